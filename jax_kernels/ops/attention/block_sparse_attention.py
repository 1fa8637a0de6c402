"""block_sparse_attention: flash_attention under a mask of blocks."""

from typing import Any, Literal, Unpack, overload

import jax
from jaxtyping import Array, Bool, Float, Float32

from jax_kernels import dispatch, masks
from jax_kernels.masks.arrays import named_block_sparse
from jax_kernels.ops.attention.arguments import BiasedAttentionArguments
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.ops.planned_op import explained_as
from jax_kernels.plain_numbers import ATTENTION, with_plain_numbers
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["block_sparse_attention"]


@overload
def block_sparse_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    block_mask: Bool[Array, "*#B_H rows columns"] | Float[Array, "*#B_H rows columns"] | masks.Mask,
    *,
    block_size: int | tuple[int, int] | None = ...,
    return_lse: Literal[False] = ...,
    **arguments: Unpack[BiasedAttentionArguments],
) -> Float[Array, "B T H Dv"]: ...
@overload
def block_sparse_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    block_mask: Bool[Array, "*#B_H rows columns"] | Float[Array, "*#B_H rows columns"] | masks.Mask,
    *,
    block_size: int | tuple[int, int] | None = ...,
    return_lse: Literal[True],
    **arguments: Unpack[BiasedAttentionArguments],
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@overload
def block_sparse_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    block_mask: Bool[Array, "*#B_H rows columns"] | Float[Array, "*#B_H rows columns"] | masks.Mask,
    *,
    block_size: int | tuple[int, int] | None = ...,
    return_lse: bool = ...,
    **arguments: Unpack[BiasedAttentionArguments],
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@with_plain_numbers(*ATTENTION)
@under_defaults
@jax.named_scope("block_sparse_attention")
def block_sparse_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    block_mask: Bool[Array, "*#B_H rows columns"] | Float[Array, "*#B_H rows columns"] | masks.Mask,
    *,
    block_size: int | tuple[int, int] | None = None,
    **arguments: Any,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """Attention of queries to keys within the blocks (queries x keys) that an array of flags keeps.

    Equivalent to the following JAX code::

        mask = masks.block_sparse(block_mask, block_size)
        flash_attention(query, key, value, mask=mask, **arguments)

    Args:
      query: [B, T, H, D]. key: [B, S, Hkv, D]. value: [B, S, Hkv, Dv]. As flash_attention takes them.
      block_mask: bool [rows, columns], [H or 1, rows, columns] or [B or 1, H or 1, rows, columns], True for a block
        that is attended to; rows = ceil(T / block_size), columns = ceil(S / block_size). Floats are accepted and
        rejected like flash_attention's mask. Or a masks.Mask, such as the result of masks.top_k_blocks, which has its
        own block size.
      block_size: an int, or (queries, keys); None is 128. The kernels visit blocks of multiples of 128 one by one.
        Smaller blocks that lie in the same block of a kernel are visited together.
      arguments: all other arguments of flash_attention, such as is_causal, which masks a block's later keys.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse=True, (out, lse), lse float32 [B, H, T] in natural log. A
      query without any key has out = 0 and lse = -inf.

    Raises:
      TypeError, ValueError, NotImplementedError: as flash_attention. ValueError if block_mask does not fit the lengths.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers" (2019), arXiv:1904.10509; Zaheer et
    al., "Big Bird" (2020), arXiv:2007.14062.
    """
    mask = _mask(block_mask, block_size, arguments, query, key)
    return flash_attention(query, key, value, mask=mask, **arguments)


def _plan(
    query: Any, key: Any, value: Any, block_mask: Any, *, block_size: Any = None, **arguments: Any
) -> dispatch.Plan:
    if isinstance(block_mask, jax.ShapeDtypeStruct):
        mask = jax.eval_shape(lambda x: _mask(x, block_size, arguments, query, key), block_mask)
    else:
        mask = _mask(block_mask, block_size, arguments, query, key)
    return dispatch.explain(flash_attention, query, key, value, mask=mask, **arguments)


explained_as(_plan)(block_sparse_attention)


def _mask(block_mask: Any, block_size: Any, arguments: dict[str, Any], query: Any, key: Any) -> masks.Mask:
    """block_mask as a checked masks.Mask. Raises TypeError or ValueError. arguments: flash_attention's, by name."""
    if "mask" in arguments:
        raise TypeError(
            "mask: got the argument with block_sparse_attention, want block_mask, which takes composed Masks"
        )
    if isinstance(block_mask, masks.Mask) and block_size is not None:
        raise ValueError(f"block_size: got {block_size} with a Mask, want None: a Mask has its own")
    mask = block_mask
    if not isinstance(block_mask, masks.Mask):
        mask = named_block_sparse("block_mask", block_mask, 128 if block_size is None else block_size)
    if all(len(getattr(x, "shape", ())) == 4 for x in (query, key)):  # else flash_attention raises the error
        _check_sizes(block_mask, mask, query, key)
    return mask


def _check_sizes(block_mask: Any, mask: Any, query: Any, key: Any) -> None:
    """Raises ValueError unless the mask fits query and key: batch entries, heads, and the number of blocks.

    The number of blocks is checked only for an array block_mask; flash_attention checks it for a Mask.
    """
    batch, q_length, heads, _ = query.shape
    if mask.batch not in (1, batch) or mask.heads not in (1, heads):
        raise ValueError(
            f"block_mask: got {mask.batch} batch entries and {mask.heads} heads, want 1 or {batch} batch entries and "
            f"1 or {heads} heads"
        )
    if block_mask is mask:
        return
    want = (-(-q_length // mask.block_q), -(-key.shape[1] // mask.block_kv))
    if tuple(block_mask.shape[-2:]) != want:
        raise ValueError(
            f"block_mask: got shape {tuple(block_mask.shape)} for {q_length} queries and {key.shape[1]} keys, want "
            f"[batch, heads, {want[0]}, {want[1]}] at block_size {(mask.block_q, mask.block_kv)}"
        )
