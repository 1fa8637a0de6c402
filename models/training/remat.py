"""Policies for jax.checkpoint: the names of the saved values. The backward of a block rematerialises the others."""

from collections.abc import Callable
from typing import Any

import jax

from jax_kernels.ops.attention.vjp import RESIDUALS as OF_ATTENTION
from jax_kernels.ops.matmul.fp8 import RESIDUALS as OF_FP8
from jax_kernels.ops.matmul.mlp import RESIDUALS as OF_MLP
from jax_kernels.ops.normalization.vjp import RESIDUALS as OF_NORM
from jax_kernels.ops.ring.ring_attention import OF_HEADS
from jax_kernels.ops.ring.vjp import RESIDUALS as OF_RING

__all__ = ["PROJECTION", "REMAT", "recomputed"]

# The matmuls of an attention's projections, and of an MLP that does not use the op mlp.
PROJECTION = "projection"

# The names of the saved values, by policy.
REMAT: dict[str, tuple[str, ...]] = {
    "attention": (*OF_ATTENTION, *OF_RING),
    "products": (*OF_ATTENTION, *OF_RING, *OF_HEADS, *OF_MLP, *OF_FP8, *OF_NORM, PROJECTION),
}


def recomputed(function: Callable[..., Any], remat: bool | str) -> Callable[..., Any]:
    """The function, whose backward rematerialises all values that the policy does not save.

    remat: the policy: False to save all, True to save none, or a name in REMAT, whose values are saved.
    """
    if remat is False:
        return function
    if remat is True:
        return jax.checkpoint(function)
    return jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(*REMAT[remat]))
