"""The cross-entropy of a language model's head, computed in chunks of the vocabulary."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.models.parallel.sharding import UNCONSTRAINED, ShardingRules
from jax_kernels.models.training.token_ids import check_targets, usable_targets
from jax_kernels.plain_numbers import plain
from jax_kernels.tracing.derivatives import in_both_modes
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["linear_cross_entropy"]

# Vocabulary entries whose logits are in memory at once: 16,384 tokens by 4,096 entries in float32 take 268 MB.
CHUNK = 4096


@under_defaults
def linear_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    *,
    transpose_w: bool = False,
    chunk: int = CHUNK,
    rules: ShardingRules | None = None,
) -> jax.Array:
    """The cross-entropy of each token under the logits x @ w: float32 [...], in nats. The logits are never all in
    memory.

    Equivalent to the following JAX code, in float32 from the matmul on::

        logits = x @ (w.T if transpose_w else w)
        losses = logsumexp(logits, axis=-1) - take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = where(targets >= 0, losses, 0)

    Forward and backward loop over chunks of the vocabulary. The backward rematerialises the logits of a chunk. It
    rounds their cotangents to x's dtype for its matmuls, and accumulates x's gradient in float32.

    Args:
      x: [..., D], bfloat16, float16 or float32.
      w: [D, V], or [V, D] with transpose_w, of any float dtype; rounded to x's dtype for the matmuls.
      targets: integers [...]: the token ids, below V. A token whose target is below 0, such as -1 or -100, has a loss
        of 0 and no gradient.
      chunk: the largest number of vocabulary entries whose logits are in memory at once.
      rules: the mesh axes that shard the logits; None for ShardingRules().

    Returns:
      losses [...], float32, in nats.

    Raises:
      TypeError: a dtype is wrong.
      ValueError: shapes do not fit together, chunk is below 1, or a target is V or more. A traced target of V or more
        gives NaN.
    """
    for name, array in (("x", x), ("w", w)):
        if not hasattr(array, "dtype"):
            raise TypeError(f"{name}: got {type(array).__name__}, want an array of floats")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name}: got dtype {array.dtype}, want floats")
    targets = targets if hasattr(targets, "dtype") else jnp.asarray(targets)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets: got dtype {targets.dtype}, want integers")
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1 if transpose_w else 0]:
        want = "[V, D] with transpose_w" if transpose_w else "[D, V]"
        raise ValueError(f"w: got shape {w.shape}, want {want} with x's {x.shape}")
    if targets.shape != x.shape[:-1]:
        raise ValueError(f"targets: got shape {targets.shape}, want x's {x.shape[:-1]}")
    chunk, transpose_w = plain(chunk), plain(transpose_w)
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk: got {chunk!r}, want a positive int")
    rows = w if transpose_w else w.T
    vocabulary = rows.shape[0]
    check_targets(targets, vocabulary)
    targets = usable_targets(targets, vocabulary)
    count = -(-vocabulary // chunk)
    # Inside shard_map the transpose of this cast sums the gradients of a replicated array over the devices.
    x, rows, targets = as_varying((x, rows, targets), varying_axes(x, rows, targets))
    losses = _losses((count, ShardingRules() if rules is None else rules), x, rows, targets)
    return jnp.where(targets < vocabulary, losses, jnp.nan)


def _chunks(count: int, x: jax.Array, rows: jax.Array, rules: ShardingRules) -> tuple[jax.Array, jax.Array]:
    """(rows, ids): the chunks of the vocabulary, rows [count, V / count, D] in x's dtype and their token ids [count, V
    / count].

    rows: [V, D], one row for each token id. A chunk takes every count-th row, so that each vocabulary shard has an
    equal part of each chunk. V is rounded up to a multiple of count; ids of V or more mark the padding.
    """
    vocabulary, depth = rows.shape
    rows = jnp.pad(rows.astype(x.dtype), ((0, -vocabulary % count), (0, 0)))
    rows = rows.reshape(-1, count, depth).swapaxes(0, 1)
    ids = jnp.arange(rows.shape[0] * rows.shape[1], dtype=jnp.int32).reshape(-1, count).T
    return rules.constrain(rows, None, "vocab"), ids


def _logits(x: jax.Array, rows: jax.Array, ids: jax.Array, vocabulary: int, rules: ShardingRules) -> jax.Array:
    """The logits of one chunk of the vocabulary: float32 [..., V / count], -inf for padding.

    x: [..., D]. rows: [V / count, D], the chunk's rows. ids: [V / count], their token ids; ids of `vocabulary` or more
    are padding.
    """
    logits = jnp.einsum("...d,vd->...v", x, rows, preferred_element_type=jnp.float32)
    names = ("batch", "tokens") if x.ndim == 3 else (None,) * (x.ndim - 1)
    # The caller may shard an axis of x that the rules do not shard: its sharding is kept.
    is_known = lambda name, length: name is not None and rules.devices(name, length)
    outer = [name if is_known(name, n) else UNCONSTRAINED for name, n in zip(names, x.shape[:-1], strict=True)]
    logits = rules.constrain(logits, *outer, "vocab")
    return jnp.where(ids < vocabulary, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Devices:
    """The mesh axes over which the gradient of w is summed after the loop over chunks, not within it.

    batch, tokens: the axes that shard the batch and the tokens of x [B, T, D], if they come before any axis that also
    shards the width of w. sizes: the number of devices along `batch`, and along `tokens`. Along an axis that shards the
    width, each device needs only its part of the sum, so each chunk's sum is sent at once, in parallel with the matmuls
    of the next chunk. There are no such axes if x does not have three axes.
    """

    batch: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    sizes: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, x: jax.Array, rules: ShardingRules) -> "_Devices":
        """The _Devices for x [..., D] on the mesh of jax.set_mesh."""
        if x.ndim != 3:
            return cls()
        of_width = rules.devices("embed", x.shape[2])
        outer = lambda axes: dict(itertools.takewhile(lambda axis: axis[0] not in of_width, axes.items()))
        batch, tokens = (outer(rules.devices(name, n)) for name, n in (("batch", x.shape[0]), ("tokens", x.shape[1])))
        sizes = math.prod(batch.values()), math.prod(tokens.values())
        return cls(batch=tuple(batch), tokens=tuple(tokens), sizes=sizes)

    @property
    def count(self) -> int:
        """The number of partial sums: devices that shard the batch times devices that shard the tokens."""
        return self.sizes[0] * self.sizes[1]

    def sums(self, dlogits: jax.Array, x: jax.Array) -> jax.Array:
        """dlogits^T @ x, summed over each device's own tokens: float32 [batch devices, token devices, V, D].

        Here V is the number of vocabulary entries of one chunk. dlogits: [..., V], cotangents of the chunk's logits.
        x: [..., D]. The sum over the first two axes is the gradient of the chunk's rows of w.
        """
        if self.count == 1:
            outer = tuple(range(x.ndim - 1))
            return jnp.tensordot(dlogits, x, (outer, outer), preferred_element_type=jnp.float32)[None, None]
        return jnp.einsum("abcdv,abcdz->acvz", self._parts(dlogits), self._parts(x), preferred_element_type=jnp.float32)

    def _parts(self, x: jax.Array) -> jax.Array:
        """x [B, T, n] with its batch and tokens split by device: [batch devices, B / these, token devices, T / these,
        n].
        """
        (of_batch, of_tokens), (batch, tokens, _) = self.sizes, x.shape
        return x.reshape(of_batch, batch // of_batch, of_tokens, tokens // of_tokens, x.shape[-1])


@under_defaults
def _forward(how: tuple[int, ShardingRules], x: jax.Array, rows: jax.Array, targets: jax.Array) -> Any:
    """(cross-entropy of logits x @ rows.T and each target, residuals of the backward).

    how: (number of chunks of rows, rules). x: [..., D]. rows: [V, D]. targets: integers [...]. The losses are float32
    [...]; the logits are made for one chunk of rows at a time.
    """
    count, rules = how

    def one(carry: Any, of_chunk: Any) -> Any:
        largest, total, chosen = carry
        logits = _logits(x, of_chunk[0], of_chunk[1], rows.shape[0], rules)
        above = jnp.maximum(largest, logits.max(-1))
        total = total * jnp.exp(largest - above) + jnp.exp(logits - above[..., None]).sum(-1)
        is_target = of_chunk[1] == targets[..., None]
        return (above, total, chosen + jnp.where(is_target, logits, 0).sum(-1)), None

    full = lambda value: jnp.full(targets.shape, value, jnp.float32)
    # The first maximum is finite: the difference of two infinite maxima is NaN.
    start = as_varying((full(jnp.finfo(jnp.float32).min), full(0), full(0)), varying_axes(x, rows, targets))
    (largest, total, chosen), _ = lax.scan(one, start, _chunks(count, x, rows, rules))
    lse = largest + jnp.log(total)
    return jnp.where(targets >= 0, lse - chosen, 0), (x, rows, targets, lse)


@under_defaults
def _backward(how: tuple[int, ShardingRules], residuals: Any, cotangent: jax.Array) -> Any:
    """The gradients of (x, rows, targets): [..., D] in x's dtype, [V, D] in rows' dtype, and None.

    how: (number of chunks, rules). residuals: from _forward. cotangent: of the losses, [...].
    """
    count, rules = how
    x, rows, targets, lse = residuals
    cotangent = jnp.where(targets >= 0, cotangent, 0)
    devices = _Devices.of(x, rules)

    def one(dx: Any, of_chunk: Any) -> Any:
        of_rows, ids = of_chunk
        logits = _logits(x, of_rows, ids, rows.shape[0], rules)
        share = jnp.exp(logits - lse[..., None]) - (ids == targets[..., None])
        dlogits = (share * cotangent[..., None]).astype(x.dtype)
        dx = dx + jnp.einsum("...v,vd->...d", dlogits, of_rows, preferred_element_type=jnp.float32)
        drows = devices.sums(dlogits, x)
        drows = rules.constrain(drows, devices.batch, devices.tokens, "vocab", "embed")
        return dx, drows if devices.count > 1 else drows.astype(rows.dtype)

    start = as_varying(jnp.zeros(x.shape, jnp.float32), varying_axes(residuals, cotangent))
    dx, drows = lax.scan(one, start, _chunks(count, x, rows, rules))
    drows = drows.transpose(1, 2, 3, 0, 4).reshape(*devices.sizes, -1, rows.shape[1])[:, :, : rows.shape[0]]
    # Summed over the devices once: inside the loop each chunk would wait for its sum.
    drows = rules.constrain(drows.sum((0, 1)).astype(rows.dtype), "vocab", "embed")
    return dx.astype(x.dtype), drows, None


_losses = in_both_modes(lambda how, *arrays: _forward(how, *arrays)[0], _forward, _backward)
