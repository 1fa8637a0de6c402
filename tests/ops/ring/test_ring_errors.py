"""Each call that ring_attention refuses, and its error text."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention, masks, ring_attention, shard_sequence
from tests.support.cases import rings

MESH = jax.make_mesh((1,), ("sequence",), (jax.sharding.AxisType.Auto,))
X = jnp.ones((1, 6, 4, 8))


def ring_of(**options):
    call = lambda x: ring_attention(x, x, x, **({"axis_name": "sequence"} | options))
    return jax.shard_map(call, mesh=MESH, in_specs=jax.P(None, "sequence"), out_specs=jax.P(None, "sequence"))(X)


def of_two(**options):
    options = {"axis_name": "sequence", "strategy": "halo", "is_causal": True, "window": (2, 0)} | options
    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    call = lambda x: ring_attention(x, x, x, **options)
    tokens = jax.P(None, "sequence")
    return jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=tokens, out_specs=tokens), jnp.ones((1, 12, 4, 8)))


BAD = {
    "axis": (lambda: ring_of(axis_name="rows"), "axis_name: got 'rows', want an axis of the jax.shard_map"),
    "vmap": (
        lambda: jax.vmap(lambda x: ring_attention(x, x, x, axis_name="rows"), axis_name="rows")(X[None]),
        "axis_name: got 'rows', want an axis of the jax.shard_map",
    ),
    "layout": (lambda: ring_of(layout="zig"), "layout: got 'zig', want one of 'zigzag', 'striped', 'contiguous'"),
    "strategy": (
        lambda: ring_of(strategy="tree"),
        "strategy: got 'tree', want one of 'ring', 'halo', 'all_to_all', 'all_gather', 'auto'",
    ),
    "halo_striped": (
        lambda: of_two(layout="striped"),
        "layout: got 'striped' with strategy='halo', want 'zigzag' or 'contiguous'",
    ),
    "halo_of_all": (
        lambda: of_two(window=None),
        "window: got (-1, 0) with strategy='halo' and runs of 3 tokens on each device, want at most 3 on both sides",
    ),
    "halo_too_wide": (
        lambda: of_two(window=(4, 0)),
        "window: got (4, 0) with strategy='halo' and runs of 3 tokens on each device, want at most 3 on both sides",
    ),
    "halo_masked": (lambda: of_two(mask=masks.global_tokens(2)), "mask: got one with strategy='halo', want None"),
    "halo_biased": (lambda: of_two(bias=jnp.ones((1, 1, 6, 12))), "bias: got one with strategy='halo', want None"),
    "halo_modified": (
        lambda: of_two(score_mod=rings.score_mod),
        "score_mod: got one with strategy='halo', want None",
    ),
    "ahead": (lambda: ring_of(sends_ahead=0), "sends_ahead: got 0, want an int of 1 or more, or None"),
    "half_ahead": (lambda: ring_of(sends_ahead=1.5), "sends_ahead: got 1.5, want an int of 1 or more, or None"),
    "ahead_halo": (
        lambda: of_two(sends_ahead=2),
        "sends_ahead: got 2 with strategy='halo', want None: it is for rings",
    ),
    "striped": (
        lambda: of_two(strategy="all_gather", layout="striped"),
        "layout: got 'striped' with strategy='all_gather', want 'zigzag' or 'contiguous'",
    ),
    "window": (lambda: ring_of(window=-7), "window: got"),
    "order": (lambda: shard_sequence(X, MESH, "sequence", layout="zig"), "layout: got 'zig'"),
    "mesh": (lambda: shard_sequence(X, MESH, "rows"), "axis_name: got 'rows', want an axis of the mesh"),
    "tokens": (
        lambda: shard_sequence(X[:, :5], MESH, "sequence"),
        "x: got 5 tokens for 1 devices with layout='zigzag', want a multiple of 2",
    ),
    "key": (
        lambda: jax.shard_map(
            lambda x: ring_attention(x, x[:, :4], x[:, :4], axis_name="sequence"), mesh=MESH, in_specs=jax.P(),
            out_specs=jax.P("sequence"),
        )(X),
        "key: got 4 tokens, want query's 6",
    ),
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["ring", "halo", "all_to_all", "all_gather"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_forward_mode_as_for_flash_attention(strategy, is_traced):
    """On one device, where gradients and tangents need no sends; test_ring_forward_mode.py has two devices."""
    limits = {"is_causal": True, "window": (2, 0)}
    call = lambda x: ring_attention(x, x, x, axis_name="sequence", strategy=strategy, **limits)
    shared = jax.shard_map(call, mesh=MESH, in_specs=jax.P(None, "sequence"), out_specs=jax.P(None, "sequence"))
    alone = lambda x: flash_attention(x, x, x, **limits)
    x, direction = (jax.random.normal(jax.random.key(seed), X.shape) for seed in range(2))
    push = lambda function: jax.jvp(jax.jit(function) if is_traced else function, (x,), (direction,))
    for got, want in zip(push(shared), push(alone), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    if not is_traced:
        loss = lambda function: lambda x: jnp.sin(function(x)).sum()
        np.testing.assert_allclose(jax.grad(loss(shared))(x), jax.grad(loss(alone))(x), atol=1e-5)


def test_separate_query_and_key_ids_are_refused():
    ids = jnp.zeros(X.shape[:2], jnp.int32)
    with pytest.raises(TypeError, match="segment_ids: got a pair, want one array"):
        ring_of(segment_ids=(ids, ids))


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
