"""next_token_loss: the loss of a Transformer's batch, for Trainer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.models.training.packing import DealtDocuments, within_documents
from jax_kernels.models.transformer import Transformer
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["is_next_token_loss", "next_token_loss"]


@under_defaults
def next_token_loss(
    model: Transformer, batch: Any, key: jax.Array, *, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[Any, ...]:
    """(the sum of the losses of a batch's targets, the number of targets that count), for Trainer's argument `loss`.

    For a model with experts (the sum with a balance term, the number, the balance term, the Routing). The balance term
    is the number times config.experts.balance_loss times the sum of the blocks' load-balancing losses.

    batch: (tokens, targets), or for packed documents (tokens, targets, segment_ids), integers [B, T] each. A target
    below 0, or in another document than its token, does not count. A fourth item has the weights of the tokens, floats
    [B, T] of 0 or more; segment_ids may then be None. The sum of the weights replaces the number. key is not used.
    z_loss, label_smoothing: as in linear_cross_entropy; functools.partial gives them to a Trainer.
    """
    tokens, targets, segment_ids, weights = (*batch, None, None)[:4]
    if segment_ids is not None and not isinstance(segment_ids, DealtDocuments):
        targets = within_documents(targets, segment_ids)
    counts = targets >= 0
    count = counts.sum() if weights is None else jnp.where(counts, weights, 0).sum(dtype=jnp.float32)
    options: dict[str, Any] = {"segment_ids": segment_ids, "weights": weights, "reduction": "sum"}
    options |= {"z_loss": z_loss, "label_smoothing": label_smoothing}
    if model.config.experts is None:
        return model.losses(tokens, targets, **options), count
    losses, routing = model.losses_and_routing(tokens, targets, **options)
    assert routing is not None
    balance = count * model.config.experts.balance_loss * routing.balance_loss.sum()
    return losses + balance, count, balance, routing


def is_next_token_loss(loss: Any) -> bool:
    """Whether a loss is next_token_loss, perhaps as a functools.partial with other options."""
    return loss is next_token_loss or (isinstance(loss, functools.partial) and loss.func is next_token_loss)
