"""flash_attention against float64, and under JAX's transformations; on a GPU, in every implementation."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS
from jax_kernels.reference import attention as reference
from jax_kernels.reference import attention_chunks
from jax_kernels.testing import (
    ATTENTION_CASES,
    GPU_ATTENTION_CASES,
    AttentionCase,
    attention_float64,
    attention_inputs,
    rms_error,
    run_attention,
    tolerance,
    tolerance_by,
    tolerance_of,
    why_not,
)
from tests.support.cases import ids, tiers
from tests.support.oracles import attention as attention_oracle

xla = functools.partial(flash_attention, implementation="xla")
with_lse = functools.partial(xla, return_lse=True)


@functools.lru_cache(maxsize=4)
def right_answer(case, lse_gradient):
    arrays = attention_inputs(case)
    return attention_float64(case, *(arrays if lse_gradient else arrays[:-1]))


def errors(case, got, want=None):
    want = right_answer(case, "lse" in got) if want is None else want
    return {name: rms_error(x, getattr(want, name)) for name, x in got.items()}


def dtypes(case):
    """The wanted dtype of each result."""
    own = dict.fromkeys(("out", "dq", "dk", "dv"), case.dtype)
    return own | {"lse": "float32", "dbias": case.bias_dtype or case.dtype, "dsinks": "float32"}


def check(case, implementation, bounds, check_dead, want=None):
    got = run_attention(case, attention_inputs(case), implementation)
    assert {name: str(x.dtype) for name, x in got.items()} == {name: dtypes(case)[name] for name in got}
    over = {name: error for name, error in errors(case, got, want).items() if not error <= bounds[name]}
    assert not over, f"errors {over} above {bounds}"
    check_dead(case, got)


def check_on_cpu(case, check_dead):
    arrays = attention_inputs(case)
    want = attention_oracle.attention(case, *arrays)
    check(case, "xla", tolerance_of(case, arrays, want), check_dead, want)


# The cases of `make test`: each argument once, in one dtype.
QUICK = {
    "odd_causal", "one_query_last", "mqa", "head_dim_40", "value_wider", "offset_negative", "offset_per_batch",
    "kv_lengths", "all_dead", "fp16_causal_gqa", "fp32_causal", "window_offsets_lengths", "segments_causal",
    "softcap_fp32", "garbage_causal", "no_sink_no_keys", "sinks", "bias_full", "bias_keys", "bias_masks",
    "bias_whole_causal", "mask_bias", "pattern_cells_causal", "everything", "everything_else", "large",
}  # fmt: skip


@pytest.mark.parametrize("case", tiers.cases(ATTENTION_CASES, QUICK))
def test_against_float64(case, check_dead):
    check_on_cpu(case, check_dead)


def poison():
    """Leaves NaN in the GPU memory that the next arrays will take."""
    for _ in range(2):
        jax.block_until_ready([jnp.full(size, jnp.nan, jnp.float32) for size in (1 << 28, 1 << 24, 1 << 20)])


@functools.lru_cache(maxsize=4)
def gpu_bounds(case):
    """16-bit results may have 1.1 times the error of cuDNN, if it serves the case, or of the plain evaluation."""
    bounds = tolerance(case)
    if case.dtype == "float32" or why_not(case, "cudnn") is not None:
        return bounds
    cudnn = errors(case, run_attention(case, attention_inputs(case), "cudnn"))
    return {name: max(bound, 1.1 * cudnn.get(name, 0)) for name, bound in bounds.items()}


def skip_where_not_served(case, implementation):
    reason = why_not(case, implementation)
    if reason is not None:
        pytest.skip(reason)


def in_one_process(cases):
    """The cases as parameters. With xdist's loadgroup, one process and one oracle serve a case."""
    return [pytest.param(case, id=ids.case_id(case, case), marks=pytest.mark.xdist_group(case.name)) for case in cases]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", in_one_process(ATTENTION_CASES + GPU_ATTENTION_CASES))
@pytest.mark.timeout(300)
def test_on_gpu_against_float64(case, implementation, check_dead):
    skip_where_not_served(case, implementation)
    bounds = tolerance_by(case, "cudnn") if implementation == "cudnn" else gpu_bounds(case)
    poison()
    check(case, implementation, bounds, check_dead)


def check_padded(implementation):
    """Queries without a key by a low bias, with zero cotangents, disturb no gradient."""
    case = AttentionCase("padded", bias="bhts", bias_dtype="float32", q_length=450, kv_length=70)
    query, key, value, dout, dlse = attention_inputs(case)
    bias = np.array(case.arguments["bias"])
    # Scores are so large that they change the rounding of the bias. lse cannot show this, unlike for a bias alone.
    query = query.at[:, 50:].multiply(300)
    bias[:, :, 50:] = np.linspace(-1e9, -1e11, 400)[:, None]
    dout, dlse = dout.at[:, 50:].set(0), dlse.at[:, :, 50:].set(0)

    def gradients(implementation, *arrays):
        run = lambda *primals: flash_attention(
            *primals[:3], bias=primals[3], return_lse=True, implementation=implementation
        )
        return jax.jit(lambda primals, cotangents: jax.vjp(run, *primals)[1](cotangents))(arrays, (dout, dlse))

    got = gradients(implementation, query, key, value, jnp.asarray(bias))
    bias[:, :, 50:] = -np.inf
    want = gradients("xla", query, key, value, jnp.asarray(bias))
    for name, x, y in zip(("dq", "dk", "dv", "dbias"), got, want, strict=True):
        assert rms_error(x, y) < 4e-3, name


def test_queries_masked_by_a_low_bias(monkeypatch):
    check_padded("xla")
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    check_padded("triton")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_on_gpu_queries_masked_by_a_low_bias(implementation):
    check_padded(implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["long_128_causal", "long_gqa_64", "long_fp32", "long_cells_causal"])
def test_on_gpu_the_same_bits(name, implementation, deterministic):
    """The forward always gives the same bits, the backward with deterministic=True."""
    case = next(case for case in GPU_ATTENTION_CASES if case.name == name)
    skip_where_not_served(case, implementation)
    if deterministic and implementation == "cudnn":
        with pytest.raises(NotImplementedError, match="deterministic"):
            run_attention(case, attention_inputs(case), implementation, deterministic=True)
        return
    run = jax.jit(lambda *arrays: run_attention(case, arrays, implementation, deterministic=deterministic))
    arrays = attention_inputs(case)
    once, twice = run(*arrays), run(*arrays)
    for result in once if deterministic else {"out", "lse"} & set(once):
        np.testing.assert_array_equal(once[result], twice[result], err_msg=result)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["long_128_causal", "long_gqa_64", "long_bias_keys", "long_bias_odd", "long_bias_256", "long_cells_causal"]
)
def test_on_gpu_the_same_bits_without_lse(name):
    """A kernel that writes no lse gives the same out, and out has a gradient."""
    case = next(case for case in GPU_ATTENTION_CASES if case.name == name)
    query, key, value, dout, dlse = attention_inputs(case)
    want = run_attention(case, (query, key, value, dout, jnp.zeros_like(dlse)), "mosaic_gpu")
    arguments = case.arguments | {"key": key, "value": value, "implementation": "mosaic_gpu"}
    forward = jax.jit(lambda query: flash_attention(query, **arguments))
    poison()
    out, vjp = jax.vjp(forward, query)
    for found in (out, forward(query)):
        np.testing.assert_array_equal(found, want["out"])
    assert rms_error(vjp(dout)[0], want["dq"]) <= tolerance(case)["dq"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["long_bias", "long_bias_full", "long_bias_keys", "long_bias_odd", "long_bias_256", "long_cells_bias"]
)
def test_on_gpu_deterministic_backward_with_bias(name):
    case = next(case for case in GPU_ATTENTION_CASES if case.name == name)
    arrays = attention_inputs(case)
    run = lambda deterministic: run_attention(case, arrays, "mosaic_gpu", deterministic=deterministic)
    got, twice, want = run(True), run(True), run(False)
    for result, bound in tolerance(case).items():
        np.testing.assert_array_equal(got[result], twice[result], err_msg=result)
        assert rms_error(got[result], want[result]) <= bound, result


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"mask": np.tri(37, 52, 9, bool)[None, None]},
        {"kv_lengths": np.array([52, 3], np.int32)},
        {"window": (7, 3), "bias": np.random.default_rng(5).standard_normal((1, 4, 37, 52), np.float32)},
    ],
    ids=["full", "causal", "mask", "kv_lengths", "window_bias"],
)
def test_oracle_is_attention(arguments, kv_heads):
    """All other tests rest on the float64 reference. This compares it with JAX's own attention."""
    case = AttentionCase(
        "", q_length=37, kv_length=52, heads=4, kv_heads=kv_heads, head_dim=16, v_head_dim=16, dtype="float32"
    )
    query, key, value, *_ = attention_inputs(case)
    inputs = {name: arguments[name] for name in ("mask", "kv_lengths", "bias") if name in arguments}
    options = {name: arguments[name] for name in ("is_causal", "window") if name in arguments}
    got, _ = reference.oracle(AttentionInputs(query, key, value, **inputs), AttentionOptions(scale=0.25, **options))
    lengths = arguments.get("kv_lengths")
    want = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=arguments.get("bias"),
        mask=arguments.get("mask"),
        local_window_size=arguments.get("window"),
        is_causal=arguments.get("is_causal", False),
        key_value_seq_lengths=lengths,
        query_seq_lengths=None if lengths is None else np.full_like(lengths, 37),
    )
    np.testing.assert_allclose(got, want, atol=2e-6)


# Heads in groups, an offset, lengths, rows without keys: in float32, which shows small errors.
SMALL, SMALL_ELSE = (
    next(case for case in ATTENTION_CASES if case.name == name) for name in ("everything", "everything_else")
)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 16 or 32 queries, one batch entry and one key head in the "xla" implementation."""
    monkeypatch.setattr(attention_chunks, "CPU_CHUNK_BYTES", 32 * 70 * 4)
    jax.clear_caches()
    yield
    jax.clear_caches()


IN_CHUNKS = {
    "everything": SMALL,
    "everything_else": SMALL_ELSE,
    "bias_keys": dataclasses.replace(SMALL_ELSE, name="bias_keys", bias="bs"),
    # A chunk sums dk and dv in float32, in every input dtype.
    "bf16": AttentionCase("chunks_bf16", q_length=300, kv_length=70, is_causal=True, kv_heads=1),
}


@pytest.mark.parametrize("name", tiers.cases(IN_CHUNKS, {"everything", "bf16"}))
def test_chunks(name, small_chunks, check_dead):
    check_on_cpu(IN_CHUNKS[name], check_dead)


def results_of(attend):
    """out, lse, dq, dk, dv of attend(query, key, value) on SMALL's arrays."""
    *qkv, dout, dlse = attention_inputs(SMALL)
    results, vjp = jax.vjp(jax.jit(attend), *qkv)
    return *results, *vjp((dout, dlse))


MASK = np.random.default_rng(1).random((2, 4, 45, 38)) < 0.3
MASK[1, 2, 7:9] = False  # queries without a key


DENSE = {
    "full": MASK,
    "one_batch": MASK[:1],
    "one_head": MASK[:, :1],
    "one_query": MASK[:, :, :1],
    "3d": MASK[0],
    "2d": MASK[0, 0],
    "row": MASK[0, 0, :1],
    "float32": MASK.astype(np.float32),
}


@pytest.mark.parametrize("name", tiers.cases(DENSE, {"full", "one_query", "3d", "float32"}))
def test_dense_mask(name, small_chunks):
    mask = DENSE[name]
    arguments = {"kv_lengths": np.asarray(SMALL.kv_lengths, np.int32), "is_causal": True, "q_offset": 2}
    got = results_of(functools.partial(with_lse, mask=mask, **arguments))
    case = dataclasses.replace(SMALL, q_offset=2, window=None, softcap=None, segments=None, sinks=False, bias=None)
    want = attention_oracle.attention(case, *attention_inputs(SMALL), keep=attention_oracle.live(case) & (mask != 0))
    for g, w in zip(got, want, strict=False):
        assert rms_error(g, w) < 2e-6
    if mask is MASK:
        assert np.isneginf(got[1][1, 2, 7:9]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 4, 64, 96), (1, 1, 64, 96), (2, 1, 1, 96)])
def test_on_gpu_dense_mask_by_cudnn(shape):
    case = AttentionCase("", q_length=64, kv_length=96, heads=4)
    query, key, value, dout, _ = attention_inputs(case)
    mask = np.random.default_rng(1).random(shape) < 0.3
    mask[0, 0, 0] = False
    results = []
    for implementation in ("cudnn", "xla"):
        f = jax.jit(functools.partial(flash_attention, mask=mask, is_causal=True, implementation=implementation))
        out, vjp = jax.vjp(f, query, key, value)
        results.append((out, *vjp(dout)))
    for got, want in zip(*results, strict=True):
        assert rms_error(got, want) < 6e-3  # two results in bfloat16
    dead = ~(mask & np.tri(64, 96, dtype=bool)).any(axis=-1).swapaxes(1, 2)
    assert not np.asarray(results[0][0])[np.broadcast_to(dead, (2, 64, 4))].any()


@pytest.mark.parametrize("scale", tiers.cases([0.3, -0.7, 0, np.float32(2)], {"-0.7", "0"}, "scale"))
def test_scale(scale):
    got = results_of(functools.partial(with_lse, scale=scale))
    want = results_of(lambda *qkv: reference.oracle(AttentionInputs(*qkv), AttentionOptions(scale=float(scale))))
    for g, w in zip(got, want, strict=True):
        assert rms_error(g, w) < 2e-6


def test_masked_keys_have_no_influence():
    """Other values in ignored keys leave every bit of the output unchanged."""
    query, key, value, *_ = attention_inputs(SMALL)
    f = jax.jit(functools.partial(with_lse, kv_lengths=np.array([30, 38]), is_causal=True))
    before = f(query, key, value)
    after = f(query, *(x.at[0, 30:].set(1e4) for x in (key, value)))
    causal = f(query, *(x.at[:, 20:].set(-1e4) for x in (key, value)))
    for x, y, z in zip(before, after, causal, strict=True):
        np.testing.assert_array_equal(x, y)
        rows = (slice(None), slice(None, 20)) if x.ndim == 4 else (..., slice(None, 20))
        np.testing.assert_array_equal(x[rows], z[rows])


def test_traced_offset_and_lengths_match_static():
    query, key, value, *_ = attention_inputs(SMALL)
    traced = jax.jit(
        lambda offset, lengths: with_lse(query, key, value, is_causal=True, q_offset=offset, kv_lengths=lengths)
    )
    for offset, lengths in ((3, (1, 38)), (-2, (0, 9)), (np.array([-2, 4], np.int32), (38, 100))):
        want = with_lse(query, key, value, is_causal=True, q_offset=offset, kv_lengths=np.asarray(lengths))
        for g, w in zip(traced(offset, np.asarray(lengths, np.int32)), want, strict=True):
            assert rms_error(g, w) < 1e-6


@st.composite
def any_case(draw):
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    q_length, kv_length = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    offset = st.integers(-45, 45)
    return AttentionCase(
        "any",
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 24)),
        v_head_dim=draw(st.integers(1, 24)),
        dtype="float32",
        is_causal=draw(st.booleans()),
        q_offset=draw(st.one_of(offset, st.tuples(*[offset] * batch))),
        kv_lengths=draw(st.none() | st.tuples(*[st.integers(0, kv_length + 3)] * batch)),
        window=draw(st.none() | st.integers(0, 30) | st.tuples(st.integers(-1, 30), st.integers(-1, 30))),
        softcap=draw(st.none() | st.floats(0.5, 20)),
        sinks=draw(st.booleans()),
        segments=draw(st.sampled_from([None, "packed", "mixed"])),
        bias=draw(st.none() | st.sampled_from(["", "h", "t", "bs", "hts", "bhts"])),
        bias_masks=draw(st.booleans()),
    )


@pytest.mark.parametrize(
    ("implementation", "examples"),
    [("xla", 6), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("xla", 12), ("triton", 5)))],
)
def test_any_case(implementation, examples, check_dead, monkeypatch):
    """Any combination of arguments and shapes. Without a GPU, the kernels are interpreted."""
    if implementation != "xla":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")

    @hypothesis.given(any_case(), st.integers(0, 1000))
    @hypothesis.settings(max_examples=examples)
    def any_of_them(case, seed):
        check_any(case, attention_inputs(case, seed), implementation, check_dead)

    any_of_them()


def check_any(case, arrays, implementation, check_dead):
    got = run_attention(case, arrays, implementation)
    want = attention_oracle.attention(case, *arrays)
    for name, x in got.items():
        np.testing.assert_allclose(x, getattr(want, name), rtol=1e-5, atol=1e-5, err_msg=name)
    check_dead(case, got)


@pytest.mark.parametrize("case", [SMALL, SMALL_ELSE])
def test_oracle_gradient_is_right(case):
    arrays = attention_inputs(case)
    got, want = (f(case, *arrays)._asdict() for f in (attention_float64, attention_oracle.attention))
    assert list(got) == list(want)
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], rtol=1e-12, atol=1e-13, err_msg=name)


def test_rms_error():
    inf, nan = np.inf, np.nan
    assert rms_error([3.0, 4.0], [3.0, 4.0]) == 0
    assert rms_error([3.0, 4.5], [3.0, 4.0]) == pytest.approx(0.1)
    assert rms_error([-inf, 4.5, 3.0], [-inf, 4.0, 3.0]) == pytest.approx(0.1)
    assert rms_error([3.0, 4.0], [0.0, 0.0]) == pytest.approx(12.5**0.5)
    for got, want in (([nan, 1.0], [1.0, 1.0]), ([-inf, 1.0], [1.0, 1.0]), ([1.0, 1.0], [-inf, 1.0]), ([inf], [-inf])):
        assert rms_error(got, want) == inf
    with pytest.raises(ValueError, match="shape"):
        rms_error([1.0], [1.0, 1.0])
