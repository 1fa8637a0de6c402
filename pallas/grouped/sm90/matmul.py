"""The Hopper grouped matmul with its epilogue, for row i of group g:

    out[i] = activation(x[i] @ w[g] + bias[g]) * (x[i] @ w_up[g])

One CTA runs on each SM, and takes one work tile of 128 rows of one group and block_n columns after another. A memory
warpgroup loads blocks of 128 bytes of the inner dimension through a pipeline of stages, and runs ahead into the next
work tile. Each of two compute warpgroups owns 64 rows, whose sums stay in registers. The operands have 16 bits, or 8
bits with a scale for each row of x and for each column of each group's weights.

A store writes whole blocks of 64 rows. So the last rows of a group are computed in a block that ends with the group,
and overlaps the block before; both write the same values. Only a group with fewer than 64 rows is stored in parts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.group_tiles import found_tiles, group_offsets
from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions, GroupedResult
from jax_kernels.pallas.block_specs.matmul_specs import GroupedSm90
from jax_kernels.pallas.grouped.sm90 import fp8
from jax_kernels.pallas.grouped.sm90.state import (
    BLOCK_M,
    BUFFERS,
    COLUMNS,
    COMPUTE_WGS,
    ROWS,
    Kernel,
    Smem,
    Traits,
    WorkTile,
    run_tiles,
)
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.mosaic.elementwise import for_tiles
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import COLUMN, WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed

EIGHT = 8  # rows of a swizzle atom


def grouped_matmul(
    inputs: GroupedInputs, options: GroupedOptions, *, config: GroupedSm90, core_count: int, interpret: bool
) -> GroupedResult:
    """Computes activation(x @ w[group] + bias[group]) * (x @ w_up[group]) on Hopper.

    Rows past the last group are 0 with options.has_zeros, and otherwise are not written. A call without w_up has no
    second factor. With x_up, x_up @ w_up is added to x @ w instead.
    out has 16 bits, and so has x, with N and K in multiples of 64. Or x and the weights have 8 bits, with transpose_w,
    and with K and N in multiples of 128. core_count: the number of SMs. interpret: runs the kernel in
    JAX's interpreter.
    """
    traits, inputs = Traits.of(inputs, options, config), fp8.with_scales_to_load(inputs)
    offsets = group_offsets(inputs.group_sizes, traits.m)
    schedule = found_tiles(offsets, traits.m, BLOCK_M, short_last=config.largest_first)
    leaves, tree = jax.tree.flatten((inputs._replace(group_sizes=None), schedule))  # type: ignore[arg-type]
    out = jax.ShapeDtypeStruct((traits.m, traits.n), options.out_dtype)
    ctas = min(core_count, traits.row_tiles * traits.n_blocks)

    def entry(*refs: Ref) -> None:
        given, schedule = jax.tree.unflatten(tree, refs[: len(leaves)])
        kernel = functools.partial(
            Kernel, traits=traits, ctas=ctas, inputs=given, schedule=schedule, results=list(refs[len(leaves) :])
        )
        run = lambda smem: run_tiles(kernel(smem=smem), _load_tile, _compute_tile)
        pl.run_scoped(run, Smem.scratch(traits), collective_axes="wg")

    results = launch(
        entry,
        "grouped_matmul_sm90",
        out_type=[out] * traits.results,
        ctas=ctas,
        warpgroups=COMPUTE_WGS + 1,
        semantics=plgpu.LoweringSemantics.Warpgroup,
        interpret=interpret,
    )(*leaves)
    return GroupedResult(*results)


def _load_tile(kernel: Kernel, tile: WorkTile, filled: Index) -> None:
    """Loads a work tile's blocks of x and w, step by step, as stages become free."""
    traits, inputs, smem = kernel.traits, kernel.inputs, kernel.smem
    _, x_copies = traits.x_tiles.views(smem.x)

    def step(i, _):
        number = filled + i
        slot = lax.rem(number, jnp.int32(traits.stages))

        @pl.when(number >= traits.stages)
        def _wait():
            plgpu.barrier_wait(smem.free.at[slot])

        def load(k: Index, x: Ref, weights: list[Any]) -> None:
            depth, columns = pl.ds(k * traits.block_k, traits.block_k), pl.ds(tile.column, traits.block_n)
            for nth, row in enumerate(tile.rows):
                part = x_copies.at[slot, :, pl.ds(nth * ROWS, ROWS)]
                traits.x_tiles.load(x.at[pl.ds(row, ROWS), depth], part, smem.ready.at[slot])
            if traits.is_8_bit:
                fp8.load_weights(kernel, weights, tile, depth, slot)
                return
            for w, target in zip(weights, (smem.w, smem.w_up), strict=False):
                block = w.at[(tile.group, *((columns, depth) if traits.options.transpose_w else (depth, columns)))]
                plgpu.copy_gmem_to_smem(block, needed(target).at[slot], smem.ready.at[slot])

        if not traits.adds_products:
            load(i, inputs.x, [inputs.w, inputs.w_up] if traits.is_gated else [inputs.w])
            return
        pl.when(i < traits.k_steps)(lambda: load(i, inputs.x, [inputs.w]))
        pl.when(i >= traits.k_steps)(lambda: load(i - traits.k_steps, needed(inputs.x_up), [inputs.w_up]))

    @pl.when(tile.group < traits.groups)
    def _load():
        lax.fori_loop(0, traits.steps, step, None)


def _compute_tile(kernel: Kernel, wg: Index, tile: WorkTile, filled: Index) -> None:
    """Computes and stores the 64 rows of a work tile that warpgroup `wg` has."""
    wg = recomputed(wg) if kernel.traits.is_8_bit else wg  # addresses kept across tiles would spill
    row, count = (jnp.where(wg == 0, *pair) for pair in (tile.rows, tile.counts))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last work tile may have ended at either buffer
    is_in_group = tile.group < kernel.traits.groups

    @pl.when(is_in_group & (count > 0))
    def _sums():
        traits = kernel.traits
        sums = (fp8.promoted_sums if traits.is_8_bit else _multiply)(kernel, wg, filled)
        scales = fp8.Scales.first(kernel, tile, row) if traits.is_8_bit else None
        for part in range(traits.block_n // COLUMNS):
            of_part = [columns_of(x, part) for x in sums]
            if scales is not None:
                of_part, scales = scales.scaled(of_part), scales.at(kernel, tile, part + 1)
            _store_part(kernel, wg, tile, part, row, count, of_part)

    @pl.when(is_in_group & (count == 0))
    def _drain():
        def step(i, _):
            slot = lax.rem(filled + i, jnp.int32(kernel.traits.stages))
            plgpu.barrier_wait(kernel.smem.ready.at[slot])
            if kernel.smem.second_ready is not None:
                plgpu.barrier_wait(kernel.smem.second_ready.at[slot])
            plgpu.barrier_arrive(kernel.smem.free.at[slot])

        lax.fori_loop(0, kernel.traits.steps, step, None)

    @pl.when(jnp.logical_not(is_in_group) & (count > 0))
    def _zeros():
        # A loop, because JAX's time to lower the kernel grows with the number of stores.
        store = lambda part, _: _store_part(kernel, wg, tile, part, row, count, None)
        lax.fori_loop(0, kernel.traits.block_n // COLUMNS, store, None)


def columns_of(arrays: list[jax.Array], part: int) -> jax.Array:
    """The 64 columns of a part of a work tile. arrays: its sums, as arrays [64, n] of adjacent columns."""
    nth, start = divmod(part * COLUMNS, arrays[0].shape[1])
    return arrays[nth][:, start : start + COLUMNS]


def _multiply(kernel: Kernel, wg: Index, filled: Index) -> list[list[jax.Array]]:
    """The float32 sums, an array [64, block_n] each, of a warpgroup's rows: x @ w and, of a gated unit, x @ w_up.

    A step's wgmmas are issued before the wait for the previous step's.
    """
    traits, smem = kernel.traits, kernel.smem
    x_tiles, _ = traits.x_tiles.views(smem.x)
    slot_of = lambda i: lax.rem(filled + i, jnp.int32(traits.stages))
    mine = pl.ds(wg * ROWS, ROWS)

    def multiply(accs, i):
        for acc, operand in zip(accs, (smem.w, smem.w_up), strict=False):
            w = needed(operand).at[slot_of(i)]
            plgpu.wgmma(acc, x_tiles.at[slot_of(i), 0, mine], w.T if traits.options.transpose_w else w)

    def sums(*accs):
        def step(i, _):
            plgpu.barrier_wait(smem.ready.at[slot_of(i)])
            multiply(accs, i)
            plgpu.wgmma_wait(len(accs))
            plgpu.barrier_arrive(smem.free.at[slot_of(i - 1)])  # its wgmmas have ended

        multiply(accs, 0)
        lax.fori_loop(1, traits.steps, step, None)
        found = [[acc[...]] for acc in accs]
        plgpu.barrier_arrive(smem.free.at[slot_of(traits.steps - 1)])
        return found

    plgpu.barrier_wait(smem.ready.at[slot_of(0)])  # before the accumulators, so that ptxas writes no zeros
    return pl.run_scoped(sums, *[plgpu.ACC((ROWS, traits.block_n))] * (2 if traits.is_gated else 1))


def _store_part(
    kernel: Kernel, wg: Index, tile: WorkTile, part: int, row: Index, count: Index, sums: list[jax.Array] | None
) -> None:
    """Computes the epilogue of 64 columns of a warpgroup's rows, and stores it.

    row: the first row. count: the number of rows to store. sums: float32 [64, 64], x @ w and, of a gated unit, x @
    w_up; None for rows past the last group, which become 0.
    """
    traits, options = kernel.traits, kernel.traits.options
    column = tile.column + part * COLUMNS

    @pl.when(column < traits.n)
    def _():
        if sums is None:
            values: list[Any] = [plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), WGMMA)]
            values *= len(kernel.results)
        else:
            total, *up = sums
            if kernel.inputs.bias is not None:
                of_part = kernel.inputs.bias.at[tile.group, pl.ds(column, COLUMNS)]
                bias = plgpu.load(of_part, layout=COLUMN, optimized=False)
                total = total + lax.broadcast_in_dim(bias.astype(jnp.float32), total.shape, [1])
            activation = for_tiles(options.activation)
            out = total if activation is None else activation(total)
            values = [out * up[0] if up else out, total, *up][: len(kernel.results)]
        for i, (y, result) in enumerate(zip(values, kernel.results, strict=True)):
            buffer = (part * len(values) + i) % BUFFERS
            _store(kernel, wg, buffer, y, result.at[:, pl.ds(column, COLUMNS)], row, count)


def _store(kernel: Kernel, wg: Index, buffer: int, y: jax.Array, result: Ref, row: Index, count: Index) -> None:
    """Rounds values [64, 64] to an output buffer, and starts to copy the first `count` rows to rows of the result.

    result: [M, 64], in device memory. row: the first row.
    """
    layout = kernel.traits.out_tiles
    tiles, copies = (view.at[wg, buffer] for view in layout.views(kernel.smem.out))
    plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
    tiles[0] = y.astype(tiles.dtype)
    plgpu.commit_smem()

    def copy(first: Index, rows: int) -> None:
        layout.store(copies.at[:, pl.ds(first, rows)], result.at[pl.ds(row + first, rows)])

    @pl.when(count == ROWS)
    def _whole():
        copy(0, ROWS)

    @pl.when(count < ROWS)
    def _parts():
        rows = ROWS // 2
        while rows >= EIGHT:
            first = pl.multiple_of(jnp.bitwise_and(count, -2 * rows), EIGHT)
            pl.when(jnp.bitwise_and(count, rows) != 0)(functools.partial(copy, first, rows))
            rows //= 2
        for rows in range(1, EIGHT):
            first = pl.multiple_of(jnp.bitwise_and(count, -EIGHT), EIGHT)
            pl.when(jnp.bitwise_and(count, EIGHT - 1) == rows)(functools.partial(copy, first, rows))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
