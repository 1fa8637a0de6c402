"""Forward mode and second derivatives of every op by "xla", against JAX's derivatives of plain code in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import (
    block_sparse_attention,
    dilated_attention,
    dynamic_mask_attention,
    flash_attention,
    gated_matmul,
    grouped_gated_matmul,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    masks,
    matmul,
    mlp,
    quantize,
    rms_norm,
)
from jax_kernels.models.training.losses import linear_cross_entropy as model_losses
from jax_kernels.quantization import dequantize
from tests.support.cases import tiers

RANDOM = np.random.default_rng(0)
TARGETS = np.array([3, -1, 0, 7, 2])
TOKENS = np.arange(8)


def _normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


X, W, BIAS, RESIDUAL, DOWN = _normal(5, 16), _normal(16, 8), _normal(8), _normal(5, 8), _normal(8, 16)
QKV = tuple(_normal(2, 8, 2, 4) for _ in range(3))
OF_KEYS = _normal(1, 2, 1, 8)
WEIGHTS = quantize(W, "int4", axis=-2, group_size=32)


def _attention(query, key, value, keep, bias=0.0, sinks=None, softcap=None, modify=lambda scores: scores):
    """(out, lse) in the inputs' precision. Rows without a key have out 0, and here lse 0."""
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / 2
    scores = modify(scores if softcap is None else softcap * jnp.tanh(scores / softcap)) + bias
    scores = jnp.where(keep, scores, -jnp.inf)
    dead = ~jnp.any(jnp.isfinite(scores), axis=-1, keepdims=True)
    p = jnp.where(jnp.isfinite(scores), jnp.exp(jnp.where(jnp.isfinite(scores), scores, 0)), 0)
    total = p.sum(-1, keepdims=True) + (0 if sinks is None else jnp.exp(sinks)[:, None, None])
    total = jnp.where(dead & (total == 0), 1, total)
    return jnp.einsum("bhts,bshd->bthd", p / total, value), jnp.log(total)[..., 0]


def _both(result):
    """out and lse as one array. Rows without a key count lse as 0."""
    out, lse = result
    return out + jnp.where(jnp.isneginf(lse), 0, lse).swapaxes(1, 2)[..., None]


def _norm(x, scale, bias=0.0, mean=0.0):
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def _losses(x, w):
    logits = x @ w
    chosen = jnp.take_along_axis(logits, np.maximum(TARGETS, 0)[:, None], -1)[:, 0]
    return jnp.where(TARGETS >= 0, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)


CAUSAL = TOKENS[:, None] >= TOKENS
BEHIND = TOKENS[:, None] > TOKENS  # the first query has no key
LOWER_BLOCKS = np.kron(np.tril(np.ones((2, 2), bool)), np.ones((4, 4), bool))
GROUP, GROUP_EXISTS = np.array([0, 0, 2, 2, 2]), np.array([1, 1, 1, 0, 0])[:, None]
silu, gelu = jax.nn.silu, lambda x: jax.nn.gelu(x, approximate=False)
# The op, the same function in plain jnp, and the arrays.
CASES = {
    "matmul": (
        lambda x, w, bias, residual: matmul(x, w, bias=bias, activation="gelu", residual=residual),
        lambda x, w, bias, residual: gelu(x @ w + bias) + residual,
        (X, W, BIAS, RESIDUAL),
    ),
    "transposed": (lambda x, w: matmul(x, w, transpose_w=True), lambda x, w: x @ w.T, (X, W.T)),
    "gated_matmul": (
        lambda x, gate, up: gated_matmul(x, gate, up),
        lambda x, gate, up: silu(x @ gate) * (x @ up),
        (X, W, DOWN.T),
    ),
    "mlp": (
        lambda x, up, down, gate: mlp(x, up, down, w_gate=gate, activation="silu"),
        lambda x, up, down, gate: (silu(x @ gate) * (x @ up)) @ down,
        (X, W, DOWN, W[::-1]),
    ),
    "grouped_matmul": (
        lambda x, w, bias: grouped_matmul(x, w, np.array([2, 0, 1], np.int32), bias=bias, activation="silu"),
        lambda x, w, bias: GROUP_EXISTS * silu(jnp.einsum("mk,mkn->mn", x, w[GROUP]) + bias[GROUP]),
        (X, np.stack([W, DOWN.T, W[::-1]]), np.stack([BIAS, BIAS[::-1], 2 * BIAS])),
    ),
    "grouped_gated_matmul": (
        lambda x, gate, up: grouped_gated_matmul(x, gate, up, np.array([2, 0, 1], np.int32)),
        lambda x, gate, up: (
            GROUP_EXISTS * silu(jnp.einsum("mk,mkn->mn", x, gate[GROUP])) * jnp.einsum("mk,mkn->mn", x, up[GROUP])
        ),
        (X, np.stack([W, DOWN.T, W[::-1]]), np.stack([DOWN.T, W, W])),
    ),
    "low_bit": (
        lambda x, bias: matmul(x, WEIGHTS, bias=bias, activation="silu"),
        lambda x, bias: silu(x @ dequantize(WEIGHTS) + bias),
        (X, BIAS),
    ),
    "layer_norm": (
        lambda x, scale, bias: layer_norm(x, scale, bias, eps=1e-5),
        lambda x, scale, bias: _norm(x, scale, bias, x.mean(-1, keepdims=True)),
        (X, X[0], X[1]),
    ),
    "rms_norm": (
        lambda x, scale, residual: sum(rms_norm(x, scale, residual=residual, eps=1e-5)),
        lambda x, scale, residual: _norm(x + residual, scale) + x + residual,
        (X, X[0], X[::-1]),
    ),
    "linear_cross_entropy": (
        lambda x, w: linear_cross_entropy(x, w, TARGETS, reduction="sum"),
        lambda x, w: _losses(x, w).sum(),
        (X, W),
    ),
    "losses": (lambda x, w: model_losses(x, w, TARGETS, chunk=3), _losses, (X, W)),
    "flash_attention": (
        lambda q, k, v, bias: _both(flash_attention(q, k, v, bias=bias, is_causal=True, q_offset=-1, return_lse=True)),
        lambda q, k, v, bias: _both(_attention(q, k, v, BEHIND, bias)),
        (*QKV, OF_KEYS),
    ),
    "sinks": (
        lambda q, k, v, sinks: flash_attention(q, k, v, sinks=sinks, softcap=2.0, kv_lengths=np.array([5, 0])),
        lambda q, k, v, sinks: _attention(q, k, v, np.array([5, 0])[:, None, None, None] > TOKENS, 0, sinks, 2.0)[0],
        (*QKV, np.array([0.5, -1], np.float32)),
    ),
    "score_mod": (
        lambda q, k, v, by: flash_attention(
            q, k, v, score_mod=lambda score, b, h, i, j: score * by[h] + 0.1 * (i - j), mask=masks.causal()
        ),
        lambda q, k, v, by: _attention(
            q, k, v, CAUSAL, modify=lambda scores: scores * by[:, None, None] + 0.1 * (TOKENS[:, None] - TOKENS)
        )[0],
        (*QKV, np.array([0.5, -1], np.float32)),
    ),
    "block_sparse": (
        lambda q, k, v: block_sparse_attention(q, k, v, np.tril(np.ones((2, 2), bool)), block_size=4),
        lambda q, k, v: _attention(q, k, v, LOWER_BLOCKS)[0],
        QKV,
    ),
    "dynamic_mask": (
        lambda q, k, v, bias: dynamic_mask_attention(q, k, v, CAUSAL[None, None], bias),
        lambda q, k, v, bias: _attention(q, k, v, CAUSAL, bias)[0],
        (*QKV, OF_KEYS),
    ),
    "dilated": (
        lambda q, k, v: dilated_attention(
            q, k, v, segment_lengths=[4, 8], dilation_rates=[1, 1], is_causal=True, combine="mean"
        ),
        lambda q, k, v: sum(_attention(q, k, v, keep)[0] for keep in (CAUSAL & LOWER_BLOCKS.T, CAUSAL)) / 2,
        QKV,
    ),
}  # fmt: skip


def derivatives(function, arrays, directions):
    """The value, the first derivative along the directions, and the second derivative in three ways."""
    loss = lambda arrays: jnp.sin(function(*arrays)).sum()
    along = lambda slopes: sum((x * y).sum() for x, y in zip(slopes, directions, strict=True))

    def run(arrays):
        out, tangent = jax.jvp(function, arrays, directions)
        forward_of_reverse = jax.jvp(jax.grad(loss), (arrays,), (directions,))
        reverse_of_forward = jax.grad(lambda arrays: jax.jvp(loss, (arrays,), (directions,))[1])(arrays)
        reverse_of_reverse = jax.grad(lambda arrays: along(jax.grad(loss)(arrays)))(arrays)
        return out, tangent, forward_of_reverse, reverse_of_forward, reverse_of_reverse

    return jax.jit(run)(arrays)


@pytest.mark.parametrize(
    "name", tiers.cases(CASES, ["matmul", "mlp", "rms_norm", "losses", "flash_attention", "score_mod", "dilated"])
)
def test_against_float64(name):
    op, definition, arrays = CASES[name]
    directions = tuple(np.random.default_rng(1).standard_normal(x.shape).astype(np.float32) for x in arrays)
    got = derivatives(op, arrays, directions)
    with jax.enable_x64(True):
        want = derivatives(definition, *(tuple(x.astype(np.float64) for x in given) for given in (arrays, directions)))
    for x, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert right.dtype == jnp.float64
        np.testing.assert_allclose(x, right, rtol=1e-3, atol=2e-5 * (1 + np.abs(right).max()))


def test_transforms():
    """jacfwd, hessian, linearize, vmap on either side, a scan, jax.checkpoint and a shard_map."""
    query, key, value = map(jnp.asarray, QKV)
    call = lambda x: flash_attention(x, key, value, is_causal=True)
    plain = lambda x: _attention(x, key, value, CAUSAL)[0]
    of_one = lambda f: lambda x: f(query.at[0, 3, 0].set(x))[0, 3, 0]
    many, directions = jnp.stack([query, key]), jnp.stack([value, query])
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.P("data")
    shared = lambda f: jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    ways = {
        "jacfwd": lambda f: jax.jacfwd(of_one(f))(query[0, 3, 0]),
        "hessian": lambda f: jax.hessian(lambda x: of_one(f)(x).sum())(query[0, 3, 0]),
        "linearize": lambda f: jax.linearize(jax.jit(f), query)[1](value),
        "vmap of jvp": lambda f: jax.vmap(lambda x, t: jax.jvp(f, (x,), (t,)))(many, directions),
        "jvp of vmap": lambda f: jax.jvp(jax.vmap(f), (many,), (directions,)),
        "checkpoint": lambda f: jax.jvp(jax.grad(lambda x: jax.checkpoint(f)(x).sum()), (query,), (value,)),
        "scan": lambda f: jax.jvp(
            lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0], (query,), (value,)
        ),
        "shard_map": lambda f: jax.jvp(jax.grad(lambda x: jnp.sin(shared(f)(x)).sum()), (query,), (value,)),
    }
    for name, way in ways.items():
        got, want = (jax.jit(way, static_argnums=0)(f) for f in (call, plain))
        for x, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, right, rtol=1e-3, atol=1e-5, err_msg=name)


def test_fp8_tangents():
    """Rounding counts as the identity: matmuls of the tangents with the dequantized values."""
    tangents = _normal(5, 16), _normal(16, 8)
    _, got = jax.jvp(lambda x, w: matmul(x, w, precision="fp8"), (X, W), tangents)
    x, w = (np.float64(dequantize(quantize(y, scaling="tensor"))) for y in (X, W))
    np.testing.assert_allclose(got, tangents[0] @ w + x @ tangents[1], rtol=1e-5, atol=1e-5)
    loss = lambda arrays: (matmul(*arrays, precision="fp8") ** 2).sum() / 2
    (dx, dw) = jax.jvp(jax.grad(loss), ((X, W),), (tangents,))[1]
    out = x @ w
    want = got @ w.T + out @ tangents[1].T, x.T @ got + tangents[0].T @ out
    for slope, right in zip((dx, dw), want, strict=True):
        np.testing.assert_allclose(slope, right, rtol=1e-4, atol=1e-4)


def test_fully_masked_row_has_zero_tangents():
    call = lambda q, k, v: flash_attention(q, k, v, mask=np.zeros((1, 1, 8, 8), bool), return_lse=True)
    (out, lse), (dout, dlse) = jax.jvp(call, QKV, QKV)
    assert np.isneginf(lse).all()
    for x in (out, dout, dlse):
        assert not x.any()
