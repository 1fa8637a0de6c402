"""The README's table of speeds has the figures of checked-in results, and the README stays short."""

import json

import pytest
import readme_table

README = (readme_table.ROOT / "README.md").read_text()


def test_the_readme_has_the_table_of_the_results():
    """If it fails: `make report` writes the table again."""
    assert readme_table.with_table(README) == README
    assert readme_table.main(["--check"]) == 0


def test_a_changed_result_changes_the_table(tmp_path, monkeypatch):
    changed = [dict(row) for row in readme_table._rows("fp8-h200.json")]
    readme_table.one(changed, shape=[2, 8192, 8, 256], causal=False)["speed_ratio"] = 9.876
    rows = readme_table._rows
    monkeypatch.setattr(readme_table, "_rows", lambda file: changed if file == "fp8-h200.json" else rows(file))
    path = tmp_path / "README.md"
    path.write_text(README)
    assert readme_table.main(["--readme", str(path), "--check"]) == 1
    assert path.read_text() == README
    readme_table.main(["--readme", str(path)])
    (line,) = [new for new in path.read_text().splitlines() if new not in README.splitlines()]
    assert "forward in 8 bits" in line
    assert "| 9.88 times bf16's |" in line


def test_every_row_names_its_gpu():
    """Rows are of an H200, as the text above the table says, or name their GPU."""
    for line in readme_table.LINES:
        environment = json.loads((readme_table.ROOT / readme_table.RESULTS / line.file).read_text())["environment"]
        device = environment["device"].removeprefix("NVIDIA ").split(" ")[0]
        assert device == "H200" or device in line.call, line.call


def test_an_ambiguous_case_raises():
    rows = [{"a": 1, "b": 1}, {"a": 1, "b": 2}]
    assert readme_table.one(rows, a=1, b=2) is rows[1]
    for wanted in ({"a": 1}, {"a": 2}):
        with pytest.raises(ValueError, match="want one"):
            readme_table.one(rows, **wanted)
    with pytest.raises(ValueError, match="got no table"):
        readme_table.with_table("# a page\n")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
