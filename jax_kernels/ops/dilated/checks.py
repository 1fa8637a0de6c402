"""The checks of dilated_attention and of its pattern. An error names the argument, its value and the wanted values."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_kernels.inputs.attention import AttentionInputs, FlashArguments
from jax_kernels.ops.attention.checks import check as check_attention
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.ops.checks import check_known, ranked_over
from jax_kernels.ops.dilated import branches as dilated_views
from jax_kernels.ops.dilated.branches import BranchCall
from jax_kernels.ops.dilated.pieces import of_heads, pieces_of
from jax_kernels.ops.dilated.sharded_segments import Shards
from jax_kernels.plain_numbers import plain, plain_of

__all__ = ["Checked", "Pattern", "check", "check_pattern"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern:
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


class Checked(NamedTuple):
    """A checked call of dilated_attention.

    request, inputs: of one flash_attention over all tokens, without branches. pattern: the branches. merge: branches,
    is_mean, is_alone, stop_gradient_weights and return_lse, the fields of DilatedCall that say how branches are merged,
    by name. arguments: the options of flash_attention, by name, equal for every attention of the call.
    """

    request: AttentionRequest
    inputs: AttentionInputs
    pattern: Pattern
    merge: dict[str, Any]
    arguments: dict[str, Any]


def check(
    *, query, key, value, segment_lengths, dilation_rates, is_causal=False, heads="all", combine="lse",
    layout="overlap", order=None, stop_gradient_weights=False, return_lse=False, segment_ids=None, scale=None,
    deterministic=None, precision=None, implementation=None, shards: Shards | None = None,
) -> Checked:  # fmt: skip
    """The checked arguments of dilated_attention. Raises the errors that it documents.

    shards: the mesh axis over which the tokens are sharded, or None. The arrays then have one device's tokens.
    """
    if isinstance(segment_ids, tuple | list):
        raise TypeError("segment_ids: got a pair, want one int32 array [B, T]: queries and keys are the same tokens")
    known = ", ".join(repr(name) for name in IMPLEMENTATIONS if name != "cudnn")
    if isinstance(implementation, str) and implementation == "cudnn":
        reason = (
            f"it serves no branch, since the merge needs the gradient of a branch's log-sum-exp; want one of {known}"
        )
        raise NotImplementedError(f"implementation='cudnn' cannot serve this dilated_attention: {reason}")
    if isinstance(implementation, str) and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: got {implementation!r} for dilated_attention, want one of {known}")
    given = FlashArguments(
        query=query, key=key, value=value, is_causal=is_causal, return_lse=return_lse, scale=scale,
        deterministic=deterministic, precision=precision, implementation=implementation,
    )  # fmt: skip
    request, inputs = check_attention(given)
    check_known("query", "length", request.q_length, "segments depend on it")
    check_known("query", "number of heads", request.heads, "each head has its own offset")
    if request.kv_length != request.q_length:
        raise ValueError(f"key: got length {request.kv_length}, want query's length {request.q_length}")
    if segment_ids is not None:
        if shards is not None and shards.devices > 1:
            segment_ids = ranked_over(shards.axis_name, segment_ids)
        _, inputs = check_attention(FlashArguments(query=query, key=key, value=value, segment_ids=segment_ids))
    branches = check_pattern(
        segment_lengths, dilation_rates, heads, combine, layout, order, stop_gradient_weights=stop_gradient_weights
    )
    if heads == "groups" and 0 < request.heads < len(branches):
        raise ValueError(
            f"heads: got 'groups' with {len(branches)} segment_lengths for {request.heads} heads, want at least one "
            "head for each of them"
        )
    pattern = Pattern(
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
    return Checked(request, inputs, pattern, merge, arguments)


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
