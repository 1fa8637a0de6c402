"""The router of a mixture of experts: scores, the choice of experts, and the balance of their load."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_kernels.tracing.derivatives import in_both_modes

__all__ = ["ExpertBias", "RouterKernel", "Routing", "balanced", "largest", "loads", "route"]

_PASSES = 8  # the most experts of a token that are found one after the other


class RouterKernel(nnx.Param):
    """A router's matrix, float32 [model_dim, num_experts]. It is never rounded to a computation's dtype."""


class ExpertBias(nnx.Variable):
    """The bias by which a router prefers experts with little load: float32 [num_experts].

    Not an nnx.Param, so that optimizers and nnx.grad ignore it.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """The sums over a batch's tokens from which the balance of the experts is computed.

    load: the number of tokens that chose each expert, int32 [..., num_experts]. probability: the sum of the tokens'
    probabilities of each expert, float32 [..., num_experts]. Sums of parts of a batch may be added. A first axis may
    hold the layers of a model.
    """

    load: jax.Array
    probability: jax.Array

    @property
    def balance_loss(self) -> jax.Array:
        """The load-balancing loss, float32 [...]: 1 if all experts have the same load, up to num_experts if one has
        all.

        Equivalent to num_experts * sum over experts of fraction * mean_probability, with the expert's fraction of the
        load. Its gradient reaches the router by the mean probabilities. 0 without tokens.

        Sources: Fedus et al., "Switch Transformers" (2021), arXiv:2101.03961, equations 4 to 6, for one expert per
        token; Lepikhin et al., "GShard" (2020), arXiv:2006.16668.
        """
        of_all = lambda x: jnp.maximum(x.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        load = self.load.astype(jnp.float32)
        mean = self.probability / lax.stop_gradient(of_all(self.probability))  # a token's probabilities sum to 1
        return self.load.shape[-1] * (load / of_all(load) * mean).sum(-1)

    @property
    def largest_load(self) -> jax.Array:
        """The largest load of an expert over the mean load, float32 [...]: 1 if all are equal; 0 without tokens."""
        load = self.load.astype(jnp.float32)
        return load.max(-1) / jnp.maximum(load.mean(-1), jnp.finfo(jnp.float32).tiny)


def route(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, *, count: int, scores: str, renormalize: bool, scale: float
) -> tuple[jax.Array, jax.Array, Routing]:
    """(the weights of each token's experts, their indices, the Routing): float32 [N, count], int32 [N, count].

    Equivalent to the following JAX code, in float32::

        s = softmax(x @ kernel) if scores == "softmax" else sigmoid(x @ kernel)
        experts = top_k(s + bias, count)[1]
        weights = take_along_axis(s, experts, axis=-1)
        weights = scale * (weights / weights.sum(-1, keepdims=True) if renormalize else weights)

    Of experts with equal scores, the one with the lower index comes first. The bias has no gradient, and no influence
    on the weights. The probabilities in the Routing are s divided by its sum over the experts.

    x: [N, model_dim]. kernel: [model_dim, num_experts]. bias: [num_experts] or None.
    """
    logits = _logits(None, x, kernel.astype(jnp.float32))
    found = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    preferred = lax.stop_gradient(found)
    preferred = preferred if bias is None else preferred + lax.stop_gradient(bias)
    experts = largest(preferred, count)
    # Scores are divided by their sum as a softmax of their logarithms, which has a gradient also if all scores are 0.
    logs = jnp.maximum(logits, jnp.finfo(jnp.float32).min)
    logs = logs if scores == "softmax" else jax.nn.log_sigmoid(logs)
    weights = jnp.take_along_axis(logs if renormalize else found, experts, axis=-1)
    weights = jax.nn.softmax(weights) if renormalize else weights
    probability = found if scores == "softmax" else jax.nn.softmax(logs)
    load = loads(experts, kernel.shape[1])
    return scale * weights, experts, Routing(load=load, probability=probability.sum(0))


def largest(scores: jax.Array, count: int) -> jax.Array:
    """lax.top_k(scores, count)[1]: the indices of the largest scores, int32 [N, count], of float32 scores [N, E].

    Equal scores come in the order of their indices. NaN is above all others. A few indices are found by a
    pass over the scores each, in less time than by a sort.
    """
    scores = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.nan, scores))  # neither has a sign
    if count > _PASSES:
        return lax.top_k(scores, count)[1]
    # Integers in the order of the floats, NaN above infinity: the least integer is none of them, and marks found ones.
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    rest = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
    found: list[jax.Array] = []
    for _ in range(count):
        found.append(jnp.argmax(rest, axis=-1).astype(jnp.int32))
        columns = lax.broadcasted_iota(jnp.int32, rest.shape, rest.ndim - 1)
        rest = jnp.where(columns == found[-1][..., None], jnp.iinfo(jnp.int32).min, rest)
    return jnp.stack(found, axis=-1)


def _logits_of(_: None, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel in float32, with the precision of float32, of a bfloat16 or other x [N, D] and a kernel [D, E]."""
    if x.dtype != jnp.bfloat16:
        return jnp.matmul(x.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
    return _summed(_multiplied(x, _thirds(kernel)), kernel.shape[1])


def _logits_forward(_: None, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    return _logits_of(None, x, kernel), (x, kernel)


def _logits_backward(_: None, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    if x.dtype != jnp.bfloat16:
        multiply = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
        return multiply(cotangent, kernel.T).astype(x.dtype), multiply(x.astype(jnp.float32).T, cotangent)
    experts = kernel.shape[1]
    of_kernel, of_cotangent = _thirds(kernel), _thirds(cotangent)
    # x's cotangent is rounded to 8 bits of mantissa: of the products of parts, three have a share in them.
    high, middle = of_kernel[:, :experts], of_kernel[:, experts : 2 * experts]
    left = jnp.concatenate([of_cotangent[:, : 2 * experts], of_cotangent[:, :experts]], axis=1)
    dx = _multiplied(left, jnp.concatenate([high, high, middle], axis=1).T)
    return dx.astype(x.dtype), _summed(_multiplied(x.T, of_cotangent), experts)


_logits = in_both_modes(_logits_of, _logits_forward, _logits_backward)


def _thirds(y: jax.Array) -> jax.Array:
    """bfloat16 [N, 3 E] whose thirds add up to float32 y [N, E], but for its last bit: its leading bits come first.

    A product of bfloat16 values is exact in float32, so that the matmul of a bfloat16 x and the thirds has the
    precision of float32, in the time of three matmuls of 16 bits.
    """
    rounded = lambda y: lax.reduce_precision(y, exponent_bits=8, mantissa_bits=7)  # XLA would drop a pair of casts
    high = rounded(y)
    middle = rounded(y - high)
    return jnp.concatenate([high, middle, y - high - middle], axis=1).astype(jnp.bfloat16)


def _multiplied(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y in float32, of bfloat16 matrices."""
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _summed(y: jax.Array, experts: int) -> jax.Array:
    """The sum of y's thirds, [N, E] from [N, 3 E], the smallest first."""
    return y[:, 2 * experts :] + y[:, experts : 2 * experts] + y[:, :experts]


def loads(experts: jax.Array, count: int) -> jax.Array:
    """The number of entries of each expert from 0 to count - 1 in an array of indices: int32 [count].

    A sum of comparisons, since the few addresses of a scatter would be contended for.
    """
    return (experts.reshape(-1, 1) == lax.iota(jnp.int32, count)).sum(0, dtype=jnp.int32)


def balanced(bias: Any, load: Any, rate: float) -> jax.Array:
    """The expert bias after a step with this load: bias + rate * sign(mean load - load), both [..., num_experts].

    Sources: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024), arXiv:2408.15664;
    DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), arXiv:2412.19437.
    """
    load = load.astype(jnp.float32)
    return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
