"""Attention under a pattern, as a PyTorch module without parameters."""

import inspect
from typing import Any

import torch

from jax_kernels.bridge.compile_attention import CompiledAttention, compile_attention
from jax_kernels.masks import Mask
from jax_kernels.masks.presets import PRESETS, preset

__all__ = ["FlexAttention"]

_MOST = 16  # shapes that a module keeps


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

    def __init__(
        self, pattern: str | Mask, window: Any = None, *, implementation: str | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.pattern = pattern
        self.options = options if window is None else options | _windows(pattern, window)
        self.implementation = implementation
        self._kept: dict[Any, CompiledAttention] = {}
        if isinstance(pattern, str):
            preset(pattern, **self._with_lengths(1024, 1024))  # raises what a call would
        elif not isinstance(pattern, Mask):
            raise TypeError(f"pattern: got {type(pattern).__name__}, want a name or a masks.Mask")
        elif self.options:
            raise ValueError(f"{next(iter(self.options))}: got it with a masks.Mask, want it with a pattern's name")

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query: [B, T, H, D]; key: [B, S, Hkv, D]; value: [B, S, Hkv, D]. Returns [B, T, H, D].

        torch.compile has a graph break here.
        """
        return self.compiled(query, key)(query, key, value)

    @torch.compiler.disable(reason="jax_kernels: a Mask is no constant that torch.compile takes")
    def compiled(self, query: torch.Tensor, key: torch.Tensor) -> CompiledAttention:
        """The attention of calls with tensors like these: its mask, its plan and its density."""
        for name, x in (("query", query), ("key", key)):
            if x.ndim != 4:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, want 4 axes [batch, length, heads, head_dim]")
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        shape = (*query.shape[:3], key.shape[1], key.shape[2], query.shape[3], dtype, query.device)
        found = self._kept.get(shape)
        if found is None:
            batch, length, heads, head_dim = query.shape
            found = compile_attention(
                self.pattern,
                length,
                head_dim,
                kv_len=key.shape[1],
                batch=batch,
                num_heads=heads,
                num_kv_heads=key.shape[2],
                dtype=dtype,
                device=query.device,
                implementation=self.implementation,
                **self._with_lengths(length, key.shape[1]),
            )
            while len(self._kept) >= _MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[shape] = found
        return found

    def _with_lengths(self, length: int, kv_length: int) -> dict[str, Any]:
        """The options, with the lengths of a call where the pattern wants them and has none."""
        if not isinstance(self.pattern, str) or self.pattern not in PRESETS:
            return self.options
        wanted = inspect.signature(PRESETS[self.pattern]).parameters
        lengths = {"q_length": length, "kv_length": kv_length}
        return {name: x for name, x in lengths.items() if name in wanted} | self.options

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}  # it is made again where it is needed

    def extra_repr(self) -> str:
        return ", ".join([repr(self.pattern), *(f"{name}={x!r}" for name, x in self.options.items())])


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
