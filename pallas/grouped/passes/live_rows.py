"""Passes over the rows of all groups, without the rows past the last group.

In Triton. A device with a part of the experts has room for the rows that all of its tokens could give it, and usually
fills a part of it. A program whose rows all lie past the last group ends at once and writes nothing, so that these rows
of the results have any values. map_live_rows does not read them either. XLA's fusions read and write all rows.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, masked_slice, padded, reaches
from jax_kernels.pallas.varying import result_types

__all__ = ["copy_live_rows", "map_live_rows", "supports"]

# 4 warps load 1024 values of 16 bits at once, 16 bytes in each thread.
COPIED_ROWS, COPIED_COLUMNS = 4, 1024
MAPPED_ROWS, MAPPED_COLUMNS = 4, 256


def supports(*shapes: Sequence[int]) -> bool:
    """Whether Triton reaches all of the 16-bit arrays of these shapes, and this JAX has Pallas-Triton."""
    return backend.AVAILABLE and all(reaches(rows * columns, itemsize=2) for rows, columns in shapes)


def _view(ref: Ref, row: Index, rows: int, column: int, columns: int) -> Ref:
    return ref.at[pl.ds(row, rows), masked_slice(column, columns)]


def copy_live_rows(
    x: Float[Array, "N D"], index: Int32[Array, " M"], count: Int32[Array, "1"], *, interpret: bool = False
) -> Float[Array, "M D"]:
    """x[index] in the first `count` rows, and any values in the others.

    index: from 0 to N - 1. interpret: runs the kernel in Pallas's interpreter.
    """
    rows, columns = index.shape[0], x.shape[1]
    width = min(COPIED_COLUMNS, padded(columns))

    def kernel(x_ref: Ref, index_ref: Ref, count_ref: Ref, out_ref: Ref) -> None:
        first = pl.program_id(0) * COPIED_ROWS

        @pl.when(first < count_ref[0])
        def _() -> None:
            for row in (first + i for i in range(COPIED_ROWS)):
                exists = row < rows
                source = plgpu.load(index_ref.at[row], mask=exists, other=0)
                for column in range(0, columns, width):
                    mask = jnp.broadcast_to((exists & (column + iota(width) < columns))[None], (1, width))
                    block = plgpu.load(_view(x_ref, source, 1, column, width), mask=mask, other=0)
                    plgpu.store(_view(out_ref, row, 1, column, width), block, mask=mask)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, COPIED_ROWS),),
        out_shape=result_types([jax.ShapeDtypeStruct((rows, columns), x.dtype)], x, index, count)[0],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="grouped_copy_rows_triton",
    )(x, index, count)


def map_live_rows(
    function: Callable[..., tuple[jax.Array, ...]],
    arrays: Sequence[Float[Array, "M D"]],
    factors: Float[Array, " M"],
    count: Int32[Array, "1"],
    dtypes: Sequence[jnp.dtype],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "M D"], ...]:
    """The results of a function of blocks, and its sums over a row's columns, in the first `count` rows.

    The other rows hold any values.

    Args:
      function: of blocks [rows, columns] of the arrays, and of factors [rows, 1]. It returns a block for each of
        `dtypes`, and a float32 block whose columns are added up.
      arrays: of one shape.
      dtypes: of the results.
      interpret: runs the kernel in Pallas's interpreter.

    Returns:
      The results [M, D], then the sums, float32 [M].
    """
    rows, columns = arrays[0].shape
    width, taken, made = min(MAPPED_COLUMNS, padded(columns)), len(arrays), len(dtypes)
    outs = [jax.ShapeDtypeStruct((rows, columns), dtype) for dtype in dtypes]
    outs.append(jax.ShapeDtypeStruct((rows,), jnp.float32))

    def kernel(*refs: Ref) -> None:
        sources, (factor_ref, count_ref), results, sums = (
            refs[:taken],
            refs[taken : taken + 2],
            refs[-made - 1 : -1],
            refs[-1],
        )
        first = pl.program_id(0) * MAPPED_ROWS
        here = pl.ds(first, MAPPED_ROWS)
        count = jnp.minimum(count_ref[0], rows)

        @pl.when(first < count)
        def _() -> None:
            exists = first + iota(MAPPED_ROWS) < count
            factor = plgpu.load(factor_ref.at[here], mask=exists, other=0)[:, None]
            total = jnp.zeros((MAPPED_ROWS,), jnp.float32)
            for column in range(0, columns, width):
                view = lambda ref, column=column: _view(ref, first, MAPPED_ROWS, column, width)
                mask = exists[:, None] & (column + iota(width) < columns)[None]
                *blocks, summands = function(*(plgpu.load(view(x), mask=mask, other=0) for x in sources), factor)
                for ref, block in zip(results, blocks, strict=True):
                    plgpu.store(view(ref), block.astype(ref.dtype), mask=mask)
                total += jnp.where(mask, summands, 0).sum(1)
            plgpu.store(sums.at[here], total, mask=exists)

    return tuple(
        pl.pallas_call(
            kernel,
            grid=(pl.cdiv(rows, MAPPED_ROWS),),
            out_shape=result_types(outs, *arrays, factors, count),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="grouped_map_rows_triton",
        )(*arrays, factors, count)
    )
