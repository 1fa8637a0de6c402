"""The page "Coming from another library": each row of its tables runs, and no public name of a library is missing."""

import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "start" / "migrating.md"
# The libraries' public names, by the heading of their section.
NAMES = json.loads((Path(__file__).parent / "support" / "library_names.json").read_text())
OUT_OF_SCOPE = "Out of scope"


def sections() -> dict[str, str]:
    """The text below each heading of the page."""
    _, *parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    return {heading: text for heading, _, text in (part.partition("\n") for part in parts)}


def rows(text: str) -> list[list[str]]:
    """The cells of the tables whose second column is `write`."""
    found: list[list[str]] = []
    for table in re.findall(r"^\| [^|\n]+ \| write \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        found += [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()]
    return found


ROWS = [(heading, text, cells) for heading, text in sections().items() for cells in rows(text)]
IDS = [f"{heading} {names.partition(',')[0].strip('`')}" for heading, _, (names, _, _) in ROWS]


def values_of(result):
    return result if isinstance(result, tuple | list) else [result]


@pytest.mark.parametrize(("text", "cell"), [(text, code) for _, text, (_, code, _) in ROWS], ids=IDS)
def test_a_row_runs(text, cell, tmp_path, monkeypatch):
    """The cell is one code span, which runs after the section's first example; its floats are finite."""
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(r"`[^`]+`", cell), cell
    code = cell.strip("`")
    if code.startswith("make "):
        assert re.search(rf"^{code.removeprefix('make ')}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    scope: dict = {}
    exec(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0], scope)
    *statements, last = code.split("; ")
    for statement in statements:
        exec(statement, scope)
    result = eval(last, scope)
    assert result is not None or re.search(r"print\(|\.backward\(|\.plot\(|clear_cache\(", last)
    for value in values_of(result):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert value.float().isfinite().all()


@pytest.mark.parametrize("heading", NAMES)
def test_the_page_has_every_public_name(heading):
    """The first column, or the list at the end of the page, has the name in backticks."""
    found = sections()
    text = "".join(names for names, _, _ in rows(found[heading])) + found[OUT_OF_SCOPE]
    names = {name.partition("(")[0] for span in re.findall(r"`([^`]+)`", text) for name in span.split(", ")}
    assert len(NAMES[heading]) > 5
    assert not [name for name in NAMES[heading] if name not in names]


def test_every_library_has_rows():
    with_rows = {heading for heading, text in sections().items() if rows(text)}
    assert set(NAMES) <= with_rows
    assert len(set(IDS)) == len(ROWS) > 100


def test_a_name_is_replaced_or_out_of_scope():
    """No name of a library has a row, and is also in the list at the end of the page."""
    found = sections()
    parts = re.findall(r"([\w-]+): ((?:`[^`]+`(?:, )?)+)", found[OUT_OF_SCOPE])
    assert len(parts) > 5
    for library, spans in parts:
        text = next(text for heading, text in found.items() if library in heading)
        replaced = {
            name for names, _, _ in rows(text) for span in re.findall(r"`([^`]+)`", names) for name in span.split(", ")
        }
        assert not replaced & {name for span in re.findall(r"`([^`]+)`", spans) for name in span.split(", ")}
