"""ship_winners and tuning, with tiny norms in the interpreter and a fake timer."""

import dataclasses
import json

import pytest
import ship_winners
import tuning
from harness import parts, tuned_calls
from harness.tuned_calls import norm

from jax_kernels import flash_attention
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device, tuning_key
from jax_kernels.tuned import cache
from jax_kernels.tuning import timers
from tests.support.cases.requests import request_of

pytestmark = pytest.mark.triton

TINY = (norm("rms_norm", 4, 128), norm("rms_norm", 64, 256))
FORWARD = tuple(dataclasses.replace(case, gradients=False) for case in TINY)
SHIPPED, HELD_OUT = ship_winners.CASES, tuning.CASES


def ms(program):
    """The time of a fake reading: 1 with 2 warps, 1.5 with 1, else 2. XLA takes 3."""
    return {1: 1.5, 2: 1.0}.get(program.config.forward.num_warps, 2.0) if program.implementation == "triton" else 3.0


@pytest.fixture(autouse=True)
def _machine(monkeypatch, tmp_path, without_gpu):
    """Kernels are interpreted. There are two calls, and two candidates. Each script runs in this process."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(timers, "choose", lambda: timers.Timer(name="cupti", read=lambda program, calls: ms(program)))
    few = lambda blocks, *_: tuple(dataclasses.replace(blocks, num_warps=x) for x in (1, 2) if x != blocks.num_warps)
    monkeypatch.setattr("jax_kernels.ops.normalization.implementations.norm_candidates", few)
    for module in (ship_winners, tuning):
        monkeypatch.setattr(module, "CASES", FORWARD)
        monkeypatch.setattr(module, "prepare", lambda part: None)


def winners(path):
    return json.loads(path.read_text())["winners"]


def test_shipping(tmp_path, capsys):
    """The file has the format of the cache, a second run continues, and a shipped file is the start of another one."""
    path = tmp_path / "new" / "CPU.json"
    assert ship_winners.main(["--output", str(path), "--part", "1/2"]) == 0
    assert "left for another run: nothing" in capsys.readouterr().out
    (key,) = winners(path)
    assert json.loads(key) == {"op": "rms_norm", "rows": 4, "columns": 128, "dtype": "bfloat16"}
    (first,) = cache.read(path, "CPU").values()
    assert (first.fastest, first.timer, first.timed[0].ms) == ("triton", "cupti", 1.0)
    assert first.timed[0].blocks["forward"]["num_warps"] == 2
    assert ship_winners.main(["--output", str(path)]) == 0
    assert "rms_norm 4x128: has a winner" in capsys.readouterr().out
    assert list(winners(path)) == sorted(winners(path))
    assert len(winners(path)) == 2
    cache.SHIPPED.mkdir()
    path.rename(cache.SHIPPED / "CPU.json")
    assert ship_winners.main([]) == 0
    assert capsys.readouterr().out.count("has a winner") == 2
    other = tmp_path / "other.json"
    ship_winners.add(other, "CPU", {"another": first})
    assert len(winners(other)) == 3
    assert [x.name for x in cache.SHIPPED.iterdir()] == ["CPU.json"]


def test_the_budget(tmp_path, capsys):
    assert ship_winners.main(["--output", str(tmp_path / "CPU.json"), "--budget", "1e-6"]) == 0
    assert "left for another run: rms_norm 4x128, rms_norm 64x256" in capsys.readouterr().out
    assert not (tmp_path / "CPU.json").exists()
    assert tuning.main(["--output", str(tmp_path / "tuning.json"), "--budget", "1e-6"]) == 0
    assert "no time for rms_norm 4x128, rms_norm 64x256" in capsys.readouterr().out


@pytest.mark.slow
def test_failures(tmp_path, capsys, monkeypatch):
    """A call that fails leaves the others alone."""
    broken = dataclasses.replace(FORWARD[0], shapes=((4, 128), (3,)))
    for module in (ship_winners, tuning):
        monkeypatch.setattr(module, "CASES", (broken, FORWARD[0]))
        path = tmp_path / f"{module.__name__}.json"
        assert module.main(["--output", str(path)]) == 1
        assert "rms_norm 4x128: failed: " in capsys.readouterr().out
        assert path.exists()
    monkeypatch.setattr(timers, "choose", lambda: timers.Timer(name="host", read=lambda program, calls: 1.0))
    with pytest.raises(SystemExit):
        ship_winners.main([])
    assert "the timer is 'host'" in capsys.readouterr().err


def test_the_check_of_tuning(tmp_path, monkeypatch, capsys):
    """The pick of tuning and the fastest of all candidates, when pruning leaves the fastest out."""
    path = tmp_path / "tuning.json"
    slower = lambda request, blocks: {x: 2.0 for x in blocks if getattr(x, "num_warps", 0) == 2}
    monkeypatch.setattr("jax_kernels.tuning.cost_model.slower", slower)
    assert tuning.main(["--output", str(path), "--rounds", "3", "--part", "2/2"]) == 0
    assert tuning.main(["--output", str(path), "--rounds", "3", "--part", "1/2"]) == 0
    results = json.loads(path.read_text())
    assert results["timer"] == "cupti"
    assert [row["name"] for row in results["rows"]] == ["rms_norm 64x256", "rms_norm 4x128"]
    for row in results["rows"]:
        assert (row["status"], row["ratio"], row["pick_ms"], row["best_ms"]) == ("ok", 1.5, 1.5, 1.0)
        assert len(row["pruned"]) > 0
        assert row["candidates"] == row["tuned_of"] + len(row["pruned"])
        assert len(row["times_ms"][row["best"]]) == 3
        assert len(row["times_ms"][row["pick"]]) == 3
    assert "worst of 1: 1.500; within 2 %: 0" in capsys.readouterr().out


@pytest.mark.slow
def test_the_check_with_gradients(tmp_path, monkeypatch):
    """The candidates are the backward's, with the forward of the pick."""
    monkeypatch.setattr(tuning, "CASES", TINY[:1])
    assert tuning.main(["--output", str(tmp_path / "tuning.json"), "--rounds", "2"]) == 0
    (row,) = json.loads((tmp_path / "tuning.json").read_text())["rows"]
    assert row["status"] == "ok"
    assert row["ratio"] == 1.0
    assert "num_warps=2" in row["pick"]
    assert row["with_gradients"]


@pytest.mark.slow
def test_calls():
    """Each call is another one, also by the buckets of tuning: none of the check is shipped."""
    with on_device("h200"):
        keys = [[tuning_key(case.tunable().request) for case in cases] for cases in (SHIPPED, HELD_OUT)]
    shipped, held_out = map(set, keys)
    assert len(shipped) == len(SHIPPED)
    assert not shipped & held_out
    assert len({(key, case.gradients) for key, case in zip(keys[1], HELD_OUT, strict=True)}) == len(HELD_OUT) == 10
    for cases in (SHIPPED, HELD_OUT):
        assert {case.op for case in cases} >= {"flash_attention", "matmul", "gated_matmul"}
        assert len({case.name for case in cases}) == len(cases)


def test_a_request_of_a_call():
    """The tuner sees the request that the op makes."""
    found = tuned_calls.attention(1, 256, 4, 64, kv_heads=2, causal=True, gradients=True).tunable().request
    want = request_of(flash_attention, (1, 256, 4, 64), *[(1, 256, 2, 64)] * 2, is_causal=True)
    assert dataclasses.replace(found, device=device_info("h200")) == want


def test_parts(monkeypatch, capsys):
    shares = [parts.part_of(range(10), (index, 3)) for index in (1, 2, 3)]
    assert sorted(x for share in shares for x in share) == list(range(10))
    for text in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(SystemExit):
            tuning.main(["--part", text])
    with pytest.raises(SystemExit):
        tuning.main(["--calls", "rms_norm 4x128; matmul 1x1x1"])
    assert "calls: got ['matmul 1x1x1']" in capsys.readouterr().err
    monkeypatch.delenv("BENCHMARK_LOCK", raising=False)
    with pytest.raises(SystemExit):
        tuned_calls.prepare((1, 2))
    assert "--part: got 1/2 without BENCHMARK_LOCK" in capsys.readouterr().err
