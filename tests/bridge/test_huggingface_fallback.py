"""Hugging Face models whose attention falls back to plain PyTorch, with one warning for each reason."""

import copy
import warnings

import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge import huggingface
from jax_kernels.bridge.interop import warn_once

transformers = pytest.importorskip("transformers", minversion="5.0")

TOKENS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[1] * 9 + [0] * 3, [1] * 12])
DECODER = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
GROUPED = DECODER | {"num_key_value_heads": 2, "attention_dropout": 0.1}
BART = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "init_std": 0.3,
    "attention_dropout": 0.1,
}  # fmt: skip
MEL = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}
GPT2 = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "pad_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip
WINDOWED = GROUPED | {"sliding_window": 5, "head_dim": 8}
# The config, its arguments, the model's class, and the PyTorch attention that supports all of its arguments.
MODELS = {
    "bert": ("BertConfig", DECODER, "AutoModelForMaskedLM", "sdpa"),
    "gpt2": ("GPT2Config", GPT2, "AutoModelForCausalLM", "sdpa"),
    "llama": ("LlamaConfig", GROUPED, "AutoModelForCausalLM", "sdpa"),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": 5}, "AutoModelForCausalLM", "sdpa"),
    "gemma2": ("Gemma2Config", WINDOWED | {"attn_logit_softcapping": 5.0}, "AutoModelForCausalLM", "eager"),
    "gpt-oss": (
        *("GptOssConfig", WINDOWED | {"num_local_experts": 2, "num_experts_per_tok": 1}),
        *("AutoModelForCausalLM", "eager"),
    ),
    "bart": ("BartConfig", BART, "AutoModelForSeq2SeqLM", "sdpa"),
    "whisper": ("WhisperConfig", BART | MEL, "AutoModelForSpeechSeq2Seq", "sdpa"),
    "t5": ("T5Config", T5, "AutoModelForSeq2SeqLM", "eager"),
}


def models_of(name, reference=None):
    """A model with PyTorch's attention, its copy with this library's attention, and the arguments of a call."""
    kind, arguments, cls, own_reference = MODELS[name]
    config = getattr(transformers, kind)(**arguments)
    torch.manual_seed(0)
    theirs = getattr(transformers, cls).from_config(config, attn_implementation=reference or own_reference)
    ours = bridge.huggingface.replace_attention(copy.deepcopy(theirs))
    if name == "whisper":
        given = {"input_features": torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))}
    else:
        given = {"input_ids": TOKENS}
        if name not in ("mistral", "gemma2"):  # the kernels take a window without padding
            given["attention_mask"] = PADDING
    labels = TOKENS if "Seq2Seq" not in cls else TOKENS[:, :7].contiguous()
    return theirs, ours, given | {"labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_training_step_with_dropout(name, monkeypatch):
    """PyTorch's attention drops the same weights: the loss and the gradients are equal."""
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    theirs, ours, given = models_of(name)
    losses, gradients = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (theirs, ours):
            torch.manual_seed(3)
            loss = model.train()(**given).loss
            loss.backward()
            losses.append(loss.detach())
            gradients.append([x.grad for x in model.parameters() if x.grad is not None])
        ours(**given)
    texts = [str(x.message) for x in caught if "runs instead" in str(x.message)]
    assert len(texts) == 1
    assert texts[0].startswith("bridge.huggingface.attention: dropout=0.1 drops attention weights")
    torch.testing.assert_close(losses[1], losses[0])
    for got, want in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5 * max(1.0, float(want.abs().max())), rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_output_attentions_match_eager(name, monkeypatch):
    """Weights and logits; the kernels give the same logits. One warning."""
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    theirs, ours, given = models_of(name, "eager")
    given.pop("labels") if "decoder_start_token_id" not in MODELS[name][1] else None
    theirs.eval()
    ours.eval()
    with torch.no_grad():
        want = theirs(**given, output_attentions=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = ours(**given, output_attentions=True)
        plain = ours(**given)
    texts = [str(x.message) for x in caught if "runs instead" in str(x.message)]
    assert len(texts) == 1
    assert "output_attentions asks for attention weights" in texts[0]
    keys = [key for key in want if key.endswith("attentions")]
    assert any(want[key] for key in keys)
    for key in keys:
        for weights, right in zip(got[key], want[key], strict=True):
            torch.testing.assert_close(weights, right, atol=1e-5, rtol=1e-4)
    for logits in (got.logits, plain.logits):
        torch.testing.assert_close(logits, want.logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_left_padding_has_zero_weights(name):
    _, ours, _ = models_of(name)
    mask = PADDING.flip(1)
    ours.eval()
    with torch.no_grad():
        got = ours(TOKENS, attention_mask=mask, output_attentions=True)
    totals = got.attentions[0].sum(-1)
    assert totals.shape == (2, 4, 12)
    torch.testing.assert_close(totals, mask[:, None].expand(2, 4, 12).float())
    loss = ours.train()(TOKENS, attention_mask=mask, labels=TOKENS, output_attentions=True)
    (loss.loss + sum(x.square().sum() for x in loss.attentions)).backward()
    assert all(x.grad.isfinite().all() for x in ours.parameters() if x.grad is not None)


def test_generated_tokens_with_attentions():
    theirs, ours, _ = models_of("llama", "eager")
    arguments = {
        "attention_mask": torch.ones_like(TOKENS), "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False,
        "output_attentions": True, "return_dict_in_generate": True,
    }  # fmt: skip
    want, got = (model.eval().generate(TOKENS, **arguments) for model in (theirs, ours))
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.attentions) == 3
    for ours_of_token, theirs_of_token in zip(got.attentions, want.attentions, strict=True):
        torch.testing.assert_close(ours_of_token[0], theirs_of_token[0], atol=1e-5, rtol=1e-4)


# The arguments of a layer's attention after query, key and value, and their names in the reference.
CALLS = {
    "causal": ({}, {"is_causal": True}),
    "window": ({"sliding_window": 3}, {"is_causal": True, "window": (2, None)}),
    "capped": ({"softcap": 2.0, "scaling": 0.7}, {"is_causal": True, "softcap": 2.0, "scale": 0.7}),
    "sinks": ({"s_aux": torch.linspace(-1, 1, 4)}, {"is_causal": True, "sinks": torch.linspace(-1, 1, 4)}),
    "mask": ({"attention_mask": torch.arange(9)[:, None] % 4 > torch.arange(9) % 3}, None),
    "added": ({"attention_mask": torch.randn(2, 1, 9, 9).masked_fill(torch.rand(2, 1, 9, 9) > 0.7, -torch.inf)}, None),
    "bias": ({"position_bias": torch.randn(1, 4, 9, 9)}, {"is_causal": True, "bias": "position_bias"}),
    "bias, both ways": ({"position_bias": torch.randn(1, 4, 9, 9), "is_causal": False}, {"bias": "position_bias"}),
    "documents": (
        {"cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32)},
        {"is_causal": True, "segment_ids": (torch.arange(9) >= 4).int()[None].expand(1, -1)},
    ),
}


@pytest.mark.parametrize("how", ["weights", "head mask", "float64"])
@pytest.mark.parametrize("name", CALLS)
def test_layer_attention(name, how, reference):
    """Outputs, weights and gradients against the definition in float64, with every argument that a layer may pass."""
    options, wanted = CALLS[name]
    batch = 1 if name == "documents" else 2
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(batch, h, 9, 8, generator=draw).requires_grad_() for h in (4, 2, 2))
    mask = options.get("attention_mask")
    if wanted is None:
        wanted = {"mask": mask} if mask.dtype == torch.bool else {"bias": mask}
    wanted = {k: options["position_bias"] if isinstance(x, str) else x for k, x in wanted.items()}
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    heads_last = [x.transpose(1, 2) for x in exact]
    want, _ = reference(*heads_last, **wanted)
    ones = torch.eye(9, dtype=torch.float64)[None, :, None].expand(batch, 9, 2, 9)
    want_weights = reference(*heads_last[:2], ones, **wanted)[0].transpose(1, 2)
    given = [query, key, value]
    more, factors = {}, torch.ones(4)
    if how == "float64":
        given = [x.double() for x in given]
    elif how == "head mask":
        factors = torch.tensor([0.0, 1.0, 0.5, 2.0])
        more["head_mask"] = factors
    else:
        more["output_attentions"] = True
    got, weights = huggingface.attention(torch.nn.Module(), *given, **{"attention_mask": None, **options, **more})
    want = want * factors[:, None]
    tolerance = {"atol": 1e-12 if how == "float64" and "s_aux" not in options else 3e-6, "rtol": 0}
    assert got.dtype == given[0].dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, **tolerance)
    if how == "weights":
        torch.testing.assert_close(weights.double(), want_weights, **tolerance)
    else:
        assert weights is None
    for ours, right in zip(
        torch.autograd.grad(got.square().sum(), (query, key, value)),
        torch.autograd.grad(want.square().sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), right, atol=3e-5, rtol=1e-5)


def test_each_reason_warns_once(monkeypatch):
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    layer = torch.nn.Module()
    inputs = torch.randn(3, 1, 2, 5, 8)
    for given, options, text in (
        (inputs, {"dropout": 0.5}, "dropout=0.5 drops attention weights"),
        (inputs.double(), {}, "query is float64"),
        (torch.randn(3, 1, 2, 5, 264), {}, "head_dim is 264, and flash_attention's limit is 256"),
        (inputs, {"head_mask": torch.ones(2)}, "head_mask multiplies attention weights"),
        (inputs, {"output_attentions": True}, "output_attentions asks for attention weights"),
    ):
        with pytest.warns(UserWarning, match=f"attention: {text}.*; PyTorch's own computation runs instead$"):
            huggingface.attention(layer, *given, None, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            huggingface.attention(layer, *given, None, **options)
            huggingface.attention(layer, *given, None, **options | ({"dropout": 0.2} if "dropout" in options else {}))


def test_functions_under_other_names_raise():
    inputs = torch.randn(3, 1, 5, 2, 8)
    for call, error, text in (
        (lambda: bridge.flash_attention(*inputs.double()), TypeError, "query: got dtype torch.float64"),
        (lambda: bridge.flash_attention(*torch.randn(3, 1, 5, 2, 264)), ValueError, "query: got head_dim 264"),
        (lambda: bridge.flash_attn_func(*inputs, dropout_p=0.1), NotImplementedError, "dropout_p: got 0.1"),
        (lambda: bridge.dynamic_mask_attention(*inputs.double(), torch.ones(5, 5).bool()), TypeError, "query: got"),
        (lambda: bridge.nn.Linear(8, 8).double()(inputs[0].double()), TypeError, "input: got dtype torch.float64"),
        (lambda: bridge.nn.RMSNorm(8).double()(inputs[0].double()), TypeError, "x: got dtype torch.float64"),
    ):
        with pytest.raises(error, match=text):
            call()
