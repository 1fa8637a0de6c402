"""A mixture of experts, forward and backward, against its grouped matmuls alone, and over several GPUs.

    PYTHONPATH=. python benchmarks/experts.py --shapes "16384,2560,1280,64,2" --devices 1,2 --output experts.json

A shape is tokens of a GPU,model_dim,mlp_dim,experts,experts of a token. A call is the output of models.MixtureOfExperts
and the gradients of x and of all parameters. Contenders on one GPU: "block", the module; "products", its nine grouped
matmuls alone, on rows that are sorted before, with the group sizes of the router. They take turns in device time.

On N GPUs the experts are sharded over them, and each GPU has the same number of tokens as one GPU has. Contenders
are the two ways to exchange tokens, by the wall clock over queued calls, and "block" on one GPU by the same clock.
"efficiency" is the time of "block" on one GPU over the contender's.

The exit status is 1 if a contender failed or was wrong.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from harness import case_rows, command_line, report
from harness.cases import relative_error
from harness.process import prepare_process
from harness.side_by_side import gpu_alone
from harness.timers import choose_timer
from harness.timing import Contender, alternate, host_timer, spread
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kernels import compiler_options, grouped_matmul
from jax_kernels.models import MixtureOfExperts, ShardingRules

SHAPES = "16384,2560,1280,64,2"
EXCHANGES = ("gather", "all_to_all")
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Case:
    """A MixtureOfExperts of bfloat16 values. tokens: of a device. each: the experts of a token."""

    tokens: int
    model_dim: int
    mlp_dim: int
    experts: int
    each: int
    devices: int = 1

    @property
    def label(self) -> str:
        shape = f"{self.tokens}x{self.model_dim}x{self.mlp_dim} top {self.each} of {self.experts}"
        return f"{shape} on {self.devices}" if self.devices > 1 else shape

    def tflops(self, milliseconds: float) -> float:
        """The TFLOP/s of a GPU: of three matmuls, and two gradients of each."""
        return 9 * 2 * self.tokens * self.each * self.model_dim * self.mlp_dim / milliseconds / 1e9

    def module(self, exchange: str = "gather") -> MixtureOfExperts:
        sizes = self.model_dim, self.mlp_dim, self.experts, self.each
        return MixtureOfExperts(
            *sizes, exchange=exchange, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )

    def arrays(self, devices: int) -> list[jax.Array]:
        """x and dout, [devices, tokens, model_dim] in bfloat16."""
        shape = devices, self.tokens, self.model_dim
        make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
        return [make(jax.random.key(seed)) for seed in range(2)]


def step(graphdef: Any, parameters: Any, x: jax.Array, dout: jax.Array) -> tuple[jax.Array, Any]:
    """(the output, the gradients of the parameters and x) of a module."""
    out, vjp = jax.vjp(lambda parameters, x: nnx.merge(graphdef, parameters)(x), parameters, x)
    return out, vjp(dout)


def block(case: Case, devices: int = 1, exchange: str = "gather") -> Callable[[int], Any]:
    """The call of the module, on the first devices."""
    mesh = jax.make_mesh((devices,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    rules = ShardingRules()
    with jax.set_mesh(mesh):
        graphdef, parameters = nnx.split(case.module(exchange))
        placed = lambda path, y: jax.device_put(y, NamedSharding(mesh, P("expert" if "proj" in str(path) else None)))
        parameters = jax.tree_util.tree_map_with_path(placed, parameters)
        spec = rules.spec(("batch", "tokens", None), (devices, case.tokens, case.model_dim), mesh)
        given = [jax.device_put(y, NamedSharding(mesh, spec)) for y in case.arrays(devices)]
        run = jax.jit(functools.partial(step, graphdef), compiler_options=compiler_options(mesh))
        program = run.lower(parameters, *given).compile()
    return lambda index: program(parameters, *given)


def products(case: Case) -> Callable[[int], Any]:
    """The nine grouped matmuls of the call, and nothing else."""
    module = case.module()
    x, _ = case.arrays(1)
    sizes = jax.jit(lambda x: module.with_routing(x)[1].load)(x)
    rows = case.tokens * case.each
    normal = lambda seed, columns: jax.random.normal(jax.random.key(seed), (rows, columns), jnp.bfloat16)
    given = normal(0, case.model_dim), normal(1, case.mlp_dim)
    kernels = [y[...] for y in (module.gate_proj, module.up_proj, module.down_proj) if y is not None]

    @jax.jit
    def run(given: Any, kernels: Any) -> Any:
        wide, narrow = given
        douts = narrow, narrow + 1, wide  # equal gradients would be computed once
        results = []
        for w, rows, dout in zip(kernels, (wide, wide, narrow), douts, strict=True):
            results.append(jax.vjp(lambda rows, w: grouped_matmul(rows, w, sizes), rows, w))
            results[-1] = results[-1][0], results[-1][1](dout)
        return results

    program = run.lower(given, kernels).compile()
    return lambda index: program(given, kernels)


def contenders_of(case: Case, exchanges: Sequence[str]) -> list[Contender]:
    """The contenders that could be built. Each exchange is judged against the first one."""
    builders = {"block": functools.partial(block, case)}
    if case.devices == 1:
        builders["products"] = functools.partial(products, case)
    for name in exchanges if case.devices > 1 else ():
        builders[name] = functools.partial(block, case, case.devices, name)
    found, first = [], None
    for name, build in builders.items():
        found.append(Contender(name, "jax"))
        with found[-1].attempt():
            if case.devices > jax.device_count():
                raise NotImplementedError(f"{case.devices} devices wanted, {jax.device_count()} found")
            out, *_ = found[-1].begin(build)
            if name not in exchanges:
                continue
            if first is None:
                first = name, out
                continue
            with gpu_alone():
                found[-1].judge(relative_error([out], [first[1]]), first[0], TOLERANCE)
    return found


def measure(case: Case, timer: Any, args: argparse.Namespace) -> dict[str, Any]:
    contenders = contenders_of(case, args.exchanges)
    clock = timer if case.devices == 1 else host_timer
    alternate(contenders, clock, rounds=args.rounds, seconds=args.seconds)
    row = case_rows.row_of(case, contenders, "tflops", case.tflops)
    times = {c.name: spread(c.times)["median"] for c in contenders if c.times}
    if case.devices > 1 and "block" in times:
        row["efficiency"] = {name: times["block"] / ms for name, ms in times.items() if name != "block"}
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.1, budget=1e9)
    parser.add_argument("--shapes", default=SHAPES, help="tokens,model_dim,mlp_dim,experts,experts of a token; ...")
    parser.add_argument("--devices", default="1", help="comma list of numbers of GPUs")
    parser.add_argument("--exchanges", default=",".join(EXCHANGES), help="comma list of ways to exchange tokens")
    args = parser.parse_args(argv)
    args.exchanges = command_line.names("exchanges", args.exchanges, EXCHANGES)
    shapes = [command_line.numbers(part) for part in args.shapes.split(";")]
    prepare_process()
    until = time.monotonic() + args.budget
    name, timer = choose_timer(args.timer, ["jax"])
    results = report.header(args.commit, False, timer=name, rows=[])
    cases = [Case(*shape, devices) for devices in command_line.numbers(args.devices) for shape in shapes]
    return case_rows.run(cases, measure, args, timer, results, until)


if __name__ == "__main__":
    sys.exit(main())
