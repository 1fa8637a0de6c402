"""The arrays of a norm as its kernels see them, for type checkers."""

from typing import Protocol

from jax_kernels.pallas.kernel_types import Ref

__all__ = ["NormGradientRefs", "NormInputRefs", "NormResultRefs"]


class NormInputRefs(Protocol):
    """NormInputs of refs. A kernel's traits say which fields the launch has; the others are None."""

    x: Ref
    residual: Ref
    scale: Ref
    bias: Ref


class NormResultRefs(Protocol):
    """NormResult of refs, likewise."""

    out: Ref
    total: Ref
    mean: Ref
    inverse: Ref
    out_scale: Ref


class NormGradientRefs(Protocol):
    """NormGradients of refs, likewise."""

    x: Ref
    scale: Ref
    bias: Ref
