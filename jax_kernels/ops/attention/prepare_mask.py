"""prepare_mask: the block lists of a Mask, made once for all calls of one shape."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from jax_kernels.inputs.attention import ARGUMENT_NAMES, FlashArguments
from jax_kernels.masks import Mask, PreparedMask
from jax_kernels.masks.checks import is_int
from jax_kernels.masks.limits import dense_part
from jax_kernels.ops.attention.checks import check
from jax_kernels.ops.attention.flash_attention import OP
from jax_kernels.ops.attention.implementations import prepared_lists
from jax_kernels.plain_numbers import ATTENTION, plain, plain_options
from jax_kernels.spelling import name_hint
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["prepare_mask"]

# The arguments that limit keys by arrays, with the equivalent masks.
_ARRAYS = {"segment_ids": "masks.segments(...)", "kv_lengths": "masks.prefix(...)"}


@under_defaults
def prepare_mask(
    mask: Mask,
    query: Float[Array, "B T H D"] | jax.ShapeDtypeStruct,
    key: Float[Array, "B S Hkv D"] | jax.ShapeDtypeStruct,
    value: Float[Array, "B S Hkv Dv"] | jax.ShapeDtypeStruct | None = None,
    **arguments: Any,
) -> PreparedMask:
    """The mask with its block lists, which attention then reads instead of computing them in each call.

    Equivalent to the following JAX code, except for the time that later calls take::

        prepared = mask

    The result is a Mask, for the mask argument of flash_attention and all other ops. It is a pytree of the mask's
    arrays and of its lists. Pass it as an argument through jit, scan and shard_map, and to all layers and steps. If it
    were closed over, its arrays would be constants of the program.

    Forward and backward read the lists in calls like the prepared call, i.e. with

    - its lengths and heads, and its is_causal, window, q_offset and implementation;
    - its batch size, or a multiple of it if the mask is the same for all batch entries;
    - deterministic=True only if it was prepared with deterministic=True;
    - a bias only if it was prepared with a bias, since the blocks differ.

    In all other calls it acts as the original mask, also in a call with segment_ids, kv_lengths or a traced q_offset.
    It also does so where no lists are used: in "xla", and for a mask that is equivalent to is_causal, window and the
    like. `&`, `|` and `~` return ordinary masks.

    Outside of jit, all lists have the length of the longest list. Bits of the partial blocks are stored too, rounded up
    by at most an eighth. Another mask may then have lists of other shapes, for which jit compiles again. Under jit, as
    jax.jit(prepare_mask), the shapes depend only on the structure of the mask.

    Args:
      mask: a masks.Mask.
      query: [B, T, H, D]. key: [B, S, Hkv, D]. value: [B, S, Hkv, Dv], or None for key's shape. Only shapes and dtypes
        are used. Inside shard_map, attention sees the shapes of one device's shard.
      arguments: all other arguments of flash_attention, as in the later calls, except segment_ids and kv_lengths:
        compose masks.segments and masks.prefix into the mask instead. q_offset: an int.

    Raises:
      TypeError: mask is not a Mask, or q_offset is not an int; and the errors of flash_attention for these arguments.
      ValueError: an argument limits keys by an array; and the errors of flash_attention for these arguments.
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
    for name in arguments:
        if name not in ARGUMENT_NAMES:
            raise TypeError(
                f"flash_attention got an unexpected keyword argument {name!r}{name_hint(name, ARGUMENT_NAMES)}"
            )
    request, inputs = check(FlashArguments(query=query, key=key, value=value, mask=mask, **arguments))
    request = dataclasses.replace(request, has_lists=inputs.mask is not None)  # also for a mask's array
    if inputs.mask is not None and not isinstance(inputs.mask, Mask):
        inputs = inputs._replace(mask=dense_part(mask))  # its blocks may be computed without the array
    choice = OP.choose(request, arguments.get("implementation"))
    return PreparedMask(mask, prepared_lists(choice, inputs, request.options(scale=1.0)))
