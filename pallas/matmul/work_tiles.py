"""The order in which a matmul's work tiles are done."""

from typing import Any

import jax.numpy as jnp
from jax import lax


def banded(index: Any, m_blocks: int, n_blocks: int, rows_together: int) -> tuple[Any, Any]:
    """The row and the column, in blocks, of work tile number `index`.

    rows_together rows of tiles are done column by column: the L2 cache holds their part of x.
    """
    together = min(rows_together, m_blocks)
    per_band = together * n_blocks
    band, within = lax.div(index, jnp.int32(per_band)), lax.rem(index, jnp.int32(per_band))
    rows = jnp.minimum(m_blocks - band * together, together)  # of the last band, fewer
    return band * together + lax.rem(within, rows), lax.div(within, rows)
