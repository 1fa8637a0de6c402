"""The types of the block spec rows of matmuls, grouped ones too. Each type checks its values, as in specs.py."""

import dataclasses
from typing import Any

from jax_kernels.pallas.block_specs.specs import TimedGpu, positive, powers_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSm90:
    """Blocks of the Hopper matmul: 64 rows for each of compute_wgs warpgroups, and block_n columns.

    block_n: columns of a work tile. A gated unit has half of the columns, of w and of w_up.
    stages: the number of stages of the pipeline in shared memory, each with 64 values of the inner dimension, or 128
      values of 8 bits. The kernel uses fewer stages if shared memory lacks room.
    row_group: the number of rows of work tiles that run at the same time. The L2 cache holds their x.
    promoted_steps: the number of steps after which 8-bit matmuls, which accumulate with 14 bits, are added to float32
      sums.
    cluster: the number of CTAs of a cluster. With 2, they take work tiles one below the other, and each loads a part of
      w's block for both.
    compute_wgs: the number of compute warpgroups, 2 or 3.

    The other fields are for 16-bit operands:

    pingpong: each warpgroup has its own work tiles, and its epilogue runs during the other warpgroup's matmuls.
    wg_rows: rows of a warpgroup, 64, or 128 with fewer columns.
    early_bias: a warpgroup reads its bias before its last matmuls end.
    short_activation: tanh-approximated gelu, sigmoid and silu in fewer instructions.
    """

    block_n: int
    stages: int
    row_group: int
    promoted_steps: int = 1
    cluster: int = 1
    compute_wgs: int = 2
    pingpong: bool = False
    wg_rows: int = 64
    early_bias: bool = False
    short_activation: bool = False

    def __post_init__(self) -> None:
        positive(self, block_n=64, stages=1, row_group=1, promoted_steps=1, cluster=1)
        if self.cluster > 2:
            raise ValueError(f"MatmulSm90.cluster={self.cluster} must be 1 or 2")
        if self.compute_wgs not in (2, 3):
            raise ValueError(f"MatmulSm90.compute_wgs={self.compute_wgs} must be 2 or 3")
        if self.block_n > 256:
            raise ValueError(f"MatmulSm90.block_n={self.block_n} must be at most 256")
        if self.pingpong and self.compute_wgs != 2:
            raise ValueError(f"MatmulSm90.compute_wgs={self.compute_wgs} must be 2 with pingpong")
        if self.wg_rows not in (64, 128):
            raise ValueError(f"MatmulSm90.wg_rows={self.wg_rows} must be 64 or 128")
        if self.wg_rows * self.block_n > 128 * 192:
            raise ValueError(f"MatmulSm90.block_n={self.block_n} must be at most 192 with wg_rows=128")

    @property
    def block_m(self) -> int:
        """The number of rows of a work tile."""
        return self.wg_rows * (1 if self.pingpong else self.compute_wgs)

    def unused(self, call: "MatmulCall") -> float:
        """The fraction of the SMs' time that a matmul leaves unused.

        The reasons: work tiles reach past the last row and column, and in the last round of work tiles some SMs have no
        tile.
        """
        block_n = self.block_n // 2 if call.is_gated else self.block_n
        tiles = -(-call.rows // self.block_m) * -(-call.columns // block_n)
        rounds = -(-tiles // call.core_count)
        return 1 - call.rows * call.columns / (rounds * call.core_count * self.block_m * block_n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulTriton:
    """Blocks of the Triton matmul: a program has block_m rows, block_n columns, and steps of block_k inner values.

    A gated unit has half of the columns, of w and of w_up. row_group: the number of rows of work tiles that run at
    the same time, whose x the L2 cache holds. split_steps: if the work tiles are at most half the number of SMs,
    several programs split a tile's inner dimension, with at least split_steps steps each; None to never split.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    row_group: int = 8
    split_steps: int | None = None

    def __post_init__(self) -> None:
        positive(self, block_m=16, block_n=16, block_k=16, num_stages=1, row_group=1)
        powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")
        if self.split_steps is not None:
            positive(self, split_steps=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOrder:
    """The order in which implementations of a matmul are tried. The first row of a table that matches a call is used.

    names: of the implementations, in order. rows: matches calls with at most this number of rows of x; None matches
    any. tiles: matches calls whose result has at most this number of tiles of 128 x 256 values; None matches any.
    measured_on: the GPU on which the order was timed; None if on none.
    """

    names: tuple[str, ...]
    rows: int | None = None
    tiles: int | None = None
    measured_on: TimedGpu | None = None

    def serves(self, size: tuple[int, int]) -> bool:
        """Whether the row matches a call. size: (number of rows of x, number of columns of w)."""
        rows, columns = size
        tiles = -(-rows // 128) * -(-columns // 256)
        return (self.rows is None or rows <= self.rows) and (self.tiles is None or tiles <= self.tiles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCall:
    """The facts of a matmul that determine the row with its blocks.

    rows, columns: the size of out. inner: the length of the inner dimension. bits: of x's dtype. is_gated: whether the
    result is multiplied by a second matmul, x @ w_up. is_aligned: whether all rows in memory begin at multiples of 16
    bytes. core_count: SMs of the GPU. derives: whether the epilogue multiplies by the derivative of an activation.
    has_long_epilogue: whether there is an activation, or out has more bits than x.
    """

    rows: int
    columns: int
    inner: int
    bits: int
    is_gated: bool
    is_aligned: bool
    derives: bool
    has_long_epilogue: bool
    core_count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulRow:
    """The blocks of a matmul. The first row of a table that matches all facts of a call is used; None matches any.

    implementation: the implementation's name. config: its blocks, a MatmulSm90 or a MatmulTriton. columns: the largest
    number of columns of w. rows: the largest number of rows of x. inner: the largest inner dimension. bits: of x's
    dtype. is_gated, is_aligned, derives, has_long_epilogue: the call's value of the same name in MatmulCall. unused:
    the largest fraction of the SMs' time that these blocks, a MatmulSm90, may leave unused. measured_on: the GPU on
    which a call with these blocks was timed; None if on none.
    """

    implementation: str
    columns: int | None
    config: Any
    rows: int | None = None
    inner: int | None = None
    bits: int | None = None
    is_gated: bool | None = None
    is_aligned: bool | None = None
    derives: bool | None = None
    has_long_epilogue: bool | None = None
    unused: float | None = None
    measured_on: TimedGpu | None = None

    def serves(self, call: MatmulCall) -> bool:
        """Whether the row matches all facts of the call."""
        return (
            (self.columns is None or call.columns <= self.columns)
            and (self.rows is None or call.rows <= self.rows)
            and (self.inner is None or call.inner <= self.inner)
            and self.bits in (None, call.bits)
            and self.is_gated in (None, call.is_gated)
            and self.is_aligned in (None, call.is_aligned)
            and self.derives in (None, call.derives)
            and self.has_long_epilogue in (None, call.has_long_epilogue)
            and (self.unused is None or self.config.unused(call) <= self.unused)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulLowBitTriton:
    """Blocks of the Triton matmul of low-bit weights: a program has block_m rows and block_n columns of the result.

    block_k: values of the inner dimension in a step; fewer if the inner dimension is not a multiple of block_k.
    programs: the number of programs per SM. If there are fewer work tiles than programs, several programs split a
    tile's inner dimension; None to never split. row_group: the number of rows of work tiles that run at the same
    time, whose x the L2 cache holds. A gated unit has half of the columns, of w and of w_up.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int | None = None
    row_group: int = 8

    def __post_init__(self) -> None:
        positive(self, block_m=16, block_n=16, block_k=128, num_stages=1, row_group=1)
        powers_of_two(self, "block_m", "block_n", "num_warps")
        if self.programs is not None:
            positive(self, programs=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulLowBitSm90:
    """Blocks of the Hopper matmul of low-bit weights: 64 columns for each of compute_wgs warpgroups.

    stages: the number of stages of the pipeline in shared memory, each with 128 bytes of each column; the kernel uses
    fewer if shared memory lacks room. cluster_join: whether the CTAs that split a work tile's inner dimension, 2, 4 or
    8, are a cluster, add their sums and run the epilogue. Otherwise a second launch does.
    """

    compute_wgs: int
    stages: int
    cluster_join: bool = False

    def __post_init__(self) -> None:
        positive(self, stages=1)
        if self.compute_wgs not in (1, 2, 4):
            raise ValueError(f"MatmulLowBitSm90.compute_wgs={self.compute_wgs} must be 1, 2 or 4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowBitCall:
    """The facts of a matmul with low-bit weights that determine the row with its blocks.

    rows: the number of rows of x. bits: of x's dtype. weight_bits: of a weight, 4 or 8.
    """

    rows: int
    bits: int
    weight_bits: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulLowBitRow:
    """The blocks of a matmul of low-bit weights. The first row of a table that matches a call is used.

    implementation: the implementation's name. config: its blocks, a MatmulLowBitSm90 or a MatmulLowBitTriton. bits: of
    x's dtype. rows: the largest number of rows of x; None matches any. weight_bits: of a weight; None matches any.
    measured_on: the GPU on which a call with these blocks was timed; None if on none.
    """

    implementation: str
    bits: int
    config: Any
    rows: int | None = None
    weight_bits: int | None = None
    measured_on: TimedGpu | None = None

    def serves(self, call: LowBitCall) -> bool:
        return (
            call.bits == self.bits
            and (self.rows is None or call.rows <= self.rows)
            and self.weight_bits in (None, call.weight_bits)
        )


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
