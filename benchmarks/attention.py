"""Attention of this library against its peers, alternating in one run, by device time.

    PYTHONPATH=. python benchmarks/attention.py --shapes "2,8192,16,128;2,8192,32,64" --causal both --mode fwd,bwd

Every contender of a case is first checked against float32. Then all take turns of equal length, round after round, over
inputs that overflow the L2 cache. A contender that cannot run is listed with the reason. A shape may have a separate
head_dim for the values:

    PYTHONPATH=. python benchmarks/attention.py --shapes "2,8192,16,96;2,8192,8,192/128" --peers jax-cudnn,torch-cudnn

The exit status is 1 if a contender failed, was wrong, or was skipped because the budget was spent.
"""

import argparse
import dataclasses
import faulthandler
import os
import pathlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
from harness import command_line, report
from harness.cases import DTYPES, MODES, Case, Oracle, input_sets, parse_shapes
from harness.contenders import OURS, PEERS, build, framework, unavailable
from harness.process import prepare_process, say
from harness.timers import choose_timer, close, make_timer, matmul
from harness.timing import (
    METHODS,
    Contender,
    Timer,
    alternate,
    first_line,
    host_timer,
    skipped,
    spread,
)

SHAPES = "2,8192,16,128;2,8192,32,64"
SHAPE_HELP = "batch,seq,heads,head_dim[/value_head_dim][,kv_heads], separated by ';'"
CEILING, CEILING_WITHOUT_GPU = 8192, 256


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.timing_parser(__doc__, rounds=7, seconds=0.2)
    parser.add_argument("--shapes", default=SHAPES, help=SHAPE_HELP)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--causal", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--mode", default="fwd,bwd", help=f"comma list of {', '.join(MODES)}")
    parser.add_argument("--implementations", default="mosaic_gpu,triton", help=f"ours: comma list of {', '.join(OURS)}")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"comma list of {', '.join(PEERS)}; '' for none")
    told = "seconds after which the run ends, also with work left"
    parser.add_argument("--budget", type=command_line.positive(float), default=540, help=told)
    told = f"size of the square matmul behind the ceilings; default: {CEILING}, or {CEILING_WITHOUT_GPU} without a GPU"
    parser.add_argument("--ceiling", type=command_line.positive(int), help=told)
    parser.add_argument("--plot", type=pathlib.Path, help="PNG file")
    parser.add_argument("--self-check", action="store_true", help="one matmul and one attention under every timer")
    args = parser.parse_args(argv)
    try:
        args.shapes = parse_shapes(args.shapes, values=True)
        args.mode = command_line.names("mode", args.mode, MODES)
        args.implementations = command_line.names("implementations", args.implementations, OURS, optional=True)
        args.peers = command_line.names("peers", args.peers, PEERS, optional=True)
        cases(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def cases(args: argparse.Namespace) -> list[Case]:
    causal = {"no": [False], "yes": [True], "both": [False, True]}[args.causal]
    return [
        Case.of(shape, dtype=args.dtype, causal=is_causal, mode=mode)
        for shape in args.shapes
        for is_causal in causal
        for mode in args.mode
    ]


class Run:
    """One run of the benchmark. Each case adds its rows to the results, which are then written."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.start = time.monotonic()
        # A turn that begins just before the deadline ends within the budget.
        self.deadline = self.start + 0.95 * args.budget
        names = args.implementations + args.peers
        usable = any(framework(name) == "torch" and unavailable(name) is None for name in names)
        self.frameworks = ["jax", "torch"] if usable else ["jax"]
        self.timer: Timer = host_timer
        self.told: set[tuple[str, str]] = set()
        self.results: dict[str, Any] = {
            "schema": report.SCHEMA,
            "environment": report.environment(args.commit, usable),
            # Paths are left out: they belong to the machine.
            "arguments": {k: v for k, v in vars(args).items() if not isinstance(v, pathlib.Path)}
            | {"shapes": [shape.numbers for shape in args.shapes]},
            "timer": "",
            "method": {},
            "ceilings": {},
            "rows": [],
            "complete": False,
        }

    def everything(self) -> None:
        name, self.timer = choose_timer(self.args.timer, self.frameworks)
        self.results |= {"timer": name, "method": {which: METHODS[name][which] for which in self.frameworks}}
        self.ceilings()
        shape: Any = None
        sets: list = []
        oracles: dict[bool, Oracle] = {}
        for case in cases(self.args):
            say(f"{case.label} ({time.monotonic() - self.start:.0f} s)")
            if shape != case.shape and time.monotonic() < self.deadline:
                shape, sets, oracles = case.shape, input_sets(case), {}
            self.case(case, sets, oracles)
            self.save()
        self.results["complete"] = all(row["status"] != "skipped" for row in self.results["rows"])
        self.save()

    def ceilings(self) -> None:
        contenders = [matmul(which, self.args.ceiling) for which in self.frameworks]
        self._alternate(contenders)
        for contender in contenders:
            median = spread(contender.times)["median"] if contender.times else None
            self.results["ceilings"][contender.framework] = {
                "what": contender.plan,
                "times_ms": contender.times,
                "tflops": median and 2 * self.args.ceiling**3 / median / 1e9,
                "reason": contender.reason,
            }

    def case(self, case: Case, sets: list, oracles: dict[bool, Oracle]) -> None:
        contenders = []
        for name in self.args.implementations + self.args.peers:
            if time.monotonic() > self.deadline:
                contender = skipped(name, framework(name))
            else:
                if case.causal not in oracles:
                    oracles[case.causal] = Oracle(case, sets[0])
                contender = build(name, case, sets, oracles[case.causal].of_mode(case.mode))
                self.announce(contender)
            contenders.append(contender)
        self._alternate(contenders)
        ceilings = {which: ceiling["tflops"] for which, ceiling in self.results["ceilings"].items()}
        self.results["rows"] += report.rows(case, contenders, ceilings, self.results["method"])

    def announce(self, contender: Contender) -> None:
        """Prints one line about a built contender. The same reason of the same contender is printed once."""
        if contender.status == "ok":
            say(f"  {contender.name}: error {contender.error:.2e}, {contender.plan}")
        elif (contender.name, contender.reason) not in self.told:
            self.told.add((contender.name, contender.reason))
            say(f"  {contender.name}: {contender.status}: {contender.reason}")

    def _alternate(self, contenders: Sequence[Contender]) -> None:
        rounds, seconds = self.args.rounds, self.args.seconds
        alternate(contenders, self.timer, rounds=rounds, seconds=seconds, deadline=self.deadline, say=say)

    def save(self) -> None:
        report.write_json(self.args.output, self.results)

    def stop(self) -> None:
        """Ends the process: the budget is spent and a contender has not returned."""
        say(f"the budget of {self.args.budget:.0f} s is spent and a contender has not returned: stopping")
        self.save()
        report.print_table(self.results)
        os._exit(2)


def self_check(args: argparse.Namespace) -> int:
    """Times one matmul and one attention of each framework by every timer. Returns how many readings failed."""
    case = cases(args)[0]
    say(f"{report.environment(args.commit)}")
    sets = input_sets(case)
    oracle = Oracle(case, sets[0])
    contenders = [matmul("jax", args.ceiling)]
    for name in (*args.implementations, "jax-cudnn", "torch-cudnn"):
        contender = build(name, case, sets, oracle)
        say(f"{name}: {contender.status} {contender.reason} {contender.plan}")
        if contender.status == "ok":
            contenders.append(contender)
    if unavailable("torch-cudnn") is None:
        contenders.insert(1, matmul("torch", args.ceiling))
    failures = 0
    # "profilers" comes last: the JAX profiler detaches CUPTI from the process when it is done.
    for name in [args.timer] if args.timer else ["host", "events", "cupti", "profilers"]:
        say(f"\ntimer {name}: {METHODS[name]}")
        try:
            timer = make_timer(name)
        except Exception as error:
            say(f"  does not start: {first_line(error)}")
            failures += 1
            continue
        for contender in contenders:
            trial = dataclasses.replace(contender, times=[], reading=None, note="")
            alternate([trial], timer, rounds=3, seconds=args.seconds)
            if trial.status != "ok":
                say(f"  {contender.name}: {trial.status}: {trial.reason}")
                failures += 1
                continue
            times = ", ".join(f"{ms:.4f}" for ms in trial.times)
            say(f"  {contender.name}: {times} ms a call ({trial.calls} calls a turn) {trial.note}")
            for kernel, ms in trial.reading.kernels.items() if trial.reading else ():
                say(f"      {ms:.4f} ms  {kernel[:110]}")
        close(timer)
    return failures


def benchmark(args: argparse.Namespace) -> int:
    run = Run(args)
    watchdog = threading.Timer(args.budget, run.stop)
    watchdog.daemon = True
    watchdog.start()
    try:
        run.everything()
    finally:
        watchdog.cancel()  # it would end a caller's process also after an error
    report.print_table(run.results)
    if args.plot is not None:
        report.plot(run.results, args.plot)
    return report.exit_status(row["status"] for row in run.results["rows"])


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    prepare_process()
    if args.ceiling is None:
        args.ceiling = CEILING if jax.default_backend() == "gpu" else CEILING_WITHOUT_GPU
    # The last resort, for a thread that waits for the device and holds the interpreter's lock.
    faulthandler.dump_traceback_later(args.budget + 15, exit=True, file=sys.__stderr__)
    try:
        return min(self_check(args), 1) if args.self_check else benchmark(args)
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
