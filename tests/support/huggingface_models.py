"""Small random Hugging Face models, each with PyTorch's attention and with this library's, and padded tokens."""

import copy

import pytest
import torch

from jax_kernels import bridge

transformers = pytest.importorskip("transformers", minversion="5.0")

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # large, so that attention is far from uniform
}
DECODER = SHAPE | {"num_key_value_heads": 2}
# The config, its arguments, and the PyTorch attention that supports all of the model's arguments.
MODELS = {
    "llama": ("LlamaConfig", DECODER, "sdpa"),
    "mistral": ("MistralConfig", DECODER | {"sliding_window": 5}, "sdpa"),
    "qwen3": ("Qwen3Config", DECODER | {"head_dim": 16}, "sdpa"),
    "gemma2": (
        *("Gemma2Config", DECODER | {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 5.0}),
        "eager",
    ),
    "gpt-oss": (
        *("GptOssConfig", DECODER | {"head_dim": 16, "sliding_window": 5, "num_local_experts": 2}),
        "eager",
    ),
}
LENGTH = 12
PADDED = {"none": None, "left": [0] * 3 + [1] * 9, "right": [1] * 9 + [0] * 3}


def config_of(name):
    kind, arguments, _ = MODELS[name]
    more = {"num_experts_per_tok": 1} if name == "gpt-oss" else {}
    return getattr(transformers, kind)(**arguments, **more)


def both(name, cls="AutoModelForCausalLM", config=None):
    """A model with PyTorch's attention, and its copy with this library's attention."""
    torch.manual_seed(0)
    config = config_of(name) if config is None else config
    reference = MODELS[name][2] if name in MODELS else "sdpa"
    theirs = getattr(transformers, cls).from_config(copy.deepcopy(config), attn_implementation=reference).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape))
    return theirs, bridge.huggingface.replace_attention(copy.deepcopy(theirs))


def tokens_and_mask(padding):
    tokens = torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if PADDED[padding] is None:
        return tokens, None, torch.ones(2, LENGTH, dtype=torch.bool)
    mask = torch.tensor([PADDED[padding], [1] * LENGTH])
    return tokens, mask, mask.bool()
