"""flash_attention's score_mods: wrong functions, arrays on Explicit axes, rows without a key, and eager calls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention
from tests.support.cases import score_mods as score_mod_cases

pytestmark = pytest.mark.usefixtures("no_interpret")

H = 4
jit = lambda f: jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def arrays():
    random = np.random.default_rng(0)
    shapes = ((2, 37, H, 8), (2, 43, 2, 8), (2, 43, 2, 8))
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def out_of(result):
    return lambda score, b, h, q, k: result(score)


WANT = "want an elementwise function score_mod(score, b, h, q_idx, kv_idx) in jnp code: float32 scalar to float32"
BAD = {
    "type": (3, TypeError, f"score_mod: got int, {WANT}"),
    "arguments": (lambda score: score, TypeError, f"score_mod: raised TypeError when traced, {WANT}"),
    "control_flow": (
        lambda score, b, h, q, k: score if q > k else 0.0,
        TypeError,
        "score_mod: raised TracerBoolConversionError when traced, want",
    ),
    "numpy": (
        lambda score, b, h, q, k: score + np.ones(4, np.float32)[h],
        TypeError,
        "to float32 scalar (a traced index cannot index a NumPy array: pass the array through jnp.asarray)",
    ),
    "shape": (out_of(lambda s: s * jnp.ones(3)), ValueError, "score_mod: got shape (3,) from it for scalars, want"),
    "int": (out_of(lambda s: jnp.int32(1)), TypeError, "score_mod: got dtype int32 from it, want"),
    "bool": (out_of(lambda s: s > 0), TypeError, "score_mod: got dtype bool from it, want"),
    "half": (out_of(lambda s: s.astype(jnp.bfloat16)), TypeError, "score_mod: got dtype bfloat16 from it, want"),
    "tuple": (out_of(lambda s: (s, s)), TypeError, "score_mod: got a tuple from it, want"),
    "none": (out_of(lambda s: None), TypeError, "score_mod: got a NoneType from it, want"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    mod, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        flash_attention(*arrays(), score_mod=mod)


def test_arrays_on_explicit_axes():
    """A mod that closes over such arrays raises. As arguments of auto_axes they have gradients."""
    mesh = jax.make_mesh((1,), ("data",))
    *qkv, slopes = (jax.device_put(x, jax.NamedSharding(mesh, jax.P())) for x in (*arrays(), np.ones(H, np.float32)))

    def attend(query, key, value, slopes):
        mod = lambda score, b, h, q, k: score - slopes[h] * jnp.abs(q - k)
        return flash_attention(query, key, value, score_mod=mod)

    message = "score_mod: got a function that closes over an array on Explicit axes of a mesh, want arrays without such"
    for call in (attend, jax.jit(attend)):
        with pytest.raises(TypeError, match=message):
            call(*qkv, slopes)
    with jax.set_mesh(mesh):
        auto = jax.sharding.auto_axes(attend, out_sharding=jax.P())
        got = jit(jax.grad(lambda *a: jnp.sin(auto(*a)).sum(), 3))(*qkv, slopes)
    want = jit(jax.grad(lambda *a: jnp.sin(attend(*a)).sum(), 3))(*arrays(), np.ones(H, np.float32))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_refused_with_softcap():
    with pytest.raises(ValueError, match=r"^softcap: got 2\.0 with a score_mod, want None: score_mod\(score, \.\.\.\)"):
        flash_attention(*arrays(), score_mod=out_of(lambda s: s), softcap=2.0)


# The Hopper kernels, interpreted, run them in tests/pallas/attention/sm90/test_score_mod.py.
MASKING = [("xla", name) for name in ("lowest_64", "lowest_of_key", "lowest_tables")]
MASKING += [("triton", name) for name in ("lowest_128", "lowest_of_key")]


QUICK_MASKING = [pytest.param(*case, marks=pytest.mark.slow if i > 0 else ()) for i, case in enumerate(MASKING[::-1])]


@pytest.mark.parametrize(("implementation", "name"), QUICK_MASKING)
def test_fully_masked_rows(implementation, name, monkeypatch):
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    errors = score_mod_cases.errors_by(score_mod_cases.CASES[name], implementation)
    assert {name: found for name, found in errors.items() if not found[0] <= found[1]} == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lowest_64", "lowest_128", "lowest_of_key", "lowest_tables", "of_query", "packed"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_masking_on_a_gpu(implementation, name):
    try:
        errors = score_mod_cases.errors_by(score_mod_cases.CASES[name], implementation)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert {name: found for name, found in errors.items() if not found[0] <= found[1]} == {}


def test_eager_calls_trace_a_function_once():
    """An eager call with a function of an earlier call neither traces the function nor compiles a program."""
    traces, compiled = [], []
    slopes = jnp.arange(float(H))

    def score_mod(score, b, h, q, k):
        traces.append(score)
        return score - slopes[h] * jnp.abs(q - k)

    def run():
        attend = lambda q: flash_attention(q, *arrays()[1:], score_mod=score_mod, is_causal=True)
        return attend(arrays()[0]), jax.grad(lambda q: attend(q).sum())(arrays()[0])

    listen = lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    want = run()
    assert len(traces) == 1
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        got = run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(traces) == 1
    assert not compiled
    jax.tree.map(np.testing.assert_array_equal, got, want)
