"""Calls of from_jax's functions in graphs for many shapes.

The operators `call` and `call_backward` take a program's name, and a program holds for one set of shapes. `call_any`
and `call_any_backward` take a recipe's name. In this file a recipe is a call without shapes (DynamicCall). The
operators look up the program for the tensors' shapes when they run. The name of a recipe is a text that describes the
whole call, so nothing is kept for a graph. Only a recipe with constants other than numbers and texts is kept, and found
by a shorter name.

PyTorch must know each result's size as an expression of the tensors' sizes. Trials find the expressions: JAX gives the
results' sizes for a few sets of sizes. JAX may refuse a set, because a tensor's size must equal a parameter's size.
Then the refused sizes become constants of the graph. A call checks that its results have the sizes in its graph. The
backward reads only the tensors, so XLA recomputes the parts of the forward that the gradients need.
"""

import functools
import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.keyed_cache import memoize, unique_name
from jax_kernels.bridge.jax_functions.mask_operands import NO_MASKS
from jax_kernels.bridge.jax_functions.programs import FUNCTIONS, Program, ProgramKey, TensorSpec, display_name
from jax_kernels.bridge.jax_functions.pytree import Structure
from jax_kernels.bridge.jax_functions.tracing import cotangents_of, outputs_of, program_for
from jax_kernels.bridge.operators import torch_operator

__all__ = ["Flat", "call", "clear", "count", "find", "is_any_shape", "name_of"]


class DynamicCall(NamedTuple):
    """A call without values and shapes, also called a recipe.

    function: the name by which find_function finds the JAX function. structure: `flatten` of (args, kwargs), with the
    constants. x64: jax_enable_x64.
    """

    function: str
    structure: Structure
    x64: bool

    def request(self, signatures: Sequence[TensorSpec]) -> ProgramKey:
        """The call with tensors of these shapes and dtypes."""
        return ProgramKey(self.function, self.structure, tuple(signatures), None, self.x64)


class _Result(NamedTuple):
    """A result's dtype, and the size of each of its axes as a function of the tensors' sizes.

    An entry of sizes is an int, which is a constant size, or (tensor, axis): the index of a tensor of the call, and the
    axis whose size it is.
    """

    dtype: torch.dtype
    sizes: tuple[int | tuple[int, int], ...]


class _Results(NamedTuple):
    """The dtypes and sizes of a call's results for all sizes of its tensors. It has no values.

    results: one entry for each tensor among the results, in order. structure: of the function's results, for
    `unflatten`.
    """

    results: tuple[_Result, ...]
    structure: Structure

    @property
    def text(self) -> str:
        """The sizes of all results as JSON, for the operator's argument `sizes`."""
        return json.dumps([result.sizes for result in self.results])


_MOST = 1024  # recipes that are kept
_KEPT: dict[str, DynamicCall] = {}  # recipes that have no text, the last used at the end
_LOCK = threading.Lock()
_PLAIN: dict[str, type] = {kind.__name__: kind for kind in (str, bool, int, type(None))}


def _name_of(recipe: DynamicCall) -> str:
    """The name of a recipe, from which `find` returns the recipe.

    If all constants are numbers and texts, the name contains the whole recipe, as a text with spaces. Otherwise the
    recipe is kept in this process, under a name without spaces.
    """
    try:
        structure = json.dumps(recipe.structure, default=_type_name)
    except TypeError:
        return _kept_name(recipe)
    return f"{recipe.function} {recipe.x64:d} {structure}"


def _type_name(x: Any) -> dict[str, str]:
    """Represents the types str, bool, int and NoneType in a recipe's JSON, as {"type": the type's name}.

    Raises TypeError for other objects: then the recipe has no text.
    """
    if not isinstance(x, type) or _PLAIN.get(x.__name__) is not x:
        raise TypeError
    return {"type": x.__name__}


@memoize
def _kept_name(recipe: DynamicCall) -> str:
    """Keeps a recipe under a new name without spaces, which it returns. Equal recipes get one name."""
    name = unique_name(recipe.function)
    with _LOCK:
        _KEPT[name] = recipe
        while len(_KEPT) > _MOST:
            del _KEPT[next(iter(_KEPT))]
    return name


def find(name: str) -> DynamicCall:
    """The recipe of this name. Raises RuntimeError if another process made the name, or if the recipe was dropped."""
    if " " in name:
        return _read(name)
    with _LOCK:
        recipe = _KEPT.pop(name, None)
        if recipe is not None:
            _KEPT[name] = recipe
            return recipe
    raise RuntimeError(
        f"{name}: a graph that calls a from_jax function runs only in the process that traced it; with constants other "
        f"than numbers and texts it is lost after clear_cache(), and after {_MOST} other graphs with such constants; "
        "compile it again, after torch.compiler.reset()"
    )


@functools.lru_cache(maxsize=_MOST)
def _read(name: str) -> DynamicCall:
    """The recipe that a name with spaces describes. Raises RuntimeError if another process made the name."""
    function, x64, structure = name.split(" ", 2)
    if function not in FUNCTIONS:
        raise RuntimeError(
            f"{function}: a graph that calls a from_jax function runs only in the process that traced it"
        )
    return DynamicCall(function, _as_tuples(json.loads(structure, object_hook=lambda x: _PLAIN[x["type"]])), x64 == "1")


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x


def _label(name: str) -> str:
    """The function of the recipe with this name, as 'from_jax of NAME', for error messages."""
    return f"from_jax of {display_name(name.split(' ', 1)[0] if ' ' in name else find(name).function)}"


def clear() -> None:
    """Drops the kept recipes, and the sizes of results that were found for graphs."""
    with _LOCK:
        _KEPT.clear()
    _read.cache_clear()
    _infer_sizes.cache_clear()
    _sizes_to_specialize.cache_clear()


def count() -> int:
    """The number of kept recipes: calls in graphs for many sizes with a constant that is no number and no text."""
    return len(_KEPT)


def is_any_shape(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor has a symbolic size, as in a graph for many sizes. False under torch.func's transforms."""
    if torch._C._are_functorch_transforms_active():
        return False
    return any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape)


class Flat(NamedTuple):
    """The results of a call as a flat list. structure: of the function's results, for `unflatten`."""

    results: list[torch.Tensor]
    structure: Structure


def name_of(function: str, structure: Structure) -> str:
    """The name of a call without shapes, for `find` and `call`.

    function: the function's name in FUNCTIONS. structure: `flatten` of the call's (args, kwargs).
    """
    return _name_of(DynamicCall(function, structure, jax.config.jax_enable_x64))


def call(name: str, tensors: list[torch.Tensor]) -> Flat | None:
    """Adds a call to a graph for many shapes, and returns its results.

    name: from name_of. tensors: the call's tensors, with symbolic sizes. None if the sizes of the results cannot be
    expressed by the tensors' sizes: then nothing was added.
    """
    found = _results_of(name, tensors)
    return None if found is None else Flat(call_any_op(tensors, name, found.text), found.structure)


class _Sizes(NamedTuple):
    """A tensor of a graph for many shapes.

    sizes: for each axis an int if the size is constant, else the text of its symbolic expression, such as "s0 + 1".
    hints: the example value of each size in the trace.
    """

    sizes: tuple[int | str, ...]
    hints: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _results_of(name: str, tensors: Sequence[torch.Tensor]) -> _Results | None:
    """The dtypes and sizes of the results of the recipe `name`, for tensors with symbolic sizes; nothing is computed.

    None if the results' sizes cannot be expressed by the tensors' sizes. It makes sizes constants of the graph if the
    results' sizes can be found only then, as when JAX accepts only one value for them.
    """
    described = _sizes_of(tensors)
    if described is None:
        return None
    pins = _sizes_to_specialize(name, described)
    if not pins:
        return None if pins is None else _infer_sizes(name, described)
    for x in tensors:
        for size in x.shape:
            if _described(size) in pins:
                int(size)
    pinned = _sizes_of(tensors)
    return None if pinned is None else _infer_sizes(name, pinned)


def _sizes_of(tensors: Sequence[torch.Tensor]) -> tuple[_Sizes, ...] | None:
    """One entry for each tensor; None if a size has no example value in the trace."""
    found = []
    for x in tensors:
        hints = [torch_internals.size_hint(size) for size in x.shape]
        if None in hints:
            return None
        sizes = tuple(map(_described, x.shape))
        found.append(_Sizes(sizes, tuple(hints), x.dtype, x.device))  # type: ignore[arg-type]
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _sizes_to_specialize(name: str, tensors: tuple[_Sizes, ...]) -> tuple[str, ...] | None:
    """The texts of the size expressions that must become constants, so that the results' sizes can be found.

    () if none must; None if no choice works that leaves an expression symbolic. It first tries the expressions that are
    equal, in the trace, to a constant size: torch.compile(dynamic=True) gives a tensor's last axis a symbol, though a
    parameter's axis of the same size is a constant. name: the recipe's.
    """
    hints = _hints(tensors)
    constants = {size for x in tensors for size in x.sizes if isinstance(size, int)}
    equal = tuple(text for text, hint in hints.items() if hint in constants)
    others = tuple(text for text in hints if text not in equal)
    every = [(), *((x,) for x in equal), equal, *((x,) for x in others), *((*equal, x) for x in others)]
    for pins in dict.fromkeys(every):
        if pins and len(pins) == len(hints):
            continue
        if _infer_sizes(name, tuple(_pinned(x, pins) for x in tensors)) is not None:
            return pins
    return None


def _hints(tensors: Sequence[_Sizes]) -> dict[str, int]:
    """The example value of each symbolic size in the trace, by the text of its expression."""
    return {size: hint for x in tensors for size, hint in zip(x.sizes, x.hints, strict=True) if isinstance(size, str)}


def _pinned(x: _Sizes, pins: Sequence[str]) -> _Sizes:
    """The tensor's sizes, with the expressions whose texts are in `pins` replaced by their example values."""
    return x._replace(sizes=tuple(hint if size in pins else size for size, hint in zip(x.sizes, x.hints, strict=True)))


def _described(size: torch.SymInt | int) -> int | str:
    """A constant size as an int; else the text of the size's expression."""
    if not isinstance(size, torch.SymInt):
        return size
    text = str(size)
    return int(text) if text.isdigit() else text


class _Probe(NamedTuple):
    """A trial: the call planned for one choice of sizes.

    shapes: the shape of each tensor. program: JAX's program for these shapes, which has the results' shapes.
    """

    shapes: list[tuple[int, ...]]
    program: Program


def _trial(recipe: DynamicCall, tensors: Sequence[_Sizes], values: dict[str, int]) -> _Probe:
    """Plans a recipe's call for one choice of sizes. values: a size for each expression, by the expression's text.

    Raises JAX's error if JAX refuses these sizes.
    """
    shapes, signatures = [], []
    for x in tensors:
        shapes.append(tuple(values[size] if isinstance(size, str) else size for size in x.sizes))
        signatures.append(TensorSpec(shapes[-1], x.dtype, x.device, torch.strided))
    return _Probe(shapes, program_for(recipe.request(signatures), (False,) * len(tensors)))


@functools.lru_cache(maxsize=1024)
def _infer_sizes(name: str, tensors: tuple[_Sizes, ...]) -> _Results | None:
    """The dtypes and sizes of a recipe's results, by tracing the call for two or three choices of sizes.

    A result's axis has the size of a tensor's axis if the two sizes are equal in two trials. The first trial has the
    sizes of the trace, the second multiplies each expression by its own factor. JAX may refuse the second trial's sizes
    because some must be equal. Then expressions that are equal in the trace get the same factor. A third trial, with
    small sizes, checks the result.

    None if JAX refuses the second trial, if no axis matches, or if the third trial contradicts. Raises JAX's error if
    JAX refuses the first trial.
    """
    recipe = find(name)
    hints = _hints(tensors)
    values = list(dict.fromkeys(hints.values()))
    first = _trial(recipe, tensors, hints)
    distinct = {text: 2 + at for at, text in enumerate(hints)}
    alike = {text: 2 + values.index(hint) for text, hint in hints.items()}
    larger = [{text: hint * factors[text] for text, hint in hints.items()} for factors in (distinct, alike)]
    second = _first_trial(recipe, tensors, larger)
    if second is None:
        return None
    results = []
    for one, other in zip(first.program.results, second.program.results, strict=True):
        sizes = [_size(tensors, first, second, pair) for pair in zip(one.shape, other.shape, strict=True)]
        if None in sizes:
            return None
        results.append(_Result(one.dtype, tuple(sizes)))  # type: ignore[arg-type]
    # A size such as min(n, 8) was a constant in both trials. A trial with small sizes shows that it varies.
    third = _first_trial(recipe, tensors, [distinct, alike])
    if third is not None:
        want = [_shape(result.sizes, third.shapes) for result in results]
        if [tuple(x.shape) for x in third.program.results] != want:
            return None
    return _Results(tuple(results), first.program.outputs)


def _first_trial(recipe: DynamicCall, tensors: Sequence[_Sizes], every: Sequence[dict[str, int]]) -> _Probe | None:
    """The first trial that JAX accepts, of these choices of sizes in order; None if JAX refuses all."""
    for values in every:
        try:
            return _trial(recipe, tensors, values)
        except (TypeError, ValueError, NotImplementedError):
            continue
    return None


def _shape(sizes: Sequence[int | tuple[int, int]], shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of a result for tensors of these shapes.

    sizes: for each axis of the result a constant size, or (index of a tensor, axis of the tensor).
    """
    return tuple(x if isinstance(x, int) else shapes[x[0]][x[1]] for x in sizes)


def _size(
    tensors: Sequence[_Sizes], first: _Probe, second: _Probe, sizes: tuple[int, int]
) -> int | tuple[int, int] | None:
    """The size of an axis of a result: a constant, or (index of a tensor, axis of the tensor); None if none matches.

    sizes: the size of the result's axis in the first and in the second trial.
    """
    if sizes[0] == sizes[1]:
        return sizes[0]
    for index, x in enumerate(tensors):
        for axis, size in enumerate(x.sizes):
            if isinstance(size, str) and (first.shapes[index][axis], second.shapes[index][axis]) == sizes:
                return index, axis
    return None


def _signatures(tensors: Sequence[torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(tuple(x.shape), x.dtype, x.device, x.layout) for x in tensors]


def _program(tensors, recipe, sizes=""):
    """The JaxCall of a recipe's forward for tensors of any shapes.

    recipe: the recipe's name. sizes: the results' sizes that the graph assumes, as the JSON of _Results.text; "" skips
    the check. Raises RuntimeError if the results have other shapes.
    """
    program = program_for(find(recipe).request(_signatures(tensors)), (False,) * len(tensors))
    if sizes:
        shapes = [x.shape for x in tensors]
        want = [_shape(result, shapes) for result in json.loads(sizes)]
        got = [tuple(x.shape) for x in program.results]
        if got != want:
            raise RuntimeError(
                f"{_label(recipe)}: its results have shapes {got}, but this graph for many shapes has {want}: it takes "
                "each size of a result for a constant or the size of a tensor; compile it with dynamic=False"
            )
    return torch_operator.JaxCall(program.forward, tensors, NO_MASKS)


@memoize
def _backward(request: ProgramKey, wanted: int):
    """A jitted function (masks, *tensors, *cotangents) that returns the wanted gradients as a tuple, in order.

    wanted: bit i is set if the gradient of tensor i is wanted. It recomputes the forward from the tensors. masks:
    always (), as a recipe has no Masks. A cotangent may be None.
    """
    outputs, _ = outputs_of(request)
    count = len(request.signatures)
    moving = [index for index in range(count) if wanted >> index & 1]

    def backward(masks, *arrays):
        leaves, given = list(arrays[:count]), arrays[count:]

        def moved(*values):
            full = list(leaves)
            for index, value in zip(moving, values, strict=True):
                full[index] = value
            return outputs(masks, *full)

        results, pullback = jax.vjp(moved, *(leaves[index] for index in moving))
        gradients = pullback(cotangents_of(results, given))
        return tuple(jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x for x in gradients)

    return jax.jit(backward, keep_unused=True)


def _backward_program(tensors, cotangents, wanted, recipe):
    function = _backward(find(recipe).request(_signatures(tensors)), wanted)
    return torch_operator.JaxCall(function, (*tensors, *cotangents), NO_MASKS)


def _fake(tensors, recipe, sizes=""):
    found = _results_of(recipe, tensors)
    if found is None:
        raise RuntimeError(
            f"{_label(recipe)}: the sizes of the results of this call are not known in a graph for many shapes"
        )
    shapes = [x.shape for x in tensors]
    return [tensors[0].new_empty(_shape(result.sizes, shapes), dtype=result.dtype) for result in found.results]


def _fake_backward(tensors, cotangents, wanted, recipe):
    return [x.new_empty(x.shape) for index, x in enumerate(tensors) if wanted >> index & 1]


class AnyCall(torch.autograd.Function):
    """Runs a recipe's call so that autograd can differentiate it: apply(recipe's name, sizes, *tensors).

    sizes: the results' sizes that the graph assumes, as the JSON of _Results.text. Returns a tuple of the results.
    """

    @staticmethod
    @torch_internals.skip_dynamo
    def forward(ctx, recipe, sizes, *tensors):
        results = torch_operator.inside_function(call_any_op, list(tensors), recipe, sizes)
        ctx.recipe = recipe
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
        found = iter(torch_operator.call_in_backward(backward_any_op, tensors, list(cotangents), wanted, ctx.recipe))
        return (None, None, *(next(found) if is_needed else None for is_needed in needed))

    @staticmethod
    def jvp(ctx, *tangents):
        torch_operator.refuse_tangent(_label(ctx.recipe))


def _differentiate_backward(tensors, cotangents, wanted, recipe):
    """The gradients of the wanted tensors, where a tensor or a cotangent itself requires a gradient.

    Differentiating these gradients raises, as double backward is not supported. wanted: bit i is set if the gradient of
    tensor i is wanted. recipe: the recipe's name.
    """
    count = len(tensors)

    def again(*arrays):
        return torch_operator.inside_function(
            backward_any_op, list(arrays[:count]), list(arrays[count:]), wanted, recipe
        )

    return list(torch_operator.refuse_gradient(_label(recipe), again, (*tensors, *cotangents)))


call_any_op = torch_operator.define_operator(
    "call_any",
    "(Tensor[] tensors, str recipe, str sizes='') -> Tensor[]",
    program=_program,
    finish=lambda *arguments: list,
    fake=_fake,
    differentiate=lambda tensors, recipe, sizes="": list(torch_operator.apply(AnyCall, recipe, sizes, *tensors)),
    label=lambda tensors, recipe, sizes="": _label(recipe),
)
backward_any_op = torch_operator.define_operator(
    "call_any_backward",
    "(Tensor[] tensors, Tensor?[] cotangents, int wanted, str recipe) -> Tensor[]",
    program=_backward_program,
    finish=lambda *arguments: list,
    fake=_fake_backward,
    differentiate=_differentiate_backward,
    label=lambda tensors, cotangents, wanted, recipe: _label(recipe),
)

torch_operator.define_vmap("call_any", torch_operator.loop_vmap(lambda: call_any_op))
torch_operator.define_vmap("call_any_backward", torch_operator.loop_vmap(lambda: backward_any_op))
