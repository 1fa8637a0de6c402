"""The modules of benchmarks/ import one another without a circle, and each can be imported first."""

import ast
import importlib.util
import os
import pathlib

import pytest

from tests.support.processes.python import done_by

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = {
    ".".join(path.relative_to(BENCHMARKS).with_suffix("").parts): path
    for path in sorted([*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("harness/*.py")])
    if path.name != "__init__.py"
}
SCRIPTS = [name for name in MODULES if not name.startswith("harness.")]

# Imports each module of sys.argv, with no other module of benchmarks/ imported before.
FRESH = """
import importlib, sys
from jax._src import xla_bridge

names = sys.argv[1:]
for name in names:
    for loaded in list(sys.modules):
        if loaded in names or loaded.partition(".")[0] == "harness":
            del sys.modules[loaded]
    importlib.import_module(name)
    assert not xla_bridge.backends_are_initialized(), f"importing {name} starts JAX's backend"
    print(name)
"""


def imported(source: str) -> set[str]:
    """The modules of benchmarks/ that a source imports, including imports inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


def circle(edges: dict[str, set[str]]) -> list[str] | None:
    """The names along one circle of a graph, or None."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return None
        found = next(filter(None, (visit(other, [*path, name]) for other in sorted(edges[name]))), None)
        done.add(name)
        return found

    return next(filter(None, (visit(name, []) for name in edges)), None)


def test_import_cycle_is_found():
    edges = {"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}
    assert circle(edges) is None
    assert circle(edges | {"d": {"c"}}) == ["d", "c"]
    source = (
        "import sparse\ndef f():\n    from harness import cases, timing\nfrom harness.report import rows\nimport jax"
    )
    assert imported(source) == {"sparse", "harness.cases", "harness.timing", "harness.report"}


def test_no_import_cycles():
    edges = {name: imported(path.read_text()) for name, path in MODULES.items()}
    assert circle(edges) is None
    # Code that two scripts need belongs to the harness.
    assert {name: found & set(SCRIPTS) for name, found in edges.items() if found & set(SCRIPTS)} == {}


@pytest.mark.slow
def test_each_module_imports_first():
    """Importing a module touches no device, since prepare_process has to run before."""
    names = list(MODULES)
    if importlib.util.find_spec("torch") is None:
        names.remove("harness.torch_contenders")
    paths = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
    assert done_by("-c", FRESH, *names, PYTHONPATH=paths).stdout.split() == names


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_have_docstring_and_main(name):
    source = MODULES[name].read_text()
    assert f"python benchmarks/{name}.py" in (ast.get_docstring(ast.parse(source)) or "")
    assert source.endswith('if __name__ == "__main__":\n    sys.exit(main())\n')
