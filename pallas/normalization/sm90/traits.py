"""The sizes of a launch of a Hopper norm, and its layouts.

A warp owns a part of a row: lines of 128 columns. A short row has one part. A longer row has 4, 8 or 16 parts, for the
warps of 1, 2 or 4 warpgroups. A warpgroup always holds 4 parts, one per warp.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.normalization import NormOptions
from jax_kernels.pallas.block_specs.normalization_specs import NormSm90
from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.mosaic import interpreter

LINE = 128  # columns: 4 for each lane of a warp
WARPS = 4  # warps of a warpgroup
MOST_LINES = 16  # most lines of a part
FEW_LINES = 8  # most lines for which the registers of four warpgroups suffice
CTAS_AT_ONCE = 4  # CTAs per SM at a time, if CTAs end after some turns
MOST_BARRIERS = 32  # most barriers of an array: a thread keeps their phases in one register
SHARED_MEMORY = 225 << 10  # bytes of a CTA, for its pipelines and its scale
# [4 parts, lines, 128] in registers: a part for each warp, 4 neighbouring columns for each lane.
_TILING = plgpu.Tiling(((WARPS, 1, LINE), (LINE // 32,)))
BLOCK = plgpu.Layout.TILED(_TILING, warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
PARTS = BLOCK.reduce((1, 2))  # one value per part
LINES = BLOCK.reduce(0)  # values that all parts share


def row_warps_of(columns: int, most: int) -> int | None:
    """The number of warps of a CTA that work on a row of `columns` values: 1, 4, 8 or 16; None if none is possible.

    A number is possible if it cuts the row into equal parts of whole lines (128 columns), one part per warp, and a part
    has at most 16 lines (8 for 16 warps). most: the wanted number. The result is the largest possible number up to
    `most`, or else the smallest possible number.
    """
    most_lines = {1: MOST_LINES, 4: MOST_LINES, 8: MOST_LINES, 16: FEW_LINES}
    fit = [
        warps
        for warps, lines in most_lines.items()
        if columns % (warps * LINE) == 0 and columns <= warps * LINE * lines
    ]
    few = [warps for warps in fit if warps <= most]
    return max(few) if few else min(fit, default=None)


def cluster_of(columns: int, config: NormSm90) -> int:
    """The number of CTAs that work on a row of `columns` values: config.cluster, or 1 if that is not possible.

    It is not possible if the CTAs' parts of the row would not be equal, or if several warps cannot work on a CTA's
    part: one warp has the whole part, or the part is too long, or it is not a whole number of lines (128 columns) for
    each warp.
    """
    ctas = config.cluster
    return ctas if columns % ctas == 0 and (row_warps_of(columns // ctas, config.row_warps) or 1) > 1 else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The sizes of a launch: the static facts from which the kernel's code is chosen.

    row_warps: warps of a CTA that work on one row. cluster: CTAs that work on one row, each with a part of the columns.
    itemsize: bytes of a value of x. copies: the number of arrays that a kernel loads through a pipeline of stages, one
    pipeline for each. core_count: SMs of the GPU. scale_bytes: bytes of the scale, if the kernel should keep it in
    shared memory together with the pipelines; otherwise 0.
    """

    options: NormOptions
    config: NormSm90
    rows: int
    columns: int
    row_warps: int
    cluster: int
    itemsize: int
    copies: int
    core_count: int
    scale_bytes: int

    @classmethod
    def of(
        cls,
        x: jax.Array,
        options: NormOptions,
        config: NormSm90,
        *,
        core_count: int,
        copies: int,
        scale_bytes: int = 0,
    ) -> "Traits":
        """The sizes of a launch for x, [rows, columns].

        copies: the number of arrays like x that the kernel loads. scale_bytes: bytes of the scale to keep in shared
        memory, or 0. Raises AssertionError if no number of warps per CTA (1, 4, 8 or 16) cuts a CTA's part of the row
        into equal parts of whole lines (128 columns), of at most 16 lines, or 8 with 16 warps.
        """
        rows, columns = x.shape
        ctas = cluster_of(columns, config)
        row_warps = row_warps_of(columns // ctas, config.row_warps)
        assert row_warps is not None
        return cls(
            options=options,
            config=config,
            rows=rows,
            columns=columns,
            row_warps=row_warps,
            cluster=ctas,
            itemsize=x.dtype.itemsize,
            copies=copies,
            core_count=core_count,
            scale_bytes=scale_bytes,
        )

    @property
    def lines(self) -> int:
        """The number of lines (128 columns) of a warp's part of a row."""
        return self.columns // (LINE * self.row_parts)

    @property
    def row_parts(self) -> int:
        """The number of parts of a row, over all CTAs of a cluster. A part is the columns that one warp has."""
        return self.row_warps * self.cluster

    @property
    def is_split(self) -> bool:
        """Whether several warps work on one row."""
        return self.row_warps > 1

    @property
    def members(self) -> int:
        """The number of warpgroups of a group: the warpgroups of a CTA that work on one row."""
        return max(1, self.row_warps // WARPS)

    @property
    def warpgroups(self) -> int:
        """The number of warpgroups of a CTA: a multiple of `members`, the warpgroups that work on one row.

        In a cluster it is `members`. Otherwise it is at most config.warpgroups, but at least `members`. It is also at
        most 2 if a warp has more than 8 lines of a row, because registers lack room for more.
        """
        if self.cluster > 1:  # a cluster's barrier is for all threads
            return self.members
        most = min(self.config.warpgroups, 2) if self.lines > FEW_LINES else self.config.warpgroups
        return max(1, most // self.members) * self.members

    @property
    def groups(self) -> int:
        """The number of groups of a CTA. The warpgroups of a group work on one block of rows at a time."""
        return self.warpgroups // self.members

    @property
    def block_parts(self) -> int:
        """The number of warps of a CTA that work on one block: on a part of one row each, or on one of 4 short rows."""
        return WARPS * self.members

    @property
    def blocks(self) -> int:
        """The number of blocks of the array. A block is one row, or 4 short rows if one warp has a whole row.

        The last block may have fewer rows.
        """
        return pl.cdiv(self.rows * self.row_warps, self.block_parts)

    @property
    def turns(self) -> int:
        """The most blocks that a group of warpgroups takes before its CTA ends; 0 for no limit.

        This is config.turns, or fewer (at least 1) if there would not be 4 CTAs for each SM. With no limit, the launch
        has at most one CTA per SM.
        """
        if not self.config.turns:
            return 0
        at_once = self.core_count * CTAS_AT_ONCE // self.cluster
        return max(1, min(self.config.turns, self.blocks // max(1, self.groups * at_once)))

    @property
    def ctas(self) -> int:
        """The number of CTAs of the launch; with clusters, the number of clusters."""
        if self.turns:
            return pl.cdiv(self.blocks, self.groups * self.turns)
        return min(self.core_count, pl.cdiv(self.blocks, self.groups))

    @property
    def stride(self) -> int:
        """The distance, in blocks, from a block to the next block of the same group of warpgroups, without claims."""
        return self.groups if self.turns else self.ctas * self.groups

    @property
    def claims(self) -> bool:
        """Whether a group of warpgroups gets each block from a counter in device memory, instead of an equal share."""
        return self.config.claims and not self.turns and self.stages > 2

    def counter(self) -> Ref | None:
        """A new counter from which blocks are claimed, int32 [1] in device memory, of value 0; None without claims."""
        return cast(Ref, jax.new_ref(jnp.zeros(1, jnp.int32))) if self.claims else None

    def exchanged(self) -> Any:
        """Device memory in which the interpreter exchanges sums between the CTAs of a cluster, [blocks, 2, row_parts].

        None on a GPU, which uses shared memory, and without clusters.
        """
        if self.cluster == 1 or not interpreter.INTERPRETED:
            return None
        return jax.new_ref(jnp.zeros((self.blocks, 2, self.row_parts), jnp.float32))

    @property
    def stages(self) -> int:
        """The number of stages of each warpgroup's pipeline: config.stages, or fewer.

        There are fewer if shared memory lacks room, or if there would be more than 32 barriers, one for each stage
        of each warpgroup.
        """
        scale_bytes = self.scale_bytes if self.keeps_scale else 0
        room = (SHARED_MEMORY - scale_bytes) // self.stage_bytes
        return min(self.config.stages, room, MOST_BARRIERS // self.warpgroups)

    @property
    def keeps_scale(self) -> bool:
        """Whether shared memory keeps the scale: scale_bytes is not 0, and there is also room for two stages."""
        return 0 < self.scale_bytes <= SHARED_MEMORY - 2 * self.stage_bytes

    @property
    def stage_bytes(self) -> int:
        """The bytes of one stage of the pipelines of all warpgroups of a CTA and of all arrays."""
        return self.warpgroups * self.copies * WARPS * self.lines * LINE * self.itemsize

    def by_parts(self, x: jax.Array) -> jax.Array:
        """Reshapes an array [rows, columns] to [rows * row_parts, lines, 128].

        A part is the columns of a row that one warp has, as lines of 128 columns.
        """
        return x.reshape(self.rows * self.row_parts, self.lines, LINE)

    def weights_by_parts(self, x: jax.Array) -> jax.Array:
        """Reshapes a weight [columns] to [row_parts, lines, 128].

        A part is the columns of a row that one warp has, as lines of 128 columns.
        """
        return x.reshape(self.row_parts, self.lines, LINE)

    def numbers(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of an array with one float32 value per row; the rows are padded to whole blocks."""
        return jax.ShapeDtypeStruct((self.blocks * (1 if self.is_split else WARPS),), jnp.float32)
