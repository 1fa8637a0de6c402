"""jax-kernels tune: the calls of an op and of a script, the list of winners, and messages for wrong use."""

import json
import re
from pathlib import Path

import pytest

from jax_kernels import cli
from jax_kernels.cli.tune import TUNABLE
from jax_kernels.tuned import blocks, cache
from jax_kernels.tuning import timers

pytestmark = pytest.mark.triton


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs `jax-kernels tune` in this process, with an empty cache: (exit code, stdout, stderr).

    Kernels are interpreted. The fake timer gives "triton" 1 ms, and "xla" 2 ms.
    """
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_LOADED", {})
    read = lambda program, calls: {"triton": 1.0}.get(program.implementation, 2.0)
    monkeypatch.setattr(timers, "choose", lambda: timers.Timer(name="fake", read=read))

    def run(*arguments):
        with pytest.raises(SystemExit) as exited:
            cli.main(["tune", *arguments])
        captured = capsys.readouterr()
        return exited.value.code or 0, captured.out, captured.err

    return run


def test_an_op(run):
    code, out, err = run("rms_norm", "--shapes", "4,128 6,128 64,256", "--no-gradients", "--scale")
    assert code == 0
    assert len(re.findall(r"^rms_norm: timing at most \d+ candidates of a call$", err, re.MULTILINE)) == 3
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "rms_norm(rows=4, columns=128, dtype=bfloat16)",
        "rms_norm(rows=6, columns=128, dtype=bfloat16)",
        "rms_norm(rows=64, columns=256, dtype=bfloat16)",
    ]
    assert all("triton tuned on " in line and line.endswith(": 1 ms, xla 2 ms") for line in lines)
    code, out, _ = run("--list")
    assert code == 0
    assert out.splitlines()[0] == "CPU"
    assert out.count("  rms_norm(rows=") == 3
    found = json.loads(run("--list", "--json")[1])["CPU"]
    assert [x["request"]["rows"] for x in found] == [4, 6, 64]
    assert {x["fastest"] for x in found} == {"triton"}
    assert not any(x["shipped"] for x in found)
    code, out, _ = run("--clear")
    assert (code, out) == (0, f"removed {cache.path_of('CPU')}\n")
    assert run("--list")[1] == f"no winners in {cache.folder()}\n"
    assert run("--clear")[1] == f"no winners in {cache.folder()}\n"


def test_the_list_of_winners_of_the_library(run, monkeypatch, tmp_path):
    """They come after the user's own, with a label."""
    monkeypatch.delenv("JAX_KERNELS_TUNED")
    monkeypatch.setattr(cache, "SHIPPED", tmp_path)
    run("rms_norm", "--shapes", "4,128", "--no-gradients")
    own = cache.path_of("CPU")
    (tmp_path / own.name).write_text(own.read_text())
    label = "(shipped with the library)"
    assert [label in line for line in run("--list")[1].splitlines()] == [False, False, True]
    assert [x["shipped"] for x in json.loads(run("--list", "--json")[1])["CPU"]] == [False, True]
    run("--clear")
    assert [label in line for line in run("--list")[1].splitlines()] == [False, False, True]
    assert run("--list")[1].splitlines()[0] == f"no winners in {cache.folder()}"


def test_the_backward_of_a_matmul(run, monkeypatch):
    """Its matmuls are calls of their own, by the implementation of the forward."""
    monkeypatch.delenv("JAX_KERNELS_INTERPRET")
    _, out, _ = run("matmul", "--shapes", "8,16", "--columns", "32")
    assert [line.partition(":")[0] for line in out.splitlines()] == [
        "matmul(m=8, n=32, k=16, dtype=bfloat16, out_dtype=bfloat16)",
        "matmul(m=8, n=16, k=32, dtype=bfloat16, out_dtype=bfloat16)",
        "matmul(m=16, n=32, k=8, dtype=bfloat16, out_dtype=bfloat16, transpose_x=True)",
    ]
    assert all(line.endswith("not tuned: xla is the only candidate on CPU") for line in out.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        "grouped_matmul --shapes 16,16 --columns 16 --groups 2",
        "grouped_gated_matmul --shapes 16,16 --columns 16 --groups 2",
        "linear_cross_entropy --shapes 16,16 --columns 128 --reduction mean",
    ],
)
def test_ops_whose_backward_is_timed_with_them(run, arguments):
    """Their implementations are timed, and no blocks."""
    code, out, err = run(*arguments.split())
    assert (code, err.count("\n"), out.count("\n")) == (0, 1, 1)
    assert err.startswith(f"{arguments.split()[0]}: timing at most ")
    assert "triton tuned on " in out
    assert out.endswith(": 1 ms with its backward, xla 2 ms\n")


def test_every_op_with_candidates_is_on_the_page_and_a_command():
    """The ops that plan their own calls; others are made of such calls."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "tuning.md").read_text()
    table = page.partition("## Candidates")[2].partition("\n\n`ring_attention`")[0]
    assert set(TUNABLE.values()) == blocks.IMPLEMENTATIONS.keys()
    assert [op for op in TUNABLE.values() if f"`{op}`" not in table] == []


SCRIPT = """
import sys
import jax, jax.numpy as jnp, jax_kernels
import helper
print(sys.argv[1:])
jax.jit(jax_kernels.rms_norm)(jnp.ones((4, int(sys.argv[2]))))
sys.exit(int(sys.argv[1]))
"""


def test_a_script(run, tmp_path):
    """It runs as the main program, with its arguments and its folder. Its error ends the command."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    code, out, _ = run("--from", str(tmp_path / "script.py"), "--arguments", "0 128")
    first, line = out.splitlines()
    assert (code, first) == (0, "['0', '128']")
    assert line.startswith("rms_norm(rows=4, columns=128, dtype=float32): triton tuned on ")
    code, out, _ = run("--from", str(tmp_path / "script.py"), "--arguments", "3 256")
    assert (code, out) == (3, "['3', '256']\n")
    (tmp_path / "script.py").write_text("")
    code, out, err = run("--from", str(tmp_path / "script.py"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "got no call of an op that tuning can time" in err
    assert '--arguments: got "\'x" (No closing quotation)' in run("--from", "script.py", "--arguments", "'x")[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--list --clear", "tune: got --list and --clear, want one of them"),
        ("--clear --json", "--json: got it without --list"),
        ("--list --arguments x", "--arguments: got 'x' without --from"),
        ("--from nowhere.py", "--from: got 'nowhere.py', want a Python script"),
        ("--list rms_norm --shapes 4,128", "op: got rms_norm with --from, --list or --clear"),
        ("rms_nor --shapes 4,128", "did you mean 'rms_norm'?"),
        ("dilated_attention --shapes 4,128", "op: got 'dilated_attention', want one of attention"),
        ("rms_norm --shapes 4,x", "--shapes: got '4,x', want whole numbers"),
        ("rms_norm --shapes=", "--shapes: got '', want a shape or several"),
        ("rms_norm --shapes 4,128 --seconds 0", "--seconds: got 0.0, want a finite number above 0"),
        ("attention --shapes 1,2,3", "--shapes: query: got shape (1, 2, 3), want 4 axes"),
    ],
)
def test_wrong_use(run, arguments, text):
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert text in err


def test_without_arguments_the_help_is_shown(run):
    code, out, _ = run()
    assert code == 2
    assert "--from" in out
    assert "gated_matmul" in out
