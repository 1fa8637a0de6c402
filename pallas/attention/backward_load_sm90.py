"""What the memory warpgroup of the Hopper backward loads: a block of keys, and the queries of its walk."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention import views_sm90
from jax_kernels.pallas.attention.backward_walks_sm90 import Walks
from jax_kernels.pallas.attention.hopper import Tiles, recomputed


class Staged(NamedTuple):
    """Rows in device memory, [B, T, H, D], with a number for each, [B, H, T], and the stages for blocks of them.

    smem: of copies, [stages, halves, ...]. numbers_smem: [stages, block_q]. ids, ids_smem: of segments, where these are
    loaded as well.
    """

    gmem: Any
    numbers: Any
    smem: Any
    numbers_smem: Any
    ready: Any
    free: Any
    stages: int
    ids: Any = None
    ids_smem: Any = None


class Loads(NamedTuple):
    """given: the kernel's arrays in device memory, by name. k_smem, v_smem: of copies. bias: a dense Stage, or None.

    halves: of the columns of values, queries and dout, of `width` each; columns, row_groups: see backward_dqkv_sm90.
    """

    walks: Walks
    given: Any
    cta: Any
    k_tiles: Tiles
    v_tiles: Tiles
    q_tiles: Tiles
    k_smem: Any
    v_smem: Any
    kv_ready: Any
    queries: Staged
    dout: Staged
    bias: Any
    chunks: int
    row_groups: int
    halves: int
    width: int

    def run(self) -> None:
        walks, given, cta, width = self.walks, self.given, self.cta, self.width
        block, over_queries = functools.partial(walks.block, given), functools.partial(walks.over_queries, given, cta)
        q_head_of, kv_head_of = views_sm90.head_maps(walks.options)
        q_tiles, bias = self.q_tiles, self.bias
        b, kv_head, kv_index = block(recomputed(cta))
        kv_head = kv_head_of(kv_head)
        for r in range(self.row_groups):
            rows = pl.ds(kv_index * walks.block_kv + 64 * r, 64)
            for c in range(self.chunks):
                source = given["key"].at[b, rows, kv_head, pl.ds(64 * c, 64)]
                self.k_tiles.load(source, self.k_smem.at[c, r], self.kv_ready)
            for half in range(self.halves):
                source = given["value"].at[b, rows, kv_head, pl.ds(width * half, width)]
                self.v_tiles.load(source, self.v_smem.at[r, half], self.kv_ready)
        # Behind the first copies: what it holds and what they need do not fit this warpgroup's registers together.
        b, kv_head, kv_index = block(recomputed(cta))
        steps, place = over_queries(b, kv_head, kv_index)

        def load(step, _):
            head, q_block, _ = place(step)
            rows = pl.ds(q_block * walks.block_q, walks.block_q)

            def place_again():
                """(batch entry, head, queries): the loop of copies leaves no registers to keep them."""
                if not q_tiles.whole:
                    return b, head, rows
                b_, kv_head_, kv_index_ = block(recomputed(cta))
                head_, q_block_, _ = over_queries(b_, kv_head_, kv_index_)[1](recomputed(step))
                return b_, head_, pl.ds(q_block_ * walks.block_q, walks.block_q)

            def load_rows(staged: Staged):
                slot = lax.rem(step, jnp.int32(staged.stages))
                b, head, rows = place_again()

                @pl.when(step >= staged.stages)
                def _():
                    plgpu.barrier_wait(staged.free.at[slot])

                ready = staged.ready.at[slot]
                for half in range(self.halves):
                    source = staged.gmem.at[b, rows, q_head_of(head), pl.ds(width * half, width)]
                    q_tiles.load(source, staged.smem.at[slot, half], ready)
                b, head, rows = place_again()
                plgpu.copy_gmem_to_smem(staged.numbers.at[b, head, rows], staged.numbers_smem.at[slot], ready)
                if staged.ids is not None:
                    plgpu.copy_gmem_to_smem(staged.ids.at[b, rows], staged.ids_smem.at[slot], ready)

            load_rows(self.queries)
            load_rows(self.dout)
            if bias is not None:

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(bias.free)

                entry, _, of_keys = block(recomputed(cta))
                kv_start = of_keys * walks.block_kv
                bias.fill(given["dense"], entry, head, kv_start, q_block * walks.block_q, kv_start)

        # An opaque count: unrolled or peeled, the loop would not fit the registers either.
        lax.fori_loop(0, recomputed(steps), load, None)
