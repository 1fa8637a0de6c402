"""linear_cross_entropy's request, and its implementations."""

import dataclasses
from typing import ClassVar

from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.ops.planned_op import PlannedOp
from jax_kernels.reference import linear_cross_entropy as reference

__all__ = ["IMPLEMENTATIONS", "OP", "LossRequest"]


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


def _xla(inputs, options, *, config, interpret):
    return reference.statistics(inputs, options)


def _xla_gradients(inputs, lse, cotangent, options, *, config, interpret):
    return reference.gradients(inputs, lse, cotangent, options)


IMPLEMENTATIONS = {"xla": Implementation("xla", lambda request: None, without_blocks, _xla, _xla_gradients)}


def _order(request: LossRequest) -> tuple[tuple[str, ...], str]:
    return ("xla",), "the only implementation"


OP = PlannedOp("linear_cross_entropy", IMPLEMENTATIONS, _order)
