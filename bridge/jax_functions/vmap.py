"""torch.func.vmap of from_jax's operators: plans that run many calls at once."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax

from jax_kernels.bridge.interop.keyed_cache import once
from jax_kernels.bridge.jax_functions.program_operators import backward_op, call_op
from jax_kernels.bridge.jax_functions.programs import (
    Info,
    Map,
    Plan,
    find_plan,
    finder,
    keep,
    keep_if_traced,
    new_name,
)
from jax_kernels.bridge.jax_functions.tracing import make_plan, mapped_axes
from jax_kernels.bridge.operators import torch_operator

__all__ = ["define_rules"]


@once
def _mapped_call(name: str, size: int, mapped: tuple[bool, ...]) -> Plan:
    """The plan that runs `size` calls of another plan at once.

    mapped: whether each tensor has a leading axis of calls. If the other plan keeps residuals, this plan keeps them for
    each call, and has the other plan's backward, for one call.
    """
    plan = find_plan(name)
    signatures = zip(plan.request.signatures, mapped, strict=True)
    request = plan.request._replace(
        signatures=tuple(x._replace(shape=(size, *x.shape)) if is_mapped else x for x, is_mapped in signatures),
        maps=(*plan.request.maps, Map(size, mapped)),
    )
    if not plan.has_gradient:
        return make_plan(request, plan.needs)
    own, base = new_name(request), finder(name)

    def make() -> Plan:
        plan = base()
        results, forward = _in_parallel(size, plan.results), _vmap(plan.forward, size, mapped)
        return dataclasses.replace(plan, name=own, request=request, results=results, forward=forward)

    return keep(own, make)


@once
def _mapped_backward(name: str, size: int, mapped: tuple[bool, ...]) -> Plan:
    """The plan that runs `size` backwards of another plan at once.

    mapped: whether each stored tensor, and then each cotangent, has a leading axis of calls.
    """
    own, base = new_name(find_plan(name).request), finder(name)

    def make() -> Plan:
        plan = base()
        grads, backward = _in_parallel(size, plan.grads), _vmap(plan.backward, size, mapped)
        return dataclasses.replace(plan, name=own, grads=grads, backward=backward)

    return keep(own, make)


def _in_parallel(size: int, infos: tuple[Info, ...]) -> tuple[Info, ...]:
    return tuple(info._replace(shape=(size, *info.shape)) for info in infos)


def _vmap(function: Callable[..., Any], size: int, mapped: tuple[bool, ...]) -> Callable[..., Any]:
    """The jitted jax.vmap of a function of Masks and arrays. All calls share the Masks."""
    return jax.jit(jax.vmap(function, (None, *mapped_axes(mapped)), axis_size=size), keep_unused=True)


def _call_rule(info, in_dims, tensors, plan, operands=""):
    """torch.func.vmap of a call, as jax.vmap of its function."""
    dims, *_ = in_dims
    front, mapped = _in_front(tensors, dims)
    own = _mapped_call(plan, operator.index(info.batch_size), mapped)
    keep_if_traced(own.name)
    return call_op(front, own.name, operands), 0


def _backward_rule(info, in_dims, stored, cotangents, plan, operands=""):
    stored_dims, cotangent_dims, *_ = in_dims
    front, mapped = _in_front((*stored, *cotangents), (*stored_dims, *cotangent_dims))
    own = _mapped_backward(plan, operator.index(info.batch_size), mapped)
    keep_if_traced(own.name)
    return backward_op(front[: len(stored)], front[len(stored) :], own.name, operands), 0


def _in_front(tensors, dims):
    """(the tensors with their mapped axis first, for each tensor whether it has such an axis)."""
    front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
    return front, tuple(dim is not None for dim in dims)


def define_rules() -> None:
    """Registers the vmap rules of the operators with PyTorch. Call it at most once per process."""
    torch_operator.define_vmap("call", _call_rule)
    torch_operator.define_vmap("call_backward", _backward_rule)
