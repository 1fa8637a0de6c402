"""Benchmarks with one row for each case: the row of timed contenders, and the loop over the cases."""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness import report
from harness.process import say
from harness.timers import close
from harness.timing import Contender, speed_ratio, spread


def row_of(case: Any, contenders: Sequence[Contender], rate: str, of_ms: Callable[[float], float]) -> dict[str, Any]:
    """The row of a case, which is also told: its fields and label, the findings of each contender, and speed_ratios.

    case: a dataclass with a `label`. rate: the name of a contender's rate, such as "tflops", which of_ms gives for the
    median time in ms. speed_ratios: the speed of the first timed contender over each other one, by name.
    """
    row: dict[str, Any] = dataclasses.asdict(case) | {"label": case.label, "contenders": []}
    for contender in contenders:
        found = {"name": contender.name, "framework": contender.framework, **contender.findings}
        if contender.times:
            found[rate] = of_ms(spread(contender.times)["median"])
        row["contenders"].append(found)
    times = {c.name: c.times for c in contenders if c.times}
    for other in list(times)[1:]:
        row.setdefault("speed_ratios", {})[other] = speed_ratio(next(iter(times.values())), times[other])
    medians = sorted((spread(x)["median"], name) for name, x in times.items())
    say(f"{case.label}: " + ", ".join(f"{name} {ms:.4f} ms {of_ms(ms):.0f}" for ms, name in medians))
    for c in contenders:
        if c.status not in ("ok", "unavailable"):
            say(f"  {c.name}: {c.status}: {c.reason}")
    return row


def run(
    cases: Iterable[Any],
    measure: Callable[[Any, Any, argparse.Namespace], dict[str, Any]],
    args: argparse.Namespace,
    timer: Any,
    results: dict[str, Any],
    until: float,
) -> int:
    """Measures the cases until time.monotonic() is `until`, writes each row, and returns the exit status.

    measure(case, timer, args) returns a row. results: its "rows" get the rows.
    """
    for case in cases:
        if time.monotonic() > until:
            say(f"{case.label}: the budget is spent")
            continue
        results["rows"].append(measure(case, timer, args))
        report.write_json(args.output, results)
    close(timer)
    return report.exit_status(x["status"] for row in results["rows"] for x in row["contenders"])
