"""Attention backward on Hopper: what its kernels read, made by XLA, and what becomes of their results."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.attention_inputs import AttentionGradients, AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.sm90 import (
    backward_deterministic,
    backward_kernel,
    block_lists,
    clean_end,
    dquery_state,
)
from jax_kernels.pallas.attention.sm90 import bias as bias_sm90
from jax_kernels.pallas.attention.sm90 import score_mod as score_mod_sm90
from jax_kernels.pallas.attention.sm90.backward_arrays import Arrays
from jax_kernels.pallas.attention.sm90.backward_load import KEYS_AT_ONCE
from jax_kernels.pallas.attention.sm90.backward_traits import block_kv_of
from jax_kernels.pallas.attention.sm90.segments import segments_of
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.attention.triton.far_rows import is_far
from jax_kernels.pallas.mosaic.smem_tiles import pad_for_tma
from jax_kernels.pallas.varying import as_varying, varying_axes


def attention_backward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    lse,
    delta,
    dout,
    dquery=None,
    excess=None,
    *,
    config,
    core_count,
    interpret,
) -> AttentionGradients:
    """See the package's docstring. config: AttentionBackwardSm90. 16-bit inputs only.

    excess: of the forward, under a score_mod that may mask.

    With a bias, far rows (far_rows.is_far) pass nothing to dquery, dkey and dvalue here, nor to the gradient of
    a bias for each key: far_rows adds that.

    dquery: float32, shaped as query, but that it may have the heads alone that the call takes: query's gradient over
    options.scale is added to it, and it is given back in place of the gradient, where that need not be deterministic.

    dquery is summed in order of arrival, and so may dkey and dvalue be (see split_tail); if options.deterministic,
    dquery by a kernel of its own, in the order of the keys.
    """
    query, key, value = inputs[:3]
    q_length, kv_length = query.shape[1], key.shape[1]
    width = _width(max(query.shape[-1], value.shape[-1]))
    block_kv = block_kv_of(width)
    dq_blocks = dquery_state.BLOCK_Q, dquery_state.SIZES[width].block_kv
    lists, *dq_lists = (
        block_lists.lists_of(inputs, options, **blocks, interpret=interpret)
        for blocks in listed_blocks(config, width, options)
    )
    mod = score_mod_sm90.mod_of(inputs, options, *map(max, dq_blocks, (config.block_q, block_kv)))
    natural = mod is not None and mod.may_mask
    if natural:
        # P comes out exp(excess) times too large, and P passes on dout and delta alone.
        factor = jnp.where(is_far(lse), jnp.exp(-excess), 1.0)
        dout, delta = (dout * factor.swapaxes(1, 2)[..., None]).astype(query.dtype), delta * factor
    any_rows = not options.deterministic
    q, k, v, do = (pad_for_tma(x, width, any_rows=any_rows) for x in (query, key, value, dout))
    end_of = functools.partial(clean_end.clean_end, inputs, k, v)
    end, dq_end = end_of(KEYS_AT_ONCE), end_of(dq_blocks[1]) if options.deterministic else None
    inputs, options = block_lists.without_limits(inputs, options)
    dense = bias_sm90.dense_of(inputs, transposed=True)
    # exp2(score - inf) = 0: rows past the end pass nothing, as rows without keys.
    short = -q_length % (dquery_state.BLOCK_Q if options.deterministic else config.block_q)
    rows = [(0, 0), (0, 0), (0, short)]
    # With a bias, far_rows adds what far rows pass.
    lse = jnp.where(is_far(lse), jnp.inf, lse * LOG2E) if inputs.bias is not None else lse if natural else lse * LOG2E
    lse = jnp.pad(lse, rows, constant_values=jnp.inf)

    arrays = Arrays(
        bounds=block_ranges.bounds_array(inputs, options),
        segments=segments_of(inputs, config.block_q, block_kv, of_keys=True),
        dense=dense,
        lists=lists,
        mod=mod,
        query=q,
        key=k,
        value=v,
        dout=do,
        lse=lse,
        delta=jnp.pad(delta, rows),
        end=end,
    )
    axes = varying_axes(inputs, lse, delta, dout)
    # Inside shard_map a kernel takes no ref that varies: what is there is added behind it.
    adds = dquery is not None and not axes
    if not options.deterministic:
        start = dquery if adds else jnp.zeros(q.shape, jnp.float32)
        arrays = dataclasses.replace(arrays, dquery=jax.new_ref(pad_for_tma(start, width)))
    described = {"config": config, "interpret": interpret}
    of_bias = _has_bias_gradient(inputs, options)
    dk, dv, dbias = backward_kernel.key_gradients(
        arrays, options, kv_length, bias_gradient=of_bias, core_count=core_count, **described
    )
    if options.deterministic:
        arrays = dataclasses.replace(
            arrays,
            segments=segments_of(inputs, *dq_blocks, of_keys=False),
            lists=dq_lists[0],
            end=dq_end,
            dense=bias_sm90.dense_of(inputs, transposed=False),
        )
        dq = backward_deterministic.query_gradient(arrays, options, kv_length, **described)
    else:
        dq = as_varying(jax.freeze(arrays.dquery), axes)
        if dquery is None:
            dq = (dq * options.scale).astype(query.dtype)
        elif not adds:
            dq = dq + pad_for_tma(dquery, width)
    if dbias is not None:
        shared = tuple(axis for axis in (0, 1) if inputs.bias.shape[axis] == 1)
        dbias = dbias[:, :, None, :kv_length].sum(shared, keepdims=True).astype(inputs.bias.dtype)
    pairs = zip((dq, dk, dv), inputs[:3], strict=True)
    dq, dk, dv = (dx[:, : x.shape[1], :, : x.shape[3]] for dx, x in pairs)
    return AttentionGradients(dq, dk, dv, bias=dbias)


def _has_bias_gradient(inputs: AttentionInputs, options: AttentionOptions) -> bool:
    """Whether the kernel of dkey sums the gradient of the bias on its way: of one for each key.

    It sums over the heads that share a head of keys.
    """
    if inputs.bias is None or not options.bias_gradient or options.softcap is not None or inputs.bias.shape[2] > 1:
        return False
    return inputs.bias.shape[1] in (1, inputs.key.shape[2])


def listed_blocks(config, widest: int, options: AttentionOptions) -> list[dict[str, Any]]:
    """Of which blocks lists_of makes the lists of a mask: those by key, and those of a deterministic dquery.

    widest: the larger of the head dims.
    """
    width, together = _width(widest), {"heads_together": config.heads_together}
    of_keys = {"block_q": config.block_q, "block_kv": block_kv_of(width), "by": "key"}
    of_queries = {
        "block_q": dquery_state.BLOCK_Q,
        "block_kv": dquery_state.SIZES[width].block_kv,
        "by": "query",
    }
    return [blocks | together for blocks in ([of_keys, of_queries] if options.deterministic else [of_keys])]


def _width(widest: int) -> int:
    """The head dim that the kernels are compiled for."""
    return next(w for w in (64, 128, 256) if w >= widest)
