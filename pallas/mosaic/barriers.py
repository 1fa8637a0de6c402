"""Barriers between warpgroups, and counters in device memory that CTAs share."""

import dataclasses

from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Barrier, Index
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.mosaic.scratch import barrier_ref


class Barriers:
    """The barriers of a kernel (mbarriers in shared memory), which are found by name.

    wanted: for each name (number of barriers, arrivals that complete a phase of each barrier). merged: whether names
    with the same number of arrivals use parts of one array; otherwise each name has an array. A thread keeps the phases
    of an array in one register.
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
        """The arrays of barriers that pl.run_scoped should allocate, in an order that `of` relies on."""
        return [barrier_ref(num_arrivals=arrivals, num_barriers=n) for n, arrivals in self._arrays.values()]

    def of(self, scratch: list[Barrier], name: str) -> "BarrierSlice | None":
        """The barriers of a name: `.at[i]` of the result is barrier i. None if no barriers of this name were wanted.

        scratch: the arrays that pl.run_scoped allocated.
        """
        if name not in self._places:
            return None
        array, first = self._places[name]
        return BarrierSlice(scratch[list(self._arrays).index(array)], first)


@dataclasses.dataclass(frozen=True)
class BarrierSlice:
    """The barriers of an array from index `first` on. `.at[i]` is the array's barrier first + i."""

    array: Barrier
    first: int

    @property
    def at(self) -> "BarrierSlice":
        return self

    def __getitem__(self, index: Index) -> Barrier:
        is_only = isinstance(index, int) and self.array.shape == (1,)
        return self.array if is_only else self.array.at[self.first + index]


def named_barrier(kind: str, index: int, threads: int) -> None:
    """Issues the PTX instruction bar.sync or bar.arrive on a hardware barrier.

    kind: "sync" also waits, "arrive" does not. index: of the barrier, 0 to 15. threads: the number of threads that
    complete the barrier when they have issued either instruction; a multiple of 32. An mbarrier would be polled, which
    is slower.
    """

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def barrier(_):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], f"bar.{kind} {index}, {threads};", "", has_side_effects=True)

    barrier()


def group_barrier(members: int, first: int) -> None:
    """Waits for all threads of a group: the `members` neighbouring warpgroups that include the calling warpgroup.

    Group i consists of the warpgroups from i * members up to (i + 1) * members. first: the index of the hardware
    barrier of group 0; group i uses barrier first + i.
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
    """Waits for all threads of the cluster's CTAs. Their earlier stores to shared memory are visible afterwards."""

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def barrier(_):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        assembly = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], assembly, "~{memory}", has_side_effects=True)

    barrier()


def count_up(counter_ref, out_ref, first: int = 0, *, release: bool = False) -> None:
    """Adds 1 to a counter, atomically, and writes first + the counter's old value to out_ref[0].

    counter_ref: int32 [1] in device memory. out_ref: int32 [1] in shared memory. One thread of the calling warpgroup
    adds and writes; the caller has to make the write visible to other threads. release: whether threads that count
    later see the calling thread's earlier writes to device memory.
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
