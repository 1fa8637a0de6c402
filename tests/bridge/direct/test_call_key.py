"""Keys of calls on disk: everything that changes a program changes its key."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_kernels import chunks, dispatch, memory_limit, rms_norm
from jax_kernels.bridge.direct import call_key, program_cache
from jax_kernels.bridge.direct import compile as direct_compile
from jax_kernels.bridge.ops.attention import flash_attention_operator as operators
from jax_kernels.ops import planned_op
from jax_kernels.tuned import cache as winners
from tests.tools.compile_chains import options, target_of

CPU = torch.device("cpu")
X = jax.ShapeDtypeStruct((2, 512, 4, 128), jnp.bfloat16)
SPECS = [X, X, X, *[None] * 7]
INFO = dispatch.device_info("h200")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_KERNELS_PROGRAM_CACHE", raising=False)
    return tmp_path / "programs"


def key(make=operators._inference, specs=SPECS, target="an H200", info=INFO, more=(), **given):
    function = make(CPU, options(**{"is_causal": True} | given), *more)
    return call_key.key_of(function, specs, target, info)


def test_keys_are_different_for_different_programs():
    other = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    keys = [
        key(),
        key(operators._forward),
        *(key(operators._backward, [*SPECS, X, None, X, None], more=(wanted,)) for wanted in (7, 6)),
        *(key(is_causal=False), key(window_left=3), key(scale=0.5), key(scale=0.25)),
        *(key(softcap=0.5), key(deterministic=True), key(precision="highest"), key(implementation="triton")),
        *(key(specs=[other] * 3 + SPECS[3:]), key(specs=[X.update(dtype=jnp.float16)] * 3 + SPECS[3:])),
        *(key(specs=[X, X, X, X, *SPECS[4:]]), key(specs=[X, X, X, None, X, *SPECS[5:]])),
        *(key(target="an H100"), key(info=dispatch.device_info("h100"))),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_keys_depend_on_settings(monkeypatch):
    first = key()
    with memory_limit(2**20):
        assert key() != first
    for name, value in (("jax_default_matmul_precision", "float32"), ("jax_enable_x64", True)):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            assert key() != first
        finally:
            jax.config.update(name, before)
    with jax.default_matmul_precision("float32"):
        assert key() != first
    for name, value in (("JAX_KERNELS_TUNED", "0"), ("JAX_KERNELS_INTERPRET", "1"), ("XLA_FLAGS", "--xla_a=1")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert key() != first
    monkeypatch.setattr(program_cache, "source_digest", lambda: "another source")
    assert key() != first


def test_keys_depend_on_tuned_winners(monkeypatch):
    first = key()
    with winners.ignored():
        ignored = key()
    shipped = dict(winners.find_shipped(INFO.name))
    assert (ignored != first) == bool(shipped)
    winner = next(iter(shipped.values()), None)
    if winner is not None:
        monkeypatch.setattr(winners, "find", lambda name: {"a request": winner})
        assert key() not in (first, ignored)


class Tuner:
    lists_composed = False


def test_some_calls_have_no_key(monkeypatch):
    """Functions that are not the library's, calls whose plans are watched, and other code than a release's."""
    assert call_key.key_of(jax.jit(lambda x: x), [X], "an H200", INFO) is None
    with planned_op.recorded_plans():
        assert key() is None
    with planned_op.tuned_by(Tuner()):
        assert key() is None
    with chunks.forced(2):
        assert key() is None
    with monkeypatch.context() as changed:
        changed.setattr(program_cache, "versions", lambda: {"jax": "0.12.0.dev20261101"})
        assert key() is None
    monkeypatch.setenv("JAX_KERNELS_PROGRAM_CACHE", "0")
    assert key() is None


def test_the_source_digest_has_all_files(tmp_path, monkeypatch):
    """Also through links to folders, as in a checkout."""
    package, elsewhere = tmp_path / "package", tmp_path / "elsewhere"
    for parent in (package, elsewhere):
        parent.mkdir()
    (package / "__init__.py").write_text("")
    (elsewhere / "kernel.py").write_text("a = 1")
    (package / "linked").symlink_to(elsewhere)
    monkeypatch.setattr(program_cache.jax_kernels, "__file__", str(package / "__init__.py"))
    digest = program_cache.source_digest.__wrapped__
    seen = [digest()]
    for path, text in ((elsewhere / "kernel.py", "a = 2"), (package / "b.py", ""), (package / "c.json", "{}")):
        path.write_text(text)
        seen.append(digest())
    (package / "b.py").rename(package / "d.py")
    seen.append(digest())
    assert len(set(seen)) == len(seen)
    (package / "notes.txt").write_text("")
    assert digest() == seen[-1]


@pytest.mark.compile
def test_a_call_with_a_key_is_lowered_once(folder, monkeypatch):
    """A later process reads its chain by the key; without the chain's file it lowers the call again."""
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((96, 512), (512,))]
    norm = lambda x, scale: (rms_norm(x, scale, implementation="triton"),)
    function = call_key.describe(jax.jit(norm), "the norm of a test")
    key_of_call = call_key.key_of(function, specs, "an H200", INFO)

    def compiled():
        with dispatch.on_device("h200"):
            return direct_compile.compile_chain(target_of("h200"), function, specs, key_of_call)

    first = compiled()
    assert len(list(folder.iterdir())) == 2
    with monkeypatch.context() as changed:
        changed.setattr(direct_compile.topologies, "get_topology_desc", lambda **given: pytest.fail("lowered again"))
        assert compiled() == first
    (chain,) = (path for path in folder.iterdir() if path.name != key_of_call)
    chain.unlink()
    assert compiled() == first


@pytest.mark.slow
def test_processes_have_equal_keys():
    """Whatever the order of their sets and dicts."""
    code = """
import torch
from jax_kernels import bridge, dispatch
from jax_kernels.bridge.direct import call_key
from jax_kernels.bridge.ops.attention import flash_attention_operator as operators
given = operators.Options(**dict.fromkeys(operators.Options._fields))
function = operators._inference(torch.device('cpu'), given)
print(call_key.key_of(function, [None], 'an H200', dispatch.device_info('h200')))
"""
    found = []
    for seed in "12":
        more = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        found.append(
            subprocess.run(command, env=os.environ | more, capture_output=True, check=True, timeout=120).stdout
        )
    assert found[0] == found[1]
    assert len(found[0].strip()) == 64
