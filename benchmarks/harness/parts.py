"""Processes that share the cases of one benchmark, and its output file."""

import argparse
import fcntl
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from harness import report

__all__ = ["add_part", "exclusive", "merge_rows", "part_of"]


def add_part(parser: argparse.ArgumentParser) -> None:
    """Adds --part, for processes that share the calls."""
    text = "I/N: each N-th call, from the I-th on: start N processes with one BENCHMARK_LOCK, and one --output"
    parser.add_argument("--part", type=_part, default=(1, 1), help=text)


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"got {text!r}, want I/N with I from 1 to N")
    return int(index), int(count)


def part_of[Case](cases: Sequence[Case], part: tuple[int, int]) -> list[Case]:
    index, count = part
    return list(cases[index - 1 :: count])


@contextmanager
def exclusive(path: pathlib.Path) -> Iterator[None]:
    """One process at a time reads and writes the file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with open(pathlib.Path(tempfile.gettempdir()) / f"jax_kernels_{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def merge_rows(path: pathlib.Path | None, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the rows, with the rows of other calls in the file. Other processes may do so at the same time."""
    if path is None:
        return
    with exclusive(path):
        try:
            before = json.loads(path.read_text())["rows"]
        except (OSError, ValueError, KeyError, TypeError):
            before = []
        names = {row["name"] for row in rows}
        report.write_json(path, {**head, "rows": [*(row for row in before if row["name"] not in names), *rows]})
