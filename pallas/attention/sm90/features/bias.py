"""Biases in the Hopper kernels, and masks with one row for all queries.

A bias with a value per query and key goes through shared memory. The tensor memory accelerator copies a tile of it
while the matmuls of the previous tile run; one stage is enough, because a step reads it early. A bias or a mask with
one row for all queries is a value per key. Other masks are lists (block_lists.py).

Broadcast axes of batch and heads are read in place.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.attention import AttentionInputs
from jax_kernels.pallas.attention.softmax import LN2, LOG2E
from jax_kernels.pallas.kernel_types import Barrier, Index, Ref, needed
from jax_kernels.pallas.mosaic.layouts import COLUMN, ROW, SWIZZLED, SWIZZLED_F32, WGMMA
from jax_kernels.pallas.mosaic.scratch import barrier_ref, smem_ref


class Bias[A: jax.Array | Ref](NamedTuple):
    """The bias of a call in the form that a Hopper kernel reads.

    A tile's rows are queries and its columns keys; if transposed, the reverse. by_key: [B or 1, H or 1, S] float32, a
    bias with one value per key for all queries, times log2(e). tiles: [B or 1, H or 1, rows, columns], a bias with a
    value per query and key, in its own dtype. by_key or tiles is None; both are None without a bias.
    """

    by_key: A | None = None
    tiles: A | None = None

    @property
    def has_bias(self) -> bool:
        return self.by_key is not None or self.tiles is not None

    def stage(self, rows: int, columns: int, keys: int, warpgroups: int) -> "Stage | None":
        """The shared memory for the bias of one kv loop step, with its barriers; None without a bias.

        Returns scratch specifications for pl.run_scoped. rows, columns: the size of a tile of a bias per query and key.
        keys: the number of keys of a step, for a bias per key. warpgroups: the number of warpgroups that read the bias.
        """
        if not self.has_bias:
            return None
        tile = by_key = None
        if self.tiles is not None:
            transforms = SWIZZLED if self.tiles.dtype.itemsize == 2 else SWIZZLED_F32
            tile = smem_ref((rows, columns), self.tiles.dtype, transforms=transforms)
        if self.by_key is not None:
            by_key = smem_ref((keys,), jnp.float32)
        copies = (tile is not None) + (by_key is not None)
        return Stage(tile, by_key, barrier_ref(num_arrivals=copies), barrier_ref(num_arrivals=warpgroups))


def of_head(ref: Ref, b: Index, h: Index) -> Ref:
    """The part of an array [B or 1, H or 1, ...] in memory that belongs to batch entry b and head h."""
    return ref.at[0 if ref.shape[0] == 1 else b, 0 if ref.shape[1] == 1 else h]


class Stage(NamedTuple):
    """The bias of one step in shared memory, with a barrier for its arrival (`ready`) and one for its release (`free`).

    tile: a bias per query and key. by_key: a bias per key. One of them is None. A warpgroup calls plgpu.commit_smem()
    after it has read the bias and before it arrives at `free`: the next copy overwrites this memory.
    """

    tile: Ref | None
    by_key: Ref | None
    ready: Barrier
    free: Barrier

    def fill(self, bias: Bias, b, h, row_start, column_start, key_start) -> None:
        """Starts the copies of a step's bias from device memory to this stage. The calling thread has waited for
        `free`.

        row_start, column_start: of the tile of a bias per query and key. key_start: of a bias per key.
        """
        if self.tile is not None:
            starts = zip((row_start, column_start), self.tile.shape, strict=True)
            source = of_head(needed(bias.tiles), b, h).at[tuple(pl.ds(start, size) for start, size in starts)]
            plgpu.copy_gmem_to_smem(source, self.tile, self.ready)
        if self.by_key is not None:
            source = of_head(needed(bias.by_key), b, h).at[pl.ds(key_start, self.by_key.shape[0])]
            plgpu.copy_gmem_to_smem(source, self.by_key, self.ready)

    def added(self, scores, factor: float, row_start, *, transposed: bool, natural: bool = False):
        """scores * factor plus this stage's bias; the sum is in base 2, or in natural units if `natural`.

        scores: the rows of the tile from row_start on. transposed: rows are keys. natural is only for a bias per query
        and key.

        The caller subtracts a maximum or lse from the result, and must not multiply the result before. The compiler
        would fuse this multiplication with the subtraction, without the rounding between them, which is hundreds under
        a bias of -1e10. For the same reason the last operation here is the sum, not the multiplication by log2(e);
        this costs registers. Where rows are keys, the caller clamps P to 1, and the multiplication may come last.
        """
        rows = pl.ds(row_start, scores.shape[0])
        if self.tile is not None:
            bias = plgpu.load(self.tile.at[rows], layout=WGMMA).astype(jnp.float32)
            if natural:
                return scores * factor + bias
            return (scores * factor + bias) * LOG2E if transposed else scores * (factor * LOG2E) + bias * LOG2E
        ref, layout = (needed(self.by_key).at[rows], ROW) if transposed else (needed(self.by_key), COLUMN)
        by_key = plgpu.load(ref, layout=layout, optimized=False)
        return scores * (factor * LOG2E) + lax.broadcast_in_dim(by_key, scores.shape, [0 if transposed else 1])


# The lowest finite bias of a key, in base 2. It is above softmax.LOWEST, so that a row still has keys if all have it.
LOWEST_OF_KEY = -2.9e38


class ByKey(NamedTuple):
    """A bias per key as the kernel uses it, float32, -inf where it masks out. The kernel's smallest finite bias is
    LOWEST_OF_KEY, -2.9e38 in base 2; lower finite values are raised to it.

    base2: [B or 1, H or 1, S], times log2(e). natural: the same bias in natural units; a raised bias becomes `lowest`.
    lowest: [B or 1, H or 1], the highest of the values that were raised, as the caller gave it; -inf if none was.
    """

    base2: jax.Array
    natural: jax.Array
    lowest: jax.Array

    @classmethod
    def of(cls, bias: jax.Array) -> "ByKey":
        """A bias per key in the form of the kernel: in base 2, where lower finite values are raised to -2.9e38.

        bias: [B or 1, H or 1, 1, S], of any float dtype, in natural units; -inf masks out and stays -inf.
        """
        given = bias[:, :, 0].astype(jnp.float32)
        is_low = (given * LOG2E <= LOWEST_OF_KEY) & (given > -jnp.inf)
        base2 = jnp.where(is_low, LOWEST_OF_KEY, given * LOG2E)
        lowest = jnp.where(is_low, given, -jnp.inf).max(axis=-1)
        # The maximum keeps XLA from merging the two factors into a factor of 1.
        natural = jnp.where(is_low, lowest[..., None], jnp.maximum(base2, -jnp.inf) * LN2)
        return cls(base2, natural, lowest)

    def in_lse(self, lse: jax.Array) -> jax.Array:
        """The forward's lse [B, H, T], where rows whose keys all had a raised bias get `lowest`.

        In these rows the kernel's lse is LOWEST_OF_KEY in natural units, which no caller gave as a bias.
        """
        is_low = (lse < 0.999 * LOWEST_OF_KEY * LN2) & (lse > -jnp.inf)
        return jnp.where(is_low, self.lowest[..., None], lse)


def with_bias_as_in_lse(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs with a bias per key replaced by the bias that the forward kernel used, rounded to base 2 and back.

    Scores minus the forward's lse are then exact in the backward. Inputs without a bias per key are returned unchanged.
    """
    if inputs.bias is None or inputs.bias.shape[2] > 1:
        return inputs
    return inputs._replace(bias=ByKey.of(inputs.bias).natural[:, :, None])


def bias_of(inputs: AttentionInputs, *, transposed: bool) -> Bias | None:
    """The bias that the kernel reads, from inputs.bias and from a mask with one row for all queries; None without both.

    transposed: rows are keys. The last axis of bias and mask is S, not 1. A mask becomes a bias per key of 0 or -inf, a
    small array. With a bias per query and key the block lists hold the mask. This bias is copied if it is transposed,
    or if a side is not a multiple of the size that the tensor memory accelerator copies.
    """
    bias, mask = inputs.bias, inputs.mask
    if bias is None and mask is None:
        return None
    if bias is not None and bias.shape[2] > 1:
        tiles = _padded(bias.swapaxes(2, 3) if transposed else bias, 8, 64 if bias.dtype.itemsize == 2 else 32)
        return Bias(tiles=tiles)
    by_key = jnp.float32(0) if bias is None else ByKey.of(bias).base2
    if mask is not None:
        by_key = by_key + jnp.where(cast(jax.Array, mask)[:, :, 0], 0.0, -jnp.inf)
    return Bias(jnp.pad(by_key, [(0, 0), (0, 0), (0, -by_key.shape[2] % 8)]))


def _padded(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """x [.., .., T, S] with its last two axes padded with zeros to multiples of `rows` and `columns`."""
    pad = [(0, 0), (0, 0), (0, -x.shape[2] % rows), (0, -x.shape[3] % columns)]
    return jnp.pad(x, pad) if pad[2][1] or pad[3][1] else x
