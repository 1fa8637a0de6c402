"""Attention on PyTorch tensors with block masks, dynamic masks, Mask objects and a score_mod."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
import torch

from jax_kernels import dispatch
from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.learned_scale import in_query
from jax_kernels.bridge.interop.arguments.plain_numbers import ATTENTION, plain_options
from jax_kernels.bridge.jax_functions.api import CallKey, JaxOp
from jax_kernels.bridge.jax_functions.argument_checks import check_tensors
from jax_kernels.bridge.jax_functions.pytree import MaskById
from jax_kernels.bridge.operators.call_cache import CachedCall
from jax_kernels.bridge.ops.attention import float_masks, length_buckets
from jax_kernels.bridge.ops.attention.argument_aliases import OTHER_NAMES, renamed
from jax_kernels.bridge.ops.attention.attention_checks import check_tensor, checked
from jax_kernels.bridge.ops.attention.attention_types import AttentionOptions, OutAndLse, Outputs
from jax_kernels.bridge.translate import captures, score_mods, snapshots
from jax_kernels.bridge.translate.score_mods import ScoreMod
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.masks import Mask
from jax_kernels.ops.attention import block_sparse_attention as block_sparse
from jax_kernels.ops.attention import dynamic_mask_attention as dynamic_mask
from jax_kernels.ops.attention import flash_attention as attention

__all__ = ["attend_in_graph", "block_sparse_attention", "dynamic_mask_attention", "lookup", "masked_attention"]


_CHECKED = ("segment_ids", "kv_lengths", "q_offset", "sinks", "deterministic")

type _Arrays = jax.Array | tuple[jax.Array, jax.Array]


class ScoreModOp:
    """Wraps an attention op of JAX arrays so that its score_mod may be written in torch operations.

    A score_mod that reads no tensors is passed as `score_mod`. Otherwise the caller passes two arguments instead:
    `template`, the name under which score_mods.split_tensors registered its template (the function whose tensors are
    replaced by arguments), and `read`, the arrays of the tensors that it reads.
    """

    def __init__(self, op: Callable[..., _Arrays]) -> None:
        functools.update_wrapper(self, op, updated=())
        self.plain_numbers = (*ATTENTION, "block_size")
        self._op = op

    def __call__(self, *args: Any, **kwargs: Any) -> _Arrays:
        return self._op(*args, **_in_jnp(**kwargs))

    def plan(self, *args: Any, read: Sequence[jax.Array] = (), **kwargs: Any) -> dispatch.Plan:
        """Returns the op's plan for jax_kernels.explain. Nothing runs.

        read: arrays or shapes of the arrays that score_mod reads; zeros replace them.
        """
        read = [jnp.zeros(x.shape, x.dtype) for x in read]
        return self._op.plan(*args, **_in_jnp(read=read, **kwargs))  # type: ignore[attr-defined]


def _in_jnp(
    score_mod: ScoreMod | None = None, template: str | None = None, read: Sequence[jax.Array] = (), **others: Any
) -> dict[str, Any]:
    """Returns an op's keyword arguments, with `score_mod` in jnp code and without `template` and `read`.

    score_mod: in torch operations or jnp code, or None. template, read: replace a score_mod that reads tensors. They
    are the name of its template, as score_mods.split_tensors returned it, and the arrays of these tensors. others: all
    other keyword arguments, which are returned unchanged.
    """
    if template is not None:
        return others | {"score_mod": score_mods.bind_tensors(template, read)}
    return others if score_mod is None else others | {"score_mod": score_mods.to_jnp(score_mod)}


_flash = JaxOp(ScoreModOp(attention.flash_attention))
_SETTINGS = torch.are_deterministic_algorithms_enabled
_block_sparse = JaxOp(ScoreModOp(block_sparse.block_sparse_attention), settings=_SETTINGS)
_dynamic_mask = JaxOp(ScoreModOp(dynamic_mask.dynamic_mask_attention), settings=_SETTINGS)


class _Apart(NamedTuple):
    """The arguments of a call after the tensors that its score_mod reads became arguments of their own.

    call: the key under which the call is cached, or None for a call that is not cached. arguments: the keyword
    arguments of a ScoreModOp. is_valid: bool tensor [], whether the values of all int64 tensors that score_mod reads
    fit int32; None if they are known to fit.
    """

    call: CallKey | None
    arguments: dict[str, Any]
    is_valid: torch.Tensor | None = None


def _split_closure(call: CallKey | None, arguments: dict[str, Any]) -> _Apart:
    """Makes the tensors that a call's score_mod reads arguments of the call, so that they may change and get gradients.

    If score_mod reads tensors, the result's arguments have score_mod=None, with `template` (the registered name of the
    function without its tensors) and `read` (the tensors). Otherwise the result has the function's snapshot.

    call: the key under which to cache the call. The result's key is None, so the call is not cached, if score_mod reads
    tensors, and also under torch.compile where there is a score_mod.
    """
    score_mod: Any = arguments.get("score_mod")
    root = captures.root_of(score_mod)
    if root is None:
        return _Apart(call, arguments)
    is_traced = torch.compiler.is_compiling()
    found = score_mods.apart_in_graph(score_mod) if is_traced else score_mods.split_tensors(score_mod)
    if found is not None:
        template, paths = found
        read, is_valid = score_mods.read("score_mod", score_mod, paths)
        # torch.compile can inspect a string that it formatted itself, but not a string that it was given.
        return _Apart(None, arguments | {"score_mod": None, "template": f"{template}", "read": read}, is_valid)
    if is_traced:
        return _Apart(None, arguments)
    return _Apart(call, arguments | {"score_mod": snapshots.snapshot(score_mod)})


def _named(arguments: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call, for its key: with the snapshot of a score_mod."""
    score_mod = arguments.get("score_mod")
    return arguments if score_mod is None else arguments | {"score_mod": snapshots.key_of(score_mod)}


def masked_attention(given: FlashArguments[torch.Tensor], call: CallKey | None) -> Outputs:
    """Returns bridge.flash_attention's results, out or (out, lse), for a call with a Mask or a score_mod.

    The score_mod and the structure of the Mask are constants of the compiled program; the Mask's arrays are inputs.

    call: the key under which to cache this call; None if it is not to be cached. A call whose score_mod reads tensors
    is never cached.
    """
    arguments = checked(given).by_name()
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    first = {name: arguments.pop(name) for name in ("bias", "sinks", "mask")}  # the order of the key's tensors
    apart = _split_closure(call, arguments)
    results = _flash.run(apart.call, query, key, value, **first, **apart.arguments)
    return float_masks.or_nan(results, apart.is_valid)


def attend_in_graph(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: MaskById, **arguments: Any
) -> Any:
    """Returns bridge.flash_attention's results for a call with a Mask, in code that torch.compile traces.

    mask: the Mask's Python id(). The graph looks the Mask up by it, so the caller keeps the Mask alive as long as the
    graph. arguments: bridge.flash_attention's other keyword arguments except bias and sinks.
    """
    (query, key, value, _), arguments = _prepared(query, key, value, None, None, arguments)
    apart = _split_closure(None, arguments)
    return float_masks.or_nan(_flash.run(None, query, key, value, mask=mask, **apart.arguments), apart.is_valid)


def lookup(statics: Hashable, tensors: Sequence[torch.Tensor]) -> CachedCall | None:
    """Returns the cached call with this key, made by masked_attention, or None. Not for code that torch.compile traces.

    statics: the hashable part of the key. tensors: the call's tensors, whose shapes, dtypes and devices belong to the
    key.
    """
    return _flash.find(statics, tensors)


@overload
def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: torch.Tensor | Mask,
    *,
    block_size: int | tuple[int, int] | None = ...,
    bias: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    **arguments: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: torch.Tensor | Mask,
    *,
    block_size: int | tuple[int, int] | None = ...,
    bias: torch.Tensor | None = ...,
    return_lse: Literal[True],
    **arguments: Unpack[AttentionOptions],
) -> OutAndLse: ...
@overload
def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: torch.Tensor | Mask,
    *,
    block_size: int | tuple[int, int] | None = ...,
    bias: torch.Tensor | None = ...,
    return_lse: bool,
    **arguments: Unpack[AttentionOptions],
) -> Outputs: ...
def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: torch.Tensor | Mask,
    *,
    block_size: int | tuple[int, int] | None = None,
    **arguments: Any,
) -> Outputs:
    """jax_kernels.block_sparse_attention on PyTorch tensors: attention to the blocks of keys that a mask keeps.

    The gradients are of query, key, value, bias and sinks. See bridge.from_jax for torch.compile, derivatives and CUDA
    graphs. Autocast casts query, key, value and a 16-bit bias.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32, on a CPU or a CUDA device.
      key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv]; in query's dtype and on its device.
      block_mask: [rows, columns], [H or 1, rows, columns] or [B or 1, H or 1, rows, columns], with a row for each block
        of queries and a column for each block of keys; bool, True where the block's pairs are kept, or floats of 0 and
        1. Or a masks.Mask, as in bridge.flash_attention.
      block_size: the size of block_mask's blocks, an int for both, or (queries, keys); None is 128.
      arguments: the other arguments of bridge.flash_attention, without mask, such as is_causal; they restrict pairs
        further.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T].

    Errors are as in bridge.flash_attention, or bridge.from_jax's if they differ.
    """
    if isinstance(arguments.get("scale"), torch.Tensor):
        query, arguments["scale"] = in_query(query, arguments["scale"])
    call = _block_sparse.lookup_by_name(
        (query, key, value, block_mask), {"block_size": block_size, **_named(arguments)}
    )
    if call and call.cached:
        return call.cached(call.tensors)
    if any(name in arguments for name in OTHER_NAMES):
        arguments = _renamed("block_sparse_attention", arguments, query=query, key=key, mask=block_mask)
        return block_sparse_attention(query, key, value, block_mask, block_size=block_size, **arguments)
    if dtensors.are_in(query, key, value, block_mask):
        named = {"query": query, "key": key, "value": value, "block_mask": block_mask, "block_size": block_size}
        return dtensors.attention(block_sparse_attention, named | arguments | plain_options(ATTENTION, arguments))
    if float_masks.is_float(block_mask):
        keep, is_valid = float_masks.as_bool("block_mask", block_mask)
        results = block_sparse_attention(query, key, value, keep, block_size=block_size, **arguments)
        return float_masks.or_nan(results, is_valid)
    check_tensors(query=query)
    if not isinstance(block_mask, Mask):
        check_tensor("block_mask", block_mask, query)
        if block_mask.dtype != torch.bool:
            want = "want torch.bool (True = attend), or floats of 0 and 1"
            raise TypeError(f"block_mask: got dtype {block_mask.dtype}, {want}")
    (query, key, value, bias), arguments = _prepared(query, key, value, None, arguments.get("bias"), arguments)
    if "bias" in arguments:
        arguments = arguments | {"bias": bias}
    apart = _split_closure(call, arguments)
    results = _block_sparse.run(apart.call, query, key, value, block_mask, block_size=block_size, **apart.arguments)
    return float_masks.or_nan(results, apart.is_valid)


@overload
def dynamic_mask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | Mask | None = ...,
    bias: torch.Tensor | None = ...,
    *,
    attn_mask: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    **arguments: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def dynamic_mask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | Mask | None = ...,
    bias: torch.Tensor | None = ...,
    *,
    attn_mask: torch.Tensor | None = ...,
    return_lse: Literal[True],
    **arguments: Unpack[AttentionOptions],
) -> OutAndLse: ...
@overload
def dynamic_mask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | Mask | None = ...,
    bias: torch.Tensor | None = ...,
    *,
    attn_mask: torch.Tensor | None = ...,
    return_lse: bool,
    **arguments: Unpack[AttentionOptions],
) -> Outputs: ...
def dynamic_mask_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | Mask | None = None,
    bias: torch.Tensor | None = None,
    **arguments: Any,
) -> Outputs:
    """jax_kernels.dynamic_mask_attention on PyTorch tensors: attention with a mask and a bias for each key head.

    The gradients are of query, key, value, bias and sinks. See bridge.from_jax for torch.compile, derivatives and CUDA
    graphs. Autocast casts query, key, value and a 16-bit bias.

    Args:
      query: [B, T, H, D], bfloat16, float16 or float32, on a CPU or a CUDA device.
      key: [B, S, Hkv, D]; value: [B, S, Hkv, Dv]; in query's dtype and on its device.
      mask: bool, broadcastable to [B, H, T, S] or [B, Hkv, T, S], True where a query may attend, or floats of 0 and 1.
        Or a masks.Mask. Both are as in bridge.flash_attention.
      bias: broadcastable to [B, H, T, S] or [B, Hkv, T, S], in query's dtype or float32, added to the scores.
      arguments: the other arguments of bridge.flash_attention. attn_mask is another name for mask.

    Returns:
      out [B, T, H, Dv] in query's dtype; with return_lse, (out, lse), lse float32 [B, H, T].

    Errors are as in bridge.flash_attention, or bridge.from_jax's if they differ.
    """
    if isinstance(arguments.get("scale"), torch.Tensor):
        query, arguments["scale"] = in_query(query, arguments["scale"])
    call = _dynamic_mask.lookup_by_name((query, key, value, mask, bias), _named(arguments))
    if call and call.cached:
        return call.cached(call.tensors)
    if any(name in arguments for name in OTHER_NAMES):
        arguments = _renamed("dynamic_mask_attention", arguments, query=query, key=key, mask=mask)
        mask = arguments.pop("mask", mask)
        return dynamic_mask_attention(query, key, value, mask, bias, **arguments)
    if mask is None:
        raise TypeError("mask: got None, want a bool tensor (True = attend) or a masks.Mask")
    if dtensors.are_in(query, key, value, mask):
        named = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
        return dtensors.attention(dynamic_mask_attention, named | arguments | plain_options(ATTENTION, arguments))
    if float_masks.is_float(mask):
        keep, is_valid = float_masks.as_bool("mask", mask)
        return float_masks.or_nan(dynamic_mask_attention(query, key, value, keep, bias, **arguments), is_valid)
    (query, key, value, bias), arguments = _prepared(query, key, value, mask, bias, arguments)
    if isinstance(mask, torch.Tensor) and torch_internals.is_plain_eager():
        mask = length_buckets.without_expanded_axes(mask)
    apart = _split_closure(call, arguments)
    results = _dynamic_mask.run(apart.call, query, key, value, mask, bias, **apart.arguments)
    return float_masks.or_nan(results, apart.is_valid)


def _renamed(function: str, arguments: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Returns the arguments with flash-attn's and PyTorch's names renamed to this library's names.

    The renamed arguments are attn_mask, softmax_scale, causal and window_size. function: the caller's name, for errors.
    given: the caller's positional arguments by name, for checks.
    """
    others = {name: x for name, x in arguments.items() if name in OTHER_NAMES}
    own = {name: x for name, x in arguments.items() if name not in OTHER_NAMES}
    return own | renamed(function, others, own | given)


def _prepared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | Mask | None,
    bias: torch.Tensor | None,
    arguments: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Returns ((query, key, value, bias), arguments), after checks of types, dtypes and devices, and after autocast.

    arguments: a call's keyword arguments. In the result q_offset is a Python number if it was another library's number,
    and `deterministic` is True if it was None and torch.use_deterministic_algorithms is on.
    """
    arguments = arguments | plain_options(("q_offset",), arguments)
    others = {name: arguments[name] for name in _CHECKED if name in arguments}
    given = checked(FlashArguments(query=query, key=key, value=value, bias=bias, mask=mask, **others))
    tensors = given.query, given.key, given.value, given.bias
    return tensors, arguments if given.deterministic is None else arguments | {"deterministic": given.deterministic}
