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


class Part(NamedTuple):
    """Weights of a step that are decoded together: half `half` of each byte from byte `byte` on.

    chunk: the chunk of x that multiplies them. group: the group whose scale they share.
    """

    byte: int
    half: int
    chunk: int
    group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowBitTraits:
    """Sizes and features of a launch: [m, k] @ [n, k]ᵀ. rows: m rounded up to 8. weights: 1, or 2 for a gated unit."""

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
        return pl.cdiv(self.m, 8) * 8

    @property
    def compute_wgs(self) -> int:
        """Compute warpgroups of a CTA: the most that divide the columns, up to the block spec's.

        A gated unit has at most half the block spec's, because each warpgroup also has the sums of the second matmul.
        """
        most = max(1, self.config.compute_wgs // self.weights)
        return max(wgs for wgs in (1, 2, 4) if wgs <= most and self.n % (wgs * COLUMNS) == 0)

    @property
    def block_n(self) -> int:
        return self.compute_wgs * COLUMNS

    @property
    def block_k(self) -> int:
        return STEP_BYTES * (2 if self.layout.is_packed else 1)

    @property
    def chunks(self) -> int:
        """The number of chunks of x's columns in a step."""
        return self.block_k // self.width

    @property
    def k_steps(self) -> int:
        return self.k // self.block_k

    @property
    def tiles(self) -> int:
        return self.n // self.block_n

    @property
    def joins(self) -> bool:
        """Whether the CTAs of a cluster join the splits. The kernel must be able to compute the activation."""
        return self.config.cluster_join and elementwise.why_not(self.options.activation) is None

    @property
    def most_splits(self) -> int:
        """The number of splits that gives each SM one CTA."""
        most = max(1, min(self.k_steps, self.core_count // self.tiles))
        return max(ctas for ctas in (1, 2, 4, 8) if ctas <= most) if self.joins else most

    @property
    def steps_of_split(self) -> int:
        """Steps of a CTA."""
        return pl.cdiv(self.k_steps, self.most_splits)

    @property
    def splits(self) -> int:
        """CTAs of a work tile. In a cluster the last CTAs may have no steps."""
        return self.most_splits if self.joins else pl.cdiv(self.k_steps, self.steps_of_split)

    @property
    def exchange(self) -> tuple[int, ...]:
        """The shape of the shared memory in which sums are joined: see exchange_sums."""
        of_cta = pl.cdiv(self.compute_wgs, self.splits)
        return self.weights, of_cta, self.splits, self.rows // 4, COLUMNS * 2, 2

    @property
    def exchanges(self) -> bool:
        return self.joins and self.splits > 1

    @property
    def transposes_sums(self) -> bool:
        """Whether the sums of splits are [splits, n, m]."""
        return True

    @property
    def scales_of_step(self) -> int:
        """Scales of a column in a step; 0 if the column has a single scale."""
        return 0 if self.layout.group is None else max(1, self.block_k // self.layout.group)

    @property
    def width(self) -> int:
        """Values of the inner dimension that are decoded together: 32 or 64."""
        return min(64, self.layout.unit // (2 if self.layout.is_packed else 1))

    @property
    def parts(self) -> list[Part]:
        """The parts of a step, in the order of their groups."""
        found = []
        halves, unit = (2 if self.layout.is_packed else 1), min(self.layout.unit_bytes, self.width)
        for nth, half in itertools.product(range(STEP_BYTES // unit), range(halves)):
            chunk = nth * halves + half
            group = 0 if self.layout.group is None else chunk * self.width // self.layout.group
            found.append(Part(byte=nth * unit, half=half, chunk=chunk, group=group))
        return found

    @property
    def stages(self) -> int:
        """The block spec's stages, or the number that fits shared memory if that is lower."""
        of_weights = self.weights * self.block_n * (STEP_BYTES + 4 * self.scales_of_step)
        room = SHARED_MEMORY - (4 * math.prod(self.exchange) if self.exchanges else 0)
        return min(self.config.stages, room // (of_weights + self.rows * self.block_k * 2))
