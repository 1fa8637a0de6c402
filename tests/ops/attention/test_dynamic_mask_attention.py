"""dynamic_mask_attention against the definition in float64, with masks and biases of every supported shape."""

import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import dynamic_mask_attention, explain, masks
from jax_kernels.dispatch import on_device
from jax_kernels.testing import rms_error
from tests.support.cases import tiers

pytestmark = pytest.mark.usefixtures("no_interpret")

B, T, S, H, HKV, D = 2, 19, 23, 6, 3, 8
jit = lambda f: jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def arrays(batch=B, seed=0):
    random = np.random.default_rng(seed)
    shapes = ((batch, T, H, D), (batch, S, HKV, D), (batch, S, HKV, D))
    return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)


def of_heads(x):
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return jnp.repeat(x, H // HKV, axis=1) if x.shape[1] == HKV else x


def definition(q, k, v, mask, bias, sinks=None):
    """(out, lse)."""
    k, v = (jnp.repeat(x, H // HKV, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") / np.sqrt(D) + of_heads(bias)
    keep = jnp.broadcast_to(of_heads(mask), scores.shape) & (scores > -jnp.inf)
    total = jnp.where(keep, jnp.exp(jnp.where(keep, scores, 0)), 0)
    weights, total = total, total.sum(axis=-1) + (0 if sinks is None else jnp.exp(sinks)[:, None])
    dead = total == 0
    weights = weights / jnp.where(dead, 1, total)[..., None]
    lse = jnp.where(dead, -jnp.inf, jnp.log(jnp.where(dead, 1, total)))
    return jnp.einsum("bhts,bshd->bthd", weights, v, precision="highest"), lse


def loss(out, lse):
    return jnp.sum(out * jnp.cos(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)))


def random_mask(*shape, seed=1):
    """Some queries have no key, if the mask has an axis of queries."""
    mask = np.random.default_rng(seed).random(shape) < 0.4
    if len(shape) > 1 and shape[-2] > 1:
        mask[..., 3:5, :] = False
    return mask


def random_bias(*shape, seed=2):
    bias = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return np.where(np.random.default_rng(seed + 1).random(shape) < 0.1, -np.inf, bias).astype(np.float32)


def compare(mask, bias, batch=B, **arguments):
    given = (*arrays(batch), np.float32(bias))
    sinks = arguments.get("sinks")

    def run(attend):
        def both(q, k, v, bias):
            results = attend(q, k, v, bias)
            return loss(*results), results

        return jit(jax.value_and_grad(both, (0, 1, 2, 3), has_aux=True))

    got = run(lambda *x: dynamic_mask_attention(*x[:3], mask, x[3], return_lse=True, **arguments))(*given)
    keep = np.asarray(mask.array if isinstance(mask, masks.Mask) else mask)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in given]
        want = jax.tree.map(np.asarray, run(lambda *x: definition(*x[:3], keep, x[3], sinks))(*wide))
    for g, w in zip((*got[0][1], *got[1]), (*want[0][1], *want[1]), strict=True):
        assert rms_error(g, w) < 3e-6, np.shape(w)
    return got


SHAPES = [
    # mask, bias
    ((B, HKV, T, S), (B, HKV, T, S)),
    ((B, HKV, T, S), (1, H, 1, S)),
    ((B, 1, T, S), (B, HKV, T, S)),
    ((1, HKV, T, S), (1, HKV, 1, S)),
    ((B, HKV, 1, S), (B, HKV, 1, S)),
    ((S,), (HKV, T, 1)),
]


@pytest.mark.parametrize("shapes", tiers.cases(SHAPES, {str(SHAPES[at]) for at in (1, 3, 5)}))
def test_matches_float64(shapes):
    mask, bias = random_mask(*shapes[0]), random_bias(*shapes[1])
    (_, (out, lse)), gradients = compare(mask, bias)
    assert gradients[3].shape == shapes[1]
    dead = np.isneginf(lse).swapaxes(1, 2)
    assert not np.asarray(out)[dead].any()
    assert not np.asarray(gradients[0])[dead].any()


def test_vmapped_arguments():
    """Sinks belong to query's heads, score_mod gets query's head indices, lengths belong to batch entries."""
    mask, bias = random_mask(B, HKV, T, S), random_bias(B, HKV, T, S)
    compare(mask, bias, sinks=np.arange(H, dtype=np.float32) - 2)
    slopes, lengths = jnp.arange(1.0, H + 1), np.array([S, 7], np.int32)
    keep = np.repeat(mask, H // HKV, axis=1) & (np.arange(S) < lengths[:, None, None, None])
    got = dynamic_mask_attention(
        *arrays(), mask, bias, kv_lengths=lengths, score_mod=lambda score, b, h, q, k: score - slopes[h] * (b + 1) * k
    )
    steps = slopes[:, None, None] * np.array([1, 2])[:, None, None, None] * np.arange(S)
    want, _ = jit(definition)(*arrays(), keep, np.repeat(bias, H // HKV, axis=1) - steps)
    assert rms_error(got, want) < 3e-6


@pytest.mark.slow
def test_mask_objects():
    scores = random_bias(B, HKV, 1, S)
    mask = masks.top_k(jnp.asarray(scores), 5, among=masks.causal(), q_length=T)
    assert mask.heads == HKV
    compare(mask, scores)
    keep = np.asarray(mask.array)
    assert (keep.sum(-1) == np.minimum(np.tri(T, S)[None, None] @ (scores > -np.inf).swapaxes(2, 3), 5)[..., 0]).all()
    prepared = dynamic_mask_attention(*arrays(), masks.PreparedMask(mask, ()), scores)
    np.testing.assert_array_equal(prepared, dynamic_mask_attention(*arrays(), mask, scores))
    limits = masks.prefix(np.array([7, S], np.int32)) & masks.causal()
    got = dynamic_mask_attention(*arrays(), limits, random_bias(B, HKV, T, S))
    want = dynamic_mask_attention(*arrays(), limits.to_dense(T, S), random_bias(B, HKV, T, S))
    np.testing.assert_allclose(got, want, atol=2e-6)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=3)
def test_any_shapes(data):
    """A mask and a bias of any axes, with any supported number of heads."""
    batch = data.draw(st.integers(1, 2))
    draw = lambda: tuple(data.draw(st.sampled_from(sizes)) for sizes in ((1, batch), (1, HKV, H), (1, T), (1, S)))
    compare(random_mask(*draw()), random_bias(*draw()), batch=batch)


def test_keys_are_not_repeated_over_the_group():
    mask = jax.ShapeDtypeStruct((B, HKV, 640, 640), bool)
    bias = jax.ShapeDtypeStruct((B, HKV, 640, 640), jnp.bfloat16)
    query, key = (jax.ShapeDtypeStruct((B, 640, heads, 64), jnp.bfloat16) for heads in (H, HKV))
    call = lambda *x: dynamic_mask_attention(*x, implementation="mosaic_gpu")
    with on_device("H200"):
        program = jax.make_jaxpr(call)(query, key, key, mask, bias)
    text = str(program)
    assert f"[{B * HKV},1,640,640]" in text
    assert f"[{B},{H},640,640]" not in text


def test_plan():
    bfloat16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    query, key, sinks = bfloat16(B, 64, H, 64), bfloat16(B, 64, HKV, 64), jnp.zeros(H)
    with on_device("H200"):
        for heads in (1, HKV, H):
            mask, bias = jax.ShapeDtypeStruct((B, heads, 64, 64), bool), bfloat16(B, HKV, 1, 64)
            plan = explain(dynamic_mask_attention, query, key, key, mask, bias, sinks=sinks)
            assert (plan.op, plan.implementation) == ("flash_attention", "mosaic_gpu")
    assert explain(dynamic_mask_attention, *arrays(), random_mask(B, HKV, T, S)).implementation == "xla"


BAD = {
    "no_mask": ((None,), TypeError, "mask: got NoneType, want a bool array"),
    "mask_type": (("causal",), TypeError, "mask: got str, want a bool array"),
    "mask_dtype": ((np.ones((T, S), np.int32),), TypeError, "mask: got dtype int32, want bool (True = attend)"),
    "mask_values": ((np.full((T, S), 2.0, np.float32),), ValueError, "mask: got float32 values other than 0 and 1"),
    "mask_heads": (
        (np.ones((B, 2, T, S), bool),),
        ValueError,
        "mask: got shape (2, 2, 19, 23), want a shape broadcastable to [B, H, T, S] = (2, 6, 19, 23) or to "
        "[B, Hkv, T, S] = (2, 3, 19, 23)",
    ),
    "mask_object": (
        (masks.block_sparse(np.ones((HKV, 1, 1), bool), 32),),
        ValueError,
        "mask: got a Mask of 3 heads, want 1 or query's 6, or a dense Mask of key's 3",
    ),
    "bias_type": ((np.ones((T, S), bool), [0.0]), TypeError, "bias: got list, want an array"),
    "bias_shape": (
        (np.ones((T, S), bool), np.ones((S, T), np.float32)),
        ValueError,
        "bias: got shape (23, 19), want a shape broadcastable to [B, H, T, S]",
    ),
    "bias_dtype": (
        (np.ones((B, HKV, T, S), bool), np.ones((T, S), jnp.bfloat16)),
        TypeError,
        "bias: got dtype bfloat16, want query's dtype float32",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    given, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        dynamic_mask_attention(*arrays(), *given)


def test_shape_errors_name_the_call():
    query, key, value = arrays()
    with pytest.raises(ValueError, match="key: got 3 heads, want a divisor of query's 5 heads"):
        dynamic_mask_attention(query[:, :, :5], key, value, random_mask(T, S))
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        dynamic_mask_attention(query, key, value, random_mask(B, HKV, T, S), causal=True)
    with pytest.raises(ValueError, match=r"sinks: got shape \(3,\), want \[heads\] = \(6,\)"):
        dynamic_mask_attention(query, key, value, random_mask(B, HKV, T, S), sinks=np.zeros(3, np.float32))
