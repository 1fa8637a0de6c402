"""linear_cross_entropy with both gradients, against its peers in JAX and PyTorch, in one alternating run.

    PYTHONPATH=. python benchmarks/cross_entropy.py --shapes "8192,4096,128256" --output results/cross_entropy.json

A shape is tokens,depth,vocabulary; w is [vocabulary, depth]. A call is the mean of the losses and its gradients of x
and w, or with --forward-only the mean. Contenders: this library's implementations; "none", the mean of "xla"'s losses
of reduction="none", whose backward makes the logits again; "chunked", a scan over parts of the tokens under
jax.checkpoint in jnp, as training scripts have it; "jla", jax-linear-attention's Hopper kernels with three matmuls;
"liger" and "cce", the functions of Liger and cut-cross-entropy.
"bytes" in a row is the memory in addition to inputs and results: XLA's plan, and PyTorch's peak.

The exit status is 1 if a contender failed or was wrong.
"""

import argparse
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from harness import case_rows, command_line, report
from harness.cases import ROTATION_BYTES, TOLERANCE, relative_error
from harness.process import prepare_process
from harness.side_by_side import gpu_alone, gpu_among_others
from harness.timers import choose_timer
from harness.timing import Contender, alternate

from jax_kernels import linear_cross_entropy

SHAPES = "8192,4096,128256;16384,2048,151936"
IMPLEMENTATIONS = ("xla", "mosaic_gpu", "triton", "mosaic_gpu_8_bits")
EIGHT_BITS = "_8_bits"  # the end of a name: logits of 8-bit values
# The error of gradients whose logits have 8-bit values: e4m3 rounds a value by up to 2^-4, and a sum's error is less.
ROUNDED = 0.05
PEERS = {"chunked": "jax", "none": "jax", "jla": "jax", "liger": "torch", "cce": "torch"}
MODULES = {"jla": "jla", "liger": "liger_kernel", "cce": "cut_cross_entropy"}
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}
CHUNK = 1024  # tokens of a chunk of "chunked"

type Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss of x [tokens, depth] and w [vocabulary, depth].

    has_gradients: whether a call returns the gradients of x and w too.
    """

    tokens: int
    depth: int
    vocabulary: int
    dtype: str
    has_gradients: bool = True

    @property
    def label(self) -> str:
        label = f"{self.tokens}x{self.depth}x{self.vocabulary} {self.dtype}"
        return label if self.has_gradients else f"{label} forward"

    @property
    def flops(self) -> int:
        """The FLOPs of the matmuls that no method can avoid: three with gradients, one without."""
        return 2 * self.tokens * self.depth * self.vocabulary * (3 if self.has_gradients else 1)

    def arrays(self) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """Sets of (x, w, targets), larger than the L2 cache together. One token of 16 does not count."""
        size = jnp.dtype(DTYPES[self.dtype]).itemsize * self.depth * (self.tokens + self.vocabulary)
        sets = []
        for seed in range(max(1, min(16, round(ROTATION_BYTES / size)))):
            keys = jax.random.split(jax.random.key(seed), 3)
            x = jax.random.normal(keys[0], (self.tokens, self.depth), DTYPES[self.dtype])
            w = jax.random.normal(keys[1], (self.vocabulary, self.depth), DTYPES[self.dtype]) * self.depth**-0.5
            targets = jax.random.randint(keys[2], (self.tokens,), 0, self.vocabulary)
            targets = jnp.where(jnp.arange(self.tokens) % 16 == 0, -100, targets)
            sets.append(jax.block_until_ready((x, w, targets)))
        return sets


def ours(name: str, reduction: str = "mean") -> Loss:
    """The mean by an implementation. name: of IMPLEMENTATIONS."""
    implementation = name.removesuffix(EIGHT_BITS)
    precision = None if name == implementation else "fp8"

    def loss(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
        options: Any = {"transpose_w": True, "implementation": implementation, "reduction": reduction}
        options["precision"] = precision
        found = linear_cross_entropy(x, w, targets, **options)
        return found if reduction == "mean" else found.sum() / (targets >= 0).sum()

    return loss


def chunked(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean in plain jnp: the logits of CHUNK tokens at a time, again in the backward."""
    count = -(-x.shape[0] // CHUNK)
    padding = count * CHUNK - x.shape[0]
    x = jnp.pad(x, ((0, padding), (0, 0))).reshape(count, CHUNK, -1)
    ids = jnp.pad(targets, (0, padding), constant_values=-100).reshape(count, CHUNK)

    @jax.checkpoint
    def one(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        logits = jnp.einsum("td,vd->tv", chunk[0], w, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(logits, jnp.maximum(chunk[1], 0)[:, None], axis=1)[:, 0]
        losses = jax.nn.logsumexp(logits, axis=1) - chosen
        return total + jnp.where(chunk[1] >= 0, losses, 0).sum(), None

    return jax.lax.scan(one, jnp.float32(0), (x, ids))[0] / (targets >= 0).sum()


def need_module(name: str) -> None:
    """Raises NotImplementedError unless the package of a peer is installed and there is a GPU."""
    if importlib.util.find_spec(MODULES[name]) is None:
        raise NotImplementedError(f"{MODULES[name]} is not installed")
    if jax.default_backend() != "gpu":
        raise NotImplementedError("it needs a GPU")


def by_jla() -> Loss:
    """jax-linear-attention's mean, with its Hopper kernels: its sum has a gradient, its count of tokens has none."""
    need_module("jla")
    from jla.ops.cross_entropy import linear_cross_entropy_objective

    def loss(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
        found = linear_cross_entropy_objective(x, w, targets, impl="mosaic_gpu", compute_dtype=x.dtype)
        return found.objective_sum / found.num_valid

    return loss


def compiled(case: Case, sets: Sequence[Any], loss: Loss) -> tuple[Callable[[int], Any], int | None]:
    """(the call, the bytes of memory that XLA plans in addition to inputs and results, None if it does not say)."""
    function = jax.value_and_grad(loss, (0, 1)) if case.has_gradients else loss
    program = jax.jit(lambda *given: jax.tree.leaves(function(*given))).lower(*sets[0]).compile()
    memory = program.memory_analysis()
    return lambda index: program(*sets[index % len(sets)]), getattr(memory, "temp_size_in_bytes", None)


def by_torch(case: Case, sets: Sequence[Any], name: str) -> Callable[[int], Any]:
    """The call of a peer in PyTorch. Raises NotImplementedError if it is not installed."""
    need_module(name)
    import torch

    if name == "liger":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        loss = lambda x, w, targets: liger_fused_linear_cross_entropy(x, w, targets)
    else:
        from cut_cross_entropy import linear_cross_entropy as loss
    given = []
    for x, w, targets in sets:
        x, w = (torch.from_dlpack(y).clone().requires_grad_(case.has_gradients) for y in (x, w))
        given.append((x, w, torch.from_dlpack(targets).long()))

    def call(index: int) -> Any:
        x, w, targets = given[index % len(given)]
        with torch.set_grad_enabled(case.has_gradients):
            value = loss(x, w, targets)
        return [value, *torch.autograd.grad(value, (x, w))] if case.has_gradients else [value]

    return call


def torch_bytes(call: Callable[[int], Any]) -> int:
    """The peak of PyTorch's memory in a call, without its results and all that existed before."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call(0)
    own = sum(x.numel() * x.element_size() for x in results)
    return torch.cuda.max_memory_allocated() - before - own


def contenders_of(case: Case, sets: Sequence[Any], args: argparse.Namespace) -> tuple[list[Contender], dict[str, Any]]:
    """(the contenders, the bytes of memory of each by name). JAX's are judged against "chunked"."""
    found: list[Contender] = []
    memory: dict[str, Any] = {}
    with gpu_among_others():
        wanted = jax.block_until_ready(compiled(case, sets, chunked)[0](0))

    def add_jax(name: str, loss: Callable[[], Loss]) -> None:
        contender = Contender(name, "jax")
        found.append(contender)
        with contender.attempt():
            with gpu_among_others():
                call, memory[name] = compiled(case, sets, loss())
            output = contender.start(call)
            with gpu_alone():
                bound = ROUNDED if name.endswith(EIGHT_BITS) else TOLERANCE
                contender.judge(relative_error(output, wanted), "chunked", bound)

    for name in args.implementations:
        add_jax(name, lambda name=name: ours(name))
    of_jax = {"chunked": lambda: chunked, "none": lambda: ours("xla", "none"), "jla": by_jla}
    for name in args.peers:
        if name in of_jax:
            add_jax(name, of_jax[name])
            continue
        contender = Contender(name, "torch")
        found.append(contender)
        with contender.attempt():
            contender.begin(lambda name=name: by_torch(case, sets, name))
            with gpu_alone():
                memory[name] = torch_bytes(contender.call)
    return found, memory


def measure(case: Case, timer: Any, args: argparse.Namespace) -> dict[str, Any]:
    with gpu_among_others():
        sets = case.arrays()
    contenders, memory = contenders_of(case, sets, args)
    alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds)
    row = case_rows.row_of(case, contenders, "tflops", lambda ms: case.flops / ms / 1e9)
    for found in row["contenders"]:
        found["bytes"] = memory.get(found["name"])
    return row | {"flops": case.flops}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.2, budget=1e9)
    parser.add_argument("--shapes", default=SHAPES, help="tokens,depth,vocabulary, separated by ';'")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--forward-only", action="store_true", help="time the mean without gradients")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS), help="comma list of this library's")
    parser.add_argument("--peers", default=",".join(PEERS))
    args = parser.parse_args(argv)
    shapes = [command_line.numbers(part) for part in args.shapes.split(";")]
    args.implementations = command_line.names("implementations", args.implementations, IMPLEMENTATIONS)
    args.peers = command_line.names("peers", args.peers, tuple(PEERS)) if args.peers else []
    prepare_process()
    until = time.monotonic() + args.budget
    with_torch = any(PEERS[name] == "torch" for name in args.peers)
    name, timer = choose_timer(args.timer, ["jax", "torch"] if with_torch else ["jax"])
    results = report.header(args.commit, with_torch, timer=name, rows=[])
    cases = [Case(*shape, args.dtype, not args.forward_only) for shape in shapes]
    return case_rows.run(cases, measure, args, timer, results, until)


if __name__ == "__main__":
    sys.exit(main())
