"""matmul in plain jnp: the implementation "xla", and the equations of the kernels."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.matmul import (
    MatmulInputs,
    MatmulOptions,
    MatmulResult,
    scale_factors,
    scale_shares,
    wide_on_a_cpu,
)
from jax_kernels.quantization import formats, scale_blocks

__all__ = ["float32_sums", "in_turn", "matmul", "of_blocks"]

PRECISIONS = {None: None, "fp32": lax.Precision.HIGHEST, "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32}


def matmul(inputs: MatmulInputs, options: MatmulOptions) -> MatmulResult:
    """The MatmulResult of a call, by the equations in MatmulOptions' docstring. Products are summed in float32."""
    product = _product(inputs.x, inputs.w, inputs.x_scale, inputs.w_scale, options)
    if inputs.x_up is not None:
        product = product + _product(inputs.x_up, inputs.w_up, None, None, options)
    dtype = jnp.dtype(options.out_dtype)
    if inputs.preactivation is not None:
        up = inputs.up
        load_up = None if up is None else functools.partial(up.astype, jnp.float32)
        found = options.gradients(product, inputs.preactivation.astype(jnp.float32), load_up)
        return MatmulResult(**{name: y.astype(dtype) for name, y in found})
    if inputs.bias is not None:
        product = product + inputs.bias.astype(jnp.float32)
    out = product if options.activation is None else options.activation(product)
    up = None
    if inputs.is_gated:
        up = _product(inputs.x, inputs.w_up, inputs.x_scale, inputs.w_up_scale, options)
        out = out * up
    if inputs.residual is not None:
        out = out + inputs.residual.astype(jnp.float32)
    saved = [y.astype(dtype) if options.saves_preactivation and y is not None else None for y in (product, up)]
    return MatmulResult(out.astype(dtype), *saved)


def _product(x: Any, w: Any, x_scale: Any, w_scale: Any, options: MatmulOptions) -> Any:
    """x @ w in float32. The scales of 8-bit operands and of low-bit weights multiply it.

    x_scale, w_scale: in the shapes that options.scaling sets, see MatmulInputs; None without scales.
    """
    if options.low_bit is not None:
        w = formats.dequantized(w, w_scale, options.low_bit, x.shape[-1])
        if x.dtype == jnp.bfloat16:
            return _sums(x, w.astype(x.dtype), options)
        # float16 lacks the range of the scales.
        precision = "tf32" if x.dtype == jnp.float16 else options.precision
        return _sums(x.astype(jnp.float32), w, dataclasses.replace(options, precision=precision))
    if options.scaling == "block":
        *scales, units = _raised(x_scale, w_scale)
        count = x.ndim - w.ndim + 1  # rows' axes
        x, w = of_blocks(x, scales[0], count), of_blocks(w, scales[1], 1)
        return in_turn(_sums(x, w, dataclasses.replace(options, precision="tf32")), *scale_factors(*units))
    if options.scaling is None:
        return _sums(x, w, options)
    # bfloat16 is exact. On a GPU, XLA finds the 8-bit operands behind it.
    product = _sums(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), options)
    if options.scaling == "tensor":
        return in_turn(product, *scale_factors(x_scale, w_scale))
    first, last = scale_shares(x_scale[..., None])
    return in_turn(product, first, w_scale, last)


def _raised(x_scale: Any, w_scale: Any) -> tuple[Any, Any, list[Any]]:
    """(x_scale, w_scale, inverse powers): the scales of blocks times powers of two, and two float32 scalars that undo
    these.

    The powers raise the product of the largest scales to about 1 if it is smaller. Otherwise the terms of a sum would
    leave float32's range before the sum does.
    """
    exponents = []
    for scale in (x_scale, w_scale):
        largest = jnp.max(scale, initial=0)
        exponents.append(jnp.frexp(jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1))[1])
    of_x, of_w = exponents
    needed = jnp.maximum(-(of_x + of_w), 0)
    raised = jnp.clip(-of_x, 0, needed)
    powers = [jnp.minimum(power, 125) for power in (raised, needed - raised)]
    power_of_two = lambda exponent: lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    x_scale, w_scale = (y * power_of_two(power) for y, power in zip((x_scale, w_scale), powers, strict=True))
    return x_scale, w_scale, [power_of_two(-power) for power in powers]


def in_turn(product: Any, *factors: Any) -> Any:
    """product * factor for each factor, in this order. The barrier keeps XLA from changing the order."""
    for factor in factors:
        product = lax.optimization_barrier(product) * factor
    return product


def of_blocks(values: Any, scale: Any, count: int) -> Any:
    """values * scale in float32, for scales of blocks of 128 x 128 values.

    The first `count` axes of values are counted as one axis of rows, the other axes as one axis of columns. scale:
    float32, one for each block, with an axis for each axis of values: the number of blocks along it.
    """
    sizes = scale_blocks.sizes_of(values.shape[:count]) + scale_blocks.sizes_of(values.shape[count:])
    return values.astype(jnp.float32) * scale_blocks.spread(scale, sizes, values.shape)


def _sums(x: Any, w: Any, options: MatmulOptions) -> Any:
    """The matmul x @ w in float32, over the axes and in the precision that the options give."""
    count = w.ndim - 1  # the axes that are summed over
    of_x = range(count) if options.transpose_x else range(x.ndim - count, x.ndim)
    of_w = range(1, w.ndim) if options.transpose_w else range(count)
    return float32_sums(x, w, (tuple(of_x), tuple(of_w)), options.precision)


def float32_sums(x: Any, w: Any, axes: tuple[Sequence[int], Sequence[int]], precision: str | None) -> jax.Array:
    """The matmul in float32 over these axes of x and of w.

    precision: a key of PRECISIONS. XLA has tf32 on GPUs alone: other devices multiply in float32.
    """

    def dot(x: Any, w: Any, precision: Any = PRECISIONS[precision]) -> jax.Array:
        return lax.dot_general(x, w, (axes, ((), ())), precision, preferred_element_type=jnp.float32)

    if precision != "tf32" or jax.default_backend() == "gpu":
        return wide_on_a_cpu(dot, x, w)
    # A program for CPUs and GPUs lowers both for a CPU, which has no TF32_TF32_F32. A GPU's default is tf32.
    fast = functools.partial(dot, precision=lax.Precision.DEFAULT)
    exact = functools.partial(wide_on_a_cpu, functools.partial(dot, precision=lax.Precision.HIGHEST))
    return lax.platform_dependent(x, w, cuda=fast, rocm=fast, default=exact)
