"""`import jax_kernels`: its names, and the modules that it does not load; also on the newest JAX."""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import subprocess
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Float32

import jax_kernels
import jax_kernels.ops
import jax_kernels.pallas
import jax_kernels.reference
from jax_kernels import extras
from jax_kernels.inputs.attention import FlashArguments
from tests.support.processes.python import done_by

HEAVY = ("torch", "flax", "optax", "orbax", "transformers", "rich", "typer", "matplotlib")


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh process has after a statement."""
    code = (
        f"{statement}\nimport sys, json\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    return set(json.loads(done_by("-c", code, JAX_PLATFORMS="cpu").stdout))


@pytest.mark.parametrize("module", ["jax_kernels", "jax_kernels.testing", "jax_kernels.cli"])
def test_import_loads_no_framework(module):
    modules = modules_after(f"import {module}")
    assert "jax_kernels" in modules
    assert modules.isdisjoint(HEAVY)
    # The linked folders are no separate packages.
    assert modules.isdisjoint({"pallas", "bridge", "models"})


def test_public_names():
    names = {name for name in dir(jax_kernels) if not name.startswith("_")}
    modules = {name for name in names if isinstance(getattr(jax_kernels, name), type(jax_kernels))}
    assert {"DeviceInfo", "Plan", "device_info", "explain", "flash_attention"} <= names - modules
    for name in names - modules:
        assert getattr(jax_kernels, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("package", ["jax_kernels", "bridge"])
def test_type_checkers_see_the_names_that_are_imported_late(package):
    """A name that is imported when it is first read has the same module for a type checker."""
    tree = ast.parse((Path(jax_kernels.__file__).parents[1] / package / "__init__.py").read_text())
    block = next(x for x in tree.body if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING")
    seen = {
        name.name: x.module if package not in x.module.rpartition(".")[2] else f"{x.module}.{name.name}"
        for x in block.body
        for name in x.names
    }
    table = next(x for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "_MODULES")
    late = {name: module for module, names in ast.literal_eval(table.value).items() for name in names}
    assert len(late) > 25
    assert seen == late


def test_version_is_the_distribution():
    assert jax_kernels.__version__ == importlib.metadata.version("jax-kernels")


@pytest.mark.parametrize(
    "package", [jax_kernels.ops, jax_kernels.pallas, jax_kernels.reference], ids=lambda p: p.__name__
)
def test_every_submodule_imports(package):
    names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    assert names
    for name in names:
        assert importlib.import_module(name).__doc__, f"{name} has no docstring"


def test_numerics():
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((2, 33, 4, 24), np.float32) for _ in range(3))
    got = jax.jit(lambda *qkv: jax_kernels.flash_attention(*qkv, is_causal=True))(query, key, value)
    want = jax.nn.dot_product_attention(*(jnp.asarray(x) for x in (query, key, value)), is_causal=True)
    np.testing.assert_allclose(got, want, atol=2e-3 if jax.default_backend() == "gpu" else 2e-6)


OUT, LSE = Float[Array, "B T H Dv"], Float32[Array, "B H T"]
# The arguments that decide on the type of the result.
OVERLOADED = {
    "decode_attention": {"return_lse"},
    "dilated_attention": {"return_lse"},
    "flash_attention": {"return_lse"},
    "flash_attention_fp8": {"return_lse"},
    "layer_norm": {"quantize", "residual"},
    "ring_attention": {"return_lse"},
    "rms_norm": {"quantize", "residual"},
    "sequence_parallel_dilated_attention": {"return_lse"},
}


@pytest.mark.parametrize("name", OVERLOADED)
def test_overloads_match_their_function(name):
    """Type checkers learn from the overloads of a function, one for each case, which type a result has."""
    function = getattr(jax_kernels, name)
    want, overloads = inspect.signature(function).parameters, typing.get_overloads(function)
    assert str(overloads[-1].__annotations__) == str(function.__annotations__)  # the types of arrays are never equal
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        assert list(parameters) == list(want)
        for parameter, x in parameters.items():
            assert x.kind == want[parameter].kind, parameter
            is_same = str(x.annotation) == str(want[parameter].annotation)
            assert is_same or parameter in OVERLOADED[name], parameter


def test_flash_arguments_match_their_function():
    """The record has the arguments of flash_attention, in their order and with their defaults."""
    parameters = inspect.signature(jax_kernels.flash_attention).parameters
    defaults = {name: dataclasses.MISSING if x.default is x.empty else x.default for name, x in parameters.items()}
    assert [(field.name, field.default) for field in dataclasses.fields(FlashArguments)] == list(defaults.items())


def test_overloads_by_return_lse():
    overloads = typing.get_overloads(jax_kernels.flash_attention)
    got = [str(x.__annotations__["return"]) for x in overloads]
    assert got == [str(OUT), str(tuple[OUT, LSE]), str(OUT | tuple[OUT, LSE])]


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError, match=r"a model needs the package flax: pip install 'jax-kernels\[flax\]'"):
        extras.require("flax", "a model")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax-kernels\[cli\]'"):
        extras.require("flax", "a model", "cli")
    extras.require("jax", "a model")


@pytest.mark.slow
def test_packages_name_the_extra_that_they_need():
    code = """
import sys
import jax_kernels
for package, statement in (
    ("flax", "import jax_kernels.models"),
    ("torch", "import jax_kernels.bridge"),
    ("matplotlib", "jax_kernels.masks.causal().plot('x.png', 8, 8, 4)"),
    ("filelock", "jax_kernels.tune().__enter__()"),
):
    sys.modules[package] = None
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines() == [
        "jax_kernels.models needs the package flax: pip install 'jax-kernels[flax]'",
        "jax_kernels.bridge needs the package torch: pip install 'jax-kernels[torch]'",
        "plot needs the package matplotlib: pip install 'jax-kernels[cli]'",
        "tune needs the package filelock: pip install 'jax-kernels[cli]'",
    ]


@pytest.mark.parametrize(
    ("name", "needs"), [("", "jax"), (".bridge", "torch"), (".bridge.nn", "torch"), (".models", "flax")]
)
def test_star_imports_have_the_public_names(name, needs):
    pytest.importorskip(needs)
    package = f"jax_kernels{name}"
    listed = {name for name in dir(importlib.import_module(package)) if not name.startswith("__")}
    scope: dict = {}
    exec(f"from {package} import *", scope)
    assert len(listed) > 10
    assert not listed - scope.keys()
