"""Hugging Face mixtures of experts with experts_implementation="jax_kernels", on random small configs."""

import copy
import inspect

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from jax_kernels import bridge
from jax_kernels.bridge import huggingface

transformers = pytest.importorskip("transformers", minversion="5.0")
moe = pytest.importorskip("transformers.integrations.moe")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
MODELS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 5}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 5, "moe_intermediate_size": 24, "norm_topk_prob": True}),
    # Biases, a clamped gate, weights [in, out], and sinks.
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 5, "sliding_window": 5}),
}
TOKENS = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(0))


def both(name, dtype=torch.float32, **options):
    """A model with transformers' eager experts, and its copy with this library's."""
    torch.manual_seed(0)
    kind, arguments = MODELS[name]
    config = getattr(transformers, kind)(**SHAPE | arguments | options)
    theirs = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.3)
    ours = bridge.huggingface.replace_experts(copy.deepcopy(theirs))
    assert theirs.config._experts_implementation == "eager"
    assert ours.config._experts_implementation == "jax_kernels"
    return theirs, ours


def results(model, tokens=TOKENS):
    out = model(tokens, labels=tokens)
    out.loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters()}
    return out.logits.detach(), gradients


@pytest.fixture
def calls(monkeypatch):
    """The number of calls of grouped_matmul."""
    count, own = [], bridge.hf_experts.grouped_matmul

    def counted(*args, **options):
        count.append(args[0].shape)
        return own(*args, **options)

    monkeypatch.setattr(bridge.hf_experts, "grouped_matmul", counted)
    return count


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, calls):
    theirs, ours = both(name)
    (want, of_theirs), (got, of_ours) = results(theirs), results(ours)
    assert len(calls) == 4  # two matmuls in each of two layers
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-5)
    assert of_theirs.keys() == of_ours.keys()
    for parameter, gradient in of_theirs.items():
        torch.testing.assert_close(of_ours[parameter], gradient, atol=2e-5, rtol=2e-4, msg=parameter)
        assert gradient.abs().max() > 0, parameter


def test_bfloat16_is_as_near_to_float32():
    exact, _ = results(both("mixtral")[0])
    theirs, ours = both("mixtral", torch.bfloat16)
    errors = [(results(model)[0].float() - exact).norm().item() for model in (theirs, ours)]
    assert 0 < errors[1] < 1.1 * errors[0]


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_compiles_in_one_graph(name):
    """The experts' forward and backward, for tokens that choose other experts too."""
    _, ours = both(name)
    layer = ours.model.layers[0].mlp.experts
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(7, 32, generator=generator, requires_grad=True)
        index = torch.rand(7, 5, generator=generator).argsort(-1)[:, :2]
        weights = torch.rand(7, 2, generator=generator, requires_grad=True)
        found = []
        for function in (layer, compiled):
            out = function(x, index, weights)
            found.append((out, *torch.autograd.grad(out.square().sum(), (x, weights, layer.down_proj))))
        for got, want in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


def test_generate():
    theirs, ours = both("mixtral")
    options = {"attention_mask": torch.ones_like(TOKENS), "max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    torch.testing.assert_close(ours.generate(TOKENS, **options), theirs.generate(TOKENS, **options))


@pytest.mark.parametrize("name", MODELS)
def test_loss_without_logits(name):
    """With the load-balancing loss, whose factor is large here."""
    theirs, ours = both(name, output_router_logits=True, router_aux_loss_coef=0.5)
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    labels = torch.where(mask.bool(), TOKENS, -100)
    want = theirs(TOKENS, labels=labels, attention_mask=mask).loss
    got = bridge.huggingface.causal_lm_loss(ours, labels, input_ids=TOKENS, attention_mask=mask)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    plain = bridge.huggingface.causal_lm_loss(
        ours, labels, input_ids=TOKENS, attention_mask=mask, output_router_logits=False
    )
    assert (got - plain).item() > 0.5
    got.backward()
    want.backward()
    routers = [
        [x.grad for n, x in model.named_parameters() if "gate.weight" in n or "router.weight" in n]
        for model in (ours, theirs)
    ]
    assert routers[0]
    torch.testing.assert_close(*routers, atol=1e-5, rtol=1e-4)


# transformers has these arguments since different releases. An earlier one reads neither attribute.
WANTED = {"has_gate": False, "has_post_expert_norm": True}
KNOWN = {
    name: value
    for name, value in WANTED.items()
    if name in inspect.signature(moe.use_experts_implementation).parameters
}


@moe.use_experts_implementation(**KNOWN)
class PlainExperts(torch.nn.Module):
    """Experts without a gate, with a norm after each where transformers knows one."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 4
        self.up_proj = torch.nn.Parameter(torch.randn(4, 6, 8))
        self.down_proj = torch.nn.Parameter(torch.randn(4, 8, 6))
        self.act_fn = torch.nn.ReLU()
        self.post_expert_norm = torch.nn.LayerNorm(8)
        torch.nn.init.normal_(self.post_expert_norm.bias)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError


@pytest.mark.parametrize("is_parallel", [False, True])
def test_experts_without_a_gate_and_of_other_devices(is_parallel):
    """Against "batched_mm", whose weights are 0 for experts of other devices, as transformers' routers make them. An
    index past the experts adds 0 with any weight, though the norm's bias is not 0.
    """
    torch.manual_seed(0)
    module = PlainExperts(transformers.MixtralConfig())
    module._is_expert_parallel = is_parallel
    x, weights = torch.randn(9, 8, requires_grad=True), torch.rand(9, 2, requires_grad=True)
    index = torch.rand(9, 6 if is_parallel else 4).argsort(-1)[:, :2].clamp(max=4)
    found = []
    theirs = weights.masked_fill(index >= 4, 0.0)
    for function, given in ((huggingface.experts, weights), (moe.ALL_EXPERTS_FUNCTIONS["batched_mm"], theirs)):
        out = function(module, x, index, given)
        found.append((out, *torch.autograd.grad(out.square().sum(), (x, weights, module.up_proj))))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


def test_transformers_computes_float64():
    torch.manual_seed(0)
    module = PlainExperts(transformers.MixtralConfig()).double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    index, weights = torch.tensor([[0, 1], [3, 2], [1, 0]]), torch.rand(3, 2, dtype=torch.float64)
    with pytest.warns(UserWarning, match="hidden_states is float64, which grouped_matmul lacks; PyTorch's own"):
        got = huggingface.experts(module, x, index, weights)
    torch.testing.assert_close(got, moe.ALL_EXPERTS_FUNCTIONS["batched_mm"](module, x, index, weights))


def test_registration_and_errors(monkeypatch):
    bridge.huggingface.register()
    config = transformers.MixtralConfig(**SHAPE, num_local_experts=2)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="jax_kernels")
    assert model.config._experts_implementation == "jax_kernels"
    with pytest.raises(TypeError, match=r"^model: got Linear, want a transformers\.PreTrainedModel"):
        bridge.huggingface.replace_experts(torch.nn.Linear(2, 2))
    shape = {name: x for name, x in SHAPE.items() if name != "num_experts_per_tok"}
    llama = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape))
    with pytest.raises(ValueError, match=r"^model: got a LlamaForCausalLM, want one with experts that go through"):
        bridge.huggingface.replace_experts(llama)
    monkeypatch.setattr(huggingface, "_experts_interface", lambda: None)
    with pytest.raises(ImportError, match="got a transformers without ExpertsInterface"):
        bridge.huggingface.replace_experts(model)
