"""Host time of calls through the PyTorch bridge, by each route, and of PyTorch's own attention.

    PYTHONPATH=. JAX_PLATFORMS= python benchmarks/bridge.py --output benchmarks/results/bridge-h200.json

Host time: microseconds of a call at (1, 256, 8, 64), bfloat16. Calls run in batches. Between batches, outside the timed
region, the host waits for the GPU, so the GPU's queue never fills. The routes take turns. A host with other load may be
twice as slow for some seconds: before and after each batch a Python loop is timed. A batch is quiet if both loops took
at most 1.2 times the loop's least time. "quiet" is the fraction of quiet batches, host_us the median over quiet
batches, and all_us the median over all batches. The rows:

| row | call |
|---|---|
| no grad | flash_attention under torch.no_grad |
| forward | flash_attention with gradients |
| backward | torch.autograd.grad of its output; the no-op's backward is an autograd.Function that returns tensors |
| backward, one thread | the same, in the calling thread (autograd.set_multithreading_enabled) |
| compiled | flash_attention in torch.compile, without gradients |
| from_jax | x * 2 |
| capture, empty capture | a CUDA graph of one call, and an empty graph |

The other routes, in addition to the bridge's two, are PyTorch's "sdpa", "fa4" (flash_attn.cute of flash-attn-4, if it
is installed) and an operator that does nothing, "no-op".

Wall time: milliseconds of a call at (2, 8192, 16, 128), from the first to the last of a queue of calls that begins with
an idle GPU. Device time: CUDA events around the calls of the same queue. A GPU that was idle before a queue is faster
in this queue, so two queues are not comparable.

`--profile` prints a profile of the host time of 2,000 calls, and no times.
"""

import contextlib
import cProfile
import dataclasses
import pathlib
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from harness import report
from harness.process import refuse, say
from rich.console import Console
from rich.table import Table
from typer import Exit, Option, run

SMALL, LARGE = (1, 256, 8, 64), (2, 8192, 16, 128)
ROUTES = ("direct", "dlpack", "sdpa", "fa4", "no-op")
Calls = dict[str, Callable[[], Any]]


@contextlib.contextmanager
def on_route(name: str) -> Iterator[None]:
    """Sends the bridge's calls along the route of this name."""
    from jax_kernels.bridge.direct import route

    with route.disabled() if name == "dlpack" else route.enabled():
        yield


def tensors(shape: tuple[int, ...]) -> list[Any]:
    import torch

    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def attention_of(route: str) -> Callable[..., Any]:
    """The route's attention, on tensors [B, T, H, D], but [B, H, T, D] for "sdpa". The no-op computes nothing."""
    import torch
    import torch.nn.functional as F

    from jax_kernels import bridge

    if route == "sdpa":
        return lambda query, key, value: F.scaled_dot_product_attention(query, key, value)
    if route == "fa4":
        return fa4()
    if route == "no-op":
        return torch.ops.jax_kernels_benchmark.nothing
    return bridge.flash_attention


def fa4() -> Callable[..., Any]:
    """FlashAttention 4, on tensors [B, T, H, D]."""
    from flash_attn.cute import flash_attn_func

    def attend(query: Any, key: Any, value: Any) -> Any:
        found = flash_attn_func(query, key, value)
        return found[0] if isinstance(found, tuple) else found  # newer releases return lse too

    return attend


def missing(route: str) -> str | None:
    """The reason why a route cannot be timed here, or None."""
    from harness.contenders import unavailable

    return unavailable("fa4") if route == "fa4" else None


def define_nothing() -> Any:
    """Defines an operator that returns an empty tensor: the minimum cost of a torch.library call."""
    import torch

    library = torch.library.Library("jax_kernels_benchmark", "FRAGMENT")
    library.define("nothing(Tensor query, Tensor key, Tensor value) -> Tensor")
    library.impl("nothing", lambda query, key, value: torch.empty_like(query), "CUDA")
    torch.library.register_fake(
        "jax_kernels_benchmark::nothing", lambda query, key, value: torch.empty_like(query), lib=library
    )
    return library


def no_op_with_gradient() -> Callable[..., Any]:
    """A function of three tensors with an empty forward and backward: the minimum cost of autograd."""
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            ctx.save_for_backward(query, key, value)
            ctx.set_materialize_grads(False)
            return torch.empty_like(query)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return tuple(x.detach() for x in ctx.saved_tensors)

    return Nothing.apply


def host_calls(route: str) -> Calls:
    """The route's calls in the host table."""
    import torch

    from jax_kernels import bridge

    batch, length, heads, head_dim = SMALL
    inputs = tensors((batch, heads, length, head_dim) if route == "sdpa" else SMALL)
    attend = attention_of(route)
    plain = [x.detach() for x in inputs]
    calls: Calls = {"no grad": lambda: attend(*plain)}
    differentiable = no_op_with_gradient() if route == "no-op" else attend
    differentiable(*inputs)  # the bridge does not cache the backward of a first call
    out = differentiable(*inputs)
    dout = torch.randn_like(out)

    def in_one_thread() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return calls["backward"]()

    calls["forward"] = lambda: differentiable(*inputs)
    calls["backward"] = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    calls["backward, one thread"] = in_one_thread
    if route != "fa4":  # torch.compile breaks its graph
        function = lambda *given: attend(*given)
        # torch.compile keys functions by their code, which functions of other routes would share.
        function.__code__ = function.__code__.replace(co_name=f"by_{route.replace('-', '_')}")
        compiled = torch.compile(function, fullgraph=True)
        calls["compiled"] = lambda: compiled(*plain)
    if route in ("direct", "dlpack"):
        double = bridge.from_jax(lambda x: x * 2)
        x = torch.randn(1000, device="cuda")
        calls["from_jax"] = lambda: double(x)
    return calls


def capture_calls(route: str) -> Calls:
    """A call that captures a CUDA graph, and a call that captures an empty graph."""
    inputs = [x.detach() for x in tensors(SMALL)]
    attend = attention_of(route)
    attend(*inputs)
    return {"capture": lambda: captured(lambda: attend(*inputs)), "empty capture": lambda: captured(lambda: None)}


def captured(call: Callable[[], Any]) -> Any:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


QUIET = 1.2  # times the least time of the loop


def pace() -> float:
    """The seconds that a Python loop takes now."""
    begin = time.perf_counter()
    sum(range(1000))
    return time.perf_counter() - begin


@dataclasses.dataclass
class Timed:
    """A call and its batches: for each batch the seconds per call, and the slower of the loops before and after it."""

    route: str
    name: str
    call: Callable[[], Any]
    times: list[float] = dataclasses.field(default_factory=list)
    paces: list[float] = dataclasses.field(default_factory=list)
    reason: str = ""

    def turn(self, batches: int, batch: int, seconds: float) -> None:
        """Times up to `batches` batches of `batch` calls, none after `seconds`. An error ends the call's turns."""
        import torch

        if self.reason:
            return
        try:
            with on_route(self.route), torch.set_grad_enabled(self.name.startswith(("forward", "backward"))):
                for _ in range(min(10, batch)):
                    self.call()
                torch.cuda.synchronize()
                end = time.perf_counter() + seconds
                for _ in range(batches):
                    self._time(batch)
                    torch.cuda.synchronize()
                    if time.perf_counter() > end:
                        break
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]

    def _time(self, batch: int) -> None:
        before = pace()
        begin = time.perf_counter()
        for _ in range(batch):
            self.call()
        self.times.append((time.perf_counter() - begin) / batch)
        self.paces.append(max(before, pace()))

    def row(self, least: float) -> dict[str, Any]:
        """least: the least time of the loop in the whole run."""
        row: dict[str, Any] = {"route": self.route, "call": self.name, "shape": SMALL, "status": "ok", "reason": ""}
        if self.reason:
            return row | {"status": "failed", "reason": self.reason}
        quiet = [x for x, pace in zip(self.times, self.paces, strict=True) if pace <= QUIET * least]
        row |= {"all_us": statistics.median(self.times) * 1e6, "quiet": len(quiet) / len(self.times)}
        return row | {"host_us": statistics.median(quiet or self.times) * 1e6}


def timed_calls(routes: Sequence[str], make: Callable[[str], Calls]) -> list[Timed]:
    """The calls that `make` gives for the routes, sorted by name."""
    found = []
    for route in routes:
        try:
            with on_route(route):
                found += [Timed(route, name, call) for name, call in make(route).items()]
        except Exception as error:
            failed = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            found.append(Timed(route, "no grad", lambda: None, reason=failed))
    names = list(dict.fromkeys(x.name for x in found))
    return sorted(found, key=lambda x: names.index(x.name))


def measure_host(
    routes: Sequence[str], make: Callable[[str], Calls], calls: int, batch: int, seconds: float, rounds: int
) -> list[dict[str, Any]]:
    """A row for each call that `make` gives for the routes, which take turns."""
    found = timed_calls(routes, make)
    for _ in range(rounds):
        for x in found:
            x.turn(max(1, calls // batch // rounds), batch, seconds / rounds)
    least = min((pace for x in found for pace in x.paces), default=0.0)
    rows = [x.row(least) for x in found]
    for row in rows:
        told = f"{row['host_us']:9.1f} us, quiet {row['quiet']:.0%}" if "host_us" in row else row["reason"]
        say(f"{row['route']:7} {row['call']:20} {told}")
    return rows


def queue_times(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """wall_ms: the host's clock around a queue of calls and a wait. device_ms: CUDA events around the calls."""
    import torch

    for _ in range(2):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begin) / calls * 1e3
    return {"wall_ms": wall, "device_ms": start.elapsed_time(end) / calls}


def measure_wall(routes: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """The rows of the large shape. The routes take turns."""
    import torch

    inputs = tensors(LARGE)
    dout = torch.randn_like(inputs[0])
    heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs]
    dout_heads_first = dout.transpose(1, 2).contiguous()
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for route in routes:
            attend = attention_of(route)
            given, cotangent = (heads_first, dout_heads_first) if route == "sdpa" else (inputs, dout)
            both = lambda attend=attend, given=given, cotangent=cotangent: torch.autograd.grad(
                attend(*given), given, cotangent
            )
            with on_route(route):
                with torch.no_grad():
                    times = queue_times(lambda attend=attend, given=given: attend(*given), 20)
                found.setdefault((route, "forward"), []).append(times)
                found.setdefault((route, "both"), []).append(queue_times(both, 8))
    rows = []
    for (route, mode), times in found.items():
        row: dict[str, Any] = {"route": route, "call": mode, "shape": LARGE, "status": "ok", "reason": ""}
        row |= {key: statistics.median(x[key] for x in times) for key in ("wall_ms", "device_ms")}
        say(f"{route:7} {mode:9} {row['wall_ms']:9.3f} ms wall, {row['device_ms']:.3f} ms device")
        rows.append(row)
    return rows


def profile(route: str, calls: int) -> None:
    """Prints a profile of the host time of the route's call without gradients."""
    import torch

    from jax_kernels import bridge

    inputs = [x.detach() for x in tensors(SMALL)]
    with on_route(route), torch.no_grad():
        for _ in range(20):
            bridge.flash_attention(*inputs)
        profiler = cProfile.Profile()
        for _ in range(calls // 20):
            torch.cuda.synchronize()
            profiler.enable()
            for _ in range(20):
                bridge.flash_attention(*inputs)
            profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("call", *ROUTES, title="host, microseconds a call; wall and device, milliseconds")
    for name in dict.fromkeys((row["call"], row["shape"]) for row in rows):
        cells = []
        for route in ROUTES:
            (row,) = [x for x in rows if (x["call"], x["shape"]) == name and x["route"] == route] or [{}]
            if "host_us" in row:
                cells.append(f"{row['host_us']:.1f}")
            elif "wall_ms" in row:
                cells.append(f"{row['wall_ms']:.3f} / {row['device_ms']:.3f}")
            else:
                cells.append(row.get("status", "-"))
        table.add_row(f"{name[0]} {name[1]}", *cells)
    Console(width=120).print(table)


def measure(
    output: Annotated[pathlib.Path | None, Option(help="JSON file")] = None,
    commit: Annotated[str | None, Option(help="commit to record if the tree has no .git")] = None,
    calls: Annotated[int, Option(min=20, help="calls of each row of the host table")] = 3000,
    seconds: Annotated[float, Option(help="time limit for the calls of one row, over all turns")] = 1.5,
    rounds: Annotated[int, Option(min=1, help="turns at the large shape; other calls get 3 times as many")] = 3,
    profile_calls: Annotated[bool, Option("--profile", help="print a profile of 2,000 calls, and no times")] = False,
    route: Annotated[str, Option(help="of --profile: direct or dlpack")] = "direct",
    routes: Annotated[str, Option(help="comma list of the timed routes")] = ",".join(ROUTES),
) -> None:
    """Times calls through the bridge. The exit status is 1 if a row failed."""
    import torch

    if not torch.cuda.is_available():
        refuse("times a GPU, and PyTorch finds none")
    if route not in ROUTES[:2]:
        refuse(f"--route: got {route!r}, want direct or dlpack")
    if profile_calls:
        profile(route, 2000)
        raise Exit(0)
    chosen = [name for name in ROUTES if name in routes.split(",")]
    if len(chosen) != len(routes.split(",")):
        refuse(f"--routes: got {routes!r}, want some of {','.join(ROUTES)}")
    library = define_nothing()
    results = report.header(commit, with_torch=True)
    results["rows"] = rows = []
    for name, reason in [(name, missing(name)) for name in chosen]:
        if reason is not None:
            say(f"{name}: {reason}")
            rows.append({"route": name, "call": "no grad", "shape": SMALL, "status": "unavailable", "reason": reason})
    absent = {row["route"] for row in rows}
    chosen = [name for name in chosen if name not in absent]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        rows += measure_host(chosen, host_calls, calls, 20, seconds, 3 * rounds)
    report.write_json(output, results)
    broken = {row["route"] for row in rows if row["status"] == "failed" and row["call"] == "no grad"}
    chosen = [name for name in chosen if name not in broken]
    rows += measure_wall([name for name in chosen if name != "no-op"], rounds)
    report.write_json(output, results)
    if "dlpack" in chosen:
        rows.append({"route": "dlpack", "call": "capture", "shape": SMALL, "status": "refused", "reason": ""})
    # Last, because a failed capture leaves PyTorch unusable.
    for name in [name for name in ("sdpa", "direct") if name in chosen]:
        rows += measure_host([name], capture_calls, 20, 1, seconds, 1)
    show(rows)
    from jax_kernels.bridge.direct import route as direct

    results["not_direct"] = sorted(set(direct.reasons()))
    for reason in results["not_direct"]:
        say(f"not direct: {reason}")
    report.write_json(output, results)
    del library
    raise Exit(int(any(row["status"] == "failed" for row in rows)))


def main() -> None:
    """Reads the command line. typer ends the process."""
    run(measure)


if __name__ == "__main__":
    sys.exit(main())
