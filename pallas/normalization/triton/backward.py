"""The backward of layer_norm and rms_norm: dx, dscale and dbias from x and dout.

The number of programs is the number that the GPU runs at once. Each program takes one block of rows after another, and
keeps its sums of dscale and dbias in float32 registers. The sums of the programs are added at the end. For a row of n
16-bit values, 6 n bytes pass through device memory.

Rows of several chunks need two kernels and 10 n bytes. One kernel computes dx; it reads a row twice, the second time
from the L2 cache. The other kernel sums dscale and dbias; its programs own columns, because registers cannot hold the
sums of a whole row.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jax_kernels.inputs.normalization import NormGradients, NormInputs, NormOptions, NormResult
from jax_kernels.pallas.block_specs.normalization_specs import NormBackwardTriton
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.normalization.triton.rows import Refs, Tile, Traits, chunk_loop
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import masked_slice
from jax_kernels.pallas.varying import result_types


def norm_backward(
    inputs: NormInputs,
    options: NormOptions,
    result: NormResult,
    dout: Float[Array, "rows columns"],
    dtotal: Float[Array, "rows columns"] | None = None,
    *,
    config: NormBackwardTriton,
    core_count: int,
    interpret: bool,
) -> NormGradients:
    """The gradients of x, scale and bias of layer_norm or rms_norm, in Triton.

    result: of the forward with the same inputs. dout, dtotal: the cotangents of its out and its total; dtotal may be
    None. The gradients of scale and bias are None if the call lacks these weights. core_count: the number of SMs.
    interpret: runs the kernels in Pallas's interpreter.
    """
    traits = Traits.of(inputs, options, config.block_rows, config.chunk)
    given = {
        "x": inputs.x if result.total is None else result.total,
        "scale": inputs.scale,
        "mean": result.mean,
        "inverse": result.inverse,
        "dout": dout,
        "dtotal": dtotal,
    }
    arrays = {name: x for name, x in given.items() if x is not None}
    sums = [name for name in ("scale", "bias") if getattr(inputs, name) is not None]
    programs = min(core_count * config.programs, traits.row_blocks)
    dx = jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)
    partial_sums = jax.ShapeDtypeStruct((programs, traits.columns), jnp.float32)

    def launch(kernel, name: str, outs: dict[str, jax.ShapeDtypeStruct], grid: tuple[int, ...]) -> dict[str, jax.Array]:
        def body(*refs):
            fields: dict[str, Any] = dict.fromkeys(NormGradients._fields) | dict(
                zip(outs, refs[len(arrays) :], strict=True)
            )
            written = NormGradients(**fields)
            kernel(Refs(**dict(zip(arrays, refs[: len(arrays)], strict=True)), outs=written), traits, programs)

        found = pl.pallas_call(
            body,
            grid=grid,
            out_shape=result_types(list(outs.values()), *arrays.values()),
            compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(*arrays.values())
        return dict(zip(outs, found, strict=True))

    if traits.chunks == 1:
        found = launch(_rows_kernel, "norm_backward_triton", {"x": dx} | dict.fromkeys(sums, partial_sums), (programs,))
    else:
        found = launch(_chunked_rows_kernel, "norm_backward_dx_triton", {"x": dx}, (programs,))
        if sums:
            grid = (traits.chunks, programs)
            found |= launch(_columns_kernel, "norm_backward_sums_triton", dict.fromkeys(sums, partial_sums), grid)
    totals = {name: found[name].sum(axis=0).astype(getattr(inputs, name).dtype) for name in sums}
    return NormGradients(**{"x": found["x"]} | totals)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """The statistics of a block of rows in a kernel, float32 [block_rows, 1]. mean: None for rms_norm."""

    refs: Refs
    traits: Traits
    inverse: jax.Array
    mean: jax.Array | None

    @classmethod
    def load(cls, refs: Refs, tile: Tile) -> "_Rows":
        """Loads the statistics of the rows of `tile`."""
        mean = None if refs.mean is None else tile.load_numbers(refs.mean)
        return cls(refs=refs, traits=tile.traits, inverse=tile.load_numbers(needed(refs.inverse)), mean=mean)

    def normed(self, tile: Tile) -> jax.Array:
        """(x - mean) * inverse of a block of these rows, float32 [block_rows, chunk]."""
        x = tile.load(self.refs.x).astype(jnp.float32)
        return (x if self.mean is None else x - self.mean) * self.inverse

    def dx(
        self, tile: Tile, normed: jax.Array, g: jax.Array, mean_g: jax.Array | None, mean_normed: jax.Array
    ) -> jax.Array:
        """dx of a block, float32: (g - mean(g) - normed * mean(g * normed)) * inverse + dtotal.

        normed, g: (x - mean) * inverse and dout * weight of the block. mean_g, mean_normed: mean(g) and
        mean(g * normed) of the whole rows, [block_rows, 1]; mean_g is None for rms_norm.
        """
        dx = g - normed * mean_normed
        dx = (dx if mean_g is None else dx - mean_g) * self.inverse
        if self.refs.dtotal is not None:
            dx = dx + tile.load(self.refs.dtotal).astype(jnp.float32)
        return dx

    def means(self, g: jax.Array, normed: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """(sum(g) / columns, sum(g * normed) / columns) with sums over a chunk's columns, each [block_rows, 1].

        The first is None for rms_norm. Added over all chunks of a row, these are the row's mean(g) and mean(g *
        normed).
        """
        mean = lambda x: x.sum(axis=1)[:, None] / self.traits.columns
        return (mean(g) if self.traits.options.is_centred else None), mean(g * normed)


def _rows_kernel(refs: Refs, traits: Traits, programs: int) -> None:
    """Runs one program, for rows of one chunk: stores dx of its rows, and their sums for dscale and dbias.

    programs: the number of programs. Program p takes the row blocks p, p + programs, p + 2 * programs, ...
    """
    program = pl.program_id(0)
    zeros = jnp.zeros((traits.block_rows, traits.chunk), jnp.float32)
    names = [name for name in ("scale", "bias") if getattr(refs.outs, name) is not None]
    weight = Tile(traits=traits, row=0, column=0).weight(refs)

    def step(i, sums):
        row = (program + i * programs) * traits.block_rows
        tile = Tile(traits=traits, row=row, column=0)
        rows = _Rows.load(refs, tile)
        normed, dout = rows.normed(tile), tile.load(needed(refs.dout)).astype(jnp.float32)
        g = dout if weight is None else dout * weight
        mean_g, mean_normed = rows.means(g, normed)
        tile.store(refs.outs.x, rows.dx(tile, normed, g, mean_g, mean_normed))
        added = {"scale": dout * normed, "bias": dout}
        return {name: sums[name] + added[name] for name in names}

    # Every program takes equally many blocks. Blocks past the last row add nothing.
    sums = lax.fori_loop(0, pl.cdiv(traits.row_blocks, programs), step, dict.fromkeys(names, zeros))
    for name in names:
        _store_sums(getattr(refs.outs, name), traits, program, 0, sums[name])


def _store_sums(ref: Ref, traits: Traits, program: Index, column: Index, sums: jax.Array) -> None:
    """Adds sums [block_rows, chunk] over the rows, and stores the result in ref[program], from `column` on."""
    exists = Tile(traits=traits, row=0, column=column).column_exists
    plgpu.store(ref.at[program, masked_slice(column, traits.chunk)], sums.sum(axis=0), mask=exists)


def _chunked_rows_kernel(refs: Refs, traits: Traits, programs: int) -> None:
    """Runs one program, for rows of several chunks: stores dx of its rows, and no sums for dscale and dbias.

    programs: the number of programs. Program p takes the row blocks p, p + programs, p + 2 * programs, ...
    """
    program = pl.program_id(0)
    zeros = jnp.zeros((traits.block_rows, 1), jnp.float32)

    def of_rows(i, _):
        row = (program + i * programs) * traits.block_rows
        rows = _Rows.load(refs, Tile(traits=traits, row=row, column=0))

        def terms(column):
            tile = Tile(traits=traits, row=row, column=column)
            dout, weight = tile.load(needed(refs.dout)).astype(jnp.float32), tile.weight(refs)
            return tile, rows.normed(tile), dout if weight is None else dout * weight

        def add(column, state):
            _, normed, g = terms(column)
            mean_g, mean_normed = rows.means(g, normed)
            return state[0] + (0.0 if mean_g is None else mean_g), state[1] + mean_normed

        def write(column, state):
            tile, normed, g = terms(column)
            tile.store(refs.outs.x, rows.dx(tile, normed, g, mean_g, mean_normed))
            return state

        found, mean_normed = chunk_loop(traits, add, (zeros, zeros))
        mean_g = found if traits.options.is_centred else None
        chunk_loop(traits, write, ())
        return ()

    lax.fori_loop(0, pl.cdiv(traits.row_blocks, programs), of_rows, ())


def _columns_kernel(refs: Refs, traits: Traits, programs: int) -> None:
    """Runs one program, for rows of several chunks: stores the sums for dscale and dbias of one chunk of columns.

    programs: the number of programs of a chunk. Program p sums the row blocks p, p + programs, p + 2 * programs, ...
    """
    column, program = pl.program_id(0) * traits.chunk, pl.program_id(1)
    zeros = jnp.zeros((traits.block_rows, traits.chunk), jnp.float32)
    names = [name for name in ("scale", "bias") if getattr(refs.outs, name) is not None]

    def step(i, sums):
        row = (program + i * programs) * traits.block_rows
        tile = Tile(traits=traits, row=row, column=column)
        dout = tile.load(needed(refs.dout)).astype(jnp.float32)
        added = {"scale": lambda: dout * _Rows.load(refs, tile).normed(tile), "bias": lambda: dout}
        return {name: sums[name] + added[name]() for name in names}

    sums = lax.fori_loop(0, pl.cdiv(traits.row_blocks, programs), step, dict.fromkeys(names, zeros))
    for name in names:
        _store_sums(getattr(refs.outs, name), traits, program, column, sums[name])
