"""The decoding kernel's memory warpgroup."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.decode.state import MEMORY_REGISTERS, Item, Warpgroup
from jax_kernels.pallas.kernel_types import Index, Slice, needed


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
        copies = self._copies(item, self.first_key(item, block))
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
