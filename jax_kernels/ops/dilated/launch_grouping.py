"""Decides which pieces of a differentiated dilated attention are read in place and which are gathered for one launch.

A view saves the copy of a piece. But in the backward each view has a launch of its own, because each launch adds to the
dquery of the launch before it. A launch takes time to start, and leaves SMs idle during its last tiles. Small pieces
are therefore gathered into one launch if that is estimated to take less time. In the forward, pieces that are read in
place run in one launch.
"""

import dataclasses
from collections.abc import Sequence

from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.ops.dilated import branches as dilated_views
from jax_kernels.ops.dilated.branches import BranchCall
from jax_kernels.pallas import block_specs

__all__ = ["launches_of"]


def launches_of(call: BranchCall, request: AttentionRequest, block_q: int) -> tuple[BranchCall, ...]:
    """Splits a call into strided calls, and one call of gathered pieces, such that they take the least estimated time.

    The estimate is for the forward; the backward is assumed to be proportional to it. If the device's memory bandwidth
    is unknown, all pieces that a kernel can read in place get strided calls. request: of the arrays of
    dilated_attention, before a split into branches. block_q: the queries of a kernel's tile.
    """
    parts = dilated_views.split_strided(call, request.q_length, request.heads // request.kv_heads)
    if request.device.memory_bandwidth is None:
        return parts
    strided = sorted((part for part in parts if part.is_strided), key=lambda part: _entries(part, request))
    ways = [_joined(call, parts, strided[:count]) for count in range(len(strided) + 1)]
    return min(ways, key=lambda way: _seconds(way, request, block_q))


def _joined(call: BranchCall, parts: Sequence[BranchCall], joined: Sequence[BranchCall]) -> tuple[BranchCall, ...]:
    """Splits `call` such that the pieces of some strided calls are gathered after all.

    parts: the calls of split_strided(call, ...). joined: the strided calls among them that lose their own launch.
    Returns the other strided calls, then one call of all gathered pieces, if there is any.
    """
    strided = [part for part in parts if part.is_strided and part not in joined]
    in_place = [piece for part in strided for piece in part.pieces]
    others = tuple(piece for piece in call.pieces if piece not in in_place)
    return *strided, *([dataclasses.replace(call, pieces=others)] if others else [])


def _seconds(calls: Sequence[BranchCall], request: AttentionRequest, block_q: int) -> float:
    """The estimated time of the calls' forwards: gathers, starts of launches, and arithmetic."""
    gathered = [call for call in calls if not call.is_strided]
    copied = sum(_gathered_bytes(call, request) for call in gathered)
    assert request.device.memory_bandwidth is not None
    costs = block_specs.dilated_launches(request.device.compute_capability)
    gathering = copied / (costs.gather_bandwidth * request.device.memory_bandwidth)
    starts = costs.gather_seconds * len(gathered) + costs.launch_seconds * len(calls)
    cores = request.device.core_count
    return gathering + starts + sum(_flops(call, request, block_q) for call in calls) / (cores * costs.core_flops)


def _gathered_bytes(call: BranchCall, request: AttentionRequest) -> int:
    """The bytes that gathering query, key and value reads and writes, in sum."""
    rows = call.rows * call.heads + 2 * call.rows * call.kv_heads
    return 2 * _entries(call, request) * rows * request.head_dim * request.bits // 8


def _flops(call: BranchCall, request: AttentionRequest, block_q: int) -> float:
    """The floating point operations of a call's forward, if tiles of block_q queries compute whole tiles.

    Under a causal mask, a tile counts the mean fraction of the keys that it sees.
    """
    q_blocks = -(-call.rows // block_q)
    tiles = _entries(call, request) * call.heads * q_blocks
    share = (q_blocks + 1) / (2 * q_blocks) if request.is_causal else 1  # mean fraction of the keys that a tile has
    return 4 * tiles * block_q * share * call.rows * request.head_dim


def _entries(call: BranchCall, request: AttentionRequest) -> int:
    return call.entries(request.batch, request.heads)
