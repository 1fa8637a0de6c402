"""The checks of flash_attention. An error names the argument, the value that it got and the values that it wants."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import dispatch
from jax_kernels.inputs.attention import AttentionInputs, FlashArguments
from jax_kernels.masks import Mask
from jax_kernels.masks import checks as mask_checks
from jax_kernels.masks.limits import Limits, joined
from jax_kernels.ops import checks
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.score_mod.tile_reads import why_not
from jax_kernels.score_mod.trace import ScoreMod, trace

__all__ = ["check"]


def check(given: FlashArguments) -> tuple[AttentionRequest, AttentionInputs]:
    """(request, checked arrays) of a flash_attention call. Raises the errors that flash_attention documents.

    In the arrays, an array mask is bool with four axes, a bias has four axes, sinks are float32 [1, H], and ids,
    lengths and an array q_offset are int32. All restrictions of the keys are combined: parts of a Mask that arguments
    can express, such as causal, become the request's is_causal and window, or the arrays' segment ids and kv_lengths.
    An int q_offset is in the request only. If no pair of a query and a key exists, arrays without an effect are None.
    Arrays may be jax.ShapeDtypeStructs: then so are the returned arrays.
    """
    query, key, value = (checks.checked_array(name, getattr(given, name)) for name in ("query", "key", "value"))
    checks.check_shapes(query, key, value)
    batch, q_length, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    scores = (batch, heads, q_length, kv_length)

    checks.check_flags(is_causal=given.is_causal, return_lse=given.return_lse)
    deterministic, score_mod, softcap, precision = given.deterministic, given.score_mod, given.softcap, given.precision
    if deterministic is not None and not isinstance(deterministic, bool | np.bool_):
        raise TypeError(f"deterministic: got {type(deterministic).__name__}, want True, False or None")
    checks.check_scale("scale", given.scale)
    checks.check_softcap(softcap)
    if score_mod is not None and softcap is not None:
        raise ValueError(f"softcap: got {softcap} with a score_mod, want None: score_mod(score, ...) can begin with it")
    checks.check_names(implementation=given.implementation)
    has_score_mod = score_mod is not None
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        score_mod = _traced(score_mod, has_pairs=0 not in scores)
    if precision is not None and not (isinstance(precision, str) and precision in ("fp32", "tf32")):
        raise ValueError(f"precision: got {precision!r}, want 'fp32', 'tf32' or None")
    if precision is not None and query.dtype != jnp.float32:
        raise ValueError(f"precision: got {precision!r} with {query.dtype} inputs, want None: it is for float32 inputs")

    is_causal, window = checks.checked_window(given.window, bool(given.is_causal))
    each = Limits(
        mask=checked_mask(given.mask, scores),
        is_causal=is_causal,
        window=window,
        segment_ids=_segment_ids(given.segment_ids, (batch, q_length), (batch, kv_length)),
        kv_lengths=checks.checked_lengths(given.kv_lengths, batch),
    )
    limits, bias = joined(each, batch), checked_bias(given.bias, scores, query.dtype)
    mask = limits.mask
    q_segment_ids, kv_segment_ids = limits.segment_ids or (None, None)
    static_offset, q_offset = checks.checked_offset(given.q_offset, batch)
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        mask=mask,
        bias=bias,
        sinks=checks.checked_sinks(given.sinks, heads),
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        kv_lengths=limits.kv_lengths,
        q_offset=q_offset,
        score_mod=score_mod,
        lists=limits.lists,
    )
    request = AttentionRequest(
        op="flash_attention",
        device=dispatch.target_device(query),
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=value.shape[-1],
        dtype=str(query.dtype),
        is_causal=limits.is_causal,
        window=limits.window,
        softcap=None if softcap is None else float(softcap),
        mask_shape=None if mask is None or isinstance(mask, Mask) else tuple(mask.shape),
        has_mask_object=isinstance(mask, Mask),
        has_lists=isinstance(mask, Mask) or limits.lists is not None,
        bias_shape=None if bias is None else tuple(bias.shape),
        bias_dtype=None if bias is None else str(bias.dtype),
        has_sinks=given.sinks is not None,
        has_segment_ids=limits.segment_ids is not None,
        has_kv_lengths=limits.kv_lengths is not None,
        has_score_mod=has_score_mod,
        not_in_tiles=None if score_mod is None else why_not(score_mod),
        not_in_mosaic_tiles=None if score_mod is None else why_not(score_mod, mosaic=True),
        q_offset=static_offset,
        return_lse=bool(given.return_lse),
        deterministic=_deterministic() if deterministic is None else bool(deterministic),
        precision=(precision or "fp32") if query.dtype == jnp.float32 else None,
    )
    return request, inputs if 0 not in scores else _without_pairs(inputs)


def _traced(score_mod: Any, *, has_pairs: bool) -> ScoreMod | None:
    """The score_mod, traced once. has_pairs: whether the call has a pair of a query and a key.

    None if it has no pair and the trace fails because score_mod looks up a value in an empty array.
    """
    try:
        return trace(score_mod)
    except TypeError as error:
        if has_pairs or not mask_checks.is_empty_lookup(error.__cause__):
            raise
        return None


def _without_pairs(inputs: AttentionInputs) -> AttentionInputs:
    """The inputs that have an effect in a call without pairs of a query and a key. The others are None.

    The gradients of the others are 0.
    """
    return AttentionInputs(*inputs[:3], sinks=inputs.sinks, q_offset=inputs.q_offset)


def checked_mask(mask: Any, shape: tuple[int, int, int, int]) -> Any:
    """Checks a mask that broadcasts to `shape`, and returns it: None, a Mask, or a bool array with four axes.

    shape: [B, H, T, S]. An array of fewer axes gets leading axes of length 1. Floats of 0 and 1 that are known when
    tracing become bool. Raises TypeError or ValueError for all else, also for traced floats.
    """
    if mask is None:
        return None
    if isinstance(mask, Mask):
        mask.check_lengths(*shape[2:])
        if mask.batch not in (1, shape[0]) or mask.heads not in (1, shape[1]):
            got = f"a Mask of {mask.batch} batch entries and {mask.heads} heads"
            raise ValueError(f"mask: got {got}, want 1 or {shape[0]} batch entries and 1 or {shape[1]} heads")
        return mask
    if not isinstance(mask, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"mask: got {type(mask).__name__}, want a bool array or a Mask")
    mask_checks.is_boolean("mask", mask)
    full = checks.broadcastable("mask", mask, shape)
    if isinstance(mask, jax.ShapeDtypeStruct):
        return checks.reshaped(mask, full, bool)
    with checks.evaluated_if_known(mask):
        mask, is_mask = mask_checks.boolean("mask", mask)
        if is_mask is not None:
            raise TypeError(
                "mask: got floats that are traced, want bool: write `mask != 0`; an additive mask is a bias"
            )
        return checks.reshaped(mask, full, bool)


def checked_bias(bias: Any, shape: tuple[int, int, int, int], dtype: Any) -> Any:
    """The bias with four axes, each of length 1 or as in `shape` [B, H, T, S]; None stays None.

    dtype: query's. Raises TypeError for a dtype that is neither this nor float32, ValueError for a shape.
    """
    if bias is None:
        return None
    if not isinstance(bias, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"bias: got {type(bias).__name__}, want an array")
    if bias.dtype not in (dtype, jnp.dtype(jnp.float32)):
        or_float32 = "" if dtype == jnp.float32 else " or float32"
        hint = "; a bool one is a mask" if bias.dtype == bool else ""
        raise TypeError(f"bias: got dtype {bias.dtype}, want query's dtype {dtype}{or_float32}{hint}")
    full = checks.broadcastable("bias", bias, shape)
    with checks.evaluated_if_known(bias):
        return checks.reshaped(bias, full, bias.dtype)


def _segment_ids(segment_ids: Any, q_shape: tuple[int, int], kv_shape: tuple[int, int]) -> tuple[Any, Any] | None:
    """(ids of the queries [B, T], ids of the keys [B, S]) as int32; None stays None.

    segment_ids: one array for both, or a pair. Raises TypeError or ValueError.
    """
    if segment_ids is None:
        return None
    want = "want an int32 array [B, T], or a (query, key) pair of them, [B, T] and [B, S]"
    if isinstance(segment_ids, tuple | list):
        if len(segment_ids) != 2:
            raise ValueError(f"segment_ids: got {len(segment_ids)} items, {want}")
        for part, x in zip(("query", "key"), segment_ids, strict=True):
            if x is None:
                raise ValueError(f"segment_ids: got None for {part}, {want}")
        pair = segment_ids
    else:
        pair = (segment_ids, segment_ids)
    for part, x, shape in (("query", pair[0], q_shape), ("key", pair[1], kv_shape)):
        if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            raise TypeError(f"segment_ids: got {type(x).__name__} for {part}, {want}")
        if pair[0] is pair[1] and q_shape != kv_shape:
            raise ValueError(
                f"segment_ids: got one array where query and key have lengths {q_shape[1]} and {kv_shape[1]}, "
                "want a (query, key) pair"
            )
        if tuple(x.shape) != shape:
            raise ValueError(f"segment_ids: got shape {x.shape} for {part}, want {list(shape)}")
    arrays = pair[:1] if pair[0] is pair[1] else pair
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        found = [checks.checked_integers("segment_ids", x, want) for x in arrays]
    else:
        found = mask_checks.ids(("segment_ids",) * len(arrays), arrays, want.removeprefix("want "))
    return found[0], found[-1]


def _deterministic() -> bool:
    """Whether the environment variable XLA_FLAGS asks XLA for deterministic GPU operations."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    on = [
        f
        for f in flags
        if f.partition("=")[0] in ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    ]
    return bool(on) and on[-1].partition("=")[2].lower() in ("", "true", "1")
