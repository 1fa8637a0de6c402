"""The Triton grouped matmul with its epilogue, for row i of group g:

    out[i] = activation(x[i] @ w[g] + bias[g]) * (x[i] @ w_up[g])

XLA cuts the rows into tiles that each belong to one group (jax_kernels/inputs/group_tiles.py). A program owns block_n
columns of one tile, so that it reads the weights of one group only. The number of programs is enough for any sizes of
the groups; programs without rows end at once. Per step a program does 2 * block_m * block_n * block_k FLOPs on
(block_m + block_n) * block_k values, as in the matmul.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.group_tiles import found_tiles, group_offsets, tile_count
from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions, GroupedResult
from jax_kernels.pallas.block_specs.matmul_specs import MatmulTriton
from jax_kernels.pallas.kernel_types import Ref, needed
from jax_kernels.pallas.matmul.triton.state import Gathered, Span, Tile
from jax_kernels.pallas.matmul.work_tiles import banded
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import SMALLEST, fit
from jax_kernels.pallas.varying import result_types

# Columns of a part of a work tile in the epilogue.
EPILOGUE_COLUMNS = 64


class InputRefs(Protocol):
    """The arrays of GroupedInputs in device memory, as refs; arrays that the call lacks are None."""

    x: Ref
    w: Ref
    bias: Ref | None
    w_up: Ref | None
    x_up: Ref | None
    gather: Ref | None

    @property
    def is_gated(self) -> bool: ...


class ResultRefs(NamedTuple):
    """The arrays of a GroupedResult in device memory, as refs."""

    out: Ref
    preactivation: Ref | None = None
    up: Ref | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch: sizes of the arrays, and blocks that are shrunk to fit them."""

    options: GroupedOptions
    groups: int
    m: int
    n: int
    k: int
    block_m: int
    block_n: int
    block_k: int
    row_group: int

    @classmethod
    def of(cls, inputs: GroupedInputs, options: GroupedOptions, config: MatmulTriton) -> "Traits":
        groups, m, n, k = options.sizes(inputs)
        # A gated unit has the sums of two matmuls, hence half the columns.
        block_n = max(SMALLEST, config.block_n // 2) if inputs.is_gated else config.block_n
        return cls(
            options=options,
            groups=groups,
            m=m,
            n=n,
            k=k,
            block_m=fit(config.block_m, m),
            block_n=fit(block_n, n),
            block_k=fit(config.block_k, k),
            row_group=config.row_group,
        )

    @property
    def row_tiles(self) -> int:
        return tile_count(self.m, self.groups, self.block_m)

    @property
    def n_blocks(self) -> int:
        return pl.cdiv(self.n, self.block_n)


def grouped_matmul(
    inputs: GroupedInputs, options: GroupedOptions, *, config: MatmulTriton, core_count: int, interpret: bool
) -> GroupedResult:
    """Computes activation(x @ w[group] + bias[group]) * (x @ w_up[group]) in Triton.

    Rows past the last group are 0 with options.has_zeros, and otherwise are not written. A call without w_up has no
    second factor. With x_up, x_up @ w_up is added to x @ w instead.

    G, M, N and K are not 0. interpret: runs the kernel in Pallas's interpreter. core_count: not used.
    """
    traits = Traits.of(inputs, options, config)
    tiles = found_tiles(group_offsets(inputs.group_sizes, traits.m), traits.m, traits.block_m)
    arrays, tree = jax.tree.flatten((inputs._replace(group_sizes=None), tiles))  # type: ignore[arg-type]
    out = jax.ShapeDtypeStruct((traits.m, traits.n), options.out_dtype)
    types = [out] * ((3 if inputs.is_gated else 2) if options.saves_preactivation else 1)

    def body(*refs: Ref) -> None:
        given, schedule = jax.tree.unflatten(tree, refs[: len(arrays)])
        _kernel(traits, given, schedule, ResultRefs(*refs[len(arrays) :]))

    found = pl.pallas_call(
        body,
        grid=(traits.row_tiles * traits.n_blocks,),
        out_shape=result_types(types, *arrays),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="grouped_matmul_triton",
    )(*arrays)
    return GroupedResult(*found)


def _kernel(traits: Traits, inputs: InputRefs, tiles: Any, results: ResultRefs) -> None:
    """Runs one program: computes a block of columns of one tile, and stores it.

    tiles: the refs of FoundTiles.
    """
    i, column_block = banded(pl.program_id(0), traits.row_tiles, traits.n_blocks, traits.row_group)
    group, first, end = (plgpu.load(ref.at[i]) for ref in tiles[:3])
    tile = Tile(
        rows=Span(start=first, size=traits.block_m, length=end),
        columns=Span(start=column_block * traits.block_n, size=traits.block_n, length=traits.n),
    )

    @pl.when((first < end) if traits.options.has_zeros else (first < end) & (group < traits.groups))
    def _() -> None:
        _store(traits, tile, group, inputs, results)


def _store(traits: Traits, tile: Tile, group: jax.Array, inputs: InputRefs, results: ResultRefs) -> None:
    """Computes and stores a work tile of a group.

    Group index G marks rows past the last group: the loop has no steps for them, and they become 0.
    """
    is_in_group = group < traits.groups
    of_weights = jnp.minimum(group, traits.groups - 1)
    steps = is_in_group.astype(jnp.int32) * pl.cdiv(traits.k, traits.block_k)
    sums = _sums(traits, inputs, tile, of_weights, steps)
    parts = tile.parts(EPILOGUE_COLUMNS)
    of_parts = [lax.split(x, [part.columns.size for part in parts], axis=1) for x in sums]
    for part, z, *of_up in zip(parts, *of_parts, strict=True):
        if inputs.bias is not None:
            bias = Tile(rows=Span(start=of_weights, size=1, length=traits.groups, block=1), columns=part.columns)
            z = z + jnp.where(is_in_group, bias.load(inputs.bias).astype(jnp.float32), 0.0)
        if results.preactivation is not None:
            part.store(results.preactivation, z)
        if results.up is not None:
            part.store(results.up, of_up[0])
        if traits.options.activation is not None:
            z = jnp.where(is_in_group, traits.options.activation(z), 0.0)
        part.store(results.out, z * of_up[0] if of_up else z)


def _sums(traits: Traits, inputs: InputRefs, tile: Tile, group: jax.Array, steps: Any) -> list[jax.Array]:
    """The float32 sums of a work tile over this number of steps: x @ w[group] and, of a gated unit, x @ w_up[group].

    With an x_up, x_up @ w_up[group] is added to x @ w[group] instead.
    """
    transpose_w = traits.options.transpose_w
    rows = tile.rows if inputs.gather is None else Gathered.of(inputs.gather, tile.rows, inputs.x.shape[0])

    def products(x_ref: Ref, weights: list[Ref], sums: list[jax.Array]) -> list[jax.Array]:
        def step(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            depth = Span(start=i * traits.block_k, size=traits.block_k, length=traits.k)
            x = Tile(rows, depth).load(x_ref)
            of_w = Tile(tile.columns, depth) if transpose_w else Tile(depth, tile.columns)
            axes = 1, 1 if transpose_w else 0
            return [total + dot(x, of_w.load(w, group), axes) for total, w in zip(sums, weights, strict=True)]

        return lax.fori_loop(0, steps, step, sums)

    weights = [inputs.w, needed(inputs.w_up)] if inputs.is_gated else [inputs.w]
    sums = products(inputs.x, weights, [jnp.zeros(tile.shape, jnp.float32) for _ in weights])
    return sums if inputs.x_up is None else products(inputs.x_up, [needed(inputs.w_up)], sums)


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The float32 matmul of two blocks over axis axes[0] of a and axis axes[1] of b. float32 operands use tf32."""
    contracted = ((axes[:1], axes[1:]), ((), ()))
    return lax.dot_general(a, b, contracted, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
