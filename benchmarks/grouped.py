"""grouped_matmul against jax.lax.ragged_dot, torch._grouped_mm and a dense matmul, in one alternating run.

    PYTHONPATH=. python benchmarks/grouped.py --shapes "32768,1280,2560,64" --output results/grouped.json

A shape is rows,columns,inner,groups. Sizes of the groups: "even"; "skewed", in proportion to 1/1, 1/2, 1/3, ..., in
random order. Peers: "ragged_dot"; "torch", torch._grouped_mm; "dense", one matmul [rows, inner] @ [inner, columns] by
XLA, which has the same FLOPs and reads the weights of one group only; "jla", jax-linear-attention's Hopper kernel, not
by default. --with-gradients times the forward and the gradients of x and w. --epilogue adds a bias and silu to this
library's calls, without peers. --gated times grouped_gated_matmul with silu, and "two": two grouped_matmuls of this
library, with silu by XLA. Torch and dense are then two matmuls each. --gather reads the
rows from an x of a fourth of the rows, by index, without peers; "copy" gathers them by XLA for the planned kernels.
--precision fp8 adds this library's 8-bit calls, judged against XLA's 8-bit results, in the same run: "fp8 NAME", which
quantizes x and the weights; and forward only "fp8 NAME, w quantized", whose weights [G, N, K] were quantized before,
and "fp8 NAME, all quantized", whose x was quantized before too, as by a norm. It works with --gated too.

--sweep times other blocks, forward and gradient of the weights: of the Triton kernels as
"block_m,block_n,block_k,num_warps,num_stages,row_group", or only the changed fields by name, as "num_stages=3"; of the
Hopper kernels as "mosaic_gpu:stages=3,snake=0". With --precision fp8 it times 8-bit calls, whose arrays were quantized
before if there are no gradients.

The exit status is 1 if a contender failed or was wrong.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from harness import case_rows, command_line, report
from harness.cases import ROTATION_BYTES, TOLERANCE, relative_error
from harness.process import prepare_process
from harness.side_by_side import gpu_alone, gpu_among_others
from harness.timers import choose_timer
from harness.timing import Contender, alternate

from jax_kernels import gated_matmul, grouped_gated_matmul, grouped_matmul, matmul, quantize
from jax_kernels.pallas import block_specs

SHAPES = "32768,1280,2560,64;16384,14336,4096,8"
SIZES = ("even", "skewed")
IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
PEERS = ("ragged_dot", "torch", "dense", "jla")
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "tf32": jnp.float32}
SWEPT = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "row_group")


@dataclasses.dataclass(frozen=True)
class Case:
    """A grouped matmul of x [m, k] and w [groups, k, n]. sizes: "even" or "skewed".

    has_epilogue: with a bias and silu. has_gradients: the call is the forward and the gradients of all float arrays.
    is_gated: silu(x @ w_gate) * (x @ w_up), with weights like w. gathers: x is [m / 4, k], and the m rows are
    gathered from it.
    """

    m: int
    n: int
    k: int
    groups: int
    sizes: str
    dtype: str
    has_epilogue: bool = False
    has_gradients: bool = False
    is_gated: bool = False
    gathers: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        return ("w_gate", "w_up") if self.is_gated else ("w",)

    @property
    def label(self) -> str:
        rest = (
            ["gated"] * self.is_gated
            + ["gathered"] * self.gathers
            + ["epilogue"] * self.has_epilogue
            + ["with gradients"] * self.has_gradients
        )
        return " ".join([f"{self.m}x{self.n}x{self.k} {self.groups} {self.sizes} {self.dtype}", *rest])

    @property
    def group_sizes(self) -> np.ndarray:
        """int32 [groups], with the sum m."""
        shares = np.ones(self.groups)
        if self.sizes == "skewed":
            shares = np.random.default_rng(0).permutation(1 / np.arange(1, self.groups + 1))
        ends = np.round(np.cumsum(shares) / shares.sum() * self.m).astype(np.int32)
        return np.diff(ends, prepend=0).astype(np.int32)

    def tflops(self, milliseconds: float) -> float:
        matmuls = len(self.weights) * (3 if self.has_gradients else 1)
        return 2 * self.m * self.n * self.k * matmuls / milliseconds / 1e9

    def arrays(self) -> list[dict[str, jax.Array]]:
        """Sets of x, the weights, group_sizes, with has_epilogue bias, and dout, together larger than the L2 cache."""
        shapes = {"x": (self.m // 4 if self.gathers else self.m, self.k), "dout": (self.m, self.n)}
        shapes |= dict.fromkeys(self.weights, (self.groups, self.k, self.n))
        shapes |= {"bias": (self.groups, self.n)} if self.has_epilogue else {}
        size = jnp.dtype(DTYPES[self.dtype]).itemsize * sum(map(np.prod, shapes.values()))
        normal = lambda key, shape: jax.random.normal(key, shape, DTYPES[self.dtype]) * self.k**-(0.25)
        sets = []
        for seed in range(max(1, min(16, round(ROTATION_BYTES / size)))):
            keys = jax.random.split(jax.random.key(seed), len(shapes))
            made = {name: normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
            made["group_sizes"] = jnp.asarray(self.group_sizes)
            if self.gathers:
                made["gather_indices"] = jax.random.permutation(keys[0], self.m).astype(jnp.int32) // 4
            sets.append(jax.block_until_ready(made))
        return sets

    def call(self, op: Callable[..., Any], arrays: dict[str, jax.Array]) -> Any:
        """The result of op(x=, group_sizes=, ...), with has_gradients followed by the gradients, as a list."""
        integers = {name: x for name, x in arrays.items() if name in ("group_sizes", "gather_indices")}
        given = {name: x for name, x in arrays.items() if name not in (*integers, "dout")}
        run = lambda given: op(**given, **integers)
        if not self.has_gradients:
            return [run(given)]
        out, vjp = jax.vjp(run, given)
        return [out, *jax.tree.leaves(vjp(arrays["dout"]))]


def compiled(case: Case, sets: list[dict[str, Any]], op: Callable[..., Any]) -> Callable[[int], Any]:
    program = jax.jit(functools.partial(case.call, op)).lower(sets[0]).compile()
    return lambda index: program(sets[index % len(sets)])


def ours(
    case: Case, sets: list[dict[str, Any]], implementation: str, blocks: dict[str, int] | None = None
) -> Callable[[int], Any]:
    """The call. blocks: the fields to replace in both of its block specs, by name."""
    options: dict[str, Any] = {"activation": "silu"} if case.has_epilogue else {}
    options |= {"precision": "tf32"} if case.dtype == "tf32" else {}
    op = grouped_gated_matmul if case.is_gated else grouped_matmul
    op = functools.partial(op, implementation=implementation, **options)
    with with_blocks(blocks):
        return compiled(case, sets, op)


def with_blocks(blocks: dict[str, int] | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which the block specs of grouped matmuls have these fields, by name, in both of their parts."""
    found = block_specs.grouped_row

    def grouped_row(*call: Any) -> Any:
        row, source = found(*call)
        parts = (dataclasses.replace(part, **blocks or {}) for part in (row.forward, row.weight_gradient))
        return dataclasses.replace(row, **dict(zip(("forward", "weight_gradient"), parts, strict=True))), source

    return mock.patch.object(block_specs, "grouped_row", grouped_row)


def in_8_bits(
    case: Case,
    sets: list[dict[str, Any]],
    implementation: str,
    *,
    known: Sequence[str] = (),
    blocks: dict[str, int] | None = None,
) -> Callable[[int], Any]:
    """The 8-bit call. known: the arrays, by name, that were quantized before; all weights, or none of them.

    blocks: as in `ours`.
    """
    op = grouped_gated_matmul if case.is_gated else grouped_matmul
    op = functools.partial(op, precision="fp8", implementation=implementation, out_dtype=DTYPES[case.dtype])
    if case.has_epilogue:
        op = functools.partial(op, activation="silu")
    if not known:
        with with_blocks(blocks):
            return compiled(case, sets, op)
    of_rows = jax.jit(lambda y: quantize(y, scaling="row"))
    turned = lambda name, y: y if name == "x" else y.mT
    quantized = lambda arrays: {name: jax.block_until_ready(of_rows(turned(name, arrays[name]))) for name in known}
    given = [arrays | quantized(arrays) for arrays in sets]
    with with_blocks(blocks):
        return compiled(case, given, functools.partial(op, transpose_w=True))


def by_two(case: Case, sets: list[dict[str, Any]], implementation: str) -> Callable[[int], Any]:
    """The gated unit by two grouped_matmuls, with silu by XLA."""
    precision = "tf32" if case.dtype == "tf32" else None

    def op(x, w_gate, w_up, group_sizes):
        multiply = functools.partial(
            grouped_matmul, x, group_sizes=group_sizes, implementation=implementation, precision=precision
        )
        gate, up = (multiply(w).astype(jnp.float32) for w in (w_gate, w_up))
        return (jax.nn.silu(gate) * up).astype(x.dtype)

    return compiled(case, sets, op)


def by_copy(case: Case, sets: list[dict[str, Any]]) -> Callable[[int], Any]:
    """The planned kernels, on rows that XLA gathers into a copy."""
    planned = grouped_gated_matmul if case.is_gated else grouped_matmul
    return compiled(case, sets, lambda x, gather_indices, **given: planned(x[gather_indices], **given))


def by_ragged_dot(case: Case, sets: list[dict[str, Any]]) -> Callable[[int], Any]:
    if case.is_gated:
        raise NotImplementedError("jax.lax.ragged_dot has no gated unit")
    precision: Any = jax.lax.DotAlgorithmPreset.TF32_TF32_F32 if case.dtype == "tf32" else None
    return compiled(case, sets, lambda x, w, group_sizes: jax.lax.ragged_dot(x, w, group_sizes, precision=precision))


def by_jla(case: Case, sets: list[dict[str, Any]]) -> Callable[[int], Any]:
    """jax-linear-attention's kernel, with the option that no row lies past the groups."""
    if case.is_gated:
        raise NotImplementedError("it has no gated unit")
    if importlib.util.find_spec("jla") is None:
        raise NotImplementedError("jla is not installed")
    from jla.ops.mosaic_gpu.ragged_dot import ragged_dot

    return compiled(case, sets, lambda x, w, group_sizes: ragged_dot(x, w, group_sizes, full_groups=True))


def by_dense(case: Case, sets: list[dict[str, Any]]) -> Callable[[int], Any]:
    """A matmul, or gated unit, with the weights of group 0, and the gradients of x and of these weights."""
    precision = "tf32" if case.dtype == "tf32" else None
    dense = gated_matmul if case.is_gated else matmul
    op = lambda group_sizes, **given: dense(**given, implementation="xla", precision=precision)
    return compiled(case, [arrays | {name: arrays[name][0] for name in case.weights} for arrays in sets], op)


def by_torch(case: Case, sets: list[dict[str, Any]]) -> Callable[[int], Any]:
    import torch

    if case.dtype != "bf16":
        raise NotImplementedError("torch._grouped_mm takes bfloat16")
    given = [{name: torch.from_dlpack(x) for name, x in arrays.items()} for arrays in sets]
    moved = sorted(("x", *case.weights))
    given = [arrays | {name: arrays[name].clone().requires_grad_() for name in moved} for arrays in given]
    offsets = [arrays["group_sizes"].cumsum(0, dtype=torch.int32) for arrays in given]

    def call(index: int) -> Any:
        arrays, ends = given[index % len(given)], offsets[index % len(given)]
        with torch.set_grad_enabled(case.has_gradients):
            out, *up = (torch._grouped_mm(arrays["x"], arrays[name], offs=ends) for name in case.weights)
            out = torch.nn.functional.silu(out) * up[0] if up else out
        if not case.has_gradients:
            return [out]
        return [out, *torch.autograd.grad(out, [arrays[name] for name in moved], arrays["dout"])]

    return call


def _implementation(part: str) -> str:
    """The implementation of a part of --sweep: "triton" if it names none."""
    return part.partition(":")[0] if ":" in part else "triton"


def _blocks(part: str) -> dict[str, int]:
    """The fields of a block spec in a part of --sweep, given in order or by name."""
    part = part.rpartition(":")[2]
    if "=" not in part:
        return dict(zip(SWEPT, command_line.numbers(part), strict=True))
    return {name: int(value) for name, value in (word.split("=") for word in part.split(","))}


def contenders_of(case: Case, sets: list[dict[str, Any]], args: argparse.Namespace) -> list[Contender]:
    """The contenders that could be built. JAX's, except the dense matmul, are judged against XLA's results."""
    found: list[Contender] = []
    with gpu_among_others():
        wanted = jax.block_until_ready(ours(case, sets, "xla")(0))

    def add(
        name: str,
        framework: str,
        build: Callable[[], Callable[[int], Any]],
        is_judged: bool = True,
        against: Any = wanted,
    ) -> None:
        contender = Contender(name, framework)
        found.append(contender)
        with contender.attempt():
            output = contender.begin(build)
            if framework == "jax" and is_judged:
                with gpu_alone():
                    contender.judge(relative_error(output, against), "xla", TOLERANCE)

    parts = [part for part in (args.sweep or "").split(";") if part]
    swept = list(dict.fromkeys(_implementation(part) for part in parts))
    for name in swept or args.implementations:
        add(name, "jax", lambda name=name: ours(case, sets, name))
    if args.precision == "fp8":
        with gpu_among_others():
            in_fp8 = jax.block_until_ready(in_8_bits(case, sets, "xla")(0))
        for name in args.implementations:
            if name == "triton":
                continue  # it has no 8-bit matmuls
            known = {"": (), ", w quantized": case.weights, ", all quantized": (*case.weights, "x")}
            for ending, quantized in list(known.items())[: 1 if case.has_gradients else None]:
                build = functools.partial(in_8_bits, case, sets, name, known=quantized)
                add(f"fp8 {name}{ending}", "jax", build, against=in_fp8)
    for part in parts:
        name, blocks = _implementation(part), _blocks(part)
        if args.precision == "fp8":
            known = () if case.has_gradients else (*case.weights, "x")
            build = functools.partial(in_8_bits, case, sets, name, known=known, blocks=blocks)
            add(f"fp8 {part}", "jax", build, against=in_fp8)
        else:
            add(part, "jax", functools.partial(ours, case, sets, name, blocks))
    if case.has_epilogue:
        return found
    if case.gathers:
        add("copy", "jax", lambda: by_copy(case, sets))
        return found
    if case.is_gated:
        first = (swept or args.implementations)[0]
        add("two", "jax", lambda: by_two(case, sets, first))
    if "ragged_dot" in args.peers:
        add("ragged_dot", "jax", lambda: by_ragged_dot(case, sets))
    if "torch" in args.peers:
        add("torch", "torch", lambda: by_torch(case, sets))
    if "jla" in args.peers:
        add("jla", "jax", lambda: by_jla(case, sets))
    if "dense" in args.peers:
        add("dense", "jax", lambda: by_dense(case, sets), is_judged=False)
    return found


def measure(case: Case, timer: Any, args: argparse.Namespace) -> dict[str, Any]:
    with gpu_among_others():
        sets = case.arrays()
    contenders = contenders_of(case, sets, args)
    alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds)
    row = case_rows.row_of(case, contenders, "tflops", case.tflops)
    return row | {"smallest_group": int(case.group_sizes.min()), "largest_group": int(case.group_sizes.max())}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.05, budget=1e9)
    parser.add_argument("--shapes", default=SHAPES, help="rows,columns,inner,groups, separated by ';'")
    parser.add_argument("--sizes", default=",".join(SIZES), help="comma list of even, skewed")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--precision", choices=["fp8"], help="also time 8-bit calls")
    parser.add_argument("--with-gradients", action="store_true", help="time the forward and all gradients")
    parser.add_argument("--gated", action="store_true", help="a gated unit")
    parser.add_argument("--gather", action="store_true", help="gather the rows by index")
    parser.add_argument("--epilogue", action="store_true", help="with a bias and silu")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS), help="comma list of this library's")
    parser.add_argument("--peers", default="ragged_dot,torch,dense")
    parser.add_argument("--sweep", help="blocks of the Triton or Hopper kernels, separated by ';'")
    args = parser.parse_args(argv)
    if args.gated and args.epilogue:
        parser.error("--epilogue: got --gated too, want one of them: a gated unit has no bias")
    if args.precision and args.gather:
        parser.error("--precision: got --gather too, want one of them")
    shapes = [command_line.numbers(part) for part in args.shapes.split(";")]
    kinds = command_line.names("sizes", args.sizes, SIZES)
    args.implementations = command_line.names("implementations", args.implementations, IMPLEMENTATIONS)
    args.peers = command_line.names("peers", args.peers, PEERS) if args.peers else []
    prepare_process()
    until = time.monotonic() + args.budget
    with_torch = "torch" in args.peers and not (args.epilogue or args.gather)
    name, timer = choose_timer(args.timer, ["jax", "torch"] if with_torch else ["jax"])
    results = report.header(args.commit, with_torch, timer=name, rows=[])
    how = {"has_epilogue": args.epilogue, "has_gradients": args.with_gradients, "is_gated": args.gated}
    how["gathers"] = args.gather
    cases = [Case(*shape, kind, args.dtype, **how) for shape in shapes for kind in kinds]
    return case_rows.run(cases, measure, args, timer, results, until)


if __name__ == "__main__":
    sys.exit(main())
