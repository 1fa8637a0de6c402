"""The arrays that the Hopper backward kernels read and add to."""

import dataclasses

import jax

from jax_kernels.pallas.attention.sm90.features.bias import Bias
from jax_kernels.pallas.attention.sm90.features.block_lists import Lists
from jax_kernels.pallas.attention.sm90.features.score_mod import Mod
from jax_kernels.pallas.attention.sm90.features.segments import Segments
from jax_kernels.pallas.attention.sm90.features.tail_block import CleanEnd
from jax_kernels.pallas.kernel_types import Ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays[A: jax.Array | Ref]:
    """The arrays that a backward kernel reads or adds to, in device memory; inside a kernel, their refs. None: not
    present.

    query, key, value and dout are [B, length, H, D], all with the same D. lse (in base 2, or natural units under a
    score_mod that may mask) and delta are [B, H, a multiple of the block of queries] float32. bounds: the limits of
    each batch entry, the result of block_ranges.bounds_array. dquery: float32 [B, T, H, D], to which the kernel adds.
    end: copies of the block in which kv_lengths ends. bias, lists, mod, segments: the call's bias, block lists,
    score_mod and segment ids.

    counter: int32 [1], the next work tile of persistent CTAs. sums, arrived: if work tiles are split into parts, the
    float32 sums of dkey and dvalue of each split work tile, and the number of its parts that have finished.

    The kernel takes the arrays in the order of the fields.
    """

    arrived: A | None = None
    bounds: A | None
    counter: Ref | None = None
    delta: A
    bias: Bias | None
    dout: A
    dquery: Ref | None = None
    end: CleanEnd | None
    key: A
    lists: Lists | None
    lse: A
    mod: Mod | None
    query: A
    segments: Segments | None
    sums: A | None = None
    value: A
