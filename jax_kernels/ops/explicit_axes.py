"""Ops on a mesh with Explicit axes, where the types of arrays tell how devices share them out.

Plain JAX code with Explicit axes has to say how each of its results is shared out. An op knows that for its own results
alone: inside it the axes are Auto, and XLA places the arrays between.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
from jax.sharding import AxisType, PartitionSpec

from jax_kernels.ops.planned_op import named_arguments

__all__ = ["as_attention", "as_product", "as_rows", "with_explicit_axes"]


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
            meshes = [mesh for x in leaves if isinstance(x, jax.Array) and (mesh := _explicit_mesh(x)) is not None]
            if not meshes:
                return function(*args, **kwargs)
            places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
            specs = results(named_arguments(function.__name__, function, args, kwargs))

            def call(arrays: list[Any]) -> Any:
                given = list(leaves)
                for i, x in zip(places, arrays, strict=True):
                    given[i] = x
                args, kwargs = jax.tree.unflatten(tree, given)
                return function(*args, **kwargs)

            explicit = tuple(
                name
                for name, kind in zip(meshes[0].axis_names, meshes[0].axis_types, strict=True)
                if kind == AxisType.Explicit
            )
            arrays = [leaves[i] for i in places]
            if not jax.sharding.get_abstract_mesh().empty:
                return jax.sharding.auto_axes(call, axes=explicit, out_sharding=specs)(arrays)
            with jax.sharding.use_abstract_mesh(meshes[0]):
                return jax.sharding.auto_axes(call, axes=explicit, out_sharding=specs)(arrays)

        return cast(Function, run)

    return decorate


def _explicit_mesh(x: Any) -> Any:
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def _spec(x: Any) -> tuple[Any, ...]:
    """How an array's axes are shared out; nothing where it has no explicit axes."""
    if not isinstance(x, jax.Array) or _explicit_mesh(x) is None:
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
