"""Tiles of 16-bit arrays in shared memory, and the copies between them and device memory."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_kernels.pallas.kernel_types import Barrier, Ref
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.layouts import ROWS, SWIZZLED
from jax_kernels.pallas.mosaic.registers import recomputed
from jax_kernels.pallas.mosaic.scratch import smem_ref


class SmemTiles:
    """Shared memory for 16-bit tiles [..., rows, columns], as [..., chunks, rows, width].

    any_rows: whether an array may have any number of rows. If so, copies take 64 columns at a time, the width of a
      chunk.
    whole: whether a wgmma takes all columns in one chunk. If so, copies take 8 rows at a time, which is too slow for
      the forward.
    swizzled: for wgmma; otherwise plain rows.

    The interpreter copies any number of rows without these limits.
    """

    def __init__(self, columns: int, any_rows: bool, *, whole: bool = False, swizzled: bool = True):
        self.any_rows = any_rows and swizzled
        self.whole = self.any_rows and whole and columns > 64
        self.transforms = SWIZZLED if swizzled else ()
        self.width = 64 if self.any_rows and not self.whole else columns
        self.count = columns // self.width
        # Whether copies use other tiles of the memory than wgmma, and whether each copy has 8 rows.
        self.retiled = self.any_rows and not interpreter.INTERPRETED
        self.eights = self.whole and self.retiled

    def scratch(self, *shape: int, dtype: DTypeLike) -> Ref:
        """The memory, for pl.run_scoped. shape: the shape of the tiles without the columns."""
        *outer, rows = shape
        tiles = smem_ref((*outer, self.count, rows, self.width), dtype, transforms=self.transforms)
        if not self.retiled:
            return tiles
        copied = (rows // 8, self.width // 64, 8, 64) if self.eights else (self.count, rows, 64)
        return cast(Ref, plgpu.RefUnion(tiles, smem_ref((*outer, *copied), dtype, transforms=ROWS)))

    def views(self, smem: Ref) -> tuple[Ref, Ref]:
        """(the view of the scratch memory for wgmma and stores, the view for copies)."""
        return cast(tuple[Ref, Ref], tuple(cast(Any, smem))) if self.retiled else (smem, smem)

    def copies(self, rows: int) -> int:
        """The number of copies of a tile, which its barrier counts."""
        return rows // 8 * (self.width // 64) if self.eights else self.count

    def _each(self, gmem: Ref, smem: Ref, copy: Callable[[Ref, Ref], None]) -> None:
        if not self.eights:
            for c in range(self.count):
                copy(gmem if self.count == 1 else gmem.at[:, pl.ds(self.width * c, self.width)], smem.at[c])
            return

        def eight(i, _):
            r, c = lax.div(i, jnp.int32(self.width // 64)), lax.rem(i, jnp.int32(self.width // 64))
            copy(gmem.at[pl.ds(8 * r, 8), pl.ds(64 * c, 64)], smem.at[r, c])

        # The count is opaque: the unrolled loop takes more registers than a loading warpgroup has.
        lax.fori_loop(0, recomputed(smem.shape[0] * (self.width // 64)), eight, None)

    def load(self, gmem: Ref, smem: Ref, barrier: Barrier) -> None:
        """Starts the copies of a tile. gmem: [rows, columns] in device memory. smem: the tile's view for copies."""
        self._each(gmem, smem, lambda gmem, smem: plgpu.copy_gmem_to_smem(gmem, smem, barrier))

    def store(self, smem: Ref, gmem: Ref) -> None:
        """Starts the copies of a tile to device memory."""
        self._each(gmem, smem, lambda gmem, smem: plgpu.copy_smem_to_gmem(smem, gmem))

    def chunks(self, x: jax.Array) -> list[jax.Array]:
        """The chunks of an array's columns."""
        return [x] if self.count == 1 else [x[:, self.width * c : self.width * (c + 1)] for c in range(self.count)]

    def sixty_four(self, smem: Ref, start: int) -> Ref:
        """A ref of 64 columns of a tile, from column `start` on."""
        c, start = divmod(start, self.width)
        return smem.at[c, :, start : start + 64] if self.width > 64 else smem.at[c]


def has_odd_length(*arrays: jax.Array) -> bool:
    """Whether the length of an array [B, length, ...] is not a multiple of the 8 rows of a swizzle atom."""
    return any(x.shape[1] % 8 != 0 for x in arrays)


def pad_for_tma(x: jax.Array, head_dim_multiple: int = 64, *, any_rows: bool = False) -> jax.Array:
    """Pads [B, length, H, D] with zeros to whole swizzle atoms: D to 64 columns, and length to 8 rows unless any_rows.

    The zeros change no score, and their columns of the output are dropped. Kernels mask keys past the end.
    """
    length, columns = 0 if any_rows else -x.shape[1] % 8, -x.shape[3] % head_dim_multiple
    return jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, columns)]) if length or columns else x
