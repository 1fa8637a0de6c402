"""Error against float64 of this library's matmuls and of PyTorch's (cuBLAS on a GPU), on the same inputs.

    PYTHONPATH=. python benchmarks/matmul_accuracy.py --output results/matmul-accuracy.json

The error of an array is the root mean square of the difference over the root mean square of the float64 array. A row of
results has the errors of out and, except for 8-bit matmuls, of the gradients of x and w. The first implementation that
supports a matmul is compared with PyTorch: its error may be at most 1.05 times PyTorch's for 8 and 16 bits, and 1.5
times for float32 and tf32, whose sums have another order.

The exit status is 1 if an implementation failed, or its error is above the limit.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import command_line, report
from harness.process import say
from harness.timing import Contender

from jax_kernels import bridge

KINDS = {"bfloat16": 1.05, "float16": 1.05, "float32": 1.5, "tf32": 1.5, "fp8": 1.05}
RESULTS = ("out", "dx", "dw")
SHAPES = ("512,1024,4096", "16,2048,8192", "1000,1536,520", "4096,4096,4096")
EXACT = 1e-12  # smaller errors count as 0
IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")


def draw(kind: str, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K], w [K, N] and out's cotangent [M, N]. shape: (M, N, K)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(sum(shape))
    normal = lambda *sizes: torch.randn(sizes, generator=generator, device=device)
    rows, columns, depth = shape
    dtype = {"fp8": torch.float8_e4m3fn, "tf32": torch.float32}.get(kind) or getattr(torch, kind)
    x, w, dout = normal(rows, depth), normal(depth, columns) / depth**0.5, normal(rows, columns)
    return x.to(dtype), w.to(dtype), dout if kind == "fp8" else dout.to(dtype)


def ours(kind: str, implementation: str) -> Callable[..., torch.Tensor]:
    options: dict[str, Any] = {"precision": "tf32"} if kind == "tf32" else {}
    if kind == "fp8":
        options = {"out_dtype": torch.float32}
    return lambda x, w, **scales: bridge.matmul(x, w, implementation=implementation, **options, **scales)


def of_torch(x: torch.Tensor, w: torch.Tensor, **scales: torch.Tensor) -> torch.Tensor:
    if not scales:
        return x @ w
    if any(size % 16 for size in (*x.shape, w.shape[1])):
        raise NotImplementedError("torch._scaled_mm needs multiples of 16")
    columns = w.t().contiguous().t()
    return torch._scaled_mm(x, columns, *scales.values(), out_dtype=torch.float32, use_fast_accum=False)


def results(kind: str, function: Callable[..., torch.Tensor], drawn: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """RESULTS of a function of (x, w); only out for 8 bits."""
    x, w, dout = drawn
    if kind == "fp8":
        one = torch.ones((), device=x.device)
        return [function(x, w, x_scale=one, w_scale=one)]
    leaves = [y.detach().requires_grad_() for y in (x, w)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def errors(got: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor]) -> dict[str, float]:
    x, w, dout = (y.double() for y in drawn)
    want = (x @ w, dout @ w.t(), x.t() @ dout)
    norm = torch.linalg.vector_norm
    told = {}
    for name, result in zip(RESULTS, got, strict=False):
        right = want[RESULTS.index(name)]
        told[name] = (norm(result.double() - right) / norm(right)).item()
    return told


@contextlib.contextmanager
def tf32_where(wanted: bool):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = wanted
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def row(kind: str, shape: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """A row of results. The first of `names` that supports the matmul is compared with PyTorch."""
    drawn = draw(kind, shape)
    found: dict[str, dict[str, float]] = {}
    told = {}
    for name in ("torch", *names):
        contender = Contender(name, "torch")
        with contender.attempt(), tf32_where(kind == "tf32"):
            function = of_torch if name == "torch" else ours(kind, name)
            found[name] = errors(results(kind, function, drawn), drawn)
        told[name] = {"status": contender.status, "reason": contender.reason}
    first = next((name for name in names if name in found), None)
    ratios = {}
    if first is not None and "torch" in found:
        ratios = {result: error / max(found["torch"][result], EXACT) for result, error in found[first].items()}
        if not max(ratios.values()) <= KINDS[kind]:
            told[first] = {"status": "wrong", "reason": f"{max(ratios.values()):.3f} times PyTorch's error"}
    return {"kind": kind, "shape": list(shape), "errors": found, "first_over_torch": ratios, "contenders": told}


def line(one: dict[str, Any]) -> str:
    texts = [f"{name} " + " ".join(f"{x:.2e}" for x in found.values()) for name, found in one["errors"].items()]
    texts += [f"{name} {how['status']}: {how['reason']}" for name, how in one["contenders"].items() if how["reason"]]
    if ratios := one["first_over_torch"]:
        texts.append("over torch " + " ".join(f"{x:.3f}" for x in ratios.values()))
    return f"{one['kind']:8} {' x '.join(map(str, one['shape']))} | {' | '.join(texts)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="M,N,K")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma list")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS), help="comma list")
    args = parser.parse_args(argv)
    try:
        shapes = [command_line.numbers(text) for text in args.shapes]
        if wrong := [shape for shape in shapes if len(shape) != 3]:
            raise ValueError(f"shapes: got {wrong[0]}, want M,N,K")
        kinds = command_line.names("kinds", args.kinds, tuple(KINDS))
        names = command_line.names("implementations", args.implementations, IMPLEMENTATIONS)
    except ValueError as error:
        parser.error(str(error))
    rows: list[dict[str, Any]] = []
    results = report.header(args.commit, with_torch=True, rows=rows)
    for kind, shape in itertools.product(kinds, shapes):
        rows.append(row(kind, shape, names))
        say(line(rows[-1]))
        report.write_json(args.output, results)
    return report.exit_status(how["status"] for one in rows for how in one["contenders"].values())


if __name__ == "__main__":
    sys.exit(main())
