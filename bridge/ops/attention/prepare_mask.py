"""prepare_mask for calls on PyTorch tensors."""

import contextlib
from collections.abc import Iterator
from typing import Any, Unpack

import jax
import torch

from jax_kernels.bridge.interop import dlpack, planning_device
from jax_kernels.bridge.interop.arguments.autocast import cast_dtype
from jax_kernels.bridge.interop.arguments.plain_numbers import ATTENTION, plain_of, plain_options
from jax_kernels.bridge.jax_functions.mask_operands import on_device
from jax_kernels.bridge.ops.attention.attention_types import PrepareOptions
from jax_kernels.bridge.translate import mask_sources
from jax_kernels.masks import Mask, PreparedMask
from jax_kernels.ops.attention import prepare_mask as ops

__all__ = ["here", "prepare_mask"]


def prepare_mask(
    mask: Mask,
    query: torch.Tensor | jax.ShapeDtypeStruct,
    key: torch.Tensor | jax.ShapeDtypeStruct,
    value: torch.Tensor | jax.ShapeDtypeStruct | None = None,
    **arguments: Unpack[PrepareOptions],
) -> PreparedMask:
    """Returns the mask with its block lists, made on the tensors' device, for calls of the bridge's attention.

    It waits for the mask's arrays. The lists of another mask, even of the same structure, may have other shapes, and
    JAX then compiles attention again. So prepare a mask for many calls, and pass a mask that changes from call to call
    unprepared.

    Args:
      mask: a masks.Mask.
      query: [B, T, H, D]. key: [B, S, Hkv, D]. value: [B, S, Hkv, Dv], or None for key's shape. Only their shapes,
        dtypes and device are read; autocast changes the dtypes as in a call. They may also be jax.ShapeDtypeStructs, or
        tensors on the meta device: then the lists are made for, and on, JAX's default device.
      arguments: the other arguments of bridge.flash_attention, as in the later calls, without segment_ids and
        kv_lengths: compose masks.segments and masks.prefix into the mask. q_offset: an int. deterministic: None follows
        torch.use_deterministic_algorithms.

    Returns:
      A Mask, as in jax_kernels.prepare_mask. flash_attention takes its lists as data, forward and backward.

    Raises:
      ValueError: the tensors are on several devices, a tensor that the mask's function reads has changed since the mask
        was made, or as in jax_kernels.prepare_mask.
      TypeError, NotImplementedError: as in jax_kernels.prepare_mask.
    """
    named: dict[str, Any] = {**arguments, **plain_options(ATTENTION, arguments)}
    offset = plain_of("offset", named.get("q_offset", 0))
    given = {"query": query, "key": key, "value": value, **named, "q_offset": offset}
    device = None
    for name in ("query", "key", "value", "bias", "sinks"):
        x = given.get(name)
        if isinstance(x, torch.Tensor):
            if device is not None and x.device != device:
                raise ValueError(f"{name}: got a tensor on {x.device}, want the device of the others, {device}")
            device = x.device
            given[name] = _spec(name, x)
    if given.get("deterministic") is None and torch.are_deterministic_algorithms_enabled():
        given["deterministic"] = True
    mask_sources.check([mask])
    with here(None if device is None or device.type == "meta" else device) as place:
        # The JAX function raises for arguments that are no Mask.
        moved = mask if place is None or not isinstance(mask, Mask) else on_device(mask.unprepared, place)
        return ops.prepare_mask(moved, **given)


def _spec(name: str, x: torch.Tensor) -> jax.ShapeDtypeStruct:
    """Returns x's shape and dtype as a jax.ShapeDtypeStruct, with autocast's dtype where a call casts x.

    Raises TypeError, naming the argument, if JAX lacks the dtype.
    """
    stays = name == "sinks" or (name == "bias" and x.dtype == torch.float32)
    dtype = x.dtype if stays else cast_dtype(x)
    dlpack.check_dtype(name, dtype)
    return jax.ShapeDtypeStruct(tuple(x.shape), dlpack.jax_dtype(dtype))


@contextlib.contextmanager
def here(device: torch.device | None) -> Iterator[torch.device | None]:
    """A context manager that makes JAX plan for this device, and create arrays on it, inside the block.

    It yields the device. None leaves JAX's default device.
    """
    if device is None:
        yield None
        return
    with planning_device.planning_on(device), jax.default_device(dlpack.jax_device(device)):
        yield device
