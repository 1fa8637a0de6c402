"""The launch of a Mosaic kernel."""

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

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
    """plgpu.kernel over axes "cta" and "wg".

    cluster: the number of CTAs of a cluster, whose axis is CLUSTER; "cta" then counts the clusters.
    auto_barriers: whether Pallas inserts barriers around stores to shared memory. None: only with Lane semantics.
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
