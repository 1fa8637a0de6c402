"""decode_attention against the bandwidth of a copy of the same cache, in one run, alternating, by device time.

    PYTHONPATH=. python benchmarks/decode.py --shapes "64,1,32,128,8;1,1,32,128,8" --kv-length 16384

A step reads every key and value once: its bandwidth is their bytes over its time. The copy reads and writes; its
bandwidth counts both. "cudnn" is jax.nn.dot_product_attention, where it takes the shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import report
from attention import choose_timer, prepare_process, say
from timing import Contender, alternate, first_line, spread, wait

from jax_kernels import decode_attention

PAGE = 64


def build(name: str, function: Callable[..., Any], *arrays: Any) -> Contender:
    contender = Contender(name, "jax")
    try:
        jitted = jax.jit(function)
        contender.call = lambda index: jitted(*arrays)
        wait(contender.call(0), "jax")
    except Exception as error:
        contender.give_up("failed", first_line(error))
    return contender


def contenders(shape: tuple[int, ...], kv_length: int, implementations: Sequence[str]) -> tuple[list[Contender], int]:
    """The contenders of a shape, the copy first, and the bytes of keys and values."""
    batch, q_length, heads, head_dim, kv_heads = shape
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (batch, q_length, heads, head_dim), jnp.bfloat16)
    cache = (batch, kv_length, kv_heads, head_dim)
    key, value = (jax.random.normal(k, cache, jnp.bfloat16) for k in keys[1:])
    pages = kv_length // PAGE
    tables = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    paged = [x.reshape(-1, PAGE, kv_heads, head_dim) for x in (key, value)]
    lengths = jnp.full(batch, kv_length, jnp.int32)
    found = [build("copy", lambda k, v: (-k, -v), key, value)]
    for name in implementations:
        step = lambda q, k, v, lengths, name=name: decode_attention(q, k, v, kv_lengths=lengths, implementation=name)
        found.append(build(name, step, query, key, value, lengths))
        step = lambda q, k, v, lengths, tables, name=name: decode_attention(
            q, k, v, kv_lengths=lengths, block_tables=tables, implementation=name
        )
        found.append(build(f"{name} paged", step, query, *paged, lengths, jnp.asarray(tables)))
    cudnn = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    found.append(build("cudnn", cudnn, query, key, value))
    return found, 2 * key.nbytes


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.05)
    parser.add_argument("--shapes", default="64,1,32,128,8", help="batch,queries,heads,head_dim,kv_heads, ';' between")
    parser.add_argument("--kv-length", type=int, default=16384)
    parser.add_argument("--implementations", default="mosaic_gpu,triton")
    args = parser.parse_args(argv)
    prepare_process()
    timer_name, timer = choose_timer(args.timer, ["jax"])
    rows: list[dict[str, Any]] = []
    for text in args.shapes.split(";"):
        shape = tuple(int(word) for word in text.split(","))
        found, size = contenders(shape, args.kv_length, args.implementations.split(","))
        alternate(found, timer, rounds=args.rounds, seconds=args.seconds)
        copied = 0.0
        for contender in found:
            row = {"shape": shape, "kv_length": args.kv_length, "contender": contender.name, "status": contender.status}
            row |= {"reason": contender.reason, "times_ms": contender.times}
            if contender.times:
                moved = 2 * size if contender.name == "copy" else size
                bandwidth = moved / spread(contender.times)["median"] / 1e9
                copied = copied or bandwidth
                row |= {"terabytes_per_second": bandwidth, "of_copy": bandwidth / copied}
                say(f"{text} {contender.name:18} {bandwidth:.2f} TB/s, {bandwidth / copied:.3f} of a copy's")
            else:
                say(f"{text} {contender.name:18} {contender.status}: {contender.reason}")
            rows.append(row)
    if args.output is not None:
        results = {"schema": report.SCHEMA, "environment": report.environment(args.commit), "timer": timer_name}
        report.write_json(args.output, results | {"rows": rows})


if __name__ == "__main__":
    main()
