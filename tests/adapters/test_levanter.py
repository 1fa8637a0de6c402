"""The adapter for Levanter: named arrays in any order of axes, masks, packed documents, and Levanter's own function."""

import dataclasses
import importlib.util
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.adapters import levanter


@dataclasses.dataclass(frozen=True)
class Axis:
    """haliax's Axis."""

    name: str
    size: int


@jax.tree_util.register_pytree_node_class
class NamedArray:
    """The parts of haliax's NamedArray that the adapter reads."""

    def __init__(self, array: Any, axes: tuple[Axis, ...]) -> None:
        self.array, self.axes = array, tuple(axes)

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, leaves):
        return cls(*leaves, axes)


B, H, G = Axis("batch", 2), Axis("kv_heads", 3), Axis("group", 2)
Q, K, D = Axis("position", 10), Axis("key_position", 12), Axis("head_size", 16)


def normal(seed, *axes):
    return NamedArray(jax.random.normal(jax.random.key(seed), [axis.size for axis in axes]), axes)


def in_order(x, *axes):
    """The array with these axes in order, in float64."""
    return np.asarray(x.array, np.float64).transpose([x.axes.index(axis) for axis in axes])


def definition(query, key, value, *, keep=None, bias=None, cap=None, scale=None):
    q, k, v = in_order(query, B, H, G, Q, D), in_order(key, B, H, K, D), in_order(value, B, H, K, D)
    scores = np.einsum("bhgqd,bhkd->bhgqk", q, k) * (D.size**-0.5 if scale is None else scale)
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = scores if bias is None else scores + bias
    keep = np.ones_like(scores, bool) if keep is None else np.broadcast_to(keep, scores.shape)
    weights = np.where(keep, np.exp(scores), 0)
    return np.einsum("bhgqk,bhkd->bqhgd", weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300), v)


QUERY, KEY, VALUE = normal(0, B, Q, H, G, D), normal(1, H, B, K, D), normal(2, K, D, B, H)
ROWS, COLUMNS = np.arange(10)[:, None], np.arange(12)


def attention_mask(**fields):
    return types.SimpleNamespace(**{"is_causal": False, "explicit_mask": None} | fields)


EXPLICIT = NamedArray(jax.random.bernoulli(jax.random.key(5), 0.6, (12, 2, 10)), (K, B, Q))
IDS = np.array([[0] * 6 + [1] * 6, [0] * 3 + [1] * 7 + [-1] * 2], np.int32)
PACKED = (
    NamedArray(jnp.asarray(IDS[:, :10]), (B, Q)),
    NamedArray(jnp.asarray(IDS), (B, K)),
)
SAME = ((IDS[:, :10, None] == IDS[:, None]) & (IDS[:, :10] >= 0)[..., None])[:, None, None]
MASKS = {
    "none": (None, None),
    "causal": (attention_mask(is_causal=True), COLUMNS <= ROWS),
    "explicit": (attention_mask(explicit_mask=EXPLICIT), in_order(EXPLICIT, B, Q, K)[:, None, None] > 0),
    "array": (EXPLICIT, in_order(EXPLICIT, B, Q, K)[:, None, None] > 0),
    "window": (attention_mask(is_causal=True, sliding_window=4), (COLUMNS <= ROWS) & (COLUMNS > ROWS - 4)),
    "packed": (attention_mask(is_causal=True, segment_ids=PACKED), SAME & (COLUMNS <= ROWS)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask, keep = MASKS[name]
    bias = normal(7, G, H, Q, K)
    options = {"bias": bias, "logits_soft_cap": 5.0, "scaling_factor": 0.2}
    got = levanter.dot_product_attention("position", K, D, QUERY, KEY, VALUE, mask=mask, **options)
    assert got.axes == (B, Q, H, G, D)
    of_bias = in_order(bias, H, G, Q, K)
    want = definition(QUERY, KEY, VALUE, keep=keep, bias=of_bias, cap=5.0, scale=0.2)
    np.testing.assert_allclose(got.array, want, atol=3e-6)


def test_ids_of_square_attention():
    """One array of ids serves queries and keys, along the axis of the queries."""
    pos, key_pos = Axis("position", 12), Axis("key_position", 12)
    query = NamedArray(normal(3, B, K, H, G, D).array, (B, pos, H, G, D))
    ids = NamedArray(jnp.asarray(IDS), (B, pos))
    mask = attention_mask(segment_ids=ids)
    got = levanter.dot_product_attention(pos, key_pos, D, query, KEY, VALUE, mask=mask)
    both = (NamedArray(ids.array, (B, pos)), NamedArray(ids.array, (B, key_pos)))
    mask = attention_mask(segment_ids=both)
    want = levanter.dot_product_attention(pos, key_pos, D, query, KEY, VALUE, mask=mask)
    np.testing.assert_array_equal(got.array, want.array)
    padding = np.asarray(got.array)[1, 10:]
    assert not padding.any()


def test_gradients():
    def loss(query, key, value):
        out = levanter.dot_product_attention(Q, K, D, query, key, value, mask=MASKS["causal"][0])
        return (out.array**2).sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(QUERY, KEY, VALUE)
    for i, (x, gradient) in enumerate(zip((QUERY, KEY, VALUE), found, strict=True)):
        assert gradient.axes == x.axes
        step = np.random.default_rng(i).standard_normal(x.array.shape)
        moved = lambda t, i=i, x=x, step=step: [
            NamedArray(np.asarray(y.array, np.float64) + t * step, y.axes) if j == i else y
            for j, y in enumerate((QUERY, KEY, VALUE))
        ]
        value_at = lambda t, moved=moved: (definition(*moved(t), keep=COLUMNS <= ROWS) ** 2).sum()
        want = (value_at(1e-4) - value_at(-1e-4)) / 2e-4
        np.testing.assert_allclose((np.asarray(gradient.array, np.float64) * step).sum(), want, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dropout": 0.1, "inference": False}, NotImplementedError, "dropout: got 0.1, want 0"),
        ({"KPos": "nowhere"}, ValueError, "KPos: got 'nowhere', want one of the axes kv_heads, batch"),
        ({"QPos": D, "KPos": D}, ValueError, "KPos: got 'head_size', which is QPos"),
        ({"mask": 3}, NotImplementedError, "mask: got int, want a NamedArray or Levanter's AttentionMask"),
        ({"mask": attention_mask(causal_offset=3)}, NotImplementedError, "with a causal_offset"),
        (
            {"bias": normal(1, Axis("layers", 2), Q, K)},
            ValueError,
            "bias: got an axis layers: 2, want axes of batch: 2",
        ),
        ({"value": normal(1, B, H, Axis("key_position", 9), D)}, ValueError, "value: got axes batch: 2"),
    ],
)
def test_bad_calls_are_named(changes, error, message):
    given = {"QPos": Q, "KPos": K, "Key": D, "query": QUERY, "key": KEY, "value": VALUE}
    with pytest.raises(error, match=message):
        levanter.dot_product_attention(**given | changes)


def test_replace_attention():
    module = types.SimpleNamespace(dot_product_attention=len)
    undo = levanter.replace_attention(module)
    assert module.dot_product_attention is levanter.dot_product_attention
    undo()
    assert module.dot_product_attention is len
    with pytest.raises(TypeError, match=r"module: got .*want a module of Levanter"):
        levanter.replace_attention(types.SimpleNamespace())


def test_levanters_own_function_agrees():
    """Needs an installed Levanter that works with this JAX."""
    for package in ("haliax", "levanter"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    import haliax
    from levanter.models.attention import AttentionMask, dot_product_attention

    axes = {axis.name: haliax.Axis(axis.name, axis.size) for axis in (B, H, G, Q, K, D)}
    named = lambda x: haliax.named(x.array, tuple(axes[axis.name] for axis in x.axes))
    arrays = [named(x) for x in (QUERY, KEY, VALUE)]
    of = axes["position"], axes["key_position"], axes["head_size"]
    want = dot_product_attention(*of, *arrays, mask=AttentionMask.causal())
    got = levanter.dot_product_attention(*of, *arrays, mask=AttentionMask.causal())
    np.testing.assert_allclose(got.rearrange(want.axes).array, want.array, atol=1e-5)
