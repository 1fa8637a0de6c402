"""Gathers of the rows of grouped matmuls. A row is a pair of a token and one of its groups; rows are sorted by group.

A gather's gradient is a gather by the inverse permutation, where JAX would scatter.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels import dispatch
from jax_kernels.pallas.grouped.passes import live_rows
from jax_kernels.reference.grouped_matmul import gathered
from jax_kernels.tracing.derivatives import in_both_modes

__all__ = ["can_skip", "copied_rows", "first_rows", "permuted_rows", "summed_rows", "token_rows"]


def _taken(_: None, x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    return gathered(x, index)


def _taken_forward(_: None, x: jax.Array, index: jax.Array, inverse: jax.Array) -> Any:
    return _taken(None, x, index, inverse), inverse


def _taken_backward(_: None, inverse: jax.Array, cotangent: jax.Array) -> Any:
    return _taken(None, cotangent, inverse, inverse), None, None  # a gather, where JAX would scatter


_permuted = in_both_modes(_taken, _taken_forward, _taken_backward)


def permuted_rows(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """x[index], with 0 for an index past x's end. inverse: the inverse permutation, or its beginning."""
    return _permuted(None, x, index, inverse)


@jax.custom_jvp
def copied_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] of x [N, D] and an index below N. Values of 16 bits are copied in pairs, in half as many loads."""
    if x.dtype.itemsize != 2 or x.shape[1] % 2:
        return x.at[index].get(mode="clip")
    words = lax.bitcast_convert_type(x.reshape(x.shape[0], x.shape[1] // 2, 2), jnp.uint32)
    copied = lax.bitcast_convert_type(words.at[index].get(mode="clip"), x.dtype)
    return copied.reshape(index.shape[0], x.shape[1])


@copied_rows.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, index), (dx, _) = primals, tangents
    return copied_rows(x, index), dx.at[index].get(mode="clip")  # words of bits have no derivative


def first_rows(x: jax.Array, index: jax.Array, count: jax.Array | None) -> jax.Array:
    """copied_rows(x, index). The rows from `count` on may have any values; None if all rows are wanted.

    count: int32 without axes.
    """
    if count is None or not can_skip(x, (index.shape[0], x.shape[1])):
        return copied_rows(x, index)
    return live_rows.copy_live_rows(x, index, count.reshape(1), interpret=dispatch.interpreting())


def can_skip(x: jax.Array, *shapes: tuple[int, int]) -> bool:
    """Whether passes over rows of x's dtype, and of these shapes, can end at the last row of a group.

    They are Triton's, on GPUs from Ampere on and in Pallas's interpreter, for values of 16 bits.
    """
    capability = dispatch.target_device(x).compute_capability
    has_device = dispatch.interpreting() if capability is None else capability >= (8, 0)
    return has_device and x.dtype.itemsize == 2 and x.size > 0 and live_rows.supports(x.shape, *shapes)


def _token_rows(each: int, x: jax.Array, order: jax.Array, inverse: jax.Array, count: jax.Array | None) -> jax.Array:
    return first_rows(x, order // each, count)


def _token_rows_forward(each: int, x: jax.Array, order: jax.Array, inverse: jax.Array, count: jax.Array | None) -> Any:
    return _token_rows(each, x, order, inverse, count), (order, inverse, count)


def _token_rows_backward(each: int, residuals: Any, cotangent: jax.Array) -> Any:
    order, inverse, count = residuals
    inverse = _of_first_rows(inverse, count, cotangent.shape[0])
    of_pairs = permuted_rows(cotangent.astype(jnp.float32), inverse, order)
    return of_pairs.reshape(-1, each, cotangent.shape[1]).sum(1).astype(cotangent.dtype), None, None, None


_token_rows_in_both_modes = in_both_modes(_token_rows, _token_rows_forward, _token_rows_backward)


def token_rows(
    x: jax.Array, each: int, order: jax.Array, inverse: jax.Array, count: jax.Array | None = None
) -> jax.Array:
    """The token of each row, [rows, D], from x [N, D]. The gradient of a token is summed in float32.

    each: the pairs of a token. order: from a row to its pair. inverse: from a pair to its row. count: as in first_rows;
    the cotangents of the rows from `count` on have no influence.
    """
    return _token_rows_in_both_modes(each, x, order, inverse, count)


def _of_first_rows(inverse: jax.Array, count: jax.Array | None, rows: int) -> jax.Array:
    """inverse, with the index `rows`, which is past the end, for pairs whose row is not among the first `count` rows.

    So no pair reads a row that has no effect. count: None for all rows.
    """
    return inverse if count is None else jnp.where(inverse < count, inverse, rows)


def summed_rows(
    rows: jax.Array, weights: jax.Array, order: jax.Array, inverse: jax.Array, count: jax.Array | None = None
) -> jax.Array:
    """The sum over each token's rows, times its weights [N, each]: float32 [N, D]. Pairs without a row add 0.

    order, inverse: as in token_rows. count: int32, the number of rows that count, whatever values the rows after them
    have; None for all.
    """
    inverse = _of_first_rows(inverse, count, rows.shape[0])
    of_pairs = permuted_rows(rows.astype(jnp.float32), inverse, order)
    return (weights[..., None] * of_pairs.reshape(*weights.shape, rows.shape[1])).sum(1)
