"""Delayed scaling of 8-bit matmuls: a history of the largest magnitudes of previous calls, and the scale from it."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_kernels.quantization import quantization_scale

__all__ = [
    "AmaxHistory",
    "copy_history",
    "delayed_scale",
    "empty_history",
    "is_recording",
    "record",
    "recording",
    "without_histories",
]

LENGTH = 16
_RECORDS = contextvars.ContextVar("records", default=True)


class AmaxHistory(nnx.Variable):
    """The largest finite magnitudes of an array in previous calls: float32 [length], the newest first, 0 for none.

    Not an nnx.Param, so that optimizers and nnx.grad ignore it.
    """


def empty_history(length: int | None) -> AmaxHistory:
    """An AmaxHistory of zeros. length: the number of calls that it holds; None for 16."""
    return AmaxHistory(jnp.zeros(LENGTH if length is None else length, jnp.float32))


@contextlib.contextmanager
def recording(records: bool) -> Iterator[None]:
    """Calls inside add their magnitudes to histories only with records=True."""
    token = _RECORDS.set(records)
    try:
        yield
    finally:
        _RECORDS.reset(token)


def without_histories(tree: Any) -> Any:
    """The tree, such as parameters or an optimizer's moments, whose nnx.States have no AmaxHistories."""
    is_state = lambda x: isinstance(x, nnx.State)

    def filtered(x: Any) -> Any:
        has_histories = is_state(x) and bool(jax.tree.leaves(nnx.filter_state(x, AmaxHistory)))
        return nnx.filter_state(x, nnx.Not(AmaxHistory)) if has_histories else x

    return jax.tree.map(filtered, tree, is_leaf=is_state)


def copy_history(source: AmaxHistory, target: AmaxHistory) -> None:
    """Copies a history that a call has added to; nothing in `recording(False)`."""
    if _RECORDS.get():
        target[...] = source[...]


def delayed_scale(history: AmaxHistory, x: jax.Array) -> jax.Array:
    """The float32 scale [] with which x is rounded to e4m3, from the largest magnitude in the history.

    It then adds x's largest finite magnitude to the history, in place, except in `recording(False)`. If the history has
    no magnitude above 0, the scale comes from x itself.
    """
    x = lax.stop_gradient(x)
    newest = jnp.where(jnp.isfinite(x), jnp.abs(x), 0).max(initial=0).astype(jnp.float32)
    past = lax.stop_gradient(history[...])
    largest = jnp.where(past.max() > 0, past.max(), newest)
    record(history, newest)
    return quantization_scale(largest[None], jnp.float8_e4m3fn, "tensor", -1)


def is_recording() -> bool:
    """Whether calls add their magnitudes to histories: not in `recording(False)`."""
    return _RECORDS.get()


def record(history: AmaxHistory, newest: jax.Array) -> None:
    """Adds the largest magnitude of a call to the history, in place; nothing in `recording(False)`."""
    if _RECORDS.get():
        history[...] = jnp.concatenate([newest[None], lax.stop_gradient(history[...])[:-1]])
