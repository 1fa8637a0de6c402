"""Plans of the bridge's ops for given tensors, and the time of each implementation."""

import functools
import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, overload

import torch

from jax_kernels import dispatch
from jax_kernels.bridge.interop import dlpack
from jax_kernels.bridge.jax_functions.argument_checks import check_function_of_tensors
from jax_kernels.bridge.operators import plan_query
from jax_kernels.device import DeviceInfo
from jax_kernels.tuning.benchmark import ImplementationTime
from jax_kernels.tuning.timers import check_seconds

__all__ = ["benchmark_implementations", "device_info", "explain", "milliseconds_of"]

_NAMES = ("mosaic_gpu", "triton", "cudnn", "xla")
_READINGS = 5


def explain(
    op: Callable[..., Any], *args: Any, device: DeviceInfo | torch.device | str | None = None, **kwargs: Any
) -> dispatch.Plan:
    """Returns the Plan of `op(*args, **kwargs)` on tensors, without running it: implementation, blocks and reasons.

    op: a function of jax_kernels.bridge, or a module or function that calls such a function; the first call gives the
    plan. Autocast and PyTorch's settings apply as in a call.
    device: plans for this device, which need not be there: "a100", or another name of jax_kernels.device_names(), a
    DeviceInfo, or a torch.device. None: for the tensors' device.

    Raises the errors that the call would raise for these arguments; TypeError if op calls no op that has a plan, and
    for `device` with an op that has a parameter `device`; ValueError for an unknown device, and for a device other than
    the one for which compile_attention planned.
    """
    if not callable(op):
        raise TypeError(f"op: got {type(op).__name__}, want a function of jax_kernels.bridge")
    check_function_of_tensors("op", op)
    target = None
    if device is not None:
        given = device_info(device) if isinstance(device, torch.device) else device
        target = dispatch.device_to_explain(op.forward if isinstance(op, torch.nn.Module) else op, given)
    try:
        with plan_query.planning_only(target):
            op(*args, **kwargs)
    except plan_query.PlanFound as found:
        return found.plan
    raise TypeError(f"op: got {op!r}, which calls no op of jax_kernels.bridge, want one (bridge.flash_attention, ...)")


def device_info(place: torch.device | str | int | None = None) -> DeviceInfo:
    """The DeviceInfo of a PyTorch device: its name, compute capability, memory, dtypes and implementations.

    With None, the device is the current GPU, or the CPU if there is no GPU. An int is the index of a GPU.

    Raises ValueError for a device that is neither a CPU nor a CUDA GPU, and for "cuda" without a GPU; RuntimeError if
    JAX lacks the device.
    """
    return dispatch.device_info(dlpack.jax_device(dlpack.torch_device("place", place)))


@overload
def benchmark_implementations(
    op: Callable[..., Any],
    *args: Any,
    gradients: bool = ...,
    seconds: float = ...,
    table: Literal[False] = ...,
    **kwargs: Any,
) -> dict[str, float]: ...
@overload
def benchmark_implementations(
    op: Callable[..., Any],
    *args: Any,
    gradients: bool = ...,
    seconds: float = ...,
    table: Literal[True],
    **kwargs: Any,
) -> list[ImplementationTime]: ...
def benchmark_implementations(
    op: Callable[..., Any],
    *args: Any,
    gradients: bool = False,
    seconds: float = 0.2,
    table: bool = False,
    **kwargs: Any,
) -> dict[str, float] | list[ImplementationTime]:
    """Times `op(*args, **kwargs)` with each implementation: returns {name: milliseconds of a call}, fastest first.

    Implementations that cannot serve the call are left out. On a GPU, CUDA events enclose a queue of calls. So the time
    is the GPU's time, or the host's time if it is longer. The function waits for the GPU.

    Args:
      op: a function of jax_kernels.bridge that has an argument `implementation`.
      gradients: also computes the gradients of the tensors among args and kwargs that require a gradient.
      seconds: approximate time for each implementation.
      table: returns a list of jax_kernels.ImplementationTime instead, as jax_kernels.benchmark_implementations does:
        with spreads and plans, and with the implementations that cannot serve the call, each with its reason.

    Raises op's error if op raises for every implementation; ValueError if kwargs has `implementation`, if seconds is
    not finite and above 0, if no argument is a tensor, and for `gradients` if no tensor requires a gradient; TypeError
    if op has no argument `implementation`.
    """
    check_seconds(seconds)
    check_function_of_tensors("op", op)
    if not _takes_implementation(op):
        name = getattr(op, "__name__", repr(op))
        raise TypeError(
            f"op: got {name}, which has no argument `implementation`, want an op that has, such as "
            "bridge.flash_attention, on tensors [batch, length, heads, head_dim]"
        )
    if "implementation" in kwargs:
        raise ValueError(f"implementation: got {kwargs['implementation']!r}, want none: all are timed")
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if not tensors:
        raise ValueError("args: got no tensor, want at least one: the op runs on its device")
    first, *_ = tensors
    wanted = [x for x in tensors if x.requires_grad]
    if gradients and not wanted:
        raise ValueError("gradients: got True, want at least one tensor that requires a gradient")

    def call(name: str) -> None:
        with torch.set_grad_enabled(gradients):
            results = op(*args, implementation=name, **kwargs)
        if gradients:
            out = results[0] if isinstance(results, tuple | list) else results
            torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    times: dict[str, list[float]] = {}
    errors: dict[str, Exception] = {}
    for name in _NAMES:
        try:
            call(name)
        except (NotImplementedError, ValueError) as refused:  # it cannot serve the call, or the op lacks it
            errors[name] = refused
            continue
        times[name] = milliseconds_of(functools.partial(call, name), first.device, seconds)
    if not times:
        raise errors[_NAMES[-1]]
    fastest = dict(sorted(times.items(), key=lambda item: statistics.median(item[1])))
    if not table:
        return {name: statistics.median(readings) for name, readings in fastest.items()}
    timer = "events" if first.device.type == "cuda" else "host"
    rows = [
        ImplementationTime.of(name, explain(op, *args, implementation=name, **kwargs), readings=readings, timer=timer)
        for name, readings in fastest.items()
    ]
    lacking = [
        ImplementationTime(implementation=name, plan=None, reason=dispatch.reason_against(e))
        for name, e in errors.items()
    ]
    return rows + lacking


def _takes_implementation(op: Callable[..., Any]) -> bool:
    """Whether op's signature has an argument `implementation` or **kwargs; True for a callable without signature."""
    try:
        parameters = inspect.signature(op).parameters.values()
    except (TypeError, ValueError):  # it has no signature, or is no function
        return callable(op)
    return any(x.name == "implementation" or x.kind is x.VAR_KEYWORD for x in parameters)


def milliseconds_of(call: Callable[[], None], device: torch.device, seconds: float) -> list[float]:
    """Returns readings of the milliseconds of one call. Each is the mean of a queue of calls; all take `seconds`."""
    once = _queued(call, device, 2)
    calls = max(2, min(1000, int(seconds * 1e3 / max(once, 1e-3) / _READINGS)))
    return [_queued(call, device, calls) for _ in range(_READINGS)]


def _queued(call: Callable[[], None], device: torch.device, calls: int) -> float:
    """Returns the milliseconds of one call, averaged over this number of calls: on a GPU by CUDA events."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e3
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls
