"""8-bit matmuls: the quantisation of their operands, in the forward and in the backward.

The forward's operands are e4m3. The backward's operands are the cotangent in e5m2, which has more range, and x and w in
e4m3. The tensor cores take 8-bit operands only with the summed axis last. So w is transposed during quantisation, and
for dw so are the two operands.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_kernels import dispatch
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.ops import checks
from jax_kernels.ops.activations import derivative_of, not_for_triton
from jax_kernels.ops.matmul.gradients import batched, epilogue_gradients, reverse_mode, sum_of_rows
from jax_kernels.ops.matmul.implementations import IMPLEMENTATIONS, OP, request_of
from jax_kernels.ops.matmul.partitioning import both_ways_of_outer
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.pallas.matmul.passes import quantize_with_transpose as passes
from jax_kernels.pallas.matmul.passes.gated_gradients import gated_gradients
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.quantization import (
    FORMATS,
    QuantizedArray,
    check_scaling,
    checked_scale,
    dequantize,
    quantization_scale,
    quantize,
    quantize_blocks,
    quantize_columns,
    scale_shape,
)
from jax_kernels.quantization.scale_blocks import BLOCK, boxes, counts, sizes_of
from jax_kernels.quantization.scales import scale_of
from jax_kernels.reference import matmul as reference
from jax_kernels.tracing.derivatives import straight_through, without_derivative
from jax_kernels.tracing.promotion import under_defaults

__all__ = [
    "DTYPES",
    "RESIDUALS",
    "Factor",
    "Operands",
    "as_arrays",
    "backward",
    "both_ways",
    "can_measure",
    "check_device",
    "checked_scales",
    "forward",
    "largest_finite",
    "of_quantized",
    "product_gradients",
    "rounded_both_ways",
    "rounded_matmul",
    "run",
    "weights_both_ways",
]

# Names for policies of jax.checkpoint: 8-bit operands of the backward, and the results before an activation.
RESIDUALS = "fp8_operand", "fp8_preactivation"

DTYPES = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
NEEDS = (8, 9)  # the first compute capability with 8-bit matmuls


def as_arrays(name: str, x: Any, scale: Any, axis: int) -> tuple[Any, Any, str | None]:
    """(values, scale, scaling) of an operand x or w of a matmul, which may be a QuantizedArray.

    scaling: a QuantizedArray's, "tensor", "row" or "block"; None for another operand, whose x and scale are returned as
    they are. name: of the argument, in messages. axis: the operand's summed axis, -1 or -2. Raises ValueError if a
    QuantizedArray does not fit this axis, or comes with a scale.
    """
    if not isinstance(x, QuantizedArray):
        return x, scale, None
    if scale is not None:
        raise ValueError(f"{name}_scale: got one with a QuantizedArray, which has its own scale; want None")
    if x.scaling == "row" and x.axis != axis:
        raise ValueError(
            f"{name}: got scales of rows along axis {x.axis}, want scales along axis {axis}, the summed axis"
        )
    if x.scaling == "block" and x.ndim != 2:
        raise ValueError(f"{name}: got shape {x.shape} with scales of blocks, want two axes")
    return x.values, x.scale, x.scaling


def check_device(device: Any, implementation: str | None) -> None:
    """Raises NotImplementedError for a GPU without 8-bit matmuls, unless the caller named an implementation.

    device: a DeviceInfo. implementation: the name, or None.
    """
    capability = device.compute_capability
    if implementation is None and capability is not None and capability < NEEDS:
        raise NotImplementedError(
            f"precision: {device.name} has no 8-bit matmuls; Ada (L4, L40S, RTX 40), Hopper (H100, H200) and "
            "Blackwell GPUs have them. implementation='xla' emulates them"
        )


def checked_scales(
    x: Any, w: Any, x_scale: Any, w_scale: Any, scaling: str | None, transpose_w: bool
) -> dict[str, Any]:
    """{"x_scale", "w_scale", "scaling"}, checked, of an 8-bit matmul. Raises TypeError or ValueError.

    scaling: "tensor", "row" or "block"; None derives it from the shapes of the scales. The returned scales are float32.
    "tensor": []. "row": x's outer axes, and [N]. "block": [ceil(M / 128), ceil(K / 128)], with M the product of x's
    outer axes, and [ceil(K / 128), ceil(N / 128)], transposed with transpose_w. One number is repeated to this shape.

    A scale of None becomes 1 for 8-bit arrays. For arrays of 16 or 32 bits it stays None: they are quantised later by
    their own values. If they have a scale, such as one from an earlier training step, they are quantised by it.
    """
    if scaling is None:
        scaling = _scaling_of(x, x_scale, w_scale)
    check_scaling(scaling)
    rows = math.prod(x.shape[:-1])
    of_x = x.shape if scaling == "row" else (rows, x.shape[-1])
    shapes = scale_shape(of_x, scaling, -1), scale_shape(w.shape, scaling, -1 if transpose_w else -2)
    found = {}
    for name, y, scale, shape in zip(("x_scale", "w_scale"), (x, w), (x_scale, w_scale), shapes, strict=True):
        if scale is None and y.dtype in DTYPES:
            scale = 1.0
        if scale is not None and jnp.ndim(scale) == 0 and scaling != "tensor":
            scale = checks.spread(checked_scale(name, scale, ()), shape)
        found[name] = None if scale is None else checked_scale(name, scale, shape)
    if found["x_scale"] is not None and scaling == "row":
        found["x_scale"] = checks.reshaped(found["x_scale"], x.shape[:-1], jnp.float32)
    return found | {"scaling": scaling}


def _scaling_of(x: Any, x_scale: Any, w_scale: Any) -> str:
    """The scaling, "tensor", "row" or "block", from the shapes of the scales, which may be None or numbers.

    w_scale decides if it has axes: its shape is less ambiguous, as w has two axes. Raises ValueError if x_scale fits
    rows and blocks alike.
    """
    of_x, of_w = (tuple(getattr(scale, "shape", ())) for scale in (x_scale, w_scale))
    if of_w or not of_x:
        return ("tensor", "row", "block")[min(len(of_w), 2)]
    rows = tuple(x.shape[:-1])
    blocks = scale_shape((math.prod(rows), x.shape[-1]), "block")
    if of_x == rows == blocks:
        raise ValueError(f"scaling: got None with x_scale {of_x}, a shape of rows and of blocks; want 'row' or 'block'")
    return "block" if of_x == blocks or (of_x != rows and len(of_x) == 2) else "row"


def run(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """out [..., N] of a planned 8-bit matmul of x [..., K], differentiable by the operands of 16 or 32 bits.

    With scaling="block", 128 consecutive rows, counted through all outer axes of x, share scales. The last outer axes
    are merged for this, until each such group of rows is a rectangular part of x, i.e. a range along each axis.
    """
    if call.options.scaling != "block":
        return _planned(call, inputs)
    *outer, _ = inputs.x.shape
    axes = boxes(outer)
    of_axes: Callable[[Any], Any] = lambda y: None if y is None else y.reshape(*axes, y.shape[-1])
    scale = inputs.x_scale
    if scale is not None:
        scale = scale.reshape(counts((*axes, inputs.x.shape[-1]), (*sizes_of(axes), BLOCK)))
    out = _planned(call, inputs._replace(x=of_axes(inputs.x), residual=of_axes(inputs.residual), x_scale=scale))
    return out.reshape(*outer, out.shape[-1])


def _planned(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    if _has_frozen_weights(inputs):
        given = {field: getattr(inputs, field) for field in ("w", "w_scale", "w_up", "w_up_scale")}
        reason = "matmul: weights of 8 bits have no gradients, want 16- or 32-bit arrays with precision='fp8'"
        inputs = inputs._replace(**without_derivative(given, reason))
    return _plain(call, inputs) if call.implementation == "xla" else _by_kernels(call, reverse_mode(inputs))


def _has_frozen_weights(inputs: MatmulInputs) -> bool:
    """Whether the weights have 8 bits, and x has not."""
    return inputs.w.dtype in DTYPES and inputs.x.dtype not in DTYPES


def rounded_matmul(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """out [..., N] of a planned 8-bit matmul, without a derivative: rounds the operands, and multiplies them."""
    return _run(call, inputs, saves=False).out


def _run(call: PlannedCall, inputs: MatmulInputs, *, saves: bool) -> MatmulResult:
    """The MatmulResult of the forward: quantises the operands and runs the call's implementation.

    saves: whether the result has preactivation and up, which the backward of an epilogue reads.
    """
    x = _operand(inputs.x, inputs.x_scale, call.options.scaling)
    w = _summed_last(inputs.w, inputs.w_scale, call.options)
    w_up = None if inputs.w_up is None else _summed_last(inputs.w_up, inputs.w_up_scale, call.options)
    return of_quantized(call, inputs, x, w, w_up, saves=saves)


def of_quantized(
    call: PlannedCall,
    inputs: MatmulInputs,
    x: QuantizedArray,
    w: QuantizedArray,
    w_up: QuantizedArray | None,
    *,
    saves: bool,
) -> MatmulResult:
    """The MatmulResult of quantised operands: x [..., K], w and w_up [N, K]. inputs: has bias and residual."""
    options = dataclasses.replace(call.options, transpose_w=True, saves_preactivation=saves)
    quantized = inputs._replace(x=x.values, x_scale=x.scale, w=w.values, w_scale=w.scale)
    if w_up is not None:
        quantized = quantized._replace(w_up=w_up.values, w_up_scale=w_up.scale)
    return batched(dataclasses.replace(call, options=options))(quantized)


def _operand(x: Any, scale: Any, scaling: Any) -> QuantizedArray:
    """The operand x [..., K], whose last axis is summed, as a QuantizedArray. 8-bit arrays are not rounded again.

    scale: the factor of an 8-bit array's values. For another array, the scale to quantise with; None computes it.
    """
    if x.dtype in DTYPES:
        return QuantizedArray(values=x, scale=scale, scaling=scaling)
    return _of_rows(x, scale, scaling, "e4m3")


def _summed_last(w: Any, scale: Any, options: MatmulOptions) -> QuantizedArray:
    """The weights [K, N], or [N, K] with transpose_w, as a QuantizedArray [N, K]. scale: as the caller gave it."""
    if options.transpose_w:
        return _operand(w, scale, options.scaling)
    return _operand(w.T, scale.T if options.scaling == "block" and scale is not None else scale, options.scaling)


@under_defaults
def _forward(call, inputs):
    return forward(call, inputs, measures=False)[:2]


class Forward(NamedTuple):
    """The results of a forward under differentiation.

    residuals: (the inputs, with arrays replaced by a scalar of their dtype, and without scales; the Operands; the
    MatmulResult without out, for the derivative of the epilogue). largest: the largest finite magnitudes of x, of w,
    and of w_up if there is one, float32 []; () if they were not asked for.
    """

    out: jax.Array
    residuals: tuple[MatmulInputs, "Operands", MatmulResult]
    largest: tuple[jax.Array, ...]


def forward(call: PlannedCall, inputs: MatmulInputs, *, measures: bool) -> Forward:
    """The forward under differentiation. Raises NotImplementedError if x has 8 bits.

    measures: whether the result has `largest`, which needs scaling="tensor" and unquantized arrays.
    """
    if inputs.x.dtype in DTYPES:
        raise NotImplementedError(
            "matmul: arrays of 8 bits have no gradients, want 16- or 32-bit arrays with precision='fp8'"
        )
    saves = call.options.activation is not None or inputs.w_up is not None
    largest: tuple[jax.Array, ...] = ()
    if _has_frozen_weights(inputs):
        x, x_of_columns = _operand(inputs.x, inputs.x_scale, call.options.scaling), None
    else:
        x, x_of_columns, *largest_x = rounded_both_ways(call, inputs.x, inputs.x_scale, measures=measures)
        largest = tuple(largest_x)
    pairs = [(inputs.w, inputs.w_scale), (inputs.w_up, inputs.w_up_scale)]
    weights = weights_both_ways(call, pairs[: 1 if inputs.w_up is None else 2], measures=measures)
    w, *others = weights.forward
    result = of_quantized(call, inputs, x, w, others[0] if others else None, saves=saves)
    operands = Operands(x=x_of_columns, weights=weights.of_dx).named()
    saved = jax.tree.map(lambda y: checkpoint_name(y, RESIDUALS[1]), result._replace(out=None))  # type: ignore[arg-type]
    tokens = inputs._replace(x_scale=None, w_scale=None, w_up_scale=None)
    residuals = jax.tree.map(lambda y: y.dtype.type(0), tokens), operands, saved
    return Forward(out=result.out, residuals=residuals, largest=(*largest, *weights.largest))


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
        return jax.tree.map(lambda y: checkpoint_name(y, RESIDUALS[0]), self)


@under_defaults
def backward(call: PlannedCall, residuals: Any, dout: jax.Array) -> tuple[MatmulInputs]:
    """(MatmulInputs of the gradients,), by 8-bit matmuls of the rounded cotangent."""
    inputs, operands, saved = residuals
    found = _cotangents(call, saved, dout)
    dz, dbias = found.z, None
    if inputs.bias is not None:
        dz = lax.optimization_barrier(dz)  # without it XLA writes dz in float32 for the sum and reads it again
        dbias = sum_of_rows(dz).astype(inputs.bias.dtype)
    factors = [Factor(dz=dz, scale=found.z_scale, dtype=inputs.w.dtype)]
    if found.up is not None:
        factors.append(Factor(dz=found.up, scale=found.up_scale, dtype=inputs.w_up.dtype))
    dx, (dw, *others) = product_gradients(call, operands, factors, inputs.x.dtype)
    dresidual = None if inputs.residual is None else dout
    return (MatmulInputs(x=dx, w=dw, bias=dbias, residual=dresidual, w_up=others[0] if others else None),)  # type: ignore[arg-type]


class _Cotangents(NamedTuple):
    """The cotangents of x @ w + bias and of x @ w_up, like dout, and the scales to round them with.

    up is None without a gate. A scale is None if it is still to be computed.
    """

    z: jax.Array
    up: jax.Array | None
    z_scale: jax.Array | None = None
    up_scale: jax.Array | None = None


def _cotangents(call: PlannedCall, saved: MatmulResult, dout: jax.Array) -> _Cotangents:
    """The cotangents before the epilogue. saved: the forward's preactivation and up, or None. dout: of out."""
    if saved.preactivation is not None and saved.up is not None and _has_gated_kernel(call, dout):
        options = dataclasses.replace(call.options, derivative=derivative_of(call.options.activation))
        found = gated_gradients(dout, saved.preactivation, saved.up, options, interpret=call.interpret)
        z_scale, up_scale = (scale_of(x, jnp.float8_e5m2) for x in (found.largest_z, found.largest_up))
        return _Cotangents(z=found.z, up=found.up, z_scale=z_scale, up_scale=up_scale)
    dz, dup = epilogue_gradients(call.options, saved, dout.astype(jnp.float32))
    return _Cotangents(*(None if y is None else y.astype(dout.dtype) for y in (dz, dup)))  # type: ignore[arg-type]


def _has_gated_kernel(call: PlannedCall, dout: jax.Array) -> bool:
    """Whether one kernel can compute the cotangents of a gated unit and their magnitudes, from which scales follow."""
    options = call.options
    if options.scaling != "tensor" or str(dout.dtype) != options.out_dtype or is_partitioned():
        return False
    return _has_kernel(call, dout, None) and not_for_triton(options.activation) is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factor:
    """A matmul x @ w in the backward.

    dz: the cotangent of x @ w, [..., N], which is rounded to e5m2. scale: of dz, or None to compute it. dtype: of w's
    gradient.
    """

    dz: jax.Array
    scale: jax.Array | None
    dtype: Any


def product_gradients(
    call: PlannedCall, operands: Operands, factors: Sequence[Factor], dtype: Any
) -> tuple[jax.Array, list[jax.Array | None]]:
    """(dx, the sum of dz wᵀ over all factors, in `dtype`; for each factor dw = xᵀ dz in w's shape), by 8-bit matmuls.

    factors: in the order of operands.weights.

    A matmul adds its result to the sum before it in its epilogue. On a mesh devices may shard N, except for a matmul
    with an epilogue. There the results are float32, and XLA adds them.
    """
    if isinstance(operands.weights, JoinedWeights):
        cotangents = [factor.dz for factor in factors]
        is_reached = reaches(sum(dz.size for dz in cotangents), itemsize=1) and not is_partitioned()
        if is_reached and all(_has_kernel(call, dz, None) for dz in cotangents):
            return _joined_gradients(call, operands, operands.weights, factors, dtype)
        apart = operands.weights.apart([dz.shape[-1] for dz in cotangents])
        return product_gradients(call, dataclasses.replace(operands, weights=apart), factors, dtype)
    dx: Any = None
    gradients: list[jax.Array | None] = []
    adds_later = len(factors) > 1 and is_partitioned()
    for factor, w in zip(factors, operands.weights, strict=True):
        if operands.x is None:
            dz_of_rows, dz_of_columns = _of_rows(factor.dz, factor.scale, call.options.scaling, "e5m2"), None
        else:
            dz_of_rows, dz_of_columns = both_ways(call, factor.dz, factor.scale, format="e5m2")
        if adds_later:
            part = _product(call, dz_of_rows, w, jnp.float32)
            dx = part if dx is None else dx + part
        else:
            dx = _product(call, dz_of_rows, w, dtype, residual=dx)
        gradients.append(_weight_gradient(call, operands.x, dz_of_columns, factor.dtype))
    return dx.astype(dtype), gradients


def _weight_gradient(call: PlannedCall, x: Any, dz: Any, dtype: Any) -> jax.Array | None:
    """xᵀ dz in w's shape, from their transposes [K, ...] and [N, ...], quantised; None if there are none."""
    if x is None or dz is None:
        return None
    return _product(call, *((dz, x) if call.options.transpose_w else (x, dz)), dtype)


def _joined_gradients(
    call: PlannedCall, operands: Operands, weights: JoinedWeights, factors: Sequence[Factor], dtype: Any
) -> tuple[jax.Array, list[jax.Array | None]]:
    """The results of product_gradients, where dx is one matmul of the cotangents side by side with joined weights.

    The scales of a cotangent and of its weights multiply to one number for all factors, so a cotangent may get a
    larger scale than its own magnitude needs. e5m2 keeps its precision over 29 binades, so this has no effect unless
    the factors differ by as much.
    """
    scale_of_dz = lambda factor: quantization_scale(factor.dz, jnp.float8_e5m2, "tensor", -1)
    own = [scale_of_dz(factor) if factor.scale is None else factor.scale for factor in factors]
    both = [scale * of_w for scale, of_w in zip(own, weights.scales, strict=True)]
    common = functools.reduce(jnp.maximum, both, jnp.float32(jnp.finfo(jnp.float32).tiny))
    scales = [common / of_w for of_w in weights.scales]
    *outer, _ = factors[0].dz.shape
    rows = [factor.dz.reshape(-1, factor.dz.shape[-1]) for factor in factors]
    given = [passes.reciprocal(scale).reshape(1) for scale in scales]
    found = passes.joined_both_ways(rows, given, jnp.dtype(jnp.float8_e5m2), interpret=call.interpret)
    quantized = lambda values, scale: QuantizedArray(values=values, scale=scale, scaling="tensor")
    dz = quantized(found.values.reshape(*outer, -1), common)
    dx = _product(call, dz, quantized(weights.values, jnp.float32(1)), dtype)
    every = zip(found.transposed, scales, factors, strict=True)
    of_columns = ((quantized(y.reshape(-1, *outer), scale), factor.dtype) for y, scale, factor in every)
    return dx, [_weight_gradient(call, operands.x, y, of_w) for y, of_w in of_columns]


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
            found = _summed_last(w, scale, call.options), _of_dx(w, scale, call.options)
        else:
            of_rows, of_columns, *measured = rounded_both_ways(call, w, scale, measures=measures)
            found = (of_rows, of_columns) if call.options.transpose_w else (of_columns, of_rows)
            largest += measured
        forward.append(found[0])
        of_dx.append(found[1])
    return Weights(forward, tuple(of_dx), tuple(largest))


def _joins(call: PlannedCall, weights: Sequence[jax.Array]) -> bool:
    """Whether one kernel can round the weights [K, N] side by side, so that one matmul computes all of dx."""
    if len(weights) == 1 or call.options.scaling != "tensor" or call.options.transpose_w or is_partitioned():
        return False
    is_whole = all(w.dtype not in DTYPES and w.dtype == weights[0].dtype and w.shape[1] % BLOCK == 0 for w in weights)
    return is_whole and all(_has_kernel(call, w, None) for w in weights)


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
        return _operand(turned, scale, options.scaling)
    return quantize(turned, scaling=options.scaling, scale=scale)


def both_ways(
    call: PlannedCall, x: jax.Array, scale: Any = None, format: str = "e4m3"
) -> tuple[QuantizedArray, QuantizedArray]:
    """(x [..., N] quantised, its transpose [N, ...] quantised): for a sum over N, and for a sum over the other axes.

    format: "e4m3" or "e5m2". scale: x's scale, or None to compute one. With scaling="row" the transpose always gets
    scales of its own, one for each of its rows. Both are rounded by one kernel on GPUs if the call runs by kernels.
    """
    of_rows, of_columns, *_ = rounded_both_ways(call, x, scale, format)
    return of_rows, of_columns


def rounded_both_ways(
    call: PlannedCall, x: jax.Array, scale: Any = None, format: str = "e4m3", *, measures: bool = False
) -> tuple[Any, ...]:
    """The results of both_ways, and with measures x's largest finite magnitude, float32 [].

    measures needs scaling="tensor" with a given scale, and on GPUs one device.
    """
    scaling, of_transpose = call.options.scaling, scale
    if not _has_kernel(call, x, scale):
        rounded = _of_rows(x, scale, scaling, format), _of_columns(x, scale, scaling, format)
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
    return is_kernel and all(y.dtype not in DTYPES and _has_kernel(call, y, None) for y in arrays)


def _of_rows(x: jax.Array, scale: Any, scaling: Any, format: str) -> QuantizedArray:
    """x [..., N] quantised, for a sum over N. With scaling="block", 128 rows x 128 columns share a scale.

    The rows are counted through all outer axes. 128 consecutive rows must be a range along each of these axes, which
    `run` sees to. format: "e4m3" or "e5m2". scale: the scale of x; None computes it.
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


def _has_kernel(call: PlannedCall, x: jax.Array, scale: Any) -> bool:
    """Whether one kernel can round x and its transpose together.

    It can if this JAX has Pallas-Triton, the call runs by kernels, x is not empty, its 8-bit values are not an array of
    2 to 4 GiB, which Triton cannot address, and no scale is given with scaling="block".
    """
    if not backend.AVAILABLE:
        return False
    if call.implementation == "xla" or 0 in x.shape or (call.options.scaling == "block" and scale is not None):
        return False
    return reaches(x.size, itemsize=1)  # the size of the values that the kernel stores


def _straight_through(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """out [..., N] of the call, computed in float32 from the rounded x and weights. JAX can differentiate it.

    Derivatives treat rounding as the identity ("straight-through"). Scales have no gradients.
    """

    def rounded(x: Any, of: QuantizedArray) -> Any:
        is_known = x.dtype in DTYPES
        x = x.astype(jnp.float32)
        is_blocks = of.scaling == "block"
        known = reference.of_blocks(of.values, of.scale, of.values.ndim - 1) if is_blocks else dequantize(of)
        return known if is_known else known + (x - lax.stop_gradient(x))

    fixed = jax.tree.map(lax.stop_gradient, inputs)
    x = rounded(inputs.x, _operand(fixed.x, fixed.x_scale, call.options.scaling))
    weights = (inputs.w, fixed.w, fixed.w_scale), (inputs.w_up, fixed.w_up, fixed.w_up_scale)
    w, w_up = (
        cast(Any, None)
        if given is None
        else rounded(given if call.options.transpose_w else given.T, _summed_last(known, scale, call.options))
        for given, known, scale in weights
    )
    options = dataclasses.replace(call.options, transpose_w=True, scaling=None, precision="fp32")
    given = MatmulInputs(x=x, w=w, w_up=w_up, bias=inputs.bias, residual=inputs.residual)
    return IMPLEMENTATIONS["xla"].forward(given, options, config=None, interpret=call.interpret).out


_by_kernels = jax.custom_vjp(rounded_matmul, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, backward)


def _straight_gradients(call: PlannedCall, inputs: MatmulInputs, dout: jax.Array) -> tuple[MatmulInputs]:
    """(MatmulInputs of the gradients of the float32 call on rounded values,). Scales get None."""
    (found,) = jax.vjp(functools.partial(_straight_through, call), inputs)[1](dout)
    return (found._replace(x_scale=None, w_scale=None, w_up_scale=None),)


_plain = straight_through(rounded_matmul, _forward, backward, _straight_through, _straight_gradients)


def _product(
    call: PlannedCall, x: QuantizedArray, w: QuantizedArray, out_dtype: Any, residual: Any = None
) -> jax.Array:
    """x @ wᵀ + residual of two quantised arrays, x [..., K] and w [N, K], where K may be several axes: [..., N].

    It runs by the call's implementation if it supports the shapes, else by XLA. out_dtype: of the result and of the
    residual, which may be None.
    """
    options = MatmulOptions(out_dtype=str(jnp.dtype(out_dtype)), transpose_w=True, scaling=call.options.scaling)
    inputs = MatmulInputs(x=x.values, w=w.values, x_scale=x.scale, w_scale=w.scale, residual=residual)
    request = request_of(options, x.dtype, options.sizes(inputs), dispatch.target_device(x.values))
    serves = IMPLEMENTATIONS[call.implementation].supports(request) is None
    return batched(OP.call(request, options, call.implementation if serves else "xla"))(inputs).out
