"""Elementwise functions in Mosaic's primitives: their values and derivatives, and the functions that are declined."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, matmul
from jax_kernels.dispatch import on_device
from jax_kernels.ops.activations import derivative_of
from jax_kernels.pallas.mosaic import elementwise
from jax_kernels.score_mod.tile_reads import primitives

FUNCTIONS = {
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "hard_swish": jax.nn.hard_swish,
    "leaky_relu": jax.nn.leaky_relu,
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
    "elu": jax.nn.elu,
    "expm1": jnp.expm1,
    "log1p": lambda x: jnp.log1p(jnp.square(x)),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "erf": jax.lax.erf,
    "not": lambda x: jnp.where(~(x > 0), x, 0.5),
    "rounded": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
}
NUMBERS = np.concatenate([np.linspace(-8, 8, 1001), np.geomspace(1e-6, 1, 100), -np.geomspace(1e-6, 1, 100), [0.0]])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("of", ["function", "derivative"])
def test_values(name, of):
    function = FUNCTIONS[name] if of == "function" else derivative_of(FUNCTIONS[name])
    assert elementwise.why_not(function) is None
    x = jnp.asarray(NUMBERS, jnp.float32)
    got = elementwise.for_tiles(function)(x)
    np.testing.assert_allclose(got, function(x), rtol=1e-5, atol=5e-7)
    names = set(primitives(jax.make_jaxpr(elementwise.for_tiles(function))(x).eqns))
    assert names <= elementwise._KNOWN | {"jit"}


def test_known_primitives_are_kept():
    function = lambda x: x * jax.lax.logistic(x)
    assert elementwise.for_tiles(function) is function
    assert elementwise.for_tiles(None) is None
    assert elementwise.why_not(None) is None


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x: jnp.arctan(x), "cannot compute atan"),
        (lambda x: x + jnp.arange(3.0).sum(), "cannot compute"),
        (lambda x: x.astype(jnp.int32).astype(jnp.float32), "computes in int32"),
    ],
)
def test_declined(function, match):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 64), (64, 128)))
    with on_device("H200"), pytest.raises(NotImplementedError, match=match):
        explain(matmul, x, w, activation=function, implementation="mosaic_gpu")
