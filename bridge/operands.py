"""The Masks of a call, whose arrays are JAX's already and stay so.

As tensors they would be copied to memory that PyTorch owns (see dlpack). Instead they go past PyTorch's operators,
which take only the name under which the Masks of a call are found.
"""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import torch

from jax_kernels.bridge import dlpack, library
from jax_kernels.bridge.once import fresh_name
from jax_kernels.masks import Mask, checks

__all__ = ["NONE", "MaskSignature", "Operands", "found", "on_device", "operands_of"]


class ArraySignature(NamedTuple):
    """An array of a Mask without its values."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool


class MaskSignature(NamedTuple):
    """The Masks of a call without their values, for which a program is compiled: their structure, and each array."""

    structure: Any
    arrays: tuple[ArraySignature, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Operands:
    """The Masks of a call. They are found by the name as long as somebody holds this object; no Masks have name ""."""

    name: str
    masks: tuple[Mask, ...]

    @property
    def signature(self) -> MaskSignature:
        leaves, structure = jax.tree.flatten(self.masks)
        return MaskSignature(structure, tuple(ArraySignature(x.shape, x.dtype, x.weak_type) for x in leaves))


NONE = Operands("", ())
_FOUND: weakref.WeakValueDictionary[str, Operands] = weakref.WeakValueDictionary()
# Copies by Mask and device. Equal Masks hold the very same arrays, which never change.
_MOVED: weakref.WeakKeyDictionary[Mask, dict[jax.Device, Mask]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()  # guards _FOUND and _MOVED


def operands_of(masks: Sequence[Mask], device: torch.device) -> Operands:
    """Registers the masks, with their arrays on the device, under a new name."""
    operands = Operands(fresh_name("masks"), tuple(on_device(mask, device) for mask in masks))
    with _LOCK:
        _FOUND[operands.name] = operands
    return operands


def found(name: str) -> Operands:
    """The operands of that name, as long as somebody holds them."""
    if not name:
        return NONE
    operands = _FOUND.get(name)
    if operands is None:
        raise RuntimeError(
            "mask: a graph that calls a function with a Mask runs only in the process that traced it, and only while "
            "the traced call is alive"
        )
    return operands


def on_device(mask: Mask, device: torch.device) -> Mask:
    """The mask with its arrays on the device: the mask itself if they are there, else a copy.

    jax.Arrays are copied once. NumPy arrays and tensors may change, and are copied each time.
    """
    target = dlpack.jax_device(device)
    leaves = jax.tree.leaves(mask)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise TypeError(
            "mask: got a Mask whose arrays JAX traces, want known ones; in jax.jit, call jax_kernels itself"
        )
    if not all(isinstance(x, jax.Array) for x in leaves):
        return jax.tree.map(functools.partial(_leaf, device), mask)
    if all(x.devices() == {target} for x in leaves):
        return mask
    with _LOCK:
        copies = _MOVED.setdefault(mask, {})
        if target not in copies:
            copies[target] = jax.device_put(mask, target)
        return copies[target]


def _leaf(device: torch.device, x: Any) -> jax.Array:
    if not isinstance(x, torch.Tensor):
        return jax.device_put(checks.array("mask", x, "arrays"), dlpack.jax_device(device))
    dlpack.check_dtype("mask", x.dtype)
    with torch._C._DisableFuncTorch():
        return dlpack.copied([library.unwrapped("mask", x).to(device)], device)[0]
