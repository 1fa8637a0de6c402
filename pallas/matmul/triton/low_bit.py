"""The Triton matmul of x and low-bit weights, with the matmul's epilogue.

Device memory is read at 4 or 8 bits per weight. A program loads the stored values of block_n columns, [block_n, bytes],
through the pipeline of stages that Triton makes of the loop, and unpacks them exactly to 16-bit values in registers.
The products of values that share a scale are summed first, and the sum is scaled in float32, so that weights are not
rounded.

If there are few work tiles, several programs split a tile's inner dimension, as in the 16-bit matmul.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.pallas.block_specs.matmul_specs import MatmulLowBitTriton
from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.matmul.refs import MatmulInputRefs, MatmulResultRefs
from jax_kernels.pallas.matmul.triton import matmul as plain
from jax_kernels.pallas.matmul.triton.dequantize import unpacked
from jax_kernels.pallas.matmul.triton.state import Span, Sums, Tile, Traits
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import SMALLEST, both, fit, iota
from jax_kernels.quantization.formats import LowBit, unpack_scale

__all__ = ["LowBitTraits", "matmul"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowBitTraits(Traits):
    """The static facts of a launch that multiplies x [m, k] by low-bit weights, stored as [n, bytes].

    The padded k is k rounded up to a multiple of layout.unit, as the weights are stored. block_k is a multiple of
    layout.unit, and divides the padded k. layout: the format of the weights. interpret: whether the kernel runs in
    Pallas's interpreter.
    """

    config: MatmulLowBitTriton  # type: ignore[assignment]
    layout: LowBit
    interpret: bool

    @classmethod
    def of(  # type: ignore[override]
        cls,
        inputs: MatmulInputs,
        options: MatmulOptions,
        config: MatmulLowBitTriton,
        core_count: int,
        interpret: bool = False,
    ) -> "LowBitTraits":
        """The static facts of a launch with these inputs. Blocks shrink to fit a small matmul."""
        layout = options.low_bit
        assert layout is not None
        m, n, k = options.sizes(inputs)
        units = layout.padded(k) // layout.unit
        together = max(x for x in range(1, config.block_k // layout.unit + 1) if units % x == 0)
        return cls(
            options=options,
            config=config,
            m=m,
            n=n,
            k=k,
            block_m=fit(config.block_m, m),
            block_n=fit(config.block_n if inputs.w_up is None else max(SMALLEST, config.block_n // 2), n),
            block_k=together * layout.unit,
            core_count=core_count,
            layout=layout,
            interpret=interpret,
        )

    @property
    def k_steps(self) -> int:
        """The number of steps of a work tile, over the padded inner dimension."""
        return self.layout.padded(self.k) // self.block_k

    @property
    def steps_of_split(self) -> int:
        """The number of steps of a program: the least with which each SM has at most config.programs programs.

        All k_steps if config.programs is None.
        """
        most = 1 if self.config.programs is None else self.config.programs * self.core_count // self.tiles
        return pl.cdiv(self.k_steps, max(1, most))

    def load_x(self, ref: Ref, rows: Span, start: Index, size: int) -> jax.Array:
        """Loads `rows` of x, and `size` columns from `start` on, as [rows, size], with 0 outside x."""
        within = None if self.k == self.layout.padded(self.k) else start + iota(size) < self.k
        mask = both(rows.exists, within, (rows.size, size))
        other = None if mask is None else jnp.zeros((), ref.dtype)
        return plgpu.load(ref.at[rows.slice, pl.ds(start, size)], mask=mask, other=other)


def matmul(
    inputs: MatmulInputs, options: MatmulOptions, *, config: MatmulLowBitTriton, core_count: int, interpret: bool
) -> MatmulResult:
    """Computes activation(x @ w + bias) * (x @ w_up) + residual in Triton, for low-bit w and w_up.

    Terms that the call lacks are left out. M, N and K are not 0. core_count: the number of SMs. interpret: runs the
    kernels in Pallas's interpreter.
    """
    inputs = jax.tree.map(_as_bytes, inputs)
    traits = LowBitTraits.of(inputs, options, config, core_count, interpret)
    return plain.launched(traits, inputs, kernels=(_kernel, _split_kernel), name="matmul_low_bit", interpret=interpret)


def _as_bytes(x: jax.Array) -> jax.Array:
    """A float8 array as uint8; other arrays unchanged."""
    is_float8 = x.dtype in (jnp.float8_e4m3fn, jnp.float8_e8m0fnu)
    return lax.bitcast_convert_type(x, jnp.uint8) if is_float8 else x


def _kernel(traits: LowBitTraits, inputs: MatmulInputRefs, results: MatmulResultRefs) -> None:
    """Runs one program: computes a work tile over the whole inner dimension, with the epilogue, and stores it."""
    tile = traits.tile(pl.program_id(0))
    plain.epilogue(traits, tile, _sums(traits, inputs, tile, 0, traits.k_steps), inputs, results)


def _split_kernel(traits: LowBitTraits, inputs: MatmulInputRefs, results: Sums) -> None:
    """Runs one program: stores the sums of a work tile over the program's part of the inner dimension (its split)."""
    plain.store_split(traits, functools.partial(_sums, traits, inputs), results)


def _sums(traits: LowBitTraits, inputs: MatmulInputRefs, tile: Tile, first: Index, last: Index) -> Sums:
    """The float32 sums of a work tile, x @ w and x @ w_up, over the steps from `first` up to, not including, `last`."""
    layout, weights = traits.layout, [w for w in (inputs.w, inputs.w_up) if w is not None]
    scales = [scale for scale in (inputs.w_scale, inputs.w_up_scale) if scale is not None]
    units = traits.block_k // layout.unit

    def step(i, sums):
        for nth in range(units):
            sums = _unit(traits, tile, inputs.x, weights, scales, i * units + nth, sums)
        return sums

    sums = lax.fori_loop(first, last, step, [jnp.zeros(tile.shape, jnp.float32) for _ in weights])
    if layout.group is None:
        sums = [total * tile.load_columns(scale) for total, scale in zip(sums, scales, strict=True)]
    return Sums(*sums)


def _unit(
    traits: LowBitTraits,
    tile: Tile,
    x_ref: Ref,
    weights: list[Ref],
    scales: list[Ref],
    unit: Index,
    sums: list[jax.Array],
) -> list[jax.Array]:
    """Returns the sums plus the scaled matmul of x and a unit of the weights.

    weights, scales: refs, one for each matmul. unit: the index of the unit along the inner dimension. sums: for each
    matmul, float32 [rows, columns] of the work tile.
    """
    layout, dtype = traits.layout, x_ref.dtype
    parts = 2 if layout.is_packed else 1
    size = layout.unit // parts
    xs = [traits.load_x(x_ref, tile.rows, unit * layout.unit + nth * size, size) for nth in range(parts)]
    stored = Tile(tile.columns, Span(start=unit * layout.unit_bytes, size=layout.unit_bytes, length=layout.unit_bytes))
    of_unit, found = layout.scales_of_unit, []
    for total, w, scale_ref in zip(sums, weights, scales, strict=True):
        # Loaded before the products, which hide the wait for the loads.
        factors = [_scale(tile, scale_ref, _group(layout, unit, nth)) for nth in range(of_unit)]
        halves = unpacked(stored.load(w), layout, dtype, traits.interpret)
        products = [functools.partial(traits.dot, x, half) for x, half in zip(xs, halves, strict=True)]
        if of_unit == len(products) and factors:
            for product, factor in zip(products, factors, strict=True):
                total = total + product() * factor
        elif factors:
            total = total + sum(product() for product in products) * factors[0]
        else:
            for product in products:
                total = total + product()
        found.append(total)
    return found


def _group(layout: LowBit, unit: Index, nth: int) -> Index:
    """The index, along the inner dimension, of scale `nth` of the scales of a unit."""
    if layout.group is not None and layout.group > layout.unit:
        return lax.div(unit, jnp.int32(layout.group // layout.unit))
    return unit * layout.scales_of_unit + nth


def _scale(tile: Tile, ref: Ref, group: Index) -> jax.Array:
    """Loads the scales of a work tile's columns, [1, columns] float32.

    ref: [groups, n]. group: the index of the values along the inner dimension that share a scale.
    """
    mask = tile.columns.exists
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return unpack_scale(plgpu.load(ref.at[group, tile.columns.slice], mask=mask, other=other))[None]
