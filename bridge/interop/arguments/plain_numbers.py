"""Converts numeric options to Python numbers: a call reads the values of PyTorch's, NumPy's and JAX's scalars.

For a scalar on a GPU the host waits. A scalar that requires a gradient raises TypeError, because an option gets none.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from jax_kernels import plain_numbers
from jax_kernels.masks.checks import FARTHEST

__all__ = [
    "ATTENTION",
    "PLAIN",
    "checked_flag",
    "checked_number",
    "in_float32",
    "in_int32",
    "is_constant",
    "plain_arguments",
    "plain_of",
    "plain_options",
]

PLAIN = plain_numbers.PLAIN
ATTENTION = (*plain_numbers.ATTENTION, "q_offset")
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_INT32 = torch.iinfo(torch.int32)
_INTEGERS = (torch.int8, torch.int16, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def plain_of(name: str, x: Any) -> Any:
    """The value of an option, with Python numbers for PyTorch, NumPy and JAX scalars, also inside tuples and lists.

    A tensor without axes becomes an int, float or bool; a tensor with one axis becomes a tuple if the option `name` may
    be a sequence. For q_offset, an integer scalar tensor becomes an int32 tensor instead. All other values are returned
    unchanged. For a tensor on a GPU the host waits.

    Raises TypeError, naming the option, for a tensor that would become a number but has no known value, or requires a
    gradient.
    """
    kind = type(x)
    if kind in PLAIN:
        return x
    if kind is tuple or kind is list:
        return kind(plain_of(name, part) for part in x)
    if not isinstance(x, torch.Tensor):
        return plain_numbers.plain_of(name, x)
    if name == "q_offset":  # q_offset is data; the ops clamp it to the same limits
        return x.long().clamp(-FARTHEST, FARTHEST).int() if x.dtype in _INTEGERS and not x.ndim else x
    is_several = x.ndim == 1 and name in plain_numbers.SEQUENCES
    if x.is_nested or (x.ndim and not is_several) or x.is_complex():
        return x
    want = "numbers" if is_several else "a number"
    if x.requires_grad and torch.is_grad_enabled():
        raise TypeError(f"{name}: got a tensor that requires a gradient, want {want}: an option gets no gradient")
    try:
        value = x.tolist()
    except (RuntimeError, NotImplementedError) as error:  # on the meta device, or mapped by vmap
        raise TypeError(f"{name}: got a tensor whose values are not known here, want {want}") from error
    if any(isinstance(part, _SYMBOLS) for part in (value if is_several else [value])):  # in a graph of torch.compile
        raise TypeError(f"{name}: got a tensor in a graph, whose values are not known, want {want}")
    return tuple(value) if is_several else value


def checked_flag(name: str, x: Any) -> bool:
    """The option x as a bool: a scalar of Python, PyTorch, NumPy or JAX. Raises TypeError, naming it, for others."""
    x = plain_of(name, x)
    if not isinstance(x, bool):
        raise TypeError(f"{name}: got {type(x).__name__}, want a bool")
    return x


def checked_number(name: str, x: Any) -> Any:
    """The option x as a Python number; None stays None. Raises TypeError, naming it, unless it is a scalar or None."""
    x = plain_of(name, x)
    if not (x is None or isinstance(x, int | float | torch.SymInt | torch.SymFloat)):
        raise TypeError(f"{name}: got {type(x).__name__}, want a number")
    return x


def plain_options(names: tuple[str, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options whose values plain_of changes, by name, with the new values.

    So these are the options with PyTorch, NumPy or JAX scalars, which become Python numbers. names: the options to look
    at. Raises TypeError, naming the option, for a tensor whose value is not known, or that requires a gradient.
    """
    found = {}
    for name in names:
        x = options.get(name)
        if type(x) not in PLAIN and (value := plain_of(name, x)) is not x and not _is_same(value, x):
            found[name] = value
    return found


def in_float32(x: Any) -> Any:
    """The value x of an argument that is a scale, a number or a tensor.

    A scalar tensor is cast to float32 and stays on its device, unless it is bool or complex. NumPy and JAX scalars
    become Python numbers. All other values, such as tensors with axes, are returned unchanged.
    """
    if not isinstance(x, torch.Tensor):
        return plain_of("scale", x)
    if x.ndim or x.dtype == torch.bool or x.is_complex():
        return x
    return x.to(torch.float32)


def in_int32(x: Any) -> Any:
    """An int64 tensor as int32, for indices and counts; the host does not read it. Other values are returned unchanged.

    Values beyond int32 become its limits: they are above all sizes, or negative, as before.
    """
    return x.clamp(_INT32.min, _INT32.max).int() if isinstance(x, torch.Tensor) and x.dtype == torch.int64 else x


def is_constant(x: Any) -> bool:
    """Whether x cannot change: True for None, strings, numbers of Python and NumPy, and tuples of these, else False."""
    return all(map(is_constant, x)) if type(x) is tuple else type(x) in PLAIN or isinstance(x, np.generic)


def _is_same(value: Any, x: Any) -> bool:
    """Whether both are tuples or lists of the same length whose items are the same objects."""
    return type(x) in (tuple, list) and len(x) == len(value) and all(a is b for a, b in zip(value, x, strict=True))


def plain_arguments[Function: Callable[..., Any]](function: Function) -> Function:
    """Decorates a function so that scalar tensors and NumPy and JAX scalars among its arguments become Python numbers.

    Only for a function whose scalar tensors are all options: a scalar tensor that requires a gradient raises TypeError,
    which names the argument, and so does one whose value is not known.
    """
    return plain_numbers.plain_arguments(function, plain_of)
