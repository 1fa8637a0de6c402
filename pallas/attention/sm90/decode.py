"""Attention for decoding on Hopper: a TMA producer with a deep ring, and one or two warpgroups of wgmma behind it.

A CTA walks items of (sequence, split of its keys, head of key, tile of 64 rows); the producer runs ahead into the next
item. A row is a query of a head (see decode.py). Two compute warpgroups take the blocks of keys in turns, each with a
ring and a softmax of its own, and each leaves its own part of the result.

Bound by reading keys and values: at (64, 1, 32 / 8 heads, 128) over 16,384 keys 4.3 GB, 1.0 ms at 4.25 TB/s, against
275 GFLOP with rows padded to 64, 0.3 ms at 900 TFLOP/s. So the ring is what counts, not overlap of wgmma and softmax.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention import decode, softmax
from jax_kernels.pallas.attention.sm90.softcap import softcapped
from jax_kernels.pallas.attention.triton.decode import merge
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import ROW, SWIZZLED, SWIZZLED_F32, WGMMA

TILE = 64  # rows of a tile, as wgmma has them
# Columns of the output that are staged at a time: all of them, in float32, would take a block's shared memory.
OUT_COLUMNS = 64
# Registers per thread of a compute and of the memory warpgroup where there are three: two have enough as it is.
REGISTERS = (208, 80)


def attention_decode(
    query, key, value, kv_lengths, block_tables, sinks, *, scale, softcap, left, config, core_count, interpret
):  # fmt: skip
    """See jax_kernels.pallas.attention.decode. config: AttentionDecodeSm90.

    16-bit arrays; head_dims are multiples of 64, and the length of a contiguous cache is a multiple of 8.
    """
    batch, q_length, heads, _ = query.shape
    kv_heads, group = key.shape[2], heads // key.shape[2]
    capacity = key.shape[1] * (1 if block_tables is None else block_tables.shape[1])
    tiles = pl.cdiv(group * q_length, TILE)
    rows = tiles * TILE
    blocks = decode.most_blocks(capacity, q_length, left, config.block_kv)
    splits = decode.split_count(batch * kv_heads * tiles, blocks, core_count)
    arrays = {
        "query": decode.pack(query, kv_heads, rows),
        "key": key,
        "value": value,
        "lengths": kv_lengths,
        "tables": block_tables,
        "sinks": decode.row_sinks(sinks, kv_heads, q_length, rows),
    }
    leaves, tree = jax.tree.flatten(arrays)
    statics = {"q_length": q_length, "group": group, "capacity": capacity, "splits": splits, "left": left}
    out, lse = _kernel(
        arrays,
        tree,
        scale=scale,
        softcap=softcap,
        config=config,
        core_count=core_count,
        interpret=interpret,
        **statics,
    )(*leaves)
    if out.shape[2] == 1:
        return decode.unpack(out[:, :, 0], lse[:, :, 0], q_length, heads)
    return merge(out, lse, query, interpret=interpret)


def _kernel(
    arrays, tree, *, q_length, group, capacity, splits, left, scale, softcap, config, core_count, interpret
):  # fmt: skip
    batch, kv_heads, rows, head_dim = arrays["query"].shape
    v_head_dim, dtype = arrays["value"].shape[3], arrays["query"].dtype
    is_paged, has_sinks = arrays["tables"] is not None, arrays["sinks"] is not None
    page_size = arrays["key"].shape[1]
    compute_wgs, block_kv, stages = config.compute_warpgroups, config.block_kv, config.stages
    tiles, parts = rows // TILE, splits * compute_wgs
    items = batch * splits * kv_heads * tiles
    ctas = min(core_count, items)
    pages_per_block = max(1, block_kv // page_size) if is_paged else 1
    # Rows that are stored: whole swizzle atoms; the others are no queries.
    stored = TILE if tiles > 1 else -(-group * q_length // 8) * 8
    out_dtype = dtype if parts == 1 else jnp.dtype(jnp.float32)

    def body(refs, scratch):
        given, out_gmem, lse_gmem = refs
        q_smem, k_smem, v_smem, out_smem, lse_smem, q_ready, k_ready, v_ready, k_free, v_free = scratch
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")

        def item(index):
            """(batch entry, split, tile, head of key, length, first block, number of blocks) of an item."""
            head, rest = lax.rem(index, kv_heads), lax.div(index, kv_heads)
            tile, rest = lax.rem(rest, tiles), lax.div(rest, tiles)
            split, b = lax.rem(rest, splits), lax.div(rest, splits)
            length = jnp.clip(given["lengths"][b], 0, capacity)
            end = lax.div(length + (block_kv - 1), block_kv)
            first = lax.div(jnp.maximum(length - q_length - left, 0), block_kv) if left >= 0 else 0
            per_split = lax.div(end - first + (splits - 1), splits)
            begin = jnp.minimum(first + split * per_split, end)
            return b, split, tile, head, length, begin, jnp.minimum(per_split, end - begin)

        def for_each_item(run, state):
            """run(index, state) -> state for this CTA's items."""
            body = lambda carry: (carry[0] + ctas, run(*carry))
            lax.while_loop(lambda carry: carry[0] < items, body, (lax.optimization_barrier(cta), state))

        def following(slot):
            return jnp.where(slot == stages - 1, 0, slot + 1)

        def memory():
            if compute_wgs == 2:
                plgpu.set_max_registers(REGISTERS[1], action="decrease")

            def load_item(index, slots):
                b, _, _, head, length, begin, count = item(index)

                def places(start):
                    """(page or batch entry, its rows, the rows of the block they go to) for every copy of a block."""
                    if not is_paged:
                        return [(b, pl.ds(start, block_kv), pl.ds(0, block_kv))]
                    if page_size >= block_kv:
                        page = given["tables"][b, lax.div(start, page_size)]
                        return [(page, pl.ds(lax.rem(start, page_size), block_kv), pl.ds(0, block_kv))]
                    first, last = lax.div(start, page_size), lax.div(length - 1, page_size)
                    # Past the length a table may hold anything: the last page is loaded once more.
                    pages = [given["tables"][b, jnp.minimum(first + i, last)] for i in range(pages_per_block)]
                    whole = pl.ds(0, page_size)
                    return [(page, whole, pl.ds(i * page_size, page_size)) for i, page in enumerate(pages)]

                def load(step, slots):
                    new_slots = []
                    for w, slot in enumerate(slots):
                        number = step * compute_wgs + w

                        @pl.when(number < count)
                        def _(w=w, slot=slot, number=number):
                            copies = places((begin + number) * block_kv)
                            for name, smem, ready, free in (
                                ("key", k_smem, k_ready, k_free),
                                ("value", v_smem, v_ready, v_free),
                            ):
                                at = w * stages + slot
                                plgpu.barrier_wait(free.at[at])
                                for page, rows, to in copies:
                                    plgpu.copy_gmem_to_smem(
                                        given[name].at[page, rows, head], smem.at[at, to], ready.at[at]
                                    )

                        new_slots.append(jnp.where(number < count, following(slot), slot))
                    return tuple(new_slots)

                return lax.fori_loop(0, lax.div(count + (compute_wgs - 1), compute_wgs), load, slots)

            for_each_item(load_item, (jnp.int32(0),) * compute_wgs)

        def compute(w):
            if compute_wgs == 2:
                plgpu.set_max_registers(REGISTERS[0], action="increase")
            for slot in range(stages):
                plgpu.barrier_arrive(k_free.at[w * stages + slot])
                plgpu.barrier_arrive(v_free.at[w * stages + slot])

            def run_item(index, slot):
                b, split, tile, head, length, begin, count = item(index)
                tile_rows = pl.ds(tile * TILE, TILE)
                plgpu.copy_gmem_to_smem(given["query"].at[b, head, tile_rows], q_smem.at[w], q_ready.at[w])
                # Keys below its limit are those that a row may attend to. Rows that are no query do as the last one.
                row = tile * TILE + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW)
                limits = length - q_length + 1 + jnp.minimum(lax.div(row, jnp.int32(group)), q_length - 1)
                # Keys from here on need the predicate, as do those before the window of the last query.
                full_end, full_start = length - q_length + 1, length - 1 - left
                plgpu.barrier_wait(q_ready.at[w])

                def masked(s, start):
                    columns = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA)
                    wide = lambda x: lax.broadcast_in_dim(x, s.shape, [0])
                    keep = columns < wide(limits - start)
                    if left >= 0:
                        keep = keep & (columns >= wide(limits - start - (left + 1)))
                    return jnp.where(keep, s, -jnp.inf)

                def clear_values(v_ref, left_over):
                    """Zeros in the rows from left_over on: what a cache holds there may be no number."""
                    for first in range(0, block_kv, TILE):
                        for column in range(0, v_head_dim, 64):
                            ref = v_ref.at[pl.ds(first, TILE), pl.ds(column, 64)]
                            v = plgpu.load(ref, layout=WGMMA)
                            keep = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=WGMMA) < left_over - first
                            ref[...] = jnp.where(keep, v, jnp.zeros_like(v))
                    plgpu.commit_smem()

                def products(acc_ref, s_ref):
                    def step(i, carry):
                        highest, total, slot = carry
                        at = w * stages + slot
                        start = (begin + i * compute_wgs + w) * block_kv
                        plgpu.barrier_wait(k_ready.at[at])
                        s_ref[...] = plgpu.layout_cast(jnp.zeros((TILE, block_kv), jnp.float32), WGMMA)
                        plgpu.wgmma(s_ref, q_smem.at[w], k_smem.at[at].transpose((1, 0)))
                        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0)
                        plgpu.barrier_arrive(k_free.at[at])
                        s = softcapped(s, softcap, scale) if softcap else s
                        is_partial = start + block_kv > full_end
                        if left >= 0:
                            is_partial = is_partial | (start < full_start)
                        s = lax.cond(is_partial, lambda s: masked(s, start), lambda s: s, s)
                        p, highest, total, alpha = softmax.step(s, highest, total, softcap or scale)
                        plgpu.barrier_wait(v_ready.at[at])

                        @pl.when(start + block_kv > length)
                        def _():
                            clear_values(v_smem.at[at], length - start)

                        acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                        acc_ref[...] = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                        plgpu.wgmma(acc_ref, p.astype(dtype), v_smem.at[at])
                        plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                        plgpu.barrier_arrive(v_free.at[at])
                        return highest, total, following(slot)

                    steps = lax.div(count + (compute_wgs - 1 - w), compute_wgs)
                    highest, total, last = lax.fori_loop(0, steps, step, (*softmax.start(TILE), slot))
                    return plgpu.wgmma_accumulator_load(acc_ref, wait_n=0), highest, total, last

                accumulators = plgpu.ACC((TILE, v_head_dim), jnp.float32), plgpu.ACC((TILE, block_kv), jnp.float32)
                acc, highest, total, slot = pl.run_scoped(products, *accumulators)
                part = split * compute_wgs + w
                factor = 1.0
                if has_sinks:  # in one part alone
                    sink = plgpu.load(given["sinks"].at[b, head, tile_rows], layout=ROW, optimized=False)
                    highest, total, factor = softmax.with_sink(highest, total, jnp.where(part == 0, sink, -jnp.inf))
                inverse, lse = softmax.finish(highest, total, may_be_dead=True)
                acc = acc * lax.broadcast_in_dim(inverse * factor, acc.shape, [0])
                acc = acc.astype(out_dtype)
                to = out_gmem.at[b, head, part, pl.ds(tile * TILE, stored)]
                for column in range(0, v_head_dim, OUT_COLUMNS):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last stores have left shared memory
                    out_smem[w] = acc[:, column : column + OUT_COLUMNS]
                    if column == 0:
                        lse_smem[w] = lse
                    plgpu.commit_smem()
                    columns = pl.ds(column, OUT_COLUMNS)
                    plgpu.copy_smem_to_gmem(out_smem.at[w, pl.ds(0, stored)], to.at[:, columns])
                plgpu.copy_smem_to_gmem(lse_smem.at[w], lse_gmem.at[b, head, part, tile_rows])
                return slot

            for_each_item(run_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        branches = [lambda w=w: compute(w) for w in range(compute_wgs)]
        lax.switch(wg, [*branches, memory])

    def entry(*refs):
        *leaves, out_gmem, lse_gmem = refs
        refs = jax.tree.unflatten(tree, leaves), out_gmem, lse_gmem
        tile_smem = lambda *shape: plgpu.SMEM(shape, dtype, transforms=SWIZZLED)
        slots = compute_wgs * stages
        pl.run_scoped(
            lambda *scratch: body(refs, scratch),
            tile_smem(compute_wgs, TILE, head_dim),
            tile_smem(slots, block_kv, head_dim),
            tile_smem(slots, block_kv, v_head_dim),
            plgpu.SMEM(
                (compute_wgs, TILE, OUT_COLUMNS),
                out_dtype,
                transforms=SWIZZLED if out_dtype.itemsize == 2 else SWIZZLED_F32,
            ),
            plgpu.SMEM((compute_wgs, TILE), jnp.float32),
            plgpu.Barrier(num_barriers=compute_wgs),
            plgpu.Barrier(num_arrivals=pages_per_block, num_barriers=slots),
            plgpu.Barrier(num_arrivals=pages_per_block, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            collective_axes="wg",
        )

    out_rows = rows if tiles > 1 else stored
    return launch(
        entry,
        "attention_decode_sm90",
        out_type=(
            jax.ShapeDtypeStruct((batch, kv_heads, parts, out_rows, v_head_dim), out_dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, parts, rows), jnp.float32),
        ),
        ctas=ctas,
        warpgroups=compute_wgs + 1,
        semantics=plgpu.LoweringSemantics.Lane,
        interpret=interpret,
    )
