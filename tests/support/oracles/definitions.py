"""Each op by its definition in PyTorch, in float64: an object with jax_kernels' names, for the random calls.

PyTorch compiles nothing and differentiates by itself, and shares no code with this library. Masks, dequantized values
and the tokens of dilated attention come from functions that have their own tests.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

import jax_kernels
from tests.support.oracles.dilated import sees

ACTIVATIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    jnp.sin: torch.sin,
    jax.nn.softplus: functional.softplus,
    jax.nn.mish: functional.mish,
}


class _Masks:
    """jax_kernels.masks, whose functions also take tensors."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        make = getattr(jax_kernels.masks, name)
        convert = lambda x: _jax(x) if isinstance(x, torch.Tensor) else x
        return lambda *args, **options: make(*map(convert, args), **options)


class Definitions:
    """The ops in float64. score_mods: the form in PyTorch of each score_mod, by the function in jnp."""

    masks = _Masks()

    def __init__(self, score_mods: dict[Any, Callable[..., torch.Tensor]]) -> None:
        self._score_mods = score_mods

    def flash_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, bias: Any = None, mask: Any = None,
        is_causal: bool = False, window: Any = None, segment_ids: Any = None, kv_lengths: Any = None, q_offset: Any = 0,
        score_mod: Any = None, sinks: Any = None, scale: float | None = None, softcap: float | None = None,
        return_lse: bool = False, deterministic: Any = None, implementation: Any = None,
    ) -> Any:  # fmt: skip
        positions = torch.as_tensor(q_offset, device=query.device).reshape(-1, 1) + _range(query)
        keep = _live(positions, key, is_causal, window, kv_lengths)
        if segment_ids is not None:
            keep = keep & _same_segment(segment_ids)
        if mask is not None:
            keep = keep & _dense(mask, query, key, q_offset)
        scores = _scores(query, key, scale, softcap)
        if score_mod is not None:
            b, h, q, k = torch.meshgrid(*(torch.arange(n, device=query.device) for n in scores.shape), indexing="ij")
            scores = self._score_mods[score_mod](scores, b, h, q, k)
        out, lse = _softmax(scores if bias is None else scores + bias, keep, value, sinks)
        return (out, lse) if return_lse else out

    def block_sparse_attention(self, query: Any, key: Any, value: Any, block_mask: Any, **others: Any) -> Any:
        size = others.pop("block_size")
        mask = block_mask.repeat_interleave(size, -2).repeat_interleave(size, -1)
        return self.flash_attention(query, key, value, mask=mask[..., : query.shape[1], : key.shape[1]], **others)

    def dynamic_mask_attention(self, query: Any, key: Any, value: Any, mask: Any, bias: Any, **others: Any) -> Any:
        heads, kv_heads = query.shape[2], key.shape[2]

        def of_heads(x: torch.Tensor) -> torch.Tensor:
            is_of_keys = x.ndim == 4 and x.shape[1] == kv_heads and kv_heads > 1
            return x.repeat_interleave(heads // kv_heads, 1) if is_of_keys else x

        dense = _dense(mask, query, key, others["q_offset"])
        return self.flash_attention(query, key, value, mask=of_heads(dense), bias=of_heads(bias), **others)

    def decode_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_lengths: Any = None, *, mask: Any = None,
        block_tables: Any = None, window: Any = None, softcap: Any = None, sinks: Any = None, scale: Any = None,
        return_lse: bool = False, implementation: Any = None,
    ) -> Any:  # fmt: skip
        if block_tables is not None:
            key, value = (x[block_tables.long()].flatten(1, 2) for x in (key, value))
        lengths = kv_lengths if kv_lengths is not None else torch.full((len(query),), key.shape[1])
        positions = lengths.to(query.device).reshape(-1, 1) - query.shape[1] + _range(query)
        keep = _live(positions, key, True, None if window is None else (window, -1), lengths)
        keep = keep if mask is None else keep & mask
        out, lse = _softmax(_scores(query, key, scale, softcap), keep, value, sinks)
        return (out, lse) if return_lse else out

    def flash_attention_fp8(
        self, query: Any, key: Any, value: Any, q_scale: Any, k_scale: Any, v_scale: Any, **others: Any
    ) -> Any:
        return self.flash_attention(query, key, value, **others)

    def dilated_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, segment_ids: Any = None,
        combine: str = "lse", stop_gradient_weights: bool = False, scale: Any = None, deterministic: Any = None,
        return_lse: bool = False, implementation: Any = None, **pattern: Any,
    ) -> Any:  # fmt: skip
        scores, outs, lses = _scores(query, key, scale, None), [], []
        for live in sees(query.shape[1], query.shape[2], **pattern):
            keep = torch.as_tensor(live, device=query.device)[None]
            keep = keep if segment_ids is None else keep & _same_segment(segment_ids)
            out, lse = _softmax(scores, keep.expand(scores.shape), value, None)
            outs.append(out)
            lses.append(lse)
        of_branches = torch.stack(lses)
        dead = torch.isneginf(of_branches)
        highest = torch.where(dead, 0.0, of_branches).amax(0).detach()
        terms = torch.where(dead, 0.0, torch.exp(torch.where(dead, 0.0, of_branches - highest)))
        total = terms.sum(0)
        lse = torch.where(total > 0, torch.log(torch.where(total > 0, total, 1.0)) + highest, -torch.inf)
        shares = terms / torch.where(total > 0, total, 1.0)
        shares = shares.detach() if stop_gradient_weights else shares
        shares = torch.full_like(shares, 1 / len(outs)) if combine == "mean" else shares
        merged = sum(share.transpose(1, 2)[..., None] * out for share, out in zip(shares, outs, strict=True))
        return (merged, lse) if return_lse else merged

    def matmul(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        bias: Any = None,
        activation: Any = None,
        residual: Any = None,
        transpose_w: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        out = x @ (w.T if transpose_w else w)
        out = ACTIVATIONS[activation](out if bias is None else out + bias)
        return out if residual is None else out + residual

    def gated_matmul(
        self,
        x: torch.Tensor,
        w_gate: torch.Tensor,
        w_up: torch.Tensor,
        activation: Any = "silu",
        *,
        residual: Any = None,
        transpose_w: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        w_gate, w_up = (w.T if transpose_w else w for w in (w_gate, w_up))
        out = ACTIVATIONS[activation](x @ w_gate) * (x @ w_up)
        return out if residual is None else out + residual

    def mlp(
        self,
        x: torch.Tensor,
        w_up: torch.Tensor,
        w_down: torch.Tensor,
        *,
        w_gate: Any = None,
        bias_up: Any = 0.0,
        bias_down: Any = 0.0,
        activation: Any = "silu",
        residual: Any = None,
        transpose_w: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        turned = lambda w: w.T if transpose_w else w
        act = ACTIVATIONS[activation]
        up = x @ turned(w_up) + bias_up
        out = (act(up) if w_gate is None else act(x @ turned(w_gate)) * up) @ turned(w_down) + bias_down
        return out if residual is None else out + residual

    def grouped_matmul(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        group_sizes: Any,
        *,
        bias: Any = None,
        activation: Any = None,
        transpose_w: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        def of_group(rows: torch.Tensor, i: int) -> torch.Tensor:
            of_bias = None if bias is None else bias[i]
            return self.matmul(rows, w[i], bias=of_bias, activation=activation, transpose_w=transpose_w)

        return _by_group(x, group_sizes, w.shape[1 if transpose_w else 2], of_group)

    def grouped_gated_matmul(
        self,
        x: torch.Tensor,
        w_gate: torch.Tensor,
        w_up: torch.Tensor,
        group_sizes: Any,
        activation: Any = "silu",
        *,
        transpose_w: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        def of_group(rows: torch.Tensor, i: int) -> torch.Tensor:
            return self.gated_matmul(rows, w_gate[i], w_up[i], activation, transpose_w=transpose_w)

        return _by_group(x, group_sizes, w_gate.shape[1 if transpose_w else 2], of_group)

    def layer_norm(
        self,
        x: torch.Tensor,
        scale: Any = None,
        bias: Any = None,
        *,
        residual: Any = None,
        eps: float = 1e-6,
        scale_offset: float = 0.0,
        **others: Any,
    ) -> Any:
        total = x if residual is None else x + residual
        centred = total - total.mean(-1, keepdim=True)
        out = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
        out = out if scale is None else out * (scale + scale_offset)
        out = out if bias is None else out + bias
        return out if residual is None else (out, total)

    def rms_norm(
        self,
        x: torch.Tensor,
        scale: Any = None,
        *,
        residual: Any = None,
        eps: float = 1e-6,
        scale_offset: float = 0.0,
        **others: Any,
    ) -> Any:
        total = x if residual is None else x + residual
        out = total / torch.sqrt(total.square().mean(-1, keepdim=True) + eps)
        out = out if scale is None else out * (scale + scale_offset)
        return out if residual is None else (out, total)

    def linear_cross_entropy(
        self, x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, *, weights: Any = None, reduction: str = "none",
        transpose_w: bool = False, softcap: Any = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
        ignore_index: int = -1, precision: Any = None, implementation: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        if precision is not None:
            raise NotImplementedError("precision: the definition has no rounding with a gradient")
        logits = x @ (w.T if transpose_w else w)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        lse = torch.logsumexp(logits, -1)
        counts = (targets >= 0) & (targets != ignore_index)
        chosen = logits.gather(-1, torch.where(counts, targets, 0).long()[..., None])[..., 0]
        losses = lse - (1 - label_smoothing) * chosen - label_smoothing * logits.mean(-1) + z_loss * lse.square()
        factors = torch.where(counts, torch.ones_like(losses) if weights is None else weights, 0.0)
        losses = torch.where(counts, factors * losses, 0.0)
        if reduction == "none":
            return losses
        total = factors.sum()
        divisor = torch.where(total == 0, 1.0, total) if reduction == "mean" else 1.0
        return losses.sum() / divisor

    def quantize(self, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """The values that the rounded array has, without a gradient."""
        rounded = jax_kernels.quantize(_jax(x), *args, **options)
        return torch.as_tensor(np.array(jax_kernels.dequantize(rounded, "float32"), np.float64), device=x.device)

    def dequantize(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def quantize_fp8(self, x: torch.Tensor, axis: Any) -> tuple[torch.Tensor, None]:
        values, scale = jax_kernels.quantize_fp8(_jax(x), axis=axis)
        scale = np.expand_dims(np.array(scale, np.float64), axis)
        return torch.as_tensor(np.array(values, np.float64) * scale, device=x.device), None


def _by_group(
    x: torch.Tensor, group_sizes: Any, columns: int, of_group: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """of_group(rows, i) of the rows of each group i in turn, and zeros [.., columns] for the rows past the last."""
    parts, begin = [], 0
    for i, size in enumerate(group_sizes.tolist()):
        parts.append(of_group(x[begin : begin + size], i))
        begin += size
    return torch.cat([*parts, torch.zeros(len(x) - begin, columns, dtype=x.dtype, device=x.device)])


def _jax(x: torch.Tensor) -> jax.Array:
    x = x.detach().cpu()
    return jnp.asarray((x.float() if x.is_floating_point() else x).numpy())


def _range(query: torch.Tensor) -> torch.Tensor:
    return torch.arange(query.shape[1], device=query.device)


def _live(positions: torch.Tensor, key: torch.Tensor, is_causal: bool, window: Any, lengths: Any) -> torch.Tensor:
    """The pairs that the limits of a call keep: bool, broadcastable to [B, H, T, S]. positions: [B or 1, T]."""
    keys = torch.arange(key.shape[1], device=key.device)
    distance = (keys - positions[..., None])[:, None]
    keep = torch.ones_like(distance, dtype=torch.bool)
    keep = keep & (distance <= 0) if is_causal else keep
    left, right = (window,) * 2 if isinstance(window, int) else window or (-1, -1)
    keep = keep & (distance >= -left) if left >= 0 else keep
    keep = keep & (distance <= right) if right >= 0 else keep
    return keep if lengths is None else keep & (keys < lengths.to(key.device)[:, None, None, None])


def _same_segment(ids: torch.Tensor) -> torch.Tensor:
    return (ids[:, None, :, None] == ids[:, None, None, :]) & (ids >= 0)[:, None, :, None]


def _dense(mask: Any, query: torch.Tensor, key: torch.Tensor, q_offset: Any) -> torch.Tensor:
    if isinstance(mask, torch.Tensor):
        return mask
    offset = q_offset.cpu().numpy() if isinstance(q_offset, torch.Tensor) else q_offset
    return torch.as_tensor(np.array(mask.to_dense(query.shape[1], key.shape[1], q_offset=offset)), device=query.device)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: Any, softcap: Any) -> torch.Tensor:
    """[B, H, T, S]."""
    k = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    scores = (query.shape[-1] ** -0.5 if scale is None else scale) * torch.einsum("bthd,bshd->bhts", query, k)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _softmax(
    scores: torch.Tensor, keep: torch.Tensor, value: torch.Tensor, sinks: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, T, H, Dv], lse [B, H, T]); a query without keys and without a sink has 0 and -inf."""
    keep = keep.expand(scores.shape)
    safe = torch.where(keep, scores, 0.0)
    highest = torch.where(keep, scores, -torch.inf).amax(-1, keepdim=True).detach()
    if sinks is not None:
        highest = torch.maximum(highest, sinks.detach()[:, None, None])
    highest = torch.where(torch.isneginf(highest), 0.0, highest)
    weights = torch.where(keep, torch.exp(torch.where(keep, safe - highest, 0.0)), 0.0)
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + torch.exp(sinks[:, None, None] - highest)
    dead = total == 0
    safe_total = torch.where(dead, 1.0, total)
    lse = torch.where(dead, -torch.inf, torch.log(safe_total) + highest)[..., 0]
    v = value.repeat_interleave(scores.shape[1] // value.shape[2], 2)
    return torch.einsum("bhts,bshd->bthd", weights / safe_total, v), lse
