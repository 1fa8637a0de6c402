"""Packed documents: several in one row of tokens, of which none sees another."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kernels.masks import checks

__all__ = ["Packed", "document_positions", "document_starts", "packed", "within_documents"]


class Packed(NamedTuple):
    """The arrays that a block needs beside x for packed documents, int32 [B, T] in the order of x's tokens.

    positions: of each token within its document; None for its place in the sequence.
    """

    segment_ids: jax.Array
    positions: jax.Array | None


def packed(segment_ids: Any, tokens: Any, *, is_whole: bool = True) -> Packed:
    """Checks the ids of the documents of tokens [B, T], and adds the positions that restart.

    is_whole: whether the ids are of whole rows. A shard's ids have no positions here, and keep their dtype: shards
    compare their ids in the op.

    Raises ValueError for another shape or known values beyond int32, TypeError for another dtype.
    """
    if not hasattr(segment_ids, "dtype"):
        segment_ids = np.asarray(segment_ids)
    if segment_ids.shape != tokens.shape[:2]:
        raise ValueError(f"segment_ids: got shape {segment_ids.shape}, want [batch, length] = {tokens.shape[:2]}")
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise TypeError(f"segment_ids: got dtype {segment_ids.dtype}, want integers")
    if is_whole or not isinstance(segment_ids, jax.core.Tracer):
        segment_ids = checks.ids(("segment_ids",), (segment_ids,), "integers [batch, length]")[0]
    return Packed(segment_ids, document_positions(segment_ids) if is_whole else None)


def document_positions(segment_ids: jax.Array) -> jax.Array:
    """The position of each token in its document: its distance from the first token of its run of equal ids.

    segment_ids: integers [B, T]. Returns int32 [B, T].
    """
    if jnp.ndim(segment_ids) != 2:
        raise ValueError(f"segment_ids: got shape {jnp.shape(segment_ids)}, want [batch, length]")
    place = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return place - lax.cummax(jnp.where(starts, place, 0), axis=1)


def within_documents(targets: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The targets of next tokens [B, T], but -1 where the next token is in another document, or an id is below 0.

    Nothing is known of the token after the last one: its target stays.
    """
    if jnp.ndim(targets) != 2 or jnp.shape(segment_ids) != jnp.shape(targets):
        shapes = f"{jnp.shape(targets)} and {jnp.shape(segment_ids)}"
        raise ValueError(f"targets, segment_ids: got shapes {shapes}, want [batch, length] for both")
    goes_on = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    return jnp.where(goes_on & (segment_ids >= 0), targets, -1)


def document_starts(tokens: np.ndarray, separator: int) -> np.ndarray:
    """The first token of each document of a text in which each document ends with a separator: int64 [documents].

    Args:
      tokens: integers [n]; a np.memmap is read in parts. separator: its token id, which counts with the document that
        it ends.

    Raises TypeError for another kind of either.
    """
    if getattr(tokens, "ndim", None) != 1 or not np.issubdtype(tokens.dtype, np.integer):
        got = f"{tokens.dtype} {tokens.shape}" if hasattr(tokens, "dtype") else type(tokens).__name__
        raise TypeError(f"tokens: got {got}, want an array of integers [n]")
    if isinstance(separator, bool) or not isinstance(separator, int | np.integer):
        raise TypeError(f"separator: got {separator!r}, want a token id, an int")
    found = [np.zeros(1, np.int64)]
    for begin in range(0, len(tokens), PART):
        found.append(np.flatnonzero(tokens[begin : begin + PART] == separator) + begin + 1)
    starts = np.concatenate(found)
    return starts[starts < max(1, len(tokens))]


PART = 1 << 24  # tokens
