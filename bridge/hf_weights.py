"""The parameters of Hugging Face models under the names of bridge.nn.Transformer, and back, and their configs."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["NAMES", "check_config", "from_hf", "has_hf_names", "to_hf", "transformer_fields"]

# Parts of a Llama's parameter names: in transformers -> in jax_kernels.models.Transformer.
_LLAMA = {
    "embed_tokens": "embed",
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "o_proj": "out_proj",
    "post_attention_layernorm": "mlp_norm",
    "lm_head": "head",
}
_FINAL = {"norm": "final_norm"}
_OF_LAYER = "input_layernorm|post_attention_layernorm|self_attn\\.[qkvo]_proj|mlp\\.(gate|up|down)_proj"
_QK_NORMS = "self_attn\\.[qk]_norm"
# The parameters of a layer that a Llama lacks, by the names that from_flax takes.
_MORE = {"llama": "", "mixtral": "", "qwen3": f"|{_QK_NORMS}", "qwen3_moe": f"|{_QK_NORMS}"}
NAMES = tuple(_MORE)
_ANY_LAYER = re.compile(rf"layers\.\d+\.({_OF_LAYER}|{_QK_NORMS})\.weight")
_EXPERTS = re.compile(r"layers\.\d+\.mlp\.(gate\.weight|experts\.(gate_up_proj|down_proj))")
_OWN_EXPERTS = re.compile(r"layers\.\d+\.mlp\.(router|gate_proj|up_proj|down_proj)")
_HF_NAMES = re.compile(r"(^|\.)layers\.\d+\.self_attn\.[qkvo]_proj\.")
_OTHERS = ("embed_tokens.weight", "norm.weight", "lm_head.weight")

# The model types of transformers that models.Transformer computes, and the config values that it requires.
_KINDS = ("llama", "mistral", "mixtral", "qwen3", "qwen3_moe")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "attention_multiplier": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1.0),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "no_rope_layers": (None, []),
}


def has_hf_names(state: Mapping[str, Any]) -> bool:
    """Whether the names of a state dict are transformers'."""
    return any(_HF_NAMES.search(name) for name in state)


def from_hf(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the parameters of a Llama, a Mixtral, a Qwen3 or a Qwen3-MoE under bridge.nn.Transformer's names.

    Experts get the layouts of a MixtureOfExperts: [in, out], gate and up apart, and the router in float32. Raises
    ValueError for unknown names.
    """
    short = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    known = lambda name: _ANY_LAYER.fullmatch(name) or _EXPERTS.fullmatch(name) or name in _OTHERS
    unknown = sorted(name for name in short if not known(name))
    if unknown:
        raise ValueError(f"source: got parameters that models.Transformer lacks: {', '.join(unknown[:4])}")
    renamed = {}
    for name, tensor in short.items():
        if _EXPERTS.fullmatch(name):
            layer, _, kind = name.partition(".mlp.")
            own = f"{layer}.mlp."
            if kind == "gate.weight":
                renamed[f"{own}router"] = tensor.float().T
            elif kind == "experts.down_proj":
                renamed[f"{own}down_proj"] = tensor.transpose(1, 2)
            else:
                gate, up = tensor.transpose(1, 2).chunk(2, dim=-1)
                renamed |= {f"{own}gate_proj": gate, f"{own}up_proj": up}
            continue
        names = _FINAL if name == "norm.weight" else _LLAMA
        renamed[".".join(names.get(part, part) for part in name.split("."))] = tensor
    return renamed


def to_hf(state: Mapping[str, torch.Tensor], names: str) -> dict[str, torch.Tensor]:
    """Returns the parameters of a bridge.nn.Transformer under transformers' names; the inverse of from_hf.

    names: the type of the model, one of NAMES. Without a head, the embedding becomes the lm_head. Raises ValueError for
    parameters that a model of this type lacks, without an embedding, and for experts with only one of gate_proj and
    up_proj.
    """
    theirs = {own: other for other, own in (_LLAMA | _FINAL).items()}
    layer = re.compile(rf"layers\.\d+\.({_OF_LAYER}{_MORE[names]})\.weight")
    found = {}
    for name, tensor in state.items():
        is_of_expert = _OWN_EXPERTS.fullmatch(name) is not None
        full = ".".join(theirs.get(part, part) for part in name.split("."))
        if not (layer.fullmatch(full) or full in _OTHERS or (is_of_expert and names in ("mixtral", "qwen3_moe"))):
            kind = "Llama" if names == "llama" else names
            raise ValueError(f"parameters: got {name!r}, which a {kind} lacks")
        own, _, last = name.rpartition(".")
        if not is_of_expert:
            found[full if full.startswith("lm_head") else f"model.{full}"] = tensor
        elif last == "router":
            found[f"model.{own}.gate.weight"] = tensor.T.contiguous()
        elif last == "down_proj":
            found[f"model.{own}.experts.down_proj"] = tensor.transpose(1, 2).contiguous()
        else:
            other = f"{own}.{'up_proj' if last == 'gate_proj' else 'gate_proj'}"
            if other not in state:
                raise ValueError(f"parameters: got {name!r} without {other!r}, want both")
            if last == "gate_proj":
                both = torch.cat([tensor, state[other]], dim=-1)
                found[f"model.{own}.experts.gate_up_proj"] = both.transpose(1, 2).contiguous()
    if "embed.weight" not in state:
        raise ValueError("parameters: got no 'embed.weight', which becomes embed_tokens")
    return {"lm_head.weight": found["model.embed_tokens.weight"]} | found


def transformer_fields(config: "PreTrainedConfig") -> dict[str, Any]:
    """Returns the fields of models.TransformerConfig for a transformers.LlamaConfig, as a dict.

    For example, TransformerConfig(**transformer_fields(llama.config)). Supported are the model types "llama",
    "mistral", "mixtral", "qwen3" and "qwen3_moe". "qwen3" and "qwen3_moe" have qk_norm=True. "mixtral" and "qwen3_moe"
    have `experts`, a dict of the fields of models.ExpertsConfig. Its balance_loss stays the default, since
    transformers' loss averages over the layers.

    Raises ValueError for other model types, and for features that models.Transformer lacks: biases, scaled rotary
    frequencies, sliding windows, multipliers, router noise, and activations other than silu.
    """
    check_config(config)
    rotary = dict(getattr(config, "rope_parameters", None) or {})
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "model_dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "mlp_dim": config.intermediate_size,
        "rope_theta": float(rotary.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        "norm_eps": config.rms_norm_eps,
        "tie_embeddings": config.tie_word_embeddings,
    }
    if config.model_type.startswith("qwen3"):
        fields["qk_norm"] = True
    if config.model_type == "mixtral":
        fields["experts"] = {
            "num_experts": config.num_local_experts,
            "experts_per_token": config.num_experts_per_tok,
            "mlp_dim": config.intermediate_size,
        }
    if config.model_type == "qwen3_moe":
        layers = _expert_layers(config)
        fields["experts"] = layers and {
            "num_experts": config.num_experts,
            "experts_per_token": config.num_experts_per_tok,
            "mlp_dim": config.moe_intermediate_size,
            "renormalize": config.norm_topk_prob,
            "layers": None if len(layers) == config.num_hidden_layers else layers,
        }
    return fields


def _expert_layers(config: Any) -> tuple[int, ...] | None:
    """Returns the indices of a Qwen3-MoE's layers with experts; None if there are none."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    has_experts = lambda i: config.num_experts > 0 and i not in dense and (i + 1) % step == 0
    return tuple(filter(has_experts, range(config.num_hidden_layers))) or None


def check_config(config: Any) -> None:
    """Raises ValueError unless models.Transformer computes the function of a transformers model with this config."""
    kind = getattr(config, "model_type", None)
    if kind not in _KINDS:
        want = f"{', '.join(map(repr, _KINDS[:-1]))} or {_KINDS[-1]!r}"
        raise ValueError(f"config.model_type: got {kind!r}, want {want}, whose function models.Transformer has")
    neutral = _NEUTRAL | ({"router_jitter_noise": (None, 0.0)} if kind == "mixtral" else {})
    for name, values in neutral.items():
        if hasattr(config, name) and getattr(config, name) not in values:
            raise ValueError(f"config.{name}: got {getattr(config, name)!r}, which models.Transformer does not have")
    rotary = dict(getattr(config, "rope_parameters", None) or {})
    if rotary.get("rope_type", "default") != "default" or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.rope_parameters: got {rotary!r}, which models.Transformer does not have")
