"""The longest rows of queries, keys and values, which bound the scores and sums: bound by reading each row once.

On an H200, 2 x 8192 x 16 rows of 128 take 0.018 ms, by XLA alone 0.031.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_kernels.pallas.attention.shared_triton import head_mask, iota, padded
from jax_kernels.pallas.varying import result_types

ELEMENTS = 4096  # of a program's rows; 2048 to 16384 are alike
WARPS = 4


def longest(*arrays: jax.Array, interpret: bool) -> list[jax.Array]:
    """Of each array [B, T, heads, D] the largest squared length of a row, [B, heads] float32.

    One launch reads the arrays of one shape.
    """
    by_shape: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        by_shape.setdefault((x.shape, x.dtype), []).append(i)
    found: dict[int, jax.Array] = {}
    for members in by_shape.values():
        found |= zip(members, _of_one_shape([arrays[i] for i in members], interpret=interpret), strict=True)
    return [found[i] for i in range(len(arrays))]


def _of_one_shape(arrays: list[jax.Array], *, interpret: bool) -> list[jax.Array]:
    batch, length, heads, head_dim = arrays[0].shape
    width = padded(head_dim)
    block = ELEMENTS // width
    blocks = pl.cdiv(length, block)

    def kernel(*refs):
        rows = pl.program_id(1) * block + iota(block) < length
        mask = head_mask(rows, block, head_dim)
        for x_ref, out_ref in zip(refs[: len(arrays)], refs[len(arrays) :], strict=True):
            part = plgpu.load(x_ref, mask=mask, other=0).astype(jnp.float32)
            plgpu.store(out_ref, jnp.square(part).sum(axis=1).max(axis=0))

    shape = jax.ShapeDtypeStruct((batch, blocks, heads), jnp.float32)
    parts = pl.pallas_call(
        kernel,
        grid=(heads, blocks, batch),
        in_specs=[pl.BlockSpec((None, block, None, width), lambda h, i, b: (b, i, h, 0))] * len(arrays),
        out_specs=[pl.BlockSpec((None, None, None), lambda h, i, b: (b, i, h))] * len(arrays),
        out_shape=result_types([shape] * len(arrays), *arrays),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="attention_row_lengths",
    )(*arrays)
    return [lax.reduce_max(part, axes=(1,)) for part in parts]
