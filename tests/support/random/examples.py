"""Examples that hypothesis draws: the random calls of the ops, compared with their definitions in float64."""

import collections
import dataclasses
import random
import unittest
from collections.abc import Iterable, Mapping
from typing import Any

import hypothesis
import jax
import numpy as np
import torch
from hypothesis import strategies as st

from jax_kernels.ops.planned_op import recorded_plans
from tests.support.oracles.definitions import Definitions
from tests.support.random import tensors
from tests.support.random.calls import KINDS, SCORE_MODS
from tests.support.random.draws import Call, Draw, SmallDraw, check, cotangent

__all__ = ["ROUTES", "Counts", "definition", "example", "run_kind"]

ROUTES = ("jax", "bridge")
TORCH_MODS = {
    SCORE_MODS["distance"]: lambda s, b, h, q, k: s - 0.05 * (h + 1) * (q - k).abs(),
    SCORE_MODS["capped"]: lambda s, b, h, q, k: 8 * torch.tanh(s / 8),
    SCORE_MODS["by_place"]: lambda s, b, h, q, k: (
        torch.where(k > q + 5, s * 0.5, s) + torch.where(q % 2 == 0, 0.3, -0.2) * (b + 1)
    ),
}
# The number of calls after which compiled programs are dropped.
CALLS_KEPT = 25


class HypothesisDraw(SmallDraw):
    """Choices that hypothesis makes and can make simpler. Arrays come from a seed that it draws.

    is_small: lengths up to 160.
    """

    def __init__(self, data: st.DataObject, is_small: bool):
        super().__init__(data.draw(st.integers(0, 2**31)))
        self._data, self._is_small = data, is_small
        self.longest_whole = (SmallDraw if is_small else Draw).longest_whole

    def one(self, *choices: Any) -> Any:
        return choices[self._data.draw(st.integers(0, len(choices) - 1))]

    def chance(self, probability: float) -> bool:
        return self._data.draw(st.integers(0, 99)) >= 100 - round(100 * probability)

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high - 1))

    def size(self) -> int:
        return super().size() if self._is_small else Draw.size(self)


@dataclasses.dataclass
class Counts:
    """The examples that agreed, by kind of call, route and implementation, and the failures."""

    passed: collections.Counter[tuple[str, str, str]] = dataclasses.field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """{"passed": {kind: {route: {implementation: count}}}, "examples": their sum, "failures"}."""
        found: dict[str, Any] = {}
        for (kind, route, implementation), count in sorted(self.passed.items()):
            found.setdefault(kind, {}).setdefault(route, {})[implementation] = count
        return {"examples": self.passed.total(), "failures": self.failures, "passed": found}


def definition(call: Call, device: str) -> Mapping[str, np.ndarray]:
    """The results of a call by the definitions in float64, and as d_name the gradients of the arrays in `moved`."""
    given = {name: torch.as_tensor(np.array(x), device=device) for name, x in call.arrays.items()}
    given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    for name in call.moved:
        given[name].requires_grad_()
    found = dict(call.forward(Definitions(TORCH_MODS), given))
    moved = [given[name] for name in dict.fromkeys(call.moved)]
    outs = {name: x for name, x in found.items() if x.requires_grad}
    gradients: Iterable[Any] = ()
    if moved:
        # -inf has no gradient: a cotangent of 0 there instead.
        parts = [torch.where(torch.isfinite(x), x, 0.0) for x in outs.values()]
        cotangents = [torch.as_tensor(cotangent(x.shape), device=device).double() for x in parts]
        gradients = torch.autograd.grad(parts, moved, cotangents, allow_unused=True)
    named = {
        f"d_{name}": torch.zeros_like(x) if gradient is None else gradient
        for name, x, gradient in zip(dict.fromkeys(call.moved), moved, gradients, strict=True)
    }
    return {name: x.detach().cpu().numpy() for name, x in (found | named).items()}


def implementations(call: Call) -> list[str]:
    """The choice of dispatch for a call on this machine, and the later implementations, which `is_served` asks."""
    with recorded_plans() as plans:
        jax.eval_shape(call.run, call.given(call.dtype))
    (plan, *_) = plans
    names = [plan.implementation, *(name for name, why in plan.why_not.items() if "in the order" in why)]
    return names if call.implementation_is_free else names[:1]


def example(call: Call, route: str, draw: Draw, device: str) -> str:
    """Checks one call by one route and returns its implementation. Raises AssertionError for a wrong result.

    Half of the draws are the Hopper kernels, which take fewer calls than other implementations.
    """
    names = implementations(call)
    wanted = definition(call, device)
    name = draw.one(*names, *["mosaic_gpu"] * (len(names) - 2 if "mosaic_gpu" in names else 0))
    how = {} if name == names[0] else {"implementation": name}
    if how and not is_served(call, how):
        name, how = names[0], {}
    if route == "bridge":
        check(call, tensors.results(call, tensors.made(call, draw, device), **how), wanted)
    else:
        check(call, jax.jit(lambda arrays: call.run(arrays, **how))(call.given(call.dtype)), wanted)
    return name


def is_served(call: Call, how: Mapping[str, str]) -> bool:
    """Whether an implementation takes a call."""
    try:
        jax.eval_shape(lambda arrays: call.run(arrays, **how), call.given(call.dtype))
    except NotImplementedError:
        return False
    return True


def run_kind(
    kind: str, route: str, counts: Counts, *, examples: int, seed: int, is_over: Any, shrink: bool = False
) -> None:
    """Checks `examples` calls of a kind that hypothesis draws, until is_over() is True.

    A failure is added to counts.failures, with the options of the call; shrink: of the simplest call that fails.
    """
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    drawn: dict[str, Any] = {}
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, phases=phases, derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    @hypothesis.given(st.data())
    def check_one(data: st.DataObject) -> None:
        draw = HypothesisDraw(data, is_small=device == "cpu")
        call = KINDS[kind](draw)
        if is_over():  # after the draws, which may not depend on the time
            raise unittest.SkipTest  # hypothesis passes it on at once
        drawn.clear()
        drawn.update(call.options)
        name = example(call, route, draw, device)
        counts.passed[kind, route, name] += 1
        if counts.passed.total() % CALLS_KEPT == 0:
            jax.clear_caches()

    state = random.getstate()
    try:
        check_one()
    except unittest.SkipTest:
        pass
    except Exception as error:
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        of = {name: str(value) for name, value in drawn.items()}
        found = {"kind": kind, "route": route, "seed": seed, "error": f"{type(error).__name__}: {text}", "options": of}
        counts.failures.append(found)
    finally:
        random.setstate(state)
