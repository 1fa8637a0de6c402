"""dynamic_mask_attention: flash_attention under a mask and a bias, which may have one entry per key head."""

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from jax_kernels import dispatch, masks
from jax_kernels.masks import Mask, checks
from jax_kernels.masks.arrays import Dense, DenseMask
from jax_kernels.ops.attention.arguments import AttentionArguments
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.ops.attention.traced_masks import mask_or_nan, with_validity
from jax_kernels.ops.checks import check_shapes, checked_array, checked_sinks, reshaped
from jax_kernels.ops.planned_op import explained_as
from jax_kernels.ops.sharding.explicit_axes import as_attention, with_explicit_axes
from jax_kernels.plain_numbers import ATTENTION, with_plain_numbers
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["dynamic_mask_attention", "keys_of_largest_bias"]


@overload
def dynamic_mask_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask,
    bias: Float[Array, "*#BHTS"] | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **arguments: Unpack[AttentionArguments],
) -> Float[Array, "B T H Dv"]: ...
@overload
def dynamic_mask_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask,
    bias: Float[Array, "*#BHTS"] | None = ...,
    *,
    return_lse: Literal[True],
    **arguments: Unpack[AttentionArguments],
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@overload
def dynamic_mask_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask,
    bias: Float[Array, "*#BHTS"] | None = ...,
    *,
    return_lse: bool = ...,
    **arguments: Unpack[AttentionArguments],
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@with_plain_numbers(*ATTENTION)
@with_explicit_axes(as_attention)
@under_defaults
@jax.named_scope("dynamic_mask_attention")
def dynamic_mask_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask,
    bias: Float[Array, "*#BHTS"] | None = None,
    **arguments: Any,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """Attention to the keys that a mask keeps, with a bias that is added to the scores and differentiated.

    Equivalent to the following JAX code::

        of_heads = lambda x: repeat(x, H // Hkv, axis=1) if x.shape[1] == Hkv else x
        flash_attention(query, key, value, mask=of_heads(mask), bias=of_heads(bias), **arguments)

    An array [B, Hkv, T, S] is not repeated in memory: each key head becomes a batch entry of its own, for which query,
    key and value are copied. The Hopper and Triton kernels neither load nor visit blocks without a pair, nor their part
    of the bias. On Hopper a mask with one row for all queries skips blocks only without a bias, with one row for all
    heads, and from 4096 queries by 4096 keys on. In the forward, full blocks are not masked.

    Args:
      query: [B, T, H, D]. key: [B, S, Hkv, D]. value: [B, S, Hkv, Dv]. As flash_attention takes them.
      mask: bool, broadcastable to [B, H, T, S] or [B, Hkv, T, S], True where a query may attend.
        Floats are accepted and rejected like flash_attention's mask. Or a masks.Mask, such as the result of
        masks.top_k; a Mask with Hkv heads must be dense. No gradient passes through the mask to the arrays from which
        it was made.
      bias: broadcastable to [B, H, T, S] or [B, Hkv, T, S], in query's dtype or float32; -inf masks out. Its gradient
        has its shape and dtype, and is summed in float32 over its broadcast axes.
      arguments: all other arguments of flash_attention. is_causal is aligned top-left; q_offset=S - T aligns it
        bottom-right, as in flash-dmattn.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse=True, (out, lse), lse float32 [B, H, T] in natural log. A
      query that may attend to no key has out = 0 and passes no gradient.

    Raises:
      TypeError, ValueError, NotImplementedError: as flash_attention.

    Source: Shi et al., "Trainable Dynamic Mask Sparse Attention" (2025), arXiv:2508.02124.
    """
    mask, is_valid = with_validity("mask", mask)
    return mask_or_nan(_attention(query, key, value, mask, bias, **arguments), is_valid)


def _attention(query: Any, key: Any, value: Any, mask: Any, bias: Any, **arguments: Any) -> Any:
    """The results of dynamic_mask_attention, before invalid masks make them NaN: out, or (out, lse) with return_lse."""
    query, key, value, mask, bias = _checked(query, key, value, mask, bias)
    heads, kv_heads = query.shape[2], key.shape[2]
    if not _is_mapped(query, key, mask, bias):
        mask, bias = (_repeated(x, heads) for x in (mask, bias))
        return flash_attention(query, key, value, mask=mask, bias=bias, **arguments)

    score_mod = arguments.pop("score_mod", None)
    sinks = checked_sinks(arguments.pop("sinks", None), heads)

    def of_kv_head(index, query, key, value, mask, bias, sinks):
        named = arguments
        if score_mod is not None:
            first = index * (heads // kv_heads)
            named = arguments | {"score_mod": lambda score, b, h, *pair: score_mod(score, b, first + h, *pair)}
        return flash_attention(query, key, value, mask=mask, bias=bias, sinks=sinks, **named)

    arrays = [_by_kv_head(x, kv_heads, axis) for x, axis in ((query, 2), (key, 2), (value, 2), (mask, 1), (bias, 1))]
    arrays.append((None, None) if sinks is None else (sinks.reshape(kv_heads, heads // kv_heads), 0))
    given, axes = zip((jnp.arange(kv_heads, dtype=jnp.int32), 0), *arrays, strict=True)
    joined = lambda out: out.reshape(*query.shape[:3], out.shape[-1])
    if not arguments.get("return_lse"):
        return joined(jax.vmap(of_kv_head, axes, 2)(*given))
    out, lse = jax.vmap(of_kv_head, axes, (2, 1))(*given)
    return joined(out), lse.reshape(lse.shape[0], heads, lse.shape[-1])


def keys_of_largest_bias(
    bias: jax.Array, keys_to_keep: int, among: Mask, *, num_heads: int, q_length: int, q_offset: Any = 0
) -> Mask:
    """A Mask for dynamic_mask_attention: each query keeps, among the keys in `among`, the keys with the largest bias.

    bias: [B, Hkv, 1 or T, S]. keys_to_keep: the number of keys that a query keeps; all keys in `among` if S is not
    larger. among: a Mask with 1 or Hkv heads. num_heads: the heads of query. q_length: T. q_offset: the position of
    query 0, an int, scalar or [B].
    """
    kv_length = bias.shape[3]
    if kv_length > keys_to_keep:
        return masks.top_k(bias, keys_to_keep, among=among, q_length=q_length, q_offset=q_offset)
    if among.heads in (1, num_heads):
        return among
    # Only a mask that is an array may have the heads of the keys.
    return Dense(among.to_dense(q_length, kv_length, q_offset=q_offset), among.is_valid)


def _plan(query: Any, key: Any, value: Any, mask: Any, bias: Any = None, **arguments: Any) -> dispatch.Plan:
    """The Plan of the flash_attention calls that compute a dynamic_mask_attention.

    There is one call of all heads. Or, if `_is_mapped` is True, there is one call for each key head under a vmap; the
    Plan is then of one key head. The parameters are dynamic_mask_attention's. Raises the op's errors.
    """
    mask, _ = with_validity("mask", mask)
    query, key, value, mask, bias = _checked(query, key, value, mask, bias)
    if _is_mapped(query, key, mask, bias):
        kv_heads, sinks = key.shape[2], checked_sinks(arguments.get("sinks"), query.shape[2])
        query, key, value, mask, bias = (
            _of_one(*_by_kv_head(x, kv_heads, axis))
            for x, axis in zip((query, key, value, mask, bias), (2, 2, 2, 1, 1), strict=True)
        )
        if sinks is not None:
            arguments["sinks"] = jax.ShapeDtypeStruct((query.shape[2],), sinks.dtype)
    else:
        mask, bias = (_repeated(x, query.shape[2]) for x in (mask, bias))
    return dispatch.explain(flash_attention, query, key, value, mask=mask, bias=bias, **arguments)


explained_as(_plan)(dynamic_mask_attention)


def _checked(query: Any, key: Any, value: Any, mask: Any, bias: Any) -> tuple[Any, ...]:
    """(query, key, value, mask, bias), checked. Raises TypeError or ValueError.

    The returned mask and bias have four axes [B or 1, (H, Hkv or 1), T or 1, S or 1]; the mask may also be a Mask with
    1 or H heads, and the bias None.
    """
    query, key, value = (checked_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    check_shapes(query, key, value)
    (batch, q_length, heads), (kv_length, kv_heads) = query.shape[:3], key.shape[1:3]
    if isinstance(mask, Mask) and mask.heads not in (1, heads):
        mask = mask.unprepared
        if not isinstance(mask, DenseMask):
            want = f"1 or query's {heads}, or a dense Mask of key's {kv_heads}"
            raise ValueError(f"mask: got a Mask of {mask.heads} heads, want {want}")
        mask = mask.array
    elif not isinstance(mask, Mask | jax.ShapeDtypeStruct):
        mask, _ = checks.boolean("mask", mask)
    shape = (batch, heads, q_length, kv_length)
    return query, key, value, *(_with_four_axes(*named, shape, kv_heads) for named in (("mask", mask), ("bias", bias)))


def _with_four_axes(name: str, x: Any, shape: tuple[int, int, int, int], kv_heads: int) -> Any:
    """x with leading axes of length 1 added to make four; None and Masks stay as they are.

    shape: [B, H, T, S]. Raises TypeError, or ValueError if x is not broadcastable to `shape` with H or kv_heads heads.
    """
    if x is None or isinstance(x, Mask):
        return x
    if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"{name}: got {type(x).__name__}, want an array")
    if not jax.dtypes.issubdtype(x.dtype, np.number) and x.dtype != bool:
        raise TypeError(f"{name}: got dtype {x.dtype}, want numbers")
    full = (1,) * (4 - x.ndim) + tuple(x.shape)
    batch, heads, q_length, kv_length = shape
    sizes = ((1, batch), (1, kv_heads, heads), (1, q_length), (1, kv_length))
    if x.ndim > 4 or any(got not in wanted for got, wanted in zip(full, sizes, strict=True)):
        raise ValueError(
            f"{name}: got shape {x.shape}, want a shape broadcastable to [B, H, T, S] = {shape} or to [B, Hkv, T, S] = "
            f"{(batch, kv_heads, q_length, kv_length)}"
        )
    return reshaped(x, full, x.dtype)


def _is_mapped(query: Any, key: Any, mask: Any, bias: Any) -> bool:
    """Whether each key head becomes a call of its own, under vmap, instead of repeating mask and bias for query heads.

    It does if the mask or the bias is an array with a value for each batch entry, key head and query.
    """
    if key.shape[2] == query.shape[2] or 0 in query.shape or (isinstance(mask, Mask) and mask.heads > 1):
        return False
    large = lambda x: x.shape[:2] == (query.shape[0], key.shape[2]) and x.shape[1] != 1 and x.shape[2] != 1
    return any(large(x) for x in (mask, bias) if x is not None and not isinstance(x, Mask))


def _repeated(x: Any, heads: int) -> Any:
    """A mask or bias with four axes, with Hkv heads repeated to `heads`. Masks and None stay as they are."""
    if x is None or isinstance(x, Mask) or x.shape[1] in (1, heads):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((x.shape[0], heads, *x.shape[2:]), x.dtype)
    return jnp.repeat(x, heads // x.shape[1], axis=1)


def _by_kv_head(x: Any, kv_heads: int, axis: int) -> tuple[Any, int | None]:
    """Splits x's axis of heads for a vmap over key heads: (x with two axes of heads, the index to map).

    The heads at index `axis` become the key heads, at this index, and the heads per key head, at the next. Returns (x,
    None) if all key heads share x: it is None, a Mask, or has one head.
    """
    if x is None or isinstance(x, Mask) or x.shape[axis] == 1 < kv_heads:
        return x, None
    shape = (*x.shape[:axis], kv_heads, x.shape[axis] // kv_heads, *x.shape[axis + 1 :])
    return reshaped(x, shape, x.dtype), axis


def _of_one(x: Any, axis: int | None) -> Any:
    if axis is None:
        return x
    return jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)
