"""The contenders: one that cannot run says why, a wrong one is not timed, a backward runs no forward."""

import functools
import importlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import cases, contenders

from tests.support.cases import tiers


def test_unavailable_contenders_give_a_reason(make_case, without_gpu):
    given = make_case()
    sets = cases.input_sets(given)[:1]
    oracle = cases.Oracle(given, sets[0])
    told = {name: contenders.build(name, given, sets, oracle) for name in contenders.PEERS}
    assert {c.status for c in told.values()} == {"unavailable"}
    assert told["jax-cudnn"].reason == "it needs an NVIDIA GPU, and JAX runs on cpu"
    assert [name for name, c in told.items() if c.framework == "torch"] == [
        "torch-cudnn", "torch-fa2", "torch-flex", "torch-flex-flash", "fa4",
    ]  # fmt: skip
    mosaic = contenders.build("mosaic_gpu", given, sets, oracle)
    assert mosaic.status == "unavailable"
    assert "it needs an NVIDIA GPU, and this runs on CPU" in mosaic.reason


def test_missing_modules_are_named(monkeypatch):
    monkeypatch.setitem(contenders._NEEDS, "tokamax", ("no_such_module_here",))
    assert contenders.unavailable("tokamax") == "the Python module no_such_module_here is not installed"


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd"])
def test_wrong_results_are_not_timed(mode, monkeypatch, make_case):
    given = make_case(mode)
    sets = cases.input_sets(given)[:1]
    oracle = cases.Oracle(given, sets[0])
    right = contenders.build("xla", given, sets, oracle)
    assert (right.status, right.plan) == ("ok", "xla")
    assert 1e-4 < right.error < 5e-3
    honest = contenders._ours

    def off(name, *arguments):
        built = honest(name, *arguments)
        return contenders.Built(lambda index: (*built.call(index)[:-1], built.call(index)[-1] * 1.03), built.plan)

    monkeypatch.setattr(contenders, "_ours", off)
    wrong = contenders.build("xla", given, sets, oracle)
    assert (wrong.status, wrong.call) == ("wrong", None)
    assert wrong.reason.startswith("relative error 0.03")
    assert wrong.reason.endswith(", want at most 0.02")


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd"])
def test_value_head_dim_differs(mode, monkeypatch):
    given = cases.Case(1, 64, 4, 24, 4, "bf16", True, mode, value_head_dim=16)
    sets = cases.input_sets(given)[:1]
    oracle = cases.Oracle(given, sets[0])
    assert contenders.build("xla", given, sets, oracle).status == "ok"
    monkeypatch.setattr(contenders, "need", lambda name: None)
    for name in ("jax-cudnn", "jax-triton"):
        refused = contenders.build(name, given, sets, oracle)
        assert refused.status == "unavailable"
        assert "takes only values of key's head_dim" in refused.reason


def test_nan_is_wrong(monkeypatch, make_case):
    given = make_case()
    sets = cases.input_sets(given)[:1]
    poisoned = lambda *_: contenders.Built(lambda index: (sets[0].query * jnp.nan,), "")
    monkeypatch.setattr(contenders, "_ours", poisoned)
    assert contenders.build("xla", given, sets, cases.Oracle(given, sets[0])).status == "wrong"


@pytest.mark.parametrize("place", range(3))
def test_relative_error_keeps_nan(place):
    right = [np.arange(6.0).reshape(2, 3) + i for i in range(3)]
    assert cases.relative_error([x * 1.5 for x in right], right) == 0.5
    got = [x * np.nan if i == place else x for i, x in enumerate(right)]
    assert np.isnan(cases.relative_error(got, right))


def test_error_against_zeros_is_absolute():
    """The gradients of a query that sees one key are zeros."""
    zeros, ones = np.zeros((2, 3)), np.ones((2, 3))
    assert cases.relative_error([zeros, ones], [zeros, ones]) == 0
    assert cases.relative_error([ones, ones], [zeros, ones]) == pytest.approx(6**0.5)
    assert np.isnan(cases.relative_error([ones, ones], [ones * np.nan, ones]))


@pytest.mark.parametrize("causal", [False, True])
def test_split_backward_runs_no_forward(causal, make_case):
    given = make_case("bwd", causal)
    sets = cases.input_sets(given)[:2]

    def function(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")

    traced = []
    monkeypatch = pytest.MonkeyPatch()
    real = jax.jit
    with monkeypatch.context() as patch:
        patch.setattr(contenders.jax, "jit", lambda f, *a, **k: traced.append(real(f, *a, **k)) or traced[-1])
        call = contenders.split_backward(function, sets)
    _, backward = traced
    _, vjp = real(lambda *qkv: jax.vjp(function, *qkv))(*sets[0].qkv)
    program = str(backward.trace(jax.tree.leaves(vjp), sets[0].dout).jaxpr)
    assert program.count("dot_general[") == 4  # a forward would add two
    assert "= exp " not in program
    both = str(jax.make_jaxpr(lambda do, *qkv: jax.vjp(function, *qkv)[1](do))(sets[0].dout, *sets[0].qkv))
    assert both.count("dot_general[") == 6
    assert "= exp " in both
    for index in range(3):  # the sets rotate, each with its own residuals
        inputs = sets[index % 2]
        assert cases.Oracle(given, inputs).error(call(index)) < 1e-2
    assert cases.Oracle(given, sets[0]).error(call(1)) > 0.5


@pytest.mark.parametrize("mode", tiers.cases(["fwd", "bwd", "fwdbwd"], {"fwd"}))
def test_jax_triton_keeps_the_fastest_variant(mode, monkeypatch, make_case):
    monkeypatch.setattr(
        contenders,
        "_JAX_TRITON_FORWARD",
        (contenders.TritonForward(64, 64, None, 2), contenders.TritonForward(32, 64, 4, 2)),
    )
    monkeypatch.setattr(contenders, "_JAX_TRITON_BACKWARD", (contenders.TritonBackward(64, 64, 64, 64),))
    with pytest.warns(DeprecationWarning, match="tokamax"):
        module = importlib.reload(importlib.import_module("jax.experimental.pallas.ops.gpu.attention"))
    mha = module.mha

    def interpreted(*arguments, **named):  # its own forward rule passes arguments by name
        return mha(*arguments, **named) if named else mha(*arguments, None, True)

    monkeypatch.setattr(module, "mha", interpreted)
    given = make_case(mode, True, (1, 64, 2, 64, 2))
    sets = cases.input_sets(given)[:1]
    oracle = cases.Oracle(given, sets[0])
    built = contenders._jax_triton(given, sets, oracle)
    assert oracle.error(built.call(0)) < 1e-2
    assert built.plan.startswith("mha num_warps=")
    assert ("block_q_dkv=64" in built.plan) == (mode != "fwd")
    with pytest.raises(NotImplementedError, match="no grouped heads"):
        contenders._jax_triton(make_case(mode), sets, oracle)


def test_fastest_skips_wrong_and_broken_variants(monkeypatch, make_case):
    given = make_case()
    sets = cases.input_sets(given)[:1]
    oracle = cases.Oracle(given, sets[0])
    function = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    right = lambda: contenders.from_function(function, given, sets, "right")
    wrong = lambda: contenders.Built(lambda index: (sets[0].query,), "wrong")

    def broken():
        raise ValueError("does not compile")

    made = {"broken": broken, "wrong": wrong, "right": right}
    variants = [contenders.Variant(label, make) for label, make in made.items()]
    best = contenders.fastest(variants, oracle)
    assert (best.label, best.built.plan) == ("right", "right")
    with pytest.raises(ValueError, match="does not compile"):
        contenders.fastest([variants[1], variants[0]], oracle)


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_tokamax_reports_tuning(mode, monkeypatch, make_case):
    calls = []

    def dot_product_attention(q, k, v, *, is_causal, implementation):
        if implementation != "mosaic":
            raise ValueError(f"Unknown implementation: {implementation}")
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)

    def autotune(function, *arguments):
        calls.append(len(arguments))
        raise RuntimeError("no GPU to tune on")

    fake = types.SimpleNamespace(dot_product_attention=dot_product_attention, autotune=autotune)
    monkeypatch.setitem(sys.modules, "tokamax", fake)
    given = make_case(mode)
    sets = cases.input_sets(given)[:1]
    built = contenders._tokamax(given, sets, cases.Oracle(given, sets[0]))
    assert built.plan == "tokamax mosaic, not tuned: RuntimeError: no GPU to tune on"
    assert set(calls) == {3 if mode == "fwd" else 4}


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_torch_modes(mode, heads_first, make_case):
    torch_contenders = importlib.import_module("harness.torch_contenders")
    import torch

    given = make_case(mode)
    sets = cases.input_sets(given)[:2]
    tensors = torch_contenders.tensors(sets, heads_first)
    assert tensors[0].query.shape == ((1, 4, 64, 16) if heads_first else (1, 64, 4, 16))
    assert tensors[0].query.is_contiguous()

    def function(q, k, v):
        if not heads_first:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        return out if heads_first else out.transpose(1, 2)

    call = torch_contenders.in_mode(function, mode, tensors, heads_first)
    for index in range(3):
        assert cases.Oracle(given, sets[index % 2]).error(call(index)) < 1e-2


@pytest.mark.parametrize("mode", ["fwd", "bwd", "fwdbwd"])
def test_torch_attention_value_head_dim(mode, monkeypatch):
    torch_contenders = importlib.import_module("harness.torch_contenders")
    from torch.nn.attention import SDPBackend

    math = functools.partial(torch_contenders._sdpa, SDPBackend.MATH)
    monkeypatch.setitem(torch_contenders._MAKERS, "torch-math", math)
    given = cases.Case(1, 64, 4, 24, 4, "bf16", True, mode, value_head_dim=16)
    sets = cases.input_sets(given)[:1]
    oracle = cases.Oracle(given, sets[0])
    built = torch_contenders.build("torch-math", given, sets, oracle)
    assert built.plan == "scaled_dot_product_attention, MATH"
    assert oracle.error(built.call(0)) < 1e-2
