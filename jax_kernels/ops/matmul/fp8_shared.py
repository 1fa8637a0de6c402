"""8-bit matmuls of one x with several weights, which round x once and sum its cotangents in one matmul.

With histories of magnitudes ("delayed scaling"), the kernels that round an array find its new magnitude in the same
pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.matmul import MatmulInputs
from jax_kernels.ops.matmul import fp8
from jax_kernels.ops.matmul.checks import check, check_gated
from jax_kernels.ops.matmul.fp8_gradients import Factor, product_gradients
from jax_kernels.ops.matmul.fp8_operands import (
    DTYPES,
    Operands,
    can_measure,
    largest_finite,
    rounded_both_ways,
    weights_both_ways,
)
from jax_kernels.ops.matmul.gradients import reverse_mode
from jax_kernels.ops.matmul.implementations import GATED, OP
from jax_kernels.ops.matmul.matmul import matmul
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.pallas.matmul.passes.delayed_largest import delayed_largest
from jax_kernels.quantization.scales import scale_of
from jax_kernels.tracing.explicit_mesh import explicit_mesh
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["Recorded", "delayed_matmul", "delayed_matmuls", "shared_matmuls"]


class _Calls(NamedTuple):
    """Planned matmuls with the same x. measures: whether they find the largest magnitudes of x and of the weights."""

    calls: tuple[PlannedCall, ...]
    measures: bool = False


class Recorded(NamedTuple):
    """outs: the results of matmuls. largest: the largest finite magnitudes of x and of each of the weights, float32 [];
    () if they were not asked for.
    """

    outs: tuple[jax.Array, ...]
    largest: tuple[jax.Array, ...]


@under_defaults
def shared_matmuls(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    x_scale: Any = None,
    w_scales: Sequence[Any] | None = None,
    scaling: str | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """The results of matmul(x, w, precision="fp8", ...) for each w: a tuple of [..., N].

    Kernels with scales of tensors or rows round x, and its transpose for the backward, once for all matmuls.

    x: [..., K], of 16 or 32 bits. weights: [K, N] each, in x's dtype. x_scale, w_scales, scaling, implementation: as in
    matmul; w_scales has a scale or None for each of the weights.
    """
    scales = [None] * len(weights) if w_scales is None else list(w_scales)
    shared: dict[str, Any] = {"precision": "fp8", "scaling": scaling, "implementation": implementation}
    shared["x_scale"] = x_scale
    calls, inputs = _planned(x, weights, scales, shared)
    is_plain = any(call.implementation == "xla" or call.options.scaling == "block" for call in calls)
    if is_plain or x.dtype in DTYPES or explicit_mesh(x) is not None:
        every = zip(weights, scales, strict=True)
        return tuple(matmul(x, w, w_scale=scale, **shared) for w, scale in every)
    return _run(_Calls(calls), inputs).outs


@under_defaults
def delayed_matmuls(
    x: jax.Array,
    weights: Sequence[jax.Array],
    *,
    x_history: jax.Array,
    w_histories: Sequence[jax.Array],
    records: bool,
    implementation: str | None = None,
) -> Recorded | None:
    """shared_matmuls with scales from histories; None if the kernels cannot measure the call's arrays.

    x_history, w_histories: float32 magnitudes of earlier calls, 0 for none; an empty history's scale comes from the
    array. records: whether the result has `largest`.
    """
    shared = {"precision": "fp8", "scaling": "tensor", "implementation": implementation, "x_scale": 1.0}
    calls, inputs = _planned(x, weights, [1.0] * len(weights), shared)
    is_served = all(can_measure(call, given) for call, given in zip(calls, inputs, strict=True))
    if not is_served or explicit_mesh(x) is not None:
        return None
    x_scale = _delayed_scale(calls[0], x_history, x)
    w_scales = [_delayed_scale(calls[0], history, w) for history, w in zip(w_histories, weights, strict=True)]
    every = zip(inputs, w_scales, strict=True)
    return _run(_Calls(calls, records), [given._replace(x_scale=x_scale, w_scale=scale) for given, scale in every])


@under_defaults
def delayed_matmul(
    x: jax.Array,
    w: jax.Array,
    w_up: jax.Array | None = None,
    *,
    x_history: jax.Array,
    w_histories: Sequence[jax.Array],
    records: bool,
    implementation: str | None = None,
    **options: Any,
) -> Recorded | None:
    """matmul, or gated_matmul with w_up, with scales from histories, as delayed_matmuls has them.

    options: bias, activation, residual and out_dtype, as in these ops.
    """
    options |= {"precision": "fp8", "scaling": "tensor", "implementation": implementation, "x_scale": 1.0}
    if w_up is None:
        request, inputs, static = check(x=x, w=w, w_scale=1.0, **options)
        call = OP.call(request, static, implementation)
    else:
        scales = {"w_gate_scale": 1.0, "w_up_scale": 1.0}
        request, inputs, static = check_gated(x=x, w_gate=w, w_up=w_up, **scales, **options)
        call = GATED.call(request, static, implementation)
    if not can_measure(call, inputs) or explicit_mesh(x) is not None:
        return None
    weights = [w] if w_up is None else [w, w_up]
    w_scales = [_delayed_scale(call, history, y) for history, y in zip(w_histories, weights, strict=True)]
    inputs = inputs._replace(x_scale=_delayed_scale(call, x_history, x), w_scale=w_scales[0])
    if w_up is not None:
        inputs = inputs._replace(w_up_scale=w_scales[1])
    return _run(_Calls((call,), records), [inputs])


def _planned(
    x: jax.Array, weights: Sequence[jax.Array], scales: Sequence[Any], options: dict[str, Any]
) -> tuple[tuple[PlannedCall, ...], list[MatmulInputs]]:
    """(the calls, their inputs) of matmuls of x with each of the weights."""
    implementation = options["implementation"]
    checked = [check(x=x, w=w, w_scale=scale, **options) for w, scale in zip(weights, scales, strict=True)]
    planned = [
        OP.tuned(OP.call(request, static, implementation), request, _alone, inputs, implementation)
        for request, inputs, static in checked
    ]
    return tuple(call for call, _ in planned), [inputs for _, inputs in planned]


def _delayed_scale(call: PlannedCall, history: jax.Array, x: jax.Array) -> jax.Array:
    """The e4m3 scale of x, float32 [], from its history."""
    history, x = lax.stop_gradient((history, x))
    return scale_of(delayed_largest(history, x, interpret=call.interpret), jnp.float8_e4m3fn)


def _alone(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """The result of one of the matmuls, which tuning times."""
    return fp8.rounded_matmul(call, inputs)


def _run(calls: _Calls, inputs: Sequence[MatmulInputs]) -> Recorded:
    with jax.named_scope("matmul"):
        return _by_kernels(calls, [reverse_mode(as_varying(given, varying_axes(given))) for given in inputs])


def _results(calls: _Calls, inputs: Sequence[MatmulInputs]) -> Recorded:
    """The Recorded without a derivative."""
    outs = tuple(fp8.rounded_matmul(call, given) for call, given in zip(calls.calls, inputs, strict=True))
    if not calls.measures:
        return Recorded(outs, ())
    weights = [w for given in inputs for w in (given.w, given.w_up) if w is not None]
    return Recorded(outs, tuple(map(largest_finite, (inputs[0].x, *weights))))


@under_defaults
def _forward(calls: _Calls, inputs: Sequence[MatmulInputs]) -> tuple[Recorded, Any]:
    """(the Recorded, residuals): for one call fp8's, else (scalars of the dtypes of x and w; the Operands)."""
    first, measures = calls.calls[0], calls.measures
    if len(inputs) == 1:
        found = fp8.forward(first, inputs[0], measures=measures)
        return Recorded((found.out,), found.largest), found.residuals
    x, x_of_columns, *largest = rounded_both_ways(first, inputs[0].x, inputs[0].x_scale, measures=measures)
    weights = weights_both_ways(first, [(given.w, given.w_scale) for given in inputs], measures=measures)
    every = zip(calls.calls, inputs, weights.forward, strict=True)
    outs = tuple(fp8.of_quantized(call, given, x, w, None, saves=False).out for call, given, w in every)
    tokens = jax.tree.map(lambda y: y.dtype.type(0), [MatmulInputs(x=given.x, w=given.w) for given in inputs])
    operands = Operands(x=x_of_columns, weights=weights.of_dx).named()
    return Recorded(outs, (*largest, *weights.largest)), (tokens, operands)


@under_defaults
def _backward(calls: _Calls, residuals: Any, cotangents: Recorded) -> Any:
    first, douts = calls.calls[0], cotangents.outs
    if len(douts) == 1:
        return (list(fp8.backward(first, residuals, douts[0])),)
    tokens, operands = residuals
    factors = [Factor(dz=dout, scale=None, dtype=token.w.dtype) for dout, token in zip(douts, tokens, strict=True)]
    dtype = tokens[0].x.dtype
    dx, gradients = product_gradients(first, operands, factors, dtype, part_dtype=dtype)
    of_first, *others = (MatmulInputs(x=None, w=dw) for dw in gradients)  # type: ignore[arg-type]
    return ([of_first._replace(x=dx), *others],)


_by_kernels = jax.custom_vjp(_results, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, _backward)
