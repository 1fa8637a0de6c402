"""What flash_attention takes: bad input raises here, with the argument, what it got and what it wants."""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import dispatch
from jax_kernels.attention_inputs import AttentionInputs
from jax_kernels.masks import Mask
from jax_kernels.masks import checks as mask_checks
from jax_kernels.ops.attention.mask_arguments import MaskArguments, as_arguments
from jax_kernels.ops.attention.table import AttentionRequest
from jax_kernels.score_mod.tiles import why_not
from jax_kernels.score_mod.trace import trace

__all__ = ["check"]

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
MAX_HEAD_DIM = 256
HEADS = "[batch, length, heads, head_dim]"
# A position, and the limit of a window, stay below these: their sums fit an int32.
FARTHEST = mask_checks.FARTHEST
WIDEST = 1 << 29


def check(
    query, key, value, *, bias=None, mask=None, is_causal=False, window=None, segment_ids=None, kv_lengths=None,
    q_offset=0, score_mod=None, sinks=None, scale=None, softcap=None, return_lse=False, deterministic=None,
    precision=None, implementation=None, **unknown,
) -> tuple[AttentionRequest, AttentionInputs]:  # fmt: skip
    """The request behind a call and its arrays in the kernels' form; raises what flash_attention documents."""
    for name in unknown:
        raise TypeError(f"flash_attention got an unexpected keyword argument {name!r}")
    query, key, value = (checked_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    check_shapes(query, key, value)
    batch, q_length, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    scores = (batch, heads, q_length, kv_length)

    check_flags(is_causal=is_causal, return_lse=return_lse)
    if deterministic is not None and not isinstance(deterministic, bool | np.bool_):
        raise TypeError(f"deterministic: got {type(deterministic).__name__}, want True, False or None")
    check_number("scale", scale)
    check_softcap(softcap)
    if score_mod is not None and softcap is not None:
        raise ValueError(f"softcap: got {softcap} with a score_mod, want None: score_mod(score, ...) can begin with it")
    check_implementation(implementation)
    score_mod = None if score_mod is None else trace(score_mod)
    if precision not in (None, "fp32", "tf32"):
        raise ValueError(f"precision: got {precision!r}, want 'fp32', 'tf32' or None")
    if precision is not None and query.dtype != jnp.float32:
        raise ValueError(f"precision: got {precision!r} with {query.dtype} inputs, want None: it is for float32 inputs")

    is_causal, window = checked_window(window, bool(is_causal))
    mask, bias = _mask(mask, scores), _bias(bias, scores, query.dtype)
    ids = _segment_ids(segment_ids, (batch, q_length), (batch, kv_length))
    lengths = checked_lengths(kv_lengths, batch)
    call = MaskArguments(mask, is_causal, window, None if segment_ids is None else ids, lengths)
    reads_lists = implementation in (None, "mosaic_gpu")
    mask, is_causal, window, segment_ids, kv_lengths = as_arguments(call, batch, reads_lists=reads_lists)
    q_segment_ids, kv_segment_ids = segment_ids or (None, None)
    static_offset, q_offset = checked_offset(q_offset, batch)
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        mask=mask,
        bias=bias,
        sinks=checked_sinks(sinks, heads),
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        kv_lengths=kv_lengths,
        q_offset=q_offset,
        score_mod=score_mod,
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
        is_causal=is_causal,
        window=window,
        softcap=None if softcap is None else float(softcap),
        mask_shape=None if mask is None or isinstance(mask, Mask) else tuple(mask.shape),
        has_mask_object=isinstance(mask, Mask),
        bias_shape=None if bias is None else tuple(bias.shape),
        bias_dtype=None if bias is None else str(bias.dtype),
        has_sinks=sinks is not None,
        has_segment_ids=segment_ids is not None,
        has_kv_lengths=kv_lengths is not None,
        has_score_mod=score_mod is not None,
        not_in_tiles=None if score_mod is None else why_not(score_mod),
        not_in_mosaic_tiles=None if score_mod is None else why_not(score_mod, mosaic=True),
        q_offset=static_offset,
        return_lse=bool(return_lse),
        deterministic=_deterministic() if deterministic is None else bool(deterministic),
        precision=(precision or "fp32") if query.dtype == jnp.float32 else None,
    )
    return request, inputs


def _names(dtypes: tuple[Any, ...]) -> str:
    *others, last = (str(dtype) for dtype in dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def check_shapes(query: Any, key: Any, value: Any, dtypes: tuple[Any, ...] = DTYPES) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_heads(name, x, query.dtype, dtypes=dtypes)
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: got batch {x.shape[0]}, want query's batch {query.shape[0]}")
    batch, q_length, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    if key.shape[-1] != head_dim:
        raise ValueError(f"key: got head_dim {key.shape[-1]}, want query's head_dim {head_dim}")
    if value.shape[1:3] != (kv_length, kv_heads):
        raise ValueError(f"value: got (length, heads) {value.shape[1:3]}, want key's {(kv_length, kv_heads)}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"key: got {kv_heads} heads, want a divisor of query's {heads} heads")
    if 0 in (batch, q_length, heads, kv_length):
        raise ValueError(f"query, key: got shapes {query.shape} and {key.shape}, want no axis of length 0")


def check_heads(name: str, x: Any, dtype: Any, axes: str = HEADS, dtypes: tuple[Any, ...] = DTYPES) -> None:
    """That query, key or value is an array of heads, in query's dtype, which is one of `dtypes`."""
    if x.ndim != 4:
        raise ValueError(f"{name}: got shape {x.shape}, want 4 axes {axes}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {x.dtype}, want {_names(dtypes)}")
    if x.dtype != dtype:
        raise TypeError(f"{name}: got dtype {x.dtype}, want query's dtype {dtype}")
    if not 0 < x.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: got head_dim {x.shape[3]}, want 1 to {MAX_HEAD_DIM}")


def checked_array(name: str, x: Any, dtypes: tuple[Any, ...] = DTYPES) -> Any:
    """A jax.Array, or a ShapeDtypeStruct. A NumPy array becomes one if its dtype is one of `dtypes`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, np.ndarray | np.generic) and x.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {x.dtype}, want {_names(dtypes)}")
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name}: got {type(x).__module__}.{type(x).__name__}, want a jax.Array")
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def reshaped(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return jnp.asarray(x, dtype).reshape(shape)


def check_number(name: str, x: Any) -> None:
    if x is None:
        return
    if not isinstance(x, int | float | np.integer | np.floating) or isinstance(x, bool):
        raise TypeError(f"{name}: got {type(x).__name__}, want a number that is known when tracing")
    if not math.isfinite(x):
        raise ValueError(f"{name}: got {x}, want a finite number")


def check_softcap(softcap: Any) -> None:
    check_number("softcap", softcap)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}, want a number above 0, or None")


def check_implementation(implementation: Any) -> None:
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(f"implementation: got {type(implementation).__name__}, want a name or None")


def _is_int(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}: got {type(flag).__name__}, want a bool that is known when tracing")


def by_name(op: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """The positional arguments of an op under their names."""
    names = ("query", "key", "value")
    if len(args) > len(names):
        raise TypeError(f"{op} takes {len(names)} positional arguments (query, key, value), got {len(args)}")
    return dict(zip(names, args, strict=False))


def with_positive_scale(query: jax.Array, scale: float | None) -> tuple[jax.Array, float]:
    """A query and a scale (None: 1 / sqrt(D)) of the same scores; kernels take the maximum before they scale."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if scale > 0:
        return query, scale
    return query * jnp.asarray(0 if scale == 0 else -1, query.dtype), -scale or 1.0


def checked_window(window: Any, is_causal: bool) -> tuple[bool, tuple[int, int] | None]:
    """(is_causal, window) as AttentionOptions holds them: a right side of 0 is is_causal."""
    if window is None:
        return is_causal, None
    sides = window if isinstance(window, tuple | list) else (window, window)
    want = "want an int from 0 to 2**29, or (left, right) of them; -1 is no limit on that side"
    if not all(side is None or _is_int(side) for side in sides):
        raise TypeError(f"window: got {window!r}, {want}")
    if len(sides) != 2 or not all(side is None or -1 <= side < WIDEST for side in sides):
        raise ValueError(f"window: got {window!r}, {want}")
    left, right = (-1 if side is None else int(side) for side in sides)
    is_causal = is_causal or right == 0
    right = 0 if is_causal else right
    limits = left != -1 or right > 0
    return is_causal, (left, right) if limits else None


def _broadcastable(name: str, x: Any, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """x's shape with four axes, each of length 1 or that of `shape`."""
    full = (1,) * (4 - x.ndim) + tuple(x.shape)
    if x.ndim > 4 or any(got not in (1, wanted) for got, wanted in zip(full, shape, strict=True)):
        raise ValueError(f"{name}: got shape {x.shape}, want a shape broadcastable to [B, H, T, S] = {shape}")
    return full


def _mask(mask: Any, shape: tuple[int, int, int, int]) -> Any:
    """A Mask, a bool mask with four axes, or None."""
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
    full = _broadcastable("mask", mask, shape)
    if isinstance(mask, jax.ShapeDtypeStruct):
        return reshaped(mask, full, bool)
    mask, is_mask = mask_checks.boolean("mask", mask)
    if is_mask is not None:
        raise TypeError("mask: got floats that are traced, want bool: write `mask != 0`; an additive one is a bias")
    return reshaped(mask, full, bool)


def _bias(bias: Any, shape: tuple[int, int, int, int], dtype: Any) -> Any:
    """A bias with four axes, or None."""
    if bias is None:
        return None
    if not isinstance(bias, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"bias: got {type(bias).__name__}, want an array")
    if bias.dtype not in (dtype, jnp.dtype(jnp.float32)):
        or_float32 = "" if dtype == jnp.float32 else " or float32"
        hint = "; a bool one is a mask" if bias.dtype == bool else ""
        raise TypeError(f"bias: got dtype {bias.dtype}, want query's dtype {dtype}{or_float32}{hint}")
    return reshaped(bias, _broadcastable("bias", bias, shape), bias.dtype)


def checked_sinks(sinks: Any, heads: int) -> Any:
    """[1, H] float32, or None."""
    if sinks is None:
        return None
    if not isinstance(sinks, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"sinks: got {type(sinks).__name__}, want an array")
    if sinks.dtype not in DTYPES:
        raise TypeError(f"sinks: got dtype {sinks.dtype}, want bfloat16, float16 or float32")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks: got shape {sinks.shape}, want [heads] = ({heads},)")
    return reshaped(sinks, (1, heads), jnp.float32)


def checked_integers(name: str, x: Any, want: str, within: tuple[int, int] | None = None) -> Any:
    """An int32 array, or its spec. within: as in masks.checks.int32, which converts other dtypes."""
    if not isinstance(x, jax.Array | np.ndarray | np.integer | list | tuple | jax.ShapeDtypeStruct):
        raise TypeError(f"{name}: got {type(x).__name__}, want {want}")
    if isinstance(x, list | tuple | np.integer):
        x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: got dtype {x.dtype}, want int32")
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.int32))
    return mask_checks.int32(name, x, want, within=within)


def _segment_ids(segment_ids: Any, q_shape: tuple[int, int], kv_shape: tuple[int, int]) -> tuple[Any, Any]:
    """([B, T], [B, S]) int32, or Nones."""
    if segment_ids is None:
        return None, None
    want = "want an int32 array [B, T], or a (query, key) pair of them, [B, T] and [B, S]"
    if isinstance(segment_ids, tuple | list):
        if len(segment_ids) != 2 or any(x is None for x in segment_ids):
            raise ValueError(f"segment_ids: got {len(segment_ids)} items, {want}")
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
    q_ids, kv_ids = (checked_integers("segment_ids", x, want) for x in pair)
    return q_ids, kv_ids


def checked_lengths(kv_lengths: Any, batch: int) -> Any:
    if kv_lengths is None:
        return None
    kv_lengths = checked_integers("kv_lengths", kv_lengths, "an int32 array", mask_checks.INT32)
    if kv_lengths.shape != (batch,):
        raise ValueError(f"kv_lengths: got shape {kv_lengths.shape}, want [batch] = ({batch},)")
    return kv_lengths


def checked_offset(q_offset: Any, batch: int) -> tuple[int | None, Any]:
    """(the offset as an int, None) or (None, [B] int32)."""
    if _is_int(q_offset):
        if not -FARTHEST < q_offset < FARTHEST:
            raise ValueError(f"q_offset: got {q_offset}, want a position within 2**30 of 0")
        return int(q_offset), None
    # Arrays are kept within FARTHEST, where positions do not wrap: further away, a query sees all of the keys or none.
    q_offset = checked_integers("q_offset", q_offset, "an int or an int32 array", (-FARTHEST, FARTHEST))
    if q_offset.shape not in ((), (batch,)):
        raise ValueError(f"q_offset: got shape {q_offset.shape}, want an int, a scalar or [batch] = ({batch},)")
    if isinstance(q_offset, jax.ShapeDtypeStruct):
        return None, q_offset
    return None, jnp.broadcast_to(q_offset, (batch,))


def _deterministic() -> bool:
    """What XLA was told: --xla_gpu_deterministic_ops, in XLA_FLAGS."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    on = [
        f
        for f in flags
        if f.partition("=")[0] in ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    ]
    return bool(on) and on[-1].partition("=")[2].lower() in ("", "true", "1")
