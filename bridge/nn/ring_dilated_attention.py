"""MultiheadDilatedAttention of a sequence that the processes of a group share, as a PyTorch module."""

from typing import Any

import torch

from jax_kernels.bridge.nn.multihead_dilated_attention import MultiheadDilatedAttention
from jax_kernels.bridge.ops.sequence_parallel.dilated_attention import sequence_parallel_dilated_attention

__all__ = ["RingDilatedAttention"]


class RingDilatedAttention(MultiheadDilatedAttention):
    """MultiheadDilatedAttention of a sequence that several processes share.

    Its parameters, their names and its arguments are those of MultiheadDilatedAttention; a state_dict serves both.
    Each process has the module, with the same parameters, and calls it with its own tokens, as
    sequence_parallel_dilated_attention says. The gradients of its parameters are the parts of this process's tokens:
    add them up over the group. Without torch.distributed it is MultiheadDilatedAttention.

    Args:
      group: the torch.distributed process group whose ranks share the sequence; None is all ranks.
    """

    def __init__(self, *args: Any, group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **limits: Any) -> torch.Tensor:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return super()._attend(query, key, value, **limits)
        options = {"group": self.group, "implementation": self._implementation, **limits, **self.pattern}
        return sequence_parallel_dilated_attention(query, key, value, **options)
