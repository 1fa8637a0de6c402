"""flash_attention. Its checks are in checks.py, its table in implementations/, its gradient and vmap in vjp.py."""

import dataclasses
from typing import Any, Literal, overload

import jax
from jaxtyping import Array, Bool, Float, Float32, Integer

from jax_kernels import dispatch
from jax_kernels.inputs.attention import AttentionInputs, FlashArguments
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import implementations
from jax_kernels.ops.attention.checks import check
from jax_kernels.ops.attention.chunks import need_of_request
from jax_kernels.ops.attention.traced_masks import mask_or_nan, with_validity
from jax_kernels.ops.attention.vjp import AttentionCall, run, vary_alike, with_options
from jax_kernels.ops.checks import with_positive_scale
from jax_kernels.ops.planned_op import PlannedOp
from jax_kernels.ops.sharding.explicit_axes import as_attention, with_explicit_axes
from jax_kernels.plain_numbers import ATTENTION, with_plain_numbers
from jax_kernels.score_mod.trace import ScoreMod, ScoreModFunction
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["OP", "flash_attention", "prepare"]


@overload
def flash_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    *,
    bias: Float[Array, "*#BHTS"] | None = ...,
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask | None = ...,
    is_causal: bool = ...,
    window: int | tuple[int, int] | None = ...,
    segment_ids: Integer[Array, "B T"] | tuple[Integer[Array, "B T"], Integer[Array, "B S"]] | None = ...,
    kv_lengths: Integer[Array, " B"] | None = ...,
    q_offset: int | Integer[Array, ""] | Integer[Array, " B"] = ...,
    score_mod: ScoreModFunction | ScoreMod | None = ...,
    sinks: Float[Array, " H"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"]: ...
@overload
def flash_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    *,
    bias: Float[Array, "*#BHTS"] | None = ...,
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask | None = ...,
    is_causal: bool = ...,
    window: int | tuple[int, int] | None = ...,
    segment_ids: Integer[Array, "B T"] | tuple[Integer[Array, "B T"], Integer[Array, "B S"]] | None = ...,
    kv_lengths: Integer[Array, " B"] | None = ...,
    q_offset: int | Integer[Array, ""] | Integer[Array, " B"] = ...,
    score_mod: ScoreModFunction | ScoreMod | None = ...,
    sinks: Float[Array, " H"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    softcap: float | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@overload
def flash_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    *,
    bias: Float[Array, "*#BHTS"] | None = ...,
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask | None = ...,
    is_causal: bool = ...,
    window: int | tuple[int, int] | None = ...,
    segment_ids: Integer[Array, "B T"] | tuple[Integer[Array, "B T"], Integer[Array, "B S"]] | None = ...,
    kv_lengths: Integer[Array, " B"] | None = ...,
    q_offset: int | Integer[Array, ""] | Integer[Array, " B"] = ...,
    score_mod: ScoreModFunction | ScoreMod | None = ...,
    sinks: Float[Array, " H"] | None = ...,
    scale: float | Float[Array, ""] | None = ...,
    softcap: float | None = ...,
    return_lse: bool = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@with_plain_numbers(*ATTENTION)
@with_explicit_axes(as_attention)
@under_defaults
@jax.named_scope("flash_attention")
def flash_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv Dv"],
    *,
    bias: Float[Array, "*#BHTS"] | None = None,
    mask: Bool[Array, "*#BHTS"] | Float[Array, "*#BHTS"] | Mask | None = None,
    is_causal: bool = False,
    window: int | tuple[int, int] | None = None,
    segment_ids: Integer[Array, "B T"] | tuple[Integer[Array, "B T"], Integer[Array, "B S"]] | None = None,
    kv_lengths: Integer[Array, " B"] | None = None,
    q_offset: int | Integer[Array, ""] | Integer[Array, " B"] = 0,
    score_mod: ScoreModFunction | ScoreMod | None = None,
    sinks: Float[Array, " H"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """Exact attention in tiles, without an array of query length times key length, forward or backward.

    Equivalent to the following JAX code (with key and value repeated for grouped heads)::

        scores = jnp.einsum("bthd,bshd->bhts", query, key).astype(float32) * scale
        scores = softcap * tanh(scores / softcap) if softcap else scores
        scores = score_mod(scores, b, h, arange(T)[:, None], arange(S)) if score_mod else scores
        scores = scores + bias
        position = (q_offset + arange(T))[:, None]
        keep = mask & (arange(S) < kv_lengths[:, None, None, None])
        keep &= position >= arange(S) if is_causal else True
        keep &= (position - left <= arange(S)) & (arange(S) <= position + right)  # window
        keep &= (q_ids[:, None, :, None] == kv_ids[:, None, None, :]) & (q_ids >= 0)[:, None, :, None]
        scores = where(keep, scores, -inf)
        lse = logaddexp(logsumexp(scores, axis=-1), sinks[:, None])
        out = jnp.einsum("bhts,bshd->bthd", exp(scores - lse[..., None]), value)

    The gradients are of query, key, value, bias, sinks and the arrays that score_mod closes over.
    docs/performance/implementations.md lists the arguments, the skipped blocks and the arithmetic of each
    implementation. Each of B, T, S and H may be 0: plain JAX then computes the result, also if a kernel is named.
    Numbers and flags may be Python's, NumPy's, or arrays without axes whose values are known when tracing.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32; D up to 256, any T. Its dot products with key must fit float32.
      key: [B, S, Hkv, D] in query's dtype; Hkv divides H (grouped-query and multi-query attention).
      value: [B, S, Hkv, Dv] in query's dtype; Dv up to 256. Its sums with weights of at most 1 must fit float32.
      bias: broadcastable to [B, H, T, S], in query's dtype or float32; -inf masks out. A query whose keys are all
        masked by a finite value, such as finfo(float32).min, attends to the keys of its highest score, as in PyTorch.
      mask: bool, broadcastable to [B, H, T, S], True where a query may attend; or a masks.Mask. Floats of 0 and 1 are
        taken too. Other known floats raise ValueError; other traced floats make results and gradients NaN.
      is_causal: keep key j for query i where q_offset + i >= j.
      window: (left, right), or an int for both: keep key j for query i where q_offset + i - left <= j and
        j <= q_offset + i + right. -1 or None is no limit on that side. At most 2**29. With is_causal, right is 0.
      segment_ids: int32 [B, T] where T == S, or a (query, key) pair [B, T], [B, S]: packed sequences. A query attends
        to the keys that have its id. A query with an id below 0 attends to no key, and no query attends to a key with
        an id below 0; all arrays must be finite there. Other integers are taken too: traced integers, and known
        integers that fit int32.
      kv_lengths: [B] integers: the number of keys of each batch entry, clipped to 0 ... S. Values of key and value past
        the length have no effect, not even NaN. (Keys that a mask, a window or is_causal leaves out must be finite.)
      q_offset: position of query 0: an int within 2**30 of 0, or integers, a scalar array or [B], clipped to this
        range. 0 aligns the causal mask top-left, as jax.nn and PyTorch do; S - T bottom-right, as flash-attn does.
      score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score, any jnp code of scalars: query @ key * scale in
        float32, and int32 indices (q_idx: the query's row in this call, without q_offset). Excludes softcap. Where a
        pair is masked out, the gradients of its closed-over arrays may get a NaN, as through jnp.where.
      sinks: [H], bfloat16, float16 or float32: logits that are added only to the softmax's denominator. -inf is no
        sink.
      scale: a number, multiplies the scores; default 1 / sqrt(D). Or a traced float without axes, with a gradient, such
        as a learned temperature: query is then multiplied by scale * sqrt(D), and rounded to its dtype.
      softcap: a number above 0: the scores become softcap * tanh(scores / softcap).
      return_lse: also return the log-sum-exp of the scores, including the sink. Gradients through it are exact.
      deterministic: True for the same bits on every run; False lets the backward add in arrival order, which
        is faster on some GPUs; None follows XLA's --xla_gpu_deterministic_ops. The forward is always deterministic.
      precision: for float32 inputs, "fp32" (exact products, the default) or "tf32". None for other dtypes.
      implementation: "mosaic_gpu", "triton", "cudnn" or "xla"; only "xla" has forward mode (jax.jvp) and second
        derivatives. None picks the first in the device's order that supports the call: explain shows it.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T] in natural log. A query
      without a key has out = 0 and lse = -inf; with sinks, lse is the sink, and only the sink gets a gradient.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call (the message has the reason), or its kernels
        lack a derivative.

    Sources: Dao (2023), arXiv:2307.08691; Shah et al. (2024), arXiv:2407.08608; score_mod: Dong et al. (2024),
    arXiv:2412.05496; sinks: Xiao et al. (2023), arXiv:2309.17453.
    """
    mask, is_valid = with_validity("mask", mask)
    given = FlashArguments(
        query=query, key=key, value=value, bias=bias, mask=mask, is_causal=is_causal, window=window,
        segment_ids=segment_ids, kv_lengths=kv_lengths, q_offset=q_offset, score_mod=score_mod, sinks=sinks,
        scale=scale, softcap=softcap, return_lse=return_lse, deterministic=deterministic, precision=precision,
        implementation=implementation,
    )  # fmt: skip
    call, inputs = prepare(given)
    call = with_options(call, has_lse=return_lse)
    out, lse = mask_or_nan(run(call, inputs), is_valid)
    return (out, lse) if return_lse else out


def _check(**arguments):
    """(request, arrays) of a call that is only planned, not computed. Raises flash_attention's errors.

    The arrays of a Mask may be jax.ShapeDtypeStructs. The call is then checked in a trace: only the returned request
    may be used, since the returned arrays are its tracers.
    """
    given = FlashArguments(**arguments)

    def checked(mask):
        mask, _ = with_validity("mask", mask)
        found.append(check(dataclasses.replace(given, mask=mask)))

    found: list[Any] = []
    if isinstance(given.mask, Mask) and any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(given.mask)):
        jax.eval_shape(checked, given.mask)
    else:
        checked(given.mask)
    return found[0]


OP = PlannedOp("flash_attention", implementations.IMPLEMENTATIONS, implementations.order, need_of_request)
OP.explained_by(_check)(flash_attention)


def prepare(given: FlashArguments) -> tuple[AttentionCall, AttentionInputs]:
    """Checks the arguments of flash_attention and plans the call. Returns (call, inputs), the arguments of `run`.

    Raises the errors of flash_attention. In the inputs, a scale of 0 or less has become part of query.
    """
    request, inputs = check(given)
    choice = OP.choose(request, given.implementation)
    inputs = vary_alike(inputs)
    query, scale = with_positive_scale(inputs.query, given.scale)
    inputs = inputs._replace(query=query)
    call = AttentionCall(
        implementation=choice.implementation,
        config=choice.config,
        options=request.options(scale),
        interpret=dispatch.interpreting(),
        out_dtype=str(inputs.query.dtype),
    )
    return OP.tuned(
        call,
        request,
        lambda call, inputs: run(with_options(call, has_lse=request.return_lse), inputs),
        inputs,
        given.implementation,
        moving=("query", "key", "value"),
        lengths={"kv_lengths": request.kv_length},
        reason=None if inputs.lists is None else "mask: got a prepared mask, want the mask itself, to time all blocks",
    )
