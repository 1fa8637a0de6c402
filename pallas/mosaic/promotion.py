"""Sums of 8-bit matmuls: accumulators of about 14 bits, which are added to float32 sums after every few steps."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.kernel_types import Index
from jax_kernels.pallas.mosaic.layouts import WGMMA

__all__ = ["promoted"]


def promoted(
    products: Callable[[Index, int], Iterable[jax.Array]],
    free: Callable[[Index], None],
    *,
    parts: int,
    shape: tuple[int, int],
    steps: int,
    together: int,
) -> list[jax.Array]:
    """The float32 sums over all steps, an array of this shape for each of the parts.

    products(first, count): the matmuls of each part over `count` steps from step `first` on. free(i): is called when
    all parts have read step i. together: the number of steps after which accumulators are promoted.
    """

    def add(first: Index, count: int, totals: list[jax.Array]) -> list[jax.Array]:
        found = []
        for total, product in zip(totals, products(first, count), strict=True):
            found.append(lax.optimization_barrier(total + product))  # add here, not after the last part's wgmmas
        for i in range(count):
            free(first + i)
        return found

    totals = [plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)] * parts
    turns, rest = divmod(steps, together)
    totals = lax.fori_loop(0, turns, lambda i, totals: add(i * together, together, totals), totals)
    return add(jnp.int32(turns * together), rest, totals) if rest else totals
