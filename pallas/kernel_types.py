"""Types of the values inside a kernel. JAX has no public types for them.

A kernel reads and writes memory through a `Ref`, waits at a `Barrier`, and sums matmuls in an `AccumulatorRef`. An
`Index` is a Python int or a traced int32 scalar. A `Slice` is a Python slice or a pl.Slice of such indices.
"""

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.ref import AbstractRef
from jax.typing import ArrayLike, DTypeLike

__all__ = ["AccumulatorRef", "Barrier", "Index", "Indices", "Ref", "Slice", "needed"]

type Index = int | jax.Array
type Slice = slice | pl.Slice
type Indices = Index | Slice | EllipsisType | tuple[Index | Slice | EllipsisType, ...]

if TYPE_CHECKING:
    from jax._src.pallas.mosaic_gpu.core import WGMMAAbstractAccumulatorRef

    class _RefIndexer:
        def __getitem__(self, indices: Indices) -> "Ref": ...

    class Ref(AbstractRef):
        """Memory that a kernel reads and writes: an array in GMEM or SMEM, or a view of one."""

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> jnp.dtype: ...
        @property
        def ndim(self) -> int: ...
        @property
        def at(self) -> _RefIndexer: ...  # type: ignore[override]
        def __getitem__(self, indices: Indices) -> jax.Array: ...
        def __setitem__(self, indices: Indices, value: ArrayLike) -> None: ...
        def bitcast(self, dtype: DTypeLike) -> "Ref": ...  # type: ignore[override]
        def reshape(self, *shape: int | tuple[int, ...]) -> "Ref": ...  # type: ignore[override]
        def transpose(self, permutation: Sequence[int]) -> "Ref": ...  # type: ignore[override]

    class _BarrierIndexer:
        def __getitem__(self, indices: Index | tuple[Index, ...]) -> "Barrier": ...

    class Barrier(AbstractRef):
        """A barrier in SMEM, or an array of barriers."""

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def at(self) -> _BarrierIndexer: ...  # type: ignore[override]

    class _AccumulatorIndexer:
        def __getitem__(self, indices: Indices) -> "AccumulatorRef": ...

    class AccumulatorRef(WGMMAAbstractAccumulatorRef):
        """Registers in which wgmma accumulates a matmul."""

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def at(self) -> _AccumulatorIndexer: ...  # type: ignore[override]
        def __getitem__(self, indices: Indices) -> jax.Array: ...
        def __setitem__(self, indices: Indices, value: ArrayLike) -> None: ...

else:
    Ref = Barrier = AccumulatorRef = AbstractRef


def needed[T](x: T | None) -> T:
    """Returns x, which must not be None: a part of a kernel's state that some launches have and others lack."""
    assert x is not None
    return x
