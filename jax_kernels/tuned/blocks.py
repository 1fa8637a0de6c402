"""Checks of the implementations and blocks that a file of winners names, before a call is planned with them.

A winner of a file may be of another version's kernels, or changed by hand. Blocks that no candidate of a tuned call can
have are refused: of another type, with values that the type of the block spec refuses, or too large for a CTA.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping
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
from jax_kernels.spelling import did_you_mean

__all__ = ["IMPLEMENTATIONS", "MOST_SHARED_MEMORY", "TYPES", "check_blocks", "check_name"]

_NAMES = ("mosaic_gpu", "triton", "xla")
# By op, the names of its implementations. The winners of an op that is not here are taken as they are.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "flash_attention": ("mosaic_gpu", "triton", "cudnn", "xla"),
    "flash_attention_fp8": ("mosaic_gpu", "xla"),
    **dict.fromkeys(("decode_attention", "matmul", "gated_matmul", "mlp", "layer_norm", "rms_norm"), _NAMES),
    **dict.fromkeys(("grouped_matmul", "grouped_gated_matmul", "linear_cross_entropy"), _NAMES),
}
_MATMUL = {("mosaic_gpu", "forward"): MatmulSm90, ("triton", "forward"): MatmulTriton}
_NORM = {
    ("mosaic_gpu", "forward"): NormSm90,
    ("mosaic_gpu", "backward"): NormSm90,
    ("triton", "forward"): NormTriton,
    ("triton", "backward"): NormBackwardTriton,
}
# By op, the types of the blocks that tuning varies, by implementation and field of its config.
TYPES: dict[str, dict[tuple[str, str], type]] = {
    "flash_attention": {
        ("mosaic_gpu", "forward"): AttentionForwardSm90,
        ("mosaic_gpu", "backward"): AttentionBackwardSm90,
        ("triton", "forward"): AttentionForwardTriton,
        ("triton", "backward"): AttentionBackwardTriton,
    },
    "decode_attention": {
        ("mosaic_gpu", "forward"): AttentionDecodeSm90,
        ("triton", "forward"): AttentionDecodeTriton,
    },
    "matmul": _MATMUL,
    "gated_matmul": _MATMUL,
    "mlp": _MATMUL,
    "layer_norm": _NORM,
    "rms_norm": _NORM,
}

_REGISTERS = 65536  # of a CTA, of 32 bits each
_WARPS = 32  # of a CTA
_CTAS = 32  # of an SM
MOST_SHARED_MEMORY = 256 << 10  # of a CTA of any GPU: no known one has as many bytes


def check_name(op: str, name: str) -> None:
    """Raises ValueError unless the name is one of the op's implementations. op: of a request."""
    known = IMPLEMENTATIONS.get(op, (name,))
    if name not in known:
        raise ValueError(f"implementation: got {name!r}, want one of {', '.join(known)}{did_you_mean(name, known)}")


def check_blocks(
    request: Mapping[str, Any], implementation: str, field: str, blocks: Mapping[str, Any], shared_memory: int
) -> None:
    """Checks the blocks of a field of an implementation's config.

    request: the fields of the request by name, as in a winner's key. blocks: the name of their type ("type"), and its
    values by name. shared_memory: the most bytes of shared memory of a CTA; 0 is no limit.

    Raises TypeError or ValueError for blocks that the type or the device cannot hold.
    """
    if request["op"] not in IMPLEMENTATIONS:
        return
    kind = TYPES.get(request["op"], {}).get((implementation, field))
    if kind is None:
        raise ValueError(f"{implementation}: got blocks of {field!r}, which tuning does not vary for {request['op']}")
    values = {name: x for name, x in blocks.items() if name != "type"}
    if blocks.get("type") != kind.__name__:
        raise TypeError(f"{field}: got blocks of type {blocks.get('type')!r}, want {kind.__name__}")
    hints = _hints(kind)
    for name, x in values.items():
        if name not in hints:
            raise TypeError(f"{kind.__name__}.{name}: got {x!r}, want no field of this name")
        if type(x) not in hints[name]:
            wanted = " or ".join("None" if one is type(None) else one.__name__ for one in hints[name])
            raise TypeError(f"{kind.__name__}.{name}: got {x!r}, want {wanted}")
        if type(x) is int and x < 0:
            raise ValueError(f"{kind.__name__}.{name}: got {x}, want 0 or more")
    _check_room(kind(**values), request, shared_memory)


@functools.cache
def _hints(kind: type) -> dict[str, tuple[type, ...]]:
    """The types of each field's values in a file: a field of nested blocks is None there."""
    plain = (bool, int, type(None))
    hints = typing.get_type_hints(kind)
    kinds = {x.name: typing.get_args(hints[x.name]) or (hints[x.name],) for x in dataclasses.fields(kind)}
    return {name: tuple(x for x in of if x in plain) for name, of in kinds.items()}


def _check_room(blocks: Any, request: Mapping[str, Any], shared_memory: int) -> None:
    """Raises ValueError if a CTA has too few registers, threads or bytes of shared memory for blocks."""
    sizes = {name: request.get(name) for name in ("head_dim", "v_head_dim")}
    head_dim, v_head_dim = (size if type(size) is int and size > 0 else 1 for size in sizes.values())
    values, streamed = _needs(blocks, head_dim, v_head_dim)
    limits = {
        "32-bit registers": (values, _REGISTERS),
        "bytes of shared memory": (streamed if shared_memory else 0, shared_memory),
        "warps": (getattr(blocks, "num_warps", 1), _WARPS),
        "CTAs of an SM": (getattr(blocks, "programs", 1), _CTAS),
    }
    for thing, (needed, most) in limits.items():
        if needed > most:
            raise ValueError(f"{blocks}: needs {needed} {thing}, want at most {most}")


def _needs(x: Any, head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """(float32 values that a CTA holds, bytes of the stages of its pipeline), both at least, of these blocks."""
    both = head_dim + v_head_dim
    if isinstance(x, MatmulTriton):  # a value has at least one byte
        return x.block_m * x.block_n, x.num_stages * (x.block_m + x.block_n) * x.block_k
    if isinstance(x, AttentionForwardTriton):
        return x.block_q * max(x.block_kv, v_head_dim), x.num_stages * x.block_kv * both * 2
    if isinstance(x, AttentionBackwardTriton):
        dkv = x.block_kv_dkv * max(x.block_q_dkv, head_dim, v_head_dim)
        dq = x.block_q_dq * max(x.block_kv_dq, head_dim)
        dv = x.block_kv_dkv * (x.block_q_dv or 0)
        return max(dkv, dq, dv), x.num_stages * max(x.block_q_dkv, x.block_kv_dq) * both * 2
    if isinstance(x, AttentionDecodeTriton):
        return x.block_kv, x.num_stages * x.block_kv * both
    if isinstance(x, AttentionForwardSm90):
        return x.block_q * x.block_kv, x.stages * x.block_kv * both * 2
    if isinstance(x, AttentionDecodeSm90):
        return x.block_kv, x.compute_warpgroups * x.stages * x.block_kv * both
    if isinstance(x, AttentionBackwardSm90):
        return x.block_q, x.block_q * (x.q_stages * head_dim + x.do_stages * v_head_dim) * 2
    if isinstance(x, NormTriton | NormBackwardTriton):
        return x.block_rows * x.chunk, 0
    return 0, 0  # a MatmulSm90 or a NormSm90: the kernel lessens its stages
