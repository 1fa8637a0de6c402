"""The launch of a Mosaic kernel."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.ref import AbstractRef

from jax_kernels.pallas.kernel_types import Index
from jax_kernels.tracing.manual_axes import as_varying, varying_axes

CLUSTER = "cluster"
ALIGNMENT = 256  # bytes: Mosaic refuses to launch a kernel with arrays at other addresses


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

    def run(*arguments: Any) -> Any:
        axes = varying_axes(arguments)
        if not interpret:
            arguments = jax.tree.map(_aligned, arguments)
        results = as_varying(kernel(*arguments), axes)
        return results if interpret else jax.tree.map(_aligned, results)

    return run


def _aligned(x: Any) -> Any:
    """The same array, which XLA stores at a multiple of ALIGNMENT where it is a slice of another array.

    XLA lets a kernel read a contiguous slice in the array that it is a slice of, and write an update into the array
    that is updated, without a copy and at any address. It does so neither through an optimization barrier, nor for
    refs. The barrier costs nothing where there is no slice, but a copy where a slice is aligned. So arrays whose slices
    are aligned anyway, such as the weights of a layer in a scan over layers, get none.
    """
    is_ref = isinstance(jax.typeof(x), AbstractRef)
    return x if is_ref or slices_are_aligned(x.shape, x.dtype) else lax.optimization_barrier(x)


def slices_are_aligned(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether contiguous slices with this shape begin at multiples of ALIGNMENT bytes in their arrays.

    A contiguous slice begins at a multiple of its first row: of the axes after the first one that is longer than 1. Not
    found are slices whose array had shorter rows, such as a matrix that is a reshaped part of a vector.
    """
    sizes = [size for size in shape if size != 1]
    return math.prod(sizes[1:]) * jnp.dtype(dtype).itemsize % ALIGNMENT == 0


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
