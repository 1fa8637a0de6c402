"""Checks of flash_attention's PyTorch arguments. Errors have the form "argument: got ..., want ...".

The JAX function checks shapes and ranges when an operator is traced.
"""

import sys
from typing import Any

import torch

from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.autocast import under_autocast
from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.jax_functions.argument_checks import check_float, check_tensors
from jax_kernels.bridge.ops.attention.attention_types import SegmentIds
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.masks import Mask

__all__ = [
    "as_torch_is_set",
    "check_inputs",
    "check_statics",
    "check_tensor",
    "checked",
    "constant",
    "segment_pair",
    "window_sides",
]

_INT64 = 2**63  # ints of operators are below this; JAX's own checks are stricter


def check_tensor(name: str, tensor: Any, query: torch.Tensor) -> None:
    """Raises unless the argument is a dense tensor on a CPU, a CUDA device or the meta device, and on query's device.

    Raises TypeError for a value that is no tensor, ValueError for another device or layout. The error names the
    argument.
    """
    check_tensors(**{name: tensor})
    check_dense(name, tensor)
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want one on a CPU or a CUDA device")
    if tensor.device != query.device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, want query's device {query.device}")


def _check_float(name: str, tensor: Any, query: torch.Tensor) -> None:
    """Raises, naming the argument, unless it is a bfloat16, float16 or float32 tensor on query's device."""
    check_tensor(name, tensor, query)
    check_float(name, tensor)


def _check_int32(name: str, tensor: Any, query: torch.Tensor) -> None:
    """Raises, naming the argument, unless it is an int32 tensor on query's device."""
    check_tensor(name, tensor, query)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, want torch.int32; cast it with {name}.to(torch.int32)")


def check_inputs(
    query, key, value, *, bias=None, sinks=None, mask=None, segment_ids=(), kv_lengths=None, q_offset=0
) -> None:
    """Raises, naming the argument, if a tensor of an attention call has a wrong type, dtype or device.

    Shapes are not checked, except that query, key and value have 4 axes. Raises TypeError for a type or dtype,
    ValueError for a device, a layout or a number of axes.

    query, key, value, bias, sinks: floats. mask: bool. segment_ids: (ids of the queries, ids of the keys), int32; an
    entry may be None. kv_lengths: int32. q_offset: an int, or int32.
    """
    dtensors.refuse("this function", query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_float(name, tensor, query)
        if tensor.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, want 4 axes [batch, length, heads, head_dim]")
    if bias is not None:
        check_tensor("bias", bias, query)
        if bias.dtype == torch.bool:
            raise TypeError("bias: got dtype torch.bool, want query's dtype or torch.float32; a bool one is a mask")
        _check_float("bias", bias, query)
    if sinks is not None:
        _check_float("sinks", sinks, query)
    if mask is not None:
        check_tensor("mask", mask, query)
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask: got dtype {mask.dtype}, want torch.bool (True = attend), or torch.float32, torch.bfloat16 or "
                "torch.float16 of 0 and 1; an additive mask is a bias"
            )
    for tensor in segment_ids:
        if tensor is not None:
            _check_int32("segment_ids", tensor, query)
    if kv_lengths is not None:
        _check_int32("kv_lengths", kv_lengths, query)
    if isinstance(q_offset, torch.Tensor):
        _check_int32("q_offset", q_offset, query)
    elif isinstance(q_offset, bool) or not isinstance(q_offset, int | torch.SymInt):
        raise TypeError(f"q_offset: got {type(q_offset).__name__}, want an int or an int32 tensor")
    elif isinstance(q_offset, int) and not -_INT64 <= q_offset < _INT64:
        raise ValueError(f"q_offset: got {q_offset}, want a position within 2**30 of 0")


def checked(given: FlashArguments[torch.Tensor]) -> FlashArguments[torch.Tensor]:
    """Returns the arguments of a call as PyTorch's global settings require, after check_inputs' checks.

    A Mask object is not checked.
    """
    check_inputs(
        given.query,
        given.key,
        given.value,
        bias=given.bias,
        sinks=given.sinks,
        mask=None if isinstance(given.mask, Mask) else given.mask,
        segment_ids=segment_pair(given.segment_ids),
        kv_lengths=given.kv_lengths,
        q_offset=given.q_offset,
    )
    query, key, value, bias, deterministic = as_torch_is_set(
        given.query, given.key, given.value, bias=given.bias, deterministic=given.deterministic
    )
    changed = {"query": query, "key": key, "value": value, "bias": bias, "deterministic": deterministic}
    return FlashArguments(
        **given.by_name() | changed
    )  # dataclasses.replace would add checks to a graph of torch.compile


def check_statics(given: FlashArguments[torch.Tensor]) -> None:
    """Raises, naming the argument, if an attention argument that is no tensor has a wrong type.

    TypeError for a wrong type; ValueError for an int that no float can hold. Names of implementations and precisions
    are not checked.
    """
    for name, flag in (("is_causal", given.is_causal), ("return_lse", given.return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {type(flag).__name__}, want a bool")
    if given.deterministic is not None and not isinstance(given.deterministic, bool):
        raise TypeError(f"deterministic: got {type(given.deterministic).__name__}, want True, False or None")
    for name, number in (("scale", given.scale), ("softcap", given.softcap)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise TypeError(f"{name}: got {type(number).__name__}, want a number")
        if isinstance(number, int) and abs(number) > sys.float_info.max:
            raise ValueError(f"{name}: got an int of {number.bit_length()} bits, want a number in the range of a float")
    for name, choice in (("precision", given.precision), ("implementation", given.implementation)):
        if choice is not None and not isinstance(choice, str):
            raise TypeError(f"{name}: got {type(choice).__name__}, want a name or None")


def as_torch_is_set(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    deterministic: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool | None]:
    """Returns (query, key, value, bias, deterministic) as PyTorch's global settings require.

    Under autocast, query, key, value and a 16-bit bias are cast to autocast's dtype; a float32 bias stays float32, and
    float64 stays float64, as in PyTorch.
    deterministic=None becomes True if torch.use_deterministic_algorithms is on.
    """
    if deterministic is None and torch.are_deterministic_algorithms_enabled():
        deterministic = True
    query, key, value = (under_autocast(x) for x in (query, key, value))
    if bias is not None and bias.dtype != torch.float32:
        bias = under_autocast(bias)
    return query, key, value, bias, deterministic


def constant(x: Any) -> Any:
    """Returns a Python number for a symbolic number of torch.compile, and a tuple or list with its entries converted.

    Other values are returned unchanged. torch.compile then specialises the graph to the number's current value.
    """
    if isinstance(x, torch.SymFloat):
        return float(x)
    if isinstance(x, torch.SymInt):
        return int(x)
    if isinstance(x, torch.SymBool):
        return bool(x)
    return type(x)(map(constant, x)) if type(x) in (tuple, list) else x


def window_sides(window: Any) -> tuple[int, int]:
    """Returns (left, right) from the argument `window`: an int for both sides, a pair, or None. -1 is no limit.

    Raises TypeError for another form or a side that is no int, ValueError for a side that does not fit int64.
    """
    if window is None:
        return -1, -1
    sides = window if isinstance(window, tuple | list) else (window, window)
    whole = all(side is None or (isinstance(side, int) and not isinstance(side, bool)) for side in sides)
    if len(sides) != 2 or not whole:
        raise TypeError(f"window: got {window!r}, want an int, or (left, right) of them; -1 is no limit on that side")
    left, right = (-1 if side is None else side for side in sides)
    if not all(-_INT64 <= side < _INT64 for side in (left, right)):
        raise ValueError(f"window: got {window!r}, want an int from 0 to 2**29, or (left, right) of them")
    return left, right


def segment_pair(segment_ids: SegmentIds | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns (query's ids, key's ids) from the argument `segment_ids`: (None, None) for None.

    One tensor serves as both. Raises ValueError for a tuple or list that is not a pair of tensors.
    """
    if segment_ids is None:
        return None, None
    if not isinstance(segment_ids, tuple | list):
        return segment_ids, segment_ids
    want = "want an int32 tensor [B, T], or a (query, key) pair of them"
    if len(segment_ids) != 2:
        raise ValueError(f"segment_ids: got {len(segment_ids)} items, {want}")
    for part, x in zip(("query", "key"), segment_ids, strict=True):
        if x is None:
            raise ValueError(f"segment_ids: got None for {part}, {want}")
    q_ids, kv_ids = segment_ids
    return q_ids, kv_ids
