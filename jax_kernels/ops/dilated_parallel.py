"""sequence_parallel_dilated_attention: dilated attention of a sequence whose tokens are shared out among devices."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.ops import dilated_views
from jax_kernels.ops.attention import flash_attention
from jax_kernels.ops.dilated_attention import check_pattern, dilated_attention

__all__ = ["sequence_parallel_dilated_attention"]


def sequence_parallel_dilated_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: str,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = False,
    return_lse: bool = False,
    scale: float | None = None,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """dilated_attention inside jax.shard_map, where device i of an axis has the tokens i * T ... (i + 1) * T - 1.

    Equivalent to the following JAX code, without the gathered arrays::

        query, key, value = (all_gather(x, axis_name, axis=1, tiled=True) for x in (query, key, value))
        out = dilated_attention(query, key, value, ...)[:, i * T : (i + 1) * T]

    Segments that fit a device's tokens need no communication. Of longer ones the keys and values that take part, one
    in `rate`, are gathered from the devices of the segment; nothing else travels, and in the backward their gradients,
    in float32. It takes memory for the longest segment divided by its rate.

    Args:
      query: [B, T, H, D]. key: [B, T, Hkv, D]. value: [B, T, Hkv, Dv]: a device's tokens; else as in dilated_attention.
      axis_name: of the mesh axis over which the sequence is sharded, in the order of its tokens.
      segment_lengths: of each branch: a divisor of T, or T times a divisor of the number of devices, or no less than
        the whole sequence.
      dilation_rates: of each branch. Of segments longer than T they divide T.
      is_causal, return_lse, scale, deterministic, precision, implementation: as in dilated_attention, whose heads,
        combine, layout and order have their defaults here.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T] in natural log.

    Raises:
      TypeError, ValueError, NotImplementedError: as dilated_attention; ValueError where segment_lengths, or
        dilation_rates, do not fit the devices as said above.

    Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens" (2023), arXiv:2307.02486, section 3.
    """
    common: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "deterministic": deterministic,
        "precision": precision,
        "implementation": implementation,
    }
    branches = check_pattern(segment_lengths, dilation_rates, "all", "lse", "overlap", None)
    length, devices = query.shape[1], lax.axis_size(axis_name)
    branches = tuple((min(size, length * devices), rate) for size, rate in branches)
    _check_fit(branches, length, devices)
    parts = []
    local = [branch for branch in branches if branch[0] <= length]
    if local:
        lengths, rates = zip(*local, strict=True)
        parts.append(
            dilated_attention(
                query, key, value, segment_lengths=lengths, dilation_rates=rates, return_lse=True, **common
            )
        )
    parts += [
        _across(query, key, value, axis_name, size // length, rate, common) for size, rate in branches if size > length
    ]
    out, lse = parts[0] if len(parts) == 1 else _merge(parts)
    out = out.astype(query.dtype)
    return (out, lse) if return_lse else out


def _check_fit(branches: Sequence[tuple[int, int]], length: int, devices: int) -> None:
    for index, (size, rate) in enumerate(branches):
        fits = length % size == 0 if size <= length else size % length == 0 and devices % (size // length) == 0
        if not fits:
            raise ValueError(
                f"segment_lengths[{index}]: got {size} with {length} tokens on each of {devices} devices, want a "
                f"divisor of {length}, or {length} times a divisor of {devices}"
            )
        if size > length and length % rate:
            raise ValueError(
                f"dilation_rates[{index}]: got {rate} for segments longer than the {length} tokens of a device, want "
                f"a divisor of {length}"
            )


def _across(query, key, value, axis_name: str, devices: int, rate: int, common: dict[str, Any]):
    """(out float32, lse) of a branch whose segments have so many devices each."""
    batch, length, heads, _ = query.shape
    kv_heads = key.shape[2]
    pieces = dilated_views.pieces_of(length, heads, ((length, rate),), heads="all", layout="overlap", order=None)
    (views,) = dilated_views.calls_of(pieces, heads, kv_heads, is_causal=False, has_segment_ids=False)
    rows = functools.partial(dilated_views.gather_rows, call=views, num_heads=heads)
    everyone = lax.axis_size(axis_name)
    groups = tuple(tuple(range(first, first + devices)) for first in range(0, everyone, devices))
    key, value = (_gather(axis_name, groups, rows(x)) for x in (key, value))
    first = lax.axis_index(axis_name) % devices * views.rows
    out, lse = flash_attention(rows(query), key, value, q_offset=first, return_lse=True, **common)
    lse = lse.swapaxes(1, 2)
    ((_, out),) = dilated_views.scatter(out, views, batch, heads, heads)
    ((_, lse),) = dilated_views.scatter(lse, views, batch, heads, heads, fill=-jnp.inf)
    return out, lse.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(axis_name: str, groups: tuple[tuple[int, ...], ...], x):
    """The rows of all devices of a group, one after the other. Their gradients are added up in float32."""
    return lax.all_gather(x, axis_name, axis=1, tiled=True, axis_index_groups=groups)


def _gather_fwd(axis_name, groups, x):
    return _gather(axis_name, groups, x), None


def _gather_bwd(axis_name, groups, _, cotangent):
    total = lax.psum_scatter(
        cotangent.astype(jnp.float32), axis_name, scatter_dimension=1, tiled=True, axis_index_groups=groups
    )
    return (total.astype(cotangent.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def _merge(parts):
    """The branches' outs by the softmax of their lses, and the lse of all; of what no branch has, 0 and -inf."""
    outs, lses = zip(*parts, strict=True)
    alive = [~jnp.isneginf(lse) for lse in lses]
    highest = functools.reduce(jnp.maximum, lses)
    highest = lax.stop_gradient(jnp.where(jnp.isneginf(highest), 0, highest))
    # Nothing infinite meets an exponential: its gradient would be a NaN.
    powers = [jnp.where(a, jnp.exp(jnp.where(a, lse - highest, 0)), 0) for a, lse in zip(alive, lses, strict=True)]
    total = functools.reduce(jnp.add, powers)
    dead = total == 0
    safe = jnp.where(dead, 1, total)
    weighted = (
        (power / safe).swapaxes(1, 2)[..., None] * out.astype(jnp.float32)
        for power, out in zip(powers, outs, strict=True)
    )
    return functools.reduce(jnp.add, weighted), jnp.where(dead, -jnp.inf, jnp.log(safe) + highest)
