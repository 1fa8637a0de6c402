"""The inputs, static facts, shared memory and work items that the decoding kernel's warpgroups have in common."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.pallas.block_specs.specs import AttentionDecodeSm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref
from jax_kernels.pallas.mosaic.layouts import SWIZZLED, SWIZZLED_F32
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
    cache. mask: [n, keys] int32, nonzero for the keys that all rows keep, padded to whole blocks, or None; each of the
    n entries serves B / n consecutive sequences. indices, counts: with a mask, [B, blocks] and [B] int32, the blocks of
    keys that each sequence visits, and their number.
    """

    key: A
    lengths: A
    query: A
    sinks: A | None
    tables: A | None
    value: A
    mask: A | None = None
    indices: A | None = None
    counts: A | None = None


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A CTA's unit of work: a tile of 64 rows of key head `head`, and `count` blocks of keys from block `begin` on.

    With a mask, these are positions in the sequence's list of blocks. b: the sequence. split: index of the split of its
    keys. tile: index of the tile. length: the number of keys of the sequence.
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
        if self.arrays.counts is None:
            end = lax.div(length + (block_kv - 1), block_kv)
            windowed = traits.left >= 0
            first = lax.div(jnp.maximum(length - traits.q_length - traits.left, 0), block_kv) if windowed else 0
        else:
            first, end = 0, self.arrays.counts[b]
        per_split = lax.div(end - first + (traits.splits - 1), traits.splits)
        begin = jnp.minimum(first + split * per_split, end)
        count = jnp.minimum(per_split, end - begin)
        return Item(b=b, split=split, tile=tile, head=head, length=length, begin=begin, count=count)

    def first_key(self, item: Item, block: Index) -> Index:
        """The index of the first key of block number `block` of an item. block: below item.count."""
        number = item.begin + block
        if self.arrays.indices is not None:
            number = self.arrays.indices[item.b, number]
        return number * self.traits.config.block_kv

    def for_each_item(self, run: Callable[[Any, Any], Any], state: Any) -> None:
        """Calls run(index, state) -> next state for the CTA's items, in order. state: for the first item."""
        body = lambda carry: (carry[0] + self.traits.ctas, run(*carry))
        lax.while_loop(lambda carry: carry[0] < self.traits.items, body, (lax.optimization_barrier(self.cta), state))
