"""The rows of an expert's matmuls: pairs of a token and one of its experts, sorted by expert."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.models.layers.routing import loads
from jax_kernels.ops.grouped.rows import summed_rows, token_rows

__all__ = ["Pairs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of a token and one of its experts, sorted by expert: a row for each.

    order: from a row to its pair. inverse: from a pair to its row. sizes: int32 [experts], the rows of each expert.
    each: the pairs of a token. live_count: int32, the number of rows of all experts, if other devices have experts too:
    then it may be far below the number of rows; None otherwise.
    """

    order: jax.Array
    inverse: jax.Array
    sizes: jax.Array
    each: int
    live_count: jax.Array | None = None

    @classmethod
    def of(cls, experts: jax.Array, owned: int, *, skips: bool = False) -> "Pairs":
        """The pairs of tokens whose experts are [N, each], from 0 to owned - 1; `owned` is an expert of other devices.

        Pairs with such an expert come last. A token's experts differ, so at most min(each, owned) have a row. skips:
        whether passes over the rows may leave out the rows of other devices' experts.
        """
        pairs = experts.reshape(-1)
        keys = pairs.astype(jnp.uint8) if owned < 256 else pairs  # a radix sort takes a pass for each byte
        order = jnp.argsort(keys, stable=True)
        sizes = loads(pairs, owned)
        return cls(
            order=order[: experts.shape[0] * min(experts.shape[1], owned)],
            inverse=jnp.zeros_like(order).at[order].set(lax.iota(order.dtype, order.shape[0]), unique_indices=True),
            sizes=sizes,
            each=experts.shape[1],
            live_count=sizes.sum(dtype=jnp.int32) if skips else None,
        )

    def rows(self, x: jax.Array) -> jax.Array:
        """The token of each row, [rows, D], from x [N, D]. The gradient of a token is summed in float32."""
        return token_rows(x, self.each, self.order, self.inverse, self.live_count)

    def summed(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        """The sum over each token's rows, times its weights [N, each]: float32 [N, D]. Pairs without a row add 0."""
        return summed_rows(rows, weights, self.order, self.inverse)
