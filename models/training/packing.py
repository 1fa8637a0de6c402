"""Packed documents: several documents in one row of tokens, which do not attend to each other."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kernels.masks import checks
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["DealtDocuments", "Packed", "document_positions", "document_starts", "packed", "run_ids", "within_documents"]


class Packed(NamedTuple):
    """The document ids and positions of packed tokens, int32 [B, T] each, in the order of x's tokens.

    positions: each token's position within its document; None if the position is the index in the sequence.
    """

    segment_ids: jax.Array
    positions: jax.Array | None


class DealtDocuments(NamedTuple):
    """The document ids and positions of packed tokens that are in the order of a DocumentLayout, int32 [B, T] each.

    segment_ids: the layout's ids, which only ring_attention with the layout "documents" understands.
    """

    segment_ids: jax.Array
    positions: jax.Array


def packed(segment_ids: Any, tokens: Any, *, is_whole: bool = True) -> Packed:
    """The Packed of document ids for tokens [B, T], with positions that restart in each document. Checks the ids.

    Each run of equal ids is a document. The result has another id for each run of a row, so that the op, which compares
    ids, keeps two documents apart that have one id.

    is_whole: whether the ids are of whole rows. False for one device's shard: its positions are None and its ids stay
    as they are, since the op compares the ids of all shards.

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
    return Packed(run_ids(segment_ids), document_positions(segment_ids)) if is_whole else Packed(segment_ids, None)


def run_ids(segment_ids: Any) -> jax.Array:
    """Ids that differ between the runs of equal ids in a row: int32 [B, T], from 0 on; ids below 0 become -1.

    segment_ids: integers [B, T].
    """
    runs = jnp.cumsum(_starts(segment_ids), axis=1, dtype=jnp.int32) - 1
    return jnp.where(segment_ids < 0, -1, runs)


def _starts(segment_ids: Any) -> jax.Array:
    """Whether each token is the first of a run of equal ids: bool [B, T]."""
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)


@under_defaults
def document_positions(segment_ids: jax.Array) -> jax.Array:
    """The position of each token in its document: the distance from the first token of its run of equal ids.

    segment_ids: integers [B, T]. Returns int32 [B, T]. Raises TypeError for another dtype or no array, ValueError for
    another shape.
    """
    _check_integers(segment_ids=segment_ids)
    if segment_ids.ndim != 2:
        raise ValueError(f"segment_ids: got shape {segment_ids.shape}, want [batch, length]")
    place = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    return place - lax.cummax(jnp.where(_starts(segment_ids), place, 0), axis=1)


@under_defaults
def within_documents(targets: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The targets [B, T], with -1 where the next token is in another document or the token's segment id is below 0.

    targets: the next token of each token. segment_ids: integers [B, T], the document of each token. The last target of
    a row does not change, because the document of its token is not known. Unsigned targets become int32.

    Raises TypeError for another dtype or no array, ValueError for other shapes.
    """
    _check_integers(targets=targets, segment_ids=segment_ids)
    if targets.ndim != 2 or segment_ids.shape != targets.shape:
        shapes = f"{targets.shape} and {segment_ids.shape}"
        raise ValueError(f"targets, segment_ids: got shapes {shapes}, want [batch, length] for both")
    if jnp.issubdtype(targets.dtype, jnp.unsignedinteger):
        targets = checks.int32("targets", targets, "integers [batch, length]")
    goes_on = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    return jnp.where(goes_on & (segment_ids >= 0), targets, -1)


def _check_integers(**arrays: Any) -> None:
    """Raises TypeError unless each is an array of integers. arrays: the arguments, by their names in messages."""
    for name, x in arrays.items():
        checks.is_array(name, x, "integers [batch, length]")
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name}: got dtype {x.dtype}, want integers")


def document_starts(tokens: np.ndarray, separator: int) -> np.ndarray:
    """The index of each document's first token, in a text whose documents end with a separator: int64 [documents].

    Args:
      tokens: integers [n]; a np.memmap is read in parts.
      separator: the separator's token id. The separator belongs to the document that it ends.

    Raises TypeError if tokens are not an array of integers [n], or separator is not an int.
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


PART = 1 << 24  # tokens that are read at once
