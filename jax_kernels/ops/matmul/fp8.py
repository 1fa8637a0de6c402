"""8-bit matmuls: the quantisation of their operands, in the forward and in the backward.

The forward's operands are e4m3. The backward's operands are the cotangent in e5m2, which has more range, and x and w in
e4m3. The tensor cores take 8-bit operands only with the summed axis last. So w is transposed during quantisation; for
dw, x and the cotangent are.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_kernels.inputs.matmul import MatmulInputs, MatmulResult
from jax_kernels.ops import checks
from jax_kernels.ops.activations import derivative_of, not_for_triton
from jax_kernels.ops.matmul.fp8_gradients import Factor, product_gradients
from jax_kernels.ops.matmul.fp8_operands import (
    DTYPES,
    RESIDUAL,
    Operands,
    both_ways,
    has_kernel,
    operand,
    rounded_both_ways,
    summed_last,
    weights_both_ways,
)
from jax_kernels.ops.matmul.gradients import batched, epilogue_gradients, reverse_mode, sum_of_rows
from jax_kernels.ops.matmul.implementations import IMPLEMENTATIONS
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.pallas.matmul.passes.gated_gradients import gated_gradients
from jax_kernels.quantization import (
    QuantizedArray,
    check_scaling,
    checked_scale,
    dequantize,
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
    "as_arrays",
    "backward",
    "both_ways",
    "check_device",
    "checked_scales",
    "forward",
    "of_quantized",
    "rounded_matmul",
    "run",
]

# Names for policies of jax.checkpoint: 8-bit operands of the backward, and the results before an activation.
RESIDUALS = RESIDUAL, "fp8_preactivation"

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
            f"precision: got 8 bits on {device.name}, which has no 8-bit matmuls, want an Ada (L4, L40S, RTX 40), "
            "Hopper (H100, H200) or Blackwell GPU, or implementation='xla', which emulates them"
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
    x = operand(inputs.x, inputs.x_scale, call.options.scaling)
    w = summed_last(inputs.w, inputs.w_scale, call.options)
    w_up = None if inputs.w_up is None else summed_last(inputs.w_up, inputs.w_up_scale, call.options)
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
        op = "matmul" if inputs.w_up is None else "gated_matmul"
        raise NotImplementedError(
            f"{op}: arrays of 8 bits have no gradients, want 16- or 32-bit arrays with precision='fp8'"
        )
    saves = call.options.activation is not None or inputs.w_up is not None
    largest: tuple[jax.Array, ...] = ()
    if _has_frozen_weights(inputs):
        x, x_of_columns = operand(inputs.x, inputs.x_scale, call.options.scaling), None
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
    return has_kernel(call, dout, None) and not_for_triton(options.activation) is None


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
    x = rounded(inputs.x, operand(fixed.x, fixed.x_scale, call.options.scaling))
    weights = (inputs.w, fixed.w, fixed.w_scale), (inputs.w_up, fixed.w_up, fixed.w_up_scale)
    w, w_up = (
        cast(Any, None)
        if given is None
        else rounded(given if call.options.transpose_w else given.T, summed_last(known, scale, call.options))
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
