"""ring_attention on PyTorch tensors: one process for each device, each of which has some tokens of the sequence."""

import functools
from typing import Any

import jax
import torch
import torch.distributed as dist

from jax_kernels.bridge import dlpack, library
from jax_kernels.bridge.attention_checks import as_torch_is_set, check_inputs, check_statics
from jax_kernels.bridge.distributed import AXIS, Ring, ring_of
from jax_kernels.ops.ring import ring_attention as ops
from jax_kernels.ops.ring import shard_sequence as orders
from jax_kernels.ops.ring import vjp as ring_vjp

__all__ = ["ring_attention", "shard_sequence", "unshard_sequence"]

LABEL = "ring_attention"


@torch.compiler.disable(reason="jax_kernels: ring_attention runs over several processes")
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: Any = None,
    layout: str | None = None,
    strategy: str = "auto",
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """jax_kernels.ring_attention on PyTorch tensors, under torchrun with one process for each device.

    Each process calls it with its own tokens, in the same order of calls. Call bridge.initialize_distributed() first.
    Gradients of query, key and value flow to the process that has them. That of sinks is the part of this process's
    queries, as of every parameter that the processes share: add the parts up over the group. Under autocast query, key
    and value are cast to the autocast dtype. torch.compile breaks its graph here.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32: this process's tokens, as shard_sequence gives them.
      key: [B, T, Hkv, D]; value: [B, T, Hkv, Dv]; in query's dtype and on its device. segment_ids: int32 [B, T].
      sinks: [H], the same in all processes.
      group: the torch.distributed process group whose ranks, in their order, share the sequence; None is all ranks.
      deterministic: None follows torch.use_deterministic_algorithms; where that is off, XLA's flag decides.
      The others are those of jax_kernels.ring_attention.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T]. Both are differentiable.

    Raises:
      TypeError, ValueError, NotImplementedError: as jax_kernels.ring_attention. RuntimeError: JAX does not know the
        processes of torch.distributed, or it is differentiated twice.
    """
    check_inputs(query, key, value, sinks=sinks, segment_ids=(segment_ids,))
    check_statics(
        is_causal=is_causal, scale=scale, softcap=softcap, return_lse=return_lse, deterministic=deterministic,
        precision=precision, implementation=implementation,
    )  # fmt: skip
    query, key, value, _, deterministic = as_torch_is_set(query, key, value, deterministic=deterministic)
    options = {
        "layout": layout,
        "strategy": strategy,
        "is_causal": is_causal,
        "window": tuple(window) if isinstance(window, list) else window,
        "scale": scale,
        "softcap": softcap,
        "deterministic": deterministic,
        "precision": precision,
        "implementation": implementation,
    }
    ring = ring_of(group)
    statics = tuple(options.items())
    out, lse = _Attend.apply(ring, statics, query, key, value, segment_ids, sinks)
    return (out, lse) if return_lse else out


class _Attend(torch.autograd.Function):
    """(out, lse)."""

    @staticmethod
    def forward(ctx, ring, statics, query, key, value, segment_ids, sinks):
        tensors = query, key, value, segment_ids, sinks
        results = _run(ring, _forward(ring.mesh, statics), tensors)
        ctx.ring, ctx.statics = ring, statics
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results)
        return tuple(results)

    @staticmethod
    def backward(ctx, dout, dlse):
        *tensors, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 7
        gradients = _Gradients.apply(ctx.ring, ctx.statics, *tensors, out, lse, dout, dlse)
        dquery, dkey, dvalue, *dsinks = gradients
        return None, None, dquery, dkey, dvalue, None, dsinks[0][0] if dsinks else None

    @staticmethod
    def jvp(ctx, *tangents):
        library.refuse_tangent(LABEL)


class _Gradients(torch.autograd.Function):
    """The gradients of query, key, value, and where there are sinks theirs, [1, H]."""

    @staticmethod
    def forward(ctx, ring, statics, query, key, value, segment_ids, sinks, out, lse, dout, dlse):
        dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
        return tuple(
            _run(ring, _backward(ring.mesh, statics), (query, key, value, segment_ids, sinks, out, lse, dout, dlse))
        )

    @staticmethod
    def backward(ctx, *gradients):
        library.refuse_second_gradient(LABEL)


# The axis of the tokens in query, key, value, segment_ids, sinks, out, lse, dout and dlse.
_AXES = 1, 1, 1, 1, None, 1, 2, 1, 2


def _run(ring: Ring, program: Any, tensors: Any) -> list[torch.Tensor]:
    """The results of a program of this process's tensors, some of which may be None."""
    device = tensors[0].device
    dlpack.refuse_capture(device)
    present = [(x, axis) for x, axis in zip(tensors, _AXES[: len(tensors)], strict=True) if x is not None]
    arrays, owners = ring.whole([x for x, _ in present], [axis for _, axis in present])
    given = iter(arrays)
    results = program(*(None if x is None else next(given) for x in tensors))
    found = ring.own(results, device)
    del owners
    return found


@functools.cache
def _forward(mesh: jax.sharding.Mesh, statics: tuple[tuple[str, Any], ...]) -> Any:
    """The compiled (out, lse) of query, key, value, segment_ids and sinks."""

    def attend(query, key, value, segment_ids, sinks):
        return ops.ring_attention(
            query, key, value, axis_name=AXIS, segment_ids=segment_ids, sinks=sinks, return_lse=True, **dict(statics)
        )

    return _shared(attend, mesh, (1, 2))


@functools.cache
def _backward(mesh: jax.sharding.Mesh, statics: tuple[tuple[str, Any], ...]) -> Any:
    """The compiled gradients of query, key, value and sinks, from what the forward took and gave."""

    def gradients(query, key, value, segment_ids, sinks, out, lse, dout, dlse):
        given = {"axis_name": AXIS, "segment_ids": segment_ids, "return_lse": True} | dict(statics)
        of = lambda query, key, value, sinks: ops.prepare(query, key, value, sinks=sinks, **given)
        cotangents = dout, jax.numpy.zeros_like(lse) if dlse is None else dlse

        def attend(query, key, value, sinks):
            call, arrays = of(query, key, value, sinks)
            if call.strategy != "ring":
                return ops.attention_of(call, arrays)
            return ring_vjp.with_results(call, arrays, out, lse)

        *found, dsinks = jax.vjp(attend, query, key, value, sinks)[1](cotangents)
        return *found, None if dsinks is None else dsinks[None]

    return _shared(gradients, mesh, (1, 1, 1, 0))


def _shared(function: Any, mesh: jax.sharding.Mesh, axes: tuple[int, ...]) -> Any:
    """A function of this process's parts as one of whole arrays.

    axes: those of its results along which the processes' parts stand one after another.
    """
    spec = lambda axis: jax.P() if axis is None else jax.P(*[None] * axis, AXIS)

    def run(*given):
        in_specs = tuple(None if x is None else spec(axis) for axis, x in zip(_AXES[: len(given)], given, strict=True))
        shared = jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=tuple(map(spec, axes)), check_vma=False
        )  # fmt: skip
        return [x for x in shared(*given) if x is not None]

    return jax.jit(run)


def shard_sequence(x: torch.Tensor, *, group: Any = None, layout: str = "zigzag", axis: int = 1) -> torch.Tensor:
    """This process's tokens of a tensor that all processes have whole.

    Args:
      x: a tensor with the tokens along `axis`: a multiple of the group's ranks, and with "zigzag" of twice as many.
      group, layout: as in ring_attention, whose default with is_causal is "zigzag", else "contiguous".

    Raises:
      ValueError: the layout is unknown, or the ranks do not divide the tokens.
    """
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    order = torch.from_numpy(orders.order_of(count, layout, x.shape[axis])).to(x.device)
    return x.index_select(axis, order.chunk(count)[rank])


def unshard_sequence(x: torch.Tensor, *, group: Any = None, layout: str = "zigzag", axis: int = 1) -> torch.Tensor:
    """The whole tensor of which the processes have the parts `x`, in the order of the tokens. It has no gradient."""
    count = dist.get_world_size(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(count)]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    order = torch.from_numpy(orders.order_of(count, layout, count * x.shape[axis])).to(x.device)
    return torch.cat(parts, axis).index_select(axis, order.argsort())
