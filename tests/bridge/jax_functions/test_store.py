"""The store of named values: which values it keeps, builds again, and loses."""

import gc
import sys
import threading

import pytest

from jax_kernels.bridge.jax_functions import store


class Value:
    """A value that can be referenced weakly."""

    def __init__(self, name):
        self.name = name


@pytest.fixture
def built(monkeypatch):
    """A store of two values, and a list of the names that were built."""
    monkeypatch.setattr(store, "MOST", 2)
    monkeypatch.setattr(store, "_ALL", [])
    return store.Store(), []


def builder(names):
    return lambda name: names.append(name) or Value(name)


def test_equal_keys_have_one_value(built):
    values, names = built
    first, again = (values.get((1, "a"), "stem", builder(names)) for _ in range(2))
    other = values.get((1, "b"), "stem", builder(names))
    assert first == again != other
    assert first.value is values.find(first.name)
    assert first.name.startswith("stem_")
    assert names == [first.name, other.name]


def test_last_used_values_are_kept(built):
    values, names = built
    a, b = (values.get(key, key, builder(names)).name for key in "ab")
    values.find(a)
    c = values.get("c", "c", builder(names)).name
    assert (list(values.kept), values.names()) == ([a, c], [a, c])
    assert values.find(b) is None
    assert values.get("b", "b", builder(names)).name != b


def test_dropped_value_is_found_while_it_is_held(built):
    values, names = built
    name, held = values.get("held", "held", builder(names))
    for key in "ab":
        values.get(key, key, builder(names))
    assert name not in values.kept
    assert values.find(name) is held
    values.pin(name)  # its builder is gone, so the record holds the value
    del held
    gc.collect()
    assert values.find(name).name == name
    assert names.count(name) == 1


def test_pinned_value_is_built_again(built):
    values, names = built
    name = values.get("pinned", "pinned", builder(names)).name
    values.pin(name)
    for forget in (values.clear, store.clear, lambda: [values.get(key, key, builder(names)) for key in "ab"]):
        forget()
        gc.collect()
        assert name not in values.kept
        assert values.is_pinned(name)
        assert values.find(name).name == name
        assert values.get("pinned", "pinned", builder(names)).name == name
    assert names.count(name) == 4


def test_added_value_needs_no_weak_reference(built):
    values, names = built
    name = values.add("text", "a text")
    for key in "abc":
        values.get(key, key, builder(names))
    values.clear()
    assert values.find(name) == "a text"
    assert values.names() == [name]


def test_error_leaves_no_record(built):
    values, names = built
    with pytest.raises(ZeroDivisionError):
        values.get("a", "a", lambda name: 1 / 0)
    assert values.names() == []
    assert values.get("a", "a", builder(names)).value.name == names[0]


def test_look_up_does_not_wait_for_a_build(built):
    values, names = built
    kept = values.get("kept", "kept", builder(names))
    started, found = threading.Event(), threading.Event()

    def build(name):
        started.set()
        assert found.wait(60)
        return Value(name)

    thread = threading.Thread(target=values.get, args=("slow", "slow", build))
    thread.start()
    assert started.wait(60)
    assert values.get("kept", "kept", builder(names)) == kept
    found.set()
    thread.join()
    assert len(values) == 2


def test_alive_while_a_thread_adds(built):
    values, _ = built
    thread = threading.Thread(target=lambda: [values.add("name", Value(key)) for key in range(3000)])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        while thread.is_alive():
            values.alive()
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    assert len(values.alive()) == 3000
