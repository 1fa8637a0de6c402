"""grouped_matmul's request, and its implementations."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax.numpy as jnp

from jax_kernels.chunks import Need
from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions
from jax_kernels.ops import unsupported
from jax_kernels.ops.activations import has_known_activation, not_for_mosaic, not_for_triton
from jax_kernels.ops.planned_op import Blocks, PlannedOp, kernel, plain
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.matmul_specs import GroupedCall, GroupedSm90
from jax_kernels.pallas.grouped.sm90.matmul import grouped_matmul as sm90_matmul
from jax_kernels.pallas.grouped.sm90.weight_gradient import weight_gradient as sm90_weight_gradient
from jax_kernels.pallas.grouped.triton.matmul import grouped_matmul as triton_matmul
from jax_kernels.pallas.grouped.triton.weight_gradient import weight_gradient as triton_weight_gradient
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.reference import grouped_matmul as reference

__all__ = ["GATED", "IMPLEMENTATIONS", "OP", "GroupedRequest", "need_of", "request_of"]


@dataclasses.dataclass(frozen=True)
class GroupedRequest(Request):
    """A grouped matmul, or grouped gated unit, without its arrays: x [m, k], w and w_up [groups, k, n].

    source_rows: the rows of x, which are m rows, or from which m rows are gathered. gathers: whether they are gathered.
    dtype: x's. activation: a function, or None. precision: of float32 matmuls. scaling: "row" of an 8-bit matmul, else
    None. is_gated: whether there are two matmuls, with w and w_up.
    """

    SIZES: ClassVar[tuple[str, ...]] = ("groups", "m", "n", "k", "source_rows")
    ROUNDED: ClassVar[tuple[str, ...]] = ("m", "source_rows")

    groups: int
    m: int
    n: int
    k: int
    source_rows: int
    dtype: str
    out_dtype: str
    activation: Any
    precision: str | None
    gathers: bool = False
    scaling: str | None = None
    is_gated: bool = False


def request_of(options: GroupedOptions, inputs: GroupedInputs, device: Any) -> GroupedRequest:
    """The GroupedRequest of a call. device: the DeviceInfo of the GPU."""
    groups, m, n, k = options.sizes(inputs)
    return GroupedRequest(
        op="grouped_matmul",
        device=device,
        groups=groups,
        m=m,
        n=n,
        k=k,
        source_rows=inputs.x.shape[0],
        dtype=str(inputs.x.dtype),
        out_dtype=options.out_dtype,
        activation=options.activation,
        precision=options.precision,
        gathers=inputs.gather is not None,
        scaling=options.scaling,
        is_gated=inputs.is_gated,
    )


def _supports_mosaic(request: GroupedRequest) -> str | None:
    """The reason, in words for users, why the Hopper kernel cannot serve the request; None if it can."""
    if reason := unsupported.no_gpu(request) or unsupported.not_hopper(request):
        return reason
    if "float32" in (request.dtype, request.out_dtype):
        return "it takes and returns bfloat16 and float16, not float32"
    if request.gathers:
        return "it loads blocks of neighbouring rows, and gathers none"
    if request.scaling is not None and (request.n % 128 or request.k % 128):  # the gradient of x sums over N
        return "its 8-bit matmuls need K and N in multiples of 128"
    if request.n % 64 or request.k % 64:
        return "it needs K and N in multiples of 64"
    return not_for_mosaic(request.activation) or unsupported.no_mosaic(request)


def _supports_triton(request: GroupedRequest) -> str | None:
    """The reason, in words for users, why the Triton kernels cannot serve the request; None if they can."""
    if reason := unsupported.no_triton(request):
        return reason
    if request.scaling is not None:
        return "it has no 8-bit matmuls"
    if request.precision == "fp32":
        return "its float32 matmuls use tf32, which needs precision='tf32'"
    shapes = (
        (request.source_rows, request.k),
        (request.m, request.k),
        (request.groups, request.k, request.n),
        (request.m, request.n),
    )
    itemsize = jnp.dtype(request.dtype).itemsize
    if not all(reaches(math.prod(shape), itemsize) for shape in shapes):
        return unsupported.OUT_OF_REACH
    return not_for_triton(request.activation) or unsupported.no_triton_gpu(request)


def _config(request: GroupedRequest, implementation: str) -> tuple[Blocks, str]:
    """(Blocks, the source of their block spec row) for a request. Their `backward` is for the gradient of w.

    On Hopper the gradient of w is Triton's if the number of rows is not a multiple of 8.
    """
    itemsize = 1 if request.scaling is not None else jnp.dtype(request.dtype).itemsize
    call = GroupedCall(
        rows=request.m,
        groups=request.groups,
        bits=8 * itemsize,
        is_gated=request.is_gated,
        is_aligned=all(columns * itemsize % 16 == 0 for columns in (request.n, request.k)),
    )
    capability = request.device.compute_capability
    row, source = block_specs.grouped_row(capability, implementation, call)
    backward = row.weight_gradient
    if isinstance(backward, GroupedSm90) and request.m % 8:
        of_gradient = dataclasses.replace(call, bits=max(call.bits, 16))  # of an 8-bit matmul it has 16 bits
        backward = block_specs.grouped_row(capability, "triton", of_gradient)[0].weight_gradient
    return Blocks(forward=row.forward, backward=backward, core_count=request.device.core_count), source


def _xla(inputs, options, *, config, interpret):
    return reference.grouped_matmul(inputs, options)


def _xla_weight_gradient(inputs, options, *, config, interpret):
    return reference.weight_gradient(inputs, options)


def _mosaic_weight_gradient(inputs, options, *, config, **launch):
    """The gradient of w on Hopper, by the kernel of this type of blocks.

    In plain JAX for a device's shard of other sizes than the Hopper kernel's, and in place of Triton if this JAX has no
    Pallas-Triton.
    """
    run: Any
    if isinstance(config, GroupedSm90):
        serves = inputs.x.shape[1] % 64 == inputs.dz.shape[1] % 64 == 0
        run = sm90_weight_gradient if serves else None
    else:
        run = triton_weight_gradient if backend.AVAILABLE else None
    if run is None:
        return reference.weight_gradient(inputs, options)
    return run(inputs, options, config=config, **launch)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(
        "mosaic_gpu",
        _supports_mosaic,
        functools.partial(_config, implementation="mosaic_gpu"),
        kernel(sm90_matmul, once=True),
        kernel(_mosaic_weight_gradient, "backward", once=True),
    ),
    "triton": Implementation(
        "triton",
        _supports_triton,
        functools.partial(_config, implementation="triton"),
        kernel(triton_matmul, once=True),
        kernel(triton_weight_gradient, "backward", once=True),
    ),
    "xla": Implementation(
        "xla",
        lambda request: None,
        without_blocks,
        plain(_xla, has_known_activation),
        plain(_xla_weight_gradient, has_known_activation),
    ),
}


def _order(request: GroupedRequest) -> tuple[tuple[str, ...], str]:
    return block_specs.grouped_order(request.device.compute_capability, rows=request.m, groups=request.groups)


def need_of(name: str, rows: int, columns: int, out_dtype: str, results: int = 1) -> Need:
    """The Need of a call by the implementation `name`, which returns `results` arrays [rows, columns]."""
    size = 1.0 * rows * columns * jnp.dtype(out_dtype).itemsize * results
    return Need(kept=size, temporary=size if name == "xla" else 0.0, most=rows, axes="rows")  # xla computes tiles first


def _need(request: GroupedRequest, name: str) -> Need:
    if not all(isinstance(size, int) and size > 0 for size in (request.m, request.n, request.groups)):
        return Need(kept=0, temporary=0, most=1, axes="")
    return need_of(name, request.m, request.n, request.out_dtype)


OP = PlannedOp("grouped_matmul", IMPLEMENTATIONS, _order, _need)
GATED = PlannedOp("grouped_gated_matmul", IMPLEMENTATIONS, _order, _need)
