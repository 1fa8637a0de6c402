"""Plans of the bridge's ops: inside `planning_only`, an op does not run, but raises a PlanFound with its plan.

Inside `recording`, an op runs, and its call is recorded. Both see the arguments that the op gives to JAX, after
autocast and PyTorch's settings.
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

__all__ = ["PlanFound", "RecordedCall", "planning_only", "raise_plan_if_asked", "recording"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Question:
    """A request for a plan. device: the device to plan for; None for the device of the tensors.

    record: the list to which calls are added, which then run; None for a request that raises PlanFound.
    """

    device: DeviceInfo | None
    record: "list[RecordedCall] | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecordedCall:
    """A call of an op of the bridge: a function of jax_kernels, and its arguments with arrays without values.

    A tensor of bools keeps its values, as a NumPy array. needs_gradient: whether a tensor requires a gradient, and
    gradients are enabled. device: of the tensors.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs_gradient: bool
    device: torch.device


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


@contextlib.contextmanager
def recording() -> Iterator[list[RecordedCall]]:
    """A context manager that yields a list, to which each call of an op of the bridge by this thread is added."""
    calls: list[RecordedCall] = []
    token = _ASKED.set(_Question(device=None, record=calls))
    try:
        with _BypassCache():
            yield calls
    finally:
        _ASKED.reset(token)


def raise_plan_if_asked(function: Callable[..., Any], device: torch.device, *args: Any, **kwargs: Any) -> None:
    """Inside `planning_only`, raises PlanFound with the plan of a function of jax_kernels; `recording` adds the call.

    args, kwargs: the function's arguments, with tensors for arrays. Raises TypeError if the function has no plan.
    """
    if (question := _ASKED.get()) is not None:
        if question.record is not None:
            question.record.append(_recorded(function, device, args, kwargs))
            return
        args, kwargs = jax.tree.map(_without_values, (args, kwargs))
        with planning_device.planning_on(device):
            asked = contextlib.nullcontext() if question.device is None else dispatch.on_device(question.device)
            with asked:
                raise PlanFound(dispatch.explain(function, *args, **kwargs))


def _recorded(
    function: Callable[..., Any], device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RecordedCall:
    def given(x: Any) -> Any:
        is_mask = isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.ndim > 0
        return x.detach().cpu().numpy() if is_mask else _without_values(x)

    tensors = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    args, kwargs = jax.tree.map(given, (args, kwargs))
    return RecordedCall(
        function=function,
        args=args,
        kwargs=kwargs,
        needs_gradient=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
        device=device,
    )


def _without_values(x: Any) -> Any:
    """A tensor's shape and dtype, as a jax.ShapeDtypeStruct; other values unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    dlpack.check_dtype("tensor", x.dtype)
    return jax.ShapeDtypeStruct(tuple(x.shape), dlpack.jax_dtype(x.dtype))
