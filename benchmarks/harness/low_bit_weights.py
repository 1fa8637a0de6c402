"""benchmarks/matmul.py --weights: matmuls with low-bit weights and with 16-bit weights, and a copy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness import command_line, report
from harness.cases import ROTATION_BYTES
from harness.process import say
from harness.timers import close
from harness.timing import Contender, alternate, speed_ratio, spread
from jax_kernels import gated_matmul, matmul
from jax_kernels.ops.matmul import checks
from jax_kernels.ops.matmul import matmul as ops
from jax_kernels.quantization import quantize

SWEPT = {
    "mosaic_gpu": ("compute_wgs", "stages"),
    "triton": ("block_m", "block_n", "block_k", "num_warps", "num_stages", "programs"),
}
FORMATS = ("int8", "int8_row", "int4", "mxfp8", "mxfp4")
COPIED_BYTES = 1 << 30
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """A matmul [m, k] @ [k, n] of x in `dtype` with weights in `weights`, or in `dtype` if None."""

    kind: str
    m: int
    n: int
    k: int
    dtype: str
    weights: str | None = None

    def arrays(self) -> list[tuple[Any, ...]]:
        """Sets of (x, w, bias) or (x, w_gate, w_up), together larger than the L2 cache."""
        count = 2 if self.kind == "gated" else 1
        size = {None: 2.0, "int4": 0.5, "mxfp4": 0.5}.get(self.weights, 1.0) * self.k * self.n * count
        sets = []
        for seed in range(max(2, min(64, round(ROTATION_BYTES / size)))):
            keys = jax.random.split(jax.random.key(seed), 3)
            normal = lambda key, *shape: jax.random.normal(key, shape, DTYPES[self.dtype]) * self.k**-0.25
            weights = [self._quantized(normal(key, self.k, self.n)) for key in keys[1 : 1 + count]]
            rest = (normal(keys[2], self.n),) if self.kind == "epilogue" else ()
            sets.append(jax.block_until_ready((normal(keys[0], self.m, self.k), *weights, *rest)))
        return sets

    def _quantized(self, w: jax.Array) -> Any:
        if self.weights is None:
            return w
        format, _, scaling = self.weights.partition("_")
        return jax.jit(functools.partial(quantize, format=format, scaling=scaling or None))(w)

    def call(self, arrays: tuple[Any, ...], implementation: str | None) -> Any:
        if self.kind == "gated":
            return gated_matmul(*arrays, implementation=implementation)
        bias = {"bias": arrays[2], "activation": "gelu_tanh"} if self.kind == "epilogue" else {}
        return matmul(*arrays[:2], **bias, implementation=implementation)

    def checked(self, arrays: tuple[Any, ...]) -> Any:
        """(the op, its request, arrays and options)."""
        if self.kind == "gated":
            x, w_gate, w_up = arrays
            return ops.GATED, *checks.check_gated(x=x, w_gate=w_gate, w_up=w_up)
        bias = {"bias": arrays[2], "activation": "gelu_tanh"} if self.kind == "epilogue" else {}
        return ops.OP, *checks.check(x=arrays[0], w=arrays[1], **bias)


def bytes_of(arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def rotated(function: Callable[..., Any], sets: list[Any]) -> Callable[[int], Any]:
    compiled = jax.jit(function).lower(*sets[0]).compile()
    return lambda index: compiled(*sets[index % len(sets)])


def copy() -> Contender:
    """A copy that reads and writes 1 GiB."""
    contender = Contender("copy", "jax")
    x = jnp.zeros(COPIED_BYTES // 4, jnp.int32)
    with contender.attempt():
        contender.start(rotated(lambda x: x + 1, [(x,)]))
    return contender


def with_blocks(case: Case, implementation: str, blocks: dict[str, Any], *arrays: Any) -> Any:
    """The call of a kernel with other blocks."""
    op, request, inputs, options = case.checked(arrays)
    call = op.call(request, options, implementation)
    config = dataclasses.replace(call.config, forward=dataclasses.replace(call.config.forward, **blocks))
    return ops.run(dataclasses.replace(call, config=config), inputs)


def swept(part: str) -> tuple[str, dict[str, int]]:
    """(implementation, blocks) of a part of --sweep-low-bit: numbers in order, or by name, of the Hopper kernel."""
    if "=" in part:
        return "mosaic_gpu", {name: int(value) for name, value in (word.split("=") for word in part.split(","))}
    found = command_line.numbers(part)
    by = next((by for by, names in SWEPT.items() if len(names) == len(found)), None)
    if by is None:
        wanted = " or ".join(", ".join(names) for names in SWEPT.values())
        raise ValueError(f"--sweep-low-bit: got {part!r}, want {wanted}")
    return by, dict(zip(SWEPT[by], found, strict=True))


def contenders_of(case: Case, sets: list[Any], sweep: str | None, name: str) -> list[Contender]:
    """The kernels and XLA, or the kernels with other blocks, judged against XLA."""
    calls: dict[str, Callable[..., Any]] = {}
    if case.weights is None:
        calls = {name: lambda *arrays: case.call(arrays, "xla")}
    else:
        named = [] if sweep else ["mosaic_gpu", "triton", "xla"]
        for implementation in named:
            calls[f"{name} {implementation}"] = lambda *arrays, by=implementation: case.call(arrays, by)
        for part in sweep.split(";") if sweep else ():
            by, blocks = swept(part)
            calls[f"{name} {part}"] = functools.partial(with_blocks, case, by, blocks)
    right = np.asarray(case.call(sets[0], "xla")).astype(np.float32)
    contenders = []
    for label, function in calls.items():
        contender = Contender(label, "jax")
        contenders.append(contender)
        with contender.attempt():
            output = np.asarray(contender.start(rotated(function, sets))).astype(np.float32)
            contender.judge(float(np.linalg.norm(output - right) / np.linalg.norm(right)), "xla")
    return contenders


def measure(kind: str, sizes: tuple[int, int, int], timer: Any, args: Any) -> dict[str, Any]:
    """The row of results of one matmul with all kinds of weights."""
    copied = copy()
    contenders, read = [copied], {"copy": 2 * COPIED_BYTES}
    for weights in (None, *args.weights.split(",")):
        case = Case(kind, *sizes, args.dtype, weights)
        sets = case.arrays()
        found = contenders_of(case, sets, args.sweep_low_bit, weights or args.dtype)
        read |= {contender.name: bytes_of(sets[0]) for contender in found}
        contenders += found
    alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds)
    label = f"{kind} {'x'.join(map(str, sizes))} {args.dtype}"
    row: dict[str, Any] = {"label": label, "contenders": []}
    times = {c.name: c.times for c in contenders if c.times}
    bandwidth = {name: read[name] / spread(ms)["median"] * 1e-9 for name, ms in times.items()}  # TB/s
    say(f"{label}: copy {bandwidth.get('copy', 0):.2f} TB/s")
    for contender in contenders:
        found = {"name": contender.name, "framework": "jax", **contender.findings}
        if contender.times and contender is not copied:
            found["terabytes_per_second"] = bandwidth[contender.name]
            found["share_of_copy"] = bandwidth[contender.name] / bandwidth["copy"] if "copy" in bandwidth else None
            base = times.get(args.dtype)
            found["times_as_fast"] = speed_ratio(contender.times, base) if base else None
            say(
                f"  {contender.name}: {spread(contender.times)['median']:.4f} ms, "
                f"{found['share_of_copy'] or 0:.2f} of the copy, {found['times_as_fast'] or 0:.2f} x {args.dtype}"
            )
        elif contender.status != "ok":
            say(f"  {contender.name}: {contender.status}: {contender.reason}")
        row["contenders"].append(found)
    return row


def main(args: Any, products: list[tuple[Any, ...]], timer: Any, results: dict[str, Any]) -> int:
    command_line.names("weights", args.weights, FORMATS)
    if args.dtype not in DTYPES:
        raise SystemExit(f"--dtype: got {args.dtype} with --weights, want one of {', '.join(DTYPES)}")
    for kind, *sizes in products:
        results["rows"].append(measure(kind, tuple(sizes), timer, args))  # type: ignore[arg-type]
        report.write_json(args.output, results)
    close(timer)
    return report.exit_status(x["status"] for row in results["rows"] for x in row["contenders"])
