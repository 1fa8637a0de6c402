"""linear_cross_entropy's request, and its implementations."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.ops import unsupported
from jax_kernels.ops.planned_op import Blocks, PlannedOp, kernel
from jax_kernels.pallas.block_specs.matmul_specs import MatmulTriton
from jax_kernels.pallas.cross_entropy.triton import losses as triton
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.reference import linear_cross_entropy as reference

__all__ = ["IMPLEMENTATIONS", "OP", "LossRequest"]

# Not measured. A thread of 8 warps holds 64 logits of a work tile, and their exponentials part by part.
TRITON = MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4)


@dataclasses.dataclass(frozen=True)
class LossRequest(Request):
    """A linear cross-entropy without its arrays: x [tokens, depth], w [depth, vocabulary].

    dtype: x's. w_dtype: w's. reduction: "none", "mean" or "sum".
    """

    SIZES: ClassVar[tuple[str, ...]] = ("tokens", "depth", "vocabulary")

    tokens: int
    depth: int
    vocabulary: int
    dtype: str
    w_dtype: str
    reduction: str


def _supports_triton(request: LossRequest) -> str | None:
    """The reason, in words for users, why the Triton kernels cannot serve the request; None if they can."""
    if reason := unsupported.no_triton(request):
        return reason
    if request.dtype == "float32":
        return "its matmuls of float32 arrays would use tf32, and this op's are exact"
    shapes = (request.tokens, request.depth), (request.vocabulary, request.depth)
    if not all(reaches(math.prod(shape), jnp.dtype(request.dtype).itemsize) for shape in shapes):
        return unsupported.OUT_OF_REACH
    return unsupported.no_gpu(request)


def _triton_config(request: LossRequest) -> tuple[Blocks, str]:
    blocks = Blocks(forward=TRITON, backward=TRITON, core_count=request.device.core_count)
    return blocks, "the same blocks for all GPUs, not measured"


def _xla(inputs, options, *, config, interpret):
    return reference.statistics(inputs, options)


def _xla_gradients(inputs, options, lse, cotangent, *, config, interpret):
    return reference.gradients(inputs, lse, cotangent, options)


IMPLEMENTATIONS = {
    "triton": Implementation(
        "triton",
        _supports_triton,
        _triton_config,
        kernel(triton.statistics, once=True),
        kernel(triton.gradients, "backward", once=True),
    ),
    "xla": Implementation("xla", lambda request: None, without_blocks, _xla, _xla_gradients),
}


def _order(request: LossRequest) -> tuple[tuple[str, ...], str]:
    return ("xla", "triton"), "an order that is not measured: the Triton kernels are not timed"


OP = PlannedOp("linear_cross_entropy", IMPLEMENTATIONS, _order)
