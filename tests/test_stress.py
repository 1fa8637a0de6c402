"""The stress tier: calls that hypothesis draws, against definitions in float64, and the summary of its script."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch

from jax_kernels.cli.ops import OPS
from jax_kernels.dispatch import on_device
from tests.support.oracles.definitions import Definitions
from tests.support.random import calls, examples
from tests.support.random.draws import SmallDraw, check
from tests.tools import stress


@pytest.mark.slow
@pytest.mark.parametrize("kind", calls.KINDS)
def test_drawn_calls_are_right(kind):
    counts = examples.Counts()
    for route in examples.ROUTES:
        examples.run_kind(kind, route, counts, examples=3, seed=7, is_over=lambda: False)
    assert not counts.failures
    assert counts.passed == {(kind, "jax", "xla"): 3, (kind, "bridge", "xla"): 3}


@pytest.mark.parametrize("kind", calls.KINDS)
def test_definitions_agree_with_xla_in_float32(kind):
    """The oracle itself, by the older comparison of these calls."""
    call = calls.KINDS[kind](SmallDraw(3, 0))
    right = call.wanted()
    call = dataclasses.replace(call, dtype="float32", tolerance=1e-4)
    if kind in ("attention_of_eight_bits",):  # XLA's form rounds the weights to 8 bits
        call = dataclasses.replace(call, tolerance=0.05)
    check(call, {name: np.asarray(x) for name, x in right.items()}, examples.definition(call, "cpu"))


def test_every_drawn_op_has_a_definition():
    drawn = (calls.KINDS[kind](SmallDraw(seed)).options for kind in ("products", "grouped") for seed in range(30))
    names = {options["op"] for options in drawn if "op" in options}
    assert {"grouped_matmul", "grouped_gated_matmul"} <= names
    assert all(hasattr(Definitions, name) for name in names)


@pytest.mark.parametrize("kind", calls.KINDS)
def test_hopper_kernels_serve_some_calls(kind):
    """They want whole blocks and dtypes of 16 bits: sizes that are drawn freely seldom suit them."""
    how = {"implementation": "mosaic_gpu"}
    with on_device("h200"):
        served = (examples.is_served(calls.drawn(kind, seed), how) for seed in range(12))
        assert any(served)


@pytest.mark.parametrize("route", examples.ROUTES)
@pytest.mark.parametrize(("place", "named"), [(0, None), (1, "xla")])
def test_the_drawn_implementation_runs(route, place, named, monkeypatch):
    """A later implementation is named in the call; the choice of dispatch is not."""
    norms, asked = calls.drawn("norms", 1), []

    def forward(ops, given, **how):
        asked.append(how.get("implementation"))
        return norms.forward(ops, given, **how)

    draw = SmallDraw(0)
    monkeypatch.setattr(draw, "one", lambda *choices: choices[min(place, len(choices) - 1)])
    monkeypatch.setattr(examples, "implementations", lambda call: ["auto", "xla"])
    assert examples.example(dataclasses.replace(norms, forward=forward), route, draw, "cpu") == ["auto", "xla"][place]
    assert asked[-1] == named


def test_a_wrong_result_is_reported(monkeypatch):
    norms = calls.KINDS["norms"]

    def wrong(draw):
        call = norms(draw)
        forward = lambda ops, *args, **how: {
            name: x if isinstance(ops, Definitions) else 1.1 * x for name, x in call.forward(ops, *args, **how).items()
        }
        return dataclasses.replace(call, forward=forward)

    monkeypatch.setitem(calls.KINDS, "norms", wrong)
    counts = examples.Counts()
    examples.run_kind("norms", "bridge", counts, examples=2, seed=1, is_over=lambda: False)
    (failure,) = counts.failures
    assert (failure["kind"], failure["route"], failure["seed"]) == ("norms", "bridge", 1)
    assert failure["error"].startswith("AssertionError")
    assert "columns" in failure["options"]


def test_the_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stress, "_set_environment", lambda: None)
    path = tmp_path / "s.json"
    words = ["--examples", "2", "--kinds", "grouped", "--routes", "bridge", "--output", str(path)]
    assert stress.main(words) == 0
    found = json.loads(path.read_text())
    assert (found["examples"], found["failures"], found["device"]) == (2, [], "cpu")
    assert found["passed"] == {"grouped": {"bridge": {"xla": 2}}}
    assert json.loads(capsys.readouterr().out) == found
    both = stress.merged([found, found | {"failures": [{"kind": "norms"}]}])
    assert both["passed"] == {"grouped": {"bridge": {"xla": 4}}}
    assert (both["examples"], both["failures"]) == (4, [{"kind": "norms"}])
    with pytest.raises(SystemExit, match="--kinds: got norm, want some of attention, "):
        stress.main(["--kinds", "norm"])


def test_a_process_that_does_not_end(tmp_path, monkeypatch):
    """Its whole rounds count, and it is listed with the kind of its call.

    The seeds of the two processes are 2 and 3, and their first turns 0 and 1.
    """
    script = tmp_path / "worker.py"
    script.write_text("""
import json, pathlib, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert sys.argv[-3:] == ["--turns", str(int(given["--seed"]) - 2), "2"]
seed, running = int(given["--seed"]), {"running": {"kind": "norms", "route": "jax", "seed": 7}}
found = {"device": "cpu", "failures": [], "examples": seed, "passed": {"norms": {"jax": {"xla": seed}}}}
pathlib.Path(given["--output"]).write_text(json.dumps(found | (running if seed == 3 else {})))
time.sleep(600 if seed == 3 else 0)
""")
    monkeypatch.setattr(stress, "__file__", str(script))
    output = tmp_path / "s.json"
    words = ["--minutes", "0.1", "--grace", "0", "--workers", "2", "--seed", "1", "--output", str(output)]
    assert stress.main(words) == 1
    found = json.loads(output.read_text())
    assert (found["examples"], found["passed"]) == (5, {"norms": {"jax": {"xla": 5}}})
    assert found["unfinished"] == [{"kind": "norms", "route": "jax", "seed": 7}]


@pytest.mark.parametrize(("turns", "seen"), [((), [0, 1, 2]), (("--turns", "5", "16"), [5, 21, 13])])
def test_processes_share_the_turns(turns, seen, monkeypatch):
    """16 processes: the first takes the turns 0, 16, 32, of 24 kinds and routes; so all kinds have equally many."""
    monkeypatch.setattr(stress, "_set_environment", lambda: None)
    found = []

    def run_kind(kind, route, counts, **options):
        found.append((kind, route))
        counts.passed[kind, route, "xla"] += 10

    monkeypatch.setattr(examples, "run_kind", run_kind)
    assert stress.main(["--examples", "30", *turns]) == 0
    tasks = [(kind, route) for kind in calls.KINDS for route in examples.ROUTES]
    assert [tasks.index(task) for task in found] == seen


def test_hopper_kernels_are_half_of_the_draws(monkeypatch):
    monkeypatch.setattr(examples, "implementations", lambda call: ["triton", "mosaic_gpu", "xla"])
    monkeypatch.setattr(examples, "is_served", lambda call, how: False)
    drawn = []
    draw = SmallDraw(0)
    monkeypatch.setattr(draw, "one", lambda *choices: drawn.extend(choices) or choices[0])
    examples.example(calls.drawn("norms", 1), "jax", draw, "cpu")
    assert sorted(drawn) == ["mosaic_gpu"] * 2 + ["triton", "xla"]


def test_every_op_is_drawn():
    """By its name in a call of some kind; ring and sharded ops have random calls of their own."""
    seen = set()

    class Drawn(Exception):
        pass

    class Names:
        """Notes the op that a call is about to run, and ends the call."""

        def __getattr__(self, name):
            if name in OPS:
                seen.add(name)
                raise Drawn
            return getattr(Definitions({}), name)

    wanted = set(OPS) - {"ring_attention", "sequence_parallel_dilated_attention"}
    seeds = 0, 2, 3, 9  # the first ones that together draw all ops
    for seed, make in itertools.product(seeds, calls.KINDS.values()):
        call = make(SmallDraw(seed, 1))
        arrays = {name: torch.as_tensor(np.array(x)) for name, x in call.arrays.items()}
        with pytest.raises(Drawn):
            call.forward(Names(), arrays)
        if seen >= wanted:
            break
    assert seen == wanted
