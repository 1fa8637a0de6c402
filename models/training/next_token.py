"""next_token_loss: the loss of a Transformer's batch, for Trainer."""

from typing import Any

import jax

from jax_kernels.models.training.packing import within_documents
from jax_kernels.models.transformer import Transformer

__all__ = ["next_token_loss"]


def next_token_loss(model: Transformer, batch: Any, key: jax.Array) -> tuple[Any, ...]:
    """(the sum of the losses of a batch's targets, the number of targets that count), for Trainer's argument `loss`.

    For a model with experts (the sum with a balance term, the number, the balance term, the Routing). The balance term
    is the number times config.experts.balance_loss times the sum of the blocks' load-balancing losses.

    batch: (tokens, targets), or for packed documents (tokens, targets, segment_ids), integers [B, T] each. A target
    below 0, or in another document than its token, does not count. key is not used.
    """
    tokens, targets, *rest = batch
    documents = {}
    if rest:
        (segment_ids,) = rest
        targets = within_documents(targets, segment_ids)
        documents = {"segment_ids": segment_ids}
    count = (targets >= 0).sum()
    if model.config.experts is None:
        return model.losses(tokens, targets, **documents).sum(), count
    losses, routing = model.losses_and_routing(tokens, targets, **documents)
    assert routing is not None
    balance = count * model.config.experts.balance_loss * routing.balance_loss.sum()
    return losses.sum() + balance, count, balance, routing
