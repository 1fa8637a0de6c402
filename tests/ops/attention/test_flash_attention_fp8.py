"""flash_attention_fp8 against its definition in float64, its errors and its plans; on a GPU, every implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, flash_attention_fp8
from jax_kernels.dispatch import on_device
from jax_kernels.ops.attention.flash_attention_fp8 import IMPLEMENTATIONS
from jax_kernels.testing import rms_error
from jax_kernels.testing.flash_attention_fp8 import CASES, LONG, Fp8Case, arrays_of, definition, errors, run

pytestmark = pytest.mark.timeout(120)
E4M3 = jnp.float8_e4m3fn
SMALL = Fp8Case("small", q_length=20, kv_length=30, head_dim=32, v_head_dim=24)


def check(case, implementation):
    arrays = arrays_of(case)
    out, lse = run(case, arrays, implementation)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    for name, (error, bound) in errors(case, arrays, (out, lse), implementation).items():
        assert error <= bound, (name, error, bound)
    dead = np.isneginf(lse).swapaxes(1, 2)
    assert not np.asarray(out)[dead].any()


@pytest.mark.parametrize("case", [CASES[name] for name in ("causal", "lengths", "offsets", "odd")])
def test_xla(case, no_interpret):
    check(case, "xla")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [*CASES.values(), *LONG.values()])
def test_on_gpu(case, implementation, no_interpret):
    arrays = arrays_of(case)
    try:
        explain(flash_attention_fp8, arrays["query"], arrays["key"], arrays["value"], implementation=implementation)
    except NotImplementedError as error:
        pytest.skip(str(error))
    check(case, implementation)


@pytest.mark.gpu
def test_on_gpu_the_same_bits(no_interpret):
    arrays = arrays_of(LONG["long"])
    results = [run(LONG["long"], arrays, None) for _ in range(2)]
    for once, twice in zip(*results, strict=True):
        np.testing.assert_array_equal(once, twice)


def test_scales(no_interpret):
    """Scales as numbers and as arrays give the same result, and each scale has its documented effect."""
    arrays = arrays_of(SMALL)
    call = functools.partial(flash_attention_fp8, arrays["query"], arrays["key"], arrays["value"])
    numbers = call(q_scale=0.5, k_scale=0.25, v_scale=2)
    full = lambda x, heads: jnp.full((1, heads), x, jnp.float32)
    same = call(q_scale=full(0.5, 2), k_scale=full(0.25, 1), v_scale=jnp.float32(2))
    np.testing.assert_array_equal(numbers, same)
    np.testing.assert_array_equal(numbers, 2 * call(scale=0.125 / 32**0.5))
    assert rms_error(call(), numbers) > 0.1
    negative = call(q_scale=full(1, 2).at[0, 1].set(-1.0))
    assert np.isfinite(negative[:, :, 0].astype(jnp.float32)).all()
    assert np.isnan(negative[:, :, 1].astype(jnp.float32)).all()


@pytest.mark.parametrize("scale", [0, -0.2])
def test_non_positive_scales(scale, no_interpret):
    check(dataclasses.replace(SMALL, scale=scale), "xla")


def test_keys_past_the_length_have_no_influence(no_interpret):
    case = dataclasses.replace(SMALL, kv_lengths=(15,))
    arrays = arrays_of(case)
    before = run(case, arrays, "xla")[1]
    for first, changes in ((15, False), (14, True)):
        changed = {name: arrays[name].at[:, first:].set(3.0) for name in ("key", "value")}
        assert np.array_equal(before, run(case, arrays | changed, "xla")[1]) is not changes
    assert rms_error(before, definition(case, arrays)[1]) < 2e-6


def test_vmap(no_interpret):
    case = dataclasses.replace(SMALL, kv_lengths=(25,))
    calls = [arrays_of(case, seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *calls)
    stacked["key"], axes = calls[0]["key"], dict.fromkeys(stacked, 0) | {"key": None}
    call = functools.partial(flash_attention_fp8, return_lse=True)
    got = jax.vmap(lambda arrays: call(**arrays), in_axes=(axes,))(stacked)
    for i, arrays in enumerate(calls):
        want = call(**arrays | {"key": calls[0]["key"]})
        for x, y in zip(got, want, strict=True):
            assert rms_error(x[i], y) < 1e-6


@pytest.mark.parametrize("name", ["query", "value", "q_scale", "v_scale"])
def test_has_no_gradient(name, no_interpret):
    arrays = arrays_of(SMALL)
    total = lambda x: flash_attention_fp8(**arrays | {name: x}).astype(jnp.float32).sum()
    with pytest.raises(NotImplementedError, match="flash_attention_fp8: it has no gradient, want flash_attention"):
        jax.grad(total)(arrays[name])


def shapes(head_dim=128, **changed):
    array = lambda heads: jax.ShapeDtypeStruct((2, 512, heads, head_dim), E4M3)
    return {"query": array(8), "key": array(2), "value": array(2)} | changed


def test_plans(no_interpret):
    for device, implementation in (("h200", "mosaic_gpu"), ("a100", "xla"), ("b200", "xla"), ("cpu", "xla")):
        with on_device(device):
            assert explain(flash_attention_fp8, **shapes()).implementation == implementation
    with on_device("h200"):
        plans = [
            explain(flash_attention_fp8, **shapes(head_dim), is_causal=is_causal)
            for head_dim in (40, 128, 256)
            for is_causal in (False, True)
        ]
        assert [plan.source for plan in plans] == ["sm_90's rows, measured on NVIDIA H200"] * 6
        assert [plan.config.forward.dynamic for plan in plans] == [False, True] * 3
        assert "flash_attention_fp8: mosaic_gpu" in str(plans[0])
        with pytest.raises(TypeError, match=r"takes 3 positional arguments \(query, key, value\), got 4"):
            explain(flash_attention_fp8, *shapes().values(), 1.0)


def test_named_implementation_cannot_serve(no_interpret):
    for device, message in (("a100", "it needs Hopper"), ("cpu", "it needs an NVIDIA GPU")):
        with on_device(device), pytest.raises(NotImplementedError, match=message):
            explain(flash_attention_fp8, **shapes(), implementation="mosaic_gpu")


def test_kernel_program_is_equal_under_x64():
    with jax.enable_x64(True), on_device("h200"):
        out = jax.eval_shape(functools.partial(flash_attention_fp8, implementation="mosaic_gpu"), **shapes())
    assert (out.shape, out.dtype) == ((2, 512, 8, 128), jnp.bfloat16)


GOOD = {
    "query": jnp.ones((2, 3, 4, 16), E4M3),
    "key": jnp.ones((2, 32, 2, 16), E4M3),
    "value": jnp.ones((2, 32, 2, 8), E4M3),
}
FLOATS = "want float8_e4m3fn"
BAD = {
    "rank": ({"query": jnp.ones((3, 4, 16), E4M3)}, ValueError, "query: got shape (3, 4, 16), want 4 axes"),
    "dtype": ({"query": jnp.ones((2, 3, 4, 16))}, TypeError, f"query: got dtype float32, {FLOATS}"),
    "e5m2": ({"key": jnp.ones((2, 32, 2, 16), jnp.float8_e5m2)}, TypeError, f"key: got dtype float8_e5m2, {FLOATS}"),
    "numpy": ({"value": np.ones((2, 32, 2, 8))}, TypeError, f"value: got dtype float64, {FLOATS}"),
    "list": ({"value": [1.0]}, TypeError, "value: got builtins.list, want a jax.Array"),
    "head_dim": ({"key": jnp.ones((2, 32, 2, 8), E4M3)}, ValueError, "key: got head_dim 8, want query's head_dim 16"),
    "heads": ({"query": jnp.ones((2, 3, 5, 16), E4M3)}, ValueError, "key: got 2 heads, want a divisor of query's 5"),
    "scale_type": ({"q_scale": "1"}, TypeError, "q_scale: got str, want a positive number, or float32 [batch, heads]"),
    "scale_dtype": ({"k_scale": jnp.ones((2, 2), jnp.bfloat16)}, TypeError, "k_scale: got dtype bfloat16, want a pos"),
    "scale_shape": ({"v_scale": jnp.ones((2, 4))}, ValueError, "v_scale: got shape (2, 4), want a positive number, or"),
    "scale_zero": ({"q_scale": 0.0}, ValueError, "q_scale: got 0.0, want a positive number"),
    "scale_nan": ({"v_scale": float("nan")}, ValueError, "v_scale: got nan, want a positive number"),
    "scale": ({"scale": float("inf")}, ValueError, "scale: got inf, want a finite number"),
    "is_causal": ({"is_causal": 1}, TypeError, "is_causal: got int, want a bool"),
    "offset": ({"q_offset": 0.5}, TypeError, "q_offset: got float, want an int or an int32 array"),
    "lengths": ({"kv_lengths": jnp.array([1])}, ValueError, "kv_lengths: got shape (1,), want [batch] = (2,)"),
    "name": ({"implementation": "triton"}, ValueError, "implementation: got 'triton' for flash_attention_fp8"),
    "name_type": ({"implementation": 1}, TypeError, "implementation: got int, want a name or None"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, no_interpret):
    changed, error, message = BAD[name]
    for call in (flash_attention_fp8, functools.partial(explain, flash_attention_fp8)):
        with pytest.raises(error) as caught:
            call(**GOOD | changed)
        assert message in str(caught.value)
