"""JAX programs that write their results to PyTorch tensors.

The program takes empty tensors as donated arguments, and XLA writes the results to them. So no result is copied, and no
JAX memory is held for a PyTorch stream. PyTorch's current stream waits for JAX before the call returns. So later work
of the stream on the tensors follows JAX's work, as if the stream had run the program itself.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import torch

from jax_kernels.bridge.interop import dlpack, torch_internals
from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.interop.dlpack_capsule import CapsuleFactory
from jax_kernels.bridge.interop.keep_alive import relaxed_capture
from jax_kernels.bridge.interop.keyed_cache import memoize
from jax_kernels.bridge.interop.planning_device import planning_on
from jax_kernels.masks import Mask

__all__ = ["FlatArguments", "JaxFunction", "run"]

type JaxFunction = Callable[..., Sequence[jax.Array]]  # returns a flat sequence of arrays

_MOST = 1024  # keys of a function


class FlatArguments(NamedTuple):
    """The arguments of a JAX function: optionally a tuple of Masks, then tensors or None.

    masks: (the tuple of Masks,), or () if the function takes none. tensors: the arguments after it that are not None,
    in order. absent: for each argument after the Masks, whether it is None. structure: a value that is equal for calls
    whose Masks have equal structures, and arrays of equal shapes and dtypes.
    """

    masks: tuple[tuple[Mask, ...], ...]
    tensors: Sequence[torch.Tensor]
    absent: tuple[bool, ...]
    structure: Hashable = None

    @property
    def key(self) -> Hashable:
        """All of a call but its values: shapes, dtypes, absent arguments, the Masks' structure, and jax_enable_x64."""
        signatures = tuple([(x.shape, x.dtype) for x in self.tensors])
        return self.absent, signatures, self.structure, jax.config.jax_enable_x64

    def placed[Value](self, values: Sequence[Value]) -> list[tuple[Mask, ...] | Value | None]:
        """The function's arguments as a list, with `values` for the tensors.

        The tuple of Masks is first, if there is one. Absent arguments are None.
        """
        given = iter(values)
        return [*self.masks, *(None if is_absent else next(given) for is_absent in self.absent)]


class _Result(NamedTuple):
    """Shape, strides (in elements) and dtype of the PyTorch tensor to which a result is written."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _DonatingJit:
    """A JAX function, jitted so that it writes its results to the memory of given arrays.

    jitted(targets, *arguments): the jitted function, which overwrites the arrays in the list `targets` with its results
    (they are donated). results: by FlatArguments.key, the shape, strides and dtype of each result; None if JAX cannot
    write the results of such a call to the arrays.
    """

    def __init__(self, function: JaxFunction) -> None:
        def in_place(results: list[jax.Array], *arguments: tuple[Mask, ...] | jax.Array | None) -> Sequence[jax.Array]:
            return function(*arguments)

        in_place.__name__ = getattr(function, "__name__", in_place.__name__)
        self.jitted = jax.jit(in_place, donate_argnums=0, keep_unused=True)
        self.results: dict[Hashable, tuple[_Result, ...] | None] = {}
        self._function = function

    def forms(self, key: Hashable, arguments: FlatArguments) -> tuple[_Result, ...] | None:
        """Finds the shapes, strides and dtypes of a call's results, and stores them in `results` under `key`.

        Returns None, and stores None, if JAX cannot write the results in place.
        """
        forms = self.results[key] = self._traced(arguments)
        drop_oldest(self.results, _MOST)
        return forms

    def _traced(self, arguments: FlatArguments) -> tuple[_Result, ...] | None:
        """The shapes and dtypes of the results, by tracing the function.

        None if there is no result, if a tensor or a result is empty, or if PyTorch lacks the dtype of a result.
        """
        if not all(x.numel() for x in arguments.tensors):
            return None
        abstract = [jax.ShapeDtypeStruct(x.shape, dlpack.jax_dtype(x.dtype)) for x in arguments.tensors]
        found = jax.tree.leaves(jax.eval_shape(self._function, *arguments.placed(abstract)))
        if not found or not all(math.prod(x.shape) and dlpack.has_torch_dtype(x.dtype) for x in found):
            return None
        return tuple(_Result(tuple(x.shape), _strides(x.shape), dlpack.torch_dtype("", x.dtype)) for x in found)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    return tuple(itertools.accumulate(reversed(shape[1:]), lambda x, y: x * y, initial=1))[::-1] if shape else ()


@memoize
def _program(function: JaxFunction) -> _DonatingJit:
    return _DonatingJit(function)


def run(function: JaxFunction, arguments: FlatArguments, device: torch.device) -> list[torch.Tensor] | None:
    """Calls a jitted JAX function, which writes its results to new PyTorch tensors, and returns these tensors.

    Returns None, without running the function, if that is not possible: jaxlib's own DLPack functions are not found,
    there is no result, a tensor or a result is empty, PyTorch lacks a result's dtype, or an earlier call of the same
    shapes and dtypes was not written in place. In such an earlier call itself, the tensors are copies of JAX's results.

    The host does not wait for a GPU. device: the device of the tensors in `arguments`.
    """
    if not dlpack.has_private():
        return None
    program = _program(function)
    key = arguments.key
    forms = program.results.get(key)
    if forms is None:
        if key in program.results:
            return None
        with planning_on(device):
            forms = program.forms(key, arguments)
        if forms is None:
            return None
    with _current(device):
        written = _written(program, forms, arguments, device)
    if not written.is_in_place:
        program.results[key] = None
    return written.results


def _current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context manager that makes a GPU PyTorch's current device; for a CPU it has no effect."""
    is_current = device.type != "cuda" or torch.cuda.current_device() == device.index
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


class _Written(NamedTuple):
    """The results of a call, as PyTorch tensors.

    is_in_place: whether JAX wrote them to the tensors that it was given; otherwise they are copies of JAX's arrays.
    """

    results: list[torch.Tensor]
    is_in_place: bool


def _written(
    program: _DonatingJit, forms: tuple[_Result, ...], arguments: FlatArguments, device: torch.device
) -> _Written:
    """Runs the jitted function on the current device, with new tensors for its results.

    forms: the shape, strides and dtype of each result. After an error it waits for the device before it raises the
    error.
    """
    lender = _lender(device)
    read = [dlpack.readable(x) for x in arguments.tensors]
    results = [_empty(form, device) for form in forms]
    try:
        # Only the first array waits for PyTorch's stream: JAX waits for every array before the program begins.
        first = lender.over(results[0], dlpack.after_current_stream(device))
        targets = [first, *[lender.over(x) for x in results[1:]]]
        with planning_on(device):
            arrays = program.jitted(targets, *arguments.placed([lender.kept(x) for x in read]))
        if not all(x.unsafe_buffer_pointer() == y.data_ptr() for x, y in zip(arrays, results, strict=True)):
            return _Written(dlpack.export_arrays(arrays, device, read), is_in_place=False)
        # All arrays are results of one program: JAX records its end once.
        dlpack.wait_for(arrays[0], device)
    except BaseException:
        _synchronize(device)
        raise
    return _Written(results, is_in_place=True)


def _empty(form: _Result, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch_internals.empty_on_gpu(form.shape, form.strides, form.dtype)
    return torch.empty(form.shape, dtype=form.dtype)


def _synchronize(device: torch.device) -> None:
    """Makes the host wait until a GPU is idle; for a CPU it does nothing.

    After an error has left the call, nothing else keeps the tensors alive that JAX may still use.
    """
    if device.type == "cuda":
        with contextlib.suppress(Exception), relaxed_capture():
            torch.cuda.synchronize(device)


@functools.cache
def _lender(device: torch.device) -> CapsuleFactory:
    return dlpack.lender(device)
