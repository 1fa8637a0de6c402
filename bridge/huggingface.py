"""Hugging Face models with this library's attention, experts and loss: attn_implementation="jax_kernels".

The first call of a function imports transformers; importing this module does not.
"""

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch

from jax_kernels.bridge.hf_attention import attention, attention_mask
from jax_kernels.bridge.hf_experts import experts
from jax_kernels.bridge.nn.layers import computes_its_weight, has_global_hooks, has_hooks
from jax_kernels.bridge.nn.linear import Linear
from jax_kernels.bridge.ops.cross_entropy import linear_cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from jax_kernels.bridge.hf_cache import GrowingCache

__all__ = [
    "NAME",
    "attention",
    "attention_mask",
    "causal_lm_loss",
    "experts",
    "growing_cache",
    "register",
    "replace_attention",
    "replace_experts",
]

NAME = "jax_kernels"
# The types of models whose logits are linear in the decoder's result, but for a softcap.
_LINEAR_HEADS = (
    *("gemma", "gemma2", "gpt_oss", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen3"),
    "qwen3_moe",
)
# Arguments of a model's call, or of its loss, that do not reach the decoder.
_OF_HEAD = ("ignore_index", "logits_to_keep", "shift_labels")


def register(name: str = NAME) -> str:
    """Registers attention and experts with transformers under the name, and returns the name. It may be called again.

    Afterwards `attn_implementation=name` works in from_pretrained, in from_config, and in a model's
    set_attn_implementation. So does `experts_implementation=name`, if this version of transformers has an
    ExpertsInterface. The model gets the masks of PyTorch's attention ("sdpa"), except for plain sliding windows, which
    the kernels make themselves.

    Raises ImportError if transformers 5 or later is not installed.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise ImportError(
            "bridge.huggingface: got no transformers of version 5 or later; want it, from pip install transformers"
        ) from error
    AttentionInterface.register(name, attention)
    # Early versions of 5 request masks with other arguments. Their own sdpa_mask serves them; windows are dense masks.
    is_known = "q_length" in inspect.signature(sdpa_mask).parameters
    AttentionMaskInterface.register(name, attention_mask if is_known else sdpa_mask)
    if (interface := _experts_interface()) is not None:
        interface.register(name, experts)
    return name


def _experts_interface() -> Any:
    """Returns transformers' ExpertsInterface; None in early versions of 5, which have none."""
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:
        return None
    return ExpertsInterface


def replace_attention[Model: "PreTrainedModel"](model: Model) -> Model:
    """Sets this library's attention in all layers of a transformers.PreTrainedModel. Returns the same model.

    Raises:
      TypeError: model is no PreTrainedModel.
      ValueError: the model's class has its own attention code, which cannot be replaced.
    """
    name = register()
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {type(model).__name__}, want a transformers.PreTrainedModel")
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(
            f"model: got a {type(model).__name__}, whose attention does not go through transformers' AttentionInterface"
        )
    return model


def replace_experts[Model: "PreTrainedModel"](model: Model) -> Model:
    """Sets grouped_matmul for the experts in all layers of a transformers.PreTrainedModel. Returns the same model.

    The weights do not move. The router stays the model's own.

    Raises:
      TypeError: model is no PreTrainedModel.
      ValueError: the model's class has no experts that go through transformers' ExpertsInterface.
      ImportError: this version of transformers has no ExpertsInterface.
    """
    name = register()
    from transformers import PreTrainedModel

    if _experts_interface() is None:
        raise ImportError("bridge.huggingface: got a transformers without ExpertsInterface, want a newer one")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {type(model).__name__}, want a transformers.PreTrainedModel")
    if not any(hasattr(module, "is_transposed") and hasattr(module, "_apply_gate") for module in model.modules()):
        raise ValueError(
            f"model: got a {type(model).__name__}, want one with experts that go through transformers' ExpertsInterface"
        )
    model.set_experts_implementation(name)
    return model


def causal_lm_loss(
    model: "PreTrainedModel",
    labels: torch.Tensor,
    *,
    num_items_in_batch: torch.Tensor | int | None = None,
    z_loss: float = 0.0,
    **inputs: Any,
) -> torch.Tensor:
    """Returns the loss of a causal language model, model(labels=labels, **inputs).loss, without the logits of all
    tokens.

    The decoder, model.base_model, runs as usual; linear_cross_entropy replaces the head and the loss. The model itself
    is not called.

    Args:
      model: a transformers.PreTrainedModel with a linear head. If the config has final_logit_softcapping, it caps the
        logits. Supported are Gemma, Gemma 2, GPT-OSS, Llama, Mistral, Mixtral, OLMo, OLMo 2, Phi-3, Qwen2, Qwen3 and
        Qwen3-MoE.
      labels: integers [B, T]. The logits of a token predict the next token's label. Labels below 0, such as -100, do
        not count.
      num_items_in_batch: divides the sum of the losses, as in transformers; None for the number of labels that count.
      z_loss: as in bridge.linear_cross_entropy.
      inputs: of the model, such as input_ids, attention_mask and position_ids. With output_router_logits, here or in
        the config, the load-balancing loss of a mixture of experts is added, as in transformers.

    Raises:
      TypeError: model is no PreTrainedModel.
      NotImplementedError: the model is of another type, has hooks, another loss_function, or a forward other than
        transformers'; or its head has a bias, hooks, or a forward other than torch.nn.Linear's; or inputs has
        ignore_index, shift_labels or logits_to_keep.
    """
    register()
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {type(model).__name__}, want a transformers.PreTrainedModel")
    head = model.get_output_embeddings()
    if model.config.model_type not in _LINEAR_HEADS or not isinstance(head, torch.nn.Linear):
        want = ", ".join(_LINEAR_HEADS)
        raise NotImplementedError(f"model: got a {type(model).__name__}, want a causal language model of type {want}")
    if head.bias is not None:
        raise NotImplementedError("model: got a head with a bias, want one without")
    has_accelerates_hook = hasattr(head, "_hf_hook")  # it moves tensors
    if not computes_its_weight(head, torch.nn.Linear, Linear) and not has_accelerates_hook:
        got = f"a head of {type(head).__name__} with hooks or a forward of its own"
        raise NotImplementedError(f"model: got {got}, want torch.nn.Linear's: only the head's weight is read")
    _check_call(model, inputs)
    outputs = model.base_model(**inputs | _asked_router_logits(model, inputs) | {"return_dict": True})
    hidden = outputs.last_hidden_state
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].to(hidden.device)
    loss = linear_cross_entropy(
        hidden,
        head.weight,
        targets,
        reduction="mean" if num_items_in_batch is None else "sum",
        transpose_w=True,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        z_loss=z_loss,
    )
    loss = loss if num_items_in_batch is None else loss / num_items_in_batch
    if getattr(outputs, "router_logits", None) is None:
        return loss
    return loss + model.router_aux_loss_coef * _balance_loss(model, outputs, inputs).to(loss.device)


def _check_call(model: Any, inputs: dict[str, Any]) -> None:
    """Raises NotImplementedError if a call of the model would do more than its decoder, its head and the usual loss.

    Removes the arguments of the head from inputs.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    for name in _OF_HEAD:
        given = inputs.pop(name, None)
        is_all = name == "logits_to_keep" and isinstance(given, int) and given == 0
        if given is not None and not is_all:
            raise NotImplementedError(f"{name}: got one, want None: the loss of all labels is computed")
    has_accelerates_hook = hasattr(model, "_hf_hook")  # it moves tensors
    is_theirs = type(model).forward.__module__.startswith("transformers.models.")
    if not is_theirs or has_global_hooks() or (has_hooks(model) and not has_accelerates_hook):
        got = f"a {type(model).__name__} with hooks or a forward of its own"
        raise NotImplementedError(f"model: got {got}, want transformers': only the decoder is called")
    if model.loss_function is not ForCausalLMLoss:
        got = getattr(model.loss_function, "__name__", repr(model.loss_function))
        raise NotImplementedError(f"model.loss_function: got {got}, want transformers' ForCausalLMLoss")


def _asked_router_logits(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the decoder's argument output_router_logits by name, from the inputs or the config; {} without either."""
    asked = inputs.get("output_router_logits")
    asked = getattr(model.config, "output_router_logits", None) if asked is None else asked
    return {} if asked is None else {"output_router_logits": asked}


def _balance_loss(model: Any, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Returns the load-balancing loss by the function of the model's own file, from the decoder's outputs."""
    balance = sys.modules[type(model).__module__].load_balancing_loss_func
    return balance(outputs.router_logits, model.num_experts, model.num_experts_per_tok, inputs.get("attention_mask"))


def growing_cache(model: "PreTrainedModel | PreTrainedConfig") -> "GrowingCache":
    """Returns an empty cache with room for new tokens, for generate(past_key_values=...) and for a model's calls.

    It is a transformers.DynamicCache. Keys and values are the front of larger memory. A new token is written after
    them, where DynamicCache copies all tokens at each new token. This library's attention reads the keys and values in
    place.

    Args:
      model: a transformers.PreTrainedModel, or its config. Layers with their own window keep transformers' caches.

    Raises ImportError if transformers 5 or later is not installed.
    """
    register()
    from jax_kernels.bridge.hf_cache import GrowingCache

    return GrowingCache(getattr(model, "config", model))
