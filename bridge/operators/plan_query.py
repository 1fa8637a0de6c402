"""How an op of the bridge tells its plan: inside `asking`, it raises an Answer in place of running.

So a plan is that of the very arguments that the op gives to JAX, after autocast and PyTorch's settings.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch.overrides import TorchFunctionMode

from jax_kernels import dispatch
from jax_kernels.bridge.interop import dlpack, planning_device

__all__ = ["Answer", "answer", "asking"]

_ASKING: contextvars.ContextVar[bool] = contextvars.ContextVar("jax_kernels_asking", default=False)


class Answer(Exception):
    """Carries the plan of a call."""

    def __init__(self, plan: dispatch.Plan) -> None:
        super().__init__(str(plan))
        self.plan = plan


class _NothingIsKnown(TorchFunctionMode):
    """A mode that changes nothing. Known calls are not launched under a mode."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Makes the ops that this thread calls raise Answer inside the block."""
    token = _ASKING.set(True)
    try:
        with _NothingIsKnown():
            yield
    finally:
        _ASKING.reset(token)


def answer(function: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Raises Answer with the plan of a function of jax_kernels, where it is asked for. Tensors stand for arrays.

    Raises TypeError where the function has no plan.
    """
    if _ASKING.get():
        args, kwargs = jax.tree.map(_without_values, (args, kwargs))
        with planning_device.planning_for(device):
            raise Answer(dispatch.explain(function, *args, **kwargs))


def _without_values(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    dlpack.check_dtype("tensor", x.dtype)
    return jax.ShapeDtypeStruct(tuple(x.shape), dlpack.jax_dtype(x.dtype))
