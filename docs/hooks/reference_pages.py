"""The public names on the reference pages of jax_kernels and jax_kernels.bridge.

A line "::: names of X, Y" of such a page stands for an entry of each public name that X or Y defines. X and Y are
folders, modules or single names, relative to the package. A name goes to the line that has the name itself, else to
that of its module, else to that of the nearest folder. A heading is left out if its line has no names. The build fails
for a public name that goes to no line.
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
LINE = re.compile(r"^(?P<heading>#.*\n\n)?::: names of (?P<places>.*\n)", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Writes the entries of the public names into a page of PACKAGES."""
    package = PACKAGES.get(page.file.src_uri)
    return markdown if package is None else with_entries(markdown, package)


def with_entries(markdown: str, package: str) -> str:
    """The text with an entry for each public name of the package."""
    places = [place for line in LINE.finditer(markdown) for place in _places(line)]
    found: dict[str, list[str]] = {place: [] for place in places}
    if len(found) < len(places):
        raise PluginError(f"reference of {package}: got {places}, want each folder, module or name once")
    for path in _public_names(package):
        parts = path.split(".")
        above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        place = next((place for place in above if place in found), None)
        if place is None:
            raise PluginError(
                f"reference of {package}: no line has {path}, its module or a folder; add it below a heading"
            )
        found[place].append(f"::: {package}.{parts[-1]}\n")

    def entries(line: re.Match[str]) -> str:
        text = "\n".join(entry for place in _places(line) for entry in found[place])
        return text and f"{line['heading'] or ''}{text}"

    return LINE.sub(entries, markdown)


def _places(line: re.Match[str]) -> list[str]:
    return line["places"].strip().split(", ")


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
