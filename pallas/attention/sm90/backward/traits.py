"""The static facts of a Hopper backward when its kernel is traced: sizes, and the features of a call."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jax_kernels.inputs.attention import AttentionOptions
from jax_kernels.pallas.attention.sm90.backward.arrays import Arrays
from jax_kernels.pallas.attention.sm90.backward.schedule import Schedule
from jax_kernels.pallas.attention.sm90.backward.widths import COMPUTE_WGS, Widths
from jax_kernels.pallas.attention.sm90.features import head_views
from jax_kernels.pallas.attention.sm90.features.bias import Bias
from jax_kernels.pallas.block_specs.specs import AttentionBackwardSm90
from jax_kernels.pallas.mosaic.smem_tiles import SmemTiles, has_odd_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch of the one-pass backward.

    bias: the call's bias, a Bias without arrays if there is none. dquery_head: a function from a head of the call to a
    head of dquery. has_dquery: whether the kernel adds to dquery. bias_gradient: whether the kernel sums the gradient
    of a bias per key. has_words: whether block lists have the mask words of all blocks. has_slope: whether the
    score_mod's derivative with respect to the score is not 1. natural: whether scores are in natural units, not in base
    2. may_end: whether a block of keys may reach past the last key, and no segment ids show it. k_tiles, v_tiles,
    q_tiles, do_tiles: the layouts of keys, values, queries and dout in shared memory.
    """

    schedule: Schedule
    config: AttentionBackwardSm90
    widths: Widths
    dtype: jnp.dtype
    bias: Bias
    dquery_head: Callable[[Any], Any]
    has_dquery: bool
    bias_gradient: bool
    has_segments: bool
    has_lists: bool
    has_words: bool
    has_mod: bool
    has_slope: bool
    natural: bool
    may_end: bool
    k_tiles: SmemTiles
    v_tiles: SmemTiles
    q_tiles: SmemTiles
    do_tiles: SmemTiles

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        options: AttentionOptions,
        kv_length: int,
        *,
        bias_gradient: bool,
        config: AttentionBackwardSm90,
        core_count: int,
        interpret: bool,
    ) -> "Traits":
        """The static facts of a launch with these arrays. kv_length: the unpadded number of keys. core_count: the
        number of SMs.

        Raises ValueError if config.block_q does not fit the head_dim.
        """
        widths = Widths(key=arrays.query.shape[-1], value=arrays.value.shape[-1], block_q=config.block_q)
        block_kv, width, v_width = widths.block_kv, widths.key // widths.halves, widths.value // widths.halves
        any_rows, any_queries = has_odd_length(arrays.query, arrays.key), has_odd_length(arrays.query)
        mod = arrays.mod
        schedule = Schedule.of(
            arrays,
            options,
            kv_length,
            block_kv,
            config,
            core_count,
            bias_gradient=bias_gradient,
            interpret=interpret,
        )
        traits = cls(
            schedule=schedule,
            config=config,
            widths=widths,
            dtype=arrays.key.dtype,
            bias=arrays.bias or Bias(),
            dquery_head=head_views.dquery_head_map(arrays.query, arrays.dquery, options),
            has_dquery=arrays.dquery is not None,
            bias_gradient=bias_gradient,
            has_segments=arrays.segments is not None,
            has_lists=arrays.lists is not None,
            has_words=arrays.lists is not None and arrays.lists.has_all_words,
            has_mod=mod is not None,
            has_slope=mod is not None and not mod.adds_only,
            natural=mod is not None and mod.may_mask,
            may_end=arrays.bounds is not None or (arrays.segments is None and kv_length % block_kv != 0),
            k_tiles=SmemTiles(widths.chunk, any_rows),
            v_tiles=SmemTiles(v_width, any_rows),
            q_tiles=SmemTiles(width, any_queries, atom=widths.chunk),
            do_tiles=SmemTiles(v_width, any_queries),
        )
        traits._check()
        return traits

    def _check(self) -> None:
        """Raises ValueError if the warpgroups cannot divide the blocks of dquery of this block_q and head_dim."""
        blocks = self.chunks * self.q_chunks
        one_each = self.q_chunks == 1 if self.splits_columns else self.dq_blocks == 1
        if blocks % COMPUTE_WGS or not one_each:
            block_q = self.config.block_q
            raise ValueError(f"AttentionBackwardSm90.block_q={block_q} does not fit head_dim={self.widths.key}")

    @property
    def options(self) -> AttentionOptions:
        return self.schedule.options

    @property
    def block_q(self) -> int:
        return self.schedule.block_q

    @property
    def block_kv(self) -> int:
        return self.schedule.block_kv

    @property
    def is_persistent(self) -> bool:
        return self.schedule.is_persistent

    @property
    def recomputes(self) -> bool:
        """Whether a step recomputes its block of queries and the number of steps where it needs them, because no
        registers are left to keep them: with block lists, and with segment ids of grouped heads.

        Otherwise ptxas serialises the matmuls of grouped heads at 96, 160 and 192/128 (its note C7512), which takes 1.4
        times as long. Without groups it spills up to 40 bytes, and recomputing takes 1.01 to 1.03 of the time. A
        persistent CTA reads these numbers from shared memory.
        """
        grouped_segments = self.has_segments and self.schedule.group > 1 and not self.splits_columns
        return (self.has_lists or grouped_segments) and not self.is_persistent

    @property
    def reads_place_again(self) -> bool:
        """Whether a step reads the index of its block of queries again when it stores dquery: no registers are left to
        keep it.
        """
        if self.is_persistent or self.late_dp:
            return True
        return self.recomputes and (self.has_segments or bool(self.options.softcap))

    @property
    def has_bias(self) -> bool:
        return self.bias.has_bias

    @property
    def splits_columns(self) -> bool:
        """Whether the warpgroups split the columns of the same 64 keys, instead of having 64 keys each."""
        return self.widths.splits_columns

    @property
    def key_groups(self) -> int:
        """The number of groups of 64 keys in a block of keys."""
        return 1 if self.splits_columns else COMPUTE_WGS

    @property
    def halves(self) -> int:
        """The number of parts of the columns of values, queries and dout, each of `width` columns."""
        return self.widths.halves

    @property
    def width(self) -> int:
        """The number of columns of a warpgroup's accumulator of dkey: all columns of key, or half of them."""
        return self.widths.key // self.halves

    @property
    def v_width(self) -> int:
        """The number of columns of a warpgroup's accumulator of dvalue: all columns of value, or half of them."""
        return self.widths.value // self.halves

    @property
    def chunk(self) -> int:
        """The number of columns of a tile of keys, and of a block of dquery."""
        return self.widths.chunk

    @property
    def v_chunk(self) -> int:
        """The number of columns of dvalue that a float32 copy takes. It divides chunk."""
        return math.gcd(self.chunk, self.v_width)

    @property
    def chunks(self) -> int:
        """The number of chunks of the columns of key."""
        return self.widths.key // self.chunk

    @property
    def q_chunks(self) -> int:
        """The number of chunks of 64 queries in a block of queries."""
        return self.block_q // 64

    @property
    def parts(self) -> int:
        """The number of arrays of columns into which a warpgroup's accumulator of dkey is divided; dvalue has as
        many.
        """
        return self.q_tiles.count

    @property
    def dq_blocks(self) -> int:
        """The number of blocks of dquery, 64 queries x chunk, that a warpgroup stores in a step."""
        return self.chunks * self.q_chunks // COMPUTE_WGS

    @property
    def scores_ahead(self) -> bool:
        """Whether a step also issues the next step's scores, behind its own gradients. Wide or split columns leave
        too few registers.
        """
        return self.widths.scores_ahead

    @property
    def late_dp(self) -> bool:
        """Whether a step issues dP only when P is in 16 bits, because the sums leave no registers for S and dP."""
        return not (self.splits_columns or self.scores_ahead)

    @property
    def waits_late(self) -> bool:
        """Whether a step issues the scores before it waits for dout."""
        return self.late_dp or (self.config.late_do and not self.scores_ahead)

    @property
    def exchanges_ds(self) -> bool:
        """Whether each warpgroup reads the dS of the other warpgroup, for its part of dquery."""
        return self.has_dquery and not self.splits_columns

    @property
    def mask_first(self) -> bool:
        """Whether a step masks the scores before it issues dP.

        It is False in four cases. If the warpgroups do not exchange dS, or without scores_ahead: a branch for partial
        blocks before dP would make ptxas serialise the matmuls (its note C7511). With a softcap, or with a score_mod
        whose derivative is 1: their arithmetic comes before the mask, and should run while the matmul of dP runs.

        With another score_mod the mask comes first: it masks the score_mod's input, because masking the output would
        need both in registers.
        """
        return self.exchanges_ds and self.scores_ahead and not self.options.softcap and self.has_slope == self.has_mod

    @property
    def predicate(self) -> bool:
        """Whether a block may hold pairs that the call's limits, segments or mask drop."""
        return self.may_end or self.has_segments or self.has_lists or not self.schedule.visits_all
