"""ring_attention on PyTorch tensors: one process per device. Each process holds a shard of the sequence."""

import functools
from typing import Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments.learned_scale import with_learned_scale
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.ops.attention.attention_checks import as_torch_is_set, check_inputs, check_statics
from jax_kernels.bridge.ops.attention.attention_types import OutAndLse, Outputs
from jax_kernels.bridge.ops.sequence_parallel.operator import SequenceParallelOperator
from jax_kernels.bridge.ops.sequence_parallel.process_mesh import AXIS, process_mesh
from jax_kernels.bridge.translate.score_mods import ScoreMod, to_jnp
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.masks import Mask
from jax_kernels.ops.ring import ring_attention as ops
from jax_kernels.ops.ring import shard_sequence as orders
from jax_kernels.ops.ring.planning.documents import DocumentLayout
from jax_kernels.spelling import with_name_hints

__all__ = ["ring_attention", "shard_sequence", "unshard_sequence"]


class _Options(TypedDict, total=False):
    """The keyword arguments of ring_attention except return_lse, for type checkers."""

    group: "dist.ProcessGroup | None"
    layout: str | DocumentLayout | None
    strategy: str
    sends_ahead: int | None
    mask: Mask | None
    is_causal: bool
    window: int | tuple[int, int] | None
    segment_ids: torch.Tensor | None
    sinks: torch.Tensor | None
    score_mod: ScoreMod | None
    bias: torch.Tensor | None
    scale: float | torch.Tensor | None
    softcap: float | None
    deterministic: bool | None
    precision: str | None
    implementation: str | None


@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> torch.Tensor: ...
@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> OutAndLse: ...
@overload
def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Outputs: ...
@functools.partial(torch_internals.not_in_graph, reason="jax_kernels: ring_attention runs over several processes")
@with_learned_scale
@plain_arguments
@with_name_hints
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: "dist.ProcessGroup | None" = None,
    layout: str | DocumentLayout | None = None,
    strategy: str = "auto",
    sends_ahead: int | None = None,
    mask: Mask | None = None,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_mod: ScoreMod | None = None,
    bias: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Outputs:
    """jax_kernels.ring_attention on PyTorch tensors, under torchrun with one process for each device.

    It returns the attention of this process's queries to the keys of all processes. Each process calls it with its own
    tokens, in the same order of calls. Call bridge.initialize_distributed() first. Gradients of query, key and value
    flow to the process that has the tokens. The gradient of sinks, as of every parameter that the processes share,
    covers only this process's queries: sum it over the group. Autocast casts query, key, value and a 16-bit bias to the
    autocast dtype. torch.compile breaks its graph here.

    T is the number of this process's tokens, S the number of all processes' tokens.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32: this process's tokens, as shard_sequence returns them.
      key: [B, T, Hkv, D]; value: [B, T, Hkv, Dv]; in query's dtype and on its device. segment_ids: int32 [B, T], of
        this process's tokens: a query attends only to keys with its id.
      layout: which tokens a process has. "zigzag": the sequence is cut into 2 n chunks for n processes, and process i
        has the chunks i and 2 n - 1 - i. "striped": every n-th token from i on. "contiguous": T consecutive tokens.
        None: "zigzag" if the order of the tokens matters, else "contiguous". A DocumentLayout, the same in all
        processes, gives them equal work on packed documents, with its segment_ids; see jax_kernels.ring_attention.
      strategy: "ring" sends keys and values around; "halo" sends a window's neighbouring tokens; "all_to_all" gives
        each process all tokens of some heads; "all_gather" sends all keys to all processes. "auto" chooses.
      sends_ahead: the number of steps by which a ring sends keys and values ahead; None follows the block specs.
      is_causal, window, softcap, scale: as in bridge.flash_attention, by positions in the whole sequence.
      sinks: [H], the same in all processes, logits that only join the softmax's denominator.
      mask: a masks.Mask of the whole sequence, the same in all processes. JAX compiles a program for each mask with
        arrays, so reuse the Mask.
      score_mod: as in jax_kernels.ring_attention, in jnp code or in torch's elementwise operations, the same in all
        processes; q_idx and kv_idx are positions in the whole sequence. It may not read tensors; pass them as a bias,
        which has gradients.
      bias: broadcastable to [B, H, T, S], in query's dtype or float32, for this process's queries and all keys in their
        order: bridge.shard_sequence(bias, axis=2), where bias is the whole sequence's.
      group: the torch.distributed process group whose ranks, in order, shard the sequence; None is all ranks.
      deterministic: None follows torch.use_deterministic_algorithms; if this is off, XLA's flag decides.
      precision, implementation: as in bridge.flash_attention.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T]. Both are differentiable.

    Raises:
      TypeError, ValueError, NotImplementedError: as jax_kernels.ring_attention. RuntimeError: JAX does not know the
        processes of torch.distributed, or a second derivative is taken.
    """
    check_inputs(query, key, value, bias=bias, sinks=sinks, segment_ids=(segment_ids,))
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"mask: got {type(mask).__name__}, want a masks.Mask of the whole sequence, or None; bridge.masks.dense "
            "makes one of a tensor"
        )
    given = FlashArguments(
        query=query, key=key, value=value, is_causal=is_causal, scale=scale, softcap=softcap, return_lse=return_lse,
        deterministic=deterministic, precision=precision, implementation=implementation,
    )  # fmt: skip
    check_statics(given)
    query, key, value, bias, deterministic = as_torch_is_set(query, key, value, bias=bias, deterministic=deterministic)
    if bias is not None and bias.ndim <= 4:
        bias = bias[(None,) * (4 - bias.ndim)]
        bias = bias.expand(-1, -1, query.shape[1], -1) if bias.shape[2] == 1 else bias
    options = {
        "layout": layout.steps if isinstance(layout, DocumentLayout) else layout,
        "strategy": strategy,
        "sends_ahead": sends_ahead,
        "mask": mask,
        "score_mod": None if score_mod is None else to_jnp(score_mod),
        "is_causal": is_causal,
        "window": tuple(window) if isinstance(window, list) else window,
        "scale": scale,
        "softcap": softcap,
        "deterministic": deterministic,
        "precision": precision,
        "implementation": implementation,
    }
    out, lse = _OP(process_mesh(group), options, query, key, value, segment_ids, sinks, bias)
    return (out, lse) if return_lse else out


def _attend(query, key, value, segment_ids, sinks, bias, **options):
    arrays = {"segment_ids": segment_ids, "sinks": sinks, "bias": bias}
    return ops.ring_attention(query, key, value, axis_name=AXIS, return_lse=True, **arrays, **options)


def _known(query, key, value, segment_ids, sinks, bias, out, lse, **options):
    given = {"segment_ids": segment_ids, "sinks": sinks, "bias": bias}
    call, arrays = ops.prepare(query, key, value, axis_name=AXIS, return_lse=True, **given, **options)
    return ops.with_results(call, arrays, out, lse)


_OP = SequenceParallelOperator(label="ring_attention", attend=_attend, known=_known)


@plain_arguments
def shard_sequence(
    x: torch.Tensor,
    *,
    group: "dist.ProcessGroup | None" = None,
    layout: str | DocumentLayout = "zigzag",
    axis: int = 1,
) -> torch.Tensor:
    """Returns this process's shard of a tensor that all processes hold whole: its tokens, in the layout's order.

    Args:
      x: a tensor with the tokens along `axis`. Their count is a multiple of the group's ranks, or with "zigzag" of
        twice the ranks.
      group: the torch.distributed process group whose ranks, in order, shard the sequence; None is all ranks.
      layout: with n ranks, rank i gets: "zigzag": chunks i and 2 n - 1 - i of 2 n chunks; "striped": every n-th token
        from i on; "contiguous": chunk i of n; a DocumentLayout, the same in all processes: its rank's documents. Pass
        the same layout to ring_attention.

    Raises:
      ValueError: the layout is unknown or is for other sizes, or the ranks do not divide the tokens.
    """
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    order = torch.from_numpy(orders.order_for(x, count, layout, axis)).to(x.device)
    return _taken(x, order.chunk(count, -1)[rank], axis)


@plain_arguments
def unshard_sequence(
    x: torch.Tensor,
    *,
    group: "dist.ProcessGroup | None" = None,
    layout: str | DocumentLayout = "zigzag",
    axis: int = 1,
) -> torch.Tensor:
    """Returns the whole tensor, in the order of the tokens, from the shards of all processes. It has no gradient.

    x: this process's shard. All processes of the group make the call. group, layout, axis: as in the call of
    shard_sequence that made the shards.
    """
    count = dist.get_world_size(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(count)]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    whole = torch.cat(parts, axis)
    order = torch.from_numpy(orders.order_for(whole, count, layout, axis)).to(x.device)
    return _taken(whole, order.argsort(-1), axis)


def _taken(x: torch.Tensor, order: torch.Tensor, axis: int) -> torch.Tensor:
    """x in this order along `axis`. order: [length], or [batch, length] with an order for each row of x."""
    if order.ndim == 1:
        return x.index_select(axis, order)
    axis = axis % x.ndim - 1
    return torch.stack([row.index_select(axis, of_row) for row, of_row in zip(x, order, strict=True)])
