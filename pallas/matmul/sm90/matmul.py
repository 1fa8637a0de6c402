"""The Hopper matmul with its epilogue: out = activation(x @ w + bias) * (x @ w_up) + residual.

The operands have 16 bits, or 8 bits with scales.

One CTA runs on each SM, and takes one work tile of block_m x block_n after another. A memory warpgroup loads blocks of
128 bytes of the inner dimension through a pipeline of stages, and runs ahead into the next work tile while the compute
warpgroups store this tile. Each of two or three compute warpgroups owns 64 or 128 rows, whose sums stay in registers;
with pingpong, each has work tiles of its own.

Per step a CTA does 2 * block_m * block_n * 64 FLOPs on (block_m + block_n) * 64 values of 16 bits: at 128 x 256, 85
FLOPs per byte from the L2 cache.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.pallas.block_specs.matmul_specs import MatmulSm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, Slice, needed
from jax_kernels.pallas.matmul.sm90.accumulate import (
    Sums,
    columns_of,
    load_parts,
    plain_sums,
    promoted_sums,
    scaled,
    with_scales_to_load,
)
from jax_kernels.pallas.matmul.sm90.epilogue_operands import (
    epilogue_blocks,
    fills_ending,
    fills_starting,
    memory_of,
    part_of,
    slot_of,
)
from jax_kernels.pallas.matmul.sm90.state import (
    BUFFERS,
    ROWS,
    Kernel,
    Smem,
    Traits,
    WorkTile,
)
from jax_kernels.pallas.mosaic.elementwise import for_tiles, shortened
from jax_kernels.pallas.mosaic.launch import launch, run_warpgroup
from jax_kernels.pallas.mosaic.layouts import COLUMN, WGMMA

# Registers per thread (of a compute warpgroup, of the memory warpgroup), by the number of compute warpgroups.
REGISTERS = {2: (240, 24), 3: (160, 32)}


def matmul(
    inputs: MatmulInputs, options: MatmulOptions, *, config: MatmulSm90, core_count: int, interpret: bool
) -> MatmulResult:
    """Computes activation(x @ w + bias) * (x @ w_up) + residual on Hopper, without the terms that the call lacks.

    With inputs.preactivation it computes the derivative of such a call instead, and x @ w is the cotangent. M is a
    multiple of 8, N and K are multiples of 64. 8-bit operands have K along their last axes, and K is a multiple of 128.
    core_count: the number of SMs. interpret: runs the kernel in JAX's interpreter. Raises ValueError if config has
    fields for 16-bit operands but the operands have 8 bits, or if it has too few stages for the epilogue.
    """
    config = dataclasses.replace(config, cluster=min(config.cluster, core_count))
    short = shortened(options.activation) if config.short_activation else None
    options = dataclasses.replace(
        options, activation=short or for_tiles(options.activation), derivative=for_tiles(options.derivative)
    )
    traits = Traits.of(inputs, options, config)
    if traits.is_8_bit and (config.pingpong or config.wg_rows != ROWS or config.early_bias or config.short_activation):
        raise ValueError(
            f"{config}: its pingpong, wg_rows, early_bias and short_activation are for operands of 16 bits"
        )
    if traits.stages < (needed := traits.fills - traits.steps):
        raise ValueError(f"MatmulSm90.stages={traits.stages} must be at least {needed}, for the epilogue's operands")
    inputs = with_scales_to_load(inputs, options)
    out = jax.ShapeDtypeStruct((traits.m, traits.n), traits.out_dtype)
    leaves, tree = jax.tree.flatten(inputs)
    clusters = min(core_count // traits.cluster, traits.tiles)

    def entry(*refs):
        given, written = jax.tree.unflatten(tree, refs[: len(leaves)]), refs[len(leaves) :]
        results = _named(traits, written)
        pl.run_scoped(
            lambda smem: _kernel(Kernel(traits=traits, clusters=clusters, inputs=given, results=results, smem=smem)),
            Smem.scratch(traits),
            collective_axes="wg",
        )

    results = launch(
        entry,
        "matmul_sm90",
        out_type=[out] * len(traits.results),
        ctas=clusters * traits.cluster,
        cluster=traits.cluster,
        warpgroups=traits.compute_wgs + 1,
        semantics=plgpu.LoweringSemantics.Warpgroup,
        interpret=interpret,
    )(*leaves)
    return _named(traits, results)


def _named(traits: Traits, results: Any) -> Any:
    """The MatmulResult with these arrays or refs, which are in the order of traits.results; other fields are None."""
    return MatmulResult(**({"out": None} | dict(zip(traits.results, results, strict=True))))


def _kernel(kernel: Kernel) -> None:
    """Runs one warpgroup of a CTA: the memory warpgroup or a compute warpgroup."""
    wg, compute_wgs = lax.axis_index("wg"), kernel.traits.compute_wgs

    def memory() -> None:
        tiles = kernel.for_each_tile(functools.partial(load_tile, kernel))
        if kernel.traits.cluster > 1:
            _wait_for_readers(kernel, tiles)

    def compute() -> None:
        kernel.for_each_tile(functools.partial(_compute_tile, kernel, wg), wg)
        plgpu.wait_smem_to_gmem(0)

    run_warpgroup(wg, compute_wgs, REGISTERS[compute_wgs], memory, compute)


def load_tile(kernel: Kernel, tile: WorkTile, nth: Index) -> None:
    """Loads a work tile's blocks of x and w, step by step, then the operands of its epilogue, as stages become free.

    nth: the number of work tiles that the CTA took before.
    """
    traits, inputs = kernel.traits, kernel.inputs

    def step(i, _):
        slot = _free_slot(kernel, nth * traits.fills + i)
        load = functools.partial(_load_step, kernel, tile, slot=slot, ready=kernel.barrier_of(slot, nth))
        if not traits.adds_products:
            load(i, inputs.x, [inputs.w, inputs.w_up] if traits.is_gated else [inputs.w])
            return
        pl.when(i < traits.k_steps)(lambda: load(i, inputs.x, [inputs.w]))
        pl.when(i >= traits.k_steps)(lambda: load(i - traits.k_steps, inputs.x_up, [inputs.w_up]))

    lax.fori_loop(0, traits.steps, step, None)
    for fill, blocks in itertools.groupby(epilogue_blocks(traits), key=lambda block: block.fill):
        slot = _free_slot(kernel, nth * traits.fills + traits.steps + fill)
        ready = needed(kernel.smem.epilogue_ready).at[kernel.barrier_of(slot, nth)]
        for block in blocks:
            rows, columns = pl.ds(tile.row + block.block * ROWS, ROWS), pl.ds(tile.column + block.first, block.width)
            target = memory_of(kernel, slot, block.start, block.width)
            plgpu.copy_gmem_to_smem(getattr(inputs, block.name).at[rows, columns], target, ready)


def _free_slot(kernel: Kernel, number: Index) -> jax.Array:
    """Waits until a stage of the pipeline is free to be filled, and returns the stage's index.

    number: the number of times that the CTA has filled a stage before.
    """
    slot = lax.rem(number, jnp.int32(kernel.traits.stages))

    @pl.when(number >= kernel.traits.stages)
    def _wait():
        plgpu.barrier_wait(kernel.smem.free.at[slot])

    return slot


def _load_step(
    kernel: Kernel, tile: WorkTile, i: Index, x: Ref, weights: list[Ref], *, slot: Index, ready: Index
) -> None:
    """Starts to load the blocks of step i of x and of each of the weights, into stage `slot`.

    x, weights: refs in device memory. ready: the index of the stage's barrier in smem.ready.
    """
    traits, smem = kernel.traits, kernel.smem
    rows, columns = pl.ds(tile.row, traits.block_m), pl.ds(tile.column, traits.block_n)
    depth = pl.ds(i * traits.block_k, traits.block_k)
    x = x.at[depth, rows] if traits.options.transpose_x else x.at[rows, depth]
    plgpu.copy_gmem_to_smem(x, smem.x.at[slot], smem.ready.at[ready])
    if traits.is_8_bit:
        load_parts(kernel, tile.column, depth, slot)
        return
    places = [smem.w.at[slot], None if smem.w_up is None else smem.w_up.at[slot]]
    if traits.is_joined:
        places = [smem.w.at[slot, pl.ds(i * traits.block_n, traits.block_n)] for i in range(2)]
    for w, place in zip(weights, places, strict=False):
        part = w.at[columns, depth] if traits.options.transpose_w else w.at[depth, columns]
        kernel.load_w(part, needed(place), smem.ready.at[ready])


def _wait_for_readers(kernel: Kernel, tiles: Index) -> None:
    """Waits until all stages are free. A CTA may not end before, since its cluster signals to its shared memory.

    tiles: the number of work tiles that the CTA has loaded.
    """
    fills = tiles * kernel.traits.fills
    lax.fori_loop(fills, fills + kernel.traits.stages, lambda number, _: (_free_slot(kernel, number), None)[1], None)


def _compute_tile(kernel: Kernel, wg: Index, tile: WorkTile, nth: Index) -> None:
    """Computes and stores the rows of a work tile that warpgroup `wg` has: sums in registers, then the epilogue.

    nth: the number of work tiles that the CTA took before. Each warpgroup waits for all operands of the epilogue, other
    warpgroups' too, because it must count the barriers' phases.
    """
    traits, smem = kernel.traits, kernel.smem
    sums = (promoted_sums if traits.is_8_bit else plain_sums)(kernel, wg, tile, nth)
    for half, of_half in enumerate(sums):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last work tile may have ended at either buffer
        for part in range(traits.parts):
            for fill in fills_starting(traits, part) if half == 0 else ():
                ready = kernel.barrier_of(slot_of(kernel, fill, nth), nth)
                plgpu.barrier_wait(needed(smem.epilogue_ready).at[ready])
            _store_part(kernel, wg, tile, nth, half=half, part=part, sums=of_half)
            for fill in fills_ending(traits, part) if half == len(sums) - 1 else ():
                plgpu.barrier_arrive(smem.free.at[slot_of(kernel, fill, nth)])


def _store_part(kernel: Kernel, wg: Index, tile: WorkTile, nth: Index, *, half: int, part: int, sums: Sums) -> None:
    """Computes the epilogue of 64 rows and traits.columns columns, and stores it through alternating buffers.

    nth: the number of work tiles that the CTA took before. half: the index of the 64 rows among the warpgroup's rows.
    part: the index of the columns in the work tile. The operands of the epilogue have arrived.
    """
    traits, smem, results = kernel.traits, kernel.smem, kernel.results
    columns, first = traits.columns, part * traits.columns

    @pl.when((tile.column + first < traits.n) & (tile.row + traits.first_row(wg, half) < traits.m))
    def _store():
        rows = pl.ds(tile.row + traits.first_row(wg, half), ROWS)
        place, buffers = (rows, pl.ds(tile.column + first, columns)), smem.out.at[wg]
        z = columns_of(sums.product, part, columns)
        up = None if sums.up is None else columns_of(sums.up, part, columns)

        def epilogue_input(name):
            if name not in traits.epilogue_inputs:
                return _residual(buffers.at[0], needed(smem.residual_ready).at[wg], kernel.inputs.residual.at[place])
            found = part_of(kernel, name, traits.block_of(wg, half), part, nth)
            return plgpu.load(found, layout=WGMMA).astype(jnp.float32)

        bias = None if sums.bias is None else sums.bias[part]
        for i, (name, y) in enumerate(_results_of_part(kernel, z, up, bias, epilogue_input, place)):
            buffer = buffers.at[(part * len(traits.results) + i) % BUFFERS]
            store_part(buffer, y, getattr(results, name).at[place])


def _results_of_part(
    kernel: Kernel,
    z: jax.Array,
    up: jax.Array | None,
    bias: jax.Array | None,
    epilogue_input: Callable[[str], Any],
    place: tuple[Slice, Slice],
) -> Iterator[tuple[str, Any]]:
    """Yields (name of a field of MatmulResult, its float32 values [64, columns]) for a part of a work tile.

    z, up: the part's sums x @ w and x @ w_up, before scales; up is None without a gated unit. bias: of the part's
    columns; None if it is not loaded yet. epilogue_input(name) loads "residual", "preactivation" or "up" in float32.
    `place`: the slices of rows and of columns of the result.
    """
    traits, inputs, options = kernel.traits, kernel.inputs, kernel.traits.options
    if traits.derives:
        load_up = functools.partial(epilogue_input, "up") if traits.derives_up else None
        yield from options.gradients(z, epilogue_input("preactivation"), load_up)
        return
    z = scaled(kernel, z, inputs.w_scale, *place)
    up = None if up is None else scaled(kernel, up, inputs.w_up_scale, *place)
    if traits.has_bias:
        if bias is None:
            bias = plgpu.load(inputs.bias.at[place[1]], layout=COLUMN, optimized=False)
        z = z + lax.broadcast_in_dim(bias.astype(jnp.float32), z.shape, [1])
    out = z if options.activation is None else options.activation(z)
    if up is not None:
        out = out * up
    if traits.has_residual:
        out = out + epilogue_input("residual")
    yield "out", out
    if options.saves_preactivation:
        yield "preactivation", z
        if up is not None:
            yield "up", up


def store_part(smem: Ref, x: jax.Array, gmem: Ref) -> None:
    """Rounds values to the buffer's dtype, and starts to copy them to device memory.

    smem: the buffer, which the last store did not use. gmem: the part's ref in device memory.
    """
    plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
    smem[...] = x.astype(smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, gmem)


def _residual(smem: Ref, ready: Barrier, gmem: Ref) -> jax.Array:
    """Loads a part of the residual from device memory, gmem, and returns it in float32.

    smem: an output buffer, through which it is loaded. ready: the barrier that waits for it.
    """
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.copy_gmem_to_smem(gmem, smem, ready)
    plgpu.barrier_wait(ready)
    found = plgpu.load(smem, layout=WGMMA).astype(jnp.float32)
    plgpu.commit_smem()
    return found
