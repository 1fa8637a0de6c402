"""prepare_mask: the block lists of a Mask, made once for all calls of one shape."""

import dataclasses
from typing import Any

import jax

from jax_kernels.inputs.attention import AttentionOptions
from jax_kernels.masks import Mask, PreparedMask
from jax_kernels.masks.checks import is_int
from jax_kernels.masks.limits import dense_part
from jax_kernels.ops.attention.checks import check
from jax_kernels.ops.attention.flash_attention import OP
from jax_kernels.ops.attention.implementations import prepared_lists
from jax_kernels.plain_numbers import ATTENTION, plain, plain_options
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["prepare_mask"]

# What limits keys by arrays, and the mask that says the same.
_ARRAYS = {"segment_ids": "masks.segments(...)", "kv_lengths": "masks.prefix(...)"}


@under_defaults
def prepare_mask(
    mask: Mask,
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct | None = None,
    **arguments: Any,
) -> PreparedMask:
    """The mask with its lists of blocks, which attention then reads instead of making them in each call.

    Equivalent to the following JAX code, but for the time that later calls take::

        prepared = mask

    It is a Mask, for the mask of flash_attention and of all that takes one, and a pytree of the mask's arrays and those
    of its lists: pass it through jit, scan, shard_map, and to all layers and steps, not closed over, where it would be
    constants of the program. Both directions read the lists in calls like the one that it was prepared for: with its
    lengths and heads, and its is_causal, window, q_offset and implementation; with a batch of as many entries or, where
    the mask is the same for all, a multiple of that; with deterministic=True only if it was prepared so. In any other
    call, and in one with segment_ids, kv_lengths or a traced q_offset, it is the mask that it was made from, as it is
    where no lists are used: in "xla", and for a mask that says no more than is_causal, window and the like. Beside a
    bias the blocks are others: it is then to be prepared with one. `&`, `|` and `~` give ordinary masks.

    Outside of jit, the lists are as long as the longest one, and there are bits for the blocks that the mask keeps in
    part, rounded up by at most an eighth; another mask may then have lists of other shapes, for which jit compiles
    anew. Under jit, as jax.jit(prepare_mask), the shapes depend on the structure of the mask alone.

    Args:
      mask: a masks.Mask.
      query: [B, T, H, D]. key: [B, S, Hkv, D]. value: [B, S, Hkv, Dv], or None for key's shape. Of these, only the
        shapes and dtypes count. Inside shard_map, attention sees the shapes of one device's part.
      arguments: all others of flash_attention, as in the calls to come, without segment_ids and kv_lengths: compose
        masks.segments and masks.prefix into the mask. q_offset: an int.

    Raises:
      TypeError: mask is no Mask, or q_offset no int; and what flash_attention raises for these arguments.
      ValueError: an argument limits keys by an array; and what flash_attention raises for these arguments.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask: got {type(mask).__name__}, want a masks.Mask; masks.dense makes one of an array")
    for name, instead in _ARRAYS.items():
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name}: got {type(arguments[name]).__name__}, want None: compose {instead} into the mask"
            )
    arguments = plain_options(ATTENTION, arguments)
    if not is_int(offset := plain(arguments.get("q_offset", 0))):
        raise TypeError(f"q_offset: got {type(offset).__name__}, want an int that is known when tracing")
    arguments["q_offset"] = offset
    mask, value = mask.unprepared, key if value is None else value
    request, inputs = check(query, key, value, mask=mask, **arguments)
    request = dataclasses.replace(request, has_lists=inputs.mask is not None)  # of an array, too
    if inputs.mask is not None and not isinstance(inputs.mask, Mask):
        inputs = inputs._replace(mask=dense_part(mask))  # its blocks may be found without the array
    plan = OP.plan(request, arguments.get("implementation"))
    options = AttentionOptions(
        scale=1.0,
        is_causal=request.is_causal,
        window=request.window,
        q_offset=request.q_offset,
        deterministic=request.deterministic,
    )
    return PreparedMask(mask, prepared_lists(plan, inputs, options))
