"""Contenders that run in PyTorch, on the values of the JAX arrays.

Each contender gets its fastest layout: [B, H, T, D], contiguous, for scaled_dot_product_attention and
flex_attention, [B, T, H, D] for FlashAttention-4.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.cases import Case, InputSet, Oracle
from harness.timing import Built

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TensorSet(NamedTuple):
    """An InputSet in PyTorch: [B, H, T, D] if heads come first, else [B, T, H, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dout: torch.Tensor

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value


class TorchAttention(NamedTuple):
    """A function of query, key and value, its description, and its layout."""

    function: Attention
    plan: str
    heads_first: bool


def build(name: str, case: Case, sets: Sequence[InputSet], oracle: Oracle) -> Built:
    """The contender of this name, in the case's mode."""
    made = _MAKERS[name](case)
    return Built(in_mode(made.function, case.mode, tensors(sets, made.heads_first), made.heads_first), made.plan)


def tensors(sets: Sequence[InputSet], heads_first: bool) -> list[TensorSet]:
    """Copies of the arrays in the layout."""
    return [TensorSet(*(_tensor(x, heads_first) for x in (*s.qkv, s.dout))) for s in sets]


def _tensor(x: Any, heads_first: bool) -> torch.Tensor:
    shared = torch.from_dlpack(x)
    return shared.transpose(1, 2).contiguous() if heads_first else shared.clone()


def in_mode(function: Attention, mode: str, tensors: Sequence[TensorSet], heads_first: bool) -> Callable[[int], tuple]:
    """call(i) of the mode, over the sets in turn. Outputs are views, [B, T, H, D] in either layout."""

    def view(outputs: Sequence[torch.Tensor]) -> tuple:
        return tuple(x.transpose(1, 2) for x in outputs) if heads_first else tuple(outputs)

    if mode == "fwd":

        @torch.no_grad()
        def forward(index: int) -> tuple:
            return view([function(*tensors[index % len(tensors)].qkv)])

        return forward

    leaves = [TensorSet(*(x.detach().requires_grad_() for x in inputs.qkv), inputs.dout) for inputs in tensors]
    if mode == "bwd":
        saved = [function(*inputs.qkv) for inputs in leaves]

        def backward(index: int) -> tuple:
            inputs = leaves[index % len(leaves)]
            return view(torch.autograd.grad(saved[index % len(leaves)], inputs.qkv, inputs.dout, retain_graph=True))

        return backward

    def both(index: int) -> tuple:
        inputs = leaves[index % len(leaves)]
        out = function(*inputs.qkv)
        return view([out.detach(), *torch.autograd.grad(out, inputs.qkv, inputs.dout)])

    return both


def _sdpa(backend: SDPBackend, case: Case) -> TorchAttention:
    options = {"is_causal": case.causal, "enable_gqa": case.heads != case.kv_heads}

    def function(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return TorchAttention(function, f"scaled_dot_product_attention, {backend.name}", heads_first=True)


def settle_compiler() -> None:
    """Lets torch.compile make a program for each of many shapes. Call it before torch.compile."""
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # the backward runs many times on one forward's buffers
    torch._dynamo.config.recompile_limit = 1000


def flex(case: Case, block_mask: Any = None, backend: str = "TRITON") -> TorchAttention:
    """Compiled flex_attention. block_mask: None for the case's own. backend: "FLASH" is FA4's kernel."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    settle_compiler()
    options: dict[str, Any] = {"enable_gqa": case.heads != case.kv_heads, "kernel_options": {"BACKEND": backend}}
    if block_mask is not None:
        options["block_mask"] = block_mask
    elif case.causal:
        causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        options["block_mask"] = create_block_mask(causal, None, None, case.seq, case.seq, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = "block mask from the causal rule" if case.causal else "no mask"
    function = functools.partial(compiled, **options)
    return TorchAttention(function, f"torch.compile(flex_attention), {backend}, {mask}", heads_first=True)


def _fa4(case: Case) -> TorchAttention:
    from flash_attn.cute import flash_attn_func

    def function(q, k, v):
        result = flash_attn_func(q, k, v, softmax_scale=1 / math.sqrt(case.head_dim), causal=case.causal)
        return result[0] if isinstance(result, tuple) else result  # newer releases return lse too

    return TorchAttention(function, "flash_attn.cute.flash_attn_func", heads_first=False)


_MAKERS: dict[str, Callable[[Case], TorchAttention]] = {
    "torch-cudnn": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "torch-fa2": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "torch-flex": flex,
    "torch-flex-flash": functools.partial(flex, backend="FLASH"),
    "fa4": _fa4,
}
