"""Checks random calls of all ops, in JAX and through the bridge, against their definitions in float64.

    python tests/tools/stress.py --examples 2000 --output stress.json
    python tests/tools/stress.py --minutes 60 --output stress-gpu.json     # on a GPU, by each implementation
    python tests/tools/stress.py --kinds norms --routes bridge --seed 5 --shrink

hypothesis draws the calls: `make test-stress`. Without a GPU the calls are small. The JSON has the number of calls that
agreed, by kind, route (jax or bridge) and implementation, and each failure with the call's options. A process that is
still in a call --grace seconds after its minutes is killed and listed as unfinished; the calls of its whole rounds
count. Exit status 1 if a call failed or a process was killed. --shrink looks for the simplest call that fails, which
takes minutes.
"""

import argparse
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
# The calls of a kind and a route in a round; all kinds take turns.
ROUND = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=2000, help="calls in all")
    parser.add_argument("--minutes", type=float, help="run this long instead of a number of calls")
    parser.add_argument("--grace", type=float, default=120, help="seconds after --minutes until a worker is killed")
    parser.add_argument("--kinds", default="", help="kinds of calls, by commas; all without")
    parser.add_argument("--routes", default="jax,bridge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the calls")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--shrink", action="store_true")
    text = "the first of the turns that a process takes, and the step to its next one"
    parser.add_argument("--turns", type=int, nargs=2, default=(0, 1), metavar=("FIRST", "STEP"), help=text)
    args = parser.parse_args(argv)
    begin = time.monotonic()
    args.end = None if args.minutes is None else begin + 60 * args.minutes
    found = share(args) if args.workers > 1 else run(args)
    found = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **found}
    found |= {"minutes": round((time.monotonic() - begin) / 60, 1), "workers": args.workers}
    text = json.dumps(found, indent=1)
    if args.output is not None:
        args.output.write_text(text + "\n")
    print(text)
    return int(bool(found["failures"] or found.get("unfinished")))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The summary of this process's calls."""
    _set_environment()
    import jax

    from tests.support.random.calls import KINDS
    from tests.support.random.examples import Counts, run_kind

    kinds, routes = args.kinds.split(",") if args.kinds else list(KINDS), args.routes.split(",")
    unknown = [name for name in kinds if name not in KINDS]
    if unknown:
        sys.exit(f"--kinds: got {', '.join(unknown)}, want some of {', '.join(KINDS)}")
    counts, turn = Counts(), 0
    tasks = [(kind, route) for kind in kinds for route in routes]
    first, step = args.turns

    def is_over() -> bool:
        done = counts.passed.total() + len(counts.failures)
        return time.monotonic() > args.end if args.end is not None else done >= args.examples

    def summary() -> dict[str, Any]:
        return {"device": jax.devices()[0].device_kind, "seed": args.seed, **counts.as_json()}

    while not is_over():
        kind, route = tasks[(first + step * turn) % len(tasks)]
        seed = args.seed * 1_000_003 + turn
        if args.output is not None:
            running = {"kind": kind, "route": route, "seed": seed}
            args.output.write_text(json.dumps(summary() | {"running": running}))
        run_kind(kind, route, counts, examples=ROUND, seed=seed, is_over=is_over, shrink=args.shrink)
        turn += 1
        print(f"{counts.passed.total()} calls, {len(counts.failures)} failures", file=sys.stderr, flush=True)
    return summary()


def share(args: argparse.Namespace) -> dict[str, Any]:
    """The summary of several processes, whose seeds differ. They share the turns, so that no kind waits for its own."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder) / f"{i}.json" for i in range(args.workers)]
        options = ["--routes", args.routes, "--examples", str(-(-args.examples // args.workers))]
        options += [] if args.minutes is None else ["--minutes", str(args.minutes)]
        options += ["--kinds", args.kinds] if args.kinds else []
        options += ["--shrink"] if args.shrink else []
        shares = [(str(i), str(args.workers)) for i in range(args.workers)]
        seeds = [str(args.seed * args.workers + i) for i in range(args.workers)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *options, "--seed", seed, "--output", str(path), "--turns", *turns],
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # so that a kill reaches its children
            )
            for seed, path, turns in zip(seeds, outputs, shares, strict=True)
        ]
        try:
            codes = [_ended(process, args) for process in processes]
        finally:
            for process in processes:
                _kill(process)
        if any(code not in (0, 1, -signal.SIGKILL) for code in codes):
            sys.exit(f"a process ended with the status {codes}")
        found = [json.loads(path.read_text()) for path in outputs if path.exists()]
        if not found:
            sys.exit("all processes were killed before their first call")
    return merged(found) | {"seed": args.seed}


def _ended(process: subprocess.Popen[bytes], args: argparse.Namespace) -> int:
    """The status of a process, which is killed `grace` seconds after the end."""
    try:
        return process.wait(None if args.end is None else max(args.end + args.grace - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        _kill(process)
        return process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its children, if it has not ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum of the summaries of several processes."""
    passed: dict[str, Any] = {}
    for one in found:
        for kind, routes in one["passed"].items():
            for route, names in routes.items():
                of_route = passed.setdefault(kind, {}).setdefault(route, {})
                for name, count in names.items():
                    of_route[name] = of_route.get(name, 0) + count
    return {
        "device": found[0]["device"],
        "examples": sum(one["examples"] for one in found),
        "failures": [failure for one in found for failure in one["failures"]],
        "unfinished": [one["running"] for one in found if "running" in one],
        "passed": passed,
    }


def _set_environment() -> None:
    """The settings of the tests, before JAX starts."""
    sys.path[:0] = [str(ROOT)]
    if shutil.which("nvidia-smi") is None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from tests.support.processes.forked import QUICK_COMPILES

        os.environ.setdefault("XLA_FLAGS", QUICK_COMPILES)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["JAX_KERNELS_CACHE"] = str(pathlib.Path(tempfile.gettempdir()) / f"jax_kernels_stress_{os.getpid()}")


if __name__ == "__main__":
    sys.exit(main())
