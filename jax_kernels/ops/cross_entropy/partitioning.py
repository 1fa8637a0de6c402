"""The axes of the kernels' arrays that the devices of a mesh may shard: the tokens."""

from collections.abc import Callable

import jax

from jax_kernels.inputs.linear_cross_entropy import LossGradients, LossInputs, Statistics
from jax_kernels.ops.sharding.partitioning import Axis, Shares, is_partitioned, partitioned

__all__ = ["shared_gradients", "shared_losses_and_gradients", "shared_statistics"]

TOKENS = Axis("tokens")
OF_INPUTS = [(TOKENS, None), (None, None), (TOKENS,)]


def shared_statistics(function: Callable[[LossInputs], Statistics]) -> Callable[[LossInputs], Statistics]:
    """Returns the kernel's function with its tokens sharded over the devices of a mesh under jit."""

    def run(inputs: LossInputs) -> Statistics:
        if not is_partitioned():
            return function(inputs)
        results = lambda found: [(TOKENS,)] * len(jax.tree.leaves(found))
        shares = Shares(arguments=OF_INPUTS, results=results, lengths={TOKENS.name: inputs.x.shape[0]})
        return partitioned(function, shares)(inputs)

    return run


def shared_gradients(
    function: Callable[..., tuple[jax.Array, jax.Array]],
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the kernel's function of (inputs, lse, cotangent). Devices add their gradients of the weights."""

    def run(inputs: LossInputs, lse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not is_partitioned():
            return function(inputs, lse, cotangent)
        shares = Shares(
            arguments=[*OF_INPUTS, (TOKENS,), (TOKENS,)],
            results=lambda _: [(TOKENS, None), (None, None)],
            lengths={TOKENS.name: inputs.x.shape[0]},
        )
        return partitioned(function, shares)(inputs, lse, cotangent)

    return run


def shared_losses_and_gradients(
    function: Callable[[LossInputs, jax.Array], LossGradients],
) -> Callable[[LossInputs, jax.Array], LossGradients]:
    """Returns the kernel's function of (inputs, cotangent). Devices add their gradients of the weights."""

    def run(inputs: LossInputs, cotangent: jax.Array) -> LossGradients:
        if not is_partitioned():
            return function(inputs, cotangent)
        of_statistics = lambda found: [(TOKENS,)] * len(jax.tree.leaves(found.statistics))
        shares = Shares(
            arguments=[*OF_INPUTS, (TOKENS,)],
            results=lambda found: [*of_statistics(found), (TOKENS, None), (None, None)],
            lengths={TOKENS.name: inputs.x.shape[0]},
        )
        return partitioned(function, shares)(inputs, cotangent)

    return run
