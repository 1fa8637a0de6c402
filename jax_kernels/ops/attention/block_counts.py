"""The function that counts the blocks of a mask's bool array."""

import functools

import jax
from jax import lax

from jax_kernels.dispatch import interpreting, target_device
from jax_kernels.masks.block_lists import block_sums
from jax_kernels.pallas.attention.passes import block_counts as block_counts_pass


def counts(keep: jax.Array, block_q: int, block_kv: int) -> jax.Array:
    """The number of True pairs in each block of a mask: int32 [B, H, ceil(T / block_q), ceil(S / block_kv)].

    keep: bool [B, H, T, S]. A Triton kernel counts if the call is planned on a GPU of compute capability 8.0 or more,
    not interpreted, and compiled for CUDA, and if the kernel takes these sizes. Otherwise jnp code does.
    """
    capability = target_device().compute_capability
    has_triton = capability is not None and capability >= (8, 0) and not interpreting()
    if not has_triton or not block_counts_pass.takes(keep.shape, block_q, block_kv):
        return block_sums(keep, block_q, block_kv)
    # A machine with a GPU may still run this call on its CPU.
    kernel = functools.partial(block_counts_pass.counts, block_q=block_q, block_kv=block_kv, interpret=False)
    otherwise = functools.partial(block_sums, block_q=block_q, block_kv=block_kv)
    with jax.enable_x64(False):
        return lax.platform_dependent(keep, cuda=kernel, default=otherwise)
