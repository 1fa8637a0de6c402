"""Masks that have a value for each key, the same for every query."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.masks import checks
from jax_kernels.masks.arrays.array_mask import ArrayMask, within
from jax_kernels.masks.block_arithmetic import Grid, Literal
from jax_kernels.masks.mask import node
from jax_kernels.masks.restriction import of_heads


@node
class KeyMask(ArrayMask):
    """A mask of one value for each key: kept, bool [B or 1, H or 1, S]. Kernels look the value up, and need no bits."""

    kept: Any
    is_arithmetic = True
    is_of_keys = True

    @property
    def _array(self):
        return self.kept

    def check_lengths(self, q_length, kv_length):
        if self.kept.shape[2] != kv_length:
            raise ValueError(f"mask: got an array of {self.kept.shape[2]} keys, want {kv_length} for this call")

    def of_heads(self, first, count):
        return dataclasses.replace(self, kept=of_heads(self.kept, first, count))

    def terms(self, negated):
        return ((Literal(cells=lambda grid: self._live(grid, negated)),),)

    def _live(self, grid: Grid, negated: bool) -> jax.Array:
        """Whether each block has a kept key, or if `negated` another key: bool [B or 1, H or 1, rows, columns]."""
        found = ~self.kept if negated else self.kept
        found = jnp.pad(found, ((0, 0), (0, 0), (0, -grid.kv_length % grid.block_kv)))
        found = found.reshape(*found.shape[:2], 1, grid.columns, grid.block_kv).any(axis=4)
        return jnp.broadcast_to(found, (*found.shape[:2], grid.rows, grid.columns))

    def elements(self, b, h, q_index, k_index, *, q_offset=0):
        return self.kept[within(b, self.batch), within(h, self.heads), k_index] != 0

    def __repr__(self) -> str:
        return f"dense({checks.array_text(self.kept[:, :, None])})"
