"""Calls of from_jax's functions in graphs that serve tensors of many shapes.

The operators `call` and `call_backward` take a plan, which is for one set of shapes. `call_any` and `call_any_backward`
take a recipe, which is the call without shapes, and find the plan of the tensors when they run. A recipe is a text that
says all of it, so that nothing is kept for a graph, unless its constants are more than numbers and texts.

PyTorch must know the results' sizes as expressions in those of the tensors. They are found by trying: JAX tells the
results' sizes for a few sets of sizes. Where JAX refuses these, as a parameter has a size that the tensors must share,
the sizes in the way become constants of the graph. A call checks that its results have the sizes that its graph has.
The backward reads the tensors alone, so that XLA computes again what it needs of the forward.
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
from jax_kernels.bridge.interop.keyed_cache import fresh_name, once
from jax_kernels.bridge.jax_functions.mask_operands import NONE
from jax_kernels.bridge.jax_functions.programs import FUNCTIONS, Plan, Request, Signature, stem_of
from jax_kernels.bridge.jax_functions.tracing import cotangents_of, outputs_of, plan_for
from jax_kernels.bridge.operators import torch_operator

__all__ = ["Flat", "call", "clear", "count", "find", "is_any_shape", "name_of"]


class Recipe(NamedTuple):
    """A call without its values and shapes. function: its name. structure: its arguments, with their constants."""

    function: str
    structure: Any
    x64: bool

    def request(self, signatures: Sequence[Signature]) -> Request:
        return Request(self.function, self.structure, tuple(signatures), None, self.x64)


class _Result(NamedTuple):
    """A result's dtype, and for each axis its size, or the tensor and the axis whose size it is."""

    dtype: torch.dtype
    sizes: tuple[int | tuple[int, int], ...]


class _Results(NamedTuple):
    """The results of a recipe, and their structure."""

    results: tuple[_Result, ...]
    structure: Any

    @property
    def text(self) -> str:
        """The sizes, for the operator."""
        return json.dumps([result.sizes for result in self.results])


_MOST = 1024  # recipes that are kept
_KEPT: dict[str, Recipe] = {}  # those that no text can say, the one that was used last at the end
_LOCK = threading.Lock()
_PLAIN: dict[str, type] = {kind.__name__: kind for kind in (str, bool, int, type(None))}


def _name_of(recipe: Recipe) -> str:
    """The text for a recipe, or the name under which it is kept."""
    try:
        structure = json.dumps(recipe.structure, default=_type_name)
    except TypeError:
        return _kept_name(recipe)
    return f"{recipe.function} {recipe.x64:d} {structure}"


def _type_name(x: Any) -> dict[str, str]:
    if not isinstance(x, type) or _PLAIN.get(x.__name__) is not x:
        raise TypeError
    return {"type": x.__name__}


@once
def _kept_name(recipe: Recipe) -> str:
    name = fresh_name(recipe.function)
    with _LOCK:
        _KEPT[name] = recipe
        while len(_KEPT) > _MOST:
            del _KEPT[next(iter(_KEPT))]
    return name


def find(name: str) -> Recipe:
    """The recipe of a name. Raises RuntimeError where it is another process's, or is no longer kept."""
    if " " in name:
        return _read(name)
    with _LOCK:
        recipe = _KEPT.pop(name, None)
        if recipe is not None:
            _KEPT[name] = recipe
            return recipe
    raise RuntimeError(
        f"{name}: a graph that calls a from_jax function runs only in the process that traced it, and one with "
        f"constants other than numbers and texts until clear_cache(), or {_MOST} other such graphs, are called; "
        "compile it again, after torch.compiler.reset()"
    )


@functools.lru_cache(maxsize=_MOST)
def _read(name: str) -> Recipe:
    """The recipe that a text says. Raises RuntimeError for one of another process."""
    function, x64, structure = name.split(" ", 2)
    if function not in FUNCTIONS:
        raise RuntimeError(
            f"{function}: a graph that calls a from_jax function runs only in the process that traced it"
        )
    return Recipe(function, _as_tuples(json.loads(structure, object_hook=lambda x: _PLAIN[x["type"]])), x64 == "1")


def _as_tuples(x: Any) -> Any:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x


def _label(name: str) -> str:
    """The name of a recipe's function in error messages."""
    return f"from_jax of {stem_of(name.split(' ', 1)[0] if ' ' in name else find(name).function)}"


def clear() -> None:
    """Drops the recipes that are kept, and what was found by trying."""
    with _LOCK:
        _KEPT.clear()
    _read.cache_clear()
    _tried.cache_clear()
    _pins.cache_clear()


def count() -> int:
    """How many recipes are kept."""
    return len(_KEPT)


def is_any_shape(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a graph is traced that is to serve other sizes of the tensors, too."""
    if torch._C._are_functorch_transforms_active():
        return False
    return any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape)


class Flat(NamedTuple):
    """The results of a call, and the structure that they have."""

    results: list[torch.Tensor]
    structure: Any


def name_of(function: str, structure: Any) -> str:
    """The name of a call's recipe. structure: that of its arguments."""
    return _name_of(Recipe(function, structure, jax.config.jax_enable_x64))


def call(name: str, tensors: list[torch.Tensor]) -> Flat | None:
    """A call in a graph for many shapes, by its recipe's name; None where the sizes of its results are not known."""
    found = _results_of(name, tensors)
    return None if found is None else Flat(call_any_op(tensors, name, found.text), found.structure)


class _Sizes(NamedTuple):
    """A tensor's sizes: whole numbers, or the texts of expressions. hints: the values that they have in the trace."""

    sizes: tuple[int | str, ...]
    hints: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _results_of(name: str, tensors: Sequence[torch.Tensor]) -> _Results | None:
    """The results of a recipe. Makes constants of the sizes without which JAX has no results of other sizes."""
    described = _sizes_of(tensors)
    if described is None:
        return None
    pins = _pins(name, described)
    if not pins:
        return None if pins is None else _tried(name, described)
    for x in tensors:
        for size in x.shape:
            if _described(size) in pins:
                int(size)
    pinned = _sizes_of(tensors)
    return None if pinned is None else _tried(name, pinned)


def _sizes_of(tensors: Sequence[torch.Tensor]) -> tuple[_Sizes, ...] | None:
    """The tensors' sizes, None where one has no value in the trace."""
    found = []
    for x in tensors:
        hints = [torch_internals.hint(size) for size in x.shape]
        if None in hints:
            return None
        sizes = tuple(map(_described, x.shape))
        found.append(_Sizes(sizes, tuple(hints), x.dtype, x.device))  # type: ignore[arg-type]
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _pins(name: str, tensors: tuple[_Sizes, ...]) -> tuple[str, ...] | None:
    """The expressions to be constants, so that trying gives the results; None where that would be all of them.

    torch.compile(dynamic=True) gives a tensor's last axis a symbol beside a parameter, whose size is a constant.
    """
    hints = _hints(tensors)
    constants = {size for x in tensors for size in x.sizes if isinstance(size, int)}
    equal = tuple(text for text, hint in hints.items() if hint in constants)
    others = tuple(text for text in hints if text not in equal)
    every = [(), *((x,) for x in equal), equal, *((x,) for x in others), *((*equal, x) for x in others)]
    for pins in dict.fromkeys(every):
        if pins and len(pins) == len(hints):
            continue
        if _tried(name, tuple(_pinned(x, pins) for x in tensors)) is not None:
            return pins
    return None


def _hints(tensors: Sequence[_Sizes]) -> dict[str, int]:
    """The values that the expressions have in the trace."""
    return {size: hint for x in tensors for size, hint in zip(x.sizes, x.hints, strict=True) if isinstance(size, str)}


def _pinned(x: _Sizes, pins: Sequence[str]) -> _Sizes:
    """The sizes with the values of some expressions in their places."""
    return x._replace(sizes=tuple(hint if size in pins else size for size, hint in zip(x.sizes, x.hints, strict=True)))


def _described(size: Any) -> int | str:
    """A size, or the text of its expression, unless the trace has found that it is a constant."""
    if not isinstance(size, torch.SymInt):
        return size
    text = str(size)
    return int(text) if text.isdigit() else text


class _Trial(NamedTuple):
    """The shapes of the tensors in a trial, and the plan that JAX has for them."""

    shapes: list[tuple[int, ...]]
    plan: Plan


def _trial(recipe: Recipe, tensors: Sequence[_Sizes], values: dict[str, int]) -> _Trial:
    """A trial of these values of the expressions."""
    shapes, signatures = [], []
    for x in tensors:
        shapes.append(tuple(values[size] if isinstance(size, str) else size for size in x.sizes))
        signatures.append(Signature(shapes[-1], x.dtype, x.device, torch.strided))
    return _Trial(shapes, plan_for(recipe.request(signatures), (False,) * len(tensors)))


@functools.lru_cache(maxsize=1024)
def _tried(name: str, tensors: tuple[_Sizes, ...]) -> _Results | None:
    """The results by trying: a result's size is that of a tensor's axis which is the same in two trials.

    Each expression grows by a factor of its own. Where JAX refuses that, as some sizes must be equal, those that are
    equal in the trace have the same.
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
    for one, other in zip(first.plan.results, second.plan.results, strict=True):
        sizes = [_size(tensors, first, second, pair) for pair in zip(one.shape, other.shape, strict=True)]
        if None in sizes:
            return None
        results.append(_Result(one.dtype, tuple(sizes)))  # type: ignore[arg-type]
    # A size such as min(n, 8) is a constant in the trials so far, but no longer where all sizes are small.
    third = _first_trial(recipe, tensors, [distinct, alike])
    if third is not None:
        want = [_shape(result.sizes, third.shapes) for result in results]
        if [tuple(x.shape) for x in third.plan.results] != want:
            return None
    return _Results(tuple(results), first.plan.outputs)


def _first_trial(recipe: Recipe, tensors: Sequence[_Sizes], every: Sequence[dict[str, int]]) -> _Trial | None:
    """The first of several trials that JAX does not refuse, None where it refuses all."""
    for values in every:
        try:
            return _trial(recipe, tensors, values)
        except (TypeError, ValueError, NotImplementedError):
            continue
    return None


def _shape(sizes: Sequence[Any], shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The shape of a result. sizes: those of _Result, shapes: of the tensors."""
    return tuple(x if isinstance(x, int) else shapes[x[0]][x[1]] for x in sizes)


def _size(
    tensors: Sequence[_Sizes], first: _Trial, second: _Trial, sizes: tuple[int, int]
) -> int | tuple[int, int] | None:
    """The size, or the tensor and axis, that has these sizes in the two trials; None where there is neither."""
    if sizes[0] == sizes[1]:
        return sizes[0]
    for index, x in enumerate(tensors):
        for axis, size in enumerate(x.sizes):
            if isinstance(size, str) and (first.shapes[index][axis], second.shapes[index][axis]) == sizes:
                return index, axis
    return None


def _signatures(tensors: Sequence[torch.Tensor]) -> list[Signature]:
    return [Signature(tuple(x.shape), x.dtype, x.device, x.layout) for x in tensors]


def _program(tensors, recipe, sizes=""):
    plan = plan_for(find(recipe).request(_signatures(tensors)), (False,) * len(tensors))
    if sizes:
        shapes = [x.shape for x in tensors]
        want = [_shape(result, shapes) for result in json.loads(sizes)]
        got = [tuple(x.shape) for x in plan.results]
        if got != want:
            raise RuntimeError(
                f"{_label(recipe)}: its results have shapes {got}, and {want} in this graph for many shapes, which "
                "takes each size of a result for a constant or that of a tensor: compile it with dynamic=False"
            )
    return torch_operator.Program(plan.forward, tensors, NONE)


@once
def _backward(request: Request, wanted: int):
    """The jitted gradients of the tensors in `wanted`, a bit for each, of the tensors and then the cotangents."""
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
    return torch_operator.Program(function, (*tensors, *cotangents), NONE)


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
    """A call with its gradient."""

    @staticmethod
    @torch_internals.unseen_by_dynamo
    def forward(ctx, recipe, sizes, *tensors):
        results = torch_operator.below_function(call_any_op, list(tensors), recipe, sizes)
        ctx.recipe = recipe
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(x for x in results if not (x.is_floating_point() or x.is_complex())))
        return tuple(results)

    @staticmethod
    @torch_internals.unseen_by_dynamo
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
    count = len(tensors)

    def again(*arrays):
        return torch_operator.below_function(
            backward_any_op, list(arrays[:count]), list(arrays[count:]), wanted, recipe
        )

    return list(torch_operator.refuse_gradient(_label(recipe), again, (*tensors, *cotangents)))


call_any_op = torch_operator.define(
    "call_any",
    "(Tensor[] tensors, str recipe, str sizes='') -> Tensor[]",
    program=_program,
    finish=lambda *arguments: list,
    fake=_fake,
    differentiate=lambda tensors, recipe, sizes="": list(torch_operator.apply(AnyCall, recipe, sizes, *tensors)),
    label=lambda tensors, recipe, sizes="": _label(recipe),
)
backward_any_op = torch_operator.define(
    "call_any_backward",
    "(Tensor[] tensors, Tensor?[] cotangents, int wanted, str recipe) -> Tensor[]",
    program=_backward_program,
    finish=lambda *arguments: list,
    fake=_fake_backward,
    differentiate=_differentiate_backward,
    label=lambda tensors, cotangents, wanted, recipe: _label(recipe),
)

torch_operator.define_vmap("call_any", torch_operator.one_by_one(lambda: call_any_op))
torch_operator.define_vmap("call_any_backward", torch_operator.one_by_one(lambda: backward_any_op))
