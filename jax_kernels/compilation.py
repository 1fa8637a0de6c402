"""Compiles a program's Hopper kernels in parallel, and chooses XLA's options for many GPUs."""

import contextlib
import dataclasses
import functools
import gc
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir as mlir_ir

__all__ = ["compile_kernels", "compiler_options", "paused_collections"]

ir: Any = mlir_ir  # type checkers do not see its classes
_CALL = "mosaic_gpu_v2"  # JAX's custom call of a Mosaic kernel
_DTYPES: dict[str, Any] = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "f32": jnp.float32,
    "f8E4M3FN": jnp.float8_e4m3fn,
    "f8E5M2": jnp.float8_e5m2,
    "i1": jnp.bool_,
    "i8": jnp.int8,
    "i16": jnp.int16,
    "i32": jnp.int32,
    "ui8": jnp.uint8,
    "ui16": jnp.uint16,
    "ui32": jnp.uint32,
}
_HASH, _CONFIG = "kernel_hash", "mhlo.backend_config"
# XLA copies from GPU to GPU instead of NCCL's kernels: one option for all-to-alls, one for permutes.
_BY_COPIES = {"xla_gpu_use_memcpy_local_p2p": True, "xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


def compiler_options(mesh: jax.sharding.Mesh, *, triton_products: bool = True) -> dict[str, bool | str]:
    """Options for `jax.jit(compiler_options=...)` that speed up programs over the devices of a mesh.

    If the mesh has several GPUs, all of this process, permutes and all-to-alls are copies from GPU to GPU. A GPU's copy
    engines make these copies, and leave all SMs to the kernels that run meanwhile; NCCL's kernels occupy SMs. Only the
    time changes::

        step = jax.jit(step, compiler_options=compiler_options(mesh))

    Args:
      mesh: the devices.
      triton_products: whether XLA compiles and times Triton kernels, as well as cuBLAS's, for its own matmuls. With
        False a decoder's training step compiled 1 to 2 s faster on an H100, and ran equally fast.

    Returns:
      A dict from names of XLA's options to values. It is empty on other devices, and lacks options that this version
      of XLA lacks. On one GPU, and on GPUs of several processes, it has no options for copies.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return {}
    wanted: dict[str, Any] = {} if triton_products else dict(_WITHOUT_TRITON)
    if mesh.size > 1 and not mesh.is_multi_process:
        wanted |= _BY_COPIES
    return {name: value for name, value in wanted.items() if _is_option(name, value)}


@functools.cache
def _is_option(name: str, value: bool | str) -> bool:
    """Whether XLA has the option and accepts the value."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True


def compile_kernels(lowered: jax.stages.Lowered, *, device: jax.Device | None = None, wait: bool = True) -> int:
    """Compiles the Hopper kernels of a program on all of the host's cores, so that `lowered.compile()` is faster.

    Mosaic caches compiled kernels in this process. XLA asks for the kernels of a program one after the other: the
    kernels of a decoder's training step take more than half of its compile time. Only the time changes::

        lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
        compile_kernels(lowered, wait=False)
        step = lowered.compile()  # or call the function that jax.jit gave: it has the same program

    Args:
      lowered: a lowered program, for GPUs or not.
      device: a device of the program's kind. None is the first device of this process.
      wait: whether to return only when all kernels are compiled. If False, threads compile them in the background: XLA
        runs its passes over the program before it asks for kernels. XLA itself compiles a kernel that is not ready.

    Returns:
      The number of kernels: 0 on devices other than Hopper GPUs. Kernels that are sharded over devices are made while
      XLA compiles, and are not counted.

    A kernel that cannot be compiled separately is left to `lowered.compile()`, with a RuntimeWarning that says why.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    kernels = _kernels_of(module.operation)
    if not kernels:
        return 0
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0] if device is None else device)
    if wait:
        _compile_all(kernels, where)
    else:
        threading.Thread(target=_compile_all, args=(kernels, where), name="compile_kernels").start()
    return len(kernels)


def _compile_all(kernels: Sequence["_Kernel | Exception"], where: jax.sharding.Sharding) -> None:
    """Compiles kernels in parallel for the devices of `where`. Warns (RuntimeWarning) if some cannot be compiled.

    kernels: an exception among them is a kernel that could not be read, which counts as not compiled.
    """
    attempt = lambda kernel: kernel if isinstance(kernel, Exception) else kernel.compile(where)
    with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1)) as pool:
        failed = [error for error in pool.map(attempt, kernels) if error is not None]
    if failed:
        warnings.warn(
            f"compile_kernels: {len(failed)} of {len(kernels)} kernels are left to XLA: {failed[0]}",
            RuntimeWarning,
            stacklevel=3,
        )


@contextlib.contextmanager
def paused_collections() -> Iterator[None]:
    """A context manager that pauses Python's garbage collector in all threads.

    Tracing and lowering a decoder's step makes millions of objects. The collector takes a tenth of this time and finds
    almost no object to free. It collects the garbage after the pause.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """A call of a Mosaic kernel in a program. attributes: of the call, including its Mosaic module, by name."""

    attributes: dict[str, bytes | bool]
    arguments: list[jax.ShapeDtypeStruct]
    results: list[jax.ShapeDtypeStruct]

    @classmethod
    def of(cls, call: Any) -> "_Kernel | Exception":
        """The kernel of a custom call in a program, or the exception if the call cannot be read."""
        try:
            return cls(
                attributes={entry.name: _plain(entry.attr) for entry in call.attributes[_CONFIG]},
                arguments=[_array(x.type) for x in call.operands],
                results=[_array(x.type) for x in call.results],
            )
        except (KeyError, TypeError, ValueError) as error:
            return error

    def compile(self, where: jax.sharding.Sharding) -> Exception | None:
        """Compiles a program that has only this kernel, which fills Mosaic's cache. Returns an exception if one was
        raised.
        """
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x in self.arguments]
        run = jax.ffi.ffi_call(_CALL, self.results)
        try:
            jax.jit(lambda *arrays: run(*arrays, **self.attributes)).lower(*placed).compile()
        except Exception as error:  # after any error of JAX's internals, XLA compiles the kernel itself
            return error
        return None


def _kernels_of(operation: Any) -> list[_Kernel | Exception]:
    """The distinct kernels that an MLIR operation and its regions call, or an exception for each that cannot be read.

    Threads can compile them without the program.
    """
    found: dict[bytes, Any] = {}
    for call in _custom_calls(operation):
        if call.attributes["call_target_name"].value == _CALL and _CONFIG in call.attributes:
            name = call.attributes[_CONFIG][_HASH].value_bytes
            found[name] = found.get(name) or _Kernel.of(call)
    return list(found.values())


def _custom_calls(operation: Any) -> Iterator[Any]:
    """Yields all stablehlo.custom_call operations inside an MLIR operation, at any depth."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == "stablehlo.custom_call":
                    yield inner.operation
                else:
                    yield from _custom_calls(inner.operation)


def _plain(attribute: Any) -> bytes | bool:
    """The value of an MLIR attribute of a kernel's call. Raises TypeError if it is neither text nor a bool."""
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes
    if isinstance(attribute, ir.BoolAttr):
        return attribute.value
    raise TypeError(f"its call has an attribute of type {type(attribute).__name__}")


def _array(kind: Any) -> jax.ShapeDtypeStruct:
    """The ShapeDtypeStruct of an MLIR tensor type."""
    kind = ir.RankedTensorType(kind)
    return jax.ShapeDtypeStruct(tuple(kind.shape), _DTYPES[str(kind.element_type)])
