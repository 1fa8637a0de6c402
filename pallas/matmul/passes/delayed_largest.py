"""The largest magnitude for a delayed scale: from a history, or, while the history is empty, from the array itself.

In Triton, by one program: it reads the array only if the history is empty, as in the first step, at about 0.05 TB/s.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, masked_slice, padded
from jax_kernels.pallas.varying import result_types

__all__ = ["delayed_largest"]

CHUNK = 8192  # values that the program loads at once


def delayed_largest(
    history: Float32[Array, " length"], x: Float[Array, "..."], *, interpret: bool = False
) -> Float32[Array, ""]:
    """The largest value of the history; if it is 0, x's largest finite magnitude.

    history: of magnitudes, 0 for none. x: not empty, of 16 or 32 bits. interpret: runs the kernel in Pallas's
    interpreter.
    """
    length, size = history.shape[0], x.size

    def kernel(history_ref, x_ref, out_ref):
        first, held = pl.program_id(0), iota(padded(length))
        past = plgpu.load(history_ref.at[masked_slice(0, padded(length))], mask=held < length, other=0).max(axis=0)
        plgpu.store(out_ref.at[first], past)

        def widen(i, largest):
            exists = i * CHUNK + iota(CHUNK) < size
            loaded = plgpu.load(x_ref.at[pl.ds(i * CHUNK, CHUNK)], mask=exists, other=0)
            magnitudes = jnp.abs(loaded.astype(jnp.float32))
            return jnp.maximum(largest, jnp.where(magnitudes < jnp.inf, magnitudes, 0.0))

        @pl.when(past == 0)
        def _read():
            found = lax.fori_loop(0, pl.cdiv(size, CHUNK), widen, jnp.zeros(CHUNK, jnp.float32))
            plgpu.store(out_ref.at[first], found.max(axis=0))

    return pl.pallas_call(
        kernel,
        grid=(1,),
        out_shape=result_types([jax.ShapeDtypeStruct((1,), jnp.float32)], history, x)[0],
        compiler_params=plgpu.CompilerParams(num_warps=16, num_stages=1),
        interpret=interpret,
        name="matmul_delayed_largest_triton",
    )(history, x.reshape(size))[0]
