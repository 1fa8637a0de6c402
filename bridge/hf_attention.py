"""The attention of Hugging Face models, and its masks, for transformers' AttentionInterface."""

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention
from jax_kernels.bridge.ops.decoding import cached_decoding
from jax_kernels.bridge.ops.drop_in import fallback, heads_first
from jax_kernels.bridge.ops.drop_in.flash_attn_varlen import sequence_numbers
from jax_kernels.bridge.ops.drop_in.sdpa import shared_axes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["attention", "attention_mask"]

_NOT_GIVEN: Any = object()
# Arguments that would change the attention, and that neither this library nor PyTorch's attention supports.
_REFUSED = ("indices", "block_indices", "sinks")
# Types of models that declare no support of PyTorch's attention, and whose layers' is_causal is right all the same.
_CAUSAL_LAYERS = ("gemma2", "gpt_oss", "vaultgemma")


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = _NOT_GIVEN,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention of a layer, with the signature of transformers' AttentionInterface: (out [B, T, H, Dv], None).

    Plain PyTorch computes the attention instead, with one warning for each reason, for dropout, output_attentions, a
    head_mask, float64, a head_dim above 256, and devices other than CPUs and CUDA devices.

    Args:
      module: the layer.
      query: [B, H, T, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv]. A tensor with batch size 1 is expanded to the
        other tensors' B.
      attention_mask: broadcastable to [B, H, T, S], bool (True = attend) or added to the scores. For several queries of
        a causal layer, None is a causal mask, aligned top-left. Otherwise None is no mask, as for every layer of a
        model that declares no support of PyTorch's attention (`_supports_sdpa`): its is_causal may be wrong.
      scaling: multiplies the scores; None is 1 / sqrt(D).
      softcap: the scores become softcap * tanh(scores / softcap); None is no softcap.
      dropout: the probability of dropping an attention weight.
      is_causal: whether the layer is causal, if attention_mask is None; None for the layer's is_causal.
      sliding_window: the number of keys that a token attends to, up to and including its own key, if attention_mask is
        None.
      s_aux: the sinks, [H], logits that only join the softmax's denominator.
      position_bias: added to the scores, broadcastable to [B, H, T, S].
      others: cu_seq_lens_q: int32 [documents + 1], the start of each document in a packed sequence. output_attentions:
        whether to return the weights. head_mask: [H] or broadcastable to [B, H, T, S], multiplies the weights. indices,
        block_indices and sinks (of each query, unlike s_aux) are refused. Further arguments have no effect on
        attention.

    Returns:
      (out [B, T, H, Dv], None), or with output_attentions (out, weights [B, H, T, S]). A query that may attend to no
        key has an output of 0 and weights of 0.

    Raises:
      NotImplementedError: an argument is given that is not supported. ValueError: a tensor is nested.
    """
    for name in _REFUSED:
        if others.get(name) is not None:
            raise NotImplementedError(
                f'{name}: got one, want None: this model needs attn_implementation="eager" or "sdpa"'
            )
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dense(name, x)
    query, key, value = _of_one_batch(query, key, value)
    causal = _is_causal(module) if is_causal is None else is_causal
    window = None if sliding_window is _NOT_GIVEN else sliding_window
    if window is not None and causal and attention_mask is None and query.shape[2] == 1 and key.shape[2] > window:
        key, value = key[:, :, -window:], value[:, :, -window:]
        position_bias = None if position_bias is None else position_bias[..., -window:]
    length, kv_length = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
    asks_for_weights = bool(others.get("output_attentions")) or _are_weights_collected()
    reason = _reason(query, value, dropout, asks_for_weights, others.get("head_mask"))
    if reason is None and length == 1 and _is_decoding(query, key, value, attention_mask, position_bias, s_aux):
        mask, bias = _mask_and_bias(attention_mask, position_bias, is_shrunk=False)
        attend = cached_decoding.attend_in_graph if torch.compiler.is_compiling() else cached_decoding.decode_cache
        return attend(query, key, value, mask=mask, bias=bias, sinks=s_aux, **options), None
    if attention_mask is None and length > 1 and causal:
        if kv_length > length:  # an empty cache has room after the keys
            key, value = key[:, :, :length], value[:, :, :length]
            position_bias = None if position_bias is None else position_bias[..., :length]
        options |= {"is_causal": True, "window": _window(module, sliding_window, length)}
        if (ids := _documents(others.get("cu_seq_lens_q"), query)) is not None:
            options["segment_ids"] = ids
    mask, bias = _mask_and_bias(attention_mask, position_bias)
    if reason is not None:
        fallback.warn("bridge.huggingface.attention", reason)
        options |= {"sinks": s_aux, "dropout_p": dropout, "head_mask": others.get("head_mask")}
        out, weights = _by_pytorch(query, key, value, mask, bias, needs_weights=asks_for_weights, **options)
        if weights is not None and key.shape[2] < kv_length:
            weights = torch.nn.functional.pad(weights, (0, kv_length - key.shape[2]))
        return out.transpose(1, 2).contiguous(), weights
    if s_aux is None and "segment_ids" not in options:
        out = heads_first.attend(query, key, value, mask=mask, bias=bias, **options)
        return out.transpose(1, 2).contiguous(), None
    tensors = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attention(*tensors, mask=mask, bias=bias, sinks=s_aux, **options), None


def _of_one_batch(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors with their first axes, the batch, expanded to one size, as PyTorch's attention does."""
    batch = max(x.shape[0] for x in tensors)
    return [x.expand(batch, *x.shape[1:]) if x.shape[0] == 1 < batch else x for x in tensors]


def _is_causal(module: torch.nn.Module) -> bool:
    """Whether a layer without an attention_mask is causal."""
    return getattr(module, "is_causal", True) and _knows_is_causal(type(getattr(module, "config", module)))


@torch_internals.constant_in_graph
def _knows_is_causal(owner: type) -> bool:
    """Whether the is_causal of a model's layers says how they attend without a mask.

    PyTorch's attention ("sdpa") relies on it. So it is right if a class of the model's package declares
    `_supports_sdpa`. It counts as right in a package without classes of models, such as a user's own. owner: the class
    of the model's config, or of a layer.
    """
    package = owner.__module__.rpartition(".")[0]
    return not package or package.rpartition(".")[2] in _CAUSAL_LAYERS or _supports_sdpa(package)


@functools.cache
def _supports_sdpa(package: str) -> bool:
    """Whether a class of a package's models declares support of PyTorch's attention, or the package has no model."""
    from transformers import PreTrainedModel

    files = [module for name, module in list(sys.modules.items()) if name.startswith(f"{package}.modeling_")]
    models = [
        x
        for file in files
        for x in vars(file).values()
        if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == file.__name__
    ]
    return not models or any(getattr(model, "_supports_sdpa", False) for model in models)


def _are_weights_collected() -> bool:
    """Whether the model was called with output_attentions, which not all models pass on to their layers.

    False under torch.compile, which cannot trace the access to transformers' collector of outputs.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None or torch.compiler.is_compiling():
        return False
    return any(key.endswith("attentions") for key in collector.get() or ())


def _reason(
    query: torch.Tensor, value: torch.Tensor, dropout: float, asks_for_weights: bool, head_mask: torch.Tensor | None
) -> str | None:
    """Returns the reason why PyTorch has to compute the attention; None if this library serves the call.

    The reasons: attention weights are asked for, a head_mask, dropout, float64, the device, or a head_dim above 256.
    """
    if asks_for_weights:
        return "output_attentions asks for attention weights, which flash_attention never stores"
    if head_mask is not None:
        return "head_mask multiplies attention weights, which flash_attention never stores"
    return fallback.reason_of(query, max(query.shape[-1], value.shape[-1]), dropout, "dropout")


def _by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    needs_weights: bool,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    segment_ids: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (the attention [B, H, T, Dv], its weights [B, H, T, S] or None), computed by PyTorch.

    mask: bool or None. bias: floats or None. options: scale, softcap, sinks, dropout_p and head_mask, as in
    fallback.attention_with_weights.
    """
    is_plain = not needs_weights and all(options[name] is None for name in ("sinks", "softcap", "head_mask"))
    if is_causal and (not is_plain or window is not None or segment_ids is not None or bias is not None):
        mask, is_causal = _causal_mask(query, key, window, segment_ids), False
    if not is_plain:
        out, weights = fallback.attention_with_weights(query, key, value, mask=mask, bias=bias, **options)
        return out, weights if needs_weights else None
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    is_grouped = query.shape[1] != key.shape[1]
    out = fallback.attention(
        query, key, value, mask, options["dropout_p"], is_causal, scale=options["scale"], enable_gqa=is_grouped
    )
    return out, None


def _causal_mask(
    query: torch.Tensor, key: torch.Tensor, window: tuple[int, int] | None, segment_ids: torch.Tensor | None
) -> torch.Tensor:
    """Returns a bool mask [B or 1, 1, T, S], True where a query may attend: a causal mask, aligned top-left.

    window: (left, right) or None: a query attends to at most `left` keys before its own. segment_ids: [B, T] or None: a
    query attends only to keys with its id.
    """
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    columns = torch.arange(key.shape[2], device=query.device)
    mask = (rows >= columns)[None, None]
    if window is not None:
        mask = mask & (rows - columns <= window[0])
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None])
    return mask


def _mask_and_bias(
    mask: torch.Tensor | None, bias: torch.Tensor | None, *, is_shrunk: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns (a bool mask or None, a bias or None) from a layer's attention_mask, which may be either, and its bias.

    is_shrunk: whether axes of the mask that torch.Tensor.expand made get size 1.
    """
    if mask is None:
        return None, bias
    mask = shared_axes(mask) if is_shrunk else mask
    if mask.dtype == torch.bool:
        return mask, bias
    return None, mask if bias is None else bias + mask


def _window(module: torch.nn.Module, sliding_window: int | None, length: int) -> tuple[int, int] | None:
    """Returns flash_attention's window, (keys before the query's own, 0), of a causal layer without an attention_mask.

    None if the layer has no window, or one of at least `length` keys. sliding_window: the argument of `attention`; if
    it was not given, the layer's config decides.
    """
    if sliding_window is _NOT_GIVEN:
        sliding_window = _window_of_config(module, length)
    return None if sliding_window is None or sliding_window >= length else (sliding_window - 1, 0)


def _window_of_config(module: torch.nn.Module, length: int) -> int | None:
    """Returns the number of keys that a layer attends to by its config; None without a window below `length`.

    Raises NotImplementedError if the config has a window and does not say which layers have it.
    """
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    if window is None or window >= length:
        return None
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types is None or index is None:
        raise NotImplementedError(
            f"sliding_window: got none from {type(module).__name__}, and {window} from its config; want it from the "
            'layer: this model needs attn_implementation="eager" or "sdpa"'
        )
    return window if types[index] == "sliding_attention" else None


def _documents(starts: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Returns the index of each token's document in one packed sequence, int32 [1, T], or None without starts.

    Tokens outside of all documents have -1, so that they attend to no key.

    starts: int32 [documents + 1], the start of each document, then the end of the last. query: [1, H, T, D]. Raises
    ValueError for several batch entries.
    """
    if starts is None:
        return None
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q: got it with {query.shape[0]} batch entries, want one packed sequence")
    return sequence_numbers(starts, query.shape[2])


def _is_decoding(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether decode_attention can serve a call of one query. others: a mask, a bias and sinks, each a tensor or None.

    It needs a head_dim of at most 256, no gradients, and a mask and a bias whose last axis has the size of the cache.
    While torch.compile traces, it also needs a cache of a fixed size, and a mask.
    """
    if not key.shape[2] or max(query.shape[-1], value.shape[-1]) > 256:
        return False
    mask, bias, _ = others
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy, in a second

        if mask is None or not all(has_static_value(size) for size in key.shape):
            return False
    elif type(query) is not torch.Tensor or not torch_internals.is_plain_eager():
        return False
    if any(x is not None and x.shape[-1] != key.shape[2] for x in (mask, bias)):
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(x is not None and x.requires_grad for x in (query, key, value, *others))


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: "PreTrainedConfig | None" = None,
    **others: Any,
) -> torch.Tensor | None:
    """The mask of a model's layers, with the signature of transformers' AttentionMaskInterface: [B, 1, T, S] or None.

    A model that declares no support of PyTorch's attention ("sdpa") gets the floats of its own attention ("eager"),
    since some of its layers may add them. Other models get the bools of "sdpa", or None. For a sliding window without
    padding, their mask is None in two more cases: for all tokens of a sequence at once, because `attention` masks them
    itself, and for one token if its window has all keys.

    Args:
      batch_size, q_length, kv_length: B, T and S.
      q_offset, kv_offset: the positions of the first query and the first key.
      attention_mask: [B, S], the padding mask, or None.
      local_size: the number of keys of a window or chunk, or None.
      allow_is_causal_skip: whether the result may be None for a causal mask. allow_is_bidirectional_skip: the same for
        a mask that keeps every pair.
      config: the model's config. others: passed to transformers' sdpa_mask or eager_mask.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    given: dict[str, Any] = others | {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "attention_mask": attention_mask,
        "local_size": local_size,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        "config": config,
    }
    if config is not None and not _knows_is_causal(type(config)):
        return eager_mask(**given)
    if allow_is_causal_skip and _is_plain_window(local_size, config) and _is_full(attention_mask):
        if _is_whole(q_length, q_offset, kv_offset, attention_mask):
            return None
        known = isinstance(q_offset, int) and isinstance(kv_offset, int)
        if known and q_length == 1 and q_offset - kv_offset + 1 == kv_length <= (local_size or 0):
            return None
    is_static_step = q_length == 1 and isinstance(q_offset, torch.Tensor)
    return sdpa_mask(**given, allow_is_causal_skip=allow_is_causal_skip and not is_static_step)


def _is_plain_window(local_size: int | None, config: "PreTrainedConfig | None") -> bool:
    """Whether local_size is the config's sliding window, which layers pass to `attention`, not a chunk's size."""
    if local_size is None or getattr(config, "attention_chunk_size", None) is not None:
        return False
    return getattr(config, "sliding_window", None) == local_size


def _is_full(attention_mask: torch.Tensor | None) -> bool:
    """Whether a padding mask [B, S] keeps every token; True for None. The host waits for a GPU's values.

    False for a mask under torch.compile, where its values are unknown.
    """
    return attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all()))


def _is_whole(
    q_length: int, q_offset: int | torch.Tensor, kv_offset: int | torch.Tensor, attention_mask: torch.Tensor | None
) -> bool:
    """Whether the queries are all tokens of the sequence, from the first on, and at least two.

    attention_mask: the padding mask [B, S] or None.
    """
    begins = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0
    return begins and q_length > 1 and (attention_mask is None or attention_mask.shape[-1] == q_length)
