"""The arrays of a norm as its kernels see them, for type checkers."""

from typing import Protocol

from jax_kernels.pallas.kernel_types import Ref

__all__ = ["NormGradientRefs", "NormInputRefs", "NormResultRefs"]


class NormInputRefs(Protocol):
    """The inputs of a norm in device memory, as refs; None for arrays that the call lacks.

    The fields are like the arrays of NormInputs.
    """

    x: Ref
    residual: Ref
    scale: Ref
    bias: Ref


class NormResultRefs(Protocol):
    """The results of a norm's forward in device memory, as refs; None for results that the call lacks.

    The fields are like the arrays of NormResult.
    """

    out: Ref
    total: Ref
    mean: Ref
    inverse: Ref
    out_scale: Ref


class NormGradientRefs(Protocol):
    """The gradients of a norm in device memory, as refs; scale and bias are None if the call lacks that weight."""

    x: Ref
    scale: Ref
    bias: Ref
