"""The arrays of a matmul as its kernels see them, for type checkers."""

from typing import Protocol

from jax_kernels.pallas.kernel_types import Ref

__all__ = ["MatmulInputRefs", "MatmulResultRefs"]


class MatmulInputRefs(Protocol):
    """The inputs of a matmul in device memory, as refs; None for arrays that the call lacks.

    The fields are like the arrays of MatmulInputs. is_gated: whether the call has w_up but no x_up.
    """

    x: Ref
    w: Ref
    bias: Ref
    residual: Ref
    w_up: Ref
    x_scale: Ref
    w_scale: Ref
    w_up_scale: Ref
    x_up: Ref
    preactivation: Ref
    up: Ref

    @property
    def is_gated(self) -> bool: ...


class MatmulResultRefs(Protocol):
    """The results of a matmul in device memory, as refs; None for results that the call lacks.

    The fields are like the arrays of MatmulResult.
    """

    out: Ref
    preactivation: Ref
    up: Ref
    activated: Ref
