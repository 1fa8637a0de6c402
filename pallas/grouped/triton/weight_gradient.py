"""The gradient of a grouped matmul's weights in Triton: for each group, the sum of x[i]ᵀ dz[i] over its rows.

A program owns a block of one group's gradient, whose float32 sums stay in registers while the program loops over the
group's rows. Groups without rows have a gradient of 0, which their programs store.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.group_tiles import group_offsets
from jax_kernels.inputs.grouped_matmul import GroupedOptions, WeightGradientInputs
from jax_kernels.pallas.block_specs.matmul_specs import MatmulTriton
from jax_kernels.pallas.grouped.triton.matmul import dot
from jax_kernels.pallas.kernel_types import Ref
from jax_kernels.pallas.matmul.triton.state import Gathered, Span, Tile
from jax_kernels.pallas.matmul.work_tiles import banded
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import fit
from jax_kernels.pallas.varying import result_types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch that computes a gradient [groups, m, n], with sums over `rows` rows in all.

    block_k: rows of a step. gathers_second: whether x, whose rows may be gathered, is the second operand. The result is
    x's columns by dz's columns, or with transpose_w dz's by x's.
    """

    groups: int
    rows: int
    m: int
    n: int
    block_m: int
    block_n: int
    block_k: int
    row_group: int
    gathers_second: bool

    @property
    def m_blocks(self) -> int:
        return pl.cdiv(self.m, self.block_m)

    @property
    def n_blocks(self) -> int:
        return pl.cdiv(self.n, self.block_n)


def weight_gradient(
    inputs: WeightGradientInputs, options: GroupedOptions, *, config: MatmulTriton, core_count: int, interpret: bool
) -> jax.Array:
    """Computes the gradient of w in Triton: [G, K, N] in options.out_dtype; [G, N, K] with transpose_w.

    G, M, N and K are not 0. interpret: runs the kernel in Pallas's interpreter. core_count: not used.
    """
    first, second = (inputs.dz, inputs.x) if options.transpose_w else (inputs.x, inputs.dz)
    m, n, groups, rows = first.shape[1], second.shape[1], inputs.group_sizes.shape[0], inputs.dz.shape[0]
    traits = Traits(
        groups=groups,
        rows=rows,
        m=m,
        n=n,
        block_m=fit(config.block_m, m),
        block_n=fit(config.block_n, n),
        block_k=fit(config.block_k, rows),
        row_group=config.row_group,
        gathers_second=options.transpose_w,
    )
    arrays: Any = first, second, group_offsets(inputs.group_sizes, rows)
    arrays = arrays if inputs.gather is None else (*arrays, inputs.gather)
    out = jax.ShapeDtypeStruct((groups, m, n), options.out_dtype)
    (found,) = pl.pallas_call(
        lambda *refs: _kernel(traits, *refs),
        grid=(groups * traits.m_blocks * traits.n_blocks,),
        out_shape=result_types([out], *arrays),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="grouped_weight_gradient_triton",
    )(*arrays)
    return found


def _kernel(traits: Traits, first: Ref, second: Ref, offsets: Ref, *rest: Ref) -> None:
    """Runs one program: sums a block of a group's gradient over the group's rows, and stores it.

    Rows of other groups are loaded as 0 on both sides, so that their NaN stays in their group.
    """
    *gather, out = rest
    blocks = jnp.int32(traits.m_blocks * traits.n_blocks)
    group, within = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)
    m_block, n_block = banded(within, traits.m_blocks, traits.n_blocks, traits.row_group)
    start, end = plgpu.load(offsets.at[group]), plgpu.load(offsets.at[group + 1])
    tile = Tile(
        rows=Span(start=m_block * traits.block_m, size=traits.block_m, length=traits.m),
        columns=Span(start=n_block * traits.block_n, size=traits.block_n, length=traits.n),
    )

    def step(i: jax.Array, sums: jax.Array) -> jax.Array:
        rows = Span(start=start + i * traits.block_k, size=traits.block_k, length=end)
        of_first: Any = rows
        of_second: Any = rows
        if gather and traits.gathers_second:
            of_second = Gathered.of(gather[0], rows, second.shape[0])
        elif gather:
            of_first = Gathered.of(gather[0], rows, first.shape[0])
        return sums + dot(Tile(of_first, tile.rows).load(first), Tile(of_second, tile.columns).load(second), (0, 0))

    steps = lax.div(end - start + traits.block_k - 1, jnp.int32(traits.block_k))
    tile.store(out, lax.fori_loop(0, steps, step, jnp.zeros(tile.shape, jnp.float32)), group)
