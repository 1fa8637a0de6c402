"""The types of the block spec rows. Each type checks its values, so that a wrong row fails when it is written."""

import dataclasses
from typing import Any


def positive(spec: Any, **multiples: int) -> None:
    """Raises ValueError unless each named field of a block spec is a positive multiple of the given integer."""
    for name, multiple in multiples.items():
        value = getattr(spec, name)
        if value <= 0 or value % multiple:
            raise ValueError(f"{type(spec).__name__}.{name}={value} must be a positive multiple of {multiple}")


def powers_of_two(spec: Any, *names: str) -> None:
    """Raises ValueError unless each named field of a block spec is a power of two."""
    for name in names:
        value = getattr(spec, name)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{type(spec).__name__}.{name}={value} must be a power of two")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedGpu:
    """A GPU on which rows and orders were timed. name: as the driver reports it. capability: (major, minor)."""

    name: str
    capability: tuple[int, int]


H100 = TimedGpu(name="NVIDIA H100", capability=(9, 0))
H200 = TimedGpu(name="NVIDIA H200", capability=(9, 0))


@dataclasses.dataclass(frozen=True)
class AttentionForwardSm90:
    """Blocks of the Hopper forward of attention: 64 queries for each compute warpgroup, and block_kv keys.

    compute_warpgroups: 2 or 3.
    stages: the number of key blocks and of value blocks in the pipeline in shared memory.
    share_q_out: whether the output is staged in the query's shared memory, which leaves room for more stages.
    pingpong: whether warpgroups take turns to issue their wgmmas (a named barrier), so that softmax and wgmma
      alternate.
    head_group: the number of heads whose tiles alternate. With causal masks the long tiles of all these heads come
      first, which balances the SMs. Too many heads evict each other's keys and values from the L2 cache.
    dynamic: whether CTAs take tiles from a counter in device memory instead of a fixed list, which balances long and
      short tiles.
    bounded: whether, with a long kv loop, a pass computes the largest query and key norms. If they bound the scores, no
      maximum is kept.
    norms_q_in_kernel: whether that pass computes key norms only, and a warpgroup the norms of the queries that it has
      loaded.
    early_q: whether the next tile's queries are loaded during this tile, into the memory of the previous tile's staged
      output; the two buffers swap with each tile. Otherwise they are loaded when this tile's queries have been read.
    bounded_from, bounded_from_limited, bounded_from_lists: the least number of keys per query with which `bounded`
      takes effect, for plain or causal calls, for calls with a window or segments, and for calls with block lists.
    one_launch_max_tiles: calls with up to this number of tiles per SM run in one launch.
    atom: the columns of a swizzle atom in shared memory, 64, 32 or 16. The head_dims of key and value are padded to
      multiples of it. A wider atom makes copies faster.
    """

    compute_warpgroups: int
    block_kv: int
    stages: int
    share_q_out: bool = False
    pingpong: bool = True
    head_group: int = 1
    dynamic: bool = False
    bounded: bool = True
    norms_q_in_kernel: bool = False
    early_q: bool = False
    bounded_from: int = dataclasses.field(default=2048, repr=False)
    bounded_from_limited: int = dataclasses.field(default=8192, repr=False)
    bounded_from_lists: int = dataclasses.field(default=3072, repr=False)
    one_launch_max_tiles: int = dataclasses.field(default=4, repr=False)
    atom: int = 64

    def __post_init__(self) -> None:
        if self.atom not in (16, 32, 64):
            raise ValueError(f"AttentionForwardSm90.atom={self.atom} must be 16, 32 or 64")
        positive(self, compute_warpgroups=1, block_kv=self.atom, stages=1, head_group=1)
        if self.compute_warpgroups not in (2, 3):
            raise ValueError(f"AttentionForwardSm90.compute_warpgroups={self.compute_warpgroups} must be 2 or 3")

    @property
    def block_q(self) -> int:
        return 64 * self.compute_warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread: (of a compute warpgroup, of the memory warpgroup)."""
        return (240, 24) if self.compute_warpgroups == 2 else (160, 32)


@dataclasses.dataclass(frozen=True)
class AttentionForwardFp8Sm90:
    """Blocks of the 8-bit Hopper forward of attention: 64 queries for each compute warpgroup, and block_kv keys.

    stages: the number of key and value blocks in the pipeline in shared memory. pingpong: whether warpgroups take turns
    to issue their wgmmas. head_group: the number of heads whose tiles alternate. dynamic: whether CTAs take tiles from
    a counter in device memory.
    """

    compute_warpgroups: int
    block_kv: int
    stages: int
    pingpong: bool = True
    head_group: int = 1
    dynamic: bool = False

    def __post_init__(self) -> None:
        positive(self, compute_warpgroups=1, block_kv=64, stages=1, head_group=1)
        if self.compute_warpgroups not in (2, 3):
            raise ValueError(f"AttentionForwardFp8Sm90.compute_warpgroups={self.compute_warpgroups} must be 2 or 3")

    @property
    def block_q(self) -> int:
        return 64 * self.compute_warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread: (of a compute warpgroup, of the memory warpgroup)."""
        return (240, 24) if self.compute_warpgroups == 2 else (160, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionDquerySm90:
    """Blocks of the Hopper kernel that computes the dquery of a deterministic backward: 128 queries, block_kv keys.

    k_stages, v_stages: the numbers of key blocks and of value blocks in their pipelines in shared memory.
    """

    block_kv: int
    k_stages: int
    v_stages: int

    def __post_init__(self) -> None:
        positive(self, block_kv=64, k_stages=1, v_stages=1)


@dataclasses.dataclass(frozen=True)
class AttentionBackwardSm90:
    """Blocks of the one-pass Hopper backward: two compute warpgroups work on one block of keys, and loop over queries.

    block_q: the number of queries in a step.
    q_stages, do_stages: the numbers of blocks of queries and of dout in their pipelines in shared memory.
    q_loop_stagger: if every block of keys attends to every query, the loop of each block of keys starts this number of
      query blocks after the previous one's, which spreads the additions to dquery.
    head_group: the number of heads that run at the same time, so that long and short key blocks of causal calls
      mix. Calls with more than head_group_max_q_length queries run fewer heads together, because the dquery of all
      these heads must fit the L2 cache.
    early_dv: whether dvalue's wgmma is issued after dP's, so that dS is computed while it runs.
    late_do: above head_dim 128, whether the scores' wgmma is issued before the wait for dout.
    exit_after_smem_read: whether a CTA ends when its last stores have left shared memory, before they have arrived.
    persistent: whether CTAs take blocks of keys from a counter, and load the next block while this block's gradients
      are computed and stored. Calls above head_dim 128, and with features that need more registers, ignore it.
    v_stages: the number of blocks of values in shared memory, for persistent CTAs. With two, the next values need not
      wait for this block's last step.
    dquery: the blocks of the dquery kernel of a deterministic backward; None if dquery is summed in order of arrival.
    wider_if_deterministic: whether a deterministic backward has wider tiles; it then runs with block_q = 64 and
      do_stages = 1.
    """

    block_q: int
    q_stages: int = 2
    do_stages: int = 2
    q_loop_stagger: int = 0
    head_group: int = 1
    head_group_max_q_length: int = dataclasses.field(default=8192, repr=False)
    early_dv: bool = False
    late_do: bool = False
    exit_after_smem_read: bool = False
    persistent: bool = False
    v_stages: int = 1
    dquery: AttentionDquerySm90 | None = None
    wider_if_deterministic: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        positive(self, block_q=64, q_stages=1, do_stages=1, head_group=1, v_stages=1)
        if self.v_stages > 1 and not self.persistent:
            raise ValueError(f"AttentionBackwardSm90.v_stages={self.v_stages} is for persistent CTAs")


@dataclasses.dataclass(frozen=True)
class AttentionForwardTriton:
    """Blocks of the Triton forward of attention: a program has block_q queries, and loops over block_kv keys a step."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        positive(self, block_q=16, block_kv=16, num_stages=1)
        powers_of_two(self, "block_q", "block_kv", "num_warps")


@dataclasses.dataclass(frozen=True)
class AttentionBackwardTriton:
    """Blocks of the Triton backward of attention, which has two or three kernels.

    A program of the dkv kernel has block_kv_dkv keys, and loops over blocks of block_q_dkv queries. A program of the dq
    kernel has block_q_dq queries, and loops over blocks of block_kv_dq keys.

    block_q_dv: None if the dkv kernel computes dkey and dvalue. A number of queries if a third kernel computes dvalue,
      in steps of this number of queries, with block_kv_dkv keys in a program. It multiplies query and key once more,
      but its program and the dkv kernel's have one accumulator each, which leaves registers for larger blocks.
    delta_in_dq: whether the dq kernel runs first, and computes each query's delta from out and dout. Otherwise a pass
      of XLA reads out and dout for it.
    """

    block_q_dkv: int
    block_kv_dkv: int
    block_q_dq: int
    block_kv_dq: int
    num_warps: int
    num_stages: int
    block_q_dv: int | None = None
    delta_in_dq: bool = False

    def __post_init__(self) -> None:
        positive(self, block_q_dkv=16, block_kv_dkv=16, block_q_dq=16, block_kv_dq=16, num_stages=1)
        powers_of_two(self, "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq", "num_warps")
        if self.block_q_dv is not None:
            positive(self, block_q_dv=16)
            powers_of_two(self, "block_q_dv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The facts of an attention call that determine the row with its blocks.

    head_dim: the larger one of key and value. v_head_dim: of value. bits: of the dtype of query, key and value.
    is_limited: whether there is a window or segment ids. dense_bits: the bits of a bias or dense mask that a kernel
    reads for each query and key: 0, 1, 16 or 32. has_lists: whether block lists give the keys of each query, without a
    bias. kv_length: the number of keys.
    """

    head_dim: int
    v_head_dim: int
    bits: int
    is_causal: bool
    is_limited: bool
    has_segments: bool
    dense_bits: int
    has_lists: bool
    kv_length: int


@dataclasses.dataclass(frozen=True)
class AttentionRow:
    """The blocks for one kind of attention. The first row of a table that matches all facts of a call is used.

    implementation: the implementation's name. forward, backward: its blocks, such as an AttentionForwardTriton.
    head_dim: matches calls whose larger head_dim, of key or value, is at most this.
    v_head_dim: matches calls whose value has at most this head_dim; None matches any.
    bits: 16 matches bfloat16 and float16, 32 matches float32.
    is_causal, is_limited (a window or segment ids), has_segments: True matches only calls with it, False only without.
      None matches both.
    dense_bits: None matches all calls. A number matches only calls with a bias or dense mask, and only if a kernel
      reads at most this number of bits of it for each query and key.
    has_lists: True matches only calls with block lists, False only calls without. None matches both.
    max_kv_length: matches calls with at most this number of keys; None matches any.
    measured_on: the GPU on which a call with these blocks was timed; None if on none.
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
    has_lists: bool | None = None
    max_kv_length: int | None = None
    v_head_dim: int | None = None
    measured_on: TimedGpu | None = None

    def serves(self, call: AttentionCall) -> bool:
        """Whether the row matches all facts of the call."""
        return (
            call.head_dim <= self.head_dim
            and (self.v_head_dim is None or call.v_head_dim <= self.v_head_dim)
            and call.bits == self.bits
            and self.is_causal in (None, call.is_causal)
            and self.is_limited in (None, call.is_limited)
            and self.has_segments in (None, call.has_segments)
            and self.has_lists in (None, call.has_lists)
            and (self.dense_bits is None or 0 < call.dense_bits <= self.dense_bits)
            and (self.max_kv_length is None or call.kv_length <= self.max_kv_length)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DqueryCall:
    """The facts of a deterministic backward of attention that determine the blocks of its dquery.

    head_dim: the larger one of key and value. bias_bits: bits of a bias per query and key; 1 for a bias per key, which
    takes shared memory for a block's keys; 0 without a bias.
    """

    head_dim: int
    bias_bits: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionDqueryRow:
    """The blocks of the dquery of a deterministic backward. The first row of a table that matches a call is used.

    head_dim: matches calls whose larger head_dim, of key or value, is at most this. bias_bits: matches calls with at
    most this number of bits of a bias per query and key; 0 matches only calls without a bias.
    """

    head_dim: int
    bias_bits: int
    blocks: AttentionDquerySm90

    def serves(self, call: DqueryCall) -> bool:
        return call.head_dim <= self.head_dim and call.bias_bits <= self.bias_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class DilatedLaunches:
    """The costs that decide which pieces of a dilated attention run in one launch.

    launch_seconds: the time of a launch without its matmuls, in seconds. core_flops: FLOP/s of an SM in attention.
    gather_seconds: the time to start a gather, in seconds. gather_bandwidth: the fraction of the bandwidth of device
    memory that a gather reaches.
    """

    launch_seconds: float
    core_flops: float
    gather_seconds: float
    gather_bandwidth: float


@dataclasses.dataclass(frozen=True)
class AttentionDecodeSm90:
    """Blocks of the Hopper kernel for decoding: block_kv keys at a time.

    Each of the compute warpgroups, 1 or 2, has its own pipeline of `stages` blocks of keys and values in shared memory.
    """

    compute_warpgroups: int
    block_kv: int
    stages: int

    def __post_init__(self) -> None:
        positive(self, compute_warpgroups=1, block_kv=64, stages=1)
        if self.compute_warpgroups not in (1, 2):
            raise ValueError(f"AttentionDecodeSm90.compute_warpgroups={self.compute_warpgroups} must be 1 or 2")


@dataclasses.dataclass(frozen=True)
class AttentionDecodeTriton:
    """Blocks of the Triton kernel for decoding: a program loops over blocks of block_kv keys."""

    block_kv: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        positive(self, block_kv=16, num_stages=1)
        powers_of_two(self, "block_kv", "num_warps")


@dataclasses.dataclass(frozen=True)
class AttentionDecodeRow:
    """The blocks of decoding. The first row of a table that matches a call is used.

    implementation: the implementation's name. config: its blocks, such as an AttentionDecodeTriton. head_dim: matches
    calls whose larger head_dim, of key or value, is at most this. measured_on: the GPU on which such a call was timed;
    None if on none.
    """

    implementation: str
    head_dim: int
    config: Any
    measured_on: TimedGpu | None = None

    def serves(self, head_dim: int) -> bool:
        return head_dim <= self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Call:
    """The facts of an 8-bit attention call that determine its row. head_dim: the larger one of key and value."""

    head_dim: int
    is_causal: bool


@dataclasses.dataclass(frozen=True)
class AttentionFp8Row:
    """The blocks of the 8-bit forward of attention. The first row of a table that matches a call is used.

    implementation: the implementation's name. config: its blocks, an AttentionForwardFp8Sm90. head_dim: matches calls
    whose larger head_dim, of key or value, is at most this. is_causal: True matches only causal calls, False only
    other calls, None both. measured_on: the GPU on which such a call was timed; None if on none.
    """

    implementation: str
    head_dim: int
    config: Any
    is_causal: bool | None = None
    measured_on: TimedGpu | None = None

    def serves(self, call: Fp8Call) -> bool:
        return call.head_dim <= self.head_dim and self.is_causal in (None, call.is_causal)
