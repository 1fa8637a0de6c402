"""flash_attention under a score_mod: against the definition in float64, and against equivalent biases."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, flash_attention, masks
from jax_kernels.dispatch import on_device
from jax_kernels.reference import attention_chunks
from jax_kernels.testing import rms_error

pytestmark = pytest.mark.usefixtures("no_interpret")

B, T, S, H, HKV, D = 2, 37, 43, 4, 2, 8
jit = lambda f: jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def arrays(seed=0):
    random = np.random.default_rng(seed)
    shapes = ((B, T, H, D), (B, S, HKV, D), (B, S, HKV, D))
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


@pytest.fixture
def small_chunks(monkeypatch):
    """16 queries at a time, so that the last chunk is padded."""
    monkeypatch.setattr(attention_chunks, "CPU_CHUNK_BYTES", 16 * S * H // HKV * 4)


def alibi(score, b, h, q, k, slopes, **_):
    return score - slopes[h] * jnp.abs(q - k)


def relative(score, b, h, q, k, table, **_):
    return score + table[h, jnp.clip(q - k + 8, 0, 16)]


def both(score, b, h, q, k, slopes, rows, **_):
    """Nonlinear, with every index, and with -inf at some pairs and in whole rows."""
    score = 3 * jnp.tanh(score / 3) * (1 + slopes[h]) + rows[b, q]
    return jnp.where(((q + k) % 5 == 0) | (q == 11), -jnp.inf, score)


def far(score, b, h, q, k):
    """Large, also in the padding of a chunk. Has no derivative at pairs that causality masks."""
    return score * jnp.sqrt((q - k + 4).astype(score.dtype)) + 200.0


def far_in_float64(score, b, h, q, k):
    return score * jnp.sqrt(jnp.maximum(q - k + 4, 0)) + 200.0


MODS = {x.__name__: x for x in (alibi, relative, both, far, far_in_float64)}
CLOSED = {
    "alibi": {"slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
    "relative": {"table": np.random.default_rng(1).standard_normal((H, 17)).astype(np.float32)},
    "both": {
        "slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32),
        "rows": np.random.default_rng(2).standard_normal((B, T)).astype(np.float32),
    },
    "far": {},
    "far_in_float64": {},
}


def definition(mod, keep, q, k, v, closed):
    """(out, lse), with all pairs at once."""
    k, v = (jnp.repeat(x, H // HKV, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") / np.sqrt(D)
    indices = np.ix_(*map(np.arange, scores.shape))
    # Masked pairs must not reach the gradients of the closed-over arrays.
    scores = jnp.where(keep, mod(scores, *indices, **closed), -jnp.inf)
    dead = jnp.isneginf(scores).all(axis=-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(dead, 0, scores), axis=-1) * ~dead
    lse = jnp.where(dead, -jnp.inf, jax.nn.logsumexp(jnp.where(dead, 0, scores), axis=-1, keepdims=True))[..., 0]
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest"), lse


def loss(out, lse):
    """A loss with a generic gradient through both results."""
    return jnp.sum(out * jnp.cos(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)))


def float64(name, keep):
    """(out, lse), (dq, dk, dv, {name of a closed-over array: its gradient})."""

    def run(*given):
        out = definition(MODS[name], keep, *given)
        return loss(*out), out

    with jax.enable_x64(True):
        given = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (*arrays(), CLOSED[name]))
        (_, results), gradients = jit(jax.value_and_grad(run, (0, 1, 2, 3), has_aux=True))(*given)
        return jax.tree.map(np.asarray, (results, gradients))


def ours(name, **arguments):
    def run(q, k, v, closed):
        mod = lambda score, b, h, q, k: MODS[name](score, b, h, q, k, **closed)
        out = flash_attention(q, k, v, score_mod=mod, return_lse=True, **arguments)
        return loss(*out), out

    (_, results), gradients = jit(jax.value_and_grad(run, (0, 1, 2, 3), has_aux=True))(*arrays(), CLOSED[name])
    return results, gradients


def check(got, want, bound=3e-6):
    paths = jax.tree_util.tree_leaves_with_path(want)
    for (path, w), g in zip(paths, jax.tree.leaves(got), strict=True):
        assert rms_error(g, w) < bound, (path, rms_error(g, w))


POSITIONS = np.arange(T)[:, None]
LENGTHS = np.array([S, 9], np.int32)


@pytest.mark.parametrize(
    ("name", "masked"), [("alibi", "nothing"), ("relative", "causal"), ("both", "nothing"), ("both", "mask")]
)
def test_against_float64(name, masked, small_chunks):
    keep = {
        "nothing": np.ones((1, 1, 1, 1), bool),
        "causal": (np.arange(S) <= POSITIONS + 4) & (np.arange(S) < LENGTHS[:, None, None, None]),
        "mask": (np.arange(S) <= POSITIONS) | (np.arange(S) < 5),
    }[masked]
    arguments = {
        "nothing": {},
        "causal": {"is_causal": True, "q_offset": 4, "kv_lengths": LENGTHS},
        "mask": {"mask": masks.causal() | masks.prefix(5)},
    }[masked]
    got, want = ours(name, **arguments), float64(name, keep)
    check(got, want)
    assert not np.asarray(got[0][0])[np.isneginf(want[0][1]).swapaxes(1, 2)].any()


def test_masked_pairs_pass_no_gradient(small_chunks):
    got, want = ours("far", is_causal=True, q_offset=4), float64("far_in_float64", np.arange(S) <= POSITIONS + 4)
    check(got, want, 2e-5)  # the scores, near 200, are rounded


@hypothesis.given(
    slopes=st.lists(st.floats(-1, 1, width=32), min_size=H, max_size=H),
    left=st.integers(0, 50),
    offset=st.integers(-9, 9),
)
@hypothesis.settings(max_examples=5)
def test_alibi_is_a_bias(slopes, left, offset):
    """For any window and offset: q_idx is not shifted by q_offset."""
    slopes = np.array(slopes, np.float32)
    bias = -slopes[:, None, None] * np.abs(POSITIONS - np.arange(S)).astype(np.float32)
    got, want = jit(
        lambda slopes, bias: (
            flash_attention(
                *arrays(),
                score_mod=lambda s, b, h, q, k: alibi(s, b, h, q, k, slopes),
                window=(left, -1),
                q_offset=offset,
                return_lse=True,
            ),
            flash_attention(*arrays(), bias=bias, window=(left, -1), q_offset=offset, return_lse=True),
        )
    )(slopes, bias)
    check(got, want, 2e-6)


def test_with_bias_and_sinks():
    """The bias is added to score_mod's result."""
    bias, sinks = jnp.asarray(np.random.default_rng(3).standard_normal((1, H, T, S)), jnp.float32), jnp.arange(4.0)
    table = jnp.asarray(-np.abs(POSITIONS - np.arange(S)) / 8, jnp.float32)
    double = lambda score, b, h, q, k: 2 * score - jnp.abs(q - k) / 8

    def run(q, bias, **arguments):
        return flash_attention(q, *arrays()[1:], bias=bias, sinks=sinks, return_lse=True, **arguments)

    got = jit(jax.value_and_grad(lambda q, bias: loss(*run(q, bias, score_mod=double)), (0, 1)))(arrays()[0], bias)
    scale = 2 / np.sqrt(D)
    want = jit(jax.value_and_grad(lambda q, bias: loss(*run(q, bias + table, scale=scale)), (0, 1)))(arrays()[0], bias)
    check(got, want)


def test_16_bit_and_a_negative_scale():
    """score_mod gets float32 scores, with the scale and its sign."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays())
    seen = []

    def mod(score, b, h, q_idx, kv_idx):
        seen.append(score.dtype)
        return jnp.maximum(score, 0.1)

    got = flash_attention(q, k, v, score_mod=mod, scale=-0.5)
    assert set(seen) == {jnp.dtype(jnp.float32)}
    assert got.dtype == jnp.bfloat16
    wide = [np.repeat(np.asarray(x, np.float64), H // n, axis=2) for x, n in ((q, H), (k, HKV), (v, HKV))]
    scores = np.maximum(np.einsum("bthd,bshd->bhts", *wide[:2]) * -0.5, 0.1)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert rms_error(got, np.einsum("bhts,bshd->bthd", weights, wide[2])) < 3e-3


def test_closed_over_arrays_of_other_dtypes():
    """An int array has no gradient, a bfloat16 array has a bfloat16 gradient, a known array is a constant."""
    ids = jnp.asarray(np.arange(S) % 3)

    def run(slopes, ids):
        mod = lambda score, b, h, q, k: jnp.where(ids[k] == 1, score, slopes[h].astype(jnp.float32))
        return flash_attention(*arrays(), score_mod=mod).sum()

    gradient, nothing = jit(jax.grad(run, (0, 1), allow_int=True))(jnp.ones(H, jnp.bfloat16), ids)
    assert gradient.dtype == jnp.bfloat16
    assert np.asarray(gradient, np.float32).any()
    assert nothing.dtype == jax.dtypes.float0
    known = jit(jax.grad(lambda slopes: run(slopes, ids)))(jnp.ones(H, jnp.bfloat16))
    np.testing.assert_array_equal(known, gradient)


@pytest.mark.parametrize("mapped", ["query", "both"])
def test_vmap(mapped):
    """b is the batch entry of each mapped call. An array that all calls close over has a gradient in each call."""
    query = jnp.stack([jnp.asarray(arrays(seed)[0]) for seed in range(3)])
    slopes = jnp.stack([jnp.arange(B) * 0.1 + i for i in range(3)])

    def both(query, slopes):
        def run(query, slopes):
            mod = lambda score, b, h, q, k: score + slopes[b] * (q - k)
            return loss(*flash_attention(query, *arrays()[1:], score_mod=mod, return_lse=True))

        return jax.grad(run, (0, 1))(query, slopes)

    axes = (0, None if mapped == "query" else 0)
    pick = lambda x, axis, i: x[0 if axis is None else i]
    given = [x[0] if axis is None else x for x, axis in zip((query, slopes), axes, strict=True)]
    got = jit(jax.vmap(both, axes))(*given)
    one = jit(both)
    each = [one(pick(query, axes[0], i), pick(slopes, axes[1], i)) for i in range(3)]
    check(got, jax.tree.map(lambda *x: jnp.stack(x), *each), 1e-5)


def test_no_array_of_all_pairs(monkeypatch):
    monkeypatch.setattr(attention_chunks, "CPU_CHUNK_BYTES", 64 * 256 * 4)
    query = jnp.ones((1, 256, 1, 16))
    run = lambda q, table: flash_attention(
        q, q, q, score_mod=lambda score, b, h, q, k: score + table[jnp.abs(q - k)]
    ).sum()
    text = jax.jit(jax.grad(run, (0, 1))).lower(query, jnp.ones(256)).as_text()
    assert "64x256x" in text
    assert "256x256x" not in text


def test_unwanted_gradients_are_not_computed():
    """A table without a wanted gradient costs no scatter."""
    table = jnp.arange(float(S + T))

    def run(q, table):
        return flash_attention(q, *arrays()[1:], score_mod=lambda score, b, h, q, k: score + table[q - k + S]).sum()

    text = lambda which: jax.jit(jax.grad(run, which)).lower(arrays()[0], table).as_text()
    assert "scatter" in text(1)
    assert "scatter" not in text(0)


def keyed(score, b, h, q, k, slopes, columns, ids):
    """Look-ups of floats and ints, with one axis, two axes and a constant index."""
    score = score * columns[b, k] + slopes[h] * (q - k) + jnp.where(columns[0, k] > 0.5, slopes[0], 0.0)
    score = score + jnp.cos(score) * h
    return jnp.where(ids[q] == ids[k], score, -jnp.inf)


def far_off_diagonal(score, b, h, q, k, slopes):
    return score * jnp.sqrt((q - k + 4).astype(score.dtype)) * slopes[h]


def capped(score, b, h, q, k, slopes, columns):
    """A softcap, a slope for each head and a value for each key."""
    return 2.0 * jnp.tanh((score + columns[b, k]) / 2.0) - slopes[h] * jnp.abs(q - k)


def over(score, b, h, q, k, rows):
    """Divides by values of queries, which do not exist past the end."""
    return score / rows[b, q]


MODS |= {x.__name__: x for x in (keyed, far_off_diagonal, capped, over)}
CLOSED |= {
    "keyed": {
        "slopes": CLOSED["alibi"]["slopes"],
        "columns": np.random.default_rng(3).random((B, S), np.float32),
        "ids": np.arange(T + S, dtype=np.int32) // 30,
    },
    "far_off_diagonal": {"slopes": CLOSED["alibi"]["slopes"]},
    "over": {"rows": 1 + np.random.default_rng(4).random((B, T), np.float32)},
}


def by(implementation, name, argnums, **arguments):
    """(out, lse), and the gradients of float inputs only."""
    floats, others = {}, {}
    for key, x in CLOSED[name].items():
        (floats if x.dtype == np.float32 else others)[key] = jnp.asarray(x)

    def run(q, k, v, floats):
        mod = lambda score, b, h, q, k: MODS[name](score, b, h, q, k, **floats, **others)
        out = flash_attention(q, k, v, score_mod=mod, return_lse=True, implementation=implementation, **arguments)
        return loss(*out), out

    return jit(jax.value_and_grad(run, argnums, has_aux=True))(*arrays(), floats)


@pytest.mark.parametrize(
    ("name", "argnums", "arguments"),
    [
        ("both", (0, 1, 2, 3), {}),
        ("keyed", (0, 1, 2, 3), {"kv_lengths": LENGTHS}),
        pytest.param("over", (0, 1, 2, 3), {}, marks=pytest.mark.slow),
        ("far_off_diagonal", (0, 1), {"is_causal": True, "q_offset": 4, "sinks": np.arange(4, dtype=np.float32)}),
    ],
    ids=["both", "keyed", "over", "without_a_derivative"],
)
def test_triton_is_xla(name, argnums, arguments, monkeypatch):
    """The kernels run several blocks of queries and of keys. The mod is computed on a tile."""
    want = by("xla", name, argnums, **arguments)
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    got = by("triton", name, argnums, **arguments)
    check(got[0][1], want[0][1])
    check(got[1], want[1], 1e-5)


@pytest.mark.triton
def test_chosen_implementation():
    """Kernels support look-ups by the row, the column or the diagonal of a tile, and arithmetic on a tile."""
    query = jax.ShapeDtypeStruct((B, 64, H, 64), jnp.bfloat16)
    single = jax.ShapeDtypeStruct((B, 64, H, 64), jnp.float32)
    slopes, table = jnp.arange(4.0), jnp.arange(128.0)
    bias = {"bias": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)}
    no = "in a score_mod it takes look-ups by query or by key, not by both or by the score"
    others = "by query, by key or by their difference, not by both otherwise or by the score"
    not_by_both = f"in a score_mod it takes look-ups {others}"
    cannot = "in a score_mod its kernels cannot compute "
    with_bias = "it takes a score_mod without a bias"
    looked_up = lambda score, b, h, q, k: score * slopes[h] + table[q] + table[2 * k + b]
    linear = lambda score, b, h, q, k: score * 2
    # (score_mod, arguments, the implementation that serves it, why mosaic_gpu does not, why triton does not)
    cases = (
        (looked_up, {}, "mosaic_gpu", None, None),
        (lambda score, b, h, q, k: score * jnp.round(2.5 * h) + jnp.sin(q * 0.1), {}, "mosaic_gpu", None, None),
        (lambda score, b, h, q, k: score + table[jnp.abs(q - k)], {}, "mosaic_gpu", None, None),
        (lambda score, b, h, q, k: score + table[q + k], {}, "xla", not_by_both, no),
        (lambda score, b, h, q, k: score + table[score.astype(int)], {}, "xla", not_by_both, no),
        (linear, bias, "xla", with_bias, "it does not take a score_mod with a bias"),
        (linear, {"deterministic": True}, "mosaic_gpu", None, None),
        (linear, {"mask": jax.ShapeDtypeStruct((64, 64), bool)}, "mosaic_gpu", None, None),
        (lambda score, b, h, q, k: jnp.sin(score), {}, "triton", f"{cannot}sin", None),
        (lambda score, b, h, q, k: jax.nn.softplus(jnp.clip(score, -9, 9)) * (q % 3), {}, "mosaic_gpu", None, None),
        (lambda score, b, h, q, k: jax.jit(jnp.round)(score), {}, "xla", f"{cannot}round", f"{cannot}round"),
    )
    with on_device("H200"):
        for mod, arguments, served, *whys in cases:
            plan = explain(flash_attention, query, query, query, score_mod=mod, **arguments)
            assert plan.implementation == served
            if served != "mosaic_gpu":
                mosaic, triton = whys
                reasons = {"mosaic_gpu": mosaic, "cudnn": "it does not take a score_mod"}
                assert dict(plan.passed_over) == reasons | ({"triton": triton} if triton else {})
        plan = explain(flash_attention, single, single, single, score_mod=looked_up)
        assert plan.implementation == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "name"),
    [("triton", "both"), ("triton", "keyed"), *(("mosaic_gpu", name) for name in ("both", "capped", "relative"))],
)
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True, "q_offset": 5}], ids=["full", "causal"])
def test_kernels_on_a_gpu(implementation, name, arguments):
    """Kernels in bfloat16, over many blocks and at odd lengths, against float32 of the same inputs."""
    q_length, kv_length, heads, kv_heads = 777, 781, 8, 2
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    closed = {"slopes": draw(heads) / 100, "columns": draw(B, kv_length), "rows": draw(B, q_length)}
    closed |= {"table": draw(heads, 17)}
    names = {"both": ("slopes", "rows"), "relative": ("table",)}.get(name, ("slopes", "columns"))
    closed = {name: closed[name] for name in names}
    ids = {"ids": jnp.arange(q_length + kv_length) // 100} if name == "keyed" else {}
    shapes = ((B, q_length, heads, 64), (B, kv_length, kv_heads, 64), (B, kv_length, kv_heads, 64))
    qkv = [draw(*shape).astype(jnp.bfloat16) for shape in shapes]

    def gradients(implementation, dtype):
        def run(q, k, v, closed):
            mod = lambda score, b, h, q, k: MODS[name](score, b, h, q, k, **closed, **ids)
            out, lse = flash_attention(
                q, k, v, score_mod=mod, return_lse=True, implementation=implementation, **arguments
            )
            return loss(out.astype(jnp.float32), lse), (out, lse)

        return jax.jit(jax.value_and_grad(run, (0, 1, 2, 3), has_aux=True))(*(x.astype(dtype) for x in qkv), closed)

    got, want = gradients(implementation, jnp.bfloat16), gradients("xla", jnp.float32)
    check((got[0][1], got[1]), (want[0][1], want[1]), 2e-2)
