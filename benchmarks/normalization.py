"""layer_norm and rms_norm against their peers, forward and backward, in one alternating run.

    PYTHONPATH=. python benchmarks/normalization.py --shapes "32768,4096;65536,1024" --output results/normalization.json

Peers: XLA, torch, torch.compile, and Liger and QuACK if they are installed. The copy of an array of x's size gives the
bandwidth of the run: a forward moves the same number of bytes, a backward 1.5 times this number. --sweep times other
blocks of this library's kernels, and the block specs': for Triton as "block_rows,num_warps" forward and
"block_rows,num_warps,programs[,chunk]" backward, for Hopper as "sm90:row_warps,warpgroups,stages" in both directions,
or any field by name as "fwd:triton:num_warps=8,programs=4". Hopper blocks that do not fit a shape are skipped, unless
they are given by name.

The exit status is 1 if a contender failed or was wrong.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from harness import case_rows, command_line, report
from harness.process import prepare_process
from harness.side_by_side import gpu_alone, gpu_among_others
from harness.timers import choose_timer
from harness.timing import Contender, alternate

from jax_kernels import explain, layer_norm, rms_norm
from jax_kernels.inputs.normalization import NormOptions
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.normalization_specs import NormSm90
from jax_kernels.pallas.normalization.sm90.traits import Traits, row_warps_of

SHAPES = "32768,4096;16384,8192;65536,1024;8192,16384"
OPS = {"layer_norm": layer_norm, "rms_norm": rms_norm}
IMPLEMENTATIONS = "triton", "mosaic_gpu", "xla"
EPS = 1e-6
TRITON_BLOCKS = ("block_rows", "num_warps", "programs", "chunk")
HOPPER_BLOCKS = ("row_warps", "warpgroups", "stages")


@dataclasses.dataclass(frozen=True)
class Case:
    op: str
    mode: str
    rows: int
    columns: int

    @property
    def label(self) -> str:
        return f"{self.op} {self.mode} {self.rows}x{self.columns} bf16"

    @property
    def megabytes(self) -> float:
        """The minimum traffic to and from device memory."""
        return {"fwd": 2, "bwd": 3}[self.mode] * 2 * self.rows * self.columns / 1e6


@dataclasses.dataclass(frozen=True)
class Arrays:
    """x, dout: [rows, columns]; scale, bias: [columns]; all bfloat16."""

    x: Any
    scale: Any
    bias: Any
    dout: Any

    @classmethod
    def of(cls, case: Case) -> "Arrays":
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = (case.rows, case.columns), (case.columns,), (case.columns,), (case.rows, case.columns)
        return cls(*(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)))

    def weights(self, op: str) -> tuple[Any, ...]:
        return (self.scale, self.bias) if op == "layer_norm" else (self.scale,)

    def in_torch(self) -> "Arrays":
        import torch

        return Arrays(*(torch.from_dlpack(x) for x in (self.x, self.scale, self.bias, self.dout)))


def ours(case: Case, arrays: Arrays, implementation: str, blocks: dict[str, int] | None = None) -> Callable[[int], Any]:
    """The call. blocks: the fields to replace in the forward's or the backward's blocks, by name."""
    op, weights = OPS[case.op], arrays.weights(case.op)
    norm = lambda x, *weights: op(x, *weights, eps=EPS, implementation=implementation)
    if blocks:
        norm = lambda x, *weights: _with_blocks(case, weights, implementation, blocks, x)
    if case.mode == "fwd":
        run = jax.jit(norm).lower(arrays.x, *weights).compile()
        return lambda index: run(arrays.x, *weights)
    _, vjp = jax.vjp(norm, arrays.x, *weights)
    backward = jax.jit(lambda vjp, dout: vjp(dout)).lower(vjp, arrays.dout).compile()
    return lambda index: backward(vjp, arrays.dout)


def _with_blocks(case: Case, weights: tuple[Any, ...], implementation: str, blocks: dict[str, int], x: Any) -> Any:
    """The call with other blocks in its plan. A forward that splits rows over CTAs has Triton's backward."""
    found, direction = block_specs.norm_row, {"fwd": "forward", "bwd": "backward"}[case.mode]

    def norm_row(capability: tuple[int, int], name: str, **call: Any) -> Any:
        row, source = found(capability, name, **call)
        if name != implementation:
            return row, source
        if blocks.get("cluster", 1) > 1:
            row = dataclasses.replace(row, backward=found(capability, "triton", **call)[0].backward)
        changed = dataclasses.replace(getattr(row, direction), **blocks)
        return dataclasses.replace(row, **{direction: changed}), source

    with mock.patch.object(block_specs, "norm_row", norm_row):
        return OPS[case.op](x, *weights, eps=EPS, implementation=implementation)


def by_torch(
    case: Case, arrays: Arrays, function: Callable[..., Any], weights_in_float32: bool = False
) -> Callable[[int], Any]:
    """The call of function(x, *weights), or of its backward."""
    import torch

    given = arrays.in_torch()
    weights = given.weights(case.op)
    if weights_in_float32:
        weights = tuple(x.float() for x in weights)
    if case.mode == "fwd":
        with torch.no_grad():
            function(given.x, *weights)

        def forward(index):
            with torch.no_grad():
                return function(given.x, *weights)

        return forward
    leaves = [x.detach().requires_grad_() for x in (given.x, *weights)]
    out = function(*leaves)
    return lambda index: torch.autograd.grad(out, leaves, given.dout, retain_graph=True)


def torch_functions(op: str) -> dict[str, Callable[[], Callable[..., Any]]]:
    """By name, makers of functions of (x, *weights). A maker may raise ImportError."""

    def plain():
        from torch.nn import functional

        norm = {"layer_norm": functional.layer_norm, "rms_norm": functional.rms_norm}[op]
        return lambda x, *weights: norm(x, x.shape[-1:], *weights, eps=EPS)

    def compiled():
        import torch

        torch._dynamo.reset()  # else the shapes of earlier cases count as recompilations
        torch._functorch.config.donated_buffer = False  # several backwards use the same graph
        return torch.compile(plain())

    def liger():
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        function = {"layer_norm": LigerLayerNormFunction, "rms_norm": LigerRMSNormFunction}[op]
        return lambda x, *weights: function.apply(x, *weights, EPS)

    def quack():
        import quack

        if op == "layer_norm":
            return _quack_layer_norm()
        return lambda x, scale: quack.rmsnorm(x, scale, eps=EPS)

    return {"torch": plain, "torch.compile": compiled, "liger": liger, "quack": quack}


def _quack_layer_norm() -> Callable[..., Any]:
    """QuACK's layer norm, with the gradients for which QuACK has functions. Its weights are float32."""
    import torch
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale, bias):
            out, inverse, mean = layernorm_fwd(x, scale, bias, eps=EPS, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, scale, inverse, mean)
            return out

        @staticmethod
        def backward(ctx, dout):
            x, scale, inverse, mean = ctx.saved_tensors
            return layernorm_bwd(x, scale, dout, inverse, mean)

    return lambda x, scale, bias: Function.apply(x, scale, bias)


def _error(outputs: Any, wanted: Any) -> float:
    """The largest relative error of the outputs, in the 2-norm."""
    leaves = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree)]
    numbers = lambda x: x.astype(np.float32)
    return max(
        float(np.linalg.norm(numbers(x) - numbers(y)) / np.linalg.norm(numbers(y)))
        for x, y in zip(leaves(outputs), leaves(wanted), strict=True)
    )


def contenders_of(case: Case, arrays: Arrays, args: argparse.Namespace) -> list[Contender]:
    """The contenders that could be built, each judged against XLA in bfloat16."""
    found: list[Contender] = []
    wanted: Any = None

    def add(name: str, framework: str, build: Callable[[], Callable[[int], Any]], plan: str = "") -> None:
        contender = Contender(name, framework)
        found.append(contender)
        with contender.attempt():
            try:
                outputs = contender.begin(build, plan)
            except ImportError as error:
                raise NotImplementedError(f"not installed: {error}") from None
            if framework == "jax" and name != "copy" and wanted is not None:
                with gpu_alone():
                    contender.judge(_error(outputs, wanted), "xla")

    with gpu_among_others():
        wanted = jax.block_until_ready(ours(case, arrays, "xla")(0))
    if args.sweep:
        for implementation, blocks in _blocks(case, args.sweep):
            name = " ".join([implementation, *(f"{key}={x}" for key, x in blocks.items())])
            build = functools.partial(ours, case, arrays, implementation, blocks)
            add(name, "jax", build)
        add("copy", "jax", lambda: copy_of(arrays))
        return found
    plan = str(explain(OPS[case.op], arrays.x, *arrays.weights(case.op)))
    for name in args.implementations:
        add(name, "jax", lambda name=name: ours(case, arrays, name), "" if found else plan)
    for name, function in torch_functions(case.op).items():
        if name in args.peers:
            is_wide = name == "quack" and case.op == "layer_norm"  # it takes no other weights
            add(name, "torch", lambda function=function, is_wide=is_wide: by_torch(case, arrays, function(), is_wide))
    add("copy", "jax", lambda: copy_of(arrays))
    return found


def copy_of(arrays: Arrays) -> Callable[[int], Any]:
    copy = jax.jit(jnp.copy).lower(arrays.x).compile()
    return lambda index: copy(arrays.x)


def _blocks(case: Case, text: str) -> list[tuple[str, dict[str, int]]]:
    """(implementation, blocks): the block specs', then --sweep's, for the case's direction and columns."""
    modes = {2: "fwd", 3: "bwd", 4: "bwd"}
    found: list[tuple[str, dict[str, int]]] = [("triton", {}), ("mosaic_gpu", {})]
    for part in text.split(";"):
        if "=" in part:
            mode, implementation, words = part.split(":")
            if mode == case.mode:
                named = {key: int(x) for key, x in (word.split("=") for word in words.split(","))}
                found.append((implementation, named))
            continue
        is_hopper, numbers = part.startswith("sm90:"), [int(word) for word in part.removeprefix("sm90:").split(",")]
        if is_hopper and _fits(case, NormSm90(**dict(zip(HOPPER_BLOCKS, numbers, strict=True)))):
            found.append(("mosaic_gpu", dict(zip(HOPPER_BLOCKS, numbers, strict=True))))
        elif not is_hopper and modes[len(numbers)] == case.mode:
            found.append(("triton", dict(zip(TRITON_BLOCKS, numbers, strict=False))))
    return found


def _fits(case: Case, blocks: NormSm90) -> bool:
    """Whether the Hopper kernel takes exactly these blocks, and does not adjust them to the columns."""
    x = jax.ShapeDtypeStruct((case.rows, case.columns), jnp.bfloat16)
    if row_warps_of(case.columns, blocks.row_warps) != blocks.row_warps:
        return False
    sizes = {"fwd": {"copies": 1}, "bwd": {"copies": 2, "scale_bytes": 2 * case.columns}}[case.mode]
    options = NormOptions(is_centred=case.op == "layer_norm", eps=EPS)
    traits = Traits.of(x, options, blocks, core_count=1, **sizes)
    return (traits.warpgroups, traits.stages) == (blocks.warpgroups, blocks.stages)


def measure(case: Case, timer: Any, args: argparse.Namespace) -> dict[str, Any]:
    with gpu_among_others():
        arrays = Arrays.of(case)
    contenders = contenders_of(case, arrays, args)
    alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds)
    return case_rows.row_of(case, contenders, "gigabytes_per_second", lambda ms: case.megabytes / ms)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.05, budget=1e9)
    parser.add_argument("--shapes", default=SHAPES, help="rows,columns, separated by ';'")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--modes", default="fwd,bwd")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS), help="comma list of this library's")
    parser.add_argument("--peers", default="torch,torch.compile,liger,quack")
    parser.add_argument("--sweep", help="blocks, separated by ';'")
    args = parser.parse_args(argv)
    shapes = [[int(word) for word in part.split(",")] for part in args.shapes.split(";")]
    ops = command_line.names("ops", args.ops, tuple(OPS))
    modes = command_line.names("modes", args.modes, ("fwd", "bwd"))
    args.implementations = command_line.names("implementations", args.implementations, IMPLEMENTATIONS)
    args.peers = args.peers.split(",")
    prepare_process()
    until = time.monotonic() + args.budget
    with_torch = not args.sweep and bool(args.peers)
    name, timer = choose_timer(args.timer, ["jax", "torch"] if with_torch else ["jax"])
    results = report.header(args.commit, with_torch, timer=name, rows=[])
    cases = [Case(op, mode, *shape) for shape in shapes for op in ops for mode in modes]
    return case_rows.run(cases, measure, args, timer, results, until)


if __name__ == "__main__":
    sys.exit(main())
