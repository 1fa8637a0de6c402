"""flash_attention on PyTorch tensors."""

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch

from jax_kernels.bridge.interop import dtensors, torch_internals
from jax_kernels.bridge.interop.plain_numbers import ATTENTION, plain_options
from jax_kernels.bridge.jax_functions import flops
from jax_kernels.bridge.jax_functions.api import CallKey
from jax_kernels.bridge.operators import plan_query, torch_operator
from jax_kernels.bridge.operators.call_cache import CallCache, same_tensors
from jax_kernels.bridge.ops.attention import flash_attention_vmap, float_masks, length_buckets, masked_attention
from jax_kernels.bridge.ops.attention.argument_aliases import renamed
from jax_kernels.bridge.ops.attention.attention_checks import (
    as_torch_is_set,
    check_inputs,
    check_statics,
    constant,
    segment_pair,
    window_sides,
)
from jax_kernels.bridge.ops.attention.attention_types import FlashOptions, OutAndLse, Outputs, SegmentIds, Window
from jax_kernels.bridge.ops.attention.flash_attention_operator import (
    Attention,
    Options,
    Tensors,
    forward_op,
    inference_op,
    known_call,
)
from jax_kernels.bridge.ops.attention.length_buckets import KeyArrays
from jax_kernels.bridge.translate.score_mods import ScoreMod
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import flash_attention as attention

__all__ = ["flash_attention"]

flash_attention_vmap.define_rules()
flops.define_formulas("flash_attention", "flash_attention_inference", "flash_attention_backward")


class FlashArguments(NamedTuple):
    """The arguments of one call of flash_attention, unchanged and unchecked, in the order of its signature."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | Mask | None
    is_causal: bool
    window: Window | None
    segment_ids: SegmentIds | None
    kv_lengths: torch.Tensor | None
    q_offset: Any
    score_mod: ScoreMod | None
    sinks: torch.Tensor | None
    scale: Any
    softcap: Any
    return_lse: bool
    deterministic: bool | None
    precision: str | None
    implementation: str | None


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
    Inputs that are contiguous and aligned to 16 bytes are read in place; others are copied. PyTorch owns the results,
    which may be used on any stream.

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
        It is a constant of the call. In torch operations it may read tensors. Each call reads their current values, and
        they get gradients. (masks.from_function keeps the values from when the mask was made.) int64 tensors are read
        as int32: a value out of range raises ValueError on a CPU, and makes the results NaN on a GPU. JAX arrays that
        the function closes over get no gradient; for gradients, pass them as arguments through bridge.from_jax.
      sinks: [H], bfloat16, float16 or float32, logits that only join the softmax's denominator.
      scale, softcap, window and other numbers: Python's, NumPy's or JAX's numbers, or tensors without axes, whose
        values are read in each call. window: also a tensor of two integers.
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
        named = FlashArguments(
            *(query, key, value, bias, mask, is_causal, window, segment_ids, kv_lengths, q_offset, score_mod, sinks),
            *(scale, softcap, return_lse, deterministic, precision, implementation),
        )._asdict()
        return flash_attention(**named | renamed("flash_attention", other_names, named))
    statics: Any = None
    present: Sequence[torch.Tensor] = ()
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and score_mod is None and not isinstance(mask, Mask):
        return _in_graph(
            *(query, key, value, bias, mask, is_causal, window, segment_ids, kv_lengths, q_offset, score_mod, sinks),
            *(scale, softcap, return_lse, deterministic, precision, implementation),
        )
    by_function = score_mod is not None or isinstance(mask, Mask)
    if not is_compiling:
        if by_function:
            present, there = _present_beside_a_mask(
                query, key, value, bias, sinks, mask, segment_ids, kv_lengths, q_offset
            )
        elif bias is mask is segment_ids is kv_lengths is sinks is None and type(q_offset) is int:
            present, there = (query, key, value), None
        else:
            present, there = _present(query, key, value, bias, sinks, mask, segment_ids, kv_lengths, q_offset)
        statics = (
            *(is_causal, window, score_mod, scale, softcap, return_lse, deterministic, precision, implementation),
            # 1 equals True, but an argument may accept only one of the types.
            *(type(is_causal), None if window is None else _kinds(window), type(scale), type(softcap)),
            *(type(return_lse), type(deterministic)),
            *(there, None if isinstance(q_offset, torch.Tensor) else q_offset),
            torch.are_deterministic_algorithms_enabled(),
        )
        known = masked_attention.lookup(statics, present) if by_function else _KNOWN.lookup(statics, present)
        if known is not None:
            return known(present)
    given = FlashArguments(
        *(query, key, value, bias, mask, is_causal, window, segment_ids, kv_lengths, q_offset, score_mod, sinks),
        *(scale, softcap, return_lse, deterministic, precision, implementation),
    )
    return _call(given, statics, present)


_KNOWN = CallCache()


def _kinds(window: Window) -> type | tuple[type, ...]:
    """Returns the type of `window`, or for a tuple the types of its entries, for the key of a cached call.

    Without the types, window=True would find the cached call of window=1, although only the int is accepted.
    """
    return tuple(map(type, window)) if isinstance(window, tuple) else type(window)


def _present(
    query, key, value, bias, sinks, mask, segment_ids, kv_lengths, q_offset
) -> tuple[list[torch.Tensor], Hashable]:
    """Returns (the call's tensors that are not None, which of the tensors it has) for the key of a cached call.

    The tensors are in the order of flash_attention_operator.Tensors: query, key, value, bias, sinks, mask, query's
    segment ids, key's segment ids, kv_lengths, q_offset. The second result is a tuple: the type of q_offset, then for
    each of the ten whether it is given. Nothing is checked yet.
    """
    is_pair = isinstance(segment_ids, tuple | list) and len(segment_ids) == 2
    q_ids, kv_ids = segment_ids if is_pair else (segment_ids, segment_ids)
    offset = q_offset if isinstance(q_offset, torch.Tensor) else None
    every = (query, key, value, bias, sinks, mask, q_ids, kv_ids, kv_lengths, offset)
    return [x for x in every if x is not None], (type(q_offset), *(x is not None for x in every))


def _present_beside_a_mask(query, key, value, bias, sinks, mask, segment_ids, kv_lengths, q_offset):
    """Returns (the call's tensors that are not None, a part of its key) for a call with a Mask object or a score_mod.

    Both are for the key of a cached call, to which the caller adds the options and score_mod. Nothing is checked yet.
    The tensors are in the order query, key, value, bias, sinks, mask (if it is a tensor), segment ids (one or two),
    kv_lengths, q_offset. The second result is a tuple: for each of them whether it is given, the types of segment_ids
    and q_offset, and id(mask) for a Mask object, else None.
    """
    ids = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids,)
    is_object = isinstance(mask, Mask)
    offset = q_offset if isinstance(q_offset, torch.Tensor) else None
    every = (query, key, value, bias, sinks, None if is_object else mask, *ids, kv_lengths, offset)
    there = tuple(x is not None for x in every)
    kinds = type(segment_ids), type(q_offset)
    return [x for x in every if x is not None], (*there, *kinds, id(mask) if is_object else None)


@torch_internals.node_in_graph
def _in_graph(*given: Any) -> Outputs:
    """Runs flash_attention without a Mask or a score_mod in a graph of torch.compile. given: FlashArguments' fields.

    torch.compile does not trace this function: each name that it sees adds to its checks before every call.
    """
    named = FlashArguments(*given)
    constants = {name: constant(x) for name, x in named._asdict().items() if name != "q_offset"}
    return _call(named._replace(**constants), None, (), is_traced=True)


def _call(
    given: FlashArguments, statics: Hashable, present: Sequence[torch.Tensor], *, is_traced: bool = False
) -> Outputs:
    """Runs a call that is not cached yet. Returns out, or (out, lse).

    A call with a Mask or a score_mod runs as a JAX function by from_jax, others by flash_attention's own operators.

    statics, present: the key under which the call is cached: its hashable part, or None for no caching, and the
    tensors. is_traced: whether the call is part of a graph of torch.compile.
    """
    named = given._asdict()
    if plain := plain_options(ATTENTION, named):
        given = given._replace(**plain)
        return _call(given, None, (), is_traced=True) if is_traced else flash_attention(**given._asdict())
    if dtensors.are_in(given.query, given.key, given.value):
        return dtensors.attention(flash_attention, named)
    if float_masks.is_float(given.mask):
        mask, is_valid = float_masks.as_bool("mask", given.mask)
        given = given._replace(mask=mask)
        results = _call(given, None, (), is_traced=True) if is_traced else flash_attention(**given._asdict())
        return float_masks.or_nan(results, is_valid)
    if given.score_mod is not None or isinstance(given.mask, Mask):
        return masked_attention.masked_attention(
            given.query,
            given.key,
            given.value,
            None if statics is None else CallKey(statics, present),
            bias=given.bias,
            sinks=given.sinks,
            mask=given.mask,
            segment_ids=given.segment_ids,
            kv_lengths=given.kv_lengths,
            q_offset=given.q_offset,
            is_causal=given.is_causal,
            window=given.window,
            score_mod=given.score_mod,
            scale=given.scale,
            softcap=given.softcap,
            return_lse=given.return_lse,
            deterministic=given.deterministic,
            precision=given.precision,
            implementation=given.implementation,
        )
    q_ids, kv_ids = segment_pair(given.segment_ids)
    check_inputs(
        given.query,
        given.key,
        given.value,
        bias=given.bias,
        sinks=given.sinks,
        mask=given.mask,
        segment_ids=(q_ids, kv_ids),
        kv_lengths=given.kv_lengths,
        q_offset=given.q_offset,
    )
    check_statics(
        is_causal=given.is_causal,
        scale=given.scale,
        softcap=given.softcap,
        return_lse=given.return_lse,
        deterministic=given.deterministic,
        precision=given.precision,
        implementation=given.implementation,
    )
    query, key, value, bias, deterministic = as_torch_is_set(
        given.query, given.key, given.value, bias=given.bias, deterministic=given.deterministic
    )
    if statics is not None:
        arrays = {"query": query, "key": key, "value": value, "bias": bias, "deterministic": deterministic}
        plan_query.raise_plan_if_asked(attention.flash_attention, query.device, **given._asdict() | arrays)
    left, right = window_sides(given.window)
    has_offset_tensor = isinstance(given.q_offset, torch.Tensor)
    tensors = Tensors(
        query=query,
        key=key,
        value=value,
        bias=bias,
        sinks=given.sinks,
        mask=given.mask,
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        kv_lengths=given.kv_lengths,
        q_offset=given.q_offset if has_offset_tensor else None,
    )
    options = Options(
        is_causal=given.is_causal,
        window_left=left,
        window_right=right,
        q_offset=0 if has_offset_tensor else given.q_offset,
        scale=given.scale,
        softcap=given.softcap,
        return_lse=given.return_lse,
        deterministic=deterministic,
        precision=given.precision,
        implementation=given.implementation,
    )
    if statics is not None and (keys := _bucketed(tensors, options)) is not None:
        return flash_attention(query, sinks=given.sinks, window=given.window, **keys._asdict(), **_kept(options))
    results = _run(tensors, options, is_traced=is_traced)
    read = [x for x in tensors if x is not None]
    if statics is not None and torch_internals.is_plain_eager() and same_tensors(read, present):
        _KNOWN.record(statics, present, lambda: known_call(tensors, options))
    return results


def _bucketed(tensors: Tensors, options: Options) -> KeyArrays | None:
    """Returns a call's keys, padded to a length bucket, if their number grows from call to call; else None.

    None also if a gradient is needed, with segment ids, with a named implementation, and under torch.compile or
    torch.func.
    """
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors.differentiated)
    if (
        needs_grad
        or tensors.q_segment_ids is not None
        or options.implementation
        or not torch_internals.is_plain_eager()
    ):
        return None
    keys = KeyArrays(
        key=tensors.key,
        value=tensors.value,
        bias=tensors.bias,
        mask=tensors.mask,
        kv_lengths=tensors.kv_lengths,
        q_offset=options.q_offset if tensors.q_offset is None else tensors.q_offset,
    )
    return length_buckets.pad_to_bucket(tensors.query, keys, (options._replace(q_offset=0), tensors.sinks is None))


def _kept(options: Options) -> dict[str, Any]:
    """Returns the options as keyword arguments for the call of flash_attention that a padded call becomes.

    q_offset and window are not among them: q_offset is one of the padded KeyArrays, and the caller has `window` in its
    original form.
    """
    own = options._asdict()
    return {name: own[name] for name in own if name not in ("window_left", "window_right", "q_offset")}


def _run(tensors: Tensors, options: Options, *, is_traced: bool) -> Outputs:
    """Runs a checked call by the operators: returns out, or with options.return_lse (out, lse)."""
    arguments = (*tensors, *options)
    operator = forward_op if options.return_lse else inference_op
    if is_traced or not torch_internals.is_plain_eager():
        results = operator(*arguments)
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors.differentiated):
        results = Attention.apply(options.return_lse, *arguments)
    else:
        results = torch_operator.below_autograd(operator, *arguments)
    if not options.return_lse:
        return results
    out, rows = results
    return out, tensors.lse_of(rows)
