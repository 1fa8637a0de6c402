"""The library stays easy to read: short functions, arguments by name, docstrings that are sentences."""

import ast
import functools
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = [
    path
    for folder in ("jax_kernels", "pallas", "bridge", "models", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MOST_LINES = {"pallas": 120, "": 100}


@functools.cache
def statements(path):
    """The modules, classes, functions and imports of a file."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def functions(path):
    return [node for node in statements(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def lines_of(node) -> int:
    """The lines of a function without its docstring and its signature."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_functions_are_short():
    """At most 100 lines, 120 in the kernels' folder."""
    most = lambda path: MOST_LINES["pallas"] if path.is_relative_to(ROOT / "pallas") else MOST_LINES[""]
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": lines_of(node)
        for path in LIBRARY
        for node in functions(path)
        if lines_of(node) > most(path)
    }
    assert not long


def test_functions_are_short_with_their_docstrings():
    """At most 120 lines with the signature and the docstring. Longer explanations belong into docs/."""
    long = [node.name for path in LIBRARY for node in functions(path) if node.end_lineno - node.lineno >= 120]
    assert not long


def test_arguments_are_passed_by_name():
    """Never as **locals(), which hides the arguments from readers and tools."""
    found = [path.relative_to(ROOT) for path in LIBRARY if "locals()" in path.read_text()]
    assert not found


def modules_of(path):
    """The modules that a file imports, and the names that it imports from them with the module's name before."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_the_bridge_imports_torch():
    files = [path for path in LIBRARY if not {"bridge", "benchmarks"} & {*path.relative_to(ROOT).parts}]
    found = [str(path) for path in files if any(name.split(".")[0] == "torch" for name in modules_of(path))]
    assert files
    assert not found


def test_one_module_imports_pallas_triton():
    """JAX may remove Pallas-Triton: only pallas/triton/backend.py imports it, and says whether it exists."""

    backends = ("jax.experimental.pallas.triton", "jax._src.pallas.triton")
    found = {
        str(path.relative_to(ROOT))
        for path in LIBRARY + TESTS
        if any(name == x or name.startswith(f"{x}.") for name in modules_of(path) for x in backends)
    }
    assert found == {"pallas/triton/backend.py"}


def test_docstrings_are_sentences():
    """No docstring begins with a word that usually begins a fragment."""
    words = tuple(f"{word} " for word in ("Of", "What", "In", "Whose", "Where"))
    found = []
    for path in LIBRARY + TESTS:
        documented = [n for n in statements(path) if not isinstance(n, ast.Import | ast.ImportFrom)]
        docstrings = [(getattr(n, "name", "module"), ast.get_docstring(n)) for n in documented]
        found += [f"{path.relative_to(ROOT)}:{name}" for name, text in docstrings if (text or "").startswith(words)]
    assert not found


def test_names_of_tests_are_short():
    """At most 60 characters. A longer sentence belongs into the docstring."""
    long = [
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in TESTS
        for node in functions(path)
        if node.name.startswith("test_") and len(node.name) > 60
    ]
    assert not long


# The count of each word of tests/tools/prose.py occurs. A change that lowers a count lowers its number here.
MOST_WORDS = {
    "what": 4,
    "those": 2,
    "place": 7,
    "beside": 7,
    "stands": 0,
    "that of": 2,
    "share out": 0,
    "of which": 1,
    "Of ...": 0,
    "so many": 0,
    "How ...": 0,
    "told": 1,
    "nobody": 0,
    "the very": 0,
}


def test_prose_can_be_read_once():
    """Words that force a second reading become rarer. `python tests/tools/prose.py --show WORD` prints their lines."""
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tests" / "tools" / "prose.py")
    prose = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prose)
    found = prose.count(prose.whole_tree())
    more = {
        word: f"{count}, want at most {MOST_WORDS[word]}" for word, count in found.items() if count > MOST_WORDS[word]
    }
    assert not more
