"""Attention with a fixed mask pattern, as a PyTorch module without parameters."""

import inspect
import itertools
import operator
import types
import weakref
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments.autocast import cast_dtype
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.jax_functions.argument_checks import check_tensors
from jax_kernels.bridge.jax_functions.pytree import MaskById
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.attention.compile_attention import CompiledAttention, compile_attention
from jax_kernels.bridge.ops.attention.flash_attention import flash_attention
from jax_kernels.bridge.ops.attention.masked_attention import attend_in_graph
from jax_kernels.masks import Mask
from jax_kernels.masks.presets import PRESETS
from jax_kernels.ops.attention.compile_attention import preset_mask
from jax_kernels.spelling import did_you_mean

__all__ = ["FlexAttention"]

_MOST = 16  # shapes per module
_MODULES: weakref.WeakValueDictionary[int, "FlexAttention"] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class FlexAttention(torch.nn.Module):
    """Attention with a fixed mask pattern, for tensors of any shape: out = module(query, key, value), with gradients.

    The first call of a shape calls bridge.compile_attention and keeps its result, so the pattern's blocks are listed
    once. The module has no parameters. Its attributes pattern, options and implementation may be assigned: later calls
    use them. The attribute options is a read-only mapping.

    Args:
      pattern: a name of bridge.masks.preset, such as "causal", "sliding_window", "global_local", "longformer",
        "bigbird" or "strided", or a masks.Mask.
      window: for patterns that have a window. "longformer": the number of keys around a token. "sliding_window" and
        "global_local": the number of keys on each side, or (left, right). "attention_sinks": the number of keys before
        a token.
      implementation: "mosaic_gpu", "triton", "cudnn" or "xla"; None picks the device's first that supports the call.
      options: the pattern's other options, as in bridge.masks.preset. Each call sets a pattern's lengths (q_length,
        kv_length) if they are not given.

    Raises:
      ValueError, TypeError: the pattern or an option is not known. The text names it. The constructor raises, or the
        first call if the error depends on its lengths.
    """

    @plain_arguments
    def __init__(
        self,
        pattern: str | Mask,
        window: int | tuple[int, int] | None = None,
        *,
        implementation: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_pattern(pattern)
        if not (implementation is None or isinstance(implementation, str)):
            raise TypeError(f"implementation: got {type(implementation).__name__}, want a name or None")
        self._in_graphs: dict[tuple[int, _Shape, torch.device], Mask] = {}  # keep-alive for graphs of torch.compile
        self.pattern = pattern
        self.options = options if window is None else options | _windows(pattern, window)
        self.implementation = implementation
        if isinstance(pattern, str):
            preset_mask(pattern, 1024, 1024, self.options)  # raises the errors of a call
        elif self.options:
            raise ValueError(f"{next(iter(self.options))}: got it with a masks.Mask, want it with a pattern's name")

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Returns the attention under the pattern, [B, T, H, D], with gradients.

        query: [B, T, H, D]; key: [B, S, Hkv, D]; value: [B, S, Hkv, D]. torch.compile makes a graph for each shape.
        Raises ValueError, naming the tensor, for a nested tensor.
        """
        if symbolic_trace.is_traced(query, key, value):
            return symbolic_trace.leaf(self, query, key, value)
        if query.device.type == "meta":
            return flash_attention(query, key, value)  # the result's shape does not depend on the pattern
        if torch.compiler.is_compiling():
            mask, implementation = _made(self._number, *_sizes_of(query, key), query.device)
            # torch.compile can inspect a string that it formatted itself, but not a string that it was given.
            return attend_in_graph(query, key, value, MaskById(mask + 0), implementation=f"{implementation}")
        return self.compiled(query, key)(query, key, value)

    __prepare_scriptable__ = symbolic_trace.no_script

    def compiled(self, query: torch.Tensor, key: torch.Tensor) -> CompiledAttention:
        """Returns the CompiledAttention for query's and key's shapes, dtype and device: its mask, plan and density.

        Calls with such tensors use it. query: [B, T, H, D]; key: [B, S, Hkv, D].
        """
        return self._compiled(_Shape(*_sizes_of(query, key)), query.device)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "options":
            value = types.MappingProxyType(dict(value))
        super().__setattr__(name, value)
        if name in ("pattern", "options", "implementation"):
            self._start()

    def _start(self) -> None:
        """Drops the kept CompiledAttentions, and registers the module under a new number.

        torch.compile calls `_made` with constants only, so `_made` finds the module by this number, and a graph that
        has another number is not used again. The registry does not keep the module alive.
        """
        self._kept: dict[tuple[_Shape, torch.device], CompiledAttention] = {}
        self._number = next(_NUMBERS)
        _MODULES[self._number] = self

    def _in_graph(self, shape: "_Shape", device: torch.device) -> tuple[int, str]:
        """Returns (id() of the prepared Mask, the implementation's name) of calls of this shape in a graph.

        A graph of torch.compile has only the id. So the module keeps this Mask alive, even after calls of more than 16
        shapes.
        """
        made = self._compiled(shape, device)
        mask = self._in_graphs.setdefault((self._number, shape, device), made.prepared_mask)
        return id(mask), made.plan.implementation

    def _compiled(self, shape: "_Shape", device: torch.device) -> CompiledAttention:
        """Returns the CompiledAttention for calls of this shape and device. Up to 16 are kept."""
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
                **self.options,
            )
            while len(self._kept) >= _MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[shape, device] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        # The copy makes _kept and _in_graphs again; a read-only mapping cannot be copied.
        return self.__dict__ | {"_kept": {}, "_in_graphs": {}, "options": dict(self.options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.options = self.options

    def extra_repr(self) -> str:
        return ", ".join([repr(self.pattern), *(f"{name}={x!r}" for name, x in self.options.items())])


class _Shape(NamedTuple):
    """The sizes and the dtype of a call, for which a CompiledAttention is made. dtype: after autocast."""

    batch: int
    length: int
    heads: int
    head_dim: int
    kv_length: int
    kv_heads: int
    dtype: torch.dtype


def _sizes_of(query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...]:
    """Returns the fields of a call's _Shape, in order.

    query: [B, T, H, D]; key: [B, S, Hkv, D]. Raises ValueError, naming the tensor, if it does not have 4 axes.
    """
    for name, x in (("query", query), ("key", key)):
        check_tensors(**{name: x})
        check_dense(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want 4 axes [batch, length, heads, head_dim]")
    dtype = cast_dtype(query)
    return (*map(operator.index, query.shape), operator.index(key.shape[1]), operator.index(key.shape[2]), dtype)


@torch_internals.constant_in_graph
def _made(number: int, *facts: Any) -> tuple[int, str]:
    """Returns (id() of the prepared Mask, the implementation's name) of a FlexAttention's calls of one shape.

    torch.compile calls this function while it traces, and makes the results constants of its graph.

    number: the number that _registered gave the module. facts: the fields of the call's _Shape, then the device.
    """
    *shape, device = facts
    return _MODULES[number]._in_graph(_Shape(*shape), device)


def _check_pattern(pattern: str | Mask) -> None:
    """Raises TypeError unless pattern is a string or a Mask, ValueError if it is no preset's name."""
    if isinstance(pattern, Mask):
        return
    if not isinstance(pattern, str):
        raise TypeError(f"pattern: got {type(pattern).__name__}, want a name or a masks.Mask")
    if pattern not in PRESETS:
        names = ", ".join(map(repr, PRESETS))
        raise ValueError(f"pattern: got {pattern!r}, want one of {names}{did_you_mean(pattern, PRESETS)}")


def _windows(pattern: str | Mask, window: int | tuple[int, int]) -> dict[str, Any]:
    """Returns the argument `window` as the pattern's own options: `window`, `left`, or `left` and `right`.

    Raises ValueError for a pattern without a window, and for a pair where the pattern only looks back.
    """
    takes = inspect.signature(PRESETS[pattern]).parameters if isinstance(pattern, str) and pattern in PRESETS else {}
    if "window" in takes:
        return {"window": window}
    if "left" not in takes:
        raise ValueError(f"window: got {window!r} with the pattern {pattern!r}, which has none; want None")
    sides = tuple(window) if isinstance(window, tuple | list) else (window,) * (1 + ("right" in takes))
    if len(sides) != 1 + ("right" in takes):
        raise ValueError(f"window: got {window!r} with the pattern {pattern!r}, want an int: it only looks back")
    return dict(zip(("left", "right"), sides, strict=False))
