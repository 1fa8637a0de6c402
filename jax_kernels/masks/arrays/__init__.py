"""Masks that hold arrays of a call, and masks of a function."""

from jax_kernels.masks.arrays.array_mask import with_batch as with_batch
from jax_kernels.masks.arrays.block_sparse_mask import BlockSparse as BlockSparse
from jax_kernels.masks.arrays.block_sparse_mask import block_sparse as block_sparse
from jax_kernels.masks.arrays.block_sparse_mask import named_block_sparse as named_block_sparse
from jax_kernels.masks.arrays.cu_seqlens import segment_ids_from_cu_seqlens as segment_ids_from_cu_seqlens
from jax_kernels.masks.arrays.dense_mask import Dense as Dense
from jax_kernels.masks.arrays.dense_mask import DenseMask as DenseMask
from jax_kernels.masks.arrays.dense_mask import dense as dense
from jax_kernels.masks.arrays.dense_mask import named_dense as named_dense
from jax_kernels.masks.arrays.function_mask import from_function as from_function
from jax_kernels.masks.arrays.key_mask import KeyMask as KeyMask
from jax_kernels.masks.arrays.segments_mask import Segments as Segments
from jax_kernels.masks.arrays.segments_mask import segments as segments
