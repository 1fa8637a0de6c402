"""Joins all limits on the keys of an attention call into one description.

A caller may limit keys by is_causal, window, segment_ids and kv_lengths, by an array, and by a Mask. `joined` combines
these limits into `Limits`. The arrays of Limits reach the kernels in AttentionInputs, the static half in
AttentionOptions.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kernels.masks.arrays import DenseMask, Segments, dense, segments
from jax_kernels.masks.mask import Mask
from jax_kernels.masks.positions import Band, Prefix, causal, prefix, sliding_window
from jax_kernels.masks.prepared import PreparedMask

__all__ = [
    "Limits",
    "dense_part",
    "joined",
    "joined_band",
    "key_lengths",
    "whole_mask",
    "without_band",
    "without_limits",
]


class Limits(NamedTuple):
    """The limits on the keys of a call. A query attends to a key if every field keeps the key.

    mask: a bool array with four axes [B or 1, H or 1, T or 1, S or 1], or a Mask without block lists, or None.
    is_causal: keep no key after the query. window: (left, right) distances, both inclusive, -1 for no limit on a side,
    right 0 if is_causal; None for no window. segment_ids: (ids of queries [B, T], ids of keys [B, S]), or None.
    kv_lengths: [B] int32, the number of keys that count in each batch entry, or None. lists: the block lists of a
    PreparedMask, which hold all these limits together, or None.
    """

    mask: Any = None
    is_causal: bool = False
    window: tuple[int, int] | None = None
    segment_ids: Any = None
    kv_lengths: Any = None
    lists: Any = None


def joined(given: Limits, batch: int) -> Limits:
    """The limits of a call in their simplest form. given: the caller's limits, whose mask may be any Mask. batch: B.

    Causal, sliding_window, segments, prefix and dense masks joined by `&` move into the fields is_causal, window,
    segment_ids, kv_lengths and mask (as an array), so that kernels that take no Mask can serve the call. At most one
    dense mask and one segments mask may be joined, and no segments mask if segment_ids are given. Any other Mask stays
    whole in `mask`. A PreparedMask's lists are dropped if segment_ids or kv_lengths are given, since they were made
    without these.
    """
    if not isinstance(given.mask, Mask):
        return given
    is_alone = given.segment_ids is None and given.kv_lengths is None
    lists = given.mask.lists or None if isinstance(given.mask, PreparedMask) and is_alone else None
    given = given._replace(mask=given.mask.unprepared, lists=lists)
    left, right = given.window or (-1, 0 if given.is_causal else -1)
    array, segment_ids, kv_lengths = None, given.segment_ids, given.kv_lengths
    for part in given.mask.factors:
        if isinstance(part, Band) and part.window is not None:
            left, right = map(_tighter, (left, right), part.window)
        elif isinstance(part, Prefix):
            kv_lengths = _shorter(kv_lengths, part, batch)
        elif isinstance(part, Segments) and segment_ids is None:
            segment_ids = tuple(jnp.broadcast_to(x, (batch, x.shape[1])) for x in (part.q_ids, part.kv_ids))
        elif isinstance(part, DenseMask) and array is None:
            array = part.array
        else:
            return given
    window = (left, right) if left != -1 or right > 0 else None
    return Limits(
        mask=array,
        is_causal=given.is_causal or right == 0,
        window=window,
        segment_ids=segment_ids,
        kv_lengths=kv_lengths,
        lists=None if array is None else lists,
    )


def joined_band(mask: Mask, left: int | None, right: int | None) -> Mask:
    """The mask within a window of `left` keys before the query and `right` after it; None is no limit on a side."""
    return mask if left is None and right is None else mask & sliding_window(left, right)


def without_band(mask: Mask, left: int | None, right: int | None) -> tuple[Mask | None, int | None, int | None]:
    """(the mask without its causal and sliding_window parts, left, right): the parts become limits of the window.

    Only parts joined by `&` whose window includes the query's own position are moved. left, right: the window that
    applies in addition, inclusive distances before and after the query; the result is its intersection with the parts.
    None is no limit on a side. The returned mask is None if no other part is left.
    """
    rest: list[Mask] = []
    sides = [-1 if side is None else side for side in (left, right)]
    for part in mask.unprepared.factors:
        if isinstance(part, Band) and part.window is not None:
            sides = list(map(_tighter, sides, part.window))
        else:
            rest.append(part)
    left, right = (None if side == -1 else side for side in sides)
    return (functools.reduce(operator.and_, rest) if rest else None), left, right


def dense_part(mask: Mask) -> DenseMask | None:
    """The first DenseMask among the masks that `&` joins in this mask; None without one.

    In the Limits that `joined` returns, the field mask is this one's array.
    """
    return next((part for part in mask.factors if isinstance(part, DenseMask)), None)


def _tighter(side: int, other: int) -> int:
    """The smaller of two limits of a window's side; -1 is no limit."""
    return max(side, other) if -1 in (side, other) else min(side, other)


def _shorter(lengths: Any, prefix: Prefix, batch: int) -> Any:
    """The number of keys that count in each batch entry under both limits: [B] int32.

    lengths: [B], or None for no limit. prefix: a mask of the first n keys. If lengths is a ShapeDtypeStruct, as for a
    plan without arrays, it is returned unchanged.
    """
    limits = jnp.broadcast_to(prefix.per_batch[:, 0], (batch,))
    if lengths is None or isinstance(lengths, jax.ShapeDtypeStruct):
        return limits if lengths is None else lengths
    return jnp.minimum(lengths, limits)


def whole_mask(inputs: Any, options: Any) -> Mask:
    """All limits of a call as one Mask: mask, is_causal, window, segment ids and kv_lengths, joined by `&`.

    inputs: AttentionInputs. options: AttentionOptions. A call without limits gives a mask that keeps every pair.
    """
    mask = inputs.mask
    if not isinstance(mask, Mask):
        mask = sliding_window(None, None) if mask is None else dense(mask)
    if options.is_causal:
        mask &= causal()
    if options.window is not None:
        mask &= sliding_window(*options.window)
    if inputs.q_segment_ids is not None:
        mask &= segments(inputs.q_segment_ids, inputs.kv_segment_ids)
    if inputs.kv_lengths is not None:
        mask &= prefix(inputs.kv_lengths)
    return mask


def without_limits(inputs: Any, options: Any) -> tuple[Any, Any]:
    """(inputs, options) without limits, q_offset and lists, for a kernel whose block lists hold all limits.

    inputs: AttentionInputs. options: AttentionOptions.
    """
    arrays = ("mask", "q_segment_ids", "kv_segment_ids", "kv_lengths", "q_offset", "lists")
    options = dataclasses.replace(options, is_causal=False, window=None, q_offset=0)
    return inputs._replace(**dict.fromkeys(arrays)), options


def key_lengths(inputs: Any) -> jax.Array | None:
    """The number of valid keys of each batch entry, [B] int32 from 0 to S; None if the call does not limit it.

    inputs: AttentionInputs. The number is the smallest of kv_lengths, S, and the limits of the prefix masks joined by
    `&` in its mask. Keys and values at this index and later may hold anything, NaN too.
    """
    batch, kv_length = inputs.key.shape[:2]
    limits = [] if inputs.kv_lengths is None else [inputs.kv_lengths]
    if isinstance(inputs.mask, Mask):
        limits += [part.per_batch[:, 0] for part in inputs.mask.factors if isinstance(part, Prefix)]
    if not limits:
        return None
    lengths = jnp.full((batch,), kv_length, jnp.int32)
    for limit in limits:
        lengths = jnp.minimum(lengths, limit)
    return jnp.maximum(lengths, 0)
