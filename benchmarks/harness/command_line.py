"""The common options of the benchmarks."""

import argparse
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from harness.timing import METHODS


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --output and --commit."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=pathlib.Path, help="JSON file")
    made.add_argument("--commit", help="commit to record if the tree has no .git")
    return made


def timing_parser(
    description: str | None, *, rounds: int, seconds: float, budget: float | None = None
) -> argparse.ArgumentParser:
    """A parser that also has the options of timing.alternate. budget: None for a benchmark without a time limit."""
    made = parser(description)
    made.add_argument("--rounds", type=positive(int), default=rounds)
    made.add_argument("--seconds", type=positive(float), default=seconds, help="queued work of one turn")
    made.add_argument("--timer", choices=tuple(METHODS), help="default cupti")
    if budget is not None:
        told = "seconds after which no more work begins"
        made.add_argument("--budget", type=positive(float), default=budget, help=told)
    return made


def positive(kind: type) -> Any:
    """The argparse type of an int or a float above zero."""

    def number(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"got {text}, want a positive number")
        return value

    return number


def numbers(text: str, *, least: int = 1) -> list[int]:
    """The integers of a comma list. Raises ValueError for a word that is not an integer of `least` or more."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        kind = "positive integers" if least == 1 else f"integers of {least} or more"
        raise ValueError(f"got {text!r}, want {kind} with commas between them")
    return found


def names(option: str, text: str, known: Sequence[str], *, optional: bool = False) -> list[str]:
    """The names of a comma list, each once. Raises ValueError for an unknown name, and for no name unless optional."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found or ([] if optional else [text]):
        if name not in known:
            raise ValueError(f"{option}: got {name!r}, want some of {', '.join(known)}")
    return list(dict.fromkeys(found))
