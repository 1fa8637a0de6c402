"""Attention over some of the keys, whose results are added to the results over other keys.

A ring's step sees one device's keys. Pair, Visitors and BackwardInputs hold the arrays of such calls.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jax_kernels.inputs.attention import AttentionInputs
from jax_kernels.ops.attention.vjp import attention_forward, attention_gradients
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.pallas.attention.passes import row_norms
from jax_kernels.pallas.attention.sm90.forward.launch import reads_key_norms

__all__ = [
    "BackwardInputs",
    "Pair",
    "Visitors",
    "adds_dquery",
    "forward_onto",
    "gradients_onto",
    "key_norms",
    "log_sum",
    "merged",
    "merged_exactly",
    "weight",
    "with_norms",
]

# Above this head_dim the Hopper kernel has no registers for the result of the earlier steps.
WIDEST_JOINED = 128


class Pair(NamedTuple):
    """Keys and values, or their gradients, [B, T, Hkv, D] each, that devices send together.

    arrays: (key, value), or one array [2, B, T, Hkv, D] with both, which `of` makes if the shapes are equal. A kernel
    reads its half of the array in place, and writes both gradients as one array. The halves have an axis of their own:
    if they were halves of the batch axis, devices that shard the batch would have to exchange them.
    """

    arrays: tuple[jax.Array, ...]

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array) -> "Pair":
        """The Pair of key and value: copied into one array if their shapes are equal, else two arrays."""
        if key.shape != value.shape:
            return cls((key, value))
        if _has_auto_axis():
            return cls((jnp.stack([key, value]),))
        # A kernel writes both gradients as one array [2 B, T, Hkv, D]. This reshape does not copy it.
        return cls((jnp.concatenate([key, value]).reshape(2, *key.shape),))

    @property
    def key(self) -> jax.Array:
        return self.arrays[0] if len(self.arrays) == 2 else self.arrays[0][0]

    @property
    def value(self) -> jax.Array:
        return self.arrays[1] if len(self.arrays) == 2 else self.arrays[0][1]


def _has_auto_axis() -> bool:
    """Whether XLA's partitioner may shard arrays: the mesh of the current trace has an Auto axis of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(kind == AxisType.Auto and size > 1 for kind, size in kinds)


class Visitors(NamedTuple):
    """One device's keys, values and segment ids, which travel round the ring to the other devices.

    segment_ids: int32 [B, T], or None. key_norms: float32 [B, Hkv], the largest squared norm of a key of each head;
    None if the kernels do not read it.
    """

    pair: Pair
    segment_ids: Any
    key_norms: Any = None


class BackwardInputs(NamedTuple):
    """The values that a backward reads for each query.

    lse, delta: the row terms, float32 [B, H, T]. dout: the cotangent of out, [B, T, H, Dv]. lse_lo: [B, H, T] with a
    bias or a score_mod, the exact log-sum-exp minus lse; else None.
    """

    lse: Any
    delta: Any
    dout: Any
    lse_lo: Any = None


def weight(lse: jax.Array, total: jax.Array) -> jax.Array:
    """exp(lse - total) as [B, T, H, 1], from lse and total [B, H, T]; 0 where lse is -inf."""
    found = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - jnp.where(jnp.isneginf(total), 0, total)))
    return found.swapaxes(1, 2)[..., None]


def log_sum(one: jax.Array, other: jax.Array) -> jax.Array:
    """log(exp(one) + exp(other)), elementwise; unlike jnp.logaddexp with derivative 0 where both are -inf."""
    is_dead = jnp.isneginf(jnp.maximum(one, other))
    return jnp.where(is_dead, -jnp.inf, jnp.logaddexp(*(jnp.where(is_dead, 0, x) for x in (one, other))))


def merged(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
    """(out, lse) over the keys of both arguments, each an (out, lse) of the same queries over different keys.

    out: [B, T, H, Dv]. lse: [B, H, T].
    """
    lse = log_sum(one[1], other[1])
    return one[0] * weight(one[1], lse) + other[0] * weight(other[1], lse), lse


def merged_exactly(one: Any, other: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out, lse, lse_lo) over the keys of both arguments, each an (out, lse, lse_lo) of the same queries.

    With scores far from 0, float32 loses digits of the log-sum-exp. lse + lse_lo is exact.
    """
    highest = jnp.maximum(one[1], other[1])
    is_dead = jnp.isneginf(highest)
    highest = jnp.where(is_dead, 0, highest)
    shares = [jnp.where(jnp.isneginf(lse), 0, jnp.exp((lse - highest) + lse_lo)) for _, lse, lse_lo in (one, other)]
    total = jnp.where(is_dead, 1, shares[0] + shares[1])
    log = jnp.log(total)
    lse = highest + log
    lse_lo = jnp.where(is_dead, 0, log + (highest - lse))
    weights = [(share / total).swapaxes(1, 2)[..., None] for share in shares]
    return one[0] * weights[0] + other[0] * weights[1], jnp.where(is_dead, -jnp.inf, lse), lse_lo


def key_norms(planned: Any, inputs: AttentionInputs) -> jax.Array | None:
    """The largest squared norm of a key of each head, float32 [B, Hkv], for a planned call without a mask.

    None if the call does not read it: if its kernel would not use it, with another implementation than "mosaic_gpu",
    and if XLA may partition the call.
    """
    if planned.implementation != "mosaic_gpu" or is_partitioned():
        return None
    if not reads_key_norms(inputs, planned.options, planned.config.forward):
        return None
    return row_norms.longest(inputs.key, interpret=planned.interpret)


def with_norms(planned: Any, inputs: AttentionInputs, pair: Pair) -> AttentionInputs:
    """The inputs of a step with key_norms, the largest squared norm of a key of each head [B, Hkv].

    pair: the step's keys and values, joined in one array or as two arrays. The norms are computed from the joined
    array. The inputs are returned unchanged if there are two arrays, with a mask, with another implementation than
    "mosaic_gpu", and if XLA may partition the call.
    """
    if planned.implementation != "mosaic_gpu" or len(pair.arrays) == 2 or is_partitioned() or inputs.mask is not None:
        return inputs
    (array,) = pair.arrays
    array = array.reshape(-1, *array.shape[2:])
    return inputs._replace(key_norms=row_norms.longest(array, interpret=planned.interpret, entries=len(array) // 2))


def forward_onto(planned: Any, inputs: AttentionInputs, total: Any, *, is_last: bool) -> tuple[jax.Array, jax.Array]:
    """Runs a planned call and merges its (out, lse) with `total`, the (out, lse) of the same queries over other keys.

    total: None if there are no other keys. Returns (out [B, T, H, Dv], lse [B, H, T]), both float32, except that out
    may have query's dtype if is_last is True.
    """
    if planned.implementation != "mosaic_gpu":
        planned = dataclasses.replace(planned, out_dtype="float32")
        out, lse, *_ = attention_forward(planned, inputs)
        assert lse is not None
        return (out, lse) if total is None else merged(total, (out, lse))
    joins = total is not None and inputs.value.shape[-1] <= WIDEST_JOINED
    is_rounded = is_last and (joins or total is None)
    # The send of the next keys occupies some SMs for a while, and a reach makes some tiles short. Hence dynamic tiles.
    blocks = dataclasses.replace(planned.config, forward=dataclasses.replace(planned.config.forward, dynamic=True))
    dtype = str(inputs.query.dtype) if is_rounded else "float32"
    planned = dataclasses.replace(planned, out_dtype=dtype, config=blocks)
    if joins:
        inputs = inputs._replace(earlier_out=total[0], earlier_lse=total[1])
    out, lse, *_ = attention_forward(planned, inputs)
    assert lse is not None
    return (out, lse) if total is None or joins else merged(total, (out, lse))


def gradients_onto(
    planned: Any, inputs: AttentionInputs, backward: BackwardInputs, dquery: jax.Array, scale: float
) -> tuple[jax.Array, Pair]:
    """The gradients of one planned call: (dquery + query's gradient / scale, Pair of the gradients of key and value).

    All are float32. dquery: float32 [B, T, H, D]. planned: must have the option float32_gradients.
    """
    if adds_dquery(planned):
        found = attention_gradients(planned, inputs, backward.lse, backward.delta, backward.dout, dquery)
        return found.query, Pair.of(found.key, found.value)
    found = attention_gradients(planned, inputs, backward.lse, backward.delta, backward.dout)
    return dquery + found.query.astype(jnp.float32) / scale, Pair.of(found.key, found.value)


def adds_dquery(planned: Any) -> bool:
    """Whether the backward's kernel itself adds query's gradient to the array `dquery` of the earlier steps.

    It does with "mosaic_gpu", if the call is not deterministic. If XLA may partition the call, it does not: such a
    kernel would get whole arrays on each device.
    """
    is_alone = not planned.options.deterministic and not is_partitioned()
    return planned.implementation == "mosaic_gpu" and is_alone
