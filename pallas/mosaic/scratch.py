"""Shared memory and barriers for pl.run_scoped to allocate, typed as the refs that the kernel receives.

A dataclass of scratch memory first holds the requests for memory. pl.run_scoped then calls the kernel with a dataclass
of refs. The fields have the types of the refs.
"""

from collections.abc import Sequence
from typing import Any, cast

from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jax_kernels.pallas.kernel_types import Barrier, Ref

__all__ = ["barrier_ref", "smem_ref"]


def smem_ref(shape: Sequence[int], dtype: DTypeLike, *, transforms: Sequence[Any] = ()) -> Ref:
    """A request to pl.run_scoped for an array in shared memory. transforms: tiling and swizzle of the array.

    Type checkers see the request as the Ref that the kernel receives for it.
    """
    return cast(Ref, plgpu.SMEM(shape, dtype, transforms=transforms))


def barrier_ref(*, num_arrivals: int = 1, num_barriers: int = 1) -> Barrier:
    """A request to pl.run_scoped for an array of barriers in shared memory.

    num_arrivals: the arrivals that complete a phase of each barrier. Type checkers see the request as the Barrier that
    the kernel receives for it.
    """
    return cast(Barrier, plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers))
