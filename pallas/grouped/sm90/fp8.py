"""The sums of a warpgroup's 64 rows of an 8-bit work tile, and the scales of its epilogue.

The tensor cores accumulate 8-bit matmuls with about 14 bits. After a step or two of 128 inner values the
accumulators are promoted: added to float32 sums in registers, 128 columns at a time, as in the dense matmul. The other
warpgroup's matmuls run meanwhile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.grouped_matmul import GroupedInputs
from jax_kernels.inputs.matmul import scale_shares
from jax_kernels.pallas.grouped.sm90.state import COLUMNS, ROWS, Kernel, WorkTile
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, Slice, needed
from jax_kernels.pallas.mosaic.layouts import COLUMN, ROW
from jax_kernels.pallas.mosaic.promotion import promoted
from jax_kernels.pallas.mosaic.registers import zeros_stay

__all__ = ["Scales", "load_weights", "promoted_sums", "with_scales_to_load"]


class _Part(NamedTuple):
    """A part of a work tile whose sums are promoted together: columns of x @ w or, of a gated unit, of x @ w_up.

    columns: of the work tile. weights: the stages of their matrix in shared memory. ready: [stages], the barriers of
    the part's weights; the barriers of the first part also wait for x.
    """

    columns: Slice
    weights: Ref
    ready: Barrier


def _parts(kernel: Kernel) -> list[_Part]:
    """Both matmuls of a gated unit, or the work tile's parts of `promoted` columns."""
    smem, width = kernel.smem, kernel.traits.promoted
    barriers = smem.ready, smem.second_ready
    if kernel.traits.is_gated:
        starts, weights = [0, 0], [smem.w, needed(smem.w_up)]
    else:
        starts = list(range(0, kernel.traits.block_n, width))
        weights = [smem.w] * len(starts)
    parts = zip(starts, weights, barriers, strict=False)
    return [_Part(pl.ds(start, width), of_part, needed(ready)) for start, of_part, ready in parts]


def load_weights(kernel: Kernel, weights: list[Ref], tile: WorkTile, depth: Slice, slot: Index) -> None:
    """Starts to load a step's block of the weights into the stage `slot`.

    weights: in device memory: w and w_up of a gated unit, else one of them. depth: the step's slice of the inner
    dimension.
    """
    for nth, part in enumerate(_parts(kernel)):
        w = weights[nth] if kernel.traits.is_gated else weights[0]
        block = w.at[tile.group, pl.ds(tile.column + part.columns.start, kernel.traits.promoted), depth]
        plgpu.copy_gmem_to_smem(block, part.weights.at[slot, part.columns], part.ready.at[slot])


def promoted_sums(kernel: Kernel, wg: Index, filled: Index) -> list[list[jax.Array]]:
    """The float32 sums of a warpgroup's rows, without scales: of each matmul, arrays [64, promoted] of adjacent
    columns.

    filled: the number of times that the CTA's earlier tiles filled a stage. Each part waits for its weights. The wait
    keeps ptxas from starting a part's wgmmas before the previous part is promoted; otherwise the previous part's
    registers would spill.
    """
    traits, smem = kernel.traits, kernel.smem
    x_tiles, _ = traits.x_tiles.views(smem.x)
    slot_of = lambda i: lax.rem(filled + i, jnp.int32(traits.stages))
    parts = _parts(kernel)

    def product(first: Index, count: int, part: _Part) -> jax.Array:
        """x @ w of a part over `count` steps from step `first` on, float32 [64, promoted].

        The first wait comes before the accumulator, so that ptxas writes no zeros.
        """

        def multiply(acc: Any, slot: Index) -> None:
            plgpu.wgmma(acc, x_tiles.at[slot, 0, pl.ds(wg * ROWS, ROWS)], part.weights.at[slot, part.columns].T)

        def run(acc: Any) -> jax.Array:
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

    found = promoted(
        lambda first, count: (product(first, count, part) for part in parts),
        lambda i: plgpu.barrier_arrive(smem.free.at[slot_of(i)]),
        parts=len(parts),
        shape=(ROWS, traits.promoted),
        steps=traits.steps,
        together=traits.promoted_steps,
    )
    return [[sums] for sums in found] if traits.is_gated else [found]


class Scales(NamedTuple):
    """The scales of a warpgroup's 64 rows, and of 64 columns of each matmul's weights, in registers.

    They are loaded ahead: the first ones before the matmuls, the others before the previous columns are stored.
    """

    rows: jax.Array
    columns: list[jax.Array]

    @classmethod
    def first(cls, kernel: Kernel, tile: WorkTile, row: Index) -> "Scales":
        """The scales of the work tile's first 64 columns. row: the first row of the warpgroup."""
        of_rows = plgpu.load(needed(kernel.inputs.x_scale).at[pl.ds(row, ROWS)], layout=ROW, optimized=False)
        return cls(rows=of_rows, columns=_of_columns(kernel, tile, 0))

    def at(self, kernel: Kernel, tile: WorkTile, part: int) -> "Scales":
        """The scales of the columns from part * 64 on. For a part past the last column they are arbitrary."""
        return self._replace(columns=_of_columns(kernel, tile, part))

    def scaled(self, sums: list[jax.Array]) -> list[jax.Array]:
        """The sums [64, 64] of each matmul times the scales of their rows, and then of their columns."""
        first, last = (lax.broadcast_in_dim(share, sums[0].shape, [0]) for share in scale_shares(self.rows))
        found = []
        for total, scale in zip(sums, self.columns, strict=True):
            found.append(total * first * lax.broadcast_in_dim(scale, total.shape, [1]) * last)
        return found


def _of_columns(kernel: Kernel, tile: WorkTile, part: int) -> list[jax.Array]:
    column = jnp.minimum(tile.column + part * COLUMNS, kernel.traits.n - COLUMNS)
    scales = [kernel.inputs.w_scale, kernel.inputs.w_up_scale][: kernel.traits.weights]
    views = [needed(scale).at[tile.group, pl.ds(column, COLUMNS)] for scale in scales]
    return [plgpu.load(view, layout=COLUMN, optimized=False) for view in views]


def with_scales_to_load(inputs: GroupedInputs) -> GroupedInputs:
    """Returns the inputs with x's scales padded by 64 zeros: the rows of the last work tile may end past M."""
    if inputs.x_scale is None:
        return inputs
    return inputs._replace(x_scale=jnp.pad(inputs.x_scale, (0, ROWS)))
