"""Clear errors in place of derivatives that would be lost, or that nothing has a rule for."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

__all__ = ["NO_SECOND", "without_derivative"]

NO_SECOND = (
    "gradients of gradients: kernels have none. Products, mlp and norms have them with implementation='xla', attention "
    "has none"
)


def without_derivative[Function: Callable[..., Any]](function: Function, told: str) -> Function:
    """The function, which raises NotImplementedError where it is differentiated with respect to an array.

    Its arrays may stand anywhere among its arguments, in pytrees; the other leaves are static. told: the error's text.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

        @jax.custom_jvp
        def of_arrays(*arrays: Any) -> Any:
            for place, array in zip(places, arrays, strict=True):
                leaves[place] = array
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return function(*args, **kwargs)

        @of_arrays.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            raise NotImplementedError(told)

        return of_arrays(*(leaves[place] for place in places))

    return cast(Function, run)
