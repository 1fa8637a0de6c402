"""jax_kernels.tune: times the candidates of the calls made inside a block, and keeps the fastest."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jax_kernels import dispatch
from jax_kernels.device import device_info
from jax_kernels.dispatch import Request, tuning_key
from jax_kernels.extras import require
from jax_kernels.ops.planned_op import PlannedCall, TunableCall, tuned_by
from jax_kernels.tuned import cache
from jax_kernels.tuned.winners import Winner
from jax_kernels.tuning import timers
from jax_kernels.tuning.measure import Measurement, NothingToTuneError, Settings

__all__ = ["Progress", "Silent", "TunedCall", "filled", "tune", "without_trace"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedCall:
    """A call that was made inside jax_kernels.tune.

    request: the call without its arrays. named: the implementation that the caller named, or None. winner: its times;
    None if it was not tuned, with the reason. failed: the candidates that did not run, each with the reason. pruned:
    the candidates that were not timed because they cannot be the fastest, each with the reason.
    """

    request: Request
    named: str | None
    winner: Winner | None
    reason: str | None = None
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    pruned: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        shape = ", ".join(f"{name}={value}" for name, value in _told(self.request).items())
        head = f"{self.request.op}({shape})"
        if self.winner is None:
            return f"{head}: not tuned: {self.reason}"
        return f"{head}: {self.winner}{self._pruned_text()}"

    def _pruned_text(self) -> str:
        """Words for the candidates that were not timed; empty without any."""
        return f"; not timed: {len(self.pruned)} predicted to be too slow" if self.pruned else ""


def _told(request: Request) -> dict[str, Any]:
    """The fields of a request that differ from their common value, for a line of text."""
    text = lambda x: getattr(x, "__qualname__", x)  # of an activation
    fields = {field.name: text(getattr(request, field.name)) for field in dataclasses.fields(request)}
    dull = {"op", "device", "shapes", "not_in_tiles", "not_in_mosaic_tiles"}
    return {
        name: x for name, x in fields.items() if name not in dull and x not in (None, False) and name != "v_head_dim"
    }


class Progress(Protocol):
    """Receives the steps of tuning, for a progress bar."""

    def begin(self, text: str, steps: int) -> None:
        """A call begins, which has at most this number of candidates."""

    def step(self, text: str) -> None:
        """A candidate begins."""

    def end(self, result: TunedCall) -> None:
        """The call ends."""


class Silent:
    """A Progress that shows nothing."""

    def begin(self, text: str, steps: int) -> None:
        pass

    def step(self, text: str) -> None:
        pass

    def end(self, result: TunedCall) -> None:
        pass


class _Session:
    """The Tuner of one block: results so far, and the traced calls that are timed after the block."""

    lists_composed = False

    def __init__(self, gradients: bool, seconds: float, prune: bool, progress: Progress):
        self.gradients, self.seconds, self.prune, self.progress = gradients, seconds, prune, progress
        self.results: list[TunedCall] = []
        self.timer: timers.Timer | None = None
        self._seen: set[Any] = set()
        self._later: list[TunableCall] = []

    def tuned(self, tunable: TunableCall) -> tuple[PlannedCall, Any]:
        """Times a call with arrays at once; keeps a traced call for later, without its arrays."""
        key = tunable.request.device.name, tuning_key(tunable.request), tunable.named, tunable.reason
        if key not in self._seen:
            if (reason := tunable.reason or _why_not(tunable)) is not None:
                self._add(TunedCall(request=tunable.request, named=tunable.named, winner=None, reason=reason))
            elif _is_tracing() or any(map(_is_traced, jax.tree.leaves(tunable.inputs))):
                self._later.append(dataclasses.replace(tunable, inputs=jax.tree.map(without_trace, tunable.inputs)))
            else:
                self._measure(tunable)
            self._seen.add(key)
        choice = tunable.op.choose(tunable.request, tunable.named)
        call = dataclasses.replace(tunable.call, implementation=choice.implementation, config=choice.config)
        return call, tunable.inputs

    def composed(self, tunable: TunableCall) -> Any:
        """The inputs as they are: the calls that the op is made of are tuned."""
        return tunable.inputs

    def finish(self) -> None:
        """Times the traced calls, with random arrays."""
        while self._later:
            tunable = self._later.pop(0)
            try:
                inputs = filled(tunable)
            except jax.errors.JaxRuntimeError as error:
                reason = f"its arrays do not fit the memory: {str(error).partition(chr(10))[0]}"
                self._add(TunedCall(request=tunable.request, named=tunable.named, winner=None, reason=reason))
                continue
            self._measure(dataclasses.replace(tunable, inputs=inputs))

    def _measure(self, tunable: TunableCall) -> None:
        if self.timer is None:
            self.timer = timers.choose()
        settings = Settings(
            timer=self.timer,
            seconds=self.seconds,
            gradients=self.gradients,
            step=self.progress.step,
            prunes=self.prune,
        )
        measurement = Measurement(tunable, settings)
        self.progress.begin(tunable.request.op, measurement.count())
        found: dict[str, Any] = {"winner": None}
        try:
            found["winner"] = measurement.winner()
            cache.store(tunable.request.device.name, tuning_key(tunable.request), found["winner"])
        except NothingToTuneError as error:
            found["reason"] = str(error)
        found |= {"failed": measurement.failed, "pruned": measurement.pruned}
        self._add(TunedCall(request=tunable.request, named=tunable.named, **found))

    def _add(self, result: TunedCall) -> None:
        self.results.append(result)
        self.progress.end(result)


def _is_tracing() -> bool:
    """Whether JAX traces a function now. A call with arrays that are known then cannot run now."""
    return isinstance(jax.lax.add(1, 1), jax.core.Tracer)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)


def without_trace(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_traced(x) else x


def _why_not(tunable: TunableCall) -> str | None:
    """The reason why a call cannot be timed on this machine; None if it can."""
    planned, here = tunable.request.device.name, device_info().name
    if planned != here:
        return f"it is planned for {planned}, and JAX's default device is {here}"
    if not dispatch.serving(tunable.request, tunable.op.implementations, tunable.op.order, tunable.named):
        return "no kernel can serve it: an axis has length 0, or a symbolic one"
    for x in jax.tree.leaves(tunable.inputs):
        if isinstance(x, jax.Array) and not _is_traced(x) and len(x.devices()) > 1:
            return "its arrays are on several devices"
    fields = tunable.inputs._asdict() if hasattr(tunable.inputs, "_asdict") else {}
    for name, x in fields.items():
        for leaf in [] if hasattr(x, "dtype") else jax.tree.leaves(x):
            if _is_traced(leaf) and not jnp.issubdtype(leaf.dtype, jnp.floating):
                return f"{name}: got a {type(x).__name__} whose arrays are traced, want known arrays"
    return None


def filled(tunable: TunableCall) -> Any:
    """The inputs, with arrays instead of shapes: random numbers, True, and the integers of tunable.lengths or 0."""
    keys = iter(jax.random.split(jax.random.key(0), 1 + len(jax.tree.leaves(tunable.inputs))))

    def fill(path: Any, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.random.normal(next(keys), x.shape, jnp.float32).astype(x.dtype)
        name = jax.tree_util.keystr(path[:1], simple=True)
        return jnp.full(x.shape, True if x.dtype == bool else tunable.lengths.get(name, 0), x.dtype)

    return jax.tree_util.tree_map_with_path(fill, tunable.inputs)


@contextlib.contextmanager
def tune(
    *, gradients: bool = True, seconds: float = 0.05, prune: bool = True, progress: Progress | None = None
) -> Iterator[list[TunedCall]]:
    """A context manager: times the candidates of each call made inside it, and keeps the fastest for later processes.

    For example::

        with jax_kernels.tune() as results:
            train_step(params, batch)
        print(*results, sep="\\n")

    The candidates of a call are the implementations that can serve it, and other block sizes of the kernels of
    attention, decoding, matmuls and norms. A call with known arrays is timed when it is made, with these arrays. A call
    under jit is timed after the block, with random arrays of its shapes. Calls of equal options and similar sizes form
    a bucket, and only its first call is timed. A function that was traced before the block makes no call:
    jax.clear_caches() lets JAX trace it again.

    Later calls of the same bucket use the fastest candidate, in this process and, from the user's cache folder, in
    others: jax_kernels.explain shows the times. Programs that were compiled before keep their kernels.

    gradients: also times the backward of attention, norms, grouped matmuls and linear_cross_entropy, and chooses by the
      sum. Set it to False if the calls only serve inference. Matmuls of the backward of a matmul are calls of their
      own: they are tuned if the block differentiates.
    seconds: the duration of one reading. A candidate has three readings or more, and a much slower candidate has one.
    prune: leaves out candidates whose predicted time is more than 1.5 times the smallest predicted time. Predictions
      follow from work tiles and the rates of the device. Set it to False to time all candidates.
    progress: receives the steps, such as a progress bar.

    Yields a list, to which a TunedCall is appended for each bucket.

    Raises ModuleNotFoundError without the packages filelock and, unless JAX_KERNELS_CACHE is set, platformdirs (the cli
    extra); RuntimeError in one of several processes of a program, which must all have the same plans; ValueError for a
    number that is not finite and above 0.
    """
    timers.check_seconds(seconds)
    if jax.process_count() > 1:
        raise RuntimeError(f"tune: got a program of {jax.process_count()} processes, want one process")
    require("filelock", "tune", "cli")  # before any time is spent
    if cache.folder() is None:
        raise ModuleNotFoundError(
            "tune needs the package platformdirs: pip install 'jax-kernels[cli]'", name="platformdirs"
        )
    session = _Session(gradients, seconds, prune, progress or Silent())
    with tuned_by(session):
        yield session.results
    session.finish()
