"""The quantization of an operand of an 8-bit matmul with a scale for each row: a kernel, or two passes by XLA."""

from collections.abc import Sequence
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

__all__ = ["quantized_rows", "quantized_together"]

ROUNDS_ONCE = (9, 0)  # Triton's conversion of float32 to 8 bits rounds twice below this compute capability


def quantized_rows(call: PlannedCall, x: Any, format: str = "e4m3") -> QuantizedArray:
    """quantize(x, format, scaling="row") of x [..., K].

    One kernel reads x once if the call runs by kernels. If XLA may shard x over devices, XLA quantizes it.
    """
    (found,) = quantized_together(call, [x], format)
    return found


def quantized_together(call: PlannedCall, arrays: Sequence[Any], format: str = "e4m3") -> list[QuantizedArray]:
    """The arrays [..., K] of one shape in 8 bits. A scale belongs to a row of all arrays.

    Equivalent to quantized_rows of their concatenation along K.
    """
    shape = arrays[0].shape
    if not _has_kernel(call, arrays):
        found = quantize(arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, -1), format, scaling="row")
        starts = [i * shape[-1] for i in range(len(arrays))]
        values, scale = [found.values[..., start : start + shape[-1]] for start in starts], found.scale
    else:
        given, dtype = [x.reshape(-1, shape[-1]) for x in arrays], jnp.dtype(FORMATS[format])
        rows = quantize_rows(*given, dtype=dtype, interpret=call.interpret)
        values, scale = [y.reshape(shape) for y in rows.values], rows.scale.reshape(shape[:-1])
    return [QuantizedArray(values=y, scale=scale, scaling="row") for y in values]


def _has_kernel(call: PlannedCall, arrays: Sequence[jax.Array]) -> bool:
    """Whether one kernel can quantize the arrays.

    It needs Pallas-Triton, a GPU that rounds float32 to 8 bits once, and arrays of static size that are not empty and
    have 8-bit values that Triton can address.
    """
    x, *_ = arrays
    if call.implementation == "xla" or not backend.AVAILABLE or is_partitioned():
        return False
    if not all(isinstance(size, int) and size > 0 for size in x.shape) or not reaches(x.size, itemsize=1):
        return False
    return call.interpret or (dispatch.target_device(x).compute_capability or (0, 0)) >= ROUNDS_ONCE
