"""Times training steps of a decoder: this library's Transformer, also with cuDNN attention, and Hugging Face's Llama.

    PYTHONPATH=. python benchmarks/train.py --output benchmarks/results/train-h200.json
    PYTHONPATH=. python benchmarks/train.py --contenders products --meshes data=2 sequence=2

A step is forward, backward and AdamW on random tokens, with the state donated. Its time is the wall clock over queued
steps, closed by block_until_ready; "first" is the first step, which traces and compiles. Each contender has its own
process. MFU counts 6 FLOPs for each token and weight of a matmul, and 12 for each feature of a head and each (query,
key) pair that the causal mask keeps. Rematerialised work does not count.

Contenders: a remat policy of TransformerConfig ("none", "all", "attention", "products"), with the linear cross-entropy
in parts. Its prefixes: "scan-" for the blocks as a loop; "xla-" for the MLP's matmuls by XLA; "plain-" for the logits
of all tokens at once; "tokens-" for the losses of single tokens, with four matmuls of the head instead of three; "fp8-"
for 8-bit matmuls in the blocks, then "row-" or "block-" for the scaling, or "delayed-" for scales from histories;
"cudnn-" for cuDNN attention; for sharded sequences "all_to_all-" and "ring-" for the strategy, and "nccl-" for sends
without compiler_options; "triton-" to allow XLA Triton matmuls as well as cuBLAS. PyTorch's contenders are "llama" and
"llama-remat", with SDPA. Other matmuls are in bfloat16; parameters and moments are in the dtype of --param-dtype, also
for the Llama.

With --curve STEPS each contender trains that many steps on the bytes of Python's standard library. Its row has the loss
of each step instead of times; `loss` is the mean of the last 50 steps, `held_out_loss` is on text that was not seen.
All contenders have the same batches, initial parameters and schedule. With --seeds each trains once with each seed of
the parameters and batches; a ratio compares the losses of one seed.

    PYTHONPATH=. python benchmarks/train.py --curve 2000 --contenders products,fp8-products,fp8-delayed-products \\
        --layers 8 --width 512 --heads 8 --mlp 1408 --vocabulary 256 --batch 16 --seq-len 1024 --limit 600 --budget 590

The exit status is 1 if a contender failed or was skipped because the budget was spent.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from harness import command_line, report
from harness.process import say
from harness.train_cases import LLAMA, TrainCase, measure
from harness.workers import answer, run_cases
from rich.console import Console
from rich.table import Table

CONTENDERS = "products,scan-products,xla-products,attention,all,none,plain-products,cudnn-products,llama,llama-remat"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.parser(__doc__)
    parser.add_argument("--contenders", default=CONTENDERS, help="comma list; '' for only the meshes")
    text = "further meshes, such as data=2, for the first contender, or for products; or CONTENDER:data=2"
    parser.add_argument("--meshes", nargs="*", default=[], help=text)
    text = "JSON files of earlier runs on the same machine, whose rows come first"
    parser.add_argument("--after", nargs="*", type=pathlib.Path, default=[], help=text)
    for name, default in (("batch", 2), ("seq-len", 8192), ("layers", 18), ("width", 2048), ("heads", 16)):
        parser.add_argument(f"--{name}", type=command_line.positive(int), default=default)
    parser.add_argument("--mlp", type=command_line.positive(int), default=5632)
    parser.add_argument("--vocabulary", type=command_line.positive(int), default=32000)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the matmuls")
    parser.add_argument("--param-dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--steps", type=command_line.positive(int), default=8, help="steps of one turn")
    parser.add_argument("--rounds", type=command_line.positive(int), default=3, help="turns")
    parser.add_argument("--limit", type=command_line.positive(float), default=60, help="seconds for one contender")
    text = "seconds after which no more work begins"
    parser.add_argument("--budget", type=command_line.positive(float), default=400, help=text)
    text = "steps of training on real text, whose losses are the result, instead of times"
    parser.add_argument("--curve", type=command_line.positive(int), default=None, help=text)
    text = "comma list of the seeds of --curve"
    parser.add_argument("--seeds", default="0", help=text)
    text = "time the kernels of the first GPU in an extra turn, by CUPTI: profile_ms of the rows"
    parser.add_argument("--profile", action="store_true", help=text)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        cases(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def cases(args: argparse.Namespace) -> list[TrainCase]:
    """Raises ValueError for an unknown contender or mesh, and for wrong seeds."""
    if args.seeds != "0" and not args.curve:
        raise ValueError(f"seeds: got {args.seeds!r} without --curve, want --curve, which alone has seeds")
    try:
        seeds = command_line.numbers(args.seeds, least=0)
    except ValueError as error:
        raise ValueError(f"seeds: {error}") from None
    names = [name.strip() for name in args.contenders.split(",")] if args.contenders else []

    def case(name: str, mesh: str, seed: int) -> TrainCase:
        return TrainCase(
            name=name,
            mesh=mesh,
            batch=args.batch,
            seq_len=args.seq_len,
            layers=args.layers,
            width=args.width,
            heads=args.heads,
            mlp=args.mlp,
            vocabulary=args.vocabulary,
            dtype=args.dtype,
            param_dtype=args.param_dtype,
            steps=args.steps,
            rounds=args.rounds,
            has_profile=args.profile,
            curve=args.curve or 0,
            seed=seed,
        )

    of_meshes = [mesh.rpartition(":") for mesh in args.meshes]
    runs = [(name, "") for name in names]
    runs += [(name or [*names, "products"][0], mesh) for name, _, mesh in of_meshes]
    return [case(name, mesh, seed) for seed in seeds for name, mesh in runs]


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if args.worker:
        for line in sys.stdin:
            answer(measure(TrainCase(**json.loads(line))))
        return 0
    deadline = time.monotonic() + args.budget
    kept = {k: v for k, v in vars(args).items() if k not in ("output", "after")}
    earlier = [row for path in args.after if path.exists() for row in json.loads(path.read_text())["rows"]]
    results: dict[str, Any] = {"schema": report.SCHEMA, "arguments": kept, "rows": earlier}
    for case in cases(args):
        row: dict[str, Any] = {"contender": case.name, "mesh": case.mesh}
        if case.name in LLAMA and importlib.util.find_spec("transformers") is None:
            row |= {"status": "unavailable", "reason": "the Python module transformers is not installed"}
        else:
            # Else JAX in the Llama's process would preallocate the GPU memory that PyTorch needs.
            environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if case.name in LLAMA else {}
            command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--worker"]
            asked = [dataclasses.asdict(case)]
            answers = run_cases(command, asked, limit=args.limit / 2, deadline=deadline, environment=environment)
            ((_, found, reason),) = answers
            status = "skipped" if reason.startswith("the time budget") else "failed" if reason else "ok"
            row |= {"status": status, "reason": reason} | (found or {})
        results["rows"].append(row)
        say(f"{case.label}: {row['reason'] or findings(row)}")
        report.write_json(args.output, results)
    console = Console(width=160)
    console.print(curves(results["rows"]) if args.curve else table(results["rows"]))
    if args.output is not None:
        # Last, because it initialises the devices, whose memory the workers need.
        report.write_json(args.output, {"environment": report.environment(args.commit)} | results)
    return report.exit_status(row["status"] for row in results["rows"])


def findings(row: dict[str, Any]) -> str:
    if "losses" in row:
        return f"{row['steps']} steps in {row['seconds']:.0f} s, loss {row['loss']:.4f}"
    said = f"{row['median_ms']:.1f} ms a step, first {row['first_s']:.1f} s, loss {row['loss']:.3f}"
    if (profile := row["profile_ms"]) is None:
        return said
    parts = ", ".join(f"{name} {x:.1f}" for name, x in profile.items() if name != "kernels")
    kernels = [f"\n{x['ms']:10.2f} {x['launches']:6.0f}  {x['name']}" for x in profile["kernels"][:30]]
    return f"{said}; ms on the first GPU: {parts}" + "".join(kernels)


def curves(rows: Sequence[dict[str, Any]]) -> Table:
    """The losses at ten steps, the last losses, and their ratio to the first contender's with the same seed."""
    made = Table(title="nats per byte")
    steps = max((row["steps"] for row in rows if "losses" in row), default=1)
    marks = sorted({max(1, round(steps * i / 10)) for i in range(1, 11)})
    for column in ("contender", "seed", *(f"step {mark}" for mark in marks), "last 50", "held out", "ratio"):
        made.add_column(column, justify="left" if column == "contender" else "right")
    first: dict[int, float] = {}
    for row in rows:
        if "losses" not in row:
            made.add_row(row["contender"], row["status"])
            continue
        values = (f"{row['losses'][mark - 1]:.3f}" for mark in marks)
        held = "" if row["held_out_loss"] is None else f"{row['held_out_loss']:.4f}"
        ratio = row["loss"] / first.setdefault(row["seed"], row["loss"])
        made.add_row(row["contender"], str(row["seed"]), *values, f"{row['loss']:.4f}", held, f"{ratio:.4f}")
    return made


def table(rows: Sequence[dict[str, Any]]) -> Table:
    made = Table(title="training steps")
    for column in ("contender", "mesh", "ms a step", "MFU", "tokens/s", "share", "first s", "peak GB", "loss"):
        made.add_column(column, justify="left" if column in ("contender", "mesh") else "right")
    alone = {row["contender"]: row for row in rows if not row["mesh"] and "median_ms" in row}
    for row in rows:
        if "median_ms" not in row:
            made.add_row(row["contender"], row["mesh"], row["status"])
            continue
        rate, one = row["tokens_per_s"], alone.get(row["contender"])
        share = f"{rate / one['tokens_per_s'] / row['devices']:.1%}" if row["mesh"] and one else ""
        mfu, peak = (row[name] for name in ("mfu", "peak_gb"))
        made.add_row(
            row["contender"],
            row["mesh"],
            f"{row['median_ms']:.1f}",
            "" if mfu is None else f"{mfu:.3f}",
            f"{rate:,.0f}",
            share,
            f"{row['first_s']:.1f}",
            "" if peak is None else f"{peak:.1f}",
            f"{row['loss']:.3f}",
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
