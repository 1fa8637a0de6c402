"""ring_attention with a score_mod or a bias on CPU devices, with gradients, against flash_attention on one device.

As a script it prints the largest error of each case.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention, masks, ring_attention, shard_sequence, unshard_sequence
from tests.support.cases import rings, tiers
from tests.support.processes import cpu_devices

TOKENS, BATCH, HEADS = 48, 2, 4
WINDOW = masks.causal() & masks.sliding_window(9, 0) | masks.global_tokens(3)
# Devices, layout, strategy, the shape of the bias (None: a score_mod), other options.
CASES = {
    "zigzag mod": (4, "zigzag", "ring", None, {"is_causal": True}),
    "striped mod": (2, "striped", "ring", None, {"mask": WINDOW, "sinks": True}),
    "heads mod": (2, "zigzag", "all_to_all", None, {"is_causal": True}),
    "zigzag bias": (4, "zigzag", "ring", (BATCH, HEADS, TOKENS, TOKENS), {"is_causal": True}),
    "striped bias": (2, "striped", "ring", (1, HEADS, TOKENS, TOKENS), {"mask": WINDOW, "sinks": True}),
    "heads bias": (2, "striped", "all_to_all", (1, HEADS, TOKENS, TOKENS), {}),
    "gather bias": (2, "zigzag", "all_gather", (BATCH, 1, TOKENS, TOKENS), {"is_causal": True}),
    "far": (4, "contiguous", "ring", (1, 1, TOKENS, TOKENS), {"far": True}),
    "far sinks": (4, "contiguous", "ring", (1, 1, TOKENS, TOKENS), {"far": True, "sinks": True}),
    "one": (1, "zigzag", "auto", (1, HEADS, TOKENS, TOKENS), {"is_causal": True}),
    "gather mod": (4, "zigzag", "all_gather", None, {"mask": WINDOW}),
    "contiguous mod": (4, "contiguous", "ring", None, {"window": (7, 3), "segment_ids": True}),
    "contiguous causal mod": (2, "contiguous", "ring", None, {"is_causal": True}),
    "ahead mod": (4, "zigzag", "ring", None, {"sends_ahead": 2}),
    "auto mod": (2, None, "auto", None, {}),
    "auto bias": (2, None, "auto", (1, HEADS, TOKENS, TOKENS), {}),
    "bias of keys": (4, "zigzag", "ring", (1, HEADS, 1, TOKENS), {"is_causal": True}),
    "heads bias of keys": (2, "zigzag", "all_to_all", (1, HEADS, 1, TOKENS), {"is_causal": True}),
    "bias of queries": (4, "striped", "ring", (BATCH, 1, TOKENS, 1), {"is_causal": True, "softcap": 2.0}),
    "heads bias of all": (2, "zigzag", "all_to_all", (1, 1, TOKENS, TOKENS), {}),
    "window bias": (4, "zigzag", "ring", (1, HEADS, TOKENS, TOKENS), {"window": (7, 0), "segment_ids": True}),
}
# Under the window of "contiguous mod" a step is skipped.
QUICK = ["heads mod", "striped bias", "far sinks", "contiguous mod"]


def run_case(devices, layout, strategy, shape, options):
    options = dict(options)
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    query, key, value = (normal(BATCH, TOKENS, heads, 8) for heads in (HEADS, 2, 2))
    dout, dlse, slopes, table = normal(BATCH, TOKENS, HEADS, 8), normal(BATCH, HEADS, TOKENS), normal(HEADS), normal(97)
    sinks = normal(HEADS) if options.pop("sinks", False) else None
    ids = np.sort(random.integers(-1, 3, (BATCH, TOKENS)), axis=1).astype(np.int32)
    ids = jnp.asarray(ids) if options.pop("segment_ids", False) else None
    ahead = options.pop("sends_ahead", None)
    bias = None if shape is None else normal(*shape)
    if options.pop("far", False):  # rows with a few near keys, with none on some devices, and with far keys only
        sinks = None if sinks is None else sinks.at[0].set(-1e9)  # keeps a weight among far keys
        bias = jnp.where(random.random(shape) < 0.15, bias, -1e9).at[:, :, ::7].set(-1e9)

    def both(attention, query, key, value, ids, dout, dlse, bias, slopes, table, sinks):
        def call(query, key, value, bias, slopes, table, sinks):
            mod = lambda score, b, h, q, k: 3 * jnp.tanh(score / 3) - slopes[h] * jnp.abs(q - k) / 9 + table[q - k + 48]
            given = {"score_mod": mod} if bias is None else {"bias": bias}
            return attention(
                query, key, value, segment_ids=ids, sinks=sinks, return_lse=True, implementation="xla", **given,
                **options,
            )  # fmt: skip

        results, vjp = jax.vjp(call, query, key, value, bias, slopes, table, sinks)
        return *results, *vjp((dout, jnp.where(jnp.isneginf(results[1]), 0, dlse)))

    mesh = jax.make_mesh((devices,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    attention = functools.partial(
        ring_attention, axis_name="sequence", layout=layout, strategy=strategy, sends_ahead=ahead
    )
    tokens, rows, one, name = jax.P(None, "sequence"), jax.P(None, None, "sequence"), jax.P(), layout or "zigzag"
    of_ids, of_bias, of_sinks = None if ids is None else tokens, None, None if sinks is None else one
    if bias is not None:
        of_bias = rows if shape[2] > 1 else one
    specs = tokens, tokens, tokens, of_ids, tokens, rows, of_bias, one, one, of_sinks
    out_specs = tokens, rows, tokens, tokens, tokens, of_bias, one, one, of_sinks
    ring = functools.partial(both, attention)
    shared = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=specs, out_specs=out_specs))
    given = query, key, value, ids, dout, dlse, bias, slopes, table, sinks
    axis = lambda spec: 2 if spec == rows else 1
    place = lambda move, x, spec: x if spec in (None, one) else move(x, mesh, "sequence", layout=name, axis=axis(spec))
    got = shared(*(place(shard_sequence, x, spec) for x, spec in zip(given, specs, strict=True)))
    got = [place(unshard_sequence, x, spec) for x, spec in zip(got, out_specs, strict=True)]
    with jax.default_matmul_precision("highest"):
        want = both(flash_attention, *given)
    errors = rings.errors_of(("out", "lse", "dq", "dk", "dv", "dbias", "dslopes", "dtable", "dsinks"), got, want)
    assert ("dbias" in errors) == (shape is not None)
    assert ("dsinks" in errors) == (sinks is not None)
    return errors


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", tiers.groups(CASES, QUICK, 12))
def test_matches_flash_attention(names):
    for name, found in cpu_devices.results_of(__file__, names, devices=4).items():
        for what, error in found.items():
            assert error < 3e-6, (name, what, error)


MESH = jax.make_mesh((1,), ("sequence",), (jax.sharding.AxisType.Auto,))
X = jnp.ones((1, 6, 4, 8))
BAD = {
    "rows": ({"bias": jnp.zeros((1, 4, 5, 6))}, "bias: got shape (1, 4, 5, 6)"),
    "dtype": (
        {"bias": jnp.zeros((6, 6), bool)},
        "bias: got dtype bool, want query's dtype float32; a bool one is a mask",
    ),
    "both": ({"score_mod": lambda s, b, h, q, k: s, "softcap": 2.0}, "softcap: got 2.0 with a score_mod, want None"),
    "function": ({"score_mod": lambda s: s}, "score_mod: raised TypeError when traced"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    options, message = BAD[name]
    call = lambda x: ring_attention(x, x, x, axis_name="sequence", **options)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        jax.shard_map(call, mesh=MESH, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(X)


def test_score_mod_in_a_checked_shard_map():
    """The mod's program was traced for scalars that vary over no axis."""
    slopes = jnp.arange(4.0)
    mod = lambda score, b, h, q, k: jax.nn.silu(score) / 3 - slopes[h] * jnp.maximum(q - k, 0)
    attend = lambda x: flash_attention(x, x, x, score_mod=mod, implementation="xla")
    shared = jax.jit(jax.shard_map(attend, mesh=MESH, in_specs=jax.P("sequence"), out_specs=jax.P("sequence")))
    x = jax.random.normal(jax.random.key(0), X.shape)
    np.testing.assert_allclose(shared(x), attend(x), atol=1e-6)


if __name__ == "__main__":
    print(json.dumps({name: run_case(*CASES[name]) for name in sys.argv[1:]}))
