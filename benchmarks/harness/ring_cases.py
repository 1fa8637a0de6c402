"""Ring attention in JAX: a case, and its contenders over the first devices of one process.

"ring" is the op. "compute" is the same program with each permute replaced by a local copy: a roll by one token, which
XLA has to materialise. "communication" is only the op's permutes, one after the other.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from harness.cases import DTYPES, Case, relative_error
from harness.device_activity import DeviceActivity
from harness.timing import Contender, alternate, host_timer, skipped, spread
from jax_kernels import DocumentLayout, compiler_options, flash_attention, masks, ring_attention, shard_sequence
from jax_kernels.ops.ring import sends
from jax_kernels.ops.ring.layouts import DOCUMENTS
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.sm90 import SM90

__all__ = ["PARTS", "RingCase", "measure", "row_of"]

PARTS = ("ring", "compute", "communication")
MODES = ("fwd", "fwdbwd")
TOKENS = jax.P(None, "sequence")
PROFILED = 10  # queued calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingCase:
    """Attention of [1, tokens, heads, head_dim] over some devices. modes: of MODES.

    check: whether the op is compared with flash_attention on one device, which takes all tokens' memory. parts: of
    PARTS. once: whether only the first call is timed, for a case that takes many seconds. window: the number of tokens
    before a query that the query sees, under a causal mask; 0 for all. layout: of the causal cases. is_masked: whether
    a causal case has its limits as a mask, with 128 global tokens. sends_ahead: as in ring_attention; also the number
    of sends that XLA hides at a time. has_copies: whether sends are copies from GPU to GPU, by compiler_options.
    permutes_up_to: the most devices that exchange heads by permutes; None for the block specs' number. documents: the
    shares of packed documents in the tokens of a causal case, in order; empty for one sequence. has_profile: whether
    CUPTI records the time of each kernel on the first GPU, in extra calls.
    """

    devices: int
    tokens: int
    heads: int
    head_dim: int
    causal: bool
    modes: tuple[str, ...]
    implementation: str | None
    rounds: int
    seconds: float
    check: bool
    strategy: str = "ring"
    parts: tuple[str, ...] = PARTS
    once: bool = False
    window: int = 0
    layout: str = "zigzag"
    is_masked: bool = False
    sends_ahead: int | None = None
    has_copies: bool = True
    permutes_up_to: int | None = None
    documents: tuple[float, ...] = ()
    has_profile: bool = False

    @property
    def limits(self) -> dict[str, Any]:
        if self.causal and self.is_masked:
            reach = masks.sliding_window(self.window, 0) if self.window else masks.causal()
            return {"mask": reach | masks.global_tokens(128)}
        return {"is_causal": self.causal, "window": (self.window, 0) if self.window else None}

    @property
    def ids(self) -> np.ndarray | None:
        """int32 [1, tokens]: the document of each token; None without documents."""
        if not self.documents or not self.causal:
            return None
        ends = np.rint(np.cumsum(self.documents) / sum(self.documents) * self.tokens)[:-1]
        return np.searchsorted(ends, np.arange(self.tokens), side="right").astype(np.int32)[None]

    @property
    def live(self) -> float:
        """The pairs that documents leave, over the pairs of one causal sequence."""
        if self.ids is None:
            return 1.0
        lengths = np.bincount(self.ids[0]).astype(float)
        return float((lengths * (lengths + 1)).sum() / (self.tokens * (self.tokens + 1)))

    @property
    def arrangement(self) -> Any:
        """The layout of the case, as shard_sequence and ring_attention take it."""
        if not self.causal:
            return "contiguous"
        if self.layout != DOCUMENTS:
            return self.layout
        ids = np.zeros((1, self.tokens), np.int32) if self.ids is None else self.ids
        return DocumentLayout.of(ids, self.devices, heads=self.heads, head_dim=self.head_dim)

    def of_mode(self, mode: str) -> Case:
        """The same attention on one device."""
        return Case(1, self.tokens, self.heads, self.head_dim, self.heads, "bf16", self.causal, mode)

    @property
    def label(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.devices} x {self.tokens // self.devices} tokens, {self.heads}x{self.head_dim}, {mask}"


def row_of(case: RingCase, mode: str, contender: Contender) -> dict[str, Any]:
    """A row of results.

    tflops: TFLOP/s per device; the FLOPs are Case.flops, half of them for a causal mask; with documents only the pairs
    within a document count. Cases with a window or a mask have no tflops.
    """
    row = {
        "devices": case.devices,
        "tokens": case.tokens,
        "local_tokens": case.tokens // case.devices,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "causal": case.causal,
        "mode": mode,
        "strategy": case.strategy,
        "window": case.window,
        "layout": case.layout if case.causal else "contiguous",
        "documents": case.documents if case.causal else (),
        "is_masked": case.is_masked and case.causal,
        "sends_ahead": case.sends_ahead,
        "has_copies": case.has_copies,
        "permutes_up_to": case.permutes_up_to,
        "contender": contender.name,
        "calls_per_turn": contender.calls,
    } | contender.findings
    row.pop("kernels_ms", None)
    if contender.times and not case.window and not case.is_masked:
        row["tflops"] = case.live * case.of_mode(mode).tflops(spread(contender.times)["median"]) / case.devices
    return row


def measure(case: RingCase) -> list[dict[str, Any]]:
    """The rows of a case: all contenders take turns, by the wall clock over queued calls."""
    activity = _device_activity() if case.has_profile else None
    parts = case.parts if case.devices > 1 else PARTS[:1]
    found = jax.device_count()
    if case.devices > found:
        late = [(mode, skipped(part, "jax")) for mode in case.modes for part in parts]
        for _, contender in late:
            contender.give_up("unavailable", f"{case.devices} devices wanted, {found} found")
        return [row_of(case, mode, contender) for mode, contender in late]
    mesh = jax.make_mesh(
        (case.devices,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[: case.devices]
    )
    arrays = _inputs(case, mesh)
    contenders = [(mode, Contender(part, "jax")) for mode in case.modes for part in parts]
    lowered, memory, profiles = [], {}, {}
    for mode, contender in contenders:
        with contender.attempt(), _permutes_up_to(case.permutes_up_to):
            program, used = _program(case, mesh, mode, contender.name, arrays)
            lowered.append((mode, contender, program.lower(*used), used))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = [(*rest, pool.submit(low.compile), used) for *rest, low, used in lowered]
        for mode, contender, future, used in compiled:
            with contender.attempt():
                run = future.result()
                memory[mode, contender.name] = _gigabytes(run)
                start = time.perf_counter()
                outputs = contender.start(functools.partial(_call, run, used), str(case.arrangement))
                if case.once:
                    contender.times.append((time.perf_counter() - start) * 1e3)
                if case.check and contender.name == "ring":
                    contender.judge(relative_error(outputs, _on_one_device(case, mesh, mode)), "one device")
    if not case.once:
        alternate([contender for _, contender in contenders], host_timer, rounds=case.rounds, seconds=case.seconds)
    if activity is not None:
        for mode, contender, future, used in compiled:
            with contender.attempt():
                work = functools.partial(_queued, future.result(), used)
                profiles[mode, contender.name] = activity.profile(work, PROFILED)
    return [
        row_of(case, mode, contender)
        | {name: found.get((mode, contender.name)) for name, found in (("gigabytes", memory), ("profile_ms", profiles))}
        for mode, contender in contenders
    ]


@functools.cache
def _device_activity() -> DeviceActivity:
    return DeviceActivity()


def _queued(run: Callable[..., Any], arrays: Sequence[jax.Array]) -> None:
    for _ in range(PROFILED):
        results = run(*arrays)
    jax.block_until_ready(results)


@contextlib.contextmanager
def _permutes_up_to(devices: int | None) -> Iterator[None]:
    """Programs traced inside the block exchange heads by permutes among up to `devices` devices; None has no effect."""
    rows = SM90.ring or ()
    rows = rows if devices is None else tuple(dataclasses.replace(row, permutes_up_to=devices) for row in rows)
    with block_specs.replaced_tables((9, 0), ring=rows):
        yield


def _gigabytes(run: Any) -> float:
    """The memory of a compiled program on a device, including its arguments and results."""
    sizes = run.memory_analysis()
    return (sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes) / 1e9


def _call(run: Callable[..., Any], arrays: Sequence[jax.Array], index: int) -> Any:
    return run(*arrays)


def _normal(case: RingCase, sharding: Any) -> list[jax.Array]:
    """query, key, value, dout, in the order of the tokens."""
    shape = 1, case.tokens, case.heads, case.head_dim
    make = jax.jit(lambda key: jax.random.normal(key, shape, DTYPES["bf16"]), out_shardings=sharding)
    return [make(jax.random.key(i)) for i in range(4)]


def _inputs(case: RingCase, mesh: jax.sharding.Mesh) -> list[jax.Array]:
    arrays = _normal(case, jax.NamedSharding(mesh, TOKENS))
    placed = [shard_sequence(x, mesh, "sequence", layout=case.arrangement) for x in arrays]
    if isinstance(case.arrangement, DocumentLayout):
        placed.append(jax.device_put(case.arrangement.ring_ids, jax.NamedSharding(mesh, jax.P())))
    elif case.ids is not None:
        placed.append(shard_sequence(case.ids, mesh, "sequence", layout=case.arrangement))
    return placed


def _on_one_device(case: RingCase, mesh: jax.sharding.Mesh, mode: str) -> list[jax.Array]:
    """The results of flash_attention in the order of the layout, sharded like the op's."""
    ids = None if case.ids is None else jnp.asarray(case.ids)
    attend = functools.partial(flash_attention, **case.limits, segment_ids=ids, implementation=case.implementation)
    arrays = _normal(case, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    results = jax.jit(_in_mode(attend, mode))(*arrays[: 3 if mode == "fwd" else 4])
    return [shard_sequence(x, mesh, "sequence", layout=case.arrangement) for x in results]


def _in_mode(attend: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """The function (query, key, value) -> (out,); for "fwdbwd" (query, key, value, dout) -> (out, dq, dk, dv)."""

    def both(query: Any, key: Any, value: Any, dout: Any) -> Any:
        out, vjp = jax.vjp(attend, query, key, value)
        return out, *vjp(dout)

    return (lambda *qkv: (attend(*qkv),)) if mode == "fwd" else both


def _program(case: RingCase, mesh: Any, mode: str, part: str, arrays: Sequence[jax.Array]) -> tuple[Any, Any]:
    """The jitted program of a part, and its arguments."""
    attend = functools.partial(
        ring_attention, axis_name="sequence", layout=case.arrangement, strategy=case.strategy, **case.limits,
        sends_ahead=case.sends_ahead, implementation=case.implementation,
    )  # fmt: skip
    count = 3 if mode == "fwd" else 4
    given = [*arrays[:count], *arrays[4:]]
    specs = *[TOKENS] * count, *[jax.P() if case.layout == DOCUMENTS else TOKENS] * len(arrays[4:])
    shared = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=TOKENS, check_vma=False)
    of_ids = lambda ids: functools.partial(attend, segment_ids=ids[0]) if ids else attend
    body = lambda *given: _in_mode(of_ids(given[count:]), mode)(*given[:count])
    if part == "communication":
        travels = _permutes(jax.make_jaxpr(shared(body))(*given).jaxpr)
        body, given = (lambda *x: _permuted(travels, x)), _travellers(travels, mesh)
        shared = functools.partial(shared, in_specs=TOKENS)
    elif part == "compute":
        body = _with_copies(body)
    options = compiler_options(mesh) if case.has_copies else {}
    if jax.default_backend() == "gpu" and (case.sends_ahead or 1) > 1:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = case.sends_ahead
    return jax.jit(shared(body), compiler_options=options), given


def _with_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        copied = lambda tree, *_: jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), tree)
        alone = lambda function, **_: function  # a group without a collective is an error
        with (
            unittest.mock.patch.object(lax, "ppermute", copied),
            unittest.mock.patch.object(sends, "xla_metadata_call", alone),
        ):
            yield

    def run(*args: Any) -> Any:
        with patched():
            return function(*args)

    return run


def _permutes(jaxpr: Any) -> list[tuple[tuple[int, ...], str, tuple[tuple[int, int], ...]]]:
    """(shape, dtype, permutation) of each array that travels, in order."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ppermute":
            found += [(x.aval.shape, str(x.aval.dtype), equation.params["perm"]) for x in equation.invars]
            continue
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            found += _permutes(inner) if hasattr(inner, "eqns") else []
    return found


def _kinds(travels: Sequence[Any]) -> list[Any]:
    return sorted({(shape, dtype) for shape, dtype, _ in travels})


def _travellers(travels: Sequence[Any], mesh: jax.sharding.Mesh) -> list[jax.Array]:
    """Two arrays for each shape and dtype, because keys and values travel together."""
    sharding = jax.NamedSharding(mesh, TOKENS)
    size = mesh.shape["sequence"]
    make = lambda shape, dtype: jnp.ones((shape[0], shape[1] * size, *shape[2:]), dtype, device=sharding)
    return [make(*kind) for kind in _kinds(travels) for _ in range(2)]


def _permuted(travels: Sequence[Any], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    kinds, arrays = _kinds(travels), list(arrays)
    turns = dict.fromkeys(kinds, 0)
    for shape, dtype, permutation in travels:
        kind = shape, dtype
        at = 2 * kinds.index(kind) + turns[kind] % 2
        turns[kind] += 1
        arrays[at] = lax.ppermute(arrays[at], "sequence", permutation)
    return arrays
