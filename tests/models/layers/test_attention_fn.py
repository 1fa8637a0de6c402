"""attention_fn inside Flax's own modules, against Flax's attention with the same weights."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels.models import attention_fn
from tests.support.cases import tiers

WIDTH, HEADS, LENGTH = 32, 4, 9


def inputs(batch, length=LENGTH, seed=0):
    return jax.random.normal(jax.random.key(seed), (*batch, length, WIDTH))


def masks(batch):
    """Every kind of mask that Flax makes, by name. Each mask leaves every query at least one key."""
    tokens = jnp.ones((*batch, LENGTH))
    lengths = jnp.arange(np.prod(batch, dtype=int)).reshape(batch) % 5 + 4
    valid = jnp.arange(LENGTH) < lengths[..., None]
    random = jax.random.bernoulli(jax.random.key(7), 0.5, (*batch, HEADS, LENGTH, LENGTH)) | jnp.eye(LENGTH, dtype=bool)
    return {
        "none": None,
        "causal": nn.make_causal_mask(tokens),
        "padding": nn.make_attention_mask(jnp.ones_like(valid), valid),
        "combined": nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(valid, valid)),
        "bool_per_head": random,
        "shared_by_the_batch": random[(0,) * len(batch)],
    }


def close(got, want, atol=2e-6):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("batch", "name"),
    [((2,), "none"), ((2,), "combined"), ((2,), "bool_per_head"), ((2, 3), "bool_per_head")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            *(((2,), name) for name in ("causal", "padding", "shared_by_the_batch")),
            ((2, 3), "shared_by_the_batch"),
        ]
    ],
)
def test_linen(batch, name):
    x, mask = inputs(batch), masks(batch)[name]
    theirs = nn.MultiHeadDotProductAttention(num_heads=HEADS)
    ours = nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn)
    params = theirs.init(jax.random.key(1), x)

    def run(module):
        def loss(params, x):
            out = module.apply(params, x, mask=mask)
            return (out**2).mean(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)

    (_, out), gradients = run(ours)
    (_, want), want_gradients = run(theirs)
    if name != "combined":
        close(out, want)
        jax.tree.map(functools.partial(close, atol=1e-6), gradients, want_gradients)
        return
    # A combined mask leaves padded queries without keys. For these, Flax averages all values, and this library gives 0.
    alive = np.asarray(mask, bool).any(-1)[..., 0, :]
    assert not alive.all()
    close(out[alive], want[alive])
    close(out[~alive], jnp.broadcast_to(params["params"]["out"]["bias"], out[~alive].shape))


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    tiers.some_pairs(
        ["none", "causal", "bool_per_head", "shared_by_the_batch"],
        [HEADS, 2],
        [("none", 2), ("causal", HEADS), ("bool_per_head", 2), ("shared_by_the_batch", HEADS)],
    ),
)
def test_nnx(name, kv_heads):
    x, mask = inputs((2,)), masks((2,))[name]
    make = lambda function: nnx.MultiHeadAttention(
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        in_features=WIDTH,
        decode=False,
        attention_fn=function,
        rngs=nnx.Rngs(0),
    )
    ours, theirs = make(attention_fn), make(nnx.dot_product_attention)
    loss = lambda module, x: (module(x, mask=mask) ** 2).mean()
    run = nnx.jit(lambda module, x: (module(x, mask=mask), nnx.grad(loss, argnums=1)(module, x)))
    jax.tree.map(close, run(ours, x), run(theirs, x))


def test_nnx_causal_and_cross_attention():
    make = lambda function: nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=WIDTH, decode=False, attention_fn=function, rngs=nnx.Rngs(0)
    )
    ours, theirs = make(attention_fn), make(nnx.dot_product_attention)
    x, memory = inputs((2,)), inputs((2,), length=13, seed=1)
    close(ours(x, is_causal=True), theirs(x, is_causal=True))
    assert float(jnp.abs(ours(x, is_causal=True) - ours(x)).max()) > 1e-2
    close(ours(x, memory), theirs(x, memory))


def test_decode_with_flax_cache():
    make = lambda function: nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=WIDTH, decode=True, attention_fn=function, rngs=nnx.Rngs(0)
    )
    ours, theirs = make(attention_fn), make(nnx.dot_product_attention)
    x = inputs((2,))
    ours.init_cache((2, LENGTH, WIDTH))
    theirs.init_cache((2, LENGTH, WIDTH))
    for i in range(4):
        close(ours(x[:, i : i + 1]), theirs(x[:, i : i + 1]))


@pytest.mark.parametrize("batch", [(), (2,), (2, 1, 3)])
def test_any_number_of_batch_axes(batch):
    q, k, v = (jax.random.normal(jax.random.key(i), (*batch, LENGTH, HEADS, 8)) for i in range(3))
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, (*batch, 1, LENGTH, LENGTH)) | jnp.eye(LENGTH, dtype=bool)
    want = jax.jit(nn.dot_product_attention)(q, k, v, mask=mask)
    close(jax.jit(attention_fn)(q, k, v, mask=mask), want)


def test_dtypes_promote_as_in_flax():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, LENGTH, HEADS, 8)) for i in range(3))
    mixed = (q.astype(jnp.bfloat16), k, v)
    assert attention_fn(*mixed).dtype == nn.dot_product_attention(*mixed).dtype == jnp.float32
    close(attention_fn(*mixed), nn.dot_product_attention(*mixed))
    assert attention_fn(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ((2,), (2, HEADS, LENGTH, LENGTH)),
        ((2, 3), (3, 1, 1, LENGTH)),
        ((2, 3), (HEADS, 1, LENGTH)),
        ((), (LENGTH,) * 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias(batch, shape, dtype):
    """A bias with its gradient, with a mask, in all shapes that Flax takes."""
    q, k, v = (jax.random.normal(jax.random.key(i), (*batch, LENGTH, HEADS, 8)) for i in range(3))
    bias = jax.random.normal(jax.random.key(4), shape).astype(dtype)
    mask = masks(batch or (1,))["causal"].reshape(*batch, 1, LENGTH, LENGTH)

    def run(attend):
        loss = lambda q, bias: (attend(q, k, v, bias=bias, mask=mask) ** 2).sum()
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(q, bias)

    (got, (dq, dbias)), (want, (their_dq, their_dbias)) = run(attention_fn), run(nn.dot_product_attention)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    close(dq, their_dq, atol=5e-6)
    assert dbias.dtype == dtype
    largest = float(jnp.abs(their_dbias).max())
    atol = largest * (2e-6 if dtype == "float32" else 2**-8)
    close(dbias.astype(jnp.float32), their_dbias.astype(jnp.float32), atol=atol)


def test_bias_shapes():
    q = jnp.zeros((2, LENGTH, HEADS, 8))
    with pytest.raises(ValueError, match=r"^bias: got shape \(3, 1\), want one broadcastable to .batch..., H, T, S."):
        attention_fn(q, q, q, bias=jnp.zeros((3, 1)))


QKV = tuple(np.zeros((2, LENGTH, HEADS, 8), np.float32) for _ in range(3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout_rate", 0.1),
        ("module", object()),
        ("qk_attn_weights_einsum", jnp.einsum),
        ("attn_weights_value_einsum", jnp.einsum),
        ("input_positions", np.arange(LENGTH)),
        ("precision", jax.lax.DotAlgorithmPreset.BF16_BF16_F32),
    ],
)
def test_unsupported_options_raise(name, value):
    with pytest.raises(NotImplementedError, match=f"^{name}: got "):
        attention_fn(*map(jnp.asarray, QKV), **{name: value})


def test_module_dropout_must_be_deterministic():
    make = lambda: nnx.MultiHeadAttention(
        num_heads=HEADS,
        in_features=WIDTH,
        decode=False,
        dropout_rate=0.5,
        attention_fn=attention_fn,
        rngs=nnx.Rngs(0, dropout=1),
    )
    with pytest.raises(NotImplementedError, match=r"dropout_rate: got 0\.5"):
        make()(inputs((2,)), deterministic=False)
    assert np.isfinite(make()(inputs((2,)), deterministic=True)).all()
    with pytest.raises(NotImplementedError, match="module: got a"):
        make()(inputs((2,)), deterministic=True, sow_weights=True)


def test_bad_shapes_are_named():
    q, k, v = map(jnp.asarray, QKV)
    with pytest.raises(
        ValueError, match=r"mask: got shape \(2, 1, 3, 9\), want one broadcastable to .* \(2, 4, 9, 9\)"
    ):
        attention_fn(q, k, v, mask=jnp.ones((2, 1, 3, LENGTH), bool))
    with pytest.raises(ValueError, match=r"key: got batch axes \(1,\), want query's \(2,\)"):
        attention_fn(q, k[:1], v)
    with pytest.raises(ValueError, match=r"query: got shape \(9, 8\)"):
        attention_fn(q[0, :, 0], k, v)
    with pytest.raises(TypeError, match="mask: got dtype int32"):
        attention_fn(q, k, v, mask=jnp.ones((1, LENGTH, LENGTH), jnp.int32))


@pytest.mark.parametrize("batch", [(2,), (2, 1)])
def test_additive_mask_raises_while_tracing(batch):
    q, k, v = (jnp.asarray(x).reshape(*batch, LENGTH, HEADS, 8) for x in QKV)
    additive = jnp.where(nn.make_causal_mask(jnp.ones((*batch, LENGTH))) > 0, 0.0, -1e9)
    with pytest.raises(ValueError, match="mask: got float32 values other than 0 and 1"):
        jax.jit(lambda q, k, v: attention_fn(q, k, v, mask=additive))(q, k, v)
