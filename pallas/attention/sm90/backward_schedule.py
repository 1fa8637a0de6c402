"""What a CTA of the Hopper backward works on: a block of keys of a kv head, and the queries that it walks along.

A persistent CTA takes one such tile after another, and what loads for it runs ahead into the next one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.attention_inputs import AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.sm90 import head_views
from jax_kernels.pallas.mosaic.registers import as_int32, recomputed
from jax_kernels.pallas.mosaic.smem_tiles import has_odd_length
from jax_kernels.pallas.mosaic.split_tail import SplitTail
from jax_kernels.pallas.mosaic.tile_scheduler import Shape, TileScheduler

# The queries up to which heads_together is as a row has it; of longer sequences fewer heads run together.
HEADS_TOGETHER_UP_TO = 8192


@dataclasses.dataclass(frozen=True)
class Walks:
    """A kernel's work, as it is known when tracing. given, below: its arrays in device memory, by name.

    group: query heads of a kv head; the walk goes over all of them. visits_all: whether every block of keys meets every
    block of queries, as far as causality, a window and segments say. scheduler: of tiles that are blocks of keys of kv
    heads. is_persistent: whether a CTA takes one after another; else each has one, or a part of one. v_stages: for
    values.
    """

    options: AttentionOptions
    q_length: int
    kv_length: int
    block_q: int
    block_kv: int
    kv_heads: int
    group: int
    rotate: int
    visits_all: bool
    split: SplitTail
    scheduler: TileScheduler
    is_persistent: bool
    v_stages: int

    @classmethod
    def of(
        cls,
        arrays,
        options: AttentionOptions,
        kv_length: int,
        block_kv: int,
        config,
        core_count: int,
        *,
        bias_gradient: bool,
        interpret: bool,
    ) -> "Walks":
        batch, q_length = arrays["query"].shape[:2]
        heads, kv_heads = head_views.head_counts(arrays["query"], arrays["key"], options)
        group = heads // kv_heads
        # Heads of a group read the same keys: that many more of them run together at the same cost in cache. The dquery
        # of those that run together has to fit it.
        longer = max(1, q_length // HEADS_TOGETHER_UP_TO)
        together = max(1, config.heads_together // longer) * group
        visits_all = not (options.is_causal or options.window is not None or arrays["segments"] is not None)
        shape = Shape.of(batch, kv_heads, kv_length, block_kv)
        scheduler = TileScheduler(
            shapes=(shape,), is_causal=False, heads_together=together, dynamic=not interpret, core_count=core_count
        )
        split = SplitTail.none(shape.tiles)
        # Only dquery that is added in order of arrival may be; so may dkey and dvalue then.
        may_split = visits_all and not bias_gradient
        if may_split and all(arrays[name] is None for name in ("lists", "bounds")) and arrays["dquery"] is not None:
            split = SplitTail.of(shape.tiles, pl.cdiv(q_length, config.block_q) * group, core_count)
        # Two stages of keys have no room at head_dim 256 (blocks of 64). Sums of a bias, a softcap and a score_mod
        # leave no registers to spare, nor do copies of any rows at 128.
        any_rows = arrays["query"].shape[-1] > 64 and has_odd_length(arrays["query"], arrays["key"])
        has_extra = bias_gradient or any_rows or options.softcap is not None or arrays["mod"] is not None
        can_persist = block_kv > 64 and split.parts == 1 and not has_extra
        is_persistent = config.persistent and can_persist and shape.tiles > core_count
        v_stages = config.v_stages if is_persistent else 1
        sizes = q_length, kv_length, config.block_q, block_kv
        of_ctas = split, scheduler, is_persistent, v_stages
        return cls(options, *sizes, kv_heads, group, config.rotate, visits_all, *of_ctas)

    @property
    def ctas(self) -> int:
        return self.scheduler.ctas if self.is_persistent else self.split.ctas

    @property
    def k_stages(self) -> int:
        return 2 if self.is_persistent else 1

    def stages_of(self, turn: Any) -> tuple[Any, Any]:
        """(that of the keys, that of the values) of a CTA's tile number `turn`."""
        if not self.is_persistent:
            return 0, 0
        stage = recomputed(turn) & 1
        return stage, stage if self.v_stages == 2 else recomputed(0)

    def slot_of(self, nth: Any, stages: int) -> Any:
        """Of a CTA's step number `nth`."""
        if self.is_persistent and stages & (stages - 1) == 0:  # a bit, not a division with a sign
            return nth & (stages - 1)
        return lax.rem(nth, jnp.int32(stages))

    def shared(self, sums: int, head_dim: int, *, warpgroups: int) -> dict[str, Any]:
        """What CTAs share, in refs: so many sums of parts of a tile, or the tiles' counter."""
        counter = self.scheduler.counter() if self.is_persistent else None
        return {"counter": counter} | self.split.shared(sums, self.block_kv, head_dim, warpgroups=warpgroups)

    def for_each(self, cta: Any, run: Callable, state: Any = 0) -> None:
        """TileScheduler.for_each, or its only call of `run` where the CTA has one tile."""
        if self.is_persistent:
            self.scheduler.for_each(recomputed(cta), run, state)
        else:
            run(cta, 0, state)

    def block(self, given, cta: Any) -> tuple[Any, Any, Any]:
        """(batch entry, kv head, block of keys) of a CTA. Heads that run together alternate."""
        if given["lists"] is not None:
            walk = given["lists"].walk(cta)
            return walk.b, walk.head, walk.block
        return self.scheduler.place(self.split.tile(cta))

    def limits(self, given, b: Any) -> block_ranges.Limits:
        """Of a batch entry."""
        options = self.options
        return block_ranges.limits(
            given["bounds"], b, options.q_offset, self.kv_length, is_causal=options.is_causal, window=options.window
        )

    def over_queries(self, given, cta: Any, b: Any, kv_head: Any, kv_index: Any) -> tuple[Any, Callable]:
        """(number of steps, step -> (head, block of queries, whether it is partial))."""
        group, q_blocks = self.group, pl.cdiv(self.q_length, self.block_q)
        if given["lists"] is not None:
            walk = given["lists"].walk(recomputed(cta))
            # As the compiler is to know: around a loop that may not run it keeps more in registers.
            return jnp.maximum(walk.count, 1), functools.partial(walk.query_place, group=group, q_blocks=q_blocks)
        among = None if given["segments"] is None else given["segments"].among(b, kv_index)
        sizes = self.block_kv, self.block_q, self.q_length
        blocks = self.limits(given, b).query_blocks(kv_index * self.block_kv, *sizes, among, in_order=True)
        blocks = blocks.at_least_one()
        is_split = self.split.parts > 1

        def place(step):
            if is_split:
                step = step + self.split.first(recomputed(cta))
            if group == 1:
                head, nth = kv_head, step
            else:
                head = kv_head * group + lax.div(step, as_int32(blocks.count))
                nth = lax.rem(step, as_int32(blocks.count))
            q_block = blocks.at(nth)
            if self.rotate and self.visits_all:
                q_block = lax.rem(q_block + kv_index * self.rotate, jnp.int32(q_blocks))
            return head, q_block, blocks.is_partial(nth)

        return self.split.count(cta) if is_split else blocks.count * group, place
