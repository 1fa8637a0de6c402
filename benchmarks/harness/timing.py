"""A contender, its readings, and the loop that alternates contenders under one duty cycle.

A timer is a function (call, calls, framework) -> Reading: call(i) queues the i-th call and returns its outputs;
framework ("jax" or "torch") selects the way to wait for them.
"""

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from harness.cases import TOLERANCE
from harness.side_by_side import gpu_alone, gpu_among_others

Call = Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Reading:
    """The ms of one call. A device timer also reads the ms of each kernel, by name, and the number of launches."""

    ms: float
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    launches: float | None = None


Timer = Callable[[Call, int, str], Reading]


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled op. plan: a description of it.

    call(i) queues the op on input set i and returns its outputs, [B, T, H, D] each: (out,) for "fwd", (dq, dk, dv) for
    "bwd", (out, dq, dk, dv) for "fwdbwd".
    """

    call: Call
    plan: str


# The method of each --timer, by framework, as the report prints it with the figures.
METHODS = {
    "cupti": {
        "jax": "CUPTI: device time in which a kernel, memset or copy of the call ran",
        "torch": "CUPTI: device time in which a kernel, memset or copy of the call ran",
    },
    "profilers": {
        "jax": "jax.experimental.mosaic.gpu.profiler (CUPTI): sum of kernels; it sees no memsets or copies",
        "torch": "torch.profiler (CUPTI): sum of kernels, memsets and copies",
    },
    "events": {
        "jax": "CUDA events around the queue of calls, gaps between kernels included",
        "torch": "CUDA events around the queue of calls, gaps between kernels included",
    },
    "host": {
        "jax": "host clock around the queue of calls, dispatch included: not device time",
        "torch": "host clock around the queue of calls, dispatch included: not device time",
    },
}


def wait(outputs: Any, framework: str) -> None:
    """Blocks until everything queued up to outputs has run."""
    if framework == "jax":
        jax.block_until_ready(outputs)
        return
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def queue(call: Call, calls: int) -> Any:
    outputs = None
    for index in range(calls):
        outputs = call(index)
    return outputs


def host_timer(call: Call, calls: int, framework: str) -> Reading:
    start = time.perf_counter()
    wait(queue(call, calls), framework)
    return Reading((time.perf_counter() - start) * 1e3 / calls)


@dataclasses.dataclass
class Contender:
    """One implementation of one case, and its results.

    status: "ok", "unavailable", "failed", "wrong" or "skipped", with the reason in words.
    times: ms of one call, one entry for each round that it had a turn in.
    note: an irregularity in the readings.
    """

    name: str
    framework: str
    call: Call | None = None
    plan: str = ""
    status: str = "ok"
    reason: str = ""
    note: str = ""
    error: float | None = None
    times: list[float] = dataclasses.field(default_factory=list)
    reading: Reading | None = None
    calls: int = 0

    def give_up(self, status: str, reason: str) -> None:
        self.status, self.reason, self.call = status, reason, None

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Wraps the code that builds the contender: an exception becomes its status, and the run goes on."""
        try:
            yield
        except NotImplementedError as error:
            self.give_up("unavailable", first_line(error).removeprefix("NotImplementedError: "))
        except Exception as error:
            self.give_up("failed", first_line(error))

    def start(self, call: Call, plan: str = "") -> Any:
        """Sets the call and the plan, makes one call and returns its outputs."""
        self.call, self.plan = call, plan
        if self.framework == "torch":
            with gpu_among_others():
                wait(call(0), self.framework)  # it compiles
        with gpu_alone():
            outputs = call(0)
            wait(outputs, self.framework)
        return outputs

    def begin(self, build: Callable[[], Call], plan: str = "") -> Any:
        """Starts the call that build() returns. No other process is timed during build()."""
        with gpu_among_others():
            call = build()
        return self.start(call, plan)

    @property
    def findings(self) -> dict[str, Any]:
        """The fields of a row of results: the status, and the times if there are any."""
        found = {"status": self.status, "reason": self.reason, "plan": self.plan, "error": self.error}
        if self.times:
            kernels = self.reading.kernels if self.reading else {}
            found |= {"times_ms": self.times, "median_ms": spread(self.times)["median"], "kernels_ms": kernels}
        return found

    def judge(self, error: float, against: str, tolerance: float = TOLERANCE) -> None:
        """Sets the error of the results. Above the tolerance, or NaN, the contender is wrong and is not timed."""
        self.error = error
        if not error <= tolerance:
            self.give_up("wrong", f"relative error {error:.2g} against {against}, want at most {tolerance}")


def skipped(name: str, framework: str) -> Contender:
    """A contender that was not built, because the budget was spent."""
    contender = Contender(name, framework)
    contender.give_up("skipped", "the time budget was spent before it was built")
    return contender


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def take_turn(contender: Contender, timer: Timer, seconds: float) -> None:
    """Gives a contender one turn: an untimed call, then 3 to 2000 queued calls that fill `seconds`."""
    call = contender.call
    assert call is not None
    if contender.reading is None:
        contender.reading = host_timer(call, 2, contender.framework)
    contender.calls = min(max(round(seconds * 1e3 / max(contender.reading.ms, 1e-6)), 3), 2000)
    wait(call(0), contender.framework)
    contender.reading = timer(call, contender.calls, contender.framework)
    contender.times.append(contender.reading.ms)
    launches = contender.reading.launches
    if launches is not None and launches != round(launches):
        contender.note = f"{launches:.2f} device activities a call: not a whole number"


def alternate(
    contenders: Sequence[Contender],
    timer: Timer,
    *,
    rounds: int,
    seconds: float,
    deadline: float = float("inf"),
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Gives every contender one turn in each round. Stops early at the deadline, by time.monotonic.

    After the first round the order changes in each round, in the same way in every run: a GPU at its power limit is
    slower after a contender that drew more power, and in a fixed order this would always affect the same contender.

    A contender that raises is marked as failed and skipped; the others continue.
    """
    with gpu_alone():
        _alternate(contenders, timer, rounds, seconds, deadline, say)


def _alternate(contenders, timer, rounds, seconds, deadline, say) -> None:
    for number in range(rounds):
        for contender in random.Random(number).sample(contenders, len(contenders)) if number else contenders:
            if contender.status != "ok":
                continue
            if time.monotonic() + seconds > deadline:
                say(f"  the time budget is spent: stopped in round {number + 1} of {rounds}")
                for late in contenders:
                    if late.status == "ok" and not late.times:
                        late.give_up("skipped", "the time budget was spent before its first turn")
                return
            try:
                take_turn(contender, timer, seconds)
            except Exception as error:
                contender.give_up("failed", first_line(error))
                say(f"  {contender.name}: failed: {contender.reason}")
    for contender in contenders:
        if contender.status == "ok":
            times = ", ".join(f"{ms:.4f}" for ms in contender.times)
            say(f"  {contender.name}: {times} ms")


def spread(times: Sequence[float]) -> dict[str, float]:
    """The median, the least, the greatest and the interquartile range of one or more times."""
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    return {
        "median": statistics.median(times),
        "min": min(times),
        "max": max(times),
        "iqr": quartiles[2] - quartiles[0],
    }


def speed_ratio(times: Sequence[float], control: Sequence[float]) -> float:
    """The speed over the control's: the median over the common rounds, which cancels drift."""
    pairs = list(zip(control, times, strict=False))
    return statistics.median(theirs / ours for theirs, ours in pairs)
