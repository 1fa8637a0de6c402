"""Calls of the public functions, for type checkers. Each assert_type is a type that users rely on.

test_public_surface.py runs pyright on this file. mypy takes it too. Nothing here runs.
"""

# The rules that are off report the parts of JAX's own types that pyright does not know, such as jax.Device.
# pyright: strict, reportUnknownMemberType=false, reportUnknownLambdaType=false

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float8e4m3fn, Int32

import jax_kernels
from jax_kernels import masks

type Query = Float[Array, "B T H D"]
type Key = Float[Array, "B S Hkv D"]
type Value = Float[Array, "B S Hkv Dv"]
type OutAndLse = tuple[jax.Array, jax.Array]


def score_mod(score: jax.Array, b: jax.Array, h: jax.Array, q_idx: jax.Array, kv_idx: jax.Array) -> jax.Array:
    return score - 0.1 * (h + 1) * jnp.abs(q_idx - kv_idx)


def flash_attention(
    query: Query,
    key: Key,
    value: Value,
    ids: Int32[Array, "B T"],
    mask: Bool[Array, "B 1 T S"],
    bias: Float[Array, "1 H T S"],
    sinks: Float[Array, " H"],
    return_lse: bool,
) -> None:
    assert_type(jax_kernels.flash_attention(query, key, value), jax.Array)
    assert_type(jax_kernels.flash_attention(query, key, value, is_causal=True, window=(128, -1)), jax.Array)
    assert_type(jax_kernels.flash_attention(query, key, value, mask=mask, bias=bias, sinks=sinks), jax.Array)
    assert_type(jax_kernels.flash_attention(query, key, value, mask=masks.causal(), segment_ids=ids), jax.Array)
    assert_type(jax_kernels.flash_attention(query, key, value, segment_ids=(ids, ids)), jax.Array)
    assert_type(jax_kernels.flash_attention(query, key, value, score_mod=score_mod, softcap=None), jax.Array)
    assert_type(jax_kernels.flash_attention(query, key, value, return_lse=True), OutAndLse)
    assert_type(jax_kernels.flash_attention(query, key, value, return_lse=return_lse), jax.Array | OutAndLse)


def other_attentions(query: Query, key: Key, value: Value, tables: Int32[Array, "B pages"]) -> None:
    assert_type(jax_kernels.dynamic_mask_attention(query, key, value, masks.causal(), q_offset=4), jax.Array)
    assert_type(jax_kernels.dynamic_mask_attention(query, key, value, masks.causal(), return_lse=True), OutAndLse)
    blocks = jnp.ones((4, 4), bool)
    assert_type(jax_kernels.block_sparse_attention(query, key, value, blocks, block_size=128), jax.Array)
    assert_type(jax_kernels.block_sparse_attention(query, key, value, blocks, return_lse=True, scale=0.5), OutAndLse)
    lengths = jnp.full((2,), 7)
    assert_type(jax_kernels.decode_attention(query, key, value, kv_lengths=lengths, block_tables=tables), jax.Array)
    assert_type(jax_kernels.decode_attention(query, key, value, return_lse=True), OutAndLse)
    dilated = jax_kernels.dilated_attention(query, key, value, segment_lengths=(64, 128), dilation_rates=(1, 2))
    assert_type(dilated, jax.Array)
    prepared = jax_kernels.prepare_mask(masks.causal(), query, key, value)
    assert_type(jax_kernels.flash_attention(query, key, value, mask=prepared), jax.Array)
    compiled = jax_kernels.compile_attention("causal", 128, 64)
    assert_type(compiled(query, key, value), jax.Array)
    assert_type(jax_kernels.explain(jax_kernels.flash_attention, query, key, value).implementation, str)


def attention_of_8_bits(query: Query, key: Float8e4m3fn[Array, "B S Hkv D"]) -> None:
    values, scale = jax_kernels.quantize_fp8(query, axis=(1, 3))
    assert_type(jax_kernels.flash_attention_fp8(values, key, key, q_scale=scale, k_scale=1.0), jax.Array)
    assert_type(jax_kernels.flash_attention_fp8(values, key, key, return_lse=True), OutAndLse)


def sharded_attentions(query: Query, key: Key, value: Value, mesh: Mesh) -> None:
    placed = jax_kernels.shard_sequence({"query": query}, mesh, "sp")
    assert_type(placed, dict[str, jax.Array])
    assert_type(jax_kernels.unshard_sequence(query, mesh, "sp", layout="striped"), jax.Array)
    assert_type(jax_kernels.ring_attention(query, key, value, axis_name="sp", is_causal=True), jax.Array)
    assert_type(jax_kernels.ring_attention(query, key, value, axis_name="sp", return_lse=True), OutAndLse)
    result = jax_kernels.sequence_parallel_dilated_attention(
        query, key, value, axis_name="sp", segment_lengths=(64,), dilation_rates=(1,), return_lse=True
    )
    assert_type(result, OutAndLse)


def matmuls(x: Float[Array, "B T K"], w: Float[Array, "K N"], bias: Float[Array, " N"]) -> None:
    assert_type(jax_kernels.matmul(x, w, bias=bias, activation="gelu", out_dtype=jnp.float32), jax.Array)
    assert_type(jax_kernels.matmul(x, w, activation=jax.nn.silu, out_dtype="bfloat16"), jax.Array)
    assert_type(jax_kernels.matmul(x, jax_kernels.quantize(w, "int4"), precision=None), jax.Array)
    assert_type(jax_kernels.gated_matmul(x, w, w), jax.Array)
    weights = jnp.stack([w] * 2)
    assert_type(jax_kernels.grouped_gated_matmul(x[0], weights, weights, jnp.ones(2, int)), jax.Array)
    assert_type(jax_kernels.grouped_matmul(x[0], weights, jnp.ones(2, int), activation="silu"), jax.Array)
    assert_type(jax_kernels.mlp(x, w, w, w_gate=w), jax.Array)
    assert_type(jax_kernels.linear_cross_entropy(x, w, jnp.zeros(x.shape[:2], int), reduction="mean"), jax.Array)
    assert_type(jax_kernels.dequantize(jax_kernels.quantize(x)), jax.Array)


def norms(x: Float[Array, "B T N"], scale: Float[Array, " N"], quantize: str | None) -> None:
    assert_type(jax_kernels.layer_norm(x, scale, scale, eps=1e-5), jax.Array)
    assert_type(jax_kernels.rms_norm(x, scale), jax.Array)
    assert_type(jax_kernels.rms_norm(x, scale, residual=x), tuple[jax.Array, jax.Array])
    assert_type(jax_kernels.rms_norm(x, scale, quantize="e4m3"), jax_kernels.QuantizedArray)
    quantized, total = jax_kernels.layer_norm(x, scale, residual=x, quantize="e4m3")
    assert_type(quantized, jax_kernels.QuantizedArray)
    assert_type(total, jax.Array)
    out = jax_kernels.rms_norm(x, quantize=quantize)
    assert not isinstance(out, tuple)
    assert_type(out, jax.Array | jax_kernels.QuantizedArray)


def orders(x: Float[Array, "n D"]) -> None:
    order = jax_kernels.hilbert_order(x.shape[0])
    assert_type(jax_kernels.invert_order(order), np.ndarray)
    assert_type(x[order], jax.Array)


def compilation(lowered: jax.stages.Lowered, mesh: Mesh) -> None:
    assert_type(jax_kernels.compile_kernels(lowered, wait=False), int)
    jax.jit(lambda x: x, compiler_options=jax_kernels.compiler_options(mesh))
    assert_type(jax_kernels.device_info("h200"), jax_kernels.DeviceInfo)
