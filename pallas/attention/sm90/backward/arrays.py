"""The arrays that the Hopper backward kernels read and add to."""

import dataclasses
from typing import Any

import jax

from jax_kernels.pallas.attention.sm90.features.bias import Bias
from jax_kernels.pallas.attention.sm90.features.block_lists import Lists
from jax_kernels.pallas.attention.sm90.features.score_mod import Mod
from jax_kernels.pallas.attention.sm90.features.segments import Segments
from jax_kernels.pallas.attention.sm90.features.tail_block import CleanEnd


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
    """Arrays in device memory; inside a kernel, their refs. None: the call does not have the array.

    query, key, value and dout are [B, length, H, D], all with the same D. lse (in base 2) and delta are
    [B, H, a multiple of the block of queries] float32. dquery is a float32 ref that a kernel adds to. end: keys and
    values of the block in which kv_lengths ends. counter: of the work tiles of persistent CTAs. sums, arrived: of the
    parts of a work tile, see SplitTail.shared.

    The kernel takes the arrays in the order of the fields.
    """

    arrived: Any = None
    bounds: Any
    counter: Any = None
    delta: Any
    bias: Bias | None
    dout: Any
    dquery: Any = None
    end: CleanEnd | None
    key: Any
    lists: Lists | None
    lse: Any
    mod: Mod | None
    query: Any
    segments: Segments | None
    sums: Any = None
    value: Any
