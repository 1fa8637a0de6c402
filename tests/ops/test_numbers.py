"""Options that are numbers: Python's, NumPy's and known 0-d arrays give equal results; traced numbers raise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kernels
from jax_kernels import masks, models

X = jax.random.normal(jax.random.key(0), (1, 9, 2, 16))
ROWS, WEIGHTS = X[0, :, 0], jax.random.normal(jax.random.key(1), (24, 16))
FLOATS = (np.float32, np.float16, np.array, jnp.float32, lambda x: np.asarray(x, jnp.bfloat16)[()])
INTS = (np.int64, np.uint8, np.array, jnp.int32)
BOOLS = (np.bool_, np.array, jnp.bool_)
PATTERN = {"segment_lengths": (4, 8), "dilation_rates": (1, 2)}
attend = lambda **options: jax_kernels.flash_attention(X, X, X, **options)
dynamic = lambda **options: jax_kernels.dynamic_mask_attention(X, X, X, jnp.ones((9, 9), bool), **options)
blocks = lambda **x: jax_kernels.block_sparse_attention(X, X, X, jnp.ones((3, 3), bool), **{"block_size": 4} | x)
decode = lambda **options: jax_kernels.decode_attention(X[:, :1], X, X, **options)
dilated = lambda **options: jax_kernels.dilated_attention(X, X, X, **PATTERN | options)
eight = lambda **options: jax_kernels.matmul(
    *(x.astype(jnp.float8_e4m3fn) for x in (ROWS, WEIGHTS.T)), **{"x_scale": 0.5, "w_scale": 2.0} | options
)
fp8 = lambda **options: jax_kernels.flash_attention_fp8(*(X.astype(jnp.float8_e4m3fn),) * 3, **options)
by_rows = lambda **options: jax_kernels.quantize(ROWS, scaling="row", **options).scale
top_k = lambda **options: masks.top_k(ROWS, **options).to_dense(9, 16)
banded = lambda **options: masks.sliding_window(**{"left": None, "right": 0} | options).to_dense(9, 9)
CASES = {
    "attention scale": (attend, "scale", 0.5, FLOATS),
    "attention softcap": (attend, "softcap", 2, (*FLOATS, *INTS)),
    "attention window": (attend, "window", 4, INTS),
    "attention is_causal": (attend, "is_causal", True, BOOLS),
    "attention return_lse": (attend, "return_lse", True, BOOLS),
    "attention deterministic": (attend, "deterministic", True, BOOLS),
    "dynamic scale": (dynamic, "scale", 0.5, FLOATS),
    "block_size": (blocks, "block_size", 4, INTS),
    "decode scale": (decode, "scale", 0.5, FLOATS),
    "decode window": (decode, "window", 4, INTS),
    "dilated scale": (dilated, "scale", 0.5, FLOATS),
    "dilated is_causal": (dilated, "is_causal", True, BOOLS),
    "fp8 scale": (fp8, "scale", 0.5, FLOATS),
    "fp8 q_scale": (fp8, "q_scale", 2, (*FLOATS, *INTS)),
    "rms eps": (lambda **x: jax_kernels.rms_norm(ROWS, ROWS[0], **x), "eps", 0.5, FLOATS),
    "layer scale_offset": (lambda **x: jax_kernels.layer_norm(ROWS, ROWS[0], **x), "scale_offset", 1, (*FLOATS, *INTS)),
    "matmul transpose_w": (lambda **x: jax_kernels.matmul(ROWS, WEIGHTS, **x), "transpose_w", True, BOOLS),
    "matmul x_scale": (eight, "x_scale", 0.5, FLOATS),
    "matmul w_scale": (eight, "w_scale", 2, (*FLOATS, *INTS)),
    "quantize axis": (
        lambda **x: jax_kernels.quantize(ROWS, scaling="row", **x).scale,
        "axis",
        -2,
        (np.int64, jnp.int32),
    ),
    "quantize_fp8 axis": (lambda **x: jax_kernels.quantize_fp8(ROWS, **x), "axis", 1, INTS),
    "hilbert_order": (lambda **x: jax_kernels.hilbert_order(**x), "n", 9, INTS),
    "top_k": (top_k, "k", 3, INTS),
    "left": (banded, "left", 3, INTS),
    "rate": (lambda **x: masks.dilated(**x).to_dense(9, 9), "rate", 3, INTS),
}


def same(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x, float), np.asarray(y, float)), got, want)


@pytest.mark.parametrize("case", CASES)
def test_scalar_of_any_type(case):
    function, name, number, kinds = CASES[case]
    want = function(**{name: number})
    for kind in kinds:
        same(function(**{name: kind(number)}), want)


def test_pairs_and_patterns():
    scores = np.einsum("bthd,bshd->bhts", X, X, dtype=np.float64) / 4
    position = np.arange(9)
    keep = (position[:, None] - 4 <= position) & (position <= position[:, None])
    weights = np.exp(np.where(keep, scores, -np.inf))
    want = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), X)
    for pair in ((np.int64(4), 0), [4, np.uint8(0)], (jnp.int32(4), np.array(0)), np.array([4, 0]), jnp.array([4, 0])):
        np.testing.assert_allclose(attend(window=pair), want, atol=3e-6)
        np.testing.assert_allclose(dynamic(window=pair), want, atol=3e-6)
    for kind in (np.array, jnp.array, lambda x: [np.int64(n) for n in x]):
        same(dilated(**{name: kind(x) for name, x in PATTERN.items()}), dilated())
    assert masks.block_sparse(jnp.ones((3, 3), bool), jnp.array([4, 4])).block_q == 4


def test_explain_takes_scalars_of_any_type():
    spec = jax.ShapeDtypeStruct(X.shape, X.dtype)
    for op, options in ((jax_kernels.flash_attention, {}), (jax_kernels.dilated_attention, PATTERN)):
        plan = jax_kernels.explain(op, spec, spec, spec, scale=np.float32(0.5), is_causal=jnp.bool_(True), **options)
        assert plan.implementation == "xla"


WRONG = [
    (attend, "scale", np.bool_(True), "bool, want a number"),
    (attend, "scale", jnp.array([0.5]), ".*, want a number"),
    (attend, "scale", 1j, "complex, want a number"),
    (attend, "scale", np.float32("inf"), "inf, want a finite number"),
    (attend, "window", np.float64(4), "4.0, want an int"),
    (attend, "window", (True, 0), r"\(True, 0\), want an int"),
    (attend, "is_causal", np.int64(1), "int, want a bool"),
    (top_k, "k", np.float32(3), "3.0, want an int"),
    (eight, "x_scale", np.bool_(True), ".*, want float32"),
]


@pytest.mark.parametrize(("function", "name", "x", "message"), WRONG)
def test_wrong_scalars(function, name, x, message):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got {message}"):
        function(**{name: x})


TRACED = [(attend, "softcap"), (attend, "is_causal"), (attend, "window"), (CASES["rms eps"][0], "eps"), (top_k, "k")]


@pytest.mark.parametrize(("function", "name"), TRACED)
def test_traced_scalars(function, name):
    with pytest.raises(TypeError, match=rf"^{name}: got .*, want"):
        jax.jit(lambda x: function(**{name: x}))(jnp.float32(1))


@pytest.mark.parametrize("function", [attend, decode, dilated, fp8])
def test_traced_scale(function):
    """A traced scale gives the results of the same number."""
    got, want = jax.jit(lambda x: function(scale=x))(jnp.float32(0.25)), function(scale=0.25)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=2e-2, atol=2e-2)


def test_models():
    config = models.TransformerConfig(np.int64(16), jnp.int32(32), np.uint8(1), np.array(2), norm_eps=np.float32(1e-5))
    plain = models.TransformerConfig(16, 32, 1, 2, norm_eps=float(np.float32(1e-5)))
    assert config == plain
    assert hash(config) == hash(plain)
    assert [type(x) for x in (config.vocab_size, config.model_dim, config.norm_eps)] == [int, int, float]
    from flax import nnx

    x = ROWS[None]
    for of, args, options in (
        (models.MultiHeadAttention, (16, 2), {"rope_theta": 100.0, "is_causal": False}),
        (models.LayerNorm, (16,), {"epsilon": 0.5, "scale_offset": 1.0}),
        (models.RMSNorm, (16,), {"epsilon": 0.5}),
        (models.Linear, (16, 8), {"use_bias": False}),
    ):
        other = {name: np.asarray(value)[()] for name, value in options.items()}
        made = (of(*args, **options, rngs=nnx.Rngs(0)), of(*map(jnp.int32, args), **other, rngs=nnx.Rngs(0)))
        same(*(module(x) for module in made))
    with pytest.raises(TypeError, match=r"num_heads=2\.0 must be an int"):
        models.MultiHeadAttention(16, np.float32(2), rngs=nnx.Rngs(0))
