"""Detects changes of the tensors that a mask's function read when the mask was made.

In this file these tensors are the sources of the mask. PyTorch counts the changes of a tensor. A mask of
masks.from_function holds copies of the tensors' values. After a tensor changes, or a variable holds another tensor, the
copies are stale and each use of the mask raises ValueError.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jax_kernels.bridge.translate import captures
from jax_kernels.masks import Mask

__all__ = ["attach", "check", "has_sources", "is_fresh", "passed_on", "watched"]

_NAME = "_sources"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """A tensor that a mask's function read, and its state at the time when the mask copied its values.

    path: from the function to the tensor. version: the number of its changes that PyTorch had counted; None for an
    inference tensor, whose changes PyTorch does not count. pointer: the address of its memory. copy: its values, if
    version is None.
    """

    path: captures.Path
    tensor: weakref.ref[torch.Tensor]
    version: int | None
    pointer: int
    copy: torch.Tensor | None

    def is_fresh(self, function: Any) -> bool:
        """Whether the function still reads this tensor object at this path, with unchanged values."""
        try:
            x = captures.reached(function, self.path)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return False
        then = self.tensor()
        if then is None or x is not then or _pointer(then) != self.pointer:
            return False
        return torch.equal(then, self.copy) if self.copy is not None else bool(then._version == self.version)


class Sources:
    """The tensors that a mask's function read when the mask was made, at these paths from the function.

    A pickled or deep-copied Sources has no tensors, so they never count as changed.
    """

    def __init__(self, function: Any, paths: Sequence[captures.Path]) -> None:
        self._function = function
        self._sources = tuple(_source(captures.reached(function, path), path) for path in paths)

    def changed(self) -> str | None:
        """The name, in the function's code, of the first tensor that has changed since then; None if no tensor has."""
        for source in self._sources:
            if not source.is_fresh(self._function):
                return captures.text_of(self._function, source.path)
        return None

    def is_fresh(self) -> bool:
        return all(source.is_fresh(self._function) for source in self._sources)

    def __reduce__(self) -> tuple[type["Sources"], tuple[None, tuple[()]]]:
        return Sources, (None, ())


def _source(x: torch.Tensor, path: captures.Path) -> _Source:
    """The state of a tensor now. path: from the function that reads it to the tensor."""
    is_counted = not x.is_inference()
    return _Source(
        path=path,
        tensor=weakref.ref(x),
        version=x._version if is_counted else None,
        pointer=_pointer(x),
        copy=None if is_counted else x.clone(),
    )


def _pointer(x: torch.Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # a tensor inside a transform of torch.func
        return 0


def attach(mask: Mask, root: Any, paths: Sequence[captures.Path]) -> Mask:
    """Marks a mask as made from the values that tensors have now, so that `check` detects later changes of the tensors.

    root: the function, or another object. paths: from it to the tensors; () leaves the mask unmarked. Returns the same
    mask, which then keeps the root and its tensors alive.
    """
    if paths:
        object.__setattr__(mask, _NAME, Sources(root, paths))
    return mask


def _every(mask: Mask) -> Iterator[tuple[Mask, Sources | None]]:
    """Yields (mask, Sources or None) for a mask and, recursively and in order, for the masks that it combines."""
    mask = mask.unprepared
    yield mask, vars(mask).get(_NAME)
    for part in mask.parts:
        yield from _every(part)


def has_sources(mask: Mask) -> bool:
    """Whether the mask, or a mask that it combines, was made from values of tensors that may change."""
    return any(x is not None for _, x in _every(mask))


def is_fresh(mask: Mask) -> bool:
    """Whether no tensor that a function of the mask read has changed since the mask was made."""
    return all(x is None or x.is_fresh() for _, x in _every(mask))


def check(masks: Sequence[Any]) -> None:
    """Raises ValueError, naming the mask and the tensor, if a tensor that a mask's function read has changed since.

    masks: entries that are no Masks are skipped.
    """
    for whole in masks:
        if not isinstance(whole, Mask):
            continue
        for mask, sources in _every(whole):
            if sources is not None and (name := sources.changed()) is not None:
                raise ValueError(
                    f"mask: got {mask!r}, which has the values that {name} had when it was made, and {name} has "
                    "changed since; want a mask made again from the current values"
                )


def passed_on(mask: Mask, copy: Mask) -> Mask:
    """Makes `check` detect the same changes for a copy of a mask, as on another device. Returns the copy."""
    for (_, sources), (part, _) in zip(_every(mask), _every(copy), strict=True):
        if sources is not None:
            object.__setattr__(part, _NAME, sources)
    return copy


def watched(passes: Callable[..., bool], masks: Sequence[Mask]) -> Callable[..., bool]:
    """A check that passes if `passes` does, and no tensor that the masks' functions read has changed.

    passes: a function of a call's tensors that returns a bool. The new check takes the same tensors. It does not keep
    the masks alive.
    """
    found = [weakref.ref(x) for mask in masks for _, x in _every(mask) if x is not None]
    if not found:
        return passes

    def check_of_both(*tensors: torch.Tensor) -> bool:
        sources = [reference() for reference in found]
        return all(x is not None and x.is_fresh() for x in sources) and passes(*tensors)

    return check_of_both
