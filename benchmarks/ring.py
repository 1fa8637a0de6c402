"""Times ring_attention over the GPUs of one machine: the op, only its kernels, only its permutes, and PyTorch's peer.

    PYTHONPATH=. python benchmarks/ring.py --devices 1,2 --torch --output benchmarks/results/ring-h200.json

A time is the wall clock over many queued calls, closed by block_until_ready, on [1, tokens, heads, head_dim] in bf16.
TFLOP/s are per GPU: 4 * tokens^2 * heads * head_dim for the forward and 2.5 times as many for the backward, half for a
causal mask, divided by the time and the number of GPUs. Causal cases have the zigzag layout, or the layout of --layout.

"compute" is the op with each permute replaced by a local copy, "communication" is only the permutes; they take turns
with the op. Weak scaling compares TFLOP/s per GPU with one GPU that has the same tokens per GPU, strong scaling with
one GPU that has all tokens. --torch adds torch.distributed.tensor.experimental.context_parallel with cuDNN and both
rotate methods, one process for each GPU, after the JAX process has ended.

"expected" in the results is the expected efficiency of 8, 64 and 512 GPUs, see harness/ring_model.py. --long adds one
call with the given number of tokens, forward and backward, and its memory.

The exit status is 1 if a contender failed, was wrong, or was skipped because the budget was spent.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from harness import command_line, report, ring_model
from harness.process import say
from harness.ring_cases import MODES, PARTS, RingCase, measure
from harness.workers import answer, run_cases
from rich.console import Console
from rich.table import Table

from jax_kernels.ops.ring.layouts import DOCUMENTS, LAYOUTS
from jax_kernels.ops.ring.ring_attention import STRATEGIES

CONTENDERS = (*PARTS, "torch alltoall", "torch allgather")
# Compilation and turns of a case take less on an H200.
LIMIT = 45.0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.parser(__doc__)
    parser.add_argument("--devices", default="1,2,4", help="comma list of numbers of GPUs; missing GPUs are reported")
    parser.add_argument("--tokens", default="16384,65536,131072", help="comma list of global tokens, causal")
    text = "comma list of each GPU's tokens, forward, not causal; '' for none"
    parser.add_argument("--local-tokens", default="4096,8192,16384,32768", help=text)
    parser.add_argument("--heads", type=command_line.positive(int), default=16)
    parser.add_argument("--head-dim", type=command_line.positive(int), default=128)
    parser.add_argument("--mode", default=",".join(MODES), help=f"comma list of {', '.join(MODES)}")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma list of {', '.join(PARTS)}")
    parser.add_argument("--implementation", help="of ring_attention; default: its own choice")
    parser.add_argument("--rounds", type=command_line.positive(int), default=5)
    parser.add_argument("--seconds", type=command_line.positive(float), default=0.1, help="queued work of one turn")
    text = "the most tokens whose results are compared with flash_attention on one GPU"
    parser.add_argument("--check", type=int, default=16384, help=text)
    parser.add_argument("--strategy", default="ring", choices=STRATEGIES, help="of ring_attention")
    text = "of ring_attention: steps that sends go ahead; default: its own choice"
    parser.add_argument("--sends-ahead", type=command_line.positive(int), help=text)
    text = "the most GPUs that exchange heads by permutes; more use all-to-alls; default: from the block specs"
    parser.add_argument("--permutes-up-to", type=command_line.positive(int), help=text)
    parser.add_argument("--nccl", action="store_true", help="sends by NCCL's kernels, without compiler_options")
    text = "tokens before a query that the query sees in the causal cases; 0 for all"
    parser.add_argument("--window", type=int, default=0, help=text)
    parser.add_argument("--layout", default="zigzag", choices=(*LAYOUTS, DOCUMENTS), help="of the causal cases")
    text = "comma list of the shares of packed documents in the tokens of the causal cases, such as 0.5,0.3,0.2"
    parser.add_argument("--documents", default="", help=text)
    text = "the causal cases have their limits, and 128 global tokens, as a mask"
    parser.add_argument("--masked", action="store_true", help=text)
    text = "time the kernels of the first GPU in extra calls, by CUPTI: profile_ms of the rows"
    parser.add_argument("--profile", action="store_true", help=text)
    text = "comma list of global tokens for which only the first call is timed, causal; '' for none"
    parser.add_argument("--long", default="", help=text)
    text = "processes that compile cases at once; they take turns on the GPUs"
    parser.add_argument("--processes", type=command_line.positive(int), default=1, help=text)
    parser.add_argument("--torch", action="store_true", help="also time PyTorch's context_parallel")
    parser.add_argument("--limit", type=command_line.positive(float), default=LIMIT, help="seconds for one case")
    text = "seconds after which no more work begins"
    parser.add_argument("--budget", type=command_line.positive(float), default=230, help=text)
    parser.add_argument("--worker", choices=("jax", "torch"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        if args.window < 0:
            raise ValueError(f"window: got {args.window}, want 0 or more")
        for name in ("devices", "tokens", "local_tokens", "long"):
            text = getattr(args, name)
            setattr(args, name, command_line.numbers(text) if text or name in ("devices", "tokens") else [])
        args.documents = tuple(float(share) for share in args.documents.split(",") if share)
        if min(args.documents, default=1) <= 0:
            raise ValueError(f"documents: got {args.documents}, want numbers above 0")
        if args.documents and (args.window or args.masked or args.torch):
            raise ValueError("documents: got them with a window, a mask or torch, want none of these")
        args.mode = command_line.names("mode", args.mode, MODES)
        args.parts = command_line.names("parts", args.parts, PARTS)
        for tokens in args.tokens:
            for devices in args.devices:
                if tokens % (2 * devices):
                    raise ValueError(f"tokens: got {tokens} for {devices} devices, want a multiple of {2 * devices}")
    except ValueError as error:
        parser.error(str(error))
    return args


def cases(args: argparse.Namespace) -> list[RingCase]:
    """The cases, the largest mesh first. One device gets each number of tokens that scaling needs."""

    def case(devices: int, tokens: int, causal: bool) -> RingCase:
        return RingCase(
            devices=devices,
            tokens=tokens,
            heads=args.heads,
            head_dim=args.head_dim,
            causal=causal,
            modes=tuple(args.mode) if causal else ("fwd",),
            parts=tuple(args.parts),
            implementation=args.implementation,
            strategy=args.strategy,
            window=args.window if causal else 0,
            layout=args.layout,
            documents=args.documents,
            is_masked=args.masked,
            has_profile=args.profile,
            sends_ahead=args.sends_ahead,
            has_copies=not args.nccl,
            permutes_up_to=args.permutes_up_to,
            rounds=args.rounds,
            seconds=args.seconds,
            check=devices > 1 and tokens <= args.check,
        )

    found = []
    for tokens in args.long:
        of_all = case(max(args.devices), tokens, True)
        found.append(dataclasses.replace(of_all, modes=("fwdbwd",), parts=("ring",), check=False, once=True))
    for devices in sorted(args.devices, reverse=True):
        lengths = set(args.tokens)
        if devices == 1:
            lengths |= {tokens // other for tokens in args.tokens for other in args.devices}
        found += [case(devices, tokens, True) for tokens in sorted(lengths)]
        found += [case(devices, devices * tokens, False) for tokens in args.local_tokens]
    return found


def read_cases() -> Iterator[RingCase]:
    for line in sys.stdin:
        fields = json.loads(line)
        yield RingCase(**fields | {name: tuple(fields[name]) for name in ("modes", "parts", "documents")})


def work(worker: str) -> int:
    if worker == "jax":
        for case in read_cases():
            answer(measure(case))
    else:
        from harness import ring_peer

        ring_peer.work(read_cases())
    return 0


def failed(case: RingCase, contenders: Sequence[str], reason: str) -> list[dict[str, Any]]:
    status = "skipped" if reason.startswith("the time budget") else "failed"
    fields = {"devices": case.devices, "tokens": case.tokens, "local_tokens": case.tokens // case.devices}
    fields |= {"causal": case.causal, "status": status, "reason": reason}
    return [fields | {"mode": mode, "contender": name} for mode in case.modes for name in contenders]


class Run:
    """One run of the benchmark. Each case adds its rows to the results, which are then written."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.deadline = time.monotonic() + args.budget
        # Paths are left out: they belong to the machine.
        kept = {k: v for k, v in vars(args).items() if not isinstance(v, pathlib.Path)}
        self.results: dict[str, Any] = {"schema": report.SCHEMA, "arguments": kept, "rows": [], "scaling": []}

    def everything(self) -> None:
        script = str(pathlib.Path(__file__).resolve())
        todo = cases(self.args)
        self.ask_in_turns([sys.executable, script, "--worker", "jax"], todo)
        there = {row["devices"] for row in self.results["rows"] if row["status"] == "ok"}
        if self.args.torch:
            for devices in sorted(there - {1}, reverse=True):
                launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command = [*launcher, f"--nproc-per-node={devices}", script, "--worker", "torch"]
                causal = [case for case in todo if case.devices == devices and case.causal and not case.once]
                self.ask(command, causal, CONTENDERS[len(PARTS) :])
        self.results["scaling"] = scaling(self.results["rows"])
        self.results["expected"] = ring_model.expected(self.results["rows"])
        self.save()

    def ask_in_turns(self, command: Sequence[str], todo: Sequence[RingCase]) -> None:
        """Runs the cases in several processes, which compile at once and take turns on the GPUs."""
        shares = [todo[i :: self.args.processes] for i in range(self.args.processes)]
        with tempfile.NamedTemporaryFile() as lock, concurrent.futures.ThreadPoolExecutor(len(shares)) as pool:
            os.environ.setdefault("BENCHMARK_LOCK", lock.name)
            list(pool.map(lambda share: self.ask(command, share, PARTS), shares))

    def ask(self, command: Sequence[str], todo: Sequence[RingCase], contenders: Sequence[str]) -> None:
        asked = [dataclasses.asdict(case) for case in todo]
        # Memory is allocated as needed: PyTorch gets the same GPUs later.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        answers = run_cases(
            command, asked, limit=self.args.limit, deadline=self.deadline, environment=environment
        )  # fmt: skip
        for case, (_, rows, reason) in zip(todo, answers, strict=True):
            text = contenders[:1] if case.devices == 1 else [x for x in contenders if x not in PARTS or x in case.parts]
            self.results["rows"] += rows or failed(case, text, reason)
            say(f"{case.label}: {reason or 'done'}")
            self.save()

    def save(self) -> None:
        report.write_json(self.args.output, self.results)


def scaling(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The TFLOP/s of each GPU over one GPU's: weak with equal tokens per GPU, strong with equal tokens in all."""
    rates = {
        (row["devices"], row["tokens"], row["causal"], row["mode"]): row["tflops"]
        for row in rows
        if row["contender"] == "ring" and "tflops" in row
    }
    found = []
    for (devices, tokens, causal, mode), rate in rates.items():
        alone = {"weak": tokens // devices, "strong": tokens}
        kept = {kind: rates.get((1, length, causal, mode)) for kind, length in alone.items()}
        if devices > 1:
            shares = {kind: None if one is None else rate / one for kind, one in kept.items()}
            found.append({"devices": devices, "tokens": tokens, "causal": causal, "mode": mode} | shares)
    return found


def table(results: dict[str, Any]) -> Table:
    made = Table(title="ring_attention: ms, and TFLOP/s per GPU")
    columns = ("GPUs", "tokens", "each", "mask", "mode", *CONTENDERS, "over compute", "weak", "strong", "error")
    for column in columns:
        made.add_column(column, justify="right")
    scales = {tuple(list(row.values())[:4]): row for row in results["scaling"]}
    groups: dict[Any, dict[str, Any]] = {}
    for row in results["rows"]:
        if row["status"] != "unavailable":
            key = row["devices"], row["tokens"], row["causal"], row["mode"]
            groups.setdefault(key, {})[row["contender"]] = row
    share = lambda x: "" if x is None else f"{x:.0%}"
    for (devices, tokens, causal, mode), found in groups.items():
        times = {name: row["median_ms"] for name, row in found.items() if "median_ms" in row}
        over = f"{times['ring'] / times['compute']:.3f}" if {"ring", "compute"} <= times.keys() else ""
        scale = scales.get((devices, tokens, causal, mode), {})
        error = found.get("ring", {}).get("error")
        made.add_row(
            *(str(devices), str(tokens), str(tokens // devices), "causal" if causal else "full", mode),
            *(_cell(found.get(name)) for name in CONTENDERS),
            *(over, share(scale.get("weak")), share(scale.get("strong")), "" if error is None else f"{error:.1e}"),
        )
    return made


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "median_ms" not in row:
        return row["status"]
    if row["contender"] == "communication":
        return f"{row['median_ms']:.3f}"
    rate = f" ({report.figure(row['tflops'])})" if "tflops" in row else ""
    return f"{row['median_ms']:.3f}{rate}"


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.worker:
        return work(args.worker)
    if args.torch and importlib.util.find_spec("torch") is None:
        say("torch: unavailable: the Python module torch is not installed")
        args.torch = False
    run = Run(args)
    run.everything()
    console = Console(width=220)
    console.print(table(run.results))
    for row in run.results["expected"]:
        shares = ", ".join(f"{n} GPUs {row[str(n)]:.0%}" for n in ring_model.DEVICES)
        where = (
            f"{row['local_tokens']} tokens each, {row['direction']}, {row['link']} ({row['gigabytes_per_s']:.0f} GB/s)"
        )
        console.print(f"expected: {where}: {shares}")
    for row in run.results["rows"]:
        if (profile := row.get("profile_ms")) is not None:
            text = ", ".join(f"{name} {x:.3f}" for name, x in profile.items() if name != "kernels")
            where = f"{row['devices']} x {row['local_tokens']} tokens, {row['mode']}, {row['contender']}"
            kernels = [f"\n{x['ms']:10.3f} {x['launches']:6.1f}  {x['name']}" for x in profile["kernels"][:12]]
            console.print(f"profile: {where}: {text}{''.join(kernels)}", markup=False)
    reasons = dict.fromkeys(
        f"{x['contender']}: {x['status']}: {x['reason']}" for x in run.results["rows"] if x["reason"]
    )
    for line in reasons:
        console.print(line, markup=False)
    if args.output is not None:
        # Last, because it initialises the devices, whose memory the workers need.
        report.write_json(args.output, {"environment": report.environment(args.commit, args.torch)} | run.results)
    return report.exit_status(row["status"] for row in run.results["rows"])


if __name__ == "__main__":
    sys.exit(main())
