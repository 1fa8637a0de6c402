"""analyze for functions of tensors: the ops of the bridge that a function calls, their work, and advice."""

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jax_kernels import dispatch
from jax_kernels.analysis import record
from jax_kernels.analysis.analyze import analysis_of, with_total
from jax_kernels.analysis.record import Trace
from jax_kernels.analysis.report import Analysis
from jax_kernels.bridge.interop import planning_device
from jax_kernels.bridge.jax_functions.argument_checks import check_function_of_tensors
from jax_kernels.bridge.operators import plan_query
from jax_kernels.bridge.operators.plan_query import RecordedCall
from jax_kernels.bridge.ops.explain import device_info, milliseconds_of
from jax_kernels.device import DeviceInfo
from jax_kernels.ops.planned_op import tuned_by
from jax_kernels.tuning import timers

__all__ = ["analyze", "trace_of"]


def analyze(
    function: Callable[..., Any],
    *args: Any,
    device: DeviceInfo | torch.device | str | None = None,
    measure: bool = False,
    check: bool = False,
    seconds: float = 0.05,
    **kwargs: Any,
) -> Analysis:
    """The ops of the bridge that `function(*args, **kwargs)` runs: how often, their FLOPs, bytes, and advice.

    The function runs once, and each call of an op is recorded. A call whose tensors require a gradient counts with its
    backward. Operations of PyTorch itself are not listed: use torch.profiler for these. For example::

        print(bridge.analyze(model, tokens))
        print(bridge.analyze(model, tokens, device="h200"))

    Args:
      function: a function of tensors, or a module.
      args, kwargs: its arguments.
      device: analyses for this device, which need not be present. None: the device of the tensors.
      measure: also times the function, on a GPU by CUDA events, and each op's call, alone, in JAX.
      check: times the calls before and after a change that is advised, if this library can make the change.
      seconds: the duration of one reading.

    Returns:
      A jax_kernels.Analysis, whose text is a table.

    Raises:
      ValueError: `device` is unknown, or is not the tensors' and times are asked for; the function calls no op of the
        bridge; or seconds is not finite and above 0. The errors of the function.
    """
    timers.check_seconds(seconds)
    check_function_of_tensors("function", function)
    with tuned_by(None), plan_query.recording() as calls:
        function(*args, **kwargs)
    if not calls:
        raise ValueError(f"function: got {function!r}, which calls no op of jax_kernels.bridge outside of a graph")
    tensors_device = calls[0].device
    here = device_info(tensors_device)
    given = device_info(device) if isinstance(device, torch.device) else device
    info = here if given is None else dispatch.device_info(given)
    if (measure or check) and info != here:
        raise ValueError(
            f"device: got {info.name}, want {here.name} or None with measure or check, which time this machine"
        )
    timer = timers.choose() if measure or check else None
    with planning_device.planning_on(tensors_device), dispatch.on_device(info):
        traced = trace_of(calls)
        analysis = analysis_of(traced, info, timer=timer, measure=measure, check=check, seconds=seconds)
    if not measure:
        return analysis
    readings = milliseconds_of(lambda: function(*args, **kwargs), tensors_device, seconds)
    return with_total(analysis, statistics.median(readings))


def trace_of(calls: Iterable[RecordedCall]) -> Trace:
    """The Trace of recorded calls, each with its backward if it needs one. Equal calls are traced once."""
    texts: dict[Any, RecordedCall] = {}
    counts: collections.Counter[Any] = collections.Counter()
    for call in calls:
        key = call.function, call.needs_gradient, repr((call.args, sorted(call.kwargs.items()))), *_ids(call)
        texts.setdefault(key, call)
        counts[key] += 1
    found = []
    for key, call in texts.items():
        for tunable, runs in _traced(call).calls:
            times = counts[key]
            found.append(
                (tunable, dataclasses.replace(runs, forward=runs.forward * times, backward=runs.backward * times))
            )
    return Trace(calls=tuple(found), others=(), matmuls=0)


def _ids(call: RecordedCall) -> Iterator[int]:
    """The identities of a call's arrays with values, whose texts may be cut."""
    leaves = jax.tree.leaves((call.args, call.kwargs))
    return (id(x) for x in leaves if hasattr(x, "dtype") and not isinstance(x, jax.ShapeDtypeStruct))


def _traced(call: RecordedCall) -> Trace:
    if not call.needs_gradient:
        run, tree = record.pure_call(call.function, call.args, call.kwargs)
        return record.trace(run, tree)
    leaves, structure = jax.tree.flatten((call.args, call.kwargs))
    moving = [
        i for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.inexact)
    ]

    def gradients(*arrays: Any) -> Any:
        def results(*arrays: Any) -> list[Any]:
            found = dict(zip(moving, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(structure, [found.get(i, x) for i, x in enumerate(leaves)])
            out = call.function(*args, **kwargs)
            return [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]

        out, pullback = jax.vjp(results, *arrays)
        return pullback([jnp.ones_like(x) for x in out])

    run, tree = record.pure_call(gradients, tuple(leaves[i] for i in moving), {})
    return record.trace(run, tree)
