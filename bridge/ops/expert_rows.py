"""The rows of an expert's matmuls in PyTorch: gathers whose backward is a gather, where PyTorch would scatter."""

from typing import Any

import torch

__all__ = ["PermutedRows", "TokenRows"]


class TokenRows(torch.autograd.Function):
    """The token of each row, [N * each, D]: tokens[order // each], of tokens [N, D].

    A row is a pair of a token and one of its `each` experts. order: from a row to its pair. inverse: from a pair to its
    row. The gradients of a token are summed in float32, or in a wider dtype of the tokens.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, each: int) -> torch.Tensor:
        return tokens[order // each]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        tokens, _, inverse, ctx.each = inputs
        ctx.save_for_backward(inverse)
        ctx.dtype = tokens.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = gradients[0][inverse]
        of_tokens = rows.view(-1, ctx.each, rows.shape[-1])  # is_grads_batched=True has no unflatten
        summed = of_tokens.sum(1, dtype=torch.promote_types(ctx.dtype, torch.float32))
        return summed.to(ctx.dtype), None, None, None


class PermutedRows(torch.autograd.Function):
    """rows[order]. inverse: the inverse permutation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return rows[order]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse], None, None
