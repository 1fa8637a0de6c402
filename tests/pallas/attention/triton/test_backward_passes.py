"""The kernels of the Triton backward, interpreted on the CPU: dvalue by a kernel of its own, delta by the dq kernel."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention, masks, prepare_mask
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.ops.attention import implementations
from jax_kernels.pallas.attention.triton.backward import attention_backward
from jax_kernels.pallas.attention.triton.common import listed_blocks
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton, AttentionForwardTriton
from jax_kernels.reference import attention as reference
from jax_kernels.reference import chunked_attention

pytestmark = pytest.mark.timeout(120)
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

ONE = AttentionBackwardTriton(32, 32, 64, 32, 4, 2)
VARIANTS = {
    "delta in dq": dataclasses.replace(ONE, delta_in_dq=True),
    "dvalue alone": dataclasses.replace(ONE, block_q_dv=64),
    "both": dataclasses.replace(ONE, block_q_dv=16, delta_in_dq=True),
}
B, T, S, H, KV_HEADS, D, DV = 2, 70, 75, 4, 2, 32, 16
RANDOM = np.random.default_rng(0)
IDS = tuple(np.sort(RANDOM.integers(-1, 3, (B, n)), axis=1).astype(np.int32) for n in (T, S))
MASKS: dict[str, Any] = {
    "none": None,
    "lists": masks.causal() & masks.segments(*IDS) & ~masks.prefix(5),
    "words": masks.dense((RANDOM.random((1, H, T, S)) < 0.3) & (np.arange(T)[:, None] > 3)),
}


@pytest.fixture(autouse=True)
def _interpret(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")


def normal(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def close(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(np.asarray(x) - np.asarray(y)).max() < 3e-5


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mask", MASKS)
def test_variants_match_the_reference(mask, variant):
    """With cotangents of out and lse, and queries without keys."""
    inputs = AttentionInputs(
        normal(B, T, H, D, seed=0), normal(B, S, KV_HEADS, D, seed=1), normal(B, S, KV_HEADS, DV, seed=2)
    )
    ids = (jnp.asarray(IDS[0]), jnp.asarray(IDS[1])) if mask == "none" else (None, None)
    inputs = inputs._replace(mask=MASKS[mask], q_segment_ids=ids[0], kv_segment_ids=ids[1])
    options, config = AttentionOptions(0.2, is_causal=mask == "none", precision="fp32"), VARIANTS[variant]
    dout, dlse = normal(B, T, H, DV, seed=3), normal(B, H, T, seed=4)
    out, lse = chunked_attention.forward(inputs, options, out_dtype=jnp.float32)
    assert jnp.isneginf(lse).any()
    lse_of_row, delta = reference.row_terms(out, lse, dout, dlse)
    given = {"out": out, "dlse": dlse} if config.delta_in_dq else {}
    rows = (lse, None, dout) if config.delta_in_dq else (lse_of_row, delta, dout)
    got = jit(functools.partial(attention_backward, options=options, config=config, core_count=1, interpret=True))(
        inputs, lse=rows[0], delta=rows[1], dout=rows[2], **given
    )
    close(got[:3], chunked_attention.backward(inputs, options, lse_of_row, delta, dout)[:3])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("feature", ["bias", "score_mod", "sinks"])
def test_variants_in_the_op(feature, variant, monkeypatch):
    """The gradients of a bias and of a score_mod's array, and of sinks, whose gradient needs delta outside."""
    row = implementations._row
    blocks = {"forward": AttentionForwardTriton(64, 32, 4, 2), "backward": VARIANTS[variant]}
    named = lambda name, request: (dataclasses.replace(row(name, request)[0], **blocks), "the test")
    monkeypatch.setattr(implementations, "_row", named)
    arrays = normal(B, T, H, D, seed=0), normal(B, S, KV_HEADS, D, seed=1), normal(B, S, KV_HEADS, DV, seed=2)
    extra = {"bias": normal(1, H, T, S, seed=5), "score_mod": normal(H, seed=6), "sinks": normal(H, seed=7)}[feature]

    def loss(implementation, arrays, extra):
        given: Any = (lambda s, b, h, q, k: s + extra[h] * (k - q) * 0.1) if feature == "score_mod" else extra
        out, lse = flash_attention(
            *arrays, **{feature: given}, is_causal=True, return_lse=True, implementation=implementation
        )
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum() + lse.sum()

    found = [jit(jax.grad(functools.partial(loss, name), argnums=(0, 1)))(arrays, extra) for name in ("triton", "xla")]
    for x, y in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.linalg.norm(x - y) < 1e-4 * np.linalg.norm(y)


def test_each_kernel_has_its_lists():
    inputs = AttentionInputs(*(jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.float32) for _ in range(3)))
    blocks = listed_blocks(inputs, AttentionForwardTriton(64, 32, 4, 2), VARIANTS["both"])
    assert blocks == [((64, 32), "query"), ((32, 32), "key"), ((64, 32), "query"), ((16, 32), "key")]


def test_prepared_masks_serve_a_kernel_for_dvalue(monkeypatch):
    row = implementations._row
    named = lambda name, request: (dataclasses.replace(row(name, request)[0], backward=VARIANTS["both"]), "the test")
    monkeypatch.setattr(implementations, "_row", named)
    arrays = [normal(1, 64, 2, 32, seed=i) for i in range(3)]
    mask = masks.dense(RANDOM.random((1, 1, 64, 64)) < 0.4)
    prepared = prepare_mask(mask, *arrays, implementation="triton")
    built: list[Any] = []
    from jax_kernels.pallas.attention.triton import block_lists

    monkeypatch.setattr(block_lists, "_built", lambda *args, **named: built.append(args))
    grad = lambda mask, name: jax.grad(lambda *qkv: flash_attention(*qkv, mask=mask, implementation=name).sum(), (0, 2))
    got = grad(prepared, "triton")(*arrays)
    assert not built  # no kernel makes its lists again
    close(got, grad(mask, "xla")(*arrays))
