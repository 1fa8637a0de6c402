"""The benchmark of sparse attention, run without a GPU."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import sparse

from jax_kernels.masks import limits


@pytest.mark.parametrize("pattern", sparse.OF_SPARSITY)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
def test_masks_have_their_sparsity(pattern, sparsity):
    made = sparse.pattern_of(pattern, sparsity, sparse.arguments(["--seq-len", "200", "--block-size", "10"]))
    keep = made.mask.to_dense(200, 200)[0, 0]
    dense = np.asarray(keep)
    assert dense.any(axis=1).all()
    assert dense.mean() == pytest.approx(1 - sparsity, abs=0.02)
    assert sparse.kept_share(keep) == dense.mean()
    assert (made.window is None, made.tokens > 0) == (
        pattern in ("block", "top-k-blocks", "random"),
        pattern == "structured",
    )
    if made.window is not None:
        rule = sparse._window_rule(*made.window, made.tokens, made.prefix, *np.ogrid[:200, :200])
        np.testing.assert_array_equal(rule, dense)


def test_causal_window_matches_the_argument():
    """Seven keys, the last one the query's own. The mask cannot be an argument and has lists."""
    args = sparse.arguments(["--window", "7", "--prefix", "3"])
    made = sparse.pattern_of("causal-window", None, args)
    i, j = np.ogrid[:50, :50]
    want = (i - 6 <= j) & (j <= i)
    np.testing.assert_array_equal(made.mask.to_dense(50, 50)[0, 0], want)
    np.testing.assert_array_equal(sparse._window_rule(*made.window, 0, 0, i, j), want)
    given = limits.Limits(mask=made.mask)
    assert limits.joined(given, 1) == given
    with_prefix = sparse.pattern_of("causal-prefix", None, args)
    np.testing.assert_array_equal(with_prefix.mask.to_dense(50, 50)[0, 0], want | (j < 3))
    np.testing.assert_array_equal(sparse._window_rule(*with_prefix.window, 0, with_prefix.prefix, i, j), want | (j < 3))


def test_pairs_are_counted():
    i, j = np.ogrid[:23, :23]
    for side, tokens in ((0, 0), (3, 0), (22, 0), (0, 5), (4, 2), (21, 3), (22, 22)):
        want = (np.abs(i - j) <= side) | (i < tokens) | (j < tokens)
        assert sparse._pairs(23, side, tokens) == want.sum()


@pytest.mark.slow
def test_runs_and_writes(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(sparse, "prepare_process", lambda: None)
    out = tmp_path / "sparse.json"
    words = "--seq-len 64 --batch-size 2 --num-heads 2 --head-dim 16 --block-size 16 --timer host --rounds 2"
    words += " --pattern causal-window --window 20 --seconds 0.001 --implementation xla"
    words += f" --mode fwd,bwd,fwdbwd --output {out}"
    assert sparse.main(words.split()) == 0
    results = json.loads(out.read_text())
    assert {"schema", "environment", "timer", "method", "rows"} == set(results)
    rows = results["rows"]
    assert [(r["pattern"], r["mode"], r["contender"]) for r in rows] == [
        ("causal-window", mode, name) for mode in sparse.MODES for name in sparse.CONTENDERS
    ]
    for row in rows:
        if row["contender"] in ("jax-cudnn-bias", "torch-flex", "torch-flex-flash"):
            assert row["status"] == "unavailable"
            assert row["reason"].startswith(("it needs an NVIDIA GPU", "the Python module flash_attn"))
            continue
        assert (row["status"], len(row["times_ms"])) == ("ok", 2)
        assert 1e-4 < row["error"] < 1e-2
        share = 1 if row["contender"] == "dense" else 1 - row["sparsity"]
        work = 4 * 2 * 2 * 64 * 64 * 16 * share * {"fwd": 1, "bwd": 2.5, "fwdbwd": 3.5}[row["mode"]]
        assert row["tflops"] * row["median_ms"] == pytest.approx(work / 1e9)
        assert row["contender"] != "dense" or row["faster_than_dense_by"] == 1
    assert (rows[0]["live_blocks"], rows[0]["window"], rows[0]["sparsity_asked"]) == (1, [19, 0], None)
    assert rows[0]["sparsity"] == pytest.approx(1 - (64 * 20 - 19 * 20 / 2) / 64**2)


def test_rows_without_time_left_are_reported(tmp_path, monkeypatch, without_gpu):
    monkeypatch.setattr(sparse, "prepare_process", lambda: None)
    monkeypatch.setattr(sparse, "pattern_of", lambda *_: pytest.fail("a mask was built"))
    out = tmp_path / "sparse.json"
    words = "--seq-len 64 --batch-size 1 --num-heads 2 --head-dim 16 --pattern block,window --sparsity 0.5 --mode fwd"
    assert sparse.main([*words.split(), "--timer", "host", "--budget", "0.000001", "--output", str(out)]) == 1
    rows = json.loads(out.read_text())["rows"]
    assert [(r["pattern"], r["mode"], r["contender"]) for r in rows] == [
        (pattern, "fwd", name)
        for pattern in ("block", "window")
        for name in sparse.CONTENDERS
        if pattern == "window" or name != "window-argument"
    ]
    assert {(r["status"], r["reason"], "times_ms" in r) for r in rows} == {
        ("skipped", "the time budget was spent before it was built", False)
    }


@pytest.mark.parametrize("mode", sparse.MODES)
def test_wrong_results_are_not_timed(mode, make_case):
    """The reference has another mask, which lacks one key."""
    case = make_case(mode, causal=False, shape=(1, 64, 2, 16, 2))
    args = sparse.arguments(["--implementation", "xla"])
    sets = sparse.input_sets(case)[:1]
    keep = jnp.asarray(np.tri(64, dtype=bool))
    contender = sparse.build("array", case, sparse.MaskPattern(sparse.masks.dense(keep)), keep, sets, args)
    sparse.check(contender, sparse.right(case, keep, sets[0]))
    assert contender.status == "ok"
    call = contender.call
    sparse.check(contender, sparse.right(case, keep.at[32:, 0].set(False), sets[0]))
    assert (contender.status, contender.call) == ("wrong", None)
    poisoned = sparse.Contender("array", "jax", lambda index: (*call(index)[:-1], call(index)[-1] * jnp.nan))
    sparse.check(poisoned, sparse.right(case, keep, sets[0]))
    assert (poisoned.status, poisoned.call) == ("wrong", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--pattern causal",
            "pattern: got 'causal', want some of block, top-k-blocks, window, random, structured",
        ),
        ("--sparsity 1", "sparsity: got [1.0], want numbers from 0 to below 1"),
        ("--mode forward", "mode: got 'forward', want some of fwd, bwd, fwdbwd"),
        ("--contenders ours", "contenders: got 'ours', want some of dense"),
        ("--window 0", "got 0, want a positive number"),
        ("--block-size 0", "block_size: got 0, want a positive number"),
        ("--seq-len 0", "seq: got 0, want a positive number"),
    ],
)
def test_wrong_arguments_are_named(words, message, capsys):
    with pytest.raises(SystemExit):
        sparse.arguments(words.split())
    assert message in capsys.readouterr().err
