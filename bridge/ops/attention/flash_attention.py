"""flash_attention on PyTorch tensors."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Literal, Unpack, overload

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.learned_scale import in_query
from jax_kernels.bridge.interop.arguments.plain_numbers import ATTENTION, plain_options
from jax_kernels.bridge.jax_functions import flops
from jax_kernels.bridge.jax_functions.api import CallKey
from jax_kernels.bridge.operators import plan_query, torch_operator
from jax_kernels.bridge.operators.call_cache import CallCache, same_tensors
from jax_kernels.bridge.operators.profiler_names import named_function
from jax_kernels.bridge.ops.attention import flash_attention_vmap, float_masks, length_buckets, masked_attention
from jax_kernels.bridge.ops.attention.argument_aliases import renamed
from jax_kernels.bridge.ops.attention.attention_checks import (
    check_statics,
    checked,
    constant,
    segment_pair,
    window_sides,
)
from jax_kernels.bridge.ops.attention.attention_types import FlashOptions, OutAndLse, Outputs, SegmentIds, Window
from jax_kernels.bridge.ops.attention.cached_calls import known_call
from jax_kernels.bridge.ops.attention.flash_attention_operator import (
    Arguments,
    Attention,
    Options,
    Tensors,
    forward_op,
    inference_op,
    need_gradient,
)
from jax_kernels.bridge.translate.score_mods import ScoreMod
from jax_kernels.bridge.translate.snapshots import key_of
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import flash_attention as attention

__all__ = ["flash_attention"]

flash_attention_vmap.define_rules()
flops.define_formulas("flash_attention", "flash_attention_inference", "flash_attention_backward")


@overload
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[FlashOptions],
) -> torch.Tensor: ...
@overload
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[FlashOptions],
) -> OutAndLse: ...
@overload
def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_lse: bool, **options: Unpack[FlashOptions]
) -> Outputs: ...
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | Mask | None = None,
    is_causal: bool = False,
    window: Window | None = None,
    segment_ids: SegmentIds | None = None,
    kv_lengths: torch.Tensor | None = None,
    q_offset: int | torch.Tensor = 0,
    score_mod: ScoreMod | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    softcap: float | torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    precision: str | None = None,
    implementation: str | None = None,
    **other_names: Any,
) -> Outputs:
    """jax_kernels.flash_attention on PyTorch tensors: gradients of query, key, value, bias, sinks, also through lse.

    It runs on the tensors' own device, after the work on PyTorch's current stream. The host never waits for the GPU.
    Inputs that are contiguous and aligned to 256 bytes are read in place; others may be copied. PyTorch owns the
    results, which may be used on any stream.

    | under | behaviour |
    |---|---|
    | torch.compile | works with fullgraph=True; JAX compiles once for each set of shapes |
    | autocast | casts query, key, value and a 16-bit bias to the autocast dtype |
    | torch.func.vmap | one call; a loop if sinks are mapped, or for gradients of a bias or sinks |
    | activation checkpointing, torch.export, torch.func.grad | works |
    | a CUDA graph | works on the direct route, after a first call outside the graph; else raises |
    | double backward, forward mode | raises |

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32, on a CPU or a CUDA device.
      key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv]; in query's dtype and on its device.
      bias: broadcastable to [B, H, T, S], in query's dtype or float32, added to the scores.
      mask: bool, broadcastable to [B, H, T, S], True where a query may attend. Floats of 0 and 1 are accepted: other
        values raise ValueError on a CPU, and make the results NaN on a GPU. Or a masks.Mask, prepared by prepare_mask
        or not. ValueError if a tensor that the Mask's function reads has changed since the Mask was made. The Mask's
        arrays get no gradient; they are copied to query's device, JAX arrays once for each Mask.
      is_causal: keep key j for query i where q_offset + i >= j. window: an int, or (left, right): also keep only keys
        from q_offset + i - left to q_offset + i + right, both included; -1 or None is no limit.
      segment_ids: int32 [B, T], or a (query, key) pair [B, T], [B, S]: keep pairs of equal ids, none below 0.
      kv_lengths: [B] int32, the number of valid keys. q_offset: position of query 0, an int, or int32 [] or [B].
      score_mod: a function (score, b, h, q_idx, kv_idx) of scalars, in torch's elementwise operations or in jnp code.
        Each call reads the current values of the numbers that it uses, also in lists, dicts and attributes. In torch
        operations it may read tensors. Each call reads their current values, and they get gradients.
        (masks.from_function keeps the values from when the mask was made.) int64 tensors are read as int32: a value out
        of range raises ValueError on a CPU, and makes the results NaN on a GPU. JAX arrays that the function closes
        over get no gradient; for gradients, pass them as arguments through bridge.from_jax.
      sinks: [H], bfloat16, float16 or float32, logits that only join the softmax's denominator.
      scale, softcap, window and other numbers: Python's, NumPy's or JAX's numbers, or tensors without axes, whose
        values are read in each call. window: also a tensor of two integers. A scale that requires a gradient gets
        one: query is then multiplied by scale * sqrt(D), and rounded to its dtype.
      deterministic: None follows torch.use_deterministic_algorithms; if that is off, XLA's flag decides.
      other_names: attn_mask, softmax_scale, causal or window_size, for mask, scale, is_causal and window. causal and
        window_size come from flash-attn, which puts the last query at the last key. So they need T = S, or a q_offset.
      Other arguments: as in jax_kernels.flash_attention.

    DTensors: batch and heads may be sharded, in the same way in all tensors. Results are DTensors, with gradients. A
    call with a Mask or a score_mod runs as described in bridge.from_jax. JAX compiles and keeps a program for each
    function, each structure of a Mask and each set of shapes, including the shapes of a Mask's arrays. With a Mask, a
    graph of torch.compile serves only this Mask. All calls that torch.func.vmap maps have the same Mask.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T].

    Raises:
      TypeError: an argument is not a tensor, or has an unsupported dtype.
      ValueError: shapes do not fit together, or tensors are on several devices or on an unsupported device.
      NotImplementedError: an argument, or a named implementation, cannot serve this call (the error says why), or the
        call is differentiated in forward mode (torch.func.jvp, torch.autograd.forward_ad).
      RuntimeError: the call is differentiated twice, a CUDA graph that cannot hold the call is being captured, JAX
        lacks the device, or the process was forked from a process in which JAX was running.
    """
    if other_names:
        own: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "window": window, "scale": scale}
        own |= renamed("flash_attention", other_names, own | {"query": query, "key": key, "q_offset": q_offset})
        mask, is_causal, window, scale = own.values()
    if isinstance(scale, torch.Tensor):
        query, scale = in_query(query, scale)
    statics: Any = None
    present: Sequence[torch.Tensor] = ()
    is_compiling = torch.compiler.is_compiling()
    by_function = score_mod is not None or isinstance(mask, Mask)
    if not is_compiling:
        if by_function or not (bias is mask is segment_ids is kv_lengths is sinks is None and type(q_offset) is int):
            present, there = _present(
                query, key, value, bias, sinks, mask, segment_ids, kv_lengths, q_offset, by_function
            )
        else:
            present, there = (query, key, value), None
        statics = (
            *(is_causal, window, key_of(score_mod), scale, softcap),
            *(return_lse, deterministic, precision, implementation),
            # 1 equals True, but an argument may accept only one of the types.
            *(type(is_causal), None if window is None else _kinds(window), type(scale), type(softcap)),
            *(type(return_lse), type(deterministic)),
            *(there, None if isinstance(q_offset, torch.Tensor) else q_offset),
            torch.are_deterministic_algorithms_enabled(),
        )
        known = masked_attention.lookup(statics, present) if by_function else _KNOWN.lookup(statics, present)
        if known is not None:
            return known(present)
    arguments: dict[str, Any] = dict(  # noqa: C408
        query=query, key=key, value=value, bias=bias, mask=mask, is_causal=is_causal, window=window,
        segment_ids=segment_ids, kv_lengths=kv_lengths, q_offset=q_offset, score_mod=score_mod, sinks=sinks,
        scale=scale, softcap=softcap, return_lse=return_lse, deterministic=deterministic, precision=precision,
        implementation=implementation,
    )  # fmt: skip
    if is_compiling and not by_function:
        # Without a record: it would become a node of the graph.
        return _in_graph(**arguments)
    return _call(FlashArguments(**arguments), statics, present)


_KNOWN = CallCache()


def _kinds(window: Window) -> type | tuple[type, ...]:
    """Returns the type of `window`, or for a tuple the types of its entries, for the key of a cached call.

    Without the types, window=True would find the cached call of window=1, although only the int is accepted.
    """
    return tuple(map(type, window)) if isinstance(window, tuple) else type(window)


def _present(
    query, key, value, bias, sinks, mask, segment_ids, kv_lengths, q_offset, by_function
) -> tuple[list[torch.Tensor], Hashable]:
    """Returns (the call's tensors that are not None, which of the tensors it has), a part of the cached call's key.

    The tensors are in the order query, key, value, bias, sinks, mask, segment ids, kv_lengths, q_offset. One tensor of
    segment ids counts for queries and for keys, as in flash_attention_operator.Tensors; but once if by_function. The
    second result is a tuple: for each of the tensors whether it is given, the types of segment_ids and q_offset, and
    id(mask) for a Mask object, else None. Nothing is checked yet.

    by_function: whether the call has a score_mod or a Mask object.
    """
    ids: Sequence[torch.Tensor] = ()
    if isinstance(segment_ids, torch.Tensor):
        ids = (segment_ids,) if by_function else (segment_ids, segment_ids)
    elif isinstance(segment_ids, tuple | list):
        ids = segment_ids
    is_object = by_function and isinstance(mask, Mask)
    offset = q_offset if isinstance(q_offset, torch.Tensor) else None
    every = (query, key, value, bias, sinks, None if is_object else mask, *ids, kv_lengths, offset)
    there = [x is not None for x in every]  # faster than a generator
    of_mask = id(mask) if is_object else None
    return [x for x in every if x is not None], (*there, type(segment_ids), type(q_offset), of_mask)


@torch_internals.node_in_graph
def _in_graph(**arguments: Any) -> Outputs:
    """Runs flash_attention without a Mask or a score_mod in a graph of torch.compile.

    torch.compile does not trace this function: each name that it sees adds to its checks before every call.

    arguments: the fields of a FlashArguments. The record itself would become a node of its own, which the graph of a
    checkpoint cannot have.
    """
    constants = {name: constant(x) for name, x in arguments.items() if name != "q_offset"}
    return _call(FlashArguments(**arguments | constants), None, (), is_traced=True)


def _call(
    given: FlashArguments[torch.Tensor], statics: Hashable, present: Sequence[torch.Tensor], *, is_traced: bool = False
) -> Outputs:
    """Runs a call that is not cached yet. Returns out, or (out, lse).

    A call with a Mask or a score_mod runs as a JAX function by from_jax, others by flash_attention's own operators.

    statics, present: the key under which the call is cached: its hashable part, or None for no caching, and the
    tensors. is_traced: whether the call is part of a graph of torch.compile.
    """
    if plain := plain_options(ATTENTION, given.by_name()):
        return _run_again(dataclasses.replace(given, **plain), is_traced=is_traced)
    if dtensors.are_in(given.query, given.key, given.value):
        return dtensors.attention(flash_attention, given.by_name())
    if float_masks.is_float(given.mask):
        mask, is_valid = float_masks.as_bool("mask", given.mask)
        return float_masks.or_nan(_run_again(dataclasses.replace(given, mask=mask), is_traced=is_traced), is_valid)
    if given.score_mod is not None or isinstance(given.mask, Mask):
        return masked_attention.masked_attention(given, None if statics is None else CallKey(statics, present))
    given = checked(given)
    check_statics(given)
    if statics is not None:
        plan_query.raise_plan_if_asked(attention.flash_attention, given.query.device, **given.by_name())
    call = _operands(given)
    if statics is not None and (padded := _bucketed(given, call)) is not None:
        return flash_attention(**padded.by_name())
    results = _run(call, is_traced=is_traced)
    read = [x for x in call.tensors if x is not None]
    if statics is not None and torch_internals.is_plain_eager() and same_tensors(read, present):
        _KNOWN.record(statics, present, lambda: known_call(call.tensors, call.options))
    return results


def _run_again(given: FlashArguments[torch.Tensor], *, is_traced: bool) -> Outputs:
    """Runs a call whose arguments have changed, which may be a cached call now. is_traced: as in _call."""
    return _call(given, None, (), is_traced=True) if is_traced else flash_attention(**given.by_name())


def _operands(given: FlashArguments[torch.Tensor]) -> Arguments:
    """Returns the arguments of the operators for a checked call without a Mask and without a score_mod."""
    q_ids, kv_ids = segment_pair(given.segment_ids)
    left, right = window_sides(given.window)
    named = given.by_name() | {
        "q_segment_ids": q_ids,
        "kv_segment_ids": kv_ids,
        "window_left": left,
        "window_right": right,
    }
    is_tensor = isinstance(given.q_offset, torch.Tensor)
    tensors = named | {"q_offset": given.q_offset if is_tensor else None}
    options = named | {"q_offset": 0 if is_tensor else given.q_offset}
    return Arguments(
        tensors=Tensors(**{name: tensors[name] for name in Tensors._fields}),
        options=Options(**{name: options[name] for name in Options._fields}),
        backward=None,
    )


def _bucketed(given: FlashArguments[torch.Tensor], call: Arguments) -> FlashArguments[torch.Tensor] | None:
    """Returns a call's arguments with keys padded to a length bucket, if their number grows from call to call.

    None if it does not grow, if a gradient is needed, with segment ids, with a named implementation, and under
    torch.compile or torch.func. call: the operators' arguments.
    """
    if (
        given.segment_ids is not None
        or given.implementation
        or need_gradient(call.tensors)
        or not torch_internals.is_plain_eager()
    ):
        return None
    return length_buckets.pad_to_bucket(given, (call.options._replace(q_offset=0), given.sinks is None))


def _run(call: Arguments, *, is_traced: bool) -> Outputs:
    """Runs a checked call by the operators: returns out, or with options.return_lse (out, lse)."""
    arguments = (*call.tensors, *call.options)
    operator = forward_op if call.options.return_lse else inference_op
    if is_traced or not torch_internals.is_plain_eager():
        results = operator(*arguments)
    elif need_gradient(call.tensors):
        results = named_function(Attention, "flash_attention").apply(call.options.return_lse, *arguments)
    else:
        results = torch_operator.below_autograd(operator, *arguments)
    if not call.options.return_lse:
        return results
    out, rows = results
    return out, call.tensors.lse_of(rows)
