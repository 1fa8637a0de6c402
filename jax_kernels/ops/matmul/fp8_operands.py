"""The operands of 8-bit matmuls: quantised in the layouts that the forward and the backward need."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.ops.matmul.partitioning import both_ways_of_outer
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.pallas.matmul.passes import quantize_with_transpose as passes
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.quantization import (
    FORMATS,
    QuantizedArray,
    dequantize,
    quantization_scale,
    quantize,
    quantize_blocks,
    quantize_columns,
)
from jax_kernels.quantization.scale_blocks import BLOCK, sizes_of

__all__ = [
    "DTYPES",
    "RESIDUAL",
    "JoinedWeights",
    "Operands",
    "Weights",
    "both_ways",
    "can_measure",
    "has_kernel",
    "largest_finite",
    "of_rows",
    "operand",
    "rounded_both_ways",
    "summed_last",
    "weights_both_ways",
]

DTYPES = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
RESIDUAL = "fp8_operand"  # the name for policies of jax.checkpoint


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedWeights:
    """Weights [K, N] of several matmuls, quantised for sums over N, side by side: one matmul then computes all of dx.

    values: e4m3 [K, the sum of all N]. scales: float32 [] of each of the weights.
    """

    values: jax.Array
    scales: tuple[jax.Array, ...]

    def apart(self, widths: Sequence[int]) -> tuple[QuantizedArray, ...]:
        """Each of the weights. widths: their N."""
        ends = list(itertools.accumulate(widths))
        every = zip(ends, widths, self.scales, strict=True)
        return tuple(
            QuantizedArray(values=self.values[:, end - width : end], scale=scale, scaling="tensor")
            for end, width, scale in every
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """The quantised operands of the matmuls of the backward.

    x: x's transpose [K, ...], for the sum over x's outer axes; None with weights of 8 bits. weights: [K, N] each, for
    the sum over N.
    """

    x: QuantizedArray | None
    weights: tuple[QuantizedArray, ...] | JoinedWeights

    def named(self) -> "Operands":
        """The same operands, with a name for policies of jax.checkpoint."""
        return jax.tree.map(lambda y: checkpoint_name(y, RESIDUAL), self)


class Weights(NamedTuple):
    """Quantised weights of matmuls with the same x.

    forward: [N, K] each. of_dx: [K, N] each, for dz wᵀ. largest: the largest finite magnitudes, float32 [] each; () if
    they were not asked for.
    """

    forward: list[QuantizedArray]
    of_dx: tuple[QuantizedArray, ...] | JoinedWeights
    largest: tuple[jax.Array, ...]


def weights_both_ways(call: PlannedCall, pairs: Sequence[tuple[Any, Any]], *, measures: bool = False) -> Weights:
    """The Weights of matmuls with the same x.

    pairs: (w, [K, N], or [N, K] with transpose_w; the caller's scale of w, or None to compute one) of each matmul.
    """
    if _joins(call, [w for w, _ in pairs]):
        return _joined_weights(call, pairs, measures)
    forward, of_dx, largest = [], [], []
    for w, scale in pairs:
        if w.dtype in DTYPES or (call.options.scaling == "row" and scale is not None):
            found = summed_last(w, scale, call.options), _of_dx(w, scale, call.options)
        else:
            by_rows, by_columns, *measured = rounded_both_ways(call, w, scale, measures=measures)
            found = (by_rows, by_columns) if call.options.transpose_w else (by_columns, by_rows)
            largest += measured
        forward.append(found[0])
        of_dx.append(found[1])
    return Weights(forward, tuple(of_dx), tuple(largest))


def _joins(call: PlannedCall, weights: Sequence[jax.Array]) -> bool:
    """Whether one kernel can round the weights [K, N] side by side, so that one matmul computes all of dx."""
    if len(weights) == 1 or call.options.scaling != "tensor" or call.options.transpose_w or is_partitioned():
        return False
    is_whole = all(w.dtype not in DTYPES and w.dtype == weights[0].dtype and w.shape[1] % BLOCK == 0 for w in weights)
    return is_whole and all(has_kernel(call, w, None) for w in weights)


def _joined_weights(call: PlannedCall, pairs: Sequence[tuple[Any, Any]], measures: bool) -> Weights:
    """The results of weights_both_ways, by one kernel."""
    own = lambda w: quantization_scale(w, jnp.float8_e4m3fn, "tensor", -1)
    scales = [own(w) if scale is None else scale for w, scale in pairs]
    given = [passes.reciprocal(scale).reshape(1) for scale in scales]
    options: dict[str, Any] = {"measures": measures, "interpret": call.interpret}
    found = passes.joined_both_ways([w for w, _ in pairs], given, jnp.dtype(jnp.float8_e4m3fn), **options)
    every = zip(found.transposed, scales, strict=True)
    forward = [QuantizedArray(values=values, scale=scale, scaling="tensor") for values, scale in every]
    return Weights(forward, JoinedWeights(values=found.values, scales=tuple(scales)), found.largest)


def operand(x: Any, scale: Any, scaling: Any) -> QuantizedArray:
    """The operand x [..., K], whose last axis is summed, as a QuantizedArray. 8-bit arrays are not rounded again.

    scale: the factor of an 8-bit array's values. For another array, the scale to quantise with; None computes it.
    """
    if x.dtype in DTYPES:
        return QuantizedArray(values=x, scale=scale, scaling=scaling)
    return of_rows(x, scale, scaling, "e4m3")


def summed_last(w: Any, scale: Any, options: MatmulOptions) -> QuantizedArray:
    """The weights [K, N], or [N, K] with transpose_w, as a QuantizedArray [N, K]. scale: as the caller gave it."""
    if options.transpose_w:
        return operand(w, scale, options.scaling)
    return operand(w.T, scale.T if options.scaling == "block" and scale is not None else scale, options.scaling)


def _of_dx(w: Any, scale: Any, options: MatmulOptions) -> QuantizedArray:
    """The weights as [K, N], quantised for dz wᵀ, a sum over N.

    w: [K, N], or [N, K] with options.transpose_w. scale: the caller's scale of w, or None to compute one. With
    scaling="row" it is not used for values of 16 or 32 bits: its values belong to columns of w. Weights of 8 bits are
    then rounded again, and else keep their values.
    """
    if w.dtype in DTYPES and options.scaling == "row":
        known = QuantizedArray(values=w, scale=scale, scaling="row", axis=-1 if options.transpose_w else -2)
        w = dequantize(known, jnp.bfloat16)
    if options.scaling == "row":
        scale = None
    elif options.scaling == "block" and scale is not None and options.transpose_w:
        scale = scale.T
    turned = w.T if options.transpose_w else w
    if w.dtype in DTYPES:
        return operand(turned, scale, options.scaling)
    return quantize(turned, scaling=options.scaling, scale=scale)


def both_ways(
    call: PlannedCall, x: jax.Array, scale: Any = None, format: str = "e4m3"
) -> tuple[QuantizedArray, QuantizedArray]:
    """(x [..., N] quantised, its transpose [N, ...] quantised): for a sum over N, and for a sum over the other axes.

    format: "e4m3" or "e5m2". scale: x's scale, or None to compute one. With scaling="row" the transpose always gets
    scales of its own, one for each of its rows. Both are rounded by one kernel on GPUs if the call runs by kernels.
    """
    by_rows, by_columns, *_ = rounded_both_ways(call, x, scale, format)
    return by_rows, by_columns


def rounded_both_ways(
    call: PlannedCall, x: jax.Array, scale: Any = None, format: str = "e4m3", *, measures: bool = False
) -> tuple[Any, ...]:
    """The results of both_ways, and with measures x's largest finite magnitude, float32 [].

    measures needs scaling="tensor" with a given scale, and on GPUs one device.
    """
    scaling, of_transpose = call.options.scaling, scale
    if not has_kernel(call, x, scale):
        rounded = of_rows(x, scale, scaling, format), _of_columns(x, scale, scaling, format)
        return (*rounded, largest_finite(x)) if measures else rounded
    dtype = jnp.dtype(FORMATS[format])
    options: dict[str, Any] = {"dtype": dtype, "interpret": call.interpret, "measures": measures}
    kernel = both_ways_of_outer(functools.partial(passes.both_ways, **options), scaling)
    if scaling == "block":
        found = kernel(x, None)
        assert found.scale is not None
        scale, of_transpose = found.scale, jnp.moveaxis(found.scale, -1, 0)
    else:
        scale = quantization_scale(x, dtype, scaling, -1) if scale is None else scale
        outer = tuple(range(x.ndim - 1))
        of_transpose = quantization_scale(x, dtype, scaling, outer) if scaling == "row" else scale
        found = kernel(x, (passes.reciprocal(scale), passes.reciprocal(of_transpose)))
    both = (
        QuantizedArray(values=found.values, scale=scale, scaling=scaling),
        QuantizedArray(values=found.transposed, scale=of_transpose, scaling=scaling),
    )
    return (*both, found.largest) if measures else both


def largest_finite(x: jax.Array) -> jax.Array:
    """The largest finite magnitude of x, float32 []; 0 without one."""
    return jnp.where(jnp.isfinite(x), jnp.abs(x), 0).max(initial=0).astype(jnp.float32)


def can_measure(call: PlannedCall, inputs: MatmulInputs) -> bool:
    """Whether the kernels that round x and the weights of a call find their largest magnitudes in the same pass."""
    arrays = [inputs.x, inputs.w] if inputs.w_up is None else [inputs.x, inputs.w, inputs.w_up]
    is_kernel = call.options.scaling == "tensor" and not is_partitioned()
    return is_kernel and all(y.dtype not in DTYPES and has_kernel(call, y, None) for y in arrays)


def of_rows(x: jax.Array, scale: Any, scaling: Any, format: str) -> QuantizedArray:
    """x [..., N] quantised, for a sum over N. With scaling="block", 128 rows x 128 columns share a scale.

    The rows are counted through all outer axes. 128 consecutive rows must be a range along each of these axes; `run` of
    fp8.py merges axes until they are. format: "e4m3" or "e5m2". scale: the scale of x; None computes it.
    """
    if scaling != "block":
        return quantize(x, format, scaling=scaling, scale=scale)
    return quantize_blocks(x, format, (*sizes_of(x.shape[:-1]), BLOCK), scale)


def _of_columns(x: jax.Array, scale: Any, scaling: str | None, format: str) -> QuantizedArray:
    """The transpose [N, ...] of x [..., N] quantised, for a sum over x's other axes.

    With scaling="row", each of its N rows gets a new scale. Else scale is x's, or None to compute it.
    """
    if scaling == "row":
        return quantize_columns(x, format)
    if scaling != "block":
        return quantize(jnp.moveaxis(x, -1, 0), format, scaling=scaling, scale=scale)
    scale = None if scale is None else jnp.moveaxis(scale, -1, 0)
    return quantize_blocks(jnp.moveaxis(x, -1, 0), format, (BLOCK, *sizes_of(x.shape[:-1])), scale)


def has_kernel(call: PlannedCall, x: jax.Array, scale: Any) -> bool:
    """Whether one kernel can round x and its transpose together.

    It can if this JAX has Pallas-Triton, the call runs by kernels, x is not empty, its 8-bit values are not an array of
    2 to 4 GiB, which Triton cannot address, and no scale is given with scaling="block".
    """
    if not backend.AVAILABLE:
        return False
    if call.implementation == "xla" or 0 in x.shape or (call.options.scaling == "block" and scale is not None):
        return False
    return reaches(x.size, itemsize=1)  # the size of the values that the kernel stores
