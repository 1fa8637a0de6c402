"""The attention of one step of a ring: a device's queries with the visiting keys and values.

A step is one call of the attention kernels if its limits allow it. On "mosaic_gpu" this call starts from the float32
(out, lse) of the earlier steps, adds query's gradient to the gradient of the earlier steps, and writes the gradients of
key and value in float32. Between two steps, only the kernels read or write results.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, FlashArguments, HeadView
from jax_kernels.ops.attention.flash_attention import prepare
from jax_kernels.ops.attention.vjp import attention_forward, attention_gradients
from jax_kernels.ops.ring.layouts import Chunks, Layout, Whole
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.pallas.attention.passes import row_norms

__all__ = [
    "BackwardInputs",
    "Pair",
    "Step",
    "Visitors",
    "forward_onto",
    "gradients_onto",
    "merged",
    "merged_exactly",
    "weight",
    "with_norms",
]


class Pair(NamedTuple):
    """Keys and values, or their gradients, [B, T, Hkv, D] each, that devices send together.

    arrays: (key, value), or one array [2, B, T, Hkv, D] with both, which `of` makes if the shapes are equal.
    XLA hides only one collective at a time behind a kernel, so that one array is better than two. A kernel reads its
    half of the array in place. The halves have an axis of their own: if they were halves of the batch axis, devices
    that shard the batch would have to exchange them.
    """

    arrays: tuple[jax.Array, ...]

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array) -> "Pair":
        """The Pair of key and value: copied into one array if their shapes are equal, else two arrays."""
        if key.shape != value.shape:
            return cls((key, value))
        if _has_auto_axis():
            return cls((jnp.stack([key, value]),))
        # A kernel writes both gradients as one array [2 B, T, Hkv, D]. This reshape does not copy it.
        return cls((jnp.concatenate([key, value]).reshape(2, *key.shape),))

    @property
    def key(self) -> jax.Array:
        return self.arrays[0] if len(self.arrays) == 2 else self.arrays[0][0]

    @property
    def value(self) -> jax.Array:
        return self.arrays[1] if len(self.arrays) == 2 else self.arrays[0][1]


def _has_auto_axis() -> bool:
    """Whether XLA's partitioner may shard arrays: the mesh of the current trace has an Auto axis of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(kind == AxisType.Auto and size > 1 for kind, size in kinds)


class Visitors(NamedTuple):
    """One device's keys, values and segment ids, which travel round the ring to the other devices.

    segment_ids: int32 [B, T], or None.
    """

    pair: Pair
    segment_ids: Any


class BackwardInputs(NamedTuple):
    """The values that a backward reads for each query.

    lse, delta: the row terms, float32 [B, H, T]. dout: the cotangent of out, [B, T, H, Dv]. lse_lo: [B, H, T] with a
    bias or a score_mod, the exact log-sum-exp minus lse; else None.
    """

    lse: Any
    delta: Any
    dout: Any
    lse_lo: Any = None


def weight(lse: jax.Array, total: jax.Array) -> jax.Array:
    """exp(lse - total) as [B, T, H, 1], from lse and total [B, H, T]; 0 where lse is -inf."""
    found = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - jnp.where(jnp.isneginf(total), 0, total)))
    return found.swapaxes(1, 2)[..., None]


def log_sum(one: jax.Array, other: jax.Array) -> jax.Array:
    """log(exp(one) + exp(other)), elementwise; unlike jnp.logaddexp with derivative 0 where both are -inf."""
    is_dead = jnp.isneginf(jnp.maximum(one, other))
    return jnp.where(is_dead, -jnp.inf, jnp.logaddexp(*(jnp.where(is_dead, 0, x) for x in (one, other))))


def merged(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
    """(out, lse) over the keys of both arguments, each an (out, lse) of the same queries over different keys.

    out: [B, T, H, Dv]. lse: [B, H, T].
    """
    lse = log_sum(one[1], other[1])
    return one[0] * weight(one[1], lse) + other[0] * weight(other[1], lse), lse


def merged_exactly(one: Any, other: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, lse, lse_lo) over the keys of both arguments, each an (out, lse, lse_lo) of the same queries.

    With scores far from 0, float32 loses digits of the log-sum-exp. lse + lse_lo is exact.
    """
    highest = jnp.maximum(one[1], other[1])
    is_dead = jnp.isneginf(highest)
    highest = jnp.where(is_dead, 0, highest)
    shares = [jnp.where(jnp.isneginf(lse), 0, jnp.exp((lse - highest) + lse_lo)) for _, lse, lse_lo in (one, other)]
    total = jnp.where(is_dead, 1, shares[0] + shares[1])
    log = jnp.log(total)
    lse = highest + log
    lse_lo = jnp.where(is_dead, 0, log + (highest - lse))
    weights = [(share / total).swapaxes(1, 2)[..., None] for share in shares]
    return one[0] * weights[0] + other[0] * weights[1], jnp.where(is_dead, -jnp.inf, lse), lse_lo


def with_norms(planned: Any, inputs: AttentionInputs, pair: Pair) -> AttentionInputs:
    """The inputs of a step with key_norms, the largest squared norm of a key of each head [B, Hkv].

    pair: the step's keys and values, joined in one array or as two arrays. The norms are computed from the joined
    array. The inputs are returned unchanged if there are two arrays, with a mask, with another implementation than
    "mosaic_gpu", and if XLA may partition the call.
    """
    if planned.implementation != "mosaic_gpu" or len(pair.arrays) == 2 or is_partitioned() or inputs.mask is not None:
        return inputs
    (array,) = pair.arrays
    array = array.reshape(-1, *array.shape[2:])
    return inputs._replace(key_norms=row_norms.longest(array, interpret=planned.interpret, entries=len(array) // 2))


def forward_onto(planned: Any, inputs: AttentionInputs, total: Any, *, is_last: bool) -> tuple[jax.Array, jax.Array]:
    """Runs a planned call and merges its (out, lse) with `total`, the (out, lse) of the same queries over other keys.

    total: None if there are no other keys. Returns (out [B, T, H, Dv], lse [B, H, T]), both float32, except that out
    may have query's dtype if is_last is True.
    """
    if planned.implementation != "mosaic_gpu":
        planned = dataclasses.replace(planned, out_dtype="float32")
        out, lse, *_ = attention_forward(planned, inputs)
        assert lse is not None
        return (out, lse) if total is None else merged(total, (out, lse))
    joins = total is not None and inputs.value.shape[-1] <= WIDEST_JOINED
    is_rounded = is_last and (joins or total is None)
    # The send of the next keys occupies some SMs for a while, and a reach makes some tiles short. Hence dynamic tiles.
    blocks = dataclasses.replace(planned.config, forward=dataclasses.replace(planned.config.forward, dynamic=True))
    dtype = str(inputs.query.dtype) if is_rounded else "float32"
    planned = dataclasses.replace(planned, out_dtype=dtype, config=blocks)
    if joins:
        inputs = inputs._replace(earlier_out=total[0], earlier_lse=total[1])
    out, lse, *_ = attention_forward(planned, inputs)
    assert lse is not None
    return (out, lse) if total is None or joins else merged(total, (out, lse))


def gradients_onto(
    planned: Any, inputs: AttentionInputs, backward: BackwardInputs, dquery: jax.Array, scale: float
) -> tuple[jax.Array, Pair]:
    """The gradients of one planned call: (dquery + query's gradient / scale, Pair of the gradients of key and value).

    All are float32. dquery: float32 [B, T, H, D]. planned: must have the option float32_gradients.
    """
    if _goes_on(planned):
        found = attention_gradients(planned, inputs, backward.lse, backward.delta, backward.dout, dquery)
        return found.query, Pair.of(found.key, found.value)
    found = attention_gradients(planned, inputs, backward.lse, backward.delta, backward.dout)
    return dquery + found.query.astype(jnp.float32) / scale, Pair.of(found.key, found.value)


def _goes_on(planned: Any) -> bool:
    """Whether the backward's kernel itself adds query's gradient to the array `dquery` of the earlier steps.

    It does with "mosaic_gpu", if the call is not deterministic. If XLA may partition the call, it does not: such a
    kernel would get whole arrays on each device.
    """
    is_alone = not planned.options.deterministic and not is_partitioned()
    return planned.implementation == "mosaic_gpu" and is_alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a ring: the attention of a device's queries to the keys of the device that is `number` before it.

    index: this device's index along the mesh axis, a traced number. query: [B, T, H, D], of this device. q_ids: [B, T],
    the queries' segment ids. mask, score_mod: of the whole sequence. bias: [B or 1, H or 1, T or 1, S or 1], rows for
    this device's queries, columns for all S keys in sequence order. Each is None if absent. options: of
    flash_attention, by name.
    """

    layout: Layout
    number: int
    index: Any
    query: jax.Array
    q_ids: Any
    options: dict[str, Any]
    mask: Any = None
    score_mod: Any = None
    bias: Any = None

    @property
    def has_far_scores(self) -> bool:
        """Whether the step has a score_mod or a bias, whose scores may be far from 0.

        `forward` then returns (out, lse, lse_lo), and gradients come from `all_gradients`.
        """
        return self.score_mod is not None or self.bias is not None

    def forward(self, visitors: Visitors, total: Any, *, is_last: bool) -> tuple[jax.Array, ...]:
        """(out, lse) over the keys of this step and of the earlier steps.

        visitors: the keys and values of this step. total: (out, lse) of the earlier steps; None in the first step. With
        a bias or a score_mod, total and the result are (out, lse, lse_lo). All are float32, except that out may have
        query's dtype if is_last is True.
        """
        if self.has_far_scores:
            planned, inputs = self._general_call(visitors)
            result = attention_forward(dataclasses.replace(planned, out_dtype="float32"), inputs)
            assert result.lse is not None
            lse_lo = jnp.zeros_like(result.lse) if result.lse_lo is None else result.lse_lo
            terms = result.out, result.lse, lse_lo
            return terms if total is None else merged_exactly(total, terms)
        whole = self._whole_call(visitors)
        if whole is None:
            found = self._forward_of_pairs(visitors)
            return found if total is None else merged(total, found)
        planned, inputs = whole
        return forward_onto(planned, with_norms(planned, inputs, visitors.pair), total, is_last=is_last)

    def gradients(
        self, visitors: Visitors, backward: BackwardInputs, dquery: jax.Array, heads: HeadView | None = None
    ) -> tuple[jax.Array, Pair]:
        """The gradients of this step: (dquery + query's gradient / scale, Pair of the gradients of key and value).

        All are float32. backward: its row terms are over the keys of all steps. dquery: float32 [B, T, H, D], the sum
        of the earlier steps. heads: a range of key heads from `in_parts`; only these heads and their query heads are
        computed, and the Pair has only these heads. None: all heads.
        """
        scale = self.options["scale"]
        whole = self._whole_call(visitors)
        if whole is None:
            found = self._gradients_of_pairs(visitors, backward)
            return dquery + found[0] / scale, Pair.of(*found[1:])
        planned, inputs = whole
        lse, delta = backward.lse, backward.delta
        options = dataclasses.replace(planned.options, float32_gradients=True)
        if heads is not None:
            group = self.query.shape[2] // inputs.key.shape[2]
            of_query = _some_heads(heads.first * group, heads.count * group)
            options = dataclasses.replace(options, query_heads=of_query, kv_heads=heads)
            lse, delta = (x[:, of_query.first : of_query.first + of_query.count] for x in (lse, delta))
        planned = dataclasses.replace(planned, options=options)
        return gradients_onto(planned, inputs, BackwardInputs(lse, delta, backward.dout), dquery, scale)

    def all_gradients(self, visitors: Visitors, backward: BackwardInputs) -> AttentionGradients:
        """The gradients of this step only, for a step with a bias or a score_mod, whose gradients are included.

        The gradients of query, key and value are float32. backward: its row terms are over the keys of all steps.
        """
        planned, inputs = self._general_call(visitors)
        planned = dataclasses.replace(planned, options=dataclasses.replace(planned.options, float32_gradients=True))
        return attention_gradients(planned, inputs, backward.lse, backward.delta, backward.dout, lse_lo=backward.lse_lo)

    def planned(self, visitors: Visitors) -> Any:
        """The AttentionCall of the step's forward, for `explain`.

        A step that is several pairs of chunks has one call with the pairs as its batch.
        """
        if self.has_far_scores:
            return self._general_call(visitors)[0]
        whole = self._whole_call(visitors)
        if whole is not None:
            return whole[0]
        _, planned, _ = self._pairs(visitors)
        return planned

    def in_parts(self, visitors: Visitors, share: float) -> list[HeadView]:
        """Two ranges of key heads, which together are all key heads, for two calls of `gradients`.

        Empty if `gradients` cannot compute some heads only. share: the fraction of the heads in the first range,
        rounded to whole heads.
        """
        if self.mask is not None and self.mask.heads > 1:  # the mask's lists are for all heads
            return []
        whole, kv_heads = self._whole_call(visitors), visitors.pair.key.shape[2]
        if whole is None or not _goes_on(whole[0]) or kv_heads < 2:
            return []
        first = min(max(1, round(kv_heads * share)), kv_heads - 1)
        return [_some_heads(0, first), _some_heads(first, kv_heads - first)]

    def _whole_call(self, visitors: Visitors) -> tuple[Any, Any] | None:
        """(AttentionCall, AttentionInputs) of the one call of all this device's queries with all visiting keys.

        None if one call cannot express the limits of this step: it then is several pairs of chunks.
        """
        if self.mask is not None:
            return self._general_call(visitors)
        whole = self.layout.whole(self.number, self.index)
        if whole is None:
            return None
        planned, inputs = self._prepared(self.query, visitors, self.q_ids, whole)
        if whole.reach is None:
            return planned, inputs
        if planned.implementation != "mosaic_gpu" or self.layout.chunk % CHUNK:
            return None
        batch, _, heads, _ = self.query.shape
        planned = dataclasses.replace(planned, config=_of_reach(planned.config, self.layout.chunk, batch * heads))
        reach = jnp.stack([jnp.asarray(x, jnp.int32) for x in whole.reach])
        return planned, inputs._replace(reach=jnp.broadcast_to(reach, (self.query.shape[0], 2)))

    def _general_call(self, visitors: Visitors) -> tuple[Any, Any]:
        """(AttentionCall, AttentionInputs) of one call of all this device's queries with all visiting keys.

        It may have a mask, a score_mod and a bias. Limits that a call has no argument for become a part of the mask.
        """
        whole, mask, given = self.layout.whole(self.number, self.index), None, {}
        if self.mask is not None or whole is None or whole.reach is not None:
            whole, mask = Whole(), self.layout.placed(self.mask, self.number, self.index)
        if self.score_mod is not None:
            given["score_mod"] = self.layout.placed_score_mod(self.score_mod, self.number, self.index)
        if self.bias is not None:
            source = self.layout.source(self.number, self.index)
            given["bias"] = self.bias if self.bias.shape[3] == 1 else self.layout.keys_of(self.bias, source)
        return self._prepared(self.query, visitors, self.q_ids, whole, mask=mask, **given)

    def _prepared(self, query: Any, visitors: Visitors, q_ids: Any, whole: Whole, **given: Any) -> tuple[Any, Any]:
        """(AttentionCall, AttentionInputs) of a call with the limits of `whole`. given: mask, score_mod and bias."""
        ids = visitors.segment_ids
        arguments = FlashArguments(
            query=query,
            key=visitors.pair.key,
            value=visitors.pair.value,
            is_causal=whole.is_causal,
            window=whole.window,
            segment_ids=None if ids is None else (q_ids, ids),
            q_offset=whole.q_offset,
            return_lse=True,
            **given,
            **self.options,
        )
        return prepare(arguments)

    def _pairs(self, visitors: Visitors) -> tuple[list[Chunks], Any, Any]:
        """(the step's pairs of chunks, the AttentionCall that has them as its batch, its AttentionInputs).

        The batch axis has the batch entries of the first pair, then of the second pair, and so on.
        """
        layout, pairs = self.layout, self.layout.pairs(self.number, self.index)
        join = lambda x, field: None if x is None else _joined(layout, pairs, field, x)
        whole, batch = Whole(), self.query.shape[0]
        if pairs[0].q_offset is not None:
            is_causal, window = layout.window(self.number)
            offsets = jnp.concatenate([jnp.full((batch,), pair.q_offset, jnp.int32) for pair in pairs])
            whole = Whole(q_offset=offsets, is_causal=is_causal, window=window)
        of_keys = Visitors(
            Pair(tuple(_joined(layout, pairs, "key", x) for x in (visitors.pair.key, visitors.pair.value))),
            join(visitors.segment_ids, "key"),
        )
        return pairs, *self._prepared(join(self.query, "query"), of_keys, join(self.q_ids, "query"), whole)

    def _forward_of_pairs(self, visitors: Visitors) -> tuple[jax.Array, jax.Array]:
        """The float32 (out, lse) of this step only, by a call over pairs of chunks."""
        layout = self.layout
        pairs, planned, inputs = self._pairs(visitors)
        out, lse, *_ = attention_forward(dataclasses.replace(planned, out_dtype="float32"), inputs)
        assert lse is not None
        of_chunk: list[Any] = [None] * layout.chunks
        for pair, *found in zip(pairs, jnp.split(out, len(pairs)), jnp.split(lse, len(pairs)), strict=True):
            for chunk in range(layout.chunks):
                mine = found
                if not isinstance(pair.query, int):
                    mine = [found[0], jnp.where(pair.query == chunk, found[1], -jnp.inf)]
                elif pair.query != chunk:
                    continue
                of_chunk[chunk] = mine if of_chunk[chunk] is None else merged(of_chunk[chunk], mine)
        return jnp.concatenate([x[0] for x in of_chunk], 1), jnp.concatenate([x[1] for x in of_chunk], 2)

    def _gradients_of_pairs(self, visitors: Visitors, backward: BackwardInputs) -> tuple[Any, ...]:
        """The float32 gradients (query, key, value) of this step only, by a call over pairs of chunks."""
        layout = self.layout
        pairs, planned, inputs = self._pairs(visitors)
        planned = dataclasses.replace(planned, options=dataclasses.replace(planned.options, float32_gradients=True))
        lse, delta = (_joined(layout, pairs, "query", x, 2) for x in (backward.lse, backward.delta))
        found = attention_gradients(planned, inputs, lse, delta, _joined(layout, pairs, "query", backward.dout))
        return tuple(
            _of_chunks(layout, [getattr(pair, field) for pair in pairs], x.astype(jnp.float32))
            for x, field in zip(found[:3], ("query", "key", "key"), strict=True)
        )


CHUNK = 128  # tokens; the Hopper kernels take chunks of an array in place if their length is a multiple of it
# Above this head_dim the Hopper kernel has no registers for the result of the earlier steps.
WIDEST_JOINED = 128


def _some_heads(first: int, count: int) -> HeadView:
    return HeadView(count=count, first=first, run=count, skip=0)


def _of_reach(blocks: Any, chunk: int, heads: int) -> Any:
    """The Hopper kernels' blocks for a step with a reach, in which a chunk of queries may see no key.

    blocks: from the block specs. chunk: the tokens of a chunk. heads: query heads times batch entries.

    A chunk is divided into whole blocks: three warpgroups take 192 queries, two take 128. One of a device's two chunks
    of queries may see no key. Enough heads run together that the blocks of the other chunk fill the SMs about twice.
    With fewer heads a step took 1.15 to 1.3 times as long.
    """
    forward, backward = blocks.forward, blocks.backward
    if chunk % forward.block_q:
        forward = dataclasses.replace(forward, compute_warpgroups=2)
    sizes = forward.block_q, forward.block_kv, backward.block_q, backward.dquery.block_kv if backward.dquery else 1
    assert all(chunk % size == 0 for size in sizes), (blocks, chunk)
    wanted = round(2 * blocks.core_count * forward.block_q / chunk)
    together = next((n for n in range(max(1, wanted), heads) if heads % n == 0), heads)
    return dataclasses.replace(blocks, forward=dataclasses.replace(forward, head_group=together))


def _chosen(layout: Layout, x: Any, chunk: Any, axis: int = 1) -> Any:
    """One chunk of a device's array x, along its axis of tokens. chunk: its index, an int or traced, 0 or 1."""
    if layout.chunks == 1:
        return x
    chunks = jnp.split(x, layout.chunks, axis)
    return chunks[chunk] if isinstance(chunk, int) else jnp.where(chunk == 0, chunks[0], chunks[1])


def _joined(layout: Layout, pairs: list[Chunks], field: str, x: jax.Array, axis: int = 1) -> jax.Array:
    """The chunk of x for each pair, joined along the batch. field: "query" or "key": whose chunk of the pair.

    axis: the axis of x's tokens.
    """
    return jnp.concatenate([_chosen(layout, x, getattr(pair, field), axis) for pair in pairs])


def _of_chunks(layout: Layout, places: list[Any], x: jax.Array) -> jax.Array:
    """[B, T, ...]: for each chunk of a device the sum of the results of its pairs.

    x: [pairs * B, tokens of a chunk, ...], a result of each pair. `places`: the index of each pair's chunk, an int or
    traced.
    """
    sums: list[Any] = [jnp.float32(0)] * layout.chunks
    for at, part in zip(places, jnp.split(x, len(places)), strict=True):
        for chunk in range(layout.chunks):
            if isinstance(at, int):
                sums[chunk] = sums[chunk] + (part if at == chunk else 0)
            else:
                sums[chunk] = sums[chunk] + jnp.where(at == chunk, part, 0)
    shape = x.shape[0] // len(places), *x.shape[1:]
    return jnp.concatenate([jnp.broadcast_to(y, shape) for y in sums], 1)
