"""Errors of the machine are one line: no device, too little memory, an output that cannot be written, and Ctrl-C."""

import io
import os
import sys
import tempfile

import jax
import pytest

from jax_kernels import cli
from jax_kernels.cli import check
from jax_kernels.cli.machine_errors import in_one_line

BACKEND = (
    "Unable to initialize backend 'cuda': none. (set JAX_PLATFORMS='' to automatically choose an available backend)"
)


def assert_is_one_line(result, code, message):
    assert (result[0], result[1], result[2].count("\n")) == (code, "", 1)
    assert result[2].startswith("jax-kernels: ")
    assert message in result[2]


def refuse(*_, **options):
    raise RuntimeError(BACKEND)


@pytest.mark.parametrize(
    "words",
    [
        "info",
        "explain rms_norm --shape 4,128",
        "check --op rms_norm",
        "bench rms_norm",
        "tune rms_norm --shapes 4,128",
        "profile SCRIPT",
    ],
)
def test_without_a_device(run, monkeypatch, tmp_path, words):
    (tmp_path / "script.py").write_text("print('it ran')")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "local_devices", refuse)
    monkeypatch.setattr(jax, "process_count", refuse)
    result = run(*words.replace("SCRIPT", str(tmp_path / "script.py")).split())
    assert_is_one_line(result, 1, "JAX_PLATFORMS: got 'cuda', want a platform of this machine (Unable to initialize")


def test_the_assertion_of_jax_without_a_device(monkeypatch):
    """Other assertions are bugs, with their tracebacks."""
    for file, is_named in (("jax/_src/xla_bridge.py", True), ("other.py", False)):
        with pytest.raises(AssertionError) as raised:
            exec(compile("assert False", file, "exec"))
        assert (in_one_line(raised.value, "profile") is not None) == is_named
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert in_one_line(RuntimeError(BACKEND), "train") == "Unable to initialize backend 'cuda': none"


@pytest.mark.parametrize(
    "error", [MemoryError("Unable to allocate 8 PiB\nmore"), RuntimeError("RESOURCE_EXHAUSTED: 1")]
)
def test_memory_that_does_not_suffice(error):
    """The line has a way to need less. The error of a script keeps its traceback."""
    line = f"memory does not suffice ({str(error).splitlines()[0]})"
    assert in_one_line(error, "train") == f"{line}; try a smaller --batch-size, a larger --accumulate or --remat all"
    assert in_one_line(error, "check") == line
    assert in_one_line(error, "profile") is None
    assert in_one_line(RuntimeError("a bug"), "train") is None


def test_a_huge_grid_of_blocks(run, monkeypatch):
    def full(shape, *_):
        raise MemoryError(f"Unable to allocate an array of shape {shape}")

    monkeypatch.setattr("jax_kernels.cli.explain_options.np.ones", full)
    result = run("explain", "block_sparse_attention", "--shape", "1,100000000,1,64", "--block-size", "1")
    assert_is_one_line(result, 1, "memory does not suffice (Unable to allocate an array of shape (100000000,")


@pytest.mark.parametrize("words", ["--version", "--help", "tune --list", "info --device h200", "profile SCRIPT"])
def test_full_and_closed_outputs(run, monkeypatch, tmp_path, words):
    """A closed pipe, as behind `| head`, ends the command without a word."""
    script = tmp_path / "script.py"
    script.write_text("import jax.numpy as jnp, jax_kernels\njax_kernels.rms_norm(jnp.ones((4, 128)))\nprint('x')")
    words = words.replace("SCRIPT", str(script)).split()
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    code, _, err = run(*words)
    assert (code, err) == (1, "jax-kernels: the output cannot be written (No space left on device)\n")
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writing, "w"))
    code, _, err = run(*words)
    assert (code, err) == (1, "")


@pytest.mark.parametrize("length", [10, 100_000])
def test_full_disk_behind_a_text_of_any_length(monkeypatch, length):
    """Python writes a long text past its buffer, which is empty after the error."""
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left") as raised:
        print("x" * length, flush=True)
    assert in_one_line(raised.value, "info") == "the output cannot be written (No space left on device)"


def test_closed_streams(run, monkeypatch):
    """Python sets a stream to None if the process starts without it. The command then prints nothing."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert run("--version") == (0, "", "")
    assert sys.stdin.read() == ""
    monkeypatch.setattr(sys, "stderr", None)
    assert run("explain", "--no-such-option")[0] == 2


@pytest.mark.parametrize("columns", ["0", "000", ""])
def test_a_terminal_without_columns(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run("--help")
    assert code == 0
    assert "Commands" in out


def test_an_output_without_utf_8(run, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert run("info", "--device", "cpu", "--reasons") == (0, "", "")
    assert b"flash_attention" in out.buffer.getvalue()
    out.write("é")
    out.flush()
    assert out.buffer.getvalue().endswith(b"?")


def test_ctrl_c_during_imports(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupt)
    assert run("info") == (130, "", "")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("train", "--text", ""), "--text"),
        (("train", "--out="), "--out"),
        (("demo", "--out", "", "--resume"), "--out"),
        (("eval", "text", "--checkpoint", ""), "--checkpoint"),
        (("eval", ""), "TEXT"),
        (("eval", "--", ""), "TEXT"),
        (("eval", "text", "--json", "--checkpoint="), "--checkpoint"),
        (("profile", ""), "SCRIPT"),
        (("tune", "--arguments", "--from", "--from", ""), "--from"),
        (("check", "--json", ""), "--json"),
        (("bench", "--html", ""), "--html"),
    ],
)
def test_empty_paths(run, words, option):
    """They are not the current folder."""
    assert_is_one_line(run(*words), 2, f"{option}: got '', want a path")


def test_an_empty_value_of_another_option_is_no_path(run):
    """The value of --implementation has the name of an option whose value is a path."""
    assert_is_one_line(run("generate", "--implementation", "--checkpoint", ""), 2, "Invalid value for PROMPT: got an")


def test_outputs_are_checked_before_the_work(run, monkeypatch, tmp_path):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    path = str(tmp_path / "found.json")
    assert_is_one_line(run("bench", "--json", path, "--html", path), 2, f"--html: got {path!r}, the file of --json")
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(check, "run_case", lambda *_: pytest.fail("it ran"))
    assert_is_one_line(run("check", "--op", "rms_norm", "--json", path), 1, f"--json: {path} cannot be written (Permi")
    assert_is_one_line(run("bench", "--html", path), 1, f"--html: {path} cannot be written (Permission denied)")
    assert os.listdir(tmp_path) == []
