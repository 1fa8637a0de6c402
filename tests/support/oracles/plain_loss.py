"""The cross-entropy of logits in plain jnp, by the code in linear_cross_entropy's docstring."""

import jax
import jax.numpy as jnp


def of_logits(logits, targets, weights, reduction, softcap=None, label_smoothing=0.0, z_loss=0.0):
    """The losses [...] of logits [..., V], times the weights [...], or with a reduction their sum or mean."""
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    losses = lse - (1 - label_smoothing) * chosen - label_smoothing * logits.mean(-1) + z_loss * lse**2
    weights = jnp.where(targets >= 0, weights, 0)
    losses = weights * losses
    return losses if reduction == "none" else losses.sum() / (weights.sum() if reduction == "mean" else 1)
