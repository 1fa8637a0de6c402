"""The sizes of a launch of the Hopper matmul of low-bit weights."""

import dataclasses
import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_kernels.inputs.matmul import MatmulOptions
from jax_kernels.pallas.block_specs.matmul_specs import MatmulLowBitSm90
from jax_kernels.pallas.mosaic import elementwise
from jax_kernels.quantization.formats import LowBit

COLUMNS = 64  # columns of w of a compute warpgroup
STEP_BYTES = 128  # bytes of each column of w in a step
SHARED_MEMORY = 225 << 10  # bytes of a CTA's shared memory, without its barriers


class WeightSlice(NamedTuple):
    """The weights of a step, `width` for each column, that are unpacked together and multiplied by one chunk of x.

    byte: their first byte among the step's bytes of a column. half: with two 4-bit values in a byte, 0 for the low 4
    bits, 1 for the high 4 bits; otherwise 0. chunk: the index, in the step, of the chunk of x's columns. group: the
    index, in the step, of the scale that the weights share; 0 if a column has one scale.
    """

    byte: int
    half: int
    chunk: int
    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowBitTraits:
    """The static facts of a launch that multiplies x [m, k] by the transpose of low-bit weights [n, k].

    dtype: of x. weights: the number of weight matrices: 1, or 2 for a gated unit. layout: the format of the weights.
    core_count: the number of SMs. A chunk is `width` (32 or 64) neighbouring columns of x, which are multiplied
    together.
    """

    options: MatmulOptions
    config: MatmulLowBitSm90
    layout: LowBit
    m: int
    n: int
    k: int
    dtype: jnp.dtype
    weights: int
    core_count: int

    @property
    def rows(self) -> int:
        """m rounded up to a multiple of 8."""
        return pl.cdiv(self.m, 8) * 8

    @property
    def compute_wgs(self) -> int:
        """The number of compute warpgroups of a CTA: the largest one up to config.compute_wgs whose columns divide n.

        A gated unit has at most half of config.compute_wgs, because each warpgroup also has the sums of the second
        matmul.
        """
        most = max(1, self.config.compute_wgs // self.weights)
        return max(wgs for wgs in (1, 2, 4) if wgs <= most and self.n % (wgs * COLUMNS) == 0)

    @property
    def block_n(self) -> int:
        return self.compute_wgs * COLUMNS

    @property
    def block_k(self) -> int:
        """The number of values of the inner dimension in a step."""
        return STEP_BYTES * (2 if self.layout.is_packed else 1)

    @property
    def chunks(self) -> int:
        """The number of chunks, of `width` columns each, in a step's part of x."""
        return self.block_k // self.width

    @property
    def k_steps(self) -> int:
        return self.k // self.block_k

    @property
    def tiles(self) -> int:
        return self.n // self.block_n

    @property
    def joins(self) -> bool:
        """Whether the kernel runs the epilogue. CTAs that split a work tile's inner dimension are then a cluster.

        This needs config.cluster_join, and an activation that the kernel can compute. It may also be True if no work
        tile is split. Otherwise a second launch adds the splits' sums and runs the epilogue.
        """
        return self.config.cluster_join and elementwise.why_not(self.options.activation) is None

    @property
    def most_splits(self) -> int:
        """The largest number of CTAs per work tile with which each SM has at most one CTA: 1 up to the number of steps.

        It is 1 if there are more work tiles than SMs. With `joins` it is 1, 2, 4 or 8.
        """
        most = max(1, min(self.k_steps, self.core_count // self.tiles))
        return max(ctas for ctas in (1, 2, 4, 8) if ctas <= most) if self.joins else most

    @property
    def steps_of_split(self) -> int:
        """The number of steps of a CTA; the last CTAs of a work tile may have fewer, or none."""
        return pl.cdiv(self.k_steps, self.most_splits)

    @property
    def splits(self) -> int:
        """The number of CTAs that split a work tile's inner dimension. In a cluster the last CTAs may have no steps."""
        return self.most_splits if self.joins else pl.cdiv(self.k_steps, self.steps_of_split)

    @property
    def exchange(self) -> tuple[int, ...]:
        """The shape of the float32 shared memory in which a CTA receives the sums of the cluster's CTAs.

        Each CTA of the cluster adds the sums of some of the warpgroups. The axes are: matmuls; warpgroups whose sums
        this CTA adds; CTAs that send sums; pairs of values that a thread has; threads of a warpgroup; the 2 values of a
        pair.
        """
        of_cta = pl.cdiv(self.compute_wgs, self.splits)
        return self.weights, of_cta, self.splits, self.rows // 4, COLUMNS * 2, 2

    @property
    def exchanges(self) -> bool:
        """Whether CTAs of a cluster exchange their sums."""
        return self.joins and self.splits > 1

    @property
    def transposes_sums(self) -> bool:
        """Whether the splits' sums in device memory are [splits, n, rows], and not [splits, m, n]."""
        return True

    @property
    def scales_of_step(self) -> int:
        """The number of scales of a column in a step; 0 if the column has one scale for all its values."""
        return 0 if self.layout.group is None else max(1, self.block_k // self.layout.group)

    @property
    def width(self) -> int:
        """The number of values of a column that are unpacked together, along the inner dimension: 32 or 64."""
        return min(64, self.layout.unit // (2 if self.layout.is_packed else 1))

    @property
    def parts(self) -> list[WeightSlice]:
        """The parts of a step, sorted by the group whose scale they use."""
        found = []
        halves, unit = (2 if self.layout.is_packed else 1), min(self.layout.unit_bytes, self.width)
        for nth, half in itertools.product(range(STEP_BYTES // unit), range(halves)):
            chunk = nth * halves + half
            group = 0 if self.layout.group is None else chunk * self.width // self.layout.group
            found.append(WeightSlice(byte=nth * unit, half=half, chunk=chunk, group=group))
        return found

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline: config.stages, or fewer if shared memory lacks room."""
        of_weights = self.weights * self.block_n * (STEP_BYTES + 4 * self.scales_of_step)
        room = SHARED_MEMORY - (4 * math.prod(self.exchange) if self.exchanges else 0)
        return min(self.config.stages, room // (of_weights + self.rows * self.block_k * 2))
