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
from jax_kernels.ops.checks import DTYPES
from jax_kernels.ops.cross_entropy.checks import check_reduction, checked_options, request_of
from jax_kernels.ops.cross_entropy.gradients import reduced
from jax_kernels.ops.cross_entropy.implementations import OP
from jax_kernels.ops.cross_entropy.targets import check_targets, usable_targets
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.plain_numbers import plain
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
    weights: jax.Array | None = None,
    reduction: str = "none",
    transpose_w: bool = False,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    precision: str | None = None,
    chunk: int | None = None,
    rules: ShardingRules | None = None,
) -> jax.Array:
    """The cross-entropy of each token under the logits x @ w, or their sum or mean, in nats. The logits are never all
    in memory.

    Equivalent to the following JAX code, in float32 from the matmul on::

        logits = x @ (w.T if transpose_w else w)
        logits = softcap * tanh(logits / softcap)
        lse = logsumexp(logits, axis=-1)
        chosen = take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = lse - (1 - label_smoothing) * chosen - label_smoothing * logits.mean(-1) + z_loss * lse**2
        weights = where(targets >= 0, weights, 0)
        none, sum, mean = weights * losses, (weights * losses).sum(), (weights * losses).sum() / weights.sum()

    This is jax_kernels.linear_cross_entropy with the shardings of a model. With reduction="none" forward and backward
    loop over chunks of the vocabulary, and the backward computes the logits of a chunk again: four matmuls. With "sum"
    and "mean" the forward of a differentiated call loops over tiles of the tokens, and computes the gradients from the
    logits of a tile: three matmuls. On a mesh, each device sums w's gradient over its own tokens in float32, [V, D] or
    its part of V, and the devices add their sums after the loop.

    Args:
      x: [..., D], bfloat16, float16 or float32.
      w: [D, V], or [V, D] with transpose_w, of any float dtype; rounded to x's dtype for the matmuls.
      targets: integers [...]: the token ids, below V. A token whose target is below 0, such as -1 or -100, has a loss
        of 0 and no gradient.
      weights: floats [...], the factor of each token's loss; None is 1. They have a gradient.
      reduction: "none", the losses of the tokens; "sum"; or "mean", the sum divided by the sum of the weights of the
        tokens that count. The mean of no token is 0.
      softcap, label_smoothing, z_loss, precision: as in jax_kernels.linear_cross_entropy.
      chunk: the largest number of vocabulary entries whose logits are in memory at once; with "sum" and "mean", the
        largest mean number of logits in memory for each token of the batch. None for 4096 with "none", and for 0.5 GB
        of logits on a device otherwise.
      rules: the mesh axes that shard the logits; None for ShardingRules().

    Returns:
      float32 [...], or a scalar with "sum" or "mean".

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, a number is out of range, or a target is V or more. A traced target of V
        or more gives NaN.
    """
    floats = {"x": x, "w": w} if weights is None else {"x": x, "w": w, "weights": weights}
    for name, array in floats.items():
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
    if weights is not None and weights.shape != x.shape[:-1]:
        raise ValueError(f"weights: got shape {weights.shape}, want x's {x.shape[:-1]}")
    reduction, transpose_w, chunk = plain(reduction), plain(transpose_w), plain(chunk)
    check_reduction(reduction)
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk: got {chunk!r}, want a positive int")
    vocabulary = w.shape[0 if transpose_w else 1]
    check_targets(targets, vocabulary)
    options = checked_options(transpose_w, plain(softcap), plain(label_smoothing), plain(z_loss), plain(precision))
    rules = ShardingRules() if rules is None else rules
    call = _planned(x, w, options, reduction, chunk, rules)
    return reduced(call, x, w, usable_targets(targets, vocabulary), weights, reduction)


def _planned(
    x: jax.Array, w: jax.Array, options: LossOptions, reduction: str, chunk: int | None, rules: ShardingRules
) -> PlannedCall:
    """The planned call: on one device by the op's implementation, on a mesh and with a chunk by the loops of "xla"."""
    if chunk is None and _is_one_device() and x.dtype in DTYPES and w.dtype in DTYPES:
        request = request_of(x, w, reduction, options)
        call = OP.call(request, options, None)
        if call.implementation != "xla":
            return call
    vocabulary = w.shape[0 if options.transpose_w else 1]
    options = dataclasses.replace(
        options,
        chunk=CHUNK if chunk is None and reduction == "none" else chunk,
        layout=_ModelLayout.of(x, vocabulary, rules),
    )
    return PlannedCall("xla", None, options, dispatch.interpreting())


def _is_one_device() -> bool:
    """Whether a call runs on one device: there is no mesh, or a mesh of one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelLayout(Layout):
    """The sharding of the logits by a model's rules. The gradient of w is summed over devices after the loop over
    chunks, not within it: inside the loop each chunk would wait for its sum.

    names: of the axes of the logits but the last, by the rules, or UNCONSTRAINED. token_axes: the mesh axes that shard
    the batch and the tokens of x [B, T, D], with their numbers of devices. outer: the number of axes of each that come
    before any axis that also shards the width of w. Along an axis that shards the width, each device needs only its
    part of the sum, so each chunk's sum is sent at once, in parallel with the matmuls of the next chunk. A loop over
    tiles of tokens sends no sums before its end. There are no such axes if x does not have three axes.
    of_vocabulary: the number of devices that shard the vocabulary.
    """

    rules: ShardingRules
    names: tuple[Any, ...]
    token_axes: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]] = ((), ())
    outer: tuple[int, int] = (0, 0)
    of_vocabulary: int = 1

    @classmethod
    def of(cls, x: jax.Array, vocabulary: int, rules: ShardingRules) -> "_ModelLayout":
        """The layout for x [..., D] on the mesh of jax.set_mesh."""
        of_vocabulary = math.prod(rules.devices("vocab", vocabulary).values())
        if x.ndim != 3:
            return cls(rules=rules, names=(UNCONSTRAINED,) * (x.ndim - 1), of_vocabulary=of_vocabulary)
        of_width = rules.devices("embed", x.shape[2])
        batch, tokens = (rules.devices(name, n) for name, n in zip(("batch", "tokens"), x.shape, strict=False))
        outer = lambda axes: len(list(itertools.takewhile(lambda axis: axis not in of_width, axes)))
        return cls(
            rules=rules,
            # The caller may shard an axis of x that the rules do not shard: its sharding is kept.
            names=tuple(name if axes else UNCONSTRAINED for name, axes in (("batch", batch), ("tokens", tokens))),
            token_axes=(tuple(batch.items()), tuple(tokens.items())),
            outer=(outer(batch), outer(tokens)),
            of_vocabulary=of_vocabulary,
        )

    def rows(self, rows: jax.Array) -> jax.Array:
        return self.rules.constrain(rows, None, "vocab")

    def logits(self, logits: jax.Array) -> jax.Array:
        return self.rules.constrain(logits, *self.names, "vocab")

    def sums(self, dlogits: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
        """dlogits^T @ x, summed over each device's own tokens: [batch devices, token devices, V / count, D], float32 if
        there are several of them.
        """
        axes = tuple(axes[:count] for axes, count in zip(self.token_axes, self.outer, strict=True))
        drows = self._partial_sums(dlogits, x, axes, "embed")
        return drows if math.prod(_sizes(axes)) > 1 else drows.astype(dtype)

    def total(self, sums: jax.Array, dtype: Any) -> jax.Array:
        return self.rules.constrain(sums.sum((0, 1)).astype(dtype), "vocab", "embed")

    def devices(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return _sizes(self.token_axes) if len(shape) == 2 else (1,) * len(shape)

    def vocabulary_devices(self, vocabulary: int) -> int:
        return self.of_vocabulary

    def first_sums(self, rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros((*_sizes(self.token_axes), *rows.shape), jnp.float32)
        return self.rules.constrain(zeros, *map(_names, self.token_axes), "vocab", None)

    def tile_sums(self, dlogits: jax.Array, x: jax.Array) -> jax.Array:
        return self._partial_sums(dlogits, x, self.token_axes, None)

    def _partial_sums(self, dlogits: jax.Array, x: jax.Array, axes: Any, width: str | None) -> jax.Array:
        """dlogits^T @ x, summed over each device's own tokens: float32 [batch devices, token devices, rows, D].

        axes: of the mesh, as token_axes has them. width: the name of the axis D of the result, for the rules.
        """
        sizes = _sizes(axes)
        if math.prod(sizes) == 1:
            drows = product("...v,...d->vd", dlogits, x)[None, None]
        else:
            drows = product("abcdv,abcdz->acvz", _parts(dlogits, sizes), _parts(x, sizes))
        return self.rules.constrain(drows, *map(_names, axes), "vocab", width)


def _names(axes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The names of these mesh axes."""
    return tuple(name for name, _ in axes)


def _sizes(axes: tuple[tuple[tuple[str, int], ...], ...]) -> tuple[int, ...]:
    """The number of devices along each group of mesh axes."""
    return tuple(math.prod(size for _, size in of_axis) for of_axis in axes)


def _parts(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """x [B, T, n] with its axes split by device: [batch devices, B / these, token devices, T / these, n]."""
    (of_batch, of_tokens), (batch, tokens, _) = sizes, x.shape
    return x.reshape(of_batch, batch // of_batch, of_tokens, tokens // of_tokens, x.shape[-1])
