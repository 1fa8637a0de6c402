"""The types of the block spec rows of products, which check themselves as those in specs.py do."""

import dataclasses
from typing import Any

from jax_kernels.pallas.block_specs.specs import positive, powers_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSm90:
    """Blocks of the Hopper matmul: 64 rows of each of compute_wgs warpgroups, and block_n columns.

    stages: of the ring, of 64 numbers of the inner dimension, or 128 of 8 bits; as many as shared memory has room for,
    up to this number. A gated unit has half of the columns, twice.

    rows_together: so many rows of work tiles are done side by side, whose x the L2 cache holds.

    promoted_steps: after so many stages float32 sums take over the products of 8 bits, whose sums have 14 bits.

    cluster: so many CTAs, 1 or 2, take work tiles below each other. Each loads its part of w's block for both.

    pingpong, wg_rows, early_bias, short_activation: for operands of 16 bits. pingpong: each warpgroup has work tiles of
    its own, and its epilogue runs beside the other's products. wg_rows: rows of a warpgroup, 64, or 128 of fewer
    columns. early_bias: a warpgroup reads its bias before its last products end. short_activation: gelu by tanh,
    sigmoid and silu in fewer instructions.
    """

    block_n: int
    stages: int
    rows_together: int
    promoted_steps: int = 1
    cluster: int = 1
    compute_wgs: int = 2
    pingpong: bool = False
    wg_rows: int = 64
    early_bias: bool = False
    short_activation: bool = False

    def __post_init__(self) -> None:
        positive(self, block_n=64, stages=1, rows_together=1, promoted_steps=1, cluster=1)
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
        """Rows of a work tile."""
        return self.wg_rows * (1 if self.pingpong else self.compute_wgs)

    def unused(self, call: "MatmulCall") -> float:
        """The share of its multiprocessors' time that a product leaves unused.

        Work tiles reach past the last row and column, and the last of the rounds in which all multiprocessors have one
        is not full.
        """
        block_n = self.block_n // 2 if call.is_gated else self.block_n
        tiles = -(-call.rows // self.block_m) * -(-call.columns // block_n)
        rounds = -(-tiles // call.core_count)
        return 1 - call.rows * call.columns / (rounds * call.core_count * self.block_m * block_n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulTriton:
    """Blocks of the Triton matmul: a program has block_m rows and block_n columns, and block_k of the inner dimension.

    A gated unit has half of the columns, twice. rows_together: as in MatmulSm90. split_steps: where there are at most
    half as many work tiles as multiprocessors, programs share a tile, and each takes at least so many steps; None where
    they never do.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    rows_together: int = 8
    split_steps: int | None = None

    def __post_init__(self) -> None:
        positive(self, block_m=16, block_n=16, block_k=16, num_stages=1, rows_together=1)
        powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")
        if self.split_steps is not None:
            positive(self, split_steps=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOrder:
    """The implementations of a matmul, the fastest first. The first row that matches is taken.

    rows: of x, the most it serves, None for any. tiles: of 128 x 256 numbers of out, likewise.
    """

    names: tuple[str, ...]
    rows: int | None = None
    tiles: int | None = None

    def serves(self, rows: int, columns: int) -> bool:
        tiles = -(-rows // 128) * -(-columns // 256)
        return (self.rows is None or rows <= self.rows) and (self.tiles is None or tiles <= self.tiles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCall:
    """The facts of a matmul that its row of blocks depends on.

    rows, columns: of out. inner: the inner dimension. bits: of x's numbers. is_aligned: whether all rows in memory
    begin at multiples of 16 bytes. derives: whether the epilogue multiplies by the derivative of an activation.
    has_long_epilogue: whether the epilogue has an activation, or out more bits than x.
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
    """The blocks of a matmul. The first row that matches is taken.

    columns: the most of w it serves, None for any. rows: of x, likewise. inner: the most of the inner dimension. bits:
    of x's numbers, None for any. unused: the most that MatmulSm90.unused may be, None for any. is_gated, is_aligned,
    derives, has_long_epilogue: None serves both.
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

    def serves(self, call: MatmulCall) -> bool:
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
    """Blocks of the Triton matmul of weights of few bits.

    block_k: of the inner dimension in numbers; fewer where that is no multiple of them. programs: for each streaming
    multiprocessor, of which several share a work tile where there are fewer tiles; None where they never do. A gated
    unit has half of the columns, twice.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int | None = None
    rows_together: int = 8

    def __post_init__(self) -> None:
        positive(self, block_m=16, block_n=16, block_k=128, num_stages=1, rows_together=1)
        powers_of_two(self, "block_m", "block_n", "num_warps")
        if self.programs is not None:
            positive(self, programs=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulLowBitSm90:
    """Blocks of the Hopper matmul of weights of few bits: 64 columns of each of compute_wgs warpgroups.

    stages: of the ring, of 128 bytes of each column; as many as shared memory has room for, up to this number.
    cluster_join: the CTAs that share a work tile, 2, 4 or 8, are a cluster, and have its epilogue. Else a second launch
    has it.
    """

    compute_wgs: int
    stages: int
    cluster_join: bool = False

    def __post_init__(self) -> None:
        positive(self, stages=1)
        if self.compute_wgs not in (1, 2, 4):
            raise ValueError(f"MatmulLowBitSm90.compute_wgs={self.compute_wgs} must be 1, 2 or 4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulLowBitRow:
    """The blocks of a matmul of weights of few bits. The first row that matches is taken.

    rows: the most of x it serves, None for any. bits: of x's numbers. weight_bits: None serves all.
    """

    implementation: str
    bits: int
    config: Any
    rows: int | None = None
    weight_bits: int | None = None
