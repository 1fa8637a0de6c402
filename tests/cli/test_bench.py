"""jax-kernels bench: the table, the JSON and the page of one run, with a fake timer, and messages for wrong use."""

import base64
import json
import re

import jax
import pytest

from jax_kernels import cli, dispatch
from jax_kernels.cli import bench
from jax_kernels.cli.bench import page, peers, rows
from jax_kernels.cli.bench import sizes as bench_sizes
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
    assert out.count("not mosaic_gpu: it needs an NVIDIA GPU") == 3  # in the table of each call
    assert [f"wrote {tmp_path / name}" in out.replace("\n", "") for name in ("r.json", "r.html")] == [True, True]
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["device"]["name"] == "CPU"
    assert report["versions"]["jax"] == jax.__version__
    results = report["results"]
    assert {(row["op"], row["call"]) for row in results} == {
        ("matmul", "64 x 256"),
        ("matmul", "256 x 256"),
        ("rms_norm", "256 x 512"),
    }
    first = results[0]
    assert (first["implementation"], first["ms"], first["timer"], first["gradients"]) == ("xla", 2.0, "fake", True)
    assert first["options"] == {"shape": "64,256", "columns": 256}
    assert all(row["reason"] for row in results if row["ms"] is None)
    text = (tmp_path / "r.html").read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert len(pictures) == 3  # a roofline, and one of each op
    assert report["roofs"]["tflops"] == pytest.approx(2 * 1024**3 / 2 / 1e9)  # of the fake timer's 2 ms
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert "<td>64 x 256</td><td>xla</td><td>2</td>" in text


def test_an_interrupted_run_keeps_its_rows(run, monkeypatch, tmp_path):
    right = bench.rows_of

    def stopped(op, call, *options):
        if op == "rms_norm":
            raise KeyboardInterrupt
        return right(op, call, *options)

    monkeypatch.setattr(bench, "rows_of", stopped)
    files = [tmp_path / name for name in ("r.json", "r.html")]
    code, out, _ = run("matmul", "rms_norm", "--json", str(files[0]), "--html", str(files[1]))
    assert (code, "256 x 256" in out) == (130, True)
    report = json.loads(files[0].read_text())
    assert (report["complete"], {row["op"] for row in report["results"]}) == (False, {"matmul"})
    assert "256 x 256" in files[1].read_text()


@pytest.mark.parametrize(
    "ops",
    [
        ("matmul", "rms_norm", "decode_attention"),
        pytest.param(("flash_attention", "gated_matmul", "mlp", "layer_norm"), marks=pytest.mark.slow),
    ],
)
def test_peers_agree_and_are_timed(run, tmp_path, ops):
    """Each peer of a CPU runs, and its result is compared with the op's."""
    path = tmp_path / "r.json"
    code, out, _ = run(*ops, "--peers", "--gradients", "--seconds", "0.001", "--json", str(path))
    assert code == 0
    found = [row for row in json.loads(path.read_text())["results"] if row["is_peer"]]
    assert [row["reason"] for row in found if row["ms"] is None] == []
    assert {row["op"] for row in found} == set(ops)
    of_attention = {row["implementation"] for row in found if row["op"] == "flash_attention"}
    assert of_attention == ({"jax.nn", "torch SDPA"} if "flash_attention" in ops else set())
    assert "torch" in out


def test_a_peer_with_another_result_is_not_timed(monkeypatch):
    wrong = {"torch matmul": lambda torch, given: given["x"] @ given["w"] * 1.5}
    monkeypatch.setitem(peers._TORCH, "matmul", wrong)
    call = bench_sizes.STANDARD["matmul"][1][0]
    given = bench_sizes.arrays("matmul", call)
    (found,) = peers.times("matmul", given, OPS["matmul"].function, gradients=False, seconds=0.001)
    assert found.ms is None
    assert found.reason.startswith("ValueError: its result differs by 5.0e-01 of the norm")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    (found,) = peers.times("matmul", given, OPS["matmul"].function, gradients=False, seconds=0.001)
    assert found.reason.startswith("ModuleNotFoundError: torch is not installed")


def test_densities(run, tmp_path):
    path, of_html = tmp_path / "r.json", tmp_path / "r.html"
    words = ("--seconds", "0.001", "--json", str(path), "--html", str(of_html))
    code, out, _ = run("rms_norm", "--density", "--peers", *words)
    assert code == 0
    assert "4 of 8 blocks" in out
    found = [row for row in json.loads(path.read_text())["results"] if row["density"] and row["ms"]]
    assert {row["density"] for row in found} == {1.0, 0.5, 0.25, 0.125}
    assert {row["implementation"] for row in found} == {"xla", "torch SDPA, dense mask"}
    assert "Speed-up by the density of the mask" in of_html.read_text()
    blocks = rows.random_blocks(8, 3)
    assert (blocks.sum(1) == 3).all()
    assert blocks.diagonal().all()


def test_attention_is_a_short_name(run, monkeypatch):
    """As in explain and tune."""
    seen = []
    monkeypatch.setattr(bench, "rows_of", lambda op, *given: seen.append(op) or [])
    assert run("attention")[0] == 0
    assert set(seen) == {"flash_attention"}


def test_speed_ups_are_over_the_densest_mask():
    row = lambda density, ms: rows.Row(
        op="flash_attention", call="", options={}, gradients=False, implementation="xla", ms=ms, spread=0.0, timer="",
        tflops=1.0, blocks=None, tuned=False, reason=None, density=density,
    )  # fmt: skip
    assert page.speed_ups([row(1.0, 8.0), row(0.25, 4.0)]) == {"xla": {0.25: 2.0, 1.0: 1.0}}


def test_the_bytes_of_a_call():
    call = bench_sizes.STANDARD["matmul"][1][0]
    given = bench_sizes.arrays("matmul", call)
    size = given["x"].dtype.itemsize * (64 * 256 + 256 * 256 + 64 * 256)
    assert bench_sizes.traffic(OPS["matmul"].function, given, False) == size
    assert bench_sizes.traffic(OPS["matmul"].function, given, True) == 3 * size


def test_an_op_without_gradients(run):
    _, out, _ = run("decode_attention", "--gradients", "--seconds", "0.001")
    assert "decode_attention, forward, fake timer, CPU" in out


def test_reasons_name_their_calls_unless_it_is_all():
    row = lambda call, reason: rows.Row(
        op="matmul", call=call, options={}, gradients=False, implementation="triton", ms=None, spread=None, timer=None,
        tflops=None, blocks=None, tuned=False, reason=reason,
    )  # fmt: skip
    assert page.reasons([row("a", "slow"), row("b", "slow")]) == ["not triton: slow"]
    assert page.reasons([row("a", "slow"), row("b", "old")]) == ["not triton (a): slow", "not triton (b): old"]


def test_which_ops_have_standard_sizes():
    """All but the ops that need a mesh, and two that take masks of blocks."""
    without = {name for name, op in OPS.items() if op.devices is not None}
    assert OPS.keys() - bench_sizes.STANDARD.keys() == without | {"block_sparse_attention", "dynamic_mask_attention"}


def test_groups_and_targets_of_standard_calls():
    """The groups have all rows, also a rest; the targets are ids of the vocabulary."""
    call = bench_sizes.StandardCall(name="", values={"shape": "10,8", "columns": 16, "groups": 4})
    assert bench_sizes.arrays("grouped_matmul", call)["group_sizes"].tolist() == [2, 2, 2, 4]
    for transpose_w in (False, True):
        values = {"shape": "64,8", "columns": 300, "transpose_w": transpose_w}
        targets = bench_sizes.arrays("linear_cross_entropy", bench_sizes.StandardCall(name="", values=values))[
            "targets"
        ]
        assert targets.shape == (64,)
        assert 8 < targets.max() < 300


def test_a_run_of_groups_and_of_a_loss(run, tmp_path):
    path = tmp_path / "r.json"
    ops = ("grouped_matmul", "grouped_gated_matmul", "linear_cross_entropy")
    assert run(*ops, "--gradients", "--seconds", "0.001", "--json", str(path))[0] == 0
    found = [row for row in json.loads(path.read_text())["results"] if row["ms"]]
    assert [(row["op"], row["call"], row["gradients"], row["implementation"]) for row in found] == [
        (op, call.name, True, "xla") for op in ops for call in bench_sizes.STANDARD[op][1]
    ]


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
        ("grouped_matmul", False, 2 * 64 * 128 * 256),
        ("grouped_gated_matmul", True, 3 * 2 * 64 * 128 * 256 * 2),
        ("linear_cross_entropy", True, 3 * 2 * 64 * 128 * 512),
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
        ("matmul --seconds inf", "--seconds: got inf, want a finite number above 0"),
        ("matmul --seconds 0", "--seconds: got 0.0, want a finite number above 0"),
        ("matmul --json nowhere/r.json", "--json: got 'nowhere/r.json', want a file in a folder that exists"),
        ("matmul --html .", "--html: got '.', want a file"),
    ],
)
def test_wrong_use(run, arguments, text):
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert text in err
