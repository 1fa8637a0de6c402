"""The forward of layer_norm and rms_norm on Hopper: each row is read once and written once.

Each group, one warpgroup or several that work on one row, has a pipeline of blocks of rows in shared memory, and loads
blocks ahead of its computation. The output overwrites x in the pipeline, and is copied to device memory from there.

Memory is not equally fast for all SMs: with equal shares of the rows, the slowest SM would finish last. Therefore a CTA
takes a few neighbouring blocks, and several CTAs run on an SM at once. If only one CTA fits, it runs to the end, and
its warpgroups claim blocks one by one.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.normalization import NormInputs, NormOptions, NormResult
from jax_kernels.pallas.block_specs.normalization_specs import NormSm90
from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.registers import as_float32
from jax_kernels.pallas.normalization.refs import NormInputRefs, NormResultRefs
from jax_kernels.pallas.normalization.sm90.state import RowBlock, Smem, Warpgroup, sum_of_parts, wide
from jax_kernels.pallas.normalization.sm90.traits import BLOCK, LINE, Traits


def norm_forward(
    inputs: NormInputs, options: NormOptions, *, config: NormSm90, core_count: int, interpret: bool
) -> NormResult:
    """Normalises the rows of inputs.x, or of inputs.x + inputs.residual, on Hopper.

    Returns a NormResult: out, in x's shape and dtype; total, x + residual, None without a residual; mean, None for
    rms_norm; and inverse, 1 / the standard deviation (for rms_norm, 1 / the root mean square). mean and inverse have
    one float32 value per row. The kernel does not quantise. core_count: the number of SMs. interpret: runs the kernel
    in JAX's interpreter.
    """
    rows, columns = inputs.x.shape
    traits = Traits.of(inputs.x, options, config, core_count=core_count, copies=1 if inputs.residual is None else 2)
    optional = lambda function, x: None if x is None else function(x)
    given = NormInputs(
        x=traits.by_parts(inputs.x),
        residual=optional(traits.by_parts, inputs.residual),
        scale=optional(traits.weights_by_parts, inputs.scale),
        bias=optional(traits.weights_by_parts, inputs.bias),
    )
    leaves, tree = jax.tree.flatten((given, traits.counter(), traits.exchanged()))
    like_x: Any = jax.ShapeDtypeStruct(given.x.shape, inputs.x.dtype)
    numbers: Any = traits.numbers()
    wanted = NormResult(
        out=like_x,
        total=None if inputs.residual is None else like_x,
        mean=numbers if options.is_centred else None,
        inverse=numbers,
    )
    out_leaves, out_tree = jax.tree.flatten(wanted)

    def entry(*refs):
        given, counter, exchanged = jax.tree.unflatten(tree, refs[: len(leaves)])
        results = jax.tree.unflatten(out_tree, refs[len(leaves) :])
        run = lambda smem: _kernel(traits, given, counter, exchanged, results, smem)
        pl.run_scoped(run, Smem.scratch(traits, inputs.x.dtype), collective_axes="wg")

    found = launch(
        entry,
        "norm_forward_sm90",
        out_type=out_leaves,
        ctas=traits.ctas * traits.cluster,
        cluster=traits.cluster,
        warpgroups=traits.warpgroups,
        semantics=plgpu.LoweringSemantics.Lane,
        auto_barriers=False,
        reduction_scratch_bytes=0,  # each warp adds up its own part
        interpret=interpret,
    )(*leaves)
    found = jax.tree.unflatten(out_tree, found)
    return NormResult(
        out=found.out.reshape(rows, columns),
        total=optional(lambda x: x.reshape(rows, columns), found.total),
        mean=optional(lambda x: x[:rows], found.mean),
        inverse=found.inverse[:rows],
    )


def _kernel(
    traits: Traits, given: NormInputRefs, counter: Ref | None, exchanged: Any, results: NormResultRefs, smem: Smem
) -> None:
    """Runs one warpgroup of a CTA.

    given, counter: refs in device memory; counter has the number of claimed blocks, or is None. exchanged: device
    memory in which the interpreter exchanges the sums of a cluster's CTAs; otherwise None.
    """
    arrays = (given.x,) if given.residual is None else (given.x, given.residual)
    worker = Warpgroup(
        traits=traits,
        smem=smem,
        pipelines=smem.memory,
        arrays=arrays,
        wg=lax.axis_index("wg"),
        counter=counter,
        exchanged=exchanged,
    )
    worker.load_first()
    scale, bias = (None if x is None else worker.load_weights(x) for x in (given.scale, given.bias))
    forward = _Forward(worker=worker, results=results, scale=scale, bias=bias)
    worker.for_each_block(forward.step, (), stores=traits.copies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Forward:
    """A warpgroup of the forward.

    results: refs in device memory. scale, bias: the weights of the warpgroup's columns, in registers and in their
    dtype; None if the call lacks them.
    """

    worker: Warpgroup
    results: NormResultRefs
    scale: jax.Array
    bias: jax.Array | None

    def step(self, row_block: RowBlock, state: Any) -> Any:
        """Computes a block's out and statistics, and starts to store them. Returns `state` unchanged."""
        worker, options = self.worker, self.worker.traits.options
        x = self._load(row_block)
        mean, inverse = self._statistics(row_block, x)
        out = x if mean is None else x - wide(mean, x)
        out = out * wide(inverse, x)
        if self.scale is not None:
            out = out * worker.wide_weights(worker.kept(self.scale), options.scale_offset)
        if self.bias is not None:
            out = out + worker.wide_weights(worker.kept(self.bias))
        to = worker.slot(worker.traits.copies - 1, row_block)
        to[...] = out.astype(to.dtype)
        plgpu.commit_smem()
        parts = worker.parts(row_block.index)
        plgpu.copy_smem_to_gmem(to, self.results.out.at[parts])
        if self.results.total is not None:
            plgpu.copy_smem_to_gmem(worker.slot(0, row_block), self.results.total.at[parts])
        worker.store_numbers(row_block, self.results.inverse, inverse)
        if mean is not None:
            worker.store_numbers(row_block, self.results.mean, mean)
        return state

    def _load(self, row_block: RowBlock) -> jax.Array:
        """The block's x in float32, [4 parts, lines, 128].

        With a residual: x + residual, rounded to x's dtype, which also overwrites x in the pipeline.
        """
        worker = self.worker
        read = lambda i: as_float32(plgpu.load(worker.slot(i, row_block), layout=BLOCK, optimized=False), BLOCK)
        if worker.traits.copies == 1:
            return read(0)
        to = worker.slot(0, row_block)
        total = (read(0) + read(1)).astype(to.dtype)
        to[...] = total
        return as_float32(total, BLOCK)

    def _statistics(self, row_block: RowBlock, x: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """(mean, inverse) of the block's rows: scalars for a block of one row, otherwise [4]. mean: None for rms_norm.

        x: the block in float32, [4 parts, lines, 128]. inverse is 1 / sqrt(variance + eps); for rms_norm, the mean of
        the squares replaces the variance. Each warp computes the mean and the squared deviations of its part. The parts
        are joined as in Chan et al. (1979).
        """
        traits = self.worker.traits
        count = traits.lines * LINE
        if not traits.options.is_centred:
            squares = sum_of_parts(jnp.square(x))
            if traits.is_split:
                squares = cast(jax.Array, sum(self.worker.exchange(row_block, squares)[0]))
            return None, self._inverse(squares)
        mean = sum_of_parts(x) * (1 / count)
        squares = sum_of_parts(jnp.square(x - wide(mean, x)))
        if traits.is_split:
            means, of_parts = self.worker.exchange(row_block, mean, squares)
            mean = cast(jax.Array, sum(means)) * (1 / traits.row_parts)
            squares = cast(jax.Array, sum(of_parts)) + cast(jax.Array, sum(jnp.square(x - mean) for x in means)) * count
        return mean, self._inverse(squares)

    def _inverse(self, squares: jax.Array) -> jax.Array:
        """1 / sqrt(squares / columns + eps), from a row's sum of squares or of squared deviations."""
        traits = self.worker.traits
        return lax.rsqrt(squares * (1 / traits.columns) + traits.options.eps)
