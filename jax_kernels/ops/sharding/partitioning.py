"""Kernels under jit over several devices: each device runs them on its shard of the arrays.

XLA cannot partition a kernel by itself: it would gather the kernel's arrays on every device, and every device would do
all the work. Here a kernel's function gets a rule for the Shardy partitioner. The axes of its arrays have names, and
axes of one name are sharded together. A result without a name is summed over the devices that shard this name.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_kernels import dispatch
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["ArrayAxes", "Axis", "ByIndex", "Shares", "is_partitioned", "on_one_device", "partitioned"]

# The custom calls of kernels. jax.export refuses them by default, since their text may change with JAX. Programs that
# are exported here are used in this process only.
KERNEL_CALLS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu", "mosaic_gpu_v2")

_INSIDE_PARTITIONED = contextvars.ContextVar("inside_partitioned", default=False)
_ON_ONE_DEVICE = jax.make_user_context(False)  # part of the keys of jit's caches


@dataclasses.dataclass(frozen=True)
class Axis:
    """The name of an array's axis. The devices shard axes of one name together.

    group: the ratio of the axis' length to the length of the axes of this name with group=1. For grouped query heads it
    is the number of query heads per key head.
    """

    name: str
    group: int = 1

    @property
    def factor(self) -> Any:
        """The axis in a rule of the Shardy partitioner: its name, or (name, group) as a compound factor."""
        return self.name if self.group == 1 else CompoundFactor(self.name, f"{self.name}_group")


ArrayAxes = tuple[Axis | None, ...]


@dataclasses.dataclass(frozen=True)
class ByIndex:
    """A function that runs another program for each shard of an axis.

    name: the axis' name. key(index, count): a hashable value for shard `index` of `count` shards; shards with equal
    keys run one program. run(that value, *args): computes a shard's results from the shard's arrays.
    """

    name: str
    key: Callable[[int, int], Hashable]
    run: Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """The axes along which devices may shard a function's arrays. An axis that is None is never sharded.

    arguments: the axes of each leaf of the arguments, in order. results(results of the function): the axes of each leaf
    of the results. lengths: the length of the axes of each name. An axis is sharded only if the number of devices
    divides this length; names that are missing here are not sharded. warning: the text of a warning if the first array
    is sharded along an axis that is None; "" for no warning. by_index: None, or a ByIndex for an axis whose shards need
    different programs.
    """

    arguments: Sequence[ArrayAxes]
    results: Callable[[Any], Sequence[ArrayAxes]]
    lengths: Mapping[str, int]
    warning: str = ""
    by_index: ByIndex | None = None

    def is_shared(self, axis: Axis | None) -> bool:
        """Whether devices may shard the axis: it has a name with a length above 1."""
        return axis is not None and self.lengths.get(axis.name, 1) > 1

    def rule(self, results: Sequence[ArrayAxes]) -> SdyShardingRule:
        """The rule for the Shardy partitioner. results: the axes of each leaf of the results."""
        count = iter(range(10_000))
        factor = lambda axis: axis.factor if self.is_shared(axis) else f"own{next(count)}"
        mapping = lambda axes: ArrayMapping(*map(factor, axes))
        every = [axis for axes in (*self.arguments, *results) for axis in axes if self.is_shared(axis)]
        groups: Any = {f"{axis.name}_group": axis.group for axis in every if axis is not None and axis.group > 1}
        return SdyShardingRule(tuple(map(mapping, self.arguments)), tuple(map(mapping, results)), **groups)

    def spread(self, shardings: Sequence[Any]) -> dict[str, tuple[str, ...]]:
        """The mesh axes over which the axes of each name are to be sharded, by name; unsharded names are missing.

        shardings: the NamedSharding that XLA chose for each leaf of the arguments. The first array that is sharded
        along an axis of a name decides, if the devices divide the axis. May give the user the text `warning`.
        """
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
    """For each of an array's `count` axes, the mesh axes that shard it; () if none does."""
    spec = (*sharding.spec, *[None] * (count - len(sharding.spec)))
    return (() if x is None else x if isinstance(x, tuple) else (x,) for x in spec)


def _inside_shard_map(context: AbstractMesh, shapes: Sequence[Any]) -> tuple[Mesh, list[NamedSharding]]:
    """(the concrete mesh of a shard_map, the sharding of each array along the one mesh axis that XLA partitions).

    context: the abstract mesh inside the shard_map. shapes: the arrays' shapes and shardings, as XLA gives them.

    Inside a shard_map, XLA partitions only over the devices along this axis, and JAX does not name it. Sums are over
    axes of the whole mesh, for which only the mesh's shape matters: the order of the devices has no effect.
    """
    devices = np.array(sorted(shapes[0].sharding.device_set, key=lambda device: device.id))
    mesh = Mesh(devices.reshape(context.axis_sizes), context.axis_names)
    (name,) = _shared_axes(context)
    alone = Mesh(devices[: mesh.shape[name]], (name,))
    is_cut = lambda x: (part < whole for part, whole in zip(x.sharding.shard_shape(x.shape), x.shape, strict=True))
    specs = [PartitionSpec(*(name if cut else None for cut in is_cut(x))) for x in shapes]
    return mesh, [NamedSharding(alone, spec) for spec in specs]


def _shared_axes(mesh: AbstractMesh) -> list[str]:
    """The names of the mesh axes over which XLA's partitioner may shard arrays: Auto axes of several devices."""
    every = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return [name for name, size, kind in every if kind == AxisType.Auto and size > 1]


def is_partitioned() -> bool:
    """Whether XLA may partition a kernel that is traced now, so that the kernel needs a rule for its sharding.

    It may if there are several devices, and all axes of the mesh are Auto, or a shard_map leaves exactly one Auto axis
    to XLA. With several Auto axes in a shard_map, XLA would not tell the kernel's rule which axis is which. False while
    a kernel is traced for a device's shard, on a mesh of one device, and in on_one_device without a mesh.
    """
    if jax.device_count() == 1 or _INSIDE_PARTITIONED.get():
        return False
    mesh = jax.sharding.get_abstract_mesh()
    if _ON_ONE_DEVICE.value if mesh.empty else mesh.size == 1:
        return False
    if AxisType.Manual not in mesh.axis_types:
        return AxisType.Explicit not in mesh.axis_types
    return AxisType.Explicit not in mesh.axis_types and len(_shared_axes(mesh)) == 1


def on_one_device() -> contextlib.AbstractContextManager[None]:
    """A context manager: outside of a mesh, the arrays of the calls inside it are on one device of several."""
    return _ON_ONE_DEVICE(True)


@contextlib.contextmanager
def _inside_partitioned() -> Iterator[None]:
    """A context in which is_partitioned() is False, so that kernels traced in it get no rules of their own."""
    token = _INSIDE_PARTITIONED.set(True)
    try:
        yield
    finally:
        _INSIDE_PARTITIONED.reset(token)


def partitioned(
    function: Callable[..., Any], shares: Shares, key: Hashable = None, *, has_rules: bool = False
) -> Callable[..., Any]:
    """Returns `function` with a rule by which XLA shards its work over the devices of a mesh under jit.

    The returned function takes the same arrays and returns the same results. key: identifies the function. Functions
    with equal keys are lowered once for arrays of equal shapes; a function without a key is lowered only for its own
    calls. has_rules: kernels inside `function` have rules of their own. They are traced without these rules, since the
    rule here decides for the whole function.
    """
    is_compiled = not dispatch.interpreting()
    within = _inside_partitioned if has_rules else contextlib.nullcontext

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        found: list[Any] = []  # the structure of the results, and their axes
        own: dict[Any, dict[Any, Any]] = {}  # the programs of a function without a key, by shard
        context = jax.sharding.get_abstract_mesh()

        def flattened(function: Callable[..., Any]) -> Callable[..., Any]:
            @under_defaults
            def flat(*leaves: Any) -> tuple[Any, ...]:
                with within():
                    out = function(*jax.tree.unflatten(tree, leaves))
                found[:] = found or [jax.tree.structure(out), shares.results(out)]
                return tuple(jax.tree.leaves(out))

            return flat

        constants, of_constants = _with_constants(flattened(function), *leaves)
        count = len(constants)
        unshared: list[ArrayAxes] = [(None,) * x.ndim for x in constants]
        every = dataclasses.replace(shares, arguments=[*shares.arguments, *unshared])

        def partition(mesh: Any, shapes: Any, outs: Any) -> Any:
            shardings = [x.sharding for x in shapes]
            if mesh.empty:
                mesh, shardings = _inside_shard_map(context, shapes)
            spread = every.spread(shardings)
            of = lambda axis: spread.get(axis.name) if shares.is_shared(axis) else None
            sharded = lambda axes: NamedSharding(shardings[0].mesh, PartitionSpec(*map(of, axes)))
            missing = []
            for axes in found[1]:
                has = {axis.name for axis in axes if axis is not None}
                missing.append(tuple(x for name, over in spread.items() if name not in has for x in over))
            platform = mesh.devices.flat[0].platform

            def lowered(function: Callable[..., Any], *part: Hashable) -> Callable[..., Any]:
                if not is_compiled or platform == "cpu":
                    return _lowered_anew(flattened(function))
                programs = own.setdefault(part, {}) if key is None else _programs_of((key, *part), tree)
                return functools.partial(_lowered_once, flattened(function), (platform, mesh.size), programs)

            over = None if shares.by_index is None else spread.get(shares.by_index.name)
            if shares.by_index is None or over is None:
                on_device = lowered(function)
            else:
                on_device = _switched(shares.by_index, over, math.prod(mesh.shape[name] for name in over), lowered)
            # A device's function has its own constants: they depend on the shapes of its shard.
            local = lambda *given: _summed(on_device, missing, *given[: len(given) - count])
            return mesh, local, tuple(map(sharded, found[1])), tuple(map(sharded, every.arguments))

        wrapped = custom_partitioning(of_constants)
        wrapped.def_partition(partition=partition, sharding_rule=lambda *_: every.rule(found[1]))
        out = wrapped(*leaves, *constants)
        return jax.tree.unflatten(found[0], out)

    return run


def _with_constants(function: Callable[..., Any], *leaves: Any) -> tuple[list[Any], Callable[..., Any]]:
    """(the constants of `function` at `leaves`, such as tables; the function of the leaves, then of the constants).

    The second takes arrays of the leaves' shapes. custom_partitioning needs it: it refuses a function with constants.
    """
    closed = jax.make_jaxpr(function)(*leaves)
    count = len(leaves)
    run = lambda *given: tuple(jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, given[count:]))(*given[:count]))
    return closed.consts, run


def _switched(
    by_index: ByIndex, over: tuple[str, ...], count: int, lowered: Callable[..., Callable[..., Any]]
) -> Callable[..., Any]:
    """A function from a device's leaves to its results. It runs the program of the device's shard, by lax.switch.

    The shard's index is the device's index along the mesh axes `over`, which have `count` devices together.
    lowered(function of a shard, key of the shard): returns the function as a device runs it.
    """
    keys = [by_index.key(index, count) for index in range(count)]
    several = list(dict.fromkeys(keys))
    parts = [lowered(functools.partial(by_index.run, key), key) for key in several]

    def run(*leaves: Any) -> Any:
        if len(parts) == 1:
            return parts[0](*leaves)
        which = jnp.asarray([several.index(key) for key in keys], jnp.int32)[lax.axis_index(over)]
        return lax.switch(which, parts, *leaves)

    return run


def _summed(function: Callable[..., Any], over: Sequence[tuple[str, ...]], *leaves: Any) -> tuple[Any, ...]:
    """The results of function(*leaves) on a device, each summed over devices in float32 and rounded once.

    over: for each result, the mesh axes over which it is summed; () for a result without a sum.
    """

    def total(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        if not axes:
            return x
        wide = x.dtype if lax.axis_size(axes) == 2 else jnp.float32  # a sum of two values is rounded once anyway
        return lax.psum(x.astype(wide), axes).astype(x.dtype)

    mesh = jax.sharding.get_abstract_mesh()  # of the compiling process; unrelated to the device's own arrays
    auto = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(auto):
        return tuple(total(x, axes) for x, axes in zip(function(*leaves), over, strict=True))


def _lowered_anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function wrapped in custom_partitioning, with the same leaves and results.

    A partition rule may return only such a function if it holds kernels: JAX lowers a kernel's refs only inside
    custom_partitioning.
    """

    def run(*leaves: Any) -> Any:
        constants, of_constants = _with_constants(function, *leaves)
        whole = custom_partitioning(of_constants)
        whole.def_partition(partition=None)
        return whole(*leaves, *constants)

    return run


@functools.lru_cache(maxsize=1024)
def _programs_of(key: Hashable, tree: Any) -> dict[Any, Any]:
    """A dict, empty at first, that is the same object in later calls with equal arguments: a cache for _lowered_once.

    It maps (target, shapes of the arrays) to a lowered program. key: identifies the function, as for `partitioned`.
    tree: the structure of the function's arguments.
    """
    return {}


def _lowered_once(function: Callable[..., Any], target: tuple[str, int], programs: dict[Any, Any], *leaves: Any) -> Any:
    """The results of function(*leaves), from a program that is lowered once for all calls on arrays of the same shapes.

    XLA asks for a device's shard of every call separately: for each kernel of a model, in each block. Mosaic numbers
    the kernels that JAX lowers. So each answer would have kernels of its own, and XLA would compile all of them.

    programs: the dict in which lowered programs are kept. target: (platform, number of devices in the mesh). Under
    jax.set_mesh, a program is for this number of devices. JAX would then also put scalars on the mesh. A device's
    program has no use for this, and XLA has no call for it. So scalars get an axis.
    """
    platform, _ = target
    device = jax.sharding.get_abstract_mesh().abstract_device
    shapes = [x.shape for x in leaves]
    leaves = tuple(x.reshape(x.shape or (1,)) for x in leaves)
    arrays = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    key = target, device, tuple(shapes), arrays
    if key not in programs:
        name = "cuda" if platform == "gpu" else platform
        checks = [export.DisabledSafetyCheck.custom_call(call) for call in KERNEL_CALLS]
        of_shapes = lambda *leaves: function(*(x.reshape(shape) for x, shape in zip(leaves, shapes, strict=True)))
        lower = export.export(jax.jit(of_shapes), platforms=[name], disabled_checks=checks)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            programs[key] = lower(*arrays)
    return programs[key].call(*leaves)
