"""Barriers between warpgroups, and counters in device memory that CTAs share."""

import dataclasses

from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Barrier, Index
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.scratch import barrier_ref


class Barriers:
    """A kernel's barriers by name. wanted: for each name (number of barriers, arrivals per barrier).

    merged: barriers with the same number of arrivals share an array. A thread keeps an array's phases in one register.
    """

    def __init__(self, wanted: dict[str, tuple[int, int]], *, merged: bool):
        self._places: dict[str, tuple[int | str, int]] = {}
        self._arrays: dict[int | str, tuple[int, int]] = {}
        for name, (count, arrivals) in wanted.items():
            array: int | str = arrivals if merged else name
            first, _ = self._arrays.get(array, (0, 0))
            self._places[name] = array, first
            self._arrays[array] = first + count, arrivals

    def scratch(self) -> list[Barrier]:
        """The arrays of barriers, for pl.run_scoped."""
        return [barrier_ref(num_arrivals=arrivals, num_barriers=n) for n, arrivals in self._arrays.values()]

    def of(self, scratch: list[Barrier], name: str) -> "BarrierSlice | None":
        """The barriers of a name: `.at[i]` is barrier i. None if no barriers of this name were wanted."""
        if name not in self._places:
            return None
        array, first = self._places[name]
        return BarrierSlice(scratch[list(self._arrays).index(array)], first)


@dataclasses.dataclass(frozen=True)
class BarrierSlice:
    """A slice of a barrier array, starting at `first`."""

    array: Barrier
    first: int

    @property
    def at(self) -> "BarrierSlice":
        return self

    def __getitem__(self, index: Index) -> Barrier:
        is_only = isinstance(index, int) and self.array.shape == (1,)
        return self.array if is_only else self.array.at[self.first + index]


def named_barrier(kind: str, index: int, threads: int) -> None:
    """Issues bar.sync or bar.arrive on a hardware barrier. An mbarrier would be polled, which is slower."""

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def barrier(_):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], f"bar.{kind} {index}, {threads};", "", has_side_effects=True)

    barrier()


def group_barrier(members: int, first: int) -> None:
    """Waits for all threads of the calling warpgroup's group of `members` neighbouring warpgroups.

    first: the hardware barrier of the first group.
    """

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def barrier(_):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        i32 = ir.IntegerType.get_signless(32)
        group = arith.divui(utils.warpgroup_idx(sync=False), utils.c(members, i32))
        index = arith.addi(group, utils.c(first, i32))
        assembly = f"bar.sync $0, {members * utils.WARPGROUP_SIZE};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [index], assembly, "r,~{memory}", has_side_effects=True)

    barrier()


def cluster_barrier() -> None:
    """Waits for all threads of the cluster, and for their stores to shared memory."""

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def barrier(_):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        assembly = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], assembly, "~{memory}", has_side_effects=True)

    barrier()


def count_up(counter_ref, out_ref, first: int = 0, *, release: bool = False) -> None:
    """Adds 1 to a counter [1] in device memory. out_ref[0] becomes first + the counter's old value.

    release: threads that count later see the calling thread's earlier writes to device memory.
    """
    if interpreter.INTERPRETED:
        count = counter_ref[0]
        counter_ref[0] = count + 1
        out_ref[0] = count + first
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=None)
    def fetch(_, counter, out):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, memref

        i32 = ir.IntegerType.get_signless(32)
        ordering = llvm.AtomicOrdering.acq_rel if release else llvm.AtomicOrdering.monotonic
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            count = llvm.atomicrmw(llvm.AtomicBinOp.add, utils.memref_ptr(counter), utils.c(1, i32), ordering)
            memref.store(arith.addi(count, utils.c(first, i32)), out, [utils.c(0, ir.IndexType.get())])

    fetch(counter_ref, out_ref)
