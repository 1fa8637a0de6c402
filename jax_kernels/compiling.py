"""The Hopper kernels of a program, compiled side by side before XLA, which compiles them one after the other."""

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir as mlir_ir

__all__ = ["compile_kernels"]

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


def compile_kernels(lowered: jax.stages.Lowered, *, device: Any = None) -> int:
    """Compiles the Hopper kernels of a program on all of the host's cores, so that `lowered.compile()` is faster.

    Mosaic keeps what it has compiled in this process. XLA asks for the kernels of a program one after the other: those
    of a decoder's training step take more than half of the time that it takes to compile. Nothing but time changes::

        lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
        compile_kernels(lowered)
        step = lowered.compile()  # or call the function that jax.jit gave: it has the same program

    Args:
      lowered: a lowered program, for GPUs or not.
      device: a device of the program's kind. The first of this process's where None.

    Returns:
      How many kernels there were: 0 on devices other than Hopper GPUs. Kernels that devices share out are made while
      XLA compiles, and are not among them.

    A kernel that cannot be compiled alone is left to `lowered.compile()`, with a RuntimeWarning that says why.
    """
    kernels = _kernels_of(lowered)
    if not kernels:
        return 0
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0] if device is None else device)
    with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1)) as pool:
        failed = [error for error in pool.map(lambda kernel: _compile(kernel, where), kernels) if error is not None]
    if failed:
        warnings.warn(
            f"compile_kernels: {len(failed)} of {len(kernels)} kernels are left to XLA: {failed[0]}",
            RuntimeWarning,
            stacklevel=2,
        )
    return len(kernels)


def _kernels_of(lowered: jax.stages.Lowered) -> list[Any]:
    """The calls of a program's kernels, one of each kernel."""
    found: dict[bytes, Any] = {}
    module: Any = lowered.compiler_ir("stablehlo")
    for call in _custom_calls(module.operation):
        if call.attributes["call_target_name"].value == _CALL and _CONFIG in call.attributes:
            found.setdefault(call.attributes[_CONFIG][_HASH].value_bytes, call)
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


def _facts(kind: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype of an array's type in a program."""
    kind = ir.RankedTensorType(kind)
    return tuple(kind.shape), _DTYPES[str(kind.element_type)]


def _compile(call: Any, where: jax.sharding.Sharding) -> Exception | None:
    """Compiles a program of one kernel. Returns the error that this raised, or None."""
    try:
        attributes = {entry.name: _plain(entry.attr) for entry in call.attributes[_CONFIG]}
        arguments, results = (
            [jax.ShapeDtypeStruct(*_facts(x.type), sharding=where) for x in values]
            for values in (call.operands, call.results)
        )
        run = jax.ffi.ffi_call(_CALL, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results])
        jax.jit(lambda *arrays: run(*arrays, **attributes)).lower(*arguments).compile()
    except Exception as error:  # whatever JAX's internals raise, the program is compiled without this
        return error
    return None
