"""Functions that are made again for each call, and which of them share a plan."""

import jax.numpy as jnp
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge.jax_functions import programs
from jax_kernels.bridge.translate import function_identity

FACTOR = 2.0
TABLE = {"factor": 2.0}
NUMBERS = [2.0]


def helper(x):
    return x * 3.0


def power(x, n):
    return x if n == 1 else x * power(x, n - 1)


class Scaled:
    """A callable that may change."""

    factor = 2.0


SCALED = Scaled()


def by(factor):
    return lambda s, b, h, i, j: s * factor


def nested(factor):
    return lambda x: (lambda y: jnp.tanh(y) * factor)(x)


def wrapping(function):
    return lambda x: function(x) + 1.0


def with_default(factor):
    return lambda x, factor=factor: x * factor


# Each entry makes a new function every time.
SAME = {
    "plain": lambda: lambda s, b, h, i, j: s * 2.0,
    "of JAX": lambda: lambda x: jnp.tanh(x),
    "closed over": lambda: by(2.0),
    "nested": lambda: nested(2.0),
    "a default": lambda: lambda x, factor=2.0: x * factor,
    "a global number": lambda: lambda x: x * FACTOR,
    "a global function": lambda: lambda x: helper(x),
    "a function that is closed over": lambda: wrapping(nested(2.0)),
}
DIFFERENT = {
    "an array": lambda: by(jnp.ones(3)),
    "a dict": lambda: lambda x: x * TABLE["factor"],
    "an object": lambda: lambda x: x * SCALED.factor,
    "a function that calls itself": lambda: lambda x: power(x, 3),
    "a list in a function": lambda: wrapping(lambda x: x * NUMBERS[0]),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_functions(name):
    make = SAME[name]
    first, second = make(), make()
    assert first is not second
    assert function_identity.canonical_function(first) is function_identity.canonical_function(second)


@pytest.mark.parametrize("name", DIFFERENT)
def test_hidden_differences(name):
    first, second = DIFFERENT[name](), DIFFERENT[name]()
    assert (function_identity.canonical_function(first), function_identity.canonical_function(second)) == (
        first,
        second,
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (by(2.0), by(3.0)),
        (by(2.0), by(2)),
        (by(0.0), by(-0.0)),
        (nested(2.0), nested(3.0)),
        (wrapping(nested(2.0)), wrapping(nested(3.0))),
        (lambda x: x * 2.0, lambda x: x * 3.0),
        (with_default(2.0), with_default(3.0)),
    ],
)
def test_different_functions(first, second):
    assert function_identity.canonical_function(first) is not function_identity.canonical_function(second)


def test_changed_global(monkeypatch):
    make = SAME["a global number"]
    first = function_identity.canonical_function(make())
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert function_identity.canonical_function(make()) is not first


@pytest.mark.usefixtures("no_programs")
def test_lambda_in_a_loop_adds_one_program():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 16, 2, 8, generator=generator) for _ in range(3))
    attend = lambda factor: bridge.flash_attention(query, key, value, score_mod=lambda s, b, h, i, j: s * factor)
    before, results = len(programs.PROGRAMS), [attend(1.5) for _ in range(4)]
    assert len(programs.PROGRAMS) == before + 1
    for result in results:
        torch.testing.assert_close(result, bridge.flash_attention(query * 1.5, key, value))
    torch.testing.assert_close(attend(2.5), bridge.flash_attention(query * 2.5, key, value))
    assert len(programs.PROGRAMS) == before + 2


def test_changed_function_is_not_canonical(monkeypatch):
    """A program that was traced before a value changed that the function reads does not serve a later function."""
    generator = torch.Generator().manual_seed(0)
    short, long = (torch.randn(1, length, 2, 8, generator=generator) for length in (8, 12))
    attend = lambda x, score_mod: bridge.flash_attention(x, x, x, score_mod=score_mod)
    make = lambda: lambda s, b, h, i, j: s * FACTOR
    first = make()
    attend(short, first)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    attend(long, first)
    torch.testing.assert_close(attend(short, make()), bridge.flash_attention(short * 3.0, short, short))
    monkeypatch.setitem(globals(), "FACTOR", NUMBERS)  # a value that may change without notice
    unknown = lambda: lambda s, b, h, i, j: s * (FACTOR[0] if isinstance(FACTOR, list) else FACTOR)
    second = unknown()
    attend(short, second)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    attend(long, second)
    torch.testing.assert_close(attend(short, unknown()), bridge.flash_attention(short * 5.0, short, short))
