"""The layouts of tiles in registers and shared memory that wgmma and the tensor memory accelerator take."""

from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
PART = 8  # neighbouring columns of a WGMMA array, of which a thread has two
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # a number for each column of a tile
ROW = plgpu.Layout.WGMMA.reduce(1)
# 16-bit tiles as wgmma reads them: of 64 columns, and of 32.
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
SWIZZLED_32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))  # type: ignore[abstract]
SWIZZLED_8BIT = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# The same bytes where 64 columns are all, for copies of any number of rows: the tensor memory accelerator takes tiles
# of 8 rows from arrays of whole ones alone.
ROWS = (plgpu.TilingTransform((64,)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# float32 tiles as the tensor memory accelerator adds them.
SWIZZLED_F32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
