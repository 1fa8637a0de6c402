"""Attention under a pattern, as a PyTorch module without parameters."""

import inspect
import itertools
import operator
import weakref
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.interop.plain_numbers import plain_arguments
from jax_kernels.bridge.jax_functions.argument_checks import check_tensors
from jax_kernels.bridge.jax_functions.pytree import MaskOfId
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.attention.compile_attention import CompiledAttention, compile_attention
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention
from jax_kernels.bridge.ops.attention.masked_attention import attend_in_graph
from jax_kernels.masks import Mask
from jax_kernels.masks.presets import PRESETS, preset
from jax_kernels.spelling import did_you_mean

__all__ = ["FlexAttention"]

_MOST = 16  # shapes that a module keeps
_MODULES: weakref.WeakValueDictionary[int, "FlexAttention"] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class FlexAttention(torch.nn.Module):
    """Attention under a fixed pattern, for tensors of any shape: out = module(query, key, value), with gradients.

    The first call of a shape makes an attention by bridge.compile_attention, which is kept: the pattern's blocks are
    listed once. The module has no parameters.

    Args:
      pattern: a name of bridge.masks.preset, such as "causal", "sliding_window", "global_local", "longformer",
        "bigbird" or "strided", or a masks.Mask.
      window: of the patterns that have one. "longformer": how many keys around a token it attends to. "sliding_window"
        and "global_local": how many on each side, or (left, right). "attention_sinks": how many before it.
      implementation: as in flash_attention; None picks the fastest.
      options: the pattern's others, as in bridge.masks.preset. Lengths that a pattern wants (q_length, kv_length) are
        those of each call.

    Raises:
      ValueError, TypeError: the pattern or an option is not known, naming it; at once where no lengths are wanted.
    """

    @plain_arguments
    def __init__(
        self, pattern: str | Mask, window: Any = None, *, implementation: str | None = None, **options: Any
    ) -> None:
        super().__init__()
        _check_pattern(pattern)
        if not (implementation is None or isinstance(implementation, str)):
            raise TypeError(f"implementation: got {type(implementation).__name__}, want a name or None")
        self.pattern = pattern
        self.options = options if window is None else options | _windows(pattern, window)
        self.implementation = implementation
        self._kept: dict[Any, CompiledAttention] = {}
        self._in_graphs: dict[Any, Mask] = {}  # graphs of torch.compile run as long as these live
        self._number = self._registered()
        if isinstance(pattern, str):
            preset(pattern, **self._with_lengths(1024, 1024))  # raises what a call would
        elif self.options:
            raise ValueError(f"{next(iter(self.options))}: got it with a masks.Mask, want it with a pattern's name")

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query: [B, T, H, D]; key: [B, S, Hkv, D]; value: [B, S, Hkv, D]. Returns [B, T, H, D].

        torch.compile makes a graph for each shape. Raises ValueError, naming the tensor, where one is nested.
        """
        if symbolic_trace.is_traced(query, key, value):
            return symbolic_trace.leaf(self, query, key, value)
        if query.device.type == "meta":
            return flash_attention(query, key, value)  # of the same shape
        if torch.compiler.is_compiling():
            mask, implementation = _made(self._number, *_sizes_of(query, key), query.device)
            # torch.compile looks at a text that it made itself, and cannot look at one that it was given.
            return attend_in_graph(query, key, value, MaskOfId(mask + 0), implementation=f"{implementation}")
        return self.compiled(query, key)(query, key, value)

    __prepare_scriptable__ = symbolic_trace.no_script

    def compiled(self, query: torch.Tensor, key: torch.Tensor) -> CompiledAttention:
        """The attention of calls with tensors like these: its mask, its plan and its density."""
        return self._compiled(_Shape(*_sizes_of(query, key)), query.device)

    def _registered(self) -> int:
        """A number by which graphs of torch.compile find the module."""
        number = next(_NUMBERS)
        _MODULES[number] = self
        return number

    def _in_graph(self, shape: "_Shape", device: torch.device) -> tuple[int, str]:
        """(the id of the mask, the implementation) of a call in a graph."""
        made = self._compiled(shape, device)
        mask = self._in_graphs.setdefault((shape, device), made.prepared_mask)
        return id(mask), made.plan.implementation

    def _compiled(self, shape: "_Shape", device: torch.device) -> CompiledAttention:
        found = self._kept.get((shape, device))
        if found is None:
            found = compile_attention(
                self.pattern,
                shape.length,
                shape.head_dim,
                kv_len=shape.kv_length,
                batch=shape.batch,
                num_heads=shape.heads,
                num_kv_heads=shape.kv_heads,
                dtype=shape.dtype,
                device=device,
                implementation=self.implementation,
                **self._with_lengths(shape.length, shape.kv_length),
            )
            while len(self._kept) >= _MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[shape, device] = found
        return found

    def _with_lengths(self, length: int, kv_length: int) -> dict[str, Any]:
        """The options, with the lengths of a call where the pattern wants them and has none."""
        if not isinstance(self.pattern, str) or self.pattern not in PRESETS:
            return self.options
        wanted = inspect.signature(PRESETS[self.pattern]).parameters
        lengths = {"q_length": length, "kv_length": kv_length}
        return {name: x for name, x in lengths.items() if name in wanted} | self.options

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}, "_in_graphs": {}}  # they are made again where they are needed

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = self._registered()

    def extra_repr(self) -> str:
        return ", ".join([repr(self.pattern), *(f"{name}={x!r}" for name, x in self.options.items())])


class _Shape(NamedTuple):
    """That for which a call's attention is made."""

    batch: int
    length: int
    heads: int
    head_dim: int
    kv_length: int
    kv_heads: int
    dtype: torch.dtype


def _sizes_of(query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...]:
    """The fields of a call's _Shape. Raises ValueError, naming the tensor, where it has not 4 axes."""
    for name, x in (("query", query), ("key", key)):
        check_tensors(**{name: x})
        check_dense(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want 4 axes [batch, length, heads, head_dim]")
    kind = query.device.type
    is_cast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_cast else query.dtype
    return (*map(operator.index, query.shape), operator.index(key.shape[1]), operator.index(key.shape[2]), dtype)


@torch.compiler.assume_constant_result
def _made(number: int, *facts: Any) -> tuple[int, str]:
    """The constants that a graph has of the module of that number. facts: the fields of _Shape, and the device."""
    *shape, device = facts
    return _MODULES[number]._in_graph(_Shape(*shape), device)


def _check_pattern(pattern: Any) -> None:
    """Raises TypeError or ValueError unless it is the name of a preset, or a Mask."""
    if isinstance(pattern, Mask):
        return
    if not isinstance(pattern, str):
        raise TypeError(f"pattern: got {type(pattern).__name__}, want a name or a masks.Mask")
    if pattern not in PRESETS:
        names = ", ".join(map(repr, PRESETS))
        raise ValueError(f"pattern: got {pattern!r}, want one of {names}{did_you_mean(pattern, PRESETS)}")


def _windows(pattern: Any, window: Any) -> dict[str, Any]:
    """The options that a window stands for."""
    takes = inspect.signature(PRESETS[pattern]).parameters if isinstance(pattern, str) and pattern in PRESETS else {}
    if "window" in takes:
        return {"window": window}
    if "left" not in takes:
        raise ValueError(f"window: got {window!r} with the pattern {pattern!r}, which has none; want None")
    sides = tuple(window) if isinstance(window, tuple | list) else (window,) * (1 + ("right" in takes))
    if len(sides) != 1 + ("right" in takes):
        raise ValueError(f"window: got {window!r} with the pattern {pattern!r}, want an int: it looks back alone")
    return dict(zip(("left", "right"), sides, strict=False))
