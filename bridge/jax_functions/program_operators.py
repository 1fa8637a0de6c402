"""PyTorch's operators that run a plan of from_jax, and their derivatives.

Operator `call` runs a plan's forward, `call_backward` its backward. The arguments are the tensors, the plan's name and
the name of the Masks.
"""

from typing import NamedTuple

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.jax_functions.jvp import pushed
from jax_kernels.bridge.jax_functions.mask_operands import KeptOperands, Operands, found
from jax_kernels.bridge.jax_functions.programs import Plan, find_plan, keep_for_graphs
from jax_kernels.bridge.jax_functions.tracing import make_plan
from jax_kernels.bridge.operators import execute, torch_operator
from jax_kernels.bridge.operators.call_cache import KnownCall

__all__ = ["Call", "CallWithTangents", "KnownPlan", "PlanFacts", "backward_op", "call_op"]


def _program(tensors, plan, operands=""):
    planned = find_plan(plan)
    for x, want in zip(tensors, planned.request.signatures, strict=True):
        if x.shape != want.shape or x.dtype != want.dtype:  # only a graph without guards passes others
            raise ValueError(
                f"{planned.label}: got a tensor of shape {tuple(x.shape)} and dtype {x.dtype} in a graph, want the "
                f"shape and dtype of its trace, {want.shape} and {want.dtype}"
            )
    masks = found(operands)
    masks.check()
    return torch_operator.Program(planned.forward, tensors, masks)


def _backward_program(stored, cotangents, plan, operands=""):
    return torch_operator.Program(find_plan(plan).backward, (*stored, *cotangents), found(operands))


def _same(results):
    return results


def _empty(plan, infos):
    keep_for_graphs(plan.name)
    return [torch.empty(info.shape, dtype=info.dtype, device=plan.device) for info in infos]


class Call(torch.autograd.Function):
    """A call with its gradient.

    Residuals are results too, so that they depend on the inputs. A second derivative then gives them cotangents, by
    which the backward detects it and raises.
    """

    @staticmethod
    @torch_internals.unseen_by_dynamo
    def forward(ctx, plan, operands, *tensors):
        results = torch_operator.below_function(call_op, list(tensors), plan.name, operands.name)
        ctx.plan = plan
        ctx.operands = operands
        ctx.set_materialize_grads(False)
        stored = [tensors[index] for index in plan.inputs_read] + [results[index] for index in plan.outputs_read]
        ctx.save_for_backward(*stored, *results[plan.count :])
        ctx.mark_non_differentiable(*(results[index] for index in plan.fixed))
        return tuple(results)

    @staticmethod
    @torch_internals.unseen_by_dynamo
    def backward(ctx, *cotangents):
        plan, given = ctx.plan, list(cotangents[: ctx.plan.count])
        if any(cotangent is not None for cotangent in cotangents[plan.count :]):
            torch_operator.refuse_second_gradient(plan.label)
        if all(cotangent is None for cotangent in given):
            return (None,) * (2 + len(plan.needs))
        stored = list(ctx.saved_tensors)
        gradients = iter(torch_operator.call_in_backward(backward_op, stored, given, plan.name, ctx.operands.name))
        return (None, None, *(next(gradients) if needed else None for needed in plan.needs))

    @staticmethod
    def jvp(ctx, *tangents):
        torch_operator.refuse_tangent(ctx.plan.label)


def _residual_zeros(plan):
    return [torch.zeros(info.shape, dtype=info.dtype, device=plan.device) for info in plan.results[plan.count :]]


class CallWithTangents(torch.autograd.Function):
    """A call in forward mode. Its tensors may also need a gradient."""

    @staticmethod
    @torch_internals.unseen_by_dynamo
    def forward(ctx, plan, operands, *tensors):
        results = Call.forward(ctx, plan, operands, *tensors)
        ctx.save_for_forward(*tensors)
        return results

    @staticmethod
    @torch_internals.unseen_by_dynamo
    def backward(ctx, *cotangents):
        if torch_internals.is_forward_mode():  # the tangents of the residuals are zeros
            torch_operator.refuse_tangent(f"the gradient of {ctx.plan.label}")
        return Call.backward(ctx, *cotangents)

    @staticmethod
    @torch_internals.unseen_by_dynamo
    def jvp(ctx, _, __, *tangents):
        plan = ctx.plan
        moving = tuple(x is not None and plan.request.signatures[at].is_inexact for at, x in enumerate(tangents))
        moved = [x for x, is_moving in zip(tangents, moving, strict=True) if is_moving]
        name = pushed(plan.request, moving).name
        given = [*ctx.saved_for_forward, *moved]
        found = iter(torch_operator.below_function(call_op, given, name, ctx.operands.name))
        results = [None if at in plan.fixed else next(found) for at in range(plan.count)]
        # PyTorch requires a tangent for each residual. The zeros are never read: see backward.
        return (*results, *[x if x.is_floating_point() or x.is_complex() else None for x in _residual_zeros(plan)])


class PlanFacts(NamedTuple):
    """The facts of a cached call (KnownCall) of a plan. operands: its Masks."""

    plan: Plan
    operands: Operands | KeptOperands


class KnownPlan(torch.autograd.Function):
    """A cached call (KnownCall) of a plan, with its gradient. Its facts are PlanFacts."""

    @staticmethod
    @torch_internals.unseen_by_dynamo
    def forward(ctx, call, *tensors):
        (plan, operands), results = call.facts, call.chain(*tensors)
        ctx.call = call
        ctx.masks = operands.held  # keep-alive until the backward
        ctx.set_materialize_grads(False)
        stored = [tensors[index] for index in plan.inputs_read] + [results[index] for index in plan.outputs_read]
        ctx.save_for_backward(*stored, *results[plan.count :])
        ctx.mark_non_differentiable(*(results[index] for index in plan.fixed))
        return tuple(results)

    @staticmethod
    @torch_internals.unseen_by_dynamo
    def backward(ctx, *cotangents):
        call = ctx.call
        plan, operands = call.facts
        if any(cotangent is not None for cotangent in cotangents[plan.count :]):
            torch_operator.refuse_second_gradient(plan.label)
        given = [None if x is None else x.contiguous() for x in cotangents[: plan.count]]
        present = [x for x in given if x is not None]
        if not present:
            return (None,) * (1 + len(plan.needs))
        stored = list(ctx.saved_tensors)
        statics, tensors = tuple(x is None for x in given), [*stored, *present]
        known = call.backwards.find(statics, tensors)
        if known is not None:
            gradients = known(tensors)
        else:
            gradients = torch_operator.call_in_backward(backward_op, stored, given, plan.name, operands.name)
            if torch_internals.is_plain_call() and not torch.is_grad_enabled():
                call.backwards.learn(statics, tensors, lambda: _known_backward(call.facts, (*stored, *given)))
        found = iter(gradients)
        return (None, *(next(found) if needed else None for needed in plan.needs))

    @staticmethod
    def jvp(ctx, *tangents):
        torch_operator.refuse_tangent(ctx.call.facts.plan.label)


def _known_backward(facts, tensors):
    return KnownCall(execute.chain_for(facts.plan.backward, tensors, facts.operands), _same)


def _differentiate(tensors, plan, operands=""):
    """The call's results with a gradient, from the plan of the same request that has a gradient."""
    asked = find_plan(plan)
    own = make_plan(asked.request, tuple(x.requires_grad for x in tensors))
    results = torch_operator.apply(Call, own, found(operands), *tensors)[: own.count]
    if not asked.has_gradient:
        return list(results)
    # Residuals for another level of torch.func. The backward of this level reads them and must not be differentiated.
    again = lambda *tensors: torch_operator.below_function(call_op, list(tensors), plan, operands)[own.count :]
    return [*results, *torch_operator.refuse_gradient(asked.label, again, tensors)]


def _push(tensors, plan, operands=""):
    """The call's results, with tangents."""
    asked = find_plan(plan)
    if asked.has_gradient:  # another level of torch.func has a backward, which would read residuals without tangents
        torch_operator.refuse_tangent(f"the gradient of {asked.label}")
    needs = tuple(torch.is_grad_enabled() and x.requires_grad for x in tensors)
    own = make_plan(asked.request, needs)
    return list(torch_operator.apply(CallWithTangents, own, found(operands), *tensors)[: own.count])


def _differentiate_backward(stored, cotangents, plan, operands=""):
    count = len(stored)

    def again(*tensors):
        return torch_operator.below_function(backward_op, list(tensors[:count]), list(tensors[count:]), plan, operands)

    return list(torch_operator.refuse_gradient(find_plan(plan).label, again, (*stored, *cotangents)))


call_op = torch_operator.define(
    "call",
    '(Tensor[] tensors, str plan, str operands="") -> Tensor[]',
    program=_program,
    finish=lambda *arguments: _same,
    fake=lambda tensors, plan, operands="": _empty(find_plan(plan), find_plan(plan).results),
    differentiate=_differentiate,
    label=lambda tensors, plan, operands="": find_plan(plan).label,
    push=_push,
)
backward_op = torch_operator.define(
    "call_backward",
    '(Tensor[] stored, Tensor?[] cotangents, str plan, str operands="") -> Tensor[]',
    program=_backward_program,
    finish=lambda *arguments: _same,
    fake=lambda stored, cotangents, plan, operands="": _empty(find_plan(plan), find_plan(plan).grads),
    differentiate=_differentiate_backward,
    label=lambda stored, cotangents, plan, operands="": f"the gradient of {find_plan(plan).label}",
)
