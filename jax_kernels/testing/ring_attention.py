"""The cases of ring_attention for tests and `jax-kernels check`, on the devices of this machine.

They are cases of flash_attention, with its oracle and error bounds: ring_attention is flash_attention of a sequence
whose tokens are sharded over devices. With one device it is a ring of one step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_kernels.ops.ring.layouts import Layout
from jax_kernels.ops.ring.ring_attention import ring_attention
from jax_kernels.testing.attention import errors_of_attention
from jax_kernels.testing.attention_cases import AttentionCase
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.typical_call import AXIS, TypicalCall

__all__ = ["AXIS", "CASES", "GPU", "TYPICAL", "RingCase", "errors_of", "mesh_of", "ring", "why_not"]

TOKENS, ROWS = PartitionSpec(None, AXIS), PartitionSpec(None, None, AXIS)


@dataclasses.dataclass(frozen=True)
class RingCase(AttentionCase):
    """An AttentionCase with as many queries as keys, for ring_attention. layout, strategy: arguments of
    ring_attention.
    """

    layout: str = "zigzag"
    strategy: str = "auto"


def mesh_of(tokens: int) -> Mesh:
    """A mesh, with the axis AXIS, of as many of this machine's devices as can each take an even number of the
    tokens.
    """
    devices = jax.devices()
    count = next(n for n in range(len(devices), 0, -1) if tokens % (2 * n) == 0 or n == 1)
    return Mesh(np.array(devices[:count]), (AXIS,), axis_types=(AxisType.Auto,))


def ring(case: RingCase) -> Any:
    """Returns ring_attention as a function of whole arrays, with the arguments and results of flash_attention.

    The arrays are in the order of the sequence. The function arranges them for the layout, and runs over mesh_of's
    devices.
    """
    mesh = mesh_of(case.q_length)
    devices = mesh.size
    layout = Layout(name=case.layout, devices=devices, length=case.q_length // devices, left=None, right=None)
    order = np.concatenate([layout.tokens(device) for device in range(devices)])
    back = np.argsort(order)

    def attend(query: Any, key: Any, value: Any, **arguments: Any) -> Any:
        statics = {name: arguments[name] for name in ("is_causal", "window", "softcap", "precision", "implementation")}
        statics |= {"axis_name": AXIS, "layout": case.layout, "strategy": case.strategy, "return_lse": True}
        ids, bias, sinks = (arguments[name] for name in ("segment_ids", "bias", "sinks"))
        has_rows = bias is not None and bias.shape[2] > 1
        in_order = lambda x, axis=1: None if x is None else jnp.take(x, order, axis=axis)
        given = {"query": in_order(query), "key": in_order(key), "value": in_order(value)}
        specs = dict.fromkeys(given, TOKENS)
        for name, x, spec in (
            ("segment_ids", None if ids is None else in_order(ids[0]), TOKENS),
            ("bias", in_order(bias, 2) if has_rows else bias, ROWS if has_rows else PartitionSpec()),
            ("sinks", sinks, PartitionSpec()),
        ):
            if x is not None:
                given[name], specs[name] = x, spec
        call = lambda given: ring_attention(**given, **statics, mask=arguments["mask"])
        sharded = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=(TOKENS, ROWS), check_vma=False)
        out, lse = sharded(given)
        results = jnp.take(out, back, axis=1), jnp.take(lse, back, axis=2)
        return results if arguments["return_lse"] else results[0]

    return attend


def errors_of(case: RingCase, got: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(error, bound) of each result by name. got: from run_attention with `ring`.

    With "all_gather" the bounds of dk and dv are doubled: each device rounds its gradients of all keys and values.
    """
    found = errors_of_attention(case, got)
    if case.strategy == "all_gather":
        found |= {name: (error, 2 * bound) for name, (error, bound) in found.items() if name in ("dk", "dv")}
    return found


def why_not(case: RingCase, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can."""
    mesh, arguments = mesh_of(case.q_length), case.arguments
    local = case.q_length // mesh.size
    of = lambda heads, columns: jax.ShapeDtypeStruct((case.batch, local, heads, columns), jnp.dtype(case.dtype))
    given = {name: arguments[name] for name in ("is_causal", "window", "softcap", "precision", "mask", "sinks")}
    if case.segments is not None:
        given["segment_ids"] = jax.ShapeDtypeStruct((case.batch, local), jnp.int32)
    if case.bias is not None:
        bias = arguments["bias"]
        rows = local if bias.shape[2] > 1 else 1
        given["bias"] = jax.ShapeDtypeStruct((*bias.shape[:2], rows, bias.shape[3]), bias.dtype)
    given |= {"axis_name": AXIS, "layout": case.layout, "strategy": case.strategy, "implementation": implementation}
    query, key = of(case.heads, case.head_dim), of(case.kv_heads, case.head_dim)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return refusal(ring_attention, query, key, of(case.kv_heads, case.v_head_dim), **given)


def _cases(*cases: RingCase) -> dict[str, RingCase]:
    return {case.name: case for case in cases}


def _long(name: str, **fields: Any) -> RingCase:
    sizes = {"batch": 1, "q_length": 4096, "kv_length": 4096, "heads": 8, "kv_heads": 8}
    return RingCase(name, **sizes | {"head_dim": 128, "v_head_dim": 128} | fields)


CASES = _cases(
    RingCase("causal", is_causal=True),
    RingCase("full", layout="contiguous", heads=4),
    RingCase("packed", is_causal=True, segments="packed", sinks=True),
    RingCase("window", is_causal=True, window=(30, 0), softcap=3.0),
    RingCase("halo", window=(20, 9), layout="contiguous", strategy="halo"),
    RingCase("striped_fp32", is_causal=True, layout="striped", dtype="float32", heads=4),
    RingCase("ring_fp16", is_causal=True, strategy="ring", dtype="float16", q_length=192, kv_length=192),
    RingCase("all_gather", is_causal=True, strategy="all_gather", segments="packed"),
    RingCase("bias", bias="hts", layout="contiguous"),
    RingCase("mask", pattern="global", kv_heads=1),
)
# For a GPU: enough heads for every strategy on eight devices, and many tiles.
GPU = _cases(
    _long("long_causal", is_causal=True),
    _long("long_ring", is_causal=True, strategy="ring"),
    _long("long_all_to_all", is_causal=True, strategy="all_to_all", segments="packed"),
    _long("long_all_gather", is_causal=True, strategy="all_gather"),
    _long("long_halo", window=(128, 100), strategy="halo", sinks=True),
    _long("long_mask", pattern="long_global", strategy="ring"),
    _long("long_bias", bias="ts", is_causal=True),
)
TYPICAL = {"ring_attention": TypicalCall(ring_attention, arguments={"axis_name": AXIS}, devices=8)}
