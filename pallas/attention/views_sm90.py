"""Calls that take some heads of their arrays, in the Hopper kernels.

An array [B, rows, rate * H, D] is [B, rows * rate, H, D] in other words: the tokens of one residue class modulo rate
are H of its heads. So a kernel that reads heads of its choice reads strided tokens, and nothing is copied.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_kernels.attention_inputs import AttentionOptions, HeadView


def head_counts(query: Any, key: Any, options: AttentionOptions) -> tuple[int, int]:
    """How many heads of query and of key a call has."""
    of_query, of_key = options.query_heads, options.kv_heads
    return of_query.count if of_query else query.shape[2], of_key.count if of_key else key.shape[2]


def head_maps(options: AttentionOptions) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """(query's, key's): from a head of the call, a traced scalar, to the head of the array."""
    return _head_map(options.query_heads), _head_map(options.kv_heads)


def dquery_head_map(query: Any, dquery: Any, options: AttentionOptions) -> Callable[[Any], Any]:
    """From a head of the call to that of dquery, which has query's heads, or the call's alone; it may be None."""
    is_whole = dquery is None or dquery.shape[2] == query.shape[2]
    return _head_map(options.query_heads if is_whole else None)


def _head_map(view: HeadView | None) -> Callable[[Any], Any]:
    if view is None:
        return lambda head: head
    quotient = lambda head, divisor: head if divisor == 1 else lax.div(head, jnp.int32(divisor))
    if view.run >= view.count:
        return lambda head: view.first + quotient(head, view.part)
    return lambda head: view.first + quotient(head, view.part) + quotient(head, view.run) * view.skip
