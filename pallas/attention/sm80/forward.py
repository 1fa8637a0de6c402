"""Attention forward by mma.sync and cp.async, for GPUs that have neither wgmma nor tcgen05: sm_80, 86, 89 and 120.

The algorithm is FlashAttention-2 (Dao 2023, arXiv:2307.08691). A CTA of four warps owns block_q queries of one head,
which stay in registers. It walks over blocks of keys: while it computes with one block, cp.async loads the next block's
keys and values. P stays in registers too: the result layout of one mma is the operand layout of the next.

    S = Q K^T        P = exp2(S * scale * log2(e) - row_max)        O = O * alpha + P V

It serves self- and cross-attention of 16-bit arrays, full or causal, with grouped heads. It is not in the op's table of
implementations.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import softmax
from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.mosaic import async_copies, interpreter
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import SWIZZLED, WGMMA
from jax_kernels.pallas.mosaic.scratch import smem_ref
from jax_kernels.pallas.mosaic.smem_tiles import pad_for_tma

CHUNK = 64  # columns of a swizzled tile
MMA_KEYS = 16  # keys that one mma of P and V sums over
# Options that change only the backward, and has_lse: lse is always computed.
_OF_BACKWARD = {"bias_gradient", "score_mod_gradient", "deterministic", "float32_gradients", "has_lse"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionForwardSm80:
    """block_q: queries of a CTA, 64 or 128. block_kv: keys of a step, 32 or 64, and at least half of block_q.

    The two slots of shared memory take 8 * block_kv * head_dim bytes.
    """

    block_q: int = 64
    block_kv: int = 64

    def __post_init__(self):
        if self.block_q not in (64, 128):
            raise ValueError(f"block_q: got {self.block_q}, want 64 or 128")
        if self.block_kv not in (32, 64) or self.block_q > 2 * self.block_kv:
            raise ValueError(f"block_kv: got {self.block_kv}, want 32 or 64, and at least half of {self.block_q=}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """The static facts of a launch. group: query heads that share a head of keys."""

    config: AttentionForwardSm80
    batch: int
    heads: int
    group: int
    q_length: int
    kv_length: int
    head_dim: int
    dtype: jnp.dtype
    scale: float
    is_causal: bool
    q_offset: int

    @property
    def q_blocks(self) -> int:
        return pl.cdiv(self.q_length, self.config.block_q)

    @property
    def kv_blocks(self) -> int:
        return pl.cdiv(self.kv_length, self.config.block_kv)

    @property
    def lhs(self):
        """The register layout of an mma's first operand."""
        return plgpu.Layout.MMA_LHS(self.dtype)

    @property
    def rhs(self):
        """The register layout of an mma's second operand."""
        return plgpu.Layout.MMA_RHS(self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkTile:
    """The work of a CTA: block_q queries from index `start` on, of one head of one batch entry.

    It attends to key blocks 0 to end - 1. Of these, blocks from `full` on need a mask.
    """

    batch: Index
    head: Index
    start: Index
    full: Index
    end: Index

    @classmethod
    def of(cls, traits: Traits, cta: Index) -> "WorkTile":
        """The work tile of a CTA. The blocks of a head follow each other, because they read the same keys.

        Causal work starts with a head's last queries, which have the most keys.
        """
        block_q, block_kv = traits.config.block_q, traits.config.block_kv
        head, block = lax.div(cta, jnp.int32(traits.q_blocks)), lax.rem(cta, jnp.int32(traits.q_blocks))
        block = traits.q_blocks - 1 - block if traits.is_causal else block
        start, full, end = block * block_q, traits.kv_length // block_kv, traits.kv_blocks
        if traits.is_causal:
            blocks_before = lambda key: lax.div(jnp.maximum(key, 0), jnp.int32(block_kv))
            first_position = start + traits.q_offset
            end = jnp.minimum(blocks_before(first_position + block_q + block_kv - 1), end)
            full = jnp.minimum(blocks_before(first_position + 1), full)
        heads = jnp.int32(traits.heads)
        return cls(batch=lax.div(head, heads), head=lax.rem(head, heads), start=start, full=full, end=end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvLoop:
    """The loop over the blocks of keys of a work tile.

    key, value: [S, D] in device memory. kv_smem: [2 slots, 2 * block_kv, D], the keys of a block and then its values.
    """

    traits: Traits
    tile: WorkTile
    key: Ref
    value: Ref
    kv_smem: Ref

    def run(self, query: list[jax.Array]):
        """(O before the division by the sums of P, row_max, row_sum). query: [block_q, CHUNK] each, in registers.

        The first block's copies must be in flight.
        """
        traits, tile = self.traits, self.tile
        acc = jnp.zeros((traits.config.block_q, traits.head_dim), jnp.float32)
        sums = plgpu.layout_cast(acc, WGMMA), *softmax.start(traits.config.block_q)
        for is_masked, first, end in ((False, 0, tile.full), (True, tile.full, tile.end)):
            if not (isinstance(first, int) and isinstance(end, int) and first >= end):
                sums = lax.fori_loop(first, end, functools.partial(self.step, query, is_masked), sums)
        return sums

    def load(self, block: Index, slot: Index) -> None:
        """Starts the copies of a block's keys and values."""
        rows, start = self.traits.config.block_kv, block * self.traits.config.block_kv
        async_copies.load_rows(self.key, start, self.kv_smem.at[slot, pl.ds(0, rows)])
        async_copies.load_rows(self.value, start, self.kv_smem.at[slot, pl.ds(rows, rows)])
        async_copies.commit()

    def step(self, query: list[jax.Array], is_masked: bool, block: Index, sums):
        """(O, row_max, row_sum) after one more block of keys."""
        acc, row_max, row_sum = sums
        slot = lax.rem(block, jnp.int32(2))
        async_copies.wait(0)  # for this block; and until all warps have read the other slot

        @pl.when(block + 1 < self.tile.end)
        def _():
            self.load(block + 1, 1 - slot)

        scores = self.scores(query, slot)
        scores = self.masked(scores, block) if is_masked else scores
        p, row_max, row_sum, alpha = softmax.step(scores, row_max, row_sum, self.traits.scale)
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        return self.add_values(acc, p.astype(self.traits.dtype), slot), row_max, row_sum

    def scores(self, query: list[jax.Array], slot: Index) -> jax.Array:
        """S = Q K^T of the block in a slot: float32 [block_q, block_kv]."""
        rows = self.traits.config.block_kv
        scores = plgpu.layout_cast(jnp.zeros((self.traits.config.block_q, rows), jnp.float32), WGMMA)
        for c, part in enumerate(query):
            keys = self.kv_smem.at[slot, pl.ds(0, rows), pl.ds(c * CHUNK, CHUNK)]
            keys = plgpu.load(plgpu.transpose_ref(keys, (1, 0)), layout=self.traits.rhs)
            scores = plgpu.mma(scores, part, keys)
        return scores

    def add_values(self, acc: jax.Array, p: jax.Array, slot: Index) -> jax.Array:
        """O + P V with the values in a slot. p: [block_q, block_kv], 16-bit."""
        rows = self.traits.config.block_kv
        p = as_operand(p, self.traits.lhs)
        for first in range(0, rows, MMA_KEYS):
            values = plgpu.load(self.kv_smem.at[slot, pl.ds(rows + first, MMA_KEYS)], layout=self.traits.rhs)
            acc = plgpu.mma(acc, p[:, first : first + MMA_KEYS], values)
        return acc

    def masked(self, scores: jax.Array, block: Index) -> jax.Array:
        """The scores of a block, -inf where a query may not attend to a key."""
        traits = self.traits
        index = lambda axis: plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=WGMMA)
        key = index(1)
        # Keys below `last` exist; in causal work also those up to the query's position count.
        keep = key < traits.kv_length - block * traits.config.block_kv
        if traits.is_causal:
            keep &= key - index(0) <= self.tile.start + traits.q_offset - block * traits.config.block_kv
        return jnp.where(keep, scores, -jnp.inf)


def as_operand(p: jax.Array, layout) -> jax.Array:
    """P, the 16-bit result of an mma, as the first operand of the next. Each thread keeps its values."""
    if interpreter.INTERPRETED:
        return p

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(p.shape, p.dtype, layout=layout))
    def relabel(_, p):
        from jax.experimental.mosaic.gpu import fragmented_array

        operand = layout.to_mgpu()
        same = p.registers.reshape(operand.registers_shape(p.shape))
        return fragmented_array.FragmentedArray(_registers=same, _layout=operand, _is_signed=None)

    return relabel(p)


def _attend(traits: Traits, arrays: tuple[Ref, ...], kv_smem: Ref, lse_smem: Ref) -> None:
    """Computes the work tile of the calling CTA. arrays: query, key, value, out and lse in device memory."""
    query, key, value, out, lse = arrays
    tile = WorkTile.of(traits, lax.axis_index("cta"))
    kv_head = lax.div(tile.head, jnp.int32(traits.group))
    kv_loop = KvLoop(
        traits=traits,
        tile=tile,
        key=key.at[tile.batch, :, kv_head],
        value=value.at[tile.batch, :, kv_head],
        kv_smem=kv_smem,
    )
    # Slot 1 first holds the queries, and finally the output.
    staged = kv_smem.at[1, pl.ds(0, traits.config.block_q)]
    async_copies.load_rows(query.at[tile.batch, :, tile.head], tile.start, staged)
    async_copies.commit()
    kv_loop.load(0, 0)
    async_copies.wait(1)
    chunks = range(0, traits.head_dim, CHUNK)
    queries = [plgpu.load(staged.at[:, pl.ds(c, CHUNK)], layout=traits.lhs) for c in chunks]
    acc, row_max, row_sum = kv_loop.run(queries)

    factor, row_lse = softmax.finish(row_max, row_sum, may_be_dead=True)
    async_copies.wait(0)
    staged[...] = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(traits.dtype)
    lse_smem[...] = row_lse
    async_copies.barrier()
    async_copies.store_rows(staged, out.at[tile.batch, :, tile.head], tile.start)
    async_copies.store_column(lse_smem, lse.at[tile.batch, tile.head], tile.start)


def attention_forward(
    inputs: AttentionInputs,
    options: AttentionOptions,
    *,
    out_dtype: DTypeLike,
    config: AttentionForwardSm80,
    core_count: int = 0,
    interpret: bool,
) -> tuple[Float[Array, "B T H D"], Float32[Array, "B H T"]]:
    """(out [B, T, H, D] in query's dtype, lse [B, H, T] float32, natural log) of attention with 16-bit inputs.

    A query without keys has out = 0 and lse = -inf. Of the inputs it takes query, key and value, all with the same
    head_dim of at most 128; of the options scale, is_causal and a static q_offset. core_count is unused.
    """
    _check(inputs, options, out_dtype)
    query, key, value = (pad_for_tma(x, any_rows=True) for x in (inputs.query, inputs.key, inputs.value))
    batch, q_length, heads, head_dim = query.shape
    traits = Traits(
        config=config,
        batch=batch,
        heads=heads,
        group=heads // key.shape[2],
        q_length=q_length,
        kv_length=key.shape[1],
        head_dim=head_dim,
        dtype=query.dtype,
        scale=options.scale,
        is_causal=options.is_causal,
        q_offset=options.q_offset,
    )

    def entry(*refs):
        kv_shape = (2, 2 * config.block_kv, head_dim)
        scratch = smem_ref(kv_shape, query.dtype, transforms=SWIZZLED), smem_ref((config.block_q,), jnp.float32)
        pl.run_scoped(functools.partial(_attend, traits, refs), *scratch, collective_axes="wg")

    shapes = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32)
    kernel = launch(
        entry,
        "attention_forward_sm80",
        out_type=shapes,
        ctas=batch * heads * traits.q_blocks,
        warpgroups=1,
        semantics=plgpu.LoweringSemantics.Lane,
        auto_barriers=False,
        interpret=interpret,
    )
    out, lse = kernel(query, key, value)
    return out[..., : inputs.query.shape[3]], lse


def _check(inputs: AttentionInputs, options: AttentionOptions, out_dtype: DTypeLike) -> None:
    """Raises for a call that the kernel cannot compute."""
    query, key, value, *others = inputs
    given = [name for name, x in zip(AttentionInputs._fields[3:], others, strict=True) if x is not None]
    served = AttentionOptions(scale=options.scale, is_causal=options.is_causal, q_offset=options.q_offset)
    changed = [f.name for f in dataclasses.fields(served) if getattr(options, f.name) != getattr(served, f.name)]
    if given or set(changed) - _OF_BACKWARD:
        raise NotImplementedError(f"inputs, options: got {', '.join(given + changed)}, want only is_causal and q_offset")
    if query.dtype not in (jnp.bfloat16, jnp.float16) or {key.dtype, value.dtype, jnp.dtype(out_dtype)} != {query.dtype}:
        names = ", ".join(str(jnp.dtype(x)) for x in (query.dtype, key.dtype, value.dtype, out_dtype))
        raise TypeError(f"query, key, value, out_dtype: got {names}, want bfloat16 or float16 for all")
    if query.shape[3] > 128 or value.shape != key.shape or key.shape[3] != query.shape[3]:
        raise ValueError(f"query, key, value: got {query.shape}, {key.shape}, {value.shape}, want one head_dim up to 128")
