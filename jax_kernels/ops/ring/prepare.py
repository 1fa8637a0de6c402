"""Checks and plans a call of ring_attention: its strategies, layout, mask and implementation."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.masks import Mask
from jax_kernels.masks.arrays import Segments
from jax_kernels.masks.limits import joined_band, without_band
from jax_kernels.ops import checks
from jax_kernels.ops.attention import flash_attention
from jax_kernels.ops.attention.checks import check, checked_bias, checked_mask
from jax_kernels.ops.attention.flash_attention import OP
from jax_kernels.ops.ring.layouts import DOCUMENTS, LAYOUTS, Layout, axis_size, not_an_axis
from jax_kernels.ops.ring.planning.choose import chosen, predictions
from jax_kernels.ops.ring.planning.documents import DocumentLayout, DocumentSteps
from jax_kernels.ops.ring.ring_call import RingArrays, RingCall
from jax_kernels.pallas import block_specs
from jax_kernels.tracing.manual_axes import as_varying, varying_axes

__all__ = ["STRATEGIES", "layout_of", "prepare"]


STRATEGIES = ("ring", "halo", "all_to_all", "all_gather", "auto")


def prepare(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    axis_name: str,
    layout: Any,
    strategy: str,
    scale: Any,
    softcap: float | None,
    deterministic: bool | None,
    precision: str | None,
    implementation: str | None,
    sends_ahead: int | None = None,
    mask: Mask | None = None,
    bias: Float[Array, "*#BHTS"] | None = None,
    **arguments: Any,
) -> tuple[RingCall, RingArrays]:
    """Checks and plans a call of ring_attention. Returns (call, arrays), the arguments of attention_of.

    The named parameters are ring_attention's. arguments: its other arguments, which flash_attention takes too, such as
    segment_ids. Raises the errors that ring_attention documents. Must run inside the jax.shard_map.
    """
    devices = axis_size(axis_name)
    if axis_name not in jax.sharding.get_abstract_mesh().manual_axes:  # e.g. a vmap's axis, along which no array varies
        raise not_an_axis(axis_name)
    options: dict[str, Any] = {
        "softcap": softcap,
        "deterministic": deterministic,
        "precision": precision,
        "implementation": implementation,
    }
    if isinstance(arguments.get("segment_ids"), tuple | list):
        raise TypeError("segment_ids: got a pair, want one array: queries and keys are of the same tokens")
    if layout is not None and not isinstance(layout, str):
        layout = _document_steps(layout)
    of_documents, all_ids = isinstance(layout, DocumentSteps) or layout == DOCUMENTS, None
    if of_documents:
        given = {"mask": mask, "bias": bias, **{name: arguments.get(name) for name in ("window", "score_mod")}}
        _check_documents(arguments.get("segment_ids"), given, strategy)
        all_ids, length = arguments["segment_ids"], query.shape[1]
        if devices > 1 and all_ids.shape[1:] == (devices * length,):
            own = lax.axis_index(axis_name) * length
            arguments["segment_ids"] = lax.dynamic_slice_in_dim(all_ids, own, length, 1)
        else:
            all_ids = None
    if "segment_ids" in arguments and not of_documents:
        arguments["segment_ids"] = checks.ranked_over(axis_name, arguments["segment_ids"])
    request, inputs = check(FlashArguments(query=query, key=key, value=value, scale=scale, **options, **arguments))
    is_empty = 0 in (request.batch, request.q_length, request.heads)
    query, key, value = inputs.query, inputs.key, inputs.value
    checks.check_known("query", "length", request.q_length, "the layout depends on it")
    checks.check_known("query", "number of heads", request.heads, "the strategy depends on it")
    if request.q_length != request.kv_length:
        raise ValueError(f"key: got {request.kv_length} tokens, want query's {request.q_length}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: got {strategy!r}, want one of {', '.join(map(repr, STRATEGIES))}")
    if sends_ahead is not None:
        checks.check_number("sends_ahead", sends_ahead)
        if sends_ahead != int(sends_ahead) or sends_ahead < 1:
            raise ValueError(f"sends_ahead: got {sends_ahead}, want an int of 1 or more, or None")
        if strategy not in ("ring", "auto"):
            raise ValueError(f"sends_ahead: got {sends_ahead} with strategy={strategy!r}, want None: it is for rings")
    left, right = request.window or (-1, -1)
    limits: Any = None if left < 0 else left, 0 if request.is_causal else None if right < 0 else right
    if mask is not None:
        mask = _checked_mask(mask, devices, request)
        mask, *limits = (None, *limits) if is_empty else without_band(mask, *limits)
    is_free = mask is None and tuple(limits) == (None, None) and bias is None and inputs.score_mod is None
    arrangement = layout_of(layout, devices, request.q_length, *limits, is_free=is_free)
    ids = inputs.q_segment_ids
    if ids is None:
        mask, ids = _without_segments(mask, arrangement, lax.axis_index(axis_name), query.shape[0])
    query, scale = checks.with_positive_scale(query, scale)
    scores = request.batch, request.heads, request.q_length, devices * request.q_length
    bias = checked_bias(bias, scores, query.dtype)
    if is_empty:  # no device computes anything
        OP.choose(request, implementation)  # raises for a name that cannot be served
        ids = bias = all_ids = None
    arrays = RingArrays(query, key, value, ids, inputs.sinks, mask, inputs.score_mod, bias, all_ids)
    arrays = as_varying(arrays, varying_axes(arrays) | {axis_name})
    options = options | {"scale": scale}
    row = block_specs.ring_row(
        request.device.compute_capability,
        tokens=request.q_length,
        is_windowed=arrangement.limits["window"] is not None,
    )
    call = RingCall(
        layout=arrangement,
        axis_name=axis_name,
        strategy="ring",
        differentiated="ring",
        sends_ahead=row.sends_ahead if sends_ahead is None else sends_ahead,
        permutes_up_to=row.permutes_up_to,
        dead=() if mask is None else arrangement.dead_steps(joined_band(mask, *limits)),
        by_xla=implementation == "xla"
        or (implementation is None and flash_attention.OP.choose(request).implementation == "xla"),
        options=tuple(options.items()),
    )
    if is_empty:
        return call, arrays
    found = predictions(arrangement, arrays, len(call.steps), row.costs, is_free=sends_ahead is None)
    strategy, differentiated = chosen(strategy, arrangement, arrays, found)
    if {strategy, differentiated} == {"ring"} and devices > 2 and ids is not None and all_ids is None:
        arrays = _with_all_ids(arrays, axis_name)
    return dataclasses.replace(call, strategy=strategy, differentiated=differentiated, predictions=found), arrays


def _with_all_ids(arrays: RingArrays, axis_name: Any) -> RingArrays:
    """The arrays with the ids of all devices. Otherwise each step of a ring sends ids by a permute of its own, which
    XLA does not overlap with a kernel.

    The device's own ids come from the result too, so that the first step waits for it, and keys are sent behind it.
    """
    ids = arrays.segment_ids
    all_ids = lax.all_gather(ids, axis_name, axis=1, tiled=True)
    own = lax.dynamic_slice_in_dim(all_ids, lax.axis_index(axis_name) * ids.shape[1], ids.shape[1], 1)
    return arrays._replace(segment_ids=own, all_ids=all_ids)


def _checked_mask(mask: Any, devices: int, request: Any) -> Mask:
    """The mask, checked for the lengths of the whole sequence. request: of one device's tokens.

    Raises TypeError for another type than masks.Mask, and ValueError for sizes that do not fit.
    """
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask: got {type(mask).__name__}, want a masks.Mask of the whole sequence, or None; masks.dense makes one "
            "of an array"
        )
    length = devices * request.q_length
    return checked_mask(mask, (request.batch, request.heads, length, length)).unprepared


def _without_segments(mask: Mask | None, layout: Layout, index: Any, batch: int) -> tuple[Mask | None, Any]:
    """(the mask without its masks.segments, the segment ids of this device's tokens [batch, T]).

    Only a `segments` with one array of ids for queries and keys is taken out, alone or as a factor of &. Then the rest
    of the mask may be None. Without one, returns (mask, None). index: this device's index, traced.
    """
    parts = () if mask is None else mask.factors
    for part in parts:
        if isinstance(part, Segments) and part.q_ids is part.kv_ids:
            rest = [other for other in parts if other is not part]
            ids = jnp.broadcast_to(part.q_ids[:, layout.positions(index)], (batch, layout.length))
            return (functools.reduce(operator.and_, rest) if rest else None), ids
    return mask, None


def _document_steps(layout: Any) -> DocumentSteps:
    """The DocumentSteps of a layout that is no str. Raises TypeError for another type than DocumentLayout."""
    found = layout.steps if isinstance(layout, DocumentLayout) else layout
    if not isinstance(found, DocumentSteps):
        raise TypeError(f"layout: got {type(layout).__name__}, want a str, a DocumentLayout, its `steps`, or None")
    return found


def _check_documents(ids: Any, given: dict[str, Any], strategy: str) -> None:
    """Raises an error for arguments that the layout "documents" does not support.

    ids: the argument segment_ids. given: the values of other arguments, by name. All have to be None.
    """
    if ids is None:
        raise ValueError("segment_ids: got None with layout='documents', want DocumentLayout.segment_ids of the tokens")
    if getattr(ids, "dtype", None) != jnp.int32:
        kind = getattr(ids, "dtype", type(ids).__name__)
        raise TypeError(f"segment_ids: got {kind} with layout='documents', want the int32 of DocumentLayout")
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: got {_short(value)} with layout='documents', want None")
    if strategy not in ("ring", "auto"):
        raise ValueError(f"strategy: got {strategy!r} with layout='documents', want 'ring' or 'auto'")


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, int | tuple | list) else type(value).__name__


def layout_of(name: Any, devices: int, length: int, left: int | None, right: int | None, *, is_free: bool) -> Layout:
    """The checked Layout of ring_attention. Raises ValueError for an unknown name, or a length that does not fit.

    name: a name, or DocumentSteps; None chooses "zigzag", or "contiguous" if is_free. length: the tokens of one device.
    left, right: the limits of the mask, None for no limit. is_free: whether the order of the tokens has no effect on
    the result.
    """
    name = ("contiguous" if is_free else "zigzag") if name is None else name
    documents = name if isinstance(name, DocumentSteps) else None
    if documents is not None and (documents.devices, documents.length) != (devices, length):
        raise ValueError(
            f"layout: got documents for {documents.devices} devices with {documents.length} tokens each, want "
            f"{devices} devices with {length} tokens each"
        )
    name = DOCUMENTS if documents is not None else name
    if name not in (*LAYOUTS, DOCUMENTS):
        names = ", ".join(map(repr, (*LAYOUTS, DOCUMENTS)))
        raise ValueError(f"layout: got {name!r}, want one of {names}, a DocumentLayout, or None")
    if name == "zigzag" and length % 2:
        raise ValueError(f"query: got {length} tokens on each device with layout='zigzag', want an even number")
    # One device has all tokens of each document, in sequence order.
    name = "contiguous" if devices == 1 else name
    return Layout(name=name, devices=devices, length=length, left=left, right=right, documents=documents)
