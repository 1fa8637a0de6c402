"""linear_cross_entropy's request, and its implementations."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.ops import unsupported
from jax_kernels.ops.planned_op import Blocks, PlannedOp, kernel
from jax_kernels.pallas.block_specs.matmul_specs import MatmulSm90, MatmulTriton
from jax_kernels.pallas.cross_entropy.sm90 import losses as sm90
from jax_kernels.pallas.cross_entropy.triton import losses as triton
from jax_kernels.pallas.triton.tensors import reaches
from jax_kernels.reference import linear_cross_entropy as reference

__all__ = ["IMPLEMENTATIONS", "OP", "WITH_GRADIENTS", "LossRequest"]

# Not measured. A thread of 8 warps holds 64 logits of a work tile, and their exponentials part by part.
TRITON = MatmulTriton(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=4)
# The epilogue runs during the other warpgroup's matmuls, as in the matmul's row with these blocks.
SM90 = MatmulSm90(block_n=192, stages=4, row_group=8, pingpong=True, wg_rows=128)
# For logits of 8-bit values: the matmul's blocks of 8 bits, which spill no registers here either.
SM90_8_BITS = MatmulSm90(block_n=256, stages=4, row_group=8, promoted_steps=2)
# The softcap's derivative needs the logit. The Hopper kernel finds it from an exponential in 16 bits, with an error of
# 2^-9: with a smaller softcap the derivative's error would exceed its rounding's. With a larger softcap an exponential
# may be 0, as in float16.
SOFTCAPS = 4, 40
NOT_MEASURED = "the same blocks for all GPUs, not measured"
MEASURED = "rows measured on an NVIDIA H200, at two shapes and with reduction='mean'"


@dataclasses.dataclass(frozen=True)
class LossRequest(Request):
    """A linear cross-entropy without its arrays: x [tokens, depth], w [depth, vocabulary].

    dtype: x's. w_dtype: w's. reduction: "none", "mean" or "sum". softcap: of the logits, or None. precision: "fp8" for
    logits of 8-bit values, or None. is_partitioned: whether XLA may shard the call over several devices.
    """

    SIZES: ClassVar[tuple[str, ...]] = ("tokens", "depth", "vocabulary")
    ROUNDED: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: int
    depth: int
    vocabulary: int
    dtype: str
    w_dtype: str
    reduction: str
    softcap: float | None = None
    precision: str | None = None
    is_partitioned: bool = False


def _supports_triton(request: LossRequest) -> str | None:
    """The reason, in words for users, why the Triton kernels cannot serve the request; None if they can."""
    if reason := unsupported.no_triton(request):
        return reason
    if request.dtype == "float32":
        return "its matmuls of float32 arrays would use tf32, and this op's are exact"
    if request.precision is not None:
        return "it has no matmul of 8-bit values"
    shapes = (request.tokens, request.depth), (request.vocabulary, request.depth)
    if not all(reaches(math.prod(shape), jnp.dtype(request.dtype).itemsize) for shape in shapes):
        return unsupported.OUT_OF_REACH
    return unsupported.no_triton_gpu(request)


def _triton_config(request: LossRequest) -> tuple[Blocks, str]:
    blocks = Blocks(forward=TRITON, backward=TRITON, core_count=request.device.core_count)
    return blocks, NOT_MEASURED


def _supports_mosaic(request: LossRequest) -> str | None:
    """The reason, in words for users, why the Hopper kernel cannot serve the request; None if it can."""
    if reason := unsupported.no_gpu(request) or unsupported.not_hopper(request):
        return reason
    if request.dtype == "float32":
        return "its wgmma instructions take bfloat16 and float16, not float32"
    if request.depth % 64 or request.vocabulary % 64:
        return "it needs D and V in multiples of 64"
    if request.precision is not None and request.depth % 128:
        return "with precision='fp8' it needs D in multiples of 128"
    least, most = SOFTCAPS
    if request.softcap is not None and not (request.dtype == "bfloat16" and least <= request.softcap <= most):
        return f"with a softcap it takes bfloat16 and a softcap from {least} to {most}, since it stores exponentials"
    return unsupported.no_mosaic(request)


def _mosaic_config(request: LossRequest) -> tuple[Blocks, str]:
    if request.precision is not None:
        return Blocks(forward=SM90_8_BITS, backward=SM90_8_BITS, core_count=request.device.core_count), NOT_MEASURED
    return Blocks(forward=SM90, backward=SM90, core_count=request.device.core_count), MEASURED


def _xla(inputs, options, *, config, interpret):
    return reference.statistics(inputs, options)


def _xla_gradients(inputs, options, lse, cotangent, *, config, interpret):
    return reference.gradients(inputs, lse, cotangent, options)


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(
        "mosaic_gpu",
        _supports_mosaic,
        _mosaic_config,
        kernel(sm90.statistics, once=True),
        kernel(sm90.gradients, "backward", once=True),
    ),
    "triton": Implementation(
        "triton",
        _supports_triton,
        _triton_config,
        kernel(triton.statistics, once=True),
        kernel(triton.gradients, "backward", once=True),
    ),
    "xla": Implementation("xla", lambda request: None, without_blocks, _xla, _xla_gradients),
}
# Functions of (inputs, options, cotangent of the losses) that return LossGradients from one computation of the logits.
# With other implementations the backward computes the logits again.
WITH_GRADIENTS = {"mosaic_gpu": kernel(sm90.losses_and_gradients, "backward", once=True)}


def _order(request: LossRequest) -> tuple[tuple[str, ...], str]:
    if request.is_partitioned:
        return ("xla", "mosaic_gpu", "triton"), "with several devices, as xla alone keeps w sharded over the vocabulary"
    if request.precision is not None:
        return ("mosaic_gpu", "xla", "triton"), "not measured: xla multiplies the 8-bit values in 16 bits"
    if request.reduction == "none":
        return (
            "xla",
            "mosaic_gpu",
            "triton",
        ), "the order of xla and triton on an NVIDIA H200; mosaic_gpu is not measured"
    return ("mosaic_gpu", "xla", "triton"), "the order on an NVIDIA H200"


OP = PlannedOp("linear_cross_entropy", IMPLEMENTATIONS, _order)
