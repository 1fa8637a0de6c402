"""Compares the bandwidths of decode_attention and of a copy of the cache, in one alternating run, by device time.

    PYTHONPATH=. python benchmarks/decode.py --shapes "64,1,32,128,8;1,1,32,128,8" --kv-length 16384

A step reads every key and value once: its bandwidth is their bytes over its time. The copy reads and writes; its
bandwidth counts both. "cudnn" is jax.nn.dot_product_attention, whose queries attend to all keys. Our queries attend to
the keys up to their own position. Every contender except the copy is checked against float32 before it is timed.

The exit status is 1 if a contender failed or was wrong.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import command_line, report
from harness.cases import Shape, as_numpy, parse_shapes, relative_error
from harness.contenders import need
from harness.process import prepare_process, say
from harness.timers import choose_timer, close
from harness.timing import Contender, alternate, spread

from jax_kernels import decode_attention, flash_attention
from jax_kernels.ops.attention.decode_implementations import IMPLEMENTATIONS

PAGE = 64


def build(name: str, function: Callable[..., Any], *arrays: Any, want: jax.Array | None = None) -> Contender:
    """A contender, compiled and run once. want: the right output of the first batch entry, or None for no check."""
    contender = Contender(name, "jax")
    with contender.attempt():
        if name == "cudnn":
            need("jax-cudnn")
        jitted = jax.jit(function)
        outputs = contender.start(lambda index: jitted(*arrays))
        if want is not None:
            contender.judge(relative_error([as_numpy(outputs[:1])], [as_numpy(want)]), "float32")
    return contender


def contenders(shape: Shape, kv_length: int, implementations: Sequence[str]) -> tuple[list[Contender], int]:
    """Returns the contenders of a shape, the copy first, and the bytes of its keys and values."""
    batch, q_length, kv_heads, head_dim = shape.batch, shape.seq, shape.kv_heads, shape.head_dim
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (batch, q_length, shape.heads, head_dim), jnp.bfloat16)
    cache = (batch, kv_length, kv_heads, head_dim)
    key, value = (jax.random.normal(k, cache, jnp.bfloat16) for k in keys[1:])
    pages = kv_length // PAGE
    tables = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    # The same sequences, cut into pages in random order.
    paged = [
        jnp.zeros((batch * pages, PAGE, kv_heads, head_dim), x.dtype)
        .at[tables.reshape(-1)]
        .set(x.reshape(-1, PAGE, kv_heads, head_dim))
        for x in (key, value)
    ]
    lengths = jnp.full(batch, kv_length, jnp.int32)
    attend = functools.partial(flash_attention, *(x[:1].astype(jnp.float32) for x in (query, key, value)))
    want = attend(is_causal=True, q_offset=kv_length - q_length, implementation="xla")
    found = [build("copy", lambda k, v: (-k, -v), key, value)]
    for name in implementations:
        step = lambda q, k, v, lengths, name=name: decode_attention(q, k, v, kv_lengths=lengths, implementation=name)
        found.append(build(name, step, query, key, value, lengths, want=want))
        step = lambda q, k, v, lengths, tables, name=name: decode_attention(
            q, k, v, kv_lengths=lengths, block_tables=tables, implementation=name
        )
        found.append(build(f"{name} paged", step, query, *paged, lengths, jnp.asarray(tables), want=want))
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    found.append(build("cudnn", cudnn, query, key, value, want=attend(implementation="xla")))
    return found, 2 * key.nbytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.05)
    parser.add_argument(
        "--shapes", default="64,1,32,128,8", help="batch,queries,heads,head_dim[,kv_heads], ';' between"
    )
    parser.add_argument("--kv-length", type=command_line.positive(int), default=16384, help=f"a multiple of {PAGE}")
    parser.add_argument("--implementations", default="mosaic_gpu,triton", help=f"ours: {', '.join(IMPLEMENTATIONS)}")
    args = parser.parse_args(argv)
    try:
        shapes = parse_shapes(args.shapes)
        implementations = command_line.names("implementations", args.implementations, tuple(IMPLEMENTATIONS))
        if args.kv_length % PAGE:
            raise ValueError(f"kv_length: got {args.kv_length}, want a multiple of {PAGE}, the length of a page")
    except ValueError as error:
        parser.error(str(error))
    prepare_process()
    timer_name, timer = choose_timer(args.timer, ["jax"])
    results = report.header(args.commit, timer=timer_name)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        found, size = contenders(shape, args.kv_length, implementations)
        alternate(found, timer, rounds=args.rounds, seconds=args.seconds)
        copy, *_ = found
        copied = 2 * size / spread(copy.times)["median"] / 1e9 if copy.status == "ok" else None
        for contender in found:
            row = {
                "shape": shape.numbers,
                "kv_length": args.kv_length,
                "contender": contender.name,
                "status": contender.status,
            }
            row |= {"reason": contender.reason, "error": contender.error, "times_ms": contender.times}
            told = f"{','.join(map(str, shape.numbers))} {contender.name:18}"
            if contender.status == "ok":
                moved = 2 * size if contender.name == "copy" else size
                bandwidth = moved / spread(contender.times)["median"] / 1e9
                row |= {"terabytes_per_second": bandwidth, "of_copy": copied and bandwidth / copied}
                say(
                    f"{told} {report.figure(bandwidth)} TB/s"
                    + (f", {bandwidth / copied:.3f} of a copy's" if copied else "")
                )
            else:
                say(f"{told} {contender.status}: {contender.reason}")
            rows.append(row)
        report.write_json(args.output, results | {"rows": rows})
    close(timer)
    return report.exit_status(row["status"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
