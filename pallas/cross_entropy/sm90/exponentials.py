"""The Hopper matmul of linear_cross_entropy: its epilogue reduces the logits, and stores their exponentials in 16 bits.

The kernel is the Hopper matmul of 16-bit or 8-bit values with another epilogue. With z the logits of a work tile and m
the largest of them in a row, the epilogue stores exp(z - m), and for each row m, the sum of exp(z - m) and the target's
logit in float32. An exponential keeps its relative precision in 16 bits, like the cotangent that is made from it. A
logit would not: an error of 2^-9 of 20 changes its exponential by 4 %.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.linear_cross_entropy import LossOptions
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.pallas.block_specs.matmul_specs import MatmulSm90
from jax_kernels.pallas.kernel_types import Index, Ref, Slice
from jax_kernels.pallas.matmul.sm90.accumulate import (
    Sums,
    columns_of,
    plain_sums,
    promoted_sums,
    scaled,
    with_scales_to_load,
)
from jax_kernels.pallas.matmul.sm90.matmul import REGISTERS, load_tile, store_part
from jax_kernels.pallas.matmul.sm90.state import BUFFERS, ROWS, Kernel, Smem, Traits, WorkTile
from jax_kernels.pallas.mosaic.columns import picked
from jax_kernels.pallas.mosaic.launch import launch, run_warpgroup
from jax_kernels.pallas.mosaic.layouts import PART, ROW
from jax_kernels.pallas.mosaic.registers import all_of_warp, reciprocal

LEAST = float(jnp.finfo(jnp.float32).min)


class TileStatistics(NamedTuple):
    """The results of a launch, float32 [work tiles of a row, M] but for exponentials.

    largest: the largest logit of a row in a work tile. total: the sum of exp(logit - largest). chosen: the target's
    logit, 0 if the target is in another work tile. summed: the sum of the logits, None without label smoothing.
    exponentials: exp(logit - largest), [M, V] in 16 bits; None if they are not wanted.
    """

    largest: Any
    total: Any
    chosen: Any
    summed: Any
    exponentials: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossKernel:
    """The state of a CTA. matmul: of its matmul, without results. targets: [M], in device memory. results: refs."""

    matmul: Kernel
    options: LossOptions
    targets: Ref
    results: TileStatistics

    @property
    def traits(self) -> Traits:
        return self.matmul.traits


def tile_statistics(
    inputs: MatmulInputs,
    targets: jax.Array,
    options: LossOptions,
    *,
    dtype: jnp.dtype,
    config: MatmulSm90,
    core_count: int,
    interpret: bool,
    with_exponentials: bool,
) -> TileStatistics:
    """The TileStatistics of the logits x @ w, capped.

    inputs: x [M, D], M a multiple of config.block_m, and w [D, V], or [V, D] with options.transpose_w, in x's dtype. D
    and V are multiples of 64. Or 8-bit values with the scales of their rows, w [V, D], and D a multiple of 128.
    targets: int32 [M]; a target that is not in the vocabulary is never chosen. dtype: of the exponentials. core_count:
    the number of SMs. interpret: runs the kernel in JAX's interpreter.
    """
    is_8_bit = inputs.x_scale is not None
    of_matmul = MatmulOptions(
        transpose_w=is_8_bit or options.transpose_w,
        out_dtype=str(dtype),
        scaling="row" if is_8_bit else None,
    )
    inputs = with_scales_to_load(inputs, of_matmul)
    traits = Traits.of(inputs, of_matmul, config)
    if traits.cluster != 1 or traits.m % traits.block_m:
        raise ValueError(f"{config}: want cluster=1, and blocks that divide the {traits.m} rows")
    of_rows = jax.ShapeDtypeStruct((traits.n_blocks, traits.m), jnp.float32)
    types = TileStatistics(
        largest=of_rows,
        total=of_rows,
        chosen=of_rows,
        summed=of_rows if options.label_smoothing else None,
        exponentials=jax.ShapeDtypeStruct((traits.m, traits.n), dtype) if with_exponentials else None,
    )
    leaves, tree = jax.tree.flatten(types)
    operands, of_operands = jax.tree.flatten(inputs)
    ctas = min(core_count, traits.tiles)

    def entry(*refs):
        def run(smem):
            given: Any = jax.tree.unflatten(of_operands, refs[: len(operands)])
            targets, *results = refs[len(operands) :]
            none: Any = None
            matmul = Kernel(traits=traits, clusters=ctas, inputs=given, results=none, smem=smem)
            made = jax.tree.unflatten(tree, results)
            _kernel(LossKernel(matmul=matmul, options=options, targets=targets, results=made))

        pl.run_scoped(run, Smem.scratch(traits), collective_axes="wg")

    made = launch(
        entry,
        "cross_entropy_sm90",
        out_type=leaves,
        ctas=ctas,
        warpgroups=traits.compute_wgs + 1,
        semantics=plgpu.LoweringSemantics.Warpgroup,
        interpret=interpret,
    )(*operands, targets)
    return jax.tree.unflatten(tree, made)


def _kernel(kernel: LossKernel) -> None:
    """Runs one warpgroup of a CTA: the memory warpgroup or a compute warpgroup."""
    wg, compute_wgs = lax.axis_index("wg"), kernel.traits.compute_wgs

    def memory() -> None:
        kernel.matmul.for_each_tile(functools.partial(load_tile, kernel.matmul))

    def compute() -> None:
        kernel.matmul.for_each_tile(functools.partial(_compute_tile, kernel, wg), wg)
        plgpu.wait_smem_to_gmem(0)

    run_warpgroup(wg, compute_wgs, REGISTERS[compute_wgs], memory, compute)


def _compute_tile(kernel: LossKernel, wg: Index, tile: WorkTile, nth: Index) -> None:
    """Computes the rows of a work tile that warpgroup `wg` has, and reduces them."""
    sums_of = promoted_sums if kernel.traits.is_8_bit else plain_sums
    for half, sums in enumerate(sums_of(kernel.matmul, wg, tile, nth)):
        _epilogue(kernel, wg, tile, half, sums)


def _epilogue(kernel: LossKernel, wg: Index, tile: WorkTile, half: int, sums: Sums) -> None:
    """Stores the statistics of 64 rows of a work tile, and their exponentials part by part."""
    traits, results, columns = kernel.traits, kernel.results, kernel.traits.columns
    row, block = tile.row + traits.first_row(wg, half), lax.div(tile.column, jnp.int32(traits.block_n))
    rows, is_cut = pl.ds(row, ROWS), traits.n % traits.block_n != 0
    target = plgpu.load(kernel.targets.at[rows], layout=ROW, optimized=False) - tile.column
    parts = [_logits(kernel, sums, i, rows, tile.column) for i in range(traits.block_n // columns)]
    wide = lambda y: lax.broadcast_in_dim(y, parts[0].shape, [0])
    pick = lambda: functools.reduce(jnp.add, [picked(z, target - i * columns) for i, z in enumerate(parts)])
    is_elsewhere = (target < 0) | (target >= traits.block_n)
    chosen = lax.cond(all_of_warp(is_elsewhere), lambda: jnp.zeros((ROWS, PART), jnp.float32), pick)
    results.chosen.at[block, rows][...] = chosen.sum(axis=1)
    # A part past the last entry of the vocabulary has logits of zero: w is read as zero there.
    if results.summed is not None:
        results.summed.at[block, rows][...] = sum(z.sum(axis=1) for z in parts)

    def of_part(i, y, other):
        """y, or `other` for a part past the last entry. A work tile has one part of entries or more."""
        is_past = lax.broadcast_in_dim(tile.column + i * columns >= traits.n, y.shape, [])
        return jnp.where(is_past, other, y) if is_cut and i else y

    largest = functools.reduce(jnp.maximum, [of_part(i, z.max(axis=1), LEAST) for i, z in enumerate(parts)])
    results.largest.at[block, rows][...] = largest
    total = jnp.zeros_like(largest)
    for i, z in enumerate(parts):
        shares = jnp.exp(z - wide(largest))
        total = total + of_part(i, shares.sum(axis=1), 0.0)
        if results.exponentials is not None:
            _store_exponentials(kernel, wg, i, shares, results.exponentials, row, tile.column + i * columns)
    results.total.at[block, rows][...] = total


def _store_exponentials(
    kernel: LossKernel, wg: Index, part: int, shares: jax.Array, results: Ref, row: Index, column: Index
) -> None:
    """Starts to store a part's exponentials, float32 [64, columns], through the warpgroup's output buffers in turn."""
    if part == 0:  # the last work tile may have ended at either buffer
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def store():
        block = results.at[pl.ds(row, ROWS), pl.ds(column, kernel.traits.columns)]
        store_part(kernel.matmul.smem.out.at[wg, part % BUFFERS], shares, block)

    if kernel.traits.n % kernel.traits.block_n:
        pl.when(column < kernel.traits.n)(store)
    else:
        store()


def _logits(kernel: LossKernel, sums: Sums, part: int, rows: Slice, column: Index) -> jax.Array:
    """The capped logits of a part of a work tile, float32 [64, columns]. column: the work tile's first column.

    A part past the last entry of the vocabulary has sums of zero, and takes the scales of other entries.
    """
    traits = kernel.traits
    start = jnp.minimum(column + part * traits.columns, traits.n - traits.columns)
    columns = pl.ds(start, traits.columns)
    product = columns_of(sums.product, part, traits.columns)
    return _capped(kernel, scaled(kernel.matmul, product, kernel.matmul.inputs.w_scale, rows, columns))


def _capped(kernel: LossKernel, z: jax.Array) -> jax.Array:
    """The logits softcap * tanh(z / softcap), by an exponential, since tanh.approx has an error of 2^-11."""
    cap = kernel.options.softcap
    if cap is None:
        return z
    return lax.optimization_barrier(cap - (2 * cap) * reciprocal(1.0 + jnp.exp(z * (2 / cap))))
