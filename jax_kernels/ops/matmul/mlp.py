"""The op mlp: a feed-forward block. Its backward takes the activation's derivative in the epilogue of a matmul."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jax_kernels import chunks
from jax_kernels.chunks import Need
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.ops import checks
from jax_kernels.ops.activations import derivative_of
from jax_kernels.ops.matmul import checks as matmul_checks
from jax_kernels.ops.matmul import gradients
from jax_kernels.ops.matmul.checks import ROUNDED, check_gated, checked_bias, checked_residual
from jax_kernels.ops.matmul.implementations import GATED, MatmulRequest
from jax_kernels.ops.planned_op import PlannedCall, PlannedOp
from jax_kernels.ops.sharding.explicit_axes import as_product, with_explicit_axes
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.plain_numbers import with_plain_numbers
from jax_kernels.quantization import QuantizedArray
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["MLP", "PRECISIONS", "RESIDUALS", "check", "mlp"]

RESIDUALS = "mlp_gate", "mlp_up"  # names for policies of jax.checkpoint: results before the activation

PRECISIONS = (None, "fp32", "tf32")  # the precisions of matmul that mlp supports


def _need(request: MatmulRequest, name: str) -> Need:
    """The memory of an undifferentiated call, for its plan: its hidden values are temporary."""
    if not isinstance(request.m, int) or request.m < 2:
        return Need(kept=0, temporary=0, most=1, axes="rows")
    itemsize = 4 if request.dtype == "float32" else 2
    kept = 2.0 * request.m * request.k * itemsize
    return Need(kept=kept, temporary=1.0 * request.m * request.n * itemsize, most=request.m, axes="rows")


MLP = PlannedOp("mlp", GATED.implementations, GATED.order, _need)


class MlpInputs(NamedTuple):
    """The arrays of an mlp call.

    first: MatmulInputs of the matmuls before the activation. Its x is [..., K]; its bias is bias_up [H] or None. With a
    gate, its w is w_gate and its w_up is w_up. Without one, its w is w_up and its w_up is None. down: w_down, [H, N],
    or [N, H] with transpose_w. bias_down: [N]. residual: [..., N].
    """

    first: MatmulInputs
    down: Any
    bias_down: Any = None
    residual: Any = None


@with_plain_numbers("transpose_w")
@with_explicit_axes(as_product)
@under_defaults
@jax.named_scope("mlp")
def mlp(
    x: Float[Array, "*M K"],
    w_up: Float[Array, "K H"] | Float[Array, "H K"],
    w_down: Float[Array, "H N"] | Float[Array, "N H"],
    *,
    w_gate: Float[Array, "K H"] | Float[Array, "H K"] | None = None,
    bias_up: Float[Array, " H"] | None = None,
    bias_down: Float[Array, " N"] | None = None,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    residual: Float[Array, "*M N"] | None = None,
    transpose_w: bool = False,
    precision: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "*M N"]:
    """The feed-forward block of a transformer, with or without a gate.

    Equivalent to the following JAX code, in float32 after each matmul, hidden in x's dtype::

        w_up, w_down, w_gate = (w.T if transpose_w else w for w in (w_up, w_down, w_gate))
        hidden = activation(x @ w_gate) * (x @ w_up)       # or, without w_gate, activation(x @ w_up + bias_up)
        out = hidden @ w_down + bias_down + residual

    The forward of a differentiated call keeps the results of the matmuls with w_gate and w_up in x's dtype, and drops
    hidden. The backward computes hidden again, with the activation's derivative, in the epilogue of the matmul of out's
    cotangent with w_down. So hidden's cotangent never reaches device memory.

    Args:
      x: [..., K], bfloat16, float16 or float32.
      w_up, w_gate: [K, H] in x's dtype, or [H, K] with transpose_w. Without w_gate there is no gate.
      w_down: [H, N] in x's dtype, or [N, H] with transpose_w.
      bias_up: [H] in x's dtype or float32; None with w_gate. bias_down: [N], likewise.
      activation: "relu", "gelu" (exact), "gelu_tanh", "silu", "sigmoid" or "tanh"; or an elementwise jnp function of
        float32, which may not close over traced arrays.
      precision: for float32 inputs, "fp32" (exact products, the default) or "tf32". None for other dtypes.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.
      residual: [..., N] in x's dtype, added last.
      transpose_w: all weights are [outputs, inputs], as in torch.nn.Linear.

    Returns:
      out [..., N] in x's dtype.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve the first matmuls (the message has the reason). Later
        matmuls that it does not support use "xla".

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202.
    """
    request, inputs, options = check(
        x=x,
        w_up=w_up,
        w_down=w_down,
        w_gate=w_gate,
        bias_up=bias_up,
        bias_down=bias_down,
        activation=activation,
        residual=residual,
        transpose_w=transpose_w,
        precision=precision,
        implementation=implementation,
    )
    inputs = as_varying(inputs, varying_axes(inputs))
    return _planned(*MLP.tuned(MLP.call(request, options, implementation), request, _planned, inputs, implementation))


def check(
    *, x, w_up, w_down, w_gate=None, bias_up=None, bias_down=None, activation="silu", residual=None,
    transpose_w=False, precision=None, implementation=None,
) -> tuple[MatmulRequest, MlpInputs, MatmulOptions]:  # fmt: skip
    """(request, arrays, options) of an mlp call. Raises the errors that mlp documents.

    request and options are of the matmul before the activation: with w_gate a gated unit, else the matmul with w_up.
    The options of the matmul with w_down follow from them.
    """
    checks.check_flags(transpose_w=transpose_w)
    checks.check_names(precision=precision)
    if precision == "fp8":
        raise ValueError("precision: got 'fp8', want 'fp32', 'tf32' or None; gated_matmul and matmul take 'fp8'")
    if precision in ROUNDED:
        raise ValueError(f"precision: got {precision!r}, want 'fp32', 'tf32' or None; cast x and the weights instead")
    x = checks.checked_array("x", x)
    if x.ndim == 0:
        raise ValueError("x: got shape (), want [..., K]")
    hidden, columns = _sizes(x, {"w_up": w_up, "w_gate": w_gate, "w_down": w_down}, transpose_w)
    if w_gate is not None and bias_up is not None:
        raise ValueError("bias_up: got an array with w_gate, want None")
    shared = {"activation": activation, "transpose_w": transpose_w, "precision": precision}
    shared |= {"x": x, "implementation": implementation}
    if w_gate is None:
        request, first, options = matmul_checks.check(w=w_up, **shared)
        if bias_up is not None:
            first = first._replace(bias=checked_bias(bias_up, x.dtype, hidden, "bias_up"))
    else:
        request, first, options = check_gated(w_gate=w_gate, w_up=w_up, **shared)
    inputs = MlpInputs(
        first=first,
        down=checks.checked_array("w_down", w_down),
        bias_down=None if bias_down is None else checked_bias(bias_down, x.dtype, columns, "bias_down"),
        residual=None if residual is None else checked_residual(residual, x.dtype, (*x.shape[:-1], columns)),
    )
    return dataclasses.replace(request, op="mlp"), inputs, options


def _sizes(x: Any, weights: dict[str, Any], transpose_w: bool) -> tuple[int, int]:
    """(H, N): the hidden size and the number of outputs. weights: w_up, w_gate (or None) and w_down, by name.

    Raises TypeError or ValueError for weights that do not fit x and each other.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, w in weights.items():
        if name == "w_gate" and w is None:
            continue
        if isinstance(w, QuantizedArray):
            raise TypeError(f"{name}: got a QuantizedArray, want an array; gated_matmul and matmul take this too")
        w = checks.checked_array(name, w)
        if w.dtype != x.dtype:
            raise TypeError(f"{name}: got dtype {w.dtype}, want x's dtype {x.dtype}")
        if w.ndim != 2:
            raise ValueError(f"{name}: got shape {w.shape}, want two axes")
        found[name] = w.shape[::-1] if transpose_w else w.shape
    depth, hidden = x.shape[-1], found["w_up"][1]
    for name, (inner, outer) in found.items():
        want = (hidden, outer) if name == "w_down" else (depth, hidden)
        if (inner, outer) != want:
            want = want[::-1] if transpose_w else want
            of = f"w_up's H = {hidden}" if name == "w_down" else f"x's K = {depth}"
            of += f" and w_up's H = {hidden}" if name == "w_gate" else ""
            raise ValueError(f"{name}: got shape {weights[name].shape}, want {want} with {of}")
    return hidden, found["w_down"][1]


def _planned(call: PlannedCall, inputs: MlpInputs) -> jax.Array:
    """out [..., N] of a planned mlp call, differentiable."""
    if call.implementation == "xla":
        return _plain(call, inputs)
    return _by_kernels(call, in_reverse_mode(inputs, no_forward_mode("mlp")))


def _out(call, inputs):
    """out [..., N]; in chunks of rows if the hidden values of all rows do not fit the memory."""
    x, residual = inputs.first.x, inputs.residual
    whole = lambda inputs: _down(call, inputs, gradients.batched(call)(inputs.first).out)
    *shape, _ = x.shape
    rows = chunks.known_rows(shape)
    if rows < 2:
        return whole(inputs)

    def part(of: tuple[slice, ...]) -> jax.Array:
        if not of:
            return whole(inputs)
        first = inputs.first._replace(x=x[of])
        return whole(inputs._replace(first=first, residual=None if residual is None else residual[of]))

    hidden = inputs.down.shape[1 if call.options.transpose_w else 0]
    size = rows * hidden * x.dtype.itemsize
    need = Need(kept=2.0 * x.size * x.dtype.itemsize, temporary=1.0 * size, most=rows, axes="rows")
    return chunks.by_rows("mlp", need, x, part, is_partitioned(), shape)


def _down(call: PlannedCall, inputs: MlpInputs, hidden: jax.Array) -> jax.Array:
    """hidden @ w_down + bias_down + residual, [..., N]."""
    options = dataclasses.replace(call.options, activation=None)
    given = MatmulInputs(x=hidden, w=inputs.down, bias=inputs.bias_down, residual=inputs.residual)
    return gradients.further(call, given, options).out


@under_defaults
def _forward(call, inputs):
    saving = dataclasses.replace(call, options=dataclasses.replace(call.options, saves_preactivation=True))
    result = gradients.batched(saving)(inputs.first)
    saved = MatmulResult(
        out=None,  # type: ignore[arg-type]
        preactivation=checkpoint_name(result.preactivation, RESIDUALS[0]),
        up=None if result.up is None else checkpoint_name(result.up, RESIDUALS[1]),
    )
    out = _down(call, inputs, result.out)
    residual = None if inputs.residual is None else inputs.residual.dtype.type(0)  # shows that the residual existed
    return out, (inputs._replace(residual=residual), saved)


@under_defaults
def _backward(call, residuals, dout):
    """(MlpInputs of the gradients,). dout: the cotangent of out, [..., N]."""
    inputs, saved = residuals
    first, found = inputs.first, _cotangents(call, inputs, saved, dout)
    of_sum = lambda bias, cotangent: None if bias is None else gradients.sum_of_rows(cotangent).astype(bias.dtype)
    dfirst = MatmulInputs(
        x=gradients.product(
            call, found.out, first.w, x_up=found.up, w_up=first.w_up, transpose_w=not call.options.transpose_w
        ),
        w=gradients.weight_gradient(call, first.x, found.out),
        bias=of_sum(first.bias, found.out),
        w_up=None if found.up is None else gradients.weight_gradient(call, first.x, found.up),
    )
    gradient = MlpInputs(
        first=dfirst,
        down=gradients.weight_gradient(call, found.activated, dout),
        bias_down=of_sum(inputs.bias_down, dout),
        residual=None if inputs.residual is None else dout,
    )
    return (gradient,)


def _cotangents(call: PlannedCall, inputs: MlpInputs, saved: MatmulResult, dout: jax.Array) -> MatmulResult:
    """The cotangents of the first matmuls' results, and hidden, computed by one matmul of dout with w_down.

    In the MatmulResult, `out` is the cotangent of x @ w_gate (without a gate: of x @ w_up + bias_up), `up` the
    cotangent of x @ w_up with a gate, and `activated` is hidden. saved: the forward's preactivation and up. dout: the
    cotangent of mlp's result, [..., N].
    """
    derivative = derivative_of(call.options.activation)
    options = dataclasses.replace(call.options, transpose_w=not call.options.transpose_w, derivative=derivative)
    given = MatmulInputs(x=dout, w=inputs.down, preactivation=saved.preactivation, up=saved.up)
    return gradients.further(call, given, options)


_by_kernels = jax.custom_vjp(_out, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, _backward)
_plain = in_both_modes(_out, _forward, _backward)
MLP.explained_by(check)(mlp)
