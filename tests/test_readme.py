"""The Python examples of the README and of docs/ run unchanged. The files that pages and docstrings name exist."""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [page for pattern in ("*.md", "docs/**/*.md", "benchmarks/notes/*.md") for page in sorted(ROOT.glob(pattern))]
# Pages that the hooks of the site write.
GENERATED = {ROOT / "docs" / "reference" / name for name in ("cli.md", "support_matrix.md")}
# Files that CONTRIBUTING tells its reader to write.
TO_WRITE = re.compile(r"(/|_)OP\.py$|/block_specs/sm87\.py$")


def examples(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def name(page):
    return page.relative_to(ROOT).as_posix()


# tests/test_tutorials.py runs the examples of a tutorial as one program.
EXAMPLES = {
    f"{name(page)} {number}": text
    for page in PAGES
    if page.parent.name != "tutorials"
    for number, text in enumerate(examples(page))
}


def test_examples_exist():
    assert len(examples(README)) >= 4


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # An example may assign to this name.
    functional = pytest.importorskip("torch").nn.functional
    monkeypatch.setattr(functional, "scaled_dot_product_attention", functional.scaled_dot_product_attention)
    exec(compile(EXAMPLES[example], example, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page):
    links = re.findall(r'\]\(([^)#]+)[^)]*\)|src="([^"]+)"', page.read_text())
    paths = [page.parent / path for pair in links for path in pair if path and "://" not in path]
    assert not [path for path in paths if not path.exists() and path not in GENERATED]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page):
    found = re.findall(r"(?:\.\./)*[\w.]+(?:/\w+)+\.(?:py|json|toml|md)\b", page.read_text())
    paths = [path for path in found if not TO_WRITE.search(path)]
    assert not [path for path in paths if not any((folder / path).exists() for folder in (ROOT, page.parent))]


def test_docstrings_name_files_that_exist():
    """A docstring may name a file without its folders."""
    folders = ("jax_kernels", "pallas", "bridge", "models", "tests", "benchmarks", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    docstrings = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in files}
    named = [(path, x) for path, text in docstrings.items() for x in re.findall(r"(?<![\w*/])[\w/]+\.py\b", text)]
    assert len(named) > 40
    ends = {"/".join(file.parts[-count:]) for file in files for count in range(1, len(file.parts))}
    assert not [(path, x) for path, x in named if x.strip("/") not in ends]
