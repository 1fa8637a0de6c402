"""How a program is compiled: its Hopper kernels side by side, and XLA's options for many GPUs."""

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

ir: Any = mlir_ir  # whose classes type checkers do not see
_CALL = "mosaic_gpu_v2"  # the custom call of JAX's that is a Mosaic kernel
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
# XLA copies from GPU to GPU in place of NCCL's kernels: of all-to-alls, and of permutes.
_BY_COPIES = {"xla_gpu_use_memcpy_local_p2p": True, "xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


def compiler_options(mesh: jax.sharding.Mesh, *, triton_products: bool = True) -> dict[str, bool | str]:
    """Options for `jax.jit(compiler_options=...)` of programs over the devices of a mesh, which make them faster.

    Where the mesh has several GPUs, all of this process, permutes and all-to-alls are copies from GPU to GPU. A GPU's
    copy engines make them, and leave its multiprocessors to the kernels beside them; NCCL's kernels take some. Nothing
    but time changes::

        step = jax.jit(step, compiler_options=compiler_options(mesh))

    Args:
      mesh: the devices.
      triton_products: whether XLA compiles and times Triton kernels for the products that it makes, beside cuBLAS's.
        With False a decoder's training step compiled 1 to 2 s faster on an H100, and took as long.

    Returns:
      A dict by the names of XLA's options. Empty on other devices, and where this version of XLA has no such option.
      Those of copies are left out on one GPU, and on GPUs of several processes.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return {}
    wanted: dict[str, Any] = {} if triton_products else dict(_WITHOUT_TRITON)
    if mesh.size > 1 and not mesh.is_multi_process:
        wanted |= _BY_COPIES
    return {name: value for name, value in wanted.items() if _is_option(name, value)}


@functools.cache
def _is_option(name: str, value: bool | str) -> bool:
    """Whether XLA has an option, and the option such a value."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True


def compile_kernels(lowered: jax.stages.Lowered, *, device: jax.Device | None = None, wait: bool = True) -> int:
    """Compiles the Hopper kernels of a program on all of the host's cores, so that `lowered.compile()` is faster.

    Mosaic keeps what it has compiled in this process. XLA asks for the kernels of a program one after the other: those
    of a decoder's training step take more than half of the time that it takes to compile. Nothing but time changes::

        lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
        compile_kernels(lowered, wait=False)
        step = lowered.compile()  # or call the function that jax.jit gave: it has the same program

    Args:
      lowered: a lowered program, for GPUs or not.
      device: a device of the program's kind. The first of this process's where None.
      wait: whether to return when all are compiled. Else threads compile them beside what comes next: XLA's passes over
        the program come before it asks for kernels. A kernel that it asks for too early it compiles itself.

    Returns:
      How many kernels there were: 0 on devices other than Hopper GPUs. Kernels that devices share out are made while
      XLA compiles, and are not among them.

    A kernel that cannot be compiled alone is left to `lowered.compile()`, with a RuntimeWarning that says why.
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
    """Compiles kernels side by side, and warns of those that cannot be."""
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
    """Python's garbage collector rests meanwhile, in all threads.

    To trace and lower a decoder's step makes millions of objects, among which it finds next to none to free: a tenth of
    the time. What they leave it finds later.
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
    """A kernel's call. attributes: of the call, its Mosaic module among them."""

    attributes: dict[str, bytes | bool]
    arguments: list[jax.ShapeDtypeStruct]
    results: list[jax.ShapeDtypeStruct]

    @classmethod
    def of(cls, call: Any) -> "_Kernel | Exception":
        """That of a call in a program; or why it cannot be read."""
        try:
            return cls(
                attributes={entry.name: _plain(entry.attr) for entry in call.attributes[_CONFIG]},
                arguments=[_array(x.type) for x in call.operands],
                results=[_array(x.type) for x in call.results],
            )
        except (KeyError, TypeError, ValueError) as error:
            return error

    def compile(self, where: jax.sharding.Sharding) -> Exception | None:
        """Compiles a program of the kernel alone. Returns the error that this raised, or None."""
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x in self.arguments]
        run = jax.ffi.ffi_call(_CALL, self.results)
        try:
            jax.jit(lambda *arrays: run(*arrays, **self.attributes)).lower(*placed).compile()
        except Exception as error:  # whatever JAX's internals raise, the program is compiled without this
            return error
        return None


def _kernels_of(operation: Any) -> list[_Kernel | Exception]:
    """One of each kernel that a program calls. Threads need nothing of the program."""
    found: dict[bytes, Any] = {}
    for call in _custom_calls(operation):
        if call.attributes["call_target_name"].value == _CALL and _CONFIG in call.attributes:
            name = call.attributes[_CONFIG][_HASH].value_bytes
            found[name] = found.get(name) or _Kernel.of(call)
    return list(found.values())


def _custom_calls(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == "stablehlo.custom_call":
                    yield inner.operation
                else:
                    yield from _custom_calls(inner.operation)


def _plain(attribute: Any) -> bytes | bool:
    """The value of an attribute of a kernel's call. Raises TypeError for one that is neither text nor a bool."""
    if isinstance(attribute, ir.StringAttr):
        return attribute.value_bytes
    if isinstance(attribute, ir.BoolAttr):
        return attribute.value
    raise TypeError(f"its call has an attribute of type {type(attribute).__name__}")


def _array(kind: Any) -> jax.ShapeDtypeStruct:
    """An array of a type in a program."""
    kind = ir.RankedTensorType(kind)
    return jax.ShapeDtypeStruct(tuple(kind.shape), _DTYPES[str(kind.element_type)])
