"""The backward of layer_norm and rms_norm on Hopper: x and dout are read once, and dx is written once.

It runs like the forward, with one CTA per SM, whose groups claim blocks one by one. dx overwrites x in the pipeline.
The sums of dscale and dbias stay in float32 registers from a warpgroup's first block to its last. A CTA then adds the
sums of its groups in shared memory, and XLA adds the sums of the CTAs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from jax_kernels.inputs.normalization import NormGradients, NormInputs, NormOptions, NormResult
from jax_kernels.pallas.block_specs.normalization_specs import NormSm90
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import RegisterLayout
from jax_kernels.pallas.mosaic.registers import as_float32
from jax_kernels.pallas.normalization.refs import NormGradientRefs
from jax_kernels.pallas.normalization.sm90.state import RowBlock, Smem, Warpgroup, sum_of_parts, wide
from jax_kernels.pallas.normalization.sm90.traits import BLOCK, LINE, LINES, WARPS, Traits

SUMS = ("scale", "bias")
X, DOUT, DTOTAL = range(3)  # indices of the pipelines


class _Arrays[A: jax.Array | Ref](NamedTuple):
    """The arrays that the kernel reads, or their refs in device memory. Arrays that the call lacks are None.

    A part is the columns of a row that one warp has, as lines of 128 columns.

    x, dout, dtotal: [parts of all rows, lines, 128]. scale: [parts of a row, lines, 128]. mean, inverse: one float32
    value per row, padded to whole blocks. counter: int32 [1], the number of claimed blocks.
    """

    x: A
    dout: A
    dtotal: A | None
    scale: A | None
    mean: A | None
    inverse: A
    counter: Ref | None


def norm_backward(
    inputs: NormInputs,
    options: NormOptions,
    result: NormResult,
    dout: Float[Array, "rows columns"],
    dtotal: Float[Array, "rows columns"] | None = None,
    *,
    config: NormSm90,
    core_count: int,
    interpret: bool,
) -> NormGradients:
    """The gradients of x, scale and bias of layer_norm or rms_norm, on Hopper.

    result: of the forward with the same inputs. dout, dtotal: the cotangents of its out and its total; dtotal may be
    None. The gradients of scale and bias are None if the call lacks these weights. core_count: the number of SMs.
    interpret: runs the kernel in JAX's interpreter. Raises ValueError if config has a cluster.
    """
    if config.cluster > 1:
        raise ValueError(f"NormSm90.cluster={config.cluster} is for forwards; a backward has 1")
    x = inputs.x if result.total is None else result.total
    rows, columns = x.shape
    traits = Traits.of(
        x,
        options,
        config,
        core_count=core_count,
        copies=2 if dtotal is None else 3,
        scale_bytes=0 if inputs.scale is None else inputs.scale.size * inputs.scale.dtype.itemsize,
    )
    optional: Callable[..., jax.Array | None] = lambda function, x: None if x is None else function(x)
    missing = traits.numbers().shape[0] - rows
    whole_blocks: Callable[..., jax.Array] = lambda x: jnp.pad(x, (0, missing)) if missing else x
    given = _Arrays(
        x=traits.by_parts(x),
        dout=traits.by_parts(dout),
        dtotal=optional(traits.by_parts, dtotal),
        scale=optional(traits.weights_by_parts, inputs.scale),
        mean=optional(whole_blocks, result.mean),
        inverse=whole_blocks(result.inverse),
        counter=traits.counter(),
    )
    leaves, tree = jax.tree.flatten(given)
    sums: Any = jax.ShapeDtypeStruct((traits.ctas, traits.row_warps, traits.lines, LINE), jnp.float32)
    wanted = {name: sums for name in SUMS if getattr(inputs, name) is not None}
    dx: Any = jax.ShapeDtypeStruct(given.x.shape, x.dtype)
    out_leaves, out_tree = jax.tree.flatten(NormGradients(x=dx, **wanted))

    def entry(*refs):
        given = jax.tree.unflatten(tree, refs[: len(leaves)])
        gradients = jax.tree.unflatten(out_tree, refs[len(leaves) :])
        run = lambda smem: _kernel(traits, given, gradients, smem)
        scale_dtype = None if inputs.scale is None else inputs.scale.dtype
        pl.run_scoped(run, Smem.scratch(traits, x.dtype, len(wanted), scale_dtype), collective_axes="wg")

    found = launch(
        entry,
        "norm_backward_sm90",
        out_type=out_leaves,
        ctas=traits.ctas,
        warpgroups=traits.warpgroups,
        semantics=plgpu.LoweringSemantics.Lane,
        auto_barriers=False,
        reduction_scratch_bytes=0,  # each warp adds up its own part
        interpret=interpret,
    )(*leaves)
    found = jax.tree.unflatten(out_tree, found)
    add_up = lambda weights, sums: sums.reshape(traits.ctas, columns).sum(axis=0).astype(weights.dtype)
    totals = {name: add_up(getattr(inputs, name), getattr(found, name)) for name in wanted}
    return NormGradients(x=found.x.reshape(rows, columns), **totals)


def _kernel(traits: Traits, given: _Arrays, gradients: NormGradientRefs, smem: Smem) -> None:
    """Runs one warpgroup of a CTA."""
    names = tuple(name for name in SUMS if getattr(gradients, name) is not None)
    pipelines, totals = tuple(smem.memory) if names else (smem.memory, None)
    arrays = tuple(x for x in (given.x, given.dout, given.dtotal) if x is not None)
    worker = Warpgroup(
        traits=traits, smem=smem, pipelines=pipelines, arrays=arrays, wg=lax.axis_index("wg"), counter=given.counter
    )
    backward = _Backward(worker=worker, given=given, gradients=gradients, names=names)
    worker.load_first()
    backward.load_scale()
    sums = {name: [_zeros() for _ in range(traits.lines)] for name in names}
    _, sums = worker.for_each_block(backward.step, (backward.load_numbers(worker.first), sums), stores=1)
    backward.store_sums(sums, totals)


class _Numbers(NamedTuple):
    """The mean (None for rms_norm) and the inverse standard deviation of a block's rows.

    Each is a scalar for a block of one row, otherwise [4].
    """

    mean: Any
    inverse: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Backward:
    """A warpgroup of the backward.

    given, gradients: refs in device memory. names: the weights that have gradients, of "scale" and "bias".
    """

    worker: Warpgroup
    given: _Arrays
    gradients: NormGradientRefs
    names: tuple[str, ...]

    def load_scale(self) -> None:
        """If shared memory has room for the scale, copies it there and waits for all warpgroups; else does nothing.

        Without room, or without a scale, later loads of the scale read device memory. The sums of dscale and dbias
        leave no registers for the scale. All warpgroups of the CTA have to call this.
        """
        if self.worker.smem.scale is None:
            return

        @pl.when(self.worker.group == 0)
        def _copy():
            for line in range(self.worker.traits.lines):
                to = self.worker.weights_at(needed(self.worker.smem.scale), line)
                to[...] = self.worker.load_weights(needed(self.given.scale), line)

        self.worker.wait_for_all()

    def load_numbers(self, block: Index) -> _Numbers:
        """Loads the statistics of block `block`; of the last block if the index is past the last block."""
        block = jnp.minimum(block, self.worker.traits.blocks - 1)
        mean = None if self.given.mean is None else self.worker.load_numbers(block, self.given.mean)
        return _Numbers(mean=mean, inverse=self.worker.load_numbers(block, self.given.inverse))

    def step(self, row_block: RowBlock, state: tuple[_Numbers, Any]) -> tuple[_Numbers, Any]:
        """Stores dx of a block, and adds the block's terms to the sums for dscale and dbias.

        state: (the block's statistics, the sums). The sums are {weight's name: [for each line, float32 [4, 1, 128]]}.
        Returns (the next block's statistics, the new sums).
        """
        worker, (numbers, sums) = self.worker, state
        following = self.load_numbers(row_block.following)  # loaded early, for the next step
        mean_g, mean_normed = self._means(row_block, numbers)
        factor = mean_normed * numbers.inverse
        sums = {name: list(of_lines) for name, of_lines in sums.items()}
        for line in range(worker.traits.lines):
            centred, dout, g = self._line(row_block, numbers, line)
            normed = centred * wide(numbers.inverse, centred)
            added = {"scale": dout * normed, "bias": dout}
            for name in self.names:
                # Without a barrier LLVM adds at the end of the loop body, and keeps all terms in registers until then.
                sums[name][line] = lax.optimization_barrier(sums[name][line] + added[name])
            dx = g * wide(numbers.inverse, g)
            dx = (dx if mean_g is None else dx - wide(mean_g * numbers.inverse, g)) - normed * wide(factor, g)
            if self.given.dtotal is not None:
                dx = dx + self._read(DTOTAL, row_block, line)
            to = worker.slot(X, row_block).at[:, pl.ds(line, 1)]
            to[...] = dx.astype(to.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(worker.slot(X, row_block), self.gradients.x.at[worker.parts(row_block.index)])
        return following, sums

    def _read(self, array: int, row_block: RowBlock, line: int) -> jax.Array:
        """Line `line` (128 columns) of each of the 4 warps' parts of a block, in float32, [4, 1, 128].

        array: X, DOUT or DTOTAL.
        """
        ref = self.worker.slot(array, row_block).at[:, pl.ds(line, 1)]
        return as_float32(plgpu.load(ref, layout=BLOCK, optimized=False), BLOCK)

    def _line(self, row_block: RowBlock, numbers: _Numbers, line: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(x - mean, dout, dout * (scale + scale_offset)) of one line, each float32 [4, 1, 128].

        line: the index of 128 columns in the part of a row that each warp has. mean counts as 0 for rms_norm, the last
        factor as 1 without a scale.
        """
        x, dout = (self._read(array, row_block, line) for array in (X, DOUT))
        centred = x if numbers.mean is None else x - wide(numbers.mean, x)
        if self.given.scale is None:
            return centred, dout, dout
        scale = self.given.scale if self.worker.smem.scale is None else self.worker.smem.scale
        weight = self.worker.load_weights(scale, line)
        weight = self.worker.wide_weights(weight, self.worker.traits.options.scale_offset)
        return centred, dout, dout * weight

    def _means(self, row_block: RowBlock, numbers: _Numbers) -> tuple[jax.Array | None, jax.Array]:
        """(mean(g), mean(g * normed)) of each row of a block; mean(g) is None for rms_norm.

        g is dout * (scale + scale_offset), and normed is (x - mean) * inverse. A mean is a scalar for a block of one
        row, otherwise [4].
        """
        traits = self.worker.traits
        found = [_zeros() for _ in range(1 if numbers.mean is None else 2)]
        for line in range(traits.lines):
            centred, _, g = self._line(row_block, numbers, line)
            found = [x + y for x, y in zip(found, (g * centred, g), strict=False)]
        found = [sum_of_parts(x) for x in found]
        if traits.is_split:
            found = [cast(jax.Array, sum(of_parts)) for of_parts in self.worker.exchange(row_block, *found)]
        found = [x * (1 / traits.columns) for x in found]
        return (None if numbers.mean is None else found[1]), found[0] * numbers.inverse

    def store_sums(self, sums: Any, totals: Ref) -> None:
        """Adds the sums of all warpgroups of the CTA that have the same columns, and stores them for dscale and dbias.

        sums: {weight's name: [for each line, float32 [4, 1, 128]]} of this warpgroup. totals: a ref
        [weights, groups, warps, lines, 128] in shared memory, which overlaps the pipelines. The results go to this
        CTA's entry of the gradients in device memory.
        """
        worker, traits = self.worker, self.worker.traits
        if not self.names:
            return
        mine = pl.ds(worker.member * WARPS, WARPS)
        if traits.is_split and traits.groups == 1:
            for name in self.names:
                for line in range(traits.lines):
                    self._sums_of_cta(name)[mine, pl.ds(line, 1)] = sums[name][line]
            return
        worker.wait_for_all()  # the totals overwrite all pipelines
        for i, name in enumerate(self.names):
            for line in range(traits.lines):
                totals[i, worker.group, mine, pl.ds(line, 1)] = sums[name][line]
        worker.wait_for_all()
        for step in range(pl.cdiv(traits.lines, traits.groups)):  # each group adds a part of the lines
            of_group = step * traits.groups + worker.group
            pl.when(of_group < traits.lines)(functools.partial(self._add_up_line, of_group, totals))

    def _sums_of_cta(self, name: str) -> Ref:
        """The ref, [parts of a row, lines, 128] in device memory, for this CTA's sums of a weight's gradient."""
        return getattr(self.gradients, name).at[lax.axis_index("cta")]

    def _add_up_line(self, line: Index, totals: Ref) -> None:
        """Adds the groups' sums of line `line` (128 columns) of each warp, and stores the results in device memory.

        totals: [weights, groups, warps, lines, 128] in shared memory. If each warp has whole rows, the sums of the
        warps are added too.
        """
        worker, traits, lines = self.worker, self.worker.traits, pl.ds(line, 1)
        mine = pl.ds(worker.member * WARPS, WARPS)
        for i, name in enumerate(self.names):
            to = self._sums_of_cta(name)
            if traits.is_split:
                of_groups = [totals.at[i, group, mine, lines] for group in range(traits.groups)]
                to[mine, lines] = _sum_of(of_groups, BLOCK)
            else:
                rows = itertools.product(range(traits.groups), range(WARPS))
                to[0, lines] = _sum_of([totals.at[i, group, part, lines] for group, part in rows], LINES)


def _zeros() -> jax.Array:
    """Float32 zeros for 128 columns of each of a warpgroup's 4 warps, [4, 1, 128]."""
    return plgpu.layout_cast(jnp.zeros((WARPS, 1, LINE), jnp.float32), BLOCK)


def _sum_of(refs: list[Ref], layout: RegisterLayout) -> jax.Array:
    """The sum of arrays in shared memory, added in the order of the list. layout: of the result in registers."""
    first, *rest = (plgpu.load(ref, layout=layout, optimized=False) for ref in refs)
    return sum(rest, start=first)
