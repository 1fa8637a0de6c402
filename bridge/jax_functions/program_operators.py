"""PyTorch's operators that run a program of from_jax, and their derivatives.

Operator `call` runs a program's forward, `call_backward` its backward. The arguments are the tensors, `program` (the
program's name) and `operands` (the name of the call's Masks, "" without Masks).
"""

from typing import NamedTuple

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.jax_functions.jvp import jvp_program
from jax_kernels.bridge.jax_functions.mask_operands import CallMasks, WeakCallMasks, masks_by_name
from jax_kernels.bridge.jax_functions.programs import PROGRAMS, Program, find_program
from jax_kernels.bridge.jax_functions.tracing import build_program
from jax_kernels.bridge.operators import execute, torch_operator
from jax_kernels.bridge.operators.call_cache import CachedCall
from jax_kernels.bridge.operators.profiler_names import NamedLauncher, label_of

__all__ = ["CachedFunction", "CallFunction", "CallWithTangents", "ProgramInfo", "backward_op", "call_op"]


def _program(tensors, program, operands=""):
    """The JaxCall of a program's forward. program: the program's name. operands: the name of the call's Masks, or "".

    Raises ValueError if a tensor's shape or dtype is not the program's, or if a tensor that a mask's function read has
    changed since the mask was made.
    """
    planned = find_program(program)
    for x, want in zip(tensors, planned.request.signatures, strict=True):
        if x.shape != want.shape or x.dtype != want.dtype:  # only a graph without guards passes others
            raise ValueError(
                f"{planned.label}: got a tensor of shape {tuple(x.shape)} and dtype {x.dtype} in a graph, want the "
                f"shape and dtype of its trace, {want.shape} and {want.dtype}"
            )
    masks = masks_by_name(operands)
    masks.check()
    return torch_operator.JaxCall(planned.forward, tensors, masks)


def _backward_program(stored, cotangents, program, operands=""):
    return torch_operator.JaxCall(find_program(program).backward, (*stored, *cotangents), masks_by_name(operands))


def _same(results):
    return results


def _empty(program, infos):
    """Empty tensors on the program's device with the shapes and dtypes in `infos`, which are ResultSpecs.

    For a trace: its graph will contain the program's name, which stays valid until the process ends.
    """
    PROGRAMS.pin(program.name)
    return [torch.empty(info.shape, dtype=info.dtype, device=program.device) for info in infos]


class CallFunction(torch.autograd.Function):
    """Runs a program that has a gradient: apply(Program, CallMasks or WeakCallMasks, *tensors).

    Returns a tuple: the program's outputs, then its extra residuals. The residuals are results so that they depend on
    the inputs. A second derivative then gives them cotangents: the backward detects these, and raises RuntimeError.
    """

    @staticmethod
    @torch_internals.skip_dynamo
    def forward(ctx, program, operands, *tensors):
        results = torch_operator.inside_function(call_op, list(tensors), program.name, operands.name)
        ctx.program = program
        ctx.operands = operands
        ctx.set_materialize_grads(False)
        stored = [tensors[index] for index in program.inputs_read] + [results[index] for index in program.outputs_read]
        ctx.save_for_backward(*stored, *results[program.count :])
        ctx.mark_non_differentiable(*(results[index] for index in program.fixed))
        return tuple(results)

    @staticmethod
    @torch_internals.skip_dynamo
    def backward(ctx, *cotangents):
        program, given = ctx.program, list(cotangents[: ctx.program.count])
        if any(cotangent is not None for cotangent in cotangents[program.count :]):
            torch_operator.refuse_second_gradient(program.label)
        if all(cotangent is None for cotangent in given):
            return (None,) * (2 + len(program.needs))
        stored = list(ctx.saved_tensors)
        gradients = iter(torch_operator.call_in_backward(backward_op, stored, given, program.name, ctx.operands.name))
        return (None, None, *(next(gradients) if needed else None for needed in program.needs))

    @staticmethod
    def jvp(ctx, *tangents):
        torch_operator.refuse_tangent(ctx.program.label)


def _residual_zeros(program):
    """Zeros in the shapes and dtypes of a program's extra residuals."""
    return [
        torch.zeros(info.shape, dtype=info.dtype, device=program.device) for info in program.results[program.count :]
    ]


class CallWithTangents(torch.autograd.Function):
    """Runs a program on tensors with tangents of forward mode: apply(Program, CallMasks or WeakCallMasks, *tensors).

    Returns a tuple: the program's outputs, with tangents, then its extra residuals. The outputs also have a gradient,
    but under forward mode the backward raises NotImplementedError.
    """

    @staticmethod
    @torch_internals.skip_dynamo
    def forward(ctx, program, operands, *tensors):
        results = CallFunction.forward(ctx, program, operands, *tensors)
        ctx.save_for_forward(*tensors)
        return results

    @staticmethod
    @torch_internals.skip_dynamo
    def backward(ctx, *cotangents):
        if torch_internals.is_forward_mode():  # the tangents of the residuals are zeros
            torch_operator.refuse_tangent(f"the gradient of {ctx.program.label}")
        return CallFunction.backward(ctx, *cotangents)

    @staticmethod
    @torch_internals.skip_dynamo
    def jvp(ctx, _, __, *tangents):
        program = ctx.program
        moving = tuple(x is not None and program.request.signatures[at].is_inexact for at, x in enumerate(tangents))
        moved = [x for x, is_moving in zip(tangents, moving, strict=True) if is_moving]
        name = jvp_program(program.request, moving).name
        given = [*ctx.saved_for_forward, *moved]
        found = iter(torch_operator.inside_function(call_op, given, name, ctx.operands.name))
        results = [None if at in program.fixed else next(found) for at in range(program.count)]
        # PyTorch requires a tangent for each residual. The zeros are never read: see backward.
        return (*results, *[x if x.is_floating_point() or x.is_complex() else None for x in _residual_zeros(program)])


class ProgramInfo(NamedTuple):
    """The `info` of a cached call of a program: the program, and the call's Masks (operands)."""

    program: Program
    operands: CallMasks | WeakCallMasks


class CachedFunction(torch.autograd.Function):
    """Runs a cached call of a program that has a gradient: apply(call, *tensors), where call.info is a ProgramInfo.

    Returns the results of CallFunction: the program's outputs, then its extra residuals.
    """

    @staticmethod
    @torch_internals.skip_dynamo
    def forward(ctx, call, *tensors):
        (program, operands), results = call.info, call.chain(*tensors)
        ctx.call = call
        ctx.masks = operands.held  # keep-alive until the backward
        ctx.set_materialize_grads(False)
        stored = [tensors[index] for index in program.inputs_read] + [results[index] for index in program.outputs_read]
        ctx.save_for_backward(*stored, *results[program.count :])
        ctx.mark_non_differentiable(*(results[index] for index in program.fixed))
        return tuple(results)

    @staticmethod
    @torch_internals.skip_dynamo
    def backward(ctx, *cotangents):
        call = ctx.call
        program, operands = call.info
        if any(cotangent is not None for cotangent in cotangents[program.count :]):
            torch_operator.refuse_second_gradient(program.label)
        given = [None if x is None else x.contiguous() for x in cotangents[: program.count]]
        present = [x for x in given if x is not None]
        if not present:
            return (None,) * (1 + len(program.needs))
        stored = list(ctx.saved_tensors)
        statics, tensors = tuple(x is None for x in given), [*stored, *present]
        cached = call.backward_cache.lookup(statics, tensors)
        if cached is not None:
            gradients = cached(tensors)
        else:
            gradients = torch_operator.call_in_backward(backward_op, stored, given, program.name, operands.name)
            if torch_internals.is_plain_eager() and not torch.is_grad_enabled():
                call.backward_cache.record(statics, tensors, lambda: _cached_backward(call.info, (*stored, *given)))
        found = iter(gradients)
        return (None, *(next(found) if needed else None for needed in program.needs))

    @staticmethod
    def jvp(ctx, *tangents):
        torch_operator.refuse_tangent(ctx.call.info.program.label)


def _cached_backward(info, tensors):
    function = info.program.backward
    return CachedCall(NamedLauncher(execute.launcher_for(function, tensors, info.operands), label_of(function)), _same)


def _differentiate(tensors, program, operands=""):
    """The operator's results for tensors that require a gradient, so that autograd can differentiate the outputs.

    program: the name of a program, in a graph usually of one without a gradient. The forward that runs is of another
    program, for the same request, that has the gradients of the tensors that require one. operands: the name of the
    call's Masks, or "".
    """
    asked = find_program(program)
    own = build_program(asked.request, tuple(x.requires_grad for x in tensors))
    results = torch_operator.apply(CallFunction, own, masks_by_name(operands), *tensors)[: own.count]
    if not asked.has_gradient:
        return list(results)
    # Residuals for another level of torch.func. The backward of this level reads them and must not be differentiated.
    again = lambda *tensors: torch_operator.inside_function(call_op, list(tensors), program, operands)[own.count :]
    return [*results, *torch_operator.refuse_gradient(asked.label, again, tensors)]


def _push(tensors, program, operands=""):
    """The operator's results for tensors with tangents of forward-mode differentiation, with the results' tangents."""
    asked = find_program(program)
    if asked.has_gradient:  # another level of torch.func has a backward, which would read residuals without tangents
        torch_operator.refuse_tangent(f"the gradient of {asked.label}")
    needs = tuple(torch.is_grad_enabled() and x.requires_grad for x in tensors)
    own = build_program(asked.request, needs)
    return list(torch_operator.apply(CallWithTangents, own, masks_by_name(operands), *tensors)[: own.count])


def _differentiate_backward(stored, cotangents, program, operands=""):
    """The gradients of a program's inputs, where an argument of the backward itself requires a gradient.

    Differentiating these gradients raises, as double backward is not supported. stored: the inputs, outputs and extra
    residuals that the backward reads. program, operands: the names of the program and of the call's Masks.
    """
    count = len(stored)

    def again(*tensors):
        return torch_operator.inside_function(
            backward_op, list(tensors[:count]), list(tensors[count:]), program, operands
        )

    return list(torch_operator.refuse_gradient(find_program(program).label, again, (*stored, *cotangents)))


call_op = torch_operator.define_operator(
    "call",
    '(Tensor[] tensors, str plan, str operands="") -> Tensor[]',
    program=_program,
    unpack=lambda *arguments: _same,
    fake=lambda tensors, program, operands="": _empty(find_program(program), find_program(program).results),
    differentiate=_differentiate,
    label=lambda tensors, program, operands="": find_program(program).label,
    push=_push,
)
backward_op = torch_operator.define_operator(
    "call_backward",
    '(Tensor[] stored, Tensor?[] cotangents, str plan, str operands="") -> Tensor[]',
    program=_backward_program,
    unpack=lambda *arguments: _same,
    fake=lambda stored, cotangents, program, operands="": _empty(find_program(program), find_program(program).grads),
    differentiate=_differentiate_backward,
    label=lambda stored, cotangents, program, operands="": f"the gradient of {find_program(program).label}",
)
