"""Calls of Hopper kernels whose arguments are slices of arrays, at addresses that are no multiples of 256."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_kernels as jk

_HOPPER: dict[str, Any] = {"implementation": "mosaic_gpu"}
_BF16 = jnp.dtype(jnp.bfloat16)


class Call(NamedTuple):
    """run: of the slices x[1:] of `arrays`, to a tree of arrays."""

    run: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]

    def of_slices(self, *arrays: Any) -> Any:
        return self.run(*(x[1:] for x in arrays))


def _normal(*shape: int) -> np.ndarray:
    """bf16 [1 + shape[0], ...]."""
    rng = np.random.default_rng(len(shape))
    return np.asarray(rng.standard_normal((1 + shape[0], *shape[1:])), np.float32).astype(_BF16)


def _integers(*values: int) -> np.ndarray:
    return np.array([0, *values], np.int32)


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The result, and the gradients of the float arrays."""

    def run(*arrays: Any) -> Any:
        floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floats(*given: Any) -> jax.Array:
            joined = list(arrays)
            for i, x in zip(floats, given, strict=True):
                joined[i] = x
            return function(*joined)

        out, vjp = jax.vjp(of_floats, *(arrays[i] for i in floats))
        return out, vjp(out)

    return run


def _attend(query: Any, key: Any, value: Any, ids: Any) -> jax.Array:
    return jk.flash_attention(query, key, value, segment_ids=ids, is_causal=True, **_HOPPER)


def _each_document(query: Any, key: Any, value: Any) -> jax.Array:
    """A scan reads its slices and writes its results at multiples of 193 * 64 * 2 bytes."""
    return lax.map(lambda x: jk.flash_attention(*(y[None] for y in x), **_HOPPER)[0], (query, key, value))


def _update(out: Any, x: Any, w: Any) -> jax.Array:
    return out.at[1:65].set(jk.matmul(x, w, **_HOPPER))


def _decode(query: Any, key: Any, value: Any, lengths: Any) -> jax.Array:
    return jk.decode_attention(query, key, value, kv_lengths=lengths, **_HOPPER)


def _low_bit() -> Any:
    return jk.quantize(jnp.asarray(_normal(511, 256)), "int4")


_IDS = np.sort(np.random.default_rng(0).integers(0, 3, (3, 193)).astype(np.int32))
_QKV = tuple(_normal(2, 193, 1, 64) for _ in range(3))
CALLS = {
    "matmul": Call(
        with_gradients(lambda x, w, bias: jk.matmul(x, w, bias=bias, **_HOPPER)),
        (_normal(128, 64), _normal(64, 192), _normal(192)),
    ),
    "fp8": Call(lambda x, w: jk.matmul(x, w, precision="fp8", **_HOPPER), (_normal(128, 128), _normal(128, 192))),
    "gated": Call(
        with_gradients(lambda x, *w: jk.gated_matmul(x, *w, **_HOPPER)),
        (_normal(128, 64), _normal(64, 192), _normal(64, 192)),
    ),
    "update": Call(_update, (_normal(128, 64), _normal(64, 64), _normal(64, 64))),
    "norm": Call(with_gradients(lambda x, scale: jk.rms_norm(x, scale, **_HOPPER)), (_normal(8, 128), _normal(128))),
    "grouped": Call(
        with_gradients(lambda x, w, sizes: jk.grouped_matmul(x, w, sizes, **_HOPPER)),
        (_normal(128, 64), _normal(32, 64, 192), _integers(*[3] * 32)),
    ),
    "cross-entropy": Call(
        with_gradients(lambda x, w, targets: jk.linear_cross_entropy(x, w, targets, **_HOPPER).mean()),
        (_normal(128, 64), _normal(64, 192), _integers(*range(128))),
    ),
    "cross-entropy of 8 bits": Call(
        with_gradients(lambda x, w, targets: jk.linear_cross_entropy(x, w, targets, precision="fp8", **_HOPPER).mean()),
        (_normal(128, 128), _normal(128, 192), _integers(*range(128))),
    ),
    "attention": Call(with_gradients(_attend), (*_QKV, _IDS)),
    "each document": Call(with_gradients(_each_document), _QKV),
    "decoding": Call(_decode, (_normal(32, 1, 8, 64), *[_normal(32, 200, 1, 64)] * 2, _integers(*range(1, 33)))),
}
# Functions of one batch entry of each array, for scans: XLA stacks the results of the kernels in place.
SCANNED = {
    "attention": Call(
        lambda *qkv: jk.flash_attention(*(x[None] for x in qkv), scale=1.0, **_HOPPER)[0], (_normal(2, 192, 2, 64),) * 3
    ),
    "norm": Call(lambda x, scale: jk.rms_norm(x, scale, **_HOPPER), (_normal(2, 64, 512), _normal(2, 512))),
    "low-bit": Call(lambda x: jk.matmul(x, _low_bit(), **_HOPPER), (_normal(2, 8, 512),)),
}
