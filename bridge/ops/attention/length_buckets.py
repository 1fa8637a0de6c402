"""Reduces the number of programs that JAX compiles for calls of many forms.

JAX compiles a program for each set of shapes and constants. Three changes of a call's arguments let calls share one:

- Where the number of keys grows from call to call, as in a cache, keys are padded to a length bucket, one of four
lengths in each octave. kv_lengths excludes the padding; the padding of a mask or a bias has no effect. Only calls of
few queries without gradients are padded, from the third number of keys on.
- Where q_offset has many values, it becomes a tensor.
- A mask or a bias that was expanded is read with an axis of size 1.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from jax_kernels.inputs.attention import FlashArguments

if TYPE_CHECKING:
    from jax_kernels.bridge.ops.attention.flash_attention_operator import Arguments

__all__ = ["canonicalized", "pad_to_bucket", "without_expanded_axes"]

_MOST_QUERIES = 16
_LENGTHS = 3  # from the third length on keys are padded; after three values q_offset becomes a tensor
_SHORTEST = 128
_SEEN: dict[Hashable, set[int]] = {}
_LOCK = threading.Lock()
_MOST = 1024


def pad_to_bucket(given: FlashArguments[torch.Tensor], others: Hashable) -> FlashArguments[torch.Tensor] | None:
    """Returns the arguments with keys padded to a length bucket; None if the call is to run unpadded.

    In the result, key and value, and a bias or mask with an axis of keys, have the bucket's length. kv_lengths and
    q_offset are tensors; kv_lengths masks the padding.

    None if there are more than 16 queries, if the call was made with fewer than three numbers of keys so far (this one
    counts), or if the arguments have this form already: the number of keys is a length bucket, kv_lengths is given, and
    q_offset is a tensor.

    given: the arguments of a call without segment ids. others: the call's other options. Calls that are equal in these,
    and in dtypes, device and shapes but for the number of keys, count as one call.
    """
    query, kv_lengths, q_offset = given.query, given.kv_lengths, given.q_offset
    length = given.key.shape[1]
    if query.shape[1] > _MOST_QUERIES:
        return None
    size = bucket_length(length)
    is_padded = size == length and kv_lengths is not None and isinstance(q_offset, torch.Tensor)
    if is_padded or not _has_growing_length(given, others):
        return None
    if kv_lengths is None:
        kv_lengths = torch.full((query.shape[0],), length, dtype=torch.int32, device=query.device)
    else:
        kv_lengths = kv_lengths.clamp(max=length)
    if not isinstance(q_offset, torch.Tensor):
        q_offset = torch.full((), q_offset, dtype=torch.int32, device=query.device)
    rows = lambda x: x if size == length else functional.pad(x, (0, 0, 0, 0, 0, size - length))
    columns: Callable[[Any], torch.Tensor | None] = lambda x: (
        x if x is None or x.shape[-1] != length or length == 1 else functional.pad(x, (0, size - length))
    )
    return dataclasses.replace(
        given,
        key=rows(given.key),
        value=rows(given.value),
        bias=columns(given.bias),
        mask=columns(given.mask),
        kv_lengths=kv_lengths,
        q_offset=q_offset,
    )


def bucket_length(length: int) -> int:
    """Returns the smallest length bucket that is at least `length`. Buckets: 128, and four lengths per octave above it.

    The lengths are multiples of a quarter of the largest power of two below `length`: 128, 160, 192, 224, 256, 320, ...
    """
    if length <= _SHORTEST:
        return _SHORTEST
    step = 2 ** (math.ceil(math.log2(length)) - 3)
    return -(-length // step) * step


def _has_growing_length(given: FlashArguments[torch.Tensor], others: Hashable) -> bool:
    """Whether this call was made with at least three numbers of keys, including this call's number, which it records.

    Calls are the same if they differ only in the number of keys, and in values. others: the rest of the call's key.
    """
    first: Callable[[Any], Hashable] = lambda x: None if x is None else tuple(x.shape[:-1])
    query, has_offset = given.query, isinstance(given.q_offset, torch.Tensor)
    call = (
        *(query.shape, given.key.shape[2:], given.value.shape[2:], query.dtype, query.device),
        *(first(given.bias), first(given.mask), given.kv_lengths is None, has_offset, others),
    )
    length = given.key.shape[1]
    with _LOCK:
        lengths = _SEEN.setdefault(call, set())
        if len(lengths) < _LENGTHS:
            lengths.add(length)
        while len(_SEEN) > _MOST:
            del _SEEN[next(iter(_SEEN))]
        return len(lengths) == _LENGTHS


_OFFSETS: dict[Hashable, set[int]] = {}


def canonicalized(call: "Arguments", shrinking: Sequence[str]) -> "Arguments":
    """Returns an operator's arguments, changed so that more calls share a program. The program reads the result.

    q_offset is a tensor if the call was made with more than three values of it. A bias or mask that was expanded along
    an axis has size 1 there. key and value have one head if both were expanded from one head.

    shrinking: the names, among bias, mask, key and value, of tensors that may be changed in this way.
    """
    tensors, options = call.tensors, call.options
    changed: dict[str, Any] = {
        name: without_expanded_axes(getattr(tensors, name)) for name in ("bias", "mask") if name in shrinking
    }
    if "key" in shrinking and "value" in shrinking and _is_one_head(tensors.key) and _is_one_head(tensors.value):
        changed |= {name: getattr(tensors, name).narrow(2, 0, 1) for name in ("key", "value")}
    changed = {name: x for name, x in changed.items() if x is not getattr(tensors, name)}
    if changed:
        call = call._replace(tensors=tensors._replace(**changed))
    if tensors.q_offset is not None or not _has_many(call):
        return call
    offset = torch.full((), options.q_offset, dtype=torch.int32, device=tensors.query.device)
    return call._replace(tensors=call.tensors._replace(q_offset=offset), options=options._replace(q_offset=0))


def _has_many(call: "Arguments") -> bool:
    """Whether this call was made with more than three values of q_offset, including its own, which is recorded."""
    key = (
        call.options._replace(q_offset=0),
        call.backward is None,
        *[None if x is None else x.shape for x in call.tensors],
    )
    offset = call.options.q_offset
    seen = _OFFSETS.get(key)
    if seen is not None and offset in seen and len(seen) <= _LENGTHS:
        return False
    with _LOCK:
        seen = _OFFSETS.setdefault(key, set())
        if len(seen) <= _LENGTHS:
            seen.add(offset)
        while len(_OFFSETS) > _MOST:
            del _OFFSETS[next(iter(_OFFSETS))]
        return len(seen) > _LENGTHS


def without_expanded_axes(x: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the tensor with size 1 in each axis that torch.Tensor.expand made (stride 0); None for None."""
    if x is None or 0 not in x.stride():
        return x
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(axis, 0, 1)
    return x


def _is_one_head(x: torch.Tensor) -> bool:
    """Whether x [B, S, Hkv, D] has several heads, all expanded from one head."""
    return x.shape[2] > 1 and x.stride(2) == 0
