"""The README's picture is drawn from checked-in results."""

import json

import picture


def test_panels_have_the_results():
    """Each bar is the figure of a row of its file; a peer with several forms has its fastest."""
    files = [picture.RESULTS / name for name in ("attention-h200.json", "sparse-h200.json", "ring-h100-x4.json")]
    speed, sparse, ring = picture.panels(*files)
    rows = json.loads(files[0].read_text())["rows"]
    wanted = ("mosaic_gpu", True, "fwd", 256)
    (of_256,) = [r["tflops"] for r in rows if (r["contender"], r["causal"], r["mode"], r["head_dim"]) == wanted]
    assert list(speed.bars) == ["64", "128", "256"]
    assert speed.bars["256"][picture.OURS] == of_256
    assert list(sparse.bars) == ["9 %", "30 %", "50 %"]
    assert all(of_group[picture.OURS] > of_group[picture.FLEX] for of_group in sparse.bars.values())
    assert list(ring.bars) == ["1", "2", "4"]
    peers = [r for r in json.loads(files[2].read_text())["rows"] if r["contender"].startswith("torch")]
    of_two = [r["tflops"] for r in peers if (r["devices"], r["tokens"], r["mode"]) == (2, 65536, "fwdbwd")]
    assert ring.bars["2"][picture.TORCH] == max(of_two)


def test_draws_a_file(tmp_path):
    panel = picture.Panel("speed", "head_dim", "TFLOP/s", {"64": {picture.OURS: 500.0, picture.FA4: 400.0}})
    picture.draw([panel, panel], tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
