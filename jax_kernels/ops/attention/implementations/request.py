"""The request of flash_attention: a call without its arrays."""

import dataclasses
from typing import ClassVar

from jax_kernels.dispatch import Request
from jax_kernels.inputs.attention import AttentionOptions
from jax_kernels.ops import checks
from jax_kernels.pallas.attention.sm90.features import block_lists

__all__ = ["AttentionRequest"]


@dataclasses.dataclass(frozen=True)
class AttentionRequest(Request):
    """A flash_attention call without its arrays.

    window: (left, right), each -1 for no limit; None if it adds no limit to is_causal. With is_causal, right is 0.
    q_offset: the position of query 0; None if it is an array. mask_shape, bias_shape: with four axes; None without an
    array. has_mask_object: the mask is a masks.Mask that the op's other arguments cannot express. has_lists: block
    lists give the keys of each query. They come from a prepared mask, or are made from a Mask.
    """

    SIZES: ClassVar[tuple[str, ...]] = checks.SIZES
    ROUNDED: ClassVar[tuple[str, ...]] = (*checks.SIZES, "window", "mask_shape", "bias_shape", "q_offset")

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    is_causal: bool
    window: tuple[int, int] | None
    softcap: float | None
    mask_shape: tuple[int, ...] | None
    has_mask_object: bool
    has_lists: bool
    bias_shape: tuple[int, ...] | None
    bias_dtype: str | None
    has_sinks: bool
    has_segment_ids: bool
    has_kv_lengths: bool
    has_score_mod: bool
    # The reason why a Triton kernel, and a Mosaic kernel, cannot inline the score_mod.
    not_in_tiles: str | None
    not_in_mosaic_tiles: str | None
    q_offset: int | None
    return_lse: bool
    deterministic: bool
    precision: str | None

    @property
    def bits(self) -> int:
        return 32 if self.dtype == "float32" else 16

    def options(self, scale: float) -> AttentionOptions:
        """The AttentionOptions of the call. scale: the factor of the scores, above 0."""
        return AttentionOptions(
            scale=scale,
            is_causal=self.is_causal,
            window=self.window,
            softcap=self.softcap,
            q_offset=self.q_offset,
            precision=self.precision,
            deterministic=self.deterministic,
        )

    @property
    def has_mask(self) -> bool:
        return self.mask_shape is not None

    @property
    def bias_tile_bits(self) -> int:
        """The bits of each value of a bias [.., T, S] that has a row for each query; 0 for all other calls."""
        if self.bias_shape is None or self.bias_shape[2] == 1:
            return 0
        return 32 if self.bias_dtype == "float32" else 16

    @property
    def dquery_bias_bits(self) -> int:
        """The bits of a bias for each query and key that a deterministic backward's dquery kernel has in shared memory.

        1 for a bias or a mask array with one row for all queries: shared memory then has a value for each key. 0 for
        neither.
        """
        return self.bias_tile_bits or int(self.dense_bits == 16)

    @property
    def skips_keys(self) -> bool:
        """Whether the Hopper kernels skip dead blocks of keys of a mask array that is the same for all queries."""
        has_bias = self.bias_shape is not None
        return self.mask_shape is not None and block_lists.skips_keys(self.mask_shape, self.q_length, has_bias)

    @property
    def dense_bits(self) -> int:
        """The bits of a mask or a bias for each pair of a query and a key: a number that selects block specs.

        32: a float32 bias with a row for each query. 1: no bias, and a mask array with a row for each query. 0: no
        bias, and no mask array, or one that block lists replace. 16: all other calls, i.e. another bias, or a mask
        array with one row for all queries.
        """
        if self.bias_tile_bits == 32:
            return 32
        mask_shape = None if self.has_lists else self.mask_shape
        if self.bias_shape is None and mask_shape is not None and mask_shape[2] > 1:
            return 1
        return 16 if mask_shape is not None or self.bias_shape is not None else 0
