"""JAX's default promotion, whatever the caller has set."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax

__all__ = ["under_defaults"]


def under_defaults[Function: Callable[..., Any]](function: Function) -> Function:
    """A decorator: the function is traced with JAX's default dtype and rank promotion, whatever its caller has set.

    jax_numpy_rank_promotion="raise" is for the caller's code. Both halves of a custom_vjp need the decorator, because
    JAX traces them separately.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return cast(Function, run)
