"""The tiers of the suite: `make test` runs the tests without the slow mark, `make test-all` all that need no GPU.

A file whose cases repeat one another on other shapes names the few that `make test` runs. These keep a forward and a
gradient of every op, a compiled case of every kernel for each GPU generation, and an interpreted case of every feature.
"""

import fnmatch
import itertools
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import ids

# By test function: `quick`, patterns of the ids of the cases that `make test` runs, and `covered`, the quick tests that
# run the code of the others. A product of parameters keeps each value of each parameter.
REPEATS = json.loads(Path(__file__).with_name("repeats.json").read_text())


def mark_repeats(items: Iterable[pytest.Item], *, is_whole: bool) -> None:
    """Marks the cases of REPEATS slow that are not quick. is_whole: the items are whole files, with all cases."""
    unused = {}
    for item in items:
        function, _, rest = item.nodeid.partition("[")
        if (entry := REPEATS.get(function)) is None:
            continue
        left = unused.setdefault(function, set(entry["quick"]))
        found = {pattern for pattern in entry["quick"] if fnmatch.fnmatchcase(rest.removesuffix("]"), pattern)}
        left -= found
        if not found:
            item.add_marker(pytest.mark.slow)
    if is_whole and (left := {name: sorted(patterns) for name, patterns in unused.items() if patterns}):
        raise pytest.UsageError(f"tests/support/cases/repeats.json: no case has these ids: {left}")


def cases(names: Iterable[Any], quick: Collection[str], argument: str = "") -> list[Any]:
    """The names as parameters of a test. Names that are not in `quick` are marked slow.

    Ids have the cases' shapes, or the name of the argument, if given, with its value.
    """
    given = names if isinstance(names, Mapping) else {}
    names = list(names)
    assert not (unknown := set(quick) - set(map(str, names))), unknown
    name_of = lambda x: (argument and ids.argument_id(x, argument)) or ids.case_id(ids.word(x), given.get(x, x))
    return [pytest.param(x, id=name_of(x), marks=() if str(x) in quick else pytest.mark.slow) for x in names]


def pairs(names: Iterable[Any], others: Iterable[Any], quick: tuple[Any, Any]) -> list[Any]:
    """Every pair of a name and another name, as two parameters. Pairs with neither name of `quick` are marked slow."""
    both = list(itertools.product(names, others))
    assert quick in both, quick
    mark = lambda pair: () if quick[0] == pair[0] or quick[1] == pair[1] else pytest.mark.slow
    return [pytest.param(*pair, id=f"{ids.word(pair[0])}-{ids.word(pair[1])}", marks=mark(pair)) for pair in both]


def some_pairs(
    names: Iterable[Any], others: Iterable[Any], quick: Collection[tuple[Any, Any]], argument: str = ""
) -> list[Any]:
    """Every pair of a name and another name, as two parameters. Pairs that are not in `quick` are marked slow.

    argument: the first parameter's name, which ids then show.
    """
    both = list(itertools.product(names, others))
    assert not (unknown := set(quick) - set(both)), unknown
    mark = lambda pair: () if pair in quick else pytest.mark.slow
    first = lambda x: (argument and ids.argument_id(x, argument)) or ids.word(x)
    return [pytest.param(*pair, id=f"{first(pair[0])}-{ids.word(pair[1])}", marks=mark(pair)) for pair in both]


def groups(names: Iterable[str], quick: Collection[str], size: int) -> list[Any]:
    """The names of each tier in tuples of at most `size`, for tests whose process takes as long to start as a case."""
    names = list(names)
    assert not (unknown := set(quick) - set(names)), unknown
    rest = [name for name in names if name not in quick]
    tier = lambda members, marks: [
        pytest.param(group, id=", ".join(group), marks=marks) for group in itertools.batched(members, size)
    ]
    return tier([name for name in names if name in quick], ()) + tier(rest, pytest.mark.slow)
