"""The documentation site: its pages have the library's names, and its hooks write the right text.

`make docs` builds the site, and fails for a dead link or a missing name.
"""

import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("torch")
pytest.importorskip("flax")

ROOT = Path(__file__).parents[1]
HOOKS = ROOT / "docs" / "hooks"
ARCHITECTURE = ROOT / "docs" / "develop" / "architecture.md"
MODULES = ("jax_kernels", "jax_kernels.masks", "jax_kernels.models", "jax_kernels.bridge", "jax_kernels.bridge.nn")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
# For the command line.
INTERNAL = {"jax_kernels.bridge.nn.has_gpu", "jax_kernels.bridge.nn.logits_and_input_gradients"}


@pytest.fixture
def hook(monkeypatch):
    """Imports a file of docs/hooks."""
    monkeypatch.syspath_prepend(str(HOOKS))
    return importlib.import_module


def public_names(module: str) -> set[str]:
    """The names that a module imports as `X as X`, or has in __all__, without its submodules."""
    imported = importlib.import_module(module)
    listed = getattr(imported, "__all__", None)
    names = listed or re.findall(
        r"\bimport \w+ as (\w+)|^    (\w+) as \w+,$", Path(imported.__file__).read_text(), re.M
    )
    names = [name if isinstance(name, str) else name[0] or name[1] for name in names]
    is_public = lambda name: not name.startswith("_") and not isinstance(getattr(imported, name), types.ModuleType)
    return {f"{module}.{name}" for name in names if is_public(name)} - INTERNAL


def reference_page(uri: str, hook) -> str:
    """A page of docs/reference/, with the entries that the hook writes."""
    text, packages = (ROOT / "docs" / uri).read_text(), hook("reference_pages").PACKAGES
    return hook("reference_pages").with_entries(text, packages[uri]) if uri in packages else text


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_every_public_name_once(module, hook):
    uris = [f"reference/{page.name}" for page in (ROOT / "docs" / "reference").glob("*.md")]
    documented = re.findall(r"^::: (\S+)$", "".join(reference_page(uri, hook) for uri in uris), re.MULTILINE)
    assert len(documented) == len(set(documented))
    names = public_names(module)
    assert len(names) >= 15
    assert not names - set(documented)


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (
            "## A\n\n::: names of ops.f.f, ops\n\n## B\n\n::: names of ops.x\n",
            "## A\n\n::: p.f\n\n::: p.g\n\n::: p.C\n\n",
        ),
        ("# P\n\n## A\n\n::: names of ops.f\n\n::: names of ops\n", "# P\n\n## A\n\n::: p.g\n\n::: p.f\n\n::: p.C\n"),
    ],
)
def test_lines_of_names_become_entries(hook, monkeypatch, lines, want):
    pages = hook("reference_pages")
    monkeypatch.setattr(pages, "_public_names", lambda package: ["ops.f.g", "ops.f.f", "ops.deep.c.C"])
    assert pages.with_entries(lines, "p") == want


def test_a_public_name_without_a_heading_raises(hook):
    pages = hook("reference_pages")
    with pytest.raises(pages.PluginError, match=r"no line has compilation\.compile_kernels, its module or a folder"):
        pages.with_entries("## A\n\n::: names of ops, masks, analysis, chunks\n", "jax_kernels")
    with pytest.raises(pages.PluginError, match=r"got \['ops', 'ops'\], want each folder, module or name once"):
        pages.with_entries("::: names of ops\n\n::: names of ops\n", "jax_kernels")


def without_code(page: str) -> str:
    """The text of a page, without its blocks of code."""
    return re.sub(r"^( *)(```|~~~).*?^\1\2", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_a_heading_occurs_once(page):
    """No two headings of a page have the same level and text: a link to one of them would miss the other."""
    found = re.findall(r"^#+ .+?(?= *$)", without_code(page), re.MULTILINE)
    assert found
    assert [x for x in dict.fromkeys(found) if found.count(x) > 1] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/guides/")])
def test_forward_mode_is_of_xla_alone(page):
    """A sentence about forward mode names the implementation that has it, in its paragraph or item of a list."""
    for text in re.split(r"\n\n|\n- ", without_code(page)):
        if re.search(r"forward mode|jax\.jvp", text, re.IGNORECASE):
            assert 'implementation="xla"' in text


@pytest.mark.parametrize("uri", ["reference/ops.md", "reference/bridge.md"])
def test_lines_of_names_have_folders_modules_and_names(hook, uri):
    pages = hook("reference_pages")
    paths = [f"{path}." for path in pages._public_names(pages.PACKAGES[uri])]
    lines = pages.LINE.finditer((ROOT / "docs" / uri).read_text())
    sources = [source for line in lines for source in pages._sources(line)]
    assert len(sources) >= 15
    unknown = [source for source in sources if not any(path.startswith(f"{source}.") for path in paths)]
    assert not unknown


def rows_of_ops() -> list[tuple[str, list[str]]]:
    """(op, the other cells) of the architecture's tables from an op to its files."""
    tables = ARCHITECTURE.read_text().partition("## From an op to its files")[2]
    rows = [
        [cell.strip(" `") for cell in row.strip("|").split("|")]
        for row in re.findall(r"^\| `.*$", tables, re.MULTILINE)
    ]
    return [(op, cells) for op, *cells in rows]


def test_the_architecture_has_every_op_in_both_tables():
    from jax_kernels.cli.ops import OPS

    assert sorted(op for op, _ in rows_of_ops()) == sorted([*OPS, *OPS])


def test_the_architecture_names_files_and_folders_that_exist():
    text = ARCHITECTURE.read_text()
    paths = set(re.findall(r"(?:jax_kernels|pallas|bridge|models|tests)/[\w/]*(?:\.\w+)?", text))
    assert len(paths) > 40
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize(("op", "cells"), rows_of_ops())
def test_the_architecture_leads_from_an_op_to_files_that_have_it(op, cells, hook):
    if len(cells) == 4:
        page, file, gradient, _ = cells
        assert f"def {op}(" in (ROOT / file).read_text()
        assert gradient == "none" or re.search("_bwd|vjp|backward", (ROOT / gradient).read_text())
        (path,) = re.findall(r"\(\.\./([^#]*).*\)", page)  # a guide, or the op's entry in the reference
        assert op in reference_page(path, hook)
    else:
        _, tests, bridge = cells
        assert op in (ROOT / tests).read_text()
        assert f"def {op}(" in (ROOT / bridge).read_text()


@pytest.mark.parametrize(
    ("docstring", "want"),
    [
        ("Code::\n\n    a = b[0] * c\n\nMore.", "Code:\n\n```python\na = b[0] * c\n```\n\nMore."),
        ("[B, T] of 2**3 < 9, `x[0]`.", "\\[B, T] of 2\\*\\*3 &lt; 9, `x[0]`."),
        ("Args:\n  a, b,\n    c: as in x.\n  *rest: more.", "Args:\n  a, b, c: as in x.\n  *rest: more."),
        ("Returns:\n  out: x.\n\nRaises:\n  TypeError: y.", "Returns:\n  out&#58; x.\n\nRaises:\n  TypeError: y."),
        ("An end::", "An end::"),
    ],
)
def test_docstrings_become_markdown(hook, docstring, want):
    assert hook("docstring_code").as_markdown(docstring) == want


def test_fields_become_a_list(hook):
    text = "A class.\n\na: the first. b, c: two\nothers: see a."
    assert hook("docstring_code")._with_lists(text, ["a", "b", "c"]) == (
        "A class.\n\n- `a`: the first.\n- `b, c`: two others: see a."
    )


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1. One:\n\n   ```\n   code\n   ```\n\n2. Two", "1. One:\n\n    ```\n    code\n    ```\n\n2. Two\n"),
        ("- One\n  more\n\nEnd", "- One\n    more\n\nEnd\n"),
        ("```\n1. One\n   more\n```", "```\n1. One\n   more\n```\n"),
        ("| `a \\| b` | c \\| d |", "| `a | b` | c \\| d |\n"),
        ("`a \\| b`", "`a \\| b`\n"),
    ],
)
def test_pages_for_github_become_pages_for_the_site(hook, text, want):
    assert hook("github_markdown").on_page_markdown(text, page=None, config=None, files=None) == want


@pytest.mark.parametrize(
    ("page", "link", "want"),
    [
        ("index.md", "docs/guides/masks.md#how-to-make-one", "guides/masks.md#how-to-make-one"),
        ("guides/masks.md", "../../benchmarks/notes/masks.md", "../performance/notes/masks.md"),
        ("performance/notes/masks.md", "../results/sparse-h200.json", "../../benchmarks/results/sparse-h200.json"),
        ("performance/notes/index.md", "../../CONTRIBUTING.md#glossary", "../../develop/glossary.md#glossary"),
        ("develop/architecture.md", "../../bridge/README.md", "bridge.md"),
        ("guides/masks.md", "https://arxiv.org/abs/2307.08691", "https://arxiv.org/abs/2307.08691"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(hook, page, link, want):
    pages = hook("repository_pages")
    file = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=page))
    text = f"[text]({link}) `code`\n\n```\n[text]({link})\n```\n"
    assert pages.on_page_markdown(text, file, None, None) == f"[text]({want}) `code`\n\n```\n[text]({link})\n```\n"


def test_a_page_of_sections_has_their_text(hook):
    pages = hook("repository_pages")
    text = pages._text(pages.SOURCES["develop/add_a_mask.md"])
    assert text.startswith("# Add a mask\n")
    assert "jax_kernels/masks/presets.py" in text
    assert "## Add a kernel" not in text


def test_a_section_without_a_page_raises(hook, monkeypatch):
    pages = hook("repository_pages")
    without = {uri: source for uri, source in pages.SOURCES.items() if uri != "develop/glossary.md"}
    monkeypatch.setattr(pages, "SOURCES", without)
    with pytest.raises(pages.PluginError, match=r"no page of the site has \['Glossary'\]"):
        pages._check_sections()
    source = pages.Source("CONTRIBUTING.md", ("No such section",))
    monkeypatch.setattr(pages, "SOURCES", {"x.md": source})
    with pytest.raises(pages.PluginError, match=r"x.md: CONTRIBUTING.md has no section \['No such section'\]"):
        pages._check_sections()


def test_the_support_matrix_has_the_plans_of_the_library(hook):
    import jax.numpy as jnp

    from jax_kernels import explain, layer_norm
    from jax_kernels.dispatch import on_device
    from jax_kernels.testing.typical_call import spec

    matrix = hook("support_matrix")
    columns = {column.title: column for column in matrix._columns()}
    cases = {case.label: case for case in matrix._cases_of("layer_norm", matrix.OPS["layer_norm"])}
    for title in ("Hopper 9.0", "Ampere 8.0", "Turing 7.5", "no GPU"):
        answer = lambda name, column=columns[title]: matrix._answer(cases["bfloat16"], name, column)
        defaults = [name for name in ("mosaic_gpu", "triton", "xla") if answer(name) == "default"]
        with on_device(columns[title].info):
            plan = explain(layer_norm, spec((1024, 4096), jnp.bfloat16))
        assert defaults == [plan.implementation]
    assert matrix._answer(cases["float32"], "mosaic_gpu", columns["Ampere 8.0"]).startswith("it needs Hopper")
    assert matrix._directions(cases["bfloat16"], "xla", columns["no GPU"]) == "forward, backward"
    (decode, *_) = matrix._cases_of("decode_attention", matrix.OPS["decode_attention"])
    assert matrix._directions(decode, "xla", columns["no GPU"]) == "forward"


def test_the_page_of_the_command_line_has_every_command(hook):
    text = hook("command_pages").page()
    for command in ("info", "check", "train", "demo", "explain matmul"):
        assert f"# `jax-kernels {command}`" in text
        assert f"Usage: jax-kernels {command} [OPTIONS]" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["[x](missing.md)", "[x](#missing)", "::: jax_kernels.no_such_name", "![x](missing.png)"]
)
def test_a_strict_build_fails(tmp_path, text):
    config = (ROOT / "mkdocs.yml").read_text()
    config = re.sub(r"^hooks:\n(?:  .*\n)+", "", config, flags=re.MULTILINE)
    config = re.sub(r"^nav:\n(?:  .*\n)+", "nav: [index.md]\n", config, flags=re.MULTILINE)
    config = config.replace("docs_dir: docs", "docs_dir: pages").replace("paths: [.]", f"paths: [{ROOT}]")
    config = config.replace("docs/hooks/docstring_code.py", str(HOOKS / "docstring_code.py"))
    config = config.replace("extra_css: [site.css]\n", "")
    (tmp_path / "mkdocs.yml").write_text(config)
    (tmp_path / "pages").mkdir()
    build = lambda: subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    (tmp_path / "pages" / "index.md").write_text("# Home\n\n[x](#home)\n")
    done = build()
    assert done.returncode == 0, done.stderr
    (tmp_path / "pages" / "index.md").write_text(f"# Home\n\n{text}\n")
    assert build().returncode == 1
