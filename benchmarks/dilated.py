"""Dilated attention side by side, alternating, by device time: ours, by gathers and scatters, and dense attention.

    PYTHONPATH=. python benchmarks/dilated.py --shapes 1,32768,16,128 --mode fwd,fwdbwd
    PYTHONPATH=. python benchmarks/dilated.py --segments 2048,8192,32768 --rates 1,4,16 --output results/dilated.json

"gather" is the usual form, in one jit: for each branch the tokens of each head are gathered by index, attended to by
this library's kernel, scattered into zeros of the full size, and the branches are merged by their lse. "dense" is this
library's attention over the whole sequence. Ours is held against "gather" before it is timed, "dense" against float32.

The exit status is 1 where a contender failed, was wrong, or was skipped as the budget was spent.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import report
from attention import choose_timer, close, prepare_process, say
from cases import DTYPES, MODES, Case, Oracle, dilated_flops, has_nan, input_sets, parse_shapes, relative_error
from contenders import from_function
from timing import METHODS, Contender, alternate, skipped, speed_ratio, spread

import jax_kernels
from jax_kernels import dilated_attention, flash_attention

CONTENDERS = ("ours", "gather", "dense")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.2, budget=540)
    parser.add_argument("--shapes", default="1,32768,16,128", help="batch,seq,heads,head_dim[,kv_heads], split by ';'")
    parser.add_argument("--segments", default="2048,4096,8192,16384", help="segment_lengths")
    parser.add_argument("--rates", default="1,2,4,8", help="dilation_rates")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--full", action="store_true", help="without is_causal")
    parser.add_argument("--mode", default="fwd,fwdbwd", help=f"comma list of {', '.join(MODES)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="comma list")
    parser.add_argument("--implementation", help="of all: mosaic_gpu, triton or xla; default the fastest")
    args = parser.parse_args(argv)
    try:
        args.shapes = parse_shapes(args.shapes)
        args.segments, args.rates = (tuple(command_line.numbers(text)) for text in (args.segments, args.rates))
        if len(args.segments) != len(args.rates):
            raise ValueError(f"segments, rates: got {args.segments} and {args.rates}, want as many of each")
        for name, known in (("mode", MODES), ("contenders", CONTENDERS)):
            setattr(args, name, command_line.names(name, getattr(args, name), known))
        args.cases = [Case(*s, args.dtype, not args.full, mode) for s in args.shapes for mode in args.mode]
    except ValueError as error:
        parser.error(str(error))
    return args


def gathered(query, key, value, *, segment_lengths, dilation_rates, is_causal, implementation):
    """LongNet's attention by index: as it is written where nothing is known of views."""
    batch, length, heads, _ = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    outs, lses = [], []
    for size, rate in zip(segment_lengths, dilation_rates, strict=True):
        size = min(size, length)
        if length % size or (size % rate and not is_causal):
            raise NotImplementedError(f"its segments must divide {length}, and if not causal its rates its segments")
        rows = np.arange(-(-size // rate))[:, None] * rate + np.arange(heads) // -(-heads // rate)
        # A row that a segment lacks is the last one of its class: no other row attends to it, and it is dropped.
        places = np.where(rows < size, np.arange(0, length, size)[:, None, None] + rows, length)
        columns = np.broadcast_to(np.arange(heads), places.shape)
        pick = lambda x, places=places, columns=columns: x.at[:, places, columns].get(mode="clip")
        picked = (pick(x).reshape(-1, *places.shape[1:], x.shape[3]) for x in (query, key, value))
        out, lse = flash_attention(*picked, is_causal=is_causal, return_lse=True, implementation=implementation)
        out = out.reshape(batch, *places.shape, -1).astype(jnp.float32)
        lse = lse.swapaxes(1, 2).reshape(batch, *places.shape)
        put = lambda empty, x, places=places, columns=columns: empty.at[:, places, columns].set(x, mode="drop")
        outs.append(put(jnp.zeros((batch, length, heads, out.shape[-1])), out))
        lses.append(put(jnp.full((batch, length, heads), -jnp.inf), lse))
    weights = jax.nn.softmax(jnp.stack(lses), axis=0)
    return sum(w[..., None] * out for w, out in zip(weights, outs, strict=True)).astype(query.dtype)


def function_of(name: str, case: Case, args: argparse.Namespace) -> Callable[..., jax.Array]:
    common = {"is_causal": case.causal, "implementation": args.implementation}
    pattern = {"segment_lengths": args.segments, "dilation_rates": args.rates}
    if name == "dense":
        return functools.partial(flash_attention, **common)
    return functools.partial(dilated_attention if name == "ours" else gathered, **common, **pattern)


def plan_of(name: str, case: Case, args: argparse.Namespace, inputs: Any) -> str:
    if name == "gather":
        return "gather, attention and scatter for each branch"
    function = function_of(name, case, args)
    return str(jax_kernels.explain(function.func, *inputs.qkv, **function.keywords))  # type: ignore[attr-defined]


def build(case: Case, args: argparse.Namespace) -> list[Contender]:
    """The contenders of a case, compiled; ours has been checked against "gather" where that one runs."""
    sets = input_sets(case)
    contenders, right = [], None
    for name in sorted(args.contenders, key=lambda name: name == "ours"):
        contender = Contender(name, "jax")
        with contender.attempt():
            built = from_function(function_of(name, case, args), case, sets, plan_of(name, case, args, sets[0]))
            outputs = contender.start(built.call, built.plan)
            if has_nan(outputs):
                contender.give_up("wrong", "its results hold a NaN")
            elif name == "dense":
                contender.judge(Oracle(case, sets[0]).error(outputs), "float32")
            elif name == "gather":
                right = outputs
            elif right is not None:
                contender.judge(relative_error(outputs, right), "gather")
        say(f"  {name}: {contender.status} {contender.reason or contender.plan}")
        contenders.append(contender)
    return contenders


def rows_of(case: Case, args: argparse.Namespace, contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    times = {c.name: c.times for c in contenders if c.times}
    rows = []
    for contender in contenders:
        row = {
            "contender": contender.name,
            "case": case.label,
            "segments": args.segments,
            "rates": args.rates,
            "status": contender.status,
            "reason": contender.reason,
            "plan": contender.plan,
            "error": contender.error,
        }
        if contender.times:
            median = spread(contender.times)["median"]
            work = case.flops if contender.name == "dense" else dilated_flops(case, args.segments, args.rates)
            row |= {
                "times_ms": contender.times,
                "median_ms": median,
                "tflops": work / median / 1e9,
                "ours_is_faster_by": speed_ratio(times["ours"], contender.times) if "ours" in times else None,
                "kernels_ms": contender.reading.kernels if contender.reading else {},
            }
            say(f"  {contender.name}: {median:.4f} ms, {row['tflops']:.0f} TFLOP/s, ours x {row['ours_is_faster_by']}")
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    prepare_process()
    deadline = time.monotonic() + args.budget
    name, timer = choose_timer(args.timer, ["jax"])
    results: dict[str, Any] = {
        "schema": report.SCHEMA,
        "environment": report.environment(args.commit),
        "timer": name,
        "method": METHODS[name]["jax"],
        "rows": [],
    }
    for case in args.cases:
        say(case.label)
        if time.monotonic() > deadline:
            say("  skipped: the time budget is spent")
            contenders = [skipped(name, "jax") for name in args.contenders]
        else:
            contenders = build(case, args)
            alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds, deadline=deadline, say=say)
        results["rows"] += rows_of(case, args, contenders)
        if args.output is not None:
            report.write_json(args.output, results)
    close(timer)
    return report.exit_status(row["status"] for row in results["rows"])


if __name__ == "__main__":
    sys.exit(main())
