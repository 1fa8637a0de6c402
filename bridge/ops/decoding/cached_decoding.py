"""Decoding on PyTorch's layout: one query of each sequence against keys and values [B, Hkv, S, D] of a growing cache.

JAX compiles a program for each number of keys. So the keys are read with room behind them, for one of few numbers, and
lengths tell how many count. What stands in the room is without effect. A cache that has such room is read in place.
In a compiled graph the cache is one of a fixed size, and its mask tells the lengths.
"""

import functools
import threading
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jax_kernels import dispatch
from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.jax_functions.api import JaxOp, seen
from jax_kernels.bridge.ops.attention import length_buckets
from jax_kernels.ops.attention import decode_attention as ops

__all__ = ["attend", "attend_in_graph", "with_room"]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """[B, 1, H, Dv]: the attention of one query to all keys. Forward only.

    Args:
      query: [B, H, 1, D]. key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv].
      mask: bool, bias: float; broadcastable to [B, H, 1, S], with all S keys.
      sinks, scale, softcap: as in flash_attention.
    """
    length = key.shape[2]
    roomy_key, roomy_value = with_room(key), with_room(value)
    if roomy_key is None or roomy_value is None or roomy_key.shape[2] != roomy_value.shape[2]:
        roomy_key, roomy_value = _copied_with_room(key), _copied_with_room(value)
    room = roomy_key.shape[2]
    lengths = _lengths(length, key.shape[0] * key.shape[1], query.device)
    if mask is not None:
        mask = _padded(mask, room)
    if bias is not None:
        bias = _padded(bias, room)
    call = seen((query, roomy_key, roomy_value, lengths, mask, bias, sinks), (scale, softcap))
    if (known := _attend.find(call)) is not None:
        return known(call.tensors)
    return _attend.serve(
        call, query, roomy_key, roomy_value, lengths, mask, bias, sinks, scale=scale, softcap=softcap
    )  # fmt: skip


def attend_in_graph(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """attend, in code that torch.compile traces, for all keys that a cache of a fixed size has room for.

    The keys behind the last one that the mask leaves to a sequence are not read. So the graph serves every token: how
    many keys count is in the values of the mask, and no shape or constant of the graph.
    """
    four = lambda x: None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)
    mask, bias = four(mask), four(bias)
    lengths = _ends(mask, key)
    return _attend.serve(None, query, key, value, lengths, mask, bias, sinks, scale=scale, softcap=softcap)


def _ends(mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor:
    """[B * Hkv] int32: behind the last key that a 4-D mask leaves to a sequence; the number of keys without a mask."""
    batch, heads, room, _ = key.shape
    if mask is None:
        return torch.full((batch * heads,), room, dtype=torch.int32, device=key.device)
    numbers = torch.arange(1, room + 1, dtype=torch.int32, device=key.device)
    ends = torch.where(mask, numbers, 0).amax(dim=(1, 2, 3))
    return ends[:, None].expand(batch, heads).reshape(-1)


class _Folded(NamedTuple):
    """The arrays of decode_attention, in which the heads of the keys are part of the batch."""

    query: Any
    key: Any
    value: Any
    kv_lengths: Any
    mask: Any
    bias: Any


def _folded(query, key, value, lengths, mask, bias) -> _Folded:
    batch, heads, _, _ = query.shape
    kv_heads, room = key.shape[1:3]

    def of_scores(x):
        if x is None or x.shape[1] == 1:  # an entry is that of all heads of a sequence, which stand side by side
            return x
        return jnp.broadcast_to(x, (batch, heads, 1, room)).reshape(batch * kv_heads, heads // kv_heads, 1, room)

    return _Folded(
        query=query.reshape(batch * kv_heads, 1, heads // kv_heads, query.shape[-1]),
        key=key.reshape(batch * kv_heads, room, 1, key.shape[-1]),
        value=value.reshape(batch * kv_heads, room, 1, value.shape[-1]),
        kv_lengths=lengths,
        mask=of_scores(mask),
        bias=of_scores(bias),
    )


def _decode(query, key, value, lengths, mask, bias, sinks, *, scale, softcap):
    batch, heads, _, _ = query.shape
    given = _folded(query, key, value, lengths, mask, bias)
    out, lse = ops.decode_attention(**given._asdict(), scale=scale, softcap=softcap, return_lse=True)
    out, lse = out.reshape(batch, 1, heads, -1), lse.reshape(batch, 1, heads, 1)
    if sinks is None:
        return out
    # The sinks join the denominator: exp(lse) / (exp(lse) + exp(sinks)) of the weights is left for the keys.
    left = jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[:, None])
    return jnp.where(lse == -jnp.inf, out, (out * left).astype(out.dtype))


def _plan(query, key, value, lengths, mask, bias, sinks, *, scale, softcap):
    given = jax.eval_shape(_folded, query, key, value, lengths, mask, bias)
    return dispatch.explain(ops.decode_attention, **given._asdict(), scale=scale, softcap=softcap)


_decode.plan = _plan  # type: ignore[attr-defined]
_attend = JaxOp(_decode, is_whole=True)


def with_room(x: torch.Tensor) -> torch.Tensor | None:
    """[B, Hkv, room, D]: the keys or values with what stands behind those of each head in memory.

    None where nothing does, and their number is neither one of the few nor that of a cache which does not grow.
    """
    shape, strides = x.shape, x.stride()
    batch, heads, length, width = shape
    of_batch, of_head, of_key, of_number = strides
    room = of_head // width
    if (of_key, of_number) != (width, 1) or of_head % width or room < length:
        return None
    if batch > 1 and of_batch != heads * of_head:
        return None
    if room == length:
        return x if x.is_contiguous() and (room == length_buckets.bucket(length) or _stays(x)) else None
    whole = x._base  # of a cache with room it is what there is room for, and making a view costs more
    if (
        whole is not None
        and whole.shape == (batch, heads, room, width)
        and whole.stride() == strides
        and whole.dtype == x.dtype
        and whole.data_ptr() == x.data_ptr()
    ):
        return whole
    if (x.storage_offset() + batch * heads * of_head) * x.element_size() > x.untyped_storage().nbytes():
        return None  # the room of the last head would end behind the memory
    return x.as_strided((batch, heads, room, width), (heads * of_head, of_head, width, 1))


_SEEN: dict[int, weakref.ref[torch.Tensor]] = {}  # the keys and values that were last read, by their identity
_MOST_SEEN = 1024


def _stays(x: torch.Tensor) -> bool:
    """Whether the very tensor was read before, as that of a cache whose size is fixed is.

    A cache that grows by a token has another tensor each time. It may stand where that of another sequence stood, which
    was as long.
    """
    seen = _SEEN.get(id(x))
    if seen is not None and seen() is x:
        return True
    _SEEN[id(x)] = weakref.ref(x)
    drop_oldest(_SEEN, _MOST_SEEN)
    return False


def _copied_with_room(x: torch.Tensor) -> torch.Tensor:
    """with_room in new memory."""
    batch, heads, length, width = x.shape
    larger = x.new_empty(batch, heads, length_buckets.bucket(length), width)
    larger.narrow(2, 0, length).copy_(x)
    return larger


def _lengths(length: int, count: int, device: torch.device) -> torch.Tensor:
    """The length, count times. A captured CUDA graph has its own: it may outlive what is kept here."""
    if device.type != "cuda":
        return _kept_lengths(length, count, device, 0)
    if torch.cuda.is_current_stream_capturing():
        return torch.full((count,), length, dtype=torch.int32, device=device)
    return _kept_lengths(length, count, device, torch_internals.stream_handle(device.index))


@functools.lru_cache(maxsize=4)  # the layers of a model ask for the same ones
def _kept_lengths(length: int, count: int, device: torch.device, stream: int) -> torch.Tensor:
    """The lengths for work on this stream, which fills them first."""
    return torch.full((count,), length, dtype=torch.int32, device=device)


class _Padded(NamedTuple):
    """A mask or bias that was padded: for which, in which state, and for the work of which stream."""

    given: weakref.ref[torch.Tensor]
    version: int
    address: int
    stream: int
    result: torch.Tensor

    def is_of(self, x: torch.Tensor, stream: int) -> bool:
        """Whether it still is that of x, for work on this stream.

        PyTorch does not count what is written through .data or by others, such as NumPy. On the CPU the values are
        compared, which costs no more than padding. On a GPU such a write is not seen.
        """
        is_same = self.given() is x
        if not is_same or (self.version, self.address, self.stream) != (x._version, x.data_ptr(), stream):
            return False
        return x.device.type == "cuda" or torch.equal(_shrunk(x), self.result[..., : x.shape[-1]])


_PADDED: dict[tuple[int, int], _Padded] = {}  # by the identity of what was given, and the room
_LOCK = threading.Lock()
_MOST_PADDED = 4  # the layers of a model ask for the same ones


def _padded(x: torch.Tensor, room: int) -> torch.Tensor:
    """The mask or bias for all keys that there is room for, with as few entries as it has values."""
    if x.shape[-1] == room and x.is_contiguous():
        return x
    stream = 0
    if x.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _pad(x, room)
        stream = torch_internals.stream_handle(x.device.index)
    if x.is_inference():  # nobody tells whether it was written to
        return _pad(x, room)
    found, version = _PADDED.get((id(x), room)), x._version
    if found is not None and found.is_of(x, stream):
        return found.result
    kept = _Padded(given=weakref.ref(x), version=version, address=x.data_ptr(), stream=stream, result=_pad(x, room))
    with _LOCK:
        _PADDED.pop((id(x), room), None)
        _PADDED[id(x), room] = kept
        while len(_PADDED) > _MOST_PADDED:
            del _PADDED[next(iter(_PADDED))]
    return kept.result


def _pad(x: torch.Tensor, room: int) -> torch.Tensor:
    return torch.nn.functional.pad(_shrunk(x), (0, room - x.shape[-1])).contiguous()


def _shrunk(x: torch.Tensor) -> torch.Tensor:
    """The mask or bias with four axes, and as few entries as it has values."""
    return length_buckets.shrunk(x.reshape((1,) * (4 - x.ndim) + x.shape))
