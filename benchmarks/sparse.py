"""Sparse attention side by side, in one alternating run, by device time.

    PYTHONPATH=. python benchmarks/sparse.py --pattern block,window,random,structured --sparsity 0.5,0.9
    PYTHONPATH=. python benchmarks/sparse.py --seq-len 16384 --num-heads 16 --head-dim 128 --output results/sparse.json
    PYTHONPATH=. python benchmarks/sparse.py --pattern block --sparsity 0.9 --mode fwdbwd --contenders dense,mask
    PYTHONPATH=. python benchmarks/sparse.py --pattern random --sparsity 0.7,0.1 --contenders dense,array
    PYTHONPATH=. python benchmarks/sparse.py --pattern causal-window --window 1024 --mode fwd,bwd,fwdbwd

Patterns:

    block          random blocks, the same number in each row of blocks
    top-k-blocks   for each block of queries the blocks of keys with the largest scores, in dynamic_mask_attention
    window         keys near the query
    random         pairs drawn one by one, so no block is dead
    structured     a window and global tokens
    causal-window  the last --window keys of each query, including its own
    causal-prefix  the same keys, and the first --prefix keys, which every query sees

The first five are not causal. Their sparsity is the fraction of masked pairs; the last two have no sparsity.

Contenders, each checked against float32 before it is timed:

    dense            ours without a mask, the baseline of the other contenders
    prepared-mask    ours under the Mask, with block lists that prepare_mask made before the calls
    mask             ours under the same Mask, with the lists made in each call
    window-argument  ours by flash_attention's window, if the pattern is a window
    array            ours under the same mask as a bool array
    jax-cudnn-bias   cuDNN with a bias of -1e30 for masked pairs
    torch-flex       compiled flex_attention; its block mask, from the window's rule or the array, is made before
    torch-flex-flash the same by FlashAttention-4's kernel, where flash-attn-4 is installed

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
import numpy as np
from harness import command_line, report
from harness.cases import DTYPES, MODES, Case, InputSet, Shape, as_numpy, input_sets, relative_error
from harness.contenders import framework, from_function, need, unavailable
from harness.mask_patterns import MaskPattern, of_ours, random_blocks
from harness.process import prepare_process, say
from harness.side_by_side import gpu_alone, gpu_among_others
from harness.timers import choose_timer, close
from harness.timing import METHODS, Built, Contender, alternate, skipped, speed_ratio

from jax_kernels import dynamic_mask_attention, explain, flash_attention, masks

OF_SPARSITY = ("block", "top-k-blocks", "window", "random", "structured")
PATTERNS = (*OF_SPARSITY, "causal-window", "causal-prefix")
FLEX = {"torch-flex": "TRITON", "torch-flex-flash": "FLASH"}  # the backend of flex_attention
CONTENDERS = ("dense", "prepared-mask", "mask", "window-argument", "array", "jax-cudnn-bias", *FLEX)
# The size of the blocks that the kernels skip, and that a row of results counts.
BLOCK = 128


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.1, budget=540)
    parser.add_argument("--pattern", default=",".join(OF_SPARSITY), help=f"comma list of {', '.join(PATTERNS)}")
    parser.add_argument("--sparsity", default="0.5,0.75,0.9", help="comma list, each from 0 to below 1")
    text = "keys of a query in the patterns causal-window and causal-prefix, including its own"
    parser.add_argument("--window", type=command_line.positive(int), default=1024, help=text)
    text = "first keys that every query of the pattern causal-prefix sees"
    parser.add_argument("--prefix", type=command_line.positive(int), default=64, help=text)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=BLOCK, help="block size of the pattern block")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--mode", default="fwd,bwd", help=f"comma list of {', '.join(MODES)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"comma list of {', '.join(CONTENDERS)}")
    parser.add_argument("--implementation", help="for ours: mosaic_gpu, triton, cudnn or xla; default: the fastest")
    args = parser.parse_args(argv)
    try:
        for name, known in (("pattern", PATTERNS), ("mode", MODES), ("contenders", CONTENDERS)):
            setattr(args, name, command_line.names(name, getattr(args, name), known))
        args.sparsity = [float(word) for word in args.sparsity.split(",")]
        if not all(0 <= x < 1 for x in args.sparsity):
            raise ValueError(f"sparsity: got {args.sparsity}, want numbers from 0 to below 1")
        if args.block_size < 1:
            raise ValueError(f"block_size: got {args.block_size}, want a positive number")
        shape = Shape(args.batch_size, args.seq_len, args.num_heads, args.head_dim, args.num_heads)
        args.cases = [Case.of(shape, dtype=args.dtype, causal=False, mode=mode) for mode in args.mode]
    except ValueError as error:
        parser.error(str(error))
    return args


def pattern_of(name: str, sparsity: float | None, args: argparse.Namespace) -> MaskPattern:
    """The pattern of this name, in which every query has a key.

    sparsity: the pattern's own is about this. None for the patterns of --window.
    """
    seq, block = args.seq_len, args.block_size
    if sparsity is None:
        return MaskPattern.of_window(args.window - 1, 0, prefix=args.prefix if name == "causal-prefix" else 0)
    keep = 1 - sparsity
    if name == "block":
        return random_blocks(seq, keep, block)
    if name == "top-k-blocks":
        cells = -(-seq // block)
        scores = np.random.default_rng(0).random((cells, cells), np.float32)
        return MaskPattern(masks.top_k_blocks(scores, max(1, round(keep * cells)), block))
    if name == "random":
        array = np.random.default_rng(0).random((seq, seq), np.float32) < keep
        np.fill_diagonal(array, True)
        return MaskPattern(masks.dense(array))
    tokens = 0 if name == "window" else max(1, int(seq * keep / 8))
    side = min(range(seq), key=lambda side: abs(_pairs(seq, side, tokens) - keep * seq * seq))
    return MaskPattern.of_window(side, side, tokens)


def _pairs(seq: int, side: int, tokens: int) -> int:
    """The number of pairs within `side` of the diagonal or among the first `tokens` queries or keys."""
    of_window = lambda n: n * n - (n - side) * (n - side - 1) if side < n else n * n
    # Without the first tokens, the rest is a window over the other tokens.
    return of_window(seq - tokens) + tokens * (2 * seq - tokens)


def kept_share(keep: jax.Array) -> float:
    """The fraction of pairs that a mask keeps, counted row by row, because the whole count may overflow an int32."""
    return np.asarray(keep.sum(axis=1)).sum(dtype=np.int64) / keep.size


def in_torch(pattern: MaskPattern, keep: jax.Array, case: Case, sets: Sequence[InputSet], backend: str) -> Built:
    """Compiled flex_attention under a block mask, made from the pattern's rule or from the bool array `keep`."""
    import torch
    from harness import torch_contenders
    from torch.nn.attention.flex_attention import create_block_mask

    if pattern.window is None:
        array = torch.from_dlpack(keep.astype(jnp.uint8)).bool()
        rule, source = lambda b, h, q_idx, kv_idx: array[q_idx, kv_idx], "array"
    else:
        sizes = (*pattern.window, pattern.tokens, pattern.prefix)
        rule, source = lambda b, h, q_idx, kv_idx: _window_rule(*sizes, q_idx, kv_idx), "rule"
    block_mask = create_block_mask(rule, None, None, case.seq, case.seq, device="cuda", BLOCK_SIZE=BLOCK)
    flex = torch_contenders.flex(case, block_mask=block_mask, backend=backend)
    tensors = torch_contenders.tensors(sets, flex.heads_first)
    call = torch_contenders.in_mode(flex.function, case.mode, tensors, flex.heads_first)
    return Built(call, f"torch.compile(flex_attention), {backend}, block mask from the {source}")


def _window_rule(left: int, right: int, tokens: int, prefix: int, q_idx: Any, kv_idx: Any) -> Any:
    keep = (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)
    if prefix:
        keep = keep | (kv_idx < prefix)
    return keep | (q_idx < tokens) | (kv_idx < tokens) if tokens else keep


def names_of(pattern: str, args: argparse.Namespace) -> list[str]:
    is_window = pattern in ("window", "causal-window")
    return [name for name in args.contenders if is_window or name != "window-argument"]


def build(
    name: str,
    case: Case,
    pattern: MaskPattern,
    keep: jax.Array,
    sets: Sequence[InputSet],
    args: argparse.Namespace,
    is_dynamic: bool = False,
) -> Contender:
    """A contender, compiled and run once.

    keep: the mask as a bool array [seq, seq]. is_dynamic: whether a Mask is given to dynamic_mask_attention.
    """
    contender = Contender(name, framework(name))
    with contender.attempt():
        if name in FLEX:
            need(name)
            with gpu_among_others():
                built = in_torch(pattern, keep, case, sets, FLEX[name])
        elif name == "jax-cudnn-bias":
            need("jax-cudnn")
            plan = "jax.nn.dot_product_attention, cudnn, bias [1, H, T, S]"
            bias = jnp.where(keep, 0, -1e30).astype(sets[0].query.dtype)
            bias = jnp.broadcast_to(bias, (1, case.heads, case.seq, case.seq))
            attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
            built = from_function(lambda bias, *qkv: attend(*qkv, bias=bias), case, sets, plan, bias)
        else:
            is_dynamic = name == "array" or (is_dynamic and name != "dense")
            op = dynamic_mask_attention if is_dynamic else flash_attention
            given, named = of_ours(name, pattern, keep, sets[0], args.implementation)
            plan = str(explain(op, *sets[0].qkv, mask=given, **named))
            built = from_function(lambda m, *qkv: op(*qkv, mask=m, **named), case, sets, plan, given)
        contender.start(built.call, built.plan)
    return contender


def right(case: Case, keep: jax.Array | None, inputs: InputSet) -> list[np.ndarray]:
    """Float32 results, in the case's mode, of the first head of the first batch entry. keep: None for no mask."""
    arrays = [x[:1, :, :1].astype(jnp.float32) for x in (*inputs.qkv, inputs.dout)]
    _in_float32.lower(case.mode, keep, *arrays).compile()
    with gpu_alone():
        return [np.asarray(x) for x in _in_float32(case.mode, keep, *arrays)]


@jax.jit(static_argnums=0)
def _in_float32(mode, keep, query, key, value, dout):
    attend = functools.partial(flash_attention, mask=keep, implementation="xla")
    if mode == "fwd":
        return (attend(query, key, value),)
    out, vjp = jax.vjp(attend, query, key, value)
    return vjp(dout) if mode == "bwd" else (out, *vjp(dout))


def check(contender: Contender, want: Sequence[np.ndarray]) -> None:
    """Judges the outputs of the contender's first call."""
    assert contender.call is not None
    with gpu_alone():
        got = [as_numpy(x[:1, :, :1]) for x in contender.call(0)]
        contender.judge(relative_error(got, want), "float32")


def checked(
    names: Sequence[str],
    case: Case,
    pattern: MaskPattern,
    keep: jax.Array,
    sets: Sequence[InputSet],
    args: argparse.Namespace,
    deadline: float,
    is_dynamic: bool = False,
) -> list[Contender]:
    """The contenders of a case, built and checked."""
    is_late = lambda: time.monotonic() > deadline
    found = [
        skipped(name, framework(name)) if is_late() else build(name, case, pattern, keep, sets, args, is_dynamic)
        for name in names
    ]
    wanted = functools.cache(lambda is_dense: right(case, None if is_dense else keep, sets[0]))
    for contender in found:
        if contender.status == "ok":
            check(contender, wanted(contender.name == "dense"))
        say(f"  {contender.name}: {contender.status} {contender.reason or contender.plan.splitlines()[0]}")
    return found


def row_of(contender: Contender, case: Case, facts: dict[str, Any], dense: Sequence[float]) -> dict[str, Any]:
    row = facts | {"contender": contender.name, "case": case.label, "mode": case.mode} | contender.findings
    if contender.times:
        share = 1.0 if contender.name == "dense" else 1 - facts["sparsity"]
        row |= {
            "tflops": case.flops * share / row["median_ms"] / 1e9,  # only live pairs count
            "faster_than_dense_by": speed_ratio(contender.times, dense) if dense else None,
        }
        if dense:
            say(f"  {contender.name}: {row['faster_than_dense_by']:.2f} times as fast as dense")
    return row


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    prepare_process()
    deadline = time.monotonic() + args.budget
    usable = any(unavailable(name) is None for name in FLEX if name in args.contenders)
    frameworks = ["jax", "torch"] if usable else ["jax"]
    timer_name, timer = choose_timer(args.timer, frameworks)
    methods = {which: METHODS[timer_name][which] for which in frameworks}
    results = report.header(args.commit, usable, timer=timer_name, method=methods, rows=[])
    sets = input_sets(args.cases[0])
    asked = [(name, share) for name in args.pattern for share in (args.sparsity if name in OF_SPARSITY else [None])]
    for name, sparsity in asked:
        facts: dict[str, Any] = {"pattern": name, "sparsity_asked": sparsity}
        names = names_of(name, args)
        # Making the mask may take longer than timing its contenders.
        if time.monotonic() < deadline:
            pattern = pattern_of(name, sparsity, args)
            facts["window"] = pattern.window
            with gpu_among_others():
                keep = jax.jit(lambda mask: mask.to_dense(args.seq_len, args.seq_len)[0, 0])(pattern.mask)
                facts["sparsity"] = 1 - kept_share(keep)
                facts["live_blocks"] = float(pattern.mask.density(args.seq_len, args.seq_len, BLOCK))
        for case in args.cases:
            say(f"{case.label} {', '.join(f'{name} {fact}' for name, fact in facts.items())}")
            if time.monotonic() > deadline:
                say("  skipped: the time budget is spent")
                found = [skipped(name, framework(name)) for name in names]
            else:
                found = checked(names, case, pattern, keep, sets, args, deadline, name == "top-k-blocks")
                alternate(found, timer, rounds=args.rounds, seconds=args.seconds, deadline=deadline, say=say)
            dense = next((c.times for c in found if c.name == "dense"), [])
            results["rows"] += [row_of(contender, case, facts, dense) for contender in found]
            report.write_json(args.output, results)
    close(timer)
    return report.exit_status(row["status"] for row in results["rows"])


if __name__ == "__main__":
    sys.exit(main())
