"""The named state of the Hopper forward kernel: its arrays, its static facts when traced, and its shared memory."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_kernels.inputs.attention import AttentionOptions
from jax_kernels.pallas.attention import softmax
from jax_kernels.pallas.attention.sm90.features.bias import Bias, Stage
from jax_kernels.pallas.attention.sm90.features.block_lists import Lists
from jax_kernels.pallas.attention.sm90.features.head_views import LaunchCall
from jax_kernels.pallas.attention.sm90.features.score_mod import Mod
from jax_kernels.pallas.attention.sm90.features.segments import Segments
from jax_kernels.pallas.attention.sm90.features.tail_block import CleanEnd
from jax_kernels.pallas.attention.sm90.forward.loop import KvLoop, KvPipeline
from jax_kernels.pallas.block_specs.specs import AttentionForwardSm90
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref
from jax_kernels.pallas.mosaic.smem_tiles import SmemTiles, has_odd_length
from jax_kernels.pallas.mosaic.tile_scheduler import Fetched, TileScheduler


class Earlier[A: jax.Array | Ref](NamedTuple):
    """The float32 results of the same queries over other keys, to merge with.

    out: [B, T, H, Dv]. lse: [B, H, T], natural log. T is padded to whole blocks of queries.
    """

    out: A
    lse: A


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays[A: jax.Array | Ref]:
    """The arrays that the kernel reads, in device memory, in the order of its operands. None: the call has none.

    query, key, value: one array per call of the launch. Several calls can have one launch only if they have no other
    arrays than these and the counter.

    bounds: int32 [B, 2 or 3], the limits that tracing does not know: the position of query 0, the number of keys that
    count, and with inputs.reach the first query that has keys. counter: int32 [1], the next work tile. earlier: the
    results of other keys to merge with. end: copies of the values of the block in which kv_lengths ends, with zeros
    past the end, which the kernel loads instead of that block; end.key is None. bias, lists, mod, segments: the call's
    bias, block lists, score_mod and segment ids. sinks: [B, H] float32.

    score_bounds: [B, heads of query] float32, an upper bound of each head's scores in base 2; with
    config.norms_q_in_kernel, the bound for a query of norm 1. small_scores: [B, heads of query] int32, 1 if all scores
    of a head are so small that a polynomial computes their tanh. Both have all heads of the array query.
    """

    bounds: A | None = None
    counter: Ref | None = None
    bias: Bias | None = None
    earlier: "Earlier | None" = None
    end: CleanEnd | None = None
    key: list[A]
    score_bounds: A | None = None
    lists: Lists | None = None
    mod: Mod | None = None
    query: list[A]
    segments: Segments | None = None
    sinks: A | None = None
    small_scores: A | None = None
    value: list[A]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results[A: jax.Array | Ref]:
    """The arrays that the kernel writes, one per call of the launch.

    outs: [B, T, H, Dv]. lses, lse_lo: [B, H, T] float32, or padded to whole blocks of rows if T is not a multiple of 4.
    lses and lse_lo are empty if the options ask for no lse. lse_lo: the exact log-sum-exp minus lse; empty if the
    kernel does not compute it.
    """

    outs: tuple[A, ...]
    lses: tuple[A, ...]
    lse_lo: tuple[A, ...]

    @classmethod
    def of(cls, refs: tuple[A, ...], calls: int) -> "Results":
        """The results by name, from one tuple of all outs, then all lses, then all lse_lo; the last two may be missing.

        calls: the number of calls.
        """
        arrays = iter(itertools.batched(refs, calls))
        return cls(outs=next(arrays), lses=next(arrays, ()), lse_lo=next(arrays, ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch when its kernel is traced.

    any_rows: whether an array may have a number of rows that is not a multiple of 8. natural: the softmax's
    input is in natural units. This is so with a bias per query and key, and under a score_mod that may mask. Otherwise
    the input is in base 2 with a bias per key or another score_mod; with neither, it is the raw Q K^T, or with a
    softcap tanh(score / softcap).
    """

    config: AttentionForwardSm90
    options: AttentionOptions
    calls: tuple[LaunchCall, ...]
    scheduler: TileScheduler
    interpret: bool
    dtype: jnp.dtype
    out_dtype: DTypeLike
    head_dim: int
    v_head_dim: int
    any_rows: bool
    has_bias: bool
    has_mod: bool
    has_segments: bool
    has_sinks: bool
    has_earlier: bool
    natural: bool

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        scheduler: TileScheduler,
        options: AttentionOptions,
        calls: tuple[LaunchCall, ...],
        *,
        out_dtype: DTypeLike,
        config: AttentionForwardSm90,
        interpret: bool,
    ) -> "Traits":
        """The static facts of a launch with these arrays. calls: of each call of the launch."""
        bias = arrays.bias or Bias()
        return cls(
            config=config,
            options=options,
            calls=calls,
            scheduler=scheduler,
            interpret=interpret,
            dtype=arrays.query[0].dtype,
            out_dtype=out_dtype,
            head_dim=arrays.query[0].shape[-1],
            v_head_dim=arrays.value[0].shape[-1],
            any_rows=has_odd_length(*arrays.query, *arrays.key),
            has_bias=bias.has_bias,
            has_mod=arrays.mod is not None,
            has_segments=arrays.segments is not None,
            has_sinks=arrays.sinks is not None,
            has_earlier=arrays.earlier is not None,
            natural=bias.tiles is not None or (arrays.mod is not None and arrays.mod.may_mask),
        )

    @property
    def has_lse(self) -> bool:
        return self.options.has_lse

    @property
    def has_lse_lo(self) -> bool:
        """Whether the kernel computes the exact log-sum-exp minus lse."""
        return self.has_lse and (self.has_bias or self.natural)

    @property
    def score_factor(self) -> float:
        """The factor that turns S, or with a softcap its tanh, into scores in natural units."""
        return self.options.softcap or self.options.scale

    @property
    def softmax_scale(self) -> float:
        """The factor that turns the softmax's input into natural units: ln 2 with a bias or a score_mod, whose results
        are in base 2, otherwise score_factor. It has no meaning if `natural`.
        """
        return softmax.LN2 if self.has_bias or self.has_mod else self.score_factor

    @property
    def softmax_step(self) -> Callable[..., tuple[jax.Array, ...]]:
        """The online softmax of one block: (scores, row_max, row_sum) -> (P, new row_max, new row_sum, alpha).

        alpha: the factor for O. It is softmax.natural_step if `natural`, otherwise softmax.step with softmax_scale.
        """
        return softmax.natural_step if self.natural else functools.partial(softmax.step, scale=self.softmax_scale)

    @property
    def out_fits_q(self) -> bool:
        """Whether an output tile has the size and dtype of a query tile, or with `chunked`, of its first chunks."""
        return self.out_dtype == self.dtype and (self.v_head_dim == self.head_dim or self.chunked)

    @property
    def chunked(self) -> bool:
        """Whether tiles are cut into chunks of 64 columns, so that an output with fewer columns fits the queries'
        memory.
        """
        fits = self.v_head_dim < self.head_dim <= 192 and self.v_head_dim % 64 == self.head_dim % 64 == 0
        return self.config.share_q_out and fits and self.out_dtype == self.dtype

    @property
    def is_wide(self) -> bool:
        """Whether the accumulators leave no spare registers."""
        return max(self.head_dim, self.v_head_dim) > 128

    @property
    def stores_registers(self) -> bool:
        """Whether the output goes from registers to device memory: shared memory has no room for float32 output."""
        return self.out_dtype != self.dtype

    @property
    def share_q_out(self) -> bool:
        """Whether the output goes through the shared memory of the queries."""
        return self.config.share_q_out and self.out_fits_q

    @property
    def early_q(self) -> bool:
        """Whether the next work tile's queries are loaded while this work tile is computed."""
        return self.config.early_q and (self.out_fits_q or self.stores_registers) and not self.share_q_out

    @property
    def q_tiles(self) -> int:
        """The number of query tiles in shared memory: early_q also keeps the queries of the next work tile."""
        return (1 + self.early_q) * self.config.compute_warpgroups

    def q_slot(self, w: int, turn: Index) -> Index:
        """The index in shared memory of compute warpgroup w's queries, and of its output, in the CTA's `turn`-th work
        tile.
        """
        return (turn & 1) * self.config.compute_warpgroups + w if self.early_q else w

    @property
    def qk_tiles(self) -> SmemTiles:
        """The layout of queries and keys in shared memory."""
        return SmemTiles(self.head_dim, self.any_rows, atom=self.config.atom, chunked=self.chunked)

    @property
    def v_tiles(self) -> SmemTiles:
        """The layout of values in shared memory."""
        return SmemTiles(self.v_head_dim, self.any_rows, atom=self.config.atom)

    @property
    def out_tiles(self) -> SmemTiles:
        """The layout of the output in shared memory."""
        return SmemTiles(self.v_head_dim, self.any_rows, atom=self.config.atom, chunked=self.chunked)

    def kv_loop(self, arrays: Arrays, cta: Index) -> KvLoop:
        """The loop over blocks of keys (KvLoop) of CTA number `cta`."""
        return KvLoop(
            cta=cta,
            scheduler=self.scheduler,
            options=self.options,
            calls=self.calls,
            block_q=self.config.block_q,
            block_kv=self.config.block_kv,
            bounds=arrays.bounds,
            segments=arrays.segments,
            lists=arrays.lists,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scratch:
    """A CTA's shared memory and barriers: scratch specifications for pl.run_scoped, which passes the Refs in the same
    fields.

    q, out: a tile per compute warpgroup. k, v: a block per slot of the pipeline. rows: lse and lse_lo, [1 or 2,
    warpgroups, 64]. spans: of the queries' segment ids, [query tiles, 2, 64]. q_ready: the queries of a
    compute warpgroup have arrived. bias: of a step. fetched: the next work tile from the scheduler's counter. None: not
    needed.
    """

    q: Ref
    out: Ref | None
    k: Ref
    v: Ref
    rows: Ref
    spans: Ref | None
    q_ready: Barrier
    pipeline: KvPipeline
    bias: Stage | None
    fetched: Fetched

    def lse_refs(self, traits: Traits, w: int) -> tuple[Ref, Ref | None]:
        """(lse, lse_lo) of compute warpgroup w, [64] each; lse_lo is None if the kernel does not compute it."""
        return self.rows.at[0, w], self.rows.at[1, w] if traits.has_lse_lo else None

    @classmethod
    def of(cls, traits: Traits, bias: Bias) -> "Scratch":
        """The scratch specifications of a launch with this bias."""
        config, qk_tiles, v_tiles, has_segments = traits.config, traits.qk_tiles, traits.v_tiles, traits.has_segments
        compute_wgs, block_kv, stages = config.compute_warpgroups, config.block_kv, config.stages
        own_out = None if traits.share_q_out or traits.early_q or traits.stores_registers else traits.out_tiles
        return cls(
            q=qk_tiles.scratch(traits.q_tiles, 64, dtype=traits.dtype),
            out=None if own_out is None else own_out.scratch(compute_wgs, 64, dtype=traits.out_dtype),
            k=qk_tiles.scratch(stages, block_kv, dtype=traits.dtype),
            v=v_tiles.scratch(stages, block_kv, dtype=traits.dtype),
            rows=smem_ref((1 + traits.has_lse_lo, compute_wgs, 64), jnp.float32),
            spans=smem_ref((traits.q_tiles, 2, 64), jnp.int32) if has_segments else None,
            q_ready=barrier_ref(num_arrivals=qk_tiles.count + has_segments, num_barriers=compute_wgs),
            pipeline=KvPipeline.scratch(stages, compute_wgs, qk_tiles.count, v_tiles.count),
            bias=bias.stage(config.block_q, block_kv, block_kv, compute_wgs),
            fetched=traits.scheduler.scratch(compute_wgs + 1),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Smem:
    """A CTA's tiles in shared memory, in two views: q, k, v and out for matmuls and stores, *_copied for copies.

    If out has no memory of its own, it is the memory of q.
    """

    q: Ref
    q_copied: Ref
    k: Ref
    k_copied: Ref
    v: Ref
    v_copied: Ref
    out: Ref
    out_copied: Ref

    @classmethod
    def of(cls, traits: Traits, scratch: Scratch) -> "Smem":
        """The views of a CTA's scratch memory."""
        (q, q_copied), (k, k_copied) = traits.qk_tiles.views(scratch.q), traits.qk_tiles.views(scratch.k)
        v, v_copied = traits.v_tiles.views(scratch.v)
        out, out_copied = q, q_copied
        if scratch.out is not None:
            out, out_copied = traits.out_tiles.views(scratch.out)
        return cls(
            q=q,
            q_copied=q_copied,
            k=k,
            k_copied=k_copied,
            v=v,
            v_copied=v_copied,
            out=out,
            out_copied=out_copied,
        )
