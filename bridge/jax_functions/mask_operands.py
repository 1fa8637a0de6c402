"""The Masks of a call. Their arrays stay jax.Arrays.

As tensors the arrays would be copied to memory that PyTorch owns (see dlpack). PyTorch's operators instead take a name,
and look up the call's Masks by this name.
"""

import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.typing import ArrayLike

from jax_kernels.bridge.interop import dlpack, fork
from jax_kernels.bridge.interop.keyed_cache import unique_name
from jax_kernels.bridge.operators import torch_operator
from jax_kernels.bridge.translate import mask_sources
from jax_kernels.masks import Mask, checks

__all__ = [
    "NO_MASKS",
    "CallMasks",
    "MaskSignature",
    "are_immutable",
    "masks_by_name",
    "on_device",
    "register_masks",
    "register_weak",
]


class ArraySignature(NamedTuple):
    """The shape and JAX dtype of a Mask's array. weak_type: whether JAX promotes it like a Python number."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    weak_type: bool


class MaskSignature(NamedTuple):
    """The Masks of a call without their values: a part of a program's key.

    structure: of the tuple of Masks. arrays: one entry for each leaf of this structure, in order.
    """

    structure: jax.tree_util.PyTreeDef
    arrays: tuple[ArraySignature, ...]


class _OfMasks:
    """The Masks of a call. name: masks_by_name finds this object by it, so operators take the name as an argument.

    masks: the call's Masks, with their arrays on the call's device.
    """

    name: str

    @property
    def masks(self) -> tuple[Mask, ...]:
        raise NotImplementedError

    @property
    def held(self) -> tuple[Mask, ...]:
        """The Masks to hold so that masks_by_name still finds the call's Masks, as for a later backward.

        Some may be missing if they have died.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises ValueError if a tensor that a mask's function read has changed since the mask was made.

        Only WeakCallMasks check: they serve later calls too. CallMasks were checked when they were made.
        """

    @functools.cached_property
    def signature(self) -> MaskSignature:
        """The Masks' structure, and their arrays' shapes and dtypes."""
        infos = [_info_of(mask) for mask in self.masks]
        structure = jax.tree_util.treedef_tuple([x.structure for x in infos])
        return MaskSignature(structure, tuple(itertools.chain.from_iterable(x.arrays for x in infos)))

    def tensors(self, device: torch.device) -> list[torch.Tensor] | None:
        """The Masks' arrays as PyTorch tensors on this GPU, in the order of `signature`'s arrays.

        Work on PyTorch's current stream may read them. Each Mask is copied once for each device. Returns None if
        PyTorch lacks a dtype, or if a CUDA graph is being captured and there is no earlier copy.
        """
        return _tensors_of(map(_info_of, self.masks), device)


@dataclasses.dataclass(frozen=True, eq=False)
class CallMasks(_OfMasks):
    """The Masks of one call, held by this object. masks_by_name finds it while it is alive.

    given: the Masks, with their arrays on the call's device. Without Masks the name is "".
    """

    name: str
    given: tuple[Mask, ...]

    @property
    def masks(self) -> tuple[Mask, ...]:
        return self.given

    @property
    def held(self) -> tuple[Mask, ...]:
        return self.given


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WeakCallMasks(_OfMasks):
    """The Masks of repeated calls, such as cached calls, and calls in a graph of torch.compile, held weakly.

    masks_by_name finds this object while all of the Masks are alive. references: the caller's Masks, whose arrays may
    be on another device than `device`, the calls' device.
    """

    name: str
    device: torch.device
    references: tuple[weakref.ref[Mask], ...]

    @property
    def masks(self) -> tuple[Mask, ...]:
        return tuple(on_device(mask, self.device) for mask in self.held)

    @property
    def held(self) -> tuple[Mask, ...]:
        return tuple(mask for reference in self.references if (mask := reference()) is not None)

    @functools.cached_property
    def _has_sources(self) -> bool:
        return any(map(mask_sources.has_sources, self.held))

    def check(self) -> None:
        if self._has_sources:
            mask_sources.check(self.held)

    @functools.cached_property
    def _infos(self) -> list["_MaskInfo"]:
        return [_info_of(mask) for mask in self.masks]

    def tensors(self, device: torch.device) -> list[torch.Tensor] | None:
        return _tensors_of(self._infos, device)

    def is_of(self, masks: Sequence[Mask], device: torch.device) -> bool:
        """Whether it was made for exactly these Mask objects, in this order, and for this device."""
        if device != self.device or len(masks) != len(self.references):
            return False
        return all(reference() is mask for reference, mask in zip(self.references, masks, strict=True))


NO_MASKS = CallMasks("", ())
_FOUND: weakref.WeakValueDictionary[str, CallMasks] = weakref.WeakValueDictionary()
_KEPT: dict[str, WeakCallMasks] = {}
# Mask -> device -> copy. Equal Masks hold identical array objects, which never change.
_MOVED: weakref.WeakKeyDictionary[Mask, dict[jax.Device, Mask]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()  # guards _FOUND and _MOVED


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Copy:
    """A Mask's arrays, copied to PyTorch's memory on one GPU.

    copied: the event after the copy. streams: handles of the streams that already wait for this event.
    """

    tensors: list[torch.Tensor]
    copied: torch.cuda.Event
    streams: set[int]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _MaskInfo:
    """The structure of a Mask and its arrays' shapes and dtypes, kept in _INFOS by the Mask's id while it is alive.

    reference: a weak reference to the Mask; its callback drops the entry. copies: the arrays as PyTorch
    tensors, by GPU, made when a call first needs them there.
    """

    reference: weakref.ref[Mask]
    structure: jax.tree_util.PyTreeDef
    arrays: tuple[ArraySignature, ...]
    copies: dict[torch.device, _Copy]


_INFOS: dict[int, _MaskInfo] = {}
_CAPTURED: dict[int, _Copy] = {}  # keep-alive: a captured graph may read these copies at any time


def _info_of(mask: Mask) -> _MaskInfo:
    """The _MaskInfo of a Mask, made at the first call for this Mask object."""
    info = _INFOS.get(id(mask))
    if info is None or info.reference() is not mask:
        leaves, structure = jax.tree.flatten(mask)
        number = id(mask)
        _INFOS[number] = info = _MaskInfo(
            reference=weakref.ref(mask, lambda _: _INFOS.pop(number, None)),
            structure=structure,
            arrays=tuple(ArraySignature(x.shape, x.dtype, x.weak_type) for x in leaves),
            copies={},
        )
    return info


def _tensors_of(every: Iterable[_MaskInfo], device: torch.device) -> list[torch.Tensor] | None:
    """The arrays of all these Masks as PyTorch tensors on a GPU, for work on PyTorch's current stream.

    None if PyTorch lacks a dtype, or if a CUDA graph is being captured and there is no earlier copy.
    """
    tensors: list[torch.Tensor] = []
    for info in every:
        if info.arrays:
            found = _read(info, device)
            if found is None:
                return None
            tensors += found
    return tensors


def _read(info: _MaskInfo, device: torch.device) -> list[torch.Tensor] | None:
    """The arrays of one Mask as PyTorch tensors on a GPU, for work on PyTorch's current stream.

    The first call for a device copies them; later streams wait for the copy. None if PyTorch lacks a dtype, or if a
    CUDA graph is being captured and there is no earlier copy.
    """
    is_capturing = dlpack.is_capturing(device)
    stream = torch.cuda.current_stream(device)
    found = info.copies.get(device)
    if found is None:
        if is_capturing:
            return None
        try:
            tensors = dlpack.export_arrays(jax.tree.leaves(info.reference()), device)
        except TypeError:
            return None
        copied = torch.cuda.Event()
        copied.record(stream)
        found = _Copy(tensors=tensors, copied=copied, streams={stream.cuda_stream})
        info.copies[device] = found
    elif is_capturing:  # a capture begins with a wait for all earlier work
        _CAPTURED[id(found)] = found
    elif stream.cuda_stream not in found.streams:
        stream.wait_event(found.copied)
        for x in found.tensors:
            x.record_stream(stream)
        found.streams.add(stream.cuda_stream)
    return found.tensors


def are_immutable(masks: Sequence[Mask]) -> bool:
    """Whether all arrays of the Masks are jax.Arrays, which do not change. Only then may a call be cached."""
    return all(isinstance(x, jax.Array) for mask in masks for x in jax.tree.leaves(mask))


def register_masks(masks: Sequence[Mask], device: torch.device) -> CallMasks:
    """Registers the Masks of one call under a new name, with their arrays on the device.

    Raises ValueError if a tensor that a mask's function read has changed since the mask was made.
    """
    mask_sources.check(masks)
    operands = CallMasks(unique_name("masks"), tuple(on_device(mask, device) for mask in masks))
    with _LOCK:
        _FOUND[operands.name] = operands
    return operands


def register_weak(masks: Sequence[Mask], device: torch.device) -> WeakCallMasks:
    """The WeakCallMasks of these Mask objects on this device, made at the first call for them.

    A cached call, or a graph of torch.compile, holds their name as a constant. Raises ValueError if a tensor that a
    mask's function read has changed since the mask was made.
    """
    mask_sources.check(masks)
    with _LOCK:
        for kept in list(_KEPT.values()):
            if kept.is_of(masks, device):
                return kept
        name = unique_name("masks")
        drop = functools.partial(_drop, _KEPT, name)
        references = tuple(weakref.ref(mask, drop) for mask in masks)
        _KEPT[name] = WeakCallMasks(name=name, device=device, references=references)
        return _KEPT[name]


def _drop(kept: dict[str, WeakCallMasks], name: str, _: weakref.ref[Mask]) -> None:
    kept.pop(name, None)


def masks_by_name(name: str) -> CallMasks | WeakCallMasks:
    """The Masks registered under this name; NO_MASKS for "". Raises RuntimeError if they are gone."""
    if not name:
        return NO_MASKS
    operands = _FOUND.get(name) or _KEPT.get(name)
    if operands is None:
        raise RuntimeError(
            "mask: a graph that calls a function with a Mask runs only in the process that traced it, and only while "
            "the Mask is alive"
        )
    return operands


def on_device(mask: Mask, device: torch.device) -> Mask:
    """The mask with its arrays on the device: the mask itself if the arrays are there, otherwise a copy.

    jax.Arrays are copied once for each device. NumPy arrays and tensors may change, so they are copied each time. For
    the meta device, returns the mask itself. Raises TypeError if JAX traces the arrays, and RuntimeError in a forked
    process if it would have to copy.
    """
    if device.type == "meta":
        return mask
    target = dlpack.jax_device(device)
    leaves = jax.tree.leaves(mask)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise TypeError(
            "mask: got a Mask whose arrays JAX traces, want arrays with values; in jax.jit, call jax_kernels itself"
        )
    is_whole = all(isinstance(x, jax.Array) for x in leaves)
    if is_whole and all(x.devices() == {target} for x in leaves):
        return mask
    fork.refuse()  # a copy never ends in a forked process
    if not is_whole:
        return jax.tree.map(functools.partial(_leaf, device), mask)
    with _LOCK:
        copies = _MOVED.setdefault(mask, {})
        if target not in copies:
            copies[target] = mask_sources.passed_on(mask, jax.device_put(mask, target))
        return copies[target]


def _leaf(device: torch.device, x: torch.Tensor | ArrayLike) -> jax.Array:
    """A copy of a Mask's array, as a jax.Array on the device."""
    if not isinstance(x, torch.Tensor):
        return jax.device_put(checks.array("mask", x, "arrays"), dlpack.jax_device(device))
    dlpack.check_dtype("mask", x.dtype)
    with torch._C._DisableFuncTorch():
        return dlpack.copy_to_jax([torch_operator.unwrapped("mask", x).to(device)], device)[0]
