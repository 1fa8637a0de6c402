"""The mask of packed sequences: a query attends to the keys that have its id."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks import checks
from jax_kernels.masks.arrays.array_mask import within
from jax_kernels.masks.block_arithmetic import Grid, Literal
from jax_kernels.masks.mask import Mask, node


def segments(q_ids: jax.Array, kv_ids: jax.Array | None = None) -> Mask:
    """Packed sequences: a query attends to the keys that have its id; an id below 0 attends to nothing.

    q_ids: int32 [T] or [B or 1, T]. kv_ids: int32 [S] or [B or 1, S]; None is q_ids. Other integer dtypes are accepted:
    known values must fit int32; traced values may be any, and are compared exactly. Row i of q_ids belongs to query i,
    whatever its position. Ids may come in any order. If each id has one run of keys, the dead, partial and full blocks
    are exact.
    """
    q_ids, kv_ids = _ids(q_ids, kv_ids)
    return Segments(q_ids, kv_ids)


def _ids(q_ids: Any, kv_ids: Any) -> tuple[jax.Array, jax.Array]:
    """(q_ids, kv_ids) as int32 [B or 1, T] and [B or 1, S]. kv_ids of None gives q_ids twice."""
    want = "an int32 array [length] or [batch, length]"
    given = {"q_ids": q_ids} | ({} if kv_ids is None else {"kv_ids": kv_ids})
    for name, x in given.items():
        checks.is_array(name, x, want)
        if x.ndim not in (1, 2):
            raise ValueError(f"{name}: got shape {x.shape}, want {want}")
    checks.joint("q_ids, kv_ids", [1 if x.ndim == 1 else x.shape[0] for x in given.values()], "batch entries")
    found = [jnp.atleast_2d(x) for x in checks.ids(tuple(given), tuple(given.values()), want)]
    return found[0], found[-1]


@node
class Segments(Mask):
    """A mask in which a query attends to the keys that have its id, unless the id is below 0.

    q_ids, kv_ids: int32 [B or 1, T] and [B or 1, S].
    """

    q_ids: Any
    kv_ids: Any
    is_shardable = True
    is_arithmetic = True

    @property
    def batch(self) -> int:
        return self.kv_ids.shape[0] if self.q_ids.shape[0] == 1 else self.q_ids.shape[0]

    def check_lengths(self, q_length, kv_length):
        for name, x, length in (("q_ids", self.q_ids, q_length), ("kv_ids", self.kv_ids, kv_length)):
            if x.ndim != 2 or x.shape[1] != length:
                raise ValueError(f"segments: got {name} of shape {x.shape}, want [batch, {length}] for this call")

    def terms(self, negated):
        if not negated:
            return ((Literal(interval=lambda grid: grid.once(self._runs)[:2]),),)

        def before(grid):
            start, _, is_run = grid.once(self._runs)
            return 0, jnp.where(is_run, start, grid.kv_length)

        def after(grid):
            _, end, is_run = grid.once(self._runs)
            return jnp.where(is_run, end, 0), grid.kv_length

        return ((Literal(interval=before),), (Literal(interval=after),))

    def restricted(self, piece):
        return Segments(piece.ids(self.q_ids, 0), piece.ids(self.kv_ids, 1))

    def _runs(self, grid: Grid):
        """(start, end, is_run) for each query, each [B or 1, T]: the first and last + 1 of the keys with the query's
        id.

        is_run: bool, whether all keys from start to end - 1 have the id. A query without such keys has start = end = 0.
        """
        q_ids, kv_ids = (jnp.broadcast_to(x, (self.batch, x.shape[1])) for x in (self.q_ids, self.kv_ids))

        def runs(q_ids, kv_ids):
            order = jnp.argsort(kv_ids, stable=True).astype(jnp.int32)
            ids = kv_ids[order]
            first, after = (jnp.searchsorted(ids, q_ids, side=side).astype(jnp.int32) for side in ("left", "right"))
            some = (first < after) & (q_ids >= 0)
            start = jnp.where(some, order[jnp.minimum(first, grid.kv_length - 1)], 0)
            end = jnp.where(some, order[jnp.maximum(after - 1, 0)] + 1, 0)
            return start, end, ~some | (end - start == after - first)

        return jax.vmap(runs)(q_ids, kv_ids)

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        q_ids = self.q_ids[within(b, self.q_ids.shape[0]), q_index]
        kv_ids = self.kv_ids[within(b, self.kv_ids.shape[0]), k_index]
        return (q_ids == kv_ids) & (q_ids >= 0)

    def __repr__(self) -> str:
        return f"segments({checks.array_text(self.q_ids)}, {checks.array_text(self.kv_ids)})"
