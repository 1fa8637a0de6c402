"""torch.nn.MultiheadAttention by flash_attention."""

import torch
from torch.nn import functional

from jax_kernels.bridge.interop.arguments.autocast import autocast_dtype
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.jax_functions.argument_checks import advice
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention
from jax_kernels.bridge.ops.drop_in import fallback

__all__ = ["MultiheadAttention"]


_NARROW = (torch.bfloat16, torch.float16)  # autocast casts these dtypes


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with this library's attention.

    It has PyTorch's arguments, parameters, initialisation and state dict, and can replace it in PyTorch's layers. One
    default differs: need_weights is False, because the kernels never store attention weights.

    Plain PyTorch computes calls with need_weights=True, which is slow. It also computes, with one warning per reason,
    dropout in training, a head_dim above 256, float64, and devices other than CPU and CUDA; and, without a warning,
    empty tensors and, in eval() without gradients, nested tensors of the strided layout.

    torch.fx.symbolic_trace keeps the module as one node. torch.jit.script of it raises RuntimeError.

    Args:
      implementation: of the attention, "mosaic_gpu", "triton", "cudnn" or "xla"; None picks the device's first that
        supports the call. The other arguments are torch.nn.MultiheadAttention's.
    """

    @plain_arguments
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        implementation: str | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.implementation = implementation

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns (the output, of query's shape; None, or with need_weights the attention weights).

        Args:
          query: [N, L, embed_dim] with batch_first, else [L, N, embed_dim]; or [L, embed_dim].
          key, value: in query's layout, with S tokens, and with kdim and vdim as the last axis.
          key_padding_mask: [N, S] or [S]. A bool mask is True where no query may attend to a key; floats are added to
            the scores.
          attn_mask: [L, S] or [N * num_heads, L, S]. A bool mask is True where a query may not attend; floats are added
            to the scores.
          need_weights: also return the attention weights, [N, L, S], or with average_attn_weights=False
            [N, num_heads, L, S].
          is_causal: token i attends only to tokens up to i. An attn_mask is then assumed to be this causal mask.

        For a query that may attend to nothing, attention, weights and gradients are 0. torch.nn.MultiheadAttention with
        need_weights gives NaN there.

        Raises:
          ValueError, TypeError: a mask or a tensor has a wrong shape or dtype, or a tensor is nested and PyTorch's fast
            path does not support the call: it takes no jagged tensors, gradients, training, masks or is_causal.
        """
        if symbolic_trace.is_traced(query, key, value):
            return symbolic_trace.leaf(
                *(self, query, key, value),
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        if query.is_nested or key.is_nested or value.is_nested:
            return self._of_nested(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if 0 in (*query.shape, *key.shape):
            if is_causal and attn_mask is None:
                attn_mask = self._causal_mask(query, key)
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(f"query, key, value: got shapes {shapes}, want 3 axes each, or 2 without a batch")
        at = 0 if self.batch_first else 1
        batch = query.shape[at] if query.ndim == 3 else 1
        if key.shape[:-1] != value.shape[:-1] or (query.ndim == 3 and key.shape[at] != batch):
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(f"query, key, value: got shapes {shapes}, want one batch, and as many keys as values")
        dropout_p = self.dropout if self.training else 0.0
        reason = fallback.reason_of(query, self.head_dim, dropout_p, "dropout")
        by_pytorch = need_weights or reason is not None
        if is_causal and (by_pytorch or self._keeps_keys()):
            attn_mask, is_causal = self._causal_mask(query, key), False
        mask, bias = self._mask_and_bias(query, key, attn_mask, key_padding_mask, batch, is_causal)
        projected = self._projected(query, key, value, batch)
        weights = None
        if by_pytorch:
            if reason is not None and not need_weights:
                fallback.warn("MultiheadAttention", reason)
            out, weights = _by_pytorch(projected, mask, bias, dropout_p, need_weights=need_weights)
        else:
            out = flash_attention(
                *projected, mask=mask, bias=bias, is_causal=is_causal, implementation=self.implementation
            )
        if weights is not None:
            weights = weights.reshape(batch, self.num_heads, *weights.shape[-2:])
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if query.ndim == 3 else weights[0]
        return self.out_proj(out.reshape(*query.shape[:-1], self.embed_dim)), weights

    __prepare_scriptable__ = symbolic_trace.no_script

    def _of_nested(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        need_weights: bool,
        attn_mask: torch.Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns forward's results for nested tensors, by PyTorch's fast path, the only computation that takes them.

        Raises ValueError if the fast path does not support the call.
        """
        named = {"query": query, "key": key, "value": value}
        name = next(name for name, x in named.items() if x.is_nested)
        want = f"{name}: got a nested tensor, want a dense one: pad it, with key_padding_mask for the padding"
        if is_causal:  # the fast path would ignore it
            raise ValueError(f"{want}; or is_causal=False, for PyTorch's fast path")
        try:
            return super().forward(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights)
        except AssertionError as error:
            _, _, why = " ".join(str(error).split()).partition("not hit because ")
            why = why or "the projections have no bias"
            raise ValueError(
                f"{want}; PyTorch's fast path, which takes nested tensors, was not hit because {why}"
            ) from None

    def _keeps_keys(self) -> bool:
        """Whether the module appends keys to each sequence (add_bias_kv, add_zero_attn). All queries attend to them."""
        return self.bias_k is not None or self.add_zero_attn

    def _projected(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: int) -> list[torch.Tensor]:
        """Returns the projected query, key and value, [B, T, H, D] each; key and value include the appended keys.

        If the sequence comes first in the given tensors, they are [1, T, B * H, D] instead: batch entries become heads,
        to avoid a copy. batch: the number of batch entries.
        """
        if self.in_proj_weight is not None and query is key is value:  # one matmul: its gradient is rounded once
            projected = list(functional.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1))
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = weights if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            projected = [functional.linear(*x) for x in zip((query, key, value), weights, biases, strict=True)]
        axis = 1 if self.batch_first and query.ndim == 3 else 0  # the axis of tokens
        if self.bias_k is not None:
            given = zip(projected[1:], (self.bias_k, self.bias_v), strict=True)
            projected[1:] = [self._appended(x, row.to(x.dtype), axis) for x, row in given]
        if self.add_zero_attn:
            projected[1:] = [self._appended(x, x.new_zeros(1, 1, self.embed_dim), axis) for x in projected[1:]]
        shape = (-1, self.num_heads, self.head_dim) if axis else (-1, batch * self.num_heads, self.head_dim)
        return [x.reshape(batch if axis else 1, *shape) for x in projected]

    @staticmethod
    def _appended(x: torch.Tensor, row: torch.Tensor, axis: int) -> torch.Tensor:
        """Returns keys or values with one token more in each batch entry.

        x: projected, [..., embed_dim], in the layout of forward's arguments. row: the token, [1, 1, embed_dim]. axis:
        x's axis of tokens.
        """
        row = row[0] if x.ndim == 2 else row.expand(*(1 if i == axis else x.shape[i] for i in range(2)), -1)
        return torch.cat([x, row], dim=axis)

    def _causal_mask(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Returns the causal mask as an attn_mask: bool [L, S], True where a query may not attend.

        That is where the key's index is larger than the query's. query, key: forward's arguments, read for L and S.
        """
        axis = 1 if self.batch_first and query.ndim == 3 else 0
        mask = torch.ones(query.shape[axis], key.shape[axis], dtype=torch.bool, device=query.device)
        return mask.triu(1)

    def _mask_and_bias(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
        batch: int,
        is_causal: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns (a bool mask, True where a query may attend; a bias) for the tensors that _projected returns.

        Each is None, or broadcastable to these tensors' scores, with columns for the appended keys. The arguments are
        forward's; batch is the number of batch entries. With is_causal, attn_mask is checked but not used, since it is
        assumed to be the causal mask. The results do not contain the causal mask then: the caller passes is_causal to
        flash_attention.
        """
        axis = 1 if self.batch_first and query.ndim == 3 else 0
        length, kv_length = query.shape[axis], key.shape[axis]
        given = []
        if attn_mask is not None:
            shapes = ((length, kv_length), (batch * self.num_heads, length, kv_length))
            _check("attn_mask", attn_mask, shapes, query)
        if attn_mask is not None and not is_causal:
            given.append(attn_mask.reshape(-1 if attn_mask.ndim == 3 else 1, length, kv_length))
        if key_padding_mask is not None:
            shape = (batch, kv_length) if query.ndim == 3 else (kv_length,)
            _check("key_padding_mask", key_padding_mask, (shape,), query)
            rows = key_padding_mask.reshape(batch, 1, 1, kv_length)
            given.append(rows.expand(-1, self.num_heads, -1, -1).reshape(-1, 1, kv_length) if batch > 1 else rows[0])
        mask = bias = None
        appended = int(self.bias_k is not None) + int(self.add_zero_attn)
        for x in given:
            x = functional.pad(x, (0, appended)) if appended else x
            if x.dtype == torch.bool:
                mask = ~x if mask is None else mask & ~x
            else:
                bias = x if bias is None else bias + x
        return tuple(None if x is None else self._of_batch(x, batch, axis) for x in (mask, bias))  # type: ignore[return-value]

    def _of_batch(self, x: torch.Tensor, batch: int, axis: int) -> torch.Tensor:
        """Reshapes a mask or bias [N * num_heads or 1, L, S] to 4 axes that fit the scores of the projected tensors.

        axis: 1 if the given tensors have the batch first: the result is [N, num_heads, L, S]; else
        [1, N * num_heads, L, S]. An entry for all heads gives [1, 1, L, S].
        """
        return x[None] if x.shape[0] == 1 or not axis else x.unflatten(0, (batch, self.num_heads))


def _by_pytorch(
    projected: list[torch.Tensor],
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    dropout_p: float,
    *,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (attention [B, T, H, D], weights [B, H, T, S] or None), computed by PyTorch.

    projected: query, key and value, each [B, T, H, D]. mask: bool, True where a query may attend, and bias: both
    broadcastable to [B, H, T, S].
    """
    query, key, value = (x.transpose(1, 2) for x in projected)
    if need_weights:
        out, weights = fallback.attention_with_weights(query, key, value, mask=mask, bias=bias, dropout_p=dropout_p)
        return out.transpose(1, 2), weights
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    return fallback.attention(query, key, value, mask, dropout_p).transpose(1, 2), None


def _check(name: str, mask: torch.Tensor, shapes: tuple[tuple[int, ...], ...], query: torch.Tensor) -> None:
    """Raises TypeError or ValueError, naming the argument, unless the mask has one of these shapes and fits query.

    It must be bool, float32 or of query's dtype, and on query's device.
    """
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{name}: got {type(mask).__name__}, want a torch.Tensor{advice(mask)}")
    check_dense(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name}: got dtype {mask.dtype}, want torch.bool (True = masked out) or floats (added)")
    casts = mask.dtype in _NARROW and autocast_dtype(query.device) is not None
    if mask.dtype not in (torch.bool, torch.float32, query.dtype) and not casts:
        or_float32 = "" if query.dtype == torch.float32 else " or torch.float32"
        raise TypeError(f"{name}: got dtype {mask.dtype}, want torch.bool, or query's dtype {query.dtype}{or_float32}")
    if mask.device != query.device:
        raise ValueError(f"{name}: got a tensor on {mask.device}, want query's device {query.device}")
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(str(x) for x in shapes)
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, want {wanted}")
