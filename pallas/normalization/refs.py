"""The arrays of a norm as its kernels see them, for type checkers."""

from typing import Protocol

from jax_kernels.pallas.kernel_types import Ref

__all__ = ["NormGradientRefs", "NormInputRefs", "NormResultRefs"]


class NormInputRefs(Protocol):
    """The inputs of a norm in device memory, as refs; None for arrays that the call lacks.

    x, and residual, which is added to it: all rows. scale, bias: of each column. A kernel chooses how it shapes them.
    """

    x: Ref
    residual: Ref
    scale: Ref
    bias: Ref


class NormResultRefs(Protocol):
    """The results of a norm's forward in device memory, as refs; None for results that the call lacks.

    out: the normalised rows. total: x + residual. mean, inverse, out_scale: a float32 value for each row: its mean, the
    inverse of its standard deviation (rms_norm: of its root mean square), and the factor of an 8-bit out. A kernel
    chooses how it shapes them.
    """

    out: Ref
    total: Ref
    mean: Ref
    inverse: Ref
    out_scale: Ref


class NormGradientRefs(Protocol):
    """The arrays that a norm's backward kernel writes, as refs in device memory.

    x: the gradient of x. scale, bias: the sums of each CTA's or program's rows for the weight's gradient, which are
    added up after the kernel; None if the call lacks that weight.
    """

    x: Ref
    scale: Ref
    bias: Ref
