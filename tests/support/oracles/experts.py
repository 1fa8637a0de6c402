"""A mixture of experts by its equations: every expert runs on every token, in the dtype of the arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["dense_experts"]

ACTIVATIONS = {"silu": lambda z: z / (1 + jnp.exp(-z)), "relu": lambda z: jnp.maximum(z, 0)}


def dense_experts(module: Any, parameters: Mapping[str, Any], x: Any) -> tuple[Any, Any]:
    """(result [N, model_dim], balance loss) of the equations in the docstring of MixtureOfExperts.

    The experts of a token are a mask over all experts, from a stable sort of the scores, without a gradient.

    module: gives the options and the expert_bias. parameters: arrays by name. x: [N, model_dim].
    """
    p, act = parameters, ACTIVATIONS[module.activation]
    logits = x @ p["router"]
    exp = jnp.exp(logits - logits.max(-1, keepdims=True))
    scores = exp / exp.sum(-1, keepdims=True) if module.scores == "softmax" else 1 / (1 + jnp.exp(-logits))
    bias = 0 if module.expert_bias is None else np.asarray(module.expert_bias[...], np.float64)
    ranked = np.argsort(-np.asarray(jax.lax.stop_gradient(scores) + bias), axis=-1, kind="stable")
    chosen = np.zeros(scores.shape)
    np.put_along_axis(chosen, ranked[:, : module.experts_per_token], 1, axis=-1)
    weights = scores * chosen
    weights = weights / weights.sum(-1, keepdims=True) if module.renormalize else weights
    hidden = jnp.einsum("nd,edf->nef", x, p["up_proj"])
    hidden = act(jnp.einsum("nd,edf->nef", x, p["gate_proj"])) * hidden if module.gated else act(hidden)
    out = module.weight_scale * jnp.einsum("nef,efd,ne->nd", hidden, p["down_proj"], weights)
    if module.shared is not None:
        gate, up, down = (p[f"shared.{name}_proj.kernel"] for name in ("gate", "up", "down"))
        out = out + (act(x @ gate) * (x @ up)) @ down
    probability = (scores / scores.sum(-1, keepdims=True)).mean(0)
    return out, module.num_experts * (chosen.sum(0) / chosen.sum() * probability).sum()
