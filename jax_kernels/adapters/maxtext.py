"""Attention for MaxText: flash_attention instead of AttentionOp.apply_attention.

Before MaxText builds its model::

    from jax_kernels.adapters import maxtext
    from maxtext.layers.attention_op import AttentionOp

    maxtext.replace_attention(AttentionOp)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.spelling import did_you_mean

__all__ = ["attention", "replace_attention"]

_TYPES = ("global", "full", "mla", "local_sliding", "chunk")
_MODES = ("train", "prefill")
# The arguments of apply_attention with which this library computes nothing, and MaxText's own attention runs.
_OTHERS = ("previous_chunk", "bidirectional_mask", "indexer_mask", "compressed_mask")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decoder_segment_ids: jax.Array | None = None,
    *,
    attention_type: str = "global",
    sliding_window_size: int | None = None,
    chunk_attn_window_size: int | None = None,
    attn_logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """MaxText's attention in training: its masks, and scores without a scale, since MaxText scales the query.

    Equivalent to the following JAX code::

        rows, columns = arange(T)[:, None], arange(T)
        keep = rows >= columns                                            # except with "full"
        keep = keep & (rows - columns < sliding_window_size)              # with "local_sliding"
        keep = keep & (rows // chunk == columns // chunk)                 # with "chunk"
        keep = keep & (ids[:, :, None] == ids[:, None]) & (ids >= 0)      # packed documents

    Args:
      query: [B, T, H, D]. key: [B, T, Hkv, D]. value: [B, T, Hkv, Dv]. As flash_attention takes them.
      decoder_segment_ids: integers [B, T], the document of each token; None for one document. A token with an id below
        0 is padding; MaxText pads with 0, whose tokens see each other.
      attention_type: the value of MaxText's AttentionType: "global", "mla", "local_sliding", "chunk" or "full".
      sliding_window_size: the number of tokens that a token sees, with itself, with "local_sliding".
      chunk_attn_window_size: the length of a chunk, with "chunk".
      attn_logits_soft_cap: softcap of flash_attention; 0 counts as None. sinks, implementation: as in flash_attention.

    Returns:
      [B, T, H, Dv], in query's dtype.

    Raises:
      ValueError: attention_type is unknown, or its size is missing or below 1; TypeError, ValueError and
        NotImplementedError of flash_attention.
    """
    if attention_type not in _TYPES:
        want = f"want one of {', '.join(_TYPES)}{did_you_mean(attention_type, _TYPES)}"
        raise ValueError(f"attention_type: got {attention_type!r}, {want}")
    window, ids = None, decoder_segment_ids
    if attention_type == "local_sliding":
        window = (_size("sliding_window_size", sliding_window_size, attention_type) - 1, 0)
    if attention_type == "chunk":
        size = _size("chunk_attn_window_size", chunk_attn_window_size, attention_type)
        ids = _of_chunks(query, ids, size)
    return flash_attention(
        query,
        key,
        value,
        is_causal=attention_type != "full",
        window=window,
        segment_ids=ids,
        softcap=attn_logits_soft_cap or None,
        sinks=sinks,
        scale=1.0,
        implementation=implementation,
    )


def _size(name: str, value: int | None, attention_type: str) -> int:
    if value is None or value < 1:
        raise ValueError(f"{name}: got {value} with attention_type={attention_type!r}, want a number above 0")
    return value


def _of_chunks(query: jax.Array, ids: jax.Array | None, size: int) -> jax.Array:
    """Segment ids [B, T] that differ between chunks of a row as well as between documents."""
    batch, length = query.shape[:2]
    chunks = jnp.arange(length, dtype=jnp.int32) // size
    if ids is None:
        return jnp.broadcast_to(chunks, (batch, length))
    count = -(-length // size)
    return jnp.where(ids >= 0, ids.astype(jnp.int32) * count + chunks, -1)


def replace_attention(attention_op: Any, *, implementation: str | None = None) -> Callable[[], None]:
    """Replaces attention_op.apply_attention for calls in training and prefill.

    MaxText's own attention still runs calls of other kinds: decoding, attention types other than in `attention`,
    quantized keys, a mask as an array, recorded logits, and rows that a mesh axis shards (context parallelism). Give
    MaxText's option `attention` any value that its checks accept on your GPU, such as "dot_product".

    Args:
      attention_op: MaxText's class AttentionOp.
      implementation: as in flash_attention.

    Returns:
      A function without arguments that undoes the replacement.

    Raises:
      TypeError: attention_op has no apply_attention.
    """
    original = getattr(attention_op, "apply_attention", None)
    if original is None:
        raise TypeError(f"attention_op: got {attention_op!r}, want MaxText's class AttentionOp")

    @functools.wraps(original)
    def apply_attention(
        self: Any, query: Any, key: Any, value: Any, decoder_segment_ids: Any, segment_positions: Any, lengths: Any,
        model_mode: str, use_ragged_attention: bool = False, *args: Any, sinks: Any = None, **others: Any,
    ) -> Any:  # fmt: skip
        given = query, key, value, decoder_segment_ids, segment_positions, lengths, model_mode, use_ragged_attention
        if args or use_ragged_attention or not _is_served(self, query, key, model_mode, others):
            return original(self, *given, *args, sinks=sinks, **others)
        out = attention(
            query,
            key,
            value,
            decoder_segment_ids,
            attention_type=self.attention_type.value,
            sliding_window_size=self.sliding_window_size,
            chunk_attn_window_size=self.chunk_attn_window_size,
            attn_logits_soft_cap=self.attn_logits_soft_cap,
            sinks=sinks,
            implementation=implementation,
        )
        return out, None, None

    attention_op.apply_attention = apply_attention
    return lambda: setattr(attention_op, "apply_attention", original)


def _is_served(op: Any, query: Any, key: Any, model_mode: str, others: dict[str, Any]) -> bool:
    """Whether `attention` computes this call of apply_attention. others: its further arguments by name."""
    parallel = getattr(op, "_context_parallel_size", lambda: 1)()
    return (
        model_mode in _MODES
        and op.attention_type.value in _TYPES
        and isinstance(key, jax.Array)
        and key.shape[1] == query.shape[1]
        and parallel == 1
        and not getattr(op.config, "moba", False)
        and not others.get("record_max_logits", False)
        and others.get("decoder_segment_ids_kv") is None
        and not any(others.get(name) is not None for name in _OTHERS)
    )
