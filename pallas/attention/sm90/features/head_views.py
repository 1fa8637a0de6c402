"""Calls that take some heads of their arrays, and launches that serve several calls, in the Hopper kernels.

An array [B, rows, rate * H, D] is [B, rows * rate, H, D] in other words: the tokens of one residue class modulo rate
are H of its heads. So a kernel that reads heads of its choice reads strided tokens, and nothing is copied.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, HeadView


@dataclasses.dataclass(frozen=True)
class LaunchCall:
    """A call that a launch serves, as its kernel sees it when tracing. Lengths are those of its arrays, unpadded."""

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    query_heads: HeadView | None = None
    key_heads: HeadView | None = None

    @classmethod
    def of(cls, inputs: AttentionInputs, options: AttentionOptions) -> "LaunchCall":
        batch, q_length = inputs.query.shape[:2]
        heads, kv_heads = head_counts(inputs.query, inputs.key, options)
        return cls(batch, q_length, inputs.key.shape[1], heads, kv_heads, options.query_heads, options.kv_heads)

    def array_heads(self, head: Any) -> tuple[Any, Any]:
        """(query's, key's): a head of the call, a traced scalar, among those of the arrays."""
        group = self.heads // self.kv_heads
        kv_head = lax.div(head, jnp.int32(group)) if group > 1 else head
        return _head_map(self.query_heads)(head), _head_map(self.key_heads)(kv_head)


def of_call(number: Any, count: int, run: Callable[[int], Any]) -> Any:
    """run(i) for the call that a traced number names, of so many: each has arrays, and numbers, of its own."""
    return run(0) if count == 1 else lax.switch(number, [functools.partial(run, i) for i in range(count)])


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
