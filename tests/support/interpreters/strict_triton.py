"""Triton kernels in the interpreter with checked bounds: an access past an array's end gives NaN.

The interpreter moves such a load or store into the array, or leaves it out. A GPU accesses the memory behind the array,
which is the next row, or another array.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jax_kernels.pallas.triton.backend import plgpu


@contextmanager
def strict() -> Iterator[None]:
    """Inside, newly traced kernels have checked loads and stores. Accesses of whole refs are not checked.

    A store past an end makes all of its array NaN, as the interpreter may leave the store out.
    """
    load, store = plgpu.load, plgpu.store

    def checked_load(view: Any, *, mask: Any = None, **rest: Any) -> jax.Array:
        return _nan_where(_passes(view, mask), load(view, mask=mask, **rest))

    def checked_store(view: Any, x: jax.Array, *, mask: Any = None, **rest: Any) -> None:
        store(view, x, mask=mask, **rest)
        if hasattr(view, "transforms"):
            view.ref[...] = _nan_where(jnp.any(_passes(view, mask)), view.ref[...])

    jax.clear_caches()
    with mock.patch.object(plgpu, "load", checked_load), mock.patch.object(plgpu, "store", checked_store):
        yield
    jax.clear_caches()


def _nan_where(where: jax.Array, x: jax.Array) -> jax.Array:
    """x with NaN, or with the least integer, where `where` is true."""
    wrong = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return jnp.where(where, jnp.asarray(wrong, x.dtype), x)


def _passes(view: Any, mask: Any) -> jax.Array:
    """Whether each element of a view is kept by the mask and lies outside of the array, as bools."""
    if not hasattr(view, "transforms"):  # a whole ref
        return jnp.zeros((), bool)
    *outer, last = view.transforms
    passes = jnp.zeros(view.shape, bool)
    for indexer in outer:
        for place, size in zip(indexer.indices, indexer.shape, strict=True):
            passes = passes | jnp.any(_outside(place, size))
    axis = 0
    for place, size in zip(last.indices, last.shape, strict=True):
        outside = _outside(place, size)
        if outside.ndim:
            outside = outside.reshape([-1 if i == axis else 1 for i in range(len(view.shape))])
            axis += 1
        passes = passes | outside
    return passes if mask is None else passes & mask


def _outside(place: Any, size: int) -> jax.Array:
    """Whether indices along an axis of length `size` are out of bounds: a bool, or bool [count] for a slice."""
    if hasattr(place, "start"):
        place = place.start + jnp.arange(place.size) * place.stride
    place = jnp.asarray(place)
    return (place < 0) | (place >= size)
