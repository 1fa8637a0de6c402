"""Measures the growth of time and memory with the length, for causal attention, forward and backward.

    PYTHONPATH=. python benchmarks/long_sequence.py --lengths 32768,65536,131072 --output results/long.json
    PYTHONPATH=. python benchmarks/long_sequence.py --lengths 32768,1048576 --heads 12 --head-dim 64 \\
        --segments 2048,4096,8192,16384,32768 --rates 1,2,4,6,12

Each length runs in its own process. --segments and --rates choose dilated attention.

The time is the best of a few calls, by the wall clock: a call takes tenths of a second. The memory is XLA's peak
memory, also as a multiple of the query's bytes: query, key, value, dout and the four results make eight.

The exit status is 1 if a length failed or its results have a NaN; the row of this length says so.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from harness import command_line, report
from harness.cases import Case, has_nan
from harness.gathers import Pattern

from jax_kernels import dilated_attention, flash_attention


def measure(length: int, args: argparse.Namespace) -> dict:
    heads, head_dim = args.heads, args.head_dim
    normal = jax.jit(lambda k: jax.random.normal(k, (1, length, heads, head_dim), jnp.bfloat16))
    query, key, value, dout = (jax.block_until_ready(normal(jax.random.key(i))) for i in range(4))
    case = Case(1, length, heads, head_dim, heads, "bf16", True, "fwdbwd")
    flops, attend = case.flops, flash_attention
    if args.segments:
        attend = functools.partial(dilated_attention, segment_lengths=args.segments, dilation_rates=args.rates)
        flops = Pattern(args.segments, args.rates).flops(case)

    @jax.jit
    def run(query, key, value, dout):
        f = lambda *qkv: attend(*qkv, is_causal=True, implementation=args.implementation)
        out, vjp = jax.vjp(f, query, key, value)
        return out, *vjp(dout)

    jax.block_until_ready(run(query, key, value, dout))
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(query, key, value, dout))
        seconds.append(time.perf_counter() - start)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    # Another call, after the peak is read: kept results would count in the peak.
    nan = bool(has_nan(run(query, key, value, dout)))
    return {
        "length": length,
        "status": "wrong" if nan else "ok",
        "reason": "its results hold a NaN" if nan else "",
        "seconds": seconds,
        "tflops": flops / min(seconds) / 1e12,
        "peak_bytes": peak,
        "peak_over_query": peak and peak / query.nbytes,
    }


def in_its_own_process(length: int, words: Sequence[str]) -> dict[str, Any]:
    """The row that measure returns in a separate process, or a row with the reason why the process ended."""
    command = [sys.executable, __file__, *words, "--one", str(length)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(done.stderr)
    told = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return {"length": length, "status": "failed", "reason": told[-1][:300]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--lengths", default="32768,65536,131072", help="comma list of tokens")
    parser.add_argument("--heads", type=command_line.positive(int), default=16)
    parser.add_argument("--head-dim", type=command_line.positive(int), default=128)
    parser.add_argument("--segments", help="comma list of segment_lengths of dilated attention")
    parser.add_argument("--rates", help="comma list of dilation_rates")
    parser.add_argument("--implementation", default=None)
    parser.add_argument("--repeats", type=command_line.positive(int), default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    asked = {"segments": args.segments, "rates": args.rates} if args.segments else {}
    try:
        lengths = command_line.numbers(args.lengths)
        args.segments, args.rates = (
            text if text is None else tuple(command_line.numbers(text)) for text in (args.segments, args.rates)
        )
        if len(args.segments or ()) != len(args.rates or ()):
            raise ValueError(f"segments, rates: got {args.segments} and {args.rates}, want equally many")
    except ValueError as error:
        parser.error(str(error))
    if args.one:
        print(json.dumps(measure(args.one, args)))
        return 0
    case = asked | {"heads": args.heads, "head_dim": args.head_dim, "batch": 1, "causal": True, "dtype": "bf16"}
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"schema": report.SCHEMA, "case": case, "rows": rows}
    for length in lengths:
        row = in_its_own_process(length, words)
        rows.append(row)
        if row["status"] == "ok":
            memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 1e9:.2f} GB"
            print(f"{length}: {min(row['seconds']):.3g} s, {report.figure(row['tflops'])} TFLOP/s{memory}", flush=True)
        else:
            print(f"{length}: {row['status']}: {row['reason']}", flush=True)
        report.write_json(args.output, results)
    if args.output is not None:
        # Last, because it initialises the device, whose memory the other processes measure.
        report.write_json(args.output, {"environment": report.environment(args.commit)} | results)
    return report.exit_status(row["status"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
