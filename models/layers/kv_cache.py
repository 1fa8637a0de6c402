"""The key-value cache of a module of attention, with a static shape."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["KVCache", "append", "check_length"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens so far; a pytree whose shapes never change, so that jit compiles once.

    key, value: [B, max_length, num_kv_heads, head_dim]; the keys are already rotated.
    length: int32, the number of filled positions: a scalar for all sequences, or [B].

    Pad prompts of different lengths at the end to one length, run them together, and then set their lengths. The next
    tokens of each sequence overwrite its padding::

        out, cache = attention(prompts, cache=attention.init_cache(B, max_length))
        cache = cache.with_length(lengths)  # [B]; the prompt's last output is out[b, lengths[b] - 1]
        out, cache = attention(tokens, cache=cache)
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array

    @property
    def max_length(self) -> int:
        return self.key.shape[1]

    @property
    def lengths(self) -> jax.Array:
        """The length of each sequence, int32 [B], for decode_attention's kv_lengths."""
        return jnp.broadcast_to(self.length, self.key.shape[:1])

    def with_length(self, length: Any) -> "KVCache":
        """The cache with the same keys and values and another length, an integer or integers [B].

        Raises ValueError or TypeError for another shape or dtype, and ValueError for a known length that is below 0 or
        above max_length.
        """
        cache = dataclasses.replace(self, length=jnp.asarray(length))
        check_length(cache, new_tokens=0)
        return dataclasses.replace(cache, length=cache.length.astype(jnp.int32))


def check_length(cache: KVCache, *, new_tokens: int) -> None:
    """Raises TypeError or ValueError unless the cache's length is an integer or integers [B] from 0 to max_length.

    A known length must leave room for new_tokens more; a traced length is not checked.
    """
    batch, *_ = cache.key.shape
    if not hasattr(cache.length, "dtype"):
        raise TypeError(f"cache: got a length of type {type(cache.length).__name__}, want an int32 array")
    if not jnp.issubdtype(cache.length.dtype, jnp.integer):
        raise TypeError(f"cache: got a length of dtype {cache.length.dtype}, want int32")
    if cache.length.shape not in ((), (batch,)):
        raise ValueError(f"cache: got a length of shape {cache.length.shape}, want a scalar or [batch] = ({batch},)")
    if isinstance(cache.length, jax.core.Tracer) or cache.length.size == 0:
        return
    known = np.asarray(cache.length)
    if known.min() < 0:
        raise ValueError(f"cache: got a length of {known.min()}, want 0 or more")
    if known.max() > cache.max_length:
        raise ValueError(f"cache: got a length of {known.max()}, want at most max_length={cache.max_length}")
    if known.max() + new_tokens > cache.max_length:
        raise ValueError(
            f"cache: got {new_tokens} tokens after {known.max()}, want at most max_length={cache.max_length} in all"
        )


def append(cache: KVCache, key: jax.Array, value: jax.Array) -> KVCache:
    """The cache with new keys and values [B, T, num_kv_heads, head_dim] written after each sequence's tokens."""

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(old.dtype)
        if cache.length.ndim == 0:
            return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)
        return jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))(old, new, cache.length)

    length = cache.length + key.shape[1]
    return KVCache(key=write(cache.key, key), value=write(cache.value, value), length=length)
