"""Layouts of tiles in registers and shared memory for wgmma and the tensor memory accelerator."""

import math
from typing import TYPE_CHECKING

from jax.experimental.pallas import mosaic_gpu as plgpu

if TYPE_CHECKING:  # JAX has no public type for plgpu.Layout and its reductions
    from jax._src.pallas.mosaic_gpu.core import SomeLayout as RegisterLayout
else:
    RegisterLayout = plgpu.Layout

type Transforms = tuple[plgpu.Transform, ...]

WGMMA = plgpu.Layout.WGMMA
PART = 8  # neighbouring columns of a WGMMA array in which a thread has two
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value per column of a tile
ROW = plgpu.Layout.WGMMA.reduce(1)
# 16-bit tiles as wgmma reads them, with 64, 32 and 16 columns.
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
SWIZZLED_32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))  # type: ignore[abstract]
SWIZZLED_16 = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32))  # type: ignore[abstract]
SWIZZLED_8BIT = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# The same bytes for tiles of 64 columns, for copies of any number of rows: the tensor memory accelerator takes tiles of
# 8 rows only from arrays whose rows are a multiple of 8.
ROWS = (plgpu.TilingTransform((64,)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
ROWS_8BIT = (plgpu.TilingTransform((128,)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# float32 tiles, as the tensor memory accelerator adds them, with 32 and with 16 columns.
SWIZZLED_F32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
SWIZZLED_F32_16 = (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(64))  # type: ignore[abstract]


def swizzle(columns: int) -> Transforms:
    """The layout of 16-bit tiles with this number of columns, in which wgmma reads any slice of 64, 32 or 16 columns.

    A tile is a row of swizzle atoms, of the widest of 64, 32 and 16 columns that divides `columns`. wgmma takes both
    operands in atoms of one width.
    """
    return {64: SWIZZLED, 32: SWIZZLED_32, 16: SWIZZLED_16}[math.gcd(columns, 64)]


def swizzle_float32(columns: int) -> Transforms:
    """The layout of float32 tiles with this number of columns, as the tensor memory accelerator adds them."""
    return SWIZZLED_F32 if columns % 32 == 0 else SWIZZLED_F32_16
