"""The forward and backward of a planned dilated attention: its attentions, and the merge of their results."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jax_kernels import chunks
from jax_kernels.inputs.attention import AttentionInputs
from jax_kernels.ops.attention import vjp as attention
from jax_kernels.ops.attention.vjp import AttentionCall
from jax_kernels.ops.dilated import branches as dilated_views
from jax_kernels.ops.dilated import chunks as of_chunks
from jax_kernels.ops.dilated import ring_steps
from jax_kernels.ops.dilated.branches import BranchCall
from jax_kernels.ops.dilated.partitioning import shared
from jax_kernels.ops.dilated.pieces import Piece
from jax_kernels.ops.planned_op import jitted_in_eager_shard_map
from jax_kernels.ops.ring.partial_results import BackwardInputs
from jax_kernels.pallas.attention.passes import merge_branches
from jax_kernels.pallas.triton import backend
from jax_kernels.reference.attention import row_terms
from jax_kernels.tracing.derivatives import (
    NO_SECOND,
    in_both_modes,
    in_reverse_mode,
    no_forward_mode,
    without_derivative,
)
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["DilatedCall", "run", "with_results"]

REVERSE_MODE = no_forward_mode("dilated_attention")
Parts = list[tuple[Piece, jax.Array]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DilatedCall:
    """A planned dilated_attention without its arrays: its attention calls, and the options of their merge.

    attentions: (pieces, planned call) of each attention in a call without gradients. differentiated: the same for the
    forward and backward of a call with gradients, in which each view needs a launch of its own and more pieces are
    therefore gathered. All attentions have one implementation. A call without a token or a head has none. branches: the
    number of branches. is_mean: combine="mean". is_alone: no token of a head is in two branches. sums_dquery: each
    attention of the backward adds query's gradient, divided by the scale, to a float32 array. of_heads(index, count):
    the call of shard `index` of the heads, if they are sharded over `count` devices; None if not available.
    """

    attentions: tuple[tuple[BranchCall, AttentionCall], ...]
    differentiated: tuple[tuple[BranchCall, AttentionCall], ...]
    branches: int
    is_mean: bool
    is_alone: bool
    stop_gradient_weights: bool
    return_lse: bool
    sums_dquery: bool = False
    of_heads: Callable[[int, int], "DilatedCall"] | None = None

    @property
    def merged_backward(self) -> bool:
        """Whether the gradients of every branch follow from the merged out and lse, without the branch's own out."""
        return self.is_alone or not (self.is_mean or self.stop_gradient_weights)

    @property
    def share(self) -> float:
        """The constant weight of each branch's out: 1 / branches with combine="mean", else 1."""
        return 1 / self.branches if self.is_mean else 1.0

    @property
    def interpret(self) -> bool:
        return self.attentions[0][1].interpret

    @property
    def by_kernels(self) -> bool:
        """Whether all attentions run by Pallas kernels."""
        return all(planned.implementation in ("mosaic_gpu", "triton") for _, planned in self.attentions)

    @property
    def by_passes(self) -> bool:
        """Whether Triton kernels, instead of jnp code, gather rows and merge the attentions' results."""
        return self.by_kernels and backend.AVAILABLE

    @property
    def by_xla(self) -> bool:
        """Whether all attentions run by XLA, so that JAX can differentiate the call in both modes."""
        return all(planned.implementation == "xla" for _, planned in self.attentions)

    @property
    def has_spans(self) -> bool:
        """Whether any segment is shared by several devices."""
        return any(views.span is not None for views, _ in self.attentions)


def _split(function: Any, call: DilatedCall, statics: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """function(call, *statics, arrays), in chunks if the memory requires it. An eager call that fails is tried again.

    function: _forward or _backward.
    """
    backward = function is _backward
    attentions = call.differentiated if backward or statics[0] else call.attentions
    need = of_chunks.need_of(
        [views for views, _ in attentions if call.of_heads is not None],
        of_chunks.Sizes.of_arrays(arrays),
        branches=call.branches,
        by_passes=bool(attentions) and call.by_passes,
        has_float32_out=any(planned.out_dtype == "float32" for _, planned in attentions),
        backward=backward,
    )
    op = "dilated_attention's backward" if backward else "dilated_attention"
    query, key = arrays[:2]
    sizes = f"query {list(query.shape)} and key {list(key.shape)} in {query.dtype}"
    run = lambda: _jitted(function, call, statics, of_chunks.count_of(need, arrays), arrays)
    return chunks.retried(op, sizes, run, need.most)


# Jitted for callers without jit: the views and the merge are many small operations.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _jitted(function: Any, call: DilatedCall, statics: tuple[Any, ...], count: int, arrays: tuple[Any, ...]) -> Any:
    run = lambda call, arrays: shared(function, call, *statics)(arrays)
    return run(call, arrays) if count == 1 else of_chunks.in_chunks(run, call, arrays, count)


def _inputs(call: DilatedCall, views: BranchCall, query, key, value, ids) -> AttentionInputs:
    """The arrays of the attention `views`, from the arrays of dilated_attention.

    query, key, value: [B, T, heads, D]. ids: int32 [B, T] or None. In the result the arrays are compact, or views if
    the call is strided. Segment ids are included if the call takes them (views.is_masked).
    """
    if views.is_masked:
        ids = dilated_views.gather_ids(ids, views, *query.shape[:2])
    query, key, value = _read(call, views, query.shape[2], query, key, value)
    return AttentionInputs(query, key, value, q_segment_ids=ids, kv_segment_ids=ids)


def _read(call: DilatedCall, views: BranchCall, num_heads: int, *arrays: jax.Array) -> list[jax.Array]:
    """The arrays of the attention `views`, one for each of `arrays`: the array, reshaped, or a compact array.

    A strided call gets the array itself, as a view; for others the rows are gathered, by a kernel if call.by_passes.
    arrays: [B, T, heads of query or key, D]. num_heads: the heads of query.
    """
    if views.is_strided or not call.by_passes:
        return [dilated_views.arrays_of(x, views, num_heads) for x in arrays]
    read: dict[int, jax.Array] = {}
    for shape in dict.fromkeys(x.shape for x in arrays):
        compact = dilated_views.compact_rows([views], shape[0], num_heads, shape[2])
        gather = lambda tables, *alike, compact=compact: tuple(
            merge_branches.gather(compact._replace(tables=tables), alike, views.rows, interpret=call.interpret)
        )
        alike = [index for index, x in enumerate(arrays) if x.shape == shape]
        with jax.enable_x64(False):  # as for flash_attention's kernels
            gathered = sequential_vmap(gather)(compact.tables, *(arrays[index] for index in alike))
        read |= zip(alike, gathered, strict=True)
    return [read[index] for index in range(len(arrays))]


def _forward(call: DilatedCall, is_differentiated: bool, arrays):
    """(out [B, T, H, Dv] in query's dtype, lse float32 [B, H, T]), merged from all branches.

    is_differentiated: run call.differentiated instead of call.attentions. arrays: (query, key, value, ids or None).
    """
    attentions = call.differentiated if is_differentiated else call.attentions
    query = arrays[0]
    batch, length, heads, _ = query.shape
    if not attentions:
        out = jnp.zeros((batch, length, heads, arrays[2].shape[-1]), query.dtype)
        return as_varying((out, jnp.zeros((batch, heads, length), jnp.float32)), varying_axes(arrays))
    planned = [planned for _, planned in attentions]
    inputs = [_inputs(call, views, *arrays) for views, _ in attentions]
    results: list[Any] = [None] * len(attentions)
    alone = [i for i, (views, _) in enumerate(attentions) if views.span is None]
    of_alone = attention.attention_forward_together([planned[i] for i in alone], [inputs[i] for i in alone])
    for i, found in zip(alone, of_alone, strict=True):
        results[i] = found
    for i, (views, _) in enumerate(attentions):
        if views.span is not None:
            results[i] = ring_steps.forward(views.span, planned[i], inputs[i])
    outs, lses = [result.out for result in results], [result.lse for result in results]
    like = jax.ShapeDtypeStruct((*query.shape[:3], outs[0].shape[-1]), query.dtype)
    if call.by_passes:
        compact = dilated_views.compact_rows([views for views, _ in attentions], batch, heads, heads)
        share = call.share if call.is_mean else None
        merge = lambda tables, outs, lses: merge_branches.merge(
            compact._replace(tables=tables), outs, lses, like=like, share=share, interpret=call.interpret
        )
        with jax.enable_x64(False):  # as for flash_attention's kernels
            return sequential_vmap(merge)(compact.tables, outs, lses)
    out_parts: Parts = []
    lse_parts: Parts = []
    for (views, _), out, lse in zip(attentions, outs, lses, strict=True):
        out_parts += dilated_views.scatter(out, views, batch, heads, heads)
        lse_parts += dilated_views.scatter(lse.swapaxes(1, 2), views, batch, heads, heads, fill=-jnp.inf)
    return _merge(call, out_parts, lse_parts, like)


def _merge(call: DilatedCall, out_parts: Parts, lse_parts: Parts, like):
    """(out, lse [B, H, T]) merged from the branches, in jnp code.

    out_parts, lse_parts: (piece, float32 [B, its tokens, H, ...]) of all attentions. like: the shape and dtype of out.
    """
    outs = dilated_views.merge_rows(out_parts, like.shape[1])
    lses = dilated_views.merge_rows(lse_parts, like.shape[1], fill=-jnp.inf)
    lse = functools.reduce(jnp.maximum, lses)
    if not call.is_alone:
        dead = jnp.isneginf(lse)
        highest = jax.lax.stop_gradient(jnp.where(dead, 0, lse))
        total = jnp.where(dead, 1, _sum([jnp.exp(x - highest) for x in lses]))  # log(0) has an infinite derivative
        lse = jnp.where(dead, -jnp.inf, jnp.log(total) + highest)
        if not call.is_mean:
            finite = jnp.where(jnp.isneginf(lse), 0, lse)
            outs = [jnp.exp(x - finite)[..., None] * out for x, out in zip(lses, outs, strict=True)]
    return (_sum(outs) * call.share).astype(like.dtype), lse.swapaxes(1, 2)


def _sum(arrays: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, arrays)


def _dilated(call: DilatedCall, arrays: Any):
    return _plain(call, arrays) if call.by_xla else _by_kernels(call, in_reverse_mode(arrays, REVERSE_MODE))


def _results(call, arrays):
    return _split(_forward, call, (False,), arrays)[: 1 + call.return_lse]


@under_defaults
def _dilated_fwd(call, arrays):
    given = arrays if call.by_xla else without_derivative(arrays, NO_SECOND)
    out, lse = _split(_forward, call, (True,), given)
    return (out, lse)[: 1 + call.return_lse], (*arrays, out, lse)


@under_defaults
def _dilated_bwd(call: DilatedCall, residuals, cotangents):
    dout, dlse = cotangents if call.return_lse else (*cotangents, None)
    return ((*_split(_backward, call, (), (*residuals, dout, dlse)), None),)


def _backward(call: DilatedCall, arrays):
    """The gradients of query, key and value, each in its array's shape and dtype.

    arrays: (query, key, value, ids, out, lse, dout, dlse); ids and dlse may be None.
    """
    query, key, value, ids, out, lse, dout, dlse = arrays
    if not call.differentiated:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    heads = out.shape[2]
    terms = _row_terms(call, out, lse, dout, dlse) if call.merged_backward else None
    # The array to which calls that read views add, one after the other.
    dquery = jnp.zeros(query.shape, jnp.float32) if _sums_whole(call, query) else None
    parts: dict[str, list[Any]] = {"query": [], "key": [], "value": []}
    for views, planned in call.differentiated:
        inputs = _inputs(call, views, query, key, value, ids)
        if terms is None:
            lse_of_rows, delta = _branch_terms(call, views, planned, inputs, lse, dout, dlse)
        else:
            lse_of_rows, delta = (dilated_views.gather_rows(x, views, heads).swapaxes(1, 2) for x in terms)
        so_far = None
        if views.is_strided and dquery is not None:
            so_far = dquery.reshape(inputs.query.shape)
        elif call.sums_dquery:
            so_far = jnp.zeros((*inputs.query.shape[:2], views.heads, query.shape[3]), jnp.float32)
        (dout_of_rows,) = _read(call, views, heads, dout)
        if views.span is not None:
            given = BackwardInputs(lse=lse_of_rows, delta=delta, dout=dout_of_rows)
            gradients = ring_steps.gradients(views.span, planned, inputs, given, so_far)
        else:
            gradients = attention.attention_gradients(planned, inputs, lse_of_rows, delta, dout_of_rows, so_far)
        if views.is_strided and dquery is not None:
            dquery, gradients = gradients.query.reshape(query.shape), gradients._replace(query=None)  # type: ignore[arg-type]
        for name, part in parts.items():
            part.append(getattr(gradients, name))
    scale = call.attentions[0][1].options.scale if call.sums_dquery else 1.0
    dq = _total(call, parts["query"], query, heads, dquery, scale)
    dk, dv = (_total(call, parts[name], x, heads) for name, x in (("key", key), ("value", value)))
    return dq, dk, dv


def _sums_whole(call: DilatedCall, query: jax.Array) -> bool:
    """Whether all strided calls add query's gradient to one float32 array of query's shape.

    They do if separate arrays, one for each strided call, would take as much memory or more.
    """
    batch, _, heads, head_dim = query.shape
    strided = [views for views, _ in call.differentiated if views.is_strided]
    taken = sum(views.entries(batch, heads) * views.rows * views.heads for views in strided)
    return 0 < query.size <= taken * head_dim


def _total(call: DilatedCall, parts, like, heads: int, whole=None, factor: float = 1.0):
    """The gradient of query, key or value in the shape and dtype of `like`: factor * (the sum of parts + whole).

    parts: for each attention its gradient as a compact array, or None if it is already part of `whole`. whole: None,
    or an array of like's shape. heads: the heads of query.
    """
    batch, length, array_heads, _ = like.shape
    calls = [views for (views, _), part in zip(call.differentiated, parts, strict=True) if part is not None]
    parts = [part for part in parts if part is not None]
    if call.by_passes:
        compact = dilated_views.compact_rows(calls, batch, heads, array_heads)
        total = lambda tables, parts, whole: merge_branches.total(
            compact._replace(tables=tables), parts, whole, factor, like=like, interpret=call.interpret
        )
        with jax.enable_x64(False):
            return sequential_vmap(total)(compact.tables, parts, whole)
    scattered: Parts = []
    for views, part in zip(calls, parts, strict=True):
        scattered += dilated_views.scatter(part, views, batch, heads, array_heads)
    sums = dilated_views.merge_rows(scattered, length) + ([] if whole is None else [whole])
    return (factor * _sum(sums)).astype(like.dtype)


def _row_terms(call: DilatedCall, out, lse, dout, dlse):
    """(lse, delta) [B, T, H], the row terms that every branch can use, from the merged out and lse.

    With them P = exp(score - lse) and dS = P * (dP - delta). P includes the branch's weight in the merge, call.share
    too, so that P^T @ dout is the gradient of value. lse, dlse: [B, H, T]; dlse may be None.
    """
    lse, delta = row_terms(out, lse, dout, dlse)
    lse, delta = lse.swapaxes(1, 2), delta.swapaxes(1, 2)
    return lse - math.log(call.share), delta / call.share


def _branch_terms(
    call: DilatedCall, views: BranchCall, planned: AttentionCall, inputs: AttentionInputs, lse, dout, dlse
):
    """(lse, delta) [entries, heads, rows], the row terms of one attention. Its forward is run again for its own out.

    With them P = exp(score - lse) includes the branch's weight. So the returned lse is the merged lse; with
    combine="mean" it is the branch's own lse minus log(call.share). lse, dlse: merged, [B, H, T]; dlse may be None.
    dout: [B, T, H, Dv].
    """
    rows = lambda x: dilated_views.gather_rows(x, views, dout.shape[2])
    lse_of_rows = rows(lse.swapaxes(1, 2)).swapaxes(1, 2)
    if views.span is None:
        branch_out, branch_lse, _ = attention.attention_forward(planned, inputs)
    else:
        branch_out, branch_lse, _ = ring_steps.forward(views.span, planned, inputs)
    dlse = None if dlse is None else rows(dlse.swapaxes(1, 2)).swapaxes(1, 2)
    assert branch_lse is not None
    if call.is_mean and dlse is not None:
        dlse = jnp.where(jnp.isneginf(branch_lse), 0, jnp.exp(branch_lse - lse_of_rows)) * dlse / call.share
    branch_lse, delta = row_terms(branch_out, branch_lse, rows(dout), dlse)
    lse_of_rows = branch_lse - math.log(call.share) if call.is_mean else lse_of_rows
    return jnp.where(jnp.isposinf(branch_lse), jnp.inf, lse_of_rows), delta


_by_kernels = jax.custom_vjp(_results, nondiff_argnums=(0,))
_by_kernels.defvjp(_dilated_fwd, _dilated_bwd)
_plain = in_both_modes(
    _results,
    _dilated_fwd,
    _dilated_bwd,
    plain=lambda call, arrays: _split(_forward, call, (True,), arrays)[: 1 + call.return_lse],
)


def with_results(call: DilatedCall, arrays: Any, out: jax.Array, lse: jax.Array):
    """Returns (out, lse), which an earlier run with return_lse=True gave, without computing them again.

    Their gradients with respect to `arrays` are the gradients of `run`. arrays: (query, key, value, ids or None).
    """
    if call.by_xla:
        return _plain_with_results(call, arrays, out, lse)
    return _with_results(call, in_reverse_mode(arrays, REVERSE_MODE), out, lse)


_of_results: Any = (
    lambda call, arrays, out, lse: (out, lse),
    lambda call, arrays, out, lse: ((out, lse), (*arrays, out, lse)),
    lambda call, residuals, cotangents: (*_dilated_bwd(call, residuals, cotangents), None, None),
)
_with_results = jax.custom_vjp(_of_results[0], nondiff_argnums=(0,))
_with_results.defvjp(*_of_results[1:])
_plain_with_results = in_both_modes(
    *_of_results, plain=lambda call, arrays, out, lse: _split(_forward, call, (True,), arrays)
)

run = jitted_in_eager_shard_map(_dilated)
