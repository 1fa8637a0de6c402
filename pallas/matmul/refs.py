"""The arrays of a matmul as its kernels see them, for type checkers."""

from typing import Protocol

from jax_kernels.pallas.kernel_types import Ref

__all__ = ["MatmulInputRefs", "MatmulResultRefs"]


class MatmulInputRefs(Protocol):
    """The inputs of a matmul in device memory, as refs; None for arrays that the call lacks.

    x: [M, K]; [K, M] with transpose_x. w: [K, N]; [N, K] with transpose_w; or stored low-bit weights, [N, bytes]. w_up:
    like w, of a gated unit. x_up: like x; x_up @ w_up is then added to x @ w. bias: [N]. residual: [M, N]. x_scale,
    w_scale, w_up_scale: factors of 8-bit operands or of low-bit weights. preactivation, up: [M, N], of an earlier call
    whose derivative this call computes. is_gated: whether the call has w_up but no x_up.
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

    All are [M, N]. out: the result. preactivation, up: x @ w + bias, and x @ w_up of a gated unit. In the derivative of
    an earlier call, out and up are the cotangents of its preactivation and of its up, and activated is its result.
    """

    out: Ref
    preactivation: Ref
    up: Ref
    activated: Ref
