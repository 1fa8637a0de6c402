"""The order of a matmul's work tiles."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.pallas.kernel_types import Index


def banded(index: Index, m_blocks: int, n_blocks: int, row_group: int) -> tuple[jax.Array, jax.Array]:
    """(index of the block of rows, index of the block of columns) of work tile `index`, as traced int32 scalars.

    The result has m_blocks x n_blocks work tiles. Tiles are ordered in bands of row_group blocks of rows. A band is
    ordered column by column, because the L2 cache holds the band's part of x.
    """
    together = min(row_group, m_blocks)
    per_band = together * n_blocks
    band, within = lax.div(index, jnp.int32(per_band)), lax.rem(index, jnp.int32(per_band))
    rows = jnp.minimum(m_blocks - band * together, together)  # fewer in the last band
    return band * together + lax.rem(within, rows), lax.div(within, rows)
