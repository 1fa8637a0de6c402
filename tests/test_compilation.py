"""compile_kernels: Mosaic has compiled each kernel when XLA asks for it.

As a script it compiles a program for an H200. It prints the number of kernels, and Mosaic's files before and after XLA
asks for the kernels.
"""

import gc
import json
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import compilation, compile_kernels, compiler_options, flash_attention, rms_norm
from tests.support.processes import forked
from tests.tools import compile_case


def test_program_without_kernels():
    lowered = jax.jit(lambda x: rms_norm(x, jnp.ones(128), implementation="xla")).lower(jnp.ones((4, 128)))
    assert compile_kernels(lowered) == 0
    assert lowered.compile()(jnp.ones((4, 128))).shape == (4, 128)


def test_kernels_left_to_xla_are_reported(monkeypatch):
    lowered = jax.jit(lambda x: x).lower(1.0)
    kernel = lambda error: types.SimpleNamespace(compile=lambda where: error)
    kernels = [kernel(None), kernel(TypeError("no")), kernel(None)]
    monkeypatch.setattr(compilation, "_kernels_of", lambda operation: kernels)
    with pytest.warns(RuntimeWarning, match="^compile_kernels: 1 of 3 kernels are left to XLA: no$"):
        assert compile_kernels(lowered) == 3
    kernels[:] = [KeyError("f4")]
    with pytest.warns(RuntimeWarning, match="^compile_kernels: 1 of 1 kernels are left to XLA: 'f4'$"):
        assert compile_kernels(lowered) == 1


def test_caller_need_not_wait(monkeypatch):
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def compile_late(where):
        begun.set()
        assert may_end.wait(timeout=30)
        ended.append(where)

    kernel = types.SimpleNamespace(compile=compile_late)
    monkeypatch.setattr(compilation, "_kernels_of", lambda operation: [kernel, kernel])
    assert compile_kernels(jax.jit(lambda x: x).lower(1.0), wait=False) == 2
    assert begun.wait(timeout=30)
    assert not ended
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "compile_kernels":
            thread.join(timeout=30)
    assert len(ended) == 2


def mesh_of(platform, devices, is_multi_process=False):
    """A fake mesh with the attributes that compiler_options reads."""
    found = np.array([types.SimpleNamespace(platform=platform)] * devices)
    return types.SimpleNamespace(devices=found, size=devices, is_multi_process=is_multi_process)


def test_gpus_in_one_process_send_by_copies():
    options = compiler_options(mesh_of("gpu", 2))
    assert options == {
        "xla_gpu_use_memcpy_local_p2p": True,
        "xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY",
    }
    # XLA accepts them on any platform.
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


@pytest.mark.parametrize("devices", [1, 2])
def test_matmuls_without_triton(devices):
    name = "xla_gpu_enable_triton_gemm"
    mesh = mesh_of("gpu", devices)
    assert compiler_options(mesh, triton_products=False) == compiler_options(mesh) | {name: False}
    assert compiler_options(mesh_of("cpu", devices), triton_products=False) == {}


@pytest.mark.parametrize("mesh", [mesh_of("gpu", 1), mesh_of("cpu", 2), mesh_of("gpu", 2, is_multi_process=True)])
def test_other_meshes_have_no_options(mesh):
    assert compiler_options(mesh) == {}


def test_cpu_mesh_has_no_options():
    assert compiler_options(jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("s",))) == {}


def test_unknown_xla_option_is_dropped(monkeypatch):
    with_more = compilation._BY_COPIES | {
        "xla_gpu_no_such_option": True,
        "xla_gpu_ragged_all_to_all_mode": "no such mode",
    }
    monkeypatch.setattr(compilation, "_BY_COPIES", with_more)
    found = compiler_options(mesh_of("gpu", 2))
    assert "xla_gpu_no_such_option" not in found
    assert "xla_gpu_ragged_all_to_all_mode" not in found
    assert len(found) == 2


def test_garbage_collection_pauses_and_resumes():
    def fail():
        with compilation.paused_collections():
            raise KeyError(gc.isenabled())

    with pytest.raises(KeyError, match="False"):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with compilation.paused_collections():
            pass
        assert not gc.isenabled()  # the caller's own setting
    finally:
        gc.enable()


@pytest.mark.gpu
def test_program_is_right_on_a_gpu():
    x, scale = jax.random.normal(jax.random.key(0), (2, 512, 8, 128), jnp.bfloat16), jnp.ones(128, jnp.bfloat16)
    lowered = jax.jit(jax.grad(_loss)).lower(x, scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compile_kernels(lowered)
    # The two attentions have the same kernels, forward and backward. Triton has the norms.
    assert found == (2 if jax.devices()[0].compute_capability == "9.0" else 0)
    got, want = (np.asarray(f(x, scale), np.float32) for f in (lowered.compile(), jax.grad(_loss)))
    assert np.linalg.norm(got - want) <= 2e-2 * np.linalg.norm(want)
    assert np.linalg.norm(want) > 0


def _loss(x, scale):
    """The loss of two attentions of one shape, and norms."""
    for _ in range(2):
        x = rms_norm(flash_attention(x, x, x, is_causal=True), scale)
    return jnp.square(x.astype(jnp.float32)).sum() + x[0, 0].astype(jnp.float32).sum()


def _compile(dump: str) -> dict[str, Any]:
    """Compiles the gradient of _loss in this process."""
    from jax.experimental import topologies

    from jax_kernels.device import device_info

    written = lambda: sorted((path.name, path.stat().st_mtime_ns) for path in Path(dump).iterdir())
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    lowered = compile_case.lower("h200", jax.grad(_loss), array(2, 512, 8, 128), array(128))
    config = compile_case.target_config(device_info("h200"))
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compile_kernels(lowered, device=topology.devices[0])
    before = written()
    lowered.compile()
    return {"kernels": found, "before": before, "after": written()}


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
def test_xla_finds_compiled_kernels(tmp_path):
    env = {"JAX_KERNELS_INTERPRET": None, "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    done = forked.run(__file__, str(tmp_path), env=env, timeout=compile_case.TIMEOUT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"] == 4  # of two attentions, forward and backward: with dumps, Mosaic numbers each
    assert len(found["before"]) >= 4
    assert found["after"] == found["before"]


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1])))
