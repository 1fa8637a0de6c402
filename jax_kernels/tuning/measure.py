"""Times the candidates of a call: the implementations that serve it, and other blocks of the faster ones."""

import dataclasses
import datetime
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels import dispatch
from jax_kernels.dispatch import Choice
from jax_kernels.ops.planned_op import TunableCall, tuned_by
from jax_kernels.tuned import cache
from jax_kernels.tuned.winners import Timed, Winner
from jax_kernels.tuning import compiling, cost_model
from jax_kernels.tuning.timers import Program, Timer, milliseconds, ones_like_result

__all__ = ["Measurement", "NothingToTuneError", "Settings", "program_of"]

_TURNS = 3  # readings of a candidate when it is first timed
_ROUNDS = 5  # readings of each of the fastest candidates, which alternate
_FINALISTS = 3
_GAIN = 0.99  # the part of the block spec's time that other blocks may take at most
# The blocks of an implementation are varied if it takes at most this multiple of the fastest one's time.
_NEAR = 1.5
# A candidate whose first call takes more than this multiple of the fastest one's time gets no further reading.
_FAR = 5.0


class NothingToTuneError(Exception):
    """A call has one candidate, or none runs. The text is the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """timer: reads the times. seconds: of a reading's queue of calls. gradients: whether gradients are timed too.

    prunes: whether candidates that cannot be the fastest are left out. step(text): called before each candidate is
    timed.
    """

    timer: Timer
    seconds: float
    gradients: bool
    step: Callable[[str], None]
    prunes: bool = True


@dataclasses.dataclass(kw_only=True, eq=False)
class _Candidate:
    """A program and its readings in ms. result: of one call, to compare results; None after the comparison."""

    program: Program
    readings: list[float] = dataclasses.field(default_factory=list)
    result: Any = None

    @property
    def ms(self) -> float:
        return statistics.median(self.readings)


class Measurement:
    """The candidates of one call, and their times.

    failed: the text of each candidate that raised, or whose results differ, with the reason: also of one that asks for
    more shared memory or registers than there are, which its compilation finds. pruned: the same of each candidate that
    was neither compiled nor timed, because the cost model predicts more than MARGIN times the smallest prediction.

    Spilled registers decide nothing: a kernel that spills a few can be the fastest. The fastest Triton backward of
    benchmarks/results/triton-blocks-h100.json at head_dim 256 spills 96 bytes, and takes 0.77 of the time of one that
    spills none.
    """

    def __init__(self, tunable: TunableCall, settings: Settings):
        self.tunable, self.settings = tunable, settings
        self.failed: dict[str, str] = {}
        self.pruned: dict[str, str] = {}
        self.direction = "gradients" if settings.gradients and tunable.moving else "forward"
        self._wanted: dict[str, Any] = {}  # by direction, the results of the first candidate
        op, request = tunable.op, tunable.request
        with cache.ignored():
            self.untuned: Choice = op.choose(request, tunable.named)
        self.names = dispatch.serving(request, op.implementations, op.order, tunable.named)

    def count(self) -> int:
        """The number of candidates to time, at most: some implementations are too slow to vary their blocks."""
        others = ((name, *x) for name in self.names for x in self._others(name).items())
        return len(self.names) + sum(len(x) - len(self._too_slow(name, field, x)) for name, field, x in others)

    def winner(self) -> Winner:
        """Times the candidates. Raises NothingToTuneError if there are fewer than two, or if none runs."""
        if self.count() < 2:
            only = f"{self.names[0]} is the only candidate" if self.names else "plain JAX serves it"
            raise NothingToTuneError(f"{only} on {self.tunable.request.device.name}")
        with tuned_by(None):
            base = self._implementations()
            best = {name: self._varied(name, base) for name in base}
            return self._final(base, best)

    def _implementations(self) -> dict[str, _Candidate]:
        """The candidates with the block specs, by implementation; the untuned one first, whose results are right."""
        first = self.untuned.implementation
        programs = {}
        for name in sorted(self.names, key=lambda name: name != first):
            config, _ = self.tunable.op.implementations[name].config(self.tunable.request)
            programs[name] = self._program(name, config, self.direction)
        found = self._timed(programs)
        if not found:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            raise NothingToTuneError(f"no implementation runs: {reasons}")
        return found

    def _others(self, name: str) -> dict[str, Sequence[Any]]:
        """By field of the config, the blocks of each candidate of an implementation, without its block spec."""
        candidates = self.tunable.op.implementations[name].candidates
        found: Mapping[str, Sequence[Any]] = {} if candidates is None else candidates(self.tunable.request)
        return {field: x for field, x in found.items() if field == "forward" or self.direction == "gradients"}

    def _too_slow(self, name: str, field: str, blocks: Sequence[Any]) -> dict[Any, float]:
        """The blocks that the cost model leaves out, with the multiples of the smallest prediction."""
        if not self.settings.prunes:
            return {}
        request = self.tunable.request
        spec = getattr(self.tunable.op.implementations[name].config(request)[0], field)
        return {x: times for x, times in cost_model.slower(request, (spec, *blocks)).items() if x != spec}

    def _kept(self, name: str, field: str, blocks: Sequence[Any]) -> list[Any]:
        """The blocks that the cost model leaves; `pruned` gets the others."""
        too_slow = self._too_slow(name, field, blocks)
        for x, times in too_slow.items():
            self.pruned[f"{name} {x}"] = f"its predicted time is {times:.1f} times the smallest prediction"
        return [x for x in blocks if x not in too_slow]

    def _varied(self, name: str, base: Mapping[str, _Candidate]) -> _Candidate:
        """The fastest candidate of an implementation: first the blocks of the forward vary, then of the backward."""
        best = base[name]
        if best.ms > _NEAR * min(candidate.ms for candidate in base.values()):
            return best
        for field, others in self._others(name).items():
            direction = "forward" if field == "forward" else self.direction
            start = best
            if best.program.direction != direction:
                timed = self._timed({name: self._program(name, best.program.config, direction)})
                if not timed:
                    continue
                start = timed[name]
            programs = {}
            for blocks in self._kept(name, field, others):
                config = dataclasses.replace(start.program.config, **{field: blocks})
                programs[f"{name} {blocks}"] = self._program(name, config, direction)
            found = self._fastest(start, list(self._timed(programs, start).values()))
            if found is not start:
                again = found
                if direction != self.direction:
                    text = f"{name} {field}"
                    program = self._program(name, found.program.config, self.direction)
                    again = self._timed({text: program}, best).get(text, best)
                best = again
        return best

    def _fastest(self, start: _Candidate, tried: Sequence[_Candidate]) -> _Candidate:
        """The fastest of the candidates, after rounds in which the fastest alternate; `start` if none gains enough."""
        nearest = sorted(tried, key=lambda x: x.ms)[:_FINALISTS]
        if not nearest:
            return start
        self._alternate([start, *nearest])
        best = min(nearest, key=lambda x: x.ms)
        return best if best.ms <= _GAIN * start.ms else start

    def _final(self, base: Mapping[str, _Candidate], best: Mapping[str, _Candidate]) -> Winner:
        """The Winner, after rounds in which the implementations near the fastest alternate with their block specs."""
        least = min(candidate.ms for candidate in best.values())
        near = [x for name in best for x in (base[name], best[name]) if best[name].ms <= _NEAR * least]
        self._alternate(list(dict.fromkeys(near)))
        timed = []
        for name in best:
            spec, changed = base[name], best[name]
            is_faster = changed is not spec and changed.ms <= _GAIN * spec.ms
            timed.append(
                Timed(
                    name=name,
                    ms=changed.ms if is_faster else spec.ms,
                    untuned_ms=spec.ms,
                    blocks=_blocks(spec.program.config, changed.program.config) if is_faster else {},
                )
            )
        timed.sort(key=lambda x: x.ms)
        fastest, untuned = timed[0].name, self.untuned.implementation
        spec_of = {x.name: x for x in timed}
        if untuned in spec_of and timed[0].ms > _GAIN * spec_of[untuned].ms:
            fastest = untuned
        return Winner(
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            timer=self.settings.timer.name,
            with_gradients=self.direction == "gradients",
            untuned=untuned,
            fastest=fastest if self.tunable.named is None else None,
            timed=tuple(timed),
        )

    def _alternate(self, candidates: Sequence[_Candidate]) -> None:
        """Replaces the readings of the candidates by new ones, taken in turn."""
        once = {id(x): x.ms for x in candidates}
        for candidate in candidates:
            candidate.readings = []
        for _ in range(_ROUNDS):
            for x in candidates:
                x.readings.append(milliseconds(x.program, self.settings.timer, self.settings.seconds, once[id(x)]))

    def _program(self, name: str, config: Any, direction: str) -> Program:
        return program_of(self.tunable, name, config, direction)

    def _timed(self, programs: Mapping[str, Program], *others: _Candidate) -> dict[str, _Candidate]:
        """The candidates of programs with their first readings, by text, in their order.

        A candidate that does not run, or whose results are wrong, is left out, and `failed` has the reason. A candidate
        whose first call is far slower than the fastest reading, `others` included, gets a single reading. No program is
        compiled while a candidate is timed.
        """
        found: dict[str, _Candidate] = {}
        for batch in itertools.batched(programs.items(), compiling.WORKERS):
            ready = compiling.compiled([program for _, program in batch])
            for (text, _), program in zip(batch, ready, strict=True):
                self.settings.step(text)
                try:
                    if isinstance(program, Exception):
                        raise program
                    found[text] = self._first_readings(program, [*others, *found.values()])
                except Exception as error:  # it does not compile, or asks for too much memory
                    self.failed[text] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return found

    def _first_readings(self, program: Program, others: Sequence[_Candidate]) -> _Candidate:
        """Raises the program's errors, and ValueError for wrong results. others: as in _timed."""
        candidate = _Candidate(program=program)
        got = jax.block_until_ready(program.call())
        self._check(got, program.direction)
        begin = time.perf_counter()
        jax.block_until_ready(program.call())
        once = (time.perf_counter() - begin) * 1e3
        del got
        times = [other.ms for other in others if other.program.direction == program.direction]
        is_far = bool(times) and once > max(_FAR * min(times), 1.0)
        for _ in range(1 if is_far else _TURNS):
            candidate.readings.append(milliseconds(program, self.settings.timer, self.settings.seconds, once))
        return candidate

    def _check(self, got: Any, direction: str) -> None:
        """Raises ValueError if results differ from the first candidate's in this direction."""
        if direction not in self._wanted:
            self._wanted[direction] = got
            return
        error = _relative_error(got, self._wanted[direction])
        if not error <= _TOLERANCE:
            raise ValueError(f"its results differ from the untuned call's by {error:.1e} of their norm")


_TOLERANCE = 0.03  # of the norm of a result: bfloat16 gradients of long sums differ by a hundredth
# Below this part of the largest root mean square of all results, a result may be roundings alone. For equal cotangents,
# the gradient of a layer norm's x is 0.
_ROUNDING = 1e-4


def _relative_error(got: Any, want: Any) -> float:
    """The largest difference of two results, as a part of an array's norm. Infinite values are left out.

    An array whose root mean square is below _ROUNDING times the largest one is compared with this product instead.
    """
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in leaves]
    pairs = [(jnp.where(jnp.isfinite(y), x, 0), jnp.where(jnp.isfinite(y), y, 0)) for x, y in pairs]
    root_mean_square = lambda x: float(jnp.sqrt(jnp.mean(jnp.square(x)))) if x.size else 0.0
    least = _ROUNDING * max((root_mean_square(y) for _, y in pairs), default=0.0)
    errors = [root_mean_square(x - y) / max(root_mean_square(y), least, 1e-30) for x, y in pairs]
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)


def program_of(tunable: TunableCall, name: str, config: Any, direction: str) -> Program:
    """The jitted call by an implementation with a config.

    direction: "forward", or "gradients" for (the results, the gradients) of cotangents of 1. The results count, and the
    cotangents are arguments, since XLA would leave out the forward of results that are not read, and reads of ones.
    """
    call = tunable.call if tunable.parts else dataclasses.replace(tunable.call, implementation=name, config=config)

    def forward(inputs: Any) -> Any:
        return tunable.run(call, inputs)

    def gradients(inputs: Any, cotangents: Any) -> Any:
        moving = {field: getattr(inputs, field) for field in tunable.moving}
        out, vjp = jax.vjp(lambda moving: tunable.run(call, inputs._replace(**moving)), moving)
        return out, vjp(cotangents)

    jitted = jax.jit(forward if direction == "forward" else gradients)
    given = (tunable.inputs,) if direction == "forward" else (tunable.inputs, ones_like_result(forward, tunable.inputs))
    return Program(
        implementation=name,
        config=config,
        direction=direction,
        call=lambda: jitted(*given),
        lower=lambda: (jitted.lower(*given), given),
    )


def _blocks(before: Any, after: Any) -> dict[str, dict[str, Any]]:
    """The fields of a config that changed, with the name of the type of their blocks and their plain values."""
    changed = {}
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old != new:
            values = {x.name: getattr(new, x.name) for x in dataclasses.fields(new)}
            plain = {name: x for name, x in values.items() if isinstance(x, bool | int | None)}
            changed[field.name] = {"type": type(new).__name__, **plain}
    return changed
