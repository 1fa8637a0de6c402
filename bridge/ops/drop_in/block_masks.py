"""Converts PyTorch's BlockMask to a masks.Mask.

Pairs outside the blocks that a BlockMask lists are masked out. In a listed partial block its mask_mod selects pairs; in
a listed full block all pairs are kept.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from jax_kernels.bridge import masks
from jax_kernels.bridge.ops.drop_in import torch_flex
from jax_kernels.bridge.translate import mask_sources, score_mods
from jax_kernels.masks import Mask

if TYPE_CHECKING:
    from torch.nn.attention import flex_attention as torchs

__all__ = ["Sizes", "is_whole", "mask_in_graph", "mask_of"]

_NAME = "_jax_kernels_masks"
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_WHOLE = 1 << 30  # the block size of PyTorch's BlockMask for calls without a mask
_MOST = 16  # Masks that are kept for a BlockMask


class Sizes(NamedTuple):
    """The sizes of a call that a BlockMask serves: batch entries, query heads, queries and keys."""

    batch: int
    heads: int
    length: int
    kv_length: int


type _MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
type _State = tuple[_MaskMod, tuple[bool, ...], tuple[int, ...], tuple[int, ...]]


class _Made(NamedTuple):
    """A Mask, and the state of the BlockMask from which it was made, as _state_of returns it."""

    mask: Mask
    state: _State


class _Kept(dict[Sizes, _Made]):
    """The Masks that were made from one BlockMask, by the sizes of calls. It is an attribute of the BlockMask.

    A copy of the BlockMask starts without Masks. in_graphs: by id, the Masks of graphs of torch.compile, which live as
    long as the BlockMask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_graphs: dict[int, Mask] = {}

    def __reduce__(self) -> tuple[type["_Kept"], tuple[()]]:
        return _Kept, ()


def is_whole(block_mask: "torchs.BlockMask") -> bool:
    """Whether block_mask is PyTorch's BlockMask for calls without a mask, whose one block keeps all pairs."""
    return tuple(block_mask.BLOCK_SIZE) == (_WHOLE, _WHOLE) and block_mask.mask_mod is torch_flex.module.noop_mask


def mask_of(block_mask: "torchs.BlockMask", sizes: Sizes) -> Mask:
    """Returns the Mask of a BlockMask for calls of these sizes.

    The Mask is kept with the BlockMask, for up to 16 sizes. It is made again if the mask_mod, a list, or a tensor that
    the mask_mod reads has changed.

    Raises ValueError, naming block_mask, if the BlockMask was made for other sizes, and TypeError if its mask_mod has
    no form in jnp.
    """
    kept = vars(block_mask).setdefault(_NAME, _Kept())
    made = kept.get(sizes)
    state = _state_of(block_mask)
    if made is None or made.state != state or not mask_sources.is_fresh(made.mask):
        while len(kept) >= _MOST:
            del kept[next(iter(kept))]
        kept[sizes] = made = _Made(_make(block_mask, sizes), state)
    return made.mask


def mask_in_graph(block_mask: "torchs.BlockMask", sizes: Sizes) -> Mask:
    """Returns the Mask of a BlockMask for a graph of torch.compile. The BlockMask keeps the Mask alive."""
    mask = mask_of(block_mask, sizes)
    vars(block_mask)[_NAME].in_graphs[id(mask)] = mask
    return mask


def _state_of(block_mask: "torchs.BlockMask") -> _State:
    """Returns the parts of a BlockMask that determine its Mask, except the values of tensors.

    They are (the mask_mod; which of the lists kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices are not
    None; the block size; the numbers of queries and keys).
    """
    is_there = tuple(getattr(block_mask, name) is not None for name in _LISTS)
    return block_mask.mask_mod, is_there, tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths)


def _make(block_mask: "torchs.BlockMask", sizes: Sizes) -> Mask:
    """Returns a new Mask of the BlockMask, which raises if the BlockMask's lists change later.

    Raises ValueError if the BlockMask is a slice of another one, or was made for other lengths.
    """
    mask_mod = block_mask.mask_mod
    if mask_mod is getattr(torch_flex.module, "_sliced_mask_mod_error", None):
        raise ValueError(
            "block_mask: got a part of a BlockMask, want its mask_mod set, for example to the mask_mod of the whole"
        )
    lengths = tuple(map(int, block_mask.seq_lengths))
    if lengths != (sizes.length, sizes.kv_length):
        raise ValueError(
            f"block_mask: got one for {lengths[0]} queries and {lengths[1]} keys, want one for {sizes.length} queries "
            f"and {sizes.kv_length} keys"
        )
    lists = [(("attribute", name),) for name in _LISTS if getattr(block_mask, name) is not None]
    return mask_sources.attach(_of_lists(block_mask, sizes), block_mask, lists)


def _of_lists(block_mask: "torchs.BlockMask", sizes: Sizes) -> Mask:
    """Returns the Mask that keeps the full blocks, and in the partial blocks the pairs that the mask_mod keeps."""
    mask_mod = block_mask.mask_mod
    partial = _blocks(block_mask, "kv_num_blocks", "kv_indices", sizes)
    has_full = block_mask.full_kv_num_blocks is not None
    full = _blocks(block_mask, "full_kv_num_blocks", "full_kv_indices", sizes) if has_full else None
    size = tuple(map(int, block_mask.BLOCK_SIZE))
    if mask_mod is torch_flex.module.noop_mask:
        blocks = partial if full is None else torch.logical_or(*torch.broadcast_tensors(partial, full))
        return masks.block_sparse(blocks, size)
    mask = masks.block_sparse(partial, size) & _of_function(mask_mod, sizes)
    return mask if full is None else mask | masks.block_sparse(full, size)


def _of_function(mask_mod: _MaskMod, sizes: Sizes) -> Mask:
    """Returns the Mask of the pairs for which a BlockMask's mask_mod is True, without regard to its blocks.

    The Mask has an axis for batch, or heads, only if the mask_mod reads that index.
    Raises TypeError if the mask_mod has no form in jnp.
    """
    made, read, _ = score_mods.mask_mod(mask_mod)
    sees_batch, sees_heads = score_mods.looks_at(made, read)
    return masks.from_function(
        mask_mod, batch=sizes.batch if sees_batch else None, heads=sizes.heads if sees_heads else None
    )


def _blocks(block_mask: "torchs.BlockMask", of_counts: str, of_indices: str, sizes: Sizes) -> torch.Tensor:
    """Returns the blocks that a pair of a BlockMask's lists names: bool [B or 1, H or 1, query blocks, key blocks].

    of_counts, of_indices: the attributes with the number of listed key blocks of each query block, and their indices.
    Raises ValueError, naming block_mask, for a list of another shape or a block index out of range.
    """
    counts, indices = getattr(block_mask, of_counts).detach(), getattr(block_mask, of_indices).detach()
    counts = counts.reshape((1,) * (3 - counts.ndim) + tuple(counts.shape))
    indices = indices.reshape((1,) * (4 - indices.ndim) + tuple(indices.shape))
    block_q, block_kv = map(int, block_mask.BLOCK_SIZE)
    rows, columns = -(-sizes.length // block_q), -(-sizes.kv_length // block_kv)
    batch, heads, length = counts.shape
    if length != rows or batch not in (1, sizes.batch) or heads not in (1, sizes.heads):
        raise ValueError(
            f"block_mask: got {of_counts} of shape {tuple(counts.shape)}, want one broadcastable to "
            f"{(sizes.batch, sizes.heads, rows)}"
        )
    indices = indices.to(torch.int64)
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    is_listed, indices = torch.broadcast_tensors(is_listed, indices)
    if bool((is_listed & ((indices < 0) | (indices >= columns))).any()):
        raise ValueError(f"block_mask: got {of_indices} with a block out of range, want 0 to {columns - 1}")
    blocks = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    blocks.scatter_(-1, torch.where(is_listed, indices, columns), True)
    return blocks[..., :columns].contiguous()
