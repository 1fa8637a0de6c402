"""Delayed scaling of 8-bit matmuls: a history of the largest magnitudes of previous calls, and the scale from it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_kernels.models.config import positive
from jax_kernels.quantization import quantization_scale

__all__ = ["AmaxHistory", "check_fp8_scaling", "delayed_scale", "empty_history"]

LENGTH = 16


class AmaxHistory(nnx.Variable):
    """The largest finite magnitudes of an array in previous calls: float32 [length], the newest first, 0 for none.

    Not an nnx.Param, so that optimizers and nnx.grad ignore it.
    """


def empty_history(length: int | None) -> AmaxHistory:
    """An AmaxHistory of zeros. length: the number of calls that it holds; None for 16."""
    return AmaxHistory(jnp.zeros(LENGTH if length is None else length, jnp.float32))


def delayed_scale(history: AmaxHistory, x: jax.Array) -> jax.Array:
    """The float32 scale [] with which x is rounded to e4m3, from the largest magnitude in the history.

    It then adds x's largest finite magnitude to the history, in place. If the history has no magnitude above 0, the
    scale comes from x itself.
    """
    x = lax.stop_gradient(x)
    newest = jnp.where(jnp.isfinite(x), jnp.abs(x), 0).max(initial=0).astype(jnp.float32)
    past = history[...]
    largest = jnp.where(past.max() > 0, past.max(), newest)
    history[...] = jnp.concatenate([newest[None], past[:-1]])
    return quantization_scale(largest[None], jnp.float8_e4m3fn, "tensor", -1)


def check_fp8_scaling(fp8_scaling: Any, length: Any, precision: Any, scaling: Any) -> None:
    """Raises ValueError or TypeError, naming the argument, unless fp8_scaling fits the other options.

    length: the argument amax_history_length.
    """
    if fp8_scaling not in ("dynamic", "delayed"):
        raise ValueError(f"fp8_scaling={fp8_scaling!r} must be 'dynamic' or 'delayed'")
    if fp8_scaling == "dynamic":
        if length is not None:
            raise ValueError(f"amax_history_length={length!r} must be None with fp8_scaling='dynamic'")
        return
    if precision != "fp8":
        raise ValueError(f"fp8_scaling='delayed' must be 'dynamic' with precision={precision!r}: it is for 'fp8'")
    if scaling not in (None, "tensor"):
        raise ValueError(f"scaling={scaling!r} must be 'tensor' or None with fp8_scaling='delayed'")
    if length is not None:
        positive("amax_history_length", length)
