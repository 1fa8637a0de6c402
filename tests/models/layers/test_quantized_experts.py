"""QuantizedMixtureOfExperts against a MixtureOfExperts with the dequantised weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels.models import MixtureOfExperts, QuantizedMixtureOfExperts, QuantizedWeight, make_mesh
from jax_kernels.models.layers import quantized_experts
from jax_kernels.quantization import dequantize, quantize

DIM, WIDTH, EXPERTS = 40, 24, 8
# Token counts: all experts are dequantised, or, for less than 8 pairs, the chosen ones.
MANY, FEW = (3, 5), (3,)


def both(format="int4", dtype=None, quantized=None, **options):
    """(the module with low-bit weights, a MixtureOfExperts with the same weights, dequantised)."""
    make = lambda: MixtureOfExperts(
        DIM, WIDTH, EXPERTS, 2, dtype=dtype, rngs=nnx.Rngs(0), **{"shared_experts": 1, "balance_bias": True} | options
    )
    plain, other = make(), make()
    for name in ("gate_proj", "up_proj", "down_proj"):
        if (matrices := getattr(plain, name)) is not None:
            matrices[...] = dequantize(quantize(matrices[...], format, axis=-2, **quantized or {}))
    if plain.expert_bias is not None:
        plain.expert_bias[...] = other.expert_bias[...] = jnp.linspace(-0.1, 0.1, EXPERTS)
    return QuantizedMixtureOfExperts(other, format, **quantized or {}), plain


def x_of(shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).standard_normal((*shape, DIM)), dtype)


@pytest.mark.parametrize("shape", [MANY, FEW, pytest.param((0,), marks=pytest.mark.slow), ()])
@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("int4", {}),
        ("int8", {"gated": False, "shared_experts": 0, "balance_bias": False, "activation": "relu"}),
        ("int8", {"scores": "sigmoid", "weight_scale": 2.5, "quantized": {"scaling": "row"}}),
        ("mxfp8", {"renormalize": False}),
        pytest.param("mxfp4", {}, marks=pytest.mark.slow),
    ],
)
def test_equals_the_dequantised_weights(format, options, shape):
    low, plain = both(format, **options)
    call = nnx.jit(lambda module, x: module.with_routing(x, residual=x))
    (got, of_low), (want, of_plain) = (call(module, x_of(shape)) for module in (low, plain))
    np.testing.assert_allclose(got, want, atol=2e-5)
    np.testing.assert_array_equal(of_low.load, of_plain.load)
    np.testing.assert_allclose(of_low.probability, of_plain.probability, rtol=1e-6)


@pytest.mark.parametrize("shape", [MANY, FEW])
def test_bfloat16_and_gradients(shape):
    """The gradients of x and of the router; the experts' weights are no parameters."""
    low, plain = both(dtype=jnp.bfloat16)
    x = x_of(shape, jnp.bfloat16)

    def loss(module, x):
        out, routing = module.with_routing(x)
        return (out.astype(jnp.float32) ** 2).sum() + routing.balance_loss

    (got, dx), (want, of_plain) = (nnx.jit(nnx.grad(loss, argnums=(0, 1)))(module, x) for module in (low, plain))
    close = lambda a, b: np.testing.assert_allclose(
        *(np.asarray(y, np.float32) for y in (a, b)), atol=0.02 * float(jnp.abs(b).max())
    )
    close(dx, of_plain)
    close(got["router"][...], want["router"][...])
    close(got["shared"]["up_proj"]["kernel"][...], want["shared"]["up_proj"]["kernel"][...])
    assert set(got) == {"router", "shared"}


@pytest.mark.parametrize("shape", [MANY, FEW])
def test_few_pairs_dequantise_the_chosen_experts_alone(shape, monkeypatch):
    """And the compiled program of few pairs has no matrices of all experts."""
    low, _ = both()
    shapes = []
    real = quantized_experts.dequantize
    monkeypatch.setattr(quantized_experts, "dequantize", lambda q, dtype: shapes.append(q.shape) or real(q, dtype))
    graphdef, state = nnx.split(low)
    call = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    text = call.lower(state, x_of(shape)).compile().as_text()
    is_few = shape == FEW
    assert ((6, DIM, WIDTH) in shapes) == is_few
    assert (f"f32[{EXPERTS},{DIM},{WIDTH}]" in text) != is_few


def test_on_a_mesh():
    low, plain = both()
    call = nnx.jit(lambda module, x: module(x))
    want = call(plain, x_of(FEW))
    with jax.set_mesh(make_mesh({"data": 1})):
        np.testing.assert_allclose(call(low, x_of(FEW)), want, atol=2e-5)


def test_variables_and_bytes():
    low, plain = both("int4")
    state = nnx.state(low, QuantizedWeight)
    assert {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)} == {
        f"{name}_proj.{part}" for name in ("gate", "up", "down") for part in ("values", "scale")
    }
    assert low.up_proj.shape == plain.up_proj.shape == (EXPERTS, DIM, WIDTH)
    assert state["up_proj"]["values"][...].dtype == jnp.uint8


def test_bad_arguments_are_named():
    low, plain = both()
    with pytest.raises(TypeError, match="experts: got Linear, want a MixtureOfExperts with float weights"):
        QuantizedMixtureOfExperts(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="experts: got QuantizedMixtureOfExperts, want a MixtureOfExperts with float"):
        QuantizedMixtureOfExperts(low)
    with pytest.raises(ValueError, match="format: got 'int2'"):
        QuantizedMixtureOfExperts(plain, "int2")
