"""PyTorch's attention and Hugging Face models on a GPU."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from jax_kernels import bridge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
CASES = {
    "causal": ((2, 4, 500, 64), (2, 4, 500, 64), {"is_causal": True}),
    "grouped heads": ((2, 8, 500, 128), (2, 2, 700, 128), {"enable_gqa": True}),
    "mask": ((2, 4, 500, 64), (2, 4, 500, 64), {"attn_mask": (2, 1, 1, 500)}),
    "added to the scores": ((2, 4, 256, 64), (2, 4, 256, 64), {"attn_mask": (4, 256, 256)}),
    "5 axes": ((2, 3, 4, 130, 64), (2, 1, 4, 130, 64), {"is_causal": True}),
    "one query": ((2, 8, 1, 64), (2, 2, 1000, 64), {"enable_gqa": True}),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("case", CASES)
def test_errors_are_at_most_pytorchs(case, layout):
    q_shape, kv_shape, options = CASES[case]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in (q_shape, kv_shape, kv_shape)]
    if layout == "transposed":
        inputs = [x.transpose(-2, -3).contiguous().transpose(-2, -3) for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_options = dict(options)
    if "attn_mask" in options:
        mask = torch.randn(options["attn_mask"], device="cuda")
        options = options | {"attn_mask": mask > -0.5 if case == "mask" else mask.bfloat16()}
        exact_options["attn_mask"] = mask > -0.5 if case == "mask" else mask.bfloat16().double()
    with sdpa_kernel(SDPBackend.MATH):
        want = functional.scaled_dot_product_attention(*exact, **exact_options)
    cotangent = torch.randn_like(want)
    results = [want, *torch.autograd.grad(want, exact, cotangent)]
    errors = []
    for function in (bridge.scaled_dot_product_attention, functional.scaled_dot_product_attention):
        out = function(*inputs, **options)
        found = [out, *torch.autograd.grad(out, inputs, cotangent.bfloat16())]
        errors.append([float((x.double() - y).norm() / y.norm()) for x, y in zip(found, results, strict=True)])
    # Entries share keys: each entry's gradient is rounded to bfloat16 before the sum.
    factor = 1.6 if case == "5 axes" else 1.1
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), *errors, strict=True):
        assert ours <= factor * theirs + 1e-4, (name, ours, theirs)


def llama():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, initializer_range=0.1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 5])
def test_generate(cache, padding):
    """Given the same earlier tokens, each new token has the logits of PyTorch's attention."""
    model = llama()
    tokens = torch.randint(3, 512, (2, 200), device="cuda")
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    arguments = {
        "attention_mask": mask, "max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False,
        "cache_implementation": cache, "output_logits": True, "return_dict_in_generate": True, "disable_compile": True,
    }  # fmt: skip
    model = bridge.huggingface.replace_attention(model)
    got = model.generate(tokens, **arguments)
    assert got.sequences.shape == (2, 240)
    model.set_attn_implementation("sdpa")
    positions = torch.cat([mask, mask.new_ones(2, 40)], dim=1)
    with torch.no_grad():
        ids = (positions.cumsum(-1) - 1).clamp(min=0)
        want = model(got.sequences, attention_mask=positions, position_ids=ids).logits[:, 199:-1].float()
    found = torch.stack(got.logits, dim=1).float()
    assert float((found - want).norm() / want.norm()) < 0.03


def test_compiled_static_cache_generates():
    model = bridge.huggingface.replace_attention(llama())
    tokens = torch.randint(3, 512, (2, 200), device="cuda")
    arguments = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 10, "do_sample": False}
    want = model.generate(tokens, cache_implementation="static", disable_compile=True, **arguments)
    got = model.generate(tokens, cache_implementation="static", **arguments)
    assert got.shape == want.shape
    assert float((got == want).double().mean()) > 0.95


def test_model_gradients():
    model = llama().train()
    tokens = torch.randint(3, 512, (2, 300), device="cuda")
    grads = []
    for name in ("sdpa", bridge.huggingface.register()):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        grads.append([x.grad.float().clone() for x in model.parameters()])
    for theirs, ours in zip(*grads, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.05


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padding", [True, False])
def test_multihead_attention(batch_first, padding):
    torch.manual_seed(0)
    options = {"batch_first": batch_first, "device": "cuda", "dtype": torch.bfloat16}
    theirs = torch.nn.MultiheadAttention(256, 4, **options)
    ours = bridge.nn.MultiheadAttention(256, 4, **options)
    ours.load_state_dict(theirs.state_dict())
    exact = torch.nn.MultiheadAttention(256, 4, batch_first=batch_first, device="cuda", dtype=torch.float64)
    exact.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    mask = {"key_padding_mask": torch.arange(300, device="cuda") > torch.tensor([[200], [299]], device="cuda")}
    mask = mask if padding else {}
    results = []
    for module, given in ((exact, x.double()), (theirs, x), (ours, x)):
        given = given.detach().requires_grad_()
        out, _ = module(given, given, given, need_weights=False, **mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), [given, *module.parameters()])])
    for want, plain, got in zip(*results, strict=True):
        theirs_error, error = (float((y.double() - want).norm()) for y in (plain, got))
        assert error <= 1.1 * theirs_error + 1e-4 * float(want.norm())
