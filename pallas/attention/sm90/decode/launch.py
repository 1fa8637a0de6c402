"""Attention for decoding on Hopper: the arrays of its kernel (kernel.py), and the merge of its parts.

Reading keys and values takes the most time. At batch 64, one query, 32 query and 8 key heads, head_dim 128 and 16,384
keys they are 4.3 GB, which take 1.0 ms at 4.25 TB/s. The matmuls are 275 GFLOP with rows padded to 64, which take 0.3
ms at 900 TFLOP/s. So the depth of the pipeline counts, not the overlap of wgmma and softmax.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_kernels.pallas.attention import decode_contract
from jax_kernels.pallas.attention.sm90.decode.kernel import run
from jax_kernels.pallas.attention.sm90.decode.state import COPIED_ROWS, TILE, Arrays, Traits, copied_rows
from jax_kernels.pallas.attention.triton.decode import merge
from jax_kernels.pallas.block_specs.specs import AttentionDecodeSm90


def attention_decode(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"] | Float[Array, "pages page_size Hkv D"],
    value: Float[Array, "B S Hkv Dv"] | Float[Array, "pages page_size Hkv Dv"],
    kv_lengths: Int32[Array, " B"],
    block_tables: Int32[Array, "B max_pages"] | None,
    sinks: Float32[Array, "B H"] | None,
    mask: Bool[Array, "B H T S"] | None,
    bias: Float[Array, "B H T S"] | None,
    *,
    scale: float,
    softcap: float | None,
    left: int,
    config: AttentionDecodeSm90,
    core_count: int,
    interpret: bool,
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """(out [B, T, H, Dv] in query's dtype, lse [B, H, T] float32) of T new queries per sequence over its cached keys.

    kv_lengths: the number of cached keys of each sequence, its T new keys included, which are the last ones: query t
    attends to keys up to kv_lengths - T + t. key, value: a contiguous cache, or pages if block_tables has the indices
    of each sequence's pages. sinks: logits that join the softmax's denominator. left: the number of keys before its own
    that a query attends to, -1 for all. scale: positive.

    mask: [n, 1, 1, S], one row for all heads and queries, or None. A block of keys is not read if the mask keeps none
    of its keys. bias must be None, the arrays have 16-bit dtypes, the head_dims are multiples of 64, and the length of
    a contiguous cache is a multiple of 8.
    """
    batch, q_length, heads, head_dim = query.shape
    kv_heads, group = key.shape[2], heads // key.shape[2]
    page_size = None if block_tables is None else key.shape[1]
    capacity = key.shape[1] * (1 if block_tables is None else block_tables.shape[1])
    queries = group * q_length
    tiles = pl.cdiv(queries, TILE)
    rows = tiles * TILE
    # Up to the rows of one copy, no pass is needed to pad the rows.
    packed = queries if queries <= COPIED_ROWS else copied_rows(queries)
    blocks = decode_contract.most_blocks(capacity, q_length, left, config.block_kv)
    mask_of = {} if mask is None else _mask_arrays(mask, kv_lengths, q_length, left, config.block_kv)
    arrays = Arrays(
        query=decode_contract.pack(query, kv_heads, packed),
        key=key,
        value=value,
        lengths=kv_lengths,
        tables=block_tables,
        sinks=decode_contract.row_sinks(sinks, kv_heads, q_length, rows),
        **mask_of,
    )
    traits = Traits(
        config=config,
        core_count=core_count,
        batch=batch,
        kv_heads=kv_heads,
        rows=rows,
        head_dim=head_dim,
        v_head_dim=value.shape[3],
        dtype=query.dtype,
        q_length=q_length,
        group=group,
        capacity=capacity,
        page_size=page_size,
        splits=decode_contract.split_count(batch * kv_heads * tiles, blocks, core_count),
        left=left,
        scale=scale,
        softcap=softcap,
    )
    out, lse = run(arrays, traits, interpret=interpret)
    if out.shape[2] == 1:
        return decode_contract.unpack(out[:, :, 0], lse[:, :, 0], q_length, heads)
    return merge(out, lse, query, interpret=interpret)


def _mask_arrays(
    mask: Bool[Array, "#B 1 1 S"], kv_lengths: Int32[Array, " B"], q_length: int, left: int, block_kv: int
) -> dict[str, jax.Array]:
    """The fields mask, indices and counts of Arrays."""
    live = decode_contract.live_blocks(mask, kv_lengths, kv_heads=1, q_length=q_length, left=left, block_kv=block_kv)
    keys = jnp.pad(mask[:, 0, 0].astype(jnp.int32), ((0, 0), (0, -mask.shape[3] % block_kv)))
    return {"mask": keys, "indices": live.indices[:, 0], "counts": live.counts[:, 0]}
