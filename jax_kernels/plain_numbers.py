"""Converts options to Python's numbers, from NumPy scalars and known arrays without axes; and options to dtypes."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.spelling import add_hint

__all__ = [
    "ATTENTION",
    "DILATED",
    "PLAIN",
    "SEQUENCES",
    "dtype_of",
    "dtype_text",
    "plain",
    "plain_arguments",
    "plain_of",
    "plain_options",
    "with_plain_numbers",
]

PLAIN = (int, float, bool, str, type(None))
ATTENTION = ("is_causal", "window", "scale", "softcap", "return_lse", "deterministic")
DILATED = (
    *("segment_lengths", "dilation_rates", "is_causal", "stop_gradient_weights", "scale", "return_lse"),
    "deterministic",
)
# Options that may be several numbers, and so arrays with one axis.
SEQUENCES = frozenset(("axis", "block_size", "dilation_rates", "segment_lengths", "window", "window_size"))


def plain(x: Any) -> Any:
    """The Python int, float or bool that x holds; x itself if it holds no number that is known when tracing.

    Entries of tuples and lists are converted likewise.
    """
    kind = type(x)
    if kind in PLAIN:
        return x
    if kind is tuple or kind is list:
        return kind(map(plain, x))
    if not isinstance(x, np.generic | np.ndarray | jax.Array) or isinstance(x, jax.core.Tracer) or x.ndim:
        return x
    if x.dtype == bool:
        return bool(x)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return int(x)
    return float(x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def plain_of(name: str, x: Any) -> Any:
    """The value of the option `name` as Python's numbers, if it is a NumPy scalar or a known array without axes.

    All other values are returned unchanged, such as traced arrays. For options that take several numbers (the names in
    SEQUENCES, such as "window"), a known array with one axis becomes a tuple. In tuples and lists, entries are
    converted likewise.
    """
    is_array = isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)
    if name in SEQUENCES and is_array and x.ndim == 1:
        return tuple(map(plain, np.asarray(x)))
    return plain(x)


def plain_options(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The options, with the values of these names as Python's numbers; the dict itself if nothing changes."""
    changed = {name: plain_of(name, options[name]) for name in names if type(options.get(name)) not in PLAIN}
    return options | changed if changed else options


def with_plain_numbers[Function: Callable[..., Any]](*names: str) -> Callable[[Function], Function]:
    """Returns a decorator: the keyword arguments of these names reach the function as Python's numbers.

    `explain` converts them likewise. NumPy scalars and known arrays without axes are converted. The TypeError for an
    unknown argument gets a hint: see spelling.add_hint. A jax.ShapeDtypeStruct raises TypeError.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **plain_options(names, kwargs))
            except Exception as error:
                _refuse_shapes(function, args, kwargs, error)
                if isinstance(error, TypeError):
                    add_hint(error, function)
                raise

        run.plain_numbers = names  # type: ignore[attr-defined]
        return cast(Function, run)

    return decorate


def _refuse_shapes(function: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> None:
    """Raises a TypeError that names the first argument that is a jax.ShapeDtypeStruct. error: of the call."""
    names = (*zip(inspect.signature(function).parameters, args, strict=False), *kwargs.items())
    for name, x in names:
        if isinstance(x, jax.ShapeDtypeStruct):
            want = "want an array; jax_kernels.explain and jax.eval_shape take shapes without values"
            raise TypeError(f"{name}: got a jax.ShapeDtypeStruct, {want}") from error


def dtype_of(x: Any) -> np.dtype | None:
    """The option x as a dtype; None if it is no dtype. As in NumPy, None is float64."""
    try:
        return jnp.dtype(x)
    except (TypeError, ValueError):  # ValueError: an array whose dtype NumPy lacks
        return None


def dtype_text(x: Any) -> str:
    """The option x in an error about dtypes: a dtype's name, None or another string as it is, else its type."""
    if x is None or (found := dtype_of(x)) is None:
        return repr(x) if x is None or isinstance(x, str) else type(x).__name__
    return str(found)


def plain_arguments[Function: Callable[..., Any]](
    function: Function, convert: Callable[[str, Any], Any] = plain_of
) -> Function:
    """A decorator: all arguments that are NumPy scalars or known arrays without axes reach the function as Python's
    numbers.

    It is for functions whose own arrays all have axes. Arguments that take several numbers (the names in SEQUENCES,
    such as "window") may be arrays with one axis, and become tuples. convert(name, value): the value that the function
    gets.
    """
    positions = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        plain_args = (convert(name, x) for name, x in zip(positions, args, strict=False))
        more = args[len(positions) :]
        return function(*plain_args, *more, **{name: convert(name, x) for name, x in kwargs.items()})

    return cast(Function, run)
