"""The matmuls in the backward of 8-bit matmuls."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels import dispatch
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.ops.matmul.fp8_operands import JoinedWeights, Operands, both_ways, has_kernel, of_rows
from jax_kernels.ops.matmul.gradients import batched
from jax_kernels.ops.matmul.implementations import IMPLEMENTATIONS, OP, request_of
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.pallas.matmul.passes import quantize_with_transpose as passes
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.quantization import QuantizedArray, quantization_scale

__all__ = ["Factor", "product_gradients"]


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
    call: PlannedCall, operands: Operands, factors: Sequence[Factor], dtype: Any, part_dtype: Any = jnp.float32
) -> tuple[jax.Array, list[jax.Array | None]]:
    """(dx, the sum of dz wᵀ over all factors, in `dtype`; for each factor dw = xᵀ dz in w's shape), by 8-bit matmuls.

    factors: in the order of operands.weights.

    A matmul adds its result to the sum before it in its epilogue. On a mesh devices may shard N, except for a matmul
    with an epilogue. There XLA adds the results, which have part_dtype.
    """
    if isinstance(operands.weights, JoinedWeights):
        cotangents = [factor.dz for factor in factors]
        is_reached = reaches(sum(dz.size for dz in cotangents), itemsize=1) and not is_partitioned()
        if is_reached and all(has_kernel(call, dz, None) for dz in cotangents):
            return _joined_gradients(call, operands, operands.weights, factors, dtype)
        apart = operands.weights.apart([dz.shape[-1] for dz in cotangents])
        return product_gradients(call, dataclasses.replace(operands, weights=apart), factors, dtype, part_dtype)
    dx: Any = None
    gradients: list[jax.Array | None] = []
    adds_later = len(factors) > 1 and is_partitioned()
    for factor, w in zip(factors, operands.weights, strict=True):
        if operands.x is None:
            dz_of_rows, dz_of_columns = of_rows(factor.dz, factor.scale, call.options.scaling, "e5m2"), None
        else:
            dz_of_rows, dz_of_columns = both_ways(call, factor.dz, factor.scale, format="e5m2")
        if adds_later:
            part = _product(call, dz_of_rows, w, part_dtype)
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
    the factors differ by as much. The number is not computed, because it may underflow: the weights' largest scale
    stays apart.
    """
    scale_of_dz = lambda factor: quantization_scale(factor.dz, jnp.float8_e5m2, "tensor", -1)
    own = [scale_of_dz(factor) if factor.scale is None else factor.scale for factor in factors]
    least, of_all_weights = jnp.float32(jnp.finfo(jnp.float32).tiny), functools.reduce(jnp.maximum, weights.scales)
    shares = [jnp.maximum(of_w / of_all_weights, least) for of_w in weights.scales]
    common = functools.reduce(jnp.maximum, [scale * share for scale, share in zip(own, shares, strict=True)], least)
    scales = [common / share for share in shares]
    *outer, _ = factors[0].dz.shape
    rows = [factor.dz.reshape(-1, factor.dz.shape[-1]) for factor in factors]
    given = [passes.reciprocal(scale).reshape(1) for scale in scales]
    found = passes.joined_both_ways(rows, given, jnp.dtype(jnp.float8_e5m2), interpret=call.interpret)
    quantized = lambda values, scale: QuantizedArray(values=values, scale=scale, scaling="tensor")
    dz = quantized(found.values.reshape(*outer, -1), common)
    dx = _product(call, dz, quantized(weights.values, of_all_weights), dtype)
    every = zip(found.transposed, scales, factors, strict=True)
    of_columns = ((quantized(y.reshape(-1, *outer), scale), factor.dtype) for y, scale, factor in every)
    return dx, [_weight_gradient(call, operands.x, y, of_w) for y, of_w in of_columns]


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
