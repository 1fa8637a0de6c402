"""Compares the pick of jax_kernels.tune with the fastest of all candidates, for calls that no block spec was made for.

    PYTHONPATH=. python benchmarks/tuning.py --budget 240 --output tuning.json

Each call is tuned, with pruning. Then all candidates are timed, also the ones that tuning left out: each gets readings,
and the fastest ones and the pick get --rounds more, in turns. With gradients, the candidates are the backward's, with
the forward of the pick. Implementations whose block spec takes more than twice the time of the fastest are left out.
The ratio is the median time of the pick over the smallest median. A row is printed, and written, when it is done.

Most of the time is compilation, on the host. Several processes share it, and take turns on the GPU:

    export BENCHMARK_LOCK=/tmp/gpu.lock
    for i in 1 2 3; do PYTHONPATH=. python benchmarks/tuning.py --part $i/3 --output tuning.json & done; wait

Rows of other calls in --output are kept. The exit status is 1 if a call failed.
"""

import dataclasses
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from harness import command_line, report
from harness.parts import add_part, merge_rows, part_of
from harness.side_by_side import gpu_alone
from harness.timing import first_line, spread
from harness.tuned_calls import (
    Clock,
    OutOfTimeError,
    TunedCase,
    TurnsMeasurement,
    attention,
    matmul,
    prepare,
)

from jax_kernels.tuned.winners import Winner
from jax_kernels.tuning import compiling, timers
from jax_kernels.tuning.measure import Settings
from jax_kernels.tuning.timers import Program, milliseconds

# None of them is a call of ship_winners.
CASES: tuple[TunedCase, ...] = (
    matmul(6144, 6144, 6144),
    attention(2, 6144, 16, 128, causal=True, gradients=False),
    attention(4, 3072, 24, 64, causal=True, gradients=True),
    matmul(1536, 5120, 5120),
    attention(4, 3072, 24, 64, causal=False, gradients=False),
    attention(2, 6144, 12, 128, causal=True, gradients=True),
    matmul(6144, 8192, 3072, gated=True),
    attention(2, 5120, 16, 96, causal=False, gradients=False),
    attention(1, 12288, 24, 128, kv_heads=4, causal=False, gradients=False),
    attention(2, 6144, 8, 256, causal=True, gradients=False),
)
_FAR = 2.0  # implementations beyond this multiple of the fastest one's time are left out
_NEAR, _MOST_NEAR = 1.1, 8  # further readings: candidates within this multiple of the fastest, at most this number

Key = tuple[str, Any, str]  # of a program: implementation, config, direction


def pick_of(measurement: TurnsMeasurement, winner: Winner) -> Key:
    """The program that calls of the tuned bucket run."""
    request = measurement.tunable.request
    timed = winner.of(winner.fastest or winner.timed[0].name)
    assert timed is not None
    config, _ = measurement.tunable.op.implementations[timed.name].config(request)
    return timed.name, config and timed.changed(config), measurement.direction


def candidates(measurement: TurnsMeasurement, winner: Winner) -> list[Key]:
    """All programs to time: the pick, the block specs, and their other blocks."""
    pick, tunable = pick_of(measurement, winner), measurement.tunable
    least = min(x.untuned_ms for x in winner.timed)
    found = [pick]
    for timed in winner.timed:
        if timed.untuned_ms > _FAR * least:
            continue
        spec, _ = tunable.op.implementations[timed.name].config(tunable.request)
        found.append((timed.name, spec, measurement.direction))
        field = "forward" if measurement.direction == "forward" else "backward"
        base = pick[1] if timed.name == pick[0] and field == "backward" else spec
        for blocks in measurement.others(timed.name, field):
            found.append((timed.name, dataclasses.replace(base, **{field: blocks}), measurement.direction))
        if base is not spec:
            found.append((timed.name, dataclasses.replace(base, **{field: getattr(spec, field)}), pick[2]))
    return list(dict.fromkeys(found))


def compiled(measurement: TurnsMeasurement, keys: Sequence[Key]) -> tuple[dict[Key, Program], dict[str, str]]:
    """(the programs, and the reason for each that does not compile). Programs of the tuner are used again."""
    new = [key for key in keys if key not in measurement.programs]
    made = compiling.compiled([measurement.program(*key) for key in new])
    by_key = measurement.programs | dict(zip(new, made, strict=True))
    failed = {text_of(key): first_line(x) for key in keys if isinstance(x := by_key[key], Exception)}
    return {key: by_key[key] for key in keys if text_of(key) not in failed}, failed


def text_of(key: Key) -> str:
    name, config, direction = key
    return name if config is None else f"{name} {config.forward if direction == 'forward' else config}"


def sweep(
    measurement: TurnsMeasurement, programs: Mapping[Key, Program], pick: Key, rounds: int, clock: Clock
) -> tuple[dict[Key, list[float]], dict[str, str]]:
    """(ms of each program, by its key, and the reason for each that does not run). The nearest have `rounds` readings.

    Raises OutOfTimeError if the budget ends before each of the nearest has a reading.
    """
    settings, first, failed = measurement.settings, {}, {}
    for key, program in programs.items():
        clock.check()
        try:
            first[key] = measurement.first_readings(program, list(first.values()))
        except Exception as error:  # it asks for too much memory, or its results are wrong
            failed[text_of(key)] = first_line(error)
    least = min(x.ms for x in first.values())
    near = [key for key in sorted(first, key=lambda key: first[key].ms) if first[key].ms <= _NEAR * least][:_MOST_NEAR]
    near = list(dict.fromkeys([*near, *(key for key in (pick,) if key in first)]))
    times: dict[Key, list[float]] = {key: [] for key in near}
    with gpu_alone():
        for number in range(rounds):
            if number and clock.left <= 0:
                break
            for key in random.Random(number).sample(near, len(near)):
                ms = milliseconds(first[key].program, settings.timer, settings.seconds, first[key].ms)
                times[key].append(ms)
    return {key: x.readings for key, x in first.items()} | times, failed


def check(case: TunedCase, settings: Settings, rounds: int, clock: Clock) -> dict[str, Any]:
    """The fields of a row for a call. Raises OutOfTimeError, NothingToTuneError and the errors of the op."""
    measurement = TurnsMeasurement(case.tunable(), settings)
    count = measurement.count()
    clock.say(f"{case.name}: {count} candidates to tune")
    begin = clock.spent
    winner = measurement.winner()
    tuned = clock.spent
    pick = pick_of(measurement, winner)
    clock.check()
    programs, not_compiled = compiled(measurement, candidates(measurement, winner))
    times, failed = sweep(measurement, programs, pick, rounds, clock)
    medians = {key: spread(readings)["median"] for key, readings in times.items()}
    final = [key for key, readings in times.items() if len(readings) >= min(rounds, 2)] or list(times)
    best = min(final, key=lambda key: medians[key])
    texts = {text_of(key): readings for key, readings in times.items()}
    return {
        "pick": text_of(pick),
        "pick_ms": medians[pick],
        "best": text_of(best),
        "best_ms": medians[best],
        "ratio": medians[pick] / medians[best],
        "untuned": measurement.untuned.implementation,
        "candidates": len(programs),
        "tuned_of": count,
        "pruned": measurement.pruned,
        "failed": measurement.failed | not_compiled | failed,
        "tuner_seconds": tuned - begin,
        "sweep_seconds": clock.spent - tuned,
        "times_ms": texts,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--budget", type=command_line.positive(float), default=240, help="seconds")
    parser.add_argument("--seconds", type=command_line.positive(float), default=0.03, help="of a reading")
    parser.add_argument("--rounds", type=command_line.positive(int), default=9, help="readings of the fastest")
    parser.add_argument("--calls", default="", help="list of names, separated by ';'; default: all")
    add_part(parser)
    args = parser.parse_args(argv)
    wanted = [name.strip() for name in args.calls.split(";") if name.strip()]
    if unknown := set(wanted) - {case.name for case in CASES}:
        parser.error(f"calls: got {sorted(unknown)}, want names of {[case.name for case in CASES]}")
    cases = [case for case in CASES if not wanted or case.name in wanted]
    clock = Clock(args.budget)
    prepare(args.part)
    with gpu_alone():
        timer = timers.choose()
    head = report.header(args.commit, timer=timer.name)
    rows: list[dict[str, Any]] = []
    for case in part_of(cases, args.part):
        row: dict[str, Any] = {"name": case.name, "with_gradients": case.gradients, "status": "ok", "reason": ""}
        try:
            clock.check()
            settings = Settings(timer=timer, seconds=args.seconds, gradients=case.gradients, step=clock.check)
            row |= check(case, settings, args.rounds, clock)
            text = f"pick / best {row['ratio']:.3f}: {row['pick']} {row['pick_ms']:.4f} ms"
            text += "" if row["pick"] == row["best"] else f", {row['best']} {row['best_ms']:.4f} ms"
            clock.say(f"{case.name}: {text}; {row['candidates']} candidates, {len(row['pruned'])} left out by tuning")
        except OutOfTimeError as error:
            row |= {"status": "skipped", "reason": str(error)}
        except Exception as error:  # the other calls may work
            row |= {"status": "failed", "reason": first_line(error)}
            clock.say(f"{case.name}: failed: {row['reason']}")
        rows.append(row)
        if row["status"] != "skipped":
            merge_rows(args.output, head, [x for x in rows if x["status"] != "skipped"])
        jax.clear_caches()  # executables of the call
    ratios = [row["ratio"] for row in rows if row["status"] == "ok"]
    skipped = [row["name"] for row in rows if row["status"] == "skipped"]
    if ratios:
        clock.say(f"worst of {len(ratios)}: {max(ratios):.3f}; within 2 %: {sum(x <= 1.02 for x in ratios)}")
    if skipped:
        clock.say(f"no time for {', '.join(skipped)}")
    return 1 if any(row["status"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
