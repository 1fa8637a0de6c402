"""A traced scale, such as a learned temperature: its results and its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import (
    block_sparse_attention,
    decode_attention,
    dilated_attention,
    dynamic_mask_attention,
    flash_attention,
    flash_attention_fp8,
    ring_attention,
)
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.reference import attention as reference
from jax_kernels.testing import rms_error

T, D = 24, 16


def arrays(dtype="float32"):
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.standard_normal((2, T, heads, D)), dtype) for heads in (4, 2, 2))


def exact(scale, softcap=None):
    """The value and derivative of the loss with respect to the scale, in float64."""
    with jax.enable_x64(True):
        inputs = AttentionInputs(*(x.astype(jnp.float64) for x in arrays()))

        def loss(scale):
            query = inputs.query * scale
            options = AttentionOptions(scale=1.0, is_causal=True, softcap=softcap)
            out, lse = reference.attention(inputs._replace(query=query), options)
            return (out**2).sum() + jnp.sin(lse).sum()

        return jax.tree.map(float, jax.jit(jax.value_and_grad(loss))(jnp.float64(scale)))


@pytest.mark.parametrize("scale", [0.25, 0.37, -0.2, 0.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_flash_attention(scale, softcap):
    def loss(scale):
        options = {"is_causal": True, "softcap": softcap, "return_lse": True}
        out, lse = flash_attention(*arrays(), scale=scale, **options)
        return (out**2).sum() + jnp.sin(lse).sum()

    want, gradient = exact(scale, softcap)
    for got in (jax.jit(jax.value_and_grad(loss))(scale), jax.value_and_grad(loss)(jnp.float32(scale))):
        np.testing.assert_allclose(got, (want, gradient), rtol=3e-6, atol=1e-4)
    np.testing.assert_allclose(jax.jvp(loss, (scale,), (1.0,)), (want, gradient), rtol=3e-6, atol=1e-4)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_bfloat16(implementation, monkeypatch):
    """The default scale, traced, gives the bits of the default scale; another scale rounds query once."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    attend = functools.partial(flash_attention, *arrays("bfloat16"), implementation=implementation)
    np.testing.assert_array_equal(jax.jit(lambda scale: attend(scale=scale))(D**-0.5), attend())
    loss = lambda scale: (attend(scale=scale).astype(jnp.float32) ** 2).sum()
    got = jax.jit(jax.grad(loss))(0.37)
    wide = [x.astype(jnp.float32) for x in arrays("bfloat16")]
    want = jax.grad(lambda scale: (flash_attention(*wide, scale=scale) ** 2).sum())(0.37)
    np.testing.assert_allclose(got, want, rtol=1e-2)


def ring(query, key, value, scale):
    mesh = jax.make_mesh((1,), ("ring",), (jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "ring")
    attend = lambda *x: ring_attention(*x[:3], axis_name="ring", scale=x[3], is_causal=True)
    return jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec, jax.P()), out_specs=spec)(
        query, key, value, jnp.asarray(scale, jnp.float32)
    )


KEEP = jnp.asarray(np.random.default_rng(1).random((2, 2, T, T)) > 0.3)
SIBLINGS = {
    "dynamic_mask": lambda q, k, v, scale: dynamic_mask_attention(q, k, v, KEEP, scale=scale),
    "block_sparse": lambda q, k, v, scale: block_sparse_attention(q, k, v, jnp.ones((1, 1), bool), scale=scale),
    "dilated": lambda q, k, v, scale: dilated_attention(
        q, k, v, segment_lengths=(8, T), dilation_rates=(1, 2), scale=scale
    ),
    "ring": ring,
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings(name):
    """The gradient of a traced scale is the sum of query's gradient times query, over the scale."""
    query, key, value = arrays()
    loss = lambda query, scale: (SIBLINGS[name](query, key, value, scale) ** 2).sum()
    dquery, dscale = jax.jit(jax.grad(loss, (0, 1)))(query, 0.3)
    np.testing.assert_allclose(dscale, (dquery * query).sum() / 0.3, rtol=1e-5)
    static = jax.jit(jax.grad(lambda query: loss(query, 0.3)))(query)
    assert rms_error(dquery, static) < 1e-6


def test_decode_attention():
    query, key, value = arrays()
    attend = lambda scale: decode_attention(query[:, :1], key, value, scale=scale)
    assert rms_error(jax.jit(attend)(0.3), attend(0.3)) < 1e-6
    with pytest.raises(NotImplementedError, match="decode_attention: it has no gradient"):
        jax.grad(lambda scale: attend(scale).sum())(0.3)


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_fp8(scale):
    given = [x.astype(jnp.float8_e4m3fn) for x in arrays()]
    attend = lambda scale: flash_attention_fp8(*given, scale=scale)
    assert rms_error(jax.jit(attend)(scale), attend(scale)) < 1e-2
    with pytest.raises(NotImplementedError):
        jax.grad(lambda scale: attend(scale).astype(jnp.float32).sum())(scale)


def test_vmap():
    attend = lambda scale: flash_attention(*arrays(), scale=scale)
    got = jax.jit(jax.vmap(attend))(jnp.asarray([0.3, -0.2]))
    assert rms_error(got, jnp.stack([attend(0.3), attend(-0.2)])) < 1e-6


@pytest.mark.parametrize(
    ("scale", "kind", "message"),
    [
        (jnp.ones(2), ValueError, r"^scale: got shape \(2,\), want"),
        (jnp.int32(1), TypeError, "^scale: got a traced int32"),
    ],
)
def test_errors(scale, kind, message):
    query, key, value = arrays()
    with pytest.raises(kind, match=message):
        jax.jit(lambda scale: flash_attention(query, key, value, scale=scale))(scale)
    with pytest.raises(kind, match=message):
        jax.jit(lambda scale: decode_attention(query[:, :1], key, value, scale=scale))(scale)
