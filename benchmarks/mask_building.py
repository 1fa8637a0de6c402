"""Measures the device time of making a mask, against the attention under the mask and against a copy of the mask.

    PYTHONPATH=. python benchmarks/mask_building.py --output results/mask-building.json
    PYTHONPATH=. python benchmarks/mask_building.py --table builders --num-heads 16 --kv-heads 4 --seq-len 4096
    PYTHONPATH=. python benchmarks/mask_building.py --table dense,lists

There are three tables. The parts of each mask take turns in one run.

"builders" makes masks from scores: top_k of --keep keys, causal or not; threshold at 0; top_k_blocks of pooled scores,
with a quarter of the blocks, causal or not. The scores of top_k and threshold are a bias [batch, key heads, 1, keys];
the scores of "top_k of each query" have a row for each query.

    build      the mask from its scores, with the block lists that prepare_mask makes for attention
    attention  the forward of dynamic_mask_attention under this mask; "share" is a part's time over this time
    together   build and attention in one program

"dense" finds which blocks of a bool array [1, heads, --dense-len, --dense-len] are live and which are full.

    status     reads the array; --bar is the target, as a fraction of the copy's bandwidth
    copy       reads and writes the same number of bytes; its bandwidth counts both

"lists" makes the block lists of block, window and segments masks at --lists-len, and of a function at
--function-len.

    lists      the lists by query and by key
    prepare    everything that attention needs, under jit

Attention is checked against float32. Statuses and lists are checked against the same mask in another form. The exit
status is 1 if a contender failed, was wrong, or was skipped because the budget was spent.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import command_line, report
from harness.cases import DTYPES, Case, InputSet, as_numpy, input_sets, relative_error
from harness.mask_patterns import MaskPattern
from harness.process import prepare_process, say
from harness.side_by_side import gpu_alone
from harness.timers import choose_timer, close
from harness.timing import METHODS, Contender, alternate, first_line, skipped, spread

from jax_kernels import dynamic_mask_attention, explain, flash_attention, masks, prepare_mask
from jax_kernels.masks.block_lists import block_status

TABLES = ("builders", "dense", "lists")
BUILDERS = ("top_k", "top_k, causal", "top_k of each query", "threshold", "top_k_blocks", "top_k_blocks, causal")
LISTS = ("block", "window", "segments", "function")
BLOCK = 128
# A query of the mask "function" sees the NEAR keys before it and the FIRST keys of the sequence.
NEAR, FIRST = 4096, 64


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.05, budget=540)
    number = command_line.positive(int)
    parser.add_argument("--table", default=",".join(TABLES), help=f"comma list of {', '.join(TABLES)}")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096, help="length of the builders' attention")
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="default --num-heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--keep", type=number, default=1024, help="keys of top_k")
    parser.add_argument("--dense-len", type=number, default=8192)
    parser.add_argument("--lists-len", type=number, default=8192)
    parser.add_argument("--function-len", type=number, default=131072)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--bar", type=command_line.positive(float), default=0.7, help="default 0.7")
    parser.add_argument("--implementation", help="for ours: mosaic_gpu, triton or xla; default: the fastest")
    args = parser.parse_args(argv)
    try:
        args.table = command_line.names("table", args.table, TABLES)
        kv_heads = args.num_heads if args.kv_heads is None else args.kv_heads
        args.case = Case(
            args.batch_size, args.seq_len, args.num_heads, args.head_dim, kv_heads, args.dtype, False, "fwd"
        )
    except ValueError as error:
        parser.error(str(error))
    return args


def contender(name: str, function: Callable[..., Any], *arrays: Any, plan: str = "") -> Contender:
    """A contender of a function, compiled and run once."""
    made = Contender(name, "jax")
    with made.attempt():
        jitted = jax.jit(function)
        jitted.lower(*arrays).compile()
        made.start(lambda index: jitted(*arrays), plan)
    return made


def builder(name: str, args: argparse.Namespace) -> tuple[Callable[..., masks.Mask], list[jax.Array]]:
    """The function of the builder, from scores to a mask, and its scores."""
    case, inputs = args.case, input_sets(args.case)[0]
    if name.startswith("top_k_blocks"):
        count = max(1, -(-case.seq // BLOCK) // 4)
        limits = {"among": masks.causal(), "always": masks.sliding_window(0, 0)} if name.endswith("causal") else {}

        def of_blocks(query, key):
            mask = masks.top_k_blocks(masks.pooled_scores(query, key, BLOCK), count, BLOCK, **limits)
            return mask & masks.causal() if limits else mask

        return of_blocks, [inputs.query, inputs.key]
    rows = case.seq if name == "top_k of each query" else 1
    bias = jax.random.normal(jax.random.key(1), (case.batch, case.kv_heads, rows, case.seq), jnp.float32)
    if name == "threshold":
        return lambda bias: masks.threshold(bias, 0.0), [bias]
    among = {"among": masks.causal(), "q_length": case.seq} if name.endswith("causal") else {}
    return lambda bias: masks.top_k(bias, args.keep, **among), [bias]


def of_builder(name: str, args: argparse.Namespace) -> list[Contender]:
    case, inputs = args.case, input_sets(args.case)[0]
    make, scores = builder(name, args)
    named = {"implementation": args.implementation}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs.qkv]

    def build(*scores):
        mask = make(*scores)
        # flash_attention takes no mask over the key heads, and such a mask needs no lists.
        return prepare_mask(mask, *shapes, **named) if mask.heads in (1, case.heads) else mask

    attend = lambda mask, *qkv: dynamic_mask_attention(*qkv, mask, **named)
    together = lambda scores, *qkv: attend(build(*scores), *qkv)
    found = [contender("build", build, *scores)]
    if found[0].call is None:
        return found
    mask = found[0].call(0)
    plan = str(explain(dynamic_mask_attention, *inputs.qkv, mask, **named))
    found.append(contender("attention", attend, mask, *inputs.qkv, plan=plan))
    found.append(contender("together", together, scores, *inputs.qkv, plan=plan))
    with gpu_alone():
        want = right(case, mask, inputs)
    for one in found[1:]:
        if one.call is not None:
            with gpu_alone():
                one.judge(relative_error([as_numpy(one.call(0)[:1, :, :1])], [want]), "float32")
    return found


def right(case: Case, mask: masks.Mask, inputs: InputSet) -> np.ndarray:
    """Float32 results of the first head of the first batch entry."""
    arrays = (x[:1, :, :1].astype(jnp.float32) for x in inputs.qkv)

    @jax.jit
    def run(mask, *qkv):
        keep = mask.to_dense(case.seq, case.seq)[:1, :1]
        return flash_attention(*qkv, mask=keep, implementation="xla")

    return np.asarray(run(mask, *arrays))


def status_of(mask: masks.Mask, length: int) -> tuple[jax.Array, jax.Array]:
    """Two bool arrays: whether each block is live, and whether it is full."""
    offset = jnp.zeros(1, jnp.int32)
    return block_status(mask, offset, lengths=(length, length), blocks=(BLOCK, BLOCK), static_offset=0)


def of_dense(name: str, args: argparse.Namespace) -> list[Contender]:
    """The contenders of the table "dense". A random half of the array's blocks is empty, the other half full."""
    length, heads = args.dense_len, args.num_heads
    cells = jax.random.bernoulli(jax.random.key(2), 0.5, (1, heads, *[-(-length // BLOCK)] * 2))

    @jax.jit
    def whole(cells):
        at = jnp.arange(length) // BLOCK
        return cells[:, :, at[:, None], at]

    array = whole(cells)
    found = [
        # The same number of bytes as int32: XLA copies an array of bools at half the bandwidth.
        contender("copy", lambda words: ~words, jnp.zeros(array.size // 4, jnp.int32)),
        contender("status", lambda array: status_of(masks.dense(array), length), array),
    ]
    if found[1].call is not None and not np.array_equal(found[1].call(0)[0], cells):
        found[1].give_up("wrong", "its live blocks differ from the array's")
    return found


def _near_or_first(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q - k <= NEAR) | (k < FIRST))


def mask_of(name: str, args: argparse.Namespace) -> tuple[int, masks.Mask, masks.Mask]:
    """The length, the mask of this name, and the same mask in another form."""
    if name == "function":
        same = masks.causal() & (masks.sliding_window(NEAR, 0) | masks.prefix(FIRST))
        return args.function_len, masks.from_function(_near_or_first), same
    length = args.lists_len
    if name == "block":
        keep = jax.random.bernoulli(jax.random.key(3), 0.25, [-(-length // BLOCK)] * 2)
        mask = masks.block_sparse(keep, BLOCK)
    elif name == "window":
        mask = MaskPattern.of_window(length // 8, 0).mask
    else:
        borders = jnp.asarray([0.02, 0.07, 0.37, 0.45, 0.65, 0.69, 0.85]) * length
        mask = masks.segments(jnp.sum(jnp.arange(length)[:, None] >= borders, axis=1, dtype=jnp.int32))
    return length, mask, masks.dense(jax.jit(lambda mask: mask.to_dense(length, length))(mask))


def of_lists(name: str, args: argparse.Namespace) -> list[Contender]:
    length, mask, same = mask_of(name, args)
    lists = lambda mask: [mask.block_lists(length, length, BLOCK, BLOCK, by=by) for by in ("query", "key")]
    found = [contender("lists", lists, mask)]
    if found[0].call is not None:
        for got, want in zip(found[0].call(0), jax.jit(lists)(same), strict=True):
            width = min(got.indices.shape[-1], want.indices.shape[-1])
            pairs = zip(*(x._replace(indices=x.indices[..., :width]) for x in (got, want)), strict=True)
            if not all(np.array_equal(x, y) for x, y in pairs):
                found[0].give_up("wrong", "its lists differ from the lists of the same mask in another form")
    if name != "function":  # under jit, all bits of its mask would be stored
        shape = jax.ShapeDtypeStruct((1, length, args.num_heads, args.head_dim), DTYPES[args.dtype])
        prepare = lambda mask: prepare_mask(mask, shape, shape, implementation=args.implementation)
        found.append(contender("prepare", prepare, mask))
    return found


def groups(args: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], list[Contender]]]]:
    """Yields the table, the mask and the function that makes the mask's contenders."""
    of = {"builders": (of_builder, BUILDERS), "dense": (of_dense, ("dense",)), "lists": (of_lists, LISTS)}
    for table in args.table:
        make, names = of[table]
        for name in names:
            yield table, name, functools.partial(make, name, args)


def rows_of(table: str, mask: str, found: Sequence[Contender], args: argparse.Namespace) -> list[dict[str, Any]]:
    medians = {one.name: spread(one.times)["median"] for one in found if one.times}
    rows = []
    for one in found:
        row: dict[str, Any] = {"table": table, "mask": mask, "part": one.name} | one.findings
        told = f"  {one.name}: {one.status} {one.reason}"
        if one.name in medians:
            told = f"  {one.name}: {medians[one.name]:.4f} ms"
        if {"attention", one.name} <= medians.keys() and table == "builders":
            row["share"] = medians[one.name] / medians["attention"]
            told += f", {row['share']:.2f} of attention's time"
        if one.name in medians and table == "dense":
            moved = args.num_heads * args.dense_len**2
            bandwidth = {name: moved * (2 if name == "copy" else 1) / ms / 1e6 for name, ms in medians.items()}
            row |= {"gigabytes_per_second": bandwidth[one.name]}
            row["of_copy"] = bandwidth[one.name] / bandwidth["copy"] if "copy" in bandwidth else None
            row["meets_bar"] = row["of_copy"] and row["of_copy"] >= args.bar
            told += f", {report.figure(bandwidth[one.name])} GB/s, {row['of_copy'] or float('nan'):.2f} of a copy's"
        say(told)
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    prepare_process()
    deadline = time.monotonic() + args.budget
    timer_name, timer = choose_timer(args.timer, ["jax"])
    rows: list[dict[str, Any]] = []
    lengths = {"dense": args.dense_len, "lists": args.lists_len, "function": args.function_len}
    results = report.header(
        args.commit, timer=timer_name, method=METHODS[timer_name]["jax"], case=args.case.label, lengths=lengths,
        keep=args.keep, rows=rows,
    )  # fmt: skip
    for table, mask, make in groups(args):
        say(f"{table}: {mask}")
        found = [skipped("all", "jax")]
        if time.monotonic() < deadline:
            try:
                found = make()
            except Exception as error:
                found[0].give_up("failed", first_line(error))
            alternate(found, timer, rounds=args.rounds, seconds=args.seconds, deadline=deadline)
        rows += rows_of(table, mask, found, args)
        report.write_json(args.output, results)
    close(timer)
    return report.exit_status(row["status"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
