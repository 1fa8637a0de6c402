"""The rows of an expert's matmuls: pairs of a token and one of its experts, sorted by expert, and gathers of rows.

A gather's gradient is a gather by the inverse permutation, where JAX would scatter.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.models.layers.routing import loads
from jax_kernels.tracing.derivatives import in_both_modes

__all__ = ["Pairs", "permuted_rows"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """The pairs of a token and one of its experts, sorted by expert: a row for each.

    order: from a row to its pair. inverse: from a pair to its row. sizes: int32 [experts], the rows of each expert.
    each: the pairs of a token.
    """

    order: jax.Array
    inverse: jax.Array
    sizes: jax.Array
    each: int

    @classmethod
    def of(cls, experts: jax.Array, owned: int) -> "Pairs":
        """The pairs of tokens whose experts are [N, each], from 0 to owned - 1; `owned` is an expert of other devices.

        Pairs with such an expert come last. A token's experts differ, so at most min(each, owned) have a row.
        """
        pairs = experts.reshape(-1)
        keys = pairs.astype(jnp.uint8) if owned < 256 else pairs  # a radix sort takes a pass for each byte
        order = jnp.argsort(keys, stable=True)
        return cls(
            order=order[: experts.shape[0] * min(experts.shape[1], owned)],
            inverse=jnp.zeros_like(order).at[order].set(lax.iota(order.dtype, order.shape[0]), unique_indices=True),
            sizes=loads(pairs, owned),
            each=experts.shape[1],
        )

    def rows(self, x: jax.Array) -> jax.Array:
        """The token of each row, [rows, D], from x [N, D]. The gradient of a token is summed in float32."""
        return _token_rows(self.each, x, self.order, self.inverse)

    def summed(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        """The sum over each token's rows, times its weights [N, each]: float32 [N, D]. Pairs without a row add 0."""
        of_pairs = permuted_rows(rows.astype(jnp.float32), self.inverse, self.order)
        return (weights[..., None] * of_pairs.reshape(*weights.shape, rows.shape[1])).sum(1)


def _taken(_: None, x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """x[index], with 0 for an index past x's end. `inverse` is the inverse permutation, or its beginning."""
    return x.at[index].get(mode="fill", fill_value=0)


def _taken_forward(_: None, x: jax.Array, index: jax.Array, inverse: jax.Array) -> Any:
    return _taken(None, x, index, inverse), inverse


def _taken_backward(_: None, inverse: jax.Array, cotangent: jax.Array) -> Any:
    return _taken(None, cotangent, inverse, inverse), None, None  # a gather, where JAX would scatter


permuted_rows = functools.partial(in_both_modes(_taken, _taken_forward, _taken_backward), None)


@jax.custom_jvp
def _copied(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] of x [N, D] and an index below N. Values of 16 bits are copied in pairs, in half as many loads."""
    if x.dtype.itemsize != 2 or x.shape[1] % 2:
        return x.at[index].get(mode="clip")
    words = lax.bitcast_convert_type(x.reshape(x.shape[0], x.shape[1] // 2, 2), jnp.uint32)
    copied = lax.bitcast_convert_type(words.at[index].get(mode="clip"), x.dtype)
    return copied.reshape(index.shape[0], x.shape[1])


@_copied.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, index), (dx, _) = primals, tangents
    return _copied(x, index), dx.at[index].get(mode="clip")  # words of bits have no derivative


def _token_rows_of(each: int, x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """The token of each row, as Pairs.rows returns them."""
    return _copied(x, order // each)


def _token_rows_forward(each: int, x: jax.Array, order: jax.Array, inverse: jax.Array) -> Any:
    return _token_rows_of(each, x, order, inverse), (order, inverse)


def _token_rows_backward(each: int, residuals: Any, cotangent: jax.Array) -> Any:
    order, inverse = residuals
    of_pairs = permuted_rows(cotangent.astype(jnp.float32), inverse, order)
    return of_pairs.reshape(-1, each, cotangent.shape[1]).sum(1).astype(cotangent.dtype), None, None


_token_rows = in_both_modes(_token_rows_of, _token_rows_forward, _token_rows_backward)
