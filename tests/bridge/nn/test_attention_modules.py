"""bridge.nn.AdaptiveAttention and FlexAttention, and features of all modules of attention."""

import copy
import pickle

import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge import masks


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_adaptive_attention(causal, kv_heads, reference):
    torch.manual_seed(0)
    module = bridge.nn.AdaptiveAttention(32, 4, num_kv_heads=kv_heads, is_causal=causal)
    x = torch.randn(2, 9, 32, requires_grad=True)
    split = lambda y: y.double().unflatten(-1, (-1, 8))
    out, _ = reference(split(module.q_proj(x)), split(module.k_proj(x)), split(module.v_proj(x)), is_causal=causal)
    want = module.out_proj(out.flatten(2).float())
    torch.testing.assert_close(module(x), want, atol=3e-6, rtol=0)
    leaves = [x, *module.parameters()]
    gradients = (torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (module(x), want))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


def test_adaptive_attention_with_context(reference):
    module = bridge.nn.AdaptiveAttention(32, 4, context_dim=20, head_dim=6, bias=False)
    assert {name: tuple(x.shape) for name, x in module.named_parameters()} == {
        "q_proj.weight": (24, 32),
        "k_proj.weight": (24, 20),
        "v_proj.weight": (24, 20),
        "out_proj.weight": (32, 24),
    }
    x, context, mask = torch.randn(2, 9, 32), torch.randn(2, 11, 20), torch.rand(2, 1, 9, 11) > 0.4
    split = lambda y: y.double().unflatten(-1, (-1, 6))
    query, key, value = split(module.q_proj(x)), split(module.k_proj(context)), split(module.v_proj(context))
    out, _ = reference(query, key, value, mask=mask)
    want = module.out_proj(out.flatten(2).float())
    torch.testing.assert_close(module(x, context, mask=mask), want, atol=3e-6, rtol=0)
    assert module.explain(x, context, mask=mask).implementation == "xla"
    torch.testing.assert_close(
        module(x, context, mask=masks.causal()), module(x, context, is_causal=True), atol=3e-6, rtol=0
    )


@pytest.mark.timeout(300)
def test_adaptive_attention_compile_copy_pickle():
    torch._dynamo.reset()
    module, x = bridge.nn.AdaptiveAttention(32, 4), torch.randn(2, 9, 32)
    want = module(x)
    torch.testing.assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x), want, atol=1e-6, rtol=0)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x), want)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 33}, ValueError, "^dim: got 33 with num_heads=4, want a multiple of it, or a head_dim"),
        ({"num_heads": 0}, ValueError, "^num_heads: got 0, want a positive one"),
        ({"num_kv_heads": 3}, ValueError, "^num_kv_heads: got 3, want a divisor of num_heads=4"),
        ({"head_dim": 8.0}, TypeError, r"^head_dim: got 8\.0, want an int"),
        ({"is_causal": 1}, TypeError, "^is_causal: got 1, want a bool"),
    ],
)
def test_adaptive_attention_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        bridge.nn.AdaptiveAttention(**{"dim": 32, "num_heads": 4} | arguments)
    with pytest.raises(ValueError, match=r"^context: got shape \(2, 5, 8\), want \[batch, length, 32\]"):
        bridge.nn.AdaptiveAttention(32, 4)(torch.zeros(2, 5, 32), torch.zeros(2, 5, 8))


MODULES = {
    "AdaptiveAttention": lambda: bridge.nn.AdaptiveAttention(32, 4, num_kv_heads=2),
    "DynamicMaskAttention": lambda: bridge.nn.DynamicMaskAttention(32, 4, num_kv_heads=2, keys_to_keep=3),
    "MultiheadDilatedAttention": lambda: bridge.nn.MultiheadDilatedAttention(32, 4, [4, 8], [1, 2]),
}


@pytest.mark.parametrize("shape", [(0, 9, 32), (2, 0, 32)])
@pytest.mark.parametrize("name", MODULES)
def test_empty_batch(name, shape):
    """Its gradients are zeros, as in torch.nn's modules, and not None."""
    module, x = MODULES[name](), torch.randn(shape, requires_grad=True)
    out = module(x)
    assert out.shape == x.shape
    gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    assert not any(gradient.any() for gradient in gradients)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == module(torch.randn(1, 8, 32)).dtype


def test_empty_batch_with_context():
    module = bridge.nn.AdaptiveAttention(32, 4, context_dim=20)
    assert module(torch.zeros(0, 9, 32), torch.zeros(0, 11, 20)).shape == (0, 9, 32)
    assert module(torch.zeros(2, 0, 32), torch.zeros(2, 11, 20)).shape == (2, 0, 32)
    with pytest.raises(ValueError, match="batch"):
        module(torch.zeros(0, 9, 32), torch.zeros(2, 11, 20))


PATTERNS = {
    "causal": ({}, masks.causal()),
    "sliding_window": ({"window": 4}, masks.sliding_window(4, 4)),
    "sliding_window of two sides": ({"pattern": "sliding_window", "window": (4, 0)}, masks.sliding_window(4, 0)),
    "global_local": ({"window": 3, "n": 2}, masks.preset("global_local", n=2, left=3)),
    "attention_sinks": ({"window": 3, "n": 2}, masks.preset("attention_sinks", left=3, n=2)),
    "longformer": ({"window": 6, "n": 1}, masks.preset("longformer", window=6, n=1)),
    "bigbird": (
        {"block_size": 8, "random_blocks": 1},
        masks.preset("bigbird", q_length=24, kv_length=24, block_size=8, random_blocks=1),
    ),
    "a Mask": ({"pattern": masks.causal() & masks.dilated(2)}, masks.causal() & masks.dilated(2)),
}


QUICK = ("global_local", "bigbird")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in PATTERNS])
def test_flex_attention(name, make_qkv):
    options, mask = PATTERNS[name]
    module = bridge.nn.FlexAttention(**{"pattern": name} | options)
    inputs = make_qkv(kv_heads=2)
    got, want = module(*inputs), bridge.flash_attention(*inputs, mask=mask)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    cotangent = torch.randn_like(want)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (got, want)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_flex_attention_caches_its_mask(make_qkv, reference):
    module = bridge.nn.FlexAttention("sliding_window", 3)
    inputs = make_qkv()
    made = module.compiled(*inputs[:2])
    assert module.compiled(*inputs[:2]) is made
    assert made.density <= 1
    want = module(*inputs)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not copied._kept
        torch.testing.assert_close(copied(*inputs), want, atol=0, rtol=0)
    other = make_qkv(length=17, kv_length=29)
    torch.testing.assert_close(module(*other).double(), reference(*other, window=3)[0], atol=3e-6, rtol=0)
    assert not module.state_dict()
    assert repr(module) == "FlexAttention('sliding_window', left=3, right=3)"


def test_flex_attention_errors():
    for arguments, error, message in (
        (("swirl",), ValueError, "^pattern: got 'swirl', want one of"),
        ((3,), TypeError, "^pattern: got int, want a name or a masks.Mask"),
        (("causal", 4), ValueError, "^window: got 4 with the pattern 'causal', which has none"),
        (
            ("attention_sinks", (4, 4)),
            ValueError,
            r"^window: got \(4, 4\) with the pattern 'attention_sinks', want an int",
        ),
        (("sliding_window",), TypeError, "^options: got none for 'sliding_window', want"),
    ):
        with pytest.raises(error, match=message):
            bridge.nn.FlexAttention(*arguments)
    with pytest.raises(ValueError, match=r"^seed: got it with a masks\.Mask, want it with a pattern's name"):
        bridge.nn.FlexAttention(masks.causal(), seed=3)
    with pytest.raises(ValueError, match=r"^query: got shape \(2, 3\), want 4 axes"):
        bridge.nn.FlexAttention("causal")(*torch.zeros(3, 2, 3))


@pytest.mark.parametrize("options", [{"pattern": "sliding_window", "window": 3}, {"pattern": masks.causal()}])
def test_flex_attention_in_one_graph(options, make_qkv):
    """torch.compile makes the mask of each shape while tracing. The module keeps it."""
    module = bridge.nn.FlexAttention(**options)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for length in (24, 40, 24):
        inputs = make_qkv(length=length, kv_heads=2)
        got, want = compiled(*inputs), module(*inputs)
        torch.testing.assert_close(got, want)
        both = (torch.autograd.grad(x.sum(), inputs) for x in (got, want))
        for pair in zip(*both, strict=True):
            torch.testing.assert_close(*pair)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(torch.compile(other, fullgraph=True, backend="aot_eager")(*inputs), want)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_flex_attention_with_other_attributes(is_compiled, make_qkv):
    """Attributes that are assigned after a call, also of a compiled module or a copy, hold for the next call."""
    torch.compiler.reset()  # a function has at most 8 graphs
    inputs = make_qkv(length=24)
    module = copy.deepcopy(bridge.nn.FlexAttention("sliding_window", 3))
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if is_compiled else module
    call(*inputs)
    module.options = {"left": 1, "right": 0}
    torch.testing.assert_close(call(*inputs), bridge.nn.FlexAttention("sliding_window", (1, 0))(*inputs))
    with pytest.raises(TypeError, match="does not support item assignment"):
        module.options["left"] = 2
    module.pattern, module.options = masks.causal(), {}
    torch.testing.assert_close(call(*inputs), bridge.nn.FlexAttention("causal")(*inputs))
    module.implementation = "mosaic"
    with pytest.raises(ValueError, match="implementation: got 'mosaic'"):
        module(*inputs)


def test_flex_attention_on_meta():
    query, key, value = (torch.empty(2, 24, heads, 8, device="meta", requires_grad=True) for heads in (4, 2, 2))
    out = bridge.nn.FlexAttention("sliding_window", 3)(query, key, value)
    assert (out.shape, out.device.type) == (query.shape, "meta")
