"""bridge.linear_cross_entropy against PyTorch: results, gradients, torch.compile, autocast, vmap and errors."""

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from jax_kernels import bridge
from jax_kernels.bridge import huggingface

TARGETS = torch.tensor([[3, -100, 0, 36], [5, 11, -100, 2]])


def tensors(*shapes, dtype=torch.float32, seed=0):
    random = np.random.default_rng(seed)
    return [torch.tensor(random.standard_normal(shape), dtype=dtype, requires_grad=True) for shape in shapes]


def plain(x, w, reduction="none", label_smoothing=0.0):
    logits = (x @ w).float().flatten(0, -2)
    losses = F.cross_entropy(logits, TARGETS.flatten(), reduction=reduction, label_smoothing=label_smoothing)
    return losses.view(TARGETS.shape) if reduction == "none" else losses


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_results_and_gradients(reduction):
    x, w = tensors((2, 4, 16), (16, 37))
    options = {"reduction": reduction, "label_smoothing": 0.1}
    got, want = bridge.linear_cross_entropy(x, w, TARGETS, **options), plain(x, w, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y.sin().sum(), (x, w)) for y in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_8_bits(reduction):
    """Rounded tensors give the logits, and the gradients' matmuls take the tensors themselves."""
    x, w = tensors((2, 4, 16), (16, 37))
    of_x, of_w = (
        values.float() * scale.unsqueeze(axis)
        for axis, (values, scale) in (
            (axis, bridge.quantize(y.detach(), scaling="row", axis=axis)) for y, axis in ((x, -1), (w, -2))
        )
    )
    call = lambda x, w: bridge.linear_cross_entropy(x, w, TARGETS, reduction=reduction, precision="fp8")
    got, want = call(x, w), plain(of_x, of_w, reduction)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    logits = (of_x @ of_w).requires_grad_()
    losses = plain(logits, torch.eye(37), reduction)
    (of_logits,) = torch.autograd.grad(losses.sin().sum(), logits)
    right = of_logits @ w.T, x.flatten(0, 1).T @ of_logits.flatten(0, 1)
    torch.testing.assert_close(torch.autograd.grad(got.sin().sum(), (x, w)), right, rtol=1e-4, atol=1e-5)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w).sin().sum(), (x, w)), right, rtol=1e-4, atol=1e-5)


def test_gradient_of_weights():
    x, w, weights = tensors((2, 4, 16), (16, 37), (2, 4))
    got = bridge.linear_cross_entropy(x, w, TARGETS, weights=weights, reduction="mean")
    counted = torch.where(TARGETS >= 0, weights, 0)
    want = (plain(x, w) * counted).sum() / counted.sum()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(y, (x, w, weights)) for y in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_frozen_weights():
    x, w = tensors((2, 4, 16), (16, 37))
    loss = bridge.linear_cross_entropy(x, w.detach(), TARGETS, reduction="mean")
    torch.testing.assert_close(*(torch.autograd.grad(y, x)[0] for y in (loss, plain(x, w, "mean"))))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_dtypes_of_targets(dtype):
    x, w = tensors((2, 4, 16), (16, 37))
    got = bridge.linear_cross_entropy(x, w, TARGETS.to(dtype))
    torch.testing.assert_close(got, plain(x, w), rtol=1e-5, atol=1e-5)
    beyond = torch.full_like(TARGETS, 2**32 + 3)  # would be 3 in int32
    assert bridge.linear_cross_entropy(x, w, beyond).isnan().all()


def test_compiled():
    x, w = tensors((2, 4, 16), (16, 37))
    call = lambda x, w, targets: 2 * bridge.linear_cross_entropy(x, w, targets + 0, reduction="mean")
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(x, w, TARGETS)
    want = 2 * plain(x, w, "mean")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, w)) for y in (got, want)), rtol=1e-4, atol=1e-5)


def test_autocast():
    x, w = tensors((2, 4, 16), (16, 37))
    with torch.autocast("cpu", torch.bfloat16):
        got = bridge.linear_cross_entropy(x, w, TARGETS, reduction="mean")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, plain(x, w, "mean"), rtol=2e-2, atol=2e-2)
    got.backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_vmap():
    x, w = (y.detach() for y in tensors((2, 4, 16), (16, 37)))
    call = lambda x, targets: bridge.linear_cross_entropy(x, w, targets)
    torch.testing.assert_close(torch.vmap(call)(x, TARGETS), plain(x, w), rtol=1e-5, atol=1e-5)


X, W = (y.detach() for y in tensors((2, 4, 16), (16, 37)))
WRONG = {
    "numpy": ({"x": X.numpy()}, TypeError, "x: got numpy.ndarray, want a torch.Tensor"),
    "targets": ({"targets": [1, 2]}, TypeError, "targets: got builtins.list, want a torch.Tensor"),
    "float_targets": ({"targets": TARGETS.float()}, TypeError, "targets: got dtype float32, want integers"),
    "shape": ({"targets": TARGETS[0]}, ValueError, "targets: got shape (4,), want x's (2, 4)"),
    "w": ({"w": W.T}, ValueError, "w: got shape (37, 16), want [D, V] with x's D = 16"),
    "reduction": ({"reduction": "max"}, ValueError, "reduction: got 'max', want 'none', 'mean' or 'sum'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changed, error, text = WRONG[name]
    with pytest.raises(error, match=re.escape(text)):
        bridge.linear_cross_entropy(**({"x": X, "w": W, "targets": TARGETS} | changed))


SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}


def model_of(kind, cls="AutoModelForCausalLM"):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    more = {"head_dim": 16, "final_logit_softcapping": 2.0} if kind == "Gemma2" else {}
    return getattr(transformers, cls).from_config(getattr(transformers, f"{kind}Config")(**SHAPE, **more)).eval()


@pytest.mark.parametrize("kind", ["Gemma", "Gemma2", "Llama", "Mistral", "Olmo", "Olmo2", "Phi3", "Qwen2", "Qwen3"])
def test_causal_lm_loss(kind):
    """The loss and the gradients of Hugging Face's own models."""
    model = model_of(kind)
    tokens = torch.randint(3, 97, (2, 9))
    labels = torch.where(torch.arange(9) < 2, -100, tokens)
    theirs = copy.deepcopy(model)
    for items in (None, 11):
        got = huggingface.causal_lm_loss(model, labels, input_ids=tokens, num_items_in_batch=items)
        want = theirs(input_ids=tokens, labels=labels, num_items_in_batch=items).loss
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    got.backward(), want.backward()
    for (name, ours), own in zip(model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, own.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_causal_lm_loss_refuses_other_models():
    labels = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"model: got Linear, want a transformers\.PreTrainedModel"):
        huggingface.causal_lm_loss(torch.nn.Linear(2, 2), labels)
    with pytest.raises(NotImplementedError, match="model: got a GraniteForCausalLM, want a causal language model"):
        huggingface.causal_lm_loss(model_of("Granite"), labels, input_ids=labels)
    with pytest.raises(NotImplementedError, match="model: got a LlamaModel, want a causal language model"):
        huggingface.causal_lm_loss(model_of("Llama", "AutoModel"), labels, input_ids=labels)


def test_causal_lm_loss_refuses_changed_heads():
    """Only the head's weight is read: hooks, or a forward of a subclass, such as a LoRA layer's, would be lost."""
    labels = torch.ones(1, 4, dtype=torch.int64)
    model = model_of("Llama")
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, out: 2.0 * out)
    with pytest.raises(NotImplementedError, match="model: got a head of Linear with hooks"):
        huggingface.causal_lm_loss(model, labels, input_ids=labels)
    handle.remove()
    own = type("LoraLinear", (torch.nn.Linear,), {"forward": lambda self, x: 2.0 * torch.nn.Linear.forward(self, x)})
    head.__class__ = own
    with pytest.raises(NotImplementedError, match="model: got a head of LoraLinear with"):
        huggingface.causal_lm_loss(model, labels, input_ids=labels)


def _hooked(model):
    model.register_forward_pre_hook(lambda module, args: None)


def _own_forward(model):
    forward = model.forward
    model.forward = lambda *args, **options: forward(*args, **options)


def _subclass(model):
    model.__class__ = type("Own", (type(model),), {"forward": lambda self, **options: None})


def _own_loss(model):
    model.loss_function = lambda logits, labels, **options: logits.sum()


@pytest.mark.parametrize("change", [_hooked, _own_forward, _subclass, _own_loss], ids=lambda x: x.__name__.strip("_"))
def test_causal_lm_loss_refuses_changed_models(change):
    """The decoder is called, not the model: the model's hooks, its forward and its loss would be lost."""
    labels = torch.ones(1, 4, dtype=torch.int64)
    model = model_of("Llama")
    change(model)
    with pytest.raises(NotImplementedError, match=r"^model(: got a (LlamaForCausalLM|Own) with|.loss_function: got )"):
        huggingface.causal_lm_loss(model, labels, input_ids=labels)


def test_inputs_of_causal_lm_loss():
    """Arguments of the model's head or loss are refused; a config without ModelOutputs does not matter."""
    labels = torch.ones(1, 4, dtype=torch.int64)
    model = model_of("Llama")
    want = model(labels, labels=labels).loss
    for name, x in (("ignore_index", 1), ("shift_labels", labels), ("logits_to_keep", 2)):
        with pytest.raises(NotImplementedError, match=f"^{name}: got one"):
            huggingface.causal_lm_loss(model, labels, input_ids=labels, **{name: x})
    model.config.return_dict = False
    got = huggingface.causal_lm_loss(model, labels, input_ids=labels, logits_to_keep=0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
