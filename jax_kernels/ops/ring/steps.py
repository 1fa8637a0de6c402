"""The attention of one step of a ring: a device's queries with the visiting keys and values.

A step is one call of the attention kernels if its limits allow it. On "mosaic_gpu" this call starts from the float32
(out, lse) of the earlier steps, adds query's gradient to the gradient of the earlier steps, and writes the gradients of
key and value in float32. Between two steps, only the kernels read or write results.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionGradients, FlashArguments, HeadView
from jax_kernels.ops.attention.flash_attention import prepare
from jax_kernels.ops.attention.vjp import attention_forward, attention_gradients
from jax_kernels.ops.ring.layouts import Chunks, Layout, Whole
from jax_kernels.ops.ring.partial_results import (
    BackwardInputs,
    Pair,
    Visitors,
    adds_dquery,
    forward_onto,
    gradients_onto,
    key_norms,
    merged,
    merged_exactly,
)

__all__ = ["Step"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a ring: the attention of a device's queries to the keys of the device that is `number` before it.

    index: this device's index along the mesh axis, a traced number. query: [B, T, H, D], of this device. q_ids: [B, T],
    the queries' segment ids. all_ids: [B, S], the ids of all devices, in the order of the devices; None if a step's
    Visitors have their ids. mask, score_mod: of the whole sequence. bias: [B or 1, H or 1, T or 1, S or 1], rows for
    this device's queries, columns for all S keys in sequence order. Each is None if absent. options: of
    flash_attention, by name.
    """

    layout: Layout
    number: int
    index: Any
    query: jax.Array
    q_ids: Any
    options: dict[str, Any]
    all_ids: Any = None
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
        return forward_onto(planned, inputs._replace(key_norms=visitors.key_norms), total, is_last=is_last)

    def with_key_norms(self, visitors: Visitors) -> Visitors:
        """The Visitors of this step with their key_norms, if a kernel reads them."""
        whole = None if self.has_far_scores or self.mask is not None else self._whole_call(visitors)
        return visitors if whole is None else visitors._replace(key_norms=key_norms(*whole))

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
        if whole is None or not adds_dquery(whole[0]) or kv_heads < 2:
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
        ids = self._key_ids(visitors)
        arguments = FlashArguments(
            query=query,
            key=visitors.pair.key,
            value=visitors.pair.value,
            is_causal=whole.is_causal,
            window=whole.window,
            segment_ids=None if ids is None else self.layout.ids_of_step(self.number, self.index, q_ids, ids),
            q_offset=whole.q_offset,
            return_lse=True,
            **given,
            **self.options,
        )
        return prepare(arguments)

    def _key_ids(self, visitors: Visitors) -> Any:
        """int32 [B, S']: the segment ids of the step's keys, or None. Keys that no device needs have the id -1."""
        ids = visitors.segment_ids
        if ids is None and self.all_ids is not None:
            first = self.layout.source(self.number, self.index) * self.layout.length
            ids = lax.dynamic_slice_in_dim(self.all_ids, first, self.layout.shared, 1)
        more = 0 if ids is None else visitors.pair.key.shape[1] - ids.shape[1]
        return jnp.pad(ids, [(0, 0), (0, more)], constant_values=-1) if more else ids

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
            join(self._key_ids(visitors), "key"),
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


def _some_heads(first: int, count: int) -> HeadView:
    """The HeadView of `count` consecutive heads, from head `first` on."""
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


def _of_chunks(layout: Layout, chunks: list[Any], x: jax.Array) -> jax.Array:
    """[B, T, ...]: for each chunk of a device the sum of the results of its pairs.

    x: [pairs * B, tokens of a chunk, ...], a result of each pair. chunks: the index of each pair's chunk, an int or
    traced.
    """
    sums: list[Any] = [jnp.float32(0)] * layout.chunks
    for at, part in zip(chunks, jnp.split(x, len(chunks)), strict=True):
        for chunk in range(layout.chunks):
            if isinstance(at, int):
                sums[chunk] = sums[chunk] + (part if at == chunk else 0)
            else:
                sums[chunk] = sums[chunk] + jnp.where(at == chunk, part, 0)
    shape = x.shape[0] // len(chunks), *x.shape[1:]
    return jnp.concatenate([jnp.broadcast_to(y, shape) for y in sums], 1)
