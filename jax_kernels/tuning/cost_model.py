"""Predicts the time of a call with given blocks, so that tuning leaves out blocks that cannot be the fastest.

The model is a lower bound in each of its parts, and knows nothing of a kernel except its work tiles:

    time = launch + max(SM, memory),      SM = the largest sum of the times of the tiles of one SM
    time of a tile = max(flops / rate, bytes / L2 rate, steps * time of a step)

flops: of the tile as it is computed, with the rows and columns that pad the arrays. bytes: the operands that the tile
reads through the L2 cache. steps: of the loop of a tile. memory: the arrays, read and written once, over the bandwidth
of the device memory. So two predictions differ by padding, by the last round of tiles, which leaves SMs idle, and by
the operands that small tiles read again. Pipelines, registers and caches are not modelled: the margin is for them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jax_kernels.dispatch import Request
from jax_kernels.flops import matmul_flops
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.ops.matmul.implementations import MatmulRequest
from jax_kernels.ops.normalization.implementations import NormRequest
from jax_kernels.pallas.block_specs.matmul_specs import MatmulSm90, MatmulTriton
from jax_kernels.pallas.block_specs.normalization_specs import NormTriton
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton, AttentionForwardSm90, AttentionForwardTriton

__all__ = ["MARGIN", "predicted_seconds", "slower"]

MARGIN = 1.5  # a candidate is left out if its prediction is more than this multiple of the smallest one
_LAUNCH = 2e-6  # seconds of a launch that no blocks avoid
_STEP = 1e-7  # seconds: a tile's next step waits for a barrier, and for the latency of the tensor cores
_L2_RATE = 160e9  # bytes per second that an SM can read from the L2 cache: 64 bytes a cycle, at most 2.5 GHz


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Work tiles of equal shape. count: their number. flops, bytes, steps: of each."""

    count: float
    flops: float
    bytes: float
    steps: float = 1

    def seconds(self, rate: float) -> float:
        """Seconds of one tile on one SM. rate: FLOP/s of an SM."""
        return max(self.flops / rate, self.bytes / _L2_RATE, self.steps * _STEP)


def predicted_seconds(request: Request, blocks: Any) -> float | None:
    """The prediction for one direction of a call. blocks: of this direction, such as an AttentionForwardTriton.

    None if the model does not know the blocks or the request, as with a window, a mask or lengths, or if the device's
    rates are unknown.
    """
    predict = _BY_BLOCKS.get(type(blocks))
    device = request.device
    if predict is None or device.core_count is None or device.memory_bandwidth is None:
        return None
    return predict(request, blocks)


def slower(request: Request, blocks: Sequence[Any]) -> dict[Any, float]:
    """{blocks: their predicted time over the smallest prediction}, for blocks whose ratio is above MARGIN."""
    found = {x: seconds for x in blocks if (seconds := predicted_seconds(request, x)) is not None}
    best = min(found.values(), default=math.inf)
    return {x: seconds / best for x, seconds in found.items() if seconds > MARGIN * best}


def _rate(request: Any, arithmetic: str) -> float | None:
    """FLOP/s of an SM; None if unknown."""
    flops = request.device.flops(arithmetic)
    return None if flops is None else flops / request.device.core_count


def _in_rounds(request: Request, tiles: _Tiles, rate: float) -> float:
    """Seconds of the SM with the most tiles."""
    return math.ceil(tiles.count / request.device.core_count) * tiles.seconds(rate)


def _balanced(request: Request, tiles: Iterable[_Tiles], rate: float) -> float:
    """Seconds of the SM with the most work, if the longest tiles start first. The longest tile is a bound."""
    times = [(x.count, x.seconds(rate)) for x in tiles]
    return max(sum(count * seconds for count, seconds in times) / request.device.core_count, max(x for _, x in times))


def _total(request: Request, sm_seconds: float, moved: float) -> float:
    """Seconds of a call. sm_seconds: of the busiest SM. moved: bytes of the call's arrays."""
    return _LAUNCH + max(sm_seconds, moved / (request.device.memory_bandwidth or math.inf))


def _matmul(request: MatmulRequest, blocks: MatmulSm90 | MatmulTriton) -> float | None:
    arithmetic = "tf32" if request.precision == "tf32" else request.dtype
    rate = _rate(request, arithmetic)
    if rate is None or request.scaling is not None or request.low_bit is not None:
        return None
    itemsize, out_size = jnp.dtype(request.dtype).itemsize, jnp.dtype(request.out_dtype).itemsize
    matmuls = 2 if request.is_gated else 1
    columns = blocks.block_n // matmuls  # of out: a gated unit has two blocks of weights
    step = blocks.block_k if isinstance(blocks, MatmulTriton) else 128 // itemsize
    steps = math.ceil(request.k / step)
    # The CTAs of a cluster load a block of w together.
    shared = blocks.cluster if isinstance(blocks, MatmulSm90) else 1
    tiles = _Tiles(
        count=math.ceil(request.m / blocks.block_m) * math.ceil(request.n / columns),
        flops=matmul_flops(blocks.block_m, blocks.block_n, steps * step),
        bytes=(blocks.block_m + blocks.block_n / shared) * steps * step * itemsize,
        steps=steps,
    )
    if isinstance(blocks, MatmulTriton) and blocks.split_steps is not None and 2 * tiles.count <= _cores(request):
        parts = min(_cores(request) // tiles.count, steps / blocks.split_steps)
        split = dataclasses.replace(tiles, flops=tiles.flops / parts, bytes=tiles.bytes / parts, steps=steps / parts)
        tiles = split if parts > 1 else tiles
    moved = (request.m * request.k + matmuls * request.k * request.n) * itemsize + request.m * request.n * out_size
    return _total(request, _in_rounds(request, tiles, rate), moved)


def _cores(request: Request) -> int:
    return request.device.core_count or 1


def _is_plain(request: AttentionRequest) -> bool:
    """Whether each query has the keys that is_causal alone gives."""
    arrays = request.window, request.mask_shape, request.bias_shape
    others = request.has_mask_object, request.has_lists, request.has_segment_ids, request.has_kv_lengths
    has_more = request.has_score_mod or request.q_offset is None
    return all(x is None for x in arrays) and not any(others) and not has_more


def _keys(request: AttentionRequest, queries: int) -> list[int]:
    """For each block of queries, the number of keys of its last query."""
    ends = range(queries, request.q_length + queries, queries)
    if not request.is_causal:
        return [request.kv_length for _ in ends]
    offset = request.q_offset or 0
    return [min(request.kv_length, max(0, end + offset)) for end in ends]


def _queries(request: AttentionRequest, keys: int) -> list[int]:
    """For each block of keys, the number of queries from the first one that attends to it."""
    starts = range(0, request.kv_length, keys)
    if not request.is_causal:
        return [request.q_length for _ in starts]
    offset = request.q_offset or 0
    return [min(request.q_length, max(0, request.q_length - (start - offset))) for start in starts]


def _loops(request: AttentionRequest, lengths: Sequence[int], held: int, step: int, dims: int) -> list[_Tiles]:
    """The tiles that hold `held` rows and loop over these lengths. dims: columns of all matmuls of a pair of rows."""
    itemsize = request.bits // 8
    streamed = (request.head_dim + request.v_head_dim) * itemsize
    found = []
    for length in lengths:
        steps = math.ceil(length / step)
        rows = steps * step
        found.append(
            _Tiles(
                count=request.batch * request.heads,
                flops=2 * held * rows * dims,
                bytes=rows * streamed,
                steps=steps,
            )
        )
    return found


def _attention_rate(request: AttentionRequest) -> float | None:
    return _rate(request, "tf32" if request.precision == "tf32" else request.dtype) if _is_plain(request) else None


def _moved(request: AttentionRequest, times: float) -> float:
    """Bytes of query, key, value and out, `times` times."""
    rows = request.batch * request.q_length * request.heads + request.batch * request.kv_length * request.kv_heads
    return times * rows * (request.head_dim + request.v_head_dim) * request.bits / 8


def _attention(request: AttentionRequest, blocks: AttentionForwardSm90 | AttentionForwardTriton) -> float | None:
    rate = _attention_rate(request)
    if rate is None:
        return None
    dims = request.head_dim + request.v_head_dim
    tiles = _loops(request, _keys(request, blocks.block_q), blocks.block_q, blocks.block_kv, dims)
    if request.is_causal:
        seconds = _balanced(request, tiles, rate)
    else:
        same = dataclasses.replace(tiles[0], count=tiles[0].count * len(tiles))
        seconds = _in_rounds(request, same, rate)
    return _total(request, seconds, _moved(request, 1))


def _attention_backward(request: AttentionRequest, blocks: AttentionBackwardTriton) -> float | None:
    rate = _attention_rate(request)
    if rate is None:
        return None
    dims, v_dims = request.head_dim, request.v_head_dim
    of_keys = _queries(request, blocks.block_kv_dkv)
    loops = [
        # Scores, dP and dkey; and dvalue, with the scores once more in a kernel of its own.
        _loops(request, of_keys, blocks.block_kv_dkv, blocks.block_q_dkv, 2 * dims + v_dims),
        _loops(
            request,
            of_keys,
            blocks.block_kv_dkv,
            blocks.block_q_dv or blocks.block_q_dkv,
            v_dims + (0 if blocks.block_q_dv is None else dims),
        ),
        # Scores, dP and dquery.
        _loops(request, _keys(request, blocks.block_q_dq), blocks.block_q_dq, blocks.block_kv_dq, 2 * dims + v_dims),
    ]
    return _total(request, sum(_balanced(request, tiles, rate) for tiles in loops), _moved(request, 3))


def _norm(request: NormRequest, blocks: NormTriton) -> float:
    row_bytes = 2 * request.columns * jnp.dtype(request.dtype).itemsize  # of x and out
    tiles = _Tiles(count=math.ceil(request.rows / blocks.block_rows), flops=0, bytes=blocks.block_rows * row_bytes)
    return _total(request, _in_rounds(request, tiles, 1.0), request.rows * row_bytes)


_BY_BLOCKS: Mapping[type, Callable[[Any, Any], float | None]] = {
    AttentionForwardSm90: _attention,
    AttentionForwardTriton: _attention,
    AttentionBackwardTriton: _attention_backward,
    MatmulSm90: _matmul,
    MatmulTriton: _matmul,
    NormTriton: _norm,
}
