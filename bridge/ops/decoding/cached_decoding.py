"""Decoding on PyTorch's layout: one query of each sequence against keys and values [B, Hkv, S, D] of a growing cache.

JAX compiles a program for each number of keys. So the keys are padded to one of a few length buckets, and kv_lengths
gives the number of valid keys. The padding ("room": unused memory after the keys of each head) has no effect. A cache
that already has room is read in place. In a compiled graph the cache has a fixed size, and the mask gives the lengths.
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
from jax_kernels.bridge.jax_functions.api import JaxOp
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
    """Returns the attention of one query per sequence to all keys of a cache: [B, 1, H, Dv]. Forward only.

    The cache is read in place if its memory has room for more keys after each head's keys. A contiguous cache is also
    read in place if S is a length bucket, or if the same tensors were given before, as with a cache of fixed size.
    Otherwise the keys and values are copied, with padding to a length bucket. So calls with a growing S share programs.

    Args:
      query: [B, H, 1, D]. key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv].
      mask: bool, True where a query may attend; bias: float, added to the scores. Both are broadcastable to
        [B, H, 1, S], with size S in the last axis.
      sinks: [H], logits that only join the softmax's denominator. scale: multiplies the scores; default 1 / sqrt(D).
      softcap: the scores become softcap * tanh(scores / softcap).
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
    call = _attend.lookup((query, roomy_key, roomy_value, lengths, mask, bias, sinks), (scale, softcap))
    if call and call.cached:
        return call.cached(call.tensors)
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
    """Returns decode_cache's result, [B, 1, H, Dv], in code that torch.compile traces, with a cache of fixed size.

    Args:
      query: [B, H, 1, D]. key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv], where S is the cache's capacity.
      mask: bool, broadcastable to [B, H, 1, S]. Keys after the last key that it allows for a sequence are not read.
        None allows all keys.
      Other arguments: as in decode_cache.

    The number of valid keys depends only on the mask's values, not on a shape or constant of the graph. So the graph
    serves every token.
    """
    four = lambda x: None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)
    mask, bias = four(mask), four(bias)
    lengths = _ends(mask, key)
    return _attend.run(None, query, key, value, lengths, mask, bias, sinks, scale=scale, softcap=softcap)


def _ends(mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor:
    """Returns the number of keys to read for each sequence and key head: int32 [B * Hkv].

    mask: bool, broadcastable to [B, H, 1, S]: the number is 1 + the index of the last key that it allows for any head
    of the sequence. None: S. key: [B, Hkv, S, D].
    """
    batch, heads, room, _ = key.shape
    if mask is None:
        return torch.full((batch * heads,), room, dtype=torch.int32, device=key.device)
    numbers = torch.arange(1, room + 1, dtype=torch.int32, device=key.device)
    ends = torch.where(mask, numbers, 0).amax(dim=(1, 2, 3))
    return ends[:, None].expand(batch, heads).reshape(-1)


class _Folded(NamedTuple):
    """The arguments of jax_kernels.decode_attention, where each key head of each sequence is a batch entry.

    query: [B * Hkv, 1, H / Hkv, D]. key, value: [B * Hkv, S, 1, D or Dv]. kv_lengths: int32 [B * Hkv]. mask, bias: as
    given if they have one head, else [B * Hkv, H / Hkv, 1, S].
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    kv_lengths: jax.Array
    mask: jax.Array | None
    bias: jax.Array | None


def _folded(query, key, value, lengths, mask, bias) -> _Folded:
    """Makes each key head of each sequence a batch entry, in the form of decode_attention's arguments.

    query: [B, H, 1, D]. key, value: [B, Hkv, S, ...]. lengths: int32 [B * Hkv]. mask, bias: 4 axes, broadcastable to
    [B, H, 1, S], or None.
    """
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
    """Returns the attention [B, 1, H, Dv] of one query per sequence, in JAX.

    query: [B, H, 1, D]. key, value: [B, Hkv, S, ...]. lengths: int32 [B * Hkv]. mask, bias: 4 axes or None. sinks: [H]
    or None.
    """
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
    """Returns keys or values together with the unused memory after each head's keys: [B, Hkv, room, D], not a copy.

    room is the number of keys for which a head has memory; the keys after the first S have arbitrary values.

    x: the keys or values [B, Hkv, S, D]. If there is no unused memory, the result is x itself where S is a length
    bucket or the same tensor was given before (a cache of fixed size), else None. It is also None unless the memory has
    the order of a contiguous [B, Hkv, room, D] and ends within the tensor's storage.
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
    """Whether the same tensor object was given in an earlier call, as happens with a cache of fixed size.

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
    """Returns a copy of x [B, Hkv, S, D] padded to the length bucket of S. The padding is not initialised."""
    batch, heads, length, width = x.shape
    larger = x.new_empty(batch, heads, length_buckets.bucket_length(length), width)
    larger.narrow(2, 0, length).copy_(x)
    return larger


def _lengths(length: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns an int32 tensor [count] in which each entry is `length`, cached.

    While a CUDA graph is captured, the tensor is a new one: the graph may outlive the cached tensors.
    """
    if device.type != "cuda":
        return _kept_lengths(length, count, device, 0)
    if torch.cuda.is_current_stream_capturing():
        return torch.full((count,), length, dtype=torch.int32, device=device)
    return _kept_lengths(length, count, device, torch_internals.stream_handle(device.index))


@functools.lru_cache(maxsize=4)  # the layers of a model read the same lengths
def _kept_lengths(length: int, count: int, device: torch.device, stream: int) -> torch.Tensor:
    """Returns an int32 tensor [count] in which each entry is `length`, for work on this CUDA stream (0 on a CPU).

    The stream fills the tensor before the work reads it.
    """
    return torch.full((count,), length, dtype=torch.int32, device=device)


class _Padded(NamedTuple):
    """A padded mask or bias, kept for the next layer that passes the same tensor.

    given: the original tensor. version, address: its PyTorch version counter and data pointer when it was padded.
    stream: the CUDA stream whose work reads the result, 0 on a CPU. result: the padded tensor.
    """

    given: weakref.ref[torch.Tensor]
    version: int
    address: int
    stream: int
    result: torch.Tensor

    def is_of(self, x: torch.Tensor, stream: int) -> bool:
        """Whether the result still holds x's values, for work on this stream.

        Writes that PyTorch counts are detected. PyTorch does not count writes through .data or by other libraries, such
        as NumPy. On the CPU the values are compared, which costs no more than padding. On a GPU these writes are not
        detected.
        """
        is_same = self.given() is x
        if not is_same or (self.version, self.address, self.stream) != (x._version, x.data_ptr(), stream):
            return False
        return x.device.type == "cuda" or torch.equal(_shrunk(x), self.result[..., : x.shape[-1]])


_PADDED: dict[tuple[int, int], _Padded] = {}  # by the id of the original tensor, and the room
_LOCK = threading.Lock()
_MOST_PADDED = 4  # the layers of a model read the same mask


def _padded(x: torch.Tensor, room: int) -> torch.Tensor:
    """Returns a mask or bias with four axes, whose last axis is padded to the cache's capacity `room`.

    Broadcast axes keep size 1. The padding is False or 0. The result is kept for later calls with the same tensor,
    except for inference tensors and while a CUDA graph is captured. A contiguous tensor whose last axis has size `room`
    is returned unchanged.
    """
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
    """Returns a mask or bias with four axes, whose last axis is padded with False or 0 to size `room`."""
    return torch.nn.functional.pad(_shrunk(x), (0, room - x.shape[-1])).contiguous()


def _shrunk(x: torch.Tensor) -> torch.Tensor:
    """Returns the mask or bias with four axes, and with size 1 in axes that torch.Tensor.expand made."""
    return length_buckets.without_expanded_axes(x.reshape((1,) * (4 - x.ndim) + x.shape))
