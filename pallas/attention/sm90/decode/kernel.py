"""The decoding kernel on Hopper: a TMA producer with a deep pipeline, and one or two warpgroups of wgmma.

A CTA processes items of (sequence, split of its keys, key head, tile of 64 rows); the memory warpgroup runs ahead into
the next item. A row is a query of a head (see decode_contract.py). Two compute warpgroups process the blocks of keys in
turns. Each warpgroup has its own pipeline and its own softmax, and writes its own part of the result.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention import softmax
from jax_kernels.pallas.attention.sm90.features.softcap import softcapped
from jax_kernels.pallas.attention.sm90.forward.step import Accumulators, TileSums, with_accumulators
from jax_kernels.pallas.block_specs.specs import AttentionDecodeSm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, Slice, needed
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import ROW, SWIZZLED, SWIZZLED_F32, WGMMA
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref

TILE = 64  # rows of a tile, as wgmma has them
COPIED_ROWS = 8  # a copy has fewer rows, or whole groups of this size: the atoms of its swizzle
# Columns of the output that are staged at a time: all columns, in float32, would take the shared memory of a block.
OUT_COLUMNS = 64
# Registers per thread with three warpgroups. With two warpgroups the default is enough.
COMPUTE_REGISTERS, MEMORY_REGISTERS = 208, 80


def copied_rows(count: int) -> int:
    """The smallest multiple of COPIED_ROWS (8) that is at least `count`."""
    return pl.cdiv(count, COPIED_ROWS) * COPIED_ROWS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays[A: jax.Array | Ref]:
    """The arrays that the kernel reads, in device memory, in the order of its operands.

    query: [B, Hkv, rows, D]; row t * group + g is query t of query head g of the key head, and rows without a query are
    zeros at the end (decode_contract.pack). key, value: [B, capacity, Hkv, D], or pages [pages, page_size, Hkv, D].
    lengths: [B] int32, the number of keys of each sequence. sinks: [B, Hkv, Traits.rows] float32, the sink logit of
    each row, or None. tables: [B, pages of a sequence] int32, the pages of each sequence, or None for a contiguous
    cache.
    """

    key: A
    lengths: A
    query: A
    sinks: A | None
    tables: A | None
    value: A


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a call when its kernel is traced.

    group: query heads per key head. capacity: the number of keys that a sequence has room for. left: the number of keys
    before its own that a query attends to, -1 for all. rows: the rows of a key head, one per query and query head of
    its group, rounded up to whole tiles of 64. page_size: None for a contiguous cache. splits: the number of splits of
    a sequence's keys.
    """

    config: AttentionDecodeSm90
    core_count: int
    batch: int
    kv_heads: int
    rows: int
    head_dim: int
    v_head_dim: int
    dtype: jnp.dtype
    q_length: int
    group: int
    capacity: int
    page_size: int | None
    splits: int
    left: int
    scale: float
    softcap: float | None

    @property
    def tiles(self) -> int:
        """The number of tiles of 64 rows of a key head."""
        return self.rows // TILE

    @property
    def parts(self) -> int:
        """The number of results that a row has, to be merged later: one per split of the keys and compute warpgroup.

        Each compute warpgroup processes every compute_warpgroups-th block of a split.
        """
        return self.splits * self.config.compute_warpgroups

    @property
    def items(self) -> int:
        """The number of items of the launch: one per sequence, split of its keys, key head and tile of 64 rows."""
        return self.batch * self.splits * self.kv_heads * self.tiles

    @property
    def ctas(self) -> int:
        return min(self.core_count, self.items)

    @property
    def pages_per_block(self) -> int:
        """The number of pages that a block of keys spans; 1 for a contiguous cache."""
        return 1 if self.page_size is None else max(1, self.config.block_kv // self.page_size)

    @property
    def stored_rows(self) -> int:
        """The number of rows of a tile that are stored, a multiple of 8; rows past them hold no queries."""
        return TILE if self.tiles > 1 else copied_rows(self.group * self.q_length)

    @property
    def out_dtype(self) -> jnp.dtype:
        return self.dtype if self.parts == 1 else jnp.dtype(jnp.float32)

    def following(self, slot: Index) -> Index:
        """The index of the slot after this one in a pipeline; after the last comes the first."""
        return jnp.where(slot == self.config.stages - 1, 0, slot + 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scratch:
    """A CTA's shared memory and barriers: scratch specifications for pl.run_scoped, which passes the Refs in the same
    fields.

    q_smem, out_smem, lse_smem: a tile per compute warpgroup. The other fields have the slots of all pipelines, the
    first compute warpgroup's pipeline first. *_ready: the copies have arrived. *_free: a slot has been read and may be
    overwritten.
    """

    q_smem: Ref
    k_smem: Ref
    v_smem: Ref
    out_smem: Ref
    lse_smem: Ref
    q_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier
    k_free: Barrier
    v_free: Barrier

    @classmethod
    def of(cls, traits: Traits) -> "Scratch":
        """The scratch specifications of a launch."""
        config, out_dtype = traits.config, traits.out_dtype
        compute_wgs, slots = config.compute_warpgroups, config.compute_warpgroups * config.stages
        tile_smem = lambda *shape: smem_ref(shape, traits.dtype, transforms=SWIZZLED)
        out_transforms = SWIZZLED if out_dtype.itemsize == 2 else SWIZZLED_F32
        return cls(
            q_smem=tile_smem(compute_wgs, TILE, traits.head_dim),
            k_smem=tile_smem(slots, config.block_kv, traits.head_dim),
            v_smem=tile_smem(slots, config.block_kv, traits.v_head_dim),
            out_smem=smem_ref((compute_wgs, TILE, OUT_COLUMNS), out_dtype, transforms=out_transforms),
            lse_smem=smem_ref((compute_wgs, TILE), jnp.float32),
            q_ready=barrier_ref(num_barriers=compute_wgs),
            k_ready=barrier_ref(num_arrivals=traits.pages_per_block, num_barriers=slots),
            v_ready=barrier_ref(num_arrivals=traits.pages_per_block, num_barriers=slots),
            k_free=barrier_ref(num_barriers=slots),
            v_free=barrier_ref(num_barriers=slots),
        )


def run(arrays: Arrays, traits: Traits, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel, and returns a result per part of the keys.

    (out [B, Hkv, parts, rows, Dv] in traits.out_dtype, lse [B, Hkv, parts, rows] float32, natural log). out may have
    fewer rows than lse: the last ones are not queries.
    """
    leaves, tree = jax.tree.flatten(arrays)
    compute_wgs = traits.config.compute_warpgroups

    def entry(*refs):
        *given, out_gmem, lse_gmem = refs
        given = jax.tree.unflatten(tree, given)

        def body(scratch: Scratch) -> None:
            wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
            loader = Loader(traits=traits, arrays=given, scratch=scratch, cta=cta)

            def compute(w: int) -> None:
                Compute(
                    traits=traits, arrays=given, scratch=scratch, cta=cta, out_gmem=out_gmem, lse_gmem=lse_gmem, w=w
                ).run()

            of_w = [functools.partial(compute, w) for w in range(compute_wgs)]
            lax.switch(wg, [*of_w, loader.run])

        pl.run_scoped(body, Scratch.of(traits), collective_axes="wg")

    out_rows = traits.rows if traits.tiles > 1 else traits.stored_rows
    kernel = launch(
        entry,
        "attention_decode_sm90",
        out_type=(
            jax.ShapeDtypeStruct(
                (traits.batch, traits.kv_heads, traits.parts, out_rows, traits.v_head_dim), traits.out_dtype
            ),
            jax.ShapeDtypeStruct((traits.batch, traits.kv_heads, traits.parts, traits.rows), jnp.float32),
        ),
        ctas=traits.ctas,
        warpgroups=compute_wgs + 1,
        semantics=plgpu.LoweringSemantics.Lane,
        interpret=interpret,
    )
    return kernel(*leaves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A CTA's unit of work: a tile of 64 rows of key head `head`, and `count` blocks of keys from block `begin` on.

    b: the sequence. split: index of the split of its keys. tile: index of the tile. length: the number of keys of the
    sequence.
    """

    b: Index
    split: Index
    tile: Index
    head: Index
    length: Index
    begin: Index
    count: Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warpgroup:
    """The state that a CTA's warpgroups have in common, and the items of the CTA; the base of Loader and Compute."""

    traits: Traits
    arrays: Arrays
    scratch: Scratch
    cta: Any

    def item(self, index: Index) -> Item:
        """Item number `index` of the launch."""
        traits, block_kv = self.traits, self.traits.config.block_kv
        head, rest = lax.rem(index, traits.kv_heads), lax.div(index, traits.kv_heads)
        tile, rest = lax.rem(rest, traits.tiles), lax.div(rest, traits.tiles)
        split, b = lax.rem(rest, traits.splits), lax.div(rest, traits.splits)
        length = jnp.clip(self.arrays.lengths[b], 0, traits.capacity)
        end = lax.div(length + (block_kv - 1), block_kv)
        windowed = traits.left >= 0
        first = lax.div(jnp.maximum(length - traits.q_length - traits.left, 0), block_kv) if windowed else 0
        per_split = lax.div(end - first + (traits.splits - 1), traits.splits)
        begin = jnp.minimum(first + split * per_split, end)
        count = jnp.minimum(per_split, end - begin)
        return Item(b=b, split=split, tile=tile, head=head, length=length, begin=begin, count=count)

    def for_each_item(self, run: Callable[[Any, Any], Any], state: Any) -> None:
        """Calls run(index, state) -> next state for the CTA's items, in order. state: for the first item."""
        body = lambda carry: (carry[0] + self.traits.ctas, run(*carry))
        lax.while_loop(lambda carry: carry[0] < self.traits.items, body, (lax.optimization_barrier(self.cta), state))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageCopy:
    """One copy of keys or values: rows `rows` of page `page` (contiguous cache: of sequence `page`) to rows `to` of a
    slot.
    """

    page: Index
    rows: Slice
    to: Slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loader(Warpgroup):
    """The memory warpgroup: it fills the pipeline of each compute warpgroup."""

    def run(self) -> None:
        """Loads all items of the CTA."""
        compute_wgs = self.traits.config.compute_warpgroups
        if compute_wgs == 2:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        self.for_each_item(self._load_item, (jnp.int32(0),) * compute_wgs)

    def _load_item(self, index: Index, slots: tuple[Index, ...]) -> tuple[jax.Array, ...]:
        """Loads an item's blocks into the pipelines, from each compute warpgroup's slot in `slots` on. Returns the next
        slots.
        """
        item, compute_wgs = self.item(index), self.traits.config.compute_warpgroups

        def load(step, slots):
            next_slots = []
            for w, slot in enumerate(slots):
                block = step * compute_wgs + w
                pl.when(block < item.count)(functools.partial(self._load_block, item, block, w, slot))
                next_slots.append(jnp.where(block < item.count, self.traits.following(slot), slot))
            return tuple(next_slots)

        return lax.fori_loop(0, lax.div(item.count + (compute_wgs - 1), compute_wgs), load, slots)

    def _load_block(self, item: Item, block: Index, w: int, slot: Index) -> None:
        """Loads keys and values of block `block`, counted within the item, into a slot of compute warpgroup w's
        pipeline.
        """
        arrays, scratch, config = self.arrays, self.scratch, self.traits.config
        copies = self._copies(item, (item.begin + block) * config.block_kv)
        for gmem, smem, ready, free in (
            (arrays.key, scratch.k_smem, scratch.k_ready, scratch.k_free),
            (arrays.value, scratch.v_smem, scratch.v_ready, scratch.v_free),
        ):
            at = w * config.stages + slot
            plgpu.barrier_wait(free.at[at])
            for copy in copies:
                source = gmem.at[copy.page, copy.rows, item.head]
                plgpu.copy_gmem_to_smem(source, smem.at[at, copy.to], ready.at[at])

    def _copies(self, item: Item, start: Index) -> list[PageCopy]:
        """The copies of the block of keys from key `start` on: one, or one per page."""
        block_kv, page_size, tables = self.traits.config.block_kv, self.traits.page_size, self.arrays.tables
        whole_block = pl.ds(0, block_kv)
        if page_size is None:
            return [PageCopy(page=item.b, rows=pl.ds(start, block_kv), to=whole_block)]
        if page_size >= block_kv:
            page = needed(tables)[item.b, lax.div(start, page_size)]
            return [PageCopy(page=page, rows=pl.ds(lax.rem(start, page_size), block_kv), to=whole_block)]
        first, last = lax.div(start, page_size), lax.div(item.length - 1, page_size)
        # Past the length a table may hold invalid pages: the last page is loaded again instead.
        pages = [needed(tables)[item.b, jnp.minimum(first + i, last)] for i in range(self.traits.pages_per_block)]
        return [
            PageCopy(page=page, rows=pl.ds(0, page_size), to=pl.ds(i * page_size, page_size))
            for i, page in enumerate(pages)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLimits:
    """The keys that each row of a tile may attend to: limits - (left + 1) ... limits - 1 (from 0 without a window).

    limits: int32 [64], exclusive ends. length: the number of keys of the sequence. Blocks of keys that lie within
    full_start ... full_end - 1 need no mask; without a window only full_end counts.
    """

    limits: jax.Array
    length: Index
    full_start: Index
    full_end: Index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopState:
    """The state of the loop over keys: the softmax so far, and the pipeline's slot of the next block.

    row_max, row_sum: the maximum of each row in base 2, [64], and partial sums of each row of P, [64, 8], both float32.
    """

    row_max: jax.Array
    row_sum: jax.Array
    slot: Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute(Warpgroup):
    """Compute warpgroup w, which processes an item's blocks w, w + compute_warpgroups, w + 2 * compute_warpgroups
    ...
    """

    out_gmem: Ref
    lse_gmem: Ref
    w: int

    def run(self) -> None:
        """Computes and stores all items of the CTA, this warpgroup's blocks only."""
        config, scratch = self.traits.config, self.scratch
        if config.compute_warpgroups == 2:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for slot in range(config.stages):
            plgpu.barrier_arrive(scratch.k_free.at[self.w * config.stages + slot])
            plgpu.barrier_arrive(scratch.v_free.at[self.w * config.stages + slot])
        self.for_each_item(self._run_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _run_item(self, index: Index, slot: Index) -> Index:
        """Computes and stores the warpgroup's part of item `index`, whose first block is in `slot`. Returns the next
        slot.
        """
        traits, scratch, w = self.traits, self.scratch, self.w
        item = self.item(index)
        tile_rows = pl.ds(item.tile * TILE, TILE)
        queries = self.arrays.query.at[item.b, item.head, tile_rows]
        plgpu.copy_gmem_to_smem(queries, scratch.q_smem.at[w], scratch.q_ready.at[w])
        rows = self._row_limits(item)
        plgpu.barrier_wait(scratch.q_ready.at[w])
        attend = functools.partial(self._attend, item, rows, slot)
        sums = with_accumulators(attend, v_head_dim=traits.v_head_dim, block_kv=traits.config.block_kv)
        self._epilogue(item, tile_rows, sums)
        return sums.slot

    def _row_limits(self, item: Item) -> RowLimits:
        """The limits of the keys of each row of an item's tile. Rows past the last query have the last query's
        limit.
        """
        q_length, length = self.traits.q_length, item.length
        # Rows past the last query have the last query's limit.
        row = item.tile * TILE + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW)
        limits = length - q_length + 1 + jnp.minimum(lax.div(row, jnp.int32(self.traits.group)), q_length - 1)
        full_end, full_start = length - q_length + 1, length - 1 - self.traits.left
        return RowLimits(limits=limits, length=length, full_start=full_start, full_end=full_end)

    def _attend(self, item: Item, rows: RowLimits, slot: Index, accs: Accumulators) -> TileSums:
        """The sums of the loop over the warpgroup's blocks of keys: O = P V before the division, and the softmax
        state.
        """
        compute_wgs = self.traits.config.compute_warpgroups
        steps = lax.div(item.count + (compute_wgs - 1 - self.w), compute_wgs)
        row_max, row_sum = softmax.start(TILE)
        step = functools.partial(self._mma_step, item, rows, accs)
        state = lax.fori_loop(0, steps, step, LoopState(row_max=row_max, row_sum=row_sum, slot=slot))
        acc = plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
        return TileSums(acc=acc, row_max=state.row_max, row_sum=state.row_sum, slot=state.slot)

    def _mma_step(self, item: Item, rows: RowLimits, accs: Accumulators, step: Index, state: LoopState) -> LoopState:
        """Adds one block of keys: S = Q K^T, its softmax P, and O += P V. Returns the next state."""
        traits, scratch, config, w = self.traits, self.scratch, self.traits.config, self.w
        at = w * config.stages + state.slot
        start = (item.begin + step * config.compute_warpgroups + w) * config.block_kv
        plgpu.barrier_wait(scratch.k_ready.at[at])
        accs.s_ref[...] = plgpu.layout_cast(jnp.zeros((TILE, config.block_kv), jnp.float32), WGMMA)
        plgpu.wgmma(accs.s_ref, scratch.q_smem.at[w], scratch.k_smem.at[at].transpose((1, 0)))  # S = Q K^T
        s = plgpu.wgmma_accumulator_load(accs.s_ref, wait_n=0)
        plgpu.barrier_arrive(scratch.k_free.at[at])
        s = self._masked_if_partial(softcapped(s, traits.softcap, traits.scale) if traits.softcap else s, rows, start)
        p, row_max, row_sum, alpha = softmax.step(s, state.row_max, state.row_sum, traits.softcap or traits.scale)
        plgpu.barrier_wait(scratch.v_ready.at[at])
        left_over = lambda: self._clear_values(scratch.v_smem.at[at], rows.length - start)
        pl.when(start + config.block_kv > rows.length)(left_over)
        acc = plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
        accs.acc_ref[...] = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        plgpu.wgmma(accs.acc_ref, p.astype(traits.dtype), scratch.v_smem.at[at])  # O += P V
        plgpu.wgmma_accumulator_load(accs.acc_ref, wait_n=0)
        plgpu.barrier_arrive(scratch.v_free.at[at])
        return LoopState(row_max=row_max, row_sum=row_sum, slot=traits.following(state.slot))

    def _masked_if_partial(self, s: jax.Array, rows: RowLimits, start: Index) -> jax.Array:
        """The scores of the block of keys from key `start` on, with -inf where a row may not attend to a key."""
        left = self.traits.left
        is_partial = start + self.traits.config.block_kv > rows.full_end
        if left >= 0:
            is_partial = is_partial | (start < rows.full_start)

        def masked(s):
            columns = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA)
            wide = lambda x: lax.broadcast_in_dim(x, s.shape, [0])
            keep = columns < wide(rows.limits - start)
            if left >= 0:
                keep = keep & (columns >= wide(rows.limits - start - (left + 1)))
            return jnp.where(keep, s, -jnp.inf)

        return lax.cond(is_partial, masked, lambda s: s, s)

    def _clear_values(self, v_ref: Ref, left_over: Index) -> None:
        """Writes zeros to the rows of a slot that lie past the sequence's keys: a cache may hold NaN or infinity there.

        v_ref: the slot's values in shared memory. left_over: the number of its rows that are keys of the sequence.
        """
        for first in range(0, self.traits.config.block_kv, TILE):
            for column in range(0, self.traits.v_head_dim, 64):
                ref = v_ref.at[pl.ds(first, TILE), pl.ds(column, 64)]
                v = plgpu.load(ref, layout=WGMMA)
                keep = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=WGMMA) < left_over - first
                ref[...] = jnp.where(keep, v, jnp.zeros_like(v))
        plgpu.commit_smem()

    def _epilogue(self, item: Item, tile_rows: Slice, sums: TileSums) -> None:
        """Stores out = O / row_sum and lse, in natural log, of the warpgroup's part of an item.

        lse = log(row_sum) + row_max * ln 2, since row_max is in base 2. A row without keys and sinks has out = 0 and
        lse = -inf. The sinks join part 0 only. tile_rows: the rows of the item's tile.
        """
        traits, sinks, w = self.traits, self.arrays.sinks, self.w
        out_smem, lse_smem = self.scratch.out_smem, self.scratch.lse_smem
        b, head, part = item.b, item.head, item.split * traits.config.compute_warpgroups + w
        row_max, row_sum, factor = sums.row_max, sums.row_sum, 1.0
        if sinks is not None:  # in one part only
            sink = plgpu.load(sinks.at[b, head, tile_rows], layout=ROW, optimized=False)
            row_max, row_sum, factor = softmax.with_sink(row_max, row_sum, jnp.where(part == 0, sink, -jnp.inf))
        inverse, lse = softmax.finish(row_max, row_sum, may_be_dead=True)
        acc = sums.acc * lax.broadcast_in_dim(inverse * factor, sums.acc.shape, [0])
        acc = acc.astype(traits.out_dtype)
        to = self.out_gmem.at[b, head, part, pl.ds(item.tile * TILE, traits.stored_rows)]
        for column in range(0, traits.v_head_dim, OUT_COLUMNS):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last stores have left shared memory
            out_smem[w] = acc[:, column : column + OUT_COLUMNS]
            if column == 0:
                lse_smem[w] = lse
            plgpu.commit_smem()
            columns = pl.ds(column, OUT_COLUMNS)
            plgpu.copy_smem_to_gmem(out_smem.at[w, pl.ds(0, traits.stored_rows)], to.at[:, columns])
        plgpu.copy_smem_to_gmem(lse_smem.at[w], self.lse_gmem.at[b, head, part, tile_rows])
