"""Plans of the ops of the bridge for given tensors, and the time that each implementation takes."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch

from jax_kernels import device, dispatch
from jax_kernels.bridge.interop import dlpack
from jax_kernels.bridge.operators import plan_query

__all__ = ["benchmark_implementations", "device_info", "explain"]

_NAMES = ("mosaic_gpu", "triton", "cudnn", "xla")


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> dispatch.Plan:
    """The Plan of `op(*args, **kwargs)` on tensors, without running it: the implementation, its blocks, and why.

    op: a function of jax_kernels.bridge, or a module or function that calls one; the plan is that of its first call.
    Autocast and PyTorch's settings count as they do in a call.

    Raises what the call itself would raise for these arguments; TypeError where op calls no op that has a plan.
    """
    if not callable(op):
        raise TypeError(f"op: got {type(op).__name__}, want a function of jax_kernels.bridge")
    try:
        with plan_query.asking():
            op(*args, **kwargs)
    except plan_query.Answer as found:
        return found.plan
    raise TypeError(f"op: got {op!r}, which calls no op of jax_kernels.bridge, want one (bridge.flash_attention, ...)")


def device_info(place: torch.device | str | int | None = None) -> device.DeviceInfo:
    """The facts that jax_kernels has of a device of PyTorch's. None is the current GPU, or the CPU where there is none.

    Raises ValueError for a device that is neither a CPU nor a CUDA GPU, and for "cuda" where there is none;
    RuntimeError where JAX lacks it.
    """
    if place is None:
        place = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    if found.type == "cuda" and found.index is None:
        found = dlpack.current_gpu("place")
    return dispatch.device_info(dlpack.jax_device(found))


def benchmark_implementations(
    op: Callable[..., Any], *args: Any, gradients: bool = False, seconds: float = 0.2, **kwargs: Any
) -> dict[str, float]:
    """The milliseconds that `op(*args, **kwargs)` takes with each implementation that can serve it, fastest first.

    On a GPU, CUDA events stand around a queue of calls, so that the time is that of the GPU, or of the host where that
    is longer. It waits for the GPU.

    Args:
      op: a function of jax_kernels.bridge that has an argument `implementation`.
      gradients: also computes the gradients of the tensors among args and kwargs that require one.
      seconds: of each implementation, about.

    Raises what op raises for every implementation; ValueError where kwargs names one; TypeError where op does not take
    one.
    """
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
        raise ValueError("got no tensor among the arguments, want at least one: its device is where the op runs")
    first, *_ = tensors
    wanted = [x for x in tensors if x.requires_grad]
    if gradients and not wanted:
        raise ValueError("gradients: got True, and no tensor that requires a gradient; want one")

    def call(name: str) -> None:
        with torch.set_grad_enabled(gradients):
            results = op(*args, implementation=name, **kwargs)
        if gradients:
            out = results[0] if isinstance(results, tuple | list) else results
            torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    times: dict[str, float] = {}
    error: Exception | None = None
    for name in _NAMES:
        try:
            call(name)
        except (NotImplementedError, ValueError) as refused:  # it cannot serve the call, or the op has none of the name
            error = refused
            continue
        times[name] = _milliseconds(functools.partial(call, name), first.device, seconds)
    if not times and error is not None:
        raise error
    return dict(sorted(times.items(), key=lambda item: item[1]))


def _takes_implementation(op: Any) -> bool:
    try:
        parameters = inspect.signature(op).parameters.values()
    except (TypeError, ValueError):  # it has no signature, or is no function
        return callable(op)
    return any(x.name == "implementation" or x.kind is x.VAR_KEYWORD for x in parameters)


def _milliseconds(call: Callable[[], Any], place: torch.device, seconds: float) -> float:
    """The time of a call in a queue of them."""
    once = _queued(call, place, 2)
    return _queued(call, place, max(2, min(1000, int(seconds * 1e3 / max(once, 1e-3)))))


def _queued(call: Callable[[], Any], place: torch.device, calls: int) -> float:
    if place.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls * 1e3
    with torch.cuda.device(place):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls
