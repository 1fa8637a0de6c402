"""DTensors: an op runs on each process's own shards, if no shard needs another shard.

An axis along which an op computes independently has a role, a name such as "batch" or "heads"; other axes have the role
None, and cannot be sharded. Along each dimension of the mesh one role may be sharded: all tensors with an axis of this
role are sharded along it, and the other tensors are replicated. The gradient of a replicated tensor is then a partial
sum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jax_kernels.masks import Mask

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["HEADS", "are_in", "attention", "is_dtensor", "on_shards", "refuse", "rows_roles"]

type Roles = tuple[str | None, ...]  # for each axis of a tensor
type Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
HEADS: Roles = ("batch", None, "heads", None)
SCORES: Roles = ("batch", "heads", None, None)
LSE: Roles = ("batch", "heads", None)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(x: Any) -> bool:
    """Whether x is a torch.distributed.tensor.DTensor. It does not import torch.distributed."""
    return isinstance(x, torch.Tensor) and type(x) not in _TENSORS and hasattr(x, "device_mesh")


def are_in(*tensors: Any) -> bool:
    """Whether any argument is a DTensor."""
    return any(map(is_dtensor, tensors))


def refuse(function: str, **tensors: Any) -> None:
    """Raises NotImplementedError, naming the argument and its placements, if a tensor is a DTensor.

    function: the name, for the error, of the function that takes no DTensors. tensors: its arguments, by name.
    """
    for name, x in tensors.items():
        if is_dtensor(x):
            raise NotImplementedError(
                f"{name}: got a DTensor with placements {_text(x)}, want a torch.Tensor: {function} takes no DTensors; "
                "call it on to_local()"
            )


class _Shards(NamedTuple):
    """The sharding of a call's DTensors.

    roles: for each dimension of the mesh, the role that is sharded along it; None if all tensors are replicated there.
    sizes: the global size of each role's axes, before sharding; 1 only if all tensors have size 1 there.
    """

    mesh: "DeviceMesh"
    roles: list[str | None]
    sizes: dict[str, int]

    def placements(
        self, axes: Roles, shape: Sequence[int] | None = None, *, of_gradient: bool = False
    ) -> list["Placement"]:
        """The placements that a tensor must have whose axes have these roles, one for each dimension of the mesh.

        shape: the tensor's global shape, since an axis of size 1 that is broadcast must be replicated; None if no axis
        is broadcast. of_gradient: the placements of its gradient instead, with partial sums where it is replicated and
        other tensors are sharded.
        """
        from torch.distributed.tensor import Partial, Replicate, Shard

        found: list[Placement] = []
        for role in self.roles:
            if role is None:
                found.append(Replicate())
            elif role in axes and (shape is None or shape[axes.index(role)] > 1 or self.sizes[role] == 1):
                found.append(Shard(axes.index(role)))
            else:
                found.append(Partial() if of_gradient else Replicate())
        return found


def on_shards(
    function: Function,
    tensors: Mapping[str, torch.Tensor | None],
    roles: Mapping[str, Roles],
    results: Sequence[Roles],
    options: Mapping[str, Any],
) -> Any:
    """Runs function(**tensors, **options) on this process's shards of DTensors. Returns DTensors, with gradients.

    tensors: DTensors or None, by name; the function gets local tensors. roles: for each tensor, by name, the role of
    each of its axes. results: for each result of the function, the role of each of its axes. options: the function's
    other arguments.

    Raises, naming the argument and its placements: TypeError for a tensor that is no DTensor, ValueError for tensors on
    different meshes, or for placements with which a shard would need another shard.
    """
    from torch.distributed.tensor import DTensor

    given: dict[str, Any] = {name: x for name, x in tensors.items() if x is not None}
    shards = _shards(given, roles)
    local = {}
    for name, x in given.items():
        axes = roles[name]
        placements = shards.placements(axes, x.shape)
        if list(x.placements) != placements:
            raise ValueError(
                f"{name}: got a DTensor with placements {_text(x)}, want {_names(placements)} with the other "
                f"tensors; call {name}.redistribute(placements=...)"
            )
        local[name] = x.to_local(grad_placements=shards.placements(axes, x.shape, of_gradient=True))
    found = function(**{name: local.get(name) for name in tensors}, **options)

    def whole(x: torch.Tensor, axes: Roles) -> Any:
        sharded = set(shards.roles)
        size = lambda role, n: shards.sizes[role] if role is not None and role in sharded else n
        shape = torch.Size([size(role, n) for role, n in zip(axes, x.shape, strict=True)])
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return DTensor.from_local(
            x, shards.mesh, shards.placements(axes), run_check=False, shape=shape, stride=strides
        )  # fmt: skip

    if isinstance(found, tuple | list):
        return tuple(whole(x, axes) for x, axes in zip(found, results, strict=True))
    return whole(found, results[0])


def _shards(given: Mapping[str, "DTensor"], roles: Mapping[str, Roles]) -> _Shards:
    """The sharding of a call's DTensors. given: the tensors, by name. roles: the role of each of their axes, by name.

    Raises TypeError for a tensor that is no DTensor, and ValueError for tensors on different meshes, or for placements
    with which a shard would need another shard.
    """
    first = next(name for name, x in given.items() if is_dtensor(x))
    mesh = given[first].device_mesh
    sizes: dict[str, int] = {}
    for name, x in given.items():
        if not is_dtensor(x):
            raise TypeError(f"{name}: got a {type(x).__name__} with {first}, a DTensor; want a DTensor on its mesh")
        if x.device_mesh != mesh:
            raise ValueError(f"{name}: got a DTensor on {x.device_mesh}, want {first}'s mesh {mesh}")
        for role, size in zip(roles[name], x.shape, strict=False):
            if role is not None:
                sizes[role] = max(size, sizes.get(role, 0))
    found = [_role_of(dim, given, roles) for dim in range(mesh.ndim)]
    for role in {role for role in found if role is not None}:
        _check_sizes(role, math.prod(mesh.size(i) for i, x in enumerate(found) if x == role), given, roles)
    return _Shards(mesh=mesh, roles=found, sizes=sizes)


def _role_of(dim: int, given: Mapping[str, "DTensor"], roles: Mapping[str, Roles]) -> str | None:
    """The role that is sharded along dimension `dim` of the mesh; None if all tensors are replicated there.

    Raises ValueError, naming the tensor, if one is sharded along an axis without a role, or if two roles are sharded.
    """
    from torch.distributed.tensor import Shard

    found = None
    for name, x in given.items():
        placement = x.placements[dim]
        if placement.is_replicate():
            continue
        axes = roles[name]
        role = axes[placement.dim] if type(placement) is Shard and placement.dim < len(axes) else None
        if role is None or found not in (None, role):
            shardable = [f"Shard({axis})" for axis, own in enumerate(axes) if own is not None and own in (found or own)]
            raise ValueError(
                f"{name}: got a DTensor with placements {_text(x)}, want {' or '.join([*shardable, 'Replicate()'])} "
                f"along dimension {dim} of the mesh"
            )
        found = role
    return found


def _check_sizes(role: str, devices: int, given: Mapping[str, "DTensor"], roles: Mapping[str, Roles]) -> None:
    """Raises ValueError if a process would hold different parts of the role's axis in two tensors.

    That is so if the axes have different sizes other than 1, as heads in grouped-query attention, and one is no
    multiple of `devices`, the number of shards.
    """
    sizes = {name: x.shape[roles[name].index(role)] for name, x in given.items() if role in roles[name]}
    different = {size for size in sizes.values() if size > 1}
    if len(different) < 2:
        return
    for name, size in sizes.items():
        if size % devices and size > 1:
            raise ValueError(
                f"{name}: got a DTensor with placements {_text(given[name])} of {size} {role}, want a multiple of the "
                f"{devices} shards, as the tensors have different numbers of {role}"
            )


_ROLES: dict[str, Roles] = {
    "query": HEADS,
    "key": HEADS,
    "value": HEADS,
    "sinks": ("heads",),
    "kv_lengths": ("batch",),
    "q_offset": ("batch",),
    "segment_ids": ("batch", None),
    "kv_segment_ids": ("batch", None),
    "alibi_slopes": ("batch", "heads"),
    "bias": SCORES,
    "mask": SCORES,
    "block_mask": SCORES,
}
_BROADCAST = ("alibi_slopes", "bias", "mask", "block_mask", "q_offset")


def _attention_roles(name: str, x: torch.Tensor) -> Roles:
    """The role of each axis of the attention argument `name`, whose value is x.

    Leading axes may be missing in alibi_slopes, bias, mask, block_mask and q_offset, which broadcast. Raises ValueError
    for any other wrong number of axes.
    """
    axes = _ROLES[name]
    if x.ndim > len(axes) or (x.ndim < len(axes) and name not in _BROADCAST):
        raise ValueError(f"{name}: got a DTensor of shape {tuple(x.shape)}, want {len(axes)} axes")
    return axes[len(axes) - x.ndim :]


def attention(function: Function, given: Mapping[str, Any]) -> Any:
    """Runs an attention function on this process's shards of DTensors. Returns DTensors, with gradients.

    given: all arguments of the function, by name. Batch and heads may be sharded; sequences may not.

    Raises, naming the argument and its placements: TypeError for a tensor that is no DTensor, ValueError for tensors on
    different meshes, or for placements with which a shard would need another shard. With a sharded axis, also raises
    ValueError for a score_mod, and for a Mask that differs along this axis: their functions take global indices.
    """
    tensors: dict[str, Any] = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in given.items() if name not in tensors}
    if isinstance(given.get("segment_ids"), tuple | list):
        del options["segment_ids"]
        tensors["segment_ids"], tensors["kv_segment_ids"] = given["segment_ids"]
    roles = {name: _attention_roles(name, x) for name, x in tensors.items()}
    sharded = set(_shards(tensors, roles).roles) - {None}
    mask = options.get("mask") if isinstance(options.get("mask"), Mask) else options.get("block_mask")
    if sharded and options.get("score_mod") is not None:
        placements = _text(tensors["query"])
        raise ValueError(f"score_mod: got one with a DTensor with placements {placements}, want None, or Replicate()")
    for role, size in (("batch", mask.batch), ("heads", mask.heads)) if isinstance(mask, Mask) else ():
        if role in sharded and size > 1:
            placements = _text(tensors["query"])
            raise ValueError(f"mask: got {size} {role} with a DTensor with placements {placements}, want a Mask of 1")

    def run(segment_ids: Any = None, kv_segment_ids: Any = None, **others: Any) -> Any:
        ids = segment_ids if kv_segment_ids is None else (segment_ids, kv_segment_ids)
        return function(**others) if ids is None else function(segment_ids=ids, **others)

    return on_shards(run, tensors, roles, (HEADS, LSE), options)


def rows_roles(x: torch.Tensor) -> Roles:
    """The roles of the axes of x [..., K], for an op on rows: a role of its own for each axis, None for the last."""
    return (*(f"axis {axis}" for axis in range(x.ndim - 1)), None)


def _names(placements: Sequence["Placement"]) -> str:
    return f"({', '.join(map(repr, placements))})"


def _text(x: "DTensor") -> str:
    return _names(x.placements)
