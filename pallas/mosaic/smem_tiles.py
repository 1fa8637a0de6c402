"""Tiles of 16-bit and 8-bit arrays in shared memory, and the copies between them and device memory."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_kernels.pallas.kernel_types import Barrier, Ref
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.layouts import ROWS, ROWS_8BIT, SWIZZLED_8BIT, swizzle
from jax_kernels.pallas.mosaic.scratch import smem_ref


class SmemTiles:
    """The layout in shared memory of 16-bit tiles [..., rows, columns], and the copies that load and store them.

    The memory has shape [..., chunks, rows, width]: the columns are cut into chunks of `width` neighbouring columns.
    Without any_rows, one chunk has all columns.

    columns: the number of columns of a tile.
    any_rows: whether the arrays in device memory may have a number of rows that is not a multiple of 8. If so, a chunk
      has 64 columns, and each copy takes one chunk.
    swizzled: whether wgmma reads the tiles; otherwise their rows are plain.
    atom: the tiles have the layout of tiles with this number of columns (layouts.swizzle); None is `columns`. With
      any_rows atoms have 64 columns.
    chunked: whether a chunk has 64 columns without any_rows, too.
    has_8_bits: whether the values have 8 bits. Then atoms have 128 columns, as have the tiles, with any_rows.

    The interpreter copies any number of rows without these limits.
    """

    def __init__(
        self,
        columns: int,
        any_rows: bool,
        *,
        swizzled: bool = True,
        atom: int | None = None,
        chunked: bool = False,
        has_8_bits: bool = False,
    ):
        self.any_rows = any_rows and swizzled
        self.transforms = swizzle(columns if atom is None else atom) if swizzled else ()
        self.copy_transforms = ROWS_8BIT if has_8_bits else ROWS
        if has_8_bits:
            self.transforms = SWIZZLED_8BIT
        self.width = columns if has_8_bits else 64 if self.any_rows or chunked else columns
        self.count = columns // self.width
        # Whether copies use other tiles of the memory than wgmma.
        self.retiled = self.any_rows and not interpreter.INTERPRETED

    def scratch(self, *shape: int, dtype: DTypeLike) -> Ref:
        """The request for the tiles' memory, for pl.run_scoped. shape: [..., rows], the shape without the columns."""
        *outer, rows = shape
        tiles = smem_ref((*outer, self.count, rows, self.width), dtype, transforms=self.transforms)
        if not self.retiled:
            return tiles
        copied = smem_ref((*outer, self.count, rows, self.width), dtype, transforms=self.copy_transforms)
        return cast(Ref, plgpu.RefUnion(tiles, copied))

    def views(self, smem: Ref) -> tuple[Ref, Ref]:
        """(the ref by which wgmma reads and stores write, the ref by which copies read and write) of the same memory.

        smem: the memory that pl.run_scoped allocated for `scratch`.
        """
        return cast(tuple[Ref, Ref], tuple(cast(Any, smem))) if self.retiled else (smem, smem)

    def _each(self, gmem: Ref, smem: Ref, copy: Callable[[Ref, Ref], None]) -> None:
        """Calls copy(part of gmem, part of smem) for each part of a tile that one copy takes."""
        for c in range(self.count):
            copy(gmem if self.count == 1 else gmem.at[:, pl.ds(self.width * c, self.width)], smem.at[c])

    def load(self, gmem: Ref, smem: Ref, barrier: Barrier) -> None:
        """Starts the copies of a tile from device to shared memory; `barrier` waits for them.

        gmem: [rows, columns]. smem: the tile's ref for copies, the second of `views`.
        """
        self._each(gmem, smem, lambda gmem, smem: plgpu.copy_gmem_to_smem(gmem, smem, barrier))

    def store(self, smem: Ref, gmem: Ref) -> None:
        """Starts the copies of a tile from shared to device memory.

        smem: the tile's ref for copies, the second of `views`. gmem: [rows, columns].
        """
        self._each(gmem, smem, lambda gmem, smem: plgpu.copy_smem_to_gmem(smem, gmem))

    def chunks(self, x: jax.Array) -> list[jax.Array]:
        """Cuts an array [rows, columns] in registers into its chunks of columns, each [rows, width]."""
        return [x] if self.count == 1 else [x[:, self.width * c : self.width * (c + 1)] for c in range(self.count)]

    def columns(self, smem: Ref, start: int, count: int = 64) -> Ref:
        """The part of a tile in shared memory that has `count` columns from `start` on. smem: [chunks, rows, width]."""
        c, start = divmod(start, self.width)
        return smem.at[c, :, start : start + count] if self.width > count else smem.at[c]


def has_odd_length(*arrays: jax.Array) -> bool:
    """Whether an array [B, length, ...] has a length that is not a multiple of 8, the rows of a swizzle atom."""
    return any(x.shape[1] % 8 != 0 for x in arrays)


def pad_for_tma(x: jax.Array, head_dim_multiple: int = 64, *, any_rows: bool = False) -> jax.Array:
    """Pads [B, length, H, D] with zeros: D to a multiple of head_dim_multiple, and length to a multiple of 8.

    any_rows: leaves the length as it is. A swizzle atom has 8 rows of 64 values. The zeros change no score, and their
    columns of the output are dropped. Kernels mask keys past the end.
    """
    length, columns = 0 if any_rows else -x.shape[1] % 8, -x.shape[3] % head_dim_multiple
    return jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, columns)]) if length or columns else x
