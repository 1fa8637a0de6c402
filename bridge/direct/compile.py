"""Compiles JAX functions for a GPU without running them, and reads the launch chains of their executables."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_kernels.bridge.direct import program_cache
from jax_kernels.bridge.direct.chain import LaunchChain, NotDirectError
from jax_kernels.bridge.direct.executable import chain_of
from jax_kernels.bridge.interop.donated_outputs import JaxFunction
from jax_kernels.ops.sharding.partitioning import on_one_device

__all__ = ["Target", "compile_chain"]

_KERNELS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")
# Operations that XLA passes to cuBLAS or cuDNN, or autotunes on a GPU. A compilation for an absent GPU cannot autotune.
_LIBRARIES = ("stablehlo.dot", "stablehlo.convolution", "stablehlo.custom_call", "stablehlo.while")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The facts of a GPU that XLA compiles for. It need not be in this machine.

    kind: JAX's device_kind, such as "NVIDIA H200". A core is an SM. Memory sizes are in bytes, memory_bandwidth in
    bytes per second, registers in 32-bit registers.
    """

    kind: str
    compute_capability: tuple[int, int]
    core_count: int
    shared_memory_per_block: int
    shared_memory_per_core: int
    threads_per_core: int
    registers_per_core: int
    l2_cache: int
    total_memory: int
    memory_bandwidth: int
    clock_ghz: float

    @property
    def description(self) -> str:
        """The GPU as the text of XLA's GpuTargetConfigProto, for jax.experimental.topologies."""
        major, minor = self.compute_capability
        features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return f"""gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
          shared_memory_per_core: {self.shared_memory_per_core} threads_per_core_limit: {self.threads_per_core}
          core_count: {self.core_count} fpus_per_core: {64 if (major, minor) == (8, 0) else 128}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: {self.memory_bandwidth} l2_cache_size: {self.l2_cache}
          clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.total_memory}
          shared_memory_per_block_optin: {self.shared_memory_per_block}
          cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
          registers_per_core_limit: {self.registers_per_core} registers_per_block_limit: 65536
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{self.kind}"
          driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
          dnn_version: "9.19.0"
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 19 }} device_description_str: "{self.kind}"
        """


@dataclasses.dataclass(frozen=True)
class _Device(AbstractDevice):
    """JAX's AbstractDevice with a compute_capability, such as "9.0", from which Mosaic reads the architecture."""

    compute_capability: str = ""


def compile_chain(
    target: Target, function: JaxFunction, specs: Sequence[jax.ShapeDtypeStruct], key: str | None = None
) -> LaunchChain:
    """The launch chain of a JAX function, compiled for a GPU.

    function: takes arrays, and returns a flat sequence of arrays. specs: the shape and dtype of each argument. key: of
    call_key, or None. If any process compiled an equal program before, its chain is read from disk: see program_cache.
    With a key, the function is not even lowered then.

    Raises NotDirectError if the function cannot be lowered, or if its program is not only kernels, fills and copies. A
    function without a Mosaic or Triton kernel raises before it is compiled if it has an operation that XLA passes to a
    library or autotunes, such as a matmul, or a loop.
    """
    if key is not None and (known := program_cache.linked(key)) is not None:
        return known
    topology = topologies.get_topology_desc(platform="cuda", target_config=target.description, topology="1x1x1")
    replicated = NamedSharding(Mesh(np.array(topology.devices[:1]), ("device",)), PartitionSpec())
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated) for x in specs]
    device = _Device(
        device_kind=target.kind,
        num_cores=target.core_count,
        platform="gpu",
        compute_capability="{}.{}".format(*target.compute_capability),
    )
    # keep_unused makes every argument a parameter of the executable.
    flat = jax.jit(lambda *arrays: tuple(function(*arrays)), keep_unused=True)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), on_one_device():
        try:
            lowered = flat.lower(*placed)
        except Exception as error:  # the caller's error: the DLPack route raises it again
            raise NotDirectError(f"the function cannot be lowered: {error}") from error
    text = lowered.as_text()
    if not any(kernel in text for kernel in _KERNELS) and any(name in text for name in _LIBRARIES):
        raise NotDirectError("the plan has no kernel of this library")
    if program_cache.folder() is None:
        return chain_of(lowered.compile(), specs, lowered.out_info)
    by_text = program_cache.key_of(target.description, program_cache.program_text(lowered, text))
    chain = program_cache.load(by_text)
    if chain is None:
        chain = chain_of(lowered.compile(), specs, lowered.out_info)
        program_cache.store(by_text, chain)
    if key is not None:
        program_cache.link(key, by_text)
    return chain
