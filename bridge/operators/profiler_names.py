"""The names of calls in torch.profiler: an op's rows carry the op's name, whatever runs it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from jax_kernels.bridge.interop.donated_outputs import JaxFunction

__all__ = ["NamedLauncher", "label_of", "named", "named_function", "recorded"]

# Looked up once, to save time in each call. NVTX ranges (emit_nvtx) count as a profiler too.
_is_profiling = torch._C._autograd._profiler_enabled


def label_of(function: JaxFunction) -> str:
    """The name of a jitted function's rows: "jax_kernels::matmul" for a function whose __name__ is "matmul"."""
    return f"jax_kernels::{getattr(function, '__name__', 'call')}"


def named[Function: Callable[..., Any]](function: Function, name: str) -> Function:
    """The function with this __name__, which JAX gives to its programs: module jit_NAME in HLO and in jax.profiler."""
    function.__name__ = function.__qualname__ = name
    return function


def recorded[Result](label: str, call: Callable[..., Result], *arguments: Any) -> Result:
    """Returns call(*arguments). Under torch.profiler, a row with this label has the call's time."""
    if not _is_profiling():
        return call(*arguments)
    with record_function(label):
        return call(*arguments)


class NamedLauncher:
    """A function of a call's tensors, such as a LoadedChain, whose calls have a row with this label in torch.profiler.

    launch: returns the call's list of results. label: as label_of returns it.
    """

    __slots__ = ("label", "launch")

    def __init__(self, launch: Callable[..., list[torch.Tensor]], label: str) -> None:
        self.launch = launch
        self.label = label

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if not _is_profiling():
            return self.launch(*tensors)
        with record_function(self.label):
            return self.launch(*tensors)


@functools.lru_cache(maxsize=1024)
def named_function(function: type[torch.autograd.Function], name: str) -> Any:
    """The torch.autograd.Function under another name, which torch.profiler and grad_fn show: `name`, `name`Backward."""
    kind: Callable[[str, Sequence[type], dict[str, Any]], Any] = type(function)
    return kind(name, (function,), {"__module__": function.__module__, "__doc__": function.__doc__})
