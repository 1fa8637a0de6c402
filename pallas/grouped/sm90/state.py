"""State of the Hopper grouped matmul: sizes, the schedule of row tiles, and shared memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.group_tiles import FoundTiles, tile_count
from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions
from jax_kernels.pallas.block_specs.matmul_specs import GroupedSm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref
from jax_kernels.pallas.mosaic.launch import run_warpgroup
from jax_kernels.pallas.mosaic.layouts import SWIZZLED, SWIZZLED_8BIT
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref
from jax_kernels.pallas.mosaic.smem_tiles import SmemTiles

ROWS = 64  # rows of a warpgroup's wgmma
COMPUTE_WGS = 2
BLOCK_M = ROWS * COMPUTE_WGS
DEPTH_BYTES = 128  # bytes of the inner dimension in a step: 64 values of 16 bits
PROMOTED = 128  # columns of 8-bit accumulators that are promoted to float32 sums at a time
PROMOTED_STEPS = 2  # steps between promotions: the error is then 2**-12 of the sums' magnitude
COLUMNS = 64  # of an output buffer
BUFFERS = 2  # output buffers of a warpgroup, used in turn
REGISTERS = 240, 24  # of a thread of a compute warpgroup, and of the memory warpgroup
SHARED_MEMORY = 225 << 10  # bytes of a CTA's shared memory, without its barriers


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rank", "number"], meta_fields=["ctas", "snake"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a CTA: in each turn, each of the `ctas` CTAs takes one work tile.

    rank: of the CTA in the order of this turn. number: of the turn. snake: whether every other turn has the opposite
    order of CTAs, so that a CTA that gets one of a turn's longest tiles gets one of the shortest next.
    """

    rank: Index
    number: Index
    ctas: int
    snake: bool

    @classmethod
    def first(cls, ctas: int, snake: bool) -> "Turn":
        return cls(rank=lax.axis_index("cta"), number=jnp.int32(0), ctas=ctas, snake=snake)

    @classmethod
    def at(cls, number: Index, ctas: int, snake: bool) -> "Turn":
        """The turn of this number."""
        rank = lax.axis_index("cta")
        if snake:
            rank = jnp.where(jnp.bitwise_and(number, 1) == 1, ctas - 1 - rank, rank)
        return cls(rank=rank, number=number, ctas=ctas, snake=snake)

    @property
    def index(self) -> Index:
        """The index of the CTA's work tile. If it is past the last tile, the CTA has no more tiles."""
        return self.number * self.ctas + self.rank

    def following(self) -> "Turn":
        rank = self.ctas - 1 - self.rank if self.snake else self.rank
        return dataclasses.replace(self, rank=rank, number=self.number + 1)


class WorkTile(NamedTuple):
    """The rows of a row tile, and the first of its block_n columns.

    group: of the rows; G for rows past the last group. rows, counts: for each compute warpgroup, the first of its 64
    rows, and the number of these rows that belong to the group. A count is 64, or 0 for a warpgroup without rows, or
    all rows of a group with fewer than 64. In a larger group, the last 64 rows end with the group, and may overlap rows
    that other warpgroups compute too, with the same result.
    """

    group: Index
    rows: tuple[Index, Index]
    counts: tuple[Index, Index]
    column: Index

    @classmethod
    def of(cls, *, group: Index, first: Index, end: Index, start: Index, column: Index) -> "WorkTile":
        """first, end: the tile's rows, first <= row < end. start: the first row of the group."""
        is_short = end - first < ROWS  # all rows of a small group, or the last rows of a group
        row0 = jnp.where(is_short, jnp.maximum(end - ROWS, start), first)
        has_second = end - first > ROWS
        row1 = jnp.where(has_second, jnp.minimum(first + ROWS, end - ROWS), row0)
        counts = jnp.minimum(end - row0, ROWS), jnp.where(has_second, ROWS, 0)
        return cls(group=group, rows=(row0, row1), counts=counts, column=column)


class InputRefs(Protocol):
    """The arrays of GroupedInputs in device memory, as refs; arrays that the call lacks are None."""

    x: Ref
    w: Ref
    bias: Ref | None
    w_up: Ref | None
    x_up: Ref | None
    x_scale: Ref | None
    w_scale: Ref | None
    w_up_scale: Ref | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch. dtype, w_dtype: of x and w. adds_products: whether the call has an x_up."""

    options: GroupedOptions
    config: GroupedSm90
    groups: int
    m: int
    n: int
    k: int
    dtype: jnp.dtype
    w_dtype: jnp.dtype
    is_gated: bool
    adds_products: bool

    @classmethod
    def of(cls, inputs: GroupedInputs, options: GroupedOptions, config: GroupedSm90) -> "Traits":
        groups, m, n, k = options.sizes(inputs)
        return cls(
            options=options,
            config=config,
            groups=groups,
            m=m,
            n=n,
            k=k,
            dtype=inputs.x.dtype,
            w_dtype=inputs.w.dtype,
            is_gated=inputs.is_gated,
            adds_products=inputs.x_up is not None,
        )

    @property
    def results(self) -> int:
        """The number of results."""
        return (3 if self.is_gated else 2) if self.options.saves_preactivation else 1

    @property
    def is_8_bit(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def block_k(self) -> int:
        """The number of values of the inner dimension in a step."""
        return DEPTH_BYTES // self.dtype.itemsize

    @property
    def promoted(self) -> int:
        """The number of columns whose 8-bit accumulators are promoted (added to float32 sums) at a time."""
        return min(PROMOTED, self.block_n)

    @property
    def weights(self) -> int:
        """The number of blocks of weights in a stage."""
        return 2 if self.is_gated else 1

    @property
    def first_weights(self) -> int:
        """The number of blocks of weights that share barriers with x. In 8 bits w_up has barriers of its own."""
        return 1 if self.is_8_bit else self.weights

    @property
    def has_second_part(self) -> bool:
        """Whether a work tile of 8 bits has a second part, whose sums are promoted by themselves."""
        return self.is_8_bit and (self.is_gated or self.block_n > PROMOTED)

    @property
    def promoted_steps(self) -> int:
        """The number of steps after which 8-bit accumulators are promoted. With two results, two steps spill."""
        return 1 if self.results > 1 else min(PROMOTED_STEPS, self.stages - 1)

    @property
    def x_tiles(self) -> SmemTiles:
        """The layout of x's blocks: a group may begin and end at any row."""
        return SmemTiles(self.block_k, any_rows=True, has_8_bits=self.is_8_bit)

    @property
    def out_tiles(self) -> SmemTiles:
        """The layout of the output buffers."""
        return SmemTiles(COLUMNS, any_rows=True)

    @property
    def block_n(self) -> int:
        """The number of columns of a work tile. A gated unit has half as many, because it accumulates two matmuls."""
        return max(COLUMNS, self.config.block_n // 2) if self.is_gated else self.config.block_n

    @property
    def n_blocks(self) -> int:
        return pl.cdiv(self.n, self.block_n)

    @property
    def k_steps(self) -> int:
        """The number of steps of one matmul of a work tile."""
        return self.k // self.block_k

    @property
    def steps(self) -> int:
        """The number of steps of a work tile: for x @ w, then for x_up @ w_up if there is an x_up."""
        return self.k_steps * (2 if self.adds_products else 1)

    @property
    def row_tiles(self) -> int:
        """The largest number of row tiles, for any sizes of the groups."""
        return tile_count(self.m, self.groups, BLOCK_M)

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline: config.stages, or fewer if shared memory has no room for as many."""
        of_w = self.block_n * self.weights
        of_stage = (BLOCK_M + of_w) * DEPTH_BYTES
        of_results = COMPUTE_WGS * BUFFERS * ROWS * COLUMNS * jnp.dtype(self.options.out_dtype).itemsize
        return min(self.config.stages, (SHARED_MEMORY - of_results) // of_stage)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Smem:
    """A CTA's shared memory.

    x: [stages, 1, 128, block_k]. w: [stages, block_k, block_n]; [stages, block_n, block_k] with transpose_w. w_up: like
    w, of a gated unit; else None. out: [warpgroups, buffers, 1, 64, 64], the output buffers. x and out have two views,
    see SmemTiles. ready, free: [stages], barriers: a step's operands have arrived, or have been read by both
    warpgroups. second_ready: [stages], barriers: the weights of the second part of 8-bit columns, or of a gated unit
    in 8 bits w_up, have arrived.
    """

    x: Ref
    w: Ref
    w_up: Ref | None
    out: Ref
    ready: Barrier
    second_ready: Barrier | None
    free: Barrier

    @classmethod
    def scratch(cls, traits: Traits) -> "Smem":
        """The scratch shapes for pl.run_scoped."""
        stages, of_w = traits.stages, (traits.block_k, traits.block_n)
        shape = stages, *(of_w[::-1] if traits.options.transpose_w else of_w)
        weights = smem_ref(shape, traits.w_dtype, transforms=SWIZZLED_8BIT if traits.is_8_bit else SWIZZLED)
        return cls(
            x=traits.x_tiles.scratch(stages, BLOCK_M, dtype=traits.dtype),
            w=weights,
            w_up=weights if traits.is_gated else None,
            out=traits.out_tiles.scratch(COMPUTE_WGS, BUFFERS, ROWS, dtype=jnp.dtype(traits.options.out_dtype)),
            ready=barrier_ref(num_arrivals=COMPUTE_WGS + traits.first_weights, num_barriers=stages),
            second_ready=barrier_ref(num_barriers=stages) if traits.has_second_part else None,
            free=barrier_ref(num_arrivals=COMPUTE_WGS, num_barriers=stages),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """The state of a CTA. ctas: of the launch. inputs, schedule, results: refs in device memory, of
    the schedule of row tiles of 128 rows."""

    traits: Traits
    ctas: int
    inputs: InputRefs
    schedule: FoundTiles
    results: list[Ref]
    smem: Smem

    def for_each_tile(self, run: Callable[[WorkTile, Index], None]) -> None:
        """Calls run(tile, filled) for each work tile of the CTA.

        filled: the number of times that the CTA's earlier tiles filled a stage. Rows past the last group fill none.
        """
        if self.traits.is_8_bit:
            self._for_each_8_bit_tile(run)
            return
        row_tiles = self._row_tiles()
        tiles = row_tiles * self.traits.n_blocks

        def body(carry: tuple[Turn, Index, WorkTile]) -> tuple[Turn, Index, WorkTile]:
            turn, filled, tile = carry
            following = turn.following()
            loaded = self._tile(following.index, row_tiles)  # read while the tile is computed
            run(tile._replace(column=pl.multiple_of(jnp.int32(tile.column), COLUMNS)), filled)
            return following, filled + self._fills(tile), loaded

        first = Turn.first(self.ctas, self.traits.config.snake)
        start = first, jnp.int32(0), self._tile(first.index, row_tiles)
        lax.while_loop(lambda carry: carry[0].index < tiles, body, start)

    def _for_each_8_bit_tile(self, run: Callable[[WorkTile, Index], None]) -> None:
        """for_each_tile for sums of 8 bits, which leave no registers for the next tile and for a whole Turn."""
        index_of = lambda number: Turn.at(number, self.ctas, self.traits.config.snake).index

        def if_any(number: Index) -> Index:
            """The number of a turn; -1 if the CTA has no work tile in this turn."""
            return jnp.where(index_of(number) < self._row_tiles() * self.traits.n_blocks, number, jnp.int32(-1))

        def body(carry: tuple[Index, Index]) -> tuple[Index, Index]:
            number, filled = carry
            tile = self._tile(index_of(number), self._row_tiles())
            run(tile._replace(column=pl.multiple_of(jnp.int32(tile.column), COLUMNS)), filled)
            return if_any(number + 1), filled + self._fills(tile)

        lax.while_loop(lambda carry: carry[0] >= 0, body, (if_any(jnp.int32(0)), jnp.int32(0)))

    def _row_tiles(self) -> Index:
        """The number of row tiles. The tiles of the rows past the last group come last, and may be left out."""
        return self.schedule.used[self.traits.groups + (1 if self.traits.options.has_zeros else 0)]

    def _fills(self, tile: WorkTile) -> Index:
        """The number of times that a work tile fills a stage."""
        return jnp.where(tile.group < self.traits.groups, jnp.int32(self.traits.steps), jnp.int32(0))

    def _tile(self, index: Index, row_tiles: Index) -> WorkTile:
        """Work tile `index` of all: in bands of config.row_group row tiles, column by column, as in the matmul.

        An index past the last tile gives the last tile, which the caller does not run.
        """
        index = jnp.maximum(jnp.minimum(index, row_tiles * self.traits.n_blocks - 1), 0)
        per_band = jnp.int32(self.config_rows * self.traits.n_blocks)
        band, within = lax.div(index, per_band), lax.rem(index, per_band)
        rows = jnp.minimum(row_tiles - band * self.config_rows, self.config_rows)  # fewer in the last band
        rows = jnp.maximum(rows, 1)  # without tiles
        i = band * self.config_rows + lax.rem(within, rows)
        return WorkTile.of(
            group=self.schedule.group[i],
            first=self.schedule.first[i],
            end=self.schedule.end[i],
            start=self.schedule.start[i],
            column=lax.div(within, rows) * self.traits.block_n,
        )

    @property
    def config_rows(self) -> int:
        return self.traits.config.row_group


def run_tiles(kernel: Any, load_tile: Callable[..., None], compute_tile: Callable[..., None]) -> None:
    """Runs one warpgroup of a CTA: the memory warpgroup, or a compute warpgroup.

    kernel: the state of the CTA, with for_each_tile. The memory warpgroup runs load_tile(kernel, tile, filled) for each
    work tile, a compute warpgroup compute_tile(kernel, warpgroup, tile, filled).
    """
    wg = lax.axis_index("wg")

    def compute() -> None:
        kernel.for_each_tile(functools.partial(compute_tile, kernel, wg))
        plgpu.wait_smem_to_gmem(0)

    load = functools.partial(kernel.for_each_tile, functools.partial(load_tile, kernel))
    run_warpgroup(wg, COMPUTE_WGS, REGISTERS, load, compute)
