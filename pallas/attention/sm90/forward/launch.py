"""Attention forward on Hopper: the arrays that its kernel reads, and whether vector norms bound the scores.

The kernel's loop over keys keeps a running maximum per row only if it has to. Norms bound scores: |q . k| <= |q| |k|,
and the largest norms of a head's queries and keys are computed beforehand. If no score can rise far above the maximum
of a row's first block, a maximum that no score exceeds serves for all blocks: bfloat16 and float32 have the exponents
for it. The kernel then omits the search for the maximum, the rescaling, and the wait for both, which are a third of its
instructions. In causal work the first block is the diagonal block: rows with few keys have no other block.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.masks.limits import without_limits
from jax_kernels.pallas.attention import block_ranges, softmax
from jax_kernels.pallas.attention.passes import row_norms
from jax_kernels.pallas.attention.sm90.features import bias as bias_sm90
from jax_kernels.pallas.attention.sm90.features import block_lists, head_views, tail_block
from jax_kernels.pallas.attention.sm90.features import score_mod as score_mod_sm90
from jax_kernels.pallas.attention.sm90.features.segments import segments_of
from jax_kernels.pallas.attention.sm90.features.softcap import TANH_UP_TO
from jax_kernels.pallas.attention.sm90.forward import kernel as forward_kernel
from jax_kernels.pallas.attention.sm90.forward.loop import is_short_tile
from jax_kernels.pallas.attention.sm90.forward.state import Arrays, Earlier
from jax_kernels.pallas.block_specs.specs import AttentionForwardSm90
from jax_kernels.pallas.kernel_types import needed
from jax_kernels.pallas.mosaic.smem_tiles import has_odd_length, pad_for_tma
from jax_kernels.pallas.mosaic.tile_scheduler import Shape, TileScheduler

# (out, lse) or (out, lse, lse_lo).
type ForwardArrays = tuple[Float[Array, "B T H Dv"], *tuple[Float32[Array, "B H T"] | None, ...]]


def attention_forward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    out_dtype: DTypeLike,
    config: AttentionForwardSm90,
    core_count: int,
    interpret: bool,
) -> ForwardArrays:
    """(out [B, T, H, Dv] in out_dtype, lse [B, H, T] float32), or (out, lse, lse_lo), of attention with 16-bit inputs.

    lse_lo: like lse, the exact log-sum-exp minus lse, with a bias or under a score_mod that may mask. lse is None if
    not options.has_lse. A query without keys has out = 0 and lse = -inf. config: the block spec row.
    """
    call = head_views.LaunchCall.of(inputs, options)
    lists = block_lists.lists_of(inputs, options, **listed_blocks(config), interpret=interpret)
    no_later_keys = options.is_causal and inputs.q_offset is None and options.q_offset == 0
    keys = _keys_per_query(options, call.kv_length)
    keys = keys if lists is None else min(keys, lists.keys)
    query, key, value = _padded([inputs], config)[0]
    end = tail_block.clean_end(inputs, key, value, config.block_kv)
    if lists is not None:
        inputs, options = without_limits(inputs, options)
    segments = segments_of(inputs, config.block_q, config.block_kv, of_keys=False, interpret=interpret)
    bias = bias_sm90.bias_of(inputs, transposed=False)
    mod = score_mod_sm90.mod_of(inputs, options, config.block_q, config.block_kv)
    largest = small = None
    norms_q_in_kernel = _norms_q_in_kernel(inputs, options, config)
    if _bounds_pay(inputs, options, config, keys, has_lists=lists is not None):
        largest, small = _bounds(
            query,
            key,
            mod,
            options,
            norms_q_in_kernel=norms_q_in_kernel,
            no_later_keys=no_later_keys,
            key_norms=inputs.key_norms,
            interpret=interpret,
        )
    sinks = inputs.sinks
    config = dataclasses.replace(config, norms_q_in_kernel=norms_q_in_kernel)
    visits_all = not (
        options.is_causal or _is_limited(inputs, options) or lists is not None or inputs.kv_lengths is not None
    )
    short_last = visits_all and call.q_length > config.block_q and is_short_tile(call.q_length, config.block_q)
    scheduler = _scheduler((call,), options.is_causal, config, core_count, short_last=short_last, interpret=interpret)
    arrays = Arrays(
        query=[query],
        key=[key],
        value=[value],
        bounds=block_ranges.bounds_array(inputs, options),
        segments=segments,
        bias=bias,
        earlier=_earlier(inputs, config.block_q, value.shape[-1]),
        lists=lists,
        mod=mod,
        sinks=None if sinks is None else jnp.broadcast_to(sinks.astype(jnp.float32), (len(query), sinks.shape[1])),
        score_bounds=largest,
        small_scores=small,
        end=None if end is None else end._replace(key=None),  # scores of keys past the length are masked
        counter=scheduler.counter(),
    )
    ((out, *rows),) = _launch(
        arrays, scheduler, options, (call,), out_dtype=out_dtype, config=config, interpret=interpret
    )
    out = out[..., : inputs.value.shape[-1]]
    if not rows:
        return out, None
    lse, *lse_lo = rows
    if inputs.bias is not None and inputs.bias.shape[2] == 1:
        lse = bias_sm90.ByKey.of(inputs.bias).in_lse(needed(lse))
    return cast(ForwardArrays, (out, lse, *lse_lo))


def attention_forward_together(
    inputs: Sequence[AttentionInputs],
    options: Sequence[AttentionOptions],
    *,
    out_dtype: DTypeLike,
    config: AttentionForwardSm90,
    core_count: int,
    interpret: bool,
) -> list[ForwardArrays]:
    """The results of attention_forward for several calls, in their order.

    The calls with few work tiles have one launch in common, unless bounds of their scores would pay. Each other call
    has a launch of its own. If not options.has_lse, the result of a call in the common launch is (out,). inputs,
    options: of each call. The calls have only query, key and value. Their options differ only in the views of heads.
    """
    named: dict[str, Any] = {"out_dtype": out_dtype, "config": config, "core_count": core_count, "interpret": interpret}
    calls = [head_views.LaunchCall.of(*call) for call in zip(inputs, options, strict=True)]
    keys = [_keys_per_query(of, call.kv_length) for of, call in zip(options, calls, strict=True)]

    def is_small(i: int) -> bool:
        arrays = inputs[i].query, inputs[i].key
        looks = config.bounded and _look_pays(keys[i], config.bounded_from, *arrays, calls[i].heads)
        return not looks and _shape_of(calls[i], config).tiles <= config.one_launch_max_tiles * core_count

    # Calls with the most keys per query come first, like tiles within a call.
    together = sorted(filter(is_small, range(len(calls))), key=lambda i: -keys[i])
    others = (i for i in range(len(calls)) if i not in together)
    results = {i: attention_forward(inputs[i], options[i], **named) for i in others}
    if together:
        # The options differ only in the heads, which each LaunchCall also has.
        shared, of_launch = options[together[0]], tuple(calls[i] for i in together)
        query, key, value = zip(*_padded([inputs[i] for i in together], config), strict=True)
        scheduler = _scheduler(of_launch, shared.is_causal, config, core_count, interpret=interpret)
        arrays = Arrays(query=list(query), key=list(key), value=list(value), counter=scheduler.counter())
        launched = _launch(
            arrays, scheduler, shared, of_launch, out_dtype=out_dtype, config=config, interpret=interpret
        )
        results |= zip(together, launched, strict=True)
    widths = [of.value.shape[-1] for of in inputs]
    return [(results[i][0][..., :width], *results[i][1:]) for i, width in enumerate(widths)]


def _padded(inputs: Sequence[AttentionInputs], config: AttentionForwardSm90) -> list[tuple[jax.Array, ...]]:
    """(query, key, value) of each call of a launch, with head_dims and lengths that the tensor memory accelerator
    takes.

    Copies of any number of rows need swizzle atoms of 64 columns. Without them, odd lengths are padded.
    """
    any_rows = config.atom == 64 and has_odd_length(*(x for of in inputs for x in (of.query, of.key)))
    return [tuple(pad_for_tma(x, config.atom, any_rows=any_rows) for x in of[:3]) for of in inputs]


def _launch(
    arrays: Arrays,
    scheduler: TileScheduler,
    options: AttentionOptions,
    calls: tuple[head_views.LaunchCall, ...],
    *,
    out_dtype: DTypeLike,
    config: AttentionForwardSm90,
    interpret: bool,
) -> list[ForwardArrays]:
    """For each call (out, lse); with a bias or a score_mod that may mask (out, lse, lse_lo); without has_lse (out,).

    The rows are cut to the calls' lengths.
    """
    results = forward_kernel.run(
        arrays, scheduler, options, calls, out_dtype=out_dtype, config=config, interpret=interpret
    )
    rows = [x for x in (results.lses, results.lse_lo) if x]
    return [
        (results.outs[i][:, : call.q_length], *(x[i][..., : call.q_length] for x in rows))
        for i, call in enumerate(calls)
    ]


def _earlier(inputs: AttentionInputs, block_q: int, columns: int) -> Earlier | None:
    """The results of other keys to merge with, padded to whole blocks of queries and to `columns` columns; None without
    them.
    """
    if inputs.earlier_out is None:
        return None
    short = -inputs.query.shape[1] % block_q
    out = jnp.pad(inputs.earlier_out, [(0, 0), (0, short), (0, 0), (0, columns - inputs.earlier_out.shape[-1])])
    return Earlier(out, jnp.pad(needed(inputs.earlier_lse), [(0, 0), (0, 0), (0, short)]))


def _scheduler(
    calls: tuple[head_views.LaunchCall, ...],
    longest_last: bool,
    config,
    core_count: int,
    *,
    short_last: bool = False,
    interpret: bool,
) -> TileScheduler:
    return TileScheduler(
        shapes=tuple(_shape_of(call, config) for call in calls),
        longest_last=longest_last,
        short_last=short_last,
        head_group=config.head_group,
        dynamic=config.dynamic and not interpret,
        core_count=core_count,
    )


def _shape_of(call: head_views.LaunchCall, config) -> Shape:
    return Shape.of(call.batch, call.heads, call.q_length, config.block_q)


def reads_key_norms(inputs: AttentionInputs, options: AttentionOptions, config: AttentionForwardSm90) -> bool:
    """Whether attention_forward with these arguments, without a mask, reads inputs.key_norms if they are given."""
    known = inputs._replace(key_norms=jnp.zeros((), jnp.float32))
    return _bounds_pay(known, options, config, _keys_per_query(options, inputs.key.shape[1]), has_lists=False)


def _bounds_pay(
    inputs: AttentionInputs, options: AttentionOptions, config: AttentionForwardSm90, keys: int, *, has_lists: bool
) -> bool:
    """Whether the kernel gets upper bounds of the scores.

    keys: the approximate number of keys that a query attends to. has_lists: whether the blocks are listed because of a
    mask; then inputs and options are without limits.
    """
    query, key, is_limited = inputs.query, inputs.key, _is_limited(inputs, options)
    bounded_from = config.bounded_from_limited if is_limited else config.bounded_from
    bounded_from = config.bounded_from_lists if has_lists else bounded_from
    looks_at_keys_only = _norms_q_in_kernel(inputs, options, config) and not is_limited
    of_look = key.shape[2] / (query.shape[2] + key.shape[2]) if looks_at_keys_only else 1
    looked_at, heads = key if inputs.key_norms is None else None, head_views.LaunchCall.of(inputs, options).heads
    pays = _look_pays(keys, bounded_from * of_look, query, looked_at, heads)
    return config.bounded and pays and inputs.bias is None


def _is_limited(inputs: AttentionInputs, options: AttentionOptions) -> bool:
    return options.window is not None or inputs.q_segment_ids is not None


def _norms_q_in_kernel(inputs: AttentionInputs, options: AttentionOptions, config: AttentionForwardSm90) -> bool:
    """Whether the kernel computes the norms of its queries, and gets upper bounds for queries of norm 1."""
    # The bounds under a score_mod, and small scores, are determined for whole heads.
    return config.norms_q_in_kernel and inputs.score_mod is None and not options.softcap


def _look_pays(keys: int, bounded_from: float, query: jax.Array, key: jax.Array | None, heads: int) -> bool:
    """Whether upper bounds of the scores save more time in the loop over keys than their vector norms take.

    keys: the approximate number of keys that a query attends to. bounded_from: the least such number that pays, if the
    call uses all heads of query, and query has at least as many vectors as key. key: None if its norms are known.
    heads: the number of heads that the call uses; norms are computed for all heads.
    """
    vectors = query.shape[1] * query.shape[2]
    of_keys = 0 if key is None else key.shape[1] * key.shape[2]
    share = min(1.0, 2 * vectors / (vectors + of_keys))  # few queries save little, and all keys are read
    return keys * share >= bounded_from * query.shape[2] / heads


def listed_blocks(config: AttentionForwardSm90) -> dict[str, Any]:
    """The keyword arguments of block_lists.lists_of for this block spec row: block_q, block_kv, by and
    head_group.
    """
    blocks = {"block_q": config.block_q, "block_kv": config.block_kv}
    return {**blocks, "by": "query", "head_group": config.head_group}


def _bounds(
    query,
    key,
    mod,
    options: AttentionOptions,
    *,
    no_later_keys: bool,
    interpret: bool,
    norms_q_in_kernel: bool = False,
    key_norms=None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """(largest, small), both [B, heads of query], from the norms of queries and keys; each may be None.

    The heads are all heads of the array query, also the heads that the call does not use.

    largest: float32, an upper bound of a head's scores in base 2; None if unknown. small: int32, 1 if all scores of a
    head are so small that a polynomial computes a tanh of them; None without a softcap or a tanh in the score_mod. mod:
    the call's score_mod or None. no_later_keys: queries attend to no key with a greater index. norms_q_in_kernel:
    largest is for queries of norm 1. key_norms: [B, Hkv] float32, the largest squared norm of a key; None: computed
    here.
    """
    cap, headroom = options.softcap, softmax.headroom(query.dtype)

    @functools.cache
    def scores():
        longest = functools.partial(row_norms.longest, interpret=interpret)
        of_queries = jnp.ones((query.shape[0], query.shape[2]), jnp.float32) if norms_q_in_kernel else longest(query)
        of_keys = longest(key) if key_norms is None else key_norms
        return softmax.largest_scores(of_queries, of_keys, options.scale / softmax.LOG2E)

    factor = 1 / cap if cap else mod.tanh_factor if mod is not None else None
    small = None if factor is None else (scores() * abs(factor) <= TANH_UP_TO).astype(jnp.int32)
    if mod is None:
        highest = jnp.minimum(scores(), cap) if cap else scores()
    else:
        lengths = {"farthest": max(query.shape[1], key.shape[1]), "no_later_keys": no_later_keys}
        highest = mod.highest(None, **lengths)
        if highest is None or (isinstance(highest, float) and highest * softmax.LOG2E > headroom):
            of_any_size = mod.highest(jnp.zeros((1, 1)), **lengths)
            highest = None if of_any_size is None else mod.highest(scores(), **lengths)
        if highest is None or mod.may_mask:
            return None, None
    return jnp.broadcast_to(jnp.asarray(highest * softmax.LOG2E, jnp.float32), (query.shape[0], query.shape[2])), small


def _keys_per_query(options: AttentionOptions, kv_length: int) -> int:
    """The approximate number of keys that a query attends to, from causality and the window only."""
    keys = kv_length // 2 if options.is_causal else kv_length
    if options.window is None or options.window[0] < 0:
        return keys
    return min(keys, options.window[0] + (0 if options.is_causal else max(options.window[1], 0)))
