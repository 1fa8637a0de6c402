"""decode_attention: a few new queries per sequence with a long cache of keys and values, contiguous or in pages."""

import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Integer

from jax_kernels import dispatch
from jax_kernels.masks import Mask
from jax_kernels.masks.limits import without_band
from jax_kernels.ops import checks
from jax_kernels.ops.attention.checks import checked_bias, checked_mask
from jax_kernels.ops.attention.decode_implementations import OP, DecodeArrays, DecodeOptions, DecodeRequest, decode
from jax_kernels.ops.attention.traced_masks import mask_or_nan
from jax_kernels.ops.sharding.explicit_axes import as_attention, with_explicit_axes
from jax_kernels.plain_numbers import with_plain_numbers
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["MOST_QUERIES", "SMALLEST_PAGE", "decode_attention"]

MOST_QUERIES = 16
SMALLEST_PAGE = 16


@overload
def decode_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"] | Float[Array, "pages page_size Hkv D"],
    value: Float[Array, "B S Hkv Dv"] | Float[Array, "pages page_size Hkv Dv"],
    *,
    kv_lengths: Integer[Array, " B"] | None = ...,
    block_tables: Integer[Array, "B max_pages"] | None = ...,
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask | None = ...,
    bias: Float[Array, "*#BHTS"] | None = ...,
    window: int | tuple[int, int] | None = ...,
    softcap: float | None = ...,
    sinks: Float[Array, " H"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    return_lse: Literal[False] = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"]: ...
@overload
def decode_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"] | Float[Array, "pages page_size Hkv D"],
    value: Float[Array, "B S Hkv Dv"] | Float[Array, "pages page_size Hkv Dv"],
    *,
    kv_lengths: Integer[Array, " B"] | None = ...,
    block_tables: Integer[Array, "B max_pages"] | None = ...,
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask | None = ...,
    bias: Float[Array, "*#BHTS"] | None = ...,
    window: int | tuple[int, int] | None = ...,
    softcap: float | None = ...,
    sinks: Float[Array, " H"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    return_lse: Literal[True],
    implementation: str | None = ...,
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@overload
def decode_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"] | Float[Array, "pages page_size Hkv D"],
    value: Float[Array, "B S Hkv Dv"] | Float[Array, "pages page_size Hkv Dv"],
    *,
    kv_lengths: Integer[Array, " B"] | None = ...,
    block_tables: Integer[Array, "B max_pages"] | None = ...,
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask | None = ...,
    bias: Float[Array, "*#BHTS"] | None = ...,
    window: int | tuple[int, int] | None = ...,
    softcap: float | None = ...,
    sinks: Float[Array, " H"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    return_lse: bool = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@with_plain_numbers("window", "softcap", "scale", "return_lse")
@with_explicit_axes(as_attention)
@under_defaults
@jax.named_scope("decode_attention")
def decode_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"] | Float[Array, "pages page_size Hkv D"],
    value: Float[Array, "B S Hkv Dv"] | Float[Array, "pages page_size Hkv Dv"],
    *,
    kv_lengths: Integer[Array, " B"] | None = None,
    block_tables: Integer[Array, "B max_pages"] | None = None,
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask | None = None,
    bias: Float[Array, "*#BHTS"] | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """Attention of the newest 1 to 16 tokens of each sequence to its cache of keys and values. Forward only.

    Equivalent to the following JAX code (with key and value repeated for grouped heads)::

        if block_tables is not None:  # [B, pages] numbers -> [B, pages * page_size, Hkv, D]
            key, value = (x[block_tables].reshape(B, -1, *x.shape[2:]) for x in (key, value))
        position = (kv_lengths[:, None] - T + arange(T))[:, None, :, None]
        scores = jnp.einsum("bthd,bshd->bhts", query, key).astype(float32) * scale
        scores = softcap * tanh(scores / softcap) if softcap else scores
        scores = scores + bias
        keep = (arange(S) <= position) & (arange(S) >= position - left) & mask  # left: the window's
        scores = where(keep, scores, -inf)
        lse = logaddexp(logsumexp(scores, axis=-1), sinks[:, None])
        out = jnp.einsum("bhts,bshd->bthd", exp(scores - lse[..., None]), value)

    Query heads that share a key head read it together, once. If there are fewer sequences and heads than SMs, the keys
    of a sequence are cut into splits, whose results are merged by their log-sum-exp. Values of the cache past a length
    have no effect, not even NaN. Only "xla" copies the cache.

    The batch, the queries, the heads, the keys, the pages and the pages of a sequence may be 0, as in flash_attention.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32 (only "xla"); T up to 16, D up to 256.
      key: [B, S, Hkv, D] in query's dtype, Hkv dividing H; it already contains the T new tokens' keys. With
        block_tables: [pages, page_size, Hkv, D], page_size a power of two from 16 on.
      value: [B, S, Hkv, Dv] in query's dtype, Dv up to 256; with block_tables [pages, page_size, Hkv, Dv].
      kv_lengths: [B] int32, the number of keys of each sequence, including the T new keys; below 0 it counts as 0 and
        above S as S. None: S for all. Query i of a sequence of length L has position L - T + i and attends to the keys
        up to this position; if it is below 0, to no key.
      block_tables: [B, max_pages] int32, the indices of each sequence's pages, in order. Entries past the sequence's
        length are never read. All other entries are valid pages, even if a window leaves them out. Needs kv_lengths; S
        is max_pages * page_size.
      mask: bool, broadcastable to [B, H, T, S], True where a query may attend; floats of 0 and 1 are taken too, unless
        JAX traces them. Its first axis may be any divisor n of B: each entry is then for B / n consecutive sequences,
        e.g. if the key heads are part of the batch. Or a masks.Mask, which is first converted to an array, with the
        queries at their positions; its causal and sliding_window parts joined by `&` become the window. A block of keys
        is not read if no query of a key head's group keeps one of its keys.
      bias: broadcastable to [B, H, T, S] like mask, in query's dtype or float32, added to the scores after softcap.
        -inf leaves a key out. A bias [1, H, 1, S] is ALiBi's.
      window: (left, right), or an int for both: a query at position p attends to keys from p - left on. -1 or None is
        no limit. The right side has no effect: no query attends to keys after its own. At most 2**29.
      softcap: a number above 0: the scores become softcap * tanh(scores / softcap).
      sinks: [H], bfloat16, float16 or float32: logits that are added only to the softmax's denominator. -inf is no
        sink.
      scale: a number, multiplies the scores; default 1 / sqrt(D). Or a traced float [], as in flash_attention.
      return_lse: also return the log-sum-exp of the scores, including the sink.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T] in natural log. A query
      that attends to no key has out = 0 and lse = -inf; with sinks, lse is the sink.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call (the message has the reason), or a gradient is
        taken.

    Source: Dao et al., "Flash-Decoding for long-context inference" (2023); Kwon et al., "Efficient Memory Management
    for Large Language Model Serving with PagedAttention" (2023), arXiv:2309.06180.
    """
    request, arrays = _check(
        query=query,
        key=key,
        value=value,
        kv_lengths=kv_lengths,
        block_tables=block_tables,
        mask=mask,
        bias=bias,
        window=window,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        return_lse=return_lse,
        implementation=implementation,
    )
    query, scale = checks.with_positive_scale(arrays.query, scale)
    left = -1 if request.window is None else request.window[0]
    options = DecodeOptions(scale=scale, softcap=request.softcap, left=left)
    arrays = arrays._replace(query=query)
    call, arrays = OP.tuned(
        OP.call(request, options, implementation),
        request,
        decode,
        arrays,
        implementation,
        lengths={"kv_lengths": request.kv_length},
        reason=_why_not_tuned(arrays),
    )
    results = decode(call, arrays)
    out, lse = mask_or_nan(results, mask.is_valid if isinstance(mask, Mask) else None)
    return (out, lse) if return_lse else out


def _why_not_tuned(arrays: DecodeArrays) -> str | None:
    """Why a call cannot be tuned; None if it can. Random numbers of pages would not take the time of real ones."""
    is_traced = isinstance(arrays.block_tables, jax.core.Tracer | jax.ShapeDtypeStruct)
    return "block_tables: got a traced array, want a known one" if is_traced else None


def _check(
    *,
    query,
    key,
    value,
    kv_lengths,
    block_tables,
    mask,
    bias,
    window,
    softcap,
    sinks,
    scale,
    return_lse,
    implementation,
) -> tuple[DecodeRequest, DecodeArrays]:
    """(request, arrays in the kernels' form) of a call. Raises the errors that decode_attention documents."""
    query, key, value = (
        checks.checked_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    _check_shapes(query, key, value, is_paged=block_tables is not None)
    batch, q_length, heads, head_dim = query.shape
    checks.check_scale("scale", scale)
    checks.check_softcap(softcap)
    checks.check_names(implementation=implementation)
    checks.check_flags(return_lse=return_lse)
    mask, window = _without_window(mask, checks.checked_window(window, True)[1])
    sinks = checks.checked_sinks(sinks, heads)

    capacity, page_size = key.shape[1], None
    if block_tables is not None:
        block_tables = _tables(block_tables, batch)
        capacity, page_size = block_tables.shape[1] * key.shape[1], key.shape[1]
        if kv_lengths is None:
            raise ValueError("kv_lengths: got None with block_tables, want [batch] int32: the number of keys of each")
    kv_lengths = checks.checked_lengths(kv_lengths, batch)
    scores = lambda x: (_entries_of(x, batch), heads, q_length, capacity)
    mask = _keys_of(checked_mask(mask, scores(mask)), kv_lengths, q_length, capacity)
    bias = _keys_of(checked_bias(bias, scores(bias), query.dtype), kv_lengths, q_length, capacity)
    if kv_lengths is None:
        kv_lengths = jnp.full((batch,), capacity, jnp.int32)
    if sinks is not None and not isinstance(sinks, jax.ShapeDtypeStruct):
        sinks = jnp.broadcast_to(sinks, (batch, heads))

    request = DecodeRequest(
        op="decode_attention",
        device=dispatch.target_device(query),
        batch=batch,
        q_length=q_length,
        kv_length=capacity,
        heads=heads,
        kv_heads=key.shape[2],
        head_dim=head_dim,
        v_head_dim=value.shape[3],
        dtype=str(query.dtype),
        page_size=page_size,
        pages=None if page_size is None else key.shape[0],
        window=window,
        softcap=None if softcap is None else float(softcap),
        has_sinks=sinks is not None,
        has_mask=mask is not None,
        mask_size=0 if mask is None else math.prod(mask.shape),
        mask_rows=0 if mask is None else math.prod(mask.shape[1:3]),
        has_bias=bias is not None,
    )
    arrays = DecodeArrays(
        query=query,
        key=key,
        value=value,
        kv_lengths=kv_lengths,
        block_tables=block_tables,
        sinks=sinks,
        mask=mask,
        bias=bias,
    )
    return request, arrays


def _entries_of(x: Any, batch: int) -> int:
    """The batch size that a mask or bias is checked against: its own, if it is a divisor of the batch above 1.

    Each of its entries is then for several consecutive sequences. Else `batch`, also for None and for a Mask.
    """
    shape: tuple[int, ...] = () if x is None or isinstance(x, Mask) else getattr(x, "shape", ())
    return shape[0] if batch and len(shape) == 4 and shape[0] not in (0, 1) and batch % shape[0] == 0 else batch


def _without_window(mask: Any, window: tuple[int, int] | None) -> tuple[Any, tuple[int, int] | None]:
    """(mask, window) where the causal and sliding_window parts of a Mask are limits of the window.

    window: (left, 0), or None. No query attends to keys after its own, whatever the right side. The mask is None if no
    other part is left.
    """
    if not isinstance(mask, Mask):
        return mask, window
    mask, left, _ = without_band(mask, None if window is None else window[0], 0)
    return mask, None if left is None else (left, 0)


def _keys_of(x: Any, kv_lengths: Any, q_length: int, capacity: int) -> Any:
    """A checked mask or bias as an array [B or 1, H or 1, T or 1, capacity]; None stays None.

    A Mask becomes an array with the queries at their positions: the last query of a sequence has position
    kv_lengths - 1, with kv_lengths clipped to 0 ... capacity; None is capacity for all sequences. If an array of the
    Mask or kv_lengths is a jax.ShapeDtypeStruct, so is the result.
    """
    if isinstance(x, Mask):
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in (*jax.tree.leaves(x), kv_lengths)):
            return jax.ShapeDtypeStruct((x.batch, x.heads, q_length, capacity), bool)
        last = capacity if kv_lengths is None else jnp.clip(kv_lengths, 0, capacity)
        return x.unprepared.to_dense(q_length, capacity, q_offset=last - q_length)
    if x is None or x.shape[3] == capacity:
        return x
    shape = (*x.shape[:3], capacity)
    return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.broadcast_to(x, shape)


def _check_shapes(query: Any, key: Any, value: Any, *, is_paged: bool) -> None:
    """Checks the shapes and dtypes of query, key and value. Raises ValueError or TypeError. is_paged: key has pages."""
    axes = "[pages, page_size, heads, head_dim]" if is_paged else checks.HEADS
    for name, x in (("query", query), ("key", key), ("value", value)):
        checks.check_heads(name, x, query.dtype, checks.HEADS if name == "query" else axes)
    batch, q_length, heads, head_dim = query.shape
    if q_length > MOST_QUERIES:
        raise ValueError(
            f"query: got {q_length} queries per sequence, want up to {MOST_QUERIES}: flash_attention takes more"
        )
    if key.shape[3] != head_dim:
        raise ValueError(f"key: got head_dim {key.shape[3]}, want query's head_dim {head_dim}")
    checks.check_groups(heads, key.shape[2])
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value: got shape {value.shape}, want key's {key.shape[:3]} in the first three axes")
    if not is_paged and key.shape[0] != batch:
        raise ValueError(f"key: got batch {key.shape[0]}, want query's batch {batch}")
    page_size = key.shape[1]
    if is_paged and (page_size < SMALLEST_PAGE or page_size & (page_size - 1)):
        raise ValueError(f"key: got pages of {page_size} keys, want a power of two from {SMALLEST_PAGE} on")


def _tables(block_tables: Any, batch: int) -> Any:
    tables = checks.checked_integers("block_tables", block_tables, "an int32 array [batch, pages]")
    if len(tables.shape) != 2 or tables.shape[0] != batch:
        raise ValueError(f"block_tables: got shape {tables.shape}, want [batch, pages] with batch {batch}")
    return tables


OP.explained_by(_check)(decode_attention)
