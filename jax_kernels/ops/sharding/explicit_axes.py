"""Ops on a mesh with Explicit axes, where the types of arrays tell how devices share them out.

Plain JAX code with Explicit axes has to say how each of its results is shared out. An op knows that for its own results
alone: inside it the axes are Auto, and XLA places the arrays between.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jax_kernels.ops.planned_op import named_arguments
from jax_kernels.quantization import QuantizedArray
from jax_kernels.tracing.derivatives import NO_SECOND, in_reverse_mode, without_derivative
from jax_kernels.tracing.explicit_mesh import explicit_mesh, on_auto_axes, with_auto_axes
from jax_kernels.tracing.manual_axes import as_varying

__all__ = ["as_attention", "as_product", "as_rows", "with_explicit_axes"]

_NO_SECOND = f"{NO_SECOND}. In a jax.shard_map with Explicit axes beside Manual ones no op has them: make those Auto"
_NO_FORWARD_MODE = (
    "no forward mode (jax.jvp, jax.linearize, jax.jacfwd) in a jax.shard_map with Explicit axes beside Manual ones: "
    "make those Auto, with implementation='xla'"
)


def with_explicit_axes[Function: Callable[..., Any]](
    results: Callable[[dict[str, Any]], Any],
) -> Callable[[Function], Function]:
    """A decorator of an op. results(arguments by name): the PartitionSpec of each of its results, as a tree's prefix.

    It may raise for arrays that the op cannot take as they are shared out.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten((args, kwargs))
            meshes = [mesh for x in leaves if isinstance(x, jax.Array) and (mesh := explicit_mesh(x)) is not None]
            if not meshes:
                return function(*args, **kwargs)
            places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
            specs = results(named_arguments(function.__name__, function, args, kwargs))

            def call(arrays: list[Any]) -> Any:
                args, kwargs = jax.tree.unflatten(tree, _replaced(leaves, places, arrays))
                return function(*args, **kwargs)

            arrays = [leaves[i] for i in places]
            if AxisType.Manual in meshes[0].axis_types:
                arrays = in_reverse_mode(arrays, f"{function.__name__}: {_NO_FORWARD_MODE}")
                return _beside_manual_axes(call, arrays, lambda _: specs)
            return with_auto_axes(call, arrays, meshes[0], specs)

        return cast(Function, run)

    return decorate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kept:
    """The arrays that a backward keeps: the leaves of jax.vjp's function, on Explicit axes.

    structure: of that function. moving: the places of the arrays that are differentiated, and specs, these arrays'.
    """

    leaves: list[Any]
    structure: Any = dataclasses.field(metadata={"static": True})
    moving: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    specs: tuple[PartitionSpec, ...] = dataclasses.field(metadata={"static": True})


def _beside_manual_axes(function: Callable[[list[Any]], Any], arrays: list[Any], specs: Callable[[Any], Any]) -> Any:
    """function(arrays) on Auto axes, in a jax.shard_map that has Manual axes and Explicit ones.

    There JAX cannot transpose auto_axes: what a derivative keeps goes from one shard_map to another, which takes arrays
    of Auto axes for arrays of Explicit ones. Here a custom_vjp keeps them on Explicit axes. Its forward is no
    custom_vjp itself, in which a policy of jax.checkpoint would find no names. So there are no second derivatives.

    specs(results): their PartitionSpecs, as a tree's prefix.
    """

    @jax.custom_vjp
    def run(arrays: list[Any]) -> Any:
        return on_auto_axes(function, arrays, specs)

    def forward(primals: list[Any]) -> tuple[Any, _Kept]:
        arrays = without_derivative(jax.custom_derivatives.custom_vjp_primal_tree_values(primals), _NO_SECOND)
        own = [PartitionSpec(*_spec(x)) for x in arrays]
        moving = [i for i, x in enumerate(primals) if x.perturbed and jnp.issubdtype(x.value.dtype, jnp.inexact)]
        structures: list[Any] = []

        def both(arrays: list[Any]) -> tuple[Any, list[Any]]:
            def of_moving(moved: list[Any]) -> Any:
                return function(_replaced(arrays, moving, moved))

            out, backward = jax.vjp(of_moving, [arrays[i] for i in moving])
            leaves, structure = jax.tree.flatten(backward)
            structures.append(structure)
            return out, leaves

        def of_both(results: tuple[Any, list[Any]]) -> Any:
            out, leaves = results
            of_out = jax.tree.leaves(jax.tree.broadcast(specs(out), out))
            known = list(zip([*arrays, *jax.tree.leaves(out)], [*own, *of_out], strict=True))
            return specs(out), [_nearest(x, known) for x in leaves]

        out, leaves = on_auto_axes(both, arrays, of_both)
        of_moving = tuple(own[i] for i in moving)
        return out, _Kept(leaves=leaves, structure=structures[-1], moving=tuple(moving), specs=of_moving)

    def backward(kept: _Kept, cotangents: Any) -> tuple[list[Any]]:
        given, structure = jax.tree.flatten(cotangents, is_leaf=_is_zero)
        places = [i for i, x in enumerate(given) if not _is_zero(x)]
        count = len(kept.leaves)

        def gradients(arrays: list[Any]) -> list[Any]:
            zeros = [_zeros(x.aval) if _is_zero(x) else None for x in given]
            of_results = jax.tree.unflatten(structure, _replaced(zeros, places, arrays[count:]))
            return jax.tree.unflatten(kept.structure, arrays[:count])(of_results)[0]

        arrays_and_cotangents = without_derivative([*kept.leaves, *(given[i] for i in places)], _NO_SECOND)
        found = on_auto_axes(gradients, arrays_and_cotangents, lambda _: list(kept.specs))
        return (_replaced([None] * len(arrays), kept.moving, found),)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(arrays)


def _nearest(x: Any, known: list[tuple[Any, PartitionSpec]]) -> PartitionSpec:
    """How to share out an array that a backward keeps: as one of its shape, else as the first one's leading axes.

    Any answer is right, but where it is not how XLA has shared out the array, devices exchange it.
    """
    for of, spec in known:
        if of.shape == x.shape:
            return spec
    first, spec = known[0]
    pairs = zip(x.shape, first.shape, strict=False)
    alike = len(list(itertools.takewhile(lambda sizes: sizes[0] == sizes[1], pairs)))
    if alike == 0 and x.shape[1:] == first.shape[:-1]:  # the transpose that a matmul of 8 bits keeps
        return PartitionSpec(None, *spec[:-1])
    if alike == 0 and min(x.ndim, first.ndim) > 1:
        # Rows, or a batch that other axes were joined to.
        joins_batch = x.ndim == first.ndim and x.shape[0] % max(first.shape[0], 1) == 0
        alike = int(x.shape[0] == math.prod(first.shape[:-1]) or joins_batch)
    return PartitionSpec(*spec[:alike])


def _replaced(items: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The items, with others at these places."""
    replaced = list(items)
    for i, x in zip(places, others, strict=True):
        replaced[i] = x
    return replaced


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _zeros(aval: Any) -> Any:
    """A cotangent that JAX leaves out. Integers have that of dtype float0."""
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    return as_varying(jnp.zeros(aval.shape, aval.dtype), aval.manual_axis_type.varying)


def _spec(x: Any) -> tuple[Any, ...]:
    """The mesh axes that shard each axis of an array; None where it has no Explicit axes."""
    if isinstance(x, QuantizedArray) and x.layout is None:
        return _spec(x.values)
    if not isinstance(x, jax.Array) or explicit_mesh(x) is None:
        return (None,) * getattr(x, "ndim", 0)
    spec = jax.typeof(x).sharding.spec
    return (*spec, *[None] * (x.ndim - len(spec)))


def as_attention(arguments: dict[str, Any]) -> Any:
    """The specs of an attention's out, and of its lse where it is asked for: query's batch and heads.

    Raises ValueError where the devices share out tokens, or cut heads of queries and of keys differently.
    """
    (batch, tokens, heads, _), of_key = (_spec(arguments[name]) for name in ("query", "key"))
    for name, axes in (("query", tokens), ("key", of_key[1])):
        if axes is not None:
            raise ValueError(
                f"{name}: got tokens that are shared out over {axes!r}, want a whole sequence on each device; use "
                "ring_attention inside jax.shard_map for a sequence that devices share"
            )
    out = PartitionSpec(batch, None, heads, None)
    others = arguments.get("arguments", arguments)  # of flash_attention, which dynamic_mask_attention passes on
    return (out, PartitionSpec(batch, heads, None)) if others.get("return_lse") else out


def as_rows(arguments: dict[str, Any]) -> Any:
    """The specs of a normalisation's results: x's, but for the last axis."""
    rows = _spec(arguments["x"])[:-1]
    out: Any = PartitionSpec(*rows, None)
    if arguments.get("quantize") is not None:
        out = PartitionSpec(*rows)  # also that of the scales, which have no last axis
    return out


def as_product(arguments: dict[str, Any]) -> Any:
    """The spec of a matmul's result: x's rows, and w's columns where these have other mesh axes."""
    rows = _spec(arguments["x"])[:-1]
    name = next(name for name in ("w", "w_down", "w_gate") if name in arguments)
    of_w = _spec(arguments[name])
    columns = of_w[0 if arguments.get("transpose_w") else -1] if len(of_w) == 2 else None
    names = lambda x: set() if x is None else {x} if isinstance(x, str) else set(x)
    taken = set().union(*map(names, rows))
    return PartitionSpec(*rows, None if names(columns) & taken else columns)
