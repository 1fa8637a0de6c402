"""matmul and gated_matmul against cuBLAS and XLA, in one alternating run.

    PYTHONPATH=. python benchmarks/matmul.py --shapes "8192,8192,8192;16384,4096,4096" --output results/matmul.json

Kinds: "plain"; "epilogue", which has a bias and gelu by tanh; "gated", silu(x Wg) * (x Wu); "mlp", a gated unit and a
matmul back to the width of x, not a default. Peers: XLA, torch (cuBLAS, with the epilogue in separate operators) and
torch.compile; for 16 bits QuACK, if it is installed, and for plain matmuls the example that comes with JAX; for fp8,
torch._scaled_mm with and without fast sums. QuACK compiles its epilogues only if its wheels and the CuTe DSL's are in a
folder named site-packages. With block scales the Hopper kernel is also timed with tensor scales.
--with-gradients times the forward and the gradients of all arrays. --sweep times other blocks of the Hopper kernel, as
"block_n,stages,row_group,promoted_steps,cluster,compute_wgs", and --sweep-triton blocks of the Triton kernel, as
"block_m,block_n,block_k,num_warps,num_stages,row_group,split_steps"; or only the changed fields by name, as
"pingpong=1,early_bias=1". The block spec's blocks are timed in the same run.

--weights int8,int4,mxfp8,mxfp4 times x in --dtype with these weights, and with weights in --dtype, in one run, each as
a fraction of the bandwidth of a copy in the same run. --sweep-low-bit times other blocks of the kernels, as
"compute_wgs,stages" for the Hopper kernel, or "cluster_join=1,stages=3" by name, or
"block_m,block_n,block_k,num_warps,num_stages,programs" for the Triton kernel.

    PYTHONPATH=. python benchmarks/matmul.py --weights int4,int8 --shapes 16,8192,8192 --kinds plain --peers ""

The exit status is 1 if a contender failed or was wrong.
"""

import argparse
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
from harness import case_rows, command_line, low_bit_weights, report
from harness.cases import ROTATION_BYTES
from harness.process import prepare_process
from harness.side_by_side import gpu_alone, gpu_among_others
from harness.timers import choose_timer
from harness.timing import Contender, alternate

from jax_kernels import gated_matmul, matmul, mlp
from jax_kernels.pallas import block_specs
from jax_kernels.quantization import quantize

SHAPES = "8192,8192,8192;4096,4096,4096;16384,4096,4096;2048,2048,2048;8192,1024,512"
PEERS = "torch,torch.compile,quack,jax"
KINDS = ("plain", "epilogue", "gated", "mlp")
PRODUCTS = {"plain": 1, "epilogue": 1, "gated": 2, "mlp": 3}
# The blocks of a sweep, by implementation.
SWEPT = {
    "mosaic_gpu": ("block_n", "stages", "row_group", "promoted_steps", "cluster", "compute_wgs"),
    "triton": ("block_m", "block_n", "block_k", "num_warps", "num_stages", "row_group", "split_steps"),
}
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32, "tf32": jnp.float32, "fp8": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Case:
    """A matmul [m, k] @ [k, n]; two for "gated", three for "mlp".

    scaling: of fp8, whose operands are rounded beforehand. has_gradients: the call is the forward and the gradients of
    all arrays.
    """

    kind: str
    m: int
    n: int
    k: int
    dtype: str
    scaling: str | None = None
    has_gradients: bool = False

    @property
    def label(self) -> str:
        rest = self.scaling, "with gradients" if self.has_gradients else None
        return " ".join([f"{self.kind} {self.m}x{self.n}x{self.k} {self.dtype}", *filter(None, rest)])

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the op, without the arrays."""
        if self.dtype == "fp8" and self.has_gradients:
            return {"precision": "fp8", "scaling": self.scaling}
        return {"fp8": {"transpose_w": True}, "tf32": {"precision": "tf32"}}.get(self.dtype, {})

    def tflops(self, milliseconds: float) -> float:
        products = PRODUCTS[self.kind] * (3 if self.has_gradients else 1)
        return 2 * self.m * self.n * self.k * products / milliseconds / 1e9

    def arrays(self) -> list[tuple[Any, ...]]:
        """Sets of (x, w, bias) or (x, w_gate, w_up, w_down), each then out's cotangent, larger than the L2 cache."""
        size = jnp.dtype(DTYPES[self.dtype]).itemsize * (self.m * self.k + self.k * self.n + self.m * self.n)
        rest = {"plain": [], "epilogue": [(self.n,)], "gated": [(self.k, self.n)]}
        rest["mlp"] = [(self.k, self.n), (self.n, self.k)]
        shapes = [(self.m, self.k), (self.k, self.n), *rest[self.kind]]
        normal = lambda key, shape: jax.random.normal(key, shape, DTYPES[self.dtype]) * self.k**-(0.25)
        sets = []
        for seed in range(max(1, min(16, round(ROTATION_BYTES / size)))):
            keys = jax.random.split(jax.random.key(seed), len(shapes))
            made = tuple(normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
            if self.dtype == "fp8" and not self.has_gradients:
                made = tuple(self._quantized(x, i) for i, x in enumerate(made))
            if self.has_gradients:
                made = (*made, normal(jax.random.key(100 + seed), (self.m, self.k if self.kind == "mlp" else self.n)))
            sets.append(jax.block_until_ready(made))
        return sets

    def _quantized(self, x: jax.Array, nth: int) -> Any:
        """x, or a w as [n, k], in 8 bits; a bias unchanged."""
        if x.ndim == 1:
            return x
        return jax.jit(functools.partial(quantize, scaling=self.scaling))(x.T if nth else x)

    @property
    def function(self) -> Callable[..., Any]:
        """The op on a set of arrays."""
        ops = {
            "gated": gated_matmul,
            "mlp": lambda x, gate, up, down, **given: mlp(x, up, down, w_gate=gate, **given),
            "plain": matmul,
            "epilogue": lambda x, w, bias, **given: matmul(x, w, bias=bias, activation="gelu_tanh", **given),
        }
        call = functools.partial(ops[self.kind], **self.options)
        if not self.has_gradients:
            return call

        def with_gradients(*arrays, **given):
            out, vjp = jax.vjp(functools.partial(call, **given), *arrays[:-1])
            return out, *vjp(arrays[-1])

        return with_gradients


def ours(
    case: Case, sets: list[Any], implementation: str, blocks: dict[str, int] | None = None
) -> Callable[[int], Any]:
    """The call. blocks: the fields to replace in the plan, by name."""
    run = functools.partial(case.function, implementation=implementation)
    if blocks:
        run = functools.partial(_with_blocks, case, implementation, blocks)
    compiled = jax.jit(run).lower(*sets[0]).compile()
    return lambda index: compiled(*sets[index % len(sets)])


def _with_blocks(case: Case, implementation: str, blocks: dict[str, int], *arrays: Any) -> Any:
    """The call of a kernel, with other blocks in the plans of all its matmuls."""
    found = block_specs.matmul_row

    def matmul_row(capability: tuple[int, int], name: str, call: Any) -> Any:
        row, source = found(capability, name, call)
        if name == implementation:
            row = dataclasses.replace(row, config=dataclasses.replace(row.config, **blocks))
        return row, source

    with mock.patch.object(block_specs, "matmul_row", matmul_row):
        return case.function(*arrays, implementation=implementation)


def by_torch(case: Case, sets: list[Any], compiled: bool) -> Callable[[int], Any]:
    import torch
    from torch.nn import functional

    if case.dtype == "fp8" and case.has_gradients:
        raise NotImplementedError("torch has no gradients of 8-bit matmuls")
    if case.dtype == "fp8":
        return _scaled_mm(case, sets, is_fast=compiled)
    torch.set_float32_matmul_precision("high" if case.dtype == "tf32" else "highest")
    given = [tuple(torch.from_dlpack(x) for x in arrays) for arrays in sets]
    functions = {
        "plain": lambda x, w: x @ w,
        "epilogue": lambda x, w, bias: functional.gelu(torch.addmm(bias, x, w), approximate="tanh"),
        "gated": lambda x, w, up: functional.silu(x @ w) * (x @ up),
        "mlp": lambda x, w, up, down: (functional.silu(x @ w) * (x @ up)) @ down,
    }
    function = functions[case.kind]
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function)

    if case.has_gradients:
        leaves = [tuple(x.clone().requires_grad_() for x in arrays[:-1]) for arrays in given]

        def both(index):
            arrays = leaves[index % len(given)]
            out = function(*arrays)
            return out, *torch.autograd.grad(out, arrays, given[index % len(given)][-1])

        return both

    def call(index):
        with torch.no_grad():
            return function(*given[index % len(given)])

    return call


def by_quack(case: Case, sets: list[Any]) -> Callable[[int], Any]:
    """QuACK's matmul with its epilogue, with its blocks without a search."""
    if case.dtype not in ("bf16", "fp16") or (case.has_gradients and case.kind != "mlp"):
        raise NotImplementedError(
            "QuACK is timed only for 16-bit matmuls, with gradients only for mlp, whose kernels it fuses"
        )
    if importlib.util.find_spec("quack") is None:
        raise NotImplementedError("QuACK is not installed")
    import torch
    from quack.gemm_interface import gemm, gemm_act

    given = [tuple(torch.from_dlpack(x) for x in arrays) for arrays in sets]
    if case.kind == "mlp":
        return _mlp_by_quack(case, given)
    act = functools.partial(gemm_act, store_preact=False, tuned=False)
    if case.kind == "gated":  # QuACK interleaves the columns of the two weights
        given = [(x, torch.stack((w, up), dim=-1).flatten(-2)) for x, w, up in given]
    calls = {
        "plain": lambda x, w: gemm(x, w, tuned=False),
        "epilogue": lambda x, w, bias: act(x, w, bias=bias, activation="gelu_tanh_approx")[1],
        "gated": lambda x, w: act(x, w, activation="swiglu")[1],
    }
    return lambda index: calls[case.kind](*given[index % len(given)])


def _mlp_by_quack(case: Case, given: list[Any]) -> Callable[[int], Any]:
    """QuACK's gated block of a model. Its gradients are for weights in PyTorch's layout, [out, in]."""
    import torch
    from quack.mlp import mlp_func

    def leaves(x, gate, up, down, *_):
        both = torch.stack((gate, up), dim=-1).flatten(-2)
        return [y.t().contiguous().requires_grad_() for y in (x.t(), both, down)]

    sets = [leaves(*arrays) for arrays in given]
    run = functools.partial(mlp_func, activation="swiglu", tuned=False)

    def both(index):
        arrays = sets[index % len(sets)]
        out = run(*arrays)
        return out, *torch.autograd.grad(out, arrays, given[index % len(sets)][-1])

    def forward(index):
        with torch.no_grad():
            return run(*sets[index % len(sets)])

    return both if case.has_gradients else forward


def by_jax(case: Case, sets: list[Any]) -> Callable[[int], Any]:
    """The Hopper example that comes with JAX."""
    if case.kind != "plain" or case.dtype not in ("bf16", "fp16") or case.has_gradients:
        raise NotImplementedError("JAX's example has only plain 16-bit matmuls, without gradients")
    if jax.default_backend() != "gpu":
        raise NotImplementedError("JAX's example needs a GPU")
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as peer

    config = peer.TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=4,
        grid_minor_dim=peer.MatmulDimension.M,
        grid_tile_width=8,
        wg_dimension=peer.MatmulDimension.N,
    )
    run = lambda x, w: peer.matmul(x, w, None, config)
    compiled = jax.jit(run).lower(*sets[0]).compile()
    return lambda index: compiled(*sets[index % len(sets)])


def _scaled_mm(case: Case, sets: list[Any], is_fast: bool) -> Callable[[int], Any]:
    """torch._scaled_mm with 8-bit operands. is_fast: sums stay in the tensor cores."""
    import torch

    if case.kind != "plain" or case.scaling == "block":
        raise NotImplementedError("torch has no single operator for this 8-bit matmul")
    given = []
    for x, w in sets:
        values = [torch.from_dlpack(y.values.view(jnp.uint8)).view(torch.float8_e4m3fn) for y in (x, w)]
        scales = [torch.from_dlpack(y.scale) for y in (x, w)]
        if case.scaling == "row":
            scales = [scales[0][:, None], scales[1][None]]
        given.append((values[0], values[1].t(), *scales))

    def call(index):
        x, w, x_scale, w_scale = given[index % len(given)]
        return torch._scaled_mm(x, w, x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=is_fast)

    return call


def _error(output: Any, wanted: Any) -> float:
    """The largest relative error in the 2-norm of the results."""

    def of_one(output, wanted):
        x, y = (np.asarray(z).astype(np.float32) for z in (output, wanted))
        return float(np.linalg.norm(x - y) / np.linalg.norm(y))

    return max(jax.tree.leaves(jax.tree.map(of_one, output, wanted)))


def _blocks(part: str, names: Sequence[str]) -> dict[str, int]:
    """The fields of a block spec in a part of --sweep, given in order or by name."""
    if "=" not in part:
        return dict(zip(names, command_line.numbers(part), strict=True))
    return {name: int(value) for name, value in (word.split("=") for word in part.split(","))}


def contenders_of(case: Case, sets: list[Any], args: argparse.Namespace) -> list[Contender]:
    """The contenders that could be built. JAX's are judged against XLA."""
    found: list[Contender] = []
    with gpu_among_others():
        wanted = jax.block_until_ready(ours(case, sets, "xla")(0))

    def add(name: str, framework: str, build: Callable[[], Callable[[int], Any]], is_judged: bool = True) -> None:
        contender = Contender(name, framework)
        found.append(contender)
        with contender.attempt():
            output = contender.begin(build)
            if framework == "jax" and is_judged:
                with gpu_alone():
                    contender.judge(_error(output, wanted), "xla")

    for implementation, text in (("mosaic_gpu", args.sweep), ("triton", args.sweep_triton)):
        if text:
            add("row", "jax", lambda name=implementation: ours(case, sets, name))
            for part in text.split(";"):
                blocks = _blocks(part, SWEPT[implementation])
                add(part, "jax", lambda name=implementation, blocks=blocks: ours(case, sets, name, blocks))
    for name in () if args.sweep or args.sweep_triton else args.implementations:
        add(name, "jax", lambda name=name: ours(case, sets, name))
    if case.scaling == "block" and "mosaic_gpu" in args.implementations:
        of_tensors = dataclasses.replace(case, scaling="tensor")  # its operands are rounded differently
        add("scales of tensors", "jax", lambda: ours(of_tensors, of_tensors.arrays(), "mosaic_gpu"), is_judged=False)
    for name in ("torch", "torch.compile"):
        if name in args.peers:
            told = {"torch": "_scaled_mm", "torch.compile": "_scaled_mm fast"}[name] if case.dtype == "fp8" else name
            add(told, "torch", lambda name=name: by_torch(case, sets, name == "torch.compile"))
    for name, framework, build in (("quack", "torch", by_quack), ("jax", "jax", by_jax)):
        if name in args.peers:
            add(name, framework, lambda build=build: build(case, sets))
    return found


def measure(case: Case, timer: Any, args: argparse.Namespace) -> dict[str, Any]:
    with gpu_among_others():
        sets = case.arrays()
    contenders = contenders_of(case, sets, args)
    alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds)
    return case_rows.row_of(case, contenders, "tflops", case.tflops)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.05, budget=1e9)
    parser.add_argument("--shapes", default=SHAPES, help="m,n,k, separated by ';'")
    parser.add_argument("--kinds", default="plain,epilogue,gated")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--scaling", default="tensor", help="comma list of fp8 scalings: tensor, row, block")
    parser.add_argument("--with-gradients", action="store_true", help="time the forward and all gradients")
    parser.add_argument("--implementations", default="mosaic_gpu,triton,xla", help="comma list of this library's")
    parser.add_argument("--peers", help=f"default {PEERS}; none with a sweep")
    parser.add_argument("--sweep", help="blocks of the Hopper kernel, separated by ';'")
    parser.add_argument("--sweep-triton", help="blocks of the Triton kernel, separated by ';'")
    parser.add_argument("--weights", default="", help="comma list of int8, int8_row, int4, mxfp8, mxfp4")
    parser.add_argument("--sweep-low-bit", help="blocks of the kernel of --weights, separated by ';'")
    args = parser.parse_args(argv)
    shapes = [command_line.numbers(part) for part in args.shapes.split(";")]
    kinds = command_line.names("kinds", args.kinds, KINDS)
    args.implementations = command_line.names("implementations", args.implementations, ("mosaic_gpu", "triton", "xla"))
    if args.peers is None:
        args.peers = "" if args.sweep or args.sweep_triton else PEERS
    args.peers = args.peers.split(",")
    prepare_process()
    until = time.monotonic() + args.budget
    with_torch = not args.weights and any(args.peers)
    name, timer = choose_timer(args.timer, ["jax", "torch"] if with_torch else ["jax"])
    results = report.header(args.commit, with_torch, timer=name, rows=[])
    if args.weights:
        return low_bit_weights.main(args, [(kind, *shape) for shape in shapes for kind in kinds], timer, results)
    scalings = args.scaling.split(",") if args.dtype == "fp8" else [None]
    cases = [
        Case(kind, *shape, args.dtype, scaling, args.with_gradients)
        for shape in shapes
        for kind in kinds
        for scaling in scalings
    ]
    return case_rows.run(cases, measure, args, timer, results, until)


if __name__ == "__main__":
    sys.exit(main())
