"""Advice for a recorded call: each function looks for one cause of lost time, and returns an Advice or None.

A Variant is the call after the change, which `check=True` times.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.analysis.costs import Cost, cost
from jax_kernels.analysis.marks import Runs
from jax_kernels.analysis.report import Advice, shape_text
from jax_kernels.device import DeviceInfo
from jax_kernels.dispatch import Plan
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.ops.normalization.implementations import NormRequest
from jax_kernels.ops.planned_op import TunableCall
from jax_kernels.ops.ring.recorded import RingRequest

__all__ = ["Found", "Seen", "found_in"]

_BLOCK = 128
_DEAD = 0.5  # of the blocks of a mask, from which on it counts as mostly dead
_PADDING = 1.2  # the padded head_dim over the given one, from which on there is an advice


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """A recorded call with its plan and the number of its runs."""

    tunable: TunableCall
    plan: Plan
    runs: Runs

    @property
    def request(self) -> Any:
        return self.tunable.request

    @property
    def device(self) -> DeviceInfo:
        return self.tunable.request.device

    def cost(self, tunable: TunableCall | None = None) -> Cost | None:
        """The work of all runs; of another call, for as many runs."""
        call = tunable or self.tunable
        members = call.parts or ((call.request, call.inputs),)
        if self.runs.backward:
            members = tuple((r.differentiated() if isinstance(r, RingRequest) else r, x) for r, x in members)
        runs = (False, self.runs.forward), (True, self.runs.backward)
        found = [(cost(*member, backward=backward), times) for member in members for backward, times in runs]
        works = [work.times(times * self.runs.size) for work, times in found if work is not None]
        if len(works) < len(found) or not works:
            return None
        is_bound = any(work.is_bound for work in works)
        return dataclasses.replace(
            works[0], flops=sum(x.flops for x in works), bytes=sum(x.bytes for x in works), is_bound=is_bound
        )

    def seconds(self, tunable: TunableCall | None = None) -> float | None:
        work = self.cost(tunable)
        return None if work is None else work.seconds(self.device)

    def bytes_ms(self, count: float) -> float | None:
        """Milliseconds to move `count` bytes in each run."""
        bandwidth = self.device.memory_bandwidth
        runs = (self.runs.forward + self.runs.backward) * self.runs.size
        return None if bandwidth is None else count * runs / bandwidth * 1e3


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """An advice without its measured times, and the call after the change; None if it cannot be timed."""

    advice: Advice
    variant: TunableCall | None = None


def _advice(seen: Seen, kind: str, text: str, saves_ms: float | None) -> Advice:
    saves = None if saves_ms is None or saves_ms <= 0 else saves_ms
    return Advice(kind=kind, op=seen.plan.op, shape=shape_text(seen.request), text=text, saves_ms=saves)


def _saved_ms(seen: Seen, variant: TunableCall) -> float | None:
    before, after = seen.seconds(), seen.seconds(variant)
    return None if before is None or after is None else (before - after) * 1e3


def _with_fields(record: Any, **changes: Any) -> Any:
    """The record with these fields replaced, without the fields that it lacks."""
    names = {field.name for field in dataclasses.fields(record)}
    return dataclasses.replace(record, **{name: x for name, x in changes.items() if name in names})


def _planned(tunable: TunableCall, request: Any, inputs: Any, options: Any) -> TunableCall:
    """The call with another request, planned again."""
    choice = tunable.op.choose(request, tunable.named)
    call = dataclasses.replace(
        tunable.call, implementation=choice.implementation, config=choice.config, options=options
    )
    return dataclasses.replace(tunable, request=request, call=call, inputs=inputs)


def _in_dtype(tunable: TunableCall, dtype: str) -> TunableCall | None:
    """The call of float32 arrays in another dtype; None if no implementation takes it."""
    request, call = tunable.request, tunable.call
    narrow = lambda name: dtype if getattr(request, name, None) == "float32" else getattr(request, name, None)
    changed = _with_fields(
        request,
        dtype=dtype,
        out_dtype=narrow("out_dtype"),
        w_dtype=narrow("w_dtype"),
        bias_dtype=narrow("bias_dtype"),
        precision=None,
    )
    options = _with_fields(call.options, out_dtype=dtype, precision=None)

    def cast(x: Any) -> Any:
        if not hasattr(x, "dtype") or x.dtype != jnp.float32 or len(x.shape) < 2:
            return x
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)) if _is_spec(x) else x.astype(dtype)

    moved = jax.tree.map(cast, tunable.inputs, is_leaf=lambda x: not isinstance(x, tuple | list | dict))
    try:
        found = _planned(tunable, changed, moved, options)
    except NotImplementedError:
        return None
    return dataclasses.replace(found, call=_with_fields(found.call, out_dtype=dtype))


def _is_spec(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _wide(seen: Seen) -> Found | None:
    """float32 on a device whose tensor cores multiply 16 bits."""
    device, request = seen.device, seen.request
    if getattr(request, "dtype", None) != "float32" or not device.has_tensor_cores or isinstance(request, NormRequest):
        return None
    dtype = device.optimal_dtype
    variant = _in_dtype(seen.tunable, dtype)
    if variant is None:
        return None
    precision = getattr(request, "precision", None)
    how = "tf32" if precision == "tf32" else "exact float32, without tensor cores"
    text = f"its matmuls are {how}: {dtype} uses the tensor cores, and moves half of the bytes"
    if precision != "tf32" and hasattr(request, "precision") and device.supports_bf16:
        text += "; precision='tf32' uses them too"
    return Found(advice=_advice(seen, "dtype", text, _saved_ms(seen, variant)), variant=variant)


def _narrow(seen: Seen) -> Found | None:
    """A 16-bit dtype that the device has no fast arithmetic for."""
    device, dtype = seen.device, getattr(seen.request, "dtype", None)
    if dtype == "bfloat16" and not device.supports_bf16:
        text = f"{device.name} has no bfloat16 arithmetic; its dtype to train in is {device.optimal_dtype}"
        return Found(advice=_advice(seen, "dtype", text, None))
    if dtype in ("bfloat16", "float16") and device.compute_capability is None:
        text = f"{device.name} computes {dtype} by conversions; float32 avoids them"
        return Found(advice=_advice(seen, "dtype", text, None))
    return None


def _padded(seen: Seen) -> Found | None:
    """A head_dim that the kernels pad with zeros."""
    request, name = seen.request, seen.plan.implementation
    if not isinstance(request, AttentionRequest) or name not in ("mosaic_gpu", "triton"):
        return None
    widest = max(request.head_dim, request.v_head_dim)
    padded = -(-widest // 64) * 64 if name == "mosaic_gpu" else 1 << max(widest - 1, 15).bit_length()
    if padded < _PADDING * widest:
        return None
    lost = 1 - widest / padded
    seconds = seen.seconds()
    text = f"{name} pads head_dim {widest} to {padded}: {100 * lost:.0f} % of the matmuls' work is on zeros"
    # The padded work takes 1 / (1 - lost) of the time of the given work.
    saves = None if seconds is None else seconds * 1e3 * lost / (1 - lost)
    return Found(advice=_advice(seen, "head_dim", text, saves))


def _fallback(seen: Seen) -> Found | None:
    """A call that only plain JAX serves, on a GPU that has kernels for others."""
    plan, request = seen.plan, seen.request
    is_choice = seen.tunable.named is None and plan.implementation == "xla"
    if not is_choice or seen.device.compute_capability is None or not plan.why.startswith("no other"):
        return None
    reasons = "; ".join(f"{name}: {reason}" for name, reason in plan.passed_over)
    saves = None
    if isinstance(request, AttentionRequest):  # plain JAX writes and reads the scores, in float32
        scores = 4.0 * request.batch * request.heads * request.q_length * request.kv_length
        saves = seen.bytes_ms(2 * scores)
    return Found(
        advice=_advice(seen, "fallback", f"plain JAX computes it, because no kernel serves it: {reasons}", saves)
    )


def _dead_blocks(keep: np.ndarray) -> float:
    """The share of the blocks of 128 x 128 pairs of a [.., T, S] array of bools that have no True."""
    *_, rows, columns = keep.shape
    starts = [np.arange(0, length, _BLOCK) for length in (rows, columns)]
    sums = np.add.reduceat(np.add.reduceat(keep, starts[0], axis=-2, dtype=np.int32), starts[1], axis=-1)
    return float((sums == 0).mean())


def _known(x: Any) -> np.ndarray | None:
    if x is None or not isinstance(x, jax.Array | np.ndarray) or isinstance(x, jax.core.Tracer):
        return None
    return np.asarray(x) if x.ndim == 4 and x.shape[2] > 1 and x.shape[3] > 1 else None


def _dense_mask(seen: Seen) -> Found | None:
    """A known mask array that is a causal mask, or whose blocks are mostly dead."""
    request = seen.request
    if not isinstance(request, AttentionRequest) or (keep := _known(seen.tunable.inputs.mask)) is None:
        return None
    rows, columns = keep.shape[2:]
    causal = np.arange(rows)[:, None] + (request.q_offset or 0) >= np.arange(columns)
    if request.q_offset is not None and bool((keep == causal).all()):
        changed = dataclasses.replace(request, is_causal=True, mask_shape=None)
        options = dataclasses.replace(seen.tunable.call.options, is_causal=True)
        variant = _planned(seen.tunable, changed, seen.tunable.inputs._replace(mask=None), options)
        text = "its mask is an array with a causal mask's values; is_causal=True reads no array"
        saves = seen.bytes_ms(float(keep.size))
        return Found(advice=_advice(seen, "mask", text, saves), variant=variant)
    dead = _dead_blocks(keep)
    if dead < _DEAD or seen.plan.implementation == "xla":
        return None
    if seen.plan.implementation == "cudnn":
        seconds = seen.seconds()
        saves = None if seconds is None else seconds * 1e3 * dead
        text = f"{100 * dead:.0f} % of its mask's blocks are dead, and cudnn skips none; dynamic_mask_attention does"
        return Found(advice=_advice(seen, "mask", text, saves))
    text = (
        f"{100 * dead:.0f} % of its mask's blocks are dead, and each call reads the array to find them; "
        "a Mask of jax_kernels.masks with prepare_mask finds them once"
    )
    return Found(advice=_advice(seen, "mask", text, seen.bytes_ms(float(keep.size))))


def _mask_as_bias(seen: Seen) -> Found | None:
    """A known bias that masks whole blocks by -inf, which a kernel visits all the same."""
    request = seen.request
    if not isinstance(request, AttentionRequest) or (bias := _known(seen.tunable.inputs.bias)) is None:
        return None
    dead = _dead_blocks(np.asarray(bias, np.float32) != -np.inf)
    if dead < _DEAD or seen.plan.implementation not in ("mosaic_gpu", "triton", "cudnn"):
        return None
    seconds = seen.seconds()
    text = f"{100 * dead:.0f} % of its bias's blocks hold only -inf, and none is skipped; a mask skips them"
    return Found(advice=_advice(seen, "bias", text, None if seconds is None else seconds * 1e3 * dead))


_CAUSES: tuple[Callable[[Seen], Found | None], ...] = (
    _fallback,
    _wide,
    _narrow,
    _padded,
    _dense_mask,
    _mask_as_bias,
)


def found_in(seen: Seen) -> Iterator[Found]:
    """The advice for a call, with the call after each change."""
    for cause in () if seen.tunable.parts else _CAUSES:
        if (found := cause(seen)) is not None:
            yield found
