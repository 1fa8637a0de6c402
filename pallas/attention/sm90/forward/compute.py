"""The compute warpgroups of the Hopper forward kernels: the common part of the 16-bit and the 8-bit forward.

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

from jax_kernels.pallas.attention.sm90.features.bias import Stage
from jax_kernels.pallas.attention.sm90.forward.loop import KvLoop, KvPipeline, PingPong, WorkTile
from jax_kernels.pallas.kernel_types import AccumulatorRef, Index
from jax_kernels.pallas.mosaic.tile_scheduler import Fetched


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
class Exponentials:
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
class ComputeWarpgroup[Tile](abc.ABC):
    """Compute warpgroup w of a forward kernel, which owns 64 queries of every work tile.

    A subclass issues the matmuls and computes P. Its type parameter `Tile` is its state of a work tile. bias: the
    shared memory for a step's bias, None without a bias.
    """

    kv_loop: KvLoop
    pingpong: PingPong
    pipeline: KvPipeline
    fetched: Fetched
    w: int
    bias: Stage | None = None

    def run(self) -> None:
        """Computes and stores the warpgroup's queries of all work tiles of the CTA."""
        self.pipeline.free()
        if self.bias is not None:
            plgpu.barrier_arrive(self.bias.free)
        self.pingpong.start(self.w)
        self.load_q(self.kv_loop.first_tile(), 0)
        self.kv_loop.for_each_tile(self.run_tile)
        self.pingpong.end(self.w)
        plgpu.wait_smem_to_gmem(0)

    def own_tile(self, index: Index, slot: Index) -> tuple[WorkTile, Index]:
        """(the warpgroup's part of work tile `index`, the slot of the first block that its queries visit).

        slot: of the first block that any warpgroup visits. Blocks before the warpgroup's own first block are released,
        and the warpgroup passes on its turns for them.
        """
        whole = self.kv_loop.work_tile(index)
        own = self.kv_loop.own(whole, self.w)

        def skip(_, slot):
            self.pingpong.wait(self.w)
            self.pingpong.pass_on(self.w)
            self.pipeline.skip(slot)
            if self.bias is not None:
                plgpu.barrier_wait(self.bias.ready)
                plgpu.barrier_arrive(self.bias.free)
            return self.pipeline.following(slot)

        if self.kv_loop.same_blocks:
            return own, slot
        return own, lax.fori_loop(0, whole.blocks.count - own.blocks.count, skip, slot)

    def first_scores(self, tile: Tile, slot: Index, accs: Accumulators) -> jax.Array:
        """The masked scores of the work tile's first block, in `slot`; no other matmul of the warpgroup runs
        meanwhile.
        """
        plgpu.barrier_wait(self.pipeline.k_ready.at[slot])
        self.pingpong.wait(self.w)
        self.issue_scores(tile, slot, accs)  # S = Q K^T
        self.pingpong.pass_on(self.w)
        return self.scores(tile, 0, slot, accs, is_first=True)

    def mma_step(self, tile: Tile, accs: Accumulators, step: Index, state: LoopState) -> LoopState:
        """Runs one step: S = Q K^T of this step's block, O += P V of the previous block, and P of this block.

        state: after the previous step. Returns the next state.
        """
        last_slot, slot = state.slot, self.pipeline.following(state.slot)
        plgpu.barrier_wait(self.pipeline.k_ready.at[slot])
        self.pingpong.wait(self.w)
        self.issue_scores(tile, slot, accs)  # S = Q K^T
        self.issue_values(state.p, last_slot, accs)  # O += P V
        self.pingpong.pass_on(self.w)
        s = self.scores(tile, step, slot, accs, is_first=False)
        new = self.softmax_step(tile, s, step, state)
        p, row_max, row_sum, alpha = lax.optimization_barrier((new.p, new.row_max, new.row_sum, new.alpha))
        # This wait is a branch: it keeps ptxas from hoisting the next wait above the softmax.
        plgpu.barrier_wait(self.pipeline.v_ready.at[slot])
        acc = plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
        plgpu.barrier_arrive(self.pipeline.v_free.at[last_slot])
        # P stays float32 until the matmul that reads the last P has ended (ptxas C7513).
        acc, p = lax.optimization_barrier((acc, p))
        acc, p = self.rescaled_and_rounded(acc, p, lambda acc: new.rescaled(acc, alpha))
        accs.acc_ref[...] = acc
        return LoopState(p=p, row_max=row_max, row_sum=row_sum, slot=slot)

    @abc.abstractmethod
    def load_q(self, index: Index, turn: Index) -> None:
        """Starts the copy of the warpgroup's queries of work tile `index`, the `turn`-th of the CTA."""

    @abc.abstractmethod
    def run_tile(self, index: Index, turn: Index, slot: Index) -> tuple[Index, Index]:
        """Computes and stores work tile `index`, the `turn`-th of the CTA, whose first block is in `slot`.

        Returns (the following work tile, the next slot).
        """

    @abc.abstractmethod
    def issue_scores(self, tile: Tile, slot: Index, accs: Accumulators) -> None:
        """Starts the matmul S = Q K^T with the keys in `slot`."""

    @abc.abstractmethod
    def issue_values(self, p: jax.Array, slot: Index, accs: Accumulators) -> None:
        """Starts the matmul O += P V with the values in `slot`."""

    @abc.abstractmethod
    def scores(self, tile: Tile, step: Index, slot: Index, accs: Accumulators, *, is_first: bool) -> jax.Array:
        """The scores of a step as the softmax takes them, [64, block_kv], after S has arrived. Frees the keys in
        `slot`.

        is_first: no matmul O += P V runs meanwhile. In other steps this matmul goes on.
        """

    @abc.abstractmethod
    def softmax_step(self, tile: Tile, s: jax.Array, step: Index, state: LoopState) -> Exponentials:
        """P, the new row_max and row_sum, and the factor for O, after a block that is not the first. s: its scores."""

    @abc.abstractmethod
    def rescaled_and_rounded(
        self, acc: jax.Array, p: jax.Array, rescaled: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """(O under the new maximum, P as an operand of O += P V). rescaled: maps O to O under the new maximum."""
