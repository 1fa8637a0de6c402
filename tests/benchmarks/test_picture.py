"""The README's picture is drawn from checked-in results."""

import json

import picture


def test_panels_have_the_results():
    """Each bar is the figure of a row of its file; a peer with several forms has its fastest."""
    files = [picture.RESULTS / name for name in ("attention-table-h200.json", "sparse-h200.json", "ring-h100-x4.json")]
    forward, backward, sparse, ring = picture.panels(*files)
    rows = {row["name"]: row["contenders"] for row in json.loads(files[0].read_text())["rows"]}
    for panel, mode in ((forward, "fwd"), (backward, "bwd")):
        assert list(panel.bars) == ["64", "128", "192/128", "256"]
        assert all(set(of_group) == {picture.OURS, picture.FA4, picture.CUDNN} for of_group in panel.bars.values())
        assert panel.bars["256"][picture.OURS] == rows[f"256 causal {mode}"]["ours"]["tflops"]
        assert panel.bars["64"][picture.FA4] == rows[f"64 causal {mode}"]["fa4"]["tflops"]
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
