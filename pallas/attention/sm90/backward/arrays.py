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
    """Arrays in device memory; inside a kernel, their refs. None: the call does not have the array.

    query, key, value and dout are [B, length, H, D], all with the same D. lse (in base 2) and delta are
    [B, H, a multiple of the block of queries] float32. dquery is a float32 ref that a kernel adds to. end: keys and
    values of the block in which kv_lengths ends. counter: of the work tiles of persistent CTAs. sums, arrived: of the
    parts of a work tile, see SplitTail.shared.

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
