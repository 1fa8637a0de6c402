"""The arrays of a matmul as its kernels see them, for type checkers."""

from typing import Protocol

from jax_kernels.pallas.kernel_types import Ref

__all__ = ["MatmulInputRefs", "MatmulResultRefs"]


class MatmulInputRefs(Protocol):
    """MatmulInputs of refs. A kernel's traits say which fields the launch has; the others are None."""

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
    """MatmulResult of refs, likewise."""

    out: Ref
    preactivation: Ref
    up: Ref
    activated: Ref
