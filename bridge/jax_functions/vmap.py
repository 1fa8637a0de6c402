"""torch.func.vmap of from_jax's operators: programs that run many calls at once."""

import dataclasses
import operator

import jax

from jax_kernels.bridge.interop.donated_outputs import JaxFunction
from jax_kernels.bridge.jax_functions.program_operators import backward_op, call_op
from jax_kernels.bridge.jax_functions.programs import (
    PROGRAMS,
    Program,
    ResultSpec,
    VmapLevel,
    display_name,
    find_program,
    pin_if_traced,
)
from jax_kernels.bridge.jax_functions.tracing import build_program, mapped_axes
from jax_kernels.bridge.operators import torch_operator

__all__ = ["define_rules"]


def _mapped_call(name: str, size: int, mapped: tuple[bool, ...]) -> Program:
    """The program whose forward runs `size` calls of another program at once. name: the other program's name.

    mapped: for each tensor, whether it has a leading axis of length `size`, with an entry for each call. If the other
    program has a gradient, the new program's residuals have this axis, but its backward is still the other program's
    backward, for one call.
    """
    program = find_program(name)
    signatures = zip(program.request.signatures, mapped, strict=True)
    request = program.request._replace(
        signatures=tuple(x._replace(shape=(size, *x.shape)) if is_mapped else x for x, is_mapped in signatures),
        maps=(*program.request.maps, VmapLevel(size, mapped)),
    )
    if not program.has_gradient:
        return build_program(request, program.needs)

    def build(own: str) -> Program:
        program = find_program(name)
        results, forward = _in_parallel(size, program.results), _vmap(program.forward, size, mapped)
        return dataclasses.replace(program, name=own, request=request, results=results, forward=forward)

    return PROGRAMS.get(("call", name, size, mapped), display_name(request.function), build).value


def _mapped_backward(name: str, size: int, mapped: tuple[bool, ...]) -> Program:
    """The program whose backward runs `size` backwards of another program at once. name: the other program's name.

    mapped: for each tensor that the backward reads, then for each cotangent, whether it has a leading axis of length
    `size`, with an entry for each call.
    """

    def build(own: str) -> Program:
        program = find_program(name)
        grads, backward = _in_parallel(size, program.grads), _vmap(program.backward, size, mapped)
        return dataclasses.replace(program, name=own, grads=grads, backward=backward)

    stem = display_name(find_program(name).request.function)
    return PROGRAMS.get(("backward", name, size, mapped), stem, build).value


def _in_parallel(size: int, infos: tuple[ResultSpec, ...]) -> tuple[ResultSpec, ...]:
    """The ResultSpecs of `size` calls that run at once, with a leading axis. infos: the ResultSpecs of one call."""
    return tuple(info._replace(shape=(size, *info.shape)) for info in infos)


def _vmap(function: JaxFunction, size: int, mapped: tuple[bool, ...]) -> JaxFunction:
    """The jitted jax.vmap of a function (masks, *arrays). All calls share the Masks.

    mapped: for each array, whether its leading axis, of this size, is mapped.
    """
    return jax.jit(jax.vmap(function, (None, *mapped_axes(mapped)), axis_size=size), keep_unused=True)


def _call_rule(info, in_dims, tensors, program, operands=""):
    """The vmap rule of the operator `call`: (the results, 0), with the mapped axis first in every result.

    It runs one program, jax.vmap of the JAX function. info, in_dims: as torch.library.register_vmap defines them.
    """
    dims, *_ = in_dims
    front, mapped = _in_front(tensors, dims)
    own = _mapped_call(program, operator.index(info.batch_size), mapped)
    pin_if_traced(program, own.name)
    return call_op(front, own.name, operands), 0


def _backward_rule(info, in_dims, stored, cotangents, program, operands=""):
    """The vmap rule of the operator `call_backward`: (the gradients, 0), with the mapped axis first in each.

    info, in_dims: as torch.library.register_vmap defines them. stored: the inputs, outputs and extra residuals that the
    backward reads. program, operands: the names of the program and of the call's Masks.
    """
    stored_dims, cotangent_dims, *_ = in_dims
    front, mapped = _in_front((*stored, *cotangents), (*stored_dims, *cotangent_dims))
    own = _mapped_backward(program, operator.index(info.batch_size), mapped)
    pin_if_traced(program, own.name)
    return backward_op(front[: len(stored)], front[len(stored) :], own.name, operands), 0


def _in_front(tensors, dims):
    """(tensors, mapped): the tensors with their mapped axis moved to the front, and for each whether it has one.

    dims: the mapped axis of each tensor, or None.
    """
    front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
    return front, tuple(dim is not None for dim in dims)


def define_rules() -> None:
    """Registers the vmap rules of the operators with PyTorch. Call it at most once per process."""
    torch_operator.define_vmap("call", _call_rule)
    torch_operator.define_vmap("call_backward", _backward_rule)
