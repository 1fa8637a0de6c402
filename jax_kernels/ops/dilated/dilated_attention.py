"""dilated_attention: its checks and its plan. Its views are in branches, its forward and backward in vjp."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer

from jax_kernels import dispatch
from jax_kernels.inputs.attention import AttentionInputs, FlashArguments
from jax_kernels.ops.attention.checks import check
from jax_kernels.ops.attention.flash_attention import OP, flash_attention
from jax_kernels.ops.attention.flash_attention import prepare as prepare_attention
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS, AttentionRequest
from jax_kernels.ops.attention.vjp import AttentionCall, vary_alike
from jax_kernels.ops.checks import ranked_over, with_positive_scale
from jax_kernels.ops.dilated import branches as dilated_views
from jax_kernels.ops.dilated import launch_grouping as dilated_launches
from jax_kernels.ops.dilated import vjp as dilated_vjp
from jax_kernels.ops.dilated.branches import BranchCall
from jax_kernels.ops.dilated.pieces import Piece, of_heads, pieces_of
from jax_kernels.ops.dilated.sharded_segments import Shards
from jax_kernels.ops.dilated.vjp import DilatedCall
from jax_kernels.ops.planned_op import explained_as
from jax_kernels.ops.sharding.explicit_axes import as_attention, with_explicit_axes
from jax_kernels.plain_numbers import DILATED, plain, plain_of, with_plain_numbers
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["DilatedPlan", "check_pattern", "dilated_attention", "plan_of_call", "prepare"]


@overload
def dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = ...,
    heads: str = ...,
    combine: str = ...,
    layout: str = ...,
    order: str | None = ...,
    stop_gradient_weights: bool = ...,
    return_lse: Literal[False] = ...,
    segment_ids: Integer[Array, "B T"] | None = ...,
    scale: float | None = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"]: ...
@overload
def dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = ...,
    heads: str = ...,
    combine: str = ...,
    layout: str = ...,
    order: str | None = ...,
    stop_gradient_weights: bool = ...,
    return_lse: Literal[True],
    segment_ids: Integer[Array, "B T"] | None = ...,
    scale: float | None = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@overload
def dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = ...,
    heads: str = ...,
    combine: str = ...,
    layout: str = ...,
    order: str | None = ...,
    stop_gradient_weights: bool = ...,
    return_lse: bool = ...,
    segment_ids: Integer[Array, "B T"] | None = ...,
    scale: float | None = ...,
    deterministic: bool | None = ...,
    precision: str | None = ...,
    implementation: str | None = ...,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]: ...
@with_plain_numbers(*DILATED)
@with_explicit_axes(as_attention)
@under_defaults
def dilated_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hkv D"],
    value: Float[Array, "B T Hkv Dv"],
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = False,
    heads: str = "all",
    combine: str = "lse",
    layout: str = "overlap",
    order: str | None = None,
    stop_gradient_weights: bool = False,
    return_lse: bool = False,
    segment_ids: Integer[Array, "B T"] | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H Dv"] | tuple[Float[Array, "B T H Dv"], Float32[Array, "B H T"]]:
    """Self-attention of every rate-th token within segments, by several branches of (segment length, rate).

    Equivalent to the following JAX code, where branch i gives head h the tokens whose position in their segment is
    offset(i, h) modulo the branch's rate::

        def branch(i):
            tokens, length, rate = arange(T), segment_lengths[i], dilation_rates[i]
            # heads="all"; with heads="groups", i % rate for the heads of group i, and no token for the others
            offset = arange(H) // ceil(H / rate)
            takes = tokens % length % rate == offset[:, None]
            keep = (tokens[:, None] // length == tokens // length) & takes[:, :, None] & takes[:, None, :]
            return flash_attention(query, key, value, mask=keep, is_causal=is_causal, return_lse=True)

        outs, lses = map(stack, zip(*(branch(i) for i in range(branches))))
        weights = softmax(lses, axis=0) if combine == "lse" else full_like(lses, 1 / branches)
        out = (weights.swapaxes(2, 3)[..., None] * outs).sum(0)
        lse = logsumexp(lses, axis=0)

    B, T and H may be 0: the results and the gradients are then empty, or 0.

    Under jit on a mesh with Auto axes, the kernels are sharded over batch and heads. If the shards of the heads take
    different tokens, the program has kernels for each of these shards, and a device runs the kernels of its shard.
    "xla" gathers heads.

    It takes memory for one attention over the tokens that the branches take: no mask and no T x T array. The backward
    keeps query, key, value, out and lse.

    "mosaic_gpu" (Hopper) can read a branch in place if

    - D and Dv are equal and 64, 128 or 256, there are no segment_ids, and deterministic is not set;
    - its segment length divides T or is at least T, and its rate divides the segments into classes of a multiple of 8
      tokens;
    - order is None, or its rate is 1;
    - with heads="groups", its first query head is the first of a key head;
    - with layout="partition", segments of one length and one rate cover the sequence.

    Without gradients it reads these branches in place, short branches in one launch. With gradients it gathers some
    branches, namely if they are so short that one launch of their backward saves more time than their copies cost. All
    other branches, and all branches of other implementations, are gathered first, which copies their tokens. Gathered
    branches whose segments hold equally many tokens, as in LongNet, run as one attention, if they serve equally many
    heads and their classes divide the query heads of a key head in the same way. Their classes must also have equally
    many heads if there are segment_ids, or if is_causal is False and the rate does not divide the segments.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32; D up to 256, any T.
      key: [B, T, Hkv, D] in query's dtype; Hkv divides H. A query head's tokens count for its key head too.
      value: [B, T, Hkv, Dv] in query's dtype; Dv up to 256.
      segment_lengths: of each branch, at least 1. A length may exceed T, and need not divide T.
      dilation_rates: of each branch, from 1 to its segment length.
      is_causal: a token attends only to itself and to earlier tokens, for any order.
      heads: "all": every head runs every branch, with the offset h // ceil(H / rate) for head h. "groups": branch i
        serves only the i-th group of heads, with the offset i % rate; if the branches do not divide the heads, the
        first groups have one more head.
      combine: "lse": a token's outputs are weighted by the softmax of the branches' log-sum-exps; a branch without the
        token has weight 0. "mean": the outputs are added and divided by the number of branches. A token of a head that
        is in no branch gets out = 0 and lse = -inf.
      layout: "overlap": each branch cuts the whole sequence into segments of its length. "partition":
        segment_lengths cut the sequence one after another, and in segment i every residue class modulo
        dilation_rates[i] attends within itself, for all heads, so that each token is in one class; tokens past the
        sum of the lengths form a last segment at rate 1. heads, combine and stop_gradient_weights then have no effect
        and must keep their defaults.
      order: None, or "hilbert": a token's position in its segment is its index in hilbert_order. Has no effect at
        rate 1.
      stop_gradient_weights: pass no gradient through the weights of "lse".
      return_lse: also return the log-sum-exp over all branches. Gradients through it are exact.
      segment_ids: int32 [B, T]: packed sequences. A token attends to tokens with its id. A token with an id below 0
        attends to no token, but its values must be finite. Other integers are taken as in flash_attention.
      scale, deterministic, precision, implementation: as in flash_attention; "cudnn" supports no branch.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T] in natural log.

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, or a value is out of range.
      NotImplementedError: a named implementation cannot serve this call; the message has the reason.

    Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens" (2023), arXiv:2307.02486.
    """
    call, arrays = prepare(
        query=query,
        key=key,
        value=value,
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        is_causal=is_causal,
        heads=heads,
        combine=combine,
        layout=layout,
        order=order,
        stop_gradient_weights=stop_gradient_weights,
        return_lse=return_lse,
        segment_ids=segment_ids,
        scale=scale,
        deterministic=deterministic,
        precision=precision,
        implementation=implementation,
    )
    results = dilated_vjp.run(call, arrays)
    return results if return_lse else results[0]


@dataclasses.dataclass(frozen=True)
class DilatedPlan(dispatch.Plan):
    """The plan of dilated_attention. The fields of Plan describe its attention with most work.

    branches: (segment length, rate, plan) of each run of equal segments; a shorter last segment is a run of its own.
    The other fields have one value for each run. in_place, in_place_differentiated: whether the kernel reads the run in
    place (else its rows are gathered), in a call without gradients and in a call with gradients. devices: the number of
    devices that share a segment; if more than 1, the length in `branches` is the number of tokens on one device.
    shifts: the distances round the ring of these devices over which keys travel, one for each step.
    """

    branches: tuple[tuple[int, int, dispatch.Plan], ...] = ()
    in_place: tuple[bool, ...] = ()
    in_place_differentiated: tuple[bool, ...] = ()
    devices: tuple[int, ...] = ()
    shifts: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.implementation} ({self.why})", f"  device: {self.device}"]
        rows = zip(self.branches, self.in_place, self.in_place_differentiated, self.devices, self.shifts, strict=True)
        for (length, rate, plan), in_place, in_place_differentiated, devices, shifts in rows:
            how = f"{plan.implementation} {'in place' if in_place else 'of gathered rows'}"
            how += "" if in_place == in_place_differentiated else ", with gradients of gathered rows"
            if devices > 1:
                how += f" in {len(shifts)} steps of a ring of {devices} devices"
            blocks = "" if plan.config is None else f", {plan.config} from {plan.source}"
            lines.append(f"  segments of {length} at rate {rate}: {how}{blocks}")
        return "\n".join(lines + self.lines_of_others())


def plan_of_call(op: str, **arguments: Any) -> DilatedPlan:
    """The plan of a call of dilated_attention or sequence_parallel_dilated_attention. op: the name that the plan shows.

    arguments: the op's arguments; and shards, the mesh axis over which the tokens are sharded, or None. With shards,
    arrays have one device's tokens. Raises the op's errors for bad input.
    """
    checked = _check(**arguments)
    request, arguments = checked.request, checked.arguments
    plans: dict[Piece, dispatch.Plan] = {}
    in_place: tuple[set[Piece], ...] = set(), set()
    for views in checked.pattern.calls():
        with dispatch.on_device(request.device):
            plan = flash_attention.plan(**_specs(request, views), **arguments)  # type: ignore[attr-defined]
        plans |= dict.fromkeys(views.pieces, plan)
        for found, parts in zip(in_place, _parts(views, plan, request), strict=True):
            found |= {piece for part in parts if part.is_strided for piece in part.pieces}
    pieces = sorted(plans, key=lambda piece: (piece.branch, piece.start))
    if pieces:
        most = plans[max(pieces, key=lambda piece: piece.segments * piece.rows**2)]
    else:
        most = flash_attention.plan(*checked.inputs[:3], **arguments)  # type: ignore[attr-defined]
    fields = {field.name: getattr(most, field.name) for field in dataclasses.fields(most)}
    branches = tuple((piece.length, piece.rate, plans[piece]) for piece in pieces)
    of_pieces = [tuple(piece in found for piece in pieces) for found in in_place]
    return DilatedPlan(
        **fields | {"op": op},
        branches=branches,
        in_place=of_pieces[0],
        in_place_differentiated=of_pieces[1],
        devices=tuple(1 if piece.span is None else piece.span.devices for piece in pieces),
        shifts=tuple((0,) if piece.span is None else piece.span.shifts for piece in pieces),
    )


explained_as(functools.partial(plan_of_call, "dilated_attention"))(dilated_attention)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pattern:
    """The branches of a checked call of dilated_attention.

    branches: (segment length, rate) of each. heads, layout, order: the arguments of dilated_attention. shards: the mesh
    axis over which the tokens are sharded; None for one device.
    """

    request: AttentionRequest
    branches: tuple[tuple[int, int], ...]
    heads: str
    layout: str
    order: str | None
    has_segment_ids: bool
    shards: Shards | None

    def calls(self, index: int = 0, count: int = 1) -> tuple[BranchCall, ...]:
        """The attention calls of shard `index` of the heads, if the heads are sharded over `count` devices.

        Empty for a call without a token or a head.
        """
        request = self.request
        if 0 in (request.batch, request.q_length, request.heads):
            return ()
        pieces = pieces_of(
            request.q_length,
            request.heads,
            self.branches,
            heads=self.heads,
            layout=self.layout,
            order=self.order,
            is_causal=request.is_causal,
            shards=self.shards,
        )
        part = self.of_part(count)
        if count > 1:
            pieces = of_heads(pieces, index * part.heads, (index + 1) * part.heads)
        return dilated_views.calls_of(
            pieces, part.heads, part.kv_heads, is_causal=request.is_causal, has_segment_ids=self.has_segment_ids
        )

    def of_part(self, count: int) -> AttentionRequest:
        """The request for one shard of the heads, of `count` shards. A single key head is repeated in each shard."""
        request = self.request
        return dataclasses.replace(request, heads=request.heads // count, kv_heads=max(request.kv_heads // count, 1))


class _Checked(NamedTuple):
    """A checked call of dilated_attention.

    request, inputs: of one flash_attention over all tokens, without branches. pattern: the branches. merge: branches,
    is_mean, is_alone, stop_gradient_weights and return_lse, the fields of DilatedCall that say how branches are merged,
    by name. arguments: the options of flash_attention, by name, equal for every attention of the call.
    """

    request: AttentionRequest
    inputs: AttentionInputs
    pattern: _Pattern
    merge: dict[str, Any]
    arguments: dict[str, Any]


def _check(
    *, query, key, value, segment_lengths, dilation_rates, is_causal=False, heads="all", combine="lse",
    layout="overlap", order=None, stop_gradient_weights=False, return_lse=False, segment_ids=None, scale=None,
    deterministic=None, precision=None, implementation=None, shards: Shards | None = None,
) -> _Checked:  # fmt: skip
    """The checked arguments of dilated_attention. Raises the errors that it documents.

    shards: the mesh axis over which the tokens are sharded, or None. The arrays then have one device's tokens.
    """
    if isinstance(segment_ids, tuple | list):
        raise TypeError("segment_ids: got a pair, want one int32 array [B, T]: queries and keys are the same tokens")
    known = ", ".join(repr(name) for name in IMPLEMENTATIONS if name != "cudnn")
    if implementation == "cudnn":
        reason = f"it serves no branch: a branch's log-sum-exp has a gradient; want one of {known}"
        raise NotImplementedError(f"implementation='cudnn' cannot serve this dilated_attention: {reason}")
    if isinstance(implementation, str) and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not known for dilated_attention; want one of {known}")
    given = FlashArguments(
        query=query, key=key, value=value, is_causal=is_causal, return_lse=return_lse, scale=scale,
        deterministic=deterministic, precision=precision, implementation=implementation,
    )  # fmt: skip
    request, inputs = check(given)
    if jax.export.is_symbolic_dim(request.q_length):
        raise ValueError(f"query: got the symbolic length {request.q_length}, want an int: segments depend on it")
    if request.kv_length != request.q_length:
        raise ValueError(f"key: got length {request.kv_length}, want query's length {request.q_length}")
    if segment_ids is not None:
        if shards is not None and shards.devices > 1:
            segment_ids = ranked_over(shards.axis_name, segment_ids)
        _, inputs = check(FlashArguments(query=query, key=key, value=value, segment_ids=segment_ids))
    branches = check_pattern(
        segment_lengths, dilation_rates, heads, combine, layout, order, stop_gradient_weights=stop_gradient_weights
    )
    if heads == "groups" and 0 < request.heads < len(branches):
        raise ValueError(
            f"heads: got 'groups' with {len(branches)} segment_lengths for {request.heads} heads, want at least one "
            "head for each of them"
        )
    pattern = _Pattern(
        request=request,
        branches=branches,
        heads=heads,
        layout=layout,
        order=order,
        has_segment_ids=segment_ids is not None,
        shards=shards if shards is not None and shards.devices > 1 else None,
    )
    merge = {
        "branches": len(branches) if layout == "overlap" else 1,
        "is_mean": combine == "mean",
        "is_alone": heads == "groups" or layout == "partition" or len(branches) == 1,
        "stop_gradient_weights": bool(stop_gradient_weights),
        "return_lse": request.return_lse,
    }
    arguments = {
        "is_causal": request.is_causal,
        "scale": scale,
        "return_lse": True,
        "deterministic": request.deterministic,
        "precision": precision,
        "implementation": implementation,
    }
    return _Checked(request, inputs, pattern, merge, arguments)


def check_pattern(
    segment_lengths: Any,
    dilation_rates: Any,
    heads: Any,
    combine: Any,
    layout: Any,
    order: Any,
    *,
    stop_gradient_weights: Any = False,
) -> tuple[tuple[int, int], ...]:
    """((segment length, rate) of each branch), as ints, after checks of dilated_attention's options.

    The parameters are dilated_attention's. Raises its TypeErrors and ValueErrors for them.
    """
    segment_lengths = plain_of("segment_lengths", segment_lengths)
    dilation_rates = plain_of("dilation_rates", dilation_rates)
    stop_gradient_weights = plain(stop_gradient_weights)
    for name, numbers in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        has_items = isinstance(numbers, Sequence) or (isinstance(numbers, np.ndarray) and numbers.ndim > 0)
        if isinstance(numbers, str | bytes) or not has_items:
            raise TypeError(f"{name}: got {type(numbers).__name__}, want a sequence of ints")
        if any(isinstance(x, bool) or not isinstance(x, int | np.integer) for x in numbers):
            raise TypeError(f"{name}: got {numbers!r}, want a sequence of ints")
        if len(numbers) == 0 or any(x < 1 for x in numbers):
            raise ValueError(f"{name}: got {numbers!r}, want one number or more, all positive")
    if len(segment_lengths) != len(dilation_rates):
        raise ValueError(
            f"dilation_rates: got {len(dilation_rates)} of them for {len(segment_lengths)} segment_lengths, want one "
            "for each"
        )
    for index, (length, rate) in enumerate(zip(segment_lengths, dilation_rates, strict=True)):
        if rate > length:
            raise ValueError(f"dilation_rates[{index}]: got {rate}, want at most segment_lengths[{index}] = {length}")
    for name, got, *choices in (
        ("heads", heads, "all", "groups"),
        ("combine", combine, "lse", "mean"),
        ("layout", layout, "overlap", "partition"),
        ("order", order, None, "hilbert"),
    ):
        if not isinstance(got, str | None) or got not in choices:
            raise ValueError(f"{name}: got {got!r}, want {choices[0]!r} or {choices[1]!r}")
    if not isinstance(stop_gradient_weights, bool | np.bool_):
        raise TypeError(f"stop_gradient_weights: got {type(stop_gradient_weights).__name__}, want a bool")
    if stop_gradient_weights and combine == "mean":
        raise ValueError("stop_gradient_weights: got True with combine='mean', want False: its weights are constants")
    if layout == "partition" and (heads, combine, bool(stop_gradient_weights)) != ("all", "lse", False):
        raise ValueError(
            f"layout: got 'partition' with heads={heads!r}, combine={combine!r} and stop_gradient_weights="
            f"{stop_gradient_weights}, want heads='all', combine='lse' and False: each token is in one class"
        )
    return tuple((int(length), int(rate)) for length, rate in zip(segment_lengths, dilation_rates, strict=True))


def _specs(request: AttentionRequest, views: BranchCall) -> dict[str, Any]:
    """The query, key, value and segment_ids of one attention, by name, as jax.ShapeDtypeStructs of compact arrays."""
    entries = views.entries(request.batch, request.heads)
    spec = lambda *shape, dtype=request.dtype: jax.ShapeDtypeStruct((entries, *shape), jnp.dtype(dtype))
    specs: dict[str, Any] = {
        "query": spec(views.rows, views.heads, request.head_dim),
        "key": spec(views.rows, views.kv_heads, request.head_dim),
        "value": spec(views.rows, views.kv_heads, request.v_head_dim),
    }
    if views.is_masked:
        specs["segment_ids"] = (spec(views.rows, dtype="int32"),) * 2
    return specs


def prepare(**keywords: Any) -> tuple[DilatedCall, tuple[Any, ...]]:
    """Checks and plans a call of dilated_attention. Returns (call, arrays), the arguments of dilated_vjp.run.

    keywords: the arguments of dilated_attention, and shards: the mesh axis over which the tokens are sharded, or None.
    arrays: (query, key, value, segment ids or None). A scale below 0 has become part of query.
    """
    checked = _check(**keywords)
    query, scale = with_positive_scale(checked.inputs.query, checked.arguments["scale"])  # outside the custom_vjp
    recipe = _Recipe(
        pattern=checked.pattern,
        merge=tuple(checked.merge.items()),
        arguments=tuple((checked.arguments | {"scale": scale}).items()),
    )
    call = recipe.call()
    arrays = vary_alike((query, checked.inputs.key, checked.inputs.value, checked.inputs.q_segment_ids))
    if not call.attentions:
        OP.choose(checked.request, checked.arguments["implementation"])  # raises for a name that cannot be served
        return call, arrays
    parts = dataclasses.replace(recipe, implementation=call.attentions[0][1].implementation)
    return dataclasses.replace(call, of_heads=parts.call), arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recipe:
    """The data from which a checked call is planned, for all heads or for one shard of the heads.

    merge: (name, value) of the fields of DilatedCall that say how branches are merged. arguments: (name, value) of
    options of flash_attention. implementation: the implementation of all attentions; None to choose it by `arguments`.
    """

    pattern: _Pattern
    merge: tuple[tuple[str, Any], ...]
    arguments: tuple[tuple[str, Any], ...]
    implementation: str | None = None

    def call(self, index: int = 0, count: int = 1) -> DilatedCall:
        """The planned call of shard `index` of the heads, if the heads are sharded over `count` devices."""
        request, merge, arguments = self.pattern.of_part(count), dict(self.merge), dict(self.arguments)
        if self.implementation is not None:
            arguments["implementation"] = self.implementation
        is_merged = merge["branches"] > 1 and (merge["is_mean"] or not merge["is_alone"])
        plan = lambda arrays: prepare_attention(FlashArguments(**arrays, **arguments))[0]
        attentions: list[tuple[BranchCall, AttentionCall]] = []
        differentiated: list[tuple[BranchCall, AttentionCall]] = []
        for views in self.pattern.calls(index, count):
            with dispatch.on_device(request.device):
                planned = jax.eval_shape(plan, _specs(request, views))
            # The Hopper kernel's blocks leave no shared memory for a float32 out, so it rounds partial outs once.
            if is_merged and planned.implementation != "mosaic_gpu":
                planned = dataclasses.replace(planned, out_dtype="float32")
            for found, parts in zip((attentions, differentiated), _parts(views, planned, request), strict=True):
                found += [(part, _of_views(planned, part, request)) for part in parts]
        sums_dquery = bool(attentions) and _reads_views(attentions[0][1], request)
        return DilatedCall(tuple(attentions), tuple(differentiated), **merge, sums_dquery=sums_dquery)


def _parts(
    views: BranchCall, planned: AttentionCall | dispatch.Plan, request: AttentionRequest
) -> tuple[tuple[BranchCall, ...], tuple[BranchCall, ...]]:
    """The calls into which one attention is split: (for a call without gradients, for a call with gradients).

    views: an attention of all pieces whose entries have one shape, none of them strided. planned: the planned call or
    the Plan of it. Without gradients, each piece that a kernel can read in place gets a strided call. With gradients,
    only pieces get one for which this saves time. request: of the whole dilated_attention, or of its shard of the
    heads.
    """
    if not _reads_views(planned, request):
        return (views,), (views,)
    in_place = dilated_views.split_strided(views, request.q_length, request.heads // request.kv_heads)
    return in_place, dilated_launches.launches_of(views, request, planned.config.forward.block_q)


def _reads_views(planned: AttentionCall | dispatch.Plan, request: AttentionRequest) -> bool:
    """Whether the attention's kernels can take some heads of a larger array, so that they read branches in place."""
    whole = request.head_dim == request.v_head_dim and request.head_dim in (64, 128, 256)
    return planned.implementation == "mosaic_gpu" and whole and not request.deterministic


def _of_views(planned: AttentionCall, views: BranchCall, request: AttentionRequest) -> AttentionCall:
    """The planned call for `views`: if strided, the options query_heads and kv_heads select the heads of its view.

    A call of gathered rows stays as it is. request: of the whole dilated_attention, or of its shard of the heads.
    """
    if not views.is_strided:
        return planned
    of_query, of_key = (views.head_view(request.heads, heads) for heads in (request.heads, request.kv_heads))
    options = dataclasses.replace(planned.options, query_heads=of_query, kv_heads=of_key)
    return dataclasses.replace(planned, options=options)
