"""The Triton kernels of linear_cross_entropy: matmuls whose epilogues reduce the logits, or make their cotangents.

A program owns a work tile: block_m tokens by block_n entries of the vocabulary. Its sums are the tile's logits, which
stay in registers. In the forward it stores each token's maximum and sum of exponentials over its entries, which XLA
merges; the program whose entries have a token's target stores the target's logit. In the backward it computes the
logits again, and stores their cotangents, in x's dtype, for the matmuls of the gradients. One launch of the backward
has a chunk of the vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.linear_cross_entropy import LossInputs, LossOptions, Statistics, product
from jax_kernels.pallas.block_specs.matmul_specs import MatmulTriton
from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.matmul.triton.state import Span, Tile
from jax_kernels.pallas.matmul.work_tiles import banded
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import fit
from jax_kernels.pallas.varying import result_types
from jax_kernels.tracing.manual_axes import as_varying, varying_axes

# Bytes of the cotangents of logits in memory at once. Not measured.
COTANGENT_BYTES = 2**29
# Entries of the vocabulary of a part of a work tile in the epilogue.
EPILOGUE_COLUMNS = 64
LEAST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch: m tokens, n entries of a chunk of the vocabulary, depth k, and blocks that are
    shrunk to fit them.

    vocabulary: the number of entries of all chunks.
    """

    options: LossOptions
    vocabulary: int
    m: int
    n: int
    k: int
    block_m: int
    block_n: int
    block_k: int
    row_group: int

    @classmethod
    def of(cls, inputs: LossInputs, options: LossOptions, config: MatmulTriton, vocabulary: int) -> "Traits":
        """The facts of a launch for these rows of w. inputs.rows: of a chunk of the vocabulary."""
        (m, k), n = inputs.x.shape, inputs.rows.shape[0]
        return cls(
            options=options,
            vocabulary=vocabulary,
            m=m,
            n=n,
            k=k,
            block_m=fit(config.block_m, m),
            block_n=fit(config.block_n, n),
            block_k=fit(config.block_k, k),
            row_group=config.row_group,
        )

    @property
    def m_blocks(self) -> int:
        return pl.cdiv(self.m, self.block_m)

    @property
    def n_blocks(self) -> int:
        return pl.cdiv(self.n, self.block_n)

    def tile(self) -> tuple[Tile, jax.Array]:
        """(the work tile of this program, the index of its block of entries)."""
        i, j = banded(pl.program_id(0), self.m_blocks, self.n_blocks, self.row_group)
        rows = Span(start=i * self.block_m, size=self.block_m, length=self.m)
        return Tile(rows=rows, columns=Span(start=j * self.block_n, size=self.block_n, length=self.n)), j

    def logits(self, tile: Tile, x: Ref, rows: Ref) -> list[tuple[Tile, jax.Array]]:
        """Pairs of a part of the tile and its capped logits, float32."""

        def step(i: jax.Array, sums: jax.Array) -> jax.Array:
            depth = Span(start=i * self.block_k, size=self.block_k, length=self.k)
            a, b = Tile(tile.rows, depth).load(x), Tile(tile.columns, depth).load(rows)
            contracted = (((1,), (1,)), ((), ()))
            return sums + lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)

        sums = lax.fori_loop(0, pl.cdiv(self.k, self.block_k), step, jnp.zeros(tile.shape, jnp.float32))
        parts, cap = tile.parts(EPILOGUE_COLUMNS), self.options.softcap
        of_parts = lax.split(sums, [part.columns.size for part in parts], axis=1)
        return [(part, z if cap is None else cap * jnp.tanh(z / cap)) for part, z in zip(parts, of_parts, strict=True)]


def statistics(
    inputs: LossInputs, options: LossOptions, *, config: MatmulTriton, core_count: int, interpret: bool
) -> Statistics:
    """The Statistics of each token, [M]. x: [M, D]. No axis is empty. core_count: not used."""
    traits = Traits.of(inputs, options, config, inputs.rows.shape[0])
    partial = jax.ShapeDtypeStruct((traits.n_blocks, traits.m), jnp.float32)
    types = [partial, partial, jax.ShapeDtypeStruct((traits.m,), jnp.float32)]
    types += [partial] if options.label_smoothing else []
    arrays = (inputs.x, inputs.rows.astype(inputs.x.dtype), inputs.targets)
    kernel = functools.partial(_statistics_kernel, traits)
    largest, total, chosen, *sums = _launched(kernel, traits, arrays, types, config, interpret, "cross_entropy_triton")
    above = largest.max(axis=0)
    total = (total * jnp.exp(largest - above)).sum(axis=0)
    is_inside = (inputs.targets >= 0) & (inputs.targets < traits.vocabulary)
    return Statistics(
        lse=above + jnp.log(total),
        chosen=jnp.where(is_inside, chosen, 0),
        mean=sums[0].sum(axis=0) / traits.vocabulary if sums else None,
    )


def gradients(
    inputs: LossInputs,
    options: LossOptions,
    lse: jax.Array,
    cotangent: jax.Array,
    *,
    config: MatmulTriton,
    core_count: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of (x, rows), in float32 and in rows' dtype, chunk by chunk of the vocabulary.

    cotangent: of the losses, float32 [M]; 0 for tokens that do not count. Float16 rows have a float32 gradient.
    """
    x, rows, _ = inputs
    vocabulary, depth = rows.shape
    count = _chunk_count(x.shape[0], vocabulary, x.dtype.itemsize)
    chunk = pl.cdiv(vocabulary, count)
    padded = jnp.pad(rows.astype(x.dtype), ((0, count * chunk - vocabulary), (0, 0))).reshape(count, chunk, depth)
    wide = jnp.float32 if rows.dtype == jnp.float16 else rows.dtype
    traits = Traits.of(inputs._replace(rows=padded[0]), options, config, vocabulary)
    dlogits = jax.ShapeDtypeStruct((traits.m, chunk), x.dtype)

    def one(dx: jax.Array, of_chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        own, first = of_chunk
        arrays = (x, own, inputs.targets, lse, cotangent, first)
        kernel, name = functools.partial(_cotangent_kernel, traits), "cross_entropy_cotangents_triton"
        (made,) = _launched(kernel, traits, arrays, [dlogits], config, interpret, name)
        return dx + product("mv,vd->md", made, own), product("mv,md->vd", made, x).astype(wide)

    firsts = (chunk * jnp.arange(count, dtype=jnp.int32))[:, None]
    start = as_varying(jnp.zeros(x.shape, jnp.float32), varying_axes(inputs, lse, cotangent))
    dx, drows = lax.scan(one, start, (padded, firsts))
    return dx, drows.reshape(count * chunk, depth)[:vocabulary]


def _chunk_count(tokens: int, vocabulary: int, itemsize: int) -> int:
    """The number of chunks of the vocabulary. If possible, they are equal, so that w is not padded."""
    least = min(max(pl.cdiv(tokens * vocabulary * itemsize, COTANGENT_BYTES), 1), vocabulary)
    return next((count for count in range(least, 2 * least + 1) if vocabulary % count == 0), least)


def _launched(
    kernel: Callable[..., None],
    traits: Traits,
    arrays: Sequence[jax.Array],
    types: Sequence[Any],
    config: MatmulTriton,
    interpret: bool,
    name: str,
) -> Sequence[jax.Array]:
    """The results of a kernel with a program for each work tile."""
    return pl.pallas_call(
        kernel,
        grid=(traits.m_blocks * traits.n_blocks,),
        out_shape=result_types(list(types), *arrays),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name=name,
    )(*arrays)


def _values(rows: Span, ref: Ref, other: Any) -> jax.Array:
    """The values of an array [M] for the rows; `other` past its end."""
    exists = rows.exists
    return plgpu.load(ref.at[rows.slice], mask=exists, other=None if exists is None else jnp.asarray(other, ref.dtype))


def _columns(part: Tile) -> jax.Array:
    """int32 [rows, columns]: the index in the chunk of each column of the part."""
    return part.columns.start + lax.broadcasted_iota(jnp.int32, part.shape, 1)


def _statistics_kernel(traits: Traits, x: Ref, rows: Ref, targets: Ref, *results: Ref) -> None:
    """Stores the work tile's maxima, sums of exponentials, and chosen logits; with label smoothing also the sums."""
    tile, j = traits.tile()
    parts = traits.logits(tile, x, rows)
    target = _values(tile.rows, targets, -1)
    size = tile.rows.size
    largest = jnp.full((size,), LEAST, jnp.float32)
    chosen, summed = jnp.zeros((size,), jnp.float32), jnp.zeros((size,), jnp.float32)
    for part, z in parts:
        columns = _columns(part)
        exists = columns < traits.n
        largest = jnp.maximum(largest, jnp.where(exists, z, LEAST).max(axis=1))
        chosen = chosen + jnp.where(columns == target[:, None], z, 0.0).sum(axis=1)
        if traits.options.label_smoothing:
            summed = summed + jnp.where(exists, z, 0.0).sum(axis=1)
    total = jnp.zeros((size,), jnp.float32)
    for part, z in parts:
        total = total + jnp.where(_columns(part) < traits.n, jnp.exp(z - largest[:, None]), 0.0).sum(axis=1)
    is_mine = (target >= tile.columns.start) & (target < jnp.minimum(tile.columns.start + tile.columns.size, traits.n))
    plgpu.store(results[2].at[tile.rows.slice], chosen, mask=is_mine)
    for ref, values in zip((*results[:2], *results[3:]), (largest, total, summed), strict=False):
        plgpu.store(ref.at[j, tile.rows.slice], values, mask=tile.rows.exists)


def _cotangent_kernel(
    traits: Traits, x: Ref, rows: Ref, targets: Ref, lse: Ref, cotangent: Ref, first: Ref, result: Ref
) -> None:
    """Stores the cotangents of the work tile's part of x @ rows.T. first: [1], the id of the chunk's first entry."""
    options = traits.options
    tile, _ = traits.tile()
    parts = traits.logits(tile, x, rows)
    # Rows past the last token have lse 0, and a cotangent of 0 is not stored.
    of_lse, of_loss = _values(tile.rows, lse, 0.0)[:, None], _values(tile.rows, cotangent, 0.0)[:, None]
    target, start = _values(tile.rows, targets, -1)[:, None], plgpu.load(first.at[pl.ds(0, 1)])[:, None]
    for part, z in parts:
        ids = start + _columns(part)
        share = jnp.exp(z - of_lse)
        share = share * (1 + 2 * options.z_loss * of_lse) if options.z_loss else share
        share = share - jnp.where(ids == target, 1.0 - options.label_smoothing, 0.0)
        share = share - options.label_smoothing / traits.vocabulary if options.label_smoothing else share
        if options.softcap is not None:
            capped = z / options.softcap
            share = share * (1 - capped * capped)
        part.store(result, jnp.where(ids < traits.vocabulary, share * of_loss, 0.0))
