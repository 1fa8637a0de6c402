"""Masks and a score_mod of a whole sequence, and errors against other results, for the tests of rings."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kernels import masks
from jax_kernels.testing import rms_error

__all__ = ["FUNCTION", "MASK", "errors_of", "score_mod"]

MASK = masks.causal() & masks.sliding_window(300, 0) | masks.global_tokens(64)
FUNCTION = masks.from_function(lambda b, h, q, k: (q // 64 + k // 64) % 3 != 1) & masks.causal()


def score_mod(score, b, h, q, k):
    return score - 0.01 * (q - k).astype(jnp.float32)


def errors_of(names: Iterable[str], got: Iterable[Any], want: Iterable[Any]) -> dict[str, float]:
    """The error of each wanted array, by name. Asserts equal positions of -inf, and that the rest is finite."""
    found = {}
    for name, g, w in zip(names, got, want, strict=True):
        if w is not None:
            g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
            dead = np.isneginf(w)
            assert np.array_equal(np.isneginf(g), dead), name
            assert np.isfinite(g[~dead]).all(), name
            found[name] = float(rms_error(np.where(dead, 0, g), np.where(dead, 0, w)))
    return found
