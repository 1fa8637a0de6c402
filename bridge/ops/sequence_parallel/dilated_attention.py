"""Dilated attention of a sequence that is sharded over processes, on PyTorch tensors."""

import functools
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments.learned_scale import with_learned_scale
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.ops.attention.attention_checks import as_torch_is_set, check_inputs
from jax_kernels.bridge.ops.attention.attention_types import OutAndLse, Outputs
from jax_kernels.bridge.ops.attention.dilated_attention import DilatedOptions
from jax_kernels.bridge.ops.sequence_parallel.operator import SequenceParallelOperator
from jax_kernels.bridge.ops.sequence_parallel.process_mesh import AXIS, process_mesh
from jax_kernels.ops.dilated import vjp as dilated_vjp
from jax_kernels.ops.dilated.plan import prepare
from jax_kernels.ops.dilated.sharded_segments import Shards
from jax_kernels.ops.ring.layouts import axis_size
from jax_kernels.spelling import with_name_hints

__all__ = ["sequence_parallel_dilated_attention"]


@overload
def sequence_parallel_dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: "torch.distributed.ProcessGroup | None" = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[DilatedOptions],
) -> torch.Tensor: ...
@overload
def sequence_parallel_dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: "torch.distributed.ProcessGroup | None" = ...,
    return_lse: Literal[True],
    **options: Unpack[DilatedOptions],
) -> OutAndLse: ...
@overload
def sequence_parallel_dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: "torch.distributed.ProcessGroup | None" = ...,
    return_lse: bool,
    **options: Unpack[DilatedOptions],
) -> Outputs: ...
@functools.partial(
    torch_internals.not_in_graph, reason="jax_kernels: sequence_parallel_dilated_attention runs over several processes"
)
@with_learned_scale
@plain_arguments
@with_name_hints
def sequence_parallel_dilated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    group: "torch.distributed.ProcessGroup | None" = None,
    is_causal: bool = False,
    heads: str = "all",
    combine: str = "lse",
    layout: str = "overlap",
    order: str | None = None,
    stop_gradient_weights: bool = False,
    return_lse: bool = False,
    segment_ids: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Outputs:
    """jax_kernels.sequence_parallel_dilated_attention on PyTorch tensors, with one process for each device.

    It returns the rows of this process's tokens of dilated_attention over the whole sequence. The ranks of the group,
    in order, hold consecutive tokens, as shard_sequence(layout="contiguous") returns them. As in bridge.ring_attention,
    each process calls the function after bridge.initialize_distributed(), and gradients flow to the process that has
    the tensor.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32: this process's tokens. key: [B, T, Hkv, D]; value:
        [B, T, Hkv, Dv]; in query's dtype and on its device. segment_ids: int32 [B, T].
      group: the torch.distributed process group; None is all ranks.
      segment_lengths, dilation_rates, is_causal, heads, combine, layout, order, stop_gradient_weights: as in
        bridge.dilated_attention, for the whole sequence: segments may extend over several processes.
      deterministic: None follows torch.use_deterministic_algorithms; if this is off, XLA's flag decides.
      Other arguments: as in jax_kernels.sequence_parallel_dilated_attention.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T].

    Raises:
      TypeError, ValueError, NotImplementedError: as jax_kernels.sequence_parallel_dilated_attention. RuntimeError: JAX
        does not know the processes of torch.distributed, or a second derivative is taken.
    """
    check_inputs(query, key, value, segment_ids=(segment_ids,))
    query, key, value, _, deterministic = as_torch_is_set(query, key, value, deterministic=deterministic)
    options = {
        "segment_lengths": tuple(segment_lengths),
        "dilation_rates": tuple(dilation_rates),
        "is_causal": is_causal,
        "heads": heads,
        "combine": combine,
        "layout": layout,
        "order": order,
        "stop_gradient_weights": stop_gradient_weights,
        "scale": scale,
        "deterministic": deterministic,
        "precision": precision,
        "implementation": implementation,
    }
    out, lse = _OP(process_mesh(group), options, query, key, value, segment_ids, None)
    return (out, lse) if return_lse else out


def _prepared(query, key, value, segment_ids, options):
    """Returns (the planned call, its arrays) of dilated attention on this process's shards, inside jax.shard_map."""
    shards = Shards(AXIS, axis_size(AXIS))
    return prepare(
        query=query, key=key, value=value, segment_ids=segment_ids, return_lse=True, shards=shards, **options
    )


def _attend(query, key, value, segment_ids, sinks, bias, **options):
    return dilated_vjp.run(*_prepared(query, key, value, segment_ids, options))


def _known(query, key, value, segment_ids, sinks, bias, out, lse, **options):
    call, arrays = _prepared(query, key, value, segment_ids, options)
    return dilated_vjp.with_results(call, arrays, out, lse)


_OP = SequenceParallelOperator(label="sequence_parallel_dilated_attention", attend=_attend, known=_known)
