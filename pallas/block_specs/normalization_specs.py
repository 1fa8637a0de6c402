"""The block specs of the norms' kernels, and the rows that choose among them."""

import dataclasses
from typing import Any

from jax_kernels.pallas.block_specs.specs import TimedGpu, positive, powers_of_two


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormTriton:
    """Blocks of the Triton forward of layer_norm and rms_norm.

    A program has block_rows rows, and holds up to `chunk` columns of them at once.
    """

    block_rows: int
    chunk: int
    num_warps: int

    def __post_init__(self) -> None:
        powers_of_two(self, "block_rows", "chunk", "num_warps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormBackwardTriton:
    """Blocks of the Triton backward of layer_norm and rms_norm.

    A program holds block_rows rows of up to `chunk` columns at once, and takes one block of rows after another.
    programs: the number of programs for each SM.
    """

    block_rows: int
    chunk: int
    num_warps: int
    programs: int

    def __post_init__(self) -> None:
        positive(self, programs=1)
        powers_of_two(self, "block_rows", "chunk", "num_warps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSm90:
    """Blocks of a Hopper kernel of layer_norm or rms_norm, forward or backward.

    row_warps: warps of a CTA that work on one row, 1, 4, 8 or 16. The kernel takes another number if a warp's part of
      the row would not be whole lines of 128 columns, or would be too long for a warp's registers.
    warpgroups: the number of warpgroups of a CTA. Each has a pipeline of stages in shared memory, a block of rows in
      each.
    stages: the largest number of stages; fewer if shared memory or the 32 barriers of an array, one per stage and
      warpgroup, do not suffice.
    turns: the most blocks of rows that a group of warpgroups (all that work on the same row) takes before its CTA ends
      and the SM starts another CTA. 0: one CTA per SM, which takes blocks until none is left.
    claims: with turns=0, groups claim blocks one by one instead of having equal shares; needs three stages or more.
    cluster: the number of CTAs of a forward that work on one row; 1 for a backward. Each has an equal part of the row's
      columns, by row_warps warps, and takes up to `turns` blocks. The kernel takes 1 if the columns do not allow it.
    """

    row_warps: int
    warpgroups: int
    stages: int
    turns: int = 0
    claims: bool = False
    cluster: int = 1

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"NormSm90.stages={self.stages} must be 2 or more")
        if self.warpgroups not in (1, 2, 3, 4):
            raise ValueError(f"NormSm90.warpgroups={self.warpgroups} must be 1, 2, 3 or 4")
        if self.row_warps not in (1, 4, 8, 16):
            raise ValueError(f"NormSm90.row_warps={self.row_warps} must be 1, 4, 8 or 16")
        if self.turns < 0:
            raise ValueError(f"NormSm90.turns={self.turns} must be 0 or more")
        if self.cluster not in (1, 2, 4, 8):
            raise ValueError(f"NormSm90.cluster={self.cluster} must be 1, 2, 4 or 8")
        if self.cluster > 1 and (self.row_warps == 1 or not self.turns or self.claims):
            raise ValueError(f"NormSm90.cluster={self.cluster} needs 4 row_warps or more, turns, and no claims: {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormRow:
    """The blocks of layer_norm and rms_norm. The first row of a table that matches a call is used.

    implementation: the implementation's name. columns: matches calls with at most this number of values in a row; None
    matches any. forward, backward: the blocks, such as NormTriton and NormBackwardTriton. measured_on: the GPU on which
    a call with these blocks was timed; None if on none.
    """

    implementation: str
    columns: int | None
    forward: Any
    backward: Any
    measured_on: TimedGpu | None = None

    def serves(self, columns: int) -> bool:
        return self.columns is None or columns <= self.columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOrder:
    """The order in which implementations of layer_norm and rms_norm are tried. The first row that matches is used.

    names: of the implementations, in order. columns: matches calls with at most this number of values in a row; None
    matches any. measured_on: the GPU on which the order was timed; None if on none.
    """

    names: tuple[str, ...]
    columns: int | None = None
    measured_on: TimedGpu | None = None

    def serves(self, columns: int) -> bool:
        return self.columns is None or columns <= self.columns
