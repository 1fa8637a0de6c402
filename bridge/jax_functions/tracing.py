"""Makes the program of a request: traces the JAX function, and finds the values that its backward reads."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import core

from jax_kernels.bridge.interop import dlpack, planning_device
from jax_kernels.bridge.jax_functions.argument_checks import type_name
from jax_kernels.bridge.jax_functions.argument_names import constants, leaf_names
from jax_kernels.bridge.jax_functions.mask_operands import MaskSignature
from jax_kernels.bridge.jax_functions.programs import (
    PROGRAMS,
    DynamicCall,
    Program,
    ProgramKey,
    ResidualSource,
    ResultSpec,
    display_name,
    find_function,
    is_of_library,
    pin_if_traced,
)
from jax_kernels.bridge.jax_functions.pytree import Leaf, Structure, flatten, unflatten
from jax_kernels.bridge.operators.profiler_names import named
from jax_kernels.masks import Mask

__all__ = [
    "build_program",
    "check_hashable",
    "cotangents_of",
    "mapped_axes",
    "mask_specs",
    "outputs_of",
    "program_for",
    "with_pullback",
]


def program_for(request: ProgramKey, needs: tuple[bool, ...]) -> Program:
    """The program of a request, made once per process.

    needs: for each tensor, whether the backward computes its gradient. Raises, naming the argument: TypeError for a
    constant that is not hashable, or a dtype that JAX lacks; ValueError if there is no tensor, a tensor is sparse, or
    the tensors are on several devices. Also raises the errors of the JAX function.
    """
    check_hashable(request)
    return build_program(request, needs)


def check_hashable(call: ProgramKey | DynamicCall) -> None:
    """Raises TypeError, naming the argument, if a constant of the call is not hashable."""
    try:
        hash(call)
    except TypeError as error:
        for name, value in constants(find_function(call.function), call.structure):
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{name}: got {type_name(value)}, want a torch.Tensor or a hashable constant"
                ) from error
        raise TypeError(f"args: got an unhashable value, want torch.Tensors and hashable constants: {error}") from error


def build_program(request: ProgramKey, needs: tuple[bool, ...]) -> Program:
    """The program of a request with hashable constants, made once per process.

    needs: for each tensor, whether the backward computes its gradient. While a graph is traced, the program's name
    becomes valid until the process ends.
    """
    function = find_function(request.function)  # `build` keeps it alive
    build = lambda name: _planned(name, request, needs, function)
    name, program = PROGRAMS.get((request, needs), display_name(request.function), build)
    pin_if_traced(name)
    return program


def _planned(name: str, request: ProgramKey, needs: tuple[bool, ...], function: Callable[..., Any]) -> Program:
    """Traces the function for a request, and returns its Program. XLA compiles the program at its first call.

    name: the program's name. function: the request's function. needs: for each tensor, whether the backward computes
    its gradient. Raises, naming the argument: TypeError for a dtype that JAX or PyTorch lacks; ValueError if there is
    no tensor, a tensor is sparse, or the tensors are on several devices. Also raises the function's errors.
    """
    signatures = request.signatures
    device = _check(request, function)
    outputs, structures = outputs_of(request)
    moving = [index for index, needed in enumerate(needs) if needed]
    specs = [jax.ShapeDtypeStruct(x.shape, dlpack.jax_dtype(x.dtype)) for x in signatures]
    specs_of_masks = mask_specs(request.masks)

    with planning_device.planning_on(device):
        if moving:
            traceable = lambda masks, *leaves: with_pullback(outputs, masks, leaves, moving)
            traced = jax.jit(traceable).trace(specs_of_masks, *specs)
            out_infos, pullback = traced.out_info
        else:
            out_infos, pullback = jax.eval_shape(outputs, specs_of_masks, *specs), None
    count = len(out_infos)
    residual_infos, tree = jax.tree.flatten(pullback)
    sources = _sources(traced.jaxpr.jaxpr, len(jax.tree.leaves(specs_of_masks)), count) if moving else []
    extra = [index for index, source in enumerate(sources) if source == ResidualSource("extra", index)]
    inputs_read = sorted({source.position for source in sources if source.origin == "input"})
    outputs_read = sorted({source.position for source in sources if source.origin == "output"})

    def forward(masks, *leaves):
        if not moving:
            return outputs(masks, *leaves)
        results, pullback = with_pullback(outputs, masks, leaves, moving)
        residuals = jax.tree.leaves(pullback)
        return (*results, *(residuals[index] for index in extra))

    def backward(masks, *arrays):
        stored = iter(arrays)
        by_source = {
            **{ResidualSource("mask", index): array for index, array in enumerate(jax.tree.leaves(masks))},
            **{ResidualSource("input", index): next(stored) for index in inputs_read},
            **{ResidualSource("output", index): next(stored) for index in outputs_read},
            **{ResidualSource("extra", index): next(stored) for index in extra},
        }
        pullback = jax.tree.unflatten(tree, [by_source[source] for source in sources])
        gradients = pullback(cotangents_of(out_infos, stored))
        return tuple(_conjugate(gradient) for gradient in gradients)

    residuals, label = [residual_infos[index] for index in extra], display_name(request.function)
    *_, output_structure = structures
    return Program(
        name=name,
        request=request,
        needs=needs,
        outputs=output_structure,
        count=count,
        fixed=tuple(i for i, info in enumerate(out_infos) if not jnp.issubdtype(info.dtype, jnp.inexact)),
        results=_infos("output", out_infos) + _infos("residual", residuals),
        grads=tuple(ResultSpec(signatures[index].shape, signatures[index].dtype) for index in moving),
        inputs_read=tuple(inputs_read),
        outputs_read=tuple(outputs_read),
        forward=jax.jit(named(forward, label), keep_unused=True),
        backward=jax.jit(named(backward, f"{label}_backward"), keep_unused=True),
    )


def _check(request: ProgramKey, function: Callable[..., Any]) -> torch.device:
    """The device of all tensors of a request.

    Raises, naming the argument: TypeError for a dtype that JAX lacks, ValueError if there is no tensor, a tensor is
    sparse, or the tensors are on several devices.
    """
    if not request.signatures:
        raise ValueError("args: got no tensor, want at least one: the function runs on its device")
    first, *_ = request.signatures
    names = leaf_names(function, request.structure)
    for name, x in zip(names, request.signatures, strict=True):
        dlpack.check_dtype(name, x.dtype, takes_64_bits=not is_of_library(function))
        if x.layout != torch.strided:
            raise ValueError(f"{name}: got layout {x.layout}, want a dense tensor; convert it with .to_dense()")
        if x.device != first.device:
            raise ValueError(f"{name}: got a tensor on {x.device}, want the device of the others, {first.device}")
    if first.device.type != "meta":
        dlpack.jax_device(first.device)
    return first.device


def outputs_of(request: ProgramKey) -> tuple[Callable[..., tuple[jax.Array, ...]], list[Structure]]:
    """(function, structures): the request's function with flat arguments and results, and a list, empty at first.

    function(masks, *arrays) takes the tuple of Masks and an array for each tensor. It returns a flat tuple of arrays,
    mapped by the request's levels of torch.func.vmap. Each trace of it appends the structure of the original results
    to the list.
    """
    function = find_function(request.function)
    structures: list[Structure] = []

    def outputs(masks, *leaves):
        def each(*leaves):
            args, kwargs = unflatten(request.structure, iter(leaves), iter(masks))
            results: list[Any] = []
            structures.append(flatten(function(*args, **kwargs), results, None, Leaf))
            return tuple(jnp.asarray(result) for result in results)

        for size, mapped in request.maps:
            each = jax.vmap(each, mapped_axes(mapped), axis_size=size)
        return each(*leaves)

    return outputs, structures


def with_pullback(outputs: Callable[..., Any], masks: Any, leaves: Sequence[Any], moving: Sequence[int]) -> Any:
    """(outputs(masks, *leaves), its pullback to the leaves with the indices `moving`), as jax.vjp returns them."""

    def moved(*values):
        full = list(leaves)
        for index, value in zip(moving, values, strict=True):
            full[index] = value
        return outputs(masks, *full)

    return jax.vjp(moved, *(leaves[index] for index in moving))


def mask_specs(signature: MaskSignature | None) -> tuple[Mask, ...]:
    """The Masks of a signature, with a jax.ShapeDtypeStruct for each array; () for None."""
    if signature is None:
        return ()
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in signature.arrays]
    return jax.tree.unflatten(signature.structure, arrays)


def _infos(what: str, arrays: Sequence[jax.ShapeDtypeStruct]) -> tuple[ResultSpec, ...]:
    """The ResultSpecs of JAX's arrays, with PyTorch's dtypes.

    Raises TypeError for a dtype that PyTorch lacks; `what` is the arrays' name in its text.
    """
    return tuple(ResultSpec(x.shape, dlpack.torch_dtype(what, x.dtype)) for x in arrays)


def _sources(jaxpr: core.Jaxpr, mask_count: int, count: int) -> list[ResidualSource]:
    """The source of each residual of a traced forward, so that no array is kept twice.

    jaxpr: its inputs are the arrays of the Masks (the first mask_count), then the call's tensors; its results are the
    outputs (the first `count`), then the residuals.
    """
    known: dict[Hashable, ResidualSource] = {}
    variable: core.Var | core.Literal
    for index, variable in enumerate(jaxpr.invars):
        is_mask = index < mask_count
        source = ResidualSource("mask", index) if is_mask else ResidualSource("input", index - mask_count)
        known.setdefault(variable, source)
    for index, variable in enumerate(jaxpr.outvars[:count]):
        if not hasattr(variable, "val"):  # a literal has `val`, and cannot be a dict's key
            known.setdefault(variable, ResidualSource("output", index))
    sources = []
    for index, variable in enumerate(jaxpr.outvars[count:]):
        fresh = ResidualSource("extra", index)
        sources.append(fresh if hasattr(variable, "val") else known.setdefault(variable, fresh))
    return sources


def cotangents_of(
    infos: Sequence[jax.ShapeDtypeStruct | jax.Array], given: Iterable[jax.Array | np.ndarray | None]
) -> tuple[jax.Array | np.ndarray, ...]:
    """The cotangents for JAX's pullback, from the cotangents that PyTorch gives.

    infos: shape and dtype of each output. given: an array or None for each output. None becomes zeros; an integer or
    bool output gets zeros of dtype float0; complex cotangents are conjugated.
    """
    cotangents = []
    for info, cotangent in zip(infos, given, strict=True):
        if not jnp.issubdtype(info.dtype, jnp.inexact):
            cotangent = np.zeros(info.shape, jax.dtypes.float0)
        elif cotangent is None:
            cotangent = jnp.zeros(info.shape, info.dtype)
        cotangents.append(_conjugate(cotangent))
    return tuple(cotangents)


def _conjugate(x: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Converts complex gradients between PyTorch's and JAX's conventions, in both directions."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def mapped_axes(mapped: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The in_axes of jax.vmap: for each array 0 if it is mapped, which means that it has a leading axis, else None."""
    return tuple(0 if is_mapped else None for is_mapped in mapped)
