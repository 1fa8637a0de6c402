"""The reason why a call cannot run on this machine."""

from collections.abc import Callable
from typing import Any

from jax_kernels.dispatch import explain

__all__ = ["refusal"]


def refusal(op: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """The reason why op(*args, **kwargs) cannot run here; None if it can. Arrays may be jax.ShapeDtypeStructs."""
    try:
        explain(op, *args, **kwargs)
    except NotImplementedError as error:
        return str(error)
    return None
