"""Attention forward through Triton: a program owns a block of queries and walks the keys that these attend to.

Arrays keep their layout: a program reads its head of [B, T, H, D] in place. Tensors in a program have power-of-two
sizes, so that loads beyond a length or a head_dim are masked, and give zeros. The walk is two loops: over the
blocks that need the predicate and over those that don't (see tiles.py).
"""

import functools
import math
import struct
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_kernels.pallas.attention import tiles

LOG2E = math.log2(math.e)
SMALLEST = 16  # the least size of a tensor core operand


def attention_forward(
    query, key, value, kv_lengths, q_offset, *, is_causal, scale, precision, out_dtype, config, core_count, interpret
):  # fmt: skip
    """See the package's docstring. config: AttentionForwardTriton."""
    del core_count  # one program per tile: nothing is persistent
    batch, q_length, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    v_head_dim = value.shape[-1]
    block_q, block_kv = fit(config.block_q, q_length), fit(config.block_kv, kv_length)
    q_blocks = pl.cdiv(q_length, block_q)
    bounds = tiles.bounds_array(q_offset, kv_lengths, batch, kv_length)

    # Under a causal mask the last queries have the most keys: they go first, so that short programs fill the end.
    q_block = (lambda i: q_blocks - 1 - i) if is_causal else lambda i: i
    kv_spec = lambda d: whole(kv_length, block_kv, None, d, lambda i, h, b: (b, h // (heads // kv_heads)))
    kernel = functools.partial(
        _kernel,
        bounds_ref=None,
        q_block=q_block,
        q_length=q_length,
        kv_length=kv_length,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        block_q=block_q,
        block_kv=block_kv,
        q_offset=q_offset,
        is_causal=is_causal,
        scale=scale,
        precision=dot_precision(precision),
        interpret=interpret,
    )
    return pl.pallas_call(
        kernel if bounds is None else with_bounds(kernel),
        grid=(q_blocks, heads, batch),
        in_specs=[
            *bounds_spec(bounds),
            pl.BlockSpec((None, block_q, None, padded(head_dim)), lambda i, h, b: (b, q_block(i), h, 0)),
            kv_spec(head_dim),
            kv_spec(v_head_dim),
        ],
        out_specs=[
            pl.BlockSpec((None, block_q, None, padded(v_head_dim)), lambda i, h, b: (b, q_block(i), h, 0)),
            pl.BlockSpec((None, None, block_q), lambda i, h, b: (b, h, q_block(i))),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((*query.shape[:3], v_head_dim), out_dtype),
            jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="attention_forward_triton",
    )(*([] if bounds is None else [bounds]), query, key, value)


def _kernel(
    q_ref, k_ref, v_ref, out_ref, lse_ref, *, bounds_ref, q_block, q_length, kv_length, head_dim, v_head_dim,
    block_q, block_kv, q_offset, is_causal, scale, precision, interpret,
):  # fmt: skip
    q_start = q_block(pl.program_id(0)) * block_q
    limits = tiles.limits(bounds_ref, pl.program_id(2), q_offset, kv_length, is_causal=is_causal)
    blocks = limits.key_blocks(q_start, block_q, block_kv)
    key_limit = row_limits(limits, q_start, block_q)
    factor = scale * LOG2E
    q = load(q_ref, q_start, q_length, head_dim)

    def step(index, state, *, partial):
        acc, highest, total = state
        start = blocks.at(index) * block_kv
        length = limits.kv_length if partial else None
        k = load(k_ref.at[pl.ds(start, block_kv), :], start, length, head_dim)
        s = dot(q, k, (1, 1), precision)
        if partial:
            s = jnp.where(start + iota(block_kv)[None, :] < key_limit[:, None], s, -jnp.inf)
        new = jnp.maximum(highest, s.max(axis=1) * factor)
        # A row may have met no key so far: -inf - -inf would be NaN.
        shift = jnp.where(new == -jnp.inf, 0.0, new) if partial else new
        alpha = jnp.exp2(highest - shift)
        p = exp2(s, factor, shift[:, None], interpret)
        total = total * alpha + p.sum(axis=1)
        v = load(v_ref.at[pl.ds(start, block_kv), :], start, length, v_head_dim)
        acc = acc * alpha[:, None] + dot(p.astype(v.dtype), v, (1, 0), precision)
        return acc, new, total

    state = (
        jnp.zeros((block_q, padded(v_head_dim)), jnp.float32),
        jnp.full((block_q,), -jnp.inf, jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
    )
    acc, highest, total = walk(blocks, step, state)
    dead = total == 0.0
    total = jnp.where(dead, 1.0, total)
    lse = jnp.where(dead, -jnp.inf, (highest + jnp.log2(total)) / LOG2E)
    store(out_ref, (acc / total[:, None]).astype(out_ref.dtype), q_start, q_length, v_head_dim)
    plgpu.store(lse_ref, lse, mask=row_mask(q_start, block_q, q_length))


# What both directions share.


def padded(head_dim: int) -> int:
    """The columns of a tensor that holds head_dim of them."""
    return max(SMALLEST, pl.next_power_of_2(head_dim))


def fit(block: int, length: int) -> int:
    """A block's rows, not many more than there are."""
    return min(block, max(SMALLEST, pl.next_power_of_2(length)))


def dot_precision(precision: str | None) -> lax.Precision:
    """ "fp32" is exact float32 products; DEFAULT is tf32 for float32 operands."""
    return lax.Precision.HIGHEST if precision == "fp32" else lax.Precision.DEFAULT


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], precision: lax.Precision) -> jax.Array:
    """The float32 product of two matrices, summed over axis axes[0] of a and axes[1] of b."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def exp2(x: jax.Array, factor: float, shift: jax.Array, interpret: bool) -> jax.Array:
    """exp2(x * factor - shift), float32, in two instructions.

    Triton as XLA runs it rounds the product, and its exp2 scales around denormal results: six instructions. This
    one fuses the product, and gives 0 below 2**-126. The interpreter knows no assembly, and gets the formula.
    """
    if interpret:
        return jnp.exp2(x * factor - shift)
    bits = struct.pack(">f", factor).hex()
    (result,) = plgpu.elementwise_inline_asm(
        f"{{ .reg .f32 t; fma.rn.f32 t, $1, 0f{bits}, $2; ex2.approx.ftz.f32 $0, t; }}",
        args=[x, jnp.broadcast_to(-shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result


def whole(length: int, block: int, heads: int | None, head_dim: int, index_map: Any) -> pl.BlockSpec:
    """All rows of one head of [B, T, H, D], or of `heads` of them; index_map gives (batch entry, block of heads).

    Only a view: a program loads the blocks of rows that it walks.
    """

    def full_index_map(*grid):
        b, h = index_map(*grid)
        return b, 0, h, 0

    return pl.BlockSpec((None, pl.cdiv(length, block) * block, heads, padded(head_dim)), full_index_map)


def bounds_spec(bounds: jax.Array | None) -> list[pl.BlockSpec]:
    return [] if bounds is None else [pl.BlockSpec(bounds.shape, lambda *grid: (0, 0))]


def with_bounds(kernel: Any) -> Any:
    """The kernel with bounds_ref as its first argument."""
    return lambda bounds_ref, *refs: kernel(*refs, bounds_ref=bounds_ref)


def iota(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size,), 0)


def row_mask(start: Any, rows: int, length: Any) -> jax.Array | None:
    """Which rows from `start` exist; None where all do: length is None, or whole blocks of them."""
    if length is None or (isinstance(length, int) and length % rows == 0):
        return None
    return start + iota(rows) < length


def _mask(start: Any, rows: int, length: Any, head_dim: int) -> jax.Array | None:
    mask = row_mask(start, rows, length)
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, None], (rows, padded(head_dim)))
    if head_dim != padded(head_dim):
        columns = jnp.broadcast_to((iota(padded(head_dim)) < head_dim)[None, :], (rows, padded(head_dim)))
        mask = columns if mask is None else mask & columns
    return mask


def load(view: Any, start: Any, length: Any, head_dim: int) -> jax.Array:
    """Rows of a head, from row `start` on: [rows, padded head_dim], zeros where there is nothing.

    length: how many rows count, so that what stands behind them is never read; None where all of these do.
    """
    mask = _mask(start, view.shape[0], length, head_dim)
    return plgpu.load(view, mask=mask, other=None if mask is None else 0.0)


def load_rows(view: Any, start: Any, length: int, other: float) -> jax.Array:
    """A number for each row from `start` on, `other` where there is no row."""
    mask = row_mask(start, view.shape[0], length)
    return plgpu.load(view, mask=mask, other=None if mask is None else other)


def store(ref: Any, x: jax.Array, start: Any, length: int, head_dim: int) -> None:
    """Stores what exists of a block of rows."""
    plgpu.store(ref, x, mask=_mask(start, x.shape[0], length, head_dim))


def row_limits(limits: tiles.Limits, q_start: Any, block_q: int) -> jax.Array:
    """How many keys each of the queries from q_start may attend to: int32 [block_q]."""
    return jnp.broadcast_to(limits.key_limit(q_start + iota(block_q)), (block_q,))


def walk(blocks: tiles.Blocks, step: Any, state: Any) -> Any:
    """Runs step(index, state, partial=...) over the blocks: those that need the predicate, then the others."""
    nothing = lambda first, last: isinstance(first, int) and isinstance(last, int) and first >= last
    for first, last, partial in ((0, blocks.partial, True), (blocks.partial, blocks.count, False)):
        if not nothing(first, last):
            state = lax.fori_loop(first, last, functools.partial(step, partial=partial), state)
    return state
