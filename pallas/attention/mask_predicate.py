"""Masks of positions and segments as predicates that kernels evaluate instead of reading bits."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from jax_kernels.masks import Mask
from jax_kernels.pallas.kernel_types import Index, Ref

# The fields of masks that hold an id for each query, or for each key.
_SIDES = {"q_ids": 0, "kv_ids": 1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskPredicate[A]:
    """An arithmetic Mask, whose arrays are A: arrays outside a kernel, Refs inside.

    arrays: the mask's arrays; ids of queries and of keys are padded to whole blocks with -1, which no query attends to.
    offset: int32 [B or 1], the position of query 0. tree: the mask's pytree structure. sides: for each array, 0 if it
    has an id for each query, 1 if for each key, else None. kv_end: the number of keys if the last block of keys reaches
    past it, else None.
    """

    arrays: list[A]
    offset: A
    tree: Any = dataclasses.field(metadata={"static": True})
    sides: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    kv_end: int | None = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls, mask: Mask, offset: jax.Array, lengths: tuple[int, int], blocks: tuple[int, int]
    ) -> "MaskPredicate[jax.Array]":
        """The predicate of an arithmetic mask.

        offset: int32 [B or 1], the position of query 0. lengths: of queries and keys. blocks: (block_q, block_kv).
        """
        leaves, tree = jax.tree_util.tree_flatten_with_path(mask)
        sides = tuple(_SIDES.get(getattr(path[-1], "name", "")) for path, _ in leaves)
        arrays = [_padded(x, side, blocks) for (_, x), side in zip(leaves, sides, strict=True)]
        kv_end = lengths[1] if lengths[1] % blocks[1] else None
        return MaskPredicate(arrays=arrays, offset=offset, tree=tree, sides=sides, kv_end=kv_end)

    def keep(
        self, b: Index, h: Index, q: jax.Array, k: jax.Array, load: Callable[[Ref, Index, int], jax.Array]
    ) -> jax.Array:
        """Which pairs of a tile are kept, inside a kernel: bool, of the joint shape of q and k.

        b, h: the batch entry and the query head. q, k: int32, the indices of the tile's queries and keys. load(ids,
        b, side): the ids of the tile's queries (side 0) or keys (side 1) from row b of ids [B or 1, length], shaped as
        q or k.
        """
        given = zip(self.arrays, self.sides, strict=True)
        arrays: list[Any] = [x if side is None else _TileIds(cast(Ref, x), side, load) for x, side in given]
        offsets = cast(Ref, self.offset)
        offset = offsets[jnp.int32(0) if offsets.shape[0] == 1 else b]
        keep = jax.tree.unflatten(self.tree, arrays).elements(b, h, q, k, q_offset=offset)
        return keep if self.kv_end is None else keep & (k < self.kv_end)


@dataclasses.dataclass(frozen=True)
class _TileIds:
    """Replaces the ids [B or 1, length] of a Segments mask in a kernel: a look-up gives the ids of the whole tile."""

    ids: Ref
    side: int
    load: Callable[[Ref, Index, int], jax.Array]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ids.shape

    def __getitem__(self, index: tuple[Index, Any]) -> jax.Array:
        return self.load(self.ids, index[0], self.side)


def _padded(x: jax.Array, side: int | None, blocks: tuple[int, int]) -> jax.Array:
    if side is None:
        return jnp.asarray(x)
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % blocks[side])), constant_values=-1)
