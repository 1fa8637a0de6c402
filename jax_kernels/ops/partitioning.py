"""Kernels under jit over several devices: each device runs them on its part of the arrays.

XLA knows nothing of a kernel: it would gather its arrays on every device, and every device would do all the work. Here
a kernel's function gets a rule for the Shardy partitioner. The axes of its arrays have names, and those of one name may
be shared out together. A result that lacks a name is summed over the devices that share that axis.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_kernels.ops.planned_op import under_defaults

__all__ = ["ArrayAxes", "Axis", "Shares", "is_partitioned", "partitioned"]


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of an array. group: its length is so many times that of the axes of this name without a group."""

    name: str
    group: int = 1

    @property
    def factor(self) -> Any:
        return self.name if self.group == 1 else CompoundFactor(self.name, f"{self.name}_group")


ArrayAxes = tuple[Axis | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """The axes of a function's arrays. An axis that is None is never shared out.

    arguments: of each leaf of the arguments, in order. results(tree): of each leaf of what the function returns.
    lengths: of the axes by name, which the devices have to divide; other names are not shared out.
    warning: for the user whose first array is shared out along an axis that is None; "" for none.
    """

    arguments: Sequence[ArrayAxes]
    results: Callable[[Any], Sequence[ArrayAxes]]
    lengths: Mapping[str, int]
    warning: str = ""

    def is_shared(self, axis: Axis | None) -> bool:
        return axis is not None and self.lengths.get(axis.name, 1) > 1

    def rule(self, results: Sequence[ArrayAxes]) -> SdyShardingRule:
        count = iter(range(10_000))
        factor = lambda axis: axis.factor if self.is_shared(axis) else f"own{next(count)}"
        mapping = lambda axes: ArrayMapping(*map(factor, axes))
        every = [axis for axes in (*self.arguments, *results) for axis in axes if self.is_shared(axis)]
        groups: Any = {f"{axis.name}_group": axis.group for axis in every if axis is not None and axis.group > 1}
        return SdyShardingRule(tuple(map(mapping, self.arguments)), tuple(map(mapping, results)), **groups)

    def spread(self, shardings: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """The mesh axes along which the axes of each name are shared out; the first array that has any decides."""
        found: dict[str, tuple[str, ...]] = {}
        for place, (sharding, axes) in enumerate(zip(shardings, self.arguments, strict=True)):
            for axis, mesh_axes in zip(axes, _mesh_axes(sharding, len(axes)), strict=True):
                if mesh_axes and axis is None and place == 0 and self.warning:
                    warnings.warn(f"{self.warning} (the mesh axes {', '.join(mesh_axes)})", stacklevel=2)
                if not mesh_axes or axis is None or not self.is_shared(axis) or axis.name in found:
                    continue
                devices = math.prod(sharding.mesh.shape[name] for name in mesh_axes)
                taken = {name for others in found.values() for name in others}
                if self.lengths[axis.name] % devices == 0 and not taken & set(mesh_axes):
                    found[axis.name] = mesh_axes
        return found


def _mesh_axes(sharding: Any, count: int) -> Iterator[tuple[str, ...]]:
    spec = (*sharding.spec, *[None] * (count - len(sharding.spec)))
    return (() if x is None else x if isinstance(x, tuple) else (x,) for x in spec)


def is_partitioned() -> bool:
    """Whether a kernel that is traced now may be shared out by XLA: there are devices, and no manual mesh axes."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return jax.device_count() > 1 and all(kind == AxisType.Auto for kind in kinds)


def partitioned(function: Callable[..., Any], shares: Shares) -> Callable[..., Any]:
    """The function of arrays, with a rule by which the devices of a mesh share out its work under jit."""

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        found: list[Any] = []  # the structure of the results, and their axes

        @under_defaults
        def flat(*leaves: Any) -> tuple[Any, ...]:
            out = function(*jax.tree.unflatten(tree, leaves))
            found[:] = found or [jax.tree.structure(out), shares.results(out)]
            return tuple(jax.tree.leaves(out))

        def partition(mesh: Any, shapes: Any, outs: Any) -> Any:
            shardings = [x.sharding for x in shapes]
            spread = shares.spread(shardings)
            of = lambda axis: spread.get(axis.name) if shares.is_shared(axis) else None
            place = lambda axes: NamedSharding(shardings[0].mesh, PartitionSpec(*map(of, axes)))
            missing = []
            for axes in found[1]:
                has = {axis.name for axis in axes if axis is not None}
                missing.append(tuple(x for name, over in spread.items() if name not in has for x in over))
            local = functools.partial(_summed, flat, missing)
            return mesh, local, tuple(map(place, found[1])), tuple(map(place, shares.arguments))

        wrapped = custom_partitioning(flat)
        wrapped.def_partition(partition=partition, sharding_rule=lambda *_: shares.rule(found[1]))
        out = wrapped(*leaves)
        return jax.tree.unflatten(found[0], out)

    return run


def _summed(function: Callable[..., Any], over: Sequence[tuple[str, ...]], *leaves: Any) -> tuple[Any, ...]:
    """The function's results on a device, each summed in float32 over some mesh axes."""
    total = lambda x, axes: lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x
    # JAX lowers the refs of a kernel inside custom_partitioning, and not in a function that partition returns.
    whole = custom_partitioning(function)
    whole.def_partition(partition=None)
    mesh = jax.sharding.get_abstract_mesh()  # of whoever compiles; the device's own arrays have no part in it
    auto = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(auto):
        return tuple(total(x, axes) for x, axes in zip(whole(*leaves), over, strict=True))
