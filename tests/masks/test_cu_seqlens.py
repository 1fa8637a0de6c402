"""segment_ids_from_cu_seqlens: packed documents, in JAX and in the bridge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import bridge, flash_attention, masks
from jax_kernels.bridge import masks as bridge_masks
from jax_kernels.testing import rms_error

ENDS = np.asarray([0, 5, 5, 12, 20], np.int32)
IDS = [0] * 5 + [2] * 7 + [3] * 8 + [-1] * 4


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_ids(dtype):
    ends = ENDS.astype(dtype)
    for got in (
        masks.segment_ids_from_cu_seqlens(ends, 24),
        masks.segment_ids_from_cu_seqlens(jnp.asarray(ENDS), 24),
        jax.jit(masks.segment_ids_from_cu_seqlens, static_argnums=1)(jnp.asarray(ENDS), 24),
        bridge_masks.segment_ids_from_cu_seqlens(torch.tensor(ends), 24),
        bridge_masks.segment_ids_from_cu_seqlens(torch.tensor(ends), torch.tensor(24)),
    ):
        assert str(got.dtype).endswith("int32")
        np.testing.assert_array_equal(got, [IDS])
    assert not (np.asarray(masks.segment_ids_from_cu_seqlens(np.zeros(1, np.int32), 3)) + 1).any()


def test_packed_documents_equal_documents():
    """Queries and keys with lengths of their own, with gradients; the values of cu_seqlens are traced."""
    random = np.random.default_rng(0)
    q_ends, kv_ends = jnp.asarray([0, 3, 9, 9, 14]), jnp.asarray([0, 6, 7, 11, 20])
    query, key, value = (jnp.asarray(random.standard_normal((1, n, 2, 8)), jnp.float32) for n in (16, 24, 24))

    @jax.jit
    def packed(q_ends, kv_ends, *qkv):
        ids = tuple(masks.segment_ids_from_cu_seqlens(x, n) for x, n in ((q_ends, 16), (kv_ends, 24)))
        loss = lambda *qkv: (flash_attention(*qkv, segment_ids=ids) ** 2).sum()
        return flash_attention(*qkv, segment_ids=ids), jax.grad(loss, (0, 1, 2))(*qkv)

    def documents(query, key, value):
        found = []
        for i in range(4):
            rows, keys = slice(int(q_ends[i]), int(q_ends[i + 1])), slice(int(kv_ends[i]), int(kv_ends[i + 1]))
            found.append(flash_attention(query[:, rows], key[:, keys], value[:, keys]))
        return jnp.concatenate([*found, jnp.zeros((1, 2, 2, 8))], axis=1)

    out, gradients = packed(q_ends, kv_ends, query, key, value)
    assert rms_error(out, documents(query, key, value)) < 1e-6
    want = jax.grad(lambda *qkv: (documents(*qkv) ** 2).sum(), (0, 1, 2))(query, key, value)
    for got, expected in zip(gradients, want, strict=True):
        assert rms_error(got, expected) < 1e-6


def test_bridge_equals_jax():
    ids = bridge_masks.segment_ids_from_cu_seqlens(torch.tensor(ENDS), 24)
    x = torch.randn(1, 24, 2, 8)
    got = bridge.flash_attention(x, x, x, segment_ids=ids, is_causal=True)
    given = jnp.asarray(x.numpy())
    want = flash_attention(given, given, given, segment_ids=masks.segment_ids_from_cu_seqlens(ENDS, 24), is_causal=True)
    np.testing.assert_allclose(got, want, atol=2e-6)
    compiled = torch.compile(bridge_masks.segment_ids_from_cu_seqlens, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.tensor(ENDS), 24), ids)


@pytest.mark.parametrize(
    ("ends", "length", "kind", "message"),
    [
        (np.asarray([0, 5, 3], np.int32), 8, ValueError, "^cu_seqlens: got 5 before 3, want ascending"),
        (np.asarray([1, 5], np.int32), 8, ValueError, "^cu_seqlens: got 1 as its first entry, want 0"),
        (
            np.asarray([0, 9], np.int32),
            8,
            ValueError,
            "^cu_seqlens: got 9 as its last entry, want at most the 8 tokens",
        ),
        (np.zeros(0, np.int32), 8, ValueError, r"^cu_seqlens: got shape \[0\], want int32 .documents \+ 1."),
        (np.zeros((1, 2), np.int32), 8, ValueError, r"^cu_seqlens: got shape \[1, 2\]"),
        (np.zeros(2, np.float32), 8, TypeError, "^cu_seqlens: got dtype"),
        (np.zeros(2, np.int32), 8.0, TypeError, "^length: got 8.0"),
    ],
)
def test_errors(ends, length, kind, message):
    with pytest.raises(kind, match=message):
        masks.segment_ids_from_cu_seqlens(ends, length)
    if isinstance(length, int):
        with pytest.raises(kind, match=message):
            bridge_masks.segment_ids_from_cu_seqlens(torch.tensor(ends), length)
