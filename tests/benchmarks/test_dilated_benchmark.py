"""The benchmark of dilated attention, as it runs without a GPU."""

import functools
import json

import dilated
import jax
import jax.numpy as jnp
import pytest

from jax_kernels import dilated_attention


def test_runs_and_writes(tmp_path, run_script):
    out = tmp_path / "dilated.json"
    words = [
        "--shapes",
        "1,64,4,16,2",
        "--segments",
        "16,32",
        "--rates",
        "1,2",
        "--timer",
        "host",
        "--output",
        str(out),
    ]
    done = run_script("dilated.py", *words, "--mode", "fwd", "--rounds", "2", "--seconds", "0.01")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert sorted(rows) == ["dense", "gather", "ours"]
    assert 0 < rows["ours"]["error"] < 0.01
    assert all(len(row["times_ms"]) == 2 for row in rows.values())
    assert rows["ours"]["ours_is_faster_by"] == 1
    # Two branches of 16 tokens to a segment, 4 and 2 of them, where dense attention has 64 tokens.
    work = {name: row["tflops"] * row["median_ms"] for name, row in rows.items()}
    assert work["ours"] == pytest.approx(work["gather"])
    assert work["ours"] / work["dense"] == pytest.approx((4 + 2) * 16**2 / 64**2)


def test_by_gathers_and_scatters_where_rates_divide_nothing():
    query, key, value, dout = (jax.random.normal(jax.random.key(i), (2, 32, 4, 8)) for i in range(4))
    pattern = {"segment_lengths": (8, 16, 40), "dilation_rates": (1, 3, 12), "is_causal": True, "implementation": "xla"}

    def run(function):
        out, vjp = jax.vjp(jax.jit(functools.partial(function, **pattern)), query, key, value)
        return out, *vjp(dout)

    for got, want in zip(run(dilated.gathered), run(dilated_attention), strict=True):
        assert float(jnp.abs(got - want).max()) < 1e-5
    with pytest.raises(NotImplementedError, match="if not causal its rates its segments"):
        dilated.gathered(query, key, value, **pattern | {"is_causal": False})


def test_without_time_left_each_row_says_so(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(dilated, "prepare_process", lambda: None)
    out = tmp_path / "dilated.json"
    words = f"--shapes 1,64,2,16;2,64,2,16 --mode fwd --timer host --budget 0.000001 --output {out}"
    assert dilated.main(words.split()) == 1
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"][:4], row["contender"]) for row in rows] == [
        (case, name) for case in ("1x64", "2x64") for name in dilated.CONTENDERS
    ]
    assert {(row["status"], row["reason"], "times_ms" in row) for row in rows} == {
        ("skipped", "the time budget was spent before it was built", False)
    }


def test_nan_gradients_are_wrong(tmp_path, monkeypatch, without_gpu):
    @jax.custom_vjp
    def poisoned(x):
        return x

    poisoned.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * jnp.nan,))
    attend = dilated.gathered
    of_poisoned_values = lambda *qkv, **options: attend(*qkv[:2], poisoned(qkv[2]), **options)
    monkeypatch.setattr(dilated, "dilated_attention", of_poisoned_values)
    monkeypatch.setattr(dilated, "plan_of", lambda *_: "")
    monkeypatch.setattr(dilated, "prepare_process", lambda: None)
    out = tmp_path / "dilated.json"
    words = "--shapes 1,64,2,16 --segments 16,32 --rates 1,2 --mode fwdbwd --implementation xla --timer host"
    words += f" --rounds 1 --seconds 0.001 --contenders gather,ours --output {out}"
    assert dilated.main(words.split()) == 1
    gather, ours = json.loads(out.read_text())["rows"]
    assert (gather["status"], ours["status"], ours["error"]) == ("ok", "wrong", None)
    assert ours["reason"] == "its results hold a NaN"
    assert "times_ms" not in ours


@pytest.mark.parametrize("name", ["gather", "dense"])
def test_a_nan_of_what_ours_is_held_against_is_told(name, tmp_path, monkeypatch, without_gpu):
    honest = dilated.function_of
    poisoned = lambda *qkv: honest("dense", *arguments)(*qkv) * jnp.nan
    arguments = []

    def function_of(which, *given):
        arguments[:] = given
        return poisoned if which == name else honest(which, *given)

    monkeypatch.setattr(dilated, "function_of", function_of)
    monkeypatch.setattr(dilated, "plan_of", lambda *_: "")
    monkeypatch.setattr(dilated, "prepare_process", lambda: None)
    out = tmp_path / "dilated.json"
    words = "--shapes 1,64,2,16 --segments 16 --rates 1 --mode fwd --implementation xla --timer host"
    words += f" --rounds 1 --seconds 0.001 --contenders {name},ours --output {out}"
    assert dilated.main(words.split()) == 1
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert (rows[name]["status"], rows[name]["reason"]) == ("wrong", "its results hold a NaN")
    assert rows["ours"]["status"] == "ok"


def test_wrong_arguments_are_named(capsys):
    for words, message in (
        (["--rates", "1,2"], "segments, rates: got"),
        (["--segments", "16,x"], "got '16,x', want positive integers with commas between them"),
        (["--mode", "forward"], "mode: got 'forward', want some of fwd"),
        (["--contenders", "theirs"], "contenders: got 'theirs', want some of ours"),
    ):
        with pytest.raises(SystemExit):
            dilated.arguments(words)
        assert message in capsys.readouterr().err
