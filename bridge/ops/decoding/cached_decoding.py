"""Decoding on PyTorch's layout: one query of each sequence against keys and values [B, Hkv, S, D] of a growing cache.

JAX compiles a program for each number of keys. So the keys are padded to one of a few length buckets, and kv_lengths
gives the number of valid keys. The padding ("room") has no effect. A cache that already has room is read in place. In a
compiled graph the cache has a fixed size, and the mask gives the lengths.
"""

import functools
import threading
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch

from jax_kernels import dispatch
from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.jax_functions.api import JaxOp, call_key
from jax_kernels.bridge.ops.attention import length_buckets
from jax_kernels.ops.attention import decode_attention as ops

__all__ = ["attend_in_graph", "decode_cache", "view_with_capacity"]


def decode_cache(
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
      mask: bool, bias: float; broadcastable to [B, H, 1, S]; the last axis has size S.
      sinks, scale, softcap: as in flash_attention.
    """
    length = key.shape[2]
    roomy_key, roomy_value = view_with_capacity(key), view_with_capacity(value)
    if roomy_key is None or roomy_value is None or roomy_key.shape[2] != roomy_value.shape[2]:
        roomy_key, roomy_value = _copied_with_room(key), _copied_with_room(value)
    room = roomy_key.shape[2]
    lengths = _lengths(length, key.shape[0] * key.shape[1], query.device)
    if mask is not None:
        mask = _padded(mask, room)
    if bias is not None:
        bias = _padded(bias, room)
    call = call_key((query, roomy_key, roomy_value, lengths, mask, bias, sinks), (scale, softcap))
    if (known := _attend.lookup(call)) is not None:
        return known(call.tensors)
    return _attend.run(
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
    """attend, in code that torch.compile traces, over the whole capacity of a fixed-size cache.

    Keys after the last key that the mask allows for a sequence are not read. The number of valid keys depends only on
    the mask's values, not on a shape or constant of the graph. So the graph serves every token.
    """
    four = lambda x: None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)
    mask, bias = four(mask), four(bias)
    lengths = _ends(mask, key)
    return _attend.run(None, query, key, value, lengths, mask, bias, sinks, scale=scale, softcap=softcap)


def _ends(mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor:
    """[B * Hkv] int32: 1 + the last key that a 4-D mask allows for a sequence; without a mask, the number of keys."""
    batch, heads, room, _ = key.shape
    if mask is None:
        return torch.full((batch * heads,), room, dtype=torch.int32, device=key.device)
    numbers = torch.arange(1, room + 1, dtype=torch.int32, device=key.device)
    ends = torch.where(mask, numbers, 0).amax(dim=(1, 2, 3))
    return ends[:, None].expand(batch, heads).reshape(-1)


class _Folded(NamedTuple):
    """The arrays of decode_attention, with the key heads folded into the batch."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    kv_lengths: jax.Array
    mask: jax.Array | None
    bias: jax.Array | None


def _folded(query, key, value, lengths, mask, bias) -> _Folded:
    batch, heads, _, _ = query.shape
    kv_heads, room = key.shape[1:3]

    def of_scores(x):
        if x is None or x.shape[1] == 1:  # an entry serves all heads of a sequence; they are adjacent
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
    # The sinks join the denominator: the keys' weights are multiplied by exp(lse) / (exp(lse) + exp(sinks)).
    left = jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[:, None])
    return jnp.where(lse == -jnp.inf, out, (out * left).astype(out.dtype))


def _plan(query, key, value, lengths, mask, bias, sinks, *, scale, softcap):
    given = jax.eval_shape(_folded, query, key, value, lengths, mask, bias)
    return dispatch.explain(ops.decode_attention, **given._asdict(), scale=scale, softcap=softcap)


_decode.plan = _plan  # type: ignore[attr-defined]
_attend = JaxOp(_decode, is_opaque=True)


def view_with_capacity(x: torch.Tensor) -> torch.Tensor | None:
    """[B, Hkv, room, D]: the keys or values, with the unused memory after each head.

    None if there is no unused memory, unless the length is a length bucket or the cache does not grow.
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
        return x if x.is_contiguous() and (room == length_buckets.bucket_length(length) or _is_fixed_size(x)) else None
    whole = x._base  # the whole cache, if the cache has room; a new view costs more
    if (
        whole is not None
        and whole.shape == (batch, heads, room, width)
        and whole.stride() == strides
        and whole.dtype == x.dtype
        and whole.data_ptr() == x.data_ptr()
    ):
        return whole
    if (x.storage_offset() + batch * heads * of_head) * x.element_size() > x.untyped_storage().nbytes():
        return None  # the room of the last head would end after the storage
    return x.as_strided((batch, heads, room, width), (heads * of_head, of_head, width, 1))


_SEEN: dict[int, weakref.ref[torch.Tensor]] = {}  # the keys and values that were last read, by id
_MOST_SEEN = 1024


def _is_fixed_size(x: torch.Tensor) -> bool:
    """Whether this tensor object was read before, as happens with a cache of fixed size.

    A cache that grows by a token has a new tensor each time. The new tensor may have the memory of an earlier sequence
    of the same length, so tensor objects are compared.
    """
    seen = _SEEN.get(id(x))
    if seen is not None and seen() is x:
        return True
    _SEEN[id(x)] = weakref.ref(x)
    drop_oldest(_SEEN, _MOST_SEEN)
    return False


def _copied_with_room(x: torch.Tensor) -> torch.Tensor:
    """A copy with room, padded to the length bucket."""
    batch, heads, length, width = x.shape
    larger = x.new_empty(batch, heads, length_buckets.bucket_length(length), width)
    larger.narrow(2, 0, length).copy_(x)
    return larger


def _lengths(length: int, count: int, device: torch.device) -> torch.Tensor:
    """The length, `count` times. A captured CUDA graph gets its own tensor: it may outlive the kept tensors."""
    if device.type != "cuda":
        return _kept_lengths(length, count, device, 0)
    if torch.cuda.is_current_stream_capturing():
        return torch.full((count,), length, dtype=torch.int32, device=device)
    return _kept_lengths(length, count, device, torch_internals.stream_handle(device.index))


@functools.lru_cache(maxsize=4)  # the layers of a model read the same lengths
def _kept_lengths(length: int, count: int, device: torch.device, stream: int) -> torch.Tensor:
    """The lengths for work on this stream. The stream fills the tensor before the work reads it."""
    return torch.full((count,), length, dtype=torch.int32, device=device)


class _Padded(NamedTuple):
    """A padded mask or bias (`result`): the original tensor, its state, and the stream whose work reads the result."""

    given: weakref.ref[torch.Tensor]
    version: int
    address: int
    stream: int
    result: torch.Tensor

    def is_of(self, x: torch.Tensor, stream: int) -> bool:
        """Whether the result is still valid for x, for work on this stream.

        PyTorch does not count writes through .data or by other libraries, such as NumPy. On the CPU the values are
        compared, which costs no more than padding. On a GPU these writes are not detected.
        """
        is_same = self.given() is x
        if not is_same or (self.version, self.address, self.stream) != (x._version, x.data_ptr(), stream):
            return False
        return x.device.type == "cuda" or torch.equal(_shrunk(x), self.result[..., : x.shape[-1]])


_PADDED: dict[tuple[int, int], _Padded] = {}  # by the id of the original tensor, and the room
_LOCK = threading.Lock()
_MOST_PADDED = 4  # the layers of a model read the same mask


def _padded(x: torch.Tensor, room: int) -> torch.Tensor:
    """Pads a mask or bias to the cache's capacity; broadcast axes keep size 1."""
    if x.shape[-1] == room and x.is_contiguous():
        return x
    stream = 0
    if x.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _pad(x, room)
        stream = torch_internals.stream_handle(x.device.index)
    if x.is_inference():  # PyTorch does not count writes to an inference tensor
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
    """The mask or bias with four axes; expanded axes get size 1."""
    return length_buckets.without_expanded_axes(x.reshape((1,) * (4 - x.ndim) + x.shape))
