"""Infers the sizes of a dynamic call's results, as expressions of the sizes of its tensors.

PyTorch must know these expressions in a graph for many shapes. Trials find them: JAX gives the results' sizes for a few
sets of sizes. JAX may refuse a set, because a tensor's size must equal a parameter's size. Then the refused sizes
become constants of the graph.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.keyed_cache import memoize
from jax_kernels.bridge.jax_functions.programs import DynamicCall, Program, TensorSpec
from jax_kernels.bridge.jax_functions.pytree import Structure
from jax_kernels.bridge.jax_functions.tracing import program_for

__all__ = ["DynamicResults", "infer_results", "shape_of"]


class _Result(NamedTuple):
    """A result's dtype, and the size of each of its axes as a function of the tensors' sizes.

    An entry of sizes is an int, which is a constant size, or (tensor, axis): the index of a tensor of the call, and the
    axis whose size it is.
    """

    dtype: torch.dtype
    sizes: tuple[int | tuple[int, int], ...]


class DynamicResults(NamedTuple):
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


class _Sizes(NamedTuple):
    """A tensor of a graph for many shapes.

    sizes: for each axis an int if the size is constant, else the text of its symbolic expression, such as "s0 + 1".
    hints: the example value of each size in the trace.
    """

    sizes: tuple[int | str, ...]
    hints: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def infer_results(call: DynamicCall, tensors: Sequence[torch.Tensor]) -> DynamicResults | None:
    """The dtypes and sizes of a call's results, for tensors with symbolic sizes; nothing is computed.

    None if the results' sizes cannot be expressed by the tensors' sizes. It makes sizes constants of the graph if the
    results' sizes can be found only then, as when JAX accepts only one value for them.
    """
    described = _sizes_of(tensors)
    if described is None:
        return None
    pins = _sizes_to_specialize(call, described)
    if not pins:
        return None if pins is None else _infer_sizes(call, described)
    for x in tensors:
        for size in x.shape:
            if _described(size) in pins:
                int(size)
    pinned = _sizes_of(tensors)
    return None if pinned is None else _infer_sizes(call, pinned)


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


@memoize
def _sizes_to_specialize(call: DynamicCall, tensors: tuple[_Sizes, ...]) -> tuple[str, ...] | None:
    """The texts of the size expressions that must become constants, so that the results' sizes can be found.

    () if none must; None if no choice works that leaves an expression symbolic. It first tries the expressions that are
    equal, in the trace, to a constant size: torch.compile(dynamic=True) gives a tensor's last axis a symbol, though a
    parameter's axis of the same size is a constant.
    """
    hints = _hints(tensors)
    constants = {size for x in tensors for size in x.sizes if isinstance(size, int)}
    equal = tuple(text for text, hint in hints.items() if hint in constants)
    others = tuple(text for text in hints if text not in equal)
    every = [(), *((x,) for x in equal), equal, *((x,) for x in others), *((*equal, x) for x in others)]
    for pins in dict.fromkeys(every):
        if pins and len(pins) == len(hints):
            continue
        if _infer_sizes(call, tuple(_pinned(x, pins) for x in tensors)) is not None:
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


def _trial(call: DynamicCall, tensors: Sequence[_Sizes], values: dict[str, int]) -> _Probe:
    """Plans a call for one choice of sizes. values: a size for each expression, by the expression's text.

    Raises JAX's error if JAX refuses these sizes.
    """
    shapes, signatures = [], []
    for x in tensors:
        shapes.append(tuple(values[size] if isinstance(size, str) else size for size in x.sizes))
        signatures.append(TensorSpec(shapes[-1], x.dtype, x.device, torch.strided))
    return _Probe(shapes, program_for(call.request(signatures), (False,) * len(tensors)))


@memoize
def _infer_sizes(call: DynamicCall, tensors: tuple[_Sizes, ...]) -> DynamicResults | None:
    """The dtypes and sizes of a call's results, by tracing the call for two or three choices of sizes.

    A result's axis has the size of a tensor's axis if the two sizes are equal in two trials. The first trial has the
    sizes of the trace, the second multiplies each expression by its own factor. JAX may refuse the second trial's sizes
    because some must be equal. Then expressions that are equal in the trace get the same factor. A third trial, with
    small sizes, checks the result.

    None if JAX refuses the second trial, if no axis matches, or if the third trial contradicts. Raises JAX's error if
    JAX refuses the first trial.
    """
    hints = _hints(tensors)
    values = list(dict.fromkeys(hints.values()))
    first = _trial(call, tensors, hints)
    distinct = {text: 2 + at for at, text in enumerate(hints)}
    alike = {text: 2 + values.index(hint) for text, hint in hints.items()}
    larger = [{text: hint * factors[text] for text, hint in hints.items()} for factors in (distinct, alike)]
    second = _first_trial(call, tensors, larger)
    if second is None:
        return None
    results = []
    for one, other in zip(first.program.results, second.program.results, strict=True):
        sizes = [_size(tensors, first, second, pair) for pair in zip(one.shape, other.shape, strict=True)]
        if None in sizes:
            return None
        results.append(_Result(one.dtype, tuple(sizes)))  # type: ignore[arg-type]
    # A size such as min(n, 8) was a constant in both trials. A trial with small sizes shows that it varies.
    third = _first_trial(call, tensors, [distinct, alike])
    if third is not None:
        want = [shape_of(result.sizes, third.shapes) for result in results]
        if [tuple(x.shape) for x in third.program.results] != want:
            return None
    return DynamicResults(tuple(results), first.program.outputs)


def _first_trial(call: DynamicCall, tensors: Sequence[_Sizes], every: Sequence[dict[str, int]]) -> _Probe | None:
    """The first trial that JAX accepts, of these choices of sizes in order; None if JAX refuses all."""
    for values in every:
        try:
            return _trial(call, tensors, values)
        except (TypeError, ValueError, NotImplementedError):
            continue
    return None


def shape_of(sizes: Sequence[int | tuple[int, int]], shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
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
