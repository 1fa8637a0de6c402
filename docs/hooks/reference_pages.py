"""The public names on the reference pages of jax_kernels and jax_kernels.bridge.

A line "::: names of X, Y" of such a page becomes an entry for each public name that X or Y defines. X and Y are
folders, modules or single names, relative to the package. A name goes to the line with the name itself, else to the
line with its module, else to the line with its nearest folder. A heading is left out if its line has no names. The
build fails for a public name without a line.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PACKAGES = {"reference/ops.md": "jax_kernels", "reference/bridge.md": "jax_kernels.bridge"}
LINE = re.compile(r"^(?P<heading>#.*\n\n)?::: names of (?P<sources>.*\n)", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Writes the entries of the public names into a page of PACKAGES."""
    package = PACKAGES.get(page.file.src_uri)
    return markdown if package is None else with_entries(markdown, package)


def with_entries(markdown: str, package: str) -> str:
    """The text with an entry for each public name of the package."""
    sources = [source for line in LINE.finditer(markdown) for source in _sources(line)]
    found: dict[str, list[str]] = {source: [] for source in sources}
    if len(found) < len(sources):
        raise PluginError(f"reference of {package}: got {sources}, want each folder, module or name once")
    for path in _public_names(package):
        parts = path.split(".")
        above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        source = next((source for source in above if source in found), None)
        if source is None:
            raise PluginError(
                f"reference of {package}: no line has {path}, its module or a folder; add it below a heading"
            )
        found[source].append(f"::: {package}.{parts[-1]}\n")

    def entries(line: re.Match[str]) -> str:
        text = "\n".join(entry for source in _sources(line) for entry in found[source])
        return text and f"{line['heading'] or ''}{text}"

    return LINE.sub(entries, markdown)


def _sources(line: re.Match[str]) -> list[str]:
    return line["sources"].strip().split(", ")


def _public_names(package: str) -> Iterator[str]:
    """The path of each public name that is no module itself, relative to the package, as in "ops.matmul.mlp.mlp".

    The package is read but not imported, since PyTorch need not be installed.
    """
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    table = next(x for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "_MODULES")
    for module, names in ast.literal_eval(table.value).items():
        for name in names:
            if module != f"{package}.{name}":
                yield f"{module}.{name}".removeprefix(f"{package}.")
