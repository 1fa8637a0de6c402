"""The exchange of sums between the CTAs of a cluster: each CTA stores its sums in the other CTAs' shared memory."""

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.mosaic.launch import CLUSTER
from jax_kernels.pallas.mosaic.layouts import RegisterLayout

__all__ = ["rank", "send"]


def rank() -> jax.Array:
    """The index of the calling CTA in its cluster, a traced int32 from 0 on."""
    return lax.axis_index(CLUSTER)


def send(numbers: jax.Array, to: Ref, ctas: int, layout: RegisterLayout) -> None:
    """Stores a warpgroup's float32 values [4], one per warp, in the shared memory of all CTAs of its cluster.

    to: a ref [4] in this CTA's shared memory; the other CTAs get the values at the same address. ctas: the number of
    CTAs of the cluster. layout: the register layout of `numbers`, with one value per warp. The values are visible after
    cluster_barrier. All CTAs have started, because Mosaic waits for the start of all CTAs of a cluster.
    """

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=None)
    def store(_, numbers, to):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32 = ir.IntegerType.get_signless(32)
        (number,) = numbers.registers.reshape(-1)
        number = vector.extract(number, dynamic_position=[], static_position=[0])
        warp = arith.remui(utils.warp_idx(sync=False), utils.c(4, i32))
        lane = arith.remui(utils.thread_idx(), utils.c(32, i32))
        start = llvm.ptrtoint(i32, utils.memref_ptr(to))
        address = arith.addi(start, arith.muli(warp, utils.c(4, i32)))
        # Lane i stores to CTA i.
        assembly = f"""{{
            .reg .pred p;
            .reg .b32 there;
            setp.lt.u32 p, $1, {ctas};
            @p mapa.shared::cluster.u32 there, $0, $1;
            @p st.shared::cluster.f32 [there], $2;
        }}"""
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [address, lane, number], assembly, "r,r,f,~{memory}", has_side_effects=True)

    store(numbers, to)
