"""ring_attention: exact attention inside jax.shard_map, of a sequence whose tokens are shared out among devices."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_kernels.ops import checks
from jax_kernels.ops.attention.checks import check
from jax_kernels.ops.attention.flash_attention import attention_forward, attention_gradients, flash_attention, prepare
from jax_kernels.ops.planned_op import under_defaults
from jax_kernels.ops.ring.layouts import LAYOUTS, Layout, Pair
from jax_kernels.pallas.varying import as_varying, varying_axes
from jax_kernels.reference.attention import row_terms

__all__ = ["RESIDUALS", "STRATEGIES", "axis_size", "ring_attention"]

STRATEGIES = ("ring", "all_to_all", "auto")
RESIDUALS = "ring_attention_out", "ring_attention_lse"  # names for policies of jax.checkpoint


@under_defaults
def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: str,
    layout: str | None = None,
    strategy: str = "auto",
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """flash_attention inside jax.shard_map, where each device of a mesh axis has some tokens of the sequence.

    Equivalent to the following JAX code, without the gathered arrays::

        tokens = shard_sequence's order of all tokens, of which a device has [T]
        gather = lambda x: all_gather(x, axis_name, axis=1, tiled=True)[:, argsort(tokens)]
        out = flash_attention(*map(gather, (query, key, value)), segment_ids=gather(segment_ids), ...)[:, mine]

    Keys and values travel round the ring of the devices. Each step's result is (out, lse), which are merged in float32
    with those before; "mosaic_gpu" rounds the out of a step to query's dtype. In the backward keys, values and their
    float32 gradients travel. Steps that a window makes empty on all devices are left out, and their keys do not stop
    there. shard_sequence brings an array into a layout.

    The forward keeps query, key, value, out and lse. out and lse have the names "ring_attention_out" and
    "ring_attention_lse" for the policies of jax.checkpoint.

    Args:
      query: [B, T, H, D]. key: [B, T, Hkv, D]. value: [B, T, Hkv, Dv]: a device's tokens; else as in flash_attention.
      axis_name: of the mesh axis over which the tokens are shared out.
      layout: "zigzag" (device i of n has the chunks i and 2 n - 1 - i of 2 n; T is even), "striped" (every n-th token
        from i on) or "contiguous". None is "zigzag" with is_causal, else "contiguous". Under a causal mask the first
        two give all devices equal work.
      strategy: "ring", as above; "all_to_all": each device gets all tokens of some heads (Ulysses), so that its number
        of devices divides H and Hkv; "auto" is "ring".
      is_causal, window, softcap, sinks, scale: as in flash_attention, by the tokens' places in the whole sequence.
      segment_ids: int32 [B, T], of a device's tokens: packed sequences. An id below 0 marks padding.
      return_lse, deterministic, precision, implementation: as in flash_attention.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T] in natural log. Both are
      differentiable.

    Raises:
      TypeError, ValueError, NotImplementedError: as flash_attention; ValueError where axis_name is not an axis of a
        jax.shard_map around the call, or the devices do not divide the heads.

    Sources: Liu et al., "Ring Attention with Blockwise Transformers" (2023), arXiv:2310.01889; Brandon et al., "Striped
    Attention" (2023), arXiv:2311.09431; Jacobs et al., "DeepSpeed Ulysses" (2023), arXiv:2309.14509.
    """
    devices = axis_size(axis_name)
    options = {
        "softcap": softcap,
        "deterministic": deterministic,
        "precision": precision,
        "implementation": implementation,
    }
    request, inputs = check(
        query=query, key=key, value=value, is_causal=is_causal, window=window, segment_ids=segment_ids, sinks=sinks,
        scale=scale, return_lse=return_lse, **options,
    )  # fmt: skip
    query, key, value = inputs.query, inputs.key, inputs.value
    if request.q_length != request.kv_length:
        raise ValueError(f"key: got {request.kv_length} tokens, want query's {request.q_length}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: got {strategy!r}, want one of {', '.join(map(repr, STRATEGIES))}")
    left, right = request.window or (-1, -1)
    limits = None if left < 0 else left, 0 if request.is_causal else None if right < 0 else right
    arrangement = layout_of(layout, devices, request.q_length, *limits)
    query, scale = checks.with_positive_scale(query, scale)
    arrays = _Arrays(query, key, value, inputs.q_segment_ids, inputs.sinks)
    arrays = as_varying(arrays, varying_axes(arrays) | {axis_name})
    call = _Call(layout=arrangement, axis_name=axis_name, options=tuple((options | {"scale": scale}).items()))
    if strategy == "all_to_all":
        out, lse = _all_to_all(call, arrays, request.is_causal, request.window)
    else:
        out, lse = _differentiable(call, arrays)
    return (out, lse) if return_lse else out


def axis_size(axis_name: Any) -> int:
    """The devices along a mesh axis. Raises TypeError, or ValueError outside of a jax.shard_map with that axis."""
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name: got {type(axis_name).__name__}, want the name of a mesh axis")
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(f"axis_name: got {axis_name!r}, want an axis of the jax.shard_map around this call") from None


def layout_of(name: str | None, devices: int, length: int, left: int | None, right: int | None) -> Layout:
    """The checked layout; length: a device's tokens."""
    name = ("zigzag" if right == 0 else "contiguous") if name is None else name
    if name not in LAYOUTS:
        raise ValueError(f"layout: got {name!r}, want one of {', '.join(map(repr, LAYOUTS))}, or None")
    if name == "zigzag" and length % 2:
        raise ValueError(f"query: got {length} tokens on each device with layout='zigzag', want an even number")
    return Layout(name=name, devices=devices, length=length, left=left, right=right)


class _Arrays(NamedTuple):
    """A device's arrays. segment_ids: [B, T]. sinks: [1, H] float32. None where there is none."""

    query: Any
    key: Any
    value: Any
    segment_ids: Any
    sinks: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """The static half of a call. options: of flash_attention, by name."""

    layout: Layout
    axis_name: str
    options: tuple[tuple[str, Any], ...]

    def shifted(self, tree: Any, by: int) -> Any:
        """The arrays of the device `by` places before this one."""
        devices = self.layout.devices
        if by % devices == 0:
            return tree
        there = [(i, (i + by) % devices) for i in range(devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, there), tree)

    @property
    def steps(self) -> list[int]:
        """The steps in which any device has something to do; at least one, so that rows without keys have a result."""
        return [step for step in range(self.layout.devices) if not self.layout.is_dead(step)] or [0]

    @property
    def index(self) -> Any:
        return lax.axis_index(self.axis_name)


@jax.custom_vjp
def _differentiable(call: _Call, arrays: _Arrays):
    """(out, lse)."""
    return _forward(call, arrays)


def _forward(call: _Call, arrays: _Arrays) -> tuple[jax.Array, jax.Array]:
    """All steps, and the sinks."""
    visitors = arrays.key, arrays.value, arrays.segment_ids
    steps: list[int] = call.steps
    total: Any = None
    visitors = call.shifted(visitors, steps[0])
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        upcoming = None if following is None else call.shifted(visitors, following - step)
        found = _step(call, step, arrays, *visitors)
        # Else XLA joins work on the next keys to work on these, which then waits for both.
        found, visitors = lax.optimization_barrier((found, upcoming))
        total = found if total is None else _merged(total, found)
    out, lse = total
    if arrays.sinks is not None:
        with_sink = jnp.logaddexp(lse, arrays.sinks[..., None])
        out, lse = out * _weight(lse, with_sink), with_sink
    out = checkpoint_name(out.astype(arrays.query.dtype), RESIDUALS[0])
    lse = checkpoint_name(lse, RESIDUALS[1])
    return out, lse


def _weight(lse: jax.Array, total: jax.Array) -> jax.Array:
    """exp(lse - total) as [B, T, H, 1]; 0 where there is no key."""
    weight = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - jnp.where(jnp.isneginf(total), 0, total)))
    return weight.swapaxes(1, 2)[..., None]


def _merged(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
    """The (out, lse) of the keys of both."""
    lse = jnp.logaddexp(one[1], other[1])
    return one[0] * _weight(one[1], lse) + other[0] * _weight(other[1], lse), lse


def _step(call: _Call, step: int, arrays: _Arrays, key: Any, value: Any, ids: Any) -> tuple[jax.Array, jax.Array]:
    """The float32 (out, lse) of a device's queries and the keys that it has in a step."""
    layout, pairs = call.layout, call.layout.pairs(step, call.index)
    if _is_one_call(layout, step):
        planned, inputs = _planned(call, step, arrays, key, value, ids, [])
        out, lse, *_ = attention_forward(planned, inputs)
        return out.astype(jnp.float32), lse
    planned, inputs = _planned(call, step, arrays, key, value, ids, pairs)
    out, lse, *_ = attention_forward(planned, inputs)
    out, lse = jnp.split(out.astype(jnp.float32), len(pairs)), jnp.split(lse, len(pairs))
    of_chunk: list[Any] = [None] * layout.chunks
    for pair, *found in zip(pairs, out, lse, strict=True):
        for chunk in range(layout.chunks):
            if isinstance(pair.query, int) and pair.query != chunk:
                continue
            mine = (
                found if isinstance(pair.query, int) else [found[0], jnp.where(pair.query == chunk, found[1], -jnp.inf)]
            )
            of_chunk[chunk] = mine if of_chunk[chunk] is None else _merged(of_chunk[chunk], mine)
    return jnp.concatenate([x[0] for x in of_chunk], 1), jnp.concatenate([x[1] for x in of_chunk], 2)


def _is_one_call(layout: Layout, step: int) -> bool:
    """Whether a zigzag step is one call of all chunks: no limit holds, or a causal one alone on a device's own keys."""
    is_full = layout.left is None and layout.right is None
    return layout.name == "zigzag" and (is_full or (step == 0 and layout.left is None and layout.right == 0))


def _chosen(layout: Layout, x: Any, chunk: Any, axis: int = 1) -> Any:
    """A chunk of an array's tokens; None of None. chunk: an int, or a traced number that is 0 or 1."""
    if x is None or layout.chunks == 1:
        return x
    chunks = jnp.split(x, layout.chunks, axis)
    return chunks[chunk] if isinstance(chunk, int) else jnp.where(chunk == 0, chunks[0], chunks[1])


def _planned(
    call: _Call, step: int, arrays: _Arrays, key: Any, value: Any, ids: Any, pairs: list[Pair]
) -> tuple[Any, Any]:
    """The call of flash_attention's core with the pairs as its batch, and its arrays. Without pairs: all tokens."""
    layout = call.layout
    is_causal, window = layout.window(step)
    if pairs:
        join = lambda x, field: None if x is None else jnp.concatenate(
            [_chosen(layout, x, getattr(pair, field)) for pair in pairs]
        )  # fmt: skip
    else:
        join = lambda x, field: x
    offsets: Any = 0
    if pairs and pairs[0].q_offset is not None:
        batch = arrays.query.shape[0]
        offsets = jnp.concatenate([jnp.full((batch,), pair.q_offset, jnp.int32) for pair in pairs])
    elif pairs:
        is_causal, window = False, None
    planned, inputs = prepare(
        query=join(arrays.query, "query"),
        key=join(key, "key"),
        value=join(value, "key"),
        is_causal=is_causal,
        window=window,
        segment_ids=None if ids is None else (join(arrays.segment_ids, "query"), join(ids, "key")),
        q_offset=offsets,
        return_lse=True,
        **dict(call.options),
    )
    # The Hopper kernel's blocks leave no shared memory for a float32 out: there, each step's out is rounded once.
    dtype = planned.out_dtype if planned.implementation == "mosaic_gpu" else "float32"
    return dataclasses.replace(planned, out_dtype=dtype), inputs


@under_defaults
def _vjp_forward(call: _Call, arrays: _Arrays):
    out, lse = _forward(call, arrays)
    return (out, lse), (call, arrays, out, lse)


@under_defaults
def _vjp_backward(residuals: Any, cotangents: Any):
    call, arrays, out, lse = residuals
    dout, dlse = cotangents
    terms = row_terms(out, lse, dout, dlse)
    zeros = lambda x: jnp.zeros_like(x, jnp.float32)
    dquery, travelling, at = zeros(arrays.query), None, 0
    visitors = arrays.key, arrays.value, arrays.segment_ids
    steps: list[int] = call.steps
    visitors = call.shifted(visitors, steps[0])
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        upcoming = None if following is None else call.shifted(visitors, following - step)
        travelling = None if travelling is None else call.shifted(travelling, step - at)
        found = _step_gradients(call, step, arrays, visitors, terms, dout)
        found, visitors = lax.optimization_barrier((found, upcoming))
        dquery = dquery + found[0]
        travelling = found[1:] if travelling is None else jax.tree.map(jnp.add, travelling, found[1:])
        at = step
    dkey, dvalue = call.shifted(travelling, -at)
    dsinks = None
    if arrays.sinks is not None:
        share = jnp.exp(arrays.sinks[..., None] - terms[0])
        dsinks = -jnp.sum(share * terms[1], axis=(0, 2))[None]
    of_ids = None if arrays.segment_ids is None else jnp.zeros(arrays.segment_ids.shape, jax.dtypes.float0)
    return None, _Arrays(
        query=dquery.astype(arrays.query.dtype),
        key=dkey.astype(arrays.key.dtype),
        value=dvalue.astype(arrays.value.dtype),
        segment_ids=of_ids,
        sinks=dsinks,
    )


_differentiable.defvjp(_vjp_forward, _vjp_backward)


def _step_gradients(call: _Call, step: int, arrays: _Arrays, visitors: Any, terms: Any, dout: Any) -> tuple[Any, ...]:
    """The float32 gradients of a device's queries, and of the keys and values that it has in a step."""
    layout, (key, value, ids) = call.layout, visitors
    pairs = [] if _is_one_call(layout, step) else layout.pairs(step, call.index)
    planned, inputs = _planned(call, step, arrays, key, value, ids, pairs)
    if not pairs:
        found = attention_gradients(planned, inputs, terms[0], terms[1], dout)
        return tuple(x.astype(jnp.float32) for x in found[:3])
    of_rows = [jnp.concatenate([_chosen(layout, x, pair.query, 2) for pair in pairs]) for x in terms]
    of_out = jnp.concatenate([_chosen(layout, dout, pair.query) for pair in pairs])
    found = attention_gradients(planned, inputs, of_rows[0], of_rows[1], of_out)
    results = []
    for x, field in zip(found[:3], ("query", "key", "key"), strict=True):
        sums: list[Any] = [jnp.float32(0)] * layout.chunks
        for pair, part in zip(pairs, jnp.split(x.astype(jnp.float32), len(pairs)), strict=True):
            at = getattr(pair, field)
            for chunk in range(layout.chunks):
                if isinstance(at, int):
                    sums[chunk] = sums[chunk] + (part if at == chunk else 0)
                else:
                    sums[chunk] = sums[chunk] + jnp.where(at == chunk, part, 0)
        shape = found[0].shape[0] // len(pairs), layout.chunk, *x.shape[2:]
        results.append(jnp.concatenate([jnp.broadcast_to(y, shape) for y in sums], 1))
    return tuple(results)


def _all_to_all(
    call: _Call, arrays: _Arrays, is_causal: bool, window: tuple[int, int] | None
) -> tuple[jax.Array, jax.Array]:
    """All tokens of some heads on each device, in their order; JAX differentiates it."""
    layout, name = call.layout, call.axis_name
    for of, x in (("query", arrays.query), ("key", arrays.key)):
        if x.shape[2] % layout.devices:
            raise ValueError(
                f"{of}: got {x.shape[2]} heads on {layout.devices} devices with strategy='all_to_all', want a multiple"
            )
    order = jnp.concatenate([jnp.asarray(layout.tokens(i)) for i in range(layout.devices)])
    sorted_, back = jnp.argsort(order), order
    of_heads = lambda x: lax.all_to_all(x, name, split_axis=2, concat_axis=1, tiled=True)[:, sorted_]
    ids = arrays.segment_ids
    if ids is not None:
        ids = lax.all_gather(ids, name, axis=1, tiled=True)[:, sorted_]
    sinks = arrays.sinks
    if sinks is not None:
        own = sinks.shape[1] // layout.devices
        sinks = lax.dynamic_slice_in_dim(sinks[0], call.index * own, own)
    out, lse = flash_attention(
        *(of_heads(x) for x in (arrays.query, arrays.key, arrays.value)),
        is_causal=is_causal,
        window=window,
        segment_ids=ids,
        sinks=sinks,
        return_lse=True,
        **dict(call.options),
    )
    out = lax.all_to_all(out[:, back], name, split_axis=1, concat_axis=2, tiled=True)
    return out, lax.all_to_all(lse[..., back], name, split_axis=2, concat_axis=1, tiled=True)
