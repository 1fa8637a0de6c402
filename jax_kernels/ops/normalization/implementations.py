"""The table of implementations of layer_norm and rms_norm."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.inputs.normalization import NormGradients, NormInputs, NormOptions, NormResult
from jax_kernels.ops import unsupported
from jax_kernels.ops.planned_op import Blocks, PlannedOp, kernel, no_calls, plain, with_batch
from jax_kernels.ops.sharding.partitioning import ArrayAxes, Axis, Shares, is_partitioned, partitioned
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.candidates import norm_candidates
from jax_kernels.pallas.block_specs.normalization_specs import NormBackwardTriton
from jax_kernels.pallas.normalization.sm90 import backward as backward_sm90
from jax_kernels.pallas.normalization.sm90 import forward as forward_sm90
from jax_kernels.pallas.normalization.sm90.traits import cluster_of, row_warps_of
from jax_kernels.pallas.normalization.triton import backward as backward_triton
from jax_kernels.pallas.normalization.triton import forward as forward_triton
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.reference import normalization as reference

__all__ = ["IMPLEMENTATIONS", "OPS", "NormRequest"]


@dataclasses.dataclass(frozen=True)
class NormRequest(Request):
    """A call of layer_norm or rms_norm without its arrays.

    rows: the number of rows of x, with `columns` values each. dtype: x's. quantize: the 8-bit format of out, "e4m3" or
    "e5m2"; None for x's dtype.
    """

    ROUNDED: ClassVar[tuple[str, ...]] = ("rows",)

    rows: int
    columns: int
    dtype: str
    quantize: str | None = None


def _supports_triton(request: NormRequest) -> str | None:
    if reason := unsupported.no_triton(request):
        return reason
    if request.quantize is not None and (reason := unsupported.below(request, (8, 9))):
        return f"to round to {request.quantize} {reason}"
    if request.rows == 0:
        return "there are no rows"
    if request.quantize is not None and not reaches(request.rows * request.columns, itemsize=1):
        return unsupported.OUT_OF_REACH
    return unsupported.no_triton_gpu(request)


def _supports_mosaic(request: NormRequest) -> str | None:
    """The reason, in words for users, why the Hopper kernels cannot serve the request; None if they can."""
    if reason := unsupported.no_gpu(request) or unsupported.not_hopper(request):
        return reason
    if request.rows == 0:
        return "there are no rows"
    if request.quantize is not None:
        return "it has no quantized output; Triton's kernel has one"
    if request.dtype == "float32":
        return "its pipelines in shared memory are for rows of bfloat16 and float16, not of float32"
    if row_warps_of(request.columns, 1) is None and not _is_clustered(request):
        return (
            "it needs columns that are a multiple of 128 up to 2048, of 512 up to 8192 or of 1024 up to 16384, "
            f"and these are {request.columns}"
        )
    return unsupported.no_mosaic(request)


def _is_clustered(request: NormRequest) -> bool:
    """Whether the Hopper forward splits each row over the CTAs of a cluster, and the backward is Triton's.

    The block spec for this number of columns decides.
    """
    row, _ = block_specs.norm_row(request.device.compute_capability, "mosaic_gpu", columns=request.columns)
    return cluster_of(request.columns, row.forward) > 1 and isinstance(row.backward, NormBackwardTriton)


def _mosaic_backward(*arrays: Any, config: Any, **statics: Any) -> NormGradients:
    """The NormGradients by the kernel that the block spec names: Triton's for rows that do not fit on an SM.

    XLA replaces Triton's kernel in a JAX without Pallas-Triton.

    arrays: NormInputs, NormOptions, the forward's NormResult, and the cotangents of its out and its total (or None), as
    both kernels take them. config: the block spec of the backward, whose type decides. statics: the kernels' other
    keywords.
    """
    is_triton = isinstance(config, NormBackwardTriton)
    if is_triton and not backend.AVAILABLE:
        return reference.norm_backward(*arrays)
    run = backward_triton.norm_backward if is_triton else backward_sm90.norm_backward
    return run(*arrays, config=config, **statics)


def _config(implementation: str, request: NormRequest) -> tuple[Blocks, str]:
    row, source = block_specs.norm_row(request.device.compute_capability, implementation, columns=request.columns)
    return Blocks(forward=row.forward, backward=row.backward, core_count=request.device.core_count), source


def _candidates(implementation: str, request: NormRequest) -> dict[str, tuple[Any, ...]]:
    blocks, _ = _config(implementation, request)
    return {side: norm_candidates(getattr(blocks, side), request.columns, side) for side in ("forward", "backward")}


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel's function with a vmap that runs the calls one after the other.

    Pallas has no vmap for Mosaic kernels. function: takes (NormInputs, NormOptions, *arrays, **statics), like the
    result. options and statics are hashable, and only inputs and arrays may be mapped.
    """

    def run(inputs: NormInputs, options: NormOptions, *arrays: Any, **statics: Any) -> Any:
        call = lambda inputs, *arrays: function(inputs, options, *arrays, **statics)
        return jax.custom_batching.sequential_vmap(call)(inputs, *arrays)

    return run


def _by_joined_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a forward with a vmap. If all calls share scale and bias, the mapped axis becomes an outer axis of x.

    Otherwise the calls run one after the other.
    """

    def run(inputs: NormInputs, options: NormOptions, **statics: Any) -> NormResult:
        call = jax.custom_batching.custom_vmap(lambda inputs: function(inputs, options, **statics))

        @call.def_vmap
        def _(size: int, moves: Any, inputs: NormInputs):
            if size == 0:
                return no_calls(call, moves, (inputs,))
            mapped = moves[0]
            if mapped.scale or mapped.bias:
                mapped_axes = jax.tree.map(lambda moves: 0 if moves else None, mapped)
                results = jax.vmap(lambda inputs: _one_by_one(function)(inputs, options, **statics), (mapped_axes,))(
                    inputs
                )
            else:
                arrays = {name: x for name in ("x", "residual") if (x := getattr(inputs, name)) is not None}
                joined = {name: with_batch(size, x, getattr(mapped, name)) for name, x in arrays.items()}
                results = call(inputs._replace(**joined))
            return results, jax.tree.map(lambda _: True, results)

        return call(inputs)

    return run


def _of_rows(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with `change` applied to each array that has x's outer axes: to all arrays except scale and bias."""
    if not isinstance(tree, NormInputs | NormGradients):
        return jax.tree.map(change, tree)
    changed = jax.tree.map(change, tree._replace(scale=None, bias=None))
    return changed._replace(scale=tree.scale, bias=tree.bias)


def _by_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel's function of arrays [rows, columns], so that it takes and returns arrays [..., columns].

    function: takes (NormInputs, NormOptions, *arrays, **statics). The outer axes are all axes of the inputs' x but the
    last; arrays and results have them too. scale and bias, and their gradients, are passed as they are.
    """

    def run(inputs: NormInputs, options: NormOptions, *arrays: Any, **statics: Any) -> Any:
        outer = inputs.x.shape[:-1]
        in_rows = lambda x: x.reshape(math.prod(outer), *x.shape[len(outer) :])
        given = [_of_rows(tree, in_rows) for tree in (inputs, *arrays)]
        result = function(given[0], options, *given[1:], **statics)
        return _of_rows(result, lambda x: x.reshape(*outer, *x.shape[1:]))

    return run


def _shared(
    function: Callable[..., Any], with_vmap: Callable[[Any], Any], *, has_vmap: bool = False
) -> Callable[..., Any]:
    """Wraps a kernel's function of [rows, columns] for arrays [..., columns], whose outer axes devices shard under jit.

    with_vmap: adds a vmap to a function. has_vmap: whether the kernel's function has a vmap of its own, which is used
    if XLA does not partition the call. The outer axes are merged only on a device: several sharded axes, merged into
    rows, would have no sharding, and XLA would gather them.
    """
    by_rows = _by_rows(function)
    alone = by_rows if has_vmap else with_vmap(by_rows)

    def of_outer(inputs: NormInputs, options: NormOptions, *arrays: Any, **statics: Any) -> Any:
        lengths = {f"rows{i}": length for i, length in enumerate(inputs.x.shape[:-1])}
        outer = tuple(map(Axis, lengths))

        def axes(tree: Any) -> list[ArrayAxes]:
            has_outer = _of_rows(jax.tree.map(lambda _: False, tree), lambda _: True)
            own = lambda x, has: (*outer, *[None] * (x.ndim - len(outer))) if has else (None,) * x.ndim
            return list(map(own, jax.tree.leaves(tree), jax.tree.leaves(has_outer)))

        shares = Shares(
            arguments=[of for tree in (inputs, *arrays) for of in axes(tree)], results=axes, lengths=lengths
        )
        local = lambda inputs, *arrays: by_rows(inputs, options, *arrays, **statics)
        key = function, options, len(outer), tuple(statics.items())
        return partitioned(local, shares, key)(inputs, *arrays)

    def run(inputs: NormInputs, options: NormOptions, *arrays: Any, **statics: Any) -> Any:
        if not is_partitioned():
            return alone(inputs, options, *arrays, **statics)
        return with_vmap(of_outer)(inputs, options, *arrays, **statics)

    return run


def _xla_forward(inputs, options, *, config, interpret):
    return reference.norm_forward(inputs, options)


def _xla_backward(inputs, options, result, dout, dtotal, *, config, interpret):
    return reference.norm_backward(inputs, options, result, dout, dtotal)


IMPLEMENTATIONS = {
    "triton": Implementation(
        "triton",
        _supports_triton,
        functools.partial(_config, "triton"),
        _shared(kernel(forward_triton.norm_forward, "forward", once=True), _by_joined_rows, has_vmap=True),
        _shared(kernel(backward_triton.norm_backward, "backward", once=True), _one_by_one, has_vmap=True),
        functools.partial(_candidates, "triton"),
    ),
    "mosaic_gpu": Implementation(
        "mosaic_gpu",
        _supports_mosaic,
        functools.partial(_config, "mosaic_gpu"),
        _shared(kernel(forward_sm90.norm_forward, "forward", once=True), _by_joined_rows),
        _shared(kernel(_mosaic_backward, "backward", once=True), _one_by_one),
        functools.partial(_candidates, "mosaic_gpu"),
    ),
    "xla": Implementation("xla", lambda request: None, without_blocks, plain(_xla_forward), plain(_xla_backward)),
}


def _order(request: NormRequest) -> tuple[tuple[str, ...], str]:
    return block_specs.norm_order(request.device.compute_capability, columns=request.columns)


OPS = {name: PlannedOp(name, IMPLEMENTATIONS, _order) for name in ("layer_norm", "rms_norm")}
