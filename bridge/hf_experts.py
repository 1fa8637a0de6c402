"""The experts of Hugging Face models by grouped_matmul, for transformers' ExpertsInterface."""

from typing import Any

import torch

from jax_kernels.bridge.jax_functions.argument_checks import FLOATS
from jax_kernels.bridge.ops.drop_in import fallback
from jax_kernels.bridge.ops.expert_rows import PermutedRows, TokenRows
from jax_kernels.bridge.ops.grouped_matmul import grouped_matmul

__all__ = ["experts"]


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts, with the signature of transformers' ExpertsInterface: [N, D].

    Each of the two matmuls of all experts is a bridge.grouped_matmul; the model's own code applies the gate. No token
    is dropped, and the host does not wait for the numbers of tokens. A token's results are multiplied by its weights
    and summed in float32, as are the gradients of a token.

    transformers' "batched_mm" computes the experts instead, with one warning for each reason, for float64 and devices
    other than CPUs and CUDA devices.

    Args:
      module: the experts of a layer, of a class with transformers' use_experts_implementation: with or without biases,
        a gate, transposed weights and a norm after each expert.
      hidden_states: [N, D]. top_k_index: integers [N, k], the experts of each token; with expert parallelism, an index
        of num_experts or more is an expert of another device, and adds 0. top_k_weights: floats [N, k].
    """
    if reason := _reason(hidden_states):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        fallback.warn("bridge.huggingface.experts", reason)
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](module, hidden_states, top_k_index, top_k_weights)
    count, each = module.num_experts, top_k_index.shape[-1]
    pairs = top_k_index.reshape(-1)
    order = pairs.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    sizes = torch.zeros(count + 1, device=pairs.device, dtype=torch.int32)
    sizes = sizes.scatter_add(0, pairs.clamp(max=count), torch.ones_like(pairs, dtype=torch.int32))[:count]
    has_gate = getattr(module, "has_gate", True)  # early versions of transformers 5 lack some of these attributes
    first = "gate_up_proj" if has_gate else "up_proj"
    rows = TokenRows.apply(hidden_states, order, inverse, each)
    hidden = _multiplied(module, rows, sizes, first)
    hidden = module._apply_gate(hidden) if has_gate else module.act_fn(hidden)
    out = _multiplied(module, hidden, sizes, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    out = PermutedRows.apply(out, inverse, order).unflatten(0, (-1, each))
    weights = top_k_weights.float()
    if getattr(module, "_is_expert_parallel", False):
        is_other = top_k_index >= count
        # A norm, a bias or a gate of rows past the last group need not be 0.
        weights, out = weights.masked_fill(is_other, 0.0), out.masked_fill(is_other[..., None], 0.0)
    return (weights[..., None] * out.float()).sum(1).to(hidden_states.dtype)


def _reason(x: torch.Tensor) -> str | None:
    """Returns the reason why grouped_matmul cannot compute experts of x; None if it can."""
    if x.dtype not in FLOATS:
        return f"hidden_states is {str(x.dtype).removeprefix('torch.')}, which grouped_matmul lacks"
    if x.device.type not in ("cpu", "cuda", "meta"):
        return f"hidden_states is on {x.device}, and grouped_matmul runs on CPUs and CUDA devices"
    return None


def _multiplied(module: Any, rows: torch.Tensor, sizes: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the rows times a matrix of their experts, plus the bias. name: of the matrices, in the module."""
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    transpose_w = not module.is_transposed  # transformers calls matrices [in, out] transposed
    return grouped_matmul(rows.to(weight.dtype), weight, sizes, bias=bias, transpose_w=transpose_w)
