"""A hint for misspelt names in errors, and for the names that other libraries give to the same argument."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

__all__ = ["add_hint", "did_you_mean", "name_hint", "with_name_hints"]

# The names in flash-attn, PyTorch, jax.nn, Triton's kernels and Hugging Face, with the names here.
OTHER_NAMES = {
    "attention_mask": "mask",
    "attn_bias": "bias",
    "attn_mask": "mask",
    "causal": "is_causal",
    "epsilon": "eps",
    "gamma": "scale",
    "k": "key",
    "key_value_seq_lengths": "kv_lengths",
    "local_window_size": "window",
    "logits_soft_cap": "softcap",
    "q": "query",
    "sliding_window": "window",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "v": "value",
    "weight": "scale",
    "window_size": "window",
}
# Arguments of other libraries without a counterpart, with the reason.
_WITHOUT = {
    "dropout": "there is no dropout of attention weights, which are never stored; apply dropout to the result",
    "dropout_p": "there is no dropout of attention weights, which are never stored; apply dropout to the result",
    "dropout_rate": "there is no dropout of attention weights, which are never stored; apply dropout to the result",
    "enable_gqa": "key and value may always have fewer heads than query",
}
_UNEXPECTED = re.compile(r"(?:.*\.)?(\w+)(?:\(\))? got an unexpected keyword argument '(\w+)'")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: "; did you mean 'causal'?", or "" if no known name is near."""
    if not isinstance(name, str):
        return ""
    folded = {x.casefold(): x for x in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def name_hint(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown argument: another library's name for one of `known`, or a misspelt one.

    It is "" without a hint.
    """
    known = tuple(known)
    own = OTHER_NAMES.get(name)
    if own in known:
        return f"; did you mean {own!r}?"
    if name in _WITHOUT and "query" in known:
        return f"; {_WITHOUT[name]}"
    return did_you_mean(name, known)


def add_hint(error: TypeError, function: Callable[..., Any]) -> None:
    """Adds name_hint to the text of an error about an unknown argument of `function`. Other errors are unchanged."""
    found = _UNEXPECTED.match(str(error)) if len(error.args) == 1 else None
    if found is None or found[1] != getattr(function, "__name__", None):
        return
    hint = name_hint(found[2], inspect.signature(function).parameters)
    if hint and hint not in str(error):
        error.args = (f"{found[0]}{hint}",)


def with_name_hints[Function: Callable[..., Any]](function: Function) -> Function:
    """A decorator: a call with an unknown argument raises a TypeError that says which argument may be meant."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            add_hint(error, function)
            raise

    return cast(Function, run)
