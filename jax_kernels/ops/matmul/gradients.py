"""The planned matmul with its gradients, which are matmuls of the same kind."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels import chunks, dispatch
from jax_kernels.chunks import Need
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions, MatmulResult, in_range
from jax_kernels.ops.activations import has_known_activation
from jax_kernels.ops.matmul.implementations import BY_ROWS, IMPLEMENTATIONS, OP, request_of
from jax_kernels.ops.matmul.partitioning import by_rows, shared_matmul
from jax_kernels.ops.planned_op import MOST_CALLS, PlannedCall, no_calls, with_batch
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.tracing.derivatives import in_both_modes, in_reverse_mode, no_forward_mode
from jax_kernels.tracing.promotion import under_defaults

__all__ = [
    "ScaledCotangents",
    "batched",
    "epilogue_gradients",
    "further",
    "planned",
    "product",
    "reverse_mode",
    "sum_of_rows",
    "weight_gradient",
]

LONG_SUM = 8192  # rows of a 16-bit sum that XLA computes, see weight_gradient


def planned(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """out [..., N] of a planned matmul or gated_matmul of x [..., K] of 16 or 32 bits, differentiable."""
    return _plain(call, inputs) if call.implementation == "xla" else _by_kernels(call, reverse_mode(inputs))


def reverse_mode(inputs: MatmulInputs) -> MatmulInputs:
    """The inputs, unchanged, but forward-mode derivatives through them raise NotImplementedError: kernels have none."""
    return in_reverse_mode(inputs, no_forward_mode("gated_matmul" if inputs.is_gated else "matmul"))


def _out(call, inputs):
    return batched(call)(inputs).out


@under_defaults
def _forward(call, inputs):
    saves = call.options.activation is not None or inputs.w_up is not None
    result = batched(dataclasses.replace(call, options=dataclasses.replace(call.options, saves_preactivation=saves)))(
        inputs
    )
    residual = None if inputs.residual is None else inputs.residual.dtype.type(0)  # shows that the residual existed
    return result.out, (inputs._replace(residual=residual), result._replace(out=None))  # type: ignore[arg-type]


@under_defaults
def _backward(call, residuals, dout):
    """(MatmulInputs of the gradients,). dout: the cotangent of out, [..., N]."""
    inputs, saved = residuals
    dz, dup = epilogue_gradients(call.options, saved, dout.astype(jnp.float32))
    dbias = None
    if inputs.bias is not None and dout.dtype != inputs.x.dtype:
        dbias = sum_of_rows(dz).astype(inputs.bias.dtype)
    scaled = ScaledCotangents.of(dz, dup, dout.dtype, inputs.x.dtype)
    dz, dup = scaled.dz, scaled.dup
    if inputs.bias is not None and dbias is None:
        dz = lax.optimization_barrier(dz)  # without it XLA writes dz in float32 for the sum and reads it again
        dbias = sum_of_rows(dz).astype(inputs.bias.dtype)
    dx = scaled.back(
        functools.partial(product, call, dz, inputs.w, x_up=dup, w_up=inputs.w_up),
        transpose_w=not call.options.transpose_w,
    )
    dw = scaled.back(functools.partial(weight_gradient, call, inputs.x, dz))
    dw_up = None if dup is None else scaled.back(functools.partial(weight_gradient, call, inputs.x, dup))
    dresidual = None if inputs.residual is None else dout
    return (MatmulInputs(x=dx, w=dw, bias=dbias, residual=dresidual, w_up=dw_up),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledCotangents:
    """Cotangents that were divided by `scale` and rounded to x's dtype, for the matmuls of the backward.

    dz: the cotangent of x @ w + bias; dup: of x @ w_up, or None. scale: float32, a power of two that brings the largest
    value to about 2**14; None is 1. Only float16 x with a float32 out has one: float16 has too little range for float32
    cotangents. dtype: x's.
    """

    dz: jax.Array
    dup: jax.Array | None
    scale: jax.Array | None
    dtype: Any

    @classmethod
    def of(cls, dz: jax.Array, dup: jax.Array | None, of_out: Any, dtype: Any) -> "ScaledCotangents":
        """The scaled cotangents. dz, dup: float32, dup may be None. of_out: the dtype of out. dtype: the dtype of x."""
        scale, all_of = None, [y for y in (dz, dup) if y is not None]
        if dtype == jnp.float16 and of_out == jnp.float32:
            largest = functools.reduce(jnp.maximum, [jnp.abs(y).max(initial=0) for y in all_of])
            _, exponent = jnp.frexp(jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1))
            scale = jnp.ldexp(jnp.float32(1), jnp.clip(exponent - 14, -126, 126))
            all_of = [y / scale for y in all_of]
        rounded = [y.astype(dtype) for y in all_of]
        return cls(dz=rounded[0], dup=None if dup is None else rounded[1], scale=scale, dtype=dtype)

    def back(self, of_out_dtype: Callable[..., jax.Array], **options: Any) -> jax.Array:
        """A gradient, computed by a matmul of the divided cotangents: the matmul's result times `scale`, in x's dtype.

        of_out_dtype(**options): computes the matmul of dz or dup. With a scale it is also given out_dtype="float32",
        since the result may leave the range of x's dtype until it is multiplied. Without one, its result is returned as
        it is.
        """
        if self.scale is None:
            return of_out_dtype(**options)
        return (of_out_dtype(out_dtype="float32", **options) * self.scale).astype(self.dtype)


def epilogue_gradients(options: MatmulOptions, saved: MatmulResult, dout: Any) -> tuple[Any, Any]:
    """(cotangent of x @ w + bias, cotangent of x @ w_up or None without w_up), in float32.

    saved: the forward's preactivation and up; both None without an activation and without w_up. dout: the float32
    cotangent of out.
    """
    if saved.preactivation is None:
        return dout, None
    run = _compiled_gradients if has_known_activation(options) else _gradients_of_epilogue
    return run(options, saved, dout)


def _gradients_of_epilogue(options: MatmulOptions, saved: MatmulResult, dout: Any) -> tuple[Any, Any]:
    """epilogue_gradients of a call that saved its preactivation."""
    assert saved.preactivation is not None
    z = in_range(saved.preactivation.astype(jnp.float32), saved.preactivation.dtype)
    activation = options.activation or (lambda z: z)
    activated, vjp = jax.vjp(lambda z: activation(z).astype(jnp.float32), z)
    if saved.up is None:
        return vjp(dout)[0], None
    up = in_range(saved.up.astype(jnp.float32), saved.up.dtype)
    return vjp(dout * up)[0], dout * activated


_compiled_gradients = jax.jit(_gradients_of_epilogue, static_argnums=0, inline=True)


def sum_of_rows(dz: jax.Array) -> jax.Array:
    """float32 [N]: the sum of dz [..., N] over all axes except the last."""
    return dz.sum(axis=tuple(range(dz.ndim - 1)), dtype=jnp.float32)


def weight_gradient(call: PlannedCall, x: Any, dz: Any, out_dtype: str | None = None) -> jax.Array:
    """The gradient of w, xᵀ dz: [K, N], or [N, K] if the call has transpose_w. out_dtype: None is x's dtype.

    Hopper's kernel reaches 675 TFLOP/s for the sum over 16,384 rows of an MLP's 2048 x 5632 weights, and cuBLAS 705 to
    722 for 2048 x 2048, in a training step. So XLA computes sums over as many rows or half, if it need not shard them.
    """
    rows, factors = tuple(range(dz.ndim - 1)), (dz, x) if call.options.transpose_w else (x, dz)
    is_16_bit = call.implementation == "mosaic_gpu" and x.dtype.itemsize == 2
    if is_16_bit and math.prod(dz.shape[:-1]) >= LONG_SUM and not is_partitioned():
        dtype = jnp.dtype(out_dtype or x.dtype)
        return lax.dot_general(*factors, ((rows, rows), ((), ())), preferred_element_type=dtype)
    return product(call, *factors, transpose_x=True, out_dtype=out_dtype)


_by_kernels = jax.custom_vjp(_out, nondiff_argnums=(0,))
_by_kernels.defvjp(_forward, _backward)
_plain = in_both_modes(_out, _forward, _backward)


def product(
    call: PlannedCall,
    x: Any,
    w: Any,
    *,
    x_up: Any = None,
    w_up: Any = None,
    transpose_x: bool = False,
    transpose_w: bool = False,
    out_dtype: str | None = None,
) -> jax.Array:
    """x @ w + x_up @ w_up, a matmul of the backward; without x_up only x @ w.

    x: [..., K], or [K, ...] with transpose_x. w: [K, N], or [N, K] with transpose_w. K may be several axes. x_up, w_up:
    like x and w. out_dtype: None is x's dtype. It runs by the call's implementation if it supports the shapes, else by
    XLA.
    """
    options = MatmulOptions(
        out_dtype=out_dtype or str(x.dtype),
        precision=call.options.precision,
        transpose_x=transpose_x,
        transpose_w=transpose_w,
    )
    inputs = MatmulInputs(x=x, w=w, x_up=x_up, w_up=None if x_up is None else w_up)
    return further(call, inputs, options).out


def further(call: PlannedCall, inputs: MatmulInputs, options: MatmulOptions) -> MatmulResult:
    """The MatmulResult of another matmul that a planned call needs, such as one of its backward.

    call: gives only the implementation, which is used if it supports the shapes; else XLA is. inputs, options: of the
    other matmul.
    """
    request = request_of(options, inputs.x.dtype, options.sizes(inputs), dispatch.target_device(inputs.x))
    named = call.implementation if IMPLEMENTATIONS[call.implementation].supports(request) is None else "xla"
    run = lambda call, inputs: batched(call)(inputs)
    return run(*OP.tuned(OP.call(request, options, named), request, run, inputs, named))


def batched(call: PlannedCall) -> Callable[[MatmulInputs], MatmulResult]:
    """A function from MatmulInputs to the MatmulResult of the call's implementation.

    Under vmap, the mapped axis becomes an axis of M if all calls share w and bias; else the calls run one by one.
    """
    whole = functools.partial(_run, call) if call.implementation == "xla" else _batched(call)
    return functools.partial(_in_chunks, call, whole)


def _in_chunks(call: PlannedCall, whole: Callable[[MatmulInputs], MatmulResult], inputs: MatmulInputs) -> MatmulResult:
    """whole(inputs), in chunks of rows if the memory requires it."""
    shape, _ = call.options.axes(inputs)
    of_rows = {name: getattr(inputs, name) for name in BY_ROWS if getattr(inputs, name) is not None}
    are_rows = all(x.shape[: len(shape)] == shape for x in of_rows.values())
    is_splittable = are_rows and call.options.scaling is None and not call.options.transpose_x
    rows = chunks.known_rows(shape)
    if not is_splittable or rows < 2:
        return whole(inputs)
    size = rows * inputs.w.shape[0 if call.options.transpose_w or call.options.low_bit is not None else -1]
    sums = 0.0 if call.implementation != "xla" else 4.0 * size * (1 if inputs.w_up is None else 2)
    need = Need(kept=4.0 * size, temporary=sums, most=rows, axes="rows")
    part = lambda rows: inputs._replace(**{name: x[rows] for name, x in of_rows.items()}) if rows else inputs
    return chunks.by_rows(call_name(inputs), need, inputs.x, lambda rows: whole(part(rows)), is_partitioned(), shape)


def call_name(inputs: MatmulInputs) -> str:
    """The op of a call, in messages."""
    return "gated_matmul" if inputs.is_gated else "matmul"


def _run(call: PlannedCall, inputs: MatmulInputs) -> MatmulResult:
    forward = IMPLEMENTATIONS[call.implementation].forward
    return forward(inputs, call.options, config=call.config, interpret=call.interpret)


@functools.lru_cache(maxsize=MOST_CALLS)
def _batched(call: PlannedCall) -> Callable[[MatmulInputs], MatmulResult]:
    """A kernel's function from MatmulInputs, whose M and K may be several axes, to a MatmulResult.

    Under vmap, the mapped axis becomes an axis of M if all calls share w and bias; else the calls run one by one. The
    work is sharded over devices under jit.
    """
    run = functools.partial(_run, call)
    wrapped = jax.custom_batching.custom_vmap(
        shared_matmul(_of_any_sizes(call, by_rows(run, call.options)), call.options)
    )

    @wrapped.def_vmap
    def _(size: int, moves: Any, inputs: MatmulInputs):
        if size == 0:
            return no_calls(wrapped, moves, (inputs,))
        mapped = moves[0]
        others = any(mapped._replace(**dict.fromkeys(BY_ROWS)))
        if others or call.options.scaling in ("row", "block") or call.options.transpose_x:
            results = _one_by_one(wrapped, inputs, mapped)
            return results, jax.tree.map(lambda _: True, results)
        rows = {name: x for name in BY_ROWS if (x := getattr(inputs, name)) is not None}
        results = wrapped(
            inputs._replace(**{name: with_batch(size, x, getattr(mapped, name)) for name, x in rows.items()})
        )
        return results, jax.tree.map(lambda _: True, results)

    return wrapped


def _of_any_sizes(call: PlannedCall, function: Any) -> Any:
    """Wraps a kernel's function, such that XLA computes a matmul whose sizes the implementation does not support.

    The call is planned for whole arrays. Under jit on several devices, the wrapped function gets a device's shard,
    whose sizes may be too small or unaligned for the kernel. Where XLA partitions nothing, the function is called as it
    is.
    """

    def run(inputs: MatmulInputs) -> MatmulResult:
        if not is_partitioned():
            return function(inputs)
        request = request_of(call.options, inputs.x.dtype, call.options.sizes(inputs), dispatch.target_device(inputs.x))
        if IMPLEMENTATIONS[call.implementation].supports(request) is not None:
            forward = IMPLEMENTATIONS["xla"].forward
            return forward(inputs, call.options, config=None, interpret=call.interpret)
        return function(inputs)

    return run


def _one_by_one(function: Any, inputs: MatmulInputs, mapped: MatmulInputs) -> MatmulResult:
    """The MatmulResults of several calls under a vmap, stacked along axis 0, computed one after the other.

    mapped: for each of the inputs, whether it has the mapped axis.
    """
    moving = {name: x for name, x in inputs._asdict().items() if x is not None and getattr(mapped, name)}
    return lax.map(lambda of_call: function(inputs._replace(**of_call)), moving)
