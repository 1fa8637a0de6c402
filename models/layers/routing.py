"""The router of a mixture of experts: scores, the choice of experts, and the balance of their load."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

__all__ = ["ExpertBias", "RouterKernel", "Routing", "balanced", "loads", "route"]


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
    x, kernel = (y.astype(jnp.float32) for y in (x, kernel))
    logits = jnp.matmul(x, kernel, precision=lax.Precision.HIGHEST)
    found = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    preferred = lax.stop_gradient(found)
    preferred = preferred if bias is None else preferred + lax.stop_gradient(bias)
    experts = lax.top_k(preferred, count)[1]
    weights = jnp.take_along_axis(found, experts, axis=-1)
    tiny = jnp.finfo(jnp.float32).tiny
    if renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + tiny)
    probability = found if scores == "softmax" else found / (found.sum(-1, keepdims=True) + tiny)
    load = loads(experts, kernel.shape[1])
    return scale * weights, experts, Routing(load=load, probability=probability.sum(0))


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
