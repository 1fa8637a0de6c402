"""The launch of a Mosaic kernel."""

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Index
from jax_kernels.tracing.manual_axes import as_varying, varying_axes

CLUSTER = "cluster"


def launch(
    entry: Callable[..., None],
    name: str,
    *,
    out_type: Any,
    ctas: int,
    warpgroups: int,
    semantics: plgpu.LoweringSemantics,
    interpret: bool,
    auto_barriers: bool | None = None,
    cluster: int = 1,
    **params: Any,
) -> Callable[..., Any]:
    """Returns a function that launches a Mosaic kernel with its arguments, and returns the kernel's results.

    entry: the kernel's body. Each warpgroup calls it with refs of the arguments and of the results in device memory.
      lax.axis_index("cta") is the index of its CTA, lax.axis_index("wg") of the warpgroup in the CTA.
    name: of the kernel, as profilers show it.
    out_type: a list or tree of the results' shapes and dtypes.
    ctas: the number of CTAs. warpgroups: the number of warpgroups of a CTA.
    semantics: whether Pallas lowers array operations for each warpgroup or for each lane.
    interpret: whether to run in the interpreter of Mosaic kernels.
    auto_barriers: whether Pallas inserts barriers around stores to shared memory. None: only with Lane semantics.
    cluster: the number of CTAs of a cluster. If it is more than 1, the axis CLUSTER is the index of the CTA in its
      cluster, and "cta" is the index of the cluster.
    params: further fields of plgpu.CompilerParams.

    Inside jax.shard_map the results vary over the mesh axes that the arguments vary over.
    """
    if auto_barriers is None:
        auto_barriers = semantics == plgpu.LoweringSemantics.Lane
    kernel = plgpu.kernel(
        entry,
        out_type=out_type,
        grid=(ctas // cluster,),
        grid_names=("cta",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=(CLUSTER,) if cluster > 1 else (),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=semantics, unsafe_no_auto_barriers=not auto_barriers, **params
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    return lambda *arguments: as_varying(kernel(*arguments), varying_axes(arguments))


def run_warpgroup(
    wg: Index,
    compute_wgs: int,
    registers: tuple[int, int],
    memory: Callable[[], None],
    compute: Callable[[], None],
) -> None:
    """Runs memory() in the last warpgroup of a CTA, the memory warpgroup, and compute() in the compute warpgroups.

    wg: the index of the calling warpgroup. compute_wgs: the number of compute warpgroups. registers: of a thread of a
    compute warpgroup, and of the memory warpgroup.
    """
    of_compute, of_memory = registers

    @pl.when(wg == compute_wgs)
    def _memory():
        plgpu.set_max_registers(of_memory, action="decrease")
        memory()

    @pl.when(wg < compute_wgs)
    def _compute():
        plgpu.set_max_registers(of_compute, action="increase")
        compute()
