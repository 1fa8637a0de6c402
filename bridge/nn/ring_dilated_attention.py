"""MultiheadDilatedAttention of a sequence that the processes of a group share, as a PyTorch module."""

from typing import Any

import torch

from jax_kernels.bridge.nn.multihead_dilated_attention import MultiheadDilatedAttention
from jax_kernels.bridge.ops.sequence_parallel.dilated_attention import sequence_parallel_dilated_attention

__all__ = ["RingDilatedAttention"]


class RingDilatedAttention(MultiheadDilatedAttention):
    """MultiheadDilatedAttention of a sequence that is sharded over several processes.

    Parameters, their names and arguments are as in MultiheadDilatedAttention; the two modules have the same state_dict.
    Each process has the module, with the same parameters. It calls the module with its own tokens, and gets its own
    tokens' output, [B, T, embed_dim] of T tokens: the group's ranks, in order, have consecutive tokens. Call
    bridge.initialize_distributed() first. The gradients of its parameters cover only this process's tokens: sum them
    over the group. Without torch.distributed it is MultiheadDilatedAttention.

    Args:
      group: the torch.distributed process group whose ranks shard the sequence; None is all ranks.
      args, kwargs: the arguments of MultiheadDilatedAttention.
    """

    def __init__(self, *args: Any, group: "torch.distributed.ProcessGroup | None" = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **limits: Any) -> torch.Tensor:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return super()._attend(query, key, value, **limits)
        options = {"group": self.group, "implementation": self._implementation, **limits, **self.pattern}
        return sequence_parallel_dilated_attention(query, key, value, **options)
