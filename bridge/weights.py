"""Converts parameters between PyTorch modules, Hugging Face models and the Flax models.

Flax parameters are nested dicts of arrays, in the form of flax.nnx.to_pure_dict and flax.nnx.update. All parameters are
copied; no memory is shared. Flax is not imported.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike

from jax_kernels.bridge.hf_weights import NAMES, check_config, from_hf, has_hf_names, to_hf, transformer_fields
from jax_kernels.bridge.interop import fork
from jax_kernels.bridge.interop.arguments.dtensors import is_dtensor
from jax_kernels.bridge.jax_functions.argument_checks import advice, type_name
from jax_kernels.bridge.nn.adaptive_attention import AdaptiveAttention
from jax_kernels.bridge.nn.multihead_attention import MultiheadAttention
from jax_kernels.bridge.nn.multihead_dilated_attention import MultiheadDilatedAttention
from jax_kernels.bridge.nn.ring_dilated_attention import RingDilatedAttention

__all__ = ["from_flax", "to_flax", "transformer_fields"]

type FlaxParameters = dict[str | int, FlaxParameters | jax.Array]
type GivenParameters = Mapping[Any, GivenParameters | ArrayLike]

_BF16 = np.dtype(jnp.bfloat16)
# Modules that jax_kernels.models cannot compute: its attention has no biases, or rotates queries and keys.
_ALONE = (
    torch.nn.MultiheadAttention,
    MultiheadAttention,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    AdaptiveAttention,
)
_OWN_NAMES = ("weight", "bias", "A")
# The parameters of a MixtureOfExperts, the same in PyTorch and Flax, and their numbers of axes.
_OF_EXPERTS = {"router": 2, "expert_bias": 1, "gate_proj": 3, "up_proj": 3, "down_proj": 3}


def to_flax(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> FlaxParameters:
    """Returns the parameters of a module or a state dict in the form of the Flax model of the same kind.

    For example::

        nnx.update(flax_model, bridge.weights.to_flax(torch_model))

    | source | Flax |
    |---|---|
    | bridge.nn.Transformer | models.Transformer, models.LongNet |
    | bridge.nn.DynamicMaskAttention, Linear, GatedMLP, LayerNorm, RMSNorm; torch.nn's | modules of the same names |
    | bridge.nn.MixtureOfExperts, with its expert_bias | models.MixtureOfExperts |
    | a causal Llama, Mistral, Mixtral, Qwen3 or Qwen3-MoE, or its state dict | models.Transformer |

    Args:
      source: the module, or its state dict. A Llama's lm_head is omitted if it equals the embedding, but never for a
        module whose config has tie_word_embeddings=False.

    Returns:
      nested dicts by name, with ints for the numbers of layers, of jax.Arrays in the parameters' dtypes. Kernels are
        [in, out], transposed from PyTorch's.

    Raises:
      ValueError: a module has no Flax model of its kind, or has a parameter that the model lacks, such as a bias of a
        Llama's projections, or a norm over several axes; a Hugging Face model computes another function; or there are
        low-bit weights.
      TypeError: source is no module or mapping, or a parameter is no tensor, is a DTensor, is sparse or on the meta
        device, or has a dtype that JAX lacks.
      RuntimeError: the process was forked from one in which JAX ran.
    """
    fork.refuse()
    if not isinstance(source, torch.nn.Module | Mapping):
        raise TypeError(f"source: got {type_name(source)}, want a torch.nn.Module or its state dict")
    state = source.state_dict() if isinstance(source, torch.nn.Module) else source
    for name, x in state.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"source: got {type_name(x)} for {name}, want a torch.Tensor{advice(x)}")
    for name in state:
        if name.rpartition(".")[2] == "weight_values":
            raise ValueError(
                f"source: got {name}, low-bit weights, want float weights: convert before quantize_weights"
            )
    if is_llama := has_hf_names(state):
        state = from_hf(state)
        if hasattr(source, "config"):
            check_config(source.config)
    elif isinstance(source, torch.nn.Module):
        _check_modules(source)
    found: dict[Any, Any] = {}
    for name, tensor in state.items():
        path, array = _flax_path(name, tensor), _array(name, tensor)
        place = found
        for part in path[:-1]:
            place = place.setdefault(int(part) if part.isdigit() else part, {})
        place[path[-1]] = jnp.asarray(array.T if path[-1] == "kernel" else array)
    may_tie = is_llama and getattr(getattr(source, "config", None), "tie_word_embeddings", True)
    if may_tie and {"head", "embed"} <= found.keys() and np.array_equal(found["head"]["kernel"].T, found["embed"]):
        del found["head"]
    return found


def from_flax(parameters: GivenParameters, names: str = "bridge") -> dict[str, torch.Tensor]:
    """Returns a Flax model's parameters as a PyTorch state dict: tensors by dotted name. The inverse of to_flax.

    For example::

        state = bridge.weights.from_flax(nnx.to_pure_dict(nnx.state(flax_model, nnx.Param)), names="llama")
        llama.load_state_dict(state)

    Args:
      parameters: nested dicts of arrays, or one dict by dotted names, as models.flat_parameters returns it.
      names: "bridge" for bridge.nn's modules, and for causal language models of transformers "llama" (also Mistral),
        "mixtral", "qwen3" and "qwen3_moe". If the model has no head, its embedding becomes the lm_head.

    Returns:
      tensors on the CPU, in the arrays' dtypes. Matrices of linear layers are [out, in], transposed from Flax's.

    Raises:
      ValueError: an array has more axes than a parameter of jax_kernels.models; names is unknown; or a model
        of transformers lacks a parameter.
      TypeError: parameters is no dict, or contains a value that is no array of numbers.
      RuntimeError: the process was forked from one in which JAX ran.
    """
    fork.refuse()
    if names not in ("bridge", *NAMES):
        raise ValueError(f"names: got {names!r}, want 'bridge', {', '.join(map(repr, NAMES[:-1]))} or {NAMES[-1]!r}")
    if not isinstance(parameters, Mapping):
        raise TypeError(f"parameters: got {type_name(parameters)}, want nested dicts of arrays")
    state = {}
    for path, x in _leaves(parameters):
        name, is_kernel = _torch_name(path)
        array = np.asarray(x)
        if array.dtype != _BF16 and array.dtype.kind not in "biufc":
            raise TypeError(f"parameters: got {type_name(x)} for {'.'.join(path)}, want an array of numbers")
        most = 2 if is_kernel or name.endswith("embed.weight") else _OF_EXPERTS.get(path[-1], 1)
        if array.ndim > most:
            raise ValueError(
                f"parameters: got {'.'.join(path)} of shape {array.shape}, which no model of jax_kernels.models has"
            )
        state[name] = _tensor(array.T if is_kernel else array)
    return state if names == "bridge" else to_hf(state, names)


def _check_modules(source: torch.nn.Module) -> None:
    """Raises ValueError, naming the module, if the module or one of its parts is of a kind that Flax models lack.

    These are MultiheadAttention (torch.nn's and bridge.nn's), MultiheadDilatedAttention, RingDilatedAttention,
    AdaptiveAttention, a norm over several axes, and an Embedding that is not called `embed`. Nothing else is checked.
    """
    for name, module in source.named_modules():
        place = f"source.{name}" if name else "source"
        if isinstance(module, _ALONE):
            raise ValueError(f"{place}: got a {type(module).__name__}, which jax_kernels.models lacks")
        if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm) and len(module.normalized_shape) != 1:
            raise ValueError(f"{place}: got a norm over {tuple(module.normalized_shape)}, want one over the last axis")
        if isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] != "embed":
            raise ValueError(f"{place}: got an Embedding, want it as `embed` of a bridge.nn.Transformer")


def _flax_path(name: str, tensor: torch.Tensor) -> list[str]:
    """Returns the keys of a PyTorch parameter in Flax's nested dicts.

    The last part "weight" becomes "kernel" if it has two axes, "scale" if it has one, and is omitted in an embedding.

    name: the dotted name in the PyTorch module. Raises ValueError for a parameter that no Flax model has.
    """
    *parts, last = name.split(".")
    if _OF_EXPERTS.get(last) == tensor.ndim:
        return [*parts, last]
    if last not in _OWN_NAMES or tensor.ndim > (2 if last == "weight" else 1):
        raise ValueError(f"source: got {name} of shape {tuple(tensor.shape)}, which no model of jax_kernels.models has")
    if last != "weight":
        return [*parts, last]
    if parts and parts[-1] == "embed":
        return parts
    return [*parts, "scale" if tensor.ndim == 1 else "kernel"]


def _torch_name(path: tuple[str, ...]) -> tuple[str, bool]:
    """Returns (the dotted name in a PyTorch module, whether the array must be transposed) of a Flax parameter.

    path: the keys of the parameter in the nested dicts.
    """
    *parts, last = path
    if last == "embed":
        return ".".join((*parts, last, "weight")), False
    return ".".join((*parts, "weight" if last in ("kernel", "scale") else last)), last == "kernel"


def _leaves(parameters: GivenParameters, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], ArrayLike]]:
    """Yields (the keys, the array) of each array in nested dicts; a key with dots counts as several keys."""
    for key, x in parameters.items():
        longer = (*path, *str(key).split("."))
        if isinstance(x, Mapping):
            yield from _leaves(x, longer)
        else:
            yield longer, x


def _array(name: str, tensor: torch.Tensor) -> np.ndarray:
    """Returns a copy of the tensor as a NumPy array of its dtype.

    Raises TypeError, naming the parameter, for a DTensor, for a tensor that is sparse or on the meta device, and unless
    the dtype is float32, bfloat16 or float16.
    """
    if is_dtensor(tensor):
        raise TypeError(f"{name}: got a DTensor, want a torch.Tensor; full_tensor() gathers its shards")
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "meta" if tensor.is_meta else tensor.layout
        raise TypeError(f"{name}: got a {kind} tensor, want a dense tensor with values")
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(_BF16)
    if host.dtype not in (torch.float32, torch.float16):
        raise TypeError(f"{name}: got dtype {host.dtype}, want torch.float32, torch.bfloat16 or torch.float16")
    return host.numpy().copy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Returns a copy of the array as a tensor on the CPU."""
    own = np.array(array, order="C")
    return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16) if own.dtype == _BF16 else torch.from_numpy(own)
