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

    query and key are [B, length, H, D], value and dout [B, length, H, Dv], padded to the columns of Widths. lse (in
    base 2, or natural units under a score_mod that may mask) and delta are [B, H, a multiple of the block of queries]
    float32. bounds: int32 [B, 2 or 3], the limits that tracing does not know: the position of query 0, the number of
    keys that count, and with inputs.reach the first query that has keys; None if tracing knows all. dquery: float32 [B,
    T, H, D], to which the kernel adds. end: copies of the keys and values of the block in which kv_lengths ends, with
    zeros past the end; the kernel loads them instead of that block. bias, lists, mod, segments: the call's bias, block
    lists, score_mod and segment ids.

    counter: int32 [1], the next work tile of persistent CTAs. If work tiles are split into parts: sums, float32 [split
    work tiles, 2, block_kv, the larger of D and Dv], the sums of dkey and dvalue over the parts; arrived, int32 [split
    work tiles, warpgroups], the number of parts that have finished.

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
