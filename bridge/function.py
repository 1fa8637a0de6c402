"""from_jax: a JAX function as a PyTorch function, with its gradient.

A call is made of constants and tensors. The constants (the structure of the arguments, their shapes and
dtypes, which of them need a gradient) make a plan, once; the plan's name goes with the tensors through one
operator for the forward and one for the backward.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_kernels.bridge import dlpack, library
from jax_kernels.bridge.once import fresh_name, once
from jax_kernels.bridge.operands import NONE, Operands, found, operands_of
from jax_kernels.bridge.structure import Leaf, flatten, rebuild
from jax_kernels.masks import Mask

__all__ = ["from_jax"]


def from_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as a function of PyTorch tensors, differentiable and opaque to torch.compile.

    Equivalent to running `function` on jax.Arrays with the tensors' values, and autograd's backward to jax.vjp
    of it. Call from_jax once for a function, not once for a call: it is compiled by JAX for each set of shapes,
    dtypes and constants, and never forgotten. Like any function under jax.jit it must be pure.

    Args:
      function: takes and returns jax.Arrays, alone or in tuples, lists and dicts. Arguments that are not
        tensors (numbers, strings, None, anything hashable) are passed as they are, as constants. A masks.Mask is
        passed with its arrays as data of the call, on the tensors' device: Masks of one structure, with arrays of the
        same shapes, share one program.

    Returns:
      A function that takes tensors where `function` takes arrays, all on one device and at least one of them,
      and returns tensors, which PyTorch owns. Gradients flow to floating-point and complex tensors that require
      one; integer and bool tensors, and the arrays of a Mask, get none. It runs on the tensors' device, in the order of
      PyTorch's current stream, under torch.compile(fullgraph=True) too, but for a graph break where it is given a Mask.
      torch.func.vmap is jax.vmap of `function`. It cannot be differentiated twice or in forward mode, or captured in a
      CUDA graph. A graph that calls it (torch.export, make_fx) runs only in the process that traced it.

    Raises, when called:
      TypeError: a tensor's dtype is not taken by JAX (float64 and int64 are not, without jax_enable_x64), or a
        constant is not hashable, or holds a tensor.
      ValueError: tensors on several devices, or none at all.
      NotImplementedError: on differentiating in forward mode (torch.func.jvp, torch.autograd.forward_ad).
      RuntimeError: on differentiating twice, or in a graph that another process traced.
    """
    if not callable(function):
        raise TypeError(f"function: got {type(function).__name__}, want a function of jax.Arrays")
    # A string, as torch.compile may make a symbol of a number.
    name = fresh_name(getattr(function, "__name__", "function"))
    _FUNCTIONS[name] = function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        masks: list[Mask] = []
        structure = flatten((args, kwargs), tensors, masks)
        return _with_masks(name, structure, tensors, masks) if masks else _run(name, structure, tensors, NONE, ())

    return call


_FUNCTIONS: dict[str, Callable[..., Any]] = {}


class _Signature(NamedTuple):
    """What a tensor's values are not part of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout


class _Map(NamedTuple):
    """An axis of calls that torch.func.vmap has added in front: how many calls, and which tensors have it."""

    size: int
    mapped: tuple[bool, ...]


class _Request(NamedTuple):
    """A call without its values: what a plan is made for.

    of_masks: the signature of the operands. x64: jax_enable_x64. maps: the maps of torch.func.vmap, the first applied
    first, with whose axes the signatures are.
    """

    function: str
    structure: Any
    signatures: tuple[_Signature, ...]
    of_masks: tuple[Any, ...]
    x64: bool
    maps: tuple[_Map, ...] = ()


class _Info(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def _run(name: str, structure: Any, tensors: list[torch.Tensor], operands: Operands, of_masks: tuple[Any, ...]) -> Any:
    """of_masks: the signature of the operands."""
    signatures = tuple(_signature(x) for x in tensors)
    if not library.is_plain_call():
        traced = _traced(name, structure, signatures, of_masks)
        return rebuild(traced.outputs, iter(_call_op(tensors, traced.plan, operands.name)))
    grad = torch.is_grad_enabled()
    needs = tuple(grad and x.requires_grad for x in tensors)
    plan = _plan_for(_Request(name, structure, signatures, of_masks, jax.config.jax_enable_x64), needs)
    if plan.has_gradient:
        results = _Call.apply(plan, operands, *tensors)
    else:
        results = library.below_autograd(_call_op, tensors, plan.name, operands.name)
    return rebuild(plan.outputs, iter(results))


@torch.compiler.disable(reason="jax_kernels: a Mask is no constant that torch.compile takes")
def _with_masks(name: str, structure: Any, tensors: list[torch.Tensor], masks: list[Mask]) -> Any:
    operands = operands_of(masks, tensors[0].device) if tensors else NONE
    return _run(name, structure, tensors, operands, operands.signature)


def _signature(tensor: torch.Tensor) -> _Signature:
    # index() makes a constant of a symbolic size: JAX compiles for each shape.
    shape = tuple(operator.index(size) for size in tensor.shape)
    return _Signature(shape, tensor.dtype, tensor.device, tensor.layout)


class _Residual(NamedTuple):
    """Where the backward finds a value: place is "mask" (an array of one), "input", "output", or "extra" (result)."""

    place: str
    position: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """A request, and the programs that serve it.

    needs: which tensors have a gradient. outputs: their structure; count: how many. fixed: those without a gradient.
    results: shape and dtype of the forward's results, outputs and then residuals. grads: those of the backward's.
    inputs_read, outputs_read: what the backward reads besides residuals.
    """

    name: str
    request: _Request
    needs: tuple[bool, ...]
    outputs: Any
    count: int
    fixed: tuple[int, ...]
    results: tuple[_Info, ...]
    grads: tuple[_Info, ...]
    inputs_read: tuple[int, ...]
    outputs_read: tuple[int, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @functools.cached_property
    def has_gradient(self) -> bool:
        return any(self.needs)

    @property
    def device(self) -> torch.device:
        return self.request.signatures[0].device

    @property
    def label(self) -> str:
        """How errors name it."""
        return f"from_jax of {_stem(self.request)}"


_PLANS: dict[str, _Plan] = {}


def _stem(request: _Request) -> str:
    return request.function.rsplit("_", 2)[0]


def _plan_name(request: _Request) -> str:
    return fresh_name(_stem(request))


class _Traced(NamedTuple):
    """A plan without a gradient, in constants for torch.compile: its name, and the structure of its outputs."""

    plan: str
    outputs: Any


@torch.compiler.assume_constant_result
def _traced(name: str, structure: Any, signatures: tuple[_Signature, ...], of_masks: tuple[Any, ...]) -> _Traced:
    request = _Request(name, structure, signatures, of_masks, jax.config.jax_enable_x64)
    plan = _plan_for(request, (False,) * len(signatures))
    return _Traced(plan.name, plan.outputs)


def _plan_for(request: _Request, needs: tuple[bool, ...]) -> _Plan:
    try:
        return _make_plan(request, needs)
    except TypeError as error:
        if "unhashable" in str(error):
            raise TypeError(f"got an argument that is neither a tensor nor hashable: {error}") from error
        raise


def _keep(plan: _Plan) -> _Plan:
    _PLANS[plan.name] = plan
    return plan


@once
def _make_plan(request: _Request, needs: tuple[bool, ...]) -> _Plan:
    signatures = request.signatures
    device = _check(signatures)
    outputs, structures = _outputs_of(request)
    moving = [index for index, needed in enumerate(needs) if needed]
    specs = [jax.ShapeDtypeStruct(x.shape, dlpack.jax_dtype(x.dtype)) for x in signatures]
    mask_specs: Any = ()
    if request.of_masks:
        tree, infos = request.of_masks
        arrays = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in infos]
        mask_specs = jax.tree.unflatten(tree, arrays)

    def with_pullback(masks, *leaves):
        def moved(*values):
            full = list(leaves)
            for index, value in zip(moving, values, strict=True):
                full[index] = value
            return outputs(masks, *full)

        return jax.vjp(moved, *(leaves[index] for index in moving))

    with library.planning_for(device):
        if moving:
            traced = jax.jit(with_pullback).trace(mask_specs, *specs)
            out_infos, pullback = traced.out_info
        else:
            out_infos, pullback = jax.eval_shape(outputs, mask_specs, *specs), None
    count = len(out_infos)
    residual_infos, tree = jax.tree.flatten(pullback)
    sources = _sources(traced.jaxpr.jaxpr, len(jax.tree.leaves(mask_specs)), count) if moving else []
    extra = [index for index, source in enumerate(sources) if source == _Residual("extra", index)]
    inputs_read = sorted({source.position for source in sources if source.place == "input"})
    outputs_read = sorted({source.position for source in sources if source.place == "output"})

    def forward(masks, *leaves):
        if not moving:
            return outputs(masks, *leaves)
        results, pullback = with_pullback(masks, *leaves)
        residuals = jax.tree.leaves(pullback)
        return (*results, *(residuals[index] for index in extra))

    def backward(masks, *arrays):
        stored = iter(arrays)
        places = {
            **{_Residual("mask", index): array for index, array in enumerate(jax.tree.leaves(masks))},
            **{_Residual("input", index): next(stored) for index in inputs_read},
            **{_Residual("output", index): next(stored) for index in outputs_read},
            **{_Residual("extra", index): next(stored) for index in extra},
        }
        pullback = jax.tree.unflatten(tree, [places[source] for source in sources])
        gradients = pullback(_cotangents(out_infos, stored))
        return tuple(_conjugate(gradient) for gradient in gradients)

    describe = lambda what, infos: tuple(_Info(i.shape, dlpack.torch_dtype(what, i.dtype)) for i in infos)
    return _keep(
        _Plan(
            name=_plan_name(request),
            request=request,
            needs=needs,
            outputs=structures[-1],
            count=count,
            fixed=tuple(i for i, info in enumerate(out_infos) if not jnp.issubdtype(info.dtype, jnp.inexact)),
            results=describe("output", out_infos) + describe("residual", [residual_infos[index] for index in extra]),
            grads=tuple(_Info(signatures[index].shape, signatures[index].dtype) for index in moving),
            inputs_read=tuple(inputs_read),
            outputs_read=tuple(outputs_read),
            forward=jax.jit(forward),
            backward=jax.jit(backward),
        )
    )


def _outputs_of(request: _Request) -> tuple[Callable[..., tuple[jax.Array, ...]], list[Any]]:
    """(a function of Masks and arrays that gives the outputs, a list to which tracing it adds their structure)."""
    function = _FUNCTIONS[request.function]
    structures: list[Any] = []

    def outputs(masks, *leaves):
        def each(*leaves):
            args, kwargs = rebuild(request.structure, iter(leaves), iter(masks))
            results: list[Any] = []
            structures.append(flatten(function(*args, **kwargs), results, None, Leaf))
            return tuple(jnp.asarray(result) for result in results)

        for size, mapped in request.maps:
            each = jax.vmap(each, _axes(mapped), axis_size=size)
        return each(*leaves)

    return outputs, structures


def _cotangents(infos: Any, given: Any) -> tuple[Any, ...]:
    """JAX's cotangents of PyTorch's, where None counts as zero."""
    cotangents = []
    for info, cotangent in zip(infos, given, strict=True):
        if not jnp.issubdtype(info.dtype, jnp.inexact):
            cotangent = np.zeros(info.shape, jax.dtypes.float0)
        elif cotangent is None:
            cotangent = jnp.zeros(info.shape, info.dtype)
        cotangents.append(_conjugate(cotangent))
    return tuple(cotangents)


def _conjugate(x: Any) -> Any:
    """From PyTorch's convention for complex gradients to JAX's, and back."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _check(signatures: tuple[_Signature, ...]) -> torch.device:
    if not signatures:
        raise ValueError("got no tensor among the arguments, want at least one: its device is where the function runs")
    device = signatures[0].device
    for index, x in enumerate(signatures):
        name = f"tensor argument {index}"
        dlpack.check_dtype(name, x.dtype)
        if x.layout != torch.strided:
            raise ValueError(f"{name}: got layout {x.layout}, want a dense tensor; convert it with .to_dense()")
        if x.device != device:
            raise ValueError(f"{name}: got a tensor on {x.device}, want the device of the others, {device}")
    dlpack.jax_device(device)
    return device


def _sources(jaxpr: Any, of_masks: int, count: int) -> list[_Residual]:
    """For each residual, where the backward finds it, so that nothing is kept twice."""
    known: dict[Any, _Residual] = {}
    for index, variable in enumerate(jaxpr.invars):
        place = ("mask", index) if index < of_masks else ("input", index - of_masks)
        known.setdefault(variable, _Residual(*place))
    for index, variable in enumerate(jaxpr.outvars[:count]):
        if not hasattr(variable, "val"):  # a literal, which cannot be looked up
            known.setdefault(variable, _Residual("output", index))
    sources = []
    for index, variable in enumerate(jaxpr.outvars[count:]):
        fresh = _Residual("extra", index)
        sources.append(fresh if hasattr(variable, "val") else known.setdefault(variable, fresh))
    return sources


def _plan(name: str) -> _Plan:
    if name not in _PLANS:
        raise RuntimeError(f"{name}: a graph that calls a from_jax function runs only in the process that traced it")
    return _PLANS[name]


def _kernel(tensors, plan, operands=""):
    planned = _plan(plan)
    for x, want in zip(tensors, planned.request.signatures, strict=True):
        if x.shape != want.shape or x.dtype != want.dtype:  # only a graph that nobody guards comes here with others
            raise ValueError(
                f"{planned.label}: got a tensor of shape {tuple(x.shape)} and dtype {x.dtype} in a graph, want those "
                f"that it was traced with, {want.shape} and {want.dtype}"
            )
    return library.run(functools.partial(planned.forward, found(operands).masks), tensors)


def _backward_kernel(stored, cotangents, plan, operands=""):
    return library.run(functools.partial(_plan(plan).backward, found(operands).masks), (*stored, *cotangents))


def _empty(plan, infos):
    return [torch.empty(info.shape, dtype=info.dtype, device=plan.device) for info in infos]


class _Call(torch.autograd.Function):
    """A call with its gradient.

    Residuals are results, too: what is saved of them then depends on the inputs, as a second gradient, which raises,
    must see.
    """

    @staticmethod
    def forward(ctx, plan, operands, *tensors):
        results = library.below_function(_call_op, list(tensors), plan.name, operands.name)
        ctx.plan = plan
        ctx.operands = operands
        ctx.set_materialize_grads(False)
        stored = [tensors[index] for index in plan.inputs_read] + [results[index] for index in plan.outputs_read]
        ctx.save_for_backward(*stored, *results[plan.count :])
        ctx.mark_non_differentiable(*(results[index] for index in plan.fixed))
        return tuple(results)

    @staticmethod
    def backward(ctx, *cotangents):
        plan, given = ctx.plan, list(cotangents[: ctx.plan.count])
        if any(cotangent is not None for cotangent in cotangents[plan.count :]):
            library.refuse_second_gradient(plan.label)
        if all(cotangent is None for cotangent in given):
            return (None,) * (2 + len(plan.needs))
        stored = list(ctx.saved_tensors)
        gradients = iter(library.call_in_backward(_backward_op, stored, given, plan.name, ctx.operands.name))
        return (None, None, *(next(gradients) if needed else None for needed in plan.needs))

    @staticmethod
    def jvp(ctx, *tangents):
        library.refuse_tangent(ctx.plan.label)


def _differentiate(tensors, plan, operands=""):
    """The call's results with a gradient: by the plan of the same request that has one."""
    asked = _plan(plan)
    own = _make_plan(asked.request, tuple(x.requires_grad for x in tensors))
    results = library.apply(_Call, own, found(operands), *tensors)[: own.count]
    if not asked.has_gradient:
        return list(results)
    # The residuals of another level of torch.func. Its backward reads them, and must not be differentiated.
    again = lambda *tensors: library.below_function(_call_op, list(tensors), plan, operands)[own.count :]
    return [*results, *library.refuse_gradient(asked.label, again, tensors)]


def _differentiate_backward(stored, cotangents, plan, operands=""):
    count = len(stored)

    def again(*tensors):
        return library.below_function(_backward_op, list(tensors[:count]), list(tensors[count:]), plan, operands)

    return list(library.refuse_gradient(_plan(plan).label, again, (*stored, *cotangents)))


_call_op = library.define(
    "call",
    '(Tensor[] tensors, str plan, str operands="") -> Tensor[]',
    _kernel,
    lambda tensors, plan, operands="": _empty(_plan(plan), _plan(plan).results),
    _differentiate,
    lambda tensors, plan, operands="": _plan(plan).label,
)
_backward_op = library.define(
    "call_backward",
    '(Tensor[] stored, Tensor?[] cotangents, str plan, str operands="") -> Tensor[]',
    _backward_kernel,
    lambda stored, cotangents, plan, operands="": _empty(_plan(plan), _plan(plan).grads),
    _differentiate_backward,
    lambda stored, cotangents, plan, operands="": _plan(plan).label,
)


@once
def _mapped_call(name: str, size: int, mapped: tuple[bool, ...]) -> str:
    """The name of the plan for `size` calls of another at once, of whose tensors these have an axis of calls first.

    Where the other keeps residuals, these are its own, of each call, and the backward stays that of one call.
    """
    plan = _plan(name)
    signatures = zip(plan.request.signatures, mapped, strict=True)
    request = plan.request._replace(
        signatures=tuple(x._replace(shape=(size, *x.shape)) if is_mapped else x for x, is_mapped in signatures),
        maps=(*plan.request.maps, _Map(size, mapped)),
    )
    if not plan.has_gradient:
        return _make_plan(request, plan.needs).name
    results, forward = _in_parallel(size, plan.results), _vmap(plan.forward, size, mapped)
    return _keep(
        dataclasses.replace(plan, name=_plan_name(request), request=request, results=results, forward=forward)
    ).name


@once
def _mapped_backward(name: str, size: int, mapped: tuple[bool, ...]) -> str:
    """The same for backwards. mapped: of what is stored, and of the cotangents."""
    plan = _plan(name)
    grads, backward = _in_parallel(size, plan.grads), _vmap(plan.backward, size, mapped)
    return _keep(dataclasses.replace(plan, name=_plan_name(plan.request), grads=grads, backward=backward)).name


def _in_parallel(size: int, infos: tuple[_Info, ...]) -> tuple[_Info, ...]:
    return tuple(info._replace(shape=(size, *info.shape)) for info in infos)


def _vmap(function: Callable[..., Any], size: int, mapped: tuple[bool, ...]) -> Callable[..., Any]:
    """For a function of Masks, which all calls share, and arrays."""
    return jax.jit(jax.vmap(function, (None, *_axes(mapped)), axis_size=size))


def _axes(mapped: tuple[bool, ...]) -> tuple[int | None, ...]:
    return tuple(0 if is_mapped else None for is_mapped in mapped)


def _call_rule(info, in_dims, tensors, plan, operands=""):
    """What torch.func.vmap does with a call: jax.vmap of its function."""
    dims, *_ = in_dims
    front, mapped = _in_front(tensors, dims)
    return _call_op(front, _mapped_call(plan, operator.index(info.batch_size), mapped), operands), 0


def _backward_rule(info, in_dims, stored, cotangents, plan, operands=""):
    stored_dims, cotangent_dims, *_ = in_dims
    front, mapped = _in_front((*stored, *cotangents), (*stored_dims, *cotangent_dims))
    plan = _mapped_backward(plan, operator.index(info.batch_size), mapped)
    return _backward_op(front[: len(stored)], front[len(stored) :], plan, operands), 0


def _in_front(tensors, dims):
    """(the tensors with their mapped axis first, which of them have one)."""
    front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
    return front, tuple(dim is not None for dim in dims)


library.define_vmap("call", _call_rule)
library.define_vmap("call_backward", _backward_rule)
