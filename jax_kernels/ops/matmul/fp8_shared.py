"""8-bit matmuls of one x with several weights, which round x once and its cotangent's parts into one sum."""

from collections.abc import Sequence
from typing import Any

import jax

from jax_kernels.inputs.matmul import MatmulInputs
from jax_kernels.ops.matmul.checks import check
from jax_kernels.ops.matmul.fp8 import (
    DTYPES,
    Factor,
    Operands,
    both_ways,
    of_quantized,
    product_gradients,
    rounded_matmul,
    weights_both_ways,
)
from jax_kernels.ops.matmul.gradients import reverse_mode
from jax_kernels.ops.matmul.implementations import OP
from jax_kernels.ops.matmul.matmul import matmul
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.tracing.explicit_mesh import explicit_mesh
from jax_kernels.tracing.manual_axes import as_varying, varying_axes
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["shared_matmuls"]

Calls = tuple[PlannedCall, ...]


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
    checked = [check(x=x, w=w, w_scale=scale, **shared) for w, scale in zip(weights, scales, strict=True)]
    planned = [
        OP.tuned(OP.call(request, options, implementation), request, _alone, inputs, implementation)
        for request, inputs, options in checked
    ]
    calls = tuple(call for call, _ in planned)
    is_plain = any(call.implementation == "xla" or call.options.scaling == "block" for call in calls)
    if is_plain or x.dtype in DTYPES or explicit_mesh(x) is not None:
        every = zip(weights, scales, strict=True)
        return tuple(matmul(x, w, w_scale=scale, **shared) for w, scale in every)
    with jax.named_scope("matmul"):
        inputs = [reverse_mode(as_varying(inputs, varying_axes(inputs))) for _, inputs in planned]
        return _by_kernels(calls, inputs)


def _alone(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """The result of one of the matmuls, which tuning times."""
    return _results((call,), [inputs])[0]


def _results(calls: Calls, inputs: Sequence[MatmulInputs]) -> tuple[jax.Array, ...]:
    return tuple(rounded_matmul(call, given) for call, given in zip(calls, inputs, strict=True))


@under_defaults
def _forward(calls: Calls, inputs: Sequence[MatmulInputs]) -> Any:
    """(the results, (scalars of the dtypes of x and w; the Operands of the backward))."""
    x, x_of_columns = both_ways(calls[0], inputs[0].x, inputs[0].x_scale)
    weights, of_dx = weights_both_ways(calls[0], [(given.w, given.w_scale) for given in inputs])
    every = zip(calls, inputs, weights, strict=True)
    outs = tuple(of_quantized(call, given, x, w, None, saves=False).out for call, given, w in every)
    tokens = jax.tree.map(lambda y: y.dtype.type(0), [MatmulInputs(x=given.x, w=given.w) for given in inputs])
    return outs, (tokens, Operands(x=x_of_columns, weights=of_dx).named())


@under_defaults
def _backward(calls: Calls, residuals: Any, douts: tuple[jax.Array, ...]) -> Any:
    tokens, operands = residuals
    factors = [Factor(dz=dout, scale=None, dtype=token.w.dtype) for dout, token in zip(douts, tokens, strict=True)]
    dx, gradients = product_gradients(calls[0], operands, factors, tokens[0].x.dtype)
    first, *others = (MatmulInputs(x=None, w=dw) for dw in gradients)  # type: ignore[arg-type]
    return ([first._replace(x=dx), *others],)


_by_kernels = jax.custom_vjp(_results, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, _backward)
