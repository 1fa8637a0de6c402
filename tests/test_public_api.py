"""The public names and signatures are the recorded ones, and dir() shows public names alone."""

import difflib
import importlib
import types

import pytest

pytest.importorskip("torch")
pytest.importorskip("flax")

from tests.tools import public_api

# Packages with other public modules.
PUBLIC_MODULES = {"jax_kernels": {"masks"}, "jax_kernels.bridge": {"huggingface", "masks", "nn", "weights"}}


def test_the_api_is_the_recorded_one():
    """A change that is meant needs `python tests/tools/public_api.py --write`, and an entry in CHANGELOG.md."""
    recorded = public_api.RECORD.read_text().splitlines()
    changes = difflib.unified_diff(recorded, public_api.lines(), "recorded", "found", lineterm="", n=0)
    assert not list(changes)


@pytest.mark.parametrize("line", ["def f(x, *, scale=None): ...", "def f(x, *, eps=1e-5): ...", "def g(x): ..."])
def test_a_change_of_the_api_changes_a_line(line):
    lines = []
    for source in ("def f(x, *, eps=1e-6): ...", line):
        module = types.ModuleType("m")
        exec(source, vars(module))
        lines.append(list(public_api._lines_of(module, {})))
    assert lines[0] == ["m.f(x, *, eps=1e-06)"]
    assert lines[1] != lines[0]


def test_lines_of_a_class():
    """The constructor, methods and properties; a public base's members and a dataclass's fields have no line."""
    module = types.ModuleType("jax_kernels.m")
    source = """
import dataclasses
class Base:
    def __init__(self, x, y=2): pass
    def method(self, z): pass
    def _private(self): pass
@dataclasses.dataclass
class Child(Base):
    size: int = 3
    @property
    def area(self): return self.size**2
    @classmethod
    def of(cls, size): pass
"""
    exec(source, vars(module))
    assert list(public_api._lines_of(module, {})) == [
        "class jax_kernels.m.Base(x, y=2)",
        "jax_kernels.m.Base.method(z)",
        "class jax_kernels.m.Child(size=3)",
        "jax_kernels.m.Child.area",
        "jax_kernels.m.Child.of(size)",
    ]


@pytest.mark.parametrize(
    "name", [x for x in public_api.MODULES if x.rpartition(".")[2] not in ("huggingface", "weights")]
)
def test_dir_has_public_names_alone(name):
    importlib.import_module("jax_kernels.bridge.nn")
    module = importlib.import_module(name)
    paths = [line.removeprefix("class ").partition("(")[0].partition(" ")[0] for line in public_api.lines()]
    recorded = {path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == name}
    # torch.compile adds names with two underscores to the modules whose functions it compiled in this process.
    listed = {x for x in dir(module) if not x.startswith("__")}
    assert listed == recorded | PUBLIC_MODULES.get(name, set())
    assert {"__name__", "__doc__"} <= set(dir(module))
