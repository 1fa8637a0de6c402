"""A transformers cache whose keys and values have room for more tokens. New tokens are written in place.

This module imports transformers. bridge.huggingface.growing_cache imports the module when it is called.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from jax_kernels.bridge.ops.attention import length_buckets

__all__ = ["GrowingCache", "GrowingLayer"]

_AHEAD = 128  # new memory has room for at least this number of further tokens


class GrowingLayer(DynamicLayer):
    """A layer of a transformers cache. Its keys and values are the front of larger tensors, with room for more tokens.

    A new token is written after the old tokens, where transformers' DynamicLayer copies all tokens. At the next token,
    the keys are copied to new memory if there is no room, if another method set them, or if they come from
    inference_mode and are continued outside of it.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rooms: dict[str, torch.Tensor] = {}
        self._written: dict[str, int] = {}  # the number of tokens that each of them has had

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends new tokens. Returns all keys and all values, each [batch, heads, length, head_dim].

        key_states, value_states: [batch, heads, new tokens, head_dim]. If gradients are enabled and one of them
        requires a gradient, all tokens are copied, as in DynamicLayer. args, options: passed to DynamicLayer then.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states, *args, **options)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._extended("keys", self.keys, key_states)
        self.values = self._extended("values", self.values, value_states)
        return self.keys, self.values

    def _extended(self, name: str, x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Returns x [batch, heads, length, head_dim] followed by the tokens `new`, as the front of memory with room.

        x is copied only if it is not the front of the memory that the layer keeps under `name`, or if this memory has
        no room for the new tokens or is read-only. The new memory then has room for further tokens.

        name: "keys" or "values". x: the old tokens; an empty tensor of another number of axes before the first token.
        """
        length = x.shape[2] if x.ndim == 4 else 0
        total = length + new.shape[2]
        room = self._rooms.get(name)
        if room is None or not _is_front(x, room, length) or room.shape[2] < total or not _is_writable(room):
            room = new.new_empty(*new.shape[:2], length_buckets.bucket_length(total + _AHEAD), new.shape[3])
            if length:
                room[:, :, :length].copy_(x)
            self._rooms[name] = room
            self._written[name] = length
        # A write to room.data is not counted as a change of the old tokens, which a backward may have kept.
        target = room.data if length >= self._written[name] else room
        target.narrow(2, length, new.shape[2]).copy_(new)
        self._written[name] = max(total, self._written[name])
        return room.narrow(2, 0, total)


def _is_writable(room: torch.Tensor) -> bool:
    """Whether PyTorch allows a write: memory that was made under inference_mode is read-only outside of it."""
    return torch.is_inference_mode_enabled() or not room.is_inference()


def _is_front(x: torch.Tensor, room: torch.Tensor, length: int) -> bool:
    """Whether x [batch, heads, length, head_dim] is the memory of the first `length` tokens of `room`."""
    if not length:
        return False
    same = x.shape[:2] == room.shape[:2] and x.shape[3] == room.shape[3] and x.dtype == room.dtype
    return same and x.data_ptr() == room.data_ptr() and x.stride() == room.stride()


class GrowingCache(DynamicCache):
    """A transformers DynamicCache that writes new tokens in place: its layers have room for more tokens.

    Layers with their own window keep transformers' classes. config: the model's config, or None.
    """

    layers: Any
    layer_class_to_replicate: type[DynamicLayer] | None

    def __init__(self, config: Any = None) -> None:
        super().__init__(config=config)
        self.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = GrowingLayer
