"""A step of the Hopper forward kernels, in 16 and in 8 bits: the matmuls of 64 queries with a block of keys.

A step issues S = Q K^T of one block of keys and O += P V of the previous block, and computes the softmax of S while the
second matmul runs.
"""

import abc
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.forward.loop import KvPipeline, PingPong, WorkTile
from jax_kernels.pallas.kernel_types import AccumulatorRef, Index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopState:
    """The state of the loop over keys: P of the last block, not yet multiplied by V, and the softmax so far.

    p: [64, block_kv], an operand of the matmul with V. row_max: float32 [64], the number that is subtracted from each
    row's scores, at or near their maximum so far; in base 2, or in natural units if Traits.natural. row_sum: float32
    [64, 8], partial sums of each row of P. slot: the pipeline's slot of the last block.
    """

    p: jax.Array
    row_max: jax.Array
    row_sum: jax.Array
    slot: Index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSums:
    """The results of a loop over keys for 64 queries, from which out and lse are computed.

    acc: O before its division by the sums, float32 [64, v_head_dim]. row_max: [64], the number that was subtracted
    from each row's scores, at or near their maximum; in base 2, or in natural units if Traits.natural. row_sum: [64,
    8], partial sums of each row of P. slot: the pipeline's slot of the last block.
    """

    acc: jax.Array
    row_max: jax.Array
    row_sum: jax.Array
    slot: Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulators:
    """The registers that wgmma adds to, float32. acc_ref: O, [64, v_head_dim]. s_ref: S, [64, block_kv]."""

    acc_ref: AccumulatorRef
    s_ref: AccumulatorRef


def with_accumulators[Result](run: Callable[[Accumulators], Result], *, v_head_dim: int, block_kv: int) -> Result:
    """The result of run(accumulators), with accumulators for 64 queries. acc_ref starts from zeros."""
    return pl.run_scoped(
        lambda acc_ref, s_ref: run(Accumulators(acc_ref=acc_ref, s_ref=s_ref)),
        plgpu.ACC((64, v_head_dim), jnp.float32),
        plgpu.ACC((64, block_kv), jnp.float32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax:
    """The results of a step's softmax.

    p: P, the exponentials of the scores minus row_max, float32 [64, block_kv]. row_max: [64], the new maximum. row_sum:
    [64, 8], the new partial sums of each row of P. alpha: [64], the factor that takes the O so far from the old to the
    new maximum; it has no meaning in a step that keeps the maximum on purpose. rescaled(acc, alpha): O under the new
    maximum, from acc, the O so far; in such a step, acc itself.
    """

    p: jax.Array
    row_max: jax.Array
    row_sum: jax.Array
    alpha: jax.Array
    rescaled: Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTile(abc.ABC):
    """A compute warpgroup's 64 queries of work tile `index` of the launch: the state of its steps.

    pipeline, pingpong: of the CTA. w: index of the warpgroup. own: the warpgroup's part of the work tile. A subclass
    issues the matmuls, and computes P from S.
    """

    pipeline: KvPipeline
    pingpong: PingPong
    w: int
    index: Index
    own: WorkTile

    @abc.abstractmethod
    def issue_scores(self, accs: Accumulators, slot: Index) -> None:
        """Starts the matmul S = Q K^T with the keys in `slot`."""

    @abc.abstractmethod
    def issue_values(self, accs: Accumulators, p: jax.Array, slot: Index) -> None:
        """Starts the matmul O += P V with the values in `slot`."""

    @abc.abstractmethod
    def scores(self, accs: Accumulators, step: Index, slot: Index, *, is_first: bool) -> jax.Array:
        """The scores of a step as the softmax takes them, [64, block_kv], after S has arrived. Frees the keys in
        `slot`.

        is_first: no matmul O += P V runs meanwhile. In other steps this matmul goes on.
        """

    @abc.abstractmethod
    def softmax_step(self, s: jax.Array, step: Index, state: LoopState) -> Softmax:
        """P, the new row_max and row_sum, and the factor for O, after a block that is not the first. s: its scores."""

    @abc.abstractmethod
    def rescaled_and_rounded(
        self, acc: jax.Array, p: jax.Array, rescaled: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """(O under the new maximum, P as an operand of O += P V). rescaled: maps O to O under the new maximum."""


def first_scores(tile: QueryTile, accs: Accumulators, slot: Index) -> jax.Array:
    """The masked scores of the work tile's first block, in `slot`; no other matmul of the warpgroup runs meanwhile."""
    plgpu.barrier_wait(tile.pipeline.k_ready.at[slot])
    tile.pingpong.wait(tile.w)
    # S = Q K^T
    tile.issue_scores(accs, slot)
    tile.pingpong.pass_on(tile.w)
    return tile.scores(accs, 0, slot, is_first=True)


def mma_step(tile: QueryTile, accs: Accumulators, step: Index, state: LoopState) -> LoopState:
    """Runs one step, which is not the first: adds P V of the previous block to O, and computes P of this block.

    state: after the previous step. Returns the next state. In the equations m and l are row_max and row_sum.
    """
    pipeline, last_slot, slot = tile.pipeline, state.slot, tile.pipeline.following(state.slot)
    plgpu.barrier_wait(pipeline.k_ready.at[slot])
    tile.pingpong.wait(tile.w)
    # S = Q K^T
    tile.issue_scores(accs, slot)
    # O += P V, of the previous block
    tile.issue_values(accs, state.p, last_slot)
    tile.pingpong.pass_on(tile.w)
    # S = mask(score_mod(softcap(S) + bias))
    s = tile.scores(accs, step, slot, is_first=False)
    # m_new = max(m, max S), alpha = exp(m - m_new), P = exp(S - m_new), l_new = alpha l + sum P
    new = tile.softmax_step(s, step, state)
    p, row_max, row_sum, alpha = lax.optimization_barrier((new.p, new.row_max, new.row_sum, new.alpha))
    # This wait is a branch: it keeps ptxas from hoisting the next wait above the softmax.
    plgpu.barrier_wait(pipeline.v_ready.at[slot])
    acc = plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
    plgpu.barrier_arrive(pipeline.v_free.at[last_slot])
    # P stays float32 until the matmul that reads the last P has ended (ptxas C7513).
    acc, p = lax.optimization_barrier((acc, p))
    # O = alpha O
    acc, p = tile.rescaled_and_rounded(acc, p, lambda acc: new.rescaled(acc, alpha))
    accs.acc_ref[...] = acc
    return LoopState(p=p, row_max=row_max, row_sum=row_sum, slot=slot)
