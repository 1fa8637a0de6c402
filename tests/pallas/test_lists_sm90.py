"""The lists that the Hopper kernels walk, walked in NumPy: they keep what the call's mask and limits keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.attention_inputs import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import lists_sm90
from jax_kernels.reference import attention as reference

B, T, S, H, KV_HEADS = 2, 150, 170, 4, 2
BLOCKS = (32, 64)

random = np.random.default_rng(0)
CELLS = random.random((B, H, 5, 3)) < 0.4
CELLS[0, :2, 1] = CELLS[0, :2, :, 2] = False
OPTIONS = AttentionOptions(scale=1.0)
LIMITED = AttentionOptions(scale=1.0, is_causal=True, window=(90, 0), q_offset=None)
# What stands beside the mask in LIMITED's call.
ARRAYS = {
    "q_segment_ids": jnp.asarray(random.integers(-1, 2, (B, T)), jnp.int32),
    "kv_segment_ids": jnp.asarray(random.integers(-1, 2, (B, S)), jnp.int32),
    "kv_lengths": jnp.array([S, 40]),
    "q_offset": jnp.array([30, -20]),
}
CASES = {
    "of_heads": (masks.block_sparse(jnp.asarray(CELLS), (32, 64)), OPTIONS, {}),
    "of_heads_causal": (masks.block_sparse(jnp.asarray(CELLS), (32, 64)) & masks.causal(), OPTIONS, {}),
    "shared": (masks.sliding_window(20, 9) | masks.global_tokens(3), OPTIONS, {}),
    "limited": (masks.prefix(100) | masks.dilated(7), LIMITED, ARRAYS),
    "nothing": (~masks.sliding_window(None, None), OPTIONS, {}),
}


def inputs_of(mask, arrays):
    query, key = (jnp.zeros((B, length, heads, 8), jnp.bfloat16) for length, heads in ((T, H), (S, KV_HEADS)))
    return AttentionInputs(query, key, key, mask=mask, **arrays)


def walked(lists, by):
    """What the lists keep: bool [B, H, T, S]; each tile once, and each of its blocks."""
    (block_q, block_kv), group = BLOCKS, H // KV_HEADS
    q_blocks = -(-T // block_q)
    kept = np.zeros((B, H, q_blocks * block_q, -(-S // block_kv) * block_kv), bool)
    visits = np.zeros((B, H, q_blocks, kept.shape[3] // block_kv), int)
    for b, head, block, count, full, *_ in lists.tiles.tolist():
        for step in range(count):
            nth = step // lists.sharing
            index, entry = (
                x[min(b, x.shape[0] - 1), min(head, x.shape[1] - 1), block, nth] for x in (lists.indices, lists.entries)
            )
            if by == "query":
                place = b, head, block, index
            else:
                of_group = step % group if lists.sharing > 1 else index // q_blocks
                place = b, head * group + of_group, index % q_blocks, block
            visits[place] += 1
            bits = np.ones(BLOCKS, bool)
            if step >= full:
                others = block_kv if by == "query" else block_q
                bits = lists.words[entry][:, None] >> np.arange(others // 8)[:, None] & 1 == 1
                bits = bits.reshape(len(bits), others)
                bits = bits if by == "query" else bits.T
            b_, h, q, k = place
            kept[b_, h, q * block_q : (q + 1) * block_q, k * block_kv : (k + 1) * block_kv] |= bits
    assert visits.max() <= 1, "a block is visited twice"
    assert not kept[..., S:].any(), "a key past the end is kept"
    return kept[:, :, :T, :S]


@pytest.mark.parametrize("by", ["query", "key"])
@pytest.mark.parametrize("name", CASES)
def test_lists_keep_what_the_call_keeps(name, by):
    mask, options, arrays = CASES[name]
    inputs = inputs_of(mask, arrays)
    build = lambda inputs: lists_sm90.lists_of(inputs, options, *BLOCKS, by=by, heads_together=4)
    # Most of the time is XLA's, for compiling: unoptimised code is compiled in half of it.
    lists = jax.jit(build, compiler_options={"xla_backend_optimization_level": 0})(inputs)
    lists = jax.tree.map(np.asarray, lists)
    want = reference.live(inputs, options)
    np.testing.assert_array_equal(walked(lists, by), np.broadcast_to(want, (B, H, T, S)))
    heads, blocks = (H, 5) if by == "query" else (KV_HEADS, 3)
    assert sorted(lists.tiles[:, :3].tolist()) == [
        [b, h, i] for b in range(B) for h in range(heads) for i in range(blocks)
    ]
    assert (lists.tiles[:, 3] >= 1).all(), "a kernel visits a block of every tile"
    for round_ in lists.tiles.reshape(-1, 4 * blocks, lists_sm90.COLUMNS):
        assert (np.diff(round_[:, 3]) <= 0).all(), "the longest lists come first"
    inputs, options = lists_sm90.without_limits(inputs, options)
    assert len(jax.tree.leaves(inputs)) == 3
    assert (options.is_causal, options.window, options.q_offset) == (False, None, 0)


def test_long_sequences_take_no_array_of_all_pairs():
    """131,072 tokens, of which all pairs are 16 Gi: bits for the partial blocks alone, 128 x 128 each."""
    length = 1 << 17
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16) for heads in (32, 8))
    mask = masks.sliding_window(512, 512) | masks.global_tokens(128)
    for by, blocks in (("query", (128, 128)), ("key", (64, 128))):
        build = lambda query, key, by=by, blocks=blocks: lists_sm90.lists_of(
            AttentionInputs(query, key, key, mask=mask), OPTIONS, *blocks, by=by, heads_together=8
        )
        memory = jax.jit(build).lower(query, key).compile().memory_analysis()
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 100 << 20
