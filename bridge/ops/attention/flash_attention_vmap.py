"""torch.func.vmap of flash_attention's operators: the mapped axis joins the batch."""

from typing import Any

import torch
from torch._ops import OpOverload

from jax_kernels.bridge.operators import torch_operator
from jax_kernels.bridge.ops.attention.flash_attention_operator import (
    Arguments,
    BackwardArguments,
    Tensors,
    backward_op,
    forward_op,
    inference_op,
    names_of,
    split,
)

__all__ = ["define_rules"]


def _rule(op: OpOverload) -> torch_operator.VmapRule:
    """Returns the vmap rule of an operator: it joins the mapped axis with the batch and runs the operator once.

    It runs the mapped calls one by one if sinks are mapped, or for gradients of a bias or sinks.
    """

    def rule(info, in_dims, *arguments):
        size = info.batch_size
        front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, in_dims, strict=True)]
        mapped = [dim is not None for dim in in_dims]
        call = split(front)
        is_mapped: Any = split(mapped)
        if _is_a_loop(call, is_mapped.tensors):
            return _one_by_one(op, size, front, mapped)
        batch = call.tensors.query.shape[1 if is_mapped.tensors.query else 0]
        joined = (
            _join_as(name, x, has_axis, size, batch)
            for name, x, has_axis in zip(Tensors._fields, call.tensors, is_mapped.tensors, strict=True)
        )
        extra: tuple[torch.Tensor | int | None, ...] = ()
        if call.backward is not None:
            given = zip(BackwardArguments._fields, call.backward, is_mapped.backward, strict=True)
            extra = tuple(x if name == "wanted" else _join(x, m, size) for name, x, m in given)
        results = op(*joined, *call.options, *extra)
        if isinstance(results, torch.Tensor):
            return results.unflatten(0, (size, batch)), 0
        apart = lambda x: x.unflatten(0, (size, batch)) if x.ndim > 1 else x.new_empty(size, 0)
        return tuple(apart(x) for x in results), (0,) * len(results)

    return rule


def _is_a_loop(call: Arguments, is_mapped: Tensors[bool]) -> bool:
    """Whether the mapped calls must run one by one: sinks are mapped, or the gradient of a bias or sinks is wanted.

    The reason: all entries of a batch have the same sinks, and add to one gradient of the sinks, or of a broadcast
    bias.

    call: the operator's arguments, with a mapped axis in front. is_mapped: which tensors have a mapped axis.
    """
    if is_mapped.sinks:
        return True
    if call.backward is None:
        return False
    return not {"bias", "sinks"}.isdisjoint(names_of(call.backward.wanted))


def _one_by_one(
    op: OpOverload, size: int, front: list[Any], mapped: list[bool]
) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], int | tuple[int, ...]]:
    """Runs the mapped calls in a loop. Returns (the stacked results, their mapped axis 0, or a tuple of zeros).

    size: the number of calls. front: the operator's flat arguments, with a mapped axis in front. mapped: which of them
    have one.
    """
    each = [op(*(x[i] if m else x for x, m in zip(front, mapped, strict=True))) for i in range(size)]
    if op is inference_op:
        return torch.stack(each), 0
    results = tuple(torch.stack(x) for x in zip(*each, strict=True))
    return results, (0,) * len(results)


def _join_as(name: str, x: torch.Tensor | None, is_mapped: bool, size: int, batch: int) -> torch.Tensor | None:
    """Returns the tensor called `name` for the joined call, whose batch has size * batch entries; None for None.

    is_mapped: whether x has the mapped axis, in front. size: the length of this axis. batch: the batch B of one call.
    """
    if name in ("bias", "mask"):
        return _join_scores(x, is_mapped, size, batch)
    if name == "q_offset":
        return _join_offset(x, is_mapped, size, batch)
    return x if name == "sinks" else _join(x, is_mapped, size)


def _join(x: torch.Tensor | None, is_mapped: bool, size: int) -> torch.Tensor | None:
    """Returns x as [size * B, ...] from [size, B, ...]; if x is not mapped, from [B, ...], repeated for each call."""
    if x is None:
        return None
    x = x if is_mapped else x.expand(size, *x.shape)
    return x.flatten(0, 1)


def _join_scores(x: torch.Tensor | None, is_mapped: bool, size: int, batch: int) -> torch.Tensor | None:
    """Joins a mask or bias, broadcastable to [B, H, T, S], to [size * B, ...].

    It stays unchanged if it is not mapped and has no batch axis of its own.
    """
    if x is None or (not is_mapped and (x.ndim < 4 or x.shape[0] == 1)):
        return x
    shape = x.shape[1:] if is_mapped else x.shape
    ones = (1,) * (4 - len(shape))
    x = x.reshape(size if is_mapped else 1, *ones, *shape)
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


def _join_offset(x: torch.Tensor | None, is_mapped: bool, size: int, batch: int) -> torch.Tensor | None:
    """Joins a q_offset, a scalar or [B], to [size * B]. A scalar that is not mapped stays unchanged."""
    if x is None or (not is_mapped and x.ndim == 0):
        return x
    rows = size if is_mapped else 1
    return x.reshape(rows, x.numel() // rows).expand(size, batch).flatten()


def define_rules() -> None:
    """Registers the operators' vmap rules with PyTorch. Call it only once in a process."""
    torch_operator.define_vmap("flash_attention", _rule(forward_op))
    torch_operator.define_vmap("flash_attention_inference", _rule(inference_op))
    torch_operator.define_vmap("flash_attention_backward", _rule(backward_op))
