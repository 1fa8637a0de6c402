"""Attention forward by mma.sync and cp.async, for GPUs that have neither wgmma nor tcgen05: sm_80, 86, 89 and 120.

The algorithm is FlashAttention-2 (Dao 2023, arXiv:2307.08691). Each warpgroup of a CTA owns block_q queries of one
head. The CTA walks over blocks of keys: while it computes with one block, cp.async loads the next block's keys and
values. P stays in registers: the result layout of one mma is the operand layout of the next.

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

    block_q: queries of a warpgroup: 64, or 128 for a head_dim of up to 64 or with q_in_smem. block_kv: keys of a step:
    32 or 64. warpgroups: of a CTA, 1 or 2; two share the keys and values. q_in_smem: whether each step reads the
    queries from shared memory; otherwise they stay in registers, and are staged where slot 1's keys will be, so that
    all queries of the CTA are at most 2 * block_kv.

    The two slots of shared memory take 8 * block_kv * head_dim bytes, q_in_smem 2 * head_dim for each query.
    """

    block_q: int = 64
    block_kv: int = 64
    warpgroups: int = 1
    q_in_smem: bool = False

    def __post_init__(self):
        if self.block_q not in (64, 128):
            raise ValueError(f"block_q: got {self.block_q}, want 64 or 128")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups: got {self.warpgroups}, want 1 or 2")
        rows = 0 if self.q_in_smem else self.block_q * self.warpgroups
        if self.block_kv not in (32, 64) or rows > 2 * self.block_kv:
            got = f"got {self.block_kv} with {self.block_q=} and {self.warpgroups=}"
            raise ValueError(f"block_kv: {got}, want 32 or 64, and at least half of the queries without q_in_smem")

    @property
    def rows(self) -> int:
        """The queries of a CTA."""
        return self.block_q * self.warpgroups


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
        return pl.cdiv(self.q_length, self.config.rows)

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
    """The work of a warpgroup: block_q queries from index `start` on, of one head of one batch entry.

    limits: of the queries' keys. blocks: the blocks of keys that its CTA visits, the partial ones first.
    """

    batch: Index
    head: Index
    start: Index
    limits: block_ranges.Limits
    blocks: block_ranges.BlockRange

    @classmethod
    def of(cls, traits: Traits, arrays: Arrays, cta: Index, warpgroup: Index) -> "WorkTile":
        """The work tile of a warpgroup of a CTA. A head's CTAs follow each other, because they read the same keys.

        Causal work starts with a head's last queries, which have the most keys.
        """
        options, config, heads = traits.options, traits.config, jnp.int32(traits.heads)
        head, block = lax.div(cta, jnp.int32(traits.q_blocks)), lax.rem(cta, jnp.int32(traits.q_blocks))
        batch, block = lax.div(head, heads), traits.q_blocks - 1 - block if options.is_causal else block
        start = block * config.rows
        limits = block_ranges.limits(
            arrays.bounds,
            batch,
            options.q_offset,
            traits.kv_length,
            is_causal=options.is_causal,
            window=options.window,
        )
        blocks = limits.key_blocks(start, config.rows, config.block_kv).at_least_one()
        if config.warpgroups > 1:
            start = start + warpgroup * config.block_q
        return cls(batch=batch, head=lax.rem(head, heads), start=start, limits=limits, blocks=blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvLoop:
    """The loop over the blocks of keys of a work tile.

    key, value: [S, D] in device memory. query_smem: [block_q, D], the warpgroup's queries. kv_smem: [2 slots,
    warpgroups, 2 * block_kv / warpgroups, D], the keys of a block and then its values.
    """

    traits: Traits
    tile: WorkTile
    key: Ref
    value: Ref
    query_smem: Ref
    kv_smem: Ref

    def run(self):
        """(O before the division by the sums of P, row_max, row_sum).

        The first block's copies must be in flight, and the queries must have arrived.
        """
        traits, blocks = self.traits, self.tile.blocks
        query = None if traits.config.q_in_smem else [self.queries(c) for c in range(0, traits.head_dim, CHUNK)]
        acc = jnp.zeros((traits.config.block_q, traits.head_dim), jnp.float32)
        sums = plgpu.layout_cast(acc, WGMMA), *softmax.start(traits.config.block_q)
        if self.tile.limits.keep_all(traits.config.block_kv):
            return lax.fori_loop(0, blocks.count, functools.partial(self.step, query, False), sums)
        sums = lax.fori_loop(0, blocks.partial, functools.partial(self.step, query, True), sums)
        return lax.fori_loop(blocks.partial, blocks.count, functools.partial(self.step, query, False), sums)

    def queries(self, column: int) -> jax.Array:
        """CHUNK columns of the queries, from `column` on, in registers: [block_q, CHUNK]."""
        return plgpu.load(self.query_smem.at[:, pl.ds(column, CHUNK)], layout=self.traits.lhs)

    def of_slot(self, slot: Index, *, values: bool, first: int = 0, rows: int | None = None) -> Ref:
        """Rows `first` and following of the keys, or of the values, in a slot: [rows, D], by default all rows."""
        block_kv, is_second = self.traits.config.block_kv, self.traits.config.warpgroups > 1
        half, start = (int(values), first) if is_second else (0, first + block_kv * values)
        return self.kv_smem.at[slot, half, pl.ds(start, block_kv if rows is None else rows)]

    def load(self, step: Index, slot: Index) -> None:
        """Starts the warpgroup's copies of the keys and values of a step: of two warpgroups, each copies one array."""
        start, end = self.tile.blocks.at(step) * self.traits.config.block_kv, self.tile.limits.kv_length
        for values, array in ((False, self.key), (True, self.value)):
            copy = functools.partial(async_copies.load_rows, array, start, end, self.of_slot(slot, values=values))
            if self.traits.config.warpgroups == 1:
                copy()
            else:
                pl.when(lax.axis_index("wg") == int(values))(copy)
        async_copies.commit()

    def step(self, query: list[jax.Array] | None, is_partial: bool, step: Index, sums):
        """(O, row_max, row_sum) after one more block of keys."""
        acc, row_max, row_sum = sums
        slot = lax.rem(step, jnp.int32(2))
        # For this block; and until all warps have read the other slot.
        async_copies.wait(0, self.traits.config.warpgroups)

        @pl.when(step + 1 < self.tile.blocks.count)
        def _():
            self.load(step + 1, 1 - slot)

        scores = self.scores(query, slot)
        scores = self.masked(scores, step) if is_partial else scores
        p, row_max, row_sum, alpha = softmax.step(scores, row_max, row_sum, self.traits.options.scale)
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        return self.add_values(acc, p.astype(self.traits.dtype), slot), row_max, row_sum

    def scores(self, query: list[jax.Array] | None, slot: Index) -> jax.Array:
        """S = Q K^T of the block in a slot: float32 [block_q, block_kv]."""
        config = self.traits.config
        scores = plgpu.layout_cast(jnp.zeros((config.block_q, config.block_kv), jnp.float32), WGMMA)
        for c in range(0, self.traits.head_dim, CHUNK):
            keys = self.of_slot(slot, values=False).at[:, pl.ds(c, CHUNK)]
            transposed = plgpu.load(keys.transpose((1, 0)), layout=self.traits.rhs)
            scores = plgpu.mma(scores, self.queries(c) if query is None else query[c // CHUNK], transposed)
        return scores

    def add_values(self, acc: jax.Array, p: jax.Array, slot: Index) -> jax.Array:
        """O + P V with the values in a slot. p: [block_q, block_kv], 16-bit."""
        p = as_operand(p, self.traits.lhs)
        for first in range(0, self.traits.config.block_kv, MMA_KEYS):
            rows = self.of_slot(slot, values=True, first=first, rows=MMA_KEYS)
            values = plgpu.load(rows, layout=self.traits.rhs)
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


def _attend(traits: Traits, arrays: Arrays, kv_smem: Ref, lse_smem: Ref, query_smem: Ref | None) -> None:
    """Computes the work tile of the calling warpgroup."""
    config, threads = traits.config, traits.config.warpgroups
    warpgroup = lax.axis_index("wg") if threads > 1 else 0
    tile = WorkTile.of(traits, arrays, lax.axis_index("cta"), warpgroup)
    kv_head = lax.div(tile.head, jnp.int32(traits.group))
    # Without memory of their own, slot 1 first holds the queries, and finally the output.
    staged = kv_smem.at[1, warpgroup, pl.ds(0, config.block_q)] if query_smem is None else query_smem.at[warpgroup]
    kv_loop = KvLoop(
        traits=traits,
        tile=tile,
        key=arrays.key.at[tile.batch, :, kv_head],
        value=arrays.value.at[tile.batch, :, kv_head],
        query_smem=staged,
        kv_smem=kv_smem,
    )
    async_copies.load_rows(arrays.query.at[tile.batch, :, tile.head], tile.start, traits.q_length, staged)
    async_copies.commit()
    kv_loop.load(0, 0)
    async_copies.wait(1, threads)
    acc, row_max, row_sum = kv_loop.run()

    factor, lse = softmax.finish(row_max, row_sum, may_be_dead=True)
    async_copies.barrier(threads)  # all warps have read slot 1 and the queries
    staged[...] = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(traits.dtype)
    lse_smem[warpgroup] = lse
    async_copies.barrier(threads)
    async_copies.store_rows(staged, arrays.out.at[tile.batch, :, tile.head], tile.start)
    async_copies.store_column(lse_smem.at[warpgroup], arrays.lse.at[tile.batch, tile.head], tile.start)


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
    _check(inputs, options, out_dtype, config, interpret)
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
        threads = config.warpgroups
        in_smem = lambda *shape: smem_ref((*shape, head_dim), query.dtype, transforms=SWIZZLED)
        scratch = in_smem(2, threads, 2 * config.block_kv // threads), smem_ref((threads, config.block_q), jnp.float32)
        of_queries = in_smem(threads, config.block_q) if config.q_in_smem else None
        pl.run_scoped(functools.partial(_attend, traits, arrays), *scratch, of_queries, collective_axes="wg")

    shapes = jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((batch, heads, q_length), jnp.float32)
    kernel = launch(
        entry,
        "attention_forward_sm80",
        out_type=shapes,
        ctas=batch * heads * traits.q_blocks,
        warpgroups=config.warpgroups,
        semantics=plgpu.LoweringSemantics.Lane,
        auto_barriers=False,
        interpret=interpret,
    )
    out, lse = kernel(*given)
    return out[..., : inputs.query.shape[3]], lse


def _check(
    inputs: AttentionInputs,
    options: AttentionOptions,
    out_dtype: DTypeLike,
    config: AttentionForwardSm80,
    interpret: bool,
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
    if interpret and config.warpgroups > 1:  # the interpreter has no barrier for the copies of both
        raise NotImplementedError(f"interpret: got {interpret} with {config.warpgroups} warpgroups, want 1 warpgroup")
    if config.block_q > 64 and head_dim > 64 and not config.q_in_smem:  # the accumulator and the queries would spill
        raise ValueError(f"config: got block_q {config.block_q} for head_dim {head_dim}, want 64 or q_in_smem")
