"""Aliases of attention's arguments: the names in flash-attn, flash-dmattn and PyTorch."""

from typing import Any

import torch

from jax_kernels.bridge.interop.arguments.plain_numbers import plain_of
from jax_kernels.spelling import name_hint

__all__ = ["OTHER_NAMES", "check_mask_shape", "renamed"]

OTHER_NAMES = {"attn_mask": "mask", "softmax_scale": "scale", "causal": "is_causal", "window_size": "window"}
_RENAMED = tuple(OTHER_NAMES.values())
_ALIGNED = ("causal", "window_size")  # flash-attn aligns the last query with the last key


def renamed(function: str, others: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments `others` under this library's names, after checks of their values.

    The aliases are attn_mask (mask), softmax_scale (scale), causal (is_causal) and window_size (window).

    function: the caller's name, for errors. given: the caller's other arguments, under this library's names, at least
    query and key. An argument in `others` may not be in `given` too, except as None or False.

    Raises TypeError for an unknown name, if an argument is given under two names, or for a wrong type. Raises
    ValueError for a mask of the wrong shape, and for causal or window_size if query and key have different lengths and
    q_offset is 0: flash-attn would put the last query at the last key there.
    """
    found: dict[str, Any] = {}
    for name, x in others.items():
        own = OTHER_NAMES.get(name)
        if own is None:
            hint = name_hint(name, (*given, *_RENAMED))
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
        if given.get(own) is not None and given[own] is not False:
            raise TypeError(f"{name}: got it with {own}, which is the same argument; want one of them")
        found[own] = _checked(name, x)
    if "attn_mask" in others:
        check_mask_shape("attn_mask", others["attn_mask"], given["query"], given["key"])
    if any(name in others for name in _ALIGNED) and (found.get("is_causal") or found.get("window") is not None):
        _check_alignment(next(name for name in _ALIGNED if name in others), given)
    return found


def check_mask_shape(name: str, mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raises ValueError, naming the argument, unless the mask is broadcastable to [B, H, T, S] or to [B, Hkv, T, S].

    query: [B, T, H, D]. key: [B, S, Hkv, D]. Nothing is checked if one of the three is no tensor, or query or key has
    not 4 axes.
    """
    if not all(isinstance(x, torch.Tensor) for x in (mask, query, key)) or not query.ndim == key.ndim == 4:
        return
    want = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    allowed: list[tuple[int, ...]] = [(1, size) for size in want]
    allowed[1] = (1, query.shape[2], key.shape[2])
    pairs = zip(reversed(mask.shape), reversed(allowed), strict=False)
    if mask.ndim > 4 or any(got not in sizes for got, sizes in pairs):
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, want one broadcastable to [B, H, T, S] = {want}")


def _checked(name: str, x: Any) -> Any:
    """Returns the value x of the alias `name` after a check of its type; None for a window_size without limits."""
    if name in _ALIGNED:
        x = plain_of(name, x)
    if name == "attn_mask" and isinstance(x, torch.Tensor) and x.dtype != torch.bool:
        raise TypeError(
            f"attn_mask: got dtype {x.dtype}, want torch.bool (True = attend); an additive mask is a bias, and mask "
            "takes floats of 0 and 1"
        )
    if name == "window_size" and x is not None:
        if not isinstance(x, tuple | list) or len(x) != 2:
            raise TypeError(f"window_size: got {x!r}, want (left, right), -1 for no limit")
        return None if tuple(x) in ((-1, -1), (None, None)) else tuple(x)
    if name == "causal" and not isinstance(x, bool):
        raise TypeError(f"causal: got {type(x).__name__}, want a bool")
    return x


def _check_alignment(name: str, given: dict[str, Any]) -> None:
    """Raises ValueError if query and key have different lengths and q_offset is 0.

    flash-attn puts the last query at the last key, this library puts query 0 at key q_offset. So the two would differ.

    name: the alias that the caller used, for the error. given: the caller's arguments by this library's names.
    """
    query, key, offset = given["query"], given["key"], plain_of("q_offset", given.get("q_offset", 0))
    lengths = [x.shape[1] for x in (query, key) if isinstance(x, torch.Tensor) and x.ndim == 4]
    if len(lengths) < 2 or lengths[0] == lengths[1] or not (isinstance(offset, int) and offset == 0):
        return
    own = OTHER_NAMES[name]
    raise ValueError(
        f"{name}: got it with {lengths[0]} queries and {lengths[1]} keys, where flash-attn aligns the last query with "
        f"the last key; want {own} with q_offset={lengths[1] - lengths[0]}, or {own}, which puts query 0 at key 0"
    )
