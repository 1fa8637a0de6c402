"""Arrays, caches and numbers that a call refuses: the error names the argument, its value and the wanted value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import models
from jax_kernels.models import document_positions, rotary_embedding, within_documents

CONFIG = models.TransformerConfig(vocab_size=16, model_dim=32, num_layers=2, num_heads=2)
RNGS = nnx.Rngs(0)
MODEL = models.Transformer(CONFIG, rngs=RNGS)
ATTENTION = models.MultiHeadAttention(32, num_heads=2, rngs=RNGS)
DYNAMIC = models.DynamicMaskAttention(32, num_heads=2, keys_to_keep=4, rngs=RNGS)
DILATED = models.MultiHeadDilatedAttention(32, 2, segment_lengths=(4,), dilation_rates=(2,), rngs=RNGS)
EXPERTS = models.MixtureOfExperts(32, 24, 4, 2, balance_bias=True, rngs=RNGS)
X = jnp.ones((2, 6, 32))
HEADS = jnp.ones((1, 6, 2, 8))
IDS = jnp.zeros((2, 6), jnp.int32)
LOAD = jnp.arange(4)


def rotated(positions, x=HEADS, **options):
    return lambda: rotary_embedding(x, positions, **options)


def generated(**options):
    return lambda: MODEL.generate(IDS, 2, **({"key": jax.random.key(0)} | options))


def biased(load=LOAD, **options):
    return lambda: EXPERTS.update_bias(load, **options)


CASES = {
    "attention list": (lambda: ATTENTION(X.tolist()), TypeError, "x: got list, want an array of floats"),
    "attention complex": (lambda: ATTENTION(X + 1j), TypeError, "x: got dtype complex64, want floats"),
    "dynamic list": (lambda: DYNAMIC(X.tolist()), TypeError, "x: got list, want an array of floats"),
    "dynamic complex": (lambda: DYNAMIC(X + 1j), TypeError, "x: got dtype complex64, want floats"),
    "dilated list": (lambda: DILATED(X.tolist()), TypeError, "x: got list, want an array of floats"),
    "dilated complex": (lambda: DILATED(X + 1j), TypeError, "x: got dtype complex64, want floats"),
    "positions list": (lambda: ATTENTION(X, positions=[0] * 6), TypeError, "positions: got list, want integers"),
    "dilated positions": (lambda: DILATED(X, positions=[0] * 6), TypeError, "positions: got list, want integers"),
    "attention cache": (lambda: ATTENTION(X, cache=(1, 2)), TypeError, "cache: got tuple, want a KVCache"),
    "cache length": (
        lambda: ATTENTION(X, cache=dataclasses.replace(ATTENTION.init_cache(2, 8), length=3)),
        TypeError,
        "cache: got a length of type int, want an int32 array",
    ),
    "model cache": (lambda: MODEL(IDS, cache=[None] * 2), TypeError, r"cache\[0\]: got NoneType, want a KVCache"),
    "embeddings": (lambda: MODEL(embeddings=X.tolist()), TypeError, r"embeddings: got list, want floats \[batch"),
    "rotary list": (rotated(list(range(6))), TypeError, "positions: got list, want an array of positions"),
    "rotary complex": (rotated(1j * jnp.arange(6)), TypeError, "positions: got dtype complex64, want integers or fl"),
    "rotary one": (rotated(jnp.arange(1)), ValueError, r"positions: got shape \(1,\), want \[length\] = \(6,\)"),
    "rotary scalar": (rotated(jnp.int32(1)), ValueError, r"positions: got shape \(\), want \[length\] = \(6,\)"),
    "rotary batch": (rotated(jnp.ones((3, 6))), ValueError, r"positions: got shape \(3, 6\), want .* = \(1, 6\)"),
    "rotary axes": (rotated(jnp.ones((1, 1, 6))), ValueError, r"positions: got shape \(1, 1, 6\), want"),
    "rotary int": (rotated(jnp.arange(6), x=HEADS.astype(int)), TypeError, "x: got dtype int32, want floats"),
    "rotary x list": (rotated(jnp.arange(6), x=HEADS.tolist()), TypeError, "x: got list, want an array of floats"),
    "rotary x axes": (rotated(jnp.arange(6), x=HEADS[0, 0]), ValueError, r"x: got shape \(2, 8\), want \[..., len"),
    "theta 0": (rotated(jnp.arange(6), theta=0), ValueError, "theta=0 must be positive and finite"),
    "theta text": (rotated(jnp.arange(6), theta="x"), TypeError, "theta='x' must be a number"),
    "document list": (lambda: document_positions([[0, 1]]), TypeError, "segment_ids: got list, want integers"),
    "document floats": (lambda: document_positions(IDS * 1.0), TypeError, "segment_ids: got dtype float32, want int"),
    "within list": (lambda: within_documents([[1, 2]], IDS), TypeError, "targets: got list, want integers"),
    "within id list": (lambda: within_documents(IDS, [[1, 2]]), TypeError, "segment_ids: got list, want integers"),
    "within floats": (lambda: within_documents(IDS, IDS * 1.0), TypeError, "segment_ids: got dtype float32, want"),
    "within targets": (lambda: within_documents(IDS * 1.0, IDS), TypeError, "targets: got dtype float32, want"),
    "key": (generated(key=jnp.zeros(5, jnp.uint32)), TypeError, "key: got Array.*, want a jax.random.key"),
    "temperature": (generated(temperature=np.inf), ValueError, "temperature: got inf, want a finite number of 0 or m"),
    "load list": (biased([1, 2, 3, 4]), TypeError, r"load: got list, want integers \[num_experts\]"),
    "load floats": (biased(LOAD * np.nan), TypeError, "load: got dtype float32, want integers"),
    "rate text": (biased(rate="x"), TypeError, "rate: got str, want a number"),
    "rate none": (biased(rate=None), ValueError, "rate: got None, want a number of 0 or more"),
    "rate": (biased(rate=-1.0), ValueError, r"rate: got -1\.0, want a number of 0 or more"),
    "rate infinite": (biased(rate=np.inf), ValueError, "rate: got inf, want a finite number"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_arguments_are_named(case):
    call, error, message = CASES[case]
    with pytest.raises(error, match=f"^{message}"):
        call()


def test_unsigned_targets_hold_the_mark_of_another_document():
    ids = jnp.array([[0, 0, 1, 1]], jnp.uint8)
    for dtype in ("uint8", "uint16", "uint32", "int8", "int32"):
        targets = jnp.arange(4).astype(dtype)[None]
        assert within_documents(targets, ids).tolist() == [[0, -1, 2, 3]]


def test_positions_of_rotary_embedding_may_have_axes_of_length_1():
    x = jnp.broadcast_to(HEADS, (3, *HEADS.shape[1:]))
    want = rotary_embedding(x, jnp.arange(6))
    np.testing.assert_array_equal(rotary_embedding(x, jnp.arange(6)[None]), want)
    np.testing.assert_array_equal(jax.jit(rotary_embedding)(x, np.arange(6), 10000.0), want)
