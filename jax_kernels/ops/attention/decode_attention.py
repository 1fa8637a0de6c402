"""decode_attention: a few new queries per sequence with a long cache of keys and values, contiguous or in pages."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Integer

from jax_kernels import dispatch
from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.masks import Mask
from jax_kernels.ops import checks, unsupported
from jax_kernels.ops.attention.checks import checked_bias, checked_mask
from jax_kernels.ops.attention.partitioning import BATCH, HEADS, by_heads
from jax_kernels.ops.attention.traced_masks import mask_or_nan
from jax_kernels.ops.planned_op import Blocks, PlannedCall, PlannedOp, batched, join_batch, kernel
from jax_kernels.ops.sharding.explicit_axes import as_attention, with_explicit_axes
from jax_kernels.ops.sharding.partitioning import Axis, Shares, is_partitioned, partitioned
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.attention.sm90.decode import launch as decode_sm90
from jax_kernels.pallas.attention.triton import decode as decode_triton
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.plain_numbers import with_plain_numbers
from jax_kernels.reference import decode_attention as reference
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["IMPLEMENTATIONS", "DecodeRequest", "decode_attention"]

MOST_QUERIES = 16
SMALLEST_PAGE = 16


@dataclasses.dataclass(frozen=True)
class DecodeRequest(Request):
    """A decode_attention call without its arrays.

    kv_length: the capacity of a sequence, in keys. page_size: the keys of a page; pages: the number of pages of the
    whole cache; both None if the keys of a sequence are contiguous. window: (left, 0), or None. mask_size: the number
    of elements of the mask's array; 0 without a mask.
    """

    SIZES: ClassVar[tuple[str, ...]] = (*checks.SIZES, "pages")

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    page_size: int | None
    pages: int | None
    window: tuple[int, int] | None
    softcap: float | None
    has_sinks: bool
    has_mask: bool
    mask_size: int
    has_bias: bool


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """The numbers of a call that are constants of its kernels.

    scale: the factor of the scores, above 0. softcap: above 0, or None. left: a query at position p attends to keys
    from p - left on; -1 is no limit.
    """

    scale: float
    softcap: float | None
    left: int


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
    scale: float | None = ...,
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
    scale: float | None = ...,
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
    scale: float | None = ...,
    return_lse: bool = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@with_plain_numbers("window", "softcap", "scale", "return_lse")
@with_explicit_axes(as_attention)
@under_defaults
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
    scale: float | None = None,
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
        queries at their positions. Keys that a mask leaves out are still read: to leave out long ranges of keys, use
        kv_lengths and window.
      bias: broadcastable to [B, H, T, S] like mask, in query's dtype or float32, added to the scores after softcap.
        -inf leaves a key out. A bias [1, H, 1, S] is ALiBi's.
      window: (left, right), or an int for both: a query at position p attends to keys from p - left on. -1 or None is
        no limit. The right side has no effect: no query attends to keys after its own. At most 2**29.
      softcap: a number above 0: the scores become softcap * tanh(scores / softcap).
      sinks: [H], bfloat16, float16 or float32: logits that are added only to the softmax's denominator. -inf is no
        sink.
      scale: a number, multiplies the scores; default 1 / sqrt(D).
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
    results = _decode(OP.call(request, options, implementation), arrays._replace(query=query))
    out, lse = mask_or_nan(results, mask.is_valid if isinstance(mask, Mask) else None)
    return (out, lse) if return_lse else out


class _Arrays(NamedTuple):
    """The arrays of a call, in the order in which kernels take them. block_tables and all later fields may be None.

    query: [B, T, H, D]. key, value: [B, S, Hkv, D], or pages [pages, page_size, Hkv, D]. kv_lengths: int32 [B].
    block_tables: int32 [B, max_pages], the numbers of a sequence's pages. sinks: float32 [B, H], the caller's [H] for
    each sequence. mask (bool) and bias: [B or a divisor of B, H or 1, T or 1, S], where S is the capacity of a
    sequence, with pages max_pages * page_size. An entry of a divisor of B is for B / divisor consecutive sequences.
    """

    query: Any
    key: Any
    value: Any
    kv_lengths: Any
    block_tables: Any
    sinks: Any
    mask: Any
    bias: Any


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
) -> tuple[DecodeRequest, _Arrays]:
    """(request, arrays in the kernels' form) of a call. Raises the errors that decode_attention documents."""
    query, key, value = (
        checks.checked_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    _check_shapes(query, key, value, is_paged=block_tables is not None)
    batch, q_length, heads, head_dim = query.shape
    checks.check_number("scale", scale)
    checks.check_softcap(softcap)
    checks.check_implementation(implementation)
    checks.check_flags(return_lse=return_lse)
    _, window = checks.checked_window(window, True)
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
        has_bias=bias is not None,
    )
    arrays = _Arrays(
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


def _config(name: str):
    """Returns the `config` of the implementation `name`: a function from a DecodeRequest to (Blocks, words).

    The words tell where the block spec row comes from, for the plan.
    """

    def config(request: DecodeRequest) -> tuple[Blocks, str]:
        head_dim = max(request.head_dim, request.v_head_dim)
        row, source = block_specs.decode_row(request.device.compute_capability, name, head_dim=head_dim)
        return Blocks(forward=row.config, core_count=request.device.core_count), source

    return config


def _supports_mosaic(request: DecodeRequest) -> str | None:
    """The reason, in words for users, why the Hopper kernel cannot serve the request; None if it can."""
    if reason := unsupported.not_hopper(request):
        return reason
    if request.dtype == "float32":
        return "its wgmma instructions take bfloat16 and float16, not float32"
    if request.head_dim % 64 or request.v_head_dim % 64:
        return "its head_dims are multiples of 64: it would have to copy the cache to pad it"
    if request.has_mask or request.has_bias:
        return "it takes no mask and no bias"
    if request.kv_length % 8:
        return "its cache has a length that is a multiple of 8: it would have to copy the cache to pad it"
    return unsupported.no_mosaic(request)


def _supports_triton(request: DecodeRequest) -> str | None:
    if reason := unsupported.below(request, (8, 0)):
        return reason
    if request.dtype == "float32":
        return "it takes bfloat16 and float16, not float32"
    if not reaches(request.mask_size, itemsize=1):
        return unsupported.OUT_OF_REACH
    return unsupported.no_gpu(request)


def _of_options(forward):
    """Wraps a kernel's forward, which takes the numbers of a call as keywords, so that it takes a DecodeOptions.

    forward(*arrays, scale=, softcap=, left=, **rest) becomes run(*arrays, options=, **rest). arrays: the fields of
    _Arrays.
    """

    def run(*arrays, options: DecodeOptions, **rest):
        return forward(*arrays, scale=options.scale, softcap=options.softcap, left=options.left, **rest)

    return run


def _xla(*arrays, config, interpret, **rest):
    return reference.attention_decode(*arrays, **rest)


def _implementation(name, supports, forward) -> Implementation:
    return Implementation(name, supports, _config(name), _of_options(kernel(forward)), None)


IMPLEMENTATIONS = {
    "mosaic_gpu": _implementation("mosaic_gpu", _supports_mosaic, decode_sm90.attention_decode),
    "triton": _implementation("triton", _supports_triton, decode_triton.attention_decode),
    "xla": Implementation("xla", lambda request: None, without_blocks, _of_options(_xla), None),
}


def _order(request: DecodeRequest) -> tuple[tuple[str, ...], str]:
    return block_specs.attention_order(request.device.compute_capability)


OP = PlannedOp("decode_attention", IMPLEMENTATIONS, _order)
OP.explained_by(_check)(decode_attention)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _decode(call: PlannedCall, arrays: _Arrays):
    """(out [B, T, H, Dv], lse float32 [B, H, T]) of a planned call; differentiating raises NotImplementedError."""
    return batched(OP, call, _join, _shared)(*arrays)


def _shared(function: Any) -> Any:
    """Returns the kernel's function with its work sharded over devices under jit, along batch and heads.

    Pages are not sharded, but their heads are. The function takes the fields of _Arrays in order.
    """

    def run(*arrays: Any) -> Any:
        if not is_partitioned():
            return function(*arrays)
        given = _Arrays(*arrays)
        heads, kv_heads = by_heads(given.query.shape[2], given.key.shape[2])
        batch = Axis(BATCH)
        of_cache = (batch if given.block_tables is None else None, None, kv_heads, None)
        entries = given.query.shape[0]
        given = given._replace(mask=_repeated(given.mask, entries), bias=_repeated(given.bias, entries))
        of_scores = lambda x: (
            None if x is None else (batch if x.shape[0] != 1 else None, heads if x.shape[1] != 1 else None, None, None)
        )
        axes = _Arrays(
            query=(batch, None, heads, None),
            key=of_cache,
            value=of_cache,
            kv_lengths=(batch,),
            block_tables=(batch, None),
            sinks=(batch, heads),
            mask=of_scores(given.mask),
            bias=of_scores(given.bias),
        )
        shares = Shares(
            arguments=[of for of, x in zip(axes, given, strict=True) if x is not None],
            results=lambda _: [axes.query, (batch, heads, None)],
            lengths={
                BATCH: given.query.shape[0],
                HEADS: given.query.shape[2] if kv_heads is None else given.key.shape[2],
            },
        )
        return partitioned(function, shares)(*given)

    return run


def _repeated(x: Any, batch: int) -> Any:
    """A mask or bias whose first axis divides the batch, repeated to one entry per sequence; None or 1 entry stays."""
    return x if x is None or x.shape[0] in (1, batch) else jnp.repeat(x, batch // x.shape[0], axis=0)


@_decode.defjvp
def _no_gradient(call, primals, tangents):
    raise NotImplementedError("decode_attention: it has no gradient, want flash_attention for gradients")


def _join(size: int, mapped: Any, arrays: Any) -> _Arrays:
    """The arrays of `size` calls under a vmap, merged into the arrays of one call with a larger batch.

    mapped: for each array, whether it has the mapped axis. Pages that all calls share stay as they are; pages of
    each call are joined, and the indices in block_tables are shifted.
    """
    mapped, arrays = _Arrays(*mapped), _Arrays(*arrays)
    join = lambda name: None if (x := getattr(arrays, name)) is None else join_batch(size, x, getattr(mapped, name))
    joined = {name: join(name) for name in _Arrays._fields if name not in ("key", "value")}
    if arrays.block_tables is not None and not (mapped.key or mapped.value):
        return _Arrays(key=arrays.key, value=arrays.value, **joined)
    if arrays.block_tables is not None:  # each call has pages of its own
        pages, tables = arrays.key.shape[1 if mapped.key else 0], arrays.block_tables
        tables = tables if mapped.block_tables else jnp.broadcast_to(tables, (size, *tables.shape))
        tables = tables + (jnp.arange(size, dtype=jnp.int32) * pages)[:, None, None]
        joined["block_tables"] = join_batch(size, tables, True)
    return _Arrays(key=join("key"), value=join("value"), **joined)
