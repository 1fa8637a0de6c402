"""Tiles of 16-bit arrays in shared memory, and the copies between them and device memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.layouts import ROWS, SWIZZLED
from jax_kernels.pallas.mosaic.registers import recomputed


class SmemTiles:
    """Shared memory for 16-bit tiles [..., rows, columns], as [..., chunks, rows, width].

    any_rows: whether an array may have any number of rows. Copies take 64 columns at a time then, which is the chunks'
    width. whole: a product is to have all columns in one chunk, for which copies take 8 rows at a time, and
    do not keep up with the forward. swizzled: for wgmma; else plain rows. The interpreter copies any rows as they are.
    """

    def __init__(self, columns: int, any_rows: bool, *, whole: bool = False, swizzled: bool = True):
        self.any_rows = any_rows and swizzled
        self.whole = self.any_rows and whole and columns > 64
        self.transforms = SWIZZLED if swizzled else ()
        self.width = 64 if self.any_rows and not self.whole else columns
        self.count = columns // self.width
        # Whether copies see the memory in other tiles than products do, and whether these have 8 rows each.
        self.retiled = self.any_rows and not interpreter.INTERPRETED
        self.eights = self.whole and self.retiled

    def scratch(self, *shape: int, dtype: Any) -> Any:
        """For pl.run_scoped. shape: without the columns."""
        *outer, rows = shape
        tiles = plgpu.SMEM((*outer, self.count, rows, self.width), dtype, transforms=self.transforms)
        if not self.retiled:
            return tiles
        copied = (rows // 8, self.width // 64, 8, 64) if self.eights else (self.count, rows, 64)
        return plgpu.RefUnion(tiles, plgpu.SMEM((*outer, *copied), dtype, transforms=ROWS))

    def views(self, smem: Any) -> tuple[Any, Any]:
        """(for wgmma and stores, for copies) of what scratch asked for."""
        return tuple(smem) if self.retiled else (smem, smem)

    def copies(self, rows: int) -> int:
        """How many a tile takes: a barrier's arrivals."""
        return rows // 8 * (self.width // 64) if self.eights else self.count

    def _each(self, gmem: Any, smem: Any, copy: Callable[[Any, Any], None]) -> None:
        if not self.eights:
            for c in range(self.count):
                copy(gmem if self.count == 1 else gmem.at[:, pl.ds(self.width * c, self.width)], smem.at[c])
            return

        def eight(i, _):
            r, c = lax.div(i, jnp.int32(self.width // 64)), lax.rem(i, jnp.int32(self.width // 64))
            copy(gmem.at[pl.ds(8 * r, 8), pl.ds(64 * c, 64)], smem.at[r, c])

        # An opaque count: unrolled, it takes more registers than a loading warpgroup has.
        lax.fori_loop(0, recomputed(smem.shape[0] * (self.width // 64)), eight, None)

    def load(self, gmem: Any, smem: Any, barrier: Any) -> None:
        """gmem: [rows, columns] in device memory. smem: a tile, as views has it for copies."""
        self._each(gmem, smem, lambda gmem, smem: plgpu.copy_gmem_to_smem(gmem, smem, barrier))

    def store(self, smem: Any, gmem: Any) -> None:
        self._each(gmem, smem, lambda gmem, smem: plgpu.copy_smem_to_gmem(smem, gmem))

    def chunks(self, x: Any) -> list[Any]:
        """The chunks of an array's columns."""
        return [x] if self.count == 1 else [x[:, self.width * c : self.width * (c + 1)] for c in range(self.count)]

    def sixty_four(self, smem: Any, start: int) -> Any:
        """64 columns from there on, of a tile."""
        c, start = divmod(start, self.width)
        return smem.at[c, :, start : start + 64] if self.width > 64 else smem.at[c]


def has_odd_length(*arrays: jax.Array) -> bool:
    """Whether one of them, [B, length, ...], has other than whole swizzle atoms of 8 rows."""
    return any(x.shape[1] % 8 != 0 for x in arrays)


def pad_for_tma(x: jax.Array, head_dim_multiple: int = 64, *, any_rows: bool = False) -> jax.Array:
    """[B, length, H, D] with zeros up to whole swizzle atoms: columns of 64, and 8 rows but for any_rows.

    The zeros change no score and no column that counts; keys past the end are left to the predicate.
    """
    length, columns = 0 if any_rows else -x.shape[1] % 8, -x.shape[3] % head_dim_multiple
    return jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, columns)]) if length or columns else x
