"""What a call makes of a step's scores in the Hopper backward, beside their exponentials."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90 import mask_bits
from jax_kernels.pallas.attention.sm90.backward_schedule import Schedule
from jax_kernels.pallas.attention.sm90.softcap import softcapped
from jax_kernels.pallas.mosaic.layouts import COLUMN, ROW, WGMMA
from jax_kernels.pallas.mosaic.registers import recomputed


class Scores(NamedTuple):
    """Of 64 keys of a tile and the queries of its step number `step`; methods take scores [64, block_q].

    given: the kernel's arrays in device memory, by name. bias: a dense Stage, or None. ids_smem: of the step's queries.
    predicate: whether a block may need it, may_end: whether one may reach past the keys. row: the first of the keys
    within the tile, first_key(): within the sequence. entry(): of the batch. head, q_start, is_partial: as the walk has
    them. words: of a mask, where they were read early.
    """

    schedule: Schedule
    given: Any
    bias: Any
    ids_smem: Any
    predicate: bool
    may_end: bool
    tile: Any
    step: Any
    row: Any
    first_key: Callable[[], Any]
    entry: Callable[[], Any]
    head: Any
    q_start: Any
    is_partial: Any
    words: Any

    def _under_predicate(self, s: Any) -> Any:
        if self.given.lists is not None:
            return self.given.lists.walk(recomputed(self.tile)).masked(s, self.step, self.row, by_word=False)
        b, segments = self.entry(), self.given.segments
        ids = None
        if segments is not None:
            ids = (
                plgpu.load(segments.kv_ids.at[b, pl.ds(self.first_key(), 64)], layout=ROW, optimized=False),
                plgpu.load(self.ids_smem, layout=COLUMN, optimized=False),
            )
        keep = self.schedule.limits(self.given, b).keep(
            s.shape, self.first_key(), self.q_start, layout=WGMMA, kv_axis=0, may_end=self.may_end, ids=ids
        )
        return jnp.where(keep, s, -jnp.inf)

    def biased(self, s: Any) -> Any:
        options = self.schedule.options
        return self.bias.added(s, options.softcap or options.scale, self.row, transposed=True)

    def masked(self, s: Any) -> Any:
        """Under the softcap, or else the bias, and -inf where the predicate is False."""
        options = self.schedule.options
        if options.softcap:
            s = softcapped(s, options.softcap, options.scale)
        elif self.bias is not None:  # softcap's derivative needs the scores without
            s = self.biased(s)
        if self.words is not None:  # full blocks, too: where most are partial, a branch costs a tenth
            return mask_bits.kept(s, self.words, by_word=False)
        if self.predicate:
            # One loop with a branch, not two loops: what lives across a loop more would spill.
            s = lax.cond(self.is_partial, self._under_predicate, lambda s: s, s)
        return s

    def modified(self, s: Any) -> Any:
        """The score_mod on a tile."""
        entry, mod = self.entry(), self.given.mod
        numbers = mod.of_head(entry, self.head)
        return mod.on(s, numbers, entry, self.head, self.q_start, self.first_key(), transposed=True)
