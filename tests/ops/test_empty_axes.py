"""Attention with an axis of length 0: out is empty or 0, lse is -inf or the sink, gradients are empty or 0."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_kernels import (
    block_sparse_attention,
    compile_attention,
    decode_attention,
    dilated_attention,
    dispatch,
    dynamic_mask_attention,
    explain,
    flash_attention,
    flash_attention_fp8,
    masks,
    matmul,
    prepare_mask,
    ring_attention,
    sequence_parallel_dilated_attention,
)

# (batch, queries, keys, heads, heads of keys)
SIZES = {
    "batch": (0, 3, 5, 4, 2),
    "queries": (2, 0, 5, 4, 2),
    "keys": (2, 3, 0, 4, 2),
    "tokens": (2, 0, 0, 4, 2),
    "heads": (2, 3, 5, 0, 0),
    "query_heads": (2, 3, 5, 0, 2),
}
# The cases of self-attention, whose keys belong to the same tokens as its queries.
SELF = {"batch": (0, 8, 8, 4, 2), "tokens": (2, 0, 0, 4, 2), "heads": (2, 8, 8, 0, 0)}
PATTERN = {"segment_lengths": (4, 8), "dilation_rates": (1, 2)}


def arrays(sizes, dtype=jnp.float32, value_dim=8):
    batch, queries, keys, heads, kv_heads = sizes
    shapes = (batch, queries, heads, 16), (batch, keys, kv_heads, 16), (batch, keys, kv_heads, value_dim)
    return [jnp.ones(shape, dtype) for shape in shapes]


def finite(lse):
    return jnp.where(jnp.isneginf(lse), 0, lse)


def check(call, sizes, given, lse=-np.inf, *, has_gradient=True):
    """Checks call(query, key, value) -> (out, lse): eager, jitted, mapped, and its gradients."""
    batch, queries, _, heads, _ = sizes
    want = np.broadcast_to(np.asarray(lse, np.float32), (batch, heads, queries))
    for function in (call, jax.jit(call)):
        out, got = function(*given)
        assert out.shape == (batch, queries, heads, given[2].shape[-1])
        assert not np.asarray(out, np.float32).any()
        np.testing.assert_array_equal(got, want)
    for size in (0, 2):
        out, got = jax.vmap(call)(*(jnp.broadcast_to(x, (size, *x.shape)) for x in given))
        assert (out.shape[:2], got.shape) == ((size, batch), (size, *want.shape))
    if has_gradient:
        loss = lambda *given: sum(finite(x).sum() for x in call(*given))
        for x, dx in zip(given, jax.jit(jax.grad(loss, (0, 1, 2)))(*given), strict=True):
            assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
            assert not np.asarray(dx).any()


def ids(*shape):
    return jnp.zeros(shape, jnp.int32)


def options_of(sizes):
    """Arguments of flash_attention by the names of the cases."""
    batch, queries, keys, heads, _ = sizes
    slopes, numbers = jnp.ones(heads), jnp.ones(batch)  # JAX traces no look-up in an empty array
    return {
        "plain": {},
        "causal": {"is_causal": True, "window": (2, 0), "softcap": 3.0, "scale": -1.0},
        "offset": {"is_causal": True, "q_offset": ids(batch), "deterministic": True, "precision": "tf32"},
        "mask": {"mask": jnp.ones((batch, heads, queries, keys), bool), "kv_lengths": ids(batch)},
        "floats": {"mask": jnp.ones((queries, keys)), "bias": jnp.ones((1, 1, 1, keys))},
        "bias": {"bias": jnp.ones((batch, heads, queries, keys))},
        "segments": {"segment_ids": (ids(batch, queries), ids(batch, keys))},
        "score_mod": {"score_mod": lambda score, b, h, q, k: score * slopes[h] + numbers[b]},
        "Mask": {"mask": masks.segments(ids(batch, queries), ids(batch, keys)) | masks.causal()},
    }


@pytest.mark.parametrize("option", options_of(SIZES["batch"]))
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_flash_attention(sizes, option):
    call = functools.partial(flash_attention, return_lse=True, **options_of(sizes)[option])
    check(call, sizes, arrays(sizes))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sinks(sizes):
    """Without keys the sink is the whole softmax: lse is its logit, and its cotangent goes to the sink."""
    batch, queries, keys, heads, _ = sizes
    sinks, given = jnp.arange(heads, dtype=jnp.float32), arrays(sizes)
    call = lambda *given, sinks=sinks: flash_attention(*given, sinks=sinks, return_lse=True)
    check(call, sizes, given, sinks[:, None])
    weights = jnp.arange(batch * heads * queries, dtype=jnp.float32).reshape(batch, heads, queries)
    gradient = jax.grad(lambda sinks: (call(*given, sinks=sinks)[1] * weights).sum())(sinks)
    np.testing.assert_array_equal(gradient, weights.sum((0, 2)) if keys == 0 else np.zeros(heads))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_array_gradients(sizes):
    batch, queries, keys, heads, _ = sizes
    given, factor = arrays(sizes), jnp.ones(3)
    for shape in ((1, heads, queries, keys), (batch, 1, 1, keys)):
        dbias = jax.grad(lambda bias: flash_attention(*given, bias=bias).sum())(jnp.ones(shape))
        assert dbias.shape == shape
        assert not np.asarray(dbias).any()
    mod = lambda factor: lambda score, b, h, q, k: score * factor[0]
    assert not np.asarray(jax.grad(lambda x: flash_attention(*given, score_mod=mod(x)).sum())(factor)).any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.triton
def test_plans(sizes):
    """Dispatch falls back to plain JAX and says why, even if a kernel is named."""
    given = arrays(sizes, jnp.bfloat16, value_dim=16)
    given = [jnp.concatenate([x] * 4, axis=-1) for x in given]
    with dispatch.on_device("h200"):
        plan = explain(flash_attention, *given)
        assert plan.implementation == "xla"
        reasons = dict(plan.passed_over)
        assert {"mosaic_gpu", "triton"} <= reasons.keys()
        assert all(
            reasons[x].endswith("is 0, which leaves a kernel nothing to compute") for x in ("mosaic_gpu", "triton")
        )
        named = explain(flash_attention, *given, implementation="mosaic_gpu")
        assert (named.implementation, named.config) == ("xla", None)
        assert named.why.endswith("is 0, which leaves 'mosaic_gpu' nothing to compute")
        with pytest.raises(NotImplementedError, match="wgmma instructions take bfloat16"):
            explain(flash_attention, *arrays(sizes), implementation="mosaic_gpu")


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("sizes", [SIZES["batch"], SIZES["keys"]], ids=["batch", "keys"])
def test_named_implementations(sizes, implementation, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    given = arrays(sizes, jnp.bfloat16)
    check(functools.partial(flash_attention, return_lse=True, implementation=implementation), sizes, given)
    monkeypatch.delenv("JAX_KERNELS_INTERPRET")
    with dispatch.on_device("cpu"), pytest.raises(NotImplementedError, match="it needs an NVIDIA GPU"):
        flash_attention(*given, implementation="triton")


def test_vmap_over_no_calls(monkeypatch):
    """A vmap over an axis of length 0, of calls that kernels serve."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    x = jnp.ones((0, 1, 16, 2, 16), jnp.bfloat16)
    attend = functools.partial(flash_attention, implementation="triton")
    decode = functools.partial(decode_attention, implementation="triton")
    for call in (attend, jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum()), decode):
        assert jax.vmap(call)(x, x, x).shape == x.shape
    rows, w = jnp.ones((0, 16, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    assert jax.vmap(functools.partial(matmul, implementation="triton"), (0, None))(rows, w).shape == rows.shape


def test_wrong_score_mod_is_refused():
    with pytest.raises(TypeError, match="score_mod: raised NameError when traced"):
        flash_attention(*arrays(SIZES["keys"]), score_mod=lambda score, b, h, q, k: score + unknown)  # noqa: F821
    with pytest.raises(ValueError, match="score_mod: got shape"):
        flash_attention(*arrays(SIZES["batch"]), score_mod=lambda score, b, h, q, k: score[None])


def test_mapped_gradients():
    for sizes in (SIZES["batch"], SIZES["keys"]):
        given = [jnp.broadcast_to(x, (2, *x.shape)) for x in arrays(sizes)]
        gradients = jax.vmap(jax.grad(lambda *given: flash_attention(*given).sum(), (0, 1, 2)))(*given)
        assert [x.shape for x in gradients] == [x.shape for x in given]
        assert not any(np.asarray(x).any() for x in gradients)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_dynamic_mask_attention(sizes):
    batch, queries, keys, heads, kv_heads = sizes
    sinks = jnp.arange(heads, dtype=jnp.float32)
    for mask in (jnp.ones((batch, kv_heads, queries, keys), bool), masks.causal()):
        bias = jnp.ones((batch, kv_heads, queries, keys))
        call = lambda *given, mask=mask, bias=bias: dynamic_mask_attention(
            *given, mask, bias, sinks=sinks, return_lse=True
        )
        check(call, sizes, arrays(sizes), sinks[:, None])
        assert explain(dynamic_mask_attention, *arrays(sizes), mask, bias).implementation == "xla"
        dbias = jax.grad(lambda bias, mask=mask: dynamic_mask_attention(*arrays(sizes), mask, bias).sum())(bias)
        assert not np.asarray(dbias).any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_block_sparse_and_prepared_masks(sizes):
    batch, queries, keys, heads, _ = sizes
    cells = jnp.ones((batch, heads, -(-queries // 2), -(-keys // 2)), bool)
    call = lambda *given: block_sparse_attention(*given, cells, block_size=2, return_lse=True)
    check(call, sizes, arrays(sizes))
    query, key, value = arrays(sizes)
    prepared = prepare_mask(masks.causal() | masks.prefix(1), query, key, value)
    assert not np.asarray(flash_attention(query, key, value, mask=prepared)).any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_flash_attention_fp8(sizes):
    batch, _, _, heads, kv_heads = sizes
    given = arrays(sizes, jnp.float8_e4m3fn)
    scales = {"q_scale": jnp.ones((batch, heads)), "k_scale": jnp.ones((batch, kv_heads)), "kv_lengths": ids(batch)}
    call = functools.partial(flash_attention_fp8, return_lse=True, is_causal=True, **scales)
    check(call, sizes, given, has_gradient=False)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_decode_attention(sizes):
    batch, queries, keys, heads, _ = sizes
    sinks = jnp.arange(heads, dtype=jnp.float32)
    options = {
        "kv_lengths": ids(batch),
        "mask": masks.prefix(2) | masks.causal(),
        "bias": jnp.ones((1, heads, 1, keys)),
    }
    call = functools.partial(decode_attention, sinks=sinks, window=2, return_lse=True, **options)
    check(call, sizes, arrays(sizes), sinks[:, None], has_gradient=False)
    with pytest.raises(ValueError, match="mask: got shape"):
        decode_attention(*arrays(sizes), mask=jnp.ones((3, heads, queries + 2, keys + 2), bool))


# (batch, queries, pages, pages of a sequence)
@pytest.mark.parametrize("sizes", [(0, 2, 3, 2), (2, 0, 3, 2), (2, 2, 0, 2), (2, 2, 3, 0), (0, 0, 0, 0)])
def test_paged_decode_attention(sizes):
    batch, queries, pages, most = sizes
    query, cache = jnp.ones((batch, queries, 4, 16)), jnp.ones((pages, 16, 2, 16))
    call = jax.jit(
        lambda lengths, tables: decode_attention(
            query, cache, cache, kv_lengths=lengths, block_tables=tables, sinks=jnp.ones(4), return_lse=True
        )
    )
    out, lse = call(ids(batch), ids(batch, most))
    assert out.shape == query.shape
    assert not np.asarray(out).any()
    np.testing.assert_array_equal(lse, np.ones((batch, 4, queries)))
    with dispatch.on_device("h200"):
        given = {"kv_lengths": ids(batch), "block_tables": ids(batch, most)}
        wide = [jnp.zeros((*x.shape[:3], 64), jnp.bfloat16) for x in (query, cache, cache)]
        assert explain(decode_attention, *wide, **given).implementation == "xla"


DILATED = {
    "lse": {"is_causal": True},
    "groups": {"heads": "groups", "combine": "mean"},
    "partition": {"layout": "partition", "order": "hilbert"},
    "segments": {"segment_ids": True},
}


@pytest.mark.parametrize("option", DILATED)
@pytest.mark.parametrize("sizes", SELF.values(), ids=SELF)
def test_dilated_attention(sizes, option):
    options = DILATED[option]
    if "segment_ids" in options:
        options = {"segment_ids": ids(*sizes[:2])}
    check(functools.partial(dilated_attention, return_lse=True, **PATTERN, **options), sizes, arrays(sizes))
    plan = explain(dilated_attention, *arrays(sizes), **PATTERN, **options)
    assert (plan.op, plan.implementation, plan.branches) == ("dilated_attention", "xla", ())
    with dispatch.on_device("cpu"), pytest.raises(NotImplementedError, match="it needs an NVIDIA GPU"):
        dilated_attention(*arrays(sizes), **PATTERN, **options, implementation="triton")


@pytest.mark.parametrize("checks_varying", [False, True])
@pytest.mark.parametrize("sizes", SELF.values(), ids=SELF)
def test_sharded_sequences(sizes, checks_varying):
    """ring_attention and sequence-parallel dilated attention inside jax.shard_map."""
    heads, tokens = sizes[3], sizes[1]
    mesh = jax.make_mesh((1,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    ring = functools.partial(ring_attention, axis_name="t", return_lse=True)
    options = [
        {"is_causal": True, "layout": "zigzag", "sinks": jnp.ones(heads)},
        {"mask": masks.causal() | masks.prefix(2), "strategy": "all_gather"},
        {"segment_ids": ids(*sizes[:2]), "window": (2, 0), "strategy": "halo", "layout": "contiguous"},
        {"bias": jnp.ones((1, heads, tokens, tokens)), "score_mod": lambda score, b, h, q, k: score + 1},
    ]
    calls = [functools.partial(ring, **each) for each in options]
    dilated = functools.partial(sequence_parallel_dilated_attention, axis_name="t", return_lse=True, **PATTERN)
    for call in (*calls, dilated):
        by_tokens, of_lse = PartitionSpec(None, "t"), PartitionSpec(None, None, "t")
        whole = jax.jit(
            jax.shard_map(
                call, mesh=mesh, in_specs=(by_tokens,) * 3, out_specs=(by_tokens, of_lse), check_vma=checks_varying
            )
        )
        given = arrays(sizes)
        out, lse = whole(*given)
        assert (out.shape, lse.shape) == ((*sizes[:2], heads, 8), (sizes[0], heads, tokens))
        gradients = jax.grad(lambda *given, whole=whole: sum(x.sum() for x in whole(*given)), (0, 1, 2))(*given)
        assert [x.shape for x in gradients] == [x.shape for x in given]
        assert not any(np.asarray(x).any() for x in gradients)


def test_compile_attention():
    attention = compile_attention("causal", 4, 16, num_heads=2, batch=0)
    x = jnp.ones((3, 4, 2, 16), jnp.bfloat16)
    assert attention(x[:0], x[:0], x[:0]).shape == (0, 4, 2, 16)
    assert attention(x, x, x).shape == x.shape
    without_keys = compile_attention("sliding_window", 4, 16, left=2, right=0, kv_len=0, num_heads=2)
    assert without_keys.density == 0
    assert not np.asarray(without_keys(x, x[:, :0], x[:, :0]), np.float32).any()
    assert compile_attention("bigbird", 0, 16, num_heads=2, block_size=4)(x[:, :0], x[:, :0], x[:, :0]).size == 0


def test_traced_float_masks_are_checked():
    """Values except 0 and 1 make the result NaN, also where there is no key."""
    given = arrays(SIZES["keys"])
    attend = jax.jit(lambda mask: flash_attention(*given, mask=mask))
    assert not np.asarray(attend(jnp.ones((3, 1)))).any()
    assert np.isnan(attend(jnp.full((3, 1), 0.5))).all()
