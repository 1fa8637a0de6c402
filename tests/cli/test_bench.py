"""jax-kernels bench: the table, the JSON and the page of one run, with a fake timer, and messages for wrong use."""

import base64
import json
import re

import jax
import pytest

from jax_kernels import cli, dispatch
from jax_kernels.cli import bench, bench_sizes
from jax_kernels.cli.ops import OPS
from jax_kernels.tuning import timers

pytestmark = pytest.mark.usefixtures("no_interpret")


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs `jax-kernels bench` in this process, with a timer that reads 2 ms: (exit code, stdout, stderr)."""
    monkeypatch.setattr(timers, "choose", lambda: timers.Timer(name="fake", read=lambda program, calls: 2.0))

    def run(*arguments):
        with pytest.raises(SystemExit) as exited:
            cli.main(["bench", *arguments])
        captured = capsys.readouterr()
        return exited.value.code or 0, captured.out, captured.err

    return run


def test_a_run(run, tmp_path):
    code, out, _ = run(
        "matmul", "rms_norm", "--gradients", "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")
    )
    assert code == 0
    assert "matmul, forward and backward, fake timer, CPU" in out
    assert re.search(r"64 x 256 +│ xla +│ 2 +│ 0.0% +│ 0.0126", out)  # 3 * 2 * 64 * 256 * 256 operations in 2 ms
    assert out.count("not mosaic_gpu: it needs an NVIDIA GPU") == 2
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["device"]["name"] == "CPU"
    assert report["versions"]["jax"] == jax.__version__
    rows = report["results"]
    assert {(row["op"], row["call"]) for row in rows} == {
        ("matmul", "64 x 256"),
        ("matmul", "256 x 256"),
        ("rms_norm", "256 x 512"),
    }
    first = rows[0]
    assert (first["implementation"], first["ms"], first["timer"], first["gradients"]) == ("xla", 2.0, "fake", True)
    assert first["options"] == {"shape": "64,256", "columns": 256}
    assert all(row["reason"] for row in rows if row["ms"] is None)
    page = (tmp_path / "r.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 2
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert "<td>64 x 256</td><td>xla</td><td>2</td>" in page


def test_an_op_without_gradients(run):
    _, out, _ = run("decode_attention", "--gradients", "--seconds", "0.001")
    assert "decode_attention, forward, fake timer, CPU" in out


def test_reasons_name_their_calls_unless_it_is_all():
    row = lambda call, reason: bench.Row(
        op="matmul", call=call, options={}, gradients=False, implementation="triton", ms=None, spread=None, timer=None,
        tflops=None, blocks=None, tuned=False, reason=reason,
    )  # fmt: skip
    assert bench._reasons([row("a", "slow"), row("b", "slow")]) == ["not triton: slow"]
    assert bench._reasons([row("a", "slow"), row("b", "old")]) == ["not triton (a): slow", "not triton (b): old"]


@pytest.mark.parametrize("op", bench_sizes.STANDARD)
def test_the_standard_sizes_have_plans(op, monkeypatch):
    """On an H200 each call has a kernel; on a CPU each call is small."""
    large, small = bench_sizes.STANDARD[op]
    for call in small:
        given = bench_sizes.arrays(op, call)
        assert max(x.size for x in given.values() if isinstance(x, jax.Array)) <= 2**20
    monkeypatch.setattr(jax.random, "normal", lambda key, shape, dtype: jax.ShapeDtypeStruct(shape, dtype))
    monkeypatch.setattr(
        jax.ShapeDtypeStruct, "astype", lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype), raising=False
    )
    with dispatch.on_device("h200"):
        for call in large:
            assert (
                dispatch.explain(OPS[op].function, **bench_sizes.arrays(op, call)).implementation != "xla"
                or op == "matmul"
            )


@pytest.mark.parametrize(
    ("op", "gradients", "want"),
    [
        ("flash_attention", False, 4 * 4 * 4 * 128 * 128 * 64 / 2),
        ("flash_attention", True, 3.5 * 4 * 4 * 4 * 128 * 128 * 64 / 2),
        ("gated_matmul", False, 2 * 64 * 256 * 512 * 2),
        ("mlp", True, 3 * 2 * 64 * 256 * 512 * 3),
        ("rms_norm", False, None),
        ("dilated_attention", False, None),
    ],
)
def test_operations(op, gradients, want):
    call = bench_sizes.STANDARD[op][1][0]
    assert bench_sizes.flops(op, bench_sizes.arrays(op, call), gradients) == want


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("matmull", "op: got 'matmull', want one of flash_attention, "),
        ("ring_attention", "op: got 'ring_attention'"),
        ("matmul --seconds 0", "--seconds: got 0.0, want a number above 0"),
        ("matmul --json nowhere/r.json", "--json: got 'nowhere/r.json', want a file in a folder that exists"),
        ("matmul --html .", "--html: got '.', want a file"),
    ],
)
def test_wrong_use(run, arguments, text):
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert text in err
