"""Marks in a trace: an identity on the arrays of a call, which the call's later copies in the trace keep.

A derivative, a vmap or rematerialization of a call repeats or changes its marks as it does the call. So the marks in a
function's jaxpr tell how often each call runs, forward and backward, also in loops.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_kernels.tracing.jaxprs import jaxprs_in_params

__all__ = ["Counts", "Runs", "counted_runs", "marked", "runs_of"]

_MARK = Primitive("jax_kernels_call")
_MARK.def_abstract_eval(lambda x, **_: x)


class Counts:
    """The marks that have run, by (index, direction, leaf), and the sizes of vmaps, by index."""

    def __init__(self) -> None:
        self.marks: collections.Counter[tuple[int, str, int]] = collections.Counter()
        self.sizes: dict[int, int] = {}

    def add(self, times: int, *, index: int, direction: str, leaf: int, size: int) -> None:
        """Counts `times` runs of a mark with these parameters."""
        self.marks[index, direction, leaf] += times
        self.sizes[index] = max(self.sizes.get(index, 1), size)

    def runs(self) -> dict[int, "Runs"]:
        """The Runs of each marked call, by its index: of the array of a call that has most."""
        most: collections.Counter[tuple[int, str]] = collections.Counter()
        for (index, direction, _), times in self.marks.items():
            most[index, direction] = max(most[index, direction], times)
        return {
            index: Runs(forward=most[index, "forward"], backward=most[index, "backward"], size=size)
            for index, size in self.sizes.items()
        }


_COUNTS: list[Counts] = []  # of counted_runs


@contextlib.contextmanager
def counted_runs() -> Iterator[Counts]:
    """A context in which each run of a mark counts, in programs that are compiled inside it and outside of programs."""
    counts = Counts()
    _COUNTS.append(counts)
    try:
        yield counts
        jax.effects_barrier()
    finally:
        _COUNTS.pop()


def _run(x: Any, **mark: Any) -> Any:
    if _COUNTS:
        _COUNTS[-1].add(1, **mark)
    return x


def _lowered(x: Any, **mark: Any) -> Any:
    if _COUNTS:
        jax.debug.callback(functools.partial(_COUNTS[-1].add, 1, **mark))
    return x


_MARK.def_impl(_run)
mlir.register_lowering(_MARK, mlir.lower_fun(_lowered, multiple_results=False))


def _jvp(primals: Any, tangents: Any, *, direction: str, **mark: Any) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    if type(tangent) is not ad.Zero:
        tangent = _MARK.bind(tangent, direction="tangent", **mark)
    return _MARK.bind(x, direction=direction, **mark), tangent


def _transpose(cotangent: Any, x: Any, *, direction: str, **mark: Any) -> tuple[Any]:
    if type(cotangent) is ad.Zero:
        return (cotangent,)
    return (_MARK.bind(cotangent, direction="backward", **mark),)


def _batch(arrays: Any, axes: Any, *, size: int, **mark: Any) -> tuple[Any, Any]:
    (x,), (axis,) = arrays, axes
    return _MARK.bind(x, size=size * x.shape[axis], **mark), axis


ad.primitive_jvps[_MARK] = _jvp
ad.primitive_transposes[_MARK] = _transpose
batching.primitive_batchers[_MARK] = _batch


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)


def marked(inputs: Any, index: int) -> Any:
    """The inputs of call number `index`, whose floating-point arrays are marked. Masks and functions stay as they are.

    inputs: a tuple or NamedTuple of arrays and tuples.
    """
    leaves, tree = jax.tree.flatten(inputs, is_leaf=lambda x: not isinstance(x, tuple | list | dict))
    marks = [
        _MARK.bind(x, index=index, leaf=leaf, direction="forward", size=1) if _is_array(x) else x
        for leaf, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, marks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of one call. forward, backward: the numbers of its runs. size: the calls that a vmap merges into one."""

    forward: int = 0
    backward: int = 0
    size: int = 1


def _marks(jaxpr: Any, times: int) -> Iterator[tuple[dict[str, Any], int]]:
    """(parameters, runs) of each mark in a jaxpr and its inner jaxprs.

    A scan's body runs once per iteration. The body of a while loop, and each branch of a cond, count once.
    """
    for equation in jaxpr.eqns:
        if equation.primitive is _MARK:
            yield equation.params, times
        inner = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for found in jaxprs_in_params(equation.params):
            yield from _marks(found, inner)


def runs_of(jaxpr: Any) -> dict[int, Runs]:
    """The Runs of each marked call in a jaxpr, by the call's index."""
    counts = Counts()
    for params, times in _marks(jaxpr, 1):
        counts.add(times, **params)
    return counts.runs()
