"""Attention masks as data: masks that compose, and the lists of live blocks that kernels read.

For example::

    mask = masks.causal() & masks.segments(ids) | masks.prefix(16)
    out = flash_attention(query, key, value, mask=mask)
    lists = mask.block_lists(T, S, block_q=128, block_kv=128)
"""

from jax_kernels.lazy_names import dir_of as _dir_of
from jax_kernels.masks.arrays import block_sparse as block_sparse
from jax_kernels.masks.arrays import dense as dense
from jax_kernels.masks.arrays import from_function as from_function
from jax_kernels.masks.arrays import segment_ids_from_cu_seqlens as segment_ids_from_cu_seqlens
from jax_kernels.masks.arrays import segments as segments
from jax_kernels.masks.block_lists import BlockLists as BlockLists
from jax_kernels.masks.block_lists import PackedBlocks as PackedBlocks
from jax_kernels.masks.mask import Mask as Mask
from jax_kernels.masks.positions import causal as causal
from jax_kernels.masks.positions import dilated as dilated
from jax_kernels.masks.positions import global_tokens as global_tokens
from jax_kernels.masks.positions import prefix as prefix
from jax_kernels.masks.positions import sliding_window as sliding_window
from jax_kernels.masks.prepared import PreparedMask as PreparedMask
from jax_kernels.masks.presets import preset as preset
from jax_kernels.masks.scores.builders import pooled_scores as pooled_scores
from jax_kernels.masks.scores.builders import threshold as threshold
from jax_kernels.masks.scores.builders import top_k as top_k
from jax_kernels.masks.scores.builders import top_k_blocks as top_k_blocks

__dir__ = _dir_of(__name__)
