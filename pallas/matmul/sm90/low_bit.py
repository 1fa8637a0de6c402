"""The Hopper matmul of few rows of x and low-bit weights: outᵀ = w xᵀ.

Device memory is read at 4 or 8 bits per weight. A memory warpgroup loads stored values, x and scales through a pipeline
of stages. Each compute warpgroup owns 64 columns of w: it unpacks its weights to registers, which are wgmma's first
operand, and multiplies them by x in shared memory. The products of values that share a scale are summed first, and the
sum is scaled in float32, so that weights are not rounded.

Each SM has a work tile, or a part of a work tile's inner dimension (a split). The float32 sums of splits go through
device memory to a second launch, which adds them in order and computes the epilogue; with cluster_join they go through
shared memory to the CTAs of a cluster.

8192 x 8192 weights of 4 bits with a float32 scale per 128 values are 36 MB: 0.0086 ms at 4.24 TB/s. With 16 rows of x
another 8 MB come from the L2 cache. Unpacking takes 1.4 instructions per weight, 0.004 ms.
"""

import dataclasses
import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.pallas.block_specs.matmul_specs import MatmulLowBitSm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, Slice, needed
from jax_kernels.pallas.matmul.refs import MatmulResultRefs
from jax_kernels.pallas.matmul.sm90 import split_k_reduce
from jax_kernels.pallas.matmul.sm90.dequantize import unpacked
from jax_kernels.pallas.matmul.sm90.low_bit_traits import COLUMNS, STEP_BYTES, LowBitTraits
from jax_kernels.pallas.matmul.triton.matmul import joined
from jax_kernels.pallas.matmul.triton.state import Sums
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.barriers import cluster_barrier
from jax_kernels.pallas.mosaic.launch import CLUSTER, launch, run_warpgroup
from jax_kernels.pallas.mosaic.layouts import ROW, SWIZZLED_8BIT, WGMMA
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref
from jax_kernels.quantization import formats

__all__ = ["COLUMNS", "MOST_ROWS", "STEP_BYTES", "LowBitTraits", "matmul"]

MOST_ROWS = 64  # most rows of x; half for a gated unit, whose sums would spill
# Registers (of a compute thread, of a memory thread), by the number of compute warpgroups.
REGISTERS = {1: (232, 40), 2: (232, 40), 4: (112, 32)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowBitSmem:
    """A CTA's shared memory: stages of a step's operands, with barriers.

    A chunk is `width` (32 or 64) neighbouring columns of x; width is also the last axis of x's memory.

    x: [stages, chunks, rows, width]. The rows from m on are never written; the results of these rows are never read.
    w: for each matmul, stored weights [stages, columns, bytes]. scale: for each matmul, [stages, scales of a step,
      columns]; an empty list if a column has a single scale.
    ready, free: [stages], barriers: a step's operands have arrived, or have been read.
    exchange: float32 memory in which the CTA receives the sums of its cluster's CTAs; None if there is no exchange.
    joining: for the interpreter only, a barrier of the cluster, whose CTAs then exchange sums in device memory.
    """

    x: Any
    w: list[Ref]
    scale: list[Ref]
    ready: Barrier
    free: Barrier
    exchange: Ref | None
    joining: Barrier | None

    @classmethod
    def scratch(cls, traits: LowBitTraits, inputs: "LowBitInputs") -> "LowBitSmem":
        """The scratch shapes for pl.run_scoped."""
        stages = traits.stages
        w = smem_ref((stages, traits.block_n, STEP_BYTES), jnp.uint8, transforms=SWIZZLED_8BIT)
        scales = inputs.scales if traits.scales_of_step else []
        copies = traits.chunks + traits.weights + len(scales)
        in_memory = traits.exchanges and not interpreter.INTERPRETED
        barriers = plgpu.ClusterBarrier(collective_axes=(CLUSTER,), num_arrivals=traits.compute_wgs)
        joining = cast(Barrier, barriers)
        return cls(
            x=cls._x(traits),
            w=[w] * traits.weights,
            scale=[smem_ref((stages, traits.scales_of_step, traits.block_n), y.dtype) for y in scales],
            ready=barrier_ref(num_arrivals=copies, num_barriers=stages),
            free=barrier_ref(num_arrivals=traits.compute_wgs, num_barriers=stages),
            exchange=smem_ref(traits.exchange, jnp.float32) if in_memory else None,
            joining=joining if traits.exchanges and interpreter.INTERPRETED else None,
        )

    @staticmethod
    def _x(traits: LowBitTraits) -> Any:
        """The request for x's memory, which wgmma reads as tiles of 8 rows, and copies write as any number of rows."""
        shape, width = (traits.stages, traits.chunks, traits.rows, traits.width), traits.width
        of_tiles = lambda *tile: smem_ref(
            shape,
            traits.dtype,
            transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(2 * width)),  # type: ignore[abstract]
        )
        if interpreter.INTERPRETED:
            return of_tiles(8, width)
        return plgpu.RefUnion(of_tiles(8, width), of_tiles(width))

    @property
    def x_tiles(self) -> Ref:
        """The view of x's memory for wgmma, [stages, chunks, rows, width]."""
        return self.x if interpreter.INTERPRETED else next(iter(self.x))

    @property
    def x_rows(self) -> Ref:
        """The view of x's memory for copies, [stages, chunks, rows, width]."""
        return self.x if interpreter.INTERPRETED else tuple(self.x)[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowBitInputs[A: jax.Array | Ref]:
    """The kernel's arrays, or their refs in device memory.

    x: [m, k]; with one more row, of zeros, if m is odd and x is loaded in chunks of 32 columns. weights: for each
    matmul, stored values [n, bytes]. scales: for each matmul, [groups, n], or [n] if a column has one scale. rest: a
    MatmulInputs with only bias and residual if the kernel runs the epilogue, else None. exchange: for the interpreter,
    if CTAs of a cluster exchange sums: float32 [work tiles, matmuls, splits, columns, rows]; else None.
    """

    x: A
    weights: list[A]
    scales: list[A]
    rest: Any
    exchange: A | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowBitKernel:
    """The state of a CTA.

    sums: for each matmul, the ref [splits, n, rows] in device memory for the splits' sums; empty if the kernel runs the
    epilogue. results: the refs of the results in device memory, if the kernel runs the epilogue; else None. split: the
    index of the CTA among the CTAs that split its work tile's inner dimension. column: the first column of the work
    tile. first, steps: the index of the CTA's first step, and its number of steps.
    """

    traits: LowBitTraits
    inputs: LowBitInputs
    sums: list[Ref]
    results: MatmulResultRefs | None
    smem: LowBitSmem
    split: Index
    column: Index
    first: Index
    steps: Index


def matmul(
    inputs: MatmulInputs, options: MatmulOptions, *, config: MatmulLowBitSm90, core_count: int, interpret: bool
) -> MatmulResult:
    """Computes activation(x @ w + bias) * (x @ w_up) + residual on Hopper, for low-bit w and w_up.

    Terms that the call lacks are left out. x has at most MOST_ROWS (64) rows, with a w_up half as many. N is a multiple
    of 64, and the stored bytes of a column of w are a multiple of 128. core_count: the number of SMs. interpret: runs
    the kernel in JAX's interpreter.
    """
    assert options.low_bit is not None
    weights = [w for w in (inputs.w, inputs.w_up) if w is not None]
    m, n, k = options.sizes(inputs)
    traits = LowBitTraits(
        options=options,
        config=config,
        layout=options.low_bit,
        m=m,
        n=n,
        k=k,
        dtype=inputs.x.dtype,
        weights=len(weights),
        core_count=core_count,
    )
    of_epilogue: dict[str, Any] = {"x": None, "w": None, "bias": inputs.bias, "residual": inputs.residual}
    given = LowBitInputs(
        # A copy has at least 128 bytes: two rows of a chunk of 32 values.
        x=jnp.pad(inputs.x, ((0, 1), (0, 0))) if m % 2 and traits.width == 32 else inputs.x,
        weights=[_as_bytes(w) for w in weights],
        scales=[_as_bytes(y) for y in (inputs.w_scale, inputs.w_up_scale) if y is not None],
        rest=MatmulInputs(**of_epilogue) if traits.joins else None,
        exchange=_exchange_of_interpreter(traits),
    )
    leaves, tree = jax.tree.flatten(given)
    sums = [jax.ShapeDtypeStruct((traits.splits, n, traits.rows), jnp.float32)] * len(weights)
    written = split_k_reduce.results_of(options, m, n, len(weights) > 1) if traits.joins else sums
    types, written_tree = jax.tree.flatten(written)

    def entry(*refs):
        arrays = jax.tree.unflatten(tree, refs[: len(leaves)])
        results = jax.tree.unflatten(written_tree, refs[len(leaves) :])
        pl.run_scoped(
            lambda smem: _kernel(_state(traits, arrays, results, smem)),
            LowBitSmem.scratch(traits, given),
            collective_axes="wg",
        )

    found = launch(
        entry,
        "matmul_low_bit_sm90",
        out_type=types,
        ctas=traits.tiles * traits.splits,
        cluster=traits.splits if traits.joins else 1,
        warpgroups=traits.compute_wgs + 1,
        semantics=plgpu.LoweringSemantics.Lane,
        interpret=interpret,
    )(*leaves)
    if traits.joins:
        return jax.tree.unflatten(written_tree, found)
    return joined(traits, inputs, Sums(*found), interpret=interpret)


def _exchange_of_interpreter(traits: LowBitTraits) -> Any:
    """Device memory in which the interpreter exchanges the sums of a cluster's CTAs, zeros; None if it is not needed.

    Its axes are work tiles, matmuls, splits, columns and rows.
    """
    if not (traits.exchanges and interpreter.INTERPRETED):
        return None
    shape = traits.tiles, traits.weights, traits.splits, traits.block_n, traits.rows
    return jax.new_ref(jnp.zeros(shape, jnp.float32))


def _as_bytes(x: jax.Array) -> jax.Array:
    """The array as uint8, if its values have one byte; otherwise unchanged."""
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x


def _state(traits: LowBitTraits, inputs: LowBitInputs[Ref], results: Any, smem: LowBitSmem) -> LowBitKernel:
    """The state of the calling CTA.

    results: if traits.joins a MatmulResult of refs, else for each matmul the ref of the splits' sums.
    """
    cta = lax.axis_index("cta")
    if traits.joins:
        split = lax.axis_index(CLUSTER) if traits.splits > 1 else jnp.int32(0)
    else:
        split = lax.div(cta, jnp.int32(traits.tiles))
    first = split * traits.steps_of_split
    return LowBitKernel(
        traits=traits,
        inputs=inputs,
        sums=[] if traits.joins else results,
        results=results if traits.joins else None,
        smem=smem,
        split=split,
        column=(cta if traits.joins else lax.rem(cta, jnp.int32(traits.tiles))) * traits.block_n,
        first=first,
        steps=jnp.minimum(traits.steps_of_split, traits.k_steps - first),
    )


def _kernel(kernel: LowBitKernel) -> None:
    """Runs one warpgroup of a CTA: the memory warpgroup or a compute warpgroup."""
    wg, compute_wgs = lax.axis_index("wg"), kernel.traits.compute_wgs

    def memory() -> None:
        lax.fori_loop(0, kernel.steps, lambda i, _: _load(kernel, i), None)
        if kernel.traits.exchanges and not interpreter.INTERPRETED:
            cluster_barrier()  # the barrier waits for all threads, including this warpgroup's

    run_warpgroup(wg, compute_wgs, REGISTERS[compute_wgs], memory, lambda: _multiply(kernel, wg))


def _load(kernel: LowBitKernel, i: Index) -> None:
    """Starts to load the weights, scales and x of the CTA's step i, when the step's stage is free."""
    traits, smem = kernel.traits, kernel.smem
    slot = lax.rem(i, jnp.int32(traits.stages))

    @pl.when(i >= traits.stages)
    def _wait():
        plgpu.barrier_wait(smem.free.at[slot])

    step, columns = kernel.first + i, pl.ds(kernel.column, traits.block_n)
    copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target.at[slot], smem.ready.at[slot])
    for w, target in zip(kernel.inputs.weights, smem.w, strict=True):
        copy(w.at[columns, pl.ds(step * STEP_BYTES, STEP_BYTES)], target)
    for scale, target in zip(kernel.inputs.scales, smem.scale, strict=False):
        copy(scale.at[pl.ds(_first_group(traits, step), traits.scales_of_step), columns], target)
    for chunk in range(traits.chunks):
        x = kernel.inputs.x.at[:, pl.ds(step * traits.block_k + chunk * traits.width, traits.width)]
        target = smem.x_rows.at[slot, chunk, pl.ds(0, x.shape[0])]
        plgpu.copy_gmem_to_smem(x, target, smem.ready.at[slot])


def _first_group(traits: LowBitTraits, step: Index) -> Index:
    """The index of the scale of a step's first value. step: counted from the start of the inner dimension."""
    assert traits.layout.group is not None
    if traits.layout.group > traits.block_k:
        return lax.div(step, jnp.int32(traits.layout.group // traits.block_k))
    return step * traits.scales_of_step


def _multiply(kernel: LowBitKernel, wg: Index) -> None:
    """Sums a compute warpgroup's 64 columns over the CTA's steps.

    It then stores the sums in device memory, or adds them to the sums of its cluster and runs the epilogue.
    """
    traits = kernel.traits
    zeros = plgpu.layout_cast(jnp.zeros((COLUMNS, traits.rows), jnp.float32), WGMMA)

    def step(i, totals):
        slot = lax.rem(i, jnp.int32(traits.stages))
        plgpu.barrier_wait(kernel.smem.ready.at[slot])
        totals = [_step(kernel, wg, slot, nth, total) for nth, total in enumerate(totals)]
        plgpu.barrier_arrive(kernel.smem.free.at[slot])
        return totals

    totals = lax.fori_loop(0, kernel.steps, step, [zeros] * traits.weights)
    columns = pl.ds(kernel.column + wg * COLUMNS, COLUMNS)
    scaled = []
    for nth, (total, scale) in enumerate(zip(totals, kernel.inputs.scales, strict=True)):
        if traits.layout.group is None:
            total = total * _spread(plgpu.load(scale.at[columns], layout=ROW, optimized=False), total)
        if not traits.joins:
            kernel.sums[nth][kernel.split, columns] = total
        scaled.append(total)
    if traits.joins:
        _join(kernel, wg, scaled, columns)


def _join(kernel: LowBitKernel, wg: Index, sums: list[jax.Array], columns: Slice) -> None:
    """Adds the sums of all CTAs of the cluster for warpgroup wg's columns, and runs the epilogue in one of the CTAs.

    All CTAs of the cluster call it. Without a cluster, only the epilogue is left. sums: for each matmul, the calling
    CTA's float32 sums [64 columns, rows]. columns: the slice of the result's columns.
    """
    traits, smem, inputs, results = kernel.traits, kernel.smem, kernel.inputs.rest, kernel.results
    assert inputs is not None
    assert results is not None
    finish = lambda sums: split_k_reduce.epilogue(traits.options, inputs, results, sums, columns)
    if not traits.exchanges:
        finish(sums)
        return
    exchange = (
        needed(kernel.inputs.exchange).at[lax.axis_index("cta")] if interpreter.INTERPRETED else needed(smem.exchange)
    )
    split_k_reduce.exchange_sums(sums, exchange, smem.joining, wg, kernel.split, traits.splits)

    @pl.when(lax.rem(wg, jnp.int32(traits.splits)) == kernel.split)
    def _finish():
        finish(split_k_reduce.joined_sums(exchange, wg, traits.splits, traits.rows))


def _step(kernel: LowBitKernel, wg: Index, slot: Index, nth: int, total: jax.Array) -> jax.Array:
    """Returns total, float32 [64 columns, rows], plus a step's sums of matmul `nth`: 0 for x @ w, 1 for x @ w_up.

    slot: the slot that holds the step's operands.
    """
    traits, smem = kernel.traits, kernel.smem
    mine = pl.ds(wg * COLUMNS, COLUMNS)
    stored = plgpu.load(smem.w[nth].at[slot, mine], layout=WGMMA, optimized=False)
    groups = itertools.groupby(traits.parts, lambda part: part.group)
    for group, parts in [(group, tuple(parts)) for group, parts in groups]:

        def product(acc, parts=parts):
            for part in parts:
                w = unpacked(stored, traits.layout, traits.dtype, byte=part.byte, half=part.half, width=traits.width)
                plgpu.wgmma(acc, w, smem.x_tiles.at[slot, part.chunk].T)
            return acc[...]

        sums = pl.run_scoped(product, plgpu.ACC((COLUMNS, traits.rows), jnp.float32))
        if traits.scales_of_step:
            scale = plgpu.load(smem.scale[nth].at[slot, group, mine], layout=ROW, optimized=False)
            sums = sums * _spread(scale, sums)
        total = total + sums
    return total


def _spread(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the scales [columns] of columns of w in float32, broadcast to the shape [columns, rows] of x."""
    return lax.broadcast_in_dim(formats.unpack_scale(scale), x.shape, [0])
