"""The block lists of the Hopper kernels, followed in NumPy: they keep the pairs of the call's mask and limits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.masks.limits import without_limits
from jax_kernels.pallas.attention.sm90.features import block_lists
from jax_kernels.reference import attention as reference

B, T, S, H, KV_HEADS = 2, 150, 170, 4, 2
BLOCKS = (32, 64)
SIZES = {"block_q": BLOCKS[0], "block_kv": BLOCKS[1], "head_group": 4}

random = np.random.default_rng(0)
CELLS = random.random((B, H, 5, 3)) < 0.4
CELLS[0, :2, 1] = CELLS[0, :2, :, 2] = False
OPTIONS = AttentionOptions(scale=1.0)
LIMITED = AttentionOptions(scale=1.0, is_causal=True, window=(90, 0), q_offset=None)
# The arrays in LIMITED's call, in addition to the mask.
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
    # Lists by key with full blocks, which query heads share.
    "shared_full": (masks.causal() | masks.prefix(100), OPTIONS, {}),
    "limited": (masks.prefix(100) | masks.dilated(7), LIMITED, ARRAYS),
    "nothing": (~masks.sliding_window(None, None), OPTIONS, {}),
}


def inputs_of(mask, arrays):
    query, key = (jnp.zeros((B, length, heads, 8), jnp.bfloat16) for length, heads in ((T, H), (S, KV_HEADS)))
    return AttentionInputs(query, key, key, mask=mask, **arrays)


def walked(lists, by):
    """The pairs that the lists keep: bool [B, H, T, S]. Asserts that each tile and each of its blocks occur once."""
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
def test_lists_cover_the_kept_pairs(name, by):
    mask, options, arrays = CASES[name]
    inputs = inputs_of(mask, arrays)
    build = lambda inputs: block_lists.lists_of(inputs, options, **SIZES, by=by)
    # Compiling dominates the time. Unoptimised code compiles in half of it.
    lists = jax.jit(build, compiler_options={"xla_backend_optimization_level": 0})(inputs)
    lists = jax.tree.map(np.asarray, lists)
    want = reference.live(inputs, options)
    np.testing.assert_array_equal(walked(lists, by), np.broadcast_to(want, (B, H, T, S)))
    heads, blocks = (H, 5) if by == "query" else (KV_HEADS, 3)
    assert sorted(lists.tiles[:, :3].tolist()) == [
        [b, h, i] for b in range(B) for h in range(heads) for i in range(blocks)
    ]
    assert (lists.tiles[:, 3] >= 1).all(), "a kernel visits a block of every tile"
    for round_ in lists.tiles.reshape(-1, 4 * blocks, block_lists.COLUMNS):
        assert (np.diff(round_[:, 3]) <= 0).all(), "the longest lists come first"
    inputs, options = without_limits(inputs, options)
    assert len(jax.tree.leaves(inputs)) == 3
    assert (options.is_causal, options.window, options.q_offset) == (False, None, 0)


def test_long_sequences_store_no_pair_array():
    """131,072 tokens have 16 Gi pairs. Only the partial blocks, of 128 x 128, have bits."""
    length = 1 << 17
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16) for heads in (32, 8))
    mask = masks.sliding_window(512, 512) | masks.global_tokens(128)
    for by, block_q in (("query", 128), ("key", 64)):
        sides = {"block_q": block_q, "block_kv": 128, "by": by, "head_group": 8}
        build = lambda query, key, sides=sides: block_lists.lists_of(
            AttentionInputs(query, key, key, mask=mask), OPTIONS, **sides
        )
        memory = jax.jit(build).lower(query, key).compile().memory_analysis()
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 100 << 20


def test_long_documents_store_no_bits():
    """Segments could make each block partial, which would take 2 GiB of bits: the kernels evaluate such masks."""
    query = jax.ShapeDtypeStruct((1, 1 << 17, 16, 128), jnp.bfloat16)
    mask = masks.causal() & masks.segments(np.zeros((1, 1 << 17), np.int32)) | masks.prefix(16)
    inputs = AttentionInputs(query, query, query, mask=mask)
    for by, block_q in (("query", 128), ("key", 64)):
        sides = {"block_q": block_q, "block_kv": 128, "by": by, "head_group": 8}
        lists = jax.eval_shape(lambda sides=sides: block_lists.lists_of(inputs, OPTIONS, **sides))
        assert lists.predicate is not None
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(lists)) < 32 << 20


@pytest.mark.parametrize("by", ["query", "key"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_masks_of_keys_skip_blocks(is_causal, by):
    """Lists hold the live blocks of each batch entry, without bits. A tile without live blocks visits one block."""
    length, count, live = 4096, 32, (32, 8)
    query, key = (jnp.zeros((2, length, heads, 64), jnp.bfloat16) for heads in (4, 2))
    keys = jnp.arange(length)[None, None, None] < jnp.array([length, 1000])[:, None, None, None]
    options = dataclasses.replace(OPTIONS, is_causal=is_causal)
    inputs = AttentionInputs(query, key, key, mask=keys)
    lists = block_lists.lists_of(inputs, options, block_q=128, block_kv=128, by=by, head_group=1)
    assert lists.predicate is not None
    assert lists.words is lists.entries is None
    found = {tuple(tile[:3]): tile[3] for tile in np.asarray(lists.tiles).tolist()}
    for b in range(2):
        for block in range(count):
            if by == "query":
                want = min(block + 1, live[b]) if is_causal else live[b]
            else:
                want = 2 * ((count - block if is_causal else count) if block < live[b] else 1)
            assert found[b, 0, block] == want


def test_other_masks_of_keys_are_biases():
    """Short calls, calls with a bias, and masks that differ between heads make no lists."""
    query = jax.ShapeDtypeStruct((2, 4096, 4, 64), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((2, 1, 1, 4096), bool)
    has = lambda **changed: block_lists.has_lists(
        AttentionInputs(query, query, query, mask=keys)._replace(**changed), OPTIONS
    )
    assert has()
    assert not has(query=jax.ShapeDtypeStruct((2, 2048, 4, 64), jnp.bfloat16))
    assert not has(bias=jax.ShapeDtypeStruct((1, 1, 1, 4096), jnp.float32))
    assert not has(mask=jax.ShapeDtypeStruct((2, 4, 1, 4096), bool))


PREPARED = {name: CASES[name][:2] for name in ("of_heads_causal", "shared", "nothing")}
PREPARED["limited"] = masks.prefix(100) | masks.dilated(7), dataclasses.replace(LIMITED, q_offset=30)


@functools.partial(jax.jit, static_argnames=("options", "by"), compiler_options={"xla_backend_optimization_level": 0})
def listed(inputs, *, options, by):
    return block_lists.lists_of(inputs, options, **SIZES, by=by)


def prepared_of(mask, options, by, **shapes):
    sides = SIZES | {"by": by}
    return block_lists.prepared_lists(inputs_of(mask, {}), options, **sides | shapes)


def in_order(lists):
    """All that a kernel reads: for each tile its row of the table, its blocks, and the bits of partial blocks."""
    lists = jax.tree.map(np.asarray, lists)
    found = []
    for row in lists.tiles.tolist():
        b, head, block, count, full = row[:5]
        blocks, entries = (
            x[min(b, x.shape[0] - 1), min(head, x.shape[1] - 1), block, : count // lists.sharing]
            for x in (lists.indices, lists.entries)
        )
        partial = entries[full // lists.sharing :]
        assert (partial >= 0).all()
        found.append((row, blocks.tolist(), lists.words[partial].tobytes()))
    return found


@pytest.mark.parametrize("by", ["query", "key"])
@pytest.mark.parametrize("name", PREPARED)
def test_prepared_lists_match_the_call(name, by):
    mask, options = PREPARED[name]
    prepared = prepared_of(mask, options, by)
    want = listed(inputs_of(mask, {}), options=options, by=by)
    got = block_lists.lists_of(inputs_of(mask, {"lists": (prepared,)}), options, **SIZES, by=by)
    assert got is prepared.lists
    assert in_order(got) == in_order(want)
    np.testing.assert_array_equal(got.tiles, want.tiles)
    width, count = got.indices.shape[-1], len(got.words)
    np.testing.assert_array_equal(got.indices, want.indices[..., :width])
    # The last entry has no bits.
    entries = np.where(want.entries == len(want.words) - 1, count - 1, want.entries)[..., :width]
    np.testing.assert_array_equal(got.entries, entries)
    np.testing.assert_array_equal(got.words, np.asarray(want.words)[[*range(count - 1), -1]])
    longest = int(got.tiles[:, 3].max()) // got.sharing
    assert longest <= width <= longest * 9 / 8
    assert not np.asarray(got.words)[-1].any()
    if by == "query":
        mean = float(got.tiles[:, 3].mean()) * BLOCKS[1]
        assert mean <= got.keys <= (mean + 1) * 9 / 8
        assert want.keys == want.indices.shape[-1] * BLOCKS[1] // block_lists.UNKNOWN


def test_known_masks_have_short_lists():
    """3 of each 8 cells are live. Under jit the lists have room for all 8, and bits for the whole diagonal."""
    cells = np.random.default_rng(1).random((16, 8)).argsort(axis=1) < 3
    mask = masks.block_sparse(cells, BLOCKS) & masks.causal()
    query = jax.ShapeDtypeStruct((1, 512, 1, 64), jnp.bfloat16)
    blocks = {"block_q": 32, "block_kv": 64, "by": "query", "head_group": 1}
    prepare = lambda mask: block_lists.prepared_lists(AttentionInputs(*[query] * 3, mask=mask), OPTIONS, **blocks)
    known, traced = prepare(mask).lists, jax.eval_shape(prepare, mask).lists
    partial = (np.asarray(known.entries) >= 0) & (np.asarray(known.entries) < len(known.words) - 1)
    assert known.indices.shape[-1] <= 3 < traced.indices.shape[-1] == 8
    assert len(known.words) == partial.sum() + 1 < len(traced.words)
    assert known.keys < 3 * 64
    assert traced.keys == 8 * 64 // block_lists.UNKNOWN


OTHERS = {
    "key": lambda mask: (inputs_of(mask, {}), OPTIONS, {"by": "key"}),
    "blocks": lambda mask: (inputs_of(mask, {}), OPTIONS, {"blocks": (64, 32)}),
    "together": lambda mask: (inputs_of(mask, {}), OPTIONS, {"together": 2}),
    "causal": lambda mask: (inputs_of(mask, {}), dataclasses.replace(OPTIONS, is_causal=True), {}),
    "window": lambda mask: (inputs_of(mask, {}), dataclasses.replace(OPTIONS, window=(30, -1)), {}),
    "offset": lambda mask: (inputs_of(mask, {}), dataclasses.replace(OPTIONS, q_offset=9), {}),
    "traced_offset": lambda mask: (
        inputs_of(mask, {"q_offset": jnp.array([0, 9])}),
        dataclasses.replace(OPTIONS, q_offset=None),
        {},
    ),
    "q_length": lambda mask: (inputs_of(mask, {})._replace(query=jnp.zeros((B, 100, H, 8))), OPTIONS, {}),
    "kv_length": lambda mask: (inputs_of(mask, {})._replace(key=jnp.zeros((B, 200, KV_HEADS, 8))), OPTIONS, {}),
    "kv_heads": lambda mask: (inputs_of(mask, {})._replace(key=jnp.zeros((B, S, 1, 8))), OPTIONS, {"by": "key"}),
    "heads": lambda mask: (inputs_of(mask, {})._replace(query=jnp.zeros((B, T, 8, 8))), OPTIONS, {}),
    "batch": lambda mask: (
        inputs_of(mask, {})._replace(query=jnp.zeros((3, T, H, 8)), key=jnp.zeros((3, S, KV_HEADS, 8))),
        OPTIONS,
        {},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_rebuild_the_lists(name, monkeypatch):
    """The lists are built again, from the same inputs as without prepared lists."""
    mask = masks.sliding_window(20, 9) | masks.global_tokens(3)
    inputs, options, how = OTHERS[name](mask)
    (block_q, block_kv), by, together = how.get("blocks", BLOCKS), how.get("by", "query"), how.get("together", 4)
    sides = ("query", "key") if name != "key" else ("query",)
    prepared = tuple(prepared_of(mask, OPTIONS, side) for side in sides)
    built = []
    monkeypatch.setattr(block_lists, "_built", lambda *arrays, **statics: built.append((arrays, statics)))
    for lists in (prepared, None):
        sides = {"block_q": block_q, "block_kv": block_kv, "by": by, "head_group": together}
        block_lists.lists_of(inputs._replace(lists=lists), options, **sides)
    (got, statics), want = built
    assert statics == want[1]
    assert jax.tree.structure(got) == jax.tree.structure(want[0])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want[0]), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("by", ["query", "key"])
def test_larger_batch_reads_lists_per_entry(by):
    mask = masks.sliding_window(20, 9) | masks.global_tokens(3)
    one = inputs_of(mask, {})
    query, key = one.query[:1], one.key[:1]
    sides = SIZES | {"by": by}
    made = block_lists.prepared_lists(AttentionInputs(query, key, key, mask=mask), OPTIONS, **sides)
    inputs = inputs_of(mask, {"lists": (made,)})
    got = jax.tree.map(np.asarray, block_lists.lists_of(inputs, OPTIONS, **sides))
    np.testing.assert_array_equal(walked(got, by), np.broadcast_to(mask.to_dense(T, S), (B, H, T, S)))
    of_entry = [row for row in in_order(got) if row[0][0] == 1]
    assert [(row[1:], *rest) for row, *rest in of_entry] == [(row[1:], *rest) for row, *rest in in_order(made.lists)]
    # If the mask differs between batch entries, only the prepared entries exist.
    mask = masks.block_sparse(jnp.asarray(CELLS), BLOCKS)
    made = prepared_of(mask, OPTIONS, by)
    assert made.of(made.call) is made.lists
    assert made.of(dataclasses.replace(made.call, batch=2 * B)) is None
