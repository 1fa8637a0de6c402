"""What the Hopper kernels share: layouts, shared-memory transforms, and small helpers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.attention_inputs import AttentionInputs
from jax_kernels.pallas.attention import tiles
from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.varying import as_varying, varying_axes

WGMMA = plgpu.Layout.WGMMA
PART = 8  # neighbouring columns of a WGMMA array, of which a thread has two
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # a number for each column of a tile
ROW = plgpu.Layout.WGMMA.reduce(1)
# 16-bit tiles as wgmma reads them.
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# The same bytes where 64 columns are all, for copies of any number of rows: the tensor memory accelerator takes tiles
# of 8 rows from arrays of whole ones alone.
ROWS = (plgpu.TilingTransform((64,)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
# float32 tiles as the tensor memory accelerator adds them.
SWIZZLED_F32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]

# Whether JAX's interpreter can run these kernels. As it comes it cannot; tests that complete it say so here.
INTERPRETED = False


def launch(
    entry: Callable[..., None],
    name: str,
    *,
    out_type: Any,
    ctas: int,
    warpgroups: int,
    semantics: plgpu.LoweringSemantics,
    interpret: bool,
    **params: Any,
) -> Callable[..., Any]:
    """plgpu.kernel over axes "cta" and "wg". With Warpgroup semantics the kernel places all barriers itself.

    Inside jax.shard_map the results vary over the mesh axes that the arguments vary over. params: more of
    plgpu.CompilerParams.
    """
    is_lane = semantics == plgpu.LoweringSemantics.Lane
    kernel = plgpu.kernel(
        entry,
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=semantics, unsafe_no_auto_barriers=not is_lane, **params
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    return lambda *arguments: as_varying(kernel(*arguments), varying_axes(arguments))


class Barriers:
    """A kernel's barriers by name, each with how many there are and how many arrivals each counts.

    merged: those that count as many stand in one array. A thread keeps the phases of an array in one register.
    """

    def __init__(self, wanted: dict[str, tuple[int, int]], *, merged: bool):
        self._places: dict[str, tuple[Any, int]] = {}
        self._arrays: dict[Any, tuple[int, int]] = {}
        for name, (count, arrivals) in wanted.items():
            array = arrivals if merged else name
            first, _ = self._arrays.get(array, (0, 0))
            self._places[name] = array, first
            self._arrays[array] = first + count, arrivals

    def scratch(self) -> list[Any]:
        """For pl.run_scoped."""
        return [plgpu.Barrier(num_arrivals=arrivals, num_barriers=n) for n, arrivals in self._arrays.values()]

    def of(self, scratch: list[Any], name: str) -> Any:
        """What `.at[i]` of is its barrier number i; None where none was wanted."""
        if name not in self._places:
            return None
        array, first = self._places[name]
        return _From(scratch[list(self._arrays).index(array)], first)


class _From(NamedTuple):
    """The barriers of an array from one on."""

    array: Any
    first: int

    @property
    def at(self) -> "_From":
        return self

    def __getitem__(self, index: Any) -> Any:
        is_only = isinstance(index, int) and self.array.shape == (1,)
        return self.array if is_only else self.array.at[self.first + index]


def named_barrier(kind: str, index: int, threads: int) -> None:
    """bar.sync or bar.arrive on a hardware barrier. It is cheaper than an mbarrier, which would be polled."""

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def barrier(_):
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], f"bar.{kind} {index}, {threads};", "", has_side_effects=True)

    barrier()


def zeros_stay() -> None:
    """Behind a product: keeps the number that its accumulators are zeroed by apart from them.

    Where nothing uses the zero later, LLVM makes it one of the accumulators, and ptxas then no longer sees that the
    product starts from zeros: it writes them to each register.
    """
    if INTERPRETED:
        return

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def use(_):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import llvm

        zero = utils.c(0, ir.IntegerType.get_signless(32))
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [zero], "// $0", "r", has_side_effects=True)

    use()


def count_up(counter_ref, out_ref, first: int = 0, *, release: bool = False) -> None:
    """out_ref[0] = first + how often the counter in device memory, [1], was counted up before.

    release: what the calling thread has in device memory before is seen by those who count later.
    """
    if INTERPRETED:
        count = counter_ref[0]
        counter_ref[0] = count + 1
        out_ref[0] = count + first
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=None)
    def fetch(_, counter, out):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, memref

        i32 = ir.IntegerType.get_signless(32)
        ordering = llvm.AtomicOrdering.acq_rel if release else llvm.AtomicOrdering.monotonic
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            count = llvm.atomicrmw(llvm.AtomicBinOp.add, utils.memref_ptr(counter), utils.c(1, i32), ordering)
            memref.store(arith.addi(count, utils.c(first, i32)), out, [utils.c(0, ir.IndexType.get())])

    fetch(counter_ref, out_ref)


def as_int32(x):
    return jnp.int32(x) if isinstance(x, int) else x


def recomputed(index):
    """Keeps the arithmetic on an index where it is written: hoisted out of a loop, its results spill."""
    return lax.optimization_barrier(as_int32(index))


def all_of_warp(rows) -> jax.Array:
    """Whether a bool [64] is True in all 16 rows of a warp: a scalar bool, the same in a warp, not in a warpgroup.

    A branch on it may hold no operation of a whole warpgroup.
    """
    if INTERPRETED:
        return jnp.all(rows)

    @plgpu.inline_mgpu(
        arg_types=(ROW,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    )
    def vote(_, numbers):
        from jax.experimental.mosaic.gpu import fragmented_array
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32 = ir.IntegerType.get_signless(32)
        mine = [vector.extract(x, dynamic_position=[], static_position=[0]) for x in numbers.registers.reshape(-1)]
        both = functools.reduce(arith.andi, mine)
        assembly = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.all.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        result = llvm.inline_asm(i32, [both], assembly, "=r,r", has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(result, (), is_signed=True)

    return vote(jnp.where(rows, 1, 0).astype(jnp.int32)) != 0


def any_of_warp_above(numbers, rows) -> jax.Array:
    """Whether any of numbers [64, n] is above its row's of rows [64], or NaN, in a warp: a bool as all_of_warp's."""
    if INTERPRETED:
        return jnp.any(~(numbers <= rows[:, None]))

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, ROW), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    )
    def vote(_, numbers, rows):
        from jax.experimental.mosaic.gpu import fragmented_array
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        i32 = ir.IntegerType.get_signless(32)
        element = lambda x, i: vector.extract(x, dynamic_position=[], static_position=[i])
        limits = [element(x, 0) for x in rows.registers.reshape(-1)]
        above = [
            arith.cmpf(arith.CmpFPredicate.UGT, element(x, i), limit)
            for of_row in numbers.registers.reshape(-1, len(limits))
            for x, limit in zip(of_row, limits, strict=True)
            for i in range(2)
        ]
        mine = arith.extui(i32, functools.reduce(arith.ori, above))
        assembly = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
        result = llvm.inline_asm(i32, [mine], assembly, "=r,r", has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(result, (), is_signed=True)

    return vote(numbers, rows) != 0


class Segments(NamedTuple):
    """Segment ids and, per block that a CTA owns, the blocks that it may meet (see tiles.segment_ranges)."""

    q_ids: Any
    kv_ids: Any
    ranges: Any

    def among(self, batch_index, block):
        """The blocks that a block may meet, for tiles.Limits."""
        return tiles.among(self.ranges, batch_index, block)

    def load(self, batch_index, q_start, q_rows: int, kv_start, kv_rows: int):
        """The ids of a tile whose rows are queries: (of its rows, of its columns), from device memory."""
        q_ids = self.q_ids.at[batch_index, pl.ds(q_start, q_rows)]
        kv_ids = self.kv_ids.at[batch_index, pl.ds(kv_start, kv_rows)]
        load = functools.partial(plgpu.load, optimized=False)
        return load(q_ids, layout=ROW), load(kv_ids, layout=COLUMN)


def segments_of(inputs: AttentionInputs, block_q: int, block_kv: int, *, of_keys: bool) -> Segments | None:
    """The call's segments, padded to whole blocks with ids that meet none. of_keys: a CTA owns a block of keys."""
    if inputs.q_segment_ids is None:
        return None
    q_ids, kv_ids = tiles.segment_arrays(inputs.q_segment_ids, inputs.kv_segment_ids)
    own, others = ((q_ids, block_q), (kv_ids, block_kv))[:: -1 if of_keys else 1]
    whole = lambda ids, block, none: jnp.pad(ids, [(0, 0), (0, -ids.shape[1] % block)], constant_values=none)
    return Segments(
        whole(q_ids, block_q, tiles.NO_QUERY),
        whole(kv_ids, block_kv, tiles.NO_KEY),
        tiles.segment_ranges(*own, *others),
    )


def reciprocal(x):
    """1 / x of [64, n] in the layout of wgmma's results, for x of at least 2^-126; of more than 2^126 it is 0.

    An instruction, where a division is five: four are for the smallest numbers.
    """
    if INTERPRETED:
        return 1 / x

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA))
    def approximate(_, x):
        import numpy as np
        from jax.experimental.mosaic.gpu import fragmented_array
        from jaxlib.mlir.dialects import nvvm, vector

        def of_pair(pair):
            elements = (vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2))
            return vector.from_elements(pair.type, [nvvm.rcp_approx_ftz_f(element) for element in elements])

        registers = np.empty(x.registers.shape, dtype=object)
        for place, pair in np.ndenumerate(x.registers):
            registers[place] = of_pair(pair)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return approximate(x)


def softcapped(scores, cap: float, scale: float):
    """tanh(scores * scale / cap). What it misses of the exact one, times cap, is far below what P is rounded by."""
    return 1 - 2 * reciprocal(1 + jnp.exp2(scores * (2 * LOG2E * scale / cap)))


# tanh(x) / x in powers of x^2, for |x| <= 0.75: within 1.2e-5 of it, which bfloat16's P does not see.
TANH_UP_TO = 0.75
TANH = (0.99998898, -0.33269671, 0.12742697, -0.03545278)


def tanh_polynomial(x, factor: float, times: float = 1.0):
    """tanh(x * factor) * times, where |x * factor| is TANH_UP_TO at most."""
    powers = [coefficient * factor ** (2 * i + 1) * times for i, coefficient in enumerate(TANH)]
    square = x * x
    return x * functools.reduce(lambda total, power: total * square + power, powers[-2::-1], powers[-1])


def tanh_limits(factor: float):
    """Up to which |x| tanh_polynomial serves, of 64 rows: for any_of_warp_above."""
    return plgpu.layout_cast(jnp.full((64,), TANH_UP_TO / abs(factor), jnp.float32), ROW)


def softcapped_tile(scores, cap: float, scale: float):
    """softcapped, of [64, n] in the layout of wgmma's results: by a polynomial where a warp has small scores alone.

    Two of three special functions an element are saved so.
    """
    factor = scale / cap
    limits = tanh_limits(factor)
    exact = functools.partial(softcapped, cap=cap, scale=scale)
    polynomial = functools.partial(tanh_polynomial, factor=factor)
    return lax.cond(any_of_warp_above(jnp.abs(scores), limits), exact, polynomial, scores)


class Tiles:
    """Shared memory for 16-bit tiles [..., rows, columns], as [..., chunks, rows, width].

    any_rows: whether an array may have any number of rows. Copies take 64 columns at a time then, which is the chunks'
    width. whole: a product is to have all columns in one chunk, for which copies take 8 rows at a time, and
    do not keep up with the forward. swizzled: for wgmma; else plain rows. The interpreter copies any rows as they are.
    """

    def __init__(self, columns: int, any_rows: bool, *, whole: bool = False, swizzled: bool = True):
        self.any_rows = any_rows and swizzled
        self.whole = self.any_rows and whole and columns > 64
        self.transforms = SWIZZLED if swizzled else ()
        self.width = 64 if self.any_rows and not self.whole else columns
        self.count = columns // self.width
        # Whether copies see the memory in other tiles than products do, and whether these have 8 rows each.
        self.retiled = self.any_rows and not INTERPRETED
        self.eights = self.whole and self.retiled

    def scratch(self, *shape: int, dtype: Any) -> Any:
        """For pl.run_scoped. shape: without the columns."""
        *outer, rows = shape
        tiles = plgpu.SMEM((*outer, self.count, rows, self.width), dtype, transforms=self.transforms)
        if not self.retiled:
            return tiles
        copied = (rows // 8, self.width // 64, 8, 64) if self.eights else (self.count, rows, 64)
        return plgpu.RefUnion(tiles, plgpu.SMEM((*outer, *copied), dtype, transforms=ROWS))

    def views(self, smem: Any) -> tuple[Any, Any]:
        """(for wgmma and stores, for copies) of what scratch asked for."""
        return tuple(smem) if self.retiled else (smem, smem)

    def copies(self, rows: int) -> int:
        """How many a tile takes: a barrier's arrivals."""
        return rows // 8 * (self.width // 64) if self.eights else self.count

    def _each(self, gmem: Any, smem: Any, copy: Callable[[Any, Any], None]) -> None:
        if not self.eights:
            for c in range(self.count):
                copy(gmem if self.count == 1 else gmem.at[:, pl.ds(self.width * c, self.width)], smem.at[c])
            return

        def eight(i, _):
            r, c = lax.div(i, jnp.int32(self.width // 64)), lax.rem(i, jnp.int32(self.width // 64))
            copy(gmem.at[pl.ds(8 * r, 8), pl.ds(64 * c, 64)], smem.at[r, c])

        # An opaque count: unrolled, it takes more registers than a loading warpgroup has.
        lax.fori_loop(0, recomputed(smem.shape[0] * (self.width // 64)), eight, None)

    def load(self, gmem: Any, smem: Any, barrier: Any) -> None:
        """gmem: [rows, columns] in device memory. smem: a tile, as views has it for copies."""
        self._each(gmem, smem, lambda gmem, smem: plgpu.copy_gmem_to_smem(gmem, smem, barrier))

    def store(self, smem: Any, gmem: Any) -> None:
        self._each(gmem, smem, lambda gmem, smem: plgpu.copy_smem_to_gmem(smem, gmem))

    def chunks(self, x: Any) -> list[Any]:
        """The chunks of an array's columns."""
        return [x] if self.count == 1 else [x[:, self.width * c : self.width * (c + 1)] for c in range(self.count)]

    def sixty_four(self, smem: Any, start: int) -> Any:
        """64 columns from there on, of a tile."""
        c, start = divmod(start, self.width)
        return smem.at[c, :, start : start + 64] if self.width > 64 else smem.at[c]


def has_odd_length(*arrays: jax.Array) -> bool:
    """Whether one of them, [B, length, ...], has other than whole swizzle atoms of 8 rows."""
    return any(x.shape[1] % 8 != 0 for x in arrays)


def pad_for_tma(x: jax.Array, head_dim_multiple: int = 64, *, any_rows: bool = False) -> jax.Array:
    """[B, length, H, D] with zeros up to whole swizzle atoms: columns of 64, and 8 rows but for any_rows.

    The zeros change no score and no column that counts; keys past the end are left to the predicate.
    """
    length, columns = 0 if any_rows else -x.shape[1] % 8, -x.shape[3] % head_dim_multiple
    return jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, columns)]) if length or columns else x
