"""Pages are written for GitHub. This hook rewrites the Markdown that the site's parser reads in another way."""

import re
from typing import Any

ITEM = re.compile(r"(?:\d+\.|[-*]) +")
FENCE = re.compile(r"\s*(```|~~~)")
PATH = re.compile(r"(?<=<code>)[\w.]+(?:/[\w.]*)+(?=</code>)")
CODE = re.compile(r"`[^`\n]+`")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """The page's text for the site."""
    return _without_escapes(_with_wide_indents(markdown))


def on_page_content(html: str, **kwargs: Any) -> str:
    """The page's HTML, in which a path may be broken into lines after each slash."""
    return PATH.sub(lambda path: path[0].replace("/", "/<wbr>"), html)


def _with_wide_indents(text: str) -> str:
    """Blocks that belong to an item of a list, indented by 2 or 3 columns, are indented by 4."""
    lines, width, in_fence = [], 0, False
    for line in text.splitlines():
        item = ITEM.match(line)
        indent = len(line) - len(line.lstrip())
        if item and not in_fence:
            width = len(item[0])
        elif line.strip() and indent < width and not in_fence:
            width = 0
        belongs = width and line.strip() and indent >= width
        lines.append(" " * (4 - width) + line if belongs and width < 4 else line)
        in_fence ^= bool(FENCE.match(line))
    return "\n".join(lines) + "\n"


def _without_escapes(text: str) -> str:
    """Code in the rows of a table has "|" instead of "\\|"."""
    unescaped = lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])
    return re.sub(r"^\|.*$", unescaped, text, flags=re.MULTILINE)
