"""Dilated attention side by side, in one alternating run, by device time: ours, gathers and scatters, and dense.

    PYTHONPATH=. python benchmarks/dilated.py --shapes 1,32768,16,128 --mode fwd,fwdbwd
    PYTHONPATH=. python benchmarks/dilated.py --segments 2048,8192,32768 --rates 1,4,16 --output results/dilated.json
    PYTHONPATH=. python benchmarks/dilated.py --heads groups --shapes 1,32768,16,128
    PYTHONPATH=. python benchmarks/dilated.py --order hilbert --contenders ours,plain

Contenders:

    ours          dilated_attention
    plain         ours without --order and --layout
    gather        the usual form, in one jit. For each branch it gathers the tokens of each head by index, runs this
                  library's kernel on them and scatters the result into zeros of the full size. The lses of the
                  branches weigh the sum.
    gather-cudnn  the same by cuDNN, for patterns whose branches are not merged (--heads groups, --layout partition):
                  cuDNN's backward takes no gradient of the lse
    torch-gather  the same in PyTorch, by flex_attention and autograd, compiled as a whole if this is faster
    dilated-attention-pytorch
                  the op of the package of that name, if it is installed, for --heads groups, with combine="mean". It
                  also divides each branch's outputs by their sums over the sequence, so its results are not checked.
    dense         this library's attention over the whole sequence
    copy          a copy of an array larger than the L2 cache

Before they are timed, "dense" is checked against float32, "plain" for NaNs, and the other forms against "gather".

A row of ours has an ideal if "dense" and "copy" were timed: the FLOPs of its branches at the rate of "dense", and
the bytes that have to move at the bandwidth of "copy". The forward moves query, key, value and out; a backward moves
them once more, and dout and the three gradients.

The exit status is 1 if a contender failed, was wrong, or was skipped because the budget was spent.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from harness import command_line, report
from harness.cases import (
    DTYPES,
    MODES,
    ROTATION_BYTES,
    Case,
    InputSet,
    Oracle,
    as_numpy,
    has_nan,
    input_sets,
    parse_shapes,
    relative_error,
)
from harness.contenders import framework, from_function, need, unavailable
from harness.gathers import Pattern, by_package, gathered, in_torch
from harness.process import prepare_process, say
from harness.side_by_side import gpu_alone
from harness.timers import choose_timer, close
from harness.timing import METHODS, Built, Contender, alternate, skipped, speed_ratio, spread

import jax_kernels
from jax_kernels import dilated_attention, flash_attention

CONTENDERS = ("ours", "plain", "gather", "gather-cudnn", "torch-gather", "dilated-attention-pytorch", "dense", "copy")
OURS = ("ours", "plain")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.2, budget=540)
    parser.add_argument("--shapes", default="1,32768,16,128", help="batch,seq,heads,head_dim[,kv_heads], split by ';'")
    parser.add_argument("--segments", default="2048,4096,8192,16384", help="segment_lengths")
    parser.add_argument("--rates", default="1,2,4,8", help="dilation_rates")
    parser.add_argument("--heads", choices=("all", "groups"), default="all", help="groups goes with combine='mean'")
    parser.add_argument("--layout", choices=("overlap", "partition"), default="overlap")
    parser.add_argument("--order", choices=("none", "hilbert"), default="none")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--full", action="store_true", help="attend without is_causal")
    parser.add_argument("--mode", default="fwd,fwdbwd", help=f"comma list of {', '.join(MODES)}")
    told = f"comma list of {', '.join(CONTENDERS)}; default: all, and plain only with --order or --layout"
    parser.add_argument("--contenders", help=told)
    parser.add_argument("--implementation", help="for ours: mosaic_gpu, triton or xla; default: the fastest")
    args = parser.parse_args(argv)
    try:
        args.shapes = parse_shapes(args.shapes)
        args.segments, args.rates = (tuple(command_line.numbers(text)) for text in (args.segments, args.rates))
        if len(args.segments) != len(args.rates):
            raise ValueError(f"segments, rates: got {args.segments} and {args.rates}, want equally many")
        if args.layout == "partition" and args.heads == "groups":
            raise ValueError("layout: got partition with heads groups, want heads all: each token is in one class")
        order = None if args.order == "none" else args.order
        args.pattern = Pattern(args.segments, args.rates, args.heads, args.layout, order)
        is_plain = args.pattern == Pattern(args.segments, args.rates, args.heads)
        every = ",".join(name for name in CONTENDERS if name != "plain" or not is_plain)
        args.mode = command_line.names("mode", args.mode, MODES)
        args.contenders = command_line.names("contenders", args.contenders or every, CONTENDERS)
        if is_plain and "plain" in args.contenders:
            raise ValueError("contenders: got plain, which is ours here, want plain only with --order or --layout")
        args.cases = [
            Case.of(shape, dtype=args.dtype, causal=not args.full, mode=mode)
            for shape in args.shapes
            for mode in args.mode
        ]
    except ValueError as error:
        parser.error(str(error))
    return args


def pattern_of(name: str, args: argparse.Namespace) -> Pattern:
    return Pattern(args.segments, args.rates, args.heads) if name == "plain" else args.pattern


def function_of(name: str, case: Case, args: argparse.Namespace) -> Callable[..., jax.Array]:
    common = {"is_causal": case.causal, "implementation": args.implementation}
    if name == "dense":
        return functools.partial(flash_attention, **common)
    if name in OURS:
        return functools.partial(dilated_attention, **common, **pattern_of(name, args).arguments)
    implementation = "cudnn" if name == "gather-cudnn" else args.implementation
    return functools.partial(gathered, **common | {"pattern": args.pattern, "implementation": implementation})


def plan_of(name: str, case: Case, args: argparse.Namespace, inputs: Any) -> str:
    if name.startswith("gather"):
        return "gather, attention and scatter for each branch"
    function = function_of(name, case, args)
    return str(jax_kernels.explain(function.func, *inputs.qkv, **function.keywords))  # type: ignore[attr-defined]


def built(name: str, case: Case, args: argparse.Namespace, sets: Sequence[InputSet]) -> Built:
    if framework(name) == "torch":
        need(name)
        return (in_torch if name == "torch-gather" else by_package)(args.pattern, case, sets)
    if name == "copy":
        x = jnp.zeros(copy_bytes() // 2, DTYPES[case.dtype])
        negate = jax.jit(lambda x: -x)
        return Built(lambda index: negate(x), f"-x of {x.nbytes} bytes")
    if name == "gather-cudnn":
        need("jax-cudnn")
    return from_function(function_of(name, case, args), case, sets, plan_of(name, case, args, sets[0]))


def build(case: Case, args: argparse.Namespace) -> list[Contender]:
    """The contenders of a case, compiled, and checked against "gather" if it runs."""
    sets = input_sets(case)
    contenders, right = [], None
    for name in sorted(args.contenders, key=lambda name: (name in OURS, name != "gather")):
        contender = Contender(name, framework(name))
        with contender.attempt():
            made = built(name, case, args, sets)
            outputs = contender.start(made.call, made.plan)
            if name not in ("copy", "dilated-attention-pytorch"):
                with gpu_alone():
                    right = check(contender, case, sets[0], outputs, right)
        say(f"  {name}: {contender.status} {contender.reason or contender.plan}")
        contenders.append(contender)
    return contenders


def check(contender: Contender, case: Case, inputs: InputSet, outputs: Any, right: Any) -> Any:
    """Judges the outputs of a first call. Returns the outputs of "gather", the reference for the other contenders.

    right: the outputs of "gather", or None before it has run.
    """
    if contender.framework == "torch":
        outputs = tuple(map(as_numpy, outputs))
    if has_nan(outputs):
        contender.give_up("wrong", "its results hold a NaN")
    elif contender.name == "dense":
        contender.judge(Oracle(case, inputs).error(outputs), "float32")
    elif contender.name == "gather":
        right = outputs
    elif contender.name != "plain" and right is not None:
        contender.judge(relative_error(outputs, right), "gather")
    return right


def copy_bytes() -> int:
    """The bytes of the array that "copy" reads, an even number: on a GPU, far more than its L2 cache holds."""
    return int(4 * ROTATION_BYTES) if jax.default_backend() == "gpu" else 1 << 20


def moved_bytes(case: Case) -> int:
    """The bytes that have to move: each input is read once and each output is written once."""
    of_query = 2 * case.batch * case.seq * case.heads * case.head_dim
    of_key = of_query * case.kv_heads // case.heads
    forward = 2 * of_query + 2 * of_key
    # query, key, value, out, dout and three gradients.
    backward = 4 * of_query + 4 * of_key
    return {"fwd": forward, "bwd": backward, "fwdbwd": forward + backward}[case.mode]


def rows_of(case: Case, args: argparse.Namespace, contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    times = {c.name: c.times for c in contenders if c.times}
    medians = {name: spread(of_name)["median"] for name, of_name in times.items()}
    rows = []
    for contender in contenders:
        name = contender.name
        row = {
            "contender": name,
            "case": case.label,
            "segments": args.segments,
            "rates": args.rates,
            "heads": args.heads,
            "layout": pattern_of(name, args).layout,
            "order": pattern_of(name, args).order,
            **contender.findings,
        }
        if contender.times:
            median = medians[name]
            if name == "copy":
                row["terabytes_per_second"] = 2 * copy_bytes() / median / 1e9
                told = f"{report.figure(row['terabytes_per_second'])} TB/s"
            else:
                work = case.flops if name == "dense" else pattern_of(name, args).flops(case)
                row["tflops"] = work / median / 1e9
                row["ours_is_faster_by"] = speed_ratio(times["ours"], contender.times) if "ours" in times else None
                told = f"{report.figure(row['tflops'])} TFLOP/s"
                if "ours" in times:
                    told += f", ours is {row['ours_is_faster_by']:.2f} times as fast"
            if name in OURS and {"dense", "copy"} <= times.keys():
                ideal = work / case.flops * medians["dense"] + moved_bytes(case) / (2 * copy_bytes()) * medians["copy"]
                row |= {"ideal_ms": ideal, "over_ideal": median / ideal}
                told += f", {median / ideal:.2f} of the ideal {ideal:.4f} ms"
            say(f"  {name}: {median:.4f} ms, {told}")
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    prepare_process()
    deadline = time.monotonic() + args.budget
    usable = any(framework(name) == "torch" and unavailable(name) is None for name in args.contenders)
    frameworks = ["jax", "torch"] if usable else ["jax"]
    timer_name, timer = choose_timer(args.timer, frameworks)
    methods = {which: METHODS[timer_name][which] for which in frameworks}
    results = report.header(args.commit, usable, timer=timer_name, method=methods, rows=[])
    for case in args.cases:
        say(case.label)
        if time.monotonic() > deadline:
            say("  skipped: the time budget is spent")
            contenders = [skipped(name, framework(name)) for name in args.contenders]
        else:
            contenders = build(case, args)
            alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds, deadline=deadline, say=say)
        results["rows"] += rows_of(case, args, contenders)
        report.write_json(args.output, results)
    close(timer)
    return report.exit_status(row["status"] for row in results["rows"])


if __name__ == "__main__":
    sys.exit(main())
