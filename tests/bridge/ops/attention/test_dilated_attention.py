"""dilated_attention on PyTorch tensors equals JAX's, and the module around it."""

import copy
import importlib
import inspect
import pickle
import types

import numpy as np
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.dispatch import on_device
from jax_kernels.testing import rms_error
from tests.support.oracles import dilated as dilated_oracle

PATTERN = {"segment_lengths": [6, 12], "dilation_rates": [1, 4]}


def test_forward_and_gradients(make_qkv):
    query, key, value = make_qkv(length=12, kv_heads=2)
    pattern = PATTERN | {"is_causal": True}
    segment_ids = torch.from_numpy(np.random.default_rng(0).integers(-1, 2, (2, 12)).astype(np.int32))
    dout, dlse = torch.randn(2, 12, 4, 16), torch.randn(2, 4, 12)
    numbers = [x.detach().numpy() for x in (query, key, value, dout, dlse)]
    want = dilated_oracle.dilated_attention(*numbers, segment_ids=segment_ids.numpy(), **pattern)
    run = torch.compile(bridge.dilated_attention, backend="aot_eager", fullgraph=True)
    for function in (bridge.dilated_attention, run):
        out, lse = function(query, key, value, segment_ids=segment_ids, return_lse=True, **pattern)
        gradients = torch.autograd.grad((out, lse), (query, key, value), (dout, dlse))
        for got, right in zip((out, lse, *gradients), want, strict=True):
            assert rms_error(got.detach().numpy(), right) < 1e-6


def test_all_arguments_reach_jax(make_qkv, monkeypatch):
    function, seen = bridge.dilated_attention, {}
    op = types.SimpleNamespace(lookup=lambda *call: None, run=lambda call, *tensors, **given: seen.update(given))
    monkeypatch.setitem(inspect.unwrap(function).__globals__, "_attend", op)
    given = PATTERN | {
        "is_causal": True,
        "heads": "groups",
        "combine": "mean",
        "layout": "partition",
        "order": "hilbert",
        "stop_gradient_weights": True,
        "return_lse": True,
        "segment_ids": torch.zeros(2, 12, dtype=torch.int32),
        "scale": 0.3,
        "deterministic": True,
        "precision": "tf32",
        "implementation": "triton",
    }
    assert [*inspect.signature(function).parameters] == ["query", "key", "value", *given]
    function(*make_qkv(length=12), **given)
    assert seen == given


def test_errors(make_qkv):
    query, key, value = make_qkv(length=15)
    attend = bridge.dilated_attention
    with pytest.raises(ValueError, match=r"dilation_rates: got 1 of them for 2 segment_lengths"):
        attend(query, key, value, segment_lengths=[6, 12], dilation_rates=[1])
    with pytest.raises(TypeError, match=r"query: got dtype torch.float64"):
        attend(query.double(), key, value, **PATTERN)
    with pytest.raises(TypeError, match=r"segment_ids: got dtype torch.int64, want torch.int32"):
        attend(query, key, value, segment_ids=torch.zeros(2, 15, dtype=torch.int64), **PATTERN)
    with pytest.raises(TypeError, match=r"segment_ids: got a pair"):
        attend(query, key, value, segment_ids=(None, None), **PATTERN)


def by_hand(weights, x, keys=None, values=None, segment_ids=None):
    """The output of a causal module of 4 heads, in float64, computed from weights named as in its state_dict."""
    p = {name: weight.detach().double().numpy() for name, weight in weights.items()}
    project = lambda x, name: x @ p[f"{name}_proj.weight"].T + p.get(f"{name}_proj.bias", 0)
    batch, length, _ = x.shape
    given = zip("qkv", (x, x if keys is None else keys, x if values is None else values), strict=True)
    qkv = [project(y.double().numpy(), name).reshape(batch, length, 4, -1) for name, y in given]
    pattern = PATTERN | {"heads": "groups", "combine": "mean", "is_causal": True, "segment_ids": segment_ids}
    out = dilated_oracle.dilated_attention(*qkv, qkv[0], np.zeros((batch, 4, length)), **pattern)[0].reshape(x.shape)
    if "norm.weight" in p:
        out = (out - out.mean(-1, keepdims=True)) / np.sqrt(out.var(-1, keepdims=True) + 1e-5)
        out = out * p["norm.weight"] + p["norm.bias"]
    return project(out, "out")


@pytest.mark.parametrize("layer_norm", [True, False])
def test_module(layer_norm):
    module = bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values(), layer_norm=layer_norm)
    names = [f"{name}_proj.{part}" for name in ("q", "k", "v", "out") for part in ("weight", "bias")]
    assert sorted(module.state_dict()) == sorted(names + ["norm.weight", "norm.bias"] * layer_norm)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 15, 32)
    out, weights = module(x, x, x, is_causal=True, need_weights=True)
    assert weights is None
    torch.testing.assert_close(module(x, is_causal=True), out)
    np.testing.assert_allclose(out.detach().numpy(), by_hand(dict(module.named_parameters()), x), atol=2e-5)
    out.square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for name, parameter in module.named_parameters() if name != "k_proj.bias")

    # value defaults to key.
    y, ids = torch.randn(2, 15, 32), np.random.default_rng(0).integers(-1, 2, (2, 15)).astype(np.int32)
    with torch.no_grad():
        out = module(x, y, is_causal=True, segment_ids=torch.from_numpy(ids))
    want = by_hand(dict(module.named_parameters()), x, y, y, ids)
    np.testing.assert_allclose(out.numpy(), want, atol=2e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_module_loads_public_weight_names(bias, layer_norm):
    shapes = {f"{name}_proj.weight": (32, 32) for name in ("q", "k", "v", "out")}
    shapes |= {f"{name}_proj.bias": (32,) for name in ("q", "k", "v", "out") if bias}
    shapes |= {f"norm.{name}": (32,) for name in ("weight", "bias") if layer_norm}
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = torch.randn(2, 15, 32, generator=generator)
    module = bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values(), bias=bias, layer_norm=layer_norm)
    module.load_state_dict(weights, strict=True)
    out = module(x, is_causal=True).detach().numpy()
    np.testing.assert_allclose(out, by_hand(weights, x), atol=2e-5)
    with pytest.raises(RuntimeError, match=r"Missing key.*q_proj.weight"):
        module.load_state_dict({name: weight for name, weight in weights.items() if name != "q_proj.weight"})


def test_module_is_causal():
    """Batch entry j changes token j. No output before j changes."""
    module = bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values())
    x = torch.randn(1, 15, 32)
    changed = torch.eye(16, 15, dtype=torch.bool)[:, :, None]
    with torch.no_grad():
        out = module(torch.where(changed, 10 * x + 1, x), is_causal=True)
    # PyTorch's matmuls round rows of different batch entries differently.
    differs = ((out - out[-1:]).abs() > 1e-4).any(-1)[:-1]
    assert not differs.tril(-1).any()
    assert differs.diagonal().float().mean() > 0.5


def test_module_initialisation_and_dropout():
    torch.manual_seed(0)
    module = bridge.nn.MultiheadDilatedAttention(256, 4, *PATTERN.values(), gamma_init=2.0, dropout=0.25)
    for name, gain in (("q", 1), ("k", 1), ("v", 2), ("out", 2)):
        assert getattr(module, f"{name}_proj").weight.std().item() == pytest.approx(gain / 16, rel=0.03)
        assert not getattr(module, f"{name}_proj").bias.any()
    x = torch.randn(2, 15, 256)
    dropped = module(x)
    kept = dropped != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(dropped[kept], module.eval()(x)[kept] / 0.75)


def test_module_epsilon():
    x = torch.randn(2, 15, 32)
    for eps in (0.5, 2.0):
        module = bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values(), layer_norm_eps=eps)
        heads = (layer(x).unflatten(-1, (4, 8)) for layer in (module.q_proj, module.k_proj, module.v_proj))
        out = bridge.dilated_attention(*heads, **PATTERN, heads="groups", combine="mean").flatten(-2)
        normed = (out - out.mean(-1, keepdim=True)) / torch.sqrt(out.var(-1, correction=0, keepdim=True) + eps)
        torch.testing.assert_close(module(x), module.out_proj(normed))


def test_module_backends():
    module = bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values(), benchmark_backends=True)
    assert module.attention_backend == "xla"
    assert list(module.backend_times) == ["xla"]
    assert 0 < module.backend_times["xla"] < 1e4
    assert module.dtype == torch.float32
    assert module.gpu_info.architecture == "CPU"
    assert module.bfloat16().dtype == torch.bfloat16
    make = lambda **options: bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values(), **options)
    with pytest.raises(NotImplementedError, match=r"^attention_backend='triton' cannot serve this"):
        make(attention_backend="triton")
    with pytest.raises(ValueError, match=r"^attention_backend: got 'cutlass', want one of 'mosaic_gpu'"):
        make(attention_backend="cutlass")
    with pytest.raises(TypeError, match=r"^attention_backend: got int, want a name or None"):
        make(attention_backend=3)
    for name in ("auto", "sdpa", "flash", "flash_attn_2", "flash_attn_3", "xformers", "manual"):
        assert make(attention_backend=name).attention_backend == "xla"
    with pytest.raises(ValueError, match="benchmark_backends: got True with attention_backend='xla'"):
        make(attention_backend="xla", benchmark_backends=True)
    with pytest.raises(ValueError, match=r"query: got shape \(2, 15, 8\), want \[batch, length, 32\]"):
        make()(torch.zeros(2, 15, 8))


def test_module_with_another_layout():
    make = lambda **options: bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values(), **options)
    module = make(layout="partition")
    assert (module.pattern["heads"], module.pattern["combine"]) == ("all", "lse")
    assert (make().pattern["heads"], make().pattern["combine"]) == ("groups", "mean")
    x = torch.randn(2, 16, 32)
    query, key, value = (layer(x).unflatten(-1, (4, 8)) for layer in (module.q_proj, module.k_proj, module.v_proj))
    out = bridge.dilated_attention(query, key, value, **PATTERN, layout="partition").flatten(-2)
    torch.testing.assert_close(module(x), module.out_proj(module.norm(out)))
    with pytest.raises(ValueError, match="layout: got 'partition' with heads='groups', combine='lse'"):
        make(layout="partition", heads="groups")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"embed_dim": 33}, ValueError, "embed_dim: got 33 with num_heads=4, want a multiple of num_heads"),
        ({"embed_dim": 0}, ValueError, "embed_dim: got 0, want a positive one"),
        ({"num_heads": 2.0}, TypeError, "num_heads: got 2.0, want an int"),
        ({"num_heads": -2}, ValueError, "num_heads: got -2, want a positive one"),
        ({"dropout": 1.5}, ValueError, "dropout: got 1.5, want a probability"),
        ({"dropout": None}, TypeError, "dropout: got None, want a number"),
        ({"gamma_init": "a"}, TypeError, "gamma_init: got 'a', want a number"),
        ({"gamma_init": float("inf")}, ValueError, "gamma_init: got inf, want a finite number above 0"),
        ({"layer_norm_eps": None}, TypeError, "layer_norm_eps: got None, want a number"),
        ({"layer_norm": "yes"}, TypeError, "layer_norm: got 'yes', want a bool"),
    ],
)
def test_module_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        bridge.nn.MultiheadDilatedAttention(**{"embed_dim": 32, "num_heads": 4} | PATTERN | arguments)


@pytest.mark.triton
def test_module_backend_follows_the_parameters(monkeypatch):
    make = lambda **options: bridge.nn.MultiheadDilatedAttention(128, 2, *PATTERN.values(), **options)
    module, timed, named = make(), make(benchmark_backends=True), make(attention_backend="xla")
    targets = importlib.import_module("jax_kernels.bridge.nn.multihead_dilated_attention").planning_device
    monkeypatch.setattr(targets, "planning_on", lambda device: on_device("H200"))
    assert [x.attention_backend for x in (module, timed, named)] == ["triton", "xla", "xla"]
    for x in (module, timed, named):
        x.bfloat16()
    assert [x.attention_backend for x in (module, timed, named)] == ["mosaic_gpu", "mosaic_gpu", "xla"]
    assert timed.float().attention_backend == "xla"
    assert timed._implementation == "xla"
    assert timed.to("meta")._implementation is None


@pytest.mark.gpu
def test_module_backend_on_gpu():
    """A backend that was timed on the CPU is not kept for the GPU."""
    module = bridge.nn.MultiheadDilatedAttention(128, 2, *PATTERN.values(), benchmark_backends=True)
    assert module.attention_backend == "xla"
    module.cuda().bfloat16()
    assert module.attention_backend in ("mosaic_gpu", "triton")
    assert module.gpu_info.architecture != "CPU"
    assert module(torch.randn(2, 15, 128, device="cuda", dtype=torch.bfloat16)).isfinite().all()


def test_module_on_meta():
    make = lambda **options: bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values(), **options)
    real, module = make(), make(device="meta")
    assert (module.attention_backend, module.gpu_info, module.dtype) == (None, None, torch.float32)
    with pytest.raises(ValueError, match="benchmark_backends: got True on the meta device"):
        make(device="meta", benchmark_backends=True)
    module.to_empty(device="cpu").reset_parameters()
    assert module.attention_backend == "xla"
    assert module.gpu_info.architecture == "CPU"
    x = torch.randn(2, 15, 32)
    assert module(x).isfinite().all()
    module = make(device="meta")
    module.load_state_dict(real.state_dict(), assign=True)
    torch.testing.assert_close(module(x), real(x))


def test_module_results_and_fused_weights():
    make = lambda **options: bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values(), **options)
    module, x = make(), torch.randn(2, 15, 32)
    out, weights = module(x, need_weights=True)
    assert weights is None
    torch.testing.assert_close(module(x), out, atol=0, rtol=0)
    assert module.device == torch.device("cpu")
    fused = {name: weight for name, weight in module.state_dict().items() if name[:2] not in ("q_", "k_", "v_")}
    for kind in ("weight", "bias"):
        fused[f"qkv_proj.{kind}"] = torch.cat([getattr(getattr(module, f"{name}_proj"), kind) for name in "qkv"])
    other = torch.nn.Sequential(make(attention_backend="auto"))
    other.load_state_dict({f"0.{name}": weight for name, weight in fused.items()})
    torch.testing.assert_close(other(x), out, atol=0, rtol=0)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*qkv_proj\.weight"):
        make().load_state_dict({**module.state_dict(), "qkv_proj.weight": torch.zeros(3, 32)})
    assert torch.equal(copy.deepcopy(module)(x), out)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), out)


def test_ring_module_in_one_process():
    torch.manual_seed(0)
    module = bridge.nn.RingDilatedAttention(32, 4, *PATTERN.values())
    plain = bridge.nn.MultiheadDilatedAttention(32, 4, *PATTERN.values())
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 15, 32)
    assert torch.equal(module(x, is_causal=True), plain(x, is_causal=True))
