"""Ops on a mesh with Explicit axes, where the type of an array includes its sharding.

Plain JAX code with Explicit axes has to give the sharding of each of its results. An op knows only the shardings of its
own results. Inside the op the axes are Auto, and XLA shards the intermediate arrays.
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

__all__ = ["as_attention", "as_grouped", "as_losses", "as_product", "as_rows", "with_explicit_axes"]

_NO_SECOND = (
    f"{NO_SECOND}. In a jax.shard_map with Explicit and Manual axes no op has second derivatives: make Explicit axes "
    "Auto"
)
_NO_FORWARD_MODE = (
    "no forward mode (jax.jvp, jax.linearize, jax.jacfwd) in a jax.shard_map with Explicit and Manual axes: "
    "make Explicit axes Auto, with implementation='xla'"
)


def with_explicit_axes[Function: Callable[..., Any]](
    results: Callable[[dict[str, Any]], Any],
) -> Callable[[Function], Function]:
    """A decorator that lets an op take arrays on Explicit mesh axes: the op then runs on Auto axes.

    results(arguments by name): the PartitionSpecs of the op's results, a tree or a prefix of one. It may raise for
    arrays whose sharding the op does not support. Calls without an array on Explicit axes are not changed.
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
    """The residuals of a custom_vjp: the backward function that jax.vjp returned, flattened.

    leaves: its arrays, on Explicit axes. structure: its tree structure. moving: the indices, among the arrays that the
    op takes, of the arrays that are differentiated. specs: the PartitionSpecs of these arrays, and so of their
    gradients.
    """

    leaves: list[Any]
    structure: Any = dataclasses.field(metadata={"static": True})
    moving: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    specs: tuple[PartitionSpec, ...] = dataclasses.field(metadata={"static": True})


def _beside_manual_axes(function: Callable[[list[Any]], Any], arrays: list[Any], specs: Callable[[Any], Any]) -> Any:
    """function(arrays), computed on Auto axes, inside a jax.shard_map that has both Manual and Explicit axes.

    specs(results): the PartitionSpecs of the results, a tree or a prefix of one. Reverse mode works, once.

    In such a shard_map JAX cannot transpose auto_axes: the arrays that a derivative keeps go from one shard_map to
    another, which mistakes arrays on Auto axes for arrays on Explicit axes. Here a custom_vjp keeps them on Explicit
    axes. Its forward is not a custom_vjp itself, because a policy of jax.checkpoint would find no names in one. So
    there are no second derivatives.
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
    """A guess of the PartitionSpec of x, an array that a backward keeps.

    known: (array, its PartitionSpec) of the op's arguments and results. If one of them has x's shape, its spec is
    returned. Else x is sharded like the leading axes in which it agrees with the first known array. A wrong guess only
    costs time: devices then exchange the array.
    """
    for of, spec in known:
        if of.shape == x.shape:
            return spec
    first, spec = known[0]
    pairs = zip(x.shape, first.shape, strict=False)
    alike = len(list(itertools.takewhile(lambda sizes: sizes[0] == sizes[1], pairs)))
    if alike == 0 and x.shape[1:] == first.shape[:-1]:  # the transpose that an 8-bit matmul keeps
        return PartitionSpec(None, *spec[:-1])
    if alike == 0 and min(x.ndim, first.ndim) > 1:
        # The first axis is all rows, or a batch into which other axes were merged.
        joins_batch = x.ndim == first.ndim and x.shape[0] % max(first.shape[0], 1) == 0
        alike = int(x.shape[0] == math.prod(first.shape[:-1]) or joins_batch)
    return PartitionSpec(*spec[:alike])


def _replaced(items: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """A list of the items, with the items at the indices `places` replaced by `others`."""
    replaced = list(items)
    for i, x in zip(places, others, strict=True):
        replaced[i] = x
    return replaced


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _zeros(aval: Any) -> Any:
    """An array of zeros in the shape and dtype of `aval`, a symbolic zero cotangent. Integers have dtype float0."""
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    return as_varying(jnp.zeros(aval.shape, aval.dtype), aval.manual_axis_type.varying)


def _spec(x: Any) -> tuple[Any, ...]:
    """For each axis of x, the mesh axis or axes that shard it, or None. All None for an x without Explicit axes."""
    if isinstance(x, QuantizedArray) and x.layout is None:
        return _spec(x.values)
    if not isinstance(x, jax.Array) or explicit_mesh(x) is None:
        return (None,) * getattr(x, "ndim", 0)
    spec = jax.typeof(x).sharding.spec
    return (*spec, *[None] * (x.ndim - len(spec)))


def as_attention(arguments: dict[str, Any]) -> Any:
    """The PartitionSpec of an attention's out; (of out, of lse) if the arguments have return_lse=True.

    Both are sharded like query's batch and heads. arguments: of the op, by name. Raises ValueError if query's or key's
    tokens are sharded.
    """
    (batch, tokens, heads, _), of_key = (_spec(arguments[name]) for name in ("query", "key"))
    for name, axes in (("query", tokens), ("key", of_key[1])):
        if axes is not None:
            raise ValueError(
                f"{name}: got tokens that are sharded over {axes!r}, want a whole sequence on each device; use "
                "ring_attention inside jax.shard_map for a sharded sequence"
            )
    out = PartitionSpec(batch, None, heads, None)
    others = arguments.get("arguments", arguments)  # dynamic_mask_attention's arguments for flash_attention
    return (out, PartitionSpec(batch, heads, None)) if others.get("return_lse") else out


def as_rows(arguments: dict[str, Any]) -> Any:
    """The PartitionSpec of a normalisation's results: sharded like x, except along the last axis.

    arguments: of the op, by name.
    """
    rows = _spec(arguments["x"])[:-1]
    out: Any = PartitionSpec(*rows, None)
    if arguments.get("quantize") is not None:
        out = PartitionSpec(*rows)  # also for the scales, which have no last axis
    return out


def as_losses(arguments: dict[str, Any]) -> Any:
    """The PartitionSpec of linear_cross_entropy's losses: sharded like x's tokens; of a reduced loss: not sharded.

    arguments: of the op, by name.
    """
    is_reduced = arguments["reduction"] != "none"
    return PartitionSpec() if is_reduced else PartitionSpec(*_spec(arguments["x"])[:-1])


def as_product(arguments: dict[str, Any]) -> Any:
    """The PartitionSpec of a matmul's result [..., N]: x's leading axes, then w's axis of columns.

    The columns are not sharded if their mesh axis also shards x's rows. arguments: of the op, by name.
    """
    rows = _spec(arguments["x"])[:-1]
    name = next(name for name in ("w", "w_down", "w_gate") if name in arguments)
    of_w = _spec(arguments[name])
    columns = of_w[0 if arguments.get("transpose_w") else -1] if len(of_w) == 2 else None
    names = lambda x: set() if x is None else {x} if isinstance(x, str) else set(x)
    taken = set().union(*map(names, rows))
    return PartitionSpec(*rows, None if names(columns) & taken else columns)


def as_grouped(arguments: dict[str, Any]) -> Any:
    """The PartitionSpec of the result [M, N] of grouped_matmul or grouped_gated_matmul: sharded like w's columns.

    arguments: of the op, by name. Raises ValueError if the rows of x or the groups are sharded.
    """
    weights = ["w_gate", "w_up"] if "w_gate" in arguments else ["w"]
    op = "grouped_gated_matmul" if "w_gate" in arguments else "grouped_matmul"
    rows = ["x", "gather_indices"] if arguments.get("gather_indices") is not None else ["x"]
    nouns = dict.fromkeys(rows, "rows") | dict.fromkeys([*weights, "group_sizes"], "groups")
    for name, noun in nouns.items():
        axes = _spec(arguments[name])[:1]
        if any(axis is not None for axis in axes):
            raise ValueError(
                f"{name}: got {noun} that are sharded over {axes[0]!r}, want all {noun} on each device; call "
                f"{op} inside jax.shard_map for sharded rows or groups"
            )
    columns = _spec(arguments[weights[0]])[1 if arguments.get("transpose_w") else 2 :][:1]
    return PartitionSpec(None, *columns)
