"""ring_attention: exact attention inside jax.shard_map, of a sequence whose tokens are shared out among devices."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_kernels.ops import checks
from jax_kernels.ops.attention.checks import check
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.ops.planned_op import under_defaults
from jax_kernels.ops.ring.all_gather import all_gather_attention
from jax_kernels.ops.ring.layouts import LAYOUTS, Layout, axis_size
from jax_kernels.ops.ring.steps import Pair, Rows, Step, Visitors, weight
from jax_kernels.pallas.varying import as_varying, varying_axes
from jax_kernels.reference.attention import row_terms

__all__ = ["RESIDUALS", "STRATEGIES", "ring_attention"]

STRATEGIES = ("ring", "all_to_all", "all_gather", "auto")
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
    elif strategy == "all_gather":
        out, lse = all_gather_attention(arrangement, axis_name, arrays, request.window, dict(call.options))
    else:
        out, lse = _differentiable(call, arrays)
    return (out, lse) if return_lse else out


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
        """The steps in which any device has something to do. In the first, step 0, each has its own keys."""
        return [step for step in range(self.layout.devices) if step == 0 or not self.layout.is_dead(step)]

    @property
    def index(self) -> Any:
        return lax.axis_index(self.axis_name)

    @property
    def scale(self) -> float:
        return dict(self.options)["scale"]

    def key_norms(self, key: jax.Array) -> jax.Array:
        """The `key_norms` of Step."""
        mine = jnp.square(key.astype(jnp.float32)).sum(axis=-1).max(axis=1)
        return mine if self.layout.devices == 1 else lax.pmax(mine, self.axis_name)

    def step(self, number: int, arrays: _Arrays, key_norms: Any = None) -> Step:
        return Step(
            layout=self.layout,
            number=number,
            index=self.index,
            query=arrays.query,
            q_ids=arrays.segment_ids,
            key_norms=key_norms,
            options=dict(self.options),
        )


@jax.custom_vjp
def _differentiable(call: _Call, arrays: _Arrays):
    """(out, lse)."""
    return _forward(call, arrays)


def _forward(call: _Call, arrays: _Arrays) -> tuple[jax.Array, jax.Array]:
    """All steps, and the sinks."""
    numbers: list[int] = call.steps
    total: Any = None
    norms = call.key_norms(arrays.key)
    visitors = Visitors(Pair((arrays.key, arrays.value)), arrays.segment_ids)
    upcoming: Any = Visitors(Pair.of(arrays.key, arrays.value), arrays.segment_ids)
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        upcoming = None if following is None else call.shifted(upcoming, following - number)
        step, is_last = call.step(number, arrays, norms), following is None and arrays.sinks is None
        total = step.forward(visitors, total, is_last=is_last)
        # Else XLA joins work on the next keys to work on these, which then waits for both.
        total, visitors = lax.optimization_barrier((total, upcoming))
        upcoming = visitors
    out, lse = total
    if arrays.sinks is not None:
        with_sink = jnp.logaddexp(lse, arrays.sinks[..., None])
        out, lse = out * weight(lse, with_sink), with_sink
    out = checkpoint_name(out.astype(arrays.query.dtype), RESIDUALS[0])
    lse = checkpoint_name(lse, RESIDUALS[1])
    return out, lse


@under_defaults
def _vjp_forward(call: _Call, arrays: _Arrays):
    out, lse = _forward(call, arrays)
    return (out, lse), (call, arrays, out, lse)


@under_defaults
def _vjp_backward(residuals: Any, cotangents: Any):
    call, arrays, out, lse = residuals
    dout, dlse = cotangents
    terms = row_terms(out, lse, dout, dlse)
    dquery, dkey, dvalue = _gradients(call, arrays, Rows(lse=terms[0], delta=terms[1], dout=dout))
    dsinks = None
    if arrays.sinks is not None:
        share = jnp.exp(arrays.sinks[..., None] - terms[0])
        dsinks = -jnp.sum(share * terms[1], axis=(0, 2))[None]
    of_ids = None if arrays.segment_ids is None else jnp.zeros(arrays.segment_ids.shape, jax.dtypes.float0)
    return None, _Arrays(
        query=(dquery * call.scale).astype(arrays.query.dtype),
        key=dkey.astype(arrays.key.dtype),
        value=dvalue.astype(arrays.value.dtype),
        segment_ids=of_ids,
        sinks=dsinks,
    )


_differentiable.defvjp(_vjp_forward, _vjp_backward)


def _gradients(call: _Call, arrays: _Arrays, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The float32 gradients of query, over the scale, and of key and value.

    The gradients of keys and values follow these round the ring, one step behind, and come home at the end. XLA hides
    one collective at a time behind a kernel. So a step takes half of the heads while the next keys arrive, and half
    while the gradients travel. Of the device's own keys, the second half is left for the way home.
    """
    _, *numbers = call.steps
    # Opaque: else XLA keeps the keys that arrived in the forward, of all devices.
    (query, key, value, ids), rows = lax.optimization_barrier((arrays[:4], rows))
    arrays = arrays._replace(query=query, key=key, value=value, segment_ids=ids)
    mine = Visitors(Pair((key, value)), ids)
    own, dquery = call.step(0, arrays), jnp.zeros_like(query, jnp.float32)
    if not numbers:
        dquery, of_mine = own.gradients(mine, rows, dquery)
        return dquery, of_mine.key, of_mine.value
    halves: list[Any] = own.in_parts(mine)
    upcoming = call.shifted(Visitors(Pair.of(key, value), ids), numbers[0])
    dquery, of_mine = own.gradients(mine, rows, dquery, halves[0] if halves else None)
    (dquery, of_mine), visitors = lax.optimization_barrier(((dquery, of_mine), upcoming))
    travelling, at = None, 0
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        upcoming = None if following is None else call.shifted(visitors, following - number)
        step = call.step(number, arrays)
        found: list[Pair] = []
        parts: list[Any] = step.in_parts(visitors) if upcoming is not None and travelling is not None else []
        for part in parts[:1]:
            dquery, pair = step.gradients(visitors, rows, dquery, part)
            (dquery, pair), upcoming, travelling = lax.optimization_barrier(((dquery, pair), upcoming, travelling))
            found.append(pair)
        travelling = None if travelling is None else call.shifted(travelling, number - at)
        dquery, pair = step.gradients(visitors, rows, dquery, parts[1] if parts else None)
        found.append(pair)
        (dquery, found), visitors, travelling = lax.optimization_barrier(((dquery, found), upcoming, travelling))
        pair = _joined(found)
        travelling = pair if travelling is None else jax.tree.map(jnp.add, travelling, pair)
        at = number
    if halves:
        (rows, mine), dquery, travelling = lax.optimization_barrier(((rows, mine), dquery, travelling))
    home = call.shifted(travelling, -at)
    if halves:
        dquery, of_rest = own.gradients(mine, rows, dquery, halves[1])
        (dquery, of_rest), home = lax.optimization_barrier(((dquery, of_rest), home))
        of_mine = _joined([of_mine, of_rest])
    home = jax.tree.map(jnp.add, home, of_mine)
    return dquery, home.key, home.value


def _joined(parts: list[Pair]) -> Pair:
    """The gradients of all heads, from those of some heads each."""
    return jax.tree.map(lambda *of_heads: jnp.concatenate(of_heads, axis=2), *parts) if len(parts) > 1 else parts[0]


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
