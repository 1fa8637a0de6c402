"""jax_kernels.analyze: the ops that a function runs, their work, their share of the time, and advice."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jax_kernels import dispatch
from jax_kernels.analysis import record, timing
from jax_kernels.analysis.advice import Found, Seen, found_in
from jax_kernels.analysis.marks import Runs
from jax_kernels.analysis.record import Trace
from jax_kernels.analysis.report import Advice, Analysis, OpUse, shape_text
from jax_kernels.device import DeviceInfo, device_info
from jax_kernels.frameworks import check_function, check_no_tensors
from jax_kernels.ops.planned_op import TunableCall
from jax_kernels.ops.ring.plan import RingPlan
from jax_kernels.tuning import timers
from jax_kernels.tuning.timers import Timer

__all__ = ["analysis_of", "analyze", "with_total"]


def analyze(
    function: Callable[..., Any],
    *args: Any,
    device: "DeviceInfo | jax.Device | str | None" = None,
    measure: bool = False,
    check: bool = False,
    seconds: float = 0.05,
    **kwargs: Any,
) -> Analysis:
    """The ops that `function(*args, **kwargs)` runs: how often, by which implementation, their FLOPs, bytes and advice.

    The function is traced, and nothing is computed without `measure` or `check`. For example::

        print(jax_kernels.analyze(train_step, params, batch))
        print(jax_kernels.analyze(train_step, params, batch, device="h200"))

    Runs in scans, under vmap, in derivatives and in rematerialization count; the body of a while loop, and each branch
    of a cond, count once. Inside shard_map the work is of one device; in ring_attention, of the device with most work.
    A call that must run inside shard_map is not timed.

    Args:
      function: of arrays, as jax.jit takes it, which may be under jit; or a Flax nnx module. Modules are copied: their
        state does not change.
      args, kwargs: its arguments. Arrays may be jax.ShapeDtypeStructs without `measure`. A known array of bools stays
        known, so that advice can look at a mask.
      device: analyses for this device, which need not be present: "h200", or another name of device_names(). None: the
        device on which the function would run.
      measure: also runs the function, and times it and each op's call, alone, under jit, with random arrays: on a GPU
        by CUPTI, else by the host's clock.
      check: times the calls before and after a change that is advised, if this library can make the change.
      seconds: the duration of one reading.

    Returns:
      An Analysis, whose text is a table.

    Raises:
      TypeError: `function` is no function, or takes tensors; or an argument has a tensor.
      ValueError: `device` is unknown, or is not JAX's default device and times are asked for; an argument is a
        jax.ShapeDtypeStruct and `measure` is True; or seconds is not finite and above 0.
      The errors of the function.
    """
    timers.check_seconds(seconds)
    check_function("function", function, "analyze")
    check_no_tensors((args, kwargs), "analyze")
    here = device_info()
    info = here if device is None else device_info(device)
    if (measure or check) and info != here:
        raise ValueError(
            f"device: got {info.name}, want {here.name} or None with measure or check, which time this machine"
        )
    call, tree = record.pure_call(function, args, kwargs)
    if measure and any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        raise ValueError(
            "args: got a jax.ShapeDtypeStruct with measure=True, want arrays, with which the function runs"
        )
    if device is None:
        traced = record.trace(call, tree)
    else:
        with dispatch.on_device(info):
            traced = record.trace(call, tree)
    timer = timers.choose() if measure or check else None
    total = timing.function_ms(*record.of_arrays(call, tree), timer, seconds) if measure and timer else None
    with dispatch.on_device(info):
        found = analysis_of(traced, info, timer=timer, measure=measure, check=check, seconds=seconds)
    return with_total(found, total)


def analysis_of(
    traced: Trace, device: DeviceInfo, *, timer: Timer | None, measure: bool, check: bool, seconds: float
) -> Analysis:
    """The Analysis of a traced function. timer: None without times. The shares are of the sum of all times."""
    groups = list(_grouped(traced.calls))
    pairs = [(seen, _use(seen, timer if measure else None, seconds)) for seen in groups]
    pairs.sort(key=lambda pair: -(pair[1].ms or pair[1].bound_ms or 0.0))
    advice = [_checked(seen, found, timer if check else None, seconds) for seen, _ in pairs for found in found_in(seen)]
    others = [x.seconds(device) for x in traced.others]
    others_ms = None if None in others else sum(x for x in others if x is not None) * 1e3
    analysis = Analysis(
        device=device.name,
        uses=tuple(use for _, use in pairs),
        others=traced.others,
        matmuls=traced.matmuls,
        others_ms=others_ms,
        advice=tuple(sorted(advice, key=lambda x: -(x.saves_ms or 0.0))),
        timer=None if timer is None else timer.name,
    )
    return _with_shares(analysis)


def _grouped(calls: Iterable[tuple[TunableCall, Runs]]) -> Iterator[Seen]:
    """Equal calls as one, with the sum of their runs."""
    groups: dict[Any, list[tuple[TunableCall, Runs]]] = {}
    for tunable, runs in calls:
        known = tuple(id(x) for x in jax.tree.leaves(tunable.inputs) if isinstance(x, jax.Array))  # such as a mask
        groups.setdefault((tunable.request, tunable.named, runs.size, known), []).append((tunable, runs))
    for members in groups.values():
        tunable, first = members[0]
        forward, backward = (sum(getattr(runs, side) for _, runs in members) for side in ("forward", "backward"))
        runs = dataclasses.replace(first, forward=forward, backward=backward)
        plan = tunable.op.plan(tunable.request, tunable.named) if tunable.plan is None else tunable.plan()
        yield Seen(tunable=tunable, plan=plan, runs=runs)


def _use(seen: Seen, timer: Timer | None, seconds: float) -> OpUse:
    """The OpUse of equal calls. timer: None if they are not timed."""
    bound, runs = seen.seconds(), seen.runs
    ms = None
    if timer is not None and seen.tunable.axis_name is None:
        found = timing.time_call(seen.tunable, timer, seconds, backward=runs.backward > 0)
        if found is not None:
            ms = (found.forward * runs.forward + (found.backward or 0.0) * runs.backward) * runs.size
    return OpUse(
        op=seen.plan.op,
        shape=shape_text(seen.request) + (f", vmap of {runs.size}" if runs.size > 1 else ""),
        request=seen.request,
        plan=seen.plan,
        forward=runs.forward,
        # The backward of a matmul consists of other calls.
        backward=runs.backward if seen.tunable.moving else 0,
        cost=seen.cost(),
        bound_ms=None if bound is None else bound * 1e3,
        ms=ms,
        sent_bytes=_sent_bytes(seen),
    )


def _sent_bytes(seen: Seen) -> float | None:
    """The bytes that a device sends in all runs of a ring_attention; None for other ops."""
    plan, runs = seen.plan, seen.runs
    if not isinstance(plan, RingPlan) or plan.sent_bytes is None or plan.differentiated_sent_bytes is None:
        return None
    forward, backward = plan.differentiated_sent_bytes
    if not runs.backward:
        return plan.sent_bytes * runs.forward * runs.size
    return (forward * runs.forward + backward * runs.backward) * runs.size


def _checked(seen: Seen, found: Found, timer: Timer | None, seconds: float) -> Advice:
    """The advice, with measured times if there is a timer, and a variant to time."""
    if timer is None or found.variant is None:
        return found.advice
    backward = seen.runs.backward > 0
    before, after = (
        timing.time_call(tunable, timer, seconds, backward=backward) for tunable in (seen.tunable, found.variant)
    )
    if before is None or after is None:
        return found.advice
    return dataclasses.replace(found.advice, before_ms=before.total, after_ms=after.total)


def _with_shares(analysis: Analysis) -> Analysis:
    """Shares of the sum of the measured times, or without these of the bounds of all uses and other matmuls."""
    times = [use.ms for use in analysis.uses]
    others: float | None = 0.0
    if all(ms is None for ms in times):
        times, others = [use.bound_ms for use in analysis.uses], analysis.others_ms
    if None in times or others is None:
        return analysis
    return _with_parts(analysis, times, sum(x for x in times if x is not None) + others)


def with_total(analysis: Analysis, total: float | None) -> Analysis:
    """Shares of the measured time of the function, if there is one."""
    if total is None:
        return analysis
    measured = _with_parts(analysis, [use.ms for use in analysis.uses], total)
    return dataclasses.replace(measured, total_ms=total)


def _with_parts(analysis: Analysis, parts: Sequence[float | None], total: float) -> Analysis:
    share = lambda part: None if part is None or not total else part / total
    uses = [dataclasses.replace(use, share=share(part)) for use, part in zip(analysis.uses, parts, strict=True)]
    return dataclasses.replace(analysis, uses=tuple(uses))
