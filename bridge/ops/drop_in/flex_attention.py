"""PyTorch's flex_attention over flash_attention."""

import ctypes
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments.autocast import cast_dtype
from jax_kernels.bridge.interop.arguments.learned_scale import in_query
from jax_kernels.bridge.interop.arguments.plain_numbers import checked_flag, checked_number
from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.interop.warn_once import warn_once
from jax_kernels.bridge.jax_functions.argument_checks import FLOATS, check_tensors
from jax_kernels.bridge.jax_functions.pytree import MaskById
from jax_kernels.bridge.ops.attention.attention_checks import as_torch_is_set
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention
from jax_kernels.bridge.ops.attention.masked_attention import attend_in_graph
from jax_kernels.bridge.ops.drop_in import block_masks, heads_first, torch_flex
from jax_kernels.bridge.translate.score_mods import RefusedError, ScoreMod
from jax_kernels.masks import Mask

if TYPE_CHECKING:
    from torch.nn.attention import flex_attention as torchs

__all__ = ["flex_attention"]

_MOST_HEAD_DIM = 256
_LAYOUT = "want 4 axes [batch, heads, length, head_dim]"


type KernelOptions = dict[str, bool | int | float | str]
type BlockMask = torchs.BlockMask | Mask


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: KernelOptions | None = ...,
    *,
    return_aux: None = ...,
) -> torch.Tensor: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
    kernel_options: KernelOptions | None = ...,
    return_aux: None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = ...,
    block_mask: BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: KernelOptions | None = ...,
    *,
    return_aux: "torchs.AuxRequest | None" = ...,
) -> "torch.Tensor | tuple[torch.Tensor, torch.Tensor | torchs.AuxOutput]": ...
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: KernelOptions | None = None,
    *,
    return_aux: "torchs.AuxRequest | None" = None,
) -> "torch.Tensor | tuple[torch.Tensor, torch.Tensor | torchs.AuxOutput | None]":
    """PyTorch's flex_attention, computed by flash_attention; it may be assigned to PyTorch's name.

    Equivalent to the following code, where `mask` has the blocks and the mask_mod of block_mask::

        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = bridge.flash_attention(q, k, v, score_mod=score_mod, mask=mask, scale=scale).transpose(1, 2)

    PyTorch's own function runs instead, with a warning the first time, for float64, a head_dim above 256, max_scores,
    devices other than CPUs and CUDA devices, and for a function that has no form in jnp. On a CPU PyTorch's function
    has no gradients: a call that needs gradients there raises the error that says why.

    Args:
      query: [B, H, T, D]; key: [B or 1, Hkv, S, D]; value: [B or 1, Hkv, S, Dv]; bfloat16, float16 or float32.
      score_mod: a function (score, batch, head, q_idx, kv_idx) of scalars in torch's elementwise operations. Each call
        reads the current values of the tensors that the function uses, and these tensors get gradients.
      block_mask: a BlockMask, with the meaning that it has in PyTorch's kernels: pairs outside the listed blocks are
        masked out, the mask_mod decides in partial blocks, and all pairs of full blocks are kept. It must be made for
        the call's lengths; its lists broadcast to B and H. The BlockMask keeps a masks.Mask of itself, which is made
        again if a list, or a tensor that the mask_mod reads, has changed. Or a masks.Mask.
      scale: multiplies the scores; default 1 / sqrt(D). A tensor that requires a gradient gets one.
      enable_gqa: allow fewer key and value heads than query heads; their number divides the number of query heads.
      return_lse: return (out, lse). return_aux: an AuxRequest; return (out, AuxOutput), with lse if it asks for it.
      kernel_options: FlexKernelOptions. They choose among PyTorch's kernels, and have no effect here.

    In a graph of torch.compile a BlockMask is a constant that was made outside the graph. The graph raises ValueError
    if a tensor that the mask_mod reads has changed since then.

    Returns:
      out [B, H, T, Dv] in query's dtype. lse is float32 [B, H, T], the natural logarithm, -inf for a query without
      keys, whose out is 0; it has a gradient.

    Raises:
      TypeError: an argument has an unsupported type or dtype.
      ValueError: shapes do not fit together, a tensor is nested, or a name in kernel_options is unknown.
      Errors of flash_attention, too: its gradient cannot be differentiated again.
    """
    enable_gqa, return_lse = checked_flag("enable_gqa", enable_gqa), checked_flag("return_lse", return_lse)
    _check(query, key, value, block_mask, enable_gqa, kernel_options)
    if not (return_aux is None or all(hasattr(return_aux, name) for name in ("lse", "max_scores"))):
        raise TypeError(f"return_aux: got {type(return_aux).__name__}, want an AuxRequest or None")
    query, scale = in_query(query, scale)
    scale = checked_number("scale", scale)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse, return_aux: got both, want one of them")
    options: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "kernel_options": kernel_options,
        "return_aux": return_aux,
    }
    given = (query, key, value, score_mod, block_mask)
    reason = _why_torchs(query, value, return_aux)
    if reason is not None:
        return _by_torch(reason, *given, return_lse=return_lse, **options)
    has_lse = return_lse or (return_aux is not None and return_aux.lse)
    try:
        out, lse = _attended(*given, scale=scale, has_lse=has_lse)
    except RefusedError as error:
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if isinstance(block_mask, Mask) or (query.device.type == "cpu" and needs_grad):
            raise
        return _by_torch(str(error), *given, return_lse=return_lse, **options)
    if return_aux is not None:
        return out, torch_flex.module.AuxOutput(lse=lse, max_scores=None)
    return (out, lse) if return_lse else out


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    *,
    scale: float | None,
    has_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (out [B, H, T, Dv], lse [B, H, T]) by flash_attention, for arguments that were checked.

    lse is None unless has_lse. The arguments are flex_attention's. Raises RefusedError if a function has no form in
    jnp.
    """
    batch, heads, length, _ = query.shape
    if key.shape[0] != batch:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    if torch_flex.is_block_mask(block_mask) and block_masks.is_whole(block_mask):
        block_mask = None
    if score_mod is None and block_mask is None and not has_lse:
        return heads_first.attend(query, key, value, scale=scale), None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"score_mod": score_mod, "scale": scale, "return_lse": has_lse}
    if torch_flex.is_block_mask(block_mask):
        sizes = block_masks.Sizes(*map(int, (batch, heads, length, key.shape[2])))
        if torch.compiler.is_compiling():
            mask = MaskById(_made(id(block_mask), *sizes) + 0)
            results = attend_in_graph(q, k, v, mask, **options)
        else:
            results = flash_attention(q, k, v, mask=block_masks.mask_of(block_mask, sizes), **options)
    else:
        results = flash_attention(q, k, v, mask=block_mask, **options)
    out, lse = results if has_lse else (results, None)
    return out.transpose(1, 2), lse


@torch_internals.constant_in_graph
def _made(number: int, *sizes: int) -> int:
    """Returns the id of the Mask of a BlockMask, for a graph of torch.compile. The BlockMask keeps the Mask alive.

    number: the id of the BlockMask. sizes: batch entries, heads, queries and keys of the call.
    """
    block_mask = ctypes.cast(number, ctypes.py_object).value
    return id(block_masks.mask_in_graph(block_mask, block_masks.Sizes(*sizes)))


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: BlockMask | None,
    enable_gqa: bool,
    kernel_options: KernelOptions | None,
) -> None:
    """Raises TypeError or ValueError, naming the argument, for types and shapes that flex_attention does not accept."""
    check_tensors(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, {_LAYOUT}")
    heads, kv_heads = query.shape[1], key.shape[1]
    if not enable_gqa and heads != kv_heads:
        raise ValueError(f"key: got {kv_heads} heads, want query's {heads}, or enable_gqa=True")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"key: got {kv_heads} heads, want a divisor of query's {heads}")
    if key.shape[0] not in (1, query.shape[0]) or (key.shape[0] != query.shape[0] and block_mask is None):
        raise ValueError(
            f"key: got batch {key.shape[0]}, want query's {query.shape[0]}, or 1 with a block_mask for that batch"
        )
    if not (block_mask is None or isinstance(block_mask, Mask) or torch_flex.is_block_mask(block_mask)):
        want = "want a torch.nn.attention.flex_attention.BlockMask, as from create_block_mask, or a masks.Mask"
        raise TypeError(f"block_mask: got {type(block_mask).__name__}, {want}")
    if torch_flex.is_block_mask(block_mask) and block_mask.kv_num_blocks.device != query.device:
        raise ValueError(
            f"block_mask: got one on {block_mask.kv_num_blocks.device}, want query's device {query.device}"
        )
    if not (kernel_options is None or isinstance(kernel_options, dict)):
        raise TypeError(f"kernel_options: got {type(kernel_options).__name__}, want FlexKernelOptions or None")
    for name in kernel_options or ():
        if name.removeprefix("fwd_").removeprefix("bwd_") not in torch_flex.option_names():
            raise ValueError(f"kernel_options: got {name!r}, want names of FlexKernelOptions")


def _why_torchs(query: torch.Tensor, value: torch.Tensor, return_aux: "torchs.AuxRequest | None") -> str | None:
    """Returns the reason why PyTorch's own function must run; None if flash_attention serves the call.

    The reasons: a device other than CPU and CUDA, float64, a head_dim above 256, or a request for max_scores.
    """
    kind = query.device.type
    dtype = cast_dtype(query)
    if kind not in ("cpu", "cuda", "meta"):
        return f"query is on {query.device}, and flash_attention runs on CPUs and CUDA devices"
    if dtype not in FLOATS:
        return f"query is {query.dtype}, and flash_attention takes bfloat16, float16 and float32"
    if max(query.shape[-1], value.shape[-1]) > _MOST_HEAD_DIM:
        return f"head_dim is {max(query.shape[-1], value.shape[-1])}, and flash_attention's limit is {_MOST_HEAD_DIM}"
    if return_aux is not None and return_aux.max_scores:
        return "return_aux asks for max_scores, which flash_attention does not return"
    return None


def _by_torch(
    reason: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *arguments: Any,
    return_lse: bool,
    **options: Any,
) -> Any:
    """Returns the results of PyTorch's own flex_attention. It warns with the reason, the first time.

    arguments: score_mod and block_mask. options: scale, enable_gqa, kernel_options and return_aux.
    """
    warn_once(f"flex_attention: {reason}; PyTorch's own function runs instead")
    query, key, value, *_ = as_torch_is_set(query, key, value)
    scale, enable_gqa, kernel_options, return_aux = options.values()
    torch_flex.load()
    return torch_flex.flex_attention(
        query, key, value, *arguments, scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux
    )
