"""matmul's request, and its implementations."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from jax_kernels.chunks import Need
from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.inputs.matmul import MatmulOptions
from jax_kernels.ops import unsupported
from jax_kernels.ops.activations import has_known_activation, not_for_mosaic, not_for_triton
from jax_kernels.ops.planned_op import Blocks, PlannedOp, kernel, plain
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.candidates import TiledCall, matmul_candidates
from jax_kernels.pallas.block_specs.matmul_specs import MatmulCall
from jax_kernels.pallas.matmul.sm90 import low_bit as low_bit_sm90
from jax_kernels.pallas.matmul.sm90 import matmul as matmul_sm90
from jax_kernels.pallas.matmul.triton import low_bit as low_bit_triton
from jax_kernels.pallas.matmul.triton import matmul as matmul_triton
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.plans import rounded_up
from jax_kernels.quantization.formats import LowBit
from jax_kernels.reference import matmul as reference

__all__ = ["BY_ROWS", "GATED", "IMPLEMENTATIONS", "OP", "MatmulRequest", "request_of"]

BY_ROWS = "x", "x_up", "residual", "preactivation", "up"  # the arrays [M, ...]


@dataclasses.dataclass(frozen=True)
class MatmulRequest(Request):
    """A matmul [m, k] @ [k, n] without its arrays, or the two matmuls of a gated unit.

    dtype: x's. shapes: of x, w and out, as a kernel takes them, with low-bit weights as bytes. activation: a function,
    or None. scaling: of an 8-bit matmul, "tensor", "row" or "block"; else None. low_bit: the layout of low-bit weights;
    else None. derivative: the activation's derivative, in the backward of mlp; else None. is_gated: two matmuls with
    the same x.
    """

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    shapes: tuple[tuple[int, int], ...]
    activation: Any
    precision: str | None
    scaling: str | None
    low_bit: LowBit | None = None
    derivative: Any = None
    transpose_x: bool = False
    is_gated: bool = False

    def bucket(self) -> dict[str, Any]:
        """As Request.bucket. The rows of x [rows, columns], as the caller sees it, are rounded up: m, or with
        transpose_x the summed k.
        """
        name = "k" if self.transpose_x else "m"
        rows = getattr(self, name)
        rounded = rounded_up(rows)
        of_x, of_w, of_out = self.shapes
        of_x = rounded, of_x[1]
        if self.transpose_x:
            of_w = (rounded, of_w[1]) if of_w == (rows, self.n) else (of_w[0], rounded)
        else:
            of_out = rounded, of_out[1]
        return super().bucket() | {name: rounded, "shapes": (of_x, of_w, of_out)}


def request_of(options: MatmulOptions, dtype: Any, sizes: tuple[int, int, int], device: Any) -> MatmulRequest:
    """The MatmulRequest for these options. dtype: x's. sizes: (M, N, K). device: the DeviceInfo of the GPU.

    With scaling, the request is for w as [N, K], which an 8-bit kernel needs.
    """
    m, n, k = sizes
    transpose_w = options.transpose_w or options.scaling is not None
    of_x, of_w = (k, m) if options.transpose_x else (m, k), (n, k) if transpose_w else (k, n)
    if options.low_bit is not None:
        of_w = n, options.low_bit.bytes_of(k)
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
        scaling=options.scaling,
        low_bit=options.low_bit,
        derivative=options.derivative,
        transpose_x=options.transpose_x,
    )


def _supports_mosaic(request: MatmulRequest) -> str | None:
    """The reason, in words for users, why the Hopper kernels cannot serve the request; None if they can."""
    if reason := unsupported.no_gpu(request) or unsupported.not_hopper(request):
        return reason
    if request.low_bit is not None:
        return _low_bit_reason(request, request.low_bit) or unsupported.no_mosaic(request)
    if request.dtype == "float32" and request.scaling is None:
        return "its wgmma instructions take bfloat16, float16 and 8 bits here, not float32"
    if reason := not_for_mosaic(request.activation) or not_for_mosaic(request.derivative):
        return reason
    if request.scaling is not None and (request.k % 128 or not request.k):
        return "its 8-bit matmuls need K in multiples of 128"
    if 0 in (request.m, request.n, request.k) or any(rows % 8 or columns % 64 for rows, columns in request.shapes):
        return "it needs rows in multiples of 8 and columns in multiples of 64 in x, w and out"
    return unsupported.no_mosaic(request)


def _low_bit_reason(request: MatmulRequest, layout: LowBit) -> str | None:
    """The reason, in words for users, why the Hopper kernel cannot serve a low-bit matmul; None if it can.

    layout: of the low-bit weights.
    """
    if request.dtype == "float32":
        return "with low-bit weights it takes x in bfloat16 and float16, not in float32"
    if request.activation is not None and (reason := not_for_triton(request.activation)):
        return reason
    most = low_bit_sm90.MOST_ROWS // (2 if request.is_gated else 1)
    if not 0 < request.m <= most:
        return f"with low-bit weights it takes 1 to {most} rows of x"
    if not request.n or request.n % low_bit_sm90.COLUMNS:
        return f"with low-bit weights it needs N in multiples of {low_bit_sm90.COLUMNS}"
    if not request.k or request.k != layout.padded(request.k) or layout.bytes_of(request.k) % low_bit_sm90.STEP_BYTES:
        by = low_bit_sm90.STEP_BYTES * (2 if layout.is_packed else 1)
        return f"it needs K in multiples of {by} with weights in {layout.format}"
    return None


def _sizes(request: MatmulRequest) -> list[int]:
    """[bytes of a value of x, of w, of out], of the arrays that a kernel reads and writes.

    8-bit operands have 1 byte, whatever their dtype before. Low-bit weights are arrays of bytes, so w has 1 too.
    """
    if request.scaling is not None:
        return [1, 1, jnp.dtype(request.out_dtype).itemsize]
    if request.low_bit is not None:
        return [jnp.dtype(request.dtype).itemsize, 1, jnp.dtype(request.out_dtype).itemsize]
    return [jnp.dtype(dtype).itemsize for dtype in (request.dtype, request.dtype, request.out_dtype)]


def _supports_triton(request: MatmulRequest) -> str | None:
    """The reason, in words for users, why the Triton kernels cannot serve the request; None if they can."""
    if reason := unsupported.no_triton(request):
        return reason
    if request.scaling is not None:
        return "it has no 8-bit matmuls"
    if request.precision == "fp32":
        return "its float32 matmuls use tf32, which needs precision='tf32'"
    if 0 in (request.m, request.n, request.k):
        return "a size is 0"
    sizes = zip(request.shapes, _sizes(request), strict=True)
    if not all(reaches(math.prod(shape), itemsize) for shape, itemsize in sizes):
        return unsupported.OUT_OF_REACH
    return (
        not_for_triton(request.activation) or not_for_triton(request.derivative) or unsupported.no_triton_gpu(request)
    )


def _config(request: MatmulRequest, implementation: str) -> tuple[Blocks, str]:
    """(Blocks, the source of their block spec row) for a request."""
    if request.low_bit is not None:
        return _low_bit_config(request, implementation)
    sizes = _sizes(request)
    call = MatmulCall(
        rows=request.m,
        columns=request.n,
        inner=request.k,
        bits=8 * sizes[0],
        is_gated=request.is_gated,
        is_aligned=all(columns * size % 16 == 0 for (_, columns), size in zip(request.shapes, sizes, strict=True)),
        derives=request.derivative is not None,
        has_long_epilogue=request.activation is not None or sizes[2] > sizes[0],
        core_count=request.device.core_count,
    )
    row, source = block_specs.matmul_row(request.device.compute_capability, implementation, call)
    return Blocks(forward=row.config, core_count=request.device.core_count), source


def _low_bit_config(request: MatmulRequest, implementation: str) -> tuple[Blocks, str]:
    row, source = block_specs.low_bit_row(
        request.device.compute_capability,
        implementation,
        rows=request.m,
        bits=8 * jnp.dtype(request.dtype).itemsize,
        weight_bits=4 if request.low_bit is not None and request.low_bit.is_packed else 8,
    )
    return Blocks(forward=row.config, core_count=request.device.core_count), source


def _candidates(request: MatmulRequest, implementation: str) -> dict[str, tuple[Any, ...]]:
    """The blocks that tuning times; none for low-bit weights."""
    if request.low_bit is not None:
        return {}
    blocks, _ = _config(request, implementation)
    call = TiledCall(
        itemsize=_sizes(request)[0],
        is_gated=request.is_gated,
        shared_memory=request.device.shared_memory_per_block,
    )
    return {"forward": matmul_candidates(blocks.forward, call)}


def _mosaic(inputs, options, **launch):
    run = matmul_sm90.matmul if options.low_bit is None else low_bit_sm90.matmul
    return run(inputs, options, **launch)


def _triton(inputs, options, **launch):
    run = matmul_triton.matmul if options.low_bit is None else low_bit_triton.matmul
    return run(inputs, options, **launch)


def _xla(inputs, options, *, config, interpret):
    return reference.matmul(inputs, options)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(
        "mosaic_gpu",
        _supports_mosaic,
        functools.partial(_config, implementation="mosaic_gpu"),
        kernel(_mosaic, once=True),
        None,
        functools.partial(_candidates, implementation="mosaic_gpu"),
    ),
    "triton": Implementation(
        "triton",
        _supports_triton,
        functools.partial(_config, implementation="triton"),
        kernel(_triton, once=True),
        None,
        functools.partial(_candidates, implementation="triton"),
    ),
    "xla": Implementation("xla", lambda request: None, without_blocks, plain(_xla, has_known_activation), None),
}


def _order(request: MatmulRequest) -> tuple[tuple[str, ...], str]:
    if request.low_bit is not None:
        return block_specs.low_bit_order(request.device.compute_capability, request.m)
    return block_specs.matmul_order(request.device.compute_capability, rows=request.m, columns=request.n)


def _need(request: MatmulRequest, name: str) -> Need:
    """The memory of a call, for its plan: plain JAX sums in float32 arrays of out's size."""
    is_whole = request.scaling is not None or request.transpose_x or not isinstance(request.m, int) or request.m < 2
    if is_whole or not isinstance(request.n, int):
        return Need(kept=0, temporary=0, most=1, axes="rows")
    size = 4.0 * request.m * request.n
    temporary = size * (2 if request.is_gated else 1) if name == "xla" else 0.0
    return Need(kept=size, temporary=temporary, most=request.m, axes="rows")


OP = PlannedOp("matmul", IMPLEMENTATIONS, _order, _need)
GATED = PlannedOp("gated_matmul", IMPLEMENTATIONS, _order, _need)
