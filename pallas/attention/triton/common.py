"""Parts that the Triton attention kernels have in common: loads of tiles, their scores, and the loop over blocks.

A kernel is a function of `Refs`, the call's arrays by name, and of a `TracedCall`, the call's static part.
"""

import dataclasses
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.masks import Mask
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.attention.triton.arrays import (
    ALIGNED,
    all_rows,
    bias_spec,
    load_rows,
    whole,
    whole_array,
    whole_lists,
)
from jax_kernels.pallas.attention.triton.block_lists import (
    ListedBlocks,
    Lists,
    Visit,
    lists_of,
    without_listed_limits,
)
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton, AttentionForwardTriton
from jax_kernels.pallas.kernel_types import Index, Ref, needed
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import fit, iota, padded
from jax_kernels.pallas.varying import result_types
from jax_kernels.score_mod.tile_reads import TileMod, split

type Limiting = tuple[jax.Array | None, jax.Array | None, jax.Array | None]


class Refs(NamedTuple):
    """The arrays of a kernel, as Refs in device memory; None if the call lacks one.

    mask: bool [B or 1, H or 1, T or 1, S or 1]. entries: int32 [B or 1, H or 1, blocks of queries, blocks of keys]:
    whether a block is dead or full, else its index in `words`, which has the bits of its pairs. q_ids, kv_ids: segment
    ids. ranges: int32 [B, blocks, 4]: for each block that a program may own, the range of blocks with which it shares
    segments, and the range of blocks with only its own segment. bounds: int32 [B, 2 or 3]: the position of query 0, the
    number of keys, and the first query with keys. lse (base 2, or natural units if TracedCall.may_mask), delta, lse_lo:
    float32 of each query, for a backward. out: the forward's result, in a kernel that computes delta from it; lse is
    then in natural log, and delta is the cotangent of lse, or None. operands: values that a score_mod reads. Only for
    the gradients of large rows: sums, the gradients so far of query, key and value; and large, int32 [B, Hkv], nonzero
    for key heads with large rows. lists: the block lists of a mask. outs: the arrays that the kernel writes.
    """

    query: Ref
    key: Ref
    value: Ref
    bias: Ref | None = None
    mask: Ref | None = None
    entries: Ref | None = None
    words: Ref | None = None
    sinks: Ref | None = None
    q_ids: Ref | None = None
    kv_ids: Ref | None = None
    ranges: Ref | None = None
    bounds: Ref | None = None
    dout: Ref | None = None
    out: Ref | None = None
    lse: Ref | None = None
    delta: Ref | None = None
    lse_lo: Ref | None = None
    sums: tuple[Ref, ...] = ()
    large: Ref | None = None
    operands: tuple[Ref, ...] = ()
    lists: Lists[Ref] | None = None
    outs: tuple[Ref, ...] = ()


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """The static facts of a call, with which a kernel is traced.

    block_q, block_kv: the block sizes, at most the lengths rounded up to a power of two. mod: the score_mod's program,
    or None.
    """

    options: AttentionOptions
    q_length: int
    kv_length: int
    heads: int
    group: int  # query heads per key head
    head_dim: int
    v_head_dim: int
    block_q: int
    block_kv: int
    has_bias: bool
    interpret: bool
    mod: TileMod | None = None
    # Whether the last blocks of queries have the most keys. They go first, so that short programs fill the end.
    from_last: bool = False

    @classmethod
    def of(cls, inputs: AttentionInputs, options: AttentionOptions, block_q: int, block_kv: int, interpret: bool):
        """The static facts of a call with these inputs. block_q, block_kv: the block sizes; short lengths get smaller
        blocks.
        """
        _, q_length, heads, head_dim = inputs.query.shape
        return cls(
            options=options,
            q_length=q_length,
            kv_length=inputs.key.shape[1],
            heads=heads,
            group=heads // inputs.key.shape[2],
            head_dim=head_dim,
            v_head_dim=inputs.value.shape[3],
            block_q=fit(block_q, q_length),
            block_kv=fit(block_kv, inputs.key.shape[1]),
            has_bias=inputs.bias is not None,
            interpret=interpret,
            mod=None if inputs.score_mod is None else split(inputs.score_mod),
            from_last=options.is_causal or (isinstance(inputs.mask, Mask) and inputs.mask.keeps_more_later),
        )

    @classmethod
    def listed(
        cls, inputs: AttentionInputs, options: AttentionOptions, blocks: tuple[int, int], interpret: bool, *, by: str
    ) -> tuple["TracedCall", AttentionInputs, Lists[jax.Array] | None]:
        """(the static facts, the inputs, the block lists) of a call. With lists, they alone hold the limits of keys.

        blocks: (block_q, block_kv). by: "query" or "key", the side whose blocks the programs own. The lists are None
        without a mask.
        """
        call = cls.of(inputs, options, *blocks, interpret)
        lists = lists_of(inputs, options, (call.block_q, call.block_kv), by=by)
        if lists is None:
            return call, inputs, None
        inputs, options = without_listed_limits(inputs, options)
        return dataclasses.replace(call, options=options), inputs, lists

    @property
    def may_mask(self) -> bool:
        """Whether scores may be -inf, or -1e30, without a mask: with a bias or a score_mod. Scores then stay in natural
        units.
        """
        return self.has_bias or self.mod is not None

    @property
    def columns(self) -> int | None:
        """The number of keys rounded up to a multiple of 8, the padded length of bias and operands; None without
        these.
        """
        return pl.cdiv(self.kv_length, ALIGNED) * ALIGNED if self.may_mask else None

    @property
    def q_blocks(self) -> int:
        return pl.cdiv(self.q_length, self.block_q)

    @property
    def kv_blocks(self) -> int:
        return pl.cdiv(self.kv_length, self.block_kv)

    @property
    def precision(self) -> lax.Precision:
        """The precision of matmuls. HIGHEST: exact float32 matmuls. DEFAULT: tf32 for float32 operands."""
        return lax.Precision.HIGHEST if self.options.precision == "fp32" else lax.Precision.DEFAULT

    @property
    def factor(self) -> float:
        """The factor that takes the scores that `scores` returns to base 2; 1 if scores stay in natural units."""
        if self.may_mask:
            return 1.0
        return LOG2E * (self.options.scale if self.options.softcap is None else self.options.softcap)

    def limits(self, refs: Refs, batch_index: Index) -> block_ranges.Limits:
        """The limits of the keys of a batch entry, for use inside a kernel: bounds, causal mask and window.

        Segments are not among them.
        """
        return block_ranges.limits(
            refs.bounds,
            batch_index,
            self.options.q_offset,
            self.kv_length,
            is_causal=self.options.is_causal,
            window=self.options.window,
        )

    def key_blocks(
        self, refs: Refs, limits: block_ranges.Limits, batch_index: Index, head: Index, q_index: Index
    ) -> "block_ranges.BlockRange | ListedBlocks":
        """The blocks of keys that block of queries number q_index of a query head visits, inside a kernel."""
        if refs.lists is not None:
            return refs.lists.of(batch_index, head, q_index)
        among = None
        if refs.ranges is not None:
            among = block_ranges.among(refs.ranges, batch_index, q_index)
        blocks = limits.key_blocks(q_index * self.block_q, self.block_q, self.block_kv, among)
        if not isinstance(blocks.partial, int) or blocks.partial == 0:
            return blocks
        # A loop with one iteration is unrolled into the start of the other loop. Then the tiles of two more blocks
        # overflow Hopper's shared memory. With a bias, all blocks are partial; else the number is not a constant.
        if refs.bias is not None:
            return dataclasses.replace(blocks, partial=blocks.count)
        return dataclasses.replace(blocks, partial=blocks.partial + jnp.minimum(pl.program_id(0), 0))

    def dot(self, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        """The float32 matmul of two matrices, contracted over axis axes[0] of a and axis axes[1] of b."""
        dimensions = (((axes[0],), (axes[1],)), ((), ()))
        return lax.dot_general(a, b, dimensions, precision=self.precision, preferred_element_type=jnp.float32)

    def scores(self, products: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """(scores, tanh): a tile's scores before the mask, and their tanh with a softcap, else None.

        products: query @ key^T of the tile. bias: of the tile, or None. Without a bias, `factor` takes the scores to
        base 2: they lack the factor scale or softcap. With a bias the scores are in natural units, and a maximum or lse
        is subtracted from them unscaled: a product with log2(e) fused into the subtraction would lack a rounding, which
        is hundreds under a bias of -1e10, and an infinity under a bias of finfo.min.
        """
        scale, softcap = self.options.scale, self.options.softcap
        if softcap is None:
            return (products if bias is None else self.multiply_add(products, scale, bias)), None
        if self.options.precision is None:  # exact to 1e-7 of softcap, which matmuls of 16-bit operands are not
            tanh = 1.0 - 2.0 / (1.0 + jnp.exp2(products * (2 * LOG2E * scale / softcap)))
        else:
            tanh = jnp.tanh(products * (scale / softcap))
        return (tanh if bias is None else self.multiply_add(tanh, softcap, bias)), tanh

    def multiply_add(self, x: jax.Array, factor: float, y: jax.Array) -> jax.Array:
        """x * factor + y in one instruction, where Triton as XLA runs it uses two. y: float32, broadcastable to x."""
        if self.interpret:
            return x * factor + y
        (result,) = plgpu.elementwise_inline_asm(
            f"fma.rn.f32 $0, $1, 0f{_bits(factor)}, $2;",
            args=[x, jnp.broadcast_to(y, x.shape)],
            constraints="=f,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
        )
        return result

    def in_units(self, x: jax.Array) -> jax.Array:
        """Converts x, such as lse, from natural units to the units in which `exp2` subtracts it.

        These are base 2 (x * log2(e)), or natural units (x itself) if may_mask.
        """
        return x if self.may_mask else x * LOG2E

    def shrinking(self, row_max: jax.Array, new: jax.Array) -> jax.Array:
        """The factor for a row's sums so far, when its maximum grows from row_max to `new`.

        Both maxima are in base 2, or in natural units if may_mask.
        """
        return jnp.exp2((row_max - new) * LOG2E if self.may_mask else row_max - new)

    def exp2(self, x: jax.Array, shift: jax.Array, lse_lo: jax.Array | None = None) -> jax.Array:
        """exp2(x * factor - shift) in float32; if may_mask, exp(x - shift - lse_lo), at most 1.

        If a bias of -1e30 masks a row, lse is too coarse for P, and the limit of 1 keeps P finite. Triton as XLA runs
        it rounds the product, and its exp2 scales around denormal results: six instructions. This assembly fuses the
        product, and gives 0 below 2**-126. The interpreter knows no assembly, and uses the formula.
        """
        if self.interpret:
            if not self.may_mask:
                return jnp.exp2(x * self.factor - shift)
            x = x - shift if lse_lo is None else x - shift - lse_lo
            return jnp.exp2(jnp.minimum(x * LOG2E, 0.0))
        args = [x, jnp.broadcast_to(-shift, x.shape)]
        subtract = f"fma.rn.f32 t, $1, 0f{_bits(self.factor)}, $2; "
        if self.may_mask:
            less = "0f00000000" if lse_lo is None else "$3"
            subtract = f"add.rn.f32 t, $1, $2; fma.rn.f32 t, t, 0f{_bits(LOG2E)}, {less}; "
        if lse_lo is not None:
            args.append(jnp.broadcast_to(lse_lo * -LOG2E, x.shape))
        clamp = "min.f32 t, t, 0f00000000; " if self.may_mask else ""
        (result,) = plgpu.elementwise_inline_asm(
            f"{{ .reg .f32 t; {subtract}{clamp}ex2.approx.ftz.f32 $0, t; }}",
            args=args,
            constraints=",".join(["=f", *["f"] * len(args)]),
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
        )
        return result


def _bits(x: float) -> str:
    """The 8 hex digits of x as a float32, which PTX writes after "0f"."""
    return struct.pack(">f", x).hex()


def run(
    kernel: Callable[..., None],
    call: TracedCall,
    config: AttentionBackwardTriton | AttentionForwardTriton,
    *,
    name: str,
    grid,
    ins,
    outs,
    **rest: Any,
) -> tuple[jax.Array, ...]:
    """Runs kernel(refs, call=call, **rest) as a pallas_call over `grid`, and returns the arrays that it writes.

    ins: the inputs by the names of Refs: an (array, BlockSpec) pair, a list or Lists of pairs, or None. outs:
    (ShapeDtypeStruct, BlockSpec) pairs. If ins has "sums", the outs use the memory of these arrays: values that no
    program writes stay.
    """
    before = jax.tree.leaves([x for key, x in ins.items() if key != "sums"], is_leaf=lambda x: isinstance(x, tuple))
    ins = {key: x for key, x in ins.items() if key != "sums"} | {"sums": ins.get("sums", [])}
    aliases = {len(before) + i: i for i in range(len(ins["sums"]))}
    pairs, tree = jax.tree.flatten(list(ins.values()), is_leaf=lambda x: isinstance(x, tuple))

    arrays = [array for array, _ in pairs]

    def body(*refs):
        given = jax.tree.unflatten(tree, refs[: len(pairs)])
        kernel(Refs(**dict(zip(ins, given, strict=True)), outs=refs[len(pairs) :]), call=call, **rest)

    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[spec for _, spec in pairs],
        out_specs=[spec for _, spec in outs],
        out_shape=result_types([shape for shape, _ in outs], *arrays),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=call.interpret,
        name=name,
    )(*arrays)


def listed_blocks(
    inputs: AttentionInputs, forward: AttentionForwardTriton, backward: AttentionBackwardTriton
) -> list[tuple[tuple[int, int], str]]:
    """((block_q, block_kv), by) of the block lists of each kernel: the forward, dkey and dvalue, dquery, and dvalue if
    it has a kernel of its own.
    """
    q_length, kv_length = inputs.query.shape[1], inputs.key.shape[1]
    fitted = lambda block_q, block_kv: (fit(block_q, q_length), fit(block_kv, kv_length))
    of_dvalue = [] if backward.block_q_dv is None else [(fitted(backward.block_q_dv, backward.block_kv_dkv), "key")]
    return [
        (fitted(forward.block_q, forward.block_kv), "query"),
        (fitted(backward.block_q_dkv, backward.block_kv_dkv), "key"),
        (fitted(backward.block_q_dq, backward.block_kv_dq), "query"),
        *of_dvalue,
    ]


def limiting_arrays(inputs: AttentionInputs, options: AttentionOptions) -> Limiting:
    """(bounds, segment ids of queries, segment ids of keys) as the kernels read them; None for absent arrays.

    bounds: int32 [B, 2 or 3]: for each batch entry the position of query 0, the number of keys that count, and with
    inputs.reach the first query that has keys. None if tracing knows them all. Negative ids are replaced such that they
    equal no other id.
    """
    bounds = block_ranges.bounds_array(inputs, options)
    if inputs.q_segment_ids is None:
        return bounds, None, None
    return bounds, *block_ranges.segment_arrays(inputs.q_segment_ids, needed(inputs.kv_segment_ids))


class QueryPrograms:
    """The operands of a kernel whose programs (i, h, b) own a block of queries of head h of batch entry b each.

    A program loops over the keys. limiting: (bounds, segment ids of queries, segment ids of keys), as limiting_arrays
    returns them. operands: the arrays that a score_mod reads. lists: the block lists by query, or None.
    Attributes: `grid`; `ins`, the inputs for `run`; `q_block`, the function from i to the block of queries; `row_spec`,
    the BlockSpec of an array [B, H, T].
    """

    def __init__(
        self,
        call: TracedCall,
        inputs: AttentionInputs,
        limiting: Limiting,
        operands: Sequence[jax.Array | None] = (),
        lists: Lists[jax.Array] | None = None,
    ):
        bounds, q_ids, kv_ids = limiting
        block_q, kv_rows = call.block_q, all_rows(call.kv_length, call.block_kv)
        q_block = self.q_block = (lambda i: call.q_blocks - 1 - i) if call.from_last else lambda i: i
        self.row_spec = pl.BlockSpec((None, None, block_q), lambda i, h, b: (b, h, q_block(i)))
        self.grid = (call.q_blocks, call.heads, inputs.query.shape[0])
        self._block_q = block_q
        kv_spec = lambda d: whole(call.kv_length, call.block_kv, None, d, lambda i, h, b: (b, h // call.group))
        tile = lambda x: bias_spec(x, (None, None, block_q, kv_rows), lambda i, h, b: (b, h, q_block(i), 0))
        self.ins: dict[str, Any] = {
            "bounds": whole_array(bounds),
            "query": (inputs.query, self.q_spec(call.head_dim)),
            "key": (inputs.key, kv_spec(call.head_dim)),
            "value": (inputs.value, kv_spec(call.v_head_dim)),
            "bias": None if inputs.bias is None else (inputs.bias, tile(inputs.bias)),
            "operands": [(x, tile(x)) for x in operands],
            "lists": whole_lists(lists),
        }
        if q_ids is not None:
            self.ins["q_ids"] = q_ids, pl.BlockSpec((None, block_q), lambda i, h, b: (b, q_block(i)))
            self.ins["kv_ids"] = kv_ids, pl.BlockSpec((None, kv_rows), lambda i, h, b: (b, 0))
            self.ins["ranges"] = whole_array(block_ranges.segment_ranges(q_ids, block_q, needed(kv_ids), call.block_kv))

    def q_spec(self, head_dim: int) -> pl.BlockSpec:
        """The BlockSpec of an array [B, T, H, head_dim], a block of queries per program."""
        block = (None, self._block_q, None, padded(head_dim))
        return pl.BlockSpec(block, lambda i, h, b: (b, self.q_block(i), h, 0))


class Queries(NamedTuple):
    """The keys that each query of a block may attend to: start ... limit - 1, with equal segment ids.

    start, limit: int32 [block_q]; start is None without a window. ids: of the queries, None without segments.
    """

    start: Index | None
    limit: jax.Array
    ids: jax.Array | None

    @classmethod
    def of(cls, limits: block_ranges.Limits, q_start: Index, block_q: int, ids: jax.Array | None) -> "Queries":
        """The limits of each query of the block that starts at q_start. ids: the queries' segment ids, None without
        segments.
        """
        queries = q_start + iota(block_q)
        start = limits.key_start(queries) if limits.left >= 0 else None
        return cls(start, jnp.broadcast_to(limits.key_limit(queries), (block_q,)), ids)

    def keep(self, keys: jax.Array, kv_ids: jax.Array | None, *, transposed: bool = False) -> jax.Array:
        """Which pairs of a tile the limits keep: bool [queries, keys], or if transposed [keys, queries].

        keys: the indices of the tile's keys. kv_ids: their segment ids, None without segments.
        """
        by_query = lambda x: x[None, :] if transposed else x[:, None]
        by_key = lambda x: x[:, None] if transposed else x[None, :]
        live = by_key(keys) < by_query(self.limit)
        if self.start is not None:
            live = live & (by_key(keys) >= by_query(self.start))
        if self.ids is not None:
            live = live & (by_query(self.ids) == by_key(kv_ids))
        return live


def kept_keys(
    refs: Refs, call: TracedCall, blocks: "block_ranges.BlockRange | ListedBlocks", visit: Visit, queries: Queries
) -> jax.Array:
    """Which pairs of a partial block of keys are kept, in a program that owns a block of queries.

    bool [block_q, block_kv]. blocks: the blocks of keys that the program visits.
    """
    if isinstance(blocks, ListedBlocks):
        return blocks.keep(visit)
    start = visit.block * call.block_kv
    kv_ids = None
    if queries.ids is not None:
        of_block = needed(refs.kv_ids).at[pl.ds(start, call.block_kv)]
        kv_ids = load_rows(of_block, start, call.kv_length, block_ranges.NO_KEY)
    return queries.keep(start + iota(call.block_kv), kv_ids)


def block_loop[State](
    blocks: "block_ranges.BlockRange | ListedBlocks", step: Callable[..., State], state: State
) -> State:
    """The last state of a loop over the partial blocks, and a loop over the full blocks, in the order of `blocks`.

    Each iteration is state = step(visit, state, partial=...). partial: a Python bool, whether the loop is the one over
    partial blocks. All partial blocks of a BlockRange have to come first: blocks.last is 0.
    """
    if isinstance(blocks, ListedBlocks):
        return _listed_loop(blocks, step, state)
    nothing = lambda first, last: first is last or (isinstance(first, int) and isinstance(last, int) and first >= last)
    for first, last, partial in ((0, blocks.partial, True), (blocks.partial, blocks.count, False)):
        if not nothing(first, last):
            visiting = lambda i, state, partial=partial: step(Visit(i, blocks.at(i)), state, partial=partial)
            state = lax.fori_loop(first, last, visiting, state)
    return state


def _listed_loop[State](blocks: ListedBlocks, step: Callable[..., State], state: State) -> State:
    """The last state of a loop over the full blocks of a list, and a loop over the partial blocks.

    The index of the next block is loaded one iteration ahead: the loads of this block's tiles, which Triton starts an
    iteration early, would otherwise wait for their index.
    """

    def visiting(i, carried, *, partial):
        block, state = carried
        return blocks.at(i + 1), step(Visit(i, block), state, partial=partial)

    carried = blocks.at(0), state
    for first, last, partial in ((0, blocks.full, False), (blocks.full, blocks.count, True)):
        carried = lax.fori_loop(first, last, functools.partial(visiting, partial=partial), carried)
    return carried[1]
