"""grouped_matmul in plain jnp: the implementation "xla", and the equations of the kernels.

jax.lax.ragged_dot on a GPU multiplies all rows by the weights of all groups. Here a loop over tiles, each with rows of
one group, multiplies each row by its own group's weights.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.inputs.group_tiles import GroupTiles, group_of_rows, group_offsets, group_tiles
from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions, GroupedResult, WeightGradientInputs
from jax_kernels.inputs.matmul import scale_shares
from jax_kernels.reference.matmul import float32_sums, in_turn

__all__ = ["gathered", "grouped_matmul", "sum_of_rows", "weight_gradient"]

# Fewer rows leave tensor cores idle; more rows waste work in a group's last tile.
LEAST_ROWS, MOST_ROWS = 16, 1024


def grouped_matmul(inputs: GroupedInputs, options: GroupedOptions) -> GroupedResult:
    """The GroupedResult of a call, by the equation in GroupedOptions' docstring. Products are summed in float32."""
    groups, rows, columns, _ = options.sizes(inputs)
    if rows == 0 or groups == 0:
        out = jnp.zeros((rows, columns), options.out_dtype)
        return GroupedResult(*[out] * _count(inputs, options))
    offsets, block = group_offsets(inputs.group_sizes, rows), _block(rows, groups)
    tiles = group_tiles(offsets, rows, block)

    def of_tile(tile: GroupTiles) -> list[jax.Array]:
        group = jnp.minimum(tile.group, groups - 1)
        axes = 1, 1 if options.transpose_w else 0
        multiply: Any = lambda x, w: _dot(_rows(x, tile, block, inputs.gather), w[group], axes, options)

        def scaled(z: Any, w_scale: Any) -> Any:
            if inputs.x_scale is None or w_scale is None:
                return z
            first, last = scale_shares(_rows(inputs.x_scale[:, None], tile, block, inputs.gather))
            return in_turn(z, first, w_scale[group], last)

        z = multiply(inputs.x, inputs.w)
        z = scaled(z if inputs.x_up is None else z + multiply(inputs.x_up, inputs.w_up), inputs.w_scale)
        z = z if inputs.bias is None else z + inputs.bias[group][None].astype(jnp.float32)
        out: Any = z if options.activation is None else options.activation(z)
        up: Any = None
        if inputs.is_gated:
            up = scaled(multiply(inputs.x, inputs.w_up), inputs.w_up_scale)
            out = out * up
        return [y.astype(options.out_dtype) for y in (out, z, up)[: _count(inputs, options)]]

    group = group_of_rows(offsets, rows)
    tile = (lax.iota(jnp.int32, rows)[:, None] >= tiles.end[None]).sum(axis=1, dtype=jnp.int32)
    source = tile * block + lax.iota(jnp.int32, rows) - tiles.first[tile]
    exists = (group < groups)[:, None]
    of_tiles = [y.reshape(y.shape[0] * block, columns) for y in lax.map(of_tile, tiles)]
    return GroupedResult(*(jnp.where(exists, y[source], 0) for y in of_tiles))


def _count(inputs: GroupedInputs, options: GroupedOptions) -> int:
    """The number of results of a call."""
    return (3 if inputs.is_gated else 2) if options.saves_preactivation else 1


def weight_gradient(inputs: WeightGradientInputs, options: GroupedOptions) -> jax.Array:
    """The gradient of w: for each group, the sum of x[i]ᵀ dz[i] over its rows, in float32, rounded once.

    [G, K, N] in options.out_dtype; [G, N, K] with transpose_w.
    """
    operands = (inputs.dz, None), (inputs.x, inputs.gather)
    (first, of_first), (second, of_second) = operands if options.transpose_w else operands[::-1]
    groups, rows = inputs.group_sizes.shape[0], inputs.dz.shape[0]
    total = jnp.zeros_like(first, jnp.float32, shape=(groups, first.shape[1], second.shape[1]))
    if rows == 0 or groups == 0:
        return total.astype(options.out_dtype)
    block = _block(rows, groups)

    def step(total: jax.Array, tile: GroupTiles) -> tuple[jax.Array, None]:
        group = jnp.minimum(tile.group, groups - 1)
        exists = (tile.first + lax.iota(jnp.int32, block) < tile.end) & (tile.group < groups)
        found = (_rows(y, tile, block, gather) for y, gather in ((first, of_first), (second, of_second)))
        a, b = (jnp.where(exists[:, None], y, 0) for y in found)
        return lax.dynamic_update_index_in_dim(total, total[group] + _dot(a, b, (0, 0), options), group, 0), None

    total, _ = lax.scan(step, total, group_tiles(group_offsets(inputs.group_sizes, rows), rows, block))
    return total.astype(options.out_dtype)


def sum_of_rows(dz: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """float32 [G, N]: the sum of the rows of each group. dz: [M, N]. A group's NaN stays in the group."""
    rows, groups = dz.shape[0], group_sizes.shape[0]
    if rows == 0 or groups == 0:
        return jnp.zeros((groups, dz.shape[1]), jnp.float32)
    block = _block(rows, groups)
    tiles = group_tiles(group_offsets(group_sizes, rows), rows, block)
    row = tiles.first[:, None] + lax.iota(jnp.int32, block)[None]
    exists = (row < tiles.end[:, None])[..., None]
    found = dz.at[jnp.minimum(row, rows - 1)].get(mode="promise_in_bounds")
    of_tiles = jnp.where(exists, found.astype(jnp.float32), 0).sum(axis=1)
    is_in_group = (tiles.group[None] == lax.iota(jnp.int32, groups)[:, None])[..., None]
    return jnp.where(is_in_group, of_tiles[None], 0).sum(axis=1)


def _block(rows: Any, groups: Any) -> int:
    """The rows of a tile: about a group's mean size. Symbolic sizes have no mean."""
    if not (isinstance(rows, int) and isinstance(groups, int)):
        return 128
    return min(max(LEAST_ROWS, 1 << (-(-rows // groups) - 1).bit_length()), MOST_ROWS)


def gathered(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], with rows of 0 for an index outside of x."""
    if x.shape[0] == 0:
        return jnp.zeros_like(x, shape=(index.shape[0], *x.shape[1:]))
    exists = (index >= 0) & (index < x.shape[0])
    # No index is out of bounds, which checkify would report.
    found = x.at[jnp.where(exists, index, 0)].get(mode="promise_in_bounds")
    return jnp.where(exists.reshape(-1, *[1] * (x.ndim - 1)), found, 0)


def _rows(x: jax.Array, tile: GroupTiles, block: int, gather: jax.Array | None = None) -> jax.Array:
    """The rows of x from the tile's first row on, [block, columns]: rows past x's end repeat its last row.

    gather: the indices in x of all rows of the call; None if the rows are x's.
    """
    of_call = x if gather is None else gather
    row = jnp.minimum(tile.first + lax.iota(jnp.int32, block), of_call.shape[0] - 1)
    found = of_call.at[row].get(mode="promise_in_bounds")
    return found if gather is None else gathered(x, found)


def _dot(x: Any, w: Any, axes: tuple[int, int], options: GroupedOptions) -> jax.Array:
    """The matmul over these axes of x and w, in float32, in the options' precision."""
    if options.scaling is not None:  # bfloat16 is exact; on a GPU, XLA finds the 8-bit operands behind it
        x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return float32_sums(x, w, (axes[:1], axes[1:]), options.precision)
