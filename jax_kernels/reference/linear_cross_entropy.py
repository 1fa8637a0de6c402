"""linear_cross_entropy in plain jnp: the implementation "xla", and the equations of the kernels.

`statistics` and `gradients` loop over chunks of the vocabulary. `losses_and_gradients` loops over tiles of the tokens:
a tile's logits give its losses and, as they are still in memory, its part of the gradients.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.linear_cross_entropy import LossInputs, LossOptions, Statistics, product, rounded
from jax_kernels.inputs.matmul import scale_shares
from jax_kernels.quantization import QuantizedArray
from jax_kernels.reference.matmul import in_turn
from jax_kernels.tracing.manual_axes import as_varying, varying_axes

__all__ = ["counted", "gradients", "in_range", "losses_and_gradients", "losses_of", "statistics"]

SYMBOLIC_CHUNK = 4096  # vocabulary entries of a chunk with symbolic sizes


def losses_of(found: Statistics, targets: jax.Array, options: LossOptions, vocabulary: Any) -> jax.Array:
    """The loss of each token, float32 [...], by the equation in LossOptions' docstring. targets: of LossInputs."""
    smoothing = options.label_smoothing
    losses = found.lse - (found.chosen if smoothing == 0 else (1 - smoothing) * found.chosen)
    losses = losses if found.mean is None else losses - smoothing * found.mean
    losses = losses + options.z_loss * jnp.square(found.lse) if options.z_loss else losses
    return jnp.where(targets < vocabulary, jnp.where(targets >= 0, losses, 0), jnp.nan)


def statistics(inputs: LossInputs, options: LossOptions) -> Statistics:
    """The Statistics of each token, online over chunks of the vocabulary."""
    vocabulary, targets, of_x = inputs.rows.shape[0], inputs.targets, rounded(inputs.x, options)

    def one(carry: Any, of_chunk: Any) -> Any:
        largest, total, chosen, summed = carry
        rows, ids = of_chunk
        logits = _logits(inputs.x, rows, of_x, rounded(rows, options), options)  # 0 for padding
        kept = logits + _padding(ids, vocabulary)
        above = jnp.maximum(largest, kept.max(-1))
        total = total * jnp.exp(largest - above) + jnp.exp(kept - above[..., None]).sum(-1)
        chosen = chosen + _chosen(logits, ids, targets)
        summed = None if summed is None else summed + logits.sum(-1)
        return (above, total, chosen, summed), None

    full = lambda value: jnp.full(targets.shape, value, jnp.float32)
    # The first maximum is finite: the difference of two infinite maxima is NaN.
    start = full(jnp.finfo(jnp.float32).min), full(0), full(0), full(0) if options.label_smoothing else None
    start = as_varying(start, varying_axes(inputs))
    (largest, total, chosen, summed), _ = lax.scan(one, start, _chunks(inputs, options))
    mean = None if summed is None else summed / vocabulary
    return Statistics(lse=largest + jnp.log(total), chosen=chosen, mean=mean)


def gradients(inputs: LossInputs, lse: jax.Array, cotangent: jax.Array, options: LossOptions) -> tuple[Any, Any]:
    """The gradients of (x, rows), in their dtypes, from logits that are computed again.

    lse: of the Statistics. cotangent: of the losses, [...]. Products of float16 arrays take cotangents that are divided
    by the largest of them, as float16 has a small range.
    """
    x, rows, _ = inputs
    layout, (cotangent, scale) = options.layout, in_range(inputs, cotangent)
    wide = jnp.float32 if x.dtype == jnp.float16 else rows.dtype
    of_x = rounded(x, options)

    def one(dx: Any, of_chunk: Any) -> Any:
        rows, ids = of_chunk
        logits = _logits(x, rows, of_x, rounded(rows, options), options)
        dlogits = _dlogits(inputs, logits, ids, lse, cotangent, options)
        dx = dx + product("...v,vd->...d", dlogits, rows)
        return dx, layout.sums(dlogits, x, wide)

    start = as_varying(jnp.zeros(x.shape, jnp.float32), varying_axes(inputs, lse, cotangent))
    dx, drows = lax.scan(one, start, _chunks(inputs, options))
    drows = jnp.moveaxis(drows, 0, -2)  # an entry of the vocabulary is entry id // count of chunk id % count
    of_chunk, count = drows.shape[-3:-1]
    drows = drows.reshape(*drows.shape[:-3], of_chunk * count, rows.shape[1])[..., : rows.shape[0], :]
    drows = layout.total(drows if scale is None else drows * scale, rows.dtype)
    return (dx if scale is None else dx * scale).astype(x.dtype), drows


def losses_and_gradients(
    inputs: LossInputs, cotangent: jax.Array, options: LossOptions, wanted: tuple[bool, bool]
) -> tuple[jax.Array, Any, Any]:
    """(losses [...], gradient of x, gradient of rows) with three matmuls; a gradient that is not wanted is None.

    cotangent: of the losses. wanted: whether the gradients of x and of rows are. Gradients have their arrays' dtypes,
    except that float16 becomes float32: these gradients are still to be multiplied by a cotangent, which may have
    brought them into float16's range. Symbolic sizes take four matmuls.
    """
    x, rows, targets = inputs
    dtypes = [jnp.float32 if y.dtype == jnp.float16 else y.dtype for y in (x, rows)]
    if not all(isinstance(n, int) for n in (*x.shape, rows.shape[0])):
        found = statistics(inputs, options)
        losses = losses_of(found, targets, options, rows.shape[0])
        exact = zip(gradients(inputs, found.lse, cotangent, options), dtypes, wanted, strict=True)
        dx, drows = (y.astype(dtype) if is_wanted else None for y, dtype, is_wanted in exact)
        return losses, dx, drows
    layout, counts = options.layout, _tile_counts(targets.shape, rows.shape[0], options)
    cotangent, scale = in_range(inputs, cotangent)
    cast, ids = rows.astype(x.dtype), lax.iota(jnp.int32, rows.shape[0])
    of_rows = rounded(cast, options)

    def one(total: Any, tile: Any) -> Any:
        of_tile, cotangent = LossInputs(x=tile[0], rows=cast, targets=tile[1]), tile[2]
        logits = _logits(tile[0], cast, rounded(tile[0], options), of_rows, options)
        found = _whole_statistics(logits, ids, tile[1], options)
        dlogits = _dlogits(of_tile, logits, ids, found.lse, cotangent, options)
        dx = None
        if wanted[0]:
            dx = product("...v,vd->...d", dlogits, cast)
            dx = (dx if scale is None else dx * scale).astype(dtypes[0])
        if wanted[1]:
            total = total + layout.tile_sums(dlogits, tile[0])
        return total, (losses_of(found, tile[1], options, rows.shape[0]), dx)

    start = layout.first_sums(rows) if wanted[1] else None
    start = as_varying(start, varying_axes(inputs, cotangent))
    fills = (x, 0), (targets, -1), (cotangent, 0)
    tiles = tuple(_split(y, counts, layout.devices(targets.shape), fill) for y, fill in fills)
    if math.prod(counts) == 1:  # without a loop, XLA plans the memory of all arrays together
        total, of_tiles = one(start, jax.tree.map(lambda y: y[0], tiles))
        of_tiles = jax.tree.map(lambda y: y[None], of_tiles)
    else:
        total, of_tiles = lax.scan(one, start, tiles)
    losses, dx = jax.tree.map(lambda y: _joined(y, counts, targets.shape), of_tiles)
    if total is None:
        return losses, dx, None
    return losses, dx, layout.total(total if scale is None else total * scale, dtypes[1])


def _whole_statistics(logits: jax.Array, ids: jax.Array, targets: jax.Array, options: LossOptions) -> Statistics:
    """The Statistics from the logits [..., V] of all of the vocabulary."""
    largest = lax.stop_gradient(jnp.maximum(logits.max(-1), jnp.finfo(jnp.float32).min))
    total = jnp.exp(logits - largest[..., None]).sum(-1)
    return Statistics(
        lse=largest + jnp.log(total),
        chosen=_chosen(logits, ids, targets),
        mean=logits.mean(-1) if options.label_smoothing else None,
    )


def _chosen(logits: jax.Array, ids: jax.Array, targets: jax.Array) -> jax.Array:
    """The logit of each token's target, float32 [...]; 0 if the target is not in ids.

    A product, because XLA would compute the zeros of a jnp.where before the loop, and keep them in memory: an array as
    large as the logits, which each step reads. `_padding` and `_dlogits` have no jnp.where for the same reason.
    """
    return (logits * (ids == targets[..., None])).sum(-1)


def _logits(
    x: jax.Array,
    rows: jax.Array,
    of_x: QuantizedArray | None,
    of_rows: QuantizedArray | None,
    options: LossOptions,
) -> jax.Array:
    """float32 [..., V]: x @ rows.T, capped. x: [..., D]. rows: [V, D], in x's dtype.

    of_x, of_rows: `rounded` of them.
    """
    if of_x is None or of_rows is None:
        logits = product("...d,vd->...v", x, rows)
    else:
        logits = _by_8_bits(of_x, of_rows)
        if options.is_differentiable:
            exact = product("...d,vd->...v", x, rows)
            logits = lax.stop_gradient(logits - exact) + exact
    logits = options.layout.logits(logits)
    return logits if options.softcap is None else options.softcap * jnp.tanh(logits / options.softcap)


def _by_8_bits(of_x: QuantizedArray, of_rows: QuantizedArray) -> jax.Array:
    """of_x @ of_rows.T in float32."""
    # bfloat16 is exact. On a GPU, XLA finds the 8-bit operands behind it.
    sums = product("...d,vd->...v", of_x.values.astype(jnp.bfloat16), of_rows.values.astype(jnp.bfloat16))
    first, last = scale_shares(of_x.scale[..., None])
    return in_turn(sums, first, of_rows.scale, last)


def _chunks(inputs: LossInputs, options: LossOptions) -> tuple[jax.Array, jax.Array]:
    """(rows, ids): the chunks of the vocabulary, rows [count, V / count, D] in x's dtype and their token ids [count, V
    / count].

    A chunk takes every count-th row, so that each vocabulary shard has an equal part of each chunk. V is rounded up to
    a multiple of count; ids of V or more mark the padding.
    """
    x, rows, targets = inputs
    vocabulary, depth = rows.shape
    count = -(-vocabulary // (options.chunk or _chunk(targets.shape, vocabulary, options)))
    rows = jnp.pad(rows.astype(x.dtype), ((0, -vocabulary % count), (0, 0)))
    rows = rows.reshape(rows.shape[0] // count, count, depth).swapaxes(0, 1)
    ids = jnp.arange(rows.shape[0] * rows.shape[1], dtype=jnp.int32).reshape(-1, count).T
    return options.layout.rows(rows), ids


def _padding(ids: jax.Array, vocabulary: Any) -> jax.Array:
    """0 for each id of the vocabulary, -inf for padding: float32, like ids."""
    return jnp.where(ids < vocabulary, 0.0, -jnp.inf)


def _dlogits(
    inputs: LossInputs, logits: jax.Array, ids: jax.Array, lse: jax.Array, cotangent: jax.Array, options: LossOptions
) -> jax.Array:
    """The cotangents of x @ rows.T for these ids, [..., ids], in x's dtype.

    logits: of these ids, capped; 0 for padding. lse: of each token. cotangent: of each token's loss.
    """
    targets, vocabulary = inputs.targets[..., None], inputs.rows.shape[0]
    share = jnp.exp(logits + _padding(ids, vocabulary) - lse[..., None])
    share = share * (1 + 2 * options.z_loss * lse[..., None]) if options.z_loss else share
    if options.label_smoothing:
        chosen = (1 - options.label_smoothing) * (ids == targets)
        share = (share - chosen - options.label_smoothing / vocabulary) * (ids < vocabulary)
    else:
        share = share - (ids == targets)
    if options.softcap is not None:
        share = share * (1 - jnp.square(logits / options.softcap))
    return (share * counted(inputs, cotangent)[..., None]).astype(inputs.x.dtype)


def counted(inputs: LossInputs, cotangent: jax.Array) -> jax.Array:
    """The cotangents of the losses, 0 for tokens that do not count and for targets outside the vocabulary."""
    return jnp.where((inputs.targets >= 0) & (inputs.targets < inputs.rows.shape[0]), cotangent, 0)


def in_range(inputs: LossInputs, cotangent: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """(cotangent / scale, scale): with float16 arrays the largest cotangent becomes 1; otherwise scale is None."""
    if inputs.x.dtype != jnp.float16:
        return cotangent, None
    largest = lax.stop_gradient(jnp.abs(counted(inputs, cotangent)).max(initial=0))
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return cotangent / scale, scale


def _chunk(shape: tuple[Any, ...], vocabulary: Any, options: LossOptions) -> Any:
    """The vocabulary entries of a chunk for tokens of this shape."""
    if not all(isinstance(n, int) for n in (*shape, vocabulary)):
        return SYMBOLIC_CHUNK if isinstance(vocabulary, int) else vocabulary
    of_tokens = options.logits_bytes // (4 * max(math.prod(shape), 1))
    return min(max(of_tokens, options.least_chunk), vocabulary)


def _tile_counts(shape: tuple[int, ...], vocabulary: int, options: LossOptions) -> tuple[int, ...]:
    """The parts into which each axis of the tokens is cut, so that the logits of a tile take at most
    options.logits_bytes on a device, or are at most options.chunk for each token.

    Each device that shards an axis has a token of each part.
    """
    lengths = [-(-n // devices) for n, devices in zip(shape, options.layout.devices(shape), strict=True)]
    own = vocabulary // options.layout.vocabulary_devices(vocabulary)
    left = (
        -(-vocabulary // options.chunk) if options.chunk else -(-4 * math.prod(lengths) * own // options.logits_bytes)
    )
    counts: list[int] = []
    for length in reversed(lengths):
        counts.append(max(min(left, length), 1))
        left = -(-left // counts[-1])
    return tuple(reversed(counts))


def _split(y: jax.Array, counts: tuple[int, ...], devices: tuple[int, ...], fill: int) -> jax.Array:
    """The tiles of an array [tokens, ...]: [count, tokens of a tile, ...], padded by `fill`.

    devices: that shard each axis of the tokens.

    A tile takes every count-th token of an axis, so that each shard of the tokens has an equal part of each tile.
    """
    own = y.shape[len(counts) :]
    pads = [(0, -length % (count * n)) for length, count, n in zip(y.shape, counts, devices, strict=False)]
    if any(after for _, after in pads):
        y = jnp.pad(y, (*pads, *((0, 0) for _ in own)), constant_values=fill)
    pairs = zip(y.shape, counts, strict=False)
    y = y.reshape(*(n for length, count in pairs for n in (length // count, count)), *own)
    y = jnp.moveaxis(y, tuple(range(1, 2 * len(counts), 2)), tuple(range(len(counts))))
    return y.reshape(math.prod(counts), *y.shape[len(counts) :])


def _joined(tiles: jax.Array, counts: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """The inverse of _split: [tokens, ...] from [count, tokens of a tile, ...]. shape: of the tokens."""
    own = tiles.shape[1 + len(counts) :]
    y = tiles.reshape(*counts, *tiles.shape[1:])
    y = jnp.moveaxis(y, tuple(range(len(counts))), tuple(range(1, 2 * len(counts), 2)))
    y = y.reshape(*(y.shape[2 * i] * count for i, count in enumerate(counts)), *own)
    return y[tuple(slice(length) for length in shape)]
