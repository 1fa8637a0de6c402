"""The FLOPs and the bytes of a call, and the least time that a device's data sheet allows for them.

Matmuls count two operations for each multiplication with its addition; other arithmetic does not count, except for
norms. Bytes are the arrays that the call must read and write once.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.device import DeviceInfo
from jax_kernels.dispatch import Request
from jax_kernels.flops import attention_flops, live_pairs, matmul_flops
from jax_kernels.masks import Mask
from jax_kernels.ops.attention.decode_implementations import DecodeRequest
from jax_kernels.ops.attention.flash_attention_fp8 import Fp8Request
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.ops.cross_entropy.implementations import LossRequest
from jax_kernels.ops.grouped.experts import ExpertsInputs
from jax_kernels.ops.grouped.implementations import GroupedRequest
from jax_kernels.ops.matmul.implementations import MatmulRequest
from jax_kernels.ops.normalization.implementations import NormRequest
from jax_kernels.ops.ring.recorded import RingRequest

__all__ = ["Cost", "bytes_of", "cost"]

_BLOCK = 128  # the side of the blocks whose live share counts for a Mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The work of a call. flops: operations of matmuls, in a norm of all values. bytes: read and written at least.

    arithmetic: the kind of the matmuls, as DeviceInfo.flops takes it. is_bound: whether the work may be less, because
    an array of limits (a mask, lengths, segment ids) is known only when the call runs.
    """

    flops: float
    bytes: float
    arithmetic: str
    is_bound: bool = False

    def seconds(self, device: DeviceInfo) -> float | None:
        """The least time by the rates of the device's data sheet; None if they are unknown."""
        rate = device.flops(self.arithmetic)
        if rate is None or device.memory_bandwidth is None:
            return None
        return max(self.flops / rate, self.bytes / device.memory_bandwidth)

    def times(self, count: float) -> "Cost":
        """The work of `count` such calls."""
        return dataclasses.replace(self, flops=self.flops * count, bytes=self.bytes * count)


def bytes_of(tree: Any) -> float:
    """The bytes of all arrays in a tree; of jax.ShapeDtypeStructs too."""
    arrays = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape") and hasattr(x, "dtype")]
    return float(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays))


def _is_known(tree: Any) -> bool:
    unknown = (jax.core.Tracer, jax.ShapeDtypeStruct)
    return not any(isinstance(x, unknown) for x in jax.tree.leaves(tree))


def _density(request: AttentionRequest, inputs: Any) -> tuple[float, bool]:
    """(the share of the pairs that a mask array or a Mask leaves, whether more may be left out when the call runs)."""
    mask = inputs.mask
    others = (inputs.q_segment_ids, inputs.kv_lengths, inputs.q_offset, inputs.lists)
    is_bound = any(x is not None for x in others) or request.q_offset is None
    if mask is None:
        return 1.0, is_bound
    if not _is_known(mask):
        return 1.0, True
    if isinstance(mask, Mask):
        sizes = request.q_length, request.kv_length, _BLOCK
        return float(mask.density(*sizes, q_offset=request.q_offset or 0)), True
    return float(jnp.mean(jnp.asarray(mask), dtype=jnp.float32)), True


def _attention(request: AttentionRequest, inputs: Any, backward: bool) -> Cost:
    pairs = live_pairs(
        request.q_length,
        request.kv_length,
        is_causal=request.is_causal,
        window=request.window,
        q_offset=request.q_offset or 0,
    )
    share, is_bound = _density(request, inputs)
    if share < 1:  # a mask and the other limits may leave out the same pairs: the smaller count is a bound
        pairs = min(pairs, share * request.q_length * request.kv_length)
    itemsize = request.bits // 8
    batch, heads = request.batch, request.heads
    rows = batch * heads * request.q_length
    out = rows * request.v_head_dim * itemsize + (4 * rows if request.return_lse or backward else 0)
    given = bytes_of(inputs)
    moved = given + out
    if backward:  # also reads out and its cotangent, and writes the gradients of query, key and value
        moved += out + bytes_of((inputs.query, inputs.key, inputs.value))
    arithmetic = "tf32" if request.precision == "tf32" else request.dtype
    flops = attention_flops(pairs * batch * heads, request.head_dim, request.v_head_dim, backward=backward)
    return Cost(flops=flops, bytes=moved, arithmetic=arithmetic, is_bound=is_bound)


def _ring(request: RingRequest, inputs: Any, backward: bool) -> Cost:
    """The work of the device that has most, with the keys of all devices. Bytes are of its own memory."""
    pairs = request.pairs * request.batch * request.heads
    rows, itemsize = request.batch * request.q_length, jnp.dtype(request.dtype).itemsize
    out = rows * request.heads * (request.v_head_dim * itemsize + 4)
    given = bytes_of(inputs) + (request.devices - 1) * bytes_of((inputs.key, inputs.value))
    moved = given + out + (out + bytes_of((inputs.query, inputs.key, inputs.value)) if backward else 0)
    return Cost(
        flops=attention_flops(pairs, request.head_dim, request.v_head_dim, backward=backward),
        bytes=moved,
        arithmetic="tf32" if request.precision == "tf32" else request.dtype,
        is_bound=request.is_bound,
    )


def _attention_fp8(request: Fp8Request, inputs: Any, backward: bool) -> Cost:
    pairs = live_pairs(
        request.q_length,
        request.kv_length,
        is_causal=request.is_causal,
        window=None,
        q_offset=request.q_offset or 0,
    )
    rows = request.batch * request.heads
    flops = attention_flops(rows * pairs, request.head_dim, request.v_head_dim, backward=False)
    out = rows * request.q_length * request.v_head_dim * 2
    is_bound = request.has_kv_lengths or request.q_offset is None
    return Cost(flops=flops, bytes=bytes_of(inputs) + out, arithmetic="fp8", is_bound=is_bound)


def _decode(request: DecodeRequest, inputs: Any, backward: bool) -> Cost:
    """Counts all keys that a sequence has room for: its length is known only when the call runs."""
    keys = request.kv_length
    if request.window is not None and request.window[0] >= 0:
        keys = min(keys, request.window[0] + request.q_length)
    rows = request.batch * request.heads * request.q_length
    flops = attention_flops(rows * keys, request.head_dim, request.v_head_dim, backward=False)
    itemsize = jnp.dtype(request.dtype).itemsize
    cache = request.batch * keys * request.kv_heads * (request.head_dim + request.v_head_dim) * itemsize
    own = rows * (request.head_dim + request.v_head_dim) * itemsize
    return Cost(flops=flops, bytes=cache + own, arithmetic=request.dtype, is_bound=True)


def _matmul_arithmetic(dtype: str, precision: str | None, scaling: str | None = None) -> str:
    if scaling is not None or dtype.startswith("float8"):
        return "fp8"
    if precision in ("bf16", "fp16"):
        return {"bf16": "bfloat16", "fp16": "float16"}[precision]
    return "tf32" if precision == "tf32" else dtype


def _matmul(request: MatmulRequest, inputs: Any, backward: bool) -> Cost:
    """The backward's matmuls are calls of their own, as is the second matmul of mlp."""
    first = getattr(inputs, "first", inputs)  # of mlp
    flops = matmul_flops(request.m, request.n, request.k) * (1 if first.w_up is None else 2)
    out = request.m * request.n * jnp.dtype(request.out_dtype).itemsize
    arithmetic = _matmul_arithmetic(request.dtype, request.precision, request.scaling)
    return Cost(flops=flops, bytes=bytes_of(first) + out, arithmetic=arithmetic)


def _grouped(request: GroupedRequest, inputs: Any, backward: bool) -> Cost:
    """Counts all rows as rows of a group. The backward has two matmuls for each matmul: for its x, and for its w."""
    is_experts = isinstance(inputs, ExpertsInputs)
    is_gated = is_experts or inputs.is_gated
    flops, columns = matmul_flops(request.m, request.n, request.k) * (2 if is_gated else 1), request.n
    if is_experts:
        columns = inputs.down.shape[-1]
        flops += matmul_flops(request.m, columns, request.n)
    flops *= 2 if backward else 1
    out = request.m * columns * jnp.dtype(request.out_dtype).itemsize
    if is_experts and inputs.combination is not None:
        out = 4 * columns * inputs.combination.weights.shape[0]
    given = bytes_of(inputs)
    arithmetic = _matmul_arithmetic(request.dtype, request.precision, request.scaling)
    return Cost(flops=flops, bytes=given * (2 if backward else 1) + out, arithmetic=arithmetic, is_bound=True)


def _norm(request: NormRequest, inputs: Any, backward: bool) -> Cost:
    """Reads and writes every value once; the backward reads x and the cotangent, and writes the gradient."""
    values = float(request.rows) * request.columns
    itemsize = jnp.dtype(request.dtype).itemsize
    out = values * (itemsize if request.quantize is None else 1)
    has_residual = getattr(inputs, "residual", None) is not None
    moved = bytes_of(inputs) + out + (values * itemsize if has_residual else 0) + (out if backward else 0)
    return Cost(flops=values * (14 if backward else 8), bytes=moved, arithmetic="float32")


def _loss(request: LossRequest, inputs: Any, backward: bool) -> Cost:
    """One matmul forward. The backward has three with reduction="none", and else two: the forward keeps the logits'
    work.
    """
    matmuls = (3 if request.reduction == "none" else 2) if backward else 1
    flops = matmuls * matmul_flops(request.tokens, request.vocabulary, request.depth)
    given = bytes_of(inputs)
    arithmetic = request.dtype if request.precision is None or backward else "fp8"
    return Cost(flops=flops, bytes=given * (2 if backward else 1) + 4.0 * request.tokens, arithmetic=arithmetic)


_BY_REQUEST: Mapping[type[Request], Callable[[Any, Any, bool], Cost]] = {
    AttentionRequest: _attention,
    Fp8Request: _attention_fp8,
    DecodeRequest: _decode,
    MatmulRequest: _matmul,
    GroupedRequest: _grouped,
    NormRequest: _norm,
    RingRequest: _ring,
    LossRequest: _loss,
}


def cost(request: Request, inputs: Any, *, backward: bool = False) -> Cost | None:
    """The work of a call by its request and its arrays, or jax.ShapeDtypeStructs; None for symbolic sizes.

    backward: the work of the call's own backward, without the forward. The backward of matmuls consists of other
    calls: its cost here is 0.
    """
    sizes = [getattr(request, name) for name in request.SIZES]
    if not all(isinstance(size, int) or size is None for size in sizes):
        return None
    if backward and isinstance(request, MatmulRequest | Fp8Request | DecodeRequest):
        return Cost(flops=0, bytes=0, arithmetic=getattr(request, "dtype", "float32"))
    return _BY_REQUEST[type(request)](request, inputs, backward)
