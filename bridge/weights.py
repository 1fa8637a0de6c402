"""Parameters between PyTorch modules, Hugging Face Llamas and the Flax models.

Flax parameters are nested dicts of arrays here, as flax.nnx.to_pure_dict gives and flax.nnx.update takes them. They are
copies: nothing is shared. Flax is not imported.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

__all__ = ["from_flax", "to_flax", "transformer_fields"]

# The parts of a Llama's names, in transformers and in jax_kernels.models.Transformer.
_LLAMA = {
    "embed_tokens": "embed",
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "o_proj": "out_proj",
    "post_attention_layernorm": "mlp_norm",
    "lm_head": "head",
}
_FINAL = {"norm": "final_norm"}
_LAYER = re.compile(
    r"layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight"
)
_OTHERS = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
_BF16 = np.dtype(jnp.bfloat16)


def to_flax(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """The parameters of a module or a state dict as those of the Flax model of the same kind.

    For example::

        nnx.update(flax_model, bridge.weights.to_flax(torch_model))

    | source | Flax |
    |---|---|
    | bridge.nn.Transformer | models.Transformer, models.LongNet |
    | bridge.nn.DynamicMaskAttention, Linear, GatedMLP, LayerNorm, RMSNorm; torch.nn's | those of the same names |
    | a LlamaForCausalLM, or a state dict with its names | models.Transformer (see transformer_fields) |

    Args:
      source: the module, or its state dict. A Llama's lm_head is left out where it is the embedding.

    Returns:
      nested dicts by name, numbers of layers as ints, of jax.Arrays in the parameters' dtypes: kernels are
      [in, out], transposed from PyTorch's.

    Raises:
      ValueError: a Llama has a parameter that models.Transformer lacks, such as a bias of its projections; or there are
        weights of few bits.
      TypeError: a parameter has a dtype that JAX lacks.
    """
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    for name in state:
        if name.rpartition(".")[2] == "weight_values":
            raise ValueError(
                f"source: got {name}, weights of few bits, want float ones: convert before quantize_weights"
            )
    if is_llama := any(".self_attn." in name for name in state):
        state = _without_llamas_names(state)
    found: dict[Any, Any] = {}
    for name, tensor in state.items():
        path, array = _flax_path(name, tensor), _array(name, tensor)
        place = found
        for part in path[:-1]:
            place = place.setdefault(int(part) if part.isdigit() else part, {})
        place[path[-1]] = jnp.asarray(array.T if path[-1] == "kernel" else array)
    if is_llama and "head" in found and np.array_equal(found["head"]["kernel"].T, found["embed"]):
        del found["head"]
    return found


def from_flax(parameters: Mapping[Any, Any], names: str = "bridge") -> dict[str, torch.Tensor]:
    """A PyTorch state dict of a Flax model's parameters: the inverse of to_flax.

    For example::

        state = bridge.weights.from_flax(nnx.to_pure_dict(nnx.state(flax_model, nnx.Param)), names="llama")
        llama.load_state_dict(state)

    Args:
      parameters: nested dicts of arrays, or one dict by dotted names, as models.flat_parameters gives it.
      names: "bridge" for bridge.nn's modules, and "llama" for transformers' LlamaForCausalLM. A model without a head
        gets its embedding as the Llama's lm_head.

    Returns:
      tensors on the CPU, in the arrays' dtypes.

    Raises:
      ValueError: names is neither, or, with "llama", a parameter is not one of models.Transformer's.
    """
    if names not in ("bridge", "llama"):
        raise ValueError(f"names: got {names!r}, want 'bridge' or 'llama'")
    state = {}
    for path, x in _leaves(parameters):
        name, is_kernel = _torch_name(path)
        array = np.asarray(x)
        state[name] = _tensor(array.T if is_kernel else array)
    if names == "bridge":
        return state
    llama = {_llama_name(name): tensor for name, tensor in state.items()}
    return {"lm_head.weight": llama["model.embed_tokens.weight"]} | llama


def transformer_fields(config: Any) -> dict[str, Any]:
    """The fields of models.TransformerConfig for a transformers.LlamaConfig.

    For example, TransformerConfig(**transformer_fields(llama.config)).

    Raises ValueError for what models.Transformer lacks: biases, scaled rotary frequencies, sliding windows, and an
    activation that is not silu.
    """
    rotary = dict(getattr(config, "rope_parameters", None) or {})
    lacks = {
        "hidden_act": getattr(config, "hidden_act", "silu") not in ("silu", "swish"),
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "rope_parameters": rotary.get("rope_type", "default") != "default",
        "sliding_window": getattr(config, "sliding_window", None) is not None,
    }
    for name, is_lacking in lacks.items():
        if is_lacking:
            raise ValueError(f"config.{name}: got {getattr(config, name)!r}, which models.Transformer does not have")
    return {
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


def _without_llamas_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters by the names of bridge.nn.Transformer."""
    short = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    unknown = sorted(name for name in short if not _LAYER.fullmatch(name) and name not in _OTHERS)
    if unknown:
        raise ValueError(f"source: got parameters that models.Transformer lacks: {', '.join(unknown[:4])}")
    renamed = {}
    for name, tensor in short.items():
        names = _FINAL if name == "norm.weight" else _LLAMA
        renamed[".".join(names.get(part, part) for part in name.split("."))] = tensor
    return renamed


def _llama_name(name: str) -> str:
    """A name of bridge.nn.Transformer as transformers has it."""
    theirs = {own: other for other, own in (_LLAMA | _FINAL).items()}
    full = ".".join(theirs.get(part, part) for part in name.split("."))
    if not _LAYER.fullmatch(full) and full not in _OTHERS:
        raise ValueError(f"parameters: got {name!r}, which a Llama lacks")
    return full if full.startswith("lm_head") else f"model.{full}"


def _flax_path(name: str, tensor: torch.Tensor) -> list[str]:
    *parts, last = name.split(".")
    if last != "weight":
        return [*parts, last]
    if parts and parts[-1] == "embed":
        return parts
    return [*parts, "scale" if tensor.ndim == 1 else "kernel"]


def _torch_name(path: tuple[str, ...]) -> tuple[str, bool]:
    """(the name in a PyTorch module, whether the array is to be transposed)."""
    *parts, last = path
    if last == "embed":
        return ".".join((*parts, last, "weight")), False
    return ".".join((*parts, "weight" if last in ("kernel", "scale") else last)), last == "kernel"


def _leaves(parameters: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, x in parameters.items():
        longer = (*path, *str(key).split("."))
        if isinstance(x, Mapping):
            yield from _leaves(x, longer)
        else:
            yield longer, x


def _array(name: str, tensor: torch.Tensor) -> np.ndarray:
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(_BF16)
    if host.dtype not in (torch.float32, torch.float16):
        raise TypeError(f"{name}: got dtype {host.dtype}, want torch.float32, torch.bfloat16 or torch.float16")
    return host.numpy().copy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    own = np.array(array, order="C")
    return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16) if own.dtype == _BF16 else torch.from_numpy(own)
