"""Compares attention with FlashAttention-4 and cuDNN, in 24 shapes and masks that models use, forward and backward.

    PYTHONPATH=. python benchmarks/attention_table.py --budget 300 --output attention-table.json

The contenders of a row take turns of equal length in one run, by device time; "bwd" is the whole backward op without
the forward. The ratio is our speed over the fastest peer's. A peer whose results differ from float32 is timed too, and
its row has the error. The geometric mean and the worst ratio are printed at the end.

Most of the time is compilation, on the host. Several processes share it, and take turns on the GPU:

    export BENCHMARK_LOCK=/tmp/gpu.lock
    for i in 1 2 3 4; do PYTHONPATH=. python benchmarks/attention_table.py --part $i/4 --output table.json & done; wait

FlashAttention-4 compiles its backward for about a minute. Rows of other processes in --output are kept. With
`--summary FILE` nothing is timed: the table of a file is printed.

The exit status is 1 if a contender failed, or was skipped because the budget was spent.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from harness import command_line, report
from harness.parts import add_part, merge_rows, part_of
from harness.process import prepare_process, refuse, say
from harness.side_by_side import gpu_alone
from harness.table_cases import CASES, PEERS, TableCase, build, input_sets, oracle
from harness.timers import choose_timer, close
from harness.timing import Contender, alternate, skipped, speed_ratio, spread
from rich.console import Console
from rich.table import Table

MODES = ("fwd", "bwd")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.08, budget=540)
    labels = [case.label for case in CASES]
    parser.add_argument("--cases", default="", help=f"list of labels, separated by ';': {'; '.join(labels)}")
    parser.add_argument("--mode", default=",".join(MODES), help=f"comma list of {', '.join(MODES)}")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"comma list of {', '.join(PEERS)}; '' for none")
    parser.add_argument("--summary", type=pathlib.Path, help="a file of results")
    add_part(parser)
    args = parser.parse_args(argv)
    try:
        args.mode = command_line.names("mode", args.mode, MODES)
        args.peers = command_line.names("peers", args.peers, PEERS, optional=True)
        wanted = [label.strip() for label in args.cases.split(";") if label.strip()] or labels
        if unknown := [label for label in wanted if label not in labels]:
            raise ValueError(f"cases: got {unknown}, want labels of {labels}")
        args.cases = [case for case in CASES if case.label in wanted]
    except ValueError as error:
        parser.error(str(error))
    return args


def measure(case: TableCase, args: argparse.Namespace, timer: Any, deadline: float) -> Iterator[dict[str, Any]]:
    """The rows of a case, one for each mode, each when it is done."""
    sets = input_sets(case)
    wanted = oracle(case, sets[0])
    for mode in args.mode:
        late = time.monotonic() > deadline
        names = ("ours", *args.peers)
        contenders = [skipped(name, "") if late else build(name, case, mode, sets, wanted) for name in names]
        alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds, deadline=deadline)
        yield row_of(case, mode, contenders)


def row_of(case: TableCase, mode: str, contenders: Sequence[Contender]) -> dict[str, Any]:
    """The row of a case and a mode, which is also printed."""
    row: dict[str, Any] = dataclasses.asdict(case) | {"name": f"{case.label} {mode}", "mode": mode}
    row["contenders"] = {contender.name: contender.findings for contender in contenders}
    times = {contender.name: contender.times for contender in contenders if contender.times}
    for name, readings in times.items():
        row["contenders"][name]["tflops"] = case.flops(mode) / spread(readings)["median"] / 1e9
    peers = {name: spread(readings)["median"] for name, readings in times.items() if name != "ours"}
    if "ours" in times and peers:
        row["best_peer"] = min(peers, key=lambda name: peers[name])
        row["ratio"] = speed_ratio(times["ours"], times[row["best_peer"]])
    figures = [f"{name} {row['contenders'][name]['tflops']:.0f}" for name in times]
    reasons = [f"{c.name}: {c.status}: {c.reason}" for c in contenders if c.status not in ("ok", "unavailable")]
    say(f"{row['name']}: {', '.join(figures)} TFLOP/s, ratio {row.get('ratio', math.nan):.3f} {'; '.join(reasons)}")
    return row


def is_timed(row: dict[str, Any]) -> bool:
    return any("median_ms" in found for found in row["contenders"].values())


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By mode: the geometric mean of the ratios, the smallest one, and their number."""
    found = {}
    for mode in MODES:
        ratios = [row["ratio"] for row in rows if row["mode"] == mode and row.get("ratio")]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            found[mode] = {"geometric_mean": mean, "worst": min(ratios), "rows": len(ratios)}
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """TFLOP/s of each contender, and the ratio, by case and mode."""
    found = Table("case", *(f"{name} {mode}" for mode in MODES for name in ("ours", "best peer", "ratio")))
    by_name = {row["name"]: row for row in rows}
    for case in CASES:
        cells = []
        for mode in MODES:
            row = by_name.get(f"{case.label} {mode}", {"contenders": {}})
            rate = lambda name, row=row: row["contenders"].get(name, {}).get("tflops")
            best = row.get("best_peer")
            cells += [f"{rate('ours'):.0f}" if rate("ours") else "", f"{best} {rate(best):.0f}" if best else ""]
            cells.append(f"{row['ratio']:.3f}" if row.get("ratio") else "")
        found.add_row(case.label, *cells)
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    Console(width=120).print(table(rows))
    for mode, figures in summary(rows).items():
        mean, worst = figures["geometric_mean"], figures["worst"]
        say(f"{mode}: geometric mean {mean:.3f}, worst {worst:.3f}, {figures['rows']} rows")


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.summary:
        show(json.loads(args.summary.read_text())["rows"])
        return 0
    deadline = time.monotonic() + args.budget
    prepare_process()
    if jax.default_backend() != "gpu":
        refuse("attention_table.py compares kernels of a GPU, and JAX has none: run it on a machine with a GPU")
    with gpu_alone():
        name, timer = choose_timer(args.timer, ["jax", "torch"] if args.peers else ["jax"])
    head = report.header(args.commit, bool(args.peers), timer=name)
    rows: list[dict[str, Any]] = []
    for case in part_of(args.cases, args.part):
        if time.monotonic() < deadline:
            for row in measure(case, args, timer, deadline):
                rows.append(row)
                merge_rows(args.output, head, [row for row in rows if is_timed(row)])
            jax.clear_caches()
        else:
            say(f"{case.label}: the budget is spent")
    close(timer)
    show(rows)
    statuses = [found["status"] for row in rows for found in row["contenders"].values()]
    is_whole = len(rows) == len(args.mode) * len(part_of(args.cases, args.part))
    return report.exit_status(statuses) if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
