"""The plan of ring_attention: the strategy, and the plans of its attentions."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_kernels.dispatch import Plan
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.ops.attention.flash_attention import prepare
from jax_kernels.ops.planned_op import recorded_plans
from jax_kernels.ops.ring import all_gather, all_to_all, halo
from jax_kernels.ops.ring.partial_results import Pair, Visitors
from jax_kernels.ops.ring.planning.costs import Prediction
from jax_kernels.ops.ring.ring_call import RingArrays, RingCall

__all__ = ["RingPlan", "plan_of"]


@dataclasses.dataclass(frozen=True)
class RingPlan(Plan):
    """The plan of ring_attention. The fields of Plan describe a device's first attention.

    devices: the number of devices. layout: the assignment of tokens to devices. strategy: "ring", "halo", "all_to_all"
    or "all_gather". differentiated: the strategy of the call under differentiation. steps: (words for the keys that an
    attention takes, its plan) of all attentions of a device, in order. In step s of a ring, a device takes the keys of
    the device that is s before it. differentiated_steps: the same under differentiation. A call without a token or a
    head has no step. predictions: the predicted time of each strategy, from the costs in the block specs.

    Only jax_kernels.analyze fills the other fields. work: each device's share of the pairs of a query and a key that
    the layout's limits leave. sent_bytes: the bytes that a device sends in a call without gradients.
    differentiated_work: like work, under differentiation. differentiated_sent_bytes: the bytes of a forward and of its
    backward, with the gradients of query, key and value.
    """

    devices: int = 1
    layout: str = ""
    strategy: str = ""
    differentiated: str = ""
    steps: tuple[tuple[str, Plan], ...] = ()
    differentiated_steps: tuple[tuple[str, Plan], ...] = ()
    predictions: tuple[Prediction, ...] = ()
    work: tuple[float, ...] = ()
    sent_bytes: float | None = None
    differentiated_work: tuple[float, ...] = ()
    differentiated_sent_bytes: tuple[float, float] | None = None

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.implementation} ({self.why})", f"  device: {self.device}"]
        lines += self._lines(f"strategy {self.strategy}", self.steps)
        if self.differentiated != self.strategy:
            lines += self._lines(f"with gradients strategy {self.differentiated}", self.differentiated_steps)
        if self.predictions:
            times = "; ".join(map(str, self.predictions))
            lines.append(f"  predicted ms, forward and forward with backward: {times}")
        return "\n".join(lines + self.lines_of_others())

    def _lines(self, heading: str, steps: tuple[tuple[str, Plan], ...]) -> list[str]:
        """Lines of text: the heading, and one line for each run of steps with equal plans."""
        runs: list[tuple[list[str], Plan]] = []
        for name, plan in steps:
            if runs and runs[-1][1] == plan:
                runs[-1][0].append(name)
            else:
                runs.append(([name], plan))
        lines = [f"  {heading}: {self.devices} {'device' if self.devices == 1 else 'devices'}, layout {self.layout}"]
        for names, plan in runs:
            blocks = "" if plan.config is None else f", {plan.config} from {plan.source}"
            words = ", ".join(names).replace(", step ", ", ")  # "step 0, 1, 7"
            lines.append(f"    {words}: {plan.implementation}{blocks}")
        return lines


def plan_of(call: RingCall, arrays: RingArrays, checked: Plan | None) -> RingPlan:
    """The RingPlan of a prepared call. Must run inside the jax.shard_map.

    checked: the plan to show for a call without a step, i.e. without a token or a head; else unused.
    """
    is_empty = 0 in arrays.query.shape[:3]
    steps = () if is_empty else _steps(call, arrays)
    differentiated = steps
    if call.differentiated != call.strategy:
        differentiated = _steps(dataclasses.replace(call, strategy=call.differentiated), arrays)
    first = steps[0][1] if steps else checked
    assert first is not None
    fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
    return RingPlan(
        **fields | {"op": "ring_attention"},
        devices=call.layout.devices,
        layout=call.layout.name,
        strategy=call.strategy,
        differentiated=call.differentiated,
        predictions=call.predictions,
        steps=steps,
        differentiated_steps=differentiated,
    )


def _steps(call: RingCall, arrays: RingArrays) -> tuple[tuple[str, Plan], ...]:
    """(words for the keys of an attention, its plan) for each attention of a call."""
    if call.strategy == "ring":
        own, sent = Visitors(Pair((arrays.key, arrays.value)), arrays.segment_ids), call.sendable(arrays)
        steps = {number: call.step(number, arrays) for number in call.steps}
        return tuple((f"step {n}", _plan(step.planned, sent if n else own)) for n, step in steps.items())
    if call.strategy == "halo":
        return tuple((name, _plan(planned)) for name, planned in halo.planned_calls(call, arrays).items())
    if call.strategy == "all_to_all":
        arguments, *_ = all_to_all.attention_arguments(call, arrays)
        return (("all keys of a device's heads", _plan(_prepared, arguments)),)
    chunks = enumerate(all_gather.attention_arguments(call, arrays))
    return tuple((f"all keys for chunk {chunk}", _plan(_prepared, arguments)) for chunk, arguments in chunks)


def _prepared(arguments: dict[str, Any]) -> Any:
    """The AttentionCall of flash_attention with these arguments."""
    planned, _ = prepare(FlashArguments(**arguments))
    return planned


def _plan(planned: Callable[..., Any], *arguments: Any) -> Plan:
    """The Plan of one attention, from a function that prepares it.

    planned(*arguments): makes the AttentionCall by PlannedOp.choose, which records the Plan. The returned Plan has the
    call's own config, which may differ from the recorded one.
    """
    with recorded_plans() as plans:
        call = planned(*arguments)
    return dataclasses.replace(plans[-1], config=call.config)
