"""The arrays, options and results of a grouped matmul, from the public op down to a kernel."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Float32, Int32


class GroupedInputs(NamedTuple):
    """The arrays of a call. Arrays that a call lacks are None.

    x: [M, K], its rows sorted by group. w: [G, K, N] in x's dtype; [G, N, K] with transpose_w. group_sizes: [G], the
    number of rows of each group. bias: [G, N], x's dtype or float32. w_up: like w, of a gated unit. x_up: like x; a
    call with x_up has no gated unit, and adds x_up @ w_up to x @ w. gather: int32 [M], without x_up: row i of the call
    is row gather[i] of x, which is [T, K]; an index outside of x gives a row of 0.

    x_scale, w_scale, w_up_scale: float32, the factors of 8-bit operands, see GroupedOptions.scaling: one for each row
    of x, and for each column of each group's weights. In a call with x_up, x_scale is also the scale of x_up, and
    w_scale is also the scale of w_up.
    """

    x: Float[Array, "M K"]
    w: Float[Array, "G K N"] | Float[Array, "G N K"]
    group_sizes: Int32[Array, " G"]
    bias: Float[Array, "G N"] | None = None
    w_up: Float[Array, "G K N"] | Float[Array, "G N K"] | None = None
    x_up: Float[Array, "M K"] | None = None
    gather: Int32[Array, " M"] | None = None
    x_scale: Float32[Array, " M"] | None = None
    w_scale: Float32[Array, "G N"] | None = None
    w_up_scale: Float32[Array, "G N"] | None = None

    @property
    def rows(self) -> int:
        """M, the number of rows of the call."""
        return (self.x if self.gather is None else self.gather).shape[0]

    @property
    def is_gated(self) -> bool:
        return self.w_up is not None and self.x_up is None


class GroupedResult(NamedTuple):
    """The results of a call, [M, N] each, in the call's out_dtype. Rows past the last group are 0.

    preactivation: x @ w + bias, None if it is not wanted. up: x @ w_up, likewise, of a gated unit. Their rows past the
    last group are 0 too.
    """

    out: Float[Array, "M N"]
    preactivation: Float[Array, "M N"] | None = None
    up: Float[Array, "M N"] | None = None


class WeightGradientInputs(NamedTuple):
    """The arrays of the gradient of w. x: [M, K]. dz: [M, N], x's dtype, the cotangent of x @ w. group_sizes: [G].

    gather: None, or int32 [M], as in GroupedInputs: x is [T, K].
    """

    x: Float[Array, "M K"]
    dz: Float[Array, "M N"]
    group_sizes: Int32[Array, " G"]
    gather: Int32[Array, " M"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedOptions:
    """The static half of a call: hashable, so that it can key a jit cache.

    Row i of group g is out[i] = activation(x[i] @ w[g] + bias[g]) * (x[i] @ w_up[g]), in float32 from the matmuls on;
    without w_up there is no second factor. With x_up, x_up[i] @ w_up[g] is added to x[i] @ w[g] instead.

    out_dtype: of the results. activation: an elementwise function in jnp, or None. precision: of float32 matmuls,
    "fp32" or "tf32"; otherwise None. saves_preactivation: whether the result has preactivation and, for a gated unit,
    up. scaling: "row" of an 8-bit matmul, whose x and w have scales; otherwise None. has_zeros: whether the rows of the
    results past the last group are 0; otherwise they may have any values.

    In a call for the gradient of w, out_dtype and transpose_w are of this gradient.
    """

    out_dtype: str
    transpose_w: bool = False
    activation: Callable[[Array], Array] | None = None
    precision: str | None = None
    saves_preactivation: bool = False
    scaling: str | None = None
    has_zeros: bool = True

    def sizes(self, inputs: GroupedInputs) -> tuple[int, int, int, int]:
        """(G, M, N, K)."""
        groups, *weight = inputs.w.shape
        return groups, inputs.rows, weight[0 if self.transpose_w else 1], inputs.x.shape[1]
