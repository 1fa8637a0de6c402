"""The timers of --timer, and the choice of one that works on this machine."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from harness.device_activity import DeviceActivity
from harness.process import refuse, say
from harness.timing import METHODS, Call, Contender, Reading, Timer, first_line, host_timer, queue, wait


def events_timer(call: Call, calls: int, framework: str) -> Reading:
    """The time from the end of one call to the end of the last of `calls` further calls, by CUDA events."""
    import torch

    stream = torch.cuda.Stream() if framework == "jax" else torch.cuda.current_stream()

    def mark(outputs: Any) -> torch.cuda.Event:
        if framework == "jax":  # exporting makes the stream wait for the array, without blocking the host
            jax.tree.leaves(outputs)[0].__dlpack__(stream=stream.cuda_stream)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    start = mark(call(0))
    end = mark(queue(call, calls))
    end.synchronize()
    return Reading(start.elapsed_time(end) / calls)


def profilers_timer(call: Call, calls: int, framework: str) -> Reading:
    """Reads each framework's own profiler. CUPTI takes one subscriber, so each session ends before the next begins."""
    read = _mosaic_profiler if framework == "jax" else _torch_profiler
    return summed(read(call, calls), calls)


def _mosaic_profiler(call: Call, calls: int) -> list[tuple[str, float]]:
    # jax.experimental.mosaic.gpu.profiler.Cupti.measure makes these two calls, with the same arguments for every call
    # between them. Here the arguments rotate.
    from jax._src.lib import mosaic_gpu

    mosaic_gpu._mosaic_gpu_ext._cupti_init()
    try:
        wait(queue(call, calls), "jax")
    finally:
        timings = mosaic_gpu._mosaic_gpu_ext._cupti_get_timings(True)
    return list(timings)


def _torch_profiler(call: Call, calls: int) -> list[tuple[str, float]]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wait(queue(call, calls), "torch")
    events = profiler.profiler.kineto_results.events()
    on_device = [e for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()]
    return [(event.name(), event.duration_ns() / 1e6) for event in on_device]


def summed(timings: Sequence[tuple[str, float]], calls: int) -> Reading:
    """The Reading of one of `calls` calls, whose device activities are (kernel name, ms)."""
    if not timings:
        raise RuntimeError("the profiler saw no device activity")
    kernels: dict[str, float] = {}
    for name, ms in timings:
        kernels[name] = kernels.get(name, 0.0) + ms / calls
    return Reading(sum(kernels.values()), kernels, len(timings) / calls)


def make_timer(name: str) -> Timer:
    """The timer of this name. Raises RuntimeError if it needs a GPU and there is no GPU, ValueError if unknown."""
    if name not in METHODS:
        raise ValueError(f"timer: got {name!r}, want one of {', '.join(METHODS)}")
    if name == "host":
        return host_timer
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"timer={name!r} reads a GPU, and JAX runs on {jax.default_backend()}; want timer='host'")
    if name == "cupti":
        return DeviceActivity()
    return {"events": events_timer, "profilers": profilers_timer}[name]


def matmul(which: str, size: int) -> Contender:
    """The contender of a ceiling: bf16 [size, size] @ [size, size]. which: "jax" or "torch"."""
    contender = Contender(f"matmul-{which}", which, plan=f"bf16 {size}^3 matmul")
    key_x, key_w = jax.random.split(jax.random.key(1))
    x, w = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in (key_x, key_w))
    if which == "jax":
        product = jax.jit(jnp.matmul)
        contender.call = lambda index: product(x, w)
    else:
        import torch

        tx, tw = (torch.from_dlpack(array).clone() for array in (x, w))
        contender.call = lambda index: tx @ tw
    wait(contender.call(0), which)
    return contender


def choose_timer(name: str | None, frameworks: Sequence[str]) -> tuple[str, Timer]:
    """The timer and its name, tried on a small matmul of each framework. name: None for "cupti".

    Chooses "events" if "cupti" or "profilers" does not work. Ends the process, with one line, if there is no GPU for
    the timer to read.
    """
    name = name or "cupti"
    if name != "host" and jax.default_backend() != "gpu":
        refuse(f"--timer {name} reads a GPU, and JAX runs on {jax.default_backend()}: want a GPU, or --timer host")
    timer: Timer | None = None
    try:
        timer = make_timer(name)
        for which in frameworks:
            timer(matmul(which, 256).call, 3, which)  # type: ignore[arg-type]
    except Exception as error:
        if name not in ("cupti", "profilers"):
            raise
        say(f"timer {name!r} does not work here ({first_line(error)}): timing by CUDA events instead")
        close(timer)
        return "events", make_timer("events")
    return name, timer


def close(timer: Timer | None) -> None:
    if isinstance(timer, DeviceActivity):
        timer.close()
