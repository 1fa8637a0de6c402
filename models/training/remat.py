"""Policies for jax.checkpoint, by the names of what they keep: the backward of a block computes the rest again."""

from collections.abc import Callable
from typing import Any

import jax

from jax_kernels.ops.attention.vjp import RESIDUALS as OF_ATTENTION
from jax_kernels.ops.matmul.mlp import RESIDUALS as OF_MLP
from jax_kernels.ops.ring.ring_attention import OF_HEADS
from jax_kernels.ops.ring.vjp import RESIDUALS as OF_RING

__all__ = ["PROJECTION", "REMAT", "recomputed"]

# The products of an attention's projections, and of an MLP that is not the op.
PROJECTION = "projection"

# The names of what is kept, by the name of the policy.
REMAT: dict[str, tuple[str, ...]] = {
    "attention": (*OF_ATTENTION, *OF_RING),
    "products": (*OF_ATTENTION, *OF_RING, *OF_HEADS, *OF_MLP, PROJECTION),
}


def recomputed(function: Callable[..., Any], remat: bool | str) -> Callable[..., Any]:
    """A function whose backward computes its results again, but for what the policy keeps. remat: as in the config."""
    if remat is False:
        return function
    if remat is True:
        return jax.checkpoint(function)
    return jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(*REMAT[remat]))
