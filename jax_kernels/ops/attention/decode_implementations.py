"""The implementations of decode_attention, the requests that each supports, and the planned call of one of them."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.ops import checks, unsupported
from jax_kernels.ops.attention.implementations.xla import chunk_bytes
from jax_kernels.ops.attention.partitioning import BATCH, HEADS, by_heads
from jax_kernels.ops.planned_op import Blocks, PlannedCall, PlannedOp, batched, join_batch, kernel
from jax_kernels.ops.sharding.partitioning import Axis, Shares, is_partitioned, partitioned
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.attention.sm90.decode import launch as decode_sm90
from jax_kernels.pallas.attention.triton import decode as decode_triton
from jax_kernels.pallas.block_specs.candidates import TiledCall, attention_candidates
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.reference import decode_attention as reference

__all__ = ["IMPLEMENTATIONS", "OP", "DecodeArrays", "DecodeOptions", "DecodeRequest", "decode"]


@dataclasses.dataclass(frozen=True)
class DecodeRequest(Request):
    """A decode_attention call without its arrays.

    kv_length: the capacity of a sequence, in keys. page_size: the keys of a page; pages: the number of pages of the
    whole cache; both None if the keys of a sequence are contiguous. window: (left, 0), or None. mask_size: the number
    of elements of the mask's array, and mask_rows its heads times its queries; 0 without a mask.
    """

    SIZES: ClassVar[tuple[str, ...]] = (*checks.SIZES, "pages")
    ROUNDED: ClassVar[tuple[str, ...]] = (*SIZES, "mask_size", "window")

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
    mask_rows: int
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


class DecodeArrays(NamedTuple):
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


def _config(name: str):
    """Returns the `config` of the implementation `name`: a function from a DecodeRequest to (Blocks, words).

    The words tell where the block spec row comes from, for the plan.
    """

    def config(request: DecodeRequest) -> tuple[Blocks, str]:
        head_dim = max(request.head_dim, request.v_head_dim)
        row, source = block_specs.decode_row(request.device.compute_capability, name, head_dim=head_dim)
        return Blocks(forward=row.config, core_count=request.device.core_count), source

    return config


def _candidates(name: str):
    """Returns the `candidates` of the implementation `name`: a function from a DecodeRequest to blocks to time."""

    def candidates(request: DecodeRequest) -> dict[str, tuple[Any, ...]]:
        blocks, _ = _config(name)(request)
        call = TiledCall(
            width=max(request.head_dim, request.v_head_dim),
            itemsize=2,
            shared_memory=request.device.shared_memory_per_block,
        )
        return {"forward": attention_candidates(blocks.forward, call)}

    return candidates


def _supports_mosaic(request: DecodeRequest) -> str | None:
    """The reason, in words for users, why the Hopper kernel cannot serve the request; None if it can."""
    if reason := unsupported.not_hopper(request):
        return reason
    if request.dtype == "float32":
        return "its wgmma instructions take bfloat16 and float16, not float32"
    if request.head_dim % 64 or request.v_head_dim % 64:
        return "it needs head_dims in multiples of 64, and does not copy the cache to pad it"
    if request.has_bias:
        return "it takes no bias"
    if request.mask_rows > 1:
        return "it takes a mask with one row for all heads and queries of a sequence"
    if request.kv_length % 8:
        return "it needs a cache length that is a multiple of 8, and does not copy the cache to pad it"
    return unsupported.no_mosaic(request)


def _supports_triton(request: DecodeRequest) -> str | None:
    if reason := unsupported.no_triton(request):
        return reason
    if request.dtype == "float32":
        return "it takes bfloat16 and float16, not float32"
    if not reaches(request.mask_size, itemsize=1):
        return unsupported.OUT_OF_REACH
    return unsupported.no_triton_gpu(request)


def _of_options(forward):
    """Wraps a kernel's forward, which takes the numbers of a call as keywords, so that it takes a DecodeOptions.

    forward(*arrays, scale=, softcap=, left=, **rest) becomes run(*arrays, options=, **rest). arrays: the fields of
    DecodeArrays.
    """

    def run(*arrays, options: DecodeOptions, **rest):
        return forward(*arrays, scale=options.scale, softcap=options.softcap, left=options.left, **rest)

    return run


_COMPILED = jax.jit(
    reference.attention_decode, static_argnames=("scale", "softcap", "left", "chunk_bytes"), inline=True
)


def _xla(*arrays, config, interpret, **rest):
    return _COMPILED(*arrays, **rest, chunk_bytes=chunk_bytes(arrays[0]))


def _implementation(name, supports, forward) -> Implementation:
    return Implementation(name, supports, _config(name), _of_options(kernel(forward)), None, _candidates(name))


IMPLEMENTATIONS = {
    "mosaic_gpu": _implementation("mosaic_gpu", _supports_mosaic, decode_sm90.attention_decode),
    "triton": _implementation("triton", _supports_triton, decode_triton.attention_decode),
    "xla": Implementation("xla", lambda request: None, without_blocks, _of_options(_xla), None),
}


def _order(request: DecodeRequest) -> tuple[tuple[str, ...], str]:
    return block_specs.attention_order(request.device.compute_capability)


OP = PlannedOp("decode_attention", IMPLEMENTATIONS, _order)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def decode(call: PlannedCall, arrays: DecodeArrays):
    """(out [B, T, H, Dv], lse float32 [B, H, T]) of a planned call; differentiating raises NotImplementedError."""
    return batched(OP, call, _join, _shared)(*arrays)


def _shared(function: Any) -> Any:
    """Returns the kernel's function with its work sharded over devices under jit, along batch and heads.

    Pages are not sharded, but their heads are. The function takes the fields of DecodeArrays in order.
    """

    def run(*arrays: Any) -> Any:
        if not is_partitioned():
            return function(*arrays)
        given = DecodeArrays(*arrays)
        heads, kv_heads = by_heads(given.query.shape[2], given.key.shape[2])
        batch = Axis(BATCH)
        of_cache = (batch if given.block_tables is None else None, None, kv_heads, None)
        entries = given.query.shape[0]
        given = given._replace(mask=_repeated(given.mask, entries), bias=_repeated(given.bias, entries))
        of_scores = lambda x: (
            None if x is None else (batch if x.shape[0] != 1 else None, heads if x.shape[1] != 1 else None, None, None)
        )
        axes = DecodeArrays(
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


@decode.defjvp
def _no_gradient(call, primals, tangents):
    raise NotImplementedError("decode_attention: it has no gradient, want flash_attention for gradients")


def _join(size: int, mapped: Any, arrays: Any) -> DecodeArrays:
    """The arrays of `size` calls under a vmap, merged into the arrays of one call with a larger batch.

    mapped: for each array, whether it has the mapped axis. Pages that all calls share stay as they are; pages of
    each call are joined, and the indices in block_tables are shifted.
    """
    mapped, arrays = DecodeArrays(*mapped), DecodeArrays(*arrays)
    join = lambda name: None if (x := getattr(arrays, name)) is None else join_batch(size, x, getattr(mapped, name))
    joined = {name: join(name) for name in DecodeArrays._fields if name not in ("key", "value")}
    if arrays.block_tables is not None and not (mapped.key or mapped.value):
        return DecodeArrays(key=arrays.key, value=arrays.value, **joined)
    if arrays.block_tables is not None:  # each call has pages of its own
        pages, tables = arrays.key.shape[1 if mapped.key else 0], arrays.block_tables
        tables = tables if mapped.block_tables else jnp.broadcast_to(tables, (size, *tables.shape))
        tables = tables + (jnp.arange(size, dtype=jnp.int32) * pages)[:, None, None]
        joined["block_tables"] = join_batch(size, tables, True)
    return DecodeArrays(key=join("key"), value=join("value"), **joined)
