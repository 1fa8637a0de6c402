"""Chunks: a call whose temporary arrays would not fit the memory runs in parts, one after the other.

The number of chunks comes from shapes and a limit, before anything runs. If an eager call runs out of memory all the
same, it is tried again in more chunks, with a warning.
"""

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jax_kernels.device import DeviceInfo
from jax_kernels.plain_numbers import plain_of
from jax_kernels.target import target_device

__all__ = [
    "Need",
    "by_rows",
    "count_of",
    "forced",
    "in_turn",
    "is_forced",
    "is_out_of_memory",
    "known_rows",
    "limit",
    "memory_limit",
    "retried",
    "slices",
    "why",
]

# Both are parts of the keys of jit's caches: a function is traced again under another limit.
_LIMIT = jax.make_user_context(None)
_FORCED = jax.make_user_context(1)
_SPLIT: list[list[int]] = []  # of `forced`
_MOST = 64  # chunks of a call
_SPARE = 16  # the part of a device's memory that temporary arrays may take if inputs and results fill the rest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """The memory of a call. kept: bytes of its inputs and results. temporary: bytes of other arrays, in one chunk.

    most: the number of chunks into which the call can be split; 1 if it cannot. axes: the split axes, in words.
    """

    kept: float
    temporary: float
    most: int
    axes: str


@contextlib.contextmanager
def memory_limit(size: int | None) -> Iterator[None]:
    """A context manager: the temporary arrays of one call may take `size` bytes.

    Calls that would take more run in chunks, if they can be split, as jax_kernels.explain says. The bytes are estimated
    from the shapes. With None, the default, temporary arrays may take the device's memory minus the call's inputs and
    results, and at least a sixteenth of the device's memory. For example::

        with jax_kernels.memory_limit(2**30):
            out = jax_kernels.mlp(x, w_up, w_down)

    Functions under jit are traced again for another limit. Raises ValueError if size is not above 0, TypeError if it is
    no number.
    """
    size = plain_of("size", size)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int | float)):
        raise TypeError(f"size: got {size!r}, want a number of bytes above 0, or None")
    if size is not None and not size > 0:
        raise ValueError(f"size: got {size}, want a number of bytes above 0, or None")
    with _LIMIT(size):
        yield


def limit() -> int | None:
    """The bytes of the current memory_limit."""
    return _LIMIT.value


@contextlib.contextmanager
def forced(count: int) -> Iterator[list[int]]:
    """A context manager: calls that can be split run in `count` chunks or more.

    Yields a list, to which the number of chunks of each call is added that is split inside.
    """
    split: list[int] = []
    _SPLIT.append(split)
    try:
        with _FORCED(count):
            yield split
    finally:
        _SPLIT.pop()


def is_forced() -> bool:
    """Whether `forced` asks for more than one chunk."""
    return _FORCED.value > 1


def count_of(need: Need, device: DeviceInfo, is_of_all_devices: bool = False) -> int:
    """The number of chunks of a call: 1 if it fits the limit.

    is_of_all_devices: whether `need` is of all devices together, in a trace that XLA may partition. Then the limit of
    one device does not split the call, but `forced` does.
    """
    if need.most <= 1:
        return 1
    limit = None if is_of_all_devices else _limit(need, device)
    wanted = 1 if limit is None else math.ceil(min(need.temporary / limit, _MOST))  # a tiny limit gives infinity
    count = min(max(wanted, _FORCED.value), need.most, _MOST)
    if count > 1:
        for split in _SPLIT:
            split.append(count)
    return count


def _limit(need: Need, device: DeviceInfo) -> float | None:
    if _LIMIT.value is not None:
        return _LIMIT.value
    total = device.total_memory_bytes
    return None if total is None else max(total - need.kept, total / _SPARE)


def why(need: Need, device: DeviceInfo) -> str | None:
    """The chunks of a call in words, for its plan; None without chunks."""
    count = count_of(need, device)
    if count == 1:
        return None
    limit = _limit(need, device)
    text = f"{count} chunks of {need.axes}, because temporary arrays would take {need.temporary / 1e9:.3g} GB"
    return text if limit is None else f"{text}, and may take {limit / 1e9:.3g} GB"


def slices(length: int, count: int) -> list[slice]:
    """`count` slices of an axis, or one for each entry if there are fewer, whose lengths differ by at most 1."""
    count = max(1, min(count, length))
    ends = [length * i // count for i in range(count + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def in_turn(run: Callable[[Any], Any], parts: Sequence[Any]) -> list[Any]:
    """[run(part) for each part]. In a trace, a part waits for the results of the part before it."""
    results: list[Any] = []
    for part in parts:
        if results and any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(part)):
            part, results[-1] = jax.lax.optimization_barrier((part, results[-1]))
        results.append(run(part))
    return results


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of JAX says that an allocation failed."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def retried[Result](op: str, sizes: str, call: Callable[[], Result], most: int) -> Result:
    """call(); if it runs out of memory, call() in 2 chunks, then 4, and so on, with a RuntimeWarning each.

    op, sizes: the op's name and the call's sizes, for the warning. most: the largest number of chunks. Raises the
    error of the last call.
    """
    most, count = min(most, _MOST), _FORCED.value
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    while True:
        try:
            with context:
                return call()
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error) or count >= most:
                raise
            count = min(2 * count, most)
        context = forced(count)
        text = f"{op}: out of memory for {sizes}; the call is tried again in {count} chunks"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def known_rows(shape: Sequence[Any]) -> int:
    """The number of rows of row axes of these lengths; 1, which cannot be split, if a length is symbolic."""
    return math.prod(shape) if all(isinstance(length, int) for length in shape) else 1


def by_rows(
    op: str, need: Need, x: Any, call: Callable[[tuple[slice, ...]], Any], is_partitioned: bool, shape: Sequence[int]
) -> Any:
    """call(()), or the results of call(rows) for chunks of rows, joined.

    The first of several row axes is split first. op: its name. need: of the whole call. x: an array of the call, on its
    device. call: returns a tree of arrays that begin with the row axes. It gets slices, one for each of the first row
    axes; the other row axes are whole. is_partitioned: whether the shapes of a trace are of all devices together, as in
    count_of. shape: the lengths of the row axes.
    """

    def run() -> Any:
        count = count_of(need, target_device(x), is_partitioned and isinstance(x, jax.core.Tracer))
        if count == 1:
            return call(())
        axes = _slices_of_axes(shape, count)
        parts = in_turn(call, list(itertools.product(*axes)))
        for axis, of_axis in reversed(list(enumerate(axes))):
            parts = [_joined(group, axis) for group in itertools.batched(parts, len(of_axis))]
        return parts[0]

    return retried(op, f"x {list(x.shape)} in {x.dtype}", run, need.most)


def _slices_of_axes(shape: Sequence[int], count: int) -> list[list[slice]]:
    """The slices of each of the first axes, whose products are at least `count` chunks, or as many as there can be."""
    axes = []
    for length in shape:
        axes.append(slices(length, count))
        count = -(-count // len(axes[-1]))
        if count == 1:
            break
    return axes


def _joined(parts: Sequence[Any], axis: int) -> Any:
    """A tree of the parts' arrays, joined along an axis."""
    return jax.tree.map(lambda *arrays: jax.numpy.concatenate(arrays, axis), *parts)
