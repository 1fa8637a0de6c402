"""Checks of arguments that several ops have. An error names the argument, the given value and the wanted values."""

import contextlib
import math
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_kernels.masks import checks as mask_checks
from jax_kernels.plain_numbers import plain, plain_of

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
MAX_HEAD_DIM = 256
# The sizes of an attention request: if any of them is 0, there is no pair of a query and a key.
SIZES = ("batch", "q_length", "kv_length", "heads")
HEADS = "[batch, length, heads, head_dim]"
# Positions are within FARTHEST of 0, and window limits below WIDEST, so that their sums fit int32.
FARTHEST = mask_checks.FARTHEST
WIDEST = 1 << 29


def _names(dtypes: tuple[Any, ...]) -> str:
    *others, last = (str(dtype) for dtype in dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def check_shapes(query: Any, key: Any, value: Any, dtypes: tuple[Any, ...] = DTYPES) -> None:
    """Checks that query [B, T, H, D], key [B, S, Hkv, D] and value [B, S, Hkv, Dv] fit together.

    Raises ValueError for shapes, TypeError for a dtype that is not one of `dtypes` or not query's.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_heads(name, x, query.dtype, dtypes=dtypes)
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: got batch {x.shape[0]}, want query's batch {query.shape[0]}")
    heads, head_dim = query.shape[2:]
    kv_length, kv_heads = key.shape[1:3]
    if key.shape[-1] != head_dim:
        raise ValueError(f"key: got head_dim {key.shape[-1]}, want query's head_dim {head_dim}")
    if value.shape[1:3] != (kv_length, kv_heads):
        raise ValueError(f"value: got (length, heads) {value.shape[1:3]}, want key's {(kv_length, kv_heads)}")
    check_groups(heads, kv_heads)


def check_groups(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless kv_heads divides heads. With 0 query heads, any number of key heads is valid."""
    if heads if kv_heads == 0 else heads % kv_heads:
        raise ValueError(f"key: got {kv_heads} heads, want a divisor of query's {heads} heads")


def check_known(name: str, axis: str, size: Any, reason: str) -> None:
    """Raises ValueError if a size is symbolic, under jax.export. axis: words for it. reason: why it must be an int."""
    if jax.export.is_symbolic_dim(size):
        raise ValueError(f"{name}: got the symbolic {axis} {size}, want an int: {reason}")


def check_heads(name: str, x: Any, dtype: Any, axes: str = HEADS, dtypes: tuple[Any, ...] = DTYPES) -> None:
    """Checks one of query, key and value: 4 axes, a last axis of 1 to 256, and query's dtype, one of `dtypes`.

    name: the argument's name in messages. dtype: query's. axes: words for the wanted axes. Raises ValueError or
    TypeError.
    """
    if x.ndim != 4:
        raise ValueError(f"{name}: got shape {x.shape}, want 4 axes {axes}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {x.dtype}, want {_names(dtypes)}")
    if x.dtype != dtype:
        raise TypeError(f"{name}: got dtype {x.dtype}, want query's dtype {dtype}")
    if not 0 < x.shape[3] <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: got head_dim {x.shape[3]}, want 1 to {MAX_HEAD_DIM}")


def checked_array(name: str, x: Any, dtypes: tuple[Any, ...] = DTYPES) -> Any:
    """x as a jax.Array; a jax.ShapeDtypeStruct is returned as it is.

    Raises TypeError for other types than arrays, and for a NumPy array whose dtype is not one of `dtypes`.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, np.ndarray | np.generic) and x.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {x.dtype}, want {_names(dtypes)}")
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name}: got {type(x).__module__}.{type(x).__name__}, want a jax.Array")
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def evaluated_if_known(x: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which the values of a known array are computed at once, also in a trace.

    jax_kernels.analyze then sees the values of a mask or a bias. x: an array, or a jax.ShapeDtypeStruct.
    """
    is_known = isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)
    return jax.ensure_compile_time_eval() if is_known else contextlib.nullcontext()


def reshaped(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """x with this shape and dtype. x: an array of as many elements, or a jax.ShapeDtypeStruct."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return jnp.asarray(x, dtype).reshape(shape)


def converted(x: Any, dtype: Any) -> Any:
    """x in this dtype. x: an array, or a jax.ShapeDtypeStruct."""
    return reshaped(x, x.shape, dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


def spread(x: Any, shape: tuple[int, ...]) -> Any:
    """x broadcast to a shape. x: an array, or a jax.ShapeDtypeStruct."""
    return reshaped(x, shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.broadcast_to(x, shape)


def check_number(name: str, x: Any) -> None:
    """Raises TypeError unless x is None or a number that is known when tracing, ValueError unless it is finite."""
    x = plain(x)
    if x is None:
        return
    if not isinstance(x, int | float) or isinstance(x, bool):
        raise TypeError(f"{name}: got {type(x).__name__}, want a number that is known when tracing")
    if not math.isfinite(x):
        raise ValueError(f"{name}: got {x}, want a finite number")


def check_scale(name: str, x: Any) -> None:
    """Raises TypeError or ValueError unless x is None, a finite number, or a traced float without axes."""
    if not isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        check_number(name, x)
    elif x.shape != ():
        raise ValueError(f"{name}: got shape {x.shape}, want a number, or a traced float without axes")
    elif not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: got a traced {x.dtype}, want a number, or a traced float without axes")


def check_softcap(softcap: Any) -> None:
    check_number("softcap", softcap)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}, want a number above 0, or None")


def check_names(**names: Any) -> None:
    """Raises TypeError unless each value is a str or None. names: the arguments, by their names in messages."""
    for name, x in names.items():
        if x is not None and not isinstance(x, str):
            raise TypeError(f"{name}: got {type(x).__name__}, want a name or None")


def check_flags(**flags: Any) -> None:
    """Raises TypeError unless each value is a bool. flags: the arguments, by their names in messages."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}: got {type(flag).__name__}, want a bool that is known when tracing")


def with_positive_scale(query: jax.Array, scale: Any) -> tuple[jax.Array, float]:
    """(query, scale) with scale > 0 and the same scores query @ key * scale: a scale of 0 or less moves into query.

    Kernels take the maximum of the scores before they scale, and so need a positive scale. scale: None is 1 / sqrt(D).
    A traced scale moves into query too, as its ratio to 1 / sqrt(D): query is rounded to its dtype once more, unless
    the ratio is a power of two. The scale's gradient is summed in float32.
    """
    if isinstance(scale, jax.core.Tracer):
        default = 1 / math.sqrt(query.shape[-1])
        return (query.astype(jnp.float32) * (scale.astype(jnp.float32) / default)).astype(query.dtype), default
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if scale > 0:
        return query, scale
    return query * jnp.asarray(0 if scale == 0 else -1, query.dtype), -scale or 1.0


def checked_window(window: Any, is_causal: bool) -> tuple[bool, tuple[int, int] | None]:
    """(is_causal, window) in the normal form of AttentionOptions. Raises TypeError or ValueError for a bad window.

    window: an int, (left, right) or None; -1 or None is no limit on a side. A right side of 0 makes is_causal True. The
    returned window is (left, right) with -1 for no limit, and right = 0 if is_causal; it is None if it adds no limit to
    is_causal. For instance (128, 0) gives (True, (128, 0)), and (-1, 0) gives (True, None).
    """
    window = plain_of("window", window)
    if window is None:
        return is_causal, None
    sides = window if isinstance(window, tuple | list) else (window, window)
    want = "want an int from 0 to 2**29, or (left, right) of them; -1 is no limit on that side"
    if not all(side is None or mask_checks.is_int(side) for side in sides):
        raise TypeError(f"window: got {window!r}, {want}")
    if len(sides) != 2 or not all(side is None or -1 <= side < WIDEST for side in sides):
        raise ValueError(f"window: got {window!r}, {want}")
    left, right = (-1 if side is None else int(side) for side in sides)
    is_causal = is_causal or right == 0
    right = 0 if is_causal else right
    limits = left != -1 or right > 0
    return is_causal, (left, right) if limits else None


def broadcastable(name: str, x: Any, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """x's shape, with leading axes of length 1 added to make four. Each axis has length 1 or its length in `shape`.

    Raises ValueError for a shape that is not broadcastable to `shape`. x itself is not changed.
    """
    full = (1,) * (4 - x.ndim) + tuple(x.shape)
    if x.ndim > 4 or any(got not in (1, wanted) for got, wanted in zip(full, shape, strict=True)):
        raise ValueError(f"{name}: got shape {x.shape}, want a shape broadcastable to [B, H, T, S] = {shape}")
    return full


def checked_sinks(sinks: Any, heads: int) -> Any:
    """sinks [heads] as float32 [1, heads]; None stays None. Raises TypeError or ValueError for a bad dtype or shape."""
    if sinks is None:
        return None
    if not isinstance(sinks, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"sinks: got {type(sinks).__name__}, want an array")
    if sinks.dtype not in DTYPES:
        raise TypeError(f"sinks: got dtype {sinks.dtype}, want bfloat16, float16 or float32")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks: got shape {sinks.shape}, want [heads] = ({heads},)")
    return reshaped(sinks, (1, heads), jnp.float32)


def checked_integers(name: str, x: Any, want: str, within: tuple[int, int] = mask_checks.INT32) -> Any:
    """x as an int32 array, or as a jax.ShapeDtypeStruct of one if x is a ShapeDtypeStruct.

    want: words for the wanted value in messages. within: (least, most), to which values are clipped. Raises TypeError
    unless x is an array, list or tuple of integers, and ValueError for known values that int32 does not hold.
    """
    if not isinstance(x, jax.Array | np.ndarray | np.integer | list | tuple | jax.ShapeDtypeStruct):
        raise TypeError(f"{name}: got {type(x).__name__}, want {want}")
    if isinstance(x, list | tuple | np.integer):
        x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: got dtype {x.dtype}, want int32")
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.int32))
    return mask_checks.int32(name, x, want, within=within)


def ranked_over(axis_name: Any, segment_ids: Any) -> Any:
    """One device's segment ids [B, T] as int32, such that tokens of any two devices keep equal or unequal ids.

    axis_name: the mesh axis over which the tokens are sharded. Traced ids of a dtype that int32 does not hold become
    ranks among the ids of all devices, and -1 if below 0. Any argument that is not a traced integer array [B, T] is
    returned unchanged, for the op's own checks.
    """
    if not isinstance(segment_ids, jax.core.Tracer) or segment_ids.ndim != 2:
        return segment_ids
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        return segment_ids
    want = "an int32 array [B, T]"
    return mask_checks.ids(("segment_ids",), (segment_ids,), want, axis_name=axis_name)[0]


def checked_lengths(kv_lengths: Any, batch: int) -> Any:
    """kv_lengths as int32 [batch]; None stays None. Raises TypeError or ValueError for a bad type or shape."""
    if kv_lengths is None:
        return None
    kv_lengths = checked_integers("kv_lengths", kv_lengths, "an int32 array")
    if kv_lengths.shape != (batch,):
        raise ValueError(f"kv_lengths: got shape {kv_lengths.shape}, want [batch] = ({batch},)")
    return kv_lengths


def checked_offset(q_offset: Any, batch: int) -> tuple[int | None, Any]:
    """(q_offset as an int, None) for an int that is known when tracing; else (None, int32 [batch]).

    An array is clipped to positions within 2**30 of 0. Raises TypeError or ValueError for another type or shape, and
    ValueError for an int outside this range.
    """
    if mask_checks.is_int(q_offset):
        if not -FARTHEST < q_offset < FARTHEST:
            raise ValueError(f"q_offset: got {q_offset}, want a position within 2**30 of 0")
        return int(q_offset), None
    # Arrays are clipped to FARTHEST, so that positions do not wrap: beyond it, a query sees all of the keys or no key.
    q_offset = checked_integers("q_offset", q_offset, "an int or an int32 array", (-FARTHEST, FARTHEST))
    if q_offset.shape not in ((), (batch,)):
        raise ValueError(f"q_offset: got shape {q_offset.shape}, want an int, a scalar or [batch] = ({batch},)")
    if isinstance(q_offset, jax.ShapeDtypeStruct):
        return None, q_offset
    return None, jnp.broadcast_to(q_offset, (batch,))
