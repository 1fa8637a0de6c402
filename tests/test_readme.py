"""The Python examples of the README and of the pages in docs/ run as they stand there."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [page for folder in (".", "docs", "benchmarks/notes") for page in sorted((ROOT / folder).glob("*.md"))]


def examples(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def name(page):
    return page.relative_to(ROOT).as_posix()


EXAMPLES = {f"{name(page)} {number}": text for page in PAGES for number, text in enumerate(examples(page))}


def test_there_are_examples():
    assert len(examples(README)) >= 4


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[example], example, "exec"), {"__name__": "__main__"})
