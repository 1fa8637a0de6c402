"""Arrays that a module refuses: x with another number of features, residuals of another shape or dtype than its
result's, and 8-bit floats.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

from jax_kernels import models

X = jnp.ones((5, 32))
RNGS = nnx.Rngs(0)
EXPERTS = models.MixtureOfExperts(32, 24, 4, 2, rngs=RNGS)
LINEAR = models.Linear(32, 32, rngs=RNGS)
MLP = models.GatedMLP(32, 40, rngs=RNGS)
MODULES = {
    "experts": EXPERTS,
    "shared experts": models.MixtureOfExperts(32, 24, 4, 2, shared_experts=1, dtype=jnp.bfloat16, rngs=RNGS),
    "low-bit experts": models.QuantizedMixtureOfExperts(EXPERTS),
    "linear": LINEAR,
    "mlp": MLP,
    "mlp of two matmuls": models.GatedMLP(32, 40, precision="bf16", rngs=RNGS),
    "wide residual": models.GatedMLP(32, 40, param_dtype=jnp.bfloat16, rngs=RNGS),
    "low-bit linear": models.QuantizedLinear.from_linear(LINEAR),
    "low-bit mlp": models.QuantizedGatedMLP.from_mlp(MLP),
}
SHAPES = ((3, 5, 32), (32,), (1, 32), (5, 1), (5, 16))


def of(name):
    """The module, and its x: bfloat16 for a computation that is narrower than a float32 residual."""
    return MODULES[name], X.astype(jnp.bfloat16) if name == "wide residual" else X


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_residual_has_the_shape_of_the_result(name, shape):
    module, x = of(name)
    with pytest.raises(ValueError, match=r"residual: got shape .*, want (x's|the result's) ") as raised:
        module(x, residual=jnp.ones(shape))
    assert str(shape) in str(raised.value)
    assert "(5, 32)" in str(raised.value)


@pytest.mark.parametrize("dtype", ["bool", "int32", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("name", MODULES)
def test_a_residual_has_floats(name, dtype):
    module, x = of(name)
    with pytest.raises(TypeError, match=f"residual: got dtype {dtype}, want bfloat16, float16 or float32"):
        module(x, residual=jnp.ones((5, 32), dtype))
    with pytest.raises(TypeError, match=r"residual: got builtins.list, want a jax.Array"):
        module(x, residual=[[0.0] * 32] * 5)


@pytest.mark.parametrize("kind", [models.LayerNorm, models.RMSNorm])
def test_a_residual_of_a_norm_has_floats(kind):
    for dtype in ("bool", "int32", "complex64"):
        with pytest.raises(TypeError, match=f"residual: got dtype {dtype}, want floats"):
            kind(32, rngs=RNGS)(X, residual=jnp.ones((5, 32), dtype))


def test_a_residual_of_experts_on_explicit_axes():
    with jax.set_mesh(jax.make_mesh((1,), ("data",), (AxisType.Explicit,))):
        with pytest.raises(ValueError, match=r"residual: got shape \(32,\), want x's \(5, 32\)"):
            EXPERTS(X, residual=jnp.ones(32))
        with pytest.raises(TypeError, match="residual: got dtype int32, want bfloat16"):
            EXPERTS.with_routing(X, residual=jnp.ones((5, 32), int))


def test_8_bit_floats_need_a_dtype():
    """JAX does not promote 8-bit floats; a module with a dtype casts them."""
    x = X.astype(jnp.float8_e4m3fn)
    norms = {f"{kind.__name__}": kind(32, rngs=RNGS) for kind in (models.LayerNorm, models.RMSNorm)}
    for name, module in (MODULES | norms).items():
        if name == "shared experts":
            assert module(x).dtype == jnp.bfloat16
            continue
        with pytest.raises(
            TypeError, match=r"(x|inputs): got dtype float8_e4m3fn, want bfloat16, float16 or float32, or"
        ):
            module(x)
    for kind in (models.LayerNorm, models.RMSNorm):
        assert kind(32, dtype=jnp.bfloat16, rngs=RNGS)(x).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="param_dtype: got float8_e4m3fn, want bfloat16"):
        models.Linear(32, 32, param_dtype=jnp.float8_e4m3fn, rngs=RNGS)(X)


@pytest.mark.parametrize("shape", [(5, 31), (31,), ()], ids=str)
@pytest.mark.parametrize("name", ["linear", "mlp", "mlp of two matmuls", "low-bit linear", "low-bit mlp", "norm"])
def test_an_error_names_x_of_other_features(name, shape):
    """And not the module's own parameter."""
    module = models.RMSNorm(32, rngs=RNGS) if name == "norm" else MODULES[name]
    argument = "inputs" if name == "linear" else "x"
    with pytest.raises(ValueError, match=re.escape(f"{argument}: got shape {shape}, want [..., 32]")):
        module(jnp.ones(shape))
