"""Plans of the bridge's ops: inside `planning_only`, an op does not run, but raises a PlanFound with its plan.

The plan is made from the arguments that the op gives to JAX, after autocast and PyTorch's settings.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch.overrides import TorchFunctionMode

from jax_kernels import dispatch
from jax_kernels.bridge.interop import dlpack, planning_device
from jax_kernels.device import DeviceInfo

__all__ = ["PlanFound", "planning_only", "raise_plan_if_asked"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Question:
    """A request for a plan. device: the device to plan for; None for the device of the tensors."""

    device: DeviceInfo | None


_ASKED: contextvars.ContextVar[_Question | None] = contextvars.ContextVar("jax_kernels_asked", default=None)


class PlanFound(Exception):
    """Raised by an op inside `planning_only`. plan: the implementation and blocks that the call would use."""

    def __init__(self, plan: dispatch.Plan) -> None:
        super().__init__(str(plan))
        self.plan = plan


class _BypassCache(TorchFunctionMode):
    """A torch function mode that calls functions unchanged. Inside it no cached call is used, so ops are planned."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def planning_only(device: DeviceInfo | None = None) -> Iterator[None]:
    """A context manager inside which each op of the bridge that this thread calls raises PlanFound, and does not run.

    device: the device to plan for; None for the device of the tensors.
    """
    token = _ASKED.set(_Question(device=device))
    try:
        with _BypassCache():
            yield
    finally:
        _ASKED.reset(token)


def raise_plan_if_asked(function: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Inside `planning_only`, raises PlanFound with the plan of a function of jax_kernels; else does nothing.

    args, kwargs: the function's arguments, with tensors for arrays. Raises TypeError if the function has no plan.
    """
    if (question := _ASKED.get()) is not None:
        args, kwargs = jax.tree.map(_without_values, (args, kwargs))
        with planning_device.planning_on(device):
            asked = contextlib.nullcontext() if question.device is None else dispatch.on_device(question.device)
            with asked:
                raise PlanFound(dispatch.explain(function, *args, **kwargs))


def _without_values(x: Any) -> Any:
    """A tensor's shape and dtype, as a jax.ShapeDtypeStruct; other values unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    dlpack.check_dtype("tensor", x.dtype)
    return jax.ShapeDtypeStruct(tuple(x.shape), dlpack.jax_dtype(x.dtype))
