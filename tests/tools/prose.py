"""Counts words that make prose hard to read, in docstrings, comments, error messages and Markdown pages.

    python tests/tools/prose.py [PATH ...] [--show WORD]

PATH: files or folders, by default the whole tree. --show prints each line that has the word.
"""

import argparse
import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("jax_kernels", "pallas", "bridge", "models", "benchmarks", "tests", "docs")
START = r"(?:^|(?<=[.:;] )|(?<=\n))"
# The key is the name of a count; the pattern is searched in text whose paragraphs are joined to one line each.
WORDS = {
    "what": r"\b[Ww]hat\b",
    "those": r"\b[Tt]hose\b",
    "that of": r"\b[Tt]hat of\b",
    "so many": r"\b[Ss]o many\b",
    "the very": r"\b[Tt]he very\b",
    "beside": r"\b[Bb]esides?\b",
    "stands": r"\b[Ss]tand(?:s|ing)?\b|\bstood\b",
    "told": r"\b[Tt]old\b",
    "nobody": r"\b[Nn]obody\b",
    "place": r"(?<![Ii]n )\b[Pp]laces?\b|\b[Ii]n place of\b",
    "of which": r"\b[Oo]f which\b",
    "share out": r"\b[Ss]har(?:e|es|ed|ing) (?:\w+ ){0,3}?out\b",
    "Of ...": START + r"Of (?!\w+ing\b)",
    "How ...": START + r"How ",
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PATTERNS = {name: re.compile(pattern) for name, pattern in WORDS.items()}


def paragraphs(text: str) -> str:
    """The text with one line a paragraph, so that a phrase is found across line ends."""
    return "\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*[-*|#>] )", text))


def prose_of_markdown(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def _docstrings(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, DOCUMENTED) and (found := ast.get_docstring(node)):
            yield re.sub(r"::\n\n(?:[ ]{4}.*\n?|\n)+", "\n", found + "\n")


def _messages(nodes: list[ast.AST]) -> Iterator[str]:
    """String literals of at least three words: messages and help texts, with a gap for each value of an f-string."""
    seen_elsewhere = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
    }
    seen_elsewhere |= {id(value) for node in nodes if isinstance(node, ast.JoinedStr) for value in ast.walk(node)}
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(x.value) if isinstance(x, ast.Constant) else "X" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen_elsewhere:
            text = node.value
        if text.count(" ") >= 2 and "\n" not in text.strip():
            yield text


def _comments(source: str) -> str:
    """Comments, those of neighbouring lines joined."""
    lines: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                lines.append("")
            lines.append(token.string.lstrip("# "))
            last = token.start[0]
    return "\n".join(lines)


def prose_of(path: Path) -> str:
    """The prose of a Python file or a Markdown page, one line a paragraph."""
    text = path.read_text()
    if path.suffix == ".md":
        return paragraphs(prose_of_markdown(text))
    nodes = list(ast.walk(ast.parse(text)))
    parts = [*_docstrings(nodes), *_messages(nodes), _comments(text)]
    return "\n".join(paragraphs(re.sub(r"`[^`\n]*`", "", part)) for part in parts)


def files(paths: list[Path]) -> list[Path]:
    """The Python files and pages under the paths, except this file, whose table has every word."""
    found: set[Path] = set()
    for path in paths:
        found |= {path} if path.is_file() else {x for kind in ("*.py", "*.md") for x in path.rglob(kind)}
    mine = Path(__file__).resolve()
    return sorted(path for path in found if "results" not in path.parts and path.resolve() != mine)


def whole_tree() -> list[Path]:
    """Every file that is counted by default."""
    return files([*(ROOT / folder for folder in FOLDERS), *ROOT.glob("*.md")])


def count(paths: list[Path]) -> collections.Counter[str]:
    """The count of each word in these files."""
    total: collections.Counter[str] = collections.Counter(dict.fromkeys(WORDS, 0))
    for path in paths:
        text = prose_of(path)
        total.update({name: len(pattern.findall(text)) for name, pattern in PATTERNS.items()})
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--show", choices=list(WORDS), help="print the lines that have this word")
    parser.add_argument("--all", action="store_true", help="print the lines that have any word")
    args = parser.parse_args()
    paths = files(args.paths) if args.paths else whole_tree()
    shown = list(WORDS) if args.all else [args.show] if args.show else []
    for path in paths:
        for line in prose_of(path).splitlines() if shown else ():
            if words := [word for word in shown if PATTERNS[word].search(line)]:
                print(f"{path}: [{', '.join(words)}] {line}")
    total = count(paths)
    for name, number in total.most_common():
        print(f"{number:6d}  {name}")
    print(f"{sum(total.values()):6d}  in {len(paths)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
