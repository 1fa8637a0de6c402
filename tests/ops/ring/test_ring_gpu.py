"""ring_attention on two and four GPUs: as exact as flash_attention on one, in every layout and under every mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import (
    DocumentLayout,
    compiler_options,
    flash_attention,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from tests.support.cases.rings import FUNCTION, MASK, errors_of, score_mod

DEVICES = jax.device_count() if jax.default_backend() == "gpu" else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2, reason=f"needs two NVIDIA GPUs for a ring, found {DEVICES}"),
    pytest.mark.timeout(300),
]
COUNTS = [
    2,
    pytest.param(4, marks=pytest.mark.skipif(DEVICES < 4, reason=f"needs four NVIDIA GPUs, found {DEVICES}")),
]
TOKENS = 2048
RESULTS = "out", "lse", "dq", "dk", "dv", "dsinks"

# Layout, options, whether shard_map checks varying axes. With four GPUs, a device has 512 tokens.
CASES = {
    "zigzag": ("zigzag", {"is_causal": True}, True),
    "zigzag unchecked": ("zigzag", {"is_causal": True}, False),
    "striped": ("striped", {"is_causal": True}, True),
    "contiguous": ("contiguous", {"is_causal": True}, True),
    "full": ("contiguous", {}, True),
    "packed with sinks": ("zigzag", {"is_causal": True, "segment_ids": True, "sinks": True}, True),
    "window": ("zigzag", {"is_causal": True, "window": (300, 0)}, True),
    "window of both sides": ("contiguous", {"window": (200, 100), "segment_ids": True}, True),
    "halo": ("zigzag", {"is_causal": True, "window": (200, 0), "sinks": True, "strategy": "halo"}, True),
    "halo unchecked": ("zigzag", {"window": (100, 200), "segment_ids": True, "strategy": "halo"}, False),
    "halo contiguous": ("contiguous", {"is_causal": True, "window": (400, 0), "strategy": "halo"}, True),
    "halo that overlaps": ("contiguous", {"window": (500, 400), "strategy": "halo", "batch": 1}, False),
    "softcap": ("zigzag", {"is_causal": True, "softcap": 5.0}, True),
    "two ahead": ("zigzag", {"is_causal": True, "sends_ahead": 2}, True),
    "all gather": ("zigzag", {"is_causal": True, "strategy": "all_gather"}, True),
    "auto": ("zigzag", {"is_causal": True, "strategy": "auto"}, True),
    "all to all": ("zigzag", {"is_causal": True, "strategy": "all_to_all"}, True),
    "mask": ("zigzag", {"mask": MASK}, True),
    "mask unchecked": ("striped", {"mask": MASK, "sinks": True}, False),
    "mask contiguous": ("contiguous", {"mask": MASK, "segment_ids": True}, True),
    "function": ("zigzag", {"mask": FUNCTION}, False),
    "mask by heads": ("zigzag", {"mask": MASK, "strategy": "all_to_all"}, True),
    "documents": ("documents", {"is_causal": True, "segment_ids": True, "sinks": True}, True),
    "documents unchecked": ("documents", {"is_causal": True, "segment_ids": True}, False),
    "documents full": ("documents", {"segment_ids": True}, False),
    "score_mod": ("zigzag", {"is_causal": True, "score_mod": score_mod}, False),
    "score_mod checked": ("striped", {"is_causal": True, "score_mod": score_mod}, True),
    "score_mod by heads": ("zigzag", {"is_causal": True, "score_mod": score_mod, "strategy": "all_to_all"}, False),
}


def arrays(options, head_dim, count=2):
    """query, key, value, ids, sinks, dout, dlse: bfloat16 values in float32. count: the number of devices."""
    tokens, heads = TOKENS, 2 * count
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.bfloat16).astype(jnp.float32)
    batch = options.pop("batch", 2)
    query, key, value = (normal(batch, tokens, n, head_dim) for n in (heads, count, count))
    ids = jnp.asarray(np.sort(random.integers(-1, 3, (batch, tokens)), axis=1), jnp.int32)
    return (
        *(query, key, value),
        ids if options.pop("segment_ids", False) else None,
        normal(heads) if options.pop("sinks", False) else None,
        *(normal(batch, tokens, heads, head_dim), normal(batch, heads, tokens)),
    )


def both(attention, query, key, value, ids, sinks, dout, dlse):
    """The results and the gradients of an attention that returns (out, lse)."""
    call = lambda query, key, value, sinks: attention(query, key, value, segment_ids=ids, sinks=sinks)
    results, vjp = jax.vjp(call, query, key, value, sinks)
    return *results, *vjp((dout.astype(results[0].dtype), jnp.where(jnp.isneginf(results[1]), 0, dlse)))


def rounded(given):
    query, key, value, ids, sinks, dout, dlse = given
    query, key, value, dout = (x.astype(jnp.bfloat16) for x in (query, key, value, dout))
    return query, key, value, ids, sinks, dout, dlse


def over(count, layout, options, check_vma, given):
    """The ring's results over `count` GPUs, in the order of the tokens."""
    mesh = jax.make_mesh((count,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
    options = {"strategy": "ring"} | options
    attention = functools.partial(ring_attention, axis_name="sequence", layout=layout, return_lse=True, **options)

    def ring(*local):
        *results, dsinks = both(attention, *local)
        return *results, dsinks if dsinks is None or check_vma else jax.lax.psum(dsinks, "sequence")

    tokens, rows, one = jax.P(None, "sequence"), jax.P(None, None, "sequence"), jax.P()
    specs = tokens, tokens, tokens, tokens, one, tokens, rows
    out_specs = tokens, rows, tokens, tokens, tokens, one
    specs = tuple(None if x is None else spec for x, spec in zip(given, specs, strict=True))
    program = jax.shard_map(ring, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    axis = lambda spec: 2 if spec == rows else 1
    shard = functools.partial(shard_sequence, mesh=mesh, axis_name="sequence", layout=layout)
    shared = [x if spec in (one, None) else shard(x, axis=axis(spec)) for x, spec in zip(given, specs, strict=True)]
    results = jax.jit(program)(*shared)
    back = functools.partial(unshard_sequence, mesh=mesh, axis_name="sequence", layout=layout)
    return [
        x if x is None or spec == one else back(x, axis=axis(spec)) for x, spec in zip(results, out_specs, strict=True)
    ]


def errors(got, want):
    return errors_of(RESULTS, got, want)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", COUNTS)
def test_several_gpus_are_as_exact_as_one(count, name, head_dim):
    layout, options, check_vma = CASES[name]
    options = dict(options)
    given = arrays(options, head_dim, count)
    alone = {key: value for key, value in options.items() if key not in ("strategy", "sends_ahead")}
    attend = functools.partial(flash_attention, return_lse=True, **alone)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(both, functools.partial(attend, implementation="xla")))(*given)
    of_one = errors(jax.jit(functools.partial(both, attend))(*rounded(given)), want)
    shared = rounded(given)
    if layout == "documents":
        layout = DocumentLayout.of(given[3], count, is_causal=options.get("is_causal", False), heads=10**6)
        assert layout.steps.steps
        shared = [*shared[:3], jnp.asarray(layout.segment_ids), *shared[4:]]
    of_many = errors(over(count, layout, options, check_vma, shared), want)
    assert of_many.keys() == of_one.keys()
    # Each step's softmax starts from its own maximum. lse is exact to float32. dsinks has one value for each head: a
    # sum over all queries, whose error is a random sum of the roundings of out.
    limits = {what: max(1.3 * error, 1e-5) for what, error in of_one.items()}
    limits["dsinks"] = 3 * of_one["out"]
    assert not {what: (error, limits[what]) for what, error in of_many.items() if error >= limits[what]}


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_bias_and_its_gradient(layout):
    query, key, value, *_, dout, dlse = rounded(arrays({}, 64))
    bias = jax.random.normal(jax.random.key(0), (1, query.shape[2], TOKENS, TOKENS), jnp.bfloat16)
    given = query, key, value, dout, dlse, bias

    def with_bias(attention, query, key, value, dout, dlse, bias):
        call = lambda query, key, value, bias: attention(query, key, value, bias=bias, is_causal=True, return_lse=True)
        results, vjp = jax.vjp(call, query, key, value, bias)
        *gradients, dbias = vjp((dout.astype(results[0].dtype), dlse))
        return *results, *gradients, dbias

    mesh = jax.make_mesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    tokens, rows = jax.P(None, "sequence"), jax.P(None, None, "sequence")
    specs, out_specs = (tokens,) * 4 + (rows,) * 2, (tokens, rows, tokens, tokens, tokens, rows)
    attend = functools.partial(ring_attention, axis_name="sequence", layout=layout)
    ring = jax.shard_map(functools.partial(with_bias, attend), mesh=mesh, in_specs=specs, out_specs=out_specs)
    move = lambda to, x, spec: to(x, mesh, "sequence", layout=layout, axis=2 if spec == rows else 1)
    got = jax.jit(ring)(*(move(shard_sequence, x, spec) for x, spec in zip(given, specs, strict=True)))
    got = [move(unshard_sequence, x, spec) for x, spec in zip(got, out_specs, strict=True)]
    wide = [x.astype(jnp.float32) for x in given]
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(with_bias, functools.partial(flash_attention, implementation="xla")))(*wide)
    of_one, of_many = (errors(x, want) for x in (jax.jit(functools.partial(with_bias, flash_attention))(*given), got))
    for what, error in of_many.items():
        assert error < max(1.3 * of_one[what], 1e-5), (what, error, of_one[what])


def test_results_are_reproducible():
    given = rounded(arrays({}, 128))
    once, again = (over(2, "zigzag", {"is_causal": True, "deterministic": True}, True, given) for _ in range(2))
    for x, y in zip(once[:5], again[:5], strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
@pytest.mark.parametrize("count", COUNTS)
def test_sends_by_copies_are_bitwise_equal(count, strategy):
    """Many calls are queued, each on the results of the call before, so that sends reuse memory of earlier sends."""
    mesh = jax.make_mesh((count,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
    options = compiler_options(mesh)
    assert len(options) == 2, options
    attend = functools.partial(
        ring_attention, axis_name="sequence", is_causal=True, strategy=strategy, deterministic=True
    )
    spec = jax.P(None, "sequence")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,) * 3, check_vma=False)
    def step(query, key, value):
        out, vjp = jax.vjp(attend, query, key, value)
        return tuple(x + 0.1 * jnp.tanh(g) for x, g in zip((query, key, value), vjp(out), strict=True))

    make = jax.jit(
        lambda key: jax.random.normal(key, (2, 8192, 8, 128), jnp.bfloat16), out_shardings=jax.NamedSharding(mesh, spec)
    )
    start = [make(jax.random.key(i)) for i in range(3)]
    ends = []
    for given in ({}, options):
        run, now = jax.jit(step, compiler_options=given), start
        for _ in range(40):
            now = run(*now)
        ends.append([np.asarray(x, np.float32) for x in now])
    for without, copied in zip(*ends, strict=True):
        assert np.isfinite(without).all()
        np.testing.assert_array_equal(copied, without)
