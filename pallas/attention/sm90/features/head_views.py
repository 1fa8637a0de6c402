"""Calls that use some heads of their arrays, and launches that serve several calls, in the Hopper kernels.

An array [B, rows, rate * H, D] is also an array [B, rows * rate, H, D]: H of its heads hold the tokens of one residue
class modulo rate. A kernel that reads chosen heads therefore reads strided tokens, without a copy.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions, HeadView
from jax_kernels.pallas.kernel_types import Index, Ref


@dataclasses.dataclass(frozen=True)
class LaunchCall:
    """One of the calls that a launch serves: its static facts when the kernel is traced.

    The lengths are the unpadded lengths of its arrays. heads, kv_heads: the heads of the call. query_heads, key_heads:
    the map to heads of the arrays, None if the call uses all heads.
    """

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    query_heads: HeadView | None = None
    key_heads: HeadView | None = None

    @classmethod
    def of(cls, inputs: AttentionInputs, options: AttentionOptions) -> "LaunchCall":
        """The static facts of a call with these inputs."""
        batch, q_length = inputs.query.shape[:2]
        heads, kv_heads = head_counts(inputs.query, inputs.key, options)
        return cls(batch, q_length, inputs.key.shape[1], heads, kv_heads, options.query_heads, options.kv_heads)

    def array_heads(self, head: Index) -> tuple[Index, Index]:
        """(query head, key head) in the arrays, for a head of the call, a traced scalar."""
        group = self.heads // self.kv_heads
        kv_head = lax.div(head, jnp.int32(group)) if group > 1 else head
        return _head_map(self.query_heads)(head), _head_map(self.key_heads)(kv_head)


def of_call[R](number: Index, count: int, run: Callable[[int], R]) -> R:
    """run(i), where i is the Python int equal to `number`, a traced index of one of `count` calls.

    Each call has its own arrays and static values, so that the kernel has a branch per call.
    """
    return run(0) if count == 1 else lax.switch(number, [functools.partial(run, i) for i in range(count)])


def head_counts(query: jax.Array, key: jax.Array, options: AttentionOptions) -> tuple[int, int]:
    """(query heads, key heads) that a call uses; its arrays may have more."""
    of_query, of_key = options.query_heads, options.kv_heads
    return of_query.count if of_query else query.shape[2], of_key.count if of_key else key.shape[2]


def head_maps(options: AttentionOptions) -> tuple[Callable[[Index], Index], Callable[[Index], Index]]:
    """(map for query, map for key): functions from a head of the call, a traced scalar, to a head of the array."""
    return _head_map(options.query_heads), _head_map(options.kv_heads)


def dquery_head_map(query: jax.Array, dquery: Ref | None, options: AttentionOptions) -> Callable[[Index], Index]:
    """The function from a head of the call to a head of dquery, an array with all heads of query, or only the call's
    heads.

    If dquery is None, the function is the map for query's heads.
    """
    is_whole = dquery is None or dquery.shape[2] == query.shape[2]
    return _head_map(options.query_heads if is_whole else None)


def _head_map(view: HeadView | None) -> Callable[[Index], Index]:
    """The function from a head of the call to a head of the array; the identity if view is None."""
    if view is None:
        return lambda head: head
    quotient = lambda head, divisor: head if divisor == 1 else lax.div(head, jnp.int32(divisor))
    if view.run >= view.count:
        return lambda head: view.first + quotient(head, view.part)
    return lambda head: view.first + quotient(head, view.part) + quotient(head, view.run) * view.skip
