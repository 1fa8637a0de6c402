"""What the Hopper kernels share: layouts, shared-memory transforms, and small helpers."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA = plgpu.Layout.WGMMA
COLUMN = plgpu.Layout.WGMMA.reduce(0)
# 16-bit tiles as wgmma reads them.
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# float32 tiles as the tensor memory accelerator adds them.
SWIZZLED_F32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]

# Whether JAX's interpreter can run these kernels. As it comes it cannot; tests that complete it say so here.
INTERPRETED = False


def named_barrier(kind: str, index: int, threads: int) -> None:
    """bar.sync or bar.arrive on a hardware barrier. It is cheaper than an mbarrier, which would be polled."""

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def barrier(_):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], f"bar.{kind} {index}, {threads};", "", has_side_effects=True)

    barrier()


def pad_for_tma(x: jax.Array, head_dim_multiple: int = 64) -> jax.Array:
    """[B, length, H, D] with zeros up to whole swizzle atoms: 8 rows, and columns of 64.

    The zeros change no score and no column that counts; keys past the end are left to the predicate.
    """
    length, columns = -x.shape[1] % 8, -x.shape[3] % head_dim_multiple
    return jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, columns)]) if length or columns else x
