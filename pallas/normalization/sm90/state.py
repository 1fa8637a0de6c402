"""State of a Hopper norm's kernel: shared memory, the warpgroups with their blocks, and sums over a row."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, Slice, needed
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.barriers import cluster_barrier, count_up, group_barrier
from jax_kernels.pallas.mosaic.launch import CLUSTER
from jax_kernels.pallas.mosaic.layouts import RegisterLayout
from jax_kernels.pallas.mosaic.registers import as_float32, kept, store_narrow
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref
from jax_kernels.pallas.normalization.sm90 import cluster
from jax_kernels.pallas.normalization.sm90.traits import BLOCK, LINE, LINES, PARTS, WARPS, Traits

FIRST_BARRIER = 8  # the first hardware barrier that Mosaic does not use


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Smem:
    """A CTA's shared memory. A field is None if the launch does not need it.

    A group is the warpgroups that work on one block at a time. A turn is the time in which a group works on one block.
    A part is the columns of a row that one warp has, as lines of 128 columns.

    memory: the pipelines, one for each loaded array, each [warpgroups, stages, 4 parts, lines, 128]. At the end of a
      backward the same memory holds float32 sums of the weights' gradients, [weights, groups, parts, lines, 128].
    ready: [warpgroups * stages], barriers: a warpgroup's loads into a stage have arrived.
    sums: [groups, 2, 2, parts of a row], float32: for even and odd turns, up to two values of each part, which the
      warpgroups that work on a row exchange. None if one warp has a whole row.
    scale: [parts, lines, 128], the CTA's copy of the scale.
    claimed: [groups, 2], int32: for even and odd turns, the value of the launch's counter that the group fetched. It
      gives the block that the group loads next.
    row_ready: [groups], barriers of the warpgroups of a group, for the interpreter only.
    all_ready: [1], a barrier of all warpgroups of a backward that adds up weights' gradients or keeps the scale.
    cluster_ready: [1], a barrier of all CTAs of a cluster, for the interpreter only.
    """

    memory: Any
    ready: Barrier
    sums: Ref | None
    scale: Ref | None
    claimed: Ref | None
    row_ready: Barrier | None
    all_ready: Barrier | None
    cluster_ready: Barrier | None

    @classmethod
    def scratch(
        cls, traits: Traits, dtype: jnp.dtype, weights: int = 0, scale_dtype: jnp.dtype | None = None
    ) -> "Smem":
        """The scratch shapes for pl.run_scoped.

        dtype: of x. weights: the number of weights whose gradients are summed over the rows: 0 to 2, and 0 in a
        forward. scale_dtype: of the scale; only needed if traits.keeps_scale.
        """
        shape = (traits.warpgroups, traits.stages, WARPS, traits.lines, LINE)
        pipelines = tuple(smem_ref(shape, dtype) for _ in range(traits.copies))
        totals = smem_ref((max(1, weights), traits.groups, traits.block_parts, traits.lines, LINE), jnp.float32)
        interpreted = interpreter.INTERPRETED
        of_cluster = cast(Barrier, plgpu.ClusterBarrier(collective_axes=(CLUSTER,), num_arrivals=traits.members))
        return cls(
            memory=plgpu.RefUnion(pipelines, totals) if weights else pipelines,
            ready=barrier_ref(num_arrivals=traits.copies, num_barriers=traits.warpgroups * traits.stages),
            sums=smem_ref((traits.groups, 2, 2, traits.row_parts), jnp.float32) if traits.is_split else None,
            scale=smem_ref((traits.row_warps, traits.lines, LINE), needed(scale_dtype)) if traits.keeps_scale else None,
            claimed=smem_ref((traits.groups, 2), jnp.int32) if traits.claims else None,
            row_ready=barrier_ref(num_arrivals=traits.members, num_barriers=traits.groups) if interpreted else None,
            all_ready=barrier_ref(num_arrivals=traits.warpgroups) if weights or traits.keeps_scale else None,
            cluster_ready=of_cluster if interpreted and traits.cluster > 1 else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowBlock:
    """The block of rows that a warpgroup works on, as traced integers.

    index: of the block. following: the index of the group's next block; it is past the last block if none is left.
    turn: the number of blocks that the group has finished. slot: the slot that holds the block, in all pipelines.
    """

    index: Index
    following: Index
    turn: Index
    slot: Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warpgroup:
    """A warpgroup of a CTA, with its loads, stores and exchanges.

    A group is the warpgroups that work on one block of rows at a time. A part is the columns of a row that one warp
    has, as lines of 128 columns.

    pipelines: refs in shared memory, one for each array, each [warpgroups, stages, 4 parts, lines, 128]. arrays: refs
    in device memory, [parts, lines, 128], from which the pipelines are loaded. wg: the warpgroup's index in the CTA.
    counter: int32 [1] in device memory, the number of claimed blocks, or None. exchanged: [blocks, values, parts of a
    row] in device memory, for the interpreter only: the values that the CTAs of a cluster otherwise store in each
    other's shared memory.
    """

    traits: Traits
    smem: Smem
    pipelines: tuple[Ref, ...]
    arrays: tuple[Ref, ...]
    wg: Index
    counter: Ref | None = None
    exchanged: Ref | None = None

    @property
    def group(self) -> Index:
        """The index, in the CTA, of this warpgroup's group: the warpgroups that work on one block at a time."""
        return lax.div(self.wg, jnp.int32(self.traits.members))

    @property
    def member(self) -> Index:
        """The index of this warpgroup among the warpgroups that work on the same block."""
        return lax.rem(self.wg, jnp.int32(self.traits.members))

    @property
    def first(self) -> Index:
        """The index of the first block of this warpgroup's group."""
        return lax.axis_index("cta") * self.traits.groups * max(1, self.traits.turns) + self.group

    def parts(self, block: Index) -> Slice:
        """The slice, along the parts of an array [parts, lines, 128], of this warpgroup's 4 parts of a block.

        A part is the columns of a row that one warp has. block: the block's index.
        """
        if self.traits.cluster == 1:
            return pl.ds(block * self.traits.block_parts + self.member * WARPS, WARPS)
        return pl.ds(block * self.traits.row_parts + self._first_part, WARPS)

    @property
    def _first_part(self) -> Index:
        """The index, in a row that a cluster works on, of the part that this warpgroup's first warp has."""
        return cluster.rank() * self.traits.row_warps + self.member * WARPS

    @property
    def count(self) -> Index:
        """The number of blocks of this warpgroup's group, if blocks are not claimed from a counter."""
        stride, turns = self.traits.stride, self.traits.turns
        count = lax.div(self.traits.blocks - self.first + (stride - 1), jnp.int32(stride))
        return jnp.minimum(count, turns) if turns else count

    def load_first(self) -> None:
        """Starts to load this warpgroup's parts of the group's first blocks, into all slots of its pipelines but the
        last.

        If the group has fewer blocks, the other slots stay empty.
        """
        for turn in range(self.traits.stages - 1):
            pl.when(turn < self.count)(functools.partial(self._load, self.first + turn * self.traits.stride, turn))

    def for_each_block[State](self, step: Callable[[RowBlock, State], State], state: State, stores: int) -> State:
        """Calls `step(row_block, state) -> state` for each of the group's blocks, and returns the last state.

        load_first must have been called. Each block is loaded stages - 1 turns ahead, when the stores from its slot
        have read the slot. stores: the number of copies from shared to device memory that a call of `step` starts.
        """
        if self.traits.claims:
            return self._for_each_claimed_block(step, state, stores)
        first, count, stride = self.first, self.count, self.traits.stride
        ahead = self.traits.stages - 1

        def body(turn, carry):
            slot, state = carry
            block = first + turn * stride
            state = self._turn(step, RowBlock(index=block, following=block + stride, turn=turn, slot=slot), state)
            self._load_ahead(first + (turn + ahead) * stride, turn + ahead < count, slot, stores)
            return self._next(slot), state

        _, state = lax.fori_loop(0, count, body, (jnp.int32(0), state))
        plgpu.wait_smem_to_gmem(0)
        return state

    def _for_each_claimed_block[State](
        self, step: Callable[[RowBlock, State], State], state: State, stores: int
    ) -> State:
        """Calls `step` for each of the group's blocks and returns the last state, where groups claim their blocks.

        The first stages - 1 blocks of a group are fixed. From then on, the first group that is ready to load takes the
        next block of the launch. stores: the number of copies to device memory that a call of `step` starts.
        """
        traits, ahead = self.traits, self.traits.stages - 1
        claimed_before = ahead * traits.stride  # the first blocks of all groups
        self._claim(jnp.int32(0))

        def body(carry):
            turn, slot, blocks, state = carry
            row_block = RowBlock(index=blocks[0], following=blocks[1], turn=turn, slot=slot)
            state = self._turn(step, row_block, state)  # the step has a barrier, after which the claim is visible
            new = claimed_before + needed(self.smem.claimed)[self.group, lax.rem(turn, jnp.int32(2))]
            self._load_ahead(new, new < traits.blocks, slot, stores)
            self._claim(turn + 1)
            return turn + 1, self._next(slot), (*blocks[1:], new), state

        blocks = tuple(self.first + i * traits.stride for i in range(ahead))
        start = jnp.int32(0), jnp.int32(0), blocks, state
        state = lax.while_loop(lambda carry: carry[2][0] < traits.blocks, body, start)[3]
        plgpu.wait_smem_to_gmem(0)
        return state

    def _claim(self, turn: Index) -> None:
        """Claims the launch's next block for the group, and writes the claim's number to shared memory.

        The number of a claim counts the earlier claims of all groups. The claimed block's index is this number plus the
        number of blocks that all groups of the launch have without a claim, stages - 1 each. turn: the group's turn,
        whose parity selects one of its two entries of smem.claimed. Only the group's first warpgroup claims.
        """
        entry = needed(self.smem.claimed).at[self.group, pl.ds(lax.rem(turn, jnp.int32(2)), 1)]

        @pl.when(self.member == 0)
        def _():
            if interpreter.INTERPRETED:  # without atomic additions: each group claims an equal share
                entry[0] = self.first + turn * self.traits.stride
            else:
                count_up(self.counter, entry)

    def _turn[State](self, step: Callable[[RowBlock, State], State], row_block: RowBlock, state: State) -> State:
        """Waits for the loads of a block, and returns the result of `step` for it."""
        plgpu.barrier_wait(self.smem.ready.at[self.wg * self.traits.stages + row_block.slot])
        return step(row_block, state)

    def _next(self, slot: Index) -> jax.Array:
        """The slot after `slot` in the pipeline."""
        return jnp.where(slot == self.traits.stages - 1, 0, slot + 1)

    def _load_ahead(self, block: Index, exists: jax.Array, slot: Index, stores: int) -> None:
        """Starts to load a block into the slot before `slot`, when the stores from that earlier slot have read it.

        block: the index of the block to load. exists: a traced bool; nothing is loaded if it is False. stores: the
        number of copies to device memory of the current turn, which need not have ended.
        """

        @pl.when(exists)
        def _load():
            plgpu.wait_smem_to_gmem(stores, wait_read_only=True)
            self._load(block, jnp.where(slot == 0, self.traits.stages - 1, slot - 1))

    def _load(self, block: Index, slot: Index) -> None:
        """Starts the copies of this warpgroup's parts of block `block` into a slot of its pipelines."""
        for gmem, pipeline in zip(self.arrays, self.pipelines, strict=True):
            ready = self.smem.ready.at[self.wg * self.traits.stages + slot]
            plgpu.copy_gmem_to_smem(gmem.at[self.parts(block)], pipeline.at[self.wg, slot], ready)

    def slot(self, array: int, row_block: RowBlock) -> Ref:
        """The ref, [4, lines, 128] in shared memory, that holds this warpgroup's 4 parts of a block.

        A part is the columns of a row that one warp has, as lines of 128 columns. array: the index of the array in
        `arrays`.
        """
        return self.pipelines[array].at[self.wg, row_block.slot]

    def weights_at(self, ref: Ref, line: int | None = None) -> Ref:
        """The ref of a weight's values for this warpgroup's columns.

        The result is [4 parts, lines, 128], or [lines, 128] if a row is one part. ref: the weights of a row, [parts of
        a row, lines, 128], in device or shared memory. line: the only line to take, so that the result has 1 line; None
        for all lines.
        """
        lines = pl.ds(0, self.traits.lines) if line is None else pl.ds(line, 1)
        if self.traits.cluster > 1:
            return ref.at[pl.ds(self._first_part, WARPS), lines]
        return ref.at[pl.ds(self.member * WARPS, WARPS) if self.traits.is_split else 0, lines]

    def load_weights(self, ref: Ref, line: int | None = None) -> jax.Array:
        """Loads the weights for this warpgroup's columns to registers, in their dtype.

        The result is [4 parts, lines, 128], or [lines, 128] if a row is one part. ref: [parts of a row, lines, 128].
        line: the only line to load; None for all lines.
        """
        return plgpu.load(self.weights_at(ref, line), layout=self._weights_layout, optimized=False)

    @property
    def _weights_layout(self) -> RegisterLayout:
        """The register layout of loaded weights."""
        return BLOCK if self.traits.is_split else LINES

    def kept(self, weights: jax.Array) -> jax.Array:
        """Returns the loaded weights, such that LLVM keeps them in their 16-bit dtype between blocks.

        LLVM would otherwise hoist their conversion to float32, which takes twice the registers.
        """
        return kept(weights, self._weights_layout)

    def wide_weights(self, weights: jax.Array, offset: float = 0.0) -> jax.Array:
        """Returns loaded weights plus `offset`, as float32 [4 warps, lines, 128]: the columns of each warp."""
        weights = as_float32(weights, self._weights_layout)
        weights = weights + offset if offset else weights
        if self.traits.is_split:
            return weights
        return plgpu.layout_cast(lax.broadcast_in_dim(weights, (WARPS, *weights.shape), [1, 2]), BLOCK)

    def load_numbers(self, block: Index, gmem: Ref) -> jax.Array:
        """Loads one float32 value per row of a block: a scalar for a block of one row, otherwise [4].

        block: the block's index. gmem: a ref in device memory with one value per row.
        """
        if self.traits.is_split:
            return gmem[block]
        return plgpu.load(gmem.at[self.parts(block)], layout=PARTS, optimized=False)

    def store_numbers(self, row_block: RowBlock, gmem: Ref, numbers: jax.Array) -> None:
        """Stores one float32 value per row of a block. If several warpgroups have the row, one of them stores it.

        gmem: a ref in device memory with one value per row. numbers: a scalar for a block of one row, otherwise [4].
        """
        if not self.traits.is_split:
            store_narrow(gmem, self.parts(row_block.index), numbers)
            return

        @pl.when(self.member == 0 if self.traits.cluster == 1 else self._first_part == 0)
        def _store():
            gmem[row_block.index] = numbers

    def exchange(self, row_block: RowBlock, *values: jax.Array) -> list[list[jax.Array]]:
        """Exchanges values between the warps that work on a row.

        All warpgroups that work on the row call this, at most once per turn; each waits for the others. values: one or
        two arrays [4] with a float32 value for each of this warpgroup's parts. Returns, for each array, the list of the
        scalars of all parts of the row, in the order of the parts.
        """
        traits, sums = self.traits, needed(self.smem.sums).at[self.group, lax.rem(row_block.turn, jnp.int32(2))]
        if traits.cluster > 1:
            return self._exchange_in_cluster(row_block, sums, values)
        for i, value in enumerate(values):
            sums[i, pl.ds(self.member * WARPS, WARPS)] = value
        self._wait_for_group()
        return [[sums[i, part] for part in range(traits.row_warps)] for i in range(len(values))]

    def _exchange_in_cluster(
        self, row_block: RowBlock, sums: Ref, values: tuple[jax.Array, ...]
    ) -> list[list[jax.Array]]:
        """Exchanges values between the warps of all CTAs of a cluster that work on a row.

        All warpgroups of the cluster call this, at most once per turn; each waits for the others. values: one or two
        arrays [4] with a float32 value for each of this warpgroup's parts. Returns, for each array, the list of the
        scalars of all parts of the row. sums: a ref [values, parts of a row] in shared memory, which the turn after the
        next uses again.
        """
        mine = pl.ds(self._first_part, WARPS)
        if interpreter.INTERPRETED:  # without stores to another CTA's memory
            sums = needed(self.exchanged).at[row_block.index]
            for i, value in enumerate(values):
                sums[i, mine] = value
            plgpu.barrier_arrive(needed(self.smem.cluster_ready))
            plgpu.barrier_wait(needed(self.smem.cluster_ready))
        else:
            for i, value in enumerate(values):
                cluster.send(value, sums.at[i, mine], self.traits.cluster, PARTS)
            cluster_barrier()
        return [[sums[i, part] for part in range(self.traits.row_parts)] for i in range(len(values))]

    def _wait_for_group(self) -> None:
        """Waits for all warpgroups that work on the same block as this one."""
        if not interpreter.INTERPRETED:
            group_barrier(self.traits.members, FIRST_BARRIER)
        else:
            plgpu.barrier_arrive(needed(self.smem.row_ready).at[self.group])
            plgpu.barrier_wait(needed(self.smem.row_ready).at[self.group])

    def wait_for_all(self) -> None:
        """Waits for all warpgroups of the CTA, with an mbarrier.

        racecheck does not see that a hardware barrier orders the stores of a warpgroup before the loads of a warpgroup
        without a block.
        """
        plgpu.barrier_arrive(needed(self.smem.all_ready))
        plgpu.barrier_wait(needed(self.smem.all_ready))


def sum_of_parts(x: jax.Array) -> jax.Array:
    """The sum of the values of each warp, [4], of x, [4 warps, lines, 128]."""
    return x.sum(axis=1).sum(axis=1)


def wide(x: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcasts one value per warp, [4], to the shape [4 warps, lines, 128] of `like`. Returns a scalar unchanged."""
    if x.ndim == 0:
        return x
    return plgpu.layout_cast(lax.broadcast_in_dim(x, like.shape, [0]), BLOCK)
