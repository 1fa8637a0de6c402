"""The arrays, options and results of an attention call, from the public op down to a kernel."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jaxtyping import Array, Bool, Float, Float32, Int32

if TYPE_CHECKING:
    from jax_kernels.masks import Mask
    from jax_kernels.score_mod.trace import ScoreMod


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashArguments[Value]:
    """The arguments of one call of flash_attention, by name, as the caller gave them. Nothing is checked yet.

    Value: the type of the arrays: jax.Array, or torch.Tensor in the bridge. A number may be an array without axes.
    """

    query: Value
    key: Value
    value: Value
    bias: Value | None = None
    mask: "Value | Mask | None" = None
    is_causal: bool = False
    window: int | tuple[int, int] | Value | None = None
    segment_ids: Value | tuple[Value, Value] | None = None
    kv_lengths: Value | None = None
    q_offset: int | Value = 0
    score_mod: Any = None
    sinks: Value | None = None
    scale: Any = None
    softcap: Any = None
    return_lse: bool = False
    deterministic: bool | None = None
    precision: str | None = None
    implementation: str | None = None

    def by_name(self) -> dict[str, Any]:
        """The arguments by name. (torch.compile of torch 2.11 does not support vars of a frozen dataclass.)"""
        return {name: getattr(self, name) for name in ARGUMENT_NAMES}


ARGUMENT_NAMES = tuple(field.name for field in dataclasses.fields(FlashArguments))


class AttentionInputs(NamedTuple):
    """The arrays of a call. Arrays that a call lacks are None.

    query: [B, T, H, D]. key: [B, S, Hkv, D], Hkv dividing H. value: [B, S, Hkv, Dv].
    mask: bool, [B or 1, H or 1, T or 1, S or 1], True where a query may attend, or a masks.Mask that is not prepared.
    bias: added to the scores, [B or 1, H or 1, T or 1, S or 1], in query's dtype or float32; -inf masks out.
    sinks: [B or 1, H] float32, logits that join the softmax's denominator and nothing else.
    q_segment_ids, kv_segment_ids: [B, T] and [B, S] int32; a query attends to keys with its id, if that is >= 0.
    kv_lengths: [B] int32, the number of keys that count.
    q_offset: [B] int32, the position of query 0; None if AttentionOptions.q_offset has it.
    score_mod: a ScoreMod.
    lists: the block lists of a prepared mask, which hold all limits of the calls that they are for.

    A step of a ring has these arrays too, which only "mosaic_gpu" takes:
    reach: [B, 2] int32, (first, end): queries before row `first` attend to nothing, later queries to keys below `end`.
    key_norms: [B, Hkv] float32, the largest squared norm of a key of each head.
    earlier_out, earlier_lse: [B, T, H, Dv] and [B, H, T] float32, of the earlier steps, to merge with the result.
    """

    query: Float[Array, "B T H D"]
    key: Float[Array, "B S Hkv D"]
    value: Float[Array, "B S Hkv Dv"]
    mask: "Bool[Array, '#B #H #T #S'] | Mask | None" = None
    bias: Float[Array, "#B #H #T #S"] | None = None
    sinks: Float32[Array, "#B H"] | None = None
    q_segment_ids: Int32[Array, "B T"] | None = None
    kv_segment_ids: Int32[Array, "B S"] | None = None
    kv_lengths: Int32[Array, " B"] | None = None
    q_offset: Int32[Array, " B"] | None = None
    score_mod: "ScoreMod | None" = None
    lists: Any = None
    reach: Int32[Array, "B 2"] | None = None
    key_norms: Float32[Array, "B Hkv"] | None = None
    earlier_out: Float32[Array, "B T H Dv"] | None = None
    earlier_lse: Float32[Array, "B H T"] | None = None


class AttentionResult(NamedTuple):
    """The result of a forward.

    out: [B, T, H, Dv]. lse: [B, H, T] float32, natural log; None from "cudnn", and from "mosaic_gpu" without
    AttentionOptions.has_lse. lse_lo: shaped like lse, the exact log-sum-exp minus lse; None if lse is exact. lse is
    inexact only with a bias or a score_mod that may mask: next to scores of -1e9, float32 loses the log of the sum.
    """

    out: Float[Array, "B T H Dv"]
    lse: Float32[Array, "B H T"] | None
    lse_lo: Float32[Array, "B H T"] | None = None


class AttentionGradients(NamedTuple):
    """The gradients of the arrays of AttentionInputs, in the arrays' shapes and dtypes. None for an array without
    gradient.

    With AttentionOptions.float32_gradients, the gradients of query, key and value are float32. score_mod: a ScoreMod
    whose arrays are the gradients of the score_mod's arrays.
    """

    query: Float[Array, "B T H D"]
    key: Float[Array, "B S Hkv D"]
    value: Float[Array, "B S Hkv Dv"]
    bias: Float[Array, "#B #H #T #S"] | None = None
    sinks: Float32[Array, "#B H"] | None = None
    score_mod: "ScoreMod | None" = None


@dataclasses.dataclass(frozen=True)
class HeadView:
    """The map from a call's heads to an array's heads: the array may have more heads, or hold several heads in one.

    Head h of the call is in array head of_array(h) = first + h // part + h // run * skip.

    count: the number of heads of the call. first: the array head of head 0. run, skip: after every `run` heads of the
    call, `skip` array heads are skipped. part: the number of successive heads that lie in one array head; they may
    belong to several runs.
    """

    count: int
    first: int
    run: int
    skip: int
    part: int = 1

    def of_array(self, head: int) -> int:
        """The index, in the array, of the array head that holds head `head` of the call."""
        return self.first + head // self.part + head // self.run * self.skip


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The static half of a call: hashable, so that it can key a jit cache.

    The scores are query @ key^T * scale, then softcap * tanh(scores / softcap) or score_mod, then + bias. Query i
    has position p = q_offset + i. Key j may be attended to if p >= j (is_causal), p - left <= j (window's left)
    and j <= p + right (window's right; -1 is no limit on that side). A window always adds a limit to is_causal: None
    replaces (-1, -1), and with is_causal the right is 0 and the left is not -1. q_offset: the position of query 0; None
    if it is an array, AttentionInputs.q_offset.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    q_offset: int | None = 0
    # "fp32" or "tf32" for float32 inputs, None for 16-bit inputs.
    precision: str | None = None
    # Whether the forward returns lse and lse_lo. "mosaic_gpu" writes neither if this is False.
    has_lse: bool = True
    # Whether the backward computes the gradient of bias, which costs two more matmuls.
    bias_gradient: bool = True
    # Whether the backward computes the gradients of score_mod's arrays.
    score_mod_gradient: bool = True
    # Whether the backward has to give the same bits on every run.
    deterministic: bool = False
    # Whether the gradients of query, key and value are float32, whatever the arrays' dtype is. Except: a deterministic
    # dquery of "mosaic_gpu" always has query's dtype.
    float32_gradients: bool = False
    # The call's heads in the arrays of query, and of key and value; None is all heads. Only "mosaic_gpu" takes a view.
    # The results, and the backward's lse and delta, have only the call's heads; dout has the heads of query's array.
    query_heads: HeadView | None = None
    kv_heads: HeadView | None = None


def first_position(inputs: AttentionInputs, options: AttentionOptions) -> int | Int32[Array, " B"]:
    """The position of query 0: options.q_offset, an int, unless inputs.q_offset has it, [B] int32."""
    return cast(int, options.q_offset) if inputs.q_offset is None else inputs.q_offset
