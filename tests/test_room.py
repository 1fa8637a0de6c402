"""The memory maps of compiled programs: they are counted, and clearing frees them, whoever compiled the programs."""

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_kernels import bridge
from tests.support.processes import room


def compiled(count):
    """`count` functions with a program each, which they keep as long as JAX keeps it."""
    functions = [jax.jit(lambda x, n=n: x * n + 2) for n in range(count)]
    for function in functions:
        function(jnp.arange(5.0))
    return functions


@pytest.fixture
def empty():
    """The number of maps of a process without programs."""
    room.clear()
    return room.count_maps()


def test_clear_frees_maps_of_live_functions(empty):
    functions = compiled(50)
    assert room.count_maps() > empty + 100
    scale = bridge.from_jax(lambda x: jnp.sort(x) * 3)
    graphs = [torch.compile(lambda x, n=n: scale(x) * n, backend="aot_eager", fullgraph=True) for n in range(3)]
    for size, graph in enumerate(graphs, 3):
        graph(torch.ones(size))
    taken = room.count_maps()
    room.clear()
    assert room.count_maps() < empty + (taken - empty) // 2  # PyTorch takes some of its own once
    assert functions[3](jnp.ones(2)).tolist() == [5, 5]
    torch.testing.assert_close(graphs[2](torch.ones(5)), torch.full((5,), 6.0))
    torch.testing.assert_close(scale(torch.ones(5)), torch.full((5,), 3.0))


@pytest.mark.slow
def test_clears_before_the_limit(empty):
    own = room.Room(most_maps=empty + 50, least_room=50, most_unseen=10, most_tests=1000)
    functions, most, cleared = [], 0, 0
    for _ in range(5):
        functions += compiled(25)
        most = max(most, room.count_maps())
        cleared += own.after_test()
    assert cleared >= 3
    assert most < empty + 300


def test_maps_are_counted_periodically(empty, monkeypatch):
    own, read = room.Room(most_maps=10**9, most_unseen=10, most_tests=4), []
    count = room.count_maps
    monkeypatch.setattr(room, "count_maps", lambda: read.append(count()) or read[-1])
    for _ in range(3):
        assert not own.after_test()
    assert not read
    own.after_test()
    assert len(read) == 1
    compiled(10)
    own.after_test()
    assert len(read) == 2


@pytest.mark.slow
def test_reports_when_clearing_does_not_help(monkeypatch):
    own = room.Room(most_maps=10, most_tests=1, limit=20)
    with pytest.raises(RuntimeError, match="memory maps are left without any programs, want at most 20"):
        own.after_test()


@pytest.mark.slow
def test_retained_memory_is_cleared_once():
    own = room.Room(most_bytes=1)
    assert own.after_test()
    assert not own.after_test()
