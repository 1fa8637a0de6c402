"""matmul and gated_matmul: one matmul, or two, with an epilogue."""

from collections.abc import Callable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.matmul import MatmulInputs
from jax_kernels.ops.matmul import fp8, gradients, low_bit
from jax_kernels.ops.matmul.checks import check, check_gated
from jax_kernels.ops.matmul.implementations import GATED, OP
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding.explicit_axes import as_product, with_explicit_axes
from jax_kernels.plain_numbers import with_plain_numbers
from jax_kernels.quantization import QuantizedArray
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["GATED", "OP", "gated_matmul", "matmul", "run"]


@with_plain_numbers("transpose_w")
@with_explicit_axes(as_product)
@under_defaults
@jax.named_scope("matmul")
def matmul(
    x: Float[Array, "*M K"] | QuantizedArray,
    w: Float[Array, "K N"] | Float[Array, "N K"] | QuantizedArray,
    *,
    bias: Float[Array, " N"] | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    residual: Float[Array, "*M N"] | None = None,
    x_scale: Float32[Array, "..."] | float | None = None,
    w_scale: Float32[Array, "..."] | float | None = None,
    transpose_w: bool = False,
    out_dtype: DTypeLike | None = None,
    precision: str | None = None,
    scaling: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "*M N"]:
    """The matmul of x and w, with a bias, an activation and a residual in the same pass.

    Equivalent to the following JAX code, in float32 after the matmul::

        out = x @ (w.T if transpose_w else w)
        out = out + bias
        out = activation(out)
        out = (out + residual).astype(out_dtype)

    With precision="fp8" it is an 8-bit matmul: x and w are rounded to e4m3 and, for gradients, the cotangent to e5m2,
    each with float32 scales. 8-bit arrays are multiplied by their scales without further rounding. With a
    QuantizedArray of e4m3 or e5m2 as w, or 8-bit values with a w_scale, x of 16 or 32 bits is rounded in each call, as
    with precision="fp8". w is not rounded again, except with scaling="row" for the gradient of x. Such weights have no
    gradients, and asking for them raises.

    w may also be low-bit weights, such as quantize(w, "int4"), with x of 16 or 32 bits, which is not rounded. The
    weights have no gradients, and asking for them raises. The gradients of x and of the other arrays are correct.

    Gradients are matmuls of the same kind, and treat rounding to 8 bits as the identity; scales have no gradients. With
    an activation, the forward of a differentiated call also saves x @ w + bias, in out_dtype, and the backward takes
    the activation's derivative at this value.

    Args:
      x: [..., K], bfloat16, float16, float32, float8_e4m3fn or float8_e5m2; or a QuantizedArray.
      w: [K, N] in x's dtype; [N, K] with transpose_w. Or a QuantizedArray that is quantized along K: axis=-2, and with
        transpose_w axis=-1. If x has 8 bits: any 8-bit dtype, or a QuantizedArray of 8 bits.
      bias: [N], in x's dtype or float32. If x has 8 bits, in any wider dtype.
      activation: "relu", "gelu" (exact), "gelu_tanh", "silu", "sigmoid" or "tanh"; or an elementwise jnp function of
        float32. It may not close over traced arrays.
      residual: [..., N] in out_dtype, added last.
      x_scale, w_scale: float32, of 8-bit matmuls: the factors of the 8-bit values. For arrays that are still to be
        rounded, None computes scales from their largest values; given scales are scales from earlier steps ("delayed
        scaling"), and values beyond their range saturate. For 8-bit arrays None is 1.
      transpose_w: whether w is [N, K], as in torch.nn.Linear.
      out_dtype: bfloat16, float16 or float32; None is the dtype of the given x, or bfloat16 if it has 8 bits.
      precision: for float32 inputs, "fp32" (exact products, the default) or "tf32". For all inputs, "fp8", "bf16" or
        "fp16": x and w are first rounded to it. None is x's dtype.
      scaling: of 8-bit matmuls, the values that share a scale. "tensor": all values, scales []. "row": the rows of x
        and the columns of w, x_scale [...] and w_scale [N]. "block": 128 x 128 values, x_scale [ceil(M / 128),
        ceil(K / 128)] with M the product of x's axes except the last, and w_scale [ceil(K / 128), ceil(N / 128)],
        transposed with transpose_w. None: follows from the given scales' shapes, or "tensor".
      implementation: "mosaic_gpu", "triton" or "xla" (cuBLAS on a GPU); None picks the device's first that supports
        the call. Only "xla" has derivatives in forward mode (jax.jvp) and second derivatives.

    Returns:
      out [..., N] in out_dtype.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call (the message has the reason); the GPU has no
        8-bit matmuls, and no implementation is named; or a gradient of 8-bit arrays is taken.

    Source of the 8-bit formats: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), arXiv:2209.05433.
    """
    request, inputs, options = check(
        x=x,
        w=w,
        bias=bias,
        activation=activation,
        residual=residual,
        x_scale=x_scale,
        w_scale=w_scale,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        precision=precision,
        scaling=scaling,
        implementation=implementation,
    )
    call = OP.call(request, options, implementation)
    return run(*OP.tuned(call, request, run, inputs, implementation))


@with_plain_numbers("transpose_w")
@with_explicit_axes(as_product)
@under_defaults
@jax.named_scope("gated_matmul")
def gated_matmul(
    x: Float[Array, "*M K"] | QuantizedArray,
    w_gate: Float[Array, "K N"] | Float[Array, "N K"] | QuantizedArray,
    w_up: Float[Array, "K N"] | Float[Array, "N K"] | QuantizedArray,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    *,
    residual: Float[Array, "*M N"] | None = None,
    x_scale: Float32[Array, "..."] | float | None = None,
    w_gate_scale: Float32[Array, "..."] | float | None = None,
    w_up_scale: Float32[Array, "..."] | float | None = None,
    transpose_w: bool = False,
    out_dtype: DTypeLike | None = None,
    precision: str | None = None,
    scaling: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "*M N"]:
    """The gated unit activation(x @ w_gate) * (x @ w_up), in one pass over x.

    Equivalent to the following JAX code, in float32 after the matmuls::

        gate, up = (x @ (w.T if transpose_w else w) for w in (w_gate, w_up))
        out = (activation(gate) * up + residual).astype(out_dtype)

    The forward of a differentiated call also saves the results of the two matmuls, in out_dtype.

    Args:
      x: [..., K], bfloat16, float16, float32, float8_e4m3fn or float8_e5m2; or a QuantizedArray.
      w_gate, w_up: [K, N] in x's dtype, [N, K] with transpose_w; or QuantizedArrays, also of low-bit weights. Both have
        one shape and dtype.
      activation: a name, or an elementwise jnp function of float32, as matmul takes it.
      residual: [..., N] in out_dtype, added last.
      x_scale, w_gate_scale, w_up_scale: float32, of 8-bit matmuls: the factors of the 8-bit values, like matmul's
        x_scale and w_scale. The last two have one shape.
      transpose_w: whether w_gate and w_up are [N, K].
      out_dtype: bfloat16, float16 or float32; None is the dtype of the given x, or bfloat16 if it has 8 bits.
      precision: None, "fp32", "tf32", "fp8", "bf16" or "fp16", as in matmul.
      scaling: of 8-bit matmuls, "tensor", "row" or "block", as in matmul; None follows the scales' shapes.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.

    Returns:
      out [..., N] in out_dtype.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call (the message has the reason); the GPU has no
        8-bit matmuls, and no implementation is named; or a gradient of 8-bit arrays or low-bit weights is taken.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202.
    """
    request, inputs, options = check_gated(
        x=x,
        w_gate=w_gate,
        w_up=w_up,
        activation=activation,
        residual=residual,
        x_scale=x_scale,
        w_gate_scale=w_gate_scale,
        w_up_scale=w_up_scale,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        precision=precision,
        scaling=scaling,
        implementation=implementation,
    )
    call = GATED.call(request, options, implementation)
    return run(*GATED.tuned(call, request, run, inputs, implementation))


def run(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """out [..., N] of a planned matmul or gated_matmul, differentiable. call, inputs: from `check` or `check_gated`."""
    inputs = as_varying(inputs, varying_axes(inputs))
    if call.options.low_bit is not None:
        return low_bit.planned(call, inputs)
    return gradients.planned(call, inputs) if call.options.scaling is None else fp8.run(call, inputs)


OP.explained_by(check)(matmul)
GATED.explained_by(check_gated)(gated_matmul)
