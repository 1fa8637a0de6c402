"""lse and delta of every query for the Hopper backward, and zeros for dquery, in one pass over out and dout.

Bound by reading out and dout once and by writing the zeros. At (2, 8192, 16, 128) the reads and the writes are 134 MB
each, which take 0.065 ms at 4.2 TB/s. XLA takes three launches.

If the number of queries is no multiple of 8, the pass can also copy query and dout to arrays of whole swizzle atoms:
201 MB more. The kernel then loads a block of either by one copy. Otherwise it would need a copy for every 8 rows and 64
columns, and 128 arrivals at a barrier for each copy: at head_dim 128 that is 4096 arrivals in a step of 4000 cycles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.attention.triton.arrays import head_mask
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import MOST_PROGRAMS, iota, padded
from jax_kernels.pallas.varying import result_types

ELEMENTS = 4096  # elements of a program's rows, as in row_norms.py
WARPS = 4
ATOM_ROWS = 8  # of a swizzle atom, in which the backward adds to dquery


class RowTerms(NamedTuple):
    """Values of each query for the backward's kernels.

    lse: in base 2. delta: out * dout, summed, minus the cotangent of lse. Both are float32 and padded to whole blocks
    of queries. dquery: zeros to which a kernel adds. query, dout: copies. These three are padded to a multiple of
    ATOM_ROWS queries, and None if not requested.
    """

    lse: Float32[Array, "B H rows"]
    delta: Float32[Array, "B H rows"]
    dquery: Float32[Array, "B rows H width"] | None
    query: Float[Array, "B rows H D"] | None = None
    dout: Float[Array, "B rows H Dv"] | None = None


def takes(out: Float[Array, "B T H Dv"], width: int, block_q: int) -> bool:
    """Whether this JAX has Pallas-Triton, and CUDA's grid room for the programs of rows_of. If not, XLA computes them.

    out: [B, T, H, Dv]. width: the head_dim of dquery. block_q: the block of queries to which results are padded.
    """
    batch, length, _, v_head_dim = out.shape
    blocks = pl.cdiv(length, block_q) * block_q // _rows_of(v_head_dim, width, block_q)
    return backend.AVAILABLE and max(blocks, batch) <= MOST_PROGRAMS


def _rows_of(v_head_dim: int, width: int, block_q: int) -> int:
    """The number of queries of a program: a power of 2 that divides block_q."""
    return min(ELEMENTS // max(padded(v_head_dim), padded(width)), block_q & -block_q)


def rows_of(
    out: Float[Array, "B T H Dv"],
    dout: Float[Array, "B T H Dv"],
    lse: Float32[Array, "B H T"],
    dlse: Float32[Array, "B H T"] | None,
    query: Float[Array, "B T H D"] | None = None,
    *,
    block_q: int,
    width: int,
    zeros: bool,
    interpret: bool,
) -> RowTerms:
    """lse in base 2, delta, and optionally zeros for dquery, padded to whole blocks of block_q queries.

    out, dout: [B, T, H, Dv]. lse: the forward's. dlse: its cotangent, or None for zero. width: head_dim of dquery.
    zeros: whether to make dquery. query: to copy query and dout; None: no copies.

    Past the last query lse is inf and delta 0. A query without keys also has lse = inf: exp2(score - inf) is 0, so it
    passes no gradient.
    """
    batch, length, heads, v_head_dim = out.shape
    block = _rows_of(v_head_dim, width, block_q)
    whole = pl.cdiv(length, block_q) * block_q
    columns = padded(v_head_dim)
    has_dlse, copies = dlse is not None, query is not None
    head_dim = query.shape[-1] if query is not None else 0
    whole_rows = pl.cdiv(length, ATOM_ROWS) * ATOM_ROWS

    def kernel(out_ref, dout_ref, lse_ref, *refs):
        rest = list(refs)
        dlse_ref = rest.pop(0) if has_dlse else None
        query_ref = rest.pop(0) if copies else None
        new_lse_ref, delta_ref, *rest = rest
        row = lambda: pl.program_id(1) * block + iota(block)
        exists = None if whole == length else row() < length
        of_row = lambda ref, other: plgpu.load(ref, mask=exists, other=None if exists is None else other)
        inside = head_mask(exists, block, v_head_dim)
        of_head = lambda ref, mask: plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)
        out_here = of_head(out_ref, inside).astype(jnp.float32)
        dout_here = of_head(dout_ref, inside)
        delta = (out_here * dout_here.astype(jnp.float32)).sum(axis=1)
        lse = of_row(lse_ref, jnp.inf)
        dead = lse == -jnp.inf
        if dlse_ref is not None:
            delta = delta - jnp.where(dead, 0.0, of_row(dlse_ref, 0.0))
        plgpu.store(new_lse_ref, jnp.where(dead, jnp.inf, lse * LOG2E))
        plgpu.store(delta_ref, delta)
        stored = exists if whole_rows == length else row() < whole_rows
        if zeros:
            zero = jnp.zeros((block, padded(width)), jnp.float32)
            plgpu.store(rest.pop(0), zero, mask=head_mask(stored, block, width))
        if query_ref is not None:
            query_copy, dout_copy = rest
            query_here = of_head(query_ref, head_mask(exists, block, head_dim))
            plgpu.store(query_copy, query_here, mask=head_mask(stored, block, head_dim))
            plgpu.store(dout_copy, dout_here, mask=head_mask(stored, block, v_head_dim))

    row_spec = pl.BlockSpec((None, None, block), lambda h, i, b: (b, h, i))
    head_spec = lambda columns: pl.BlockSpec((None, block, None, columns), lambda h, i, b: (b, i, h, 0))
    arrays = [out, dout, lse, *([dlse] if has_dlse else []), *([query] if copies else [])]
    shapes = [jax.ShapeDtypeStruct((batch, heads, whole), jnp.float32)] * 2
    of_rows = lambda columns, dtype: jax.ShapeDtypeStruct((batch, whole_rows, heads, columns), dtype)
    shapes += [of_rows(width, jnp.float32)] * zeros
    of_copies = []
    if query is not None:
        shapes += [of_rows(head_dim, query.dtype), of_rows(v_head_dim, dout.dtype)]
        of_copies = [head_spec(padded(head_dim)), head_spec(columns)]
    found = pl.pallas_call(
        kernel,
        grid=(heads, whole // block, batch),
        in_specs=[head_spec(columns)] * 2 + [row_spec] * (1 + has_dlse) + of_copies[:1],
        out_specs=[row_spec] * 2 + [head_spec(padded(width))] * zeros + of_copies,
        out_shape=result_types(shapes, *arrays),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="attention_backward_rows",
    )(*arrays)
    query_copy, dout_copy = found[-2:] if copies else (None, None)
    return RowTerms(lse=found[0], delta=found[1], dquery=found[2] if zeros else None, query=query_copy, dout=dout_copy)
