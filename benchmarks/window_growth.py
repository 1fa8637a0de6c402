"""Measures the growth of time and memory with the length, for attention under a window of fixed width, by device time.

    PYTHONPATH=. python benchmarks/window_growth.py --lengths 16384,32768,65536,131072,262144 --window 1024

Each query sees the last --window keys, including its own. Contenders: "window-argument", by flash_attention's window;
"prepared-mask", by a mask's block lists, made before the calls; "mask", with the lists made in each call.

Memory is the sum of the program's arguments, results and temporaries in XLA. The time and the memory per token are
divided by their values at the first length: 1.00 is linear growth, and values up to --bar count as linear. Before a
contender is timed, the first head of its last tokens is checked against float32; they depend only on the tokens of the
last two windows.

The exit status is 1 if a contender failed, was wrong, or was skipped because the budget was spent.
"""

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from harness import command_line, report
from harness.cases import DTYPES, Case, InputSet, Shape, as_numpy, input_sets, relative_error
from harness.mask_patterns import MaskPattern, of_ours
from harness.process import prepare_process, say
from harness.side_by_side import gpu_alone
from harness.timers import choose_timer, close
from harness.timing import METHODS, Contender, alternate, skipped

from jax_kernels import explain, flash_attention

MODES = ("fwd", "fwdbwd")
CONTENDERS = ("window-argument", "prepared-mask", "mask")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.1, budget=540)
    parser.add_argument("--lengths", default="16384,32768,65536,131072,262144", help="comma list of tokens")
    told = "keys of a query, including its own"
    parser.add_argument("--window", type=command_line.positive(int), default=1024, help=told)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--mode", default=",".join(MODES), help=f"comma list of {', '.join(MODES)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"comma list of {', '.join(CONTENDERS)}")
    parser.add_argument("--bar", type=command_line.positive(float), default=1.1, help="default 1.1")
    parser.add_argument("--implementation", help="for ours: mosaic_gpu, triton or xla; default: the fastest")
    args = parser.parse_args(argv)
    try:
        for name, known in (("mode", MODES), ("contenders", CONTENDERS)):
            setattr(args, name, command_line.names(name, getattr(args, name), known))
        lengths = command_line.numbers(args.lengths)
        shape = lambda length: Shape(args.batch_size, length, args.num_heads, args.head_dim, args.num_heads)
        args.cases = [
            Case.of(shape(length), dtype=args.dtype, causal=True, mode=mode) for length in lengths for mode in args.mode
        ]
    except ValueError as error:
        parser.error(str(error))
    return args


def build(name: str, case: Case, inputs: InputSet, args: argparse.Namespace) -> tuple[Contender, int | None]:
    """The checked contender, and the peak bytes of its program, or None if XLA does not report them."""
    contender, held = Contender(name, "jax"), None
    with contender.attempt():
        mask, named = of_ours(name, MaskPattern.of_window(args.window - 1, 0), None, inputs, args.implementation)
        plan = str(explain(flash_attention, *inputs.qkv, mask=mask, **named))
        run = jax.jit(functools.partial(_in_mode, case.mode, **named)).lower(mask, *inputs.qkv, inputs.dout).compile()
        memory = run.memory_analysis()
        if memory is not None:
            held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            held -= memory.alias_size_in_bytes
        outputs = contender.start(lambda index: run(mask, *inputs.qkv, inputs.dout), plan)
        with gpu_alone():
            contender.judge(error(outputs, inputs, case, args.window), "float32")
    say(f"  {name}: {contender.status} {contender.reason or contender.plan.splitlines()[0]}")
    return contender, held


def _in_mode(mode, mask, query, key, value, dout, **named):
    attend = functools.partial(flash_attention, mask=mask, **named)
    if mode == "fwd":
        return (attend(query, key, value),)
    out, vjp = jax.vjp(attend, query, key, value)
    return out, *vjp(dout)


def error(outputs: Sequence[jax.Array], inputs: InputSet, case: Case, window: int) -> float:
    """The error of the last tokens. Queries and keys of the last window depend only on the last two windows."""
    tail = [x[:1, -2 * window :, :1].astype(jnp.float32) for x in (*inputs.qkv, inputs.dout)]
    last = case.seq if case.seq <= 2 * window else window
    wanted = _right(case.mode, window, *tail)
    return relative_error(*([as_numpy(x[:1, -last:, :1]) for x in found] for found in (outputs, wanted)))


@jax.jit(static_argnums=(0, 1))
def _right(mode, window, query, key, value, dout):
    return _in_mode(mode, None, query, key, value, dout, window=(window - 1, 0), implementation="xla")


def row_of(contender: Contender, held: int | None, case: Case, first: dict[Any, dict[str, Any]], bar: float) -> dict:
    """A row of the results. first: the rows of the first length, by mode and contender."""
    row: dict[str, Any] = {"contender": contender.name, "case": case.label, "mode": case.mode, "length": case.seq}
    row |= contender.findings
    if not contender.times:
        return row
    row |= {
        "ns_per_token": row["median_ms"] * 1e6 / case.seq,
        "held_bytes": held,
        "bytes_per_token": None if held is None else held / case.seq,
    }
    base = first.setdefault((case.mode, contender.name), row)
    told = f"  {contender.name}: {row['ns_per_token']:.1f} ns"
    for what, unit in (("time", "ns_per_token"), ("memory", "bytes_per_token")):
        growth = row[unit] / base[unit] if row[unit] and base[unit] else None
        row |= {f"{what}_growth": growth, f"{what}_is_linear": growth and growth <= bar}
        told += "" if growth is None else f", {what} of a token {growth:.3f}"
    say(told + f" of that at {base['length']}")
    return row


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    prepare_process()
    deadline = time.monotonic() + args.budget
    timer_name, timer = choose_timer(args.timer, ["jax"])
    rows: list[dict[str, Any]] = []
    method = METHODS[timer_name]["jax"]
    results = report.header(args.commit, timer=timer_name, method=method, window=args.window, bar=args.bar, rows=rows)
    first: dict[Any, dict[str, Any]] = {}
    for case in args.cases:
        say(case.label)
        built: list[tuple[Contender, int | None]]
        if time.monotonic() > deadline:
            say("  skipped: the time budget is spent")
            built = [(skipped(name, "jax"), None) for name in args.contenders]
        else:
            inputs = input_sets(case)[0]
            built = [build(name, case, inputs, args) for name in args.contenders]
            found = [contender for contender, _ in built]
            alternate(found, timer, rounds=args.rounds, seconds=args.seconds, deadline=deadline, say=say)
        rows += [row_of(contender, held, case, first, args.bar) for contender, held in built]
        # Frees the arrays before the next length makes its own.
        for contender, _ in built:
            contender.call = None
        report.write_json(args.output, results)
    close(timer)
    return report.exit_status(row["status"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
