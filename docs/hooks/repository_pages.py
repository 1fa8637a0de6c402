"""Pages of the site whose text is elsewhere in the repository: README, CONTRIBUTING, the changelog, the notes.

A page is a whole file, or some of its sections. Links are rewritten, so that a page's links work in the repository and
in the site. Results under benchmarks/results/ are copied into the site.
"""

import dataclasses
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
RESULTS = "benchmarks/results"
FIGURES = "## How to read a figure".removeprefix("## ")


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of the repository, or the sections of it with these headings. title: of a page with several sections."""

    path: str
    sections: tuple[str, ...] = ()
    title: str | None = None


NOTES = {
    f"performance/notes/{'index' if path.stem == 'README' else path.stem}.md": Source(f"benchmarks/notes/{path.name}")
    for path in sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
}
SOURCES = {
    "index.md": Source("README.md"),
    "reference/changelog.md": Source("CHANGELOG.md"),
    "performance/how_to_read_a_figure.md": Source("benchmarks/notes/README.md", (FIGURES,)),
    **NOTES,
    "develop/bridge.md": Source("bridge/README.md"),
    "develop/build_and_test.md": Source(
        "CONTRIBUTING.md",
        (
            "Build and test",
            "Folders",
            "Compile one case without a GPU",
            "Show that a refactoring kept every kernel",
            "Compare two versions on a GPU",
        ),
        title="Build and test",
    ),
    "develop/add_a_row.md": Source("CONTRIBUTING.md", ("Add a block spec row",)),
    "develop/add_a_mask.md": Source("CONTRIBUTING.md", ("Add a mask",)),
    "develop/add_a_kernel.md": Source("CONTRIBUTING.md", ("Add a kernel",)),
    "develop/add_an_op.md": Source("CONTRIBUTING.md", ("Add an op",)),
    "develop/add_an_architecture.md": Source("CONTRIBUTING.md", ("Add an architecture",)),
    "develop/glossary.md": Source("CONTRIBUTING.md", ("Glossary",)),
    "develop/style.md": Source("CONTRIBUTING.md", ("Language",), title="Style"),
}
FENCE = re.compile(r"^[ \t]*(```|~~~)")
LINK = re.compile(r'(?<=\]\()(?P<link>[^)\s]+)(?=[)\s])|(?<=src=")(?P<src>[^"]+)(?=")')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of SOURCES and the results of the benchmarks."""
    _check_sections()
    for uri, source in SOURCES.items():
        files.append(File.generated(config, uri, content=_text(source)))
    for path in sorted((ROOT / RESULTS).rglob("*.*")):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page from paths in the repository to paths in the site."""
    uri = page.file.src_uri
    path = SOURCES[uri].path if uri in SOURCES else f"docs/{uri}"
    rewrite = lambda match: _in_site(match[0], posixpath.dirname(path), posixpath.dirname(uri))
    return _outside_of_fences(markdown, lambda line: LINK.sub(rewrite, line))


def _in_site(link: str, folder: str, page_folder: str) -> str:
    """A link of a file in `folder` of the repository as a link of a page in `page_folder` of the site."""
    target, _, anchor = link.partition("#")
    if not target or "://" in target or target.startswith("mailto:"):
        return link
    uri = _uri(posixpath.normpath(posixpath.join(folder, target)), anchor)
    return posixpath.relpath(uri, page_folder or ".") + (f"#{anchor}" if anchor else "")


def _uri(path: str, anchor: str) -> str:
    """The page of the site that has a file of the repository, and in it the section with this anchor."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    pages = {uri: source for uri, source in SOURCES.items() if source.path == path}
    whole = [uri for uri, source in pages.items() if not source.sections]
    with_anchor = [uri for uri, source in pages.items() if anchor in map(_slug, source.sections)]
    return next(iter([*whole, *with_anchor, *pages]), path)


def _text(source: Source) -> str:
    text = (ROOT / source.path).read_text()
    if not source.sections:
        return text
    sections = _sections(source)
    if len(source.sections) == 1:
        heading = source.title or source.sections[0]
        return _outside_of_fences(
            f"# {heading}\n{sections[source.sections[0]]}", lambda line: re.sub(r"^#(?=##+ )", "", line)
        )
    parts = [f"## {heading}\n{sections[heading]}" for heading in source.sections]
    if source.title == source.sections[0]:
        parts[0] = sections[source.title]
    return f"# {source.title}\n" + "".join(parts)


def _sections(source: Source) -> dict[str, str]:
    """The text below each heading of the second level."""
    sections: dict[str, str] = {}
    heading, in_fence = "", False
    for line in (ROOT / source.path).read_text().splitlines(keepends=True):
        in_fence ^= bool(FENCE.match(line))
        if not in_fence and line.startswith("## "):
            heading = line.removeprefix("## ").strip()
            sections[heading] = ""
        elif heading:
            sections[heading] += line
    return sections


def _check_sections() -> None:
    """Every section of CONTRIBUTING.md is on a page, and every section of SOURCES exists."""
    for uri, source in SOURCES.items():
        known = _sections(source) if source.sections else {}
        if missing := [heading for heading in source.sections if heading not in known]:
            raise PluginError(f"{uri}: {source.path} has no section {missing}; want headings of {list(known)}")
    on_pages = {
        heading for source in SOURCES.values() if source.path == "CONTRIBUTING.md" for heading in source.sections
    }
    if left := set(_sections(Source("CONTRIBUTING.md"))) - on_pages:
        raise PluginError(f"CONTRIBUTING.md: no page of the site has {sorted(left)}; add them to SOURCES")


def _outside_of_fences(text: str, change: Callable[[str], str]) -> str:
    """The text with each line changed that is not part of a fenced block."""
    lines, in_fence = [], False
    for line in text.splitlines(keepends=True):
        is_fence = bool(FENCE.match(line))
        lines.append(line if in_fence or is_fence else change(line))
        in_fence ^= is_fence
    return "".join(lines)


def _slug(heading: str) -> str:
    return re.sub(r"[^\w]+", "-", heading.lower()).strip("-")
