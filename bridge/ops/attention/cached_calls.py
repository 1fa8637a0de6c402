"""Cached calls of flash_attention's operators, and their gradient."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.operators import execute, torch_operator
from jax_kernels.bridge.operators.call_cache import CachedCall, same_tensors
from jax_kernels.bridge.operators.profiler_names import NamedLauncher, label_of, named_function
from jax_kernels.bridge.ops.attention.flash_attention_operator import (
    BackwardArguments,
    Options,
    Tensors,
    backward_op,
    backward_program,
    forward_program,
    gradient_bits,
    inference_program,
    names_of,
    need_gradient,
)

__all__ = ["CachedAttention", "known_call"]


class _Info(NamedTuple):
    """The facts of a cached call that its gradient needs.

    options: the call's arguments that are no tensors. there: for each field of Tensors, whether the call has this
    tensor. with_rows: whether the call returns lse (with its lse_lo) next to out.
    """

    options: Options
    there: tuple[bool, ...]
    with_rows: bool

    @property
    def names(self) -> list[str]:
        """The names of the tensors that the call has, in the order of Tensors."""
        return [name for name, is_there in zip(Tensors._fields, self.there, strict=True) if is_there]

    def filled[Value](self, tensors: Sequence[Value]) -> Tensors[Value]:
        """Returns a Tensors with the given values, in order, for the tensors of the call, and None for the others."""
        given: Iterator[Any] = iter(tensors)
        return Tensors(*(next(given) if there else None for there in self.there))


class CachedAttention(torch.autograd.Function):
    """The autograd function of a cached call. Its backward is cached too, from the second call on."""

    @staticmethod
    @torch_internals.skip_dynamo
    def forward(ctx, call, *tensors):
        """Returns (out, rows), or only out if the call returns no lse. rows: lse [B, H, T], with a bias [B, 2, H, T].

        call: the CachedCall, whose info is a _Info. tensors: the tensors that the call has, in the order of Tensors.
        """
        out, rows = call.chain(*tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, out, rows)
        ctx.set_materialize_grads(False)
        return (out, rows) if call.info.with_rows else out

    @staticmethod
    @torch_internals.skip_dynamo
    def backward(ctx, dout, drows=None):
        call = ctx.call
        _, *needed = ctx.needs_input_grad
        if dout is None and drows is None:
            return (None,) * (1 + len(needed))
        given = [x.contiguous() for x in (dout, drows) if x is not None]
        tensors = [*ctx.saved_tensors, *given]
        wanted = _WANTED_OF_THREE if needed == _ALL_OF_THREE else gradient_bits(call.info.filled(needed))
        statics = wanted, dout is None, drows is None
        known = call.backward_cache.lookup(statics, tensors)
        gradients = _known_backward(call, statics, tensors) if known is None else known(tensors)
        if needed == _ALL_OF_THREE:
            return (None, *gradients)
        found = dict(zip(names_of(wanted), gradients, strict=True))
        return (None, *(found.get(name) for name in call.info.names))

    @staticmethod
    def jvp(ctx, *tangents):
        torch_operator.refuse_tangent("flash_attention")


_ALL_OF_THREE = [True, True, True]
_WANTED_OF_THREE = gradient_bits(_ALL_OF_THREE)


def _known_backward(
    call: CachedCall, statics: tuple[int, bool, bool], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the wanted gradients, computed by the operator, and caches this backward for the next equal call.

    The gradients are in the order query, key, value, bias, sinks, without the unwanted ones.

    call: the forward's cached call. statics: (wanted, whether dout is None, whether drows is None), the key of the
    cached backward. wanted is an int; bit i is 1 if the i-th of these tensors gets a gradient. tensors: the call's
    tensors, out, rows, then dout and drows if they are not None.
    """
    wanted, without_dout, without_drows = statics
    count = sum(call.info.there)
    given, (out, rows, *cotangents) = call.info.filled(tensors[:count]), tensors[count:]
    left = iter(cotangents)
    dout, drows = (None if without else next(left) for without in (without_dout, without_drows))
    extra = BackwardArguments(wanted=wanted, out=out, rows=rows, dout=dout, drows=drows)
    gradients = torch_operator.call_in_backward(backward_op, *given, *call.info.options, *extra)
    if torch_internals.is_plain_eager() and not torch.is_grad_enabled() and call.backward_cache is not None:

        def make():
            program = backward_program(*given, *call.info.options, *extra)
            if not same_tensors(_present(program.tensors), tensors):
                return None
            return CachedCall(NamedLauncher(execute.launcher_for(*program), label_of(program.function)), _same)

        call.backward_cache.record(statics, tensors, make)
    return [x for index, x in enumerate(gradients) if wanted >> index & 1]


def _same(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return results


def _present(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [x for x in tensors if x is not None]


def known_call(tensors: Tensors[torch.Tensor], options: Options) -> CachedCall | None:
    """Returns a cached call for checked tensors that are read in place; None if the program would read copies.

    The cached call returns (out, lse) if options.return_lse, else out, and has a gradient if one of the tensors
    requires it.
    """
    needs_grad = need_gradient(tensors)
    with_rows = needs_grad or options.return_lse
    program = (forward_program if with_rows else inference_program)(*tensors, *options)
    if not same_tensors(_present(program.tensors), _present(tensors)):
        return None
    chain = NamedLauncher(execute.launcher_for(*program), label_of(program.function))
    info = _Info(options=options, there=tuple(x is not None for x in tensors), with_rows=options.return_lse)
    unpack: Callable[[list[torch.Tensor]], torch_operator.Results] = _same
    if not options.return_lse and not needs_grad:
        unpack = operator.itemgetter(0)
    elif options.return_lse:
        unpack = _without_lse_lo if tensors.has_lse_lo else tuple
    return CachedCall(chain, unpack, named_function(CachedAttention, "flash_attention") if needs_grad else None, info)


def _without_lse_lo(results: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse [B, H, T]) from [out, rows], where rows [B, 2, H, T] stacks lse and its lse_lo."""
    out, rows = results
    return out, rows[:, 0]
