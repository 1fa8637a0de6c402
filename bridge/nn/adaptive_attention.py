"""Multi-head self-attention and cross-attention as a PyTorch module."""

from typing import Any

import torch

from jax_kernels import dispatch
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.nn.layers import check_flags, check_input, empty_attention, positive, uncomputed_weight
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention
from jax_kernels.bridge.ops.explain import explain
from jax_kernels.masks import Mask

__all__ = ["AdaptiveAttention"]


class AdaptiveAttention(torch.nn.Module):
    """Multi-head attention over [B, T, dim] by an implementation chosen for each call's device, dtype and shapes.

    Equivalent to the following code::

        query, key, value = split_heads(q_proj(x)), split_heads(k_proj(context)), split_heads(v_proj(context))
        out = out_proj(bridge.flash_attention(query, key, value, mask=mask, is_causal=is_causal).flatten(2))

    Parameters: q_proj.weight [num_heads * head_dim, dim], k_proj.weight and v_proj.weight
    [num_kv_heads * head_dim, context_dim], out_proj.weight [dim, num_heads * head_dim], and with bias q_proj.bias, ...;
    initialised as in torch.nn.Linear.

    Args:
      dim: width of input and output.
      num_heads: number of query heads.
      num_kv_heads: number of key and value heads, a divisor of num_heads (None: num_heads).
      head_dim: width of a head, up to 256 (None: dim / num_heads).
      context_dim: width of the context (None: dim).
      bias: whether the projections have a bias.
      is_causal: whether token i attends only to tokens up to i, in calls that do not say.
      implementation: "mosaic_gpu", "triton", "cudnn" or "xla"; None picks the device's first that supports each call.
      device, dtype: device and dtype of the parameters, as in any PyTorch module.

    Raises:
      ValueError, TypeError: an argument is out of range, or has a wrong type; the error names it.
    """

    @plain_arguments
    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        is_causal: bool = False,
        implementation: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "context_dim": context_dim}
        given = {"dim": dim, "num_heads": num_heads} | {name: x for name, x in sizes.items() if x is not None}
        for name, size in given.items():
            positive(name, size)
        if head_dim is None and dim % num_heads:
            raise ValueError(f"dim: got {dim} with num_heads={num_heads}, want a multiple of it, or a head_dim")
        check_flags(bias=bias, is_causal=is_causal)
        self.dim = dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.context_dim = dim if context_dim is None else context_dim
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: got {num_kv_heads}, want a divisor of num_heads={num_heads}")
        self.is_causal = is_causal
        self.implementation = implementation
        of_queries, of_keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = torch.nn.Linear(dim, of_queries, **options)
        self.k_proj = torch.nn.Linear(self.context_dim, of_keys, **options)
        self.v_proj = torch.nn.Linear(self.context_dim, of_keys, **options)
        self.out_proj = torch.nn.Linear(of_queries, dim, **options)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | Mask | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        """Attends from x to the context, or to x itself. Returns [B, T, dim].

        Args:
          x: [B, T, dim]. context: [B, S, context_dim].
          mask: bool, broadcastable to [B, num_heads, T, S], True where a token may attend, or a masks.Mask.
          is_causal: token i attends only to tokens up to i. None: the module's is_causal.

        An empty batch gives an empty result. Raises ValueError if a shape is wrong or a tensor is nested, and the
        errors of flash_attention.
        """
        if symbolic_trace.is_traced(x, context):
            return symbolic_trace.leaf(self, x, context=context, mask=mask, is_causal=is_causal)
        heads = self._heads(x, context)
        out = empty_attention(*heads)
        if out is None:
            out = flash_attention(*heads, **self._options(mask, is_causal))
        return self.out_proj(out.flatten(2))

    __prepare_scriptable__ = symbolic_trace.no_script

    def explain(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | Mask | None = None,
        is_causal: bool | None = None,
    ) -> dispatch.Plan:
        """Returns the plan of a call: its implementation, its blocks and the reasons. Attention does not run.

        The arguments are forward's.
        """
        with torch.no_grad():
            return explain(flash_attention, *self._heads(x, context), **self._options(mask, is_causal))

    def _heads(self, x: torch.Tensor, context: torch.Tensor | None) -> list[torch.Tensor]:
        """Returns the projected query [B, T, num_heads, head_dim], and key and value [B, S, num_kv_heads, head_dim].

        Raises TypeError or ValueError, naming the argument, for a wrong shape or layout.
        """
        source = x if context is None else context
        name_of_source = "x" if context is None else "context"
        # A layer of another class, such as a QuantizedLinear, may take other dtypes than its weight's.
        is_plain = getattr(type(self.q_proj), "forward", None) is torch.nn.Linear.forward
        weight = uncomputed_weight(self.q_proj) if is_plain else None
        for name, given, width in (("x", x, self.dim), (name_of_source, source, self.context_dim)):
            check_input(name, given, weight)
            check_dense(name, given)
            if given.ndim != 3 or given.shape[-1] != width:
                raise ValueError(f"{name}: got shape {tuple(given.shape)}, want [batch, length, {width}]")
        projected = (self.q_proj(x), self.k_proj(source), self.v_proj(source))
        return [y.unflatten(-1, (-1, self.head_dim)) for y in projected]

    def _options(self, mask: torch.Tensor | Mask | None, is_causal: bool | None) -> dict[str, Any]:
        causal = self.is_causal if is_causal is None else is_causal
        return {"mask": mask, "is_causal": causal, "implementation": self.implementation}

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"is_causal={self.is_causal}"
        )
