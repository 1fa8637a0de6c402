"""The common masks of the benchmarks, and their form for each contender of ours."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from harness.cases import InputSet
from jax_kernels import masks, prepare_mask
from jax_kernels.masks.mask import Or


@dataclasses.dataclass(frozen=True)
class MaskPattern:
    """A mask, and its rule if it is a window.

    window: (left, right). A query sees the keys from `left` before it to `right` after it. None if the mask has
    more than a window, `tokens` and `prefix`.
    tokens: the first `tokens` queries see every key, and every query sees the first `tokens` keys.
    prefix: every query sees the first `prefix` keys.
    """

    mask: masks.Mask
    window: tuple[int, int] | None = None
    tokens: int = 0
    prefix: int = 0

    @staticmethod
    def of_window(left: int, right: int, tokens: int = 0, prefix: int = 0) -> "MaskPattern":
        # An Or of one mask keeps its block lists; a bare window would become flash_attention's argument.
        mask: masks.Mask = Or((masks.sliding_window(left, right),))
        if tokens:
            mask = mask | masks.global_tokens(tokens)
        if prefix:
            mask = mask | masks.prefix(prefix)
        return MaskPattern(mask, (left, right), tokens, prefix)


def random_blocks(seq: int, keep: float, block: int) -> MaskPattern:
    """Random blocks of `block` x `block` pairs. Each row of blocks has the fraction `keep` of them, at least one."""
    cells = -(-seq // block)
    rank = np.random.default_rng(0).random((cells, cells)).argsort(axis=1).argsort(axis=1)
    return MaskPattern(masks.block_sparse(rank < max(1, round(keep * cells)), block))


class Given(NamedTuple):
    """The arguments of a contender of ours: the mask, and the other arguments by name."""

    mask: Any
    named: dict[str, Any]


def of_ours(
    name: str, pattern: MaskPattern, keep: jax.Array | None, inputs: InputSet, implementation: str | None
) -> Given:
    """The arguments with which "window-argument", "prepared-mask", "mask", "array" or "dense" gets the pattern.

    keep: the mask as a bool array [seq, seq], for "array".
    """
    named: dict[str, Any] = {"implementation": implementation}
    if name == "window-argument":
        if pattern.window is None:
            raise ValueError("pattern: got a mask that is no window, want a window for the contender window-argument")
        _, right = pattern.window
        return Given(None, named | {"window": pattern.window, "is_causal": right == 0})
    if name == "prepared-mask":
        return Given(prepare_mask(pattern.mask, *inputs.qkv, **named), named)
    return Given({"mask": pattern.mask, "array": keep}.get(name), named)
