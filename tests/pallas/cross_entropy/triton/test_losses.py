"""The Triton kernels of linear_cross_entropy: results and gradients, and their compilation without a GPU.

As a script it compiles one call, forward and backward:
`python tests/pallas/cross_entropy/triton/test_losses.py h200 '{"softcap": 30.0, ...}'`.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, linear_cross_entropy
from jax_kernels.dispatch import on_device
from jax_kernels.pallas.cross_entropy.triton import losses
from jax_kernels.testing import linear_cross_entropy as cases
from tests.support.cases import ids, tiers
from tests.tools import compile_case
from tests.tools.compile_budget import GPUS


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")


@pytest.mark.parametrize("name", ids.named(cases.TRITON))
def test_against_float64(name, interpreted):
    for result, (error, bound) in cases.errors_by(cases.TRITON[name], "triton").items():
        assert error <= bound, result


@pytest.mark.parametrize("name", ["one_more", "one_short"])
def test_chunks(name, interpreted, monkeypatch):
    """The backward cuts 255 entries of the vocabulary into 3 equal chunks, and 257 into 3 with padding."""
    monkeypatch.setattr(losses, "COTANGENT_BYTES", 2**15)
    for result, (error, bound) in cases.errors_by(cases.TRITON[name], "triton").items():
        assert error <= bound, result


@pytest.mark.parametrize(("tokens", "vocabulary", "want"), [(16384, 151936, 16), (8192, 128256, 4), (8192, 50257, 2)])
def test_chunks_are_equal_if_possible(tokens, vocabulary, want):
    assert losses._chunk_count(tokens, vocabulary, 2) == want


ON_GPU = cases.TRITON | {name: case for name, case in cases.LONG.items() if case.precision is None}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(ON_GPU))
def test_on_gpu(name):
    for result, (error, bound) in cases.errors_by(ON_GPU[name], "triton").items():
        assert error <= bound, result


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_vmap_and_forward_mode(reduction, interpreted):
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in ((2, 5, 16), (16, 40)))
    targets = jnp.asarray(random.integers(0, 40, (2, 5)))
    loss = lambda x, t, name: linear_cross_entropy(x, w, t, reduction=reduction, implementation=name).sum()
    each = [jax.vmap(functools.partial(jax.grad(loss), name=name))(x, targets) for name in ("triton", "xla")]
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in each), rtol=0.03, atol=1e-3)
    with pytest.raises(NotImplementedError, match="implementation='xla' has forward mode"):
        jax.jvp(lambda x: loss(x, targets, "triton"), (x,), (x,))


def test_explain():
    """ "xla" comes first until the Hopper kernel is measured."""
    x, w, targets = (
        jax.ShapeDtypeStruct(*of) for of in (((8, 64), "bfloat16"), ((64, 96), "bfloat16"), ((8,), "int32"))
    )
    with on_device("h200"):
        plan = explain(linear_cross_entropy, x, w, targets)
        assert plan.implementation == "xla"
        assert plan.why_not["triton"] == "it comes after xla in the order"
        assert "not measured" in plan.why
        assert "not measured" in explain(linear_cross_entropy, x, w, targets, implementation="triton").source
        x, w = (jax.ShapeDtypeStruct(y.shape, "float32") for y in (x, w))
        with pytest.raises(NotImplementedError, match="would use tf32"):
            explain(linear_cross_entropy, x, w, targets, implementation="triton")


COMPILED = {
    "plain": {"reduction": "mean"},
    "options": {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4, "transpose_w": True},
    "odd": {"m": 1001, "n": 1027, "k": 333, "dtype": "float16"},
}
CASES = [f"{gpu}-{name}" for gpu in ("h200", "a100", "rtx4090", "b200") for name in COMPILED]
CASES += [case for gpu in GPUS.values() if (case := f"{gpu}-plain") not in CASES]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("case", tiers.cases(CASES, ["h200-options"]))
def test_compiled(case):
    """Forward and backward, without spills."""
    gpu, name = case.split("-")
    printed, _, others = compile_case.compile_script(__file__, gpu, json.dumps(COMPILED[name]))
    kernels = set(json.loads(printed))
    assert kernels == {"cross_entropy_triton", "cross_entropy_cotangents_triton"}
    for kernel in kernels:
        assert others[kernel]["spill_stores"] + others[kernel]["spill_loads"] == 0, (kernel, others[kernel])


def _compile(gpu: str, options: dict) -> list[str]:
    """Compiles in this process. Returns the names of the Triton kernels."""
    dtype, (m, n, k) = options.pop("dtype", "bfloat16"), (options.pop(name, 2048) for name in "mnk")
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    w = array(n, k) if options.get("transpose_w") else array(k, n)

    def both(x, w, targets):
        call = lambda x, w: linear_cross_entropy(x, w, targets, **options, implementation="triton").sum()
        return jax.value_and_grad(call, (0, 1))(x, w)

    return compile_case.lower_and_compile(gpu, both, array(m, k), w, array(m, dtype="int32"))[1]


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], json.loads(sys.argv[2]))))
