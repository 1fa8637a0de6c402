"""matmul: a product of matrices with its epilogue, its gradient and its table of implementations."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels import dispatch
from jax_kernels.dispatch import Implementation, Request
from jax_kernels.matmul_inputs import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.ops import checks, reasons
from jax_kernels.ops.activations import ACTIVATIONS, not_for_triton
from jax_kernels.ops.planned_op import Blocks, PlannedCall, PlannedOp, join_batch, kernel, split_batch, under_defaults
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.matmul.sm90 import matmul as matmul_sm90
from jax_kernels.pallas.matmul.triton import matmul as matmul_triton
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.pallas.varying import as_varying, varying_axes
from jax_kernels.reference import matmul as reference

__all__ = ["IMPLEMENTATIONS", "MatmulRequest", "check", "check_gated", "gated_matmul", "matmul", "run"]


@dataclasses.dataclass(frozen=True)
class MatmulRequest(Request):
    """A product [m, k] @ [k, n] without its arrays, or two of a gated unit. shapes: those of x, w and out."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    shapes: tuple[tuple[int, int], ...]
    activation: Any
    precision: str | None


@under_defaults
def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    residual: jax.Array | None = None,
    transpose_w: bool = False,
    out_dtype: Any = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The product of x and w, with a bias, an activation and a residual in the same pass.

    Equivalent to the following JAX code, in float32 from the product on::

        out = x @ (w.T if transpose_w else w)
        out = out + bias
        out = activation(out)
        out = (out + residual).astype(out_dtype)

    Gradients are products of the same kind. With an activation, the forward of a call that is differentiated also
    saves x @ w + bias, in out_dtype; the activation's derivative is taken there.

    Args:
      x: [..., K], bfloat16, float16 or float32.
      w: [K, N] in x's dtype; [N, K] with transpose_w.
      bias: [N], in x's dtype or float32.
      activation: "relu", "gelu" (exact), "gelu_tanh", "silu", "sigmoid" or "tanh"; or an elementwise function in jnp,
        which is given float32. It may not close over arrays that are traced.
      residual: [..., N] in out_dtype, added last.
      transpose_w: whether w is [N, K], as torch.nn.Linear has it.
      out_dtype: bfloat16, float16 or float32; None is x's dtype.
      precision: for float32 inputs, "fp32" (exact products, the default) or "tf32". None for other dtypes.
      implementation: "mosaic_gpu", "triton" or "xla" (cuBLAS on a GPU); None picks the fastest that can serve.

    Returns:
      out [..., N] in out_dtype.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call, and why.
    """
    request, inputs, options = check(
        x=x,
        w=w,
        bias=bias,
        activation=activation,
        residual=residual,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        precision=precision,
        implementation=implementation,
    )
    return run(OP.call(request, options, implementation), inputs)


@under_defaults
def gated_matmul(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    activation: str | Callable[[jax.Array], jax.Array] = "silu",
    *,
    residual: jax.Array | None = None,
    transpose_w: bool = False,
    out_dtype: Any = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The gated unit activation(x @ w_gate) * (x @ w_up), in one pass over x.

    Equivalent to the following JAX code, in float32 from the products on::

        gate, up = (x @ (w.T if transpose_w else w) for w in (w_gate, w_up))
        out = (activation(gate) * up + residual).astype(out_dtype)

    The forward of a call that is differentiated also saves both products, in out_dtype.

    Args:
      x: [..., K], bfloat16, float16 or float32.
      w_gate, w_up: [K, N] in x's dtype; [N, K] with transpose_w.
      activation, residual, transpose_w, out_dtype, precision, implementation: as in matmul.

    Returns:
      out [..., N] in out_dtype.

    Raises:
      TypeError, ValueError, NotImplementedError: as matmul.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), arXiv:2002.05202.
    """
    request, inputs, options = check_gated(
        x=x,
        w_gate=w_gate,
        w_up=w_up,
        activation=activation,
        residual=residual,
        transpose_w=transpose_w,
        out_dtype=out_dtype,
        precision=precision,
        implementation=implementation,
    )
    return run(GATED.call(request, options, implementation), inputs)


def check_gated(
    *, x, w_gate, w_up, activation="silu", **arguments
) -> tuple[MatmulRequest, MatmulInputs, MatmulOptions]:
    """As check, of a gated unit."""
    w_gate, w_up = checks.checked_array("w_gate", w_gate), checks.checked_array("w_up", w_up)
    if (w_up.shape, w_up.dtype) != (w_gate.shape, w_gate.dtype):
        got, want = (f"{w.dtype}{list(w.shape)}" for w in (w_up, w_gate))
        raise ValueError(f"w_up: got {got}, want w_gate's dtype and shape {want}")
    request, inputs, options = check(x=x, w=w_gate, activation=activation, **arguments)
    return dataclasses.replace(request, op="gated_matmul"), inputs._replace(w_up=w_up), options


def run(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """The planned call, differentiable. x and residual may have any axes before the last."""
    outer, columns = inputs.x.shape[:-1], inputs.w.shape[0 if call.options.transpose_w else 1]
    rows = lambda y: None if y is None else y.reshape(math.prod(outer), y.shape[-1])
    inputs = inputs._replace(x=rows(inputs.x), residual=rows(inputs.residual))
    inputs = as_varying(inputs, varying_axes(inputs))
    return _matmul(call, inputs).reshape(*outer, columns)


def check(
    *, x, w, bias=None, activation=None, residual=None, transpose_w=False, out_dtype=None, precision=None,
    implementation=None,
) -> tuple[MatmulRequest, MatmulInputs, MatmulOptions]:  # fmt: skip
    """The request behind a call, its arrays and its options."""
    x, w = checks.checked_array("x", x), checks.checked_array("w", w)
    if x.dtype not in checks.DTYPES:
        raise TypeError(f"x: got dtype {x.dtype}, want bfloat16, float16 or float32")
    if w.dtype != x.dtype:
        raise TypeError(f"w: got dtype {w.dtype}, want x's dtype {x.dtype}")
    checks.check_flags(transpose_w=transpose_w)
    if x.ndim == 0 or w.ndim != 2:
        raise ValueError(f"x, w: got shapes {x.shape} and {w.shape}, want [..., K] and two axes")
    depth, columns = reversed(w.shape) if transpose_w else w.shape
    if x.shape[-1] != depth:
        want = "[N, K]" if transpose_w else "[K, N]"
        raise ValueError(f"w: got shape {w.shape}, want {want} with x's K = {x.shape[-1]}")
    out_dtype = x.dtype if out_dtype is None else _out_dtype(out_dtype)
    if bias is not None:
        bias = checks.checked_array("bias", bias)
        if bias.dtype not in (x.dtype, jnp.dtype(jnp.float32)):
            raise TypeError(f"bias: got dtype {bias.dtype}, want x's dtype {x.dtype}, or float32")
        if bias.shape != (columns,):
            raise ValueError(f"bias: got shape {bias.shape}, want [N] = {(columns,)}")
    if residual is not None:
        residual, shape = checks.checked_array("residual", residual), (*x.shape[:-1], columns)
        if residual.dtype != out_dtype:
            raise TypeError(f"residual: got dtype {residual.dtype}, want out_dtype {out_dtype}")
        if residual.shape != shape:
            raise ValueError(f"residual: got shape {residual.shape}, want [..., N] = {shape}")
    if precision not in (None, "fp32", "tf32"):
        raise ValueError(f"precision: got {precision!r}, want 'fp32', 'tf32' or None")
    if precision is not None and x.dtype != jnp.float32:
        raise ValueError(f"precision: got {precision!r} with {x.dtype} inputs, want None: it is for float32 inputs")
    checks.check_implementation(implementation)
    options = MatmulOptions(
        out_dtype=str(out_dtype),
        transpose_w=bool(transpose_w),
        activation=_activation(activation),
        precision=(precision or "fp32") if x.dtype == jnp.float32 else None,
    )
    inputs = MatmulInputs(x=x, w=w, bias=bias, residual=residual)
    sizes = math.prod(x.shape[:-1]), columns, depth
    return _request(options, x.dtype, sizes, dispatch.target_device(x)), inputs, options


def _request(options: MatmulOptions, dtype: Any, sizes: tuple[int, int, int], device: Any) -> MatmulRequest:
    m, n, k = sizes
    of_x, of_w = (k, m) if options.transpose_x else (m, k), (n, k) if options.transpose_w else (k, n)
    return MatmulRequest(
        op="matmul",
        device=device,
        m=m,
        n=n,
        k=k,
        dtype=str(dtype),
        out_dtype=options.out_dtype,
        shapes=(of_x, of_w, (m, n)),
        activation=options.activation,
        precision=options.precision,
    )


def _out_dtype(dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in checks.DTYPES:
        raise TypeError(f"out_dtype: got {dtype}, want bfloat16, float16, float32 or None")
    return found


def _activation(activation: Any) -> Callable[[Any], Any] | None:
    if activation is None or callable(activation):
        return activation
    if not isinstance(activation, str):
        raise TypeError(f"activation: got {type(activation).__name__}, want a name, a function or None")
    if activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation: got {activation!r}, want a function or one of {known}")
    return ACTIVATIONS[activation]


def _supports_mosaic(request: MatmulRequest) -> str | None:
    if reason := reasons.no_gpu(request) or reasons.not_hopper(request):
        return reason
    if request.dtype == "float32":
        return "its wgmma products take bfloat16 and float16 here, not float32"
    if request.activation is not None and request.activation not in ACTIVATIONS.values():
        return "of activations it takes those that have names"
    if 0 in (request.m, request.n, request.k) or any(rows % 8 or columns % 64 for rows, columns in request.shapes):
        return "it needs rows by 8 and columns by 64 in x, w and out"
    return reasons.no_mosaic(request)


def _sizes(request: MatmulRequest) -> list[int]:
    """The bytes of a number of x, w and out."""
    return [jnp.dtype(dtype).itemsize for dtype in (request.dtype, request.dtype, request.out_dtype)]


def _supports_triton(request: MatmulRequest) -> str | None:
    if reason := reasons.below(request, (8, 0)):
        return reason
    if request.precision == "fp32":
        return "its products of float32 are tf32 ones, which precision='tf32' asks for"
    if 0 in (request.m, request.n, request.k):
        return "a size is 0"
    if not all(reaches(math.prod(shape) * size) for shape, size in zip(request.shapes, _sizes(request), strict=True)):
        return "Pallas' Triton does not reach all of an array of 2 to 4 GiB"
    return not_for_triton(request.activation) or reasons.no_gpu(request)


def _config(request: MatmulRequest, implementation: str) -> tuple[Blocks, str]:
    sizes = _sizes(request)
    row, source = block_specs.matmul_row(
        request.device.compute_capability,
        implementation,
        columns=request.n,
        rows=request.m,
        bits=8 * sizes[0],
        is_gated=request.op == "gated_matmul",
        is_aligned=all(columns * size % 16 == 0 for (_, columns), size in zip(request.shapes, sizes, strict=True)),
    )
    return Blocks(forward=row.config, core_count=request.device.core_count), source


def _xla(inputs, options, *, config, interpret):
    return reference.matmul(inputs, options)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(
        "mosaic_gpu",
        _supports_mosaic,
        functools.partial(_config, implementation="mosaic_gpu"),
        kernel(matmul_sm90.matmul),
        None,
    ),
    "triton": Implementation(
        "triton",
        _supports_triton,
        functools.partial(_config, implementation="triton"),
        kernel(matmul_triton.matmul),
        None,
    ),
    "xla": Implementation("xla", lambda request: None, lambda request: (None, "heuristic"), _xla, None),
}


def _order(request: MatmulRequest) -> tuple[str, ...]:
    return block_specs.matmul_order(request.device.compute_capability)


OP = PlannedOp("matmul", IMPLEMENTATIONS, _order)
OP.explained_by(check)(matmul)
GATED = PlannedOp("gated_matmul", IMPLEMENTATIONS, _order)
GATED.explained_by(check_gated)(gated_matmul)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: PlannedCall, inputs: MatmulInputs) -> jax.Array:
    """[M, N]."""
    return _batched(call)(inputs).out


@under_defaults
def _matmul_fwd(call, inputs):
    saves = call.options.activation is not None or inputs.w_up is not None
    result = _batched(dataclasses.replace(call, options=dataclasses.replace(call.options, saves_preactivation=saves)))(
        inputs
    )
    residual = None if inputs.residual is None else inputs.residual.dtype.type(0)  # tells that there was one
    return result.out, (inputs._replace(residual=residual), result._replace(out=None))


@under_defaults
def _matmul_bwd(call, residuals, dout):
    inputs, saved = residuals
    dz, dup = _epilogue_gradients(call.options, saved, dout.astype(jnp.float32))
    dbias = None if inputs.bias is None else dz.sum(axis=0).astype(inputs.bias.dtype)
    dx, dw = _product_gradients(call, inputs.x, inputs.w, dz, summed=dup is not None)
    dw_up = None
    if dup is not None:
        dx_up, dw_up = _product_gradients(call, inputs.x, inputs.w_up, dup, summed=True)
        dx = (dx + dx_up).astype(inputs.x.dtype)
    dresidual = None if inputs.residual is None else dout
    return (MatmulInputs(x=dx, w=dw, bias=dbias, residual=dresidual, w_up=dw_up),)


def _epilogue_gradients(options: MatmulOptions, saved: MatmulResult, dout: Any) -> tuple[Any, Any]:
    """The gradients of x @ w + bias, and of x @ w_up, None without one; float32."""
    if saved.preactivation is None:
        return dout, None
    activated, vjp = jax.vjp(options.activation or (lambda z: z), saved.preactivation.astype(jnp.float32))
    if saved.up is None:
        return vjp(dout)[0], None
    return vjp(dout * saved.up.astype(jnp.float32))[0], dout * activated


def _product_gradients(call: PlannedCall, x: Any, w: Any, dz: Any, *, summed: bool) -> tuple[Any, Any]:
    """dx = dz wᵀ and dw = xᵀ dz. summed: dx is added to another one, and is float32."""
    transposed, dz = call.options.transpose_w, dz.astype(x.dtype)
    dx = _product(call, dz, w, transpose_w=not transposed, out_dtype="float32" if summed else None)
    return dx, _product(call, *((dz, x) if transposed else (x, dz)), transpose_x=True)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _product(
    call: PlannedCall,
    x: Any,
    w: Any,
    *,
    transpose_x: bool = False,
    transpose_w: bool = False,
    out_dtype: str | None = None,
) -> jax.Array:
    """A product of the backward, by the call's implementation where it serves its shapes, else by XLA."""
    options = MatmulOptions(
        out_dtype=out_dtype or str(x.dtype),
        precision=call.options.precision,
        transpose_x=transpose_x,
        transpose_w=transpose_w,
    )
    inputs = MatmulInputs(x, w)
    request = _request(options, x.dtype, options.sizes(inputs), dispatch.target_device(x))
    serves = IMPLEMENTATIONS[call.implementation].supports(request) is None
    return _batched(OP.call(request, options, call.implementation if serves else "xla"))(inputs).out


@functools.cache
def _batched(call: PlannedCall) -> Callable[[MatmulInputs], MatmulResult]:
    """The call's implementation, with a vmap that joins its axis to the rows where all calls share w and bias."""

    def run(inputs: MatmulInputs) -> MatmulResult:
        return IMPLEMENTATIONS[call.implementation].forward(
            inputs, call.options, config=call.config, interpret=call.interpret
        )

    if call.implementation == "xla":
        return run
    wrapped = jax.custom_batching.custom_vmap(run)

    @wrapped.def_vmap
    def _(size: int, batched: Any, inputs: MatmulInputs):
        mapped = batched[0]
        if mapped.w or mapped.bias or mapped.w_up or call.options.transpose_x:
            results = _one_by_one(wrapped, inputs, mapped)
            return results, jax.tree.map(lambda _: True, results)
        join = functools.partial(join_batch, size)
        rows = {name: join(getattr(inputs, name), getattr(mapped, name)) for name in ("x", "residual")
                if getattr(inputs, name) is not None}  # fmt: skip
        results = wrapped(inputs._replace(**rows))
        return jax.tree.map(functools.partial(split_batch, size), results), jax.tree.map(lambda _: True, results)

    return wrapped


def _one_by_one(function: Any, inputs: MatmulInputs, mapped: MatmulInputs) -> MatmulResult:
    """A vmap by a loop."""
    moving = {name: x for name, x in inputs._asdict().items() if x is not None and getattr(mapped, name)}
    return lax.map(lambda of_call: function(inputs._replace(**of_call)), moving)
