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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import block_ranges, softmax
from jax_kernels.pallas.kernel_types import Index, Ref
from jax_kernels.pallas.mosaic import async_copies, interpreter
from jax_kernels.pallas.mosaic.launch import launch
from jax_kernels.pallas.mosaic.layouts import SWIZZLED, WGMMA
from jax_kernels.pallas.mosaic.scratch import smem_ref
from jax_kernels.pallas.mosaic.smem_tiles import pad_for_tma

CHUNK = 64  # columns of a swizzled tile
MMA_KEYS = 16  # keys that one mma of P and V sums over
_SERVED = {"query", "key", "value", "kv_lengths", "q_offset", "is_causal", "window"}
# Options that change only the backward, and has_lse: lse is always computed.
_OF_BACKWARD = {"bias_gradient", "score_mod_gradient", "deterministic", "float32_gradients", "has_lse"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionForwardSm80:
    """The blocks of a launch.

    block_q: queries of a CTA: 64, or 128 for a head_dim of up to 64. block_kv: keys of a step: 32 or 64, and at least
    half of block_q.

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
    options: AttentionOptions
    batch: int
    heads: int
    group: int
    q_length: int
    kv_length: int
    head_dim: int
    dtype: jnp.dtype

    @property
    def q_blocks(self) -> int:
        return pl.cdiv(self.q_length, self.config.block_q)

    @property
    def lhs(self):
        """The register layout of an mma's first operand."""
        return plgpu.Layout.MMA_LHS(self.dtype)

    @property
    def rhs(self):
        """The register layout of an mma's second operand."""
        return plgpu.Layout.MMA_RHS(self.dtype)


class Arrays(NamedTuple):
    """The arrays in device memory. bounds: see block_ranges.bounds_array."""

    query: Ref
    key: Ref
    value: Ref
    bounds: Ref | None
    out: Ref
    lse: Ref


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkTile:
    """The work of a CTA: block_q queries from index `start` on, of one head of one batch entry.

    limits: of the queries' keys. blocks: the blocks of keys that it visits, the partial ones first.
    """

    batch: Index
    head: Index
    start: Index
    limits: block_ranges.Limits
    blocks: block_ranges.BlockRange

    @classmethod
    def of(cls, traits: Traits, arrays: Arrays, cta: Index) -> "WorkTile":
        """The work tile of a CTA. A head's work tiles follow each other, because they read the same keys.

        Causal work starts with a head's last queries, which have the most keys.
        """
        options, config, heads = traits.options, traits.config, jnp.int32(traits.heads)
        head, block = lax.div(cta, jnp.int32(traits.q_blocks)), lax.rem(cta, jnp.int32(traits.q_blocks))
        batch, block = lax.div(head, heads), traits.q_blocks - 1 - block if options.is_causal else block
        start = block * config.block_q
        limits = block_ranges.limits(
            arrays.bounds,
            batch,
            options.q_offset,
            traits.kv_length,
            is_causal=options.is_causal,
            window=options.window,
        )
        blocks = limits.key_blocks(start, config.block_q, config.block_kv).at_least_one()
        return cls(batch=batch, head=lax.rem(head, heads), start=start, limits=limits, blocks=blocks)


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
        traits, blocks = self.traits, self.tile.blocks
        acc = jnp.zeros((traits.config.block_q, traits.head_dim), jnp.float32)
        sums = plgpu.layout_cast(acc, WGMMA), *softmax.start(traits.config.block_q)
        if self.tile.limits.keep_all(traits.config.block_kv):
            return lax.fori_loop(0, blocks.count, functools.partial(self.step, query, False), sums)
        sums = lax.fori_loop(0, blocks.partial, functools.partial(self.step, query, True), sums)
        return lax.fori_loop(blocks.partial, blocks.count, functools.partial(self.step, query, False), sums)

    def load(self, step: Index, slot: Index) -> None:
        """Starts the copies of the keys and values of a step."""
        rows = self.traits.config.block_kv
        start, end = self.tile.blocks.at(step) * rows, self.tile.limits.kv_length
        async_copies.load_rows(self.key, start, end, self.kv_smem.at[slot, pl.ds(0, rows)])
        async_copies.load_rows(self.value, start, end, self.kv_smem.at[slot, pl.ds(rows, rows)])
        async_copies.commit()

    def step(self, query: list[jax.Array], is_partial: bool, step: Index, sums):
        """(O, row_max, row_sum) after one more block of keys."""
        acc, row_max, row_sum = sums
        slot = lax.rem(step, jnp.int32(2))
        async_copies.wait(0)  # for this block; and until all warps have read the other slot

        @pl.when(step + 1 < self.tile.blocks.count)
        def _():
            self.load(step + 1, 1 - slot)

        scores = self.scores(query, slot)
        scores = self.masked(scores, step) if is_partial else scores
        p, row_max, row_sum, alpha = softmax.step(scores, row_max, row_sum, self.traits.options.scale)
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        return self.add_values(acc, p.astype(self.traits.dtype), slot), row_max, row_sum

    def scores(self, query: list[jax.Array], slot: Index) -> jax.Array:
        """S = Q K^T of the block in a slot: float32 [block_q, block_kv]."""
        rows = self.traits.config.block_kv
        scores = plgpu.layout_cast(jnp.zeros((self.traits.config.block_q, rows), jnp.float32), WGMMA)
        for c, part in enumerate(query):
            keys = self.kv_smem.at[slot, pl.ds(0, rows), pl.ds(c * CHUNK, CHUNK)]
            transposed = plgpu.load(keys.transpose((1, 0)), layout=self.traits.rhs)
            scores = plgpu.mma(scores, part, transposed)
        return scores

    def add_values(self, acc: jax.Array, p: jax.Array, slot: Index) -> jax.Array:
        """O + P V with the values in a slot. p: [block_q, block_kv], 16-bit."""
        rows = self.traits.config.block_kv
        p = as_operand(p, self.traits.lhs)
        for first in range(0, rows, MMA_KEYS):
            values = plgpu.load(self.kv_smem.at[slot, pl.ds(rows + first, MMA_KEYS)], layout=self.traits.rhs)
            acc = plgpu.mma(acc, p[:, first : first + MMA_KEYS], values)
        return acc

    def masked(self, scores: jax.Array, step: Index) -> jax.Array:
        """The scores of a partial block, -inf where a query may not attend to a key."""
        tile, block_kv = self.tile, self.traits.config.block_kv
        may_end = not isinstance(tile.limits.kv_length, int) or tile.limits.kv_length % block_kv != 0
        kv_start = tile.blocks.at(step) * block_kv
        keep = tile.limits.keep(scores.shape, kv_start, tile.start, layout=WGMMA, kv_axis=1, may_end=may_end)
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


def _attend(traits: Traits, arrays: Arrays, kv_smem: Ref, lse_smem: Ref) -> None:
    """Computes the work tile of the calling CTA."""
    tile = WorkTile.of(traits, arrays, lax.axis_index("cta"))
    kv_head = lax.div(tile.head, jnp.int32(traits.group))
    kv_loop = KvLoop(
        traits=traits,
        tile=tile,
        key=arrays.key.at[tile.batch, :, kv_head],
        value=arrays.value.at[tile.batch, :, kv_head],
        kv_smem=kv_smem,
    )
    # Slot 1 first holds the queries, and finally the output.
    staged = kv_smem.at[1, pl.ds(0, traits.config.block_q)]
    async_copies.load_rows(arrays.query.at[tile.batch, :, tile.head], tile.start, traits.q_length, staged)
    async_copies.commit()
    kv_loop.load(0, 0)
    async_copies.wait(1)
    chunks = range(0, traits.head_dim, CHUNK)
    queries = [plgpu.load(staged.at[:, pl.ds(c, CHUNK)], layout=traits.lhs) for c in chunks]
    acc, row_max, row_sum = kv_loop.run(queries)

    factor, lse = softmax.finish(row_max, row_sum, may_be_dead=True)
    async_copies.barrier()  # all warps have read slot 1
    staged[...] = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(traits.dtype)
    lse_smem[...] = lse
    async_copies.barrier()
    async_copies.store_rows(staged, arrays.out.at[tile.batch, :, tile.head], tile.start)
    async_copies.store_column(lse_smem, arrays.lse.at[tile.batch, tile.head], tile.start)


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

    It takes query, key and value with one head_dim of at most 128, causal limits, windows, kv_lengths and q_offset. A
    query without keys has out = 0 and lse = -inf. core_count: unused.
    """
    _check(inputs, options, out_dtype, config)
    query, key, value = (pad_for_tma(x, any_rows=True) for x in (inputs.query, inputs.key, inputs.value))
    batch, q_length, heads, head_dim = query.shape
    traits = Traits(
        config=config,
        options=options,
        batch=batch,
        heads=heads,
        group=heads // key.shape[2],
        q_length=q_length,
        kv_length=key.shape[1],
        head_dim=head_dim,
        dtype=query.dtype,
    )
    bounds = block_ranges.bounds_array(inputs, options)
    given = [query, key, value, *([] if bounds is None else [bounds])]

    def entry(*refs):
        query, key, value, *bounds, out, lse = refs
        arrays = Arrays(query, key, value, bounds[0] if bounds else None, out, lse)
        kv_shape = (2, 2 * config.block_kv, head_dim)
        scratch = smem_ref(kv_shape, query.dtype, transforms=SWIZZLED), smem_ref((config.block_q,), jnp.float32)
        pl.run_scoped(functools.partial(_attend, traits, arrays), *scratch, collective_axes="wg")

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
    out, lse = kernel(*given)
    return out[..., : inputs.query.shape[3]], lse


def _check(
    inputs: AttentionInputs, options: AttentionOptions, out_dtype: DTypeLike, config: AttentionForwardSm80
) -> None:
    """Raises for a call that the kernel cannot compute."""
    query, key, value = inputs[:3]
    unserved = [name for name, x in inputs._asdict().items() if name not in _SERVED and x is not None]
    default = AttentionOptions(scale=options.scale)
    changed = {f.name for f in dataclasses.fields(options) if getattr(options, f.name) != getattr(default, f.name)}
    if unserved := [*unserved, *sorted(changed - _SERVED - _OF_BACKWARD)]:
        raise NotImplementedError(f"inputs, options: got {', '.join(unserved)}, want only {', '.join(sorted(_SERVED))}")
    dtypes = [jnp.dtype(x) for x in (query.dtype, key.dtype, value.dtype, out_dtype)]
    if len(set(dtypes)) > 1 or dtypes[0] not in (jnp.bfloat16, jnp.float16):
        got = ", ".join(map(str, dtypes))
        raise TypeError(f"query, key, value, out_dtype: got {got}, want bfloat16 or float16 for all")
    if 0 in (*query.shape, *key.shape):
        raise ValueError(f"query, key: got {query.shape}, {key.shape}, want no empty axis")
    (batch, _, heads, head_dim), same = query.shape, key.shape == value.shape
    if not same or key.shape[0] != batch or heads % key.shape[2] or key.shape[3] != head_dim or head_dim > 128:
        got = ", ".join(str(x.shape) for x in (query, key, value))
        want = "want [B, T, H, D], [B, S, Hkv, D] twice, D up to 128, H a multiple of Hkv"
        raise ValueError(f"query, key, value: got {got}, {want}")
    if config.block_q > 64 and head_dim > 64:  # the accumulator and the queries would spill
        raise ValueError(f"config: got block_q {config.block_q} for head_dim {head_dim}, want 64")
