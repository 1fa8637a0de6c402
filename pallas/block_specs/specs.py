"""The types of the block spec rows. Each checks itself, so that a wrong row fails where it is written."""

import dataclasses
from typing import Any


def _positive(spec: Any, **multiples: int) -> None:
    for name, multiple in multiples.items():
        value = getattr(spec, name)
        if value <= 0 or value % multiple:
            raise ValueError(f"{type(spec).__name__}.{name}={value} must be a positive multiple of {multiple}")


def _powers_of_two(spec: Any, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{type(spec).__name__}.{name}={value} must be a power of two")


@dataclasses.dataclass(frozen=True)
class AttentionForwardSm90:
    """Blocks of the Hopper forward: 64 queries per compute warpgroup."""

    compute_warpgroups: int
    block_kv: int
    stages: int
    # The output is staged in the query's shared memory: room for more key and value stages.
    share_q_out: bool = False
    # Warpgroups take turns to issue their products (a named barrier), so that softmax and wgmma alternate.
    pingpong: bool = True
    # Heads whose tiles alternate. With causal masks the long tiles of all of them come first, which balances
    # the SMs; too many push one another's keys and values out of the L2 cache.
    heads_together: int = 1
    # The CTAs take their tiles off a counter in device memory, not each its own: long and short ones even out.
    dynamic: bool = False
    # Long kv loops look up the longest query and key beforehand: where these bound the scores, no maximum is kept.
    bounded: bool = True
    # Of these two, keys alone: a warpgroup measures the queries that it has loaded.
    measures_q: bool = False
    # The next tile's queries are loaded during this one, into where the output of the tile before was staged: the two
    # change places with each tile. Else they are loaded when this tile's have been read.
    early_q: bool = False
    # Scores are bounded beforehand from so many keys per query on: plain or causal, with a window or segments, and with
    # a mask's lists.
    bounded_from: int = dataclasses.field(default=2048, repr=False)
    bounded_from_limited: int = dataclasses.field(default=8192, repr=False)
    bounded_from_lists: int = dataclasses.field(default=3072, repr=False)
    # Calls of up to so many tiles per streaming multiprocessor share a launch.
    together_up_to: int = dataclasses.field(default=4, repr=False)

    def __post_init__(self) -> None:
        _positive(self, compute_warpgroups=1, block_kv=64, stages=1, heads_together=1)
        if self.compute_warpgroups not in (2, 3):
            raise ValueError(f"AttentionForwardSm90.compute_warpgroups={self.compute_warpgroups} must be 2 or 3")

    @property
    def block_q(self) -> int:
        return 64 * self.compute_warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a compute and of the memory warpgroup."""
        return (240, 24) if self.compute_warpgroups == 2 else (160, 32)


@dataclasses.dataclass(frozen=True)
class AttentionForwardFp8Sm90:
    """Blocks of the 8-bit Hopper forward. pingpong, heads_together, dynamic: as in AttentionForwardSm90."""

    compute_warpgroups: int
    block_kv: int
    stages: int
    pingpong: bool = True
    heads_together: int = 1
    dynamic: bool = False

    def __post_init__(self) -> None:
        _positive(self, compute_warpgroups=1, block_kv=64, stages=1, heads_together=1)
        if self.compute_warpgroups not in (2, 3):
            raise ValueError(f"AttentionForwardFp8Sm90.compute_warpgroups={self.compute_warpgroups} must be 2 or 3")

    @property
    def block_q(self) -> int:
        return 64 * self.compute_warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a compute and of the memory warpgroup."""
        return (240, 24) if self.compute_warpgroups == 2 else (160, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionDquerySm90:
    """Blocks of the Hopper kernel of a deterministic dquery: 128 queries, and stages of keys and of values."""

    block_kv: int
    k_stages: int
    v_stages: int

    def __post_init__(self) -> None:
        _positive(self, block_kv=64, k_stages=1, v_stages=1)


@dataclasses.dataclass(frozen=True)
class AttentionBackwardSm90:
    """Blocks of the one-pass Hopper backward: two compute warpgroups share one block of keys."""

    block_q: int
    q_stages: int = 2
    do_stages: int = 2
    # Where every block of keys meets every query, they start their loops this many blocks apart, which spreads the
    # additions to dq.
    rotate: int = 0
    # Heads that run next to one another, so that the long and the short key blocks of causal work mix: so many up to
    # heads_together_up_to queries, and fewer of longer ones, as the dquery of all of them has to fit the L2 cache.
    heads_together: int = 1
    heads_together_up_to: int = dataclasses.field(default=8192, repr=False)
    # dvalue's product is issued behind dP's, and dS is computed while it runs.
    early_dv: bool = False
    # Above head_dim 128: the scores are issued before the wait for dO.
    late_do: bool = False
    # A CTA ends when its last stores have left shared memory, not when they have arrived.
    leave_early: bool = False
    # CTAs take one block of keys after another off a counter, and load the next one's while this one's gradients are
    # computed and stored. Above head_dim 128, and with what takes registers besides, they do not (Schedule.of).
    persistent: bool = False
    # Of these: stages for values. With two, the next ones need not wait for this block's last step.
    v_stages: int = 1
    # The blocks of a deterministic dquery, None where it is summed in order of arrival.
    dquery: AttentionDquerySm90 | None = None

    def __post_init__(self) -> None:
        _positive(self, block_q=64, q_stages=1, do_stages=1, heads_together=1, v_stages=1)
        if self.v_stages > 1 and not self.persistent:
            raise ValueError(f"AttentionBackwardSm90.v_stages={self.v_stages} is for persistent CTAs")


@dataclasses.dataclass(frozen=True)
class AttentionForwardTriton:
    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        _positive(self, block_q=16, block_kv=16, num_stages=1)
        _powers_of_two(self, "block_q", "block_kv", "num_warps")


@dataclasses.dataclass(frozen=True)
class AttentionBackwardTriton:
    """Blocks of the two passes: dkv owns a block of keys and loops over the queries, dq the other way round."""

    block_q_dkv: int
    block_kv_dkv: int
    block_q_dq: int
    block_kv_dq: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        _positive(self, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16, num_stages=1)
        _powers_of_two(self, "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq", "num_warps")


@dataclasses.dataclass(frozen=True)
class AttentionRow:
    """The blocks for one kind of attention. The first row that matches is taken.

    head_dim: the largest head_dim (of key or value) it serves. bits: 16 for bf16 and fp16, 32 for float32.
    is_causal, is_limited (whether there is a window or segment ids), has_segments: None serves both. dense_bits: None
    serves all; else it serves biases and dense masks alone, of at most so many bits for every query and key. has_lists:
    it serves Masks as lists of blocks alone. up_to: it serves no more keys; None for any number.
    """

    implementation: str
    head_dim: int
    bits: int
    forward: Any
    backward: Any
    is_causal: bool | None = None
    is_limited: bool | None = None
    has_segments: bool | None = None
    dense_bits: int | None = None
    has_lists: bool = False
    up_to: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionDqueryRow:
    """The blocks of a deterministic dquery. The first row that matches is taken.

    head_dim: as in AttentionRow. bias_bits: the most bits that a bias has for each query and key, 0 without one.
    """

    head_dim: int
    bias_bits: int
    blocks: AttentionDquerySm90


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingRow:
    """The way that a sequence is shared out by strategy="auto". The first row that matches is taken.

    strategy, sends_ahead: as in ring_attention. up_to: it serves no more tokens on a device; None for any number.
    is_windowed: whether there is a window; None serves both.
    """

    strategy: str
    sends_ahead: int = 1
    up_to: int | None = None
    is_windowed: bool | None = None

    def __post_init__(self) -> None:
        if self.strategy not in ("ring", "all_gather"):  # all_to_all is not for any number of heads
            raise ValueError(f"{self.strategy=} must be 'ring' or 'all_gather'")
        if self.sends_ahead < 1:
            raise ValueError(f"{self.sends_ahead=} must be 1 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DilatedLaunches:
    """The costs that decide which pieces of a dilated attention share a launch.

    launch_seconds: what a launch costs besides its products. core_flops: of a streaming multiprocessor, per second.
    gather_seconds: what the start of a gather costs. gather_bandwidth: the share of the GPU's bandwidth it reaches.
    """

    launch_seconds: float
    core_flops: float
    gather_seconds: float
    gather_bandwidth: float


@dataclasses.dataclass(frozen=True)
class AttentionDecodeSm90:
    """Blocks of Hopper's decoding: each compute warpgroup has its own ring of `stages` blocks of keys and values."""

    compute_warpgroups: int
    block_kv: int
    stages: int

    def __post_init__(self) -> None:
        _positive(self, compute_warpgroups=1, block_kv=64, stages=1)
        if self.compute_warpgroups not in (1, 2):
            raise ValueError(f"AttentionDecodeSm90.compute_warpgroups={self.compute_warpgroups} must be 1 or 2")


@dataclasses.dataclass(frozen=True)
class AttentionDecodeTriton:
    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        _positive(self, block_kv=16, num_stages=1)
        _powers_of_two(self, "block_kv", "num_warps")


@dataclasses.dataclass(frozen=True)
class AttentionDecodeRow:
    """The blocks of decoding. The first row that matches is taken. head_dim: as in AttentionRow."""

    implementation: str
    head_dim: int
    config: Any


@dataclasses.dataclass(frozen=True)
class AttentionFp8Row:
    """The blocks of the 8-bit forward. The first row that matches is taken. head_dim, is_causal: as in AttentionRow."""

    implementation: str
    head_dim: int
    config: Any
    is_causal: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormTriton:
    """Blocks of the forward of a normalisation: a program holds block_rows rows of up to `chunk` columns at once."""

    block_rows: int
    chunk: int
    num_warps: int

    def __post_init__(self) -> None:
        _powers_of_two(self, "block_rows", "chunk", "num_warps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormBackwardTriton:
    """Blocks of the backward of a normalisation. programs: on each streaming multiprocessor."""

    block_rows: int
    chunk: int
    num_warps: int
    programs: int

    def __post_init__(self) -> None:
        _positive(self, programs=1)
        _powers_of_two(self, "block_rows", "chunk", "num_warps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormSm90:
    """Blocks of a Hopper kernel of normalisation, forward or backward.

    row_warps: warps that share a row, 1, 4, 8 or 16; others where these do not divide the columns. warpgroups: of a
    CTA; each has a ring of stages. stages: as many as shared memory has room for, up to this number. turns: blocks that
    a forward's warpgroup takes before its CTA ends, and the multiprocessor takes another CTA; 0: a CTA for each
    multiprocessor, which takes blocks to the end. claims: such CTAs' warpgroups claim blocks one by one, instead of
    having equal shares of them; with three stages or more. cluster: CTAs of a forward that share a row, each of which
    has an equal part of its columns, by row_warps warps; they take as many blocks as turns says.
    """

    row_warps: int
    warpgroups: int
    stages: int
    turns: int = 0
    claims: bool = False
    cluster: int = 1

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"NormSm90.stages={self.stages} must be 2 or more")
        if self.warpgroups not in (1, 2, 3, 4):
            raise ValueError(f"NormSm90.warpgroups={self.warpgroups} must be 1, 2, 3 or 4")
        if self.row_warps not in (1, 4, 8, 16):
            raise ValueError(f"NormSm90.row_warps={self.row_warps} must be 1, 4, 8 or 16")
        if self.turns < 0:
            raise ValueError(f"NormSm90.turns={self.turns} must be 0 or more")
        if self.cluster not in (1, 2, 4, 8):
            raise ValueError(f"NormSm90.cluster={self.cluster} must be 1, 2, 4 or 8")
        if self.cluster > 1 and (self.row_warps == 1 or not self.turns or self.claims):
            raise ValueError(f"NormSm90.cluster={self.cluster} needs 4 row_warps or more, turns, and no claims: {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormRow:
    """The blocks of a normalisation. The first row that matches is taken. columns: the most it serves, None for any."""

    implementation: str
    columns: int | None
    forward: Any
    backward: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOrder:
    """The implementations of a normalisation, the fastest first. The first row that matches is taken.

    columns: the most it serves, None for any.
    """

    names: tuple[str, ...]
    columns: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSm90:
    """Blocks of the Hopper matmul: 64 rows of each of compute_wgs warpgroups, and block_n columns.

    stages: of the ring, of 64 numbers of the inner dimension, or 128 of 8 bits; as many as shared memory has room for,
    up to this number. A gated unit has half of the columns, twice.

    rows_together: so many rows of work tiles are done side by side, whose x the L2 cache holds.

    promoted_steps: after so many stages float32 sums take over the products of 8 bits, whose sums have 14 bits.

    cluster: so many CTAs, 1 or 2, take work tiles below each other. Each loads its part of w's block for both.

    pingpong, wg_rows, early_bias, short_activation: for operands of 16 bits. pingpong: each warpgroup has work tiles of
    its own, and its epilogue runs beside the other's products. wg_rows: rows of a warpgroup, 64, or 128 of fewer
    columns. early_bias: a warpgroup reads its bias before its last products end. short_activation: gelu by tanh,
    sigmoid and silu in fewer instructions.
    """

    block_n: int
    stages: int
    rows_together: int
    promoted_steps: int = 1
    cluster: int = 1
    compute_wgs: int = 2
    pingpong: bool = False
    wg_rows: int = 64
    early_bias: bool = False
    short_activation: bool = False

    def __post_init__(self) -> None:
        _positive(self, block_n=64, stages=1, rows_together=1, promoted_steps=1, cluster=1)
        if self.cluster > 2:
            raise ValueError(f"MatmulSm90.cluster={self.cluster} must be 1 or 2")
        if self.compute_wgs not in (2, 3):
            raise ValueError(f"MatmulSm90.compute_wgs={self.compute_wgs} must be 2 or 3")
        if self.block_n > 256:
            raise ValueError(f"MatmulSm90.block_n={self.block_n} must be at most 256")
        if self.pingpong and self.compute_wgs != 2:
            raise ValueError(f"MatmulSm90.compute_wgs={self.compute_wgs} must be 2 with pingpong")
        if self.wg_rows not in (64, 128):
            raise ValueError(f"MatmulSm90.wg_rows={self.wg_rows} must be 64 or 128")
        if self.wg_rows * self.block_n > 64 * 256:
            raise ValueError(f"MatmulSm90.block_n={self.block_n} must be at most 128 with wg_rows=128")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulTriton:
    """Blocks of the Triton matmul: a program has block_m rows and block_n columns, and block_k of the inner dimension.

    A gated unit has half of the columns, twice. rows_together: as in MatmulSm90. split_steps: where there are at most
    half as many work tiles as multiprocessors, programs share a tile, and each takes at least so many steps; None where
    they never do.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    rows_together: int = 8
    split_steps: int | None = None

    def __post_init__(self) -> None:
        _positive(self, block_m=16, block_n=16, block_k=16, num_stages=1, rows_together=1)
        _powers_of_two(self, "block_m", "block_n", "block_k", "num_warps")
        if self.split_steps is not None:
            _positive(self, split_steps=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOrder:
    """The implementations of a matmul, the fastest first. The first row that matches is taken.

    rows: of x, the most it serves, None for any. tiles: of 128 x 256 numbers of out, likewise.
    """

    names: tuple[str, ...]
    rows: int | None = None
    tiles: int | None = None

    def serves(self, rows: int, columns: int) -> bool:
        tiles = -(-rows // 128) * -(-columns // 256)
        return (self.rows is None or rows <= self.rows) and (self.tiles is None or tiles <= self.tiles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulRow:
    """The blocks of a matmul. The first row that matches is taken.

    columns: the most of w it serves, None for any. rows: of x, likewise. bits: of x's numbers, None for any. is_gated,
    is_aligned (whether all rows in memory begin at multiples of 16 bytes): None serves both.
    """

    implementation: str
    columns: int | None
    config: Any
    rows: int | None = None
    bits: int | None = None
    is_gated: bool | None = None
    is_aligned: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulLowBitTriton:
    """Blocks of the Triton matmul of weights of few bits.

    block_k: of the inner dimension in numbers; fewer where that is no multiple of them. programs: for each streaming
    multiprocessor, of which several share a work tile where there are fewer tiles; None where they never do. A gated
    unit has half of the columns, twice.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int | None = None
    rows_together: int = 8

    def __post_init__(self) -> None:
        _positive(self, block_m=16, block_n=16, block_k=128, num_stages=1, rows_together=1)
        _powers_of_two(self, "block_m", "block_n", "num_warps")
        if self.programs is not None:
            _positive(self, programs=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulLowBitSm90:
    """Blocks of the Hopper matmul of weights of few bits: 64 columns of each of compute_wgs warpgroups.

    stages: of the ring, of 128 bytes of each column; as many as shared memory has room for, up to this number.
    cluster_join: the CTAs that share a work tile, 2, 4 or 8, are a cluster, and have its epilogue. Else a second launch
    has it.
    """

    compute_wgs: int
    stages: int
    cluster_join: bool = False

    def __post_init__(self) -> None:
        _positive(self, stages=1)
        if self.compute_wgs not in (1, 2, 4):
            raise ValueError(f"MatmulLowBitSm90.compute_wgs={self.compute_wgs} must be 1, 2 or 4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulLowBitRow:
    """The blocks of a matmul of weights of few bits. The first row that matches is taken.

    rows: the most of x it serves, None for any. bits: of x's numbers. weight_bits: None serves all.
    """

    implementation: str
    bits: int
    config: Any
    rows: int | None = None
    weight_bits: int | None = None
