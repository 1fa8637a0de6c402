"""The quantization of an operand of an 8-bit matmul with a scale for each row: a kernel, or two passes by XLA."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels import dispatch
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.pallas.matmul.passes.quantize_rows import quantize_rows
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.quantization import FORMATS, QuantizedArray, quantize

__all__ = ["quantized_rows"]

ROUNDS_ONCE = (9, 0)  # Triton's conversion of float32 to 8 bits rounds twice below this compute capability


def quantized_rows(call: PlannedCall, x: Any, format: str = "e4m3") -> QuantizedArray:
    """quantize(x, format, scaling="row") of x [..., K].

    One kernel reads x once if the call runs by kernels. If XLA may shard x over devices, XLA quantizes it.
    """
    if not _has_kernel(call, x):
        return quantize(x, format, scaling="row")
    dtype = jnp.dtype(FORMATS[format])
    found = quantize_rows(x.reshape(-1, x.shape[-1]), dtype, interpret=call.interpret)
    return QuantizedArray(values=found.values.reshape(x.shape), scale=found.scale.reshape(x.shape[:-1]), scaling="row")


def _has_kernel(call: PlannedCall, x: jax.Array) -> bool:
    """Whether one kernel can quantize x.

    It needs Pallas-Triton, a GPU that rounds float32 to 8 bits once, and an x of static size that is not empty and has
    8-bit values that Triton can address.
    """
    if call.implementation == "xla" or not backend.AVAILABLE or is_partitioned():
        return False
    if not all(isinstance(size, int) and size > 0 for size in x.shape) or not reaches(x.size, itemsize=1):
        return False
    return call.interpret or (dispatch.target_device(x).compute_capability or (0, 0)) >= ROUNDS_ONCE
