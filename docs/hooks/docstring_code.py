"""An extension of griffe: docstrings in this library's style become the Markdown that mkdocstrings reads.

- "::" and the indented block below it become fenced code.
- Names of arguments that continue on a second line are joined into one line.
- A paragraph of a class that describes fields, "name: text. other: text.", becomes a list.
- Results are prose: the text in front of a colon is not their type.
- "[", "*" and "<" in prose are shapes, products and comparisons, not Markdown.
"""

import re
import textwrap
from collections.abc import Sequence
from typing import Any

import griffe

__all__ = ["DocstringCode", "as_markdown"]

NAMES = re.compile(r"^( +[\w*]+(?:, [\w*]+)*,)\n +(?=[\w*]+(?:, [\w*]+)*(?:,$|:))", re.MULTILINE)
PROSE = re.compile(r"( *)(\*{0,2}(?=\w)|[-*] |)(.*)")
START = re.compile(r"^(?P<indent> *)(?P<text>.*\S)?::$")


class DocstringCode(griffe.Extension):
    """Changes the docstrings of all objects."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes one docstring."""
        if obj.docstring is not None:
            fields = [*obj.members, *_parameters(obj)] if obj.is_class else []
            obj.docstring.value = as_markdown(_with_lists(obj.docstring.value, fields))


def _parameters(obj: Any) -> list[str]:
    return [parameter.name for parameter in obj.parameters if parameter.name != "self"]


def _with_lists(text: str, fields: Sequence[str]) -> str:
    """The docstring of a class in which each paragraph that begins with the name of a field is a list of fields."""
    if not fields:
        return text
    name = "|".join(map(re.escape, fields))
    names = rf"(?:{name})(?:, (?:{name}))*"
    begins = re.compile(rf"{names}: ")
    item = re.compile(rf"(?:^|(?<=\.) )({names}): ")

    def changed(paragraph: str) -> str:
        if not begins.match(paragraph):
            return paragraph
        return item.sub(r"\n- `\1`: ", re.sub(r"\s*\n\s*", " ", paragraph)).strip()

    return "\n\n".join(changed(paragraph) for paragraph in text.split("\n\n"))


def as_markdown(text: str) -> str:
    """A docstring as Markdown."""
    lines, in_fence, in_results = [], False, False
    for line in _fenced(NAMES.sub(r"\1 ", text)).splitlines():
        is_fence = line.lstrip().startswith("```")
        in_results = line == "Returns:" or (in_results and not line[:1].strip())
        is_prose = not in_fence and not is_fence
        line = _escaped(line) if is_prose else line
        lines.append(line.replace(": ", "&#58; ") if is_prose and in_results else line)
        in_fence ^= is_fence
    return "\n".join(lines)


def _escaped(line: str) -> str:
    """A line of prose, without characters that are Markdown's outside of its `code`."""
    indent, stars, rest = PROSE.fullmatch(line).groups()
    parts = rest.split("`")
    parts[::2] = [re.sub(r"[\[*]", r"\\\g<0>", part).replace("<", "&lt;") for part in parts[::2]]
    return indent + stars + "`".join(parts)


def _fenced(text: str) -> str:
    """The docstring with fenced code. A "::" without an indented block below stays as it is."""
    lines, done = text.splitlines(), []
    while lines:
        line = lines.pop(0)
        start = START.match(line)
        block = _indented(lines, len(start["indent"])) if start else []
        if start is None or not block:
            done.append(line)
            continue
        del lines[: len(block)]
        code = textwrap.dedent("\n".join(block)).strip("\n").splitlines()
        indent = start["indent"]
        done += [f"{indent}{start['text']}:", ""] if start["text"] else []
        done += [f"{indent}{x}".rstrip() for x in ("```python", *code, "```")] + [""]
    return "\n".join(done)


def _indented(lines: list[str], indent: int) -> list[str]:
    """The first lines that are empty, or indented further than `indent`; none if all of them are empty."""
    count = next(
        (i for i, line in enumerate(lines) if line.strip() and len(line) - len(line.lstrip()) <= indent), len(lines)
    )
    block = lines[:count]
    return block if any(line.strip() for line in block) else []
