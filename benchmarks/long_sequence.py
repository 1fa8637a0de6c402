"""How time and memory of causal attention grow with the length: forward and backward, each length in its own process.

    PYTHONPATH=. python benchmarks/long_sequence.py --lengths 32768,65536,131072 --output results/long.json
    PYTHONPATH=. python benchmarks/long_sequence.py --lengths 32768,1048576 --heads 12 --head-dim 64 \\
        --segments 2048,4096,8192,16384,32768 --rates 1,2,4,6,12

With --segments and --rates it is dilated attention.

Time is the wall clock around a call, the best of a few (a call takes tenths of a second). Memory is the most that XLA
held at once, as a multiple of the query's bytes too: query, key, value, dout and the four results are eight of them.
"""

import argparse
import functools
import json
import subprocess
import sys
import time

import command_line
import jax
import jax.numpy as jnp
import report
from cases import Case, dilated_flops

from jax_kernels import dilated_attention, flash_attention


def measure(length: int, args: argparse.Namespace) -> dict:
    heads, head_dim = args.heads, args.head_dim
    normal = jax.jit(lambda k: jax.random.normal(k, (1, length, heads, head_dim), jnp.bfloat16))
    query, key, value, dout = (jax.block_until_ready(normal(jax.random.key(i))) for i in range(4))
    case = Case(1, length, heads, head_dim, heads, "bf16", True, "fwdbwd")
    flops, attend = case.flops, flash_attention
    if args.segments:
        lengths, rates = (tuple(int(x) for x in text.split(",")) for text in (args.segments, args.rates))
        attend = functools.partial(dilated_attention, segment_lengths=lengths, dilation_rates=rates)
        flops = dilated_flops(case, lengths, rates)

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
    return {
        "length": length,
        "seconds": seconds,
        "tflops": flops / min(seconds) / 1e12,
        "peak_bytes": peak,
        "peak_over_query": peak and peak / query.nbytes,
    }


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--lengths", default="32768,65536,131072", help="comma list of tokens")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--segments", help="comma list of segment_lengths, of dilated attention")
    parser.add_argument("--rates", help="comma list of dilation_rates")
    parser.add_argument("--implementation", default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (args.segments is None) != (args.rates is None):
        parser.error("segments, rates: got one of them, want both or neither")
    if args.one:
        print(json.dumps(measure(args.one, args)))
        return
    rows = []
    for length in (int(text) for text in args.lengths.split(",")):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", str(length)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        row = rows[-1]
        memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 1e9:.2f} GB"
        print(f"{length}: {min(row['seconds']):.3f} s, {row['tflops']:.0f} TFLOP/s{memory}", flush=True)
    if args.output:
        pattern = {"segments": args.segments, "rates": args.rates} if args.segments else {}
        case = pattern | {"heads": args.heads, "head_dim": args.head_dim, "batch": 1, "causal": True, "dtype": "bf16"}
        report.write_json(
            args.output,
            {"schema": report.SCHEMA, "environment": report.environment(args.commit), "case": case, "rows": rows},
        )


if __name__ == "__main__":
    main()
