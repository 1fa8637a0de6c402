"""Sharding of a model's arrays over a mesh: a table of axis names, and the functions that apply it."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_kernels.masks import Mask
from jax_kernels.masks.checks import check_integers
from jax_kernels.models.changes import changed_state, held_arrays, refuse_changes
from jax_kernels.ops.ring.layouts import Layout

__all__ = [
    "MESH_AXES",
    "UNCONSTRAINED",
    "ShardingRules",
    "batch_sharding",
    "check_mesh",
    "has_explicit_axes",
    "make_mesh",
    "place",
    "sequence_devices",
    "shard_batch",
    "shard_model",
    "share_sequence",
    "shares_sequence",
    "state_shardings",
    "token_order",
    "under_auto_axes",
]

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED  # an axis whose sharding XLA chooses
# The mesh axes that the default rules know, from the least to the most communication.
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Two tables: mesh axes for each axis of a model's arrays, and axis names for each parameter.

    axes: pairs of an array axis ("batch", "tokens", "embed", "heads", "mlp", "expert", "vocab", "stage") and the mesh
      axes that shard it. A mesh axis is not used if the mesh lacks it, if its size does not divide the array's axis, or
      if an earlier axis of the same array uses it. The array is then replicated along that mesh axis.
    parameters: pairs of a regular expression, which matches the end of a parameter's dotted name (see
      flat_parameters), and the names of the parameter's axes. The first matching pair with the parameter's number of
      axes counts. Parameters without a matching pair are replicated.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("batch", ("data", "fsdp", "expert")),
        ("tokens", ("sequence",)),
        ("embed", ("fsdp", "pipeline")),
        ("heads", ("tensor",)),
        ("mlp", ("tensor",)),
        ("expert", ("expert",)),
        ("vocab", ("tensor",)),
        ("stage", ("pipeline",)),
    )
    parameters: tuple[tuple[str, tuple[str | None, ...]], ...] = (
        (r"embed", ("vocab", "embed")),
        (r"head\.kernel", ("embed", "vocab")),
        (r"attention\.[qkv]_proj\.kernel", ("embed", "heads")),
        (r"attention\.out_proj\.kernel", ("heads", "embed")),
        (r"mlp\.(shared\.)?(gate|up)_proj\.kernel", ("embed", "mlp")),
        (r"mlp\.(shared\.)?down_proj\.kernel", ("mlp", "embed")),
        (r"(gate|up)_proj", ("expert", "embed", "mlp")),
        (r"down_proj", ("expert", "mlp", "embed")),
    )

    def mesh_axes(self, name: str | None, length: int, mesh: Any, taken: Sequence[str] = ()) -> tuple[str, ...]:
        """The mesh axes that shard an array axis of this name and length; empty if it is replicated.

        name: of an array axis in the table `axes`; None for an axis that is never sharded. mesh: a Mesh or an
        AbstractMesh. taken: mesh axes that other axes of the array use.

        Raises ValueError for a name that the table lacks.
        """
        if name is None:
            return ()
        table = dict(self.axes)
        if name not in table:
            raise ValueError(f"axes: got {name!r}, want one of {', '.join(map(repr, table))}")
        found: list[str] = []
        for axis in table[name]:
            devices = math.prod(mesh.shape[x] for x in (*found, axis) if x in mesh.shape)
            if mesh.shape.get(axis, 1) > 1 and length % devices == 0 and axis not in taken:
                found.append(axis)
        return tuple(found)

    def spec(self, names: Sequence[Any], shape: Sequence[int], mesh: Any) -> PartitionSpec:
        """The PartitionSpec, on a mesh, of an array of this shape whose axes have these names. The last axes need no
        name.

        A name may also be None (not sharded), a tuple of mesh axes, or UNCONSTRAINED (XLA chooses).
        """
        found: list[Any] = []
        for name, length in zip(names, shape, strict=False):
            taken = [x for axes in found if axes is not UNCONSTRAINED for x in axes]
            is_spec = isinstance(name, tuple) or name is UNCONSTRAINED
            found.append(name if is_spec else self.mesh_axes(name, length, mesh, taken))
        of = lambda axes: axes if axes is UNCONSTRAINED else axes[0] if len(axes) == 1 else axes or None
        return PartitionSpec(*map(of, found))

    def parameter_spec(self, name: str, shape: Sequence[int], mesh: Any) -> PartitionSpec:
        """The PartitionSpec, on a mesh, of the parameter with this dotted name and shape; replicated if no rule
        matches.
        """
        for pattern, names in self.parameters:
            if len(names) == len(shape) and re.search(rf"(^|\.)({pattern})$", name):
                return self.spec(names, shape, mesh)
        return PartitionSpec()

    def constrain(self, x: jax.Array, *names: Any) -> jax.Array:
        """x, sharded by the names of its axes over the mesh of jax.set_mesh.

        x is unchanged without a mesh, on a mesh with an axis that is not Auto, inside shard_map, and outside of jit if
        x does not have a NamedSharding. names: one for each of the first axes, a key of the table `axes`, None (not
        sharded), a tuple of mesh axes, or UNCONSTRAINED (XLA chooses).
        """
        mesh = _auto_mesh()
        if mesh is None or not (isinstance(x, jax.core.Tracer) or isinstance(x.sharding, NamedSharding)):
            return x
        return lax.with_sharding_constraint(x, self.spec(names, x.shape, mesh))

    def devices(self, name: str, length: int) -> dict[str, int]:
        """The axes of the mesh of jax.set_mesh that shard an array axis of this name and length, by name, with their
        sizes.

        Empty where `constrain` would change nothing.
        """
        mesh = _auto_mesh()
        return {} if mesh is None else {axis: mesh.shape[axis] for axis in self.mesh_axes(name, length, mesh)}


def _auto_mesh() -> Any:
    """The mesh of jax.set_mesh; None without a mesh, or if any of its axes is Explicit or Manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types) else mesh


def check_mesh(
    mesh: Mesh, rules: ShardingRules, sequence_axis: str | None = None, num_layers: int | None = None
) -> None:
    """Raises ValueError for a mesh on which a model with these rules would waste devices, or cannot be split.

    That is: no device of some process is in the mesh; an axis of several devices is neither in the rules nor
    sequence_axis, so that its devices would do the same work; or the number of pipeline stages does not divide
    num_layers. sequence_axis, num_layers: of the model's config; None for no such axis or no check of the layers.
    """
    for axis in dict(rules.axes).get("stage", ()):
        stages = mesh.shape.get(axis, 1)
        if num_layers is not None and num_layers % stages:
            raise ValueError(f"num_layers: got {num_layers} for {stages} stages along {axis!r}, want a multiple")
    known = {axis for _, axes in rules.axes for axis in axes} | ({sequence_axis} if sequence_axis else set())
    unknown = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in known]
    if unknown:
        raise ValueError(
            f"mesh: got {', '.join(f'{axis}={mesh.shape[axis]}' for axis in unknown)}, along which all devices would "
            f"do the same work, want axes that the rules use: {', '.join(sorted(known))}"
        )
    absent = sorted(set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat})
    if absent:
        raise ValueError(
            f"mesh: got {mesh.size} of {jax.device_count()} devices, none of them of process "
            f"{', '.join(map(str, absent))}, want devices of each of the {jax.process_count()} processes"
        )


def check_kinds(mesh: Any, rules: Any) -> None:
    """Raises TypeError unless mesh is a Mesh or an AbstractMesh, and rules are ShardingRules or None."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh: got {mesh!r}, want a jax.sharding.Mesh, as make_mesh gives it")
    if not isinstance(rules, ShardingRules | None):
        raise TypeError(f"rules: got {rules!r}, want ShardingRules or None")


def has_explicit_axes(mesh: Any = None) -> bool:
    """Whether a mesh has Explicit axes, the default of jax.make_mesh. mesh: None is the mesh of jax.set_mesh."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def under_auto_axes(function: Callable[..., Any], model: Any, arrays: Any, results: Any) -> Any:
    """function(model, *arrays), run with the Explicit axes of the mesh of jax.set_mesh turned into Auto axes.

    arrays: trees of arrays, the function's arguments. results: the PartitionSpecs of the function's results; only
    Explicit axes in them count.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}

    def kept(part: Any) -> Any:
        axes = (part,) if isinstance(part, str) else tuple(part or ())
        return tuple(axis for axis in axes if axis in explicit) or None

    is_spec = lambda x: isinstance(x, PartitionSpec)
    specs = jax.tree.map(lambda spec: PartitionSpec(*map(kept, spec)), results, is_leaf=is_spec)
    graphdef, state = nnx.split(model)

    def call(state: Any, arrays: Any) -> Any:
        before, module = held_arrays(state), nnx.merge(graphdef, state)
        found = function(module, *arrays)
        refuse_changes(changed_state(module, before), "Explicit axes", "Auto axes")
        return found

    arrays = jax.tree.map(jax.numpy.asarray, arrays)
    return jax.sharding.auto_axes(call, axes=tuple(sorted(explicit)), out_sharding=specs)(state, arrays)


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with Auto axes, for jax.set_mesh. XLA shards the arrays that the rules do not shard.

    Args:
      axes: the number of devices along each axis, by name: {"data": 2, "sequence": 4}. One number may be -1: that axis
        takes all remaining devices.
      devices: the devices in order, from which the mesh takes the first; None for jax.devices().

    Raises:
      ValueError: a number is out of range, or there are too few devices.
      TypeError: axes is not a mapping from names to ints.
    """
    if not isinstance(axes, Mapping):
        raise TypeError(f"axes: got {axes!r}, want the devices along each axis by name, such as {{'data': 2}}")
    devices = list(jax.devices() if devices is None else devices)
    for name, size in axes.items():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"axes: got {name!r}: {size!r}, want a name and a number of devices")
    sizes = {name: int(size) for name, size in axes.items()}
    rest = [name for name, size in sizes.items() if size == -1]
    bad = {name: size for name, size in sizes.items() if size < 1 and size != -1}
    if bad or len(rest) > 1 or not sizes:
        raise ValueError(f"axes: got {dict(axes)}, want a positive number of devices for each axis, or -1 for one axis")
    count = math.prod(size for size in sizes.values() if size != -1)
    if rest:
        sizes[rest[0]] = len(devices) // count
    total = math.prod(sizes.values())
    if total > len(devices) or total == 0 or (rest and total != len(devices)):
        want = f"want the others to divide {len(devices)}" if rest else f"want at most {len(devices)} in all"
        raise ValueError(f"axes: got {dict(axes)} for {len(devices)} device{'s' * (len(devices) != 1)}, {want}")
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=devices[:total])


def state_shardings(state: Any, mesh: Mesh, rules: ShardingRules | None = None) -> Any:
    """A tree like `state` with the NamedSharding of each array, chosen by the array's name in the tree.

    Args:
      state: an nnx.State, a module, or any tree of arrays or jax.ShapeDtypeStructs whose names end like the parameters'
        names, such as the state of an optax optimizer.
      mesh: the mesh of the shardings. rules: None for ShardingRules().
    """
    check_kinds(mesh, rules)
    rules = ShardingRules() if rules is None else rules
    state = nnx.state(state) if isinstance(state, nnx.Module) else state

    def sharding(path: Any, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return NamedSharding(mesh, rules.parameter_spec(name, x.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, state)


def shard_model(model: nnx.Module, mesh: Mesh, rules: ShardingRules | None = None) -> None:
    """Shards the parameters of a model over a mesh, in the model itself. rules: None for ShardingRules()."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model: got {type(model).__name__}, want an nnx.Module")
    state = nnx.state(model)
    nnx.update(model, place(state, state_shardings(state, mesh, rules)))


def shard_batch(batch: Any, mesh: Mesh, rules: ShardingRules | None = None) -> Any:
    """The arrays [batch, tokens, ...] of a tree, sharded over a mesh. The order of the tokens does not change.

    With several processes, each process passes the whole batch, and its devices take their shards.

    Raises ValueError if the number of devices does not divide the batch, or if NumPy's 64-bit integers have values
    that JAX would change: without jax_enable_x64 it has 32 bits.
    """
    check_kinds(mesh, rules)
    for x in jax.tree.leaves(batch):
        check_integers("batch", x)
    return place(batch, jax.tree.map(lambda x: batch_sharding(np.shape(x), mesh, rules), batch))


def place(tree: Any, shardings: Any) -> Any:
    """The tree of arrays on devices, by its tree of shardings. With several processes, each passes the same whole
    arrays.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def own(x: Any, sharding: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    return jax.tree.map(own, tree, shardings)


def batch_sharding(shape: Sequence[int], mesh: Mesh, rules: ShardingRules | None = None) -> NamedSharding:
    """The NamedSharding of an array [batch, tokens, ...] on a mesh.

    Raises ValueError if the number of devices does not divide the batch.
    """
    check_kinds(mesh, rules)
    if not shape:
        raise ValueError("batch: got an array without axes, want [batch, tokens, ...]")
    rules = ShardingRules() if rules is None else rules
    wanted = [axis for axis in dict(rules.axes)["batch"] if mesh.shape.get(axis, 1) > 1]
    if list(rules.mesh_axes("batch", shape[0], mesh)) != wanted:
        devices = math.prod(mesh.shape[axis] for axis in wanted)
        raise ValueError(f"batch: got {shape[0]} rows for {devices} devices ({', '.join(wanted)}), want a multiple")
    return NamedSharding(mesh, rules.spec(("batch", "tokens"), shape, mesh))


def _kind(axis: str | None) -> AxisType | None:
    """The type (Auto, Explicit, Manual) of an axis of the mesh of jax.set_mesh, or of the shard_map around the call.

    None if there is no such axis or only one device along it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis is None or mesh.empty or mesh.shape.get(axis, 1) == 1:
        return None
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[axis]


def sequence_devices(axis: str | None) -> int:
    """The number of devices that shard the tokens: the size of `axis` in the mesh of jax.set_mesh or of a shard_map,
    else 1.
    """
    return 1 if _kind(axis) is None else jax.sharding.get_abstract_mesh().shape[axis]


def shares_sequence(axis: str | None) -> bool:
    """Whether `axis` is an Auto axis of the mesh of jax.set_mesh, along which calls shard the tokens of whole
    arrays.
    """
    return _kind(axis) == AxisType.Auto


def whole_length(axis: str | None, length: int) -> int:
    """The length of the whole sequence, from the `length` of an array's tokens.

    Inside a shard_map over `axis` the array is one device's shard; elsewhere it has the whole sequence already.
    """
    return length * sequence_devices(axis) if _kind(axis) == AxisType.Manual else length


def token_order(axis: str, layout: str, length: int, what: str = "x") -> Any:
    """The index in the sequence of the token at each position of an array in this layout: int32 [length].

    length: of the array's tokens. Outside of shard_map these are the whole sequence's. Inside, the array is one
    device's shard, and so is the result. For zigzag on 2 devices, 8 tokens have [0, 1, 6, 7, 2, 3, 4, 5], and device 0
    has [0, 1, 6, 7].

    Raises ValueError, naming the argument `what`, for a length that the layout does not divide.
    """
    devices = sequence_devices(axis)
    is_local = _kind(axis) == AxisType.Manual
    whole = whole_length(axis, length)
    multiple = devices * (2 if layout == "zigzag" else 1)
    if whole % multiple:
        raise ValueError(
            f"{what}: got {whole} tokens for {devices} devices along {axis!r} with the layout {layout!r}, want a "
            f"multiple of {multiple}"
        )
    arrangement = Layout(name=layout, devices=devices, length=whole // devices, left=None, right=None)
    order = np.stack([arrangement.tokens(i) for i in range(devices)]).astype(np.int32)
    return jax.numpy.asarray(order)[lax.axis_index(axis)] if is_local else order.reshape(-1)


def share_sequence(
    attention: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    axis: str,
    rules: ShardingRules,
    heads_alike: bool = True,
    mask: Mask | None = None,
) -> jax.Array:
    """The result [B, T, heads, head_dim] of an attention that each device computes for its shards, in shard_map.

    attention: a function of (query, key, value) and, if given, segment_ids, and `mask` by name. query, key, value:
    whole arrays [B, T, heads, head_dim]; inside a shard_map over `axis`, shards, for which the attention is called
    directly. The batch and the tokens are sharded, by `rules` and along `axis`. The heads are sharded only with
    heads_alike, which says that heads do not depend on their index, and if the mask has one head.

    segment_ids: [B, T]. mask: of the whole sequence.

    Raises NotImplementedError on a mesh with Explicit axes, and for a mask with several batch entries if the batch is
    sharded.
    """
    kind = _kind(axis)
    arrays: tuple[Any, ...] = (query, key, value) if segment_ids is None else (query, key, value, segment_ids)
    if kind == AxisType.Manual:
        return attention(*arrays) if mask is None else attention(*arrays, mask=mask)
    mesh = jax.sharding.get_abstract_mesh()
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        raise NotImplementedError(
            f"sequence_axis: got {axis!r} on a mesh with Explicit axes, want Auto axes, as make_mesh gives them"
        )
    batch = rules.mesh_axes("batch", query.shape[0], mesh, (axis,))
    if mask is not None and mask.batch > 1 and batch:
        raise NotImplementedError(
            f"mask: got {mask.batch} batch entries with the batch sharded along {batch}, want one entry for the whole "
            "batch: use segment_ids for the documents of each entry"
        )
    both = math.gcd(query.shape[2], key.shape[2])
    heads_alike = heads_alike and (mask is None or mask.heads == 1)
    heads = rules.mesh_axes("heads", both, mesh, (axis, *batch)) if heads_alike else ()
    spec = PartitionSpec(batch or None, axis, heads or None, None)
    specs = (spec, spec, spec, PartitionSpec(batch or None, axis))[: len(arrays)]
    if mask is not None:
        of_mask, count = attention, len(arrays)
        attention = lambda *given: of_mask(*given[:count], mask=given[count])
        arrays, specs = (*arrays, mask), (*specs, PartitionSpec())
    # Interpreted kernels of the ring lack the types of varying arrays; every array here varies over all axes.
    return jax.shard_map(attention, in_specs=specs, out_specs=spec, check_vma=False)(*arrays)
