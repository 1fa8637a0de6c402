"""How time and memory of causal attention grow with the length: forward and backward, each length in its own process.

    PYTHONPATH=. python benchmarks/long_sequence.py --lengths 32768,65536,131072 --output results/long.json

Time is the wall clock around a call, the best of a few (a call takes tenths of a second). Memory is the most that XLA
held at once, as a multiple of the query's bytes too: query, key, value, dout and the four results are eight of them.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import report

from jax_kernels import flash_attention


def measure(length: int, heads: int, head_dim: int, implementation: str | None, repeats: int) -> dict:
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, dout = (jax.random.normal(k, (1, length, heads, head_dim), jnp.bfloat16) for k in keys)

    @jax.jit
    def run(query, key, value, dout):
        f = lambda *qkv: flash_attention(*qkv, is_causal=True, implementation=implementation)
        out, vjp = jax.vjp(f, query, key, value)
        return out, *vjp(dout)

    jax.block_until_ready(run(query, key, value, dout))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(query, key, value, dout))
        seconds.append(time.perf_counter() - start)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    flops = 3.5 * 4 * length**2 * heads * head_dim / 2
    return {
        "length": length,
        "seconds": seconds,
        "tflops": flops / min(seconds) / 1e12,
        "peak_bytes": peak,
        "peak_over_query": peak and peak / query.nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,65536,131072", help="comma list of tokens")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--implementation", default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file")
    parser.add_argument("--commit", help="what to record as the commit where the tree has no .git")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.heads, args.head_dim, args.implementation, args.repeats)))
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
        case = {"heads": args.heads, "head_dim": args.head_dim, "batch": 1, "causal": True, "dtype": "bf16"}
        report.write_json(
            args.output,
            {"schema": report.SCHEMA, "environment": report.environment(args.commit), "case": case, "rows": rows},
        )


if __name__ == "__main__":
    main()
