"""The adapter for MaxText, against MaxText's masks in NumPy, and an AttentionOp with its interface."""

import enum
import importlib.util
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.adapters import maxtext

SHAPE = (2, 24, 4, 16)
# The arguments of AttentionOp.apply_attention in maxtext 0.2.5.
ARGUMENTS = (
    *("self", "query", "key", "value", "decoder_segment_ids", "segment_positions", "lengths", "model_mode"),
    *("use_ragged_attention", "previous_chunk", "bidirectional_mask", "sinks", "indexer_mask", "compressed_mask"),
    *("record_max_logits", "decoder_segment_ids_kv", "pad_kv_total", "compress_ratio", "qk_product_einsum"),
    "wv_product_einsum",
)


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], SHAPE)
    key, value = (jax.random.normal(x, (2, 24, 2, 16)) for x in keys[1:])
    ids = np.repeat([[1, 2, 0], [1, 1, 2]], 8, axis=1).astype(np.int32)
    return query, key, value, ids


def definition(query, key, value, ids, kind, *, window=None, chunk=None, cap=None):
    """MaxText's apply_attention_dot: unscaled scores, its mask, and a softmax, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    key, value = (np.repeat(x, query.shape[2] // key.shape[2], 2) for x in (key, value))
    scores = np.einsum("bthd,bshd->bhts", query, key)
    scores = cap * np.tanh(scores / cap) if cap else scores
    rows, columns = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])
    keep = np.ones_like(scores[:, :1], bool)
    keep = keep & (columns <= rows) if kind != "full" else keep
    keep = keep & (columns > rows - window) if window else keep
    keep = keep & (rows // chunk == columns // chunk) if chunk else keep
    if ids is not None:
        keep = keep & ((ids[:, :, None] == ids[:, None]) & (ids[:, None] >= 0))[:, None]
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * keep
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("bhts,bshd->bthd", weights, value)


CASES = {
    "global": {},
    "full": {"cap": 5.0},
    "mla": {},
    "local_sliding": {"window": 5},
    "chunk": {"chunk": 7},
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", CASES)
def test_masks_are_maxtexts(kind, packed):
    query, key, value, ids = arrays()
    ids = ids if packed else None
    options = CASES[kind]
    given = {
        "sliding_window_size": options.get("window"),
        "chunk_attn_window_size": options.get("chunk"),
        "attn_logits_soft_cap": options.get("cap"),
    }
    got = maxtext.attention(query, key, value, ids, attention_type=kind, **given)
    np.testing.assert_allclose(got, definition(query, key, value, ids, kind, **options), atol=2e-6)


def test_padding_sees_nothing():
    query, key, value, ids = arrays()
    ids = np.where(ids == 0, -1, ids)
    for kind, options in (("global", {}), ("chunk", {"chunk_attn_window_size": 7})):
        got = maxtext.attention(query, key, value, ids, attention_type=kind, **options)
        assert not np.asarray(got)[0, 16:].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_type": "globl"}, "attention_type: got 'globl', want one of .*; did you mean 'global'"),
        ({"attention_type": "local_sliding"}, "sliding_window_size: got None with attention_type='local_sliding'"),
        ({"attention_type": "chunk", "chunk_attn_window_size": 0}, "chunk_attn_window_size: got 0 with"),
    ],
)
def test_bad_options_are_named(options, message):
    query, key, value, ids = arrays()
    with pytest.raises(ValueError, match=message):
        maxtext.attention(query, key, value, ids, **options)


class AttentionType(enum.Enum):
    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    BLOCK_DIFFUSION = "block_diffusion"


class AttentionOp:
    """MaxText's class with the interface of 0.2.5, whose own attention returns the reason for its call."""

    attention_type = AttentionType.LOCAL_SLIDING
    sliding_window_size, chunk_attn_window_size, attn_logits_soft_cap = 5, None, 0.0
    config = types.SimpleNamespace(moba=False)
    parallel = 1

    def _context_parallel_size(self):
        return self.parallel

    def apply_attention(
        self, query, key, value, decoder_segment_ids, segment_positions, lengths, model_mode,
        use_ragged_attention=False, previous_chunk=None, bidirectional_mask=None, sinks=None, indexer_mask=None,
        compressed_mask=None, record_max_logits=False, decoder_segment_ids_kv=None, pad_kv_total=0, compress_ratio=0,
        *, qk_product_einsum, wv_product_einsum,
    ):  # fmt: skip
        return "maxtext", sinks, model_mode


@pytest.fixture
def op():
    undo = maxtext.replace_attention(AttentionOp)
    yield AttentionOp()
    undo()
    assert AttentionOp().apply_attention(*[None] * 7, qk_product_einsum=None, wv_product_einsum=None)[0] == "maxtext"


def call(op, model_mode="train", **others):
    query, key, value, ids = arrays()
    einsums = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}
    return op.apply_attention(query, key, value, ids, None, None, model_mode, **einsums, **others)


def test_training_and_prefill_are_replaced(op):
    query, key, value, ids = arrays()
    for mode in ("train", "prefill"):
        out, *rest = call(op, mode, bidirectional_mask=None, sinks=None)
        assert rest == [None, None]
        np.testing.assert_allclose(out, definition(query, key, value, ids, "local_sliding", window=5), atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({}, {"model_mode": "autoregressive"}),
        ({}, {"record_max_logits": True}),
        ({}, {"indexer_mask": jnp.ones(3)}),
        ({}, {"use_ragged_attention": True}),
        ({}, {"decoder_segment_ids_kv": jnp.ones(3)}),
        ({"attention_type": AttentionType.BLOCK_DIFFUSION}, {}),
        ({"parallel": 2}, {}),
        ({"config": types.SimpleNamespace(moba=True)}, {}),
    ],
)
def test_other_calls_run_maxtexts_attention(op, monkeypatch, changes, others):
    for name, value in changes.items():
        monkeypatch.setattr(op, name, value, raising=False)
    assert call(op, sinks="sinks", **others)[:2] == ("maxtext", "sinks")


def test_another_class_is_named():
    with pytest.raises(TypeError, match=r"attention_op: got .*want MaxText's class AttentionOp"):
        maxtext.replace_attention(object)


def test_the_interface_is_maxtexts():
    """The installed MaxText has it, too, if there is one; its package has 200 dependencies, and is in no extra."""
    assert tuple(inspect.signature(AttentionOp.apply_attention).parameters) == ARGUMENTS
    if importlib.util.find_spec("maxtext") is None:
        pytest.skip("the package maxtext is not installed")
    from maxtext.layers.attention_op import AttentionOp as Installed

    assert tuple(inspect.signature(Installed.apply_attention).parameters) == ARGUMENTS
