"""from_jax: a JAX function as a PyTorch function, with its gradient.

A call is made of constants and tensors. The constants (the structure of the arguments, their shapes and
dtypes, which of them need a gradient) make a plan, once; the plan's name goes with the tensors through one
operator for the forward and one for the backward.
"""

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_kernels.bridge import dlpack, library
from jax_kernels.bridge.operands import NONE, Operands, masks_of, operands_of
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
      torch.func.vmap is jax.vmap of `function`. It cannot be differentiated twice or captured in a CUDA graph.

    Raises, when called:
      TypeError: a tensor's dtype is not taken by JAX (float64 and int64 are not, without jax_enable_x64), or a
        constant is not hashable.
      ValueError: tensors on several devices, or none at all.
    """
    if not callable(function):
        raise TypeError(f"function: got {type(function).__name__}, want a function of jax.Arrays")
    # A string, as torch.compile may make a symbol of a number.
    name = f"{getattr(function, '__name__', 'function')}_{len(_FUNCTIONS)}"
    _FUNCTIONS[name] = function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        masks: list[Mask] = []
        structure = flatten((args, kwargs), tensors, masks)
        return _with_masks(name, structure, tensors, masks) if masks else _run(name, structure, tensors, NONE, ())

    return call


_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def _run(name: str, structure: Any, tensors: list[torch.Tensor], operands: Operands, of_masks: tuple[Any, ...]) -> Any:
    """of_masks: the signature of the operands."""
    grad = torch.is_grad_enabled()
    transformed = library.transforming()
    needs = tuple(
        (x.is_floating_point() or x.is_complex()) and (transformed or (grad and x.requires_grad)) for x in tensors
    )
    facts = _facts(name, structure, needs, tuple(_signature(x) for x in tensors), of_masks)
    if transformed:
        results = _TransformedCall.apply(facts, operands, *tensors)
    elif any(needs):
        results = _Call.apply(facts, operands, *tensors)
    else:
        results = _call_op(tensors, facts[0], operands.name)
    return rebuild(facts[1], iter(results))


@torch.compiler.disable(reason="jax_kernels: a Mask is no constant that torch.compile takes")
def _with_masks(name: str, structure: Any, tensors: list[torch.Tensor], masks: list[Mask]) -> Any:
    operands = operands_of(masks, tensors[0].device) if tensors else NONE
    return _run(name, structure, tensors, operands, operands.signature)


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    # index() makes a constant of a symbolic size: JAX compiles for each shape.
    return tuple(operator.index(size) for size in tensor.shape), tensor.dtype, tensor.device, tensor.layout


class _Residual(NamedTuple):
    """Where the backward finds a value: place is "mask" (an array of one), "input", "output", or "extra" (result)."""

    place: str
    position: int


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A function with its constants, for one set of shapes on one device.

    results: shape and dtype of the forward's results, outputs and then residuals. grads: those of the backward's.
    """

    device: torch.device
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    grads: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]


_PLANS: dict[str, _Plan] = {}


@torch.compiler.assume_constant_result
def _facts(
    name: str, structure: Any, needs: tuple[bool, ...], signatures: tuple[Any, ...], of_masks: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What PyTorch's side of a call must know, in constants: (the plan's name, the structure of the outputs, how
    many outputs, which of them have no gradient, which inputs and which outputs the backward reads)."""
    try:
        return _make_facts(name, structure, needs, signatures, of_masks, jax.config.jax_enable_x64)
    except TypeError as error:
        if "unhashable" in str(error):
            raise TypeError(f"got an argument that is neither a tensor nor hashable: {error}") from error
        raise


@functools.cache
def _make_facts(name, structure, needs, signatures, of_masks, x64):
    device = _check(signatures)
    function = _FUNCTIONS[name]
    moving = [index for index, needed in enumerate(needs) if needed]
    specs = [jax.ShapeDtypeStruct(shape, dlpack.jax_dtype(dtype)) for shape, dtype, _, _ in signatures]
    mask_specs: Any = ()
    if of_masks:
        arrays = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in of_masks[1]]
        mask_specs = jax.tree.unflatten(of_masks[0], arrays)
    out_structure: Any = None

    def outputs(masks, *leaves):
        nonlocal out_structure
        args, kwargs = rebuild(structure, iter(leaves), iter(masks))
        results: list[Any] = []
        out_structure = flatten(function(*args, **kwargs), results, None, Leaf)
        return tuple(jnp.asarray(result) for result in results)

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

    def forward(masks, *leaves):
        if not moving:
            return outputs(masks, *leaves)
        results, pullback = with_pullback(masks, *leaves)
        residuals = jax.tree.leaves(pullback)
        return (*results, *(residuals[index] for index in extra))

    inputs_read = sorted({source.position for source in sources if source.place == "input"})
    outputs_read = sorted({source.position for source in sources if source.place == "output"})

    def backward(masks, *arrays):
        stored = iter(arrays)
        places = {
            **{_Residual("mask", index): array for index, array in enumerate(jax.tree.leaves(masks))},
            **{_Residual("input", index): next(stored) for index in inputs_read},
            **{_Residual("output", index): next(stored) for index in outputs_read},
            **{_Residual("extra", index): next(stored) for index in extra},
        }
        cotangents = []
        for info, given in zip(out_infos, stored, strict=True):
            if not jnp.issubdtype(info.dtype, jnp.inexact):
                given = np.zeros(info.shape, jax.dtypes.float0)
            elif given is None:
                given = jnp.zeros(info.shape, info.dtype)
            cotangents.append(_conjugate(given))
        gradients = jax.tree.unflatten(tree, [places[source] for source in sources])(tuple(cotangents))
        return tuple(_conjugate(gradient) for gradient in gradients)

    describe = lambda what, infos: tuple((i.shape, dlpack.torch_dtype(what, i.dtype)) for i in infos)
    results = describe("output", out_infos) + describe("residual", [residual_infos[index] for index in extra])
    grads = tuple(signatures[index][:2] for index in moving)
    # torch.compile keeps code on disk by the plan's name: the name must tell the shapes that such code relies on.
    digest = hashlib.sha256(repr((signatures, of_masks, results, grads)).encode()).hexdigest()[:12]
    plan = f"{name}_{len(_PLANS)}_{digest}"
    _PLANS[plan] = _Plan(device, results, grads, jax.jit(forward), jax.jit(backward))
    fixed = tuple(i for i, info in enumerate(out_infos) if not jnp.issubdtype(info.dtype, jnp.inexact))
    return plan, out_structure, count, fixed, tuple(inputs_read), tuple(outputs_read), needs


def _conjugate(x: Any) -> Any:
    """From PyTorch's convention for complex gradients to JAX's, and back."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _check(signatures: tuple[Any, ...]) -> torch.device:
    if not signatures:
        raise ValueError("got no tensor among the arguments, want at least one: its device is where the function runs")
    device = signatures[0][2]
    for index, (_, dtype, other, layout) in enumerate(signatures):
        name = f"tensor argument {index}"
        dlpack.check_dtype(name, dtype)
        if layout != torch.strided:
            raise ValueError(f"{name}: got layout {layout}, want a dense tensor; convert it with .to_dense()")
        if other != device:
            raise ValueError(f"{name}: got a tensor on {other}, want the device of the others, {device}")
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
    return library.run(functools.partial(_plan(plan).forward, masks_of(operands)), tensors)


def _backward_kernel(stored, cotangents, plan, operands=""):
    return library.run(functools.partial(_plan(plan).backward, masks_of(operands)), (*stored, *cotangents))


def _empty(plan, infos):
    return [torch.empty(shape, dtype=dtype, device=plan.device) for shape, dtype in infos]


_call_op = library.define(
    "call",
    '(Tensor[] tensors, str plan, str operands="") -> Tensor[]',
    _kernel,
    lambda tensors, plan, operands="": _empty(_plan(plan), _plan(plan).results),
)
_backward_op = library.define(
    "call_backward",
    '(Tensor[] stored, Tensor?[] cotangents, str plan, str operands="") -> Tensor[]',
    _backward_kernel,
    lambda stored, cotangents, plan, operands="": _empty(_plan(plan), _plan(plan).grads),
)


@functools.cache
def _mapped(name: str, size: int, mapped: tuple[bool, ...]) -> str:
    """The name of a plan for `size` calls of another at once, of whose arguments these have an axis of calls first."""
    plan = _plan(name)
    axes = (None, *(0 if is_mapped else None for is_mapped in mapped))
    forward, backward = (jax.jit(jax.vmap(f, axes, axis_size=size)) for f in (plan.forward, plan.backward))
    results, grads = (tuple(((size, *shape), dtype) for shape, dtype in x) for x in (plan.results, plan.grads))
    mapped_name = f"{name}_{size}x{''.join(map(str, map(int, mapped)))}"
    _PLANS[mapped_name] = _Plan(plan.device, results, grads, forward, backward)
    return mapped_name


def _call_rule(info, in_dims, tensors, plan, operands=""):
    """What torch.func.vmap does with a call: jax.vmap of its function."""
    front, mapped = _in_front(tensors, in_dims[0])
    return _call_op(front, _mapped(plan, operator.index(info.batch_size), mapped), operands), 0


def _backward_rule(info, in_dims, stored, cotangents, plan, operands=""):
    front, mapped = _in_front((*stored, *cotangents), (*in_dims[0], *in_dims[1]))
    plan = _mapped(plan, operator.index(info.batch_size), mapped)
    return _backward_op(front[: len(stored)], front[len(stored) :], plan, operands), 0


def _in_front(tensors, dims):
    """(the tensors with their mapped axis first, which of them have one)."""
    front = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
    return front, tuple(dim is not None for dim in dims)


library.define_vmap("call", _call_rule)
library.define_vmap("call_backward", _backward_rule)


class _Backward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(plan, operands, count, *arguments):
        return tuple(_backward_op(list(arguments[:count]), list(arguments[count:]), plan, operands.name))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = library.refuse_double_backward("from_jax")


def _gradients(ctx, cotangents):
    plan, _, _, _, _, _, needs = ctx.facts
    if all(cotangent is None for cotangent in cotangents):
        return (None,) * (2 + len(needs))
    stored = ctx.saved_tensors
    if torch.is_grad_enabled():
        gradients = _Backward.apply(plan, ctx.operands, len(stored), *stored, *cotangents)
    else:
        gradients = _backward_op(list(stored), list(cotangents), plan, ctx.operands.name)
    gradients = iter(gradients)
    return (None, None, *(next(gradients) if needed else None for needed in needs))


def _save(ctx, facts, operands, tensors, results):
    _, _, count, _, inputs_read, outputs_read, _ = facts
    ctx.facts = facts
    ctx.operands = operands
    ctx.set_materialize_grads(False)
    stored = [tensors[index] for index in inputs_read] + [results[index] for index in outputs_read]
    ctx.save_for_backward(*stored, *results[count:])


class _Call(torch.autograd.Function):
    """The forward of eager mode."""

    @staticmethod
    def forward(ctx, facts, operands, *tensors):
        results = _call_op(list(tensors), facts[0], operands.name)
        _save(ctx, facts, operands, tensors, results)
        ctx.mark_non_differentiable(*(results[index] for index in facts[3]))
        return tuple(results[: facts[2]])

    @staticmethod
    def backward(ctx, *cotangents):
        return _gradients(ctx, cotangents)


class _TransformedCall(torch.autograd.Function):
    """The forward under torch.func's transforms, which need `setup_context`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(facts, operands, *tensors):
        return tuple(_call_op(list(tensors), facts[0], operands.name))

    @staticmethod
    def setup_context(ctx, inputs, output):
        facts, operands, *tensors = inputs
        _save(ctx, facts, operands, tensors, output)
        fixed = (*facts[3], *range(facts[2], len(output)))
        ctx.mark_non_differentiable(*(output[index] for index in fixed))

    @staticmethod
    def backward(ctx, *cotangents):
        return _gradients(ctx, cotangents[: ctx.facts[2]])
