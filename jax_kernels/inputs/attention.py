"""The arrays, options and results of an attention call, from the public op down to a kernel."""

import dataclasses
from typing import Any, NamedTuple


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

    query: Any
    key: Any
    value: Any
    mask: Any = None
    bias: Any = None
    sinks: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    kv_lengths: Any = None
    q_offset: Any = None
    score_mod: Any = None
    lists: Any = None
    reach: Any = None
    key_norms: Any = None
    earlier_out: Any = None
    earlier_lse: Any = None


class AttentionResult(NamedTuple):
    """The result of a forward.

    out: [B, T, H, Dv]. lse: [B, H, T] float32, natural log; None from "cudnn", and from "mosaic_gpu" without
    AttentionOptions.has_lse. excess: shaped like lse, the exact log-sum-exp minus lse; None if lse is exact. lse is
    inexact only with a bias or a score_mod that may mask: next to scores of -1e9, float32 loses the log of the sum.
    """

    out: Any
    lse: Any
    excess: Any = None


class AttentionGradients(NamedTuple):
    """The gradients of AttentionInputs, each with its array's shape and dtype. None for an array without gradient.

    score_mod: a ScoreMod of the gradients of its arrays.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    sinks: Any = None
    score_mod: Any = None


@dataclasses.dataclass(frozen=True)
class HeadView:
    """The heads of a call in its array: head h is array head first + h // part + h // run * skip.

    count: the number of heads of the call. run, skip: after every `run` heads, `skip` array heads are skipped. part:
    the number of successive heads that lie in one array head; they may belong to several runs.
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
    has position p = q_offset + i. Key j may be attended to if p >= j (is_causal), p - left <= j (window's left)
    and j <= p + right (window's right; -1 is no limit on that side). A window always adds a limit to is_causal: None
    replaces (-1, -1), and with is_causal the right is 0 and the left is not -1.
    """

    scale: float
    is_causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    q_offset: int | None = 0
    # "fp32" or "tf32" for float32 inputs, None for 16-bit inputs.
    precision: str | None = None
    # Whether the forward returns lse and excess. "mosaic_gpu" writes neither if this is False.
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


def first_position(inputs: AttentionInputs, options: AttentionOptions) -> Any:
    """The position of query 0: an int, or [B] int32."""
    return options.q_offset if inputs.q_offset is None else inputs.q_offset
