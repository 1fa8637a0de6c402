"""The algebra of masks: elements, JAX's transformations, the text forms of masks, and bad input."""

import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jax_kernels import masks
from tests.support.cases.masks import CASES, B, H, S, T
from tests.support.processes import forked

IDS = np.array([[0, 0, 1, 1, -1]], np.int32)


@pytest.mark.parametrize("name", CASES)
def test_elements(name):
    """Compares random elements with the dense form."""
    random = np.random.default_rng(1)
    b, h, q, k = (random.integers(0, size, 300, np.int32) for size in (B, H, T, S))
    offset = np.array([3, -8], np.int32)
    got = CASES[name].mask.elements(b, h, q, k, q_offset=offset[b])
    assert got.dtype == bool
    want = CASES[name].dense(offset)[b, h, q, k]
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


@pytest.mark.parametrize("name", ["everything_packed", "dense", "block_sparse_odd", "function"])
def test_rows(name):
    """Rows of some queries, in any order."""
    rows = np.array([7, 0, 49, 7, 13], np.int32)
    got = CASES[name].mask.rows(rows, S, q_offset=jnp.array([4, -4], jnp.int32))
    np.testing.assert_array_equal(np.broadcast_to(got, (B, H, 5, S)), CASES[name].dense((4, -4))[:, :, rows])


def test_elements_in_a_kernel():
    """Arithmetic masks capture nothing. A kernel reads other masks through their leaves."""
    mask = masks.causal() & masks.sliding_window(6, None) & masks.segments(np.arange(16, dtype=np.int32)[None] // 5)
    leaves, structure = jax.tree.flatten(mask)

    def kernel(*refs):
        inside = jax.tree.unflatten(structure, [ref[...] for ref in refs[:-1]])
        q, k = (jax.lax.broadcasted_iota(jnp.int32, (16, 16), axis) for axis in (0, 1))
        refs[-1][...] = inside.elements(0, 0, q, k, q_offset=2)

    out = pl.pallas_call(kernel, jax.ShapeDtypeStruct((16, 16), jnp.bool_), interpret=True)(*leaves)
    np.testing.assert_array_equal(out, mask.to_dense(16, 16, q_offset=2)[0, 0])


def test_masks_are_pytrees():
    traces = []

    @jax.jit
    def counts(mask):
        traces.append(mask)
        return mask.block_lists(5, 5, 2, 2).partial_count

    def mask(n, ids=IDS):
        return masks.causal() & masks.segments(ids) | masks.prefix(jnp.int32(n)) & ~masks.dilated(2)

    # Equal structure has one trace, for any arrays. Another static number makes another structure.
    for ids in (IDS, IDS + 1):
        for n in (1, 4):
            np.testing.assert_array_equal(counts(mask(n, ids)), mask(n, ids).block_lists(5, 5, 2, 2).partial_count)
    assert len(traces) == 1
    counts(mask(1) & masks.dilated(3))
    assert len(traces) == 2
    assert jax.tree.map(lambda x: x, mask(1)).to_dense(5, 5).tolist() == mask(1).to_dense(5, 5).tolist()


def test_vmap_and_scan():
    """A stack of masks, made by vmap, goes through vmap and scan."""
    ids = jnp.stack([jnp.asarray(IDS), jnp.asarray(IDS + 1), jnp.asarray(IDS[:, ::-1])])
    limits = jnp.arange(3)
    make = lambda ids, n: masks.segments(ids) & masks.causal() | masks.prefix(n) & masks.dense(ids.T < 2)
    each = [make(x, n).block_lists(5, 5, 2, 2) for x, n in zip(ids, limits, strict=True)]
    want = jax.tree.map(lambda *x: np.stack(x), *each)
    stack = jax.vmap(make)(ids, limits)
    lists = lambda mask: mask.block_lists(5, 5, 2, 2)
    for got in (jax.vmap(lists)(stack), jax.lax.scan(lambda _, mask: (None, lists(mask)), None, stack)[1]):
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.timeout(180)
def test_shard_map():
    """Each device builds the lists of its own batch entries."""
    code = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import PartitionSpec as P
        from jax_kernels import masks

        mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
        random = np.random.default_rng(0)
        ids = np.sort(random.integers(0, 4, (4, 50))).astype(np.int32)
        array = random.random((4, 1, 50, 50)) < 0.9
        for mask in (masks.segments(ids) & masks.causal() & masks.dilated(3), masks.dense(array) | masks.causal()):
            lists = lambda mask: mask.block_lists(50, 50, 8, 16, q_offset=2)
            specs = jax.tree.map(lambda _: P("data"), mask)
            assert jax.tree.structure(specs) == jax.tree.structure(mask)
            got = jax.jit(jax.shard_map(lists, mesh=mesh, in_specs=(specs,), out_specs=P("data")))(mask)
            assert got.indices.sharding.spec == P("data")
            jax.tree.map(np.testing.assert_array_equal, got, lists(mask))
    """
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {forked.QUICK_COMPILES}",
    }
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def test_equality():
    dense = masks.dense(np.ones((4, 4), bool))
    assert masks.causal() & dense == masks.causal() & dense
    assert hash(masks.causal() & dense) == hash(masks.causal() & dense)
    assert masks.causal() == masks.sliding_window(None, 0)
    for other in (masks.sliding_window(3, 0), ~masks.causal(), dense, 1):
        assert masks.causal() != other
    assert dense != masks.dense(np.ones((4, 4), bool))
    assert len({masks.causal(), masks.causal(), masks.dilated(2)}) == 2
    assert ~~dense is dense


def test_text():
    window, sparse = masks.sliding_window(3, None), masks.block_sparse(np.ones((2, 4), bool), (64, 32))
    function, dense = masks.from_function(same_place, jnp.ones(3)), masks.dense(np.ones((2, 2), bool))
    got = [
        repr(masks.causal() & window | masks.prefix(3)),
        repr((masks.causal() | window) & ~(masks.global_tokens(jnp.arange(2)) | sparse) & ~masks.dilated(2)),
        repr(masks.segments(IDS) | function | dense),
    ]
    assert got == [
        "causal() & sliding_window(3, None) | prefix(3)",
        "(causal() | sliding_window(3, None)) & ~(global_tokens(int32[2]) | block_sparse(bool[1, 1, 2, 4], (64, 32)))"
        " & ~dilated(2)",
        "segments(int32[1, 5], int32[1, 5]) | from_function(same_place, float32[3]) | dense(bool[1, 1, 2, 2])",
    ]
    assert "segments(0, 0)" in repr(jax.tree.map(lambda x: 0, masks.segments(IDS)))


def same_place(b, h, q, k, table):
    return q == k


def test_float_mask_of_zeros_and_ones():
    array = np.tri(4, dtype=np.float32)
    np.testing.assert_array_equal(masks.dense(array).to_dense(4, 4)[0, 0], array.astype(bool))
    np.testing.assert_array_equal(jax.jit(lambda x: masks.dense(x).to_dense(4, 4))(array)[0, 0], array.astype(bool))
    np.testing.assert_array_equal(masks.block_sparse(array, 1).to_dense(4, 4)[0, 0], array.astype(bool))


def test_plot(tmp_path):
    import matplotlib.image

    mask = masks.causal() & masks.dense(np.ones((B, H, 64, 64), bool))
    mask.plot(tmp_path / "mask.png", 64, 64, (8, 16), b=1, h=2)
    image = matplotlib.image.imread(tmp_path / "mask.png")[..., :3]
    colors = [[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in ("#f4f4f2", "#f2a541", "#2b6cb0")]
    share = [np.isclose(image, color, atol=0.01).all(axis=-1).mean() for color in colors]
    # 8 x 4 blocks: 12 dead, 8 partial on the diagonal, 12 full.
    assert share[0] > 0.1
    np.testing.assert_allclose(np.array(share[1:]) / share[0], [8 / 12, 1], rtol=0.15)
    with pytest.raises(ValueError, match=r"h: got 3, want an int from 0 to 2"):
        mask.plot(tmp_path / "mask.png", 64, 64, 8, h=3)


causal, dense = masks.causal(), masks.dense(np.ones((B, 1, 4, 5), bool))
blocks = masks.block_sparse(np.ones((2, 3), bool), 2)


def _if(b, h, q, k):
    return q if q > k else k


class Foreign:
    """Another library's array."""

    shape = (4, 4)

    def __init__(self, dtype):
        self.dtype = dtype


BAD = {
    "left": (lambda: masks.sliding_window(1.5, 0), TypeError, "left: got 1.5, want an int from 0 to 2**29, or None"),
    "right": (lambda: masks.sliding_window(1, -2), ValueError, "right: got -2, want an int from 0 to 2**29, or None"),
    "rate": (lambda: masks.dilated(0), ValueError, "rate: got 0, want an int of at least 1"),
    "rate_type": (lambda: masks.dilated(2.0), TypeError, "rate: got 2.0, want an int of at least 1"),
    "prefix": (lambda: masks.prefix(-1), ValueError, "n: got -1, want an int of at least 0"),
    "prefix_array": (lambda: masks.prefix(jnp.ones(2)), TypeError, "n: got dtype float32, want an int, or an int32"),
    "global_shape": (lambda: masks.global_tokens(np.ones((2, 1), int)), ValueError, "n: got shape (2, 1), want an int"),
    "ids_dtype": (lambda: masks.segments(np.ones(4)), TypeError, "q_ids: got dtype float64, want an int32 array"),
    "ids_list": (lambda: masks.segments([0, 1]), TypeError, "q_ids: got list, want an int32 array"),
    "ids_shape": (lambda: masks.segments(IDS, IDS[None]), ValueError, "kv_ids: got shape (1, 1, 5), want an int32"),
    "ids_batch": (
        lambda: masks.segments(np.ones((2, 4), int), np.ones((3, 4), int)),
        ValueError,
        "q_ids, kv_ids: got 2 and 3 batch entries, want one number of them, or 1",
    ),
    "ids_huge": (lambda: masks.segments(np.array([2**40])), ValueError, "q_ids: got values up to 1099511627776"),
    "segments_length": (
        lambda: masks.segments(IDS).to_dense(5, 6),
        ValueError,
        "segments: got kv_ids of shape (1, 5), want [batch, 6] for this call",
    ),
    "dense_dtype": (lambda: masks.dense(np.ones((4, 4), np.int32)), TypeError, "array: got dtype int32, want bool"),
    "dense_values": (
        lambda: masks.dense(np.full((4, 4), 0.5, np.float32)),
        ValueError,
        "array: got float32 values other than 0 and 1, want a bool mask",
    ),
    "dense_rank": (lambda: masks.dense(np.ones(4, bool)), ValueError, "array: got shape (4,), want [batch, heads"),
    "dense_list": (lambda: masks.dense([[True]]), TypeError, "array: got list, want a bool array"),
    "dense_foreign": (lambda: masks.dense(Foreign("bool")), TypeError, "array: got Foreign, want a bool array, of JAX"),
    "prefix_foreign": (
        lambda: masks.prefix(Foreign("int32")),
        TypeError,
        "n: got Foreign, want an int, or an int32 array, a scalar or [batch], of JAX or NumPy",
    ),
    "dense_lengths": (
        lambda: dense.block_lists(4, 6, 2, 2),
        ValueError,
        "dense: got an array of shape (2, 1, 4, 5), want a shape broadcastable to [batch, heads, 4, 6]",
    ),
    "block_size": (lambda: masks.block_sparse(np.ones((2, 2), bool), 0), ValueError, "block_size: got 0, want an int"),
    "block_sizes": (
        lambda: masks.block_sparse(np.ones((2, 2), bool), (2, 2, 2)),
        ValueError,
        "block_size: got (2, 2, 2), want an int or a (query, key) pair",
    ),
    "blocks_shape": (
        lambda: blocks.density(4, 7, 2),
        ValueError,
        "block_sparse: got blocks of shape (1, 1, 2, 3) for 4 queries and 7 keys, want [batch, heads, 2, 4]",
    ),
    "stacked": (
        lambda: jax.vmap(masks.dense)(np.ones((3, 4, 5), bool)).to_dense(4, 5),
        ValueError,
        "dense: got an array of shape (3, 1, 1, 4, 5)",
    ),
    "batch": (lambda: dense & masks.prefix(np.arange(3)), ValueError, "&: got 2 and 3 batch, want one number of them"),
    "heads": (
        lambda: masks.dense(np.ones((2, 4, 5), bool)) | masks.block_sparse(np.ones((3, 1, 1), bool), 8),
        ValueError,
        "|: got 2 and 3 heads, want one number of them, or 1",
    ),
    "offset_batch": (
        lambda: dense.block_lists(4, 5, 2, 2, q_offset=jnp.zeros(3, jnp.int32)),
        ValueError,
        "q_offset: got 2 and 3 batch entries",
    ),
    "offset": (lambda: causal.to_dense(4, 5, q_offset=1.5), TypeError, "q_offset: got float, want an int, or an int32"),
    "offset_huge": (lambda: causal.to_dense(4, 5, q_offset=1 << 30), ValueError, "q_offset: got 1073741824, want a"),
    "q_length": (lambda: causal.to_dense(-1, 5), ValueError, "q_length: got -1, want an int of at least 0"),
    "kv_length": (lambda: causal.to_dense(4, True), TypeError, "kv_length: got True, want an int of at least 0"),
    "block_q": (lambda: causal.block_lists(4, 5, 0, 2), ValueError, "block_q: got 0, want an int of at least 1"),
    "block_kv": (lambda: causal.packed_partial(4, 5, 1, 2.0), TypeError, "block_kv: got 2.0, want an int of at least"),
    "density_block": (lambda: causal.density(4, 5, -1), ValueError, "block: got -1, want an int of at least 1"),
    "by": (lambda: causal.block_lists(4, 5, 2, 2, "rows"), ValueError, "by: got 'rows', want 'query' or 'key'"),
    "by_packed": (lambda: causal.packed_partial(4, 5, 2, 2, by=0), ValueError, "by: got 0, want 'query' or 'key'"),
    "and_array": (lambda: causal & np.ones((4, 4), bool), TypeError, "&: got ndarray and a Mask, want another"),
    "array_or": (lambda: np.ones((4, 4), bool) | causal, TypeError, "|: got ndarray and a Mask, want another Mask;"),
    "and_jax_array": (lambda: jnp.ones((4, 4), bool) & causal, TypeError, "masks.dense makes a Mask of a bool"),
    "or_none": (lambda: causal | None, TypeError, "|: got NoneType and a Mask, want another Mask"),
    "truth": (lambda: causal and dense, TypeError, "a Mask has no truth value: compose masks with &, | and ~"),
    "not_callable": (lambda: masks.from_function(3), TypeError, "function: got int, want a function (b, h, q, k)"),
    "function_batch": (lambda: masks.from_function(lambda *x: x, batch=-1), ValueError, "batch: got -1, want an int"),
    "function_of_heads": (
        lambda: masks.from_function(lambda b, h, q, k: q >= k + h, batch=2),
        ValueError,
        "heads: got None with a function that uses h, want the number that it distinguishes",
    ),
    "function_of_batch": (
        lambda: masks.from_function(lambda b, h, q, k, x: x[b] > q, jnp.arange(2), heads=2),
        ValueError,
        "batch: got None with a function that uses b, want the number that it distinguishes",
    ),
    "function_dtype": (
        lambda: masks.from_function(lambda b, h, q, k: q - k),
        TypeError,
        "function: got dtype int32 from it, want an elementwise predicate",
    ),
    "function_result": (
        lambda: masks.from_function(lambda b, h, q, k: (q, k)),
        TypeError,
        "function: got a tuple from it, want an elementwise predicate",
    ),
    "function_shape": (
        lambda: masks.from_function(lambda b, h, q, k: jnp.zeros((2, 2), bool)),
        ValueError,
        "function: got shape (2, 2) from it for indices of shape (1, 1, 3, 4), want an elementwise predicate",
    ),
    "function_reduces": (
        lambda: masks.from_function(lambda b, h, q, k: k < q.max()),
        ValueError,
        "function: got other values for arrays of indices than for each index, want an elementwise",
    ),
    "function_sorts": (
        lambda: masks.from_function(lambda b, h, q, k: jnp.flip(jnp.atleast_1d(k), -1).reshape(k.shape) > q),
        ValueError,
        "function: got other values for arrays of indices than for each index",
    ),
    "function_branches": (
        lambda: masks.from_function(_if),
        TypeError,
        "function: raised ValueError when traced, want an elementwise predicate",
    ),
    "function_numpy": (
        lambda: masks.from_function(lambda b, h, q, k: np.arange(9)[k] > q),
        TypeError,
        "(a traced index cannot index a NumPy array: pass the array through jnp.asarray)",
    ),
    "function_arguments": (lambda: masks.from_function(lambda q, k: q > k), TypeError, "function: raised TypeError"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_jitted_function_mask_reads_its_arrays():
    ids = jnp.arange(4) // 2
    plain = lambda b, h, q, k: ids[q] == ids[k]
    for function in (jax.jit(plain), jax.jit(jax.jit(plain))):
        np.testing.assert_array_equal(
            masks.from_function(function).to_dense(4, 4), masks.from_function(plain).to_dense(4, 4)
        )
    with pytest.raises(ValueError, match="heads: got None with a function that uses h"):
        masks.from_function(jax.jit(lambda b, h, q, k: q >= k + h))


def test_numpy_arrays_keep_their_values():
    small, large = np.arange(3), np.array([0, 2**40])
    assert masks.from_function(lambda b, h, q, k, x: x[k] > q, small).arrays[0].dtype == jnp.int32
    with pytest.raises(ValueError, match=r"arrays: got int64 values that int32 does not hold, want arrays"):
        masks.from_function(lambda b, h, q, k, x: x[k] > q, large)
