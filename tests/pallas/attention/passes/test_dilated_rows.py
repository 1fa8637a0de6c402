"""The passes that join the branches of dilated attention, and views of arrays, against gathered rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.ops.dilated import branches as dilated_views
from jax_kernels.ops.dilated import vjp as dilated_vjp
from jax_kernels.ops.dilated.pieces import pieces_of
from jax_kernels.pallas.attention.passes import merge_branches
from jax_kernels.pallas.attention.sm90.features import head_views
from tests.support.cases import tiers
from tests.support.cases.dilated import PATTERNS, calls_of, random_results

pytestmark = pytest.mark.triton

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


QUICK = {"longnet", "divides_nothing", "groups", "masked", "hilbert_partition"}


@pytest.mark.parametrize("name", tiers.cases(PATTERNS, QUICK))
def test_merge(name):
    calls, heads, _, length = calls_of(name)
    results = random_results(calls, heads, "heads", 6)
    is_mean = name == "divides_nothing"
    attentions = tuple((views, None) for views in calls)
    call = dilated_vjp.DilatedCall(
        attentions, attentions, 3, is_mean, False, stop_gradient_weights=False, return_lse=True
    )
    like = jax.ShapeDtypeStruct((2, length, heads, 6), jnp.float32)

    @jit
    def by_selection(outs, lses):
        out_parts, lse_parts = [], []
        for views, out, lse in zip(calls, outs, lses, strict=True):
            out_parts += dilated_views.scatter(out, views, 2, heads, heads)
            lse_parts += dilated_views.scatter(lse.swapaxes(1, 2), views, 2, heads, heads, fill=-jnp.inf)
        return dilated_vjp._merge(call, out_parts, lse_parts, like)

    @jit
    def in_one_pass(outs, lses):
        rows = dilated_views.compact_rows(calls, 2, heads, heads)
        share = call.share if is_mean else None
        return merge_branches.merge(rows, outs, lses, like=like, share=share, interpret=True)

    got, want = in_one_pass(*results), by_selection(*results)
    everywhere = "partition" in name or name in ("longnet", "grouped_heads", "classes_within_groups")
    assert np.isneginf(want[1]).any() != everywhere
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", tiers.cases(PATTERNS, QUICK))
def test_total(name):
    calls, heads, kv_heads, length = calls_of(name)
    parts, _ = random_results(calls, heads, "kv_heads", 20)
    like = jax.ShapeDtypeStruct((2, length, kv_heads, 20), jnp.bfloat16)
    whole = None
    if name.startswith(("longnet", "divides", "masked")):
        whole = jnp.asarray(np.random.default_rng(1).standard_normal(like.shape), jnp.float32)

    @jit
    def by_selection(parts, whole):
        scattered = []
        for views, part in zip(calls, parts, strict=True):
            scattered += dilated_views.scatter(part, views, 2, heads, kv_heads)
        sums = dilated_views.merge_rows(scattered, length)
        return 0.3 * dilated_vjp._sum([*sums, *([] if whole is None else [whole])])

    @jit
    def in_one_pass(parts, whole):
        rows = dilated_views.compact_rows(calls, 2, heads, kv_heads)
        return merge_branches.total(rows, parts, whole, 0.3, like=like, interpret=True)

    got, want = in_one_pass(parts, whole), by_selection(parts, whole)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", tiers.cases(PATTERNS, QUICK))
def test_gather(name):
    calls, heads, kv_heads, length = calls_of(name)
    random = np.random.default_rng(0)
    for array_heads in {heads, kv_heads}:
        arrays = [jnp.asarray(random.standard_normal((2, length, array_heads, 20)), jnp.bfloat16) for _ in range(2)]
        for call in calls:
            (rows,) = [dilated_views.compact_rows([call], 2, heads, array_heads)]
            got = merge_branches.gather(rows, arrays, call.rows, interpret=True)
            for g, x in zip(got, arrays, strict=True):
                np.testing.assert_array_equal(g, dilated_views.gather_rows(x, call, heads))


STRIDED = {
    "longnet": ((16, 32, 64), (1, 2, 4), 4, 4, 64, False),
    "uneven_classes": ((32, 64), (2, 4), 6, 3, 64, False),
    "classes_within_groups": ((32, 64, 64), (2, 4, 8), 12, 2, 64, False),
    "one_key_head": ((32, 64, 32), (2, 8, 1), 6, 1, 64, False),
    "groups": ((32, 16), (2, 1), 6, 2, 64, True),
}


@pytest.mark.parametrize("name", STRIDED)
def test_views_match_gathered_rows(name, monkeypatch):
    monkeypatch.setitem(PATTERNS, name, STRIDED[name])
    calls, heads, kv_heads, length = calls_of(name)
    strided = [part for call in calls for part in dilated_views.split_strided(call, length, heads // kv_heads)]
    assert any(call.is_strided for call in strided)
    for array_heads in (heads, kv_heads):
        x = jnp.arange(2 * length * array_heads).reshape(2, length, array_heads)
        for call in strided:
            if not call.is_strided:
                continue
            read = lambda x, call=call: (
                dilated_views.arrays_of(x, call, heads),
                dilated_views.gather_rows(x, call, heads),
            )
            view, want = (np.asarray(rows) for rows in jit(read)(x))
            taken = call.head_view(heads, array_heads)
            assert taken is not None or call.pieces[0].rate == 1
            if taken is not None:
                assert taken.count == want.shape[2]
                places = np.array([taken.of_array(head) for head in range(taken.count)])
                view = view[:, :, places]
                in_kernel = head_views._head_map(taken)
                np.testing.assert_array_equal([in_kernel(jnp.int32(head)) for head in range(taken.count)], places)
            np.testing.assert_array_equal(view, want)


def test_unstrided_patterns():
    """Segments that do not cover the sequence, rates that do not divide them, rows in partial tiles, and an order."""
    for pattern in (
        ((48,), (2,), 4, 4, 64, None),
        ((64,), (3,), 4, 4, 64, None),
        ((8,), (2,), 4, 4, 64, None),
        ((64,), (2,), 4, 4, 64, "hilbert"),
    ):
        lengths, rates, heads, kv_heads, length, order = pattern
        branches = tuple(zip(lengths, rates, strict=True))
        pieces = pieces_of(length, heads, branches, heads="all", layout="overlap", order=order)
        calls = dilated_views.calls_of(pieces, heads, kv_heads, is_causal=True, has_segment_ids=False)
        parts = [part for call in calls for part in dilated_views.split_strided(call, length, heads // kv_heads)]
        assert not any(call.is_strided for call in parts), pattern
