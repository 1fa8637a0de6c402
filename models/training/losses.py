"""The cross-entropy of a language model's head, computed in chunks of the vocabulary."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels import dispatch
from jax_kernels.inputs.linear_cross_entropy import Layout, LossOptions, product
from jax_kernels.models.parallel.sharding import UNCONSTRAINED, ShardingRules
from jax_kernels.ops.cross_entropy.gradients import planned_losses
from jax_kernels.ops.cross_entropy.targets import check_targets, usable_targets
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.plain_numbers import plain
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

    This is jax_kernels.linear_cross_entropy by "xla" with the shardings of a model. Forward and backward loop over
    chunks of the vocabulary. The backward rematerialises the logits of a chunk. It rounds their cotangents to x's dtype
    for its matmuls, and accumulates x's gradient in float32.

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
    vocabulary = w.shape[0 if transpose_w else 1]
    check_targets(targets, vocabulary)
    layout = _ModelLayout.of(x, ShardingRules() if rules is None else rules)
    options = LossOptions(transpose_w=bool(transpose_w), chunk=chunk, layout=layout)
    # Inside shard_map the transpose of this cast sums the gradients of a replicated array over the devices.
    given = x, w, usable_targets(targets, vocabulary)
    given = as_varying(given, varying_axes(given))
    return planned_losses(PlannedCall("xla", None, options, dispatch.interpreting()), *given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelLayout(Layout):
    """The sharding of the logits by a model's rules. The gradient of w is summed over devices after the loop over
    chunks, not within it: inside the loop each chunk would wait for its sum.

    names: of the axes of the logits but the last, by the rules, or UNCONSTRAINED. batch, tokens: the mesh axes that
    shard the batch and the tokens of x [B, T, D], if they come before any axis that also shards the width of w. sizes:
    the number of devices along `batch`, and along `tokens`. Along an axis that shards the width, each device needs only
    its part of the sum, so each chunk's sum is sent at once, in parallel with the matmuls of the next chunk. There are
    no such axes if x does not have three axes.
    """

    rules: ShardingRules
    names: tuple[Any, ...]
    batch: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    sizes: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, x: jax.Array, rules: ShardingRules) -> "_ModelLayout":
        """The layout for x [..., D] on the mesh of jax.set_mesh."""
        if x.ndim != 3:
            return cls(rules=rules, names=(UNCONSTRAINED,) * (x.ndim - 1))
        of_width, shapes = rules.devices("embed", x.shape[2]), dict(zip(("batch", "tokens"), x.shape, strict=False))
        found = {name: rules.devices(name, length) for name, length in shapes.items()}
        outer = lambda axes: dict(itertools.takewhile(lambda axis: axis[0] not in of_width, axes.items()))
        batch, tokens = (outer(axes) for axes in found.values())
        return cls(
            rules=rules,
            # The caller may shard an axis of x that the rules do not shard: its sharding is kept.
            names=tuple(name if axes else UNCONSTRAINED for name, axes in found.items()),
            batch=tuple(batch),
            tokens=tuple(tokens),
            sizes=(math.prod(batch.values()), math.prod(tokens.values())),
        )

    def rows(self, rows: jax.Array) -> jax.Array:
        return self.rules.constrain(rows, None, "vocab")

    def logits(self, logits: jax.Array) -> jax.Array:
        return self.rules.constrain(logits, *self.names, "vocab")

    def sums(self, dlogits: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
        """dlogits^T @ x, summed over each device's own tokens: [batch devices, token devices, V / count, D], float32 if
        there are several of them.
        """
        if math.prod(self.sizes) == 1:
            drows = product("...v,...d->vd", dlogits, x)[None, None]
        else:
            drows = product("abcdv,abcdz->acvz", self._parts(dlogits), self._parts(x))
        drows = self.rules.constrain(drows, self.batch, self.tokens, "vocab", "embed")
        return drows if math.prod(self.sizes) > 1 else drows.astype(dtype)

    def total(self, sums: jax.Array, dtype: Any) -> jax.Array:
        return self.rules.constrain(sums.sum((0, 1)).astype(dtype), "vocab", "embed")

    def _parts(self, x: jax.Array) -> jax.Array:
        """x [B, T, n] with its batch and tokens split by device: [batch devices, B / these, token devices, T / these,
        n].
        """
        (of_batch, of_tokens), (batch, tokens, _) = self.sizes, x.shape
        return x.reshape(of_batch, batch // of_batch, of_tokens, tokens // of_tokens, x.shape[-1])
