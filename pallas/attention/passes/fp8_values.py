"""Transposes values for the 8-bit wgmma, and puts the keys in the order in which P comes out of Q K^T.

A Triton kernel, because Triton's layout conversions transpose; bound by reading and writing each value once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, reaches
from jax_kernels.pallas.varying import result_types

# KEY_ORDER[i]: which of 16 keys has index i. A thread of wgmma holds the scores of keys 2t, 2t + 1, 8 + 2t and
# 8 + 2t + 1 of every 16, and as its part of an 8-bit operand the keys at indices 4t ... 4t + 3.
KEY_ORDER = tuple(8 * half + 2 * thread + i for thread in range(4) for half in range(2) for i in range(2))
BLOCK = 128  # keys of a program, and the longest row of a swizzled tile


def transposed(
    value: Float[Array, "B S Hkv Dv"], kv_lengths: Int32[Array, " B"] | None, *, interpret: bool
) -> Float[Array, "B Hkv columns rows"]:
    """The values transposed and padded with zeros: [B, Hkv, Dv rounded up to 64, S rounded up to 128], in the same
    dtype.

    The result also permutes the keys: index 16 * n + i of its last axis has key 16 * n + KEY_ORDER[i]. In this order a
    thread has the values of P that it has to pass to the 8-bit matmul with the values. value: [B, S, Hkv, Dv], an 8-bit
    type. kv_lengths: values of keys at or past this length become zeros; None: all S keys count.
    """
    batch, kv_length, kv_heads, head_dim = value.shape
    columns, rows = pl.cdiv(kv_length, BLOCK) * BLOCK, pl.cdiv(head_dim, 64) * 64
    sizes = value.size, batch * kv_heads * rows * columns
    if not (backend.AVAILABLE and all(reaches(size, itemsize=1) for size in sizes)):
        return _by_xla(value, kv_lengths, rows, columns)
    width = max(64, pl.next_power_of_2(head_dim))
    lengths = jnp.full((batch,), kv_length) if kv_lengths is None else jnp.clip(kv_lengths, 0, kv_length)

    def kernel(value_ref, length_ref, out_ref):
        start = pl.program_id(0) * BLOCK
        place = start + iota(BLOCK)
        # KEY_ORDER: bits 2 and 1 of an index are bits 1 and 3 of the key.
        key = (place & ~15) | ((place & 2) << 2) | ((place & 12) >> 1) | (place & 1)
        wide = lambda x: jnp.broadcast_to(x[:, None], (BLOCK, width))
        column = lax.broadcasted_iota(jnp.int32, (BLOCK, width), 1)
        exists = wide(key < length_ref[0]) & (column < head_dim)
        x = plgpu.load(value_ref.at[wide(key), column], mask=exists, other=0)
        fits = None if rows == width else jnp.broadcast_to(iota(width)[:, None] < rows, (width, BLOCK))
        plgpu.store(out_ref, x.T, mask=fits)

    out = pl.pallas_call(
        kernel,
        grid=(columns // BLOCK, kv_heads, batch),
        in_specs=[
            pl.BlockSpec((None, kv_length, None, width), lambda i, h, b: (b, 0, h, 0)),
            pl.BlockSpec((1,), lambda i, h, b: (b,)),
        ],
        out_specs=pl.BlockSpec((None, None, width, BLOCK), lambda i, h, b: (b, h, 0, i)),
        out_shape=result_types(jax.ShapeDtypeStruct((batch, kv_heads, rows, columns), jnp.int8), value, lengths),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="attention_fp8_values_triton",
    )(lax.bitcast_convert_type(value, jnp.int8), lengths.astype(jnp.int32))
    return lax.bitcast_convert_type(out, value.dtype)


def _by_xla(value: jax.Array, kv_lengths: jax.Array | None, rows: int, columns: int) -> jax.Array:
    """Transposes, pads and permutes the values by XLA: without Pallas-Triton, and for arrays that Triton cannot
    address.

    value: [B, S, Hkv, Dv]. kv_lengths: values of keys at or past this length become zeros; None: all S keys count.
    Returns [B, Hkv, rows, columns]: Dv padded to `rows`, S padded to `columns`. Index 16 * n + i of the last axis has
    key 16 * n + KEY_ORDER[i].
    """
    batch, kv_length, kv_heads, head_dim = value.shape
    if kv_lengths is not None:
        exists = jnp.arange(kv_length) < kv_lengths[:, None]
        value = jnp.where(exists[:, :, None, None], value, jnp.zeros((), value.dtype))
    value = jnp.pad(value, ((0, 0), (0, columns - kv_length), (0, 0), (0, rows - head_dim)))
    by_16 = value.reshape(batch, columns // 16, 16, kv_heads, rows)[:, :, jnp.array(KEY_ORDER)]
    return by_16.reshape(value.shape).transpose(0, 2, 3, 1)
