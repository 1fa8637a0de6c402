"""The types of the block spec rows of grouped matmuls."""

import dataclasses
from typing import Any

from jax_kernels.pallas.block_specs.specs import TimedGpu, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedSm90:
    """Blocks of the Hopper grouped matmul: 128 rows of one group, 64 for each of two warpgroups, and block_n columns.

    In the gradient of w, a block has 128 rows and block_n columns of one group's gradient, and steps of 64 rows of x.
    stages: the number of stages of the pipeline in shared memory, each with 64 values of the inner dimension. The
    kernel uses fewer stages if shared memory lacks room. row_group: the number of row tiles that run at the same time.
    The L2 cache holds their x. largest_first: whether the longest work tiles come first: tiles with rows for both
    warpgroups, and in the gradient of w the largest groups. snake: whether every other turn has the opposite order of
    CTAs, which balances work tiles that become shorter.
    """

    block_n: int
    stages: int
    row_group: int
    largest_first: bool = True
    snake: bool = True

    def __post_init__(self) -> None:
        positive(self, block_n=64, stages=1, row_group=1)
        if self.block_n > 256:
            raise ValueError(f"GroupedSm90.block_n={self.block_n} must be at most 256")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedOrder:
    """The order in which implementations of a grouped matmul are tried.

    The first order of a table that matches a call is used. names: of the implementations, in order. mean_rows: the
    largest mean number of rows of a group; None matches any. measured_on: the GPU on which the order was timed; None if
    on none.
    """

    names: tuple[str, ...]
    mean_rows: int | None = None
    measured_on: TimedGpu | None = None

    def serves(self, sizes: tuple[int, int]) -> bool:
        """Whether the order holds for a call with this many (rows of x, groups)."""
        return self.mean_rows is None or sizes[0] <= self.mean_rows * sizes[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedCall:
    """The facts of a grouped matmul that determine the row with its blocks.

    rows: of x. groups: their number. bits: of x's dtype. is_gated: whether there are two matmuls, with w and w_up.
    is_aligned: whether all rows in memory begin at multiples of 16 bytes.
    """

    rows: int
    groups: int
    bits: int
    is_gated: bool
    is_aligned: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedRow:
    """The blocks of a grouped matmul. The first row of a table that matches all facts of a call is used.

    implementation: the implementation's name. forward: the blocks of the matmul and of the gradient of x, a
    MatmulTriton or a GroupedSm90. weight_gradient: the blocks of the gradient of w, likewise: of the matmul of x's
    transpose [K, rows of a group] and the cotangent [rows of a group, N]. mean_rows: the largest mean number of rows of
    a group; None matches any. bits: of x's dtype. is_gated, is_aligned: the call's values in GroupedCall; None
    matches any. measured_on: the GPU on which a call with these blocks was timed; None if on none.
    """

    implementation: str
    forward: Any
    weight_gradient: Any
    mean_rows: int | None = None
    bits: int | None = None
    is_gated: bool | None = None
    is_aligned: bool | None = None
    measured_on: TimedGpu | None = None

    def serves(self, call: GroupedCall) -> bool:
        """Whether the row matches all facts of the call."""
        return (
            (self.mean_rows is None or call.rows <= self.mean_rows * call.groups)
            and self.bits in (None, call.bits)
            and self.is_gated in (None, call.is_gated)
            and self.is_aligned in (None, call.is_aligned)
        )
