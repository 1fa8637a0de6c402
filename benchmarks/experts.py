"""A mixture of experts, forward and backward, against its grouped matmuls alone, and over several GPUs.

    PYTHONPATH=. python benchmarks/experts.py --shapes "16384,2560,1280,64,2" --devices 1,2 --output experts.json

A shape is tokens of a GPU,model_dim,mlp_dim,experts,experts of a token. A call is the output of models.MixtureOfExperts
and the gradients of x and of all parameters. Contenders on one GPU: "block", the module; "products", its nine grouped
matmuls alone, on rows that are sorted before, with the group sizes of the router. They take turns in device time.

On N GPUs the experts are sharded over them, and each GPU has the same number of tokens as one GPU has. Contenders
are the two ways to exchange tokens, by the wall clock over queued calls, and "block" on one GPU by the same clock.
"efficiency" is the time of "block" on one GPU over the contender's.

--profile writes the kernels and copies of a further call of each contender on several GPUs, in the order of their
starts: "timelines" of the row.

Most of a run is compilation. Each stage of it is printed with its seconds. No contender is built after --budget.

The exit status is 1 if a contender failed or was wrong.
"""

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from harness import case_rows, command_line, report
from harness.cases import relative_error
from harness.device_activity import DeviceActivity, timeline
from harness.process import prepare_process, say
from harness.side_by_side import gpu_alone
from harness.timers import choose_timer
from harness.timing import Call, Contender, alternate, host_timer, skipped, spread, wait
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kernels import compile_kernels, compiler_options, grouped_matmul
from jax_kernels.compilation import paused_collections
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

    def module(self, exchange: str, key: jax.Array) -> MixtureOfExperts:
        sizes = self.model_dim, self.mlp_dim, self.experts, self.each
        return MixtureOfExperts(
            *sizes, exchange=exchange, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(key)
        )

    def state(self, mesh: jax.sharding.Mesh, exchange: str = "gather") -> tuple[Any, Any]:
        """(the graphdef, the parameters) of the module, with the experts sharded over the mesh."""
        key = jax.random.key(0)
        graphdef, shapes = nnx.split(nnx.eval_shape(lambda key: self.module(exchange, key), key))
        sharding = lambda path, _: NamedSharding(mesh, P("expert" if "proj" in str(path) else None))
        # One program: a program for each operation of the initialisation would take seconds to compile.
        make = jax.jit(
            lambda key: nnx.state(self.module(exchange, key)),
            out_shardings=jax.tree_util.tree_map_with_path(sharding, shapes),
        )
        return graphdef, make(key)

    def arrays(self, mesh: jax.sharding.Mesh) -> list[jax.Array]:
        """x and dout, [devices, tokens, model_dim] in bfloat16, sharded over the mesh."""
        shape = mesh.size, self.tokens, self.model_dim
        sharding = NamedSharding(mesh, ShardingRules().spec(("batch", "tokens", None), shape, mesh))
        make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16), out_shardings=sharding)
        return [make(jax.random.key(seed)) for seed in range(2)]


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Prints the name before the code, and the seconds after it."""
    say(f"  {name}: ", end="")
    start = time.monotonic()
    try:
        yield
    finally:
        say(f"{time.monotonic() - start:.1f} s")


def compiled(name: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """The program of a function. name: of the contender, in the printed stages. options: of jax.jit."""
    with stage(f"{name}: tracing and lowering"), paused_collections():
        lowered = jax.jit(function, **options).lower(*given)
    with stage(f"{name}: Mosaic kernels"):
        compile_kernels(lowered)
    with stage(f"{name}: XLA"):
        return lowered.compile()


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """The mesh of the first devices, with the axis "expert"."""
    return jax.make_mesh((devices,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])


def step(graphdef: Any, parameters: Any, x: jax.Array, dout: jax.Array) -> tuple[jax.Array, Any]:
    """(the output, the gradients of the parameters and x) of a module."""
    out, vjp = jax.vjp(lambda parameters, x: nnx.merge(graphdef, parameters)(x), parameters, x)
    return out, vjp(dout)


def block(case: Case, exchange: str = "gather") -> Callable[[int], Any]:
    """The call of the module, on the case's devices."""
    mesh = mesh_of(case.devices)
    name = "block" if case.devices == 1 else exchange
    with jax.set_mesh(mesh):
        with stage(f"{name}: arrays"):
            graphdef, parameters = case.state(mesh, exchange)
            given = jax.block_until_ready((parameters, *case.arrays(mesh)))
        run = functools.partial(step, graphdef)
        program = compiled(name, run, *given, compiler_options=compiler_options(mesh))
    return lambda index: program(*given)


# A case of several devices has the same contender on one GPU as the case of one device before it.
block_on_one = functools.lru_cache(maxsize=1)(block)


def products(case: Case) -> Callable[[int], Any]:
    """The nine grouped matmuls of the call, and nothing else."""
    mesh = mesh_of(1)
    graphdef, parameters = case.state(mesh)
    parameters, x = jax.device_put((parameters, case.arrays(mesh)[0]), jax.devices()[0])  # without the mesh
    module = nnx.merge(graphdef, parameters)
    sizes = jax.jit(lambda x: module.with_routing(x)[1].load)(x)
    rows = case.tokens * case.each
    normal = lambda seed, columns: jax.random.normal(jax.random.key(seed), (rows, columns), jnp.bfloat16)
    given = normal(0, case.model_dim), normal(1, case.mlp_dim)
    kernels = [y[...] for y in (module.gate_proj, module.up_proj, module.down_proj) if y is not None]

    def run(given: Any, kernels: Any) -> Any:
        wide, narrow = given
        douts = narrow, narrow + 1, wide  # equal gradients would be computed once
        results = []
        for w, rows, dout in zip(kernels, (wide, wide, narrow), douts, strict=True):
            results.append(jax.vjp(lambda rows, w: grouped_matmul(rows, w, sizes), rows, w))
            results[-1] = results[-1][0], results[-1][1](dout)
        return results

    program = compiled("products", run, given, kernels)
    return lambda index: program(given, kernels)


def contenders_of(case: Case, exchanges: Sequence[str], deadline: float = float("inf")) -> list[Contender]:
    """The contenders that could be built. Each exchange is judged against the first one.

    deadline: by time.monotonic; contenders after it are skipped.
    """
    builders = {"block": functools.partial(block_on_one, dataclasses.replace(case, devices=1))}
    if case.devices == 1:
        builders["products"] = functools.partial(products, case)
    for name in exchanges if case.devices > 1 else ():
        builders[name] = functools.partial(block, case, name)
    found, first = [], None
    for name, build in builders.items():
        if time.monotonic() > deadline:
            found.append(skipped(name, "jax"))
            continue
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


def measure(case: Case, timer: Any, args: argparse.Namespace, *, deadline: float = float("inf")) -> dict[str, Any]:
    say(f"{case.label}:")
    contenders = contenders_of(case, args.exchanges, deadline)
    options: dict[str, Any] = {"rounds": args.rounds, "seconds": args.seconds, "deadline": deadline, "say": say}
    if case.devices == 1:
        alternate(contenders, timer, **options)
    else:
        with timer.paused() if isinstance(timer, DeviceActivity) else contextlib.nullcontext():
            alternate(contenders, host_timer, **options)
    row = case_rows.row_of(case, contenders, "tflops", case.tflops)
    times = {c.name: spread(c.times)["median"] for c in contenders if c.times}
    if case.devices > 1 and "block" in times:
        row["efficiency"] = {name: times["block"] / ms for name, ms in times.items() if name != "block"}
    if case.devices > 1 and args.profile:
        row["timelines"] = {c.name: timeline_of(c.call, timer) for c in contenders if c.call is not None}
    return row


def timeline_of(call: Call, activity: DeviceActivity) -> list[dict[str, Any]]:
    """The kernels and copies of a call that the GPUs are ready for, behind one that is left out."""
    wait(call(0), "jax")
    return timeline(activity.of(lambda: wait(call(1), "jax")))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.1, budget=1e9)
    parser.add_argument("--shapes", default=SHAPES, help="tokens,model_dim,mlp_dim,experts,experts of a token; ...")
    parser.add_argument("--devices", default="1", help="comma list of numbers of GPUs")
    parser.add_argument("--exchanges", default=",".join(EXCHANGES), help="comma list of ways to exchange tokens")
    parser.add_argument("--profile", action="store_true", help="write the kernels of a call on several GPUs")
    args = parser.parse_args(argv)
    args.exchanges = command_line.names("exchanges", args.exchanges, EXCHANGES)
    shapes = [command_line.numbers(part) for part in args.shapes.split(";")]
    prepare_process()
    until = time.monotonic() + args.budget
    name, timer = choose_timer(args.timer, ["jax"])
    if args.profile and not isinstance(timer, DeviceActivity):
        parser.error(f"--profile: got --timer {name}, want cupti")
    results = report.header(args.commit, False, timer=name, rows=[])
    cases = [Case(*shape, devices) for shape in shapes for devices in command_line.numbers(args.devices)]
    return case_rows.run(cases, functools.partial(measure, deadline=until), args, timer, results, until)


if __name__ == "__main__":
    sys.exit(main())
