"""Calls of from_jax's functions in graphs for many shapes.

The operators `call` and `call_backward` take a program's name, and a program holds for one set of shapes. `call_any`
and `call_any_backward` take the name of a dynamic call, which has no shapes. The operators look up the program for the
tensors' shapes when they run. The name of a dynamic call is a text that describes the whole call, so nothing is kept
for a graph. Only a call with constants other than numbers and texts is kept in a store, under a shorter name.

A call checks that its results have the sizes in its graph. The backward reads only the tensors, so XLA recomputes the
parts of the forward that the gradients need.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.keyed_cache import memoize
from jax_kernels.bridge.jax_functions import store
from jax_kernels.bridge.jax_functions.mask_operands import NO_MASKS
from jax_kernels.bridge.jax_functions.programs import FUNCTIONS, DynamicCall, ProgramKey, TensorSpec
from jax_kernels.bridge.jax_functions.pytree import Structure
from jax_kernels.bridge.jax_functions.size_inference import infer_results, shape_of
from jax_kernels.bridge.jax_functions.tracing import (
    check_hashable,
    cotangents_of,
    outputs_of,
    program_for,
    with_pullback,
)
from jax_kernels.bridge.operators import torch_operator

__all__ = ["CALLS", "Flat", "call", "find", "is_any_shape", "name_of"]

CALLS: store.Store[DynamicCall] = store.Store()  # calls whose names are no texts
_PLAIN: dict[str, type] = {kind.__name__: kind for kind in (str, bool, int, type(None))}


@torch_internals.constant_in_graph
def name_of(function: str, structure: Structure) -> str:
    """The name of a dynamic call, for `find` and `call`. torch.compile makes it a constant of its graph.

    If all constants are numbers and texts, the name contains the whole call, as a text with spaces. Otherwise the
    call is kept in this process, under a name without spaces.

    function: the function's name in FUNCTIONS. structure: `flatten` of the call's (args, kwargs). Raises TypeError,
    naming the argument, for a constant that is not hashable.
    """
    call = DynamicCall(function, structure, jax.config.jax_enable_x64)
    try:
        return f"{function} {call.x64:d} {json.dumps(structure, default=_type_name)}"
    except TypeError:
        check_hashable(call)
        return CALLS.get(call, function, lambda _: call).name


def _type_name(x: Any) -> dict[str, str]:
    """Represents the types str, bool, int and NoneType in a call's JSON, as {"type": the type's name}.

    Raises TypeError for other objects: then the call has no text.
    """
    if not isinstance(x, type) or _PLAIN.get(x.__name__) is not x:
        raise TypeError
    return {"type": x.__name__}


def find(name: str) -> DynamicCall:
    """The dynamic call of this name. Raises RuntimeError if another process made the name, or if the call is lost."""
    if " " in name:
        return _read(name)
    found = CALLS.find(name)
    if found is None:
        raise RuntimeError(
            f"{name}: a graph that calls a from_jax function runs only in the process that traced it; with constants "
            f"other than numbers and texts it is lost after clear_cache(), and after {store.MOST} other graphs with "
            "such constants; compile it again, after torch.compiler.reset()"
        )
    return found


@memoize
def _read(name: str) -> DynamicCall:
    """The call that a name with spaces describes. Raises RuntimeError if another process made the name."""
    function, x64, structure = name.split(" ", 2)
    if FUNCTIONS.find(function) is None:
        raise RuntimeError(
            f"{function}: a graph that calls a from_jax function runs only in the process that traced it"
        )
    return DynamicCall(function, _as_tuples(json.loads(structure, object_hook=lambda x: _PLAIN[x["type"]])), x64 == "1")


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x


def is_any_shape(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor has a symbolic size, as in a graph for many sizes. False under torch.func's transforms."""
    if torch._C._are_functorch_transforms_active():
        return False
    return any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape)


class Flat(NamedTuple):
    """The results of a call as a flat list. structure: of the function's results, for `unflatten`."""

    results: list[torch.Tensor]
    structure: Structure


def call(name: str, tensors: list[torch.Tensor]) -> Flat | None:
    """Adds a call to a graph for many shapes, and returns its results.

    name: from name_of. tensors: the call's tensors, with symbolic sizes. None if the sizes of the results cannot be
    expressed by the tensors' sizes: then nothing was added.
    """
    found = infer_results(find(name), tensors)
    return None if found is None else Flat(call_any_op(tensors, name, found.text), found.structure)


def _signatures(tensors: Sequence[torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(tuple(x.shape), x.dtype, x.device, x.layout) for x in tensors]


def _program(tensors, name, sizes=""):
    """The JaxCall of a dynamic call's forward for tensors of any shapes.

    name: the call's name. sizes: the results' sizes that the graph assumes, as the JSON of DynamicResults.text; ""
    skips the check. Raises RuntimeError if the results have other shapes.
    """
    call = find(name)
    program = program_for(call.request(_signatures(tensors)), (False,) * len(tensors))
    if sizes:
        shapes = [x.shape for x in tensors]
        want = [shape_of(result, shapes) for result in json.loads(sizes)]
        got = [tuple(x.shape) for x in program.results]
        if got != want:
            raise RuntimeError(
                f"{call.label}: its results have shapes {got}, but this graph for many shapes has {want}: it takes "
                "each size of a result for a constant or the size of a tensor; compile it with dynamic=False"
            )
    return torch_operator.JaxCall(program.forward, tensors, NO_MASKS)


@memoize
def _backward(request: ProgramKey, wanted: int):
    """A jitted function (masks, *tensors, *cotangents) that returns the wanted gradients as a tuple, in order.

    wanted: bit i is set if the gradient of tensor i is wanted. It recomputes the forward from the tensors. masks:
    always (), as a dynamic call has no Masks. A cotangent may be None.
    """
    outputs, _ = outputs_of(request)
    count = len(request.signatures)
    moving = [index for index in range(count) if wanted >> index & 1]

    def backward(masks, *arrays):
        results, pullback = with_pullback(outputs, masks, arrays[:count], moving)
        gradients = pullback(cotangents_of(results, arrays[count:]))
        return tuple(jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x for x in gradients)

    return jax.jit(backward, keep_unused=True)


def _backward_program(tensors, cotangents, wanted, name):
    function = _backward(find(name).request(_signatures(tensors)), wanted)
    return torch_operator.JaxCall(function, (*tensors, *cotangents), NO_MASKS)


def _fake(tensors, name, sizes=""):
    call = find(name)
    found = infer_results(call, tensors)
    if found is None:
        raise RuntimeError(
            f"{call.label}: the sizes of the results of this call are not known in a graph for many shapes"
        )
    shapes = [x.shape for x in tensors]
    return [tensors[0].new_empty(shape_of(result.sizes, shapes), dtype=result.dtype) for result in found.results]


def _fake_backward(tensors, cotangents, wanted, name):
    return [x.new_empty(x.shape) for index, x in enumerate(tensors) if wanted >> index & 1]


class AnyCall(torch.autograd.Function):
    """Runs a dynamic call so that autograd can differentiate it: apply(the call's name, sizes, *tensors).

    sizes: the results' sizes that the graph assumes, as DynamicResults.text. Returns a tuple of the results.
    """

    @staticmethod
    @torch_internals.skip_dynamo
    def forward(ctx, name, sizes, *tensors):
        results = torch_operator.inside_function(call_any_op, list(tensors), name, sizes)
        ctx.name = name
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(x for x in results if not (x.is_floating_point() or x.is_complex())))
        return tuple(results)

    @staticmethod
    @torch_internals.skip_dynamo
    def backward(ctx, *cotangents):
        _, _, *needed = ctx.needs_input_grad
        if all(x is None for x in cotangents):
            return (None,) * len(ctx.needs_input_grad)
        wanted = sum(1 << index for index, is_needed in enumerate(needed) if is_needed)
        tensors = list(ctx.saved_tensors)
        found = iter(torch_operator.call_in_backward(backward_any_op, tensors, list(cotangents), wanted, ctx.name))
        return (None, None, *(next(found) if is_needed else None for is_needed in needed))

    @staticmethod
    def jvp(ctx, *tangents):
        torch_operator.refuse_tangent(find(ctx.name).label)


def _differentiate_backward(tensors, cotangents, wanted, name):
    """The gradients of the wanted tensors, where a tensor or a cotangent itself requires a gradient.

    Differentiating these gradients raises, as double backward is not supported. wanted: bit i is set if the gradient of
    tensor i is wanted. name: the call's name.
    """
    count = len(tensors)

    def again(*arrays):
        return torch_operator.inside_function(backward_any_op, list(arrays[:count]), list(arrays[count:]), wanted, name)

    return list(torch_operator.refuse_gradient(find(name).label, again, (*tensors, *cotangents)))


call_any_op = torch_operator.define_operator(
    "call_any",
    "(Tensor[] tensors, str call, str sizes='') -> Tensor[]",
    program=_program,
    unpack=lambda *arguments: list,
    fake=_fake,
    differentiate=lambda tensors, name, sizes="": list(torch_operator.apply(AnyCall, name, sizes, *tensors)),
    label=lambda tensors, name, sizes="": find(name).label,
)
backward_any_op = torch_operator.define_operator(
    "call_any_backward",
    "(Tensor[] tensors, Tensor?[] cotangents, int wanted, str call) -> Tensor[]",
    program=_backward_program,
    unpack=lambda *arguments: list,
    fake=_fake_backward,
    differentiate=_differentiate_backward,
    label=lambda tensors, cotangents, wanted, name: find(name).label,
)

torch_operator.define_vmap("call_any", torch_operator.loop_vmap(lambda: call_any_op))
torch_operator.define_vmap("call_any_backward", torch_operator.loop_vmap(lambda: backward_any_op))
