"""The Hopper kernel of linear_cross_entropy: in the Mosaic interpreter, with races; and compiled without a GPU.

As a script it compiles one call, forward and backward, or with "chunks" it runs the interpreter with small chunks:
`python tests/pallas/cross_entropy/sm90/test_sm90_losses.py '{"softcap": 30.0, ...}'`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, linear_cross_entropy
from jax_kernels.dispatch import on_device
from jax_kernels.inputs.linear_cross_entropy import LossInputs, LossOptions
from jax_kernels.ops.cross_entropy.implementations import SM90, SM90_8_BITS
from jax_kernels.pallas.cross_entropy.passes.cotangents import RowTerms, cotangents
from jax_kernels.pallas.cross_entropy.sm90 import losses
from jax_kernels.pallas.triton import backend
from jax_kernels.testing import linear_cross_entropy as cases
from tests.support.cases import ids, tiers
from tests.support.interpreters import kernels
from tests.support.processes import forked
from tests.tools import compile_case

MODULE = "jax_kernels.testing.linear_cross_entropy"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cores", "names"),
    [
        (1, ["mean", "one_token", "all_ignored"]),
        (3, ["options", "float16", "8_bits_each"]),
        pytest.param(1, ["8_bits"], marks=pytest.mark.slow),
        pytest.param(3, ["8_bits_float16"], marks=pytest.mark.slow),
        pytest.param(1, ["peaked", "float16_each"], marks=pytest.mark.slow),
        pytest.param(3, ["each", "wide_weights"], marks=pytest.mark.slow),
    ],
)
def test_interpreted(cores, names):
    """Races are detected on one core."""
    kernels.check(MODULE, cores, cores == 1, names)


@pytest.mark.timeout(240)
def test_chunks_interpreted():
    """131 tokens in two chunks, whose gradients of w are added."""
    done = forked.run(__file__, "chunks", env=forked.UNOPTIMISED, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    for result, (error, bound) in json.loads(done.stdout.splitlines()[-1])["options"]["errors"].items():
        assert error <= bound, result


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "want"),
    [(8192, 128256, (2, 4096)), (16384, 151936, (4, 4096)), (1, 64, (1, 128)), (5303, 128256, (2, 2688))],
)
def test_chunk_sizes(tokens, vocabulary, want):
    count, chunk = losses._chunks(tokens, vocabulary, 128)
    assert (count, chunk) == want
    assert 2 * chunk * vocabulary <= losses.EXPONENTIAL_BYTES


def test_cotangents_without_triton(monkeypatch):
    """The pass in Triton and in plain JAX, with a last work tile of 72 columns."""
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    shares = jnp.exp(-jnp.abs(normal(5, 264))).astype(jnp.bfloat16)
    targets = jnp.asarray([0, 263, -1, 191, 192], jnp.int32)
    terms = RowTerms(targets=targets, cotangent=normal(5), factor=normal(5, 2), largest=normal(5, 2))
    options = LossOptions(softcap=9.0, label_smoothing=0.2)
    found = []
    for available in (True, False) if backend.AVAILABLE else (False,):
        monkeypatch.setattr(backend, "AVAILABLE", available)
        found.append(np.asarray(cotangents(shares, terms, options, 192, interpret=True), np.float64))
    logits = np.log(np.float64(shares)) + np.repeat(terms.largest, 192, axis=1)[:, :264]
    want = np.float64(shares) * np.repeat(np.float64(terms.factor), 192, axis=1)[:, :264]
    one_hot = np.asarray(targets)[:, None] == np.arange(264)
    want = (want - (0.8 * one_hot + 0.2 / 264) * np.float64(terms.cotangent)[:, None]) * (1 - (logits / 9) ** 2)
    for values in found:
        np.testing.assert_allclose(values, want, rtol=2**-8, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(cases.HOPPER | cases.LONG))
def test_on_hopper(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    case = (cases.HOPPER | cases.LONG)[name]
    if reason := cases.why_not(case, "mosaic_gpu"):
        pytest.skip(reason)
    for result, (error, bound) in cases.errors_by(case, "mosaic_gpu").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "tokens", "count"), [("many_weighted", 512, 3), ("many_capped", 640, 5)])
def test_chunks_on_hopper(name, tokens, count, monkeypatch):
    """Few chunks, whose gradients of w are added in bfloat16, and more chunks, where they are added in float32."""
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    case = cases.LONG[name]
    monkeypatch.setattr(losses, "EXPONENTIAL_BYTES", 2 * tokens * case.vocabulary)
    jax.clear_caches()
    assert losses._chunks(case.tokens[0], case.vocabulary, 128)[0] == count
    for result, (error, bound) in cases.errors_by(case, "mosaic_gpu").items():
        assert error <= bound, result


def _types(m=8192, n=128256, k=4096, dtype="bfloat16", **options):
    w = (n, k) if options.get("transpose_w") else (k, n)
    types = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape in {"x": (m, k), "w": w}.items()}
    return types | {"targets": jax.ShapeDtypeStruct((m,), jnp.int32)} | options


NOT_SERVED = {
    "float32": ({"dtype": "float32"}, "its wgmma instructions take bfloat16 and float16, not float32"),
    "depth": ({"k": 72}, "it needs D and V in multiples of 64"),
    "depth_of_8_bits": ({"k": 192, "precision": "fp8"}, "with precision='fp8' it needs D in multiples of 128"),
    "vocabulary": ({"n": 50257}, "it needs D and V in multiples of 64"),
    "small_softcap": ({"softcap": 2.0}, "it takes bfloat16 and a softcap from 4 to 40"),
    "float16_softcap": ({"softcap": 30.0, "dtype": "float16"}, "it takes bfloat16 and a softcap from 4 to 40"),
    "device": ({"device": "A100"}, "it needs Hopper (compute capability 9.0)"),
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_limits(name):
    given, reason = NOT_SERVED[name]
    types = _types(**{key: x for key, x in given.items() if key != "device"})
    with on_device(given.get("device", "H200")), pytest.raises(NotImplementedError) as error:
        explain(linear_cross_entropy, **types, implementation="mosaic_gpu")
    assert reason in str(error.value)


def test_plan():
    """ "xla" comes first until the kernel is timed."""
    with on_device("H200"):
        assert explain(linear_cross_entropy, **_types(softcap=30.0)).implementation == "xla"
        plan = explain(linear_cross_entropy, **_types(), implementation="mosaic_gpu")
        of_8_bits = explain(linear_cross_entropy, **_types(precision="fp8", reduction="mean"))
        with pytest.raises(NotImplementedError, match=r"'triton' cannot serve .*: it has no matmul of 8-bit values"):
            explain(linear_cross_entropy, **_types(precision="fp8"), implementation="triton")
    assert plan.source.startswith("rows measured on an NVIDIA H200")
    assert (of_8_bits.implementation, of_8_bits.config.forward) == ("mosaic_gpu", SM90_8_BITS)


def _launches(function, *types):
    with on_device("H200"):
        return str(jax.make_jaxpr(function)(*types)).count("name=cross_entropy_sm90")


def test_launches():
    """A mean with gradients launches the matmul of the logits once, and losses of tokens twice; also under vmap."""
    types = _types(m=64, n=256, k=128)
    given = types["x"], types["w"], types["targets"]
    loss = lambda reduction: lambda *y: linear_cross_entropy(*y, reduction=reduction, implementation="mosaic_gpu").sum()
    assert _launches(loss("mean"), *given) == 1
    assert _launches(jax.grad(loss("mean"), (0, 1)), *given) == 1
    assert _launches(jax.grad(loss("none"), (0, 1)), *given) == 2
    many = jax.ShapeDtypeStruct((3, *given[0].shape), given[0].dtype)
    mapped = jax.vmap(jax.grad(loss("mean"), (0, 1)), (0, None, None))
    assert _launches(mapped, many, *given[1:]) == 1


@pytest.mark.parametrize(("tokens", "dtype"), [(4 * 128, "bfloat16"), (5 * 128, "float32")])
def test_sums_of_chunks(tokens, dtype, monkeypatch):
    """The dtype in which chunks of 128 tokens add w's gradient: float32 if there are more than four."""
    monkeypatch.setattr(losses, "EXPONENTIAL_BYTES", 2 * 128 * 256)
    types = _types(m=tokens, n=256, k=64)
    inputs = LossInputs(x=types["x"], rows=jax.ShapeDtypeStruct((256, 64), jnp.bfloat16), targets=types["targets"])
    options, cotangent = LossOptions(transpose_w=True), jax.ShapeDtypeStruct((tokens,), jnp.float32)
    launch = {"config": SM90, "core_count": 132, "interpret": False}
    run = lambda inputs, cotangent: losses.losses_and_gradients(inputs, options, cotangent, **launch)
    (scan,) = [x for x in jax.make_jaxpr(run)(inputs, cotangent).eqns if x.primitive.name == "scan"]
    assert scan.outvars[0].aval.dtype == dtype


COMPILED = {
    "8_bits": {"reduction": "mean", "precision": "fp8", "softcap": 30.0, "label_smoothing": 0.1},
    "plain": {"reduction": "mean", "transpose_w": True},
    "options": {"reduction": "sum", "softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4},
    "each": {"transpose_w": True, "n": 151936, "softcap": 30.0},
    "float16": {"reduction": "mean", "dtype": "float16", "n": 1024, "label_smoothing": 0.1, "m": 300},
}


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("name", tiers.cases(COMPILED, ["plain"]))
def test_compiled(name):
    """Forward and backward: no launch spills, and a mean of 8192 tokens takes less than 1.5 GB."""
    printed, mosaic, others = compile_case.compile_script(__file__, json.dumps(COMPILED[name]))
    found = json.loads(printed)
    assert found["triton"] == ["cross_entropy_from_exponentials_triton"]
    assert list(mosaic) == ["cross_entropy_sm90_mosaic_gpu_kernel"]
    for figures in (*mosaic.values(), *(others[kernel] for kernel in found["triton"])):
        assert figures["spill_stores"] == 0
        assert figures["spill_loads"] == 0
    if name == "plain":
        assert found["bytes"] < 1.5e9


def _compile(options: dict) -> dict:
    """Compiles in this process. Returns the names of the Triton kernels, and the bytes of temporary memory."""
    names = ("x", "w", "targets")
    given = _types(**options)
    x, w, targets = (given.pop(name) for name in names)

    def both(x, w, targets):
        call = lambda x, w: linear_cross_entropy(x, w, targets, **given, implementation="mosaic_gpu").sum()
        return jax.value_and_grad(call, (0, 1))(x, w)

    program, triton = compile_case.lower_and_compile("h200", both, x, w, targets)
    return {"triton": sorted(set(triton)), "bytes": program.memory_analysis().temp_size_in_bytes}


def _chunked() -> dict:
    """The case "options" with chunks of 128 tokens."""
    losses.EXPONENTIAL_BYTES = 2 * 128 * 448
    return kernels.main(MODULE, 1, False, ["options"])


if __name__ == "__main__":
    print(json.dumps(_chunked() if sys.argv[1] == "chunks" else _compile(json.loads(sys.argv[1]))))
