"""dilated_attention against its definition in NumPy; causality, coverage, and its errors."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import dilated_attention, explain, flash_attention
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.ops.attention import vjp as attention_vjp
from jax_kernels.reference import dilated_attention as reference
from jax_kernels.testing import rms_error
from tests.support.oracles import dilated as dilated_oracle
from tests.support.oracles.dilated import BFLOAT16_BOUNDS, NAMES

# Compiling dominates a small case. Unoptimised code compiles in half the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
xla = functools.partial(dilated_attention, implementation="xla")


def arrays(length, heads, kv_heads, *, batch=2, head_dim=8, v_head_dim=6, dtype=np.float32, seed=0):
    """query, key, value, dout, dlse."""
    random = np.random.default_rng(seed)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    qkv = (normal(batch, length, h, d) for h, d in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim)))
    dout, dlse = normal(batch, length, heads, v_head_dim), normal(batch, heads, length)
    return *(jnp.asarray(x, dtype) for x in (*qkv, dout)), jnp.asarray(dlse)


def ids_of(length, batch=2):
    return np.random.default_rng(1).integers(-1, 3, (batch, length)).astype(np.int32)


def results_of(inputs, **arguments):
    @jit
    def run(query, key, value, dout, dlse):
        attend = functools.partial(dilated_attention, return_lse=True, **{"implementation": "xla"} | arguments)
        results, vjp = jax.vjp(attend, query, key, value)
        return *results, *vjp((dout, dlse))

    return run(*inputs)


def check(inputs, bound=1e-6, **arguments):
    got = results_of(inputs, **arguments)
    arguments.pop("implementation", None)
    want = dilated_oracle.dilated_attention(*inputs, **arguments)
    errors = {name: rms_error(g, w) for name, g, w in zip(NAMES, got, want, strict=True)}
    assert max(errors.values()) < bound, errors
    dead = np.isneginf(want[1]).swapaxes(1, 2)
    assert not np.asarray(got[0])[dead].any()
    assert not np.asarray(got[2])[dead].any()


PATTERN = {"segment_lengths": (10, 100), "dilation_rates": (3, 4)}
# Branches that one attention can serve: every segment has 4 tokens.
ALIKE = {"segment_lengths": (4, 8, 16), "dilation_rates": (1, 2, 4)}
MODES = {
    "longnet": {},
    "one_call": ALIKE,
    "stopped": {"stop_gradient_weights": True},
    "all_mean": {"combine": "mean"},
    "groups_mean": {"heads": "groups", "combine": "mean"},
    "groups_lse": {"heads": "groups"},
    "partition": {"layout": "partition", "segment_lengths": (6, 6, 9), "dilation_rates": (2, 2, 4)},
    "one_branch": {"segment_lengths": (16,), "dilation_rates": (3,), "stop_gradient_weights": True},
}
# A selection of the product of the parameters: (mode, is_causal, order, with segment ids, heads, key heads).
CASES = [
    ("longnet", False, None, False, 6, 6),
    ("longnet", True, "hilbert", False, 8, 2),
    ("longnet", True, None, True, 5, 5),
    ("one_call", True, None, False, 4, 2),
    ("one_call", False, "hilbert", True, 4, 4),
    ("stopped", False, "hilbert", False, 4, 4),
    ("stopped", True, None, True, 6, 3),
    ("all_mean", True, None, False, 5, 1),
    ("all_mean", False, "hilbert", False, 4, 4),
    ("groups_mean", False, None, False, 7, 7),
    ("groups_mean", True, "hilbert", True, 8, 2),
    ("groups_lse", True, None, False, 7, 1),
    ("partition", False, None, False, 2, 2),
    ("partition", True, "hilbert", False, 4, 2),
    ("partition", False, "hilbert", True, 2, 1),
    ("one_branch", True, None, False, 4, 4),
]


SLOW = [pytest.param(*case, marks=() if i % 2 else pytest.mark.slow) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("mode", "is_causal", "order", "packed", "heads", "kv_heads"), SLOW)
def test_matches_its_definition(mode, is_causal, order, packed, heads, kv_heads):
    arguments = PATTERN | MODES[mode] | {"is_causal": is_causal, "order": order}
    length = 16 if mode == "one_call" else 24
    check(arrays(length, heads, kv_heads), segment_ids=ids_of(length) if packed else None, **arguments)


@pytest.mark.parametrize("mode", MODES)
def test_reference_matches_the_definition(mode):
    arguments = PATTERN | MODES[mode] | {"is_causal": mode != "partition", "order": "hilbert"}
    inputs, ids = arrays(23, 5, 5), ids_of(23)
    want = dilated_oracle.dilated_attention(*inputs, segment_ids=ids, **arguments)

    @jit
    def run(query, key, value, dout, dlse):
        forward = functools.partial(reference.dilated_attention, segment_ids=ids, **arguments)
        results, vjp = jax.vjp(forward, query, key, value)
        return *results, *vjp((dout, dlse))

    with jax.enable_x64(True):
        got = [np.asarray(x) for x in run(*(np.asarray(x, np.float64) for x in inputs))]
    for name, g, w in zip(NAMES, got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-12, atol=1e-13, err_msg=name)


@st.composite
def any_call(draw):
    branches = draw(st.integers(1, 3))
    lengths = draw(st.tuples(*[st.integers(1, 30)] * branches))
    layout = draw(st.sampled_from(["overlap", "overlap", "partition"]))
    is_free = layout == "overlap"
    combine = draw(st.sampled_from(["lse", "mean"])) if is_free else "lse"
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = "groups" if is_free and kv_heads * group >= branches and draw(st.booleans()) else "all"
    pattern = {
        "segment_lengths": lengths,
        "dilation_rates": tuple(draw(st.integers(1, length)) for length in lengths),
        "is_causal": draw(st.booleans()),
        "heads": heads,
        "combine": combine,
        "layout": layout,
        "order": draw(st.sampled_from([None, "hilbert"])),
        "stop_gradient_weights": is_free and combine == "lse" and draw(st.booleans()),
    }
    length = draw(st.integers(1, 25))
    pattern["segment_ids"] = ids_of(length) if draw(st.booleans()) else None
    return length, kv_heads * group, kv_heads, pattern


@hypothesis.given(any_call())
@hypothesis.settings(max_examples=4)
def test_any_call(call):
    length, heads, kv_heads, pattern = call
    check(arrays(length, heads, kv_heads), **pattern)


@pytest.mark.slow
@hypothesis.given(any_call())
@hypothesis.settings(max_examples=10)
def test_random_calls_are_causal(call):
    """Like test_is_causal, for any segments, rates, heads and ids."""
    length, heads, kv_heads, pattern = call
    pattern |= {"is_causal": True}
    if pattern["segment_ids"] is not None:
        pattern["segment_ids"] = np.broadcast_to(pattern["segment_ids"][:1], (length + 1, length))
    assert not np.tril(differences(length, heads, kv_heads, **pattern), -1).any()


def differences(length, num_heads, kv_heads, **arguments):
    """Bool [2, T, T]: whether out and lse of a token (the last axis) depend on another token (the axis before it)."""
    changed = np.eye(length + 1, length, dtype=bool)[:, :, None, None]
    inputs = (jnp.where(changed, 10 * x[:1] + 1, x[:1]) for x in arrays(length, num_heads, kv_heads)[:3])
    out, lse = (np.asarray(x) for x in jit(functools.partial(xla, return_lse=True, **arguments))(*inputs))
    return np.stack([(out != out[-1:]).any(axis=(2, 3))[:-1], (lse != lse[-1:]).any(axis=1)[:-1]])


NUMBERS = (8, "88", None, {8, 16}, (), np.array(8), np.array([8.0]), [[8]], iter([8]))
CHOICES = ("", "ALL", 0, True, ["hilbert"], np.array(["all", "groups"]))
BROKEN = {
    "segment_lengths": NUMBERS,
    "dilation_rates": NUMBERS,
    **dict.fromkeys(("heads", "combine", "layout"), (*CHOICES, None)),
    "order": CHOICES,
    "stop_gradient_weights": (None, 0, 1.0, "no", np.array([True, False])),
}


@hypothesis.given(any_call(), st.sampled_from([*BROKEN]), st.data())
@hypothesis.settings(max_examples=150)
def test_bad_pattern_is_named(call, name, data):
    """The error names the argument, or its item, whatever the other arguments."""
    length, heads, kv_heads, pattern = call
    bad = data.draw(st.sampled_from(BROKEN[name]))
    if name in ("segment_lengths", "dilation_rates") and data.draw(st.booleans()):
        bad = list(pattern[name])
        wrong = (0, -1, 8.0, True, "8", None, np.nan, *([31] if name == "dilation_rates" else []))
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.sampled_from(wrong))
    with pytest.raises((TypeError, ValueError), match=rf"^{name}(\[\d\])?: got "):
        dilated_attention(*arrays(length, heads, kv_heads)[:3], **pattern | {name: bad})


def weights_of(length, heads, kv_heads, **arguments):
    """[B, H, T, T]: the weight of a token's value (the last axis) in the output of another token."""
    query, key, *_ = arrays(length, heads, kv_heads)
    value = jnp.broadcast_to(jnp.eye(length)[:, None], (2, length, kv_heads, length))
    return np.asarray(jit(functools.partial(xla, **arguments))(query, key, value)).swapaxes(1, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [None, "hilbert"])
def test_is_causal(mode, order):
    """Batch entry j changes token j: neither out nor lse before j changes."""
    arguments = PATTERN | MODES[mode] | {"order": order, "is_causal": True}
    for differs in differences(21, 4, 4, **arguments):
        assert not np.tril(differs, -1).any()
        assert differs.diagonal().mean() > 0.5


@pytest.mark.parametrize("order", [None, "hilbert"])
def test_partition_covers_every_token(order):
    """Also past the sum of the segments, and if the sequence ends within a segment."""
    for lengths, rates in (((10, 6), (4, 3)), ((8, 30), (4, 5))):
        pattern = {"segment_lengths": lengths, "dilation_rates": rates, "layout": "partition", "order": order}
        weights = weights_of(23, 2, 1, **pattern)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
        assert (weights[..., np.arange(23), np.arange(23)] > 0).all()
        np.testing.assert_array_equal(
            weights > 0, np.broadcast_to(dilated_oracle.sees(23, 2, **pattern)[0], weights.shape)
        )


def test_hilbert_order_at_rate_1_changes_nothing():
    pattern = {"segment_lengths": (8, 100), "dilation_rates": (1, 1)}
    plain, ordered = (weights_of(23, 2, 2, order=order, **pattern) for order in (None, "hilbert"))
    np.testing.assert_array_equal(plain, ordered)


def test_hilbert_order_changes_the_seen_tokens():
    pattern = {"segment_lengths": (16,), "dilation_rates": (4,)}
    plain, ordered = (weights_of(16, 4, 4, order=order, **pattern) > 0 for order in (None, "hilbert"))
    assert (plain != ordered).any()
    np.testing.assert_array_equal(plain.sum(axis=-1).sum(axis=-1), ordered.sum(axis=-1).sum(axis=-1))


def test_rate_1_over_the_sequence_is_attention():
    query, key, value, *_ = arrays(19, 4, 2)
    got = xla(query, key, value, segment_lengths=(50,), dilation_rates=(1,), is_causal=True)
    want = flash_attention(query, key, value, is_causal=True, implementation="xla")
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_negative_scale():
    check(arrays(16, 4, 4), scale=-0.7, is_causal=True, segment_lengths=(8,), dilation_rates=(2,))


def test_vmap():
    inputs = [jnp.stack(x) for x in zip(arrays(16, 2, 2), arrays(16, 2, 2, seed=1), strict=True)]
    pattern = {"segment_lengths": (8,), "dilation_rates": (3,)}
    got = jax.vmap(lambda *inputs: results_of(inputs, **pattern))(*inputs)
    for index in range(2):
        want = dilated_oracle.dilated_attention(*(x[index] for x in inputs), **pattern)
        for g, w in zip(got, want, strict=True):
            assert rms_error(g[index], w) < 1e-6


def test_shard_map():
    """All devices have the same keys, and query has one more mesh axis: the gradient of the keys is summed."""
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    query, key, value, dout, _ = arrays(8, 2, 2)
    P = jax.sharding.PartitionSpec

    @jit
    def run(query, key, value):
        attend = functools.partial(xla, is_causal=False, segment_lengths=(3,), dilation_rates=(2,))
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
        out, vjp = jax.vjp(mapped, query, key, value)
        return out, *vjp(dout)

    pattern = {"segment_lengths": (3,), "dilation_rates": (2,)}
    got = run(query, key, value)
    out, _, *want = dilated_oracle.dilated_attention(query, key, value, dout, np.zeros((2, 2, 8)), **pattern)
    for g, w in zip(got, (out, *want), strict=True):
        assert rms_error(g, w) < 1e-6


def test_backward_residuals():
    """It keeps query, key, value, out and lse, and nothing of a branch."""
    for mode in ("longnet", "stopped", "all_mean"):
        inputs = arrays(20, 4, 2)[:3]
        attend = functools.partial(xla, is_causal=True, **PATTERN | MODES[mode])
        pullback = jax.eval_shape(lambda *qkv, attend=attend: jax.vjp(attend, *qkv)[1], *inputs)
        kept = sorted(x.shape for x in jax.tree.leaves(pullback))
        assert kept == sorted([*(x.shape for x in inputs), (2, 20, 4, 6), (2, 4, 20)])


def test_equal_branches_are_one_attention(monkeypatch):
    shapes = []
    forward = attention_vjp.attention_forward
    record = lambda call, inputs: (shapes.append((inputs.query.shape, inputs.key.shape)), forward(call, inputs))[1]
    monkeypatch.setattr(attention_vjp, "attention_forward", record)
    query, key, value, *_ = arrays(64, 8, 4, batch=3)
    attend = functools.partial(xla, is_causal=True)
    jax.eval_shape(functools.partial(attend, **ALIKE), query, key, value)
    assert shapes == [((3 * (16 + 8 + 4), 4, 8, 8), (3 * (16 + 8 + 4), 4, 4, 8))]
    shapes.clear()
    # Ragged classes of heads with no class in common are separate entries, also in one call: 8 rows instead of 3.
    jax.eval_shape(functools.partial(xla, segment_lengths=(10,), dilation_rates=(4,)), query, key, value)
    assert shapes == [((3 * 6 * 4, 8, 2, 8), (3 * 6 * 4, 8, 1, 8)), ((3 * 4 // 4, 1, 8, 8), (3 * 4 // 4, 1, 4, 8))]


def test_16_bit_merges_in_float32():
    inputs = arrays(64, 4, 4, dtype=jnp.bfloat16)
    pattern = {"segment_lengths": (16, 32, 64), "dilation_rates": (1, 2, 4), "is_causal": True}
    want = dilated_oracle.dilated_attention(*inputs, **pattern)
    got = results_of(inputs, **pattern)
    assert [str(x.dtype) for x in got] == ["bfloat16", "float32", *["bfloat16"] * 3]
    # Rounding out to bfloat16 once costs 1.7e-3 root mean square. A gradient is a sum of three rounded terms.
    for name, g, w, bound in zip(NAMES, got, want, (1.8e-3, 2e-6, 4e-3, 4e-3, 4e-3), strict=True):
        assert rms_error(g, w) < bound, name


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "others", [pytest.param({}, marks=pytest.mark.slow), {"order": "hilbert"}, {"layout": "partition"}], ids=str
)
def test_kernels_interpreted(others, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    pattern = {"segment_lengths": (16,), "dilation_rates": (3,)} | others
    check(arrays(16, 4, 2), bound=2e-6, is_causal=True, implementation="triton", **pattern)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton", "xla"])
@pytest.mark.parametrize(("mode", "is_causal", "order", "packed", "heads", "kv_heads"), CASES)
def test_on_gpu(mode, is_causal, order, packed, heads, kv_heads, implementation):
    lengths, rates = (MODES[mode].get(name, PATTERN[name]) for name in ("segment_lengths", "dilation_rates"))
    arguments = PATTERN | MODES[mode] | {"is_causal": is_causal, "order": order, "implementation": implementation}
    arguments |= {"segment_lengths": [25 * x for x in lengths], "dilation_rates": rates}
    inputs = arrays(605, heads, kv_heads, head_dim=64, v_head_dim=64, dtype=jnp.bfloat16)
    ids = ids_of(605) if packed else None
    try:
        explain(dilated_attention, *inputs[:3], segment_ids=ids, **arguments)
    except NotImplementedError as error:
        pytest.skip(str(error))
    got = results_of(inputs, segment_ids=ids, **arguments)
    arguments.pop("implementation")
    want = dilated_oracle.dilated_attention(*inputs, segment_ids=ids, **arguments)
    for name, g, w, bound in zip(NAMES, got, want, BFLOAT16_BOUNDS, strict=True):
        assert rms_error(g, w) < bound, name


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bandwidth", [1, 10**13], ids=["apart", "joined"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mode", ["longnet", "stopped", "all_mean", "groups_mean"])
def test_views_on_gpu(mode, head_dim, bandwidth):
    """Segments that cover the sequence, which Hopper reads in place, and one whose rate does not divide it.

    At a low bandwidth Hopper reads in place; otherwise these segments are so short that it gathers them.
    """
    pattern = {"segment_lengths": (128, 256, 512, 512), "dilation_rates": (1, 2, 4, 3), "is_causal": mode != "all_mean"}
    arguments = MODES[mode] | pattern
    inputs = arrays(512, 8, 2, head_dim=head_dim, v_head_dim=head_dim, dtype=jnp.bfloat16)
    with on_device(dataclasses.replace(device_info(), memory_bandwidth=bandwidth)):
        try:
            explain(dilated_attention, *inputs[:3], implementation="mosaic_gpu", **arguments)
        except NotImplementedError as error:
            pytest.skip(str(error))
        got = results_of(inputs, implementation="mosaic_gpu", **arguments)
    want = dilated_oracle.dilated_attention(*inputs, **arguments)
    for name, g, w, bound in zip(NAMES, got, want, BFLOAT16_BOUNDS, strict=True):
        assert rms_error(g, w) < bound, name
