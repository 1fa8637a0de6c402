"""Attention of a sequence that is sharded over several processes, as a PyTorch function with a gradient."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import torch

from jax_kernels.bridge.interop import dlpack
from jax_kernels.bridge.interop.donated_outputs import JaxFunction
from jax_kernels.bridge.interop.keyed_cache import memoize
from jax_kernels.bridge.operators import torch_operator
from jax_kernels.bridge.ops.sequence_parallel.process_mesh import AXIS, ProcessMesh

__all__ = ["SequenceParallelOperator"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceParallelOperator:
    """An attention op on the shards of a sequence, as a function of this process's tensors, with a gradient.

    label: the op's name in messages. The two functions take a process's shards and run inside jax.shard_map over AXIS.
    attend(query, key, value, segment_ids, sinks, bias, **options) returns (out, lse). known(query, key, value,
    segment_ids, sinks, bias, out, lse, **options) computes no attention: it returns the given (out, lse), with the op's
    gradient. segment_ids [B, T], sinks [H] and bias [B or 1, H or 1, T, S or 1] may be None.
    """

    label: str
    attend: Callable[..., tuple[jax.Array, jax.Array]]
    known: Callable[..., tuple[jax.Array, jax.Array]]

    def __call__(
        self, ring: ProcessMesh, options: dict[str, Any], query, key, value, segment_ids, sinks, bias=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this process's (out [B, T, H, Dv], lse [B, H, T]). All processes of the ring must make the call.

        ring: the processes that hold the sequence. options: further keyword arguments of attend and known, hashable
        values. query, key, value, segment_ids and bias are this process's shards along T. sinks [H] is the same tensor
        in all processes; its gradient covers only this process's queries.
        """
        call = _Call(self, ring, tuple(options.items()))
        return _Attend.apply(call, query, key, value, segment_ids, sinks, bias)


@dataclasses.dataclass(frozen=True)
class _Call:
    op: SequenceParallelOperator
    ring: ProcessMesh
    options: tuple[tuple[str, Hashable], ...]


class _Attend(torch.autograd.Function):
    """The autograd function of a SequenceParallelOperator: (out, lse), with a gradient."""

    @staticmethod
    def forward(ctx, call, query, key, value, segment_ids, sinks, bias):
        tensors = query, key, value, segment_ids, sinks, bias
        results = _run(call.ring, _forward(call.op, call.ring.mesh, call.options), tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results)
        return tuple(results)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 7
        *tensors, out, lse = ctx.saved_tensors
        dquery, dkey, dvalue, *others = _Gradients.apply(ctx.call, *tensors, out, lse, dout, dlse)
        dsinks, dbias = (None if x is None else others.pop(0) for x in tensors[4:])
        return None, dquery, dkey, dvalue, None, None if dsinks is None else dsinks[0], dbias

    @staticmethod
    def jvp(ctx, *tangents):
        torch_operator.refuse_tangent(ctx.call.op.label)


class _Gradients(torch.autograd.Function):
    """The autograd function of the backward: it returns the gradients, and its own derivative raises.

    The gradients are of this process's query, key and value; then, if they are given, of sinks, as [1, H] from this
    process's queries, and of its bias.
    """

    @staticmethod
    def forward(ctx, call, query, key, value, segment_ids, sinks, bias, out, lse, dout, dlse):
        ctx.call = call
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        tensors = query, key, value, segment_ids, sinks, bias, out, lse, dout, dlse
        return tuple(_run(call.ring, _backward(call.op, call.ring.mesh, call.options), tensors))

    @staticmethod
    def backward(ctx, *gradients):
        torch_operator.refuse_second_gradient(ctx.call.op.label)


# The axis of the tokens in query, key, value, segment_ids, sinks, bias, out, lse, dout and dlse.
_AXES = 1, 1, 1, 1, None, 2, 1, 2, 1, 2


def _run(ring: ProcessMesh, program: JaxFunction, tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Runs a program on this process's tensors. Returns this process's shards of the results, without Nones.

    All processes of the ring must make the call. program: the jitted function of arrays over the ring's mesh, as
    _forward or _backward returns it. tensors: query, key, value, segment_ids, sinks and bias, in the backward also out,
    lse, dout and dlse. segment_ids, sinks, bias and dlse may be None.
    """
    device = tensors[0].device
    dlpack.refuse_capture(device)
    present = [(x, axis) for x, axis in zip(tensors, _AXES[: len(tensors)], strict=True) if x is not None]
    arrays, owners = ring.to_global([x for x, _ in present], [axis for _, axis in present])
    given = iter(arrays)
    results = program(*(None if x is None else next(given) for x in tensors))
    found = ring.to_local(results, device)
    del owners
    return found


@memoize
def _forward(
    op: SequenceParallelOperator, mesh: jax.sharding.Mesh, options: tuple[tuple[str, Hashable], ...]
) -> JaxFunction:
    """Returns the jitted function from (query, key, value, segment_ids, sinks, bias) to [out, lse].

    All are arrays over the mesh, sharded along the queries' or keys' tokens (bias: along the queries); sinks is
    replicated. options: the items of the op's keyword arguments.
    """
    return _shared(functools.partial(op.attend, **dict(options)), mesh, (1, 2))


@memoize
def _backward(
    op: SequenceParallelOperator, mesh: jax.sharding.Mesh, options: tuple[tuple[str, Hashable], ...]
) -> JaxFunction:
    """Returns the jitted function from the forward's inputs, results and cotangents to the gradients.

    It takes arrays over the mesh: query, key, value, segment_ids, sinks, bias, out, lse, dout, dlse. It returns the
    gradients of query, key and value, then of sinks ([processes, H]) and bias if they are given.
    """

    def gradients(query, key, value, segment_ids, sinks, bias, out, lse, dout, dlse):
        def attend(query, key, value, sinks, bias):
            return op.known(query, key, value, segment_ids, sinks, bias, out, lse, **dict(options))

        cotangents = dout, jax.numpy.zeros_like(lse) if dlse is None else dlse
        *found, dsinks, dbias = jax.vjp(attend, query, key, value, sinks, bias)[1](cotangents)
        return *found, None if dsinks is None else dsinks[None], dbias

    return _shared(gradients, mesh, (1, 1, 1, 0, 2))


def _shared(
    function: Callable[..., Sequence[jax.Array | None]], mesh: jax.sharding.Mesh, axes: tuple[int, ...]
) -> JaxFunction:
    """Turns a function of one process's shards into a jitted function of arrays over the mesh.

    Results of None are dropped. axes: for each result, the axis along which the processes' shards are concatenated.
    """
    spec = lambda axis: jax.P() if axis is None else jax.P(*[None] * axis, AXIS)

    def run(*given):
        in_specs = tuple(None if x is None else spec(axis) for axis, x in zip(_AXES[: len(given)], given, strict=True))
        out_specs = tuple(map(spec, axes))
        shared = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return [x for x in shared(*given) if x is not None]

    return jax.jit(run)
