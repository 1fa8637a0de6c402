"""The sums of a warpgroup's rows of a work tile, in blocks of 64: 16-bit matmuls, and 8-bit matmuls with scales.

The tensor cores accumulate 8-bit matmuls with about 14 bits. After a few steps of 128 inner values the accumulators are
promoted: added to float32 sums in registers, 128 columns at a time. The other warpgroup's matmuls run meanwhile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions, scale_factors, scale_shares
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, Slice, needed
from jax_kernels.pallas.matmul.sm90.state import ROWS, SCALE_BLOCK, Kernel, WorkTile
from jax_kernels.pallas.mosaic.layouts import COLUMN, ROW
from jax_kernels.pallas.mosaic.promotion import promoted
from jax_kernels.pallas.mosaic.registers import zeros_stay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """A warpgroup's float32 sums of 64 rows of a work tile, in registers.

    product: x @ w, as arrays [64, columns] of adjacent columns. up: x @ w_up, likewise; None without a gated unit.
    bias: for each part of a work tile (traits.columns columns) the bias of its columns; None if it is not loaded yet.
    """

    product: list[jax.Array]
    up: list[Any] | None
    bias: list[Any] | None = None


def columns_of(arrays: list[jax.Array], part: int, columns: int) -> jax.Array:
    """The columns from part * columns up to (part + 1) * columns of a list of arrays with adjacent columns.

    arrays: each [64, n], where n is a multiple of `columns`.
    """
    nth, start = divmod(part * columns, arrays[0].shape[1])
    return arrays[nth] if arrays[0].shape[1] == columns else arrays[nth][:, start : start + columns]


def plain_sums(kernel: Kernel, wg: Index, tile: WorkTile, nth: Index) -> list[Sums]:
    """Computes 16-bit matmuls of a work tile: one Sums for each 64 rows of the warpgroup, in order.

    nth: the number of work tiles that the CTA took before, which gives the slot of the tile's first step. A step's
    wgmmas are issued before the wait for the previous step's wgmmas.
    """
    traits, smem = kernel.traits, kernel.smem
    operands = [smem.w] if smem.w_up is None else [smem.w, smem.w_up]
    columns = 2 * traits.block_n if traits.is_joined else traits.block_n

    def slot_of(i):
        return lax.rem(nth * traits.fills + i, jnp.int32(traits.stages))

    def wait(i):
        plgpu.barrier_wait(smem.ready.at[kernel.barrier_of(slot_of(i), nth)])

    def multiply(accs, i):
        """Issues acc += x @ w of step i, for each 64 rows and each w."""
        slot, halves = slot_of(i), [pl.ds(traits.first_row(wg, half), ROWS) for half in range(traits.halves)]
        for half, mine in enumerate(halves):
            x = smem.x.at[slot, :, mine].T if traits.options.transpose_x else smem.x.at[slot, mine]
            for acc, w in zip(accs[half * len(operands) :], operands, strict=False):
                plgpu.wgmma(acc, x, w.at[slot].T if traits.options.transpose_w else w.at[slot])

    def sums(*accs):
        def step(i, _):
            wait(i)
            multiply(accs, i)
            plgpu.wgmma_wait(len(accs))
            plgpu.barrier_arrive(smem.free.at[slot_of(i - 1)])  # its wgmmas have ended

        multiply(accs, 0)
        lax.fori_loop(1, traits.steps, step, None)
        bias = _bias(kernel, tile) if traits.has_bias and traits.config.early_bias else None
        results = [acc[...] for acc in accs]
        plgpu.barrier_arrive(smem.free.at[slot_of(traits.steps - 1)])
        return results, bias

    wait(0)  # before the accumulators, as in promoted_sums
    found, bias = pl.run_scoped(sums, *[plgpu.ACC((ROWS, columns))] * (traits.halves * len(operands)))
    if traits.is_joined:
        both = [[x[:, : traits.block_n], x[:, traits.block_n :]] for x in found]
        return [Sums(product=[product], up=[up], bias=bias) for product, up in both]
    of_half = [found[half * len(operands) :][: len(operands)] for half in range(traits.halves)]
    return [Sums(product=[product], up=up or None, bias=bias) for product, *up in of_half]


def _bias(kernel: Kernel, tile: WorkTile) -> list[jax.Array]:
    """Loads the bias of a work tile: an array [traits.columns] for each part of as many columns.

    A part past the last column, which is not stored, gets the bias of other columns.
    """
    columns = kernel.traits.columns
    starts = [tile.column + start for start in range(0, kernel.traits.block_n, columns)]
    places = [pl.ds(jnp.minimum(start, kernel.traits.n - columns), columns) for start in starts]
    return [plgpu.load(kernel.inputs.bias.at[place], layout=COLUMN, optimized=False) for place in places]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """Columns of w or w_up whose 8-bit accumulators are promoted (added to float32 sums) together.

    gmem, scale: the weights and their scales in device memory. smem: the weights' stages in shared memory. first: the
    part's first column in the work tile. ready: [stages], barriers: the part's weights have arrived, and for the tile's
    first part also x.
    """

    gmem: Ref
    smem: Ref
    scale: Ref
    first: int
    ready: Barrier


def _parts(kernel: Kernel) -> list[_Part]:
    """The parts of a work tile, in the order in which they are multiplied: first x @ w, then x @ w_up."""
    inputs, smem, traits = kernel.inputs, kernel.smem, kernel.traits
    given = [(inputs.w, smem.w, inputs.w_scale), (inputs.w_up, smem.w_up, inputs.w_up_scale)]
    barriers = iter((smem.ready, smem.second_ready))
    return [
        _Part(gmem=gmem, smem=needed(of_stage), scale=scale, first=first, ready=needed(next(barriers)))
        for gmem, of_stage, scale in given[: 2 if traits.is_gated else 1]
        for first in range(0, traits.block_n, traits.promoted)
    ]


def load_parts(kernel: Kernel, column: Index, depth: Slice, slot: Index) -> None:
    """Starts to load a step's blocks of 8-bit w and w_up into the stage `slot`.

    column: the work tile's first column. depth: the step's slice of the inner dimension.
    """
    width = kernel.traits.promoted
    for part in _parts(kernel):
        place = part.smem.at[slot, pl.ds(part.first, width)]
        kernel.load_w(part.gmem.at[pl.ds(column + part.first, width), depth], place, part.ready.at[slot])


def promoted_sums(kernel: Kernel, wg: Index, tile: WorkTile, nth: Index) -> list[Sums]:
    """Computes 8-bit matmuls of a warpgroup's 64 rows of a work tile: a list of one Sums.

    nth: the number of work tiles that the CTA took before, which gives the slot of the tile's first step. Block scales
    are applied, tensor and row scales are not. Each part waits for its weights. The wait keeps ptxas from
    starting a part's wgmmas before the previous part is promoted; otherwise the previous part's registers would spill.
    """
    traits, smem, inputs = kernel.traits, kernel.smem, kernel.inputs
    parts = _parts(kernel)

    def slot_of(i):
        return lax.rem(nth * traits.k_steps + i, jnp.int32(traits.stages))

    def product(first, count, part):
        """Returns x @ w of a part over `count` steps from step `first` on, float32 [64, columns], without scales.

        The first wait comes before the accumulators. Without a wait after them, ptxas sees that they are zeros, and
        writes no zeros.
        """

        def multiply(acc, slot):
            w = part.smem.at[slot, pl.ds(part.first, traits.promoted)]
            plgpu.wgmma(acc, smem.x.at[slot, pl.ds(wg * ROWS, ROWS)], w.T)

        def run(acc):
            multiply(acc, slot_of(first))
            for i in range(1, count):
                slot = slot_of(first + i)
                plgpu.barrier_wait(part.ready.at[slot])
                multiply(acc, slot)
            sums = acc[...]
            zeros_stay()
            return sums

        plgpu.barrier_wait(part.ready.at[slot_of(first)])
        return pl.run_scoped(run, plgpu.ACC((ROWS, traits.promoted)))

    def factor(i, part):
        """x_scale * w_scale of step i, a float32 scalar: for this warpgroup's rows and the columns of `part`."""
        row, column = lax.div(tile.row + wg * ROWS, SCALE_BLOCK), lax.div(tile.column + part.first, SCALE_BLOCK)
        column = jnp.minimum(column, pl.cdiv(traits.n, SCALE_BLOCK) - 1)  # a part may lie past the last column
        row = jnp.minimum(row, pl.cdiv(traits.m, SCALE_BLOCK) - 1)  # and below the last row
        return inputs.x_scale[row, i] * part.scale[column, i]

    def products(first, count):
        of_blocks = traits.options.scaling == "block"
        factors = [factor(first, part) if of_blocks else None for part in parts]  # read while the wgmmas run
        for part, scale in zip(parts, factors, strict=True):
            sums = product(first, count, part)
            yield sums if scale is None else sums * scale

    totals = promoted(
        products,
        lambda i: plgpu.barrier_arrive(smem.free.at[slot_of(i)]),
        parts=len(parts),
        shape=(ROWS, traits.promoted),
        steps=traits.k_steps,
        together=traits.promoted_steps,
    )
    of_product = len(parts) // 2 if traits.is_gated else len(parts)
    return [Sums(product=totals[:of_product], up=totals[of_product:] or None)]


def scaled(kernel: Kernel, x: jax.Array, w_scale: Ref | None, rows: Slice, columns: Slice) -> jax.Array:
    """Returns sums of 8-bit matmuls times the tensor or row scales; x itself for block scales or without scales.

    x: float32 [64, columns]. w_scale: the scales of w or of w_up. rows, columns: the slices of the result that x is.
    """
    if kernel.traits.options.scaling == "tensor":
        first, second = scale_factors(kernel.inputs.x_scale[0], needed(w_scale)[0])
        return x * first * second
    if kernel.traits.options.scaling == "row":
        of_rows = plgpu.load(kernel.inputs.x_scale.at[rows], layout=ROW, optimized=False)
        of_columns = plgpu.load(needed(w_scale).at[columns], layout=COLUMN, optimized=False)
        first, last = (lax.broadcast_in_dim(share, x.shape, [0]) for share in scale_shares(of_rows))
        return x * first * lax.broadcast_in_dim(of_columns, x.shape, [1]) * last
    return x


def with_scales_to_load(inputs: MatmulInputs, options: MatmulOptions) -> MatmulInputs:
    """Returns the inputs with scales in shapes that the kernel can load.

    Tensor scales, [], become [1]. x's row scales, [M], are padded with zeros to a multiple of 64.
    """
    if options.scaling == "tensor":
        scales = inputs.x_scale, inputs.w_scale, inputs.w_up_scale
        x_scale, w_scale, w_up_scale = (None if x is None else x.reshape(1) for x in scales)
        return inputs._replace(x_scale=x_scale, w_scale=w_scale, w_up_scale=w_up_scale)
    if options.scaling == "row" and (past := -needed(inputs.x_scale).shape[0] % ROWS):
        return inputs._replace(x_scale=jnp.pad(needed(inputs.x_scale), (0, past)))
    return inputs
