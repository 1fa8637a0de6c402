"""Masks of positions and segments as predicates that kernels evaluate instead of reading bits."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from jax_kernels.masks import Mask
from jax_kernels.pallas.kernel_types import Index, Ref

# The fields of masks that hold a value for each query, or for each key, along their last axis.
_SIDES = {"q_ids": 0, "kv_ids": 1, "kept": 1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskPredicate[A]:
    """An arithmetic Mask, whose arrays are A: arrays outside a kernel, Refs inside.

    arrays: the mask's arrays. Values of queries and of keys are padded to whole blocks: ids with -1, which no query
    attends to, and bools, as int8, with 0. offset: int32 [B or 1], the position of query 0. tree: the mask's pytree
    structure. sides: for each array, 0 if it has a value for each query, 1 if for each key, else None. kv_end: the
    number of keys if the last block of keys reaches past it, else None.
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
        arrays = [_padded(jnp.asarray(x), side, blocks) for (_, x), side in zip(leaves, sides, strict=True)]
        kv_end = lengths[1] if lengths[1] % blocks[1] else None
        return MaskPredicate(arrays=arrays, offset=offset, tree=tree, sides=sides, kv_end=kv_end)

    def keep(
        self, b: Index, h: Index, q: jax.Array, k: jax.Array, load: Callable[[Ref, tuple[Index, ...], int], jax.Array]
    ) -> jax.Array:
        """Which pairs of a tile are kept, inside a kernel: bool, of the joint shape of q and k.

        b, h: the batch entry and the query head. q, k: int32, the indices of the tile's queries and keys. load(values,
        leading, side): the values of the tile's queries (side 0) or keys (side 1) at these leading indices of values
        [..., length], shaped as q or k.
        """
        given = zip(self.arrays, self.sides, strict=True)
        arrays: list[Any] = [x if side is None else _TileValues(cast(Ref, x), side, load) for x, side in given]
        offsets = cast(Ref, self.offset)
        offset = offsets[jnp.int32(0) if offsets.shape[0] == 1 else b]
        keep = jax.tree.unflatten(self.tree, arrays).elements(b, h, q, k, q_offset=offset)
        return keep if self.kv_end is None else keep & (k < self.kv_end)


@dataclasses.dataclass(frozen=True)
class _TileValues:
    """Replaces a mask's array [..., length] of values in a kernel: a look-up gives the values of the whole tile."""

    values: Ref
    side: int
    load: Callable[[Ref, tuple[Index, ...], int], jax.Array]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: tuple[Any, ...]) -> jax.Array:
        return self.load(self.values, index[:-1], self.side)


def _padded(x: jax.Array, side: int | None, blocks: tuple[int, int]) -> jax.Array:
    if side is None:
        return x
    is_bool = x.dtype == bool
    x = x.astype(jnp.int8) if is_bool else x
    return jnp.pad(
        x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % blocks[side])], constant_values=0 if is_bool else -1
    )
