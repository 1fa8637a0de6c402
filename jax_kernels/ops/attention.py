"""flash_attention: its checks, its gradient, and the table of what can run it."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_kernels import dispatch
from jax_kernels.ops import attention_table as table
from jax_kernels.ops.attention_table import AttentionRequest

__all__ = ["AttentionCall", "attention_backward", "attention_forward", "flash_attention", "prepare"]

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))
MAX_HEAD_DIM = 256

# Arguments of the signature that no implementation serves yet, with the value that means "not given".
_NOT_YET = ("bias", "window", "segment_ids", "score_mod", "sinks", "softcap")


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The static half of a call: everything but the arrays. Hashable, so that it can key a jit cache."""

    implementation: str
    config: Any
    is_causal: bool
    scale: float
    q_offset: int | None  # None: it is an array, and travels with the others
    precision: str | None
    out_dtype: str
    interpret: bool

    @property
    def options(self) -> dict[str, Any]:
        return {
            "is_causal": self.is_causal,
            "scale": self.scale,
            "precision": self.precision,
            "config": self.config,
            "interpret": self.interpret,
        }


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: Any = None,
    kv_lengths: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    score_mod: Any = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Exact attention in tiles, without an array of query length times key length, forward or backward.

    Equivalent to the following JAX code (with key and value repeated for grouped heads)::

        scores = jnp.einsum("bthd,bshd->bhts", query, key).astype(float32) * scale
        keep = q_offset + arange(T)[:, None] >= arange(S) if is_causal else True
        keep = keep & (arange(S) < kv_lengths[:, None, None, None]) & mask
        scores = where(keep, scores, -inf)
        lse = logsumexp(scores, axis=-1)
        out = jnp.einsum("bhts,bshd->bthd", exp(scores - lse[..., None]), value)

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32; D up to 256, any T.
      key: [B, S, Hkv, D] in query's dtype; Hkv divides H (grouped-query and multi-query attention).
      value: [B, S, Hkv, Dv] in query's dtype; Dv up to 256.
      mask: bool, broadcastable to [B, H, T, S], True where a query may attend; a float32 mask of zeros and
        ones is taken too. It is dense: only "xla" and "cudnn" serve it.
      is_causal: keep key j for query i where q_offset + i >= j.
      kv_lengths: [B] int32, how many keys of each batch entry count; the others are never attended to.
      q_offset: position of query 0: an int, a scalar array, or [B] int32. 0 aligns the causal mask top-left,
        as jax.nn and PyTorch do; S - T aligns it bottom-right, as flash-attn does.
      scale: a number, multiplies the scores; default 1 / sqrt(D).
      return_lse: also return the log-sum-exp of the scores. Gradients through it are exact.
      deterministic: True for the same bits on every run; False lets the backward add in arrival order, which
        is faster on some GPUs; None follows XLA's --xla_gpu_deterministic_ops. The forward always is.
      precision: for float32 inputs, "fp32" (exact products, the default) or "tf32". None for other dtypes.
      implementation: "mosaic_gpu", "triton", "cudnn" or "xla"; None picks the fastest that can serve.
      bias, window, segment_ids, score_mod, sinks, softcap: not served yet.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T] in natural log.
      A query that may attend to no key has out = 0 and lse = -inf, and passes no gradient.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: an argument, or a named implementation, that cannot serve this call, and why.

    Source: Dao, "FlashAttention-2" (2023), arXiv:2307.08691; Shah et al., "FlashAttention-3" (2024),
    arXiv:2407.08608.
    """
    call, arrays = prepare(**locals())
    out, lse = run(call, *arrays)
    return (out, lse) if return_lse else out


def _plan(*args: Any, **kwargs: Any) -> dispatch.Plan:
    names = ("query", "key", "value")
    if len(args) > len(names):
        raise TypeError(f"flash_attention takes {len(names)} positional arguments (query, key, value), got {len(args)}")
    request, _ = _check(**dict(zip(names, args, strict=False)), **kwargs)
    return _choose(request, kwargs.get("implementation"))


flash_attention.plan = _plan  # type: ignore[attr-defined]


def _choose(request: AttentionRequest, implementation: str | None) -> dispatch.Plan:
    return dispatch.choose(request, table.IMPLEMENTATIONS, table.order(request), implementation)


def prepare(*, implementation=None, scale=None, **arguments):
    """Checks a call and plans it. Returns (AttentionCall, the arrays of attention_forward)."""
    request, arrays = _check(implementation=implementation, scale=scale, **arguments)
    plan = _choose(request, implementation)
    query, key, value, mask, kv_lengths, q_offset = _vary_alike(arrays)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if scale <= 0:  # kernels take the maximum before they scale: give them a positive one
        query = query * jnp.asarray(0 if scale == 0 else -1, query.dtype)
        scale = -scale or 1.0
    call = AttentionCall(
        implementation=plan.implementation,
        config=plan.config,
        is_causal=request.is_causal,
        scale=scale,
        q_offset=request.q_offset,
        precision=request.precision,
        out_dtype=str(query.dtype),
        interpret=dispatch.interpreting(),
    )
    return call, (query, key, value, mask, kv_lengths, q_offset)


def _vary_alike(arrays):
    """Inside shard_map, every array as varying over the mesh axes that any of them varies over.

    Its transpose sums the gradient of an array that was the same on all devices.
    """
    present = [x for x in arrays if x is not None]
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in present))

    def vary(x):
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return tuple(x if x is None else vary(x) for x in arrays)


def run(call: AttentionCall, *arrays):
    """(out, lse) of a prepared call, differentiable."""
    if table.IMPLEMENTATIONS[call.implementation].backward is None:
        return attention_forward(call, *arrays)
    return _attention(call, *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call, query, key, value, mask, kv_lengths, q_offset):
    return attention_forward(call, query, key, value, mask, kv_lengths, q_offset)


def _attention_fwd(call, *arrays):
    results = attention_forward(call, *arrays)
    return results, (*arrays, *results)


def _attention_bwd(call, residuals, cotangents):
    return (*attention_backward(call, *residuals, *cotangents), None, None, None)


_attention.defvjp(_attention_fwd, _attention_bwd)


def attention_forward(call: AttentionCall, query, key, value, mask, kv_lengths, q_offset):
    """(out, lse) by the call's implementation. vmap adds to the batch. lse is None from "cudnn"."""
    return _batched(_forward, call)(query, key, value, mask, kv_lengths, q_offset)


def attention_backward(call: AttentionCall, query, key, value, mask, kv_lengths, q_offset, out, lse, dout, dlse):
    """(dquery, dkey, dvalue) from the results of attention_forward and their cotangents (dlse may be None)."""
    return _batched(_backward, call)(query, key, value, mask, kv_lengths, q_offset, out, lse, dout, dlse)


def _forward(call, query, key, value, mask, kv_lengths, q_offset):
    offset = q_offset if call.q_offset is None else call.q_offset
    forward = table.IMPLEMENTATIONS[call.implementation].forward
    return forward(query, key, value, mask, kv_lengths, offset, out_dtype=jnp.dtype(call.out_dtype), **call.options)


def _backward(call, query, key, value, mask, kv_lengths, q_offset, out, lse, dout, dlse):
    offset = q_offset if call.q_offset is None else call.q_offset
    backward = table.IMPLEMENTATIONS[call.implementation].backward
    if backward is None:  # differentiated by JAX: the forward runs once more
        forward = lambda q, k, v: _forward(call, q, k, v, mask, kv_lengths, q_offset)[0]
        return jax.vjp(forward, query, key, value)[1](dout)
    return backward(query, key, value, mask, kv_lengths, offset, out, lse, dout, dlse, **call.options)


@functools.cache
def _batched(function, call):
    """`function(call, ...)`, whose arrays' first axis is the batch, with a vmap that joins its axis to that batch."""
    plain = functools.partial(function, call)
    if table.IMPLEMENTATIONS[call.implementation].backward is None:
        return plain  # JAX differentiates it, which a custom vmap would not let through
    wrapped = jax.custom_batching.custom_vmap(plain)

    @wrapped.def_vmap
    def _(size, batched, *arrays):
        def merge(x, has_axis):
            x = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        def spread(x, has_axis, length):
            # A mask may have a batch of one: give it the whole batch before the axes are joined.
            axis = 1 if has_axis else 0
            if x.shape[axis] == length:
                return x
            return jnp.broadcast_to(x, (*x.shape[:axis], length, *x.shape[axis + 1 :]))

        length = arrays[0].shape[1 if batched[0] else 0]
        arrays = jax.tree.map(lambda x, b: merge(spread(x, b, length), b), tuple(arrays), tuple(batched))
        outs = wrapped(*arrays)
        split = lambda x: x.reshape(size, -1, *x.shape[1:])
        return jax.tree.map(split, outs), jax.tree.map(lambda _: True, outs)

    return wrapped


def _check(
    query, key, value, *, mask=None, is_causal=False, kv_lengths=None, q_offset=0, scale=None, return_lse=False,
    deterministic=None, precision=None, implementation=None, **later,
) -> tuple[AttentionRequest, tuple[Any, ...]]:  # fmt: skip
    """The request behind a call and its arrays in the kernels' form; raises what flash_attention documents."""
    for name in later:
        if name not in _NOT_YET:
            raise TypeError(f"flash_attention got an unexpected keyword argument {name!r}")
        if later[name] is not None:
            raise NotImplementedError(f"{name}: not served yet by any implementation of flash_attention; want None")
    query, key, value = (_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {x.shape}, want 4 axes [batch, length, heads, head_dim]")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: got dtype {x.dtype}, want bfloat16, float16 or float32")
        if x.dtype != query.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, want query's dtype {query.dtype}")
        if x.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: got batch {x.shape[0]}, want query's batch {query.shape[0]}")
        if not 0 < x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: got head_dim {x.shape[-1]}, want 1 to {MAX_HEAD_DIM}")
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

    for name, flag in (("is_causal", is_causal), ("return_lse", return_lse)):
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}: got {type(flag).__name__}, want a bool that is known when tracing")
    if deterministic is not None and not isinstance(deterministic, bool | np.bool_):
        raise TypeError(f"deterministic: got {type(deterministic).__name__}, want True, False or None")
    if scale is not None and not _is_number(scale):
        raise TypeError(f"scale: got {type(scale).__name__}, want a number that is known when tracing")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale: got {scale}, want a finite number")
    if precision not in (None, "fp32", "tf32"):
        raise ValueError(f"precision: got {precision!r}, want 'fp32', 'tf32' or None")
    if precision is not None and query.dtype != jnp.float32:
        raise ValueError(f"precision: got {precision!r} with {query.dtype} inputs, want None: it is for float32 inputs")
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(f"implementation: got {type(implementation).__name__}, want a name or None")

    mask = _mask(mask, (batch, heads, q_length, kv_length))
    kv_lengths = _lengths(kv_lengths, batch)
    static_offset, q_offset = _offset(q_offset, batch)
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
        is_causal=bool(is_causal),
        has_mask=mask is not None,
        has_kv_lengths=kv_lengths is not None,
        q_offset=static_offset,
        return_lse=bool(return_lse),
        deterministic=_deterministic() if deterministic is None else bool(deterministic),
        precision=(precision or "fp32") if query.dtype == jnp.float32 else None,
    )
    return request, (query, key, value, mask, kv_lengths, q_offset)


def _array(name: str, x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, np.ndarray | np.generic) and x.dtype not in DTYPES:
        raise TypeError(f"{name}: got dtype {x.dtype}, want bfloat16, float16 or float32")
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name}: got {type(x).__module__}.{type(x).__name__}, want a jax.Array")
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def _mask(mask: Any, shape: tuple[int, int, int, int]) -> Any:
    """A bool mask with four axes, or None."""
    if mask is None:
        return None
    if not isinstance(mask, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"mask: got {type(mask).__name__}, want a bool array")
    if mask.dtype not in (jnp.dtype(bool), jnp.dtype(jnp.float32)):
        raise TypeError(f"mask: got dtype {mask.dtype}, want bool (True = attend) or a float32 mask of 0 and 1")
    want = f"want a shape broadcastable to [B, H, T, S] = {shape}"
    if mask.ndim > 4:
        raise ValueError(f"mask: got shape {mask.shape}, {want}")
    full = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if any(got not in (1, wanted) for got, wanted in zip(full, shape, strict=True)):
        raise ValueError(f"mask: got shape {mask.shape}, {want}")
    if isinstance(mask, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(full, jnp.dtype(bool))
    if mask.dtype != bool:
        # In numpy: under jit even a comparison of known values is traced.
        known = None if isinstance(mask, jax.core.Tracer) else np.asarray(mask)
        if known is not None and not ((known == 0) | (known == 1)).all():
            raise ValueError("mask: got float32 values other than 0 and 1, want a bool mask; an additive one is a bias")
        mask = mask != 0
    return jnp.asarray(mask).reshape(full)


def _integers(name: str, x: Any, want: str) -> Any:
    if not isinstance(x, jax.Array | np.ndarray | np.integer | list | tuple | jax.ShapeDtypeStruct):
        raise TypeError(f"{name}: got {type(x).__name__}, want {want}")
    if isinstance(x, list | tuple | np.integer):
        x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: got dtype {x.dtype}, want int32")
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.int32))
    if isinstance(x, np.ndarray) and (x != x.astype(np.int32)).any():
        raise ValueError(f"{name}: got values up to {np.abs(x).max()}, want int32")
    return jnp.asarray(x, jnp.int32)


def _lengths(kv_lengths: Any, batch: int) -> Any:
    if kv_lengths is None:
        return None
    kv_lengths = _integers("kv_lengths", kv_lengths, "an int32 array")
    if kv_lengths.shape != (batch,):
        raise ValueError(f"kv_lengths: got shape {kv_lengths.shape}, want [batch] = ({batch},)")
    return kv_lengths


def _offset(q_offset: Any, batch: int) -> tuple[int | None, Any]:
    """(the offset as an int, None) or (None, [B] int32)."""
    if isinstance(q_offset, int | np.integer) and not isinstance(q_offset, bool):
        if not -(1 << 30) < q_offset < 1 << 30:
            raise ValueError(f"q_offset: got {q_offset}, want a position within 2**30 of 0")
        return int(q_offset), None
    q_offset = _integers("q_offset", q_offset, "an int or an int32 array")
    if q_offset.shape not in ((), (batch,)):
        raise ValueError(f"q_offset: got shape {q_offset.shape}, want an int, a scalar or [batch] = ({batch},)")
    if isinstance(q_offset, jax.ShapeDtypeStruct):
        return None, q_offset
    return None, jnp.broadcast_to(q_offset, (batch,))


def _deterministic() -> bool:
    """What XLA was told: --xla_gpu_deterministic_ops, in XLA_FLAGS."""
    import os

    flags = os.environ.get("XLA_FLAGS", "").split()
    on = [
        f
        for f in flags
        if f.partition("=")[0] in ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    ]
    return bool(on) and on[-1].partition("=")[2].lower() in ("", "true", "1")
