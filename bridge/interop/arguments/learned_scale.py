"""A scale of the scores that is learned: a tensor that gets a gradient, through query."""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch

__all__ = ["in_query", "with_learned_scale"]


def in_query(query: Any, scale: Any) -> tuple[Any, Any]:
    """(query, scale) with the same scores, without a scale that requires a gradient.

    A float tensor without axes that requires a gradient, or that is part of a graph of torch.compile, moves into query,
    as its ratio to the default scale 1 / sqrt(D): query is rounded to its dtype once more, unless the ratio is a power
    of two. The scale is then None. Other scales stay as they are.

    query: [..., D].
    """
    if not isinstance(scale, torch.Tensor) or scale.ndim or not scale.is_floating_point():
        return query, scale
    if not scale.requires_grad and not torch.compiler.is_compiling():
        return query, scale
    if not isinstance(query, torch.Tensor) or not query.is_floating_point():
        return query, scale
    ratio = scale.float() * math.sqrt(query.shape[-1])
    return (query.float() * ratio).to(query.dtype), None


def with_learned_scale[Function: Callable[..., Any]](function: Function) -> Function:
    """A decorator of an attention function: a learned scale moves into its first argument, query, by in_query."""

    @functools.wraps(function)
    def run(query: Any, *args: Any, scale: Any = None, **kwargs: Any) -> Any:
        query, scale = in_query(query, scale)
        return function(query, *args, scale=scale, **kwargs)

    return cast(Function, run)
