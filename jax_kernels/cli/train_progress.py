"""The progress of `jax-kernels train`: a bar in a terminal, lines in a file, and loss.png at the end."""

import datetime
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_kernels.files import write_whole

__all__ = ["plot_losses", "progress"]

# The time between two lines where the output is no terminal.
MESSAGE_SECONDS = 5.0
# The number of steps in the running mean of the plot, as a part of all steps.
SMOOTH = 1 / 50

Report = Callable[[int, float], None]


@contextmanager
def progress(begun: int, steps: int, tokens: int, *, is_shown: bool = True) -> Iterator[Report]:
    """A context that yields report(step, loss in nats a byte), to be called after each step.

    In a terminal it is a bar with bits a byte, tokens/s and the remaining time. Elsewhere report prints a line with the
    same values after the first step, then about every MESSAGE_SECONDS, and after the last step.

    begun, steps: the steps before this run, and in all. tokens: of a step, over all devices. is_shown: False for a
    process other than the first, which shows nothing.
    """
    console = Console()
    if not is_shown:
        yield lambda step, loss: None
    elif console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task("", total=steps, completed=begun, bits=math.nan, rate=0.0)
            clock = _Clock(begun)

            def show(step: int, loss: float) -> None:
                rate = clock.rate(step) * tokens
                bar.update(task, completed=step, bits=loss / math.log(2), rate=rate)

            yield show
    else:
        yield _lines(begun, steps, tokens)


def _bar(console: Console) -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[bits]:.4f} bits a byte, {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )


class _Clock:
    """Steps a second. The time before the first step's end is left out: the step is compiled in it."""

    def __init__(self, begun: int) -> None:
        self._first = begun + 1
        self._started = time.monotonic()

    def rate(self, step: int) -> float:
        """Steps a second since the first step; for the first step itself with its compilation."""
        now = time.monotonic()
        if step == self._first:
            rate, self._started = 1 / max(now - self._started, 1e-9), now
            return rate
        return (step - self._first) / max(now - self._started, 1e-9)


def _lines(begun: int, steps: int, tokens: int) -> Report:
    """The function report of `progress` where the output is no terminal."""
    clock, last = _Clock(begun), time.monotonic()

    def show(step: int, loss: float) -> None:
        nonlocal last
        rate, now = clock.rate(step), time.monotonic()
        if now - last > MESSAGE_SECONDS or step in (begun + 1, steps):
            left = datetime.timedelta(seconds=round((steps - step) / rate))
            end = "" if step == steps else f", {left} left"
            print(f"step {step}: {loss / math.log(2):.4f} bits a byte, {rate * tokens:,.0f} tokens/s{end}", flush=True)
            last = now

    return show


def plot_losses(path: Path, losses: Sequence[float | None]) -> None:
    """Writes a PNG to `path`: the bits a byte of each step, and their running mean.

    losses: nats a byte, None for a step that float16 skipped. Raises OSError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bits = np.array([math.nan if x is None else x for x in losses]) / math.log(2)
    steps = np.arange(1, len(bits) + 1)
    axes.plot(steps, bits, linewidth=0.8, alpha=0.5, label="each step")
    width = int(len(bits) * SMOOTH)
    if width > 1:
        kept = np.isfinite(bits)
        sums = np.convolve(np.where(kept, bits, 0), np.ones(width), "valid")
        counts = np.convolve(kept, np.ones(width), "valid")
        mean = np.divide(sums, counts, out=np.full_like(sums, math.nan), where=counts > 0)
        axes.plot(steps[width - 1 :], mean, label=f"mean of {width} steps")
    axes.set(xlabel="step", ylabel="bits a byte", ylim=(0, None))
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    write_whole(path, image.getvalue())
