"""`import jax_kernels`: its names, and the modules that it does not load; also on the newest JAX."""

import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kernels
import jax_kernels.ops
import jax_kernels.pallas
import jax_kernels.reference

HEAVY = ("torch", "flax", "optax", "orbax", "transformers", "rich", "typer", "matplotlib")


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh process has after a statement."""
    code = (
        f"{statement}\nimport sys, json\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, check=True
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", ["jax_kernels", "jax_kernels.testing", "jax_kernels.cli"])
def test_import_loads_no_framework(module):
    modules = modules_after(f"import {module}")
    assert "jax_kernels" in modules
    assert modules.isdisjoint(HEAVY)
    # The linked folders are no separate packages.
    assert modules.isdisjoint({"pallas", "bridge", "models"})


def test_public_names():
    names = {name for name in vars(jax_kernels) if not name.startswith("_")}
    modules = {name for name in names if isinstance(getattr(jax_kernels, name), type(jax_kernels))}
    assert {"DeviceInfo", "Plan", "device_info", "explain", "flash_attention"} <= names - modules
    for name in names - modules:
        assert getattr(jax_kernels, name).__doc__, f"{name} has no docstring"


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


def test_overloads_match_their_function():
    """return_lse decides the result of flash_attention. Type checkers learn this from overloads, one for each case."""
    want = inspect.signature(jax_kernels.flash_attention).parameters
    overloads = typing.get_overloads(jax_kernels.flash_attention)
    assert [x.__annotations__["return"] for x in overloads] == [jax.Array, tuple[jax.Array, jax.Array], typing.Any]
    for overload in overloads:
        parameters = inspect.signature(overload).parameters
        assert list(parameters) == list(want)
        for name, x in parameters.items():
            assert x.kind == want[name].kind, name
            assert x.annotation == want[name].annotation or name == "return_lse", name
