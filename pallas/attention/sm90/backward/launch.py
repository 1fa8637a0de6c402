"""Attention backward on Hopper: XLA prepares the kernels' operands, and finishes their results."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionOptions
from jax_kernels.masks.limits import without_limits
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.passes import prepare_backward
from jax_kernels.pallas.attention.sm90.backward import (
    deterministic as backward_deterministic,
)
from jax_kernels.pallas.attention.sm90.backward import (
    dquery_state,
)
from jax_kernels.pallas.attention.sm90.backward import (
    kernel as backward_kernel,
)
from jax_kernels.pallas.attention.sm90.backward.arrays import Arrays
from jax_kernels.pallas.attention.sm90.backward.load import KEYS_AT_ONCE
from jax_kernels.pallas.attention.sm90.backward.widths import Widths
from jax_kernels.pallas.attention.sm90.features import bias as bias_sm90
from jax_kernels.pallas.attention.sm90.features import block_lists, tail_block
from jax_kernels.pallas.attention.sm90.features import score_mod as score_mod_sm90
from jax_kernels.pallas.attention.sm90.features.segments import segments_of
from jax_kernels.pallas.attention.softmax import LOG2E, is_large
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90
from jax_kernels.pallas.kernel_types import Ref, needed
from jax_kernels.pallas.mosaic.smem_tiles import has_odd_length, pad_for_tma
from jax_kernels.tracing.manual_axes import as_varying, varying_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """The inputs, options and arrays of a call in the form that its backward kernels take.

    inputs, options: the call's, without the limits if there are block lists, which then hold all limits. arrays: read
    by the kernel of dkey and dvalue, whose CTAs own blocks of keys. dq_lists, dq_end: `lists` and `end` for the other
    kernel, which computes a deterministic dquery and whose CTAs own blocks of queries; else None. zeros: a float32
    array of zeros to which a kernel can add dquery; None if no pass made it.
    """

    inputs: AttentionInputs
    options: AttentionOptions
    arrays: Arrays
    dq_lists: block_lists.Lists | None
    dq_end: tail_block.CleanEnd | None
    zeros: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """The arrays that attention_backward gets from the forward (lse, lse_lo, out) and from its caller (dout, dlse,
    delta).

    Shapes: [B, H, T] float32 for lse, delta, lse_lo and dlse, [B, T, H, Dv] for dout and out.
    """

    lse: jax.Array
    delta: jax.Array | None
    dout: jax.Array
    lse_lo: jax.Array | None
    out: jax.Array | None
    dlse: jax.Array | None


def makes_rows(
    inputs: AttentionInputs, options: AttentionOptions, out: Float[Array, "B T H Dv"], *, config: AttentionBackwardSm90
) -> bool:
    """Whether the caller of attention_backward should pass out and dlse instead of delta.

    A pass over out and dout then computes delta. It is not possible with a bias or a score_mod, which change lse or
    dout, with a view of query's heads, without Pallas-Triton, or if CUDA's grid has no room for the pass.
    """
    if not (inputs.bias is None and inputs.score_mod is None and options.query_heads is None):
        return False
    return prepare_backward.takes(out, _widths_of(inputs, options, config).key, _whole_rows(options, config))


def attention_backward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    lse: Float32[Array, "B H T"],
    delta: Float32[Array, "B H T"] | None,
    dout: Float[Array, "B T H Dv"],
    dquery: Float32[Array, "B T H D"] | None = None,
    lse_lo: Float32[Array, "B H T"] | None = None,
    out: Float[Array, "B T H Dv"] | None = None,
    dlse: Float32[Array, "B H T"] | None = None,
    *,
    config: AttentionBackwardSm90,
    core_count: int,
    interpret: bool,
) -> AttentionGradients:
    """The gradients of 16-bit inputs, each with its input's shape and dtype.

    lse: [B, H, T] float32, natural log. delta: [B, H, T] float32, the sum of out * dout minus the cotangent of lse.
    lse_lo: the forward's, needed under a score_mod that may mask: the exact log-sum-exp minus lse.

    out, dlse: instead of delta, if makes_rows returns True. lse is then the forward's, and a pass computes delta. dlse,
    the cotangent of lse, may be None.

    With a bias, queries with a large lse (softmax.is_large) pass no gradient here to query, key, value or a bias per
    key. triton/large_lse_rows.py adds their gradients.

    dquery: float32, with query's shape, or with only the heads that the call uses. query's gradient / options.scale is
    added to it, and the sum is returned instead of the gradient. dquery must be None if options.deterministic.

    The kernel adds dquery in order of arrival, and may add dkey and dvalue the same way, if it splits the last work
    tiles into parts. If options.deterministic, another kernel sums dquery in the order of the keys.
    """
    config = _fitting(config, options, has_score_mod=inputs.score_mod is not None)
    widths = _widths_of(inputs, options, config)
    axes = varying_axes(inputs, lse, delta, dout, out, dlse)
    # Inside shard_map a kernel takes no ref that varies: a given dquery is added after the kernel.
    adds = dquery is not None and not axes
    prepared = _prepared(
        inputs,
        options,
        Given(lse=lse, delta=delta, dout=dout, lse_lo=lse_lo, out=out, dlse=dlse),
        widths=widths,
        zeros=not (options.deterministic or adds or axes),
        config=config,
        interpret=interpret,
    )
    inputs, options, arrays = prepared.inputs, prepared.options, prepared.arrays
    kv_length = inputs.key.shape[1]
    if not options.deterministic:
        # XLA passes rows of an array in place, and then forgets that the kernel changes them: the barrier copies them.
        start = jax.lax.optimization_barrier(dquery) if adds else prepared.zeros
        if start is None:
            start = jnp.zeros(arrays.query.shape if dquery is None else dquery.shape, jnp.float32)
        arrays = dataclasses.replace(arrays, dquery=cast(Ref, jax.new_ref(pad_for_tma(start, widths.key))))
    dk, dv, dbias = backward_kernel.key_gradients(
        arrays,
        options,
        kv_length,
        bias_gradient=_has_bias_gradient(inputs, options),
        config=config,
        core_count=core_count,
        interpret=interpret,
    )
    if options.deterministic:
        assert config.dquery is not None, config
        arrays = _of_queries(prepared, config.dquery.block_kv, interpret=interpret)
        dq = backward_deterministic.query_gradient(arrays, options, kv_length, config=config, interpret=interpret)
    else:
        dq = as_varying(jax.freeze(cast(jax.Ref, arrays.dquery)), axes)
        if dquery is None:
            dq = (dq * options.scale).astype(jnp.float32 if options.float32_gradients else inputs.query.dtype)
        elif not adds:
            dq = dq + pad_for_tma(dquery, widths.key)
    if dbias is not None and inputs.bias is not None:
        shared = tuple(axis for axis in (0, 1) if inputs.bias.shape[axis] == 1)
        dbias = dbias[:, :, None, :kv_length].sum(shared, keepdims=True).astype(inputs.bias.dtype)
    pairs = zip((dq, dk, dv), inputs[:3], strict=True)
    dq, dk, dv = (dx[:, : x.shape[1], :, : x.shape[3]] for dx, x in pairs)
    return AttentionGradients(dq, dk, dv, bias=dbias)


def _prepared(
    inputs: AttentionInputs,
    options: AttentionOptions,
    given: Given,
    *,
    widths: Widths,
    zeros: bool,
    config: AttentionBackwardSm90,
    interpret: bool,
) -> Prepared:
    """The inputs, options and padded arrays of a call for its backward kernels.

    widths: the columns of the kernels' tiles. zeros: whether a pass may make the zeros of dquery.
    """
    query, key, value = inputs[:3]
    block_kv = widths.block_kv
    dq_block_kv = 0 if config.dquery is None else config.dquery.block_kv
    lists, *dq_lists = (
        block_lists.lists_of(inputs, options, **blocks, interpret=interpret)
        for blocks in listed_blocks(config, query.shape[-1], value.shape[-1], options)
    )
    mod = score_mod_sm90.mod_of(inputs, options, max(dquery_state.BLOCK_Q, config.block_q), max(dq_block_kv, block_kv))
    any_rows = not options.deterministic and widths.takes_any_rows
    any_queries = any_rows and widths.takes_any_queries
    is_exact = (query.shape[-1], value.shape[-1]) == (widths.key, widths.value)
    copies_queries = has_odd_length(query) and is_exact and not any_queries
    if given.delta is None:
        dout = given.dout
        rows = prepare_backward.rows_of(
            needed(given.out),
            dout,
            given.lse,
            given.dlse,
            block_q=_whole_rows(options, config),
            query=query if copies_queries else None,
            width=widths.key,
            zeros=zeros,
            interpret=interpret,
        )
    else:
        natural = mod is not None and mod.may_mask
        dout, rows = _rows(inputs, given, natural=natural, block_q=_whole_rows(options, config))
    k, v = (pad_for_tma(x, width, any_rows=any_rows) for x, width in ((key, widths.key), (value, widths.value)))
    q = pad_for_tma(query, widths.key, any_rows=any_queries) if rows.query is None else rows.query
    do = pad_for_tma(dout, widths.value, any_rows=any_queries) if rows.dout is None else rows.dout
    end = tail_block.clean_end(inputs, k, v, KEYS_AT_ONCE)
    dq_end = tail_block.clean_end(inputs, k, v, dq_block_kv) if options.deterministic else None
    if lists is not None:
        inputs, options = without_limits(inputs, options)
    bias = bias_sm90.bias_of(inputs, transposed=True)
    arrays = Arrays(
        bounds=block_ranges.bounds_array(inputs, options),
        segments=segments_of(inputs, config.block_q, block_kv, of_keys=True, interpret=interpret),
        bias=bias,
        lists=lists,
        mod=mod,
        query=q,
        key=k,
        value=v,
        dout=do,
        lse=rows.lse,
        delta=rows.delta,
        end=end,
    )
    return Prepared(
        inputs=inputs,
        options=options,
        arrays=arrays,
        dq_lists=dq_lists[0] if dq_lists else None,
        dq_end=dq_end,
        zeros=rows.dquery,
    )


def _rows(
    inputs: AttentionInputs, given: Given, *, natural: bool, block_q: int
) -> tuple[jax.Array, prepare_backward.RowTerms]:
    """(dout, RowTerms: the padded lse and delta), as the kernels read them, computed by XLA from lse, delta and lse_lo.

    natural: a score_mod may mask, so that lse stays in natural units, and dout and delta of large rows get the factor
    exp(-lse_lo); otherwise lse is in base 2. With a bias, large rows have lse = inf, so that the kernels give them no
    gradient. block_q: lse and delta are padded to a multiple of it, with inf and 0. RowTerms.dquery is None.
    """
    lse, delta, dout = given.lse, given.delta, given.dout
    large = is_large(lse)
    if natural:
        # P comes out exp(lse_lo) times too large. It reaches the gradients only as a factor of dout and delta.
        factor = jnp.where(large, jnp.exp(-needed(given.lse_lo)), 1.0)
        dout = (dout * factor.swapaxes(1, 2)[..., None]).astype(inputs.query.dtype)
        delta = needed(delta) * factor
    # exp2(score - inf) = 0: rows past the end pass no gradient, like rows without keys.
    pad = [(0, 0), (0, 0), (0, -inputs.query.shape[1] % block_q)]
    # With a bias, large_lse_rows adds the gradients of large rows.
    lse = jnp.where(large, jnp.inf, lse * LOG2E) if inputs.bias is not None else lse if natural else lse * LOG2E
    lse = jnp.pad(lse, pad, constant_values=jnp.inf)
    return dout, prepare_backward.RowTerms(lse=lse, delta=jnp.pad(needed(delta), pad), dquery=None)


def _whole_rows(options: AttentionOptions, config: AttentionBackwardSm90) -> int:
    """The number of queries to whose multiple lse and delta are padded: block_q, or 128 if options.deterministic."""
    return dquery_state.BLOCK_Q if options.deterministic else config.block_q


def _of_queries(prepared: Prepared, block_kv: int, *, interpret: bool) -> Arrays:
    """The arrays for the kernel of a deterministic dquery, which owns blocks of queries. block_kv: its block of
    keys.
    """
    inputs = prepared.inputs
    return dataclasses.replace(
        prepared.arrays,
        segments=segments_of(inputs, dquery_state.BLOCK_Q, block_kv, of_keys=False, interpret=interpret),
        lists=prepared.dq_lists,
        end=prepared.dq_end,
        bias=bias_sm90.bias_of(inputs, transposed=False),
    )


def _has_bias_gradient(inputs: AttentionInputs, options: AttentionOptions) -> bool:
    """Whether the kernel of dkey also computes the gradient of the bias.

    It needs a bias per key, options.bias_gradient, no softcap, and a bias that is equal for the query heads of a key
    head.
    """
    if inputs.bias is None or not options.bias_gradient or options.softcap is not None or inputs.bias.shape[2] > 1:
        return False
    return inputs.bias.shape[1] in (1, inputs.key.shape[2])


def listed_blocks(
    config: AttentionBackwardSm90, head_dim: int, v_head_dim: int, options: AttentionOptions
) -> list[dict[str, Any]]:
    """The keyword arguments of block_lists.lists_of for each kernel of a call: block_q, block_kv, by and
    head_group.

    The first dict is for the kernel of dkey and dvalue, with by="key". If options.deterministic, a second dict is for
    the kernel of dquery, with by="query". head_dim, v_head_dim: of query and of value.
    """
    config = _fitting(config, options)
    widths = Widths.of(head_dim, v_head_dim, config.block_q, deterministic=options.deterministic)
    together = {"head_group": config.head_group}
    of_keys = {"block_q": config.block_q, "block_kv": widths.block_kv, "by": "key"}
    every = [of_keys]
    if options.deterministic:
        assert config.dquery is not None, config
        every.append({"block_q": dquery_state.BLOCK_Q, "block_kv": config.dquery.block_kv, "by": "query"})
    return [blocks | together for blocks in every]


def _widths_of(inputs: AttentionInputs, options: AttentionOptions, config: AttentionBackwardSm90) -> Widths:
    """The columns of the kernels' tiles for these inputs."""
    head_dims = inputs.query.shape[-1], inputs.value.shape[-1]
    return Widths.of(*head_dims, config.block_q, deterministic=options.deterministic)


def _fitting(
    config: AttentionBackwardSm90, options: AttentionOptions, *, has_score_mod: bool = False
) -> AttentionBackwardSm90:
    """The row's blocks; for a deterministic backward, whose tiles may be wider than the row's, blocks that fit them.

    A score_mod leaves few registers: with a third stage of queries it would spill 24 to 180 bytes more, at 64.
    """
    if has_score_mod:
        config = dataclasses.replace(config, q_stages=min(config.q_stages, 2))
    if not (options.deterministic and config.wider_if_deterministic):
        return config
    return dataclasses.replace(config, block_q=64, do_stages=1)
