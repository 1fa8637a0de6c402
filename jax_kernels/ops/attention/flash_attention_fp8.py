"""flash_attention_fp8: attention of e4m3 query, key and value with float32 scales. Forward only."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float8e4m3fn, Float32, Integer

from jax_kernels import dispatch
from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.ops import checks, unsupported
from jax_kernels.ops.attention.implementations.xla import chunk_bytes
from jax_kernels.ops.attention.partitioning import BATCH, HEADS, by_heads
from jax_kernels.ops.planned_op import Blocks, PlannedCall, PlannedOp, batched, kernel
from jax_kernels.ops.sharding.explicit_axes import as_attention, with_explicit_axes
from jax_kernels.ops.sharding.partitioning import Axis, Shares, is_partitioned, partitioned
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.attention.sm90.forward import fp8 as forward_fp8
from jax_kernels.plain_numbers import plain, with_plain_numbers
from jax_kernels.reference import attention_fp8 as reference
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["IMPLEMENTATIONS", "Fp8Request", "flash_attention_fp8"]

DTYPES = (jnp.dtype(jnp.float8_e4m3fn),)


@dataclasses.dataclass(frozen=True)
class Fp8Request(Request):
    """A flash_attention_fp8 call without its arrays. q_offset: the position of query 0; None if it is an array."""

    SIZES: ClassVar[tuple[str, ...]] = checks.SIZES

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    is_causal: bool
    has_kv_lengths: bool
    q_offset: int | None


@overload
def flash_attention_fp8(
    query: Float8e4m3fn[Array, "B T H D"],
    key: Float8e4m3fn[Array, "B S Hkv D"],
    value: Float8e4m3fn[Array, "B S Hkv Dv"],
    *,
    q_scale: Float32[Array, "B H"] | float | None = ...,
    k_scale: Float32[Array, "B Hkv"] | float | None = ...,
    v_scale: Float32[Array, "B Hkv"] | float | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    q_offset: int | Integer[Array, ""] | Integer[Array, " B"] = ...,
    kv_lengths: Integer[Array, " B"] | None = ...,
    return_lse: Literal[False] = ...,
    implementation: str | None = ...,
) -> BFloat16[Array, "B T H Dv"]: ...
@overload
def flash_attention_fp8(
    query: Float8e4m3fn[Array, "B T H D"],
    key: Float8e4m3fn[Array, "B S Hkv D"],
    value: Float8e4m3fn[Array, "B S Hkv Dv"],
    *,
    q_scale: Float32[Array, "B H"] | float | None = ...,
    k_scale: Float32[Array, "B Hkv"] | float | None = ...,
    v_scale: Float32[Array, "B Hkv"] | float | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    q_offset: int | Integer[Array, ""] | Integer[Array, " B"] = ...,
    kv_lengths: Integer[Array, " B"] | None = ...,
    return_lse: Literal[True],
    implementation: str | None = ...,
) -> tuple[BFloat16[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@overload
def flash_attention_fp8(
    query: Float8e4m3fn[Array, "B T H D"],
    key: Float8e4m3fn[Array, "B S Hkv D"],
    value: Float8e4m3fn[Array, "B S Hkv Dv"],
    *,
    q_scale: Float32[Array, "B H"] | float | None = ...,
    k_scale: Float32[Array, "B Hkv"] | float | None = ...,
    v_scale: Float32[Array, "B Hkv"] | float | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    q_offset: int | Integer[Array, ""] | Integer[Array, " B"] = ...,
    kv_lengths: Integer[Array, " B"] | None = ...,
    return_lse: bool = ...,
    implementation: str | None = ...,
) -> BFloat16[Array, "B T H Dv"] | tuple[BFloat16[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@with_plain_numbers("is_causal", "scale", "return_lse")
@with_explicit_axes(as_attention)
@under_defaults
@jax.named_scope("flash_attention_fp8")
def flash_attention_fp8(
    query: Float8e4m3fn[Array, "B T H D"],
    key: Float8e4m3fn[Array, "B S Hkv D"],
    value: Float8e4m3fn[Array, "B S Hkv Dv"],
    *,
    q_scale: Float32[Array, "B H"] | float | None = None,
    k_scale: Float32[Array, "B Hkv"] | float | None = None,
    v_scale: Float32[Array, "B Hkv"] | float | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    q_offset: int | Integer[Array, ""] | Integer[Array, " B"] = 0,
    kv_lengths: Integer[Array, " B"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> BFloat16[Array, "B T H Dv"] | tuple[BFloat16[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """Attention of 8-bit arrays, whose matmuls take half the time of 16-bit matmuls. Forward only.

    Equivalent to the following JAX code (with key, value and their scales repeated for grouped heads)::

        scores = jnp.einsum("bthd,bshd->bhts", query.astype(float32), key.astype(float32))
        scores = scores * (q_scale * k_scale * scale)[:, :, None, None]
        keep = (q_offset + arange(T)[:, None] >= arange(S)) if is_causal else True
        scores = where(keep & (arange(S) < kv_lengths[:, None, None, None]), scores, -inf)
        lse = logsumexp(scores, axis=-1)
        value = value.astype(float32) * v_scale[:, None, :, None]
        out = jnp.einsum("bhts,bshd->bthd", exp(scores - lse[..., None]), value).astype(bfloat16)

    `quantize_fp8(x, axis=(1, 3))` returns 8-bit arrays and their scales. "xla" computes in float32. "mosaic_gpu" also
    rounds the softmax's numerators to e4m3, with a relative error of at most 2**-4 each, about 2.5 % of out if many
    keys count. The tensor cores add 8-bit products with about 14 bits. B, T, S and H may be 0, as in flash_attention.

    Args:
      query: [B, T, H, D], float8_e4m3fn. D up to 256.
      key: [B, S, Hkv, D], float8_e4m3fn, Hkv dividing H.
      value: [B, S, Hkv, Dv], float8_e4m3fn, Dv up to 256.
      q_scale: [B, H] float32, or a number: the factor of query. Positive; None is 1.
      k_scale, v_scale: [B, Hkv] float32, or a number: the factors of key and value. In an array, a scale that is not
        positive makes out NaN for its head.
      is_causal: query i, at position q_offset + i, attends to the keys up to that position.
      scale: a number, multiplies the scores; default 1 / sqrt(D).
      q_offset: an int, or int32 [B] or scalar: the position of query 0.
      kv_lengths: [B] int32, the number of keys of each sequence; below 0 it counts as 0 and above S as S. Values past a
        length have no effect, not even NaN.
      return_lse: also return the log-sum-exp of the scores.
      implementation: "mosaic_gpu" or "xla"; None picks the device's first that supports the call.

    Returns:
      out [B, T, H, Dv] bfloat16; with return_lse, (out, lse), lse float32 [B, H, T] in natural log. A query that
      attends to no key has out = 0 and lse = -inf.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call (the message has the reason), or the call is
        differentiated, in forward or reverse mode.

    Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024),
    arXiv:2407.08608.
    """
    request, arrays = _check(
        query=query,
        key=key,
        value=value,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        is_causal=is_causal,
        scale=scale,
        q_offset=q_offset,
        kv_lengths=kv_lengths,
        return_lse=return_lse,
        implementation=implementation,
    )
    query, scale = _with_positive_scale(arrays.query, scale)
    # The factors hold the scale: combined with the scales of query and key it differs from head to head.
    options = AttentionOptions(scale=1.0, is_causal=request.is_causal, q_offset=request.q_offset)
    factors = _factors(request, arrays.q_scale, arrays.k_scale, arrays.v_scale, scale)
    inputs = (query, arrays.key, arrays.value, factors, arrays.q_offset, arrays.kv_lengths)
    call = OP.call(request, options, implementation)
    lengths = {str(len(inputs) - 1): request.kv_length}
    out, lse = _attention(*OP.tuned(call, request, _attention, inputs, implementation, lengths=lengths))
    return (out, lse) if return_lse else out


def _with_positive_scale(query: jax.Array, scale: Any) -> tuple[jax.Array, Any]:
    """(query, scale) with scale > 0, exactly: 8-bit queries take only the sign of a traced scale, or 0."""
    if not isinstance(scale, jax.core.Tracer):
        return checks.with_positive_scale(query, scale)
    scale = scale.astype(jnp.float32)
    signed = (query.astype(jnp.float32) * jnp.sign(scale)).astype(query.dtype)
    return signed, jnp.where(scale == 0, 1, jnp.abs(scale))


class _Arrays(NamedTuple):
    """The checked arrays of a call.

    query: [B, T, H, D]. key, value: [B, S, Hkv, D]. q_scale: a number, or [B, H] float32. k_scale, v_scale: a number,
    or [B, Hkv] float32. q_offset: [B] int32; None if it is an int, which the request has. kv_lengths: [B] int32 or
    None.
    """

    query: Any
    key: Any
    value: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    q_offset: Any
    kv_lengths: Any


def _check(
    *, query, key, value, q_scale, k_scale, v_scale, is_causal, scale, q_offset, kv_lengths, return_lse, implementation
) -> tuple[Fp8Request, _Arrays]:
    """(request, arrays) of a call. Raises the errors that flash_attention_fp8 documents."""
    query, key, value = (
        checks.checked_array(name, x, DTYPES) for name, x in (("query", query), ("key", key), ("value", value))
    )
    checks.check_shapes(query, key, value, DTYPES)
    batch, q_length, heads, head_dim = query.shape
    kv_length, kv_heads = key.shape[1:3]
    checks.check_flags(is_causal=is_causal, return_lse=return_lse)
    checks.check_scale("scale", scale)
    checks.check_names(implementation=implementation)
    static_offset, q_offset = checks.checked_offset(q_offset, batch)
    arrays = _Arrays(
        query=query,
        key=key,
        value=value,
        q_scale=_scale("q_scale", q_scale, (batch, heads)),
        k_scale=_scale("k_scale", k_scale, (batch, kv_heads)),
        v_scale=_scale("v_scale", v_scale, (batch, kv_heads)),
        q_offset=q_offset,
        kv_lengths=checks.checked_lengths(kv_lengths, batch),
    )
    request = Fp8Request(
        op="flash_attention_fp8",
        device=dispatch.target_device(query),
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=value.shape[3],
        is_causal=bool(is_causal),
        has_kv_lengths=arrays.kv_lengths is not None,
        q_offset=static_offset,
    )
    return request, arrays


def _scale(name: str, x: Any, shape: tuple[int, int]) -> Any:
    """A scale as a float, or as a float32 array of `shape` or without axes; None is 1.

    name: of the argument, in messages. Raises TypeError or ValueError.
    """
    if x is None:
        return 1.0
    want = f"a positive number, or float32 [batch, heads] = {shape}"
    if getattr(x, "dtype", None) != jnp.float32:
        x = plain(x)
    if not isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        if not isinstance(x, int | float) or isinstance(x, bool):
            raise TypeError(f"{name}: got {type(x).__name__}, want {want}")
        if not 0 < x < math.inf:
            raise ValueError(f"{name}: got {x}, want {want}")
        return float(x)
    if x.dtype != jnp.float32:
        raise TypeError(f"{name}: got dtype {x.dtype}, want {want}")
    if x.shape not in ((), shape):
        raise ValueError(f"{name}: got shape {x.shape}, want {want}")
    return x


def _factors(request: Fp8Request, q_scale, k_scale, v_scale, scale: float) -> jax.Array:
    """float32 [B, H, 2]: for each head, the factor of query @ key and the factor of the weighted sum of value.

    The first includes `scale`, the factor of the softmax's argument. Both are NaN for a head with a scale that is not
    positive.
    """
    shape = request.batch, request.heads
    group = request.heads // max(request.kv_heads, 1)
    wide = lambda x: jnp.repeat(x, group, axis=1) if jnp.ndim(x) == 2 else x
    q_scale, k_scale, v_scale = q_scale, wide(k_scale), wide(v_scale)
    positive = jnp.logical_and(jnp.logical_and(q_scale > 0, k_scale > 0), v_scale > 0)
    factors = jnp.broadcast_to(_of_scores(q_scale, k_scale, scale), shape), jnp.broadcast_to(v_scale, shape)
    positive = jnp.broadcast_to(positive, shape)[..., None]
    return jnp.where(positive, jnp.stack(factors, axis=-1), jnp.nan).astype(jnp.float32)


def _of_scores(q_scale: Any, k_scale: Any, scale: float) -> Any:
    """q_scale * k_scale * scale, for positive factors, elementwise.

    The smallest and the largest factor are multiplied first. So no step leaves float32's range unless the result does.
    """
    low, high = jnp.minimum(q_scale, k_scale), jnp.maximum(q_scale, k_scale)
    between = jnp.clip(jnp.float32(scale), low, high)
    return (jnp.minimum(low, scale) * jnp.maximum(high, scale)) * between


def _config(request: Fp8Request) -> tuple[Blocks, str]:
    row, source = block_specs.fp8_row(
        request.device.compute_capability,
        "mosaic_gpu",
        head_dim=max(request.head_dim, request.v_head_dim),
        is_causal=request.is_causal,
    )
    return Blocks(forward=row.config, core_count=request.device.core_count), source


def _supports_mosaic(request: Fp8Request) -> str | None:
    return unsupported.not_hopper(request) or unsupported.no_mosaic(request)


def _of_arrays(forward):
    """Wraps a forward, which takes AttentionInputs, so that it takes the arrays of `_attention` one by one.

    forward(inputs, options, factors, **rest) becomes run(query, key, value, factors, q_offset, kv_lengths, options=,
    **rest). factors: [B, H, 2], from `_factors`. q_offset and kv_lengths may be None.
    """

    def run(query, key, value, factors, q_offset, kv_lengths, *, options, **rest):
        inputs = AttentionInputs(query, key, value, kv_lengths=kv_lengths, q_offset=q_offset)
        return forward(inputs, options, factors, **rest)

    return run


def _xla(inputs, options, factors, *, config, interpret):
    return reference.attention_forward(inputs, options, factors, chunk_bytes=chunk_bytes(inputs.query))


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(
        "mosaic_gpu", _supports_mosaic, _config, _of_arrays(kernel(forward_fp8.attention_forward)), None
    ),
    "xla": Implementation("xla", lambda request: None, without_blocks, _of_arrays(_xla), None),
}


def _order(request: Fp8Request) -> tuple[tuple[str, ...], str]:
    return block_specs.attention_order(request.device.compute_capability)


OP = PlannedOp("flash_attention_fp8", IMPLEMENTATIONS, _order)
OP.explained_by(_check)(flash_attention_fp8)


# Not a custom_jvp: JAX could not handle the kernel's tile counter in one, because the counter is a reference.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: PlannedCall, arrays: tuple[Any, ...]):
    """(out bfloat16 [B, T, H, Dv], lse float32 [B, H, T]); differentiating raises NotImplementedError.

    arrays: (query, key, value, factors [B, H, 2], q_offset, kv_lengths); the last two may be None.
    """
    return batched(OP, call, share=_shared)(*arrays)


def _shared(function: Any) -> Any:
    """Returns the kernel's function with its work sharded over devices under jit, along batch and heads.

    function: takes query, key, value, factors [B, H, 2], q_offset and kv_lengths (the last two may be None), and
    returns (out, lse). The result takes and returns the same.
    """

    def run(*arrays: Any) -> Any:
        if not is_partitioned():
            return function(*arrays)
        query, key, *_ = arrays
        batch, (heads, kv_heads) = Axis(BATCH), by_heads(query.shape[2], key.shape[2])
        of_key = (batch, None, kv_heads, None)
        axes = ((batch, None, heads, None), of_key, of_key, (batch, heads, None), (batch,), (batch,))
        shares = Shares(
            arguments=[of for of, x in zip(axes, arrays, strict=True) if x is not None],
            results=lambda _: [axes[0], (batch, heads, None)],
            lengths={BATCH: query.shape[0], HEADS: query.shape[2] if kv_heads is None else key.shape[2]},
        )
        return partitioned(function, shares)(*arrays)

    return run


def _no_gradient(*_):
    raise NotImplementedError(
        "flash_attention_fp8: it has no gradient, want flash_attention of 16-bit arrays for gradients"
    )


_attention.defvjp(_no_gradient, _no_gradient)
