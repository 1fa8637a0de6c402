"""Attention in plain jnp.

`attention` is the textbook form, in the precision of its inputs. With float64 inputs it is the oracle.
chunked_attention.py has the "xla" implementation: the same mathematics over chunks, by the functions of this file.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.limits import key_lengths


def live(inputs: AttentionInputs, options: AttentionOptions):
    """Whether each query may attend to each key, by all limits of the call: bool, broadcastable to [B, H, T, S].

    A bias of -inf is no limit here.
    """
    rows, keys = (jnp.arange(x.shape[1], dtype=jnp.int32) for x in (inputs.query, inputs.key))
    keep = kept_by_limits(inputs, options, rows, keys)
    if isinstance(inputs.mask, Mask):
        keep = keep & inputs.mask.rows(rows, inputs.key.shape[1], q_offset=first_position(inputs, options))
    elif inputs.mask is not None:
        keep = keep & inputs.mask
    return keep


def kept_by_limits(inputs, options: AttentionOptions, rows, keys):
    """Whether each query may attend to each key, by all limits except the mask: bool, broadcastable to [B, H, T, S].

    inputs: AttentionInputs or a Chunk. rows, keys: int32 [T] and [S], the indices of its queries and keys.
    """
    offset = first_position(inputs, options)
    positions = (jnp.atleast_1d(jnp.asarray(offset, jnp.int32))[:, None] + rows)[:, None, :, None]
    keep = jnp.ones((1, 1, 1, 1), bool)
    if options.is_causal:
        keep = keep & (positions >= keys)
    if options.window is not None:
        left, right = options.window
        keep = keep & (positions - left <= keys) if left >= 0 else keep
        keep = keep & (keys <= positions + right) if right >= 0 else keep
    if inputs.kv_lengths is not None:
        keep = keep & (keys < inputs.kv_lengths[:, None, None, None])
    if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
        q_ids, kv_ids = inputs.q_segment_ids[:, None, :, None], inputs.kv_segment_ids[:, None, None, :]
        keep = keep & (q_ids == kv_ids) & (q_ids >= 0)
    return keep


def without_ignored(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with zeros for the keys and values that no query may attend to because they are past the sequence's
    end.

    The end is the smallest of kv_lengths and of prefix masks. A NaN past it, times a probability of 0, would be NaN.
    """
    lengths = key_lengths(inputs)
    if lengths is None:
        return inputs
    counts = jnp.arange(inputs.key.shape[1], dtype=jnp.int32) < lengths[:, None]
    key, value = (jnp.where(counts[..., None, None], x, 0) for x in (inputs.key, inputs.value))
    return inputs._replace(key=key, value=value)


def rounded(x):
    """x, the result of a multiplication, rounded: XLA cannot fuse it with a sum into one multiply-add.

    In a fused `x - highest`, x is not rounded, but `highest` is the maximum of rounded products. If x is large and is
    the maximum, the difference is then far from 0.
    """
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


def scores_of(products, bias, options: AttentionOptions, modify=None):
    """The scores [B, H, T, S], from products = query @ key^T: scaled, then soft-capped, modified, and with the bias
    added.

    bias: broadcastable to the scores, or None. modify: a function from all scores to new scores (a score_mod), or None.
    """
    scores = rounded(products * options.scale)
    if options.softcap is not None:
        scores = rounded(options.softcap * jnp.tanh(scores / options.softcap))
    if modify is not None:
        # Sums of products in score_mod must also be rounded alike wherever the scores are read.
        scores = lax.optimization_barrier(modify(scores))
    return scores if bias is None else scores + bias.astype(scores.dtype)


def below_highest(products, keep, bias, options: AttentionOptions, modify=None):
    """(each score minus the highest of its row, [B, H, T, S]; the highest score of each row, [B, H, T, 1]).

    products: query @ key^T. keep: bool, broadcastable to it, the pairs that the masks keep. bias, modify: as in
    scores_of. The first result is -inf for a pair that is masked out, the second for a row that
    keeps no pair. The highest score has no gradient: results do not depend on it.
    """
    is_plain = options.softcap is None and bias is None and modify is None
    if is_plain and options.scale >= jnp.finfo(products.dtype).tiny:  # a scale of 0 or below changes the order
        products = jnp.where(keep, products, -jnp.inf)
        highest = _highest(products)
        # The difference comes first: it is exact for large values that are close, and the scale rounds it once.
        below = (products - _finite(highest)) * options.scale
        return below, jnp.where(jnp.isneginf(highest), highest, rounded(highest * options.scale))
    scores = jnp.where(keep, scores_of(products, bias, options, modify), -jnp.inf)
    highest = _highest(scores)
    return scores - _finite(highest), highest


def _highest(scores):
    return lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))


def _finite(highest):
    return jnp.where(jnp.isneginf(highest), 0, highest)


def attention(inputs: AttentionInputs, options: AttentionOptions):
    """(out [B, T, H, Dv], lse [B, H, T]) by the textbook form, in the inputs' precision, at least float32.

    A query without keys has an out of 0 and an lse of -inf.
    """
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    query, key, value = (x.astype(dtype) for x in without_ignored(inputs)[:3])
    key, value = (jnp.repeat(x, group_of(query, key), axis=2) for x in (key, value))
    products = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest")
    rows = jnp.arange(query.shape[1], dtype=jnp.int32)
    mod = inputs.score_mod
    modify = None if mod is None else lambda scores: mod(scores, rows)
    scores, highest = below_highest(products, live(inputs, options), inputs.bias, options, modify)
    weights, highest, sink = softmax_terms(scores, highest, inputs.sinks)
    total = weights.sum(axis=-1, keepdims=True) + sink
    dead = total == 0
    weights = weights / jnp.where(dead, 1, total)
    lse = jnp.where(dead, -jnp.inf, jnp.log(jnp.where(dead, 1, total)) + highest)[..., 0]
    return jnp.einsum("bhts,bshd->bthd", weights, value, precision="highest"), lse


def softmax_terms(scores, highest, sinks):
    """(weights [B, H, T, S], most [B, H, T, 1], sink weights [B, H, T, 1]): the terms of the softmax, not yet divided.

    most: the highest logit of each row, sinks included; 0 for a row without any. weights: exp(score - most). sink
    weights: exp(sink - most), 0 without sinks. So no term exceeds 1; their sum is the softmax's denominator.

    scores: each score minus the highest score of its row. highest: this highest score, [B, H, T, 1], -inf for a row
    that keeps no pair. sinks: [B or 1, H], or None.
    """
    if sinks is None:
        return jnp.exp(scores), _finite(highest), jnp.zeros_like(highest)
    sinks = sinks.astype(scores.dtype)[:, :, None, None]
    with_sinks = _finite(lax.stop_gradient(jnp.maximum(highest, sinks)))
    return jnp.exp(scores + (_finite(highest) - with_sinks)), with_sinks, jnp.exp(sinks - with_sinks)


def group_of(query, key) -> int:
    """The number of query heads that share a key head, from arrays [B, length, heads, D].

    If key has no heads, it is the number of query heads.
    """
    return query.shape[2] // max(key.shape[2], 1)


def matmul_precision(options):
    """The precision of float32 matmuls: "tf32" is JAX's default on a GPU, all else is full float32."""
    return lax.Precision.DEFAULT if options.precision == "tf32" else lax.Precision.HIGHEST


def row_terms(out, lse, dout, dlse):
    """(lse, delta), float32 [B, H, T]: the values of every query that a backward needs.

    out, dout: [B, T, H, Dv]. lse: [B, H, T]. dlse: the cotangent of lse, or None. dS = P * (dP - delta), where
    delta = sum(out * dout) - dlse. A query without keys has an lse of +inf here: exp(score - inf) is 0, and so are its
    contributions to all gradients.
    """
    dead = jnp.isneginf(lse)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    delta = delta if dlse is None else delta - jnp.where(dead, 0, dlse)
    return jnp.where(dead, jnp.inf, lse), delta


# The public form of the oracle, jitted: un-jitted einsums in float64 are slow on a CPU.
oracle = jax.jit(attention, static_argnames="options")
