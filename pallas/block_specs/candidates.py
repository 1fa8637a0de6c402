"""The blocks that tuning tries for a call in addition to its block spec: short lists of blocks that fit the GPU.

A list keeps the other fields of the call's own block spec. Its entries are the values that were the fastest for some
case in the sweeps behind the block specs. Shared memory and registers are estimated for the plain kernel: a call with
a bias or segments takes more, and a candidate that does not compile is passed over.
"""

import dataclasses
import itertools
from typing import Any

from jax_kernels.pallas.block_specs.matmul_specs import MatmulSm90, MatmulTriton
from jax_kernels.pallas.block_specs.normalization_specs import NormBackwardTriton, NormSm90, NormTriton
from jax_kernels.pallas.block_specs.specs import (
    AttentionBackwardSm90,
    AttentionBackwardTriton,
    AttentionDecodeSm90,
    AttentionDecodeTriton,
    AttentionForwardSm90,
    AttentionForwardTriton,
)

__all__ = [
    "TiledCall",
    "attention_candidates",
    "backward_sm90_bytes",
    "forward_sm90_bytes",
    "matmul_candidates",
    "norm_candidates",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledCall:
    """The facts of a call that limit its blocks.

    width: of attention the larger head_dim, of key or value, as the kernel pads it; of a matmul unused. itemsize: bytes
    of a value. is_causal: whether later keys are masked. is_gated: whether there are two matmuls. shared_memory: the
    most bytes of shared memory of a CTA; 0, without a GPU, is no limit.
    """

    itemsize: int
    shared_memory: int
    width: int = 0
    is_causal: bool = False
    is_gated: bool = False

    def fits(self, smem_bytes: int) -> bool:
        """Whether a CTA may ask for this number of bytes of shared memory."""
        return not self.shared_memory or smem_bytes <= self.shared_memory


# Hopper's forward: (compute_warpgroups, block_kv, stages), by width.
_FORWARD_SM90 = {
    64: ((3, 128, 3), (2, 128, 4), (2, 128, 3), (3, 128, 2), (2, 192, 2), (3, 64, 4)),
    128: ((2, 128, 2), (2, 64, 3), (2, 64, 4), (3, 64, 2)),
    192: ((2, 128, 2), (2, 64, 4), (2, 64, 3), (2, 64, 2)),
    256: ((2, 64, 2),),  # with one stage it spills
}
_HEAD_GROUPS = (1, 4, 8, 16, 32)
# Hopper's backward: (q_stages, do_stages). With one stage of queries it spills.
_BACKWARD_SM90 = ((2, 2), (2, 1))
_STAGGERS = (0, 3, 5, 7)
# Triton's forward: (block_q, block_kv), and (num_warps, num_stages). Its backward: the blocks of queries and keys of
# the dkv kernel, then of the dq kernel.
_FORWARD_TRITON = ((128, 64), (128, 128), (64, 64), (64, 128), (128, 32), (64, 32))
_BACKWARD_TRITON = ((64, 128, 128, 64), (64, 64, 64, 64), (32, 64, 64, 32), (32, 128, 128, 32))
_WARPS_AND_STAGES = ((4, 2), (8, 2), (4, 3), (8, 3))

# Decoding on Hopper: (compute_warpgroups, block_kv, stages); in Triton: blocks of keys.
_DECODE_SM90 = ((1, 128, 2), (2, 128, 2), (1, 64, 4), (2, 64, 2), (1, 64, 3), (1, 64, 2))
_DECODE_TRITON = (32, 64, 128)

# Hopper's matmul of 16 bits: fields of MatmulSm90.
_MATMUL_SM90: tuple[dict[str, Any], ...] = (
    {"block_n": 256, "stages": 4},
    {"block_n": 256, "stages": 4, "cluster": 2},
    {"block_n": 192, "stages": 4, "pingpong": True, "wg_rows": 128},
    {"block_n": 128, "stages": 6},
    {"block_n": 128, "stages": 6, "cluster": 2},
    {"block_n": 128, "stages": 6, "pingpong": True},
)
# Triton's: (block_m, block_n, block_k, num_warps, num_stages).
_MATMUL_TRITON = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 32, 4, 4),
    (256, 128, 32, 8, 4),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 64, 128, 4, 4),
    (32, 64, 128, 4, 4),
    (16, 64, 128, 4, 4),
)
_ROW_GROUPS = (4, 8, 16)

# Norms in Triton: num_warps, and for the backward the number of programs of an SM. On Hopper: fields of NormSm90.
_NORM_WARPS = (1, 2, 4, 8, 16)
_NORM_PROGRAMS = (1, 2, 4, 8)
_NORM_SM90: dict[str, tuple[dict[str, Any], ...]] = {
    "forward": (
        *({"turns": turns, "claims": False} for turns in (1, 2, 3, 4)),
        {"turns": 0, "claims": True},
    ),
    # A CTA sums the gradients of the weights: it takes blocks until none is left.
    "backward": ({"turns": 0, "claims": False}, {"turns": 0, "claims": True}),
}
# Values of a row that a thread holds, in Triton's norms: fewer leave the warps without work, more spill.
_NORM_VALUES = (4, 32)

# Registers of a thread that a Triton program may hold in accumulators and scores; the others hold operands and indices.
_TRITON_REGISTERS = 200
_SM90_RESERVED = 32  # registers of a thread, of Hopper's forward, that hold no scores or sums


def attention_candidates(blocks: Any, call: TiledCall) -> tuple[Any, ...]:
    """The blocks to time for decoding or a direction of attention. blocks: of its block spec, which is left out."""
    if isinstance(blocks, AttentionForwardSm90):
        found = _forward_sm90(blocks, call)
    elif isinstance(blocks, AttentionBackwardSm90):
        found = _backward_sm90(blocks, call)
    elif isinstance(blocks, AttentionForwardTriton):
        found = _forward_triton(call)
    elif isinstance(blocks, AttentionBackwardTriton):
        found = _backward_triton(call)
    elif isinstance(blocks, AttentionDecodeSm90 | AttentionDecodeTriton):
        found = _decode(blocks, call)
    else:
        found = []
    return tuple(x for x in dict.fromkeys(found) if x != blocks)


def matmul_candidates(blocks: Any, call: TiledCall) -> tuple[Any, ...]:
    """The blocks to time for a matmul. blocks: of its block spec, which is left out."""
    if isinstance(blocks, MatmulSm90) and call.itemsize == 2:
        found = _matmul_sm90(blocks, call)
    elif isinstance(blocks, MatmulTriton):
        found = _matmul_triton(blocks, call)
    else:
        found = []
    return tuple(x for x in dict.fromkeys(found) if x != blocks)


def norm_candidates(blocks: Any, columns: int, direction: str) -> tuple[Any, ...]:
    """The blocks to time for a norm. blocks: of its block spec, which is left out. columns: of x.

    direction: "forward" or "backward".
    """
    found: list[Any] = []
    if isinstance(blocks, NormSm90) and blocks.cluster == 1:
        found = [dataclasses.replace(blocks, **fields) for fields in _NORM_SM90[direction]]
        found += [dataclasses.replace(blocks, stages=stages) for stages in (2, 4) if stages > 2 or not blocks.claims]
    elif isinstance(blocks, NormTriton | NormBackwardTriton):
        found = _norm_triton(blocks, columns)
    return tuple(x for x in dict.fromkeys(found) if x != blocks)


def _norm_triton(blocks: NormTriton | NormBackwardTriton, columns: int) -> list[Any]:
    chunk = min(blocks.chunk, 1 << (columns - 1).bit_length())
    least, most = _NORM_VALUES
    found: list[Any] = []
    for warps in _NORM_WARPS:
        # A thread of 16 warps has 128 registers, and the backward holds several values of each element.
        limit = most // 2 if warps == 16 and isinstance(blocks, NormBackwardTriton) else most
        rows = [rows for rows in (1, 2, 4, 8, 16) if least <= rows * chunk / (32 * warps) <= limit]
        # The smallest and the largest: the sizes between them take times between theirs.
        for block_rows in dict.fromkeys([*rows[:1], *rows[-1:]]):
            found.append(dataclasses.replace(blocks, block_rows=block_rows, chunk=chunk, num_warps=warps))
    if isinstance(blocks, NormBackwardTriton):
        found += [dataclasses.replace(blocks, programs=programs) for programs in _NORM_PROGRAMS]
    return found


def _width(head_dim: int) -> int:
    return next(width for width in _FORWARD_SM90 if head_dim <= width)


def _columns(head_dim: int) -> int:
    """The columns of a tile on Hopper."""
    return next(columns for columns in (64, 80, 96, 112, 128, 160, 192, 256) if head_dim <= columns)


def _forward_sm90(blocks: AttentionForwardSm90, call: TiledCall) -> list[Any]:
    width = _columns(call.width)
    sizes = [
        dataclasses.replace(blocks, compute_warpgroups=warpgroups, block_kv=block_kv, stages=stages, share_q_out=share)
        for (warpgroups, block_kv, stages), share in itertools.product(_FORWARD_SM90[_width(call.width)], (False, True))
    ]
    groups = [dataclasses.replace(blocks, head_group=heads, dynamic=True) for heads in _HEAD_GROUPS]
    others = [dataclasses.replace(blocks, early_q=not blocks.early_q), dataclasses.replace(blocks, bounded=False)]
    # Scores in float32 and in 16 bits, and sums of `width` columns, of 64 rows on the 128 threads of a warpgroup.
    registers = lambda x: width // 2 + x.block_kv // 2 + x.block_kv // 4 + _SM90_RESERVED
    return [
        x
        for x in (*sizes, *groups, *others)
        if call.fits(forward_sm90_bytes(x, width)) and registers(x) <= x.registers[0]
    ]


def _backward_sm90(blocks: AttentionBackwardSm90, call: TiledCall) -> list[Any]:
    width = _columns(call.width)
    stages = [dataclasses.replace(blocks, q_stages=q, do_stages=do) for q, do in _BACKWARD_SM90]
    heads = [dataclasses.replace(blocks, head_group=heads) for heads in _HEAD_GROUPS]
    staggers = [] if call.is_causal else [dataclasses.replace(blocks, q_loop_stagger=x) for x in _STAGGERS]
    others = [dataclasses.replace(blocks, early_dv=not blocks.early_dv)]
    if width <= 128:  # wider calls are not persistent
        others.append(dataclasses.replace(blocks, exit_after_smem_read=not blocks.exit_after_smem_read))
        if call.is_causal or blocks.persistent:  # otherwise a persistent kernel spills
            others.append(dataclasses.replace(blocks, persistent=not blocks.persistent, v_stages=1))
    return [x for x in (*stages, *heads, *staggers, *others) if call.fits(backward_sm90_bytes(x, width))]


def _forward_triton(call: TiledCall) -> list[Any]:
    found = []
    for (block_q, block_kv), (warps, stages) in itertools.product(_FORWARD_TRITON, _WARPS_AND_STAGES):
        registers = block_q * (block_kv + call.width) / (32 * warps)
        smem = (block_q + 2 * stages * block_kv) * call.width * call.itemsize
        if registers <= _TRITON_REGISTERS and call.fits(smem):
            found.append(AttentionForwardTriton(block_q=block_q, block_kv=block_kv, num_warps=warps, num_stages=stages))
    return found


def _backward_triton(call: TiledCall) -> list[Any]:
    found = []
    for blocks, (warps, stages) in itertools.product(_BACKWARD_TRITON, _WARPS_AND_STAGES):
        q_dkv, kv_dkv, q_dq, kv_dq = blocks
        held = max(kv_dkv * (2 * call.width + q_dkv), q_dq * (call.width + kv_dq))
        streamed = max(q_dkv, kv_dq) * stages * 2 + max(kv_dkv, q_dq) * 2
        if held / (32 * warps) <= _TRITON_REGISTERS and call.fits(streamed * call.width * call.itemsize):
            found.append(
                AttentionBackwardTriton(
                    block_q_dkv=q_dkv,
                    block_kv_dkv=kv_dkv,
                    block_q_dq=q_dq,
                    block_kv_dq=kv_dq,
                    num_warps=warps,
                    num_stages=stages,
                )
            )
    return found


def _decode(blocks: AttentionDecodeSm90 | AttentionDecodeTriton, call: TiledCall) -> list[Any]:
    width = _width(call.width)
    tile = lambda block_kv: 2 * block_kv * width * call.itemsize  # of keys and values
    if isinstance(blocks, AttentionDecodeSm90):
        found = [AttentionDecodeSm90(*fields) for fields in _DECODE_SM90]
        # Queries and sums take up to an eighth of shared memory.
        return [x for x in found if call.fits(x.compute_warpgroups * x.stages * tile(x.block_kv) * 8 // 7)]
    return [
        AttentionDecodeTriton(block_kv=block_kv, num_warps=warps, num_stages=stages)
        for block_kv, (warps, stages) in itertools.product(_DECODE_TRITON, _WARPS_AND_STAGES)
        if call.fits(stages * tile(block_kv))
    ]


def _matmul_sm90(blocks: MatmulSm90, call: TiledCall) -> list[Any]:
    names = ("row_group", "promoted_steps", "short_activation")
    kept: dict[str, Any] = {name: getattr(blocks, name) for name in names}
    found = [MatmulSm90(**kept, **fields) for fields in _MATMUL_SM90]
    found += [dataclasses.replace(blocks, row_group=rows) for rows in _ROW_GROUPS]
    # With two matmuls, 128 rows of a warpgroup would hold the sums of both.
    return [x for x in found if not (call.is_gated and x.wg_rows == 128 and x.block_n > 128)]


def _matmul_triton(blocks: MatmulTriton, call: TiledCall) -> list[Any]:
    found = []
    for m, n, k, warps, stages in _MATMUL_TRITON:
        smem = stages * (m + n) * k * call.itemsize
        if m * n / (32 * warps) <= _TRITON_REGISTERS and call.fits(smem):
            found.append(
                dataclasses.replace(blocks, block_m=m, block_n=n, block_k=k, num_warps=warps, num_stages=stages)
            )
    return found


def forward_sm90_bytes(config: AttentionForwardSm90, head_dim: int) -> int:
    """Bytes of shared memory for the tiles: query, out, and stages of keys and values, two bytes an element."""
    queries = config.block_q * head_dim * 2 * (1 if config.share_q_out else 2)
    return queries + config.stages * 2 * config.block_kv * head_dim * 2


def backward_sm90_bytes(config: AttentionBackwardSm90, head_dim: int) -> int:
    """Bytes of shared memory for the tiles: keys, values, stages of queries and dout, dS, and dq in float32."""
    block_kv = 64 if head_dim > 160 else 128
    chunk = head_dim // 2 if head_dim in (96, 160, 192) else 64
    if config.block_q == 128 and head_dim > 64:
        chunk = head_dim
    stages = (config.q_stages + config.do_stages) * config.block_q * head_dim * 2
    values = (config.v_stages - 1) * block_kv * head_dim * 2
    return 2 * block_kv * head_dim * 2 + values + stages + block_kv * config.block_q * 2 + 2 * 64 * chunk * 4
