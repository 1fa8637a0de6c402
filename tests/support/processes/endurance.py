"""Many calls of the bridge over changing shapes, streams and threads. Every result is checked.

    python tests/support/processes/endurance.py CALLS SECONDS

It ends after CALLS calls or SECONDS seconds, and prints a JSON object. calls: the number of calls. wrong: the number of
results that differ from the first call of their kind, which is compared with float64. before, after: the memory in use
of both allocators and of the process, after a tenth of the calls and at the end.
"""

import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jax_kernels import bridge
from jax_kernels.bridge.direct import route
from jax_kernels.bridge.interop import dlpack

THREADS, STREAMS = 4, 3


class Case(NamedTuple):
    """A call, its input tensors, and the wanted results and gradients."""

    name: str
    call: Callable[..., torch.Tensor]
    inputs: Sequence[torch.Tensor]
    want: Sequence[torch.Tensor]


double = bridge.from_jax(lambda x, y: x * 2 + y)
product = bridge.from_jax(lambda x, w: jnp.tanh(x @ w))


def exact_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~keep, -torch.inf).softmax(-1), value)


def exact_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + torch.finfo(torch.bfloat16).eps).rsqrt() * scale


# By name: (a call of tensors, the same call in plain PyTorch, the shapes of the tensors).
KINDS: dict[str, tuple[Any, Any, list[tuple[tuple[int, ...], ...]]]] = {
    "attention": (
        lambda *x: bridge.flash_attention(*x, is_causal=True),
        exact_attention,
        [((2, length, 4, 64),) * 3 for length in (128, 200, 256, 333, 512)],
    ),
    "attention of XLA": (
        lambda *x: bridge.flash_attention(*x, is_causal=True, implementation="xla"),
        exact_attention,
        [((1, length, 2, 32),) * 3 for length in (64, 96)],
    ),
    "rms_norm": (bridge.rms_norm, exact_norm, [((rows, 256), (256,)) for rows in (64, 100, 500)]),
    "matmul": (bridge.matmul, torch.matmul, [((rows, 128), (128, 256)) for rows in (128, 200)]),
    "from_jax": (double, lambda x, y: x * 2 + y, [((size,),) * 2 for size in (100, 1000, 5000)]),
    "from_jax of a product": (product, lambda x, w: torch.tanh(x @ w), [((64, 32), (32, 48))]),
}


def results_of(call: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    out = call(*inputs)
    return [out, *torch.autograd.grad(out, inputs, out.detach() * 0.5 + 1)]


def make_cases() -> list[Case]:
    cases = []
    generator = torch.Generator().manual_seed(0)
    for name, (call, exact, shapes) in KINDS.items():
        for each in shapes:
            drawn = [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in each]
            inputs = [x.requires_grad_() for x in drawn]
            want = [x.detach() for x in results_of(call, inputs)]
            wide = [x.detach().double().requires_grad_() for x in inputs]
            for ours, theirs in zip(want, results_of(exact, wide), strict=True):
                error = float((ours.double() - theirs.detach()).norm() / theirs.detach().norm())
                assert error < 2e-2, (name, each, error)
            cases.append(Case(name=name, call=call, inputs=inputs, want=want))
    torch.cuda.synchronize()
    return cases


class Counts:
    """The number of calls so far, and the limits of calls and of time."""

    def __init__(self, calls: int, seconds: float) -> None:
        self.lock = threading.Lock()
        self.left = calls
        self.end = time.monotonic() + seconds
        self.done = 0
        self.errors: list[str] = []

    def next(self) -> bool:
        with self.lock:
            if self.left <= 0 or self.errors or time.monotonic() > self.end:
                return False
            self.left -= 1
            self.done += 1
            return True


def work(cases: Sequence[Case], counts: Counts, seed: int, wrong: torch.Tensor) -> None:
    """Calls random cases on streams of its own. wrong: adds one for each wrong result."""
    chosen = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    sizes = [2**8, 2**13, 2**17, 2**19]
    try:
        while counts.next():
            case = chosen.choice(cases)
            stream, other = chosen.choice(streams), chosen.choice(streams)
            with torch.cuda.stream(stream):
                # A kernel may still read or write memory that was freed too early. NaN in this memory makes the error
                # visible.
                torch.full((chosen.choice(sizes),), float("nan"), device="cuda", dtype=torch.bfloat16)
                if chosen.random() < 0.5:
                    with torch.no_grad():
                        found = [case.call(*case.inputs)]
                else:
                    found = results_of(case.call, case.inputs)
            other.wait_stream(stream)
            with torch.cuda.stream(other):
                for ours, theirs in zip(found, case.want, strict=False):
                    ours.record_stream(other)
                    error = (ours.detach().float() - theirs.float()).abs().max()
                    wrong += ~(error <= 2e-2 * theirs.float().abs().max())
            del found
            if counts.done % 64 == 0:
                stream.synchronize()  # keeps the queue of each thread short
    except Exception as error:
        counts.errors.append(f"{case.name}: {type(error).__name__}: {error}")


def in_use() -> dict[str, int]:
    """The bytes in use of PyTorch's allocator, of JAX's allocator, and of the process."""
    for _ in range(3):
        gc.collect()
        torch.cuda.synchronize()
        dlpack._HELD.release()
    stats = dlpack.jax_device(torch.device("cuda", 0)).memory_stats() or {}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "torch": torch.cuda.memory_allocated(),
        "jax": stats.get("bytes_in_use", 0),
        "process": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": threading.active_count(),
    }


def run(cases: Sequence[Case], calls: int, seconds: float) -> dict[str, Any]:
    counts = Counts(calls, seconds)
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(THREADS)]
    torch.cuda.synchronize()
    threads = [
        threading.Thread(target=work, args=(cases, counts, seed, each)) for seed, each in enumerate(wrong, calls)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        jax.block_until_ready(jnp.full((1 << 16,), jnp.nan))  # JAX's own work, in memory that may be reused
        time.sleep(0.001)
    torch.cuda.synchronize()
    return {"calls": counts.done, "wrong": int(sum(int(x) for x in wrong)), "errors": counts.errors}


def main(calls: int, seconds: float) -> None:
    cases = make_cases()
    run(cases, 20 * len(cases), seconds)  # now all kinds are cached, on the streams of all threads
    begin = time.monotonic()
    first = run(cases, calls // 10, seconds / 2)
    before = in_use()
    rest = run(cases, calls - first["calls"], seconds - (time.monotonic() - begin))
    found = {
        "calls": first["calls"] + rest["calls"],
        "wrong": first["wrong"] + rest["wrong"],
        "errors": first["errors"] + rest["errors"],
        "seconds": time.monotonic() - begin,
        "before": before,
        "after": in_use(),
        "not_direct": sorted(set(route.reasons())),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
