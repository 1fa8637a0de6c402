"""Attention in plain jnp.

`attention` is the textbook form, in the precision of its inputs. With float64 inputs it is the oracle.
`forward` and `backward` are the "xla" implementation: the same mathematics, over chunks of queries, so
that no array has the size of query length times key length.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionOptions, first_position
from jax_kernels.masks import Mask
from jax_kernels.masks.limits import key_lengths

# Bytes of float32 scores that one chunk of queries may take.
CHUNK_BYTES = 1 << 28


def live(inputs: AttentionInputs, options: AttentionOptions, rows=None):
    """Whether each query may attend to each key, by all limits of the call: bool, broadcastable to [B, H, T, S].

    rows: int32 [T], the indices of the queries, by default all. A bias of -inf is no limit here.
    """
    rows = jnp.arange(inputs.query.shape[1], dtype=jnp.int32) if rows is None else rows
    offset = first_position(inputs, options)
    positions = (jnp.atleast_1d(jnp.asarray(offset, jnp.int32))[:, None] + rows)[:, None, :, None]
    keys = jnp.arange(inputs.key.shape[1], dtype=jnp.int32)
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
    if isinstance(inputs.mask, Mask):
        keep = keep & inputs.mask.rows(rows, inputs.key.shape[1], q_offset=offset)
    elif inputs.mask is not None:
        keep = keep & inputs.mask
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


def below_highest(products, keep, inputs: AttentionInputs, options: AttentionOptions, rows):
    """(each score minus the highest of its row, [B, H, T, S]; the highest score of each row, [B, H, T, 1]).

    products: query @ key^T. keep: bool, broadcastable to it, the pairs that the masks keep. rows: int32 [T], the
    queries' indices, for a score_mod. The first result is -inf for a pair that is masked out, the second for a row that
    keeps no pair. The highest score has no gradient: results do not depend on it.
    """
    is_plain = options.softcap is None and inputs.bias is None and inputs.score_mod is None
    if is_plain and options.scale >= jnp.finfo(products.dtype).tiny:  # a scale of 0 or below changes the order
        products = jnp.where(keep, products, -jnp.inf)
        highest = _highest(products)
        # The difference comes first: it is exact for large values that are close, and the scale rounds it once.
        below = (products - _finite(highest)) * options.scale
        return below, jnp.where(jnp.isneginf(highest), highest, rounded(highest * options.scale))
    scores = jnp.where(keep, scores_of(products, inputs.bias, options, _modify(inputs, rows)), -jnp.inf)
    highest = _highest(scores)
    return scores - _finite(highest), highest


def _highest(scores):
    return lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))


def _finite(highest):
    return jnp.where(jnp.isneginf(highest), 0, highest)


def _modify(inputs: AttentionInputs, rows):
    """The score_mod as a function of scores [B, H, T, S] for the queries with indices rows [T], or None without one."""
    return None if inputs.score_mod is None else lambda scores: inputs.score_mod(scores, rows)


def attention(inputs: AttentionInputs, options: AttentionOptions):
    """(out [B, T, H, Dv], lse [B, H, T]) by the textbook form, in the inputs' precision, at least float32.

    A query without keys has an out of 0 and an lse of -inf.
    """
    dtype = jnp.promote_types(inputs.query.dtype, jnp.float32)
    query, key, value = (x.astype(dtype) for x in without_ignored(inputs)[:3])
    key, value = (jnp.repeat(x, group_of(query, key), axis=2) for x in (key, value))
    products = jnp.einsum("bthd,bshd->bhts", query, key, precision="highest")
    rows = jnp.arange(query.shape[1], dtype=jnp.int32)
    scores, highest = below_highest(products, live(inputs, options), inputs, options, rows)
    weights, highest, sink = _weights(scores, highest, inputs.sinks)
    total = weights.sum(axis=-1, keepdims=True) + sink
    dead = total == 0
    weights = weights / jnp.where(dead, 1, total)
    lse = jnp.where(dead, -jnp.inf, jnp.log(jnp.where(dead, 1, total)) + highest)[..., 0]
    return jnp.einsum("bhts,bshd->bthd", weights, value, precision="highest"), lse


def _weights(scores, highest, sinks):
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


def _chunk_length(query, key):
    """The number of queries in a chunk: the largest multiple of 16 whose scores fit CHUNK_BYTES, at least 16.

    It is the whole length if that fits. A symbolic length of jax.export has no known divisors: one chunk has all
    queries.
    """
    if not isinstance(query.shape[1], int):
        return query.shape[1]
    if not isinstance(key.shape[1], int):
        return max(query.shape[1], 1)
    batch = query.shape[0] if isinstance(query.shape[0], int) else 1
    row = batch * query.shape[2] * max(key.shape[1], 1) * 4
    rows = max(16, CHUNK_BYTES // max(row, 1) // 16 * 16)
    return min(rows, max(query.shape[1], 1))


def _parts(length, part):
    """length // part, for reshape; -1 for symbolic sizes, so that reshape finds the number."""
    return length // max(part, 1) if isinstance(length, int) and isinstance(part, int) else -1


def _split(x, chunk, axis=1, fill=0):
    """Splits an axis into chunks: [..., T, ...] -> [chunks, ..., chunk, ...], padded at the end with `fill`."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % chunk)
    x = jnp.pad(x, pad, constant_values=fill)
    x = x.reshape(*x.shape[:axis], _parts(x.shape[axis], chunk), chunk, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x, length, axis=1):
    """Joins the chunks of _split: [chunks, ..., chunk, ...] -> [..., length, ...], without the padding."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


# The axis of queries in each array that has such an axis, except in the indices of the queries.
_QUERY_AXES = {"query": 1, "mask": 2, "bias": 2, "q_segment_ids": 1}


def _in_chunks(inputs: AttentionInputs):
    """(chunk, split, inputs_of): the inputs cut into chunks of `chunk` queries, for lax.map or lax.scan.

    split: a dict of arrays with a leading axis of chunks: "rows", the queries' indices, and the inputs that have an
    axis of queries. inputs_of: maps one chunk's dict to (its AttentionInputs, its queries' indices).
    """
    chunk = _chunk_length(inputs.query, inputs.key)
    split = {"rows": _split(jnp.arange(inputs.query.shape[1], dtype=jnp.int32), chunk, axis=0)}
    for name, axis in _QUERY_AXES.items():
        x = getattr(inputs, name)
        if x is not None and not isinstance(x, Mask) and (name == "query" or x.shape[axis] != 1):
            split[name] = _split(x, chunk, axis)

    def inputs_of(arrays):
        return inputs._replace(**{name: x for name, x in arrays.items() if name != "rows"}), arrays["rows"]

    return chunk, split, inputs_of


def group_of(query, key) -> int:
    """The number of query heads that share a key head, from arrays [B, length, heads, D].

    If key has no heads, it is the number of query heads.
    """
    return query.shape[2] // max(key.shape[2], 1)


def _grouped(x, kv_heads):
    """x with its query heads grouped by key head: [B, T, H, D] -> [B, T, kv heads, queries per kv head, D]."""
    return x.reshape(*x.shape[:2], kv_heads, _parts(x.shape[2], kv_heads), x.shape[-1])


def _grouped_scores(x, kv_heads):
    """x with its query heads grouped by key head: [B, H, T, S] -> [B, kv heads, queries per kv head, T, S]."""
    return x.reshape(x.shape[0], kv_heads, _parts(x.shape[1], kv_heads), *x.shape[2:])


def _precision(options):
    """The precision of float32 matmuls: "tf32" is JAX's default on a GPU, all else is full float32."""
    return lax.Precision.DEFAULT if options.precision == "tf32" else lax.Precision.HIGHEST


def query_key_products(inputs, options):
    """query @ key^T of each head, without the scale: float32 [B, H, T, S]."""
    q = _grouped(inputs.query, inputs.key.shape[2])
    s = jnp.einsum(
        "bqkgd,bskd->bkgqs", q, inputs.key, precision=_precision(options), preferred_element_type=jnp.float32
    )
    return s.reshape(s.shape[0], s.shape[1] * s.shape[2], *s.shape[3:])


def _masked_scores(inputs, options, rows):
    """(scores minus the row's highest, the highest, query @ key^T), for the queries with indices rows [T].

    Shapes: [B, H, T, S], [B, H, T, 1], [B, H, T, S]. The first is -inf for pairs that are masked out.
    """
    products = query_key_products(inputs, options)
    return *below_highest(products, live(inputs, options, rows), inputs, options, rows), products


def forward(inputs: AttentionInputs, options: AttentionOptions, *, out_dtype):
    """Returns (out [B, T, H, Dv] in out_dtype, lse [B, H, T] float32), with a bias or score_mod also lse_lo.

    lse_lo, shaped like lse, is the exact log-sum-exp minus lse: next to scores of -1e9, float32 loses the log. A query
    without keys has an out of 0 and an lse of -inf.
    """
    kv_heads, inputs = inputs.key.shape[2], without_ignored(inputs)
    _, split, inputs_of = _in_chunks(inputs)

    def one(arrays):
        part, rows = inputs_of(arrays)
        s, highest, _ = _masked_scores(part, options, rows)
        p, highest, sink = _weights(s, highest, part.sinks)
        total = (p.sum(axis=-1, keepdims=True) + sink)[..., 0]
        p = p / jnp.where(total == 0, 1, total)[..., None]
        p = _grouped_scores(p, kv_heads)
        out = jnp.einsum("bkgqs,bskd->bqkgd", p, part.value.astype(jnp.float32), precision=_precision(options))
        dead, highest = total == 0, highest[..., 0]
        log = jnp.log(jnp.where(dead, 1, total))  # log has an infinite derivative at 0
        lse = jnp.where(dead, -jnp.inf, log + highest)
        lse_lo = jnp.where(dead, 0, log + (highest - lse))
        may_be_far = part.bias is not None or part.score_mod is not None
        out = out.reshape(*part.query.shape[:3], out.shape[-1]).astype(out_dtype)
        return out, lse, *([lse_lo] if may_be_far else [])

    out, *rows = lax.map(one, split)
    length = inputs.query.shape[1]
    return _join(out, length), *(_join(x, length, axis=2) for x in rows)


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


def backward(inputs: AttentionInputs, options: AttentionOptions, lse, delta, dout, lse_lo=None) -> AttentionGradients:
    """All gradients except dsinks, in the inputs' dtypes, or float32 with options.float32_gradients; sums are in
    float32.

    lse, delta: float32 [B, H, T], as row_terms returns them. dout: [B, T, H, Dv]. lse_lo: the exact log-sum-exp minus
    lse, [B, H, T], which the forward returns with a bias or a score_mod; None for 0.
    """
    lse_lo = jnp.zeros_like(lse) if lse_lo is None else lse_lo
    inputs = without_ignored(inputs)
    query, key, value, bias, score_mod = inputs.query, inputs.key, inputs.value, inputs.bias, inputs.score_mod
    length, kv_heads, precision = query.shape[1], key.shape[2], _precision(options)
    chunk, split, inputs_of = _in_chunks(inputs)
    k32, v32 = key.astype(jnp.float32), value.astype(jnp.float32)
    dtype_of = lambda x: jnp.float32 if options.float32_gradients else x.dtype
    with_bias = bias is not None and options.bias_gradient
    bias_shape = () if bias is None else bias.shape
    bias_chunks = with_bias and bias_shape[2] != 1

    def one(carry, args):
        arrays, do, l, d, more = args
        part, rows = inputs_of(arrays)
        s, highest, products = _masked_scores(part, options, rows)
        p = jnp.exp(s + ((highest - l[..., None]) - more[..., None]))
        grouped = lambda x: _grouped_scores(x, kv_heads)
        q, do = (_grouped(x.astype(jnp.float32), kv_heads) for x in (part.query, do))
        dv = jnp.einsum("bkgqs,bqkgd->bskd", grouped(p), do, precision=precision)
        dp = jnp.einsum("bqkgd,bskd->bkgqs", do, v32, precision=precision)
        ds = p * (dp.reshape(p.shape) - d[..., None])
        dbias = None
        if with_bias:
            broadcast = tuple(axis for axis in range(4) if bias_shape[axis] == 1)
            dbias = ds.sum(broadcast, keepdims=True)
        if options.softcap is not None:
            ds = ds * (1 - jnp.tanh(products * (options.scale / options.softcap)) ** 2)
        darrays = ()
        if part.score_mod is not None:
            of_arrays = options.score_mod_gradient
            ds, darrays = part.score_mod.gradients(products * options.scale, rows, ds, of_arrays=of_arrays)
            ds = jnp.where(jnp.isneginf(s), 0, ds)  # the derivative may be anything there
        ds = grouped(ds) * options.scale
        dq = jnp.einsum("bkgqs,bskd->bqkgd", ds, k32, precision=precision)
        dk = jnp.einsum("bkgqs,bqkgd->bskd", ds, q, precision=precision)
        dq = dq.reshape(*dq.shape[:2], dq.shape[2] * dq.shape[3], dq.shape[-1]).astype(dtype_of(query))
        sums = (dk, dv, dbias if with_bias and not bias_chunks else None, darrays)
        return jax.tree.map(jnp.add, carry, sums), (dq, dbias if bias_chunks else None)

    # zeros_like keeps the mesh axes along which the arrays vary in a shard_map.
    zeros = lambda x: jnp.zeros_like(x, jnp.float32)
    array_zeros = () if score_mod is None else score_mod.zeros(of_arrays=options.score_mod_gradient)
    carry = (zeros(key), zeros(value), zeros(bias) if with_bias and not bias_chunks else None, array_zeros)
    # Queries past the last query have probabilities of 0, whatever their scores become in score_mod.
    lse, delta, lse_lo = (_split(x, chunk, axis=2, fill=fill) for x, fill in ((lse, jnp.inf), (delta, 0), (lse_lo, 0)))
    others = (_split(dout, chunk), lse, delta, lse_lo)
    (dk, dv, dbias, darrays), (dq, dbias_chunks) = lax.scan(one, carry, (split, *others))
    if bias is not None and with_bias:
        dbias = jnp.asarray(_join(dbias_chunks, length, axis=2) if bias_chunks else dbias, bias.dtype)
    dmod = None if score_mod is None else score_mod.with_gradients(darrays)
    gradients = (_join(dq, length), dk.astype(dtype_of(key)), dv.astype(dtype_of(value)))
    return AttentionGradients(*gradients, bias=dbias, score_mod=dmod)


# The public form of the oracle, jitted: un-jitted einsums in float64 are slow on a CPU.
oracle = jax.jit(attention, static_argnames="options")
