"""The Triton kernels read and write nothing past the ends of their arrays, with the blocks of an A100."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jax_kernels import dequantize, flash_attention, gated_matmul, layer_norm, matmul, mlp, quantize, rms_norm
from jax_kernels.dispatch import on_device
from jax_kernels.pallas.triton.backend import plgpu
from tests.support.cases import tiers
from tests.support.interpreters.strict_triton import strict

pytestmark = pytest.mark.triton


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def products(m: int, n: int, k: int, **given: Any) -> dict[str, Any]:
    """The arguments of matmul. A tile has 128 x 256 values."""
    arrays = {name: normal(*shape, seed=1) for name, shape in given.items()}
    return {"x": normal(m, k), "w": normal(k, n) / k**0.5} | arrays


def gradients(op, arrays: dict[str, Any], **options: Any) -> Any:
    out, vjp = jax.vjp(lambda arrays: op(**arrays, **options), arrays)
    return out, vjp(jax.tree.map(jnp.cos, out))


CALLS = {
    # Tiles whose last 64 or 128 columns are out of bounds. A part of a tile has 64 columns.
    "tiles": (matmul, products(640, 1152, 32, bias=(1152,), residual=(640, 1152)), {"activation": "gelu"}),
    "few_rows": (matmul, products(29, 1216, 640), {}),
    "columns": (matmul, products(65, 100, 33, bias=(100,)), {"activation": jnp.sin}),
    "gated": (
        gated_matmul,
        {"x": normal(700, 32), "w_gate": normal(32, 576, seed=1) / 6, "w_up": normal(32, 576, seed=2) / 6},
        {},
    ),
    "mlp": (
        mlp,
        {"x": normal(29, 192), "w_up": normal(192, 320, seed=1) / 14, "w_down": normal(320, 192, seed=2) / 18},
        {"activation": "relu"},
    ),
    "layer_norm": (
        layer_norm,
        {"x": normal(7, 300), "scale": normal(300, seed=1), "bias": normal(300, seed=2), "residual": normal(7, 300)},
        {},
    ),
    "rms_norm": (rms_norm, {"x": normal(5, 20000), "scale": normal(20000, seed=1)}, {}),
    "attention": (
        flash_attention,
        {
            "query": normal(1, 70, 2, 40),
            "key": normal(1, 90, 1, 40, seed=1),
            "value": normal(1, 90, 1, 40, seed=2),
            "bias": normal(1, 2, 70, 90, seed=3),
        },
        {"is_causal": True},
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", tiers.cases(CALLS, ["tiles", "gated", "mlp", "layer_norm"]))
def test_kernels_stay_within_their_arrays(name, monkeypatch):
    """Also checks the kernels of the gradients."""
    op, arrays, options = CALLS[name]
    if op is not layer_norm and op is not rms_norm:
        arrays = jax.tree.map(lambda x: x.astype(jnp.float16), arrays)
    want = gradients(op, jax.tree.map(lambda x: x.astype(jnp.float32), arrays), **options, implementation="xla")
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    with on_device("A100"), strict():
        got = gradients(op, arrays, **options, implementation="triton")
    for x, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        largest = float(jnp.abs(right).max())
        np.testing.assert_allclose(np.asarray(x, np.float32), right, atol=1e-2 * largest)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("format", tiers.cases(["int4", "int8", "mxfp4", "mxfp8"], ["int4"]))
def test_low_bit_matmuls_stay_within_their_arrays(format, monkeypatch):
    x, w = normal(3, 256).astype(jnp.bfloat16), quantize(normal(256, 320, seed=1) / 16, format, axis=-2)
    want = x.astype(jnp.float32) @ dequantize(w).astype(jnp.float32)
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    with on_device("A100"), strict():
        got = matmul(x, w, implementation="triton")
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("size", [64, 48])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["load", "store"])
def test_check_finds_out_of_bounds_access(kind, masked, size):
    """The last block of 64 passes the end of 96 values. No block of 48 does."""

    def kernel(x, out):
        places = pl.ds(pl.program_id(0) * size, size)
        mask = pl.program_id(0) * size + jnp.arange(size) < 96 if masked else None
        checked = {"mask": mask, "other": None if mask is None else 0.0}
        loaded = plgpu.load(x.at[places], **checked) if kind == "load" else jnp.ones(size)
        plgpu.store(out.at[places], loaded, mask=mask if kind == "store" else None)

    x, out = jnp.ones(96 if kind == "load" else 128), 96 if kind == "store" else 2 * size
    with strict():
        found = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((out,), jnp.float32), grid=2, interpret=True)(x)
    assert bool(jnp.isnan(found).any()) == (size == 64 and not masked)
