"""The forward of layer_norm and rms_norm: each row is read once and written once.

A program owns a few whole rows. A row of one chunk stays in registers between its statistics and its output. Longer
rows are read a second time, from the L2 cache. For a row of n 16-bit values, 4 n bytes pass through device memory:
0.127 ms for 32768 x 4096 at 4.24 TB/s.

A quantised output is scaled by the largest magnitude of its row, which is computed in registers too: 3 n bytes,
0.095 ms. Rows of several chunks are read a third time for the scale, again from the L2 cache.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.normalization import NormInputs, NormOptions, NormResult
from jax_kernels.pallas.block_specs.normalization_specs import NormTriton
from jax_kernels.pallas.kernel_types import Index, needed
from jax_kernels.pallas.normalization.triton.rows import Refs, Tile, Traits, chunk_loop
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.rounding import magnitude_bits, scale_of
from jax_kernels.pallas.varying import result_types
from jax_kernels.quantization import FORMATS


def norm_forward(
    inputs: NormInputs, options: NormOptions, *, config: NormTriton, core_count: int, interpret: bool
) -> NormResult:
    """Normalises the rows of inputs.x, or of inputs.x + inputs.residual, in Triton.

    Returns a NormResult: out, in x's shape and dtype; total, x + residual, None without a residual; mean, None for
    rms_norm; and inverse, 1 / the standard deviation (for rms_norm, 1 / the root mean square). mean and inverse have
    one float32 value per row. With options.quantize, out has 8 bits, out_scale a scale for each row, and mean and
    inverse are None. core_count is not used. interpret: runs the kernel in Pallas's interpreter.
    """
    del core_count
    traits = Traits.of(inputs, options, config.block_rows, config.chunk)
    arrays = {name: x for name, x in inputs._asdict().items() if x is not None}
    numbers = jax.ShapeDtypeStruct((traits.rows,), jnp.float32)
    like_x = jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)
    if options.quantize is None:
        outs = {"out": like_x, "inverse": numbers}
    else:  # a quantised call has no gradient, which would read the statistics
        outs = {"out": jax.ShapeDtypeStruct(inputs.x.shape, FORMATS[options.quantize]), "out_scale": numbers}
    if inputs.residual is not None:
        outs["total"] = like_x
    if options.is_centred and options.quantize is None:
        outs["mean"] = numbers

    def body(*refs):
        given, written = refs[: len(arrays)], refs[len(arrays) :]
        fields: dict[str, Any] = dict.fromkeys(NormResult._fields) | dict(zip(outs, written, strict=True))
        results = NormResult(**fields)
        kernel = _kernel if options.quantize is None else _quantized_kernel
        kernel(Refs(**dict(zip(arrays, given, strict=True)), outs=results), traits)

    found = pl.pallas_call(
        body,
        grid=(traits.row_blocks,),
        out_shape=result_types(list(outs.values()), *arrays.values()),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="norm_forward_triton" if options.quantize is None else "norm_forward_quantized_triton",
    )(*arrays.values())
    fields: dict[str, Any] = dict.fromkeys(NormResult._fields) | dict(zip(outs, found, strict=True))
    return NormResult(**fields)


def _kernel(refs: Refs, traits: Traits) -> None:
    """Runs one program: computes the statistics and out of block_rows rows, and stores them."""
    row = pl.program_id(0) * traits.block_rows
    tile = lambda column: Tile(traits=traits, row=row, column=column)
    if traits.chunks == 1:
        first = tile(0)
        x = first.inputs(refs)
        mean, inverse = _statistics(first, x)
        _write(refs, first, x, mean, inverse)
    else:
        mean, inverse = _chunked_statistics(refs, traits, tile)

        def write(column, state):
            at = tile(column)
            _write(refs, at, at.inputs(refs), mean, inverse)
            return state

        chunk_loop(traits, write, ())
    results = refs.outs
    tile(0).store_numbers(results.inverse, inverse[:, 0])
    if results.mean is not None:
        tile(0).store_numbers(results.mean, needed(mean)[:, 0])


def _quantized_kernel(refs: Refs, traits: Traits) -> None:
    """Runs one program: normalises block_rows rows, and stores them in 8 bits with a scale for each row."""
    row = pl.program_id(0) * traits.block_rows
    tile = lambda column: Tile(traits=traits, row=row, column=column)
    results = refs.outs
    if traits.chunks == 1:
        first = tile(0)
        x = first.inputs(refs)
        out = _normed(refs, first, x, *_statistics(first, x))
        scale, inverse_scale = scale_of(_largest(first, out), results.out.dtype)
        first.store(results.out, _rounded(traits, out * inverse_scale))
        if results.total is not None:
            first.store(results.total, x)
    else:
        mean, inverse = _chunked_statistics(refs, traits, tile)

        def normed(column):
            at = tile(column)
            x = at.inputs(refs)
            return at, x, _normed(refs, at, x, mean, inverse)

        def widen(column, largest):
            at, _, out = normed(column)
            return jnp.maximum(largest, _largest(at, out))

        def write(column, state):
            at, x, out = normed(column)
            at.store(results.out, _rounded(traits, out * inverse_scale))
            if results.total is not None:
                at.store(results.total, x)
            return state

        largest = chunk_loop(traits, widen, jnp.zeros((traits.block_rows, 1), jnp.int32))
        scale, inverse_scale = scale_of(largest, results.out.dtype)
        chunk_loop(traits, write, ())
    tile(0).store_numbers(results.out_scale, scale[:, 0])


def _largest(tile: Tile, out: jax.Array) -> jax.Array:
    """The largest magnitude of each row of a block, [block_rows, 1] int32: the bits of the float32 value.

    out: float32 [block_rows, chunk]; values outside the array are ignored.
    """
    return jnp.where(tile.exists, magnitude_bits(out), 0).max(axis=1)[:, None]


def _rounded(traits: Traits, scaled: jax.Array) -> jax.Array:
    """Returns the scaled float32 values, changed such that their conversion to 8 bits rounds to nearest.

    They change only on GPUs that convert by way of float16 (options.quantizes_by_half).
    """
    return odd_halves(scaled) if traits.options.quantizes_by_half else scaled


def odd_halves(x: jax.Array) -> jax.Array:
    """Returns float32 x with float16's last mantissa bit set wherever float16 would drop a set bit of x.

    Without it, a value just above the midpoint of two 8-bit values would become the midpoint, and round down.

    Below compute capability 9.0 Triton truncates float32 to float16 first, and rounds the result to 8 bits.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(jnp.where(bits & 0x1FFF != 0, bits | 0x2000, bits), jnp.float32)


def _sum(x: jax.Array) -> jax.Array:
    """The sum of each row, [rows, 1]."""
    return x.sum(axis=1)[:, None]


def _statistics(tile: Tile, x: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """(mean, inverse) of each row, float32 [block_rows, 1], for rows of one chunk. mean: None for rms_norm.

    x: the whole rows, with 0 outside the array. inverse is 1 / sqrt(variance + eps); for rms_norm, the mean of the
    squares replaces the variance.
    """
    traits, x = tile.traits, x.astype(jnp.float32)
    mean, centred = None, x
    if traits.options.is_centred:
        mean = _sum(x) / traits.columns
        centred = jnp.where(tile.exists, x - mean, 0.0)
    return mean, jax.lax.rsqrt(_sum(jnp.square(centred)) / traits.columns + traits.options.eps)


def _chunked_statistics(
    refs: Refs, traits: Traits, tile: Callable[[Index], Tile]
) -> tuple[jax.Array | None, jax.Array]:
    """(mean, inverse) of each row, float32 [block_rows, 1], for rows of several chunks. mean: None for rms_norm.

    `tile`: a function from the first column of a chunk to the chunk's `Tile`. The means and squared deviations of the
    chunks are joined by the formulas of Chan et al. (1979).
    """
    zeros = jnp.zeros((traits.block_rows, 1), jnp.float32)

    def step(column, state):
        mean, squares = state
        at = tile(column)
        x = at.inputs(refs).astype(jnp.float32)
        if not traits.options.is_centred:
            return mean, squares + _sum(jnp.square(x))
        before = column.astype(jnp.float32)
        count = jnp.minimum(traits.columns - column, traits.chunk).astype(jnp.float32)
        own = _sum(x) / count
        share, apart = count / (before + count), own - mean
        own_squares = _sum(jnp.square(jnp.where(at.exists, x - own, 0.0)))
        return mean + apart * share, squares + own_squares + jnp.square(apart) * before * share

    mean, squares = chunk_loop(traits, step, (zeros, zeros))
    inverse = jax.lax.rsqrt(squares / traits.columns + traits.options.eps)
    return (mean if traits.options.is_centred else None), inverse


def _normed(refs: Refs, tile: Tile, x: jax.Array, mean: jax.Array | None, inverse: jax.Array) -> jax.Array:
    """(x - mean) * inverse * (scale + scale_offset) + bias of a block, float32 [block_rows, chunk].

    x: the block. mean, inverse: [block_rows, 1]; mean is None for rms_norm.
    """
    out = x.astype(jnp.float32)
    out = (out if mean is None else out - mean) * inverse
    if (weight := tile.weight(refs)) is not None:
        out = out * weight
    if refs.bias is not None:
        out = out + tile.load_columns(refs.bias)
    return out


def _write(refs: Refs, tile: Tile, x: jax.Array, mean: jax.Array | None, inverse: jax.Array) -> None:
    """Normalises a block x, and stores out, and x as total if there is a residual."""
    tile.store(refs.outs.out, _normed(refs, tile, x, mean, inverse))
    if refs.outs.total is not None:
        tile.store(refs.outs.total, x)
