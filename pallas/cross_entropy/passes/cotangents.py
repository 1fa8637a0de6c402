"""Turns exponentials of logits into the cotangents of the logits, in their memory: 4 bytes of traffic for each value.

In Triton. XLA would write a second array, as large as the exponentials.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int32

from jax_kernels.inputs.linear_cross_entropy import LossOptions
from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import iota, reaches
from jax_kernels.pallas.varying import result_types

__all__ = ["RowTerms", "cotangents"]

COLUMNS = 64  # neighbouring columns that have one factor
PARTS = 32  # such groups of columns of a program


class RowTerms(NamedTuple):
    """The values of tokens with which exponentials become cotangents. T is the number of work tiles of a row.

    targets: the target's id. cotangent: of the loss. factor: of the exponentials of a work tile, so that the product is
    a probability times the cotangent of the loss. largest: the largest logit of a work tile; None without a softcap.
    """

    targets: Int32[Array, " M"]
    cotangent: Float32[Array, " M"]
    factor: Float32[Array, "M T"]
    largest: Float32[Array, "M T"] | None


def cotangents(
    exponentials: Float[Array, "M V"], terms: RowTerms, options: LossOptions, block_n: int, *, interpret: bool
) -> Float[Array, "M V"]:
    """The cotangents of the logits before the softcap, in the memory of the exponentials if Pallas-Triton is there.

    exponentials: exp(logit - largest) of 16 bits. block_n: the columns of a work tile, a multiple of 64. interpret:
    runs the kernel in Pallas's interpreter.
    """
    rows, columns = exponentials.shape
    if not (backend.AVAILABLE and reaches(exponentials.size, exponentials.dtype.itemsize)):
        return _plain(exponentials, terms, options, block_n)
    across = pl.cdiv(columns, PARTS * COLUMNS)
    given = exponentials, *(y for y in terms if y is not None)

    def kernel(*refs: Ref) -> None:
        row, first = pl.program_id(0) // across, pl.program_id(0) % across * (PARTS * COLUMNS)
        parts = first + iota(PARTS) * COLUMNS
        ids = parts[:, None] + iota(COLUMNS)[None]
        index, exists = (row, ids), ids < columns
        shares = plgpu.load(refs[0].at[index], mask=exists, other=1.0).astype(jnp.float32)
        target, cotangent = (plgpu.load(ref.at[pl.ds(row, 1)])[:, None] for ref in refs[1:3])
        tile = jnp.minimum(parts // block_n, terms.factor.shape[1] - 1)
        of_tiles = [plgpu.load(ref.at[row, tile])[:, None] for ref in refs[3 : len(given)]]
        found = _cotangents(shares, ids, target, cotangent, of_tiles, options, columns)
        plgpu.store(refs[-1].at[index], found.astype(refs[-1].dtype), mask=exists)

    return pl.pallas_call(
        kernel,
        grid=(rows * across,),
        out_shape=result_types(jax.ShapeDtypeStruct(exponentials.shape, exponentials.dtype), *given),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="cross_entropy_from_exponentials_triton",
    )(*given)


def _plain(exponentials: jax.Array, terms: RowTerms, options: LossOptions, block_n: int) -> jax.Array:
    """`cotangents` without Pallas-Triton."""
    columns = exponentials.shape[1]
    of_tiles = [jnp.repeat(y, block_n, axis=1)[:, :columns] for y in (terms.factor, terms.largest) if y is not None]
    ids = lax.broadcasted_iota(jnp.int32, exponentials.shape, 1)
    of_rows = terms.targets[:, None], terms.cotangent[:, None]
    found = _cotangents(exponentials.astype(jnp.float32), ids, *of_rows, of_tiles, options, columns)
    return found.astype(exponentials.dtype)


def _cotangents(
    shares: jax.Array,
    ids: jax.Array,
    target: jax.Array,
    cotangent: jax.Array,
    of_tiles: list[jax.Array],
    options: LossOptions,
    vocabulary: int,
) -> jax.Array:
    """The cotangents in float32. shares: the exponentials. ids: int32, of their columns.

    of_tiles: the fields of RowTerms with the same names, factor and, with a softcap, largest. All broadcast.

    With a softcap the logit is the logarithm of the exponential plus the work tile's largest logit. The rounding to 16
    bits gives it an error of about 2^-9, and the softcap's derivative has twice this error divided by the cap.
    """
    smoothing = options.label_smoothing
    found = shares * of_tiles[0] - jnp.where(ids == target, (1 - smoothing) * cotangent, 0.0)
    if smoothing:
        found = found - (smoothing / vocabulary) * cotangent
    if options.softcap is None:
        return found
    capped = (jnp.log(jnp.maximum(shares, float(jnp.finfo(jnp.float32).tiny))) + of_tiles[1]) / options.softcap
    return found * (1 - capped * capped)
