"""The arrays, options and results of an attention call, from the public op down to a kernel."""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jaxtyping import Array, Bool, Float, Float32, Int32

if TYPE_CHECKING:
    from jax_kernels.masks import Mask
    from jax_kernels.score_mod.trace import ScoreMod


class AttentionInputs(NamedTuple):
    """The arrays of a call. Those that a call lacks are None.

    query: [B, T, H, D]. key: [B, S, Hkv, D], Hkv dividing H. value: [B, S, Hkv, Dv].
    mask: bool, [B or 1, H or 1, T or 1, S or 1], True where a query may attend, or a masks.Mask that is not prepared.
    bias: added to the scores, [B or 1, H or 1, T or 1, S or 1], in query's dtype or float32; -inf masks out.
    sinks: [B or 1, H] float32, logits that join the softmax's denominator and nothing else.
    q_segment_ids, kv_segment_ids: [B, T] and [B, S] int32; a query attends to keys with its id, if that is >= 0.
    kv_lengths: [B] int32, the number of keys that count.
    q_offset: [B] int32, the position of query 0; None where AttentionOptions.q_offset has it.
    score_mod: a ScoreMod.
    lists: the block lists of a prepared mask, which hold all limits of the calls that they are for.

    A step of a ring has these besides, which "mosaic_gpu" alone takes:
    reach: [B, 2] int32, (first, end): queries before row `first` attend to nothing, the others to keys below `end`.
    key_norms: [B, Hkv] float32, the largest squared norm of a key of each head.
    earlier_out, earlier_lse: [B, T, H, Dv] and [B, H, T] float32, of the steps before, which the result is merged with.
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

    out: [B, T, H, Dv]. lse: [B, H, T] float32, natural log, None from "cudnn", and without has_lse of AttentionOptions
    from "mosaic_gpu". excess: like lse, what the exact
    log-sum-exp is more than lse; None where lse is exact, which it is but with a bias and under a score_mod that may
    mask: beside scores of -1e9 the log of the sum is lost in float32.
    """

    out: Float[Array, "B T H Dv"]
    lse: Float32[Array, "B H T"] | None
    excess: Float32[Array, "B H T"] | None = None


class AttentionGradients(NamedTuple):
    """The gradients of AttentionInputs, each with its array's shape and dtype. None for what has none.

    score_mod: a ScoreMod of the gradients of its arrays.
    """

    query: Float[Array, "B T H D"]
    key: Float[Array, "B S Hkv D"]
    value: Float[Array, "B S Hkv Dv"]
    bias: Float[Array, "#B #H #T #S"] | None = None
    sinks: Float32[Array, "#B H"] | None = None
    score_mod: "ScoreMod | None" = None


@dataclasses.dataclass(frozen=True)
class HeadView:
    """The heads of a call among those of its array: head h is the array's first + h // part + h // run * skip.

    count: how many heads the call has. run, skip: after so many heads, that many are left out. part: so many heads of
    the call are in one of the array, of several such runs.
    """

    count: int
    first: int
    run: int
    skip: int
    part: int = 1

    def of_array(self, head: int) -> int:
        return self.first + head // self.part + head // self.run * self.skip


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The static half of a call: hashable, so that it can key a jit cache.

    The scores are query @ key^T * scale, then softcap * tanh(scores / softcap) or score_mod, then + bias. Query i
    stands at position p = q_offset + i. Key j may be attended to if p >= j (is_causal), p - left <= j (window's left)
    and j <= p + right (window's right; -1 is no limit on that side). A window has a limit that is_causal does not
    give: (-1, -1) is None, and with is_causal its right is 0 and its left is not -1.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    q_offset: int | None = 0
    # "fp32" or "tf32" for float32 inputs, None for 16-bit ones.
    precision: str | None = None
    # Whether the forward gives lse, and what the exact one is more. "mosaic_gpu" writes neither without it.
    has_lse: bool = True
    # Whether the backward gives bias a gradient, which costs it two more products.
    bias_gradient: bool = True
    # Whether the backward gives the arrays of score_mod their gradients.
    score_mod_gradient: bool = True
    # Whether the backward has to give the same bits on every run.
    deterministic: bool = False
    # Whether the gradients of query, key and value are float32, whatever the arrays' dtype is. A deterministic
    # dquery of "mosaic_gpu" has query's dtype all the same.
    float32_gradients: bool = False
    # The heads that a call takes of query, and of key and value, where it does not take all of them ("mosaic_gpu").
    # What it gives, and lse and delta of the backward, have the call's heads alone; dout has those of query's array.
    query_heads: HeadView | None = None
    kv_heads: HeadView | None = None


def first_position(inputs: AttentionInputs, options: AttentionOptions) -> int | Int32[Array, " B"]:
    """The position of query 0: an int, or [B] int32."""
    return cast(int, options.q_offset) if inputs.q_offset is None else inputs.q_offset
