"""The arrays, options and results of a linear cross-entropy, from the public op down to a kernel."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_kernels.inputs.matmul import wide_on_a_cpu
from jax_kernels.quantization import QuantizedArray, quantize
from jax_kernels.tracing.derivatives import without_derivative

__all__ = [
    "LEAST_CHUNK",
    "LOGITS_BYTES",
    "Layout",
    "LossGradients",
    "LossInputs",
    "LossOptions",
    "Statistics",
    "product",
    "rounded",
]

# Bytes of float32 logits in memory at once. Not measured. Each tile of tokens reads and
# writes the float32 gradient of the weights, so larger tiles have less traffic.
LOGITS_BYTES = 2**29
# Vocabulary entries of a chunk: fewer leave tensor cores idle.
LEAST_CHUNK = 512
# JAX drops the rule of a derivative that lies within another rule inside of a loop.
NO_SECOND_DERIVATIVE = (
    "precision: got 'fp8' in a second derivative of jax.lax.scan or another loop, want None: JAX does not keep its rule"
)


def product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum(axes, a, b) in float32. Products of float32 arrays are exact, not in tf32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    einsum = lambda a, b: jnp.einsum(axes, a, b, preferred_element_type=jnp.float32, precision=precision)
    return wide_on_a_cpu(einsum, a, b)


class LossInputs(NamedTuple):
    """The arrays of a call.

    x: [..., D]. rows: [V, D], the weights of each vocabulary entry, in any float dtype. targets: [...], from 0 to
    V - 1; -1 for a token that does not count; V for a target outside the vocabulary, whose loss is NaN.
    """

    x: Float[Array, "... D"]
    rows: Float[Array, "V D"]
    targets: Int32[Array, "..."]


class Statistics(NamedTuple):
    """Float32 values of each token's logits, [...]: their log-sum-exp, the target's logit, and their mean.

    mean is None in a call without label smoothing.
    """

    lse: Float[Array, "..."]
    chosen: Float[Array, "..."]
    mean: Float[Array, "..."] | None


class LossGradients(NamedTuple):
    """The Statistics of a call, and the gradients of x and of rows.

    Gradients have their arrays' dtypes, except that float16 becomes float32: they are still to be multiplied.
    """

    statistics: Statistics
    dx: Float[Array, "... D"]
    drows: Float[Array, "V D"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding of the logits and of the gradient of the weights. Here XLA decides; `models` derives from it."""

    def rows(self, rows: jax.Array) -> jax.Array:
        """The chunks of the weights [count, V / count, D], with their sharding."""
        return rows

    def logits(self, logits: jax.Array) -> jax.Array:
        """The logits of a chunk, [..., V / count], with their sharding."""
        return logits

    def sums(self, dlogits: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
        """The gradient of a chunk's rows, dlogits^T @ x: [..., V / count, D], whose leading axes `total` sums.

        dlogits: [..., V / count]. x: [..., D]. dtype: of the gradient; sums that are not complete stay float32.
        """
        return product("...v,...d->vd", dlogits, x).astype(dtype)

    def total(self, sums: jax.Array, dtype: Any) -> jax.Array:
        """The gradient of all rows [V, D], from the results of `sums` or of `tile_sums`."""
        return sums.astype(dtype)

    def devices(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The number of devices that shard each axis of the tokens, whose lengths are `shape`."""
        return (1,) * len(shape)

    def vocabulary_devices(self, vocabulary: int) -> int:
        """The number of devices that shard the vocabulary."""
        return 1

    def first_sums(self, rows: jax.Array) -> jax.Array:
        """Zeros, to which the results of `tile_sums` are added."""
        return jnp.zeros(rows.shape, jnp.float32)

    def tile_sums(self, dlogits: jax.Array, x: jax.Array) -> jax.Array:
        """The part of a tile of tokens in the gradient of all rows: float32 [..., V, D], whose leading axes `total`
        sums after the last tile.

        dlogits: [tokens of a tile, V]. x: [tokens of a tile, D].
        """
        return product("...v,...d->vd", dlogits, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The static half of a call: hashable, so that it can key a jit cache.

    With z the logits x @ rows.T of a token, capped to softcap * tanh(z / softcap), its loss is
    lse(z) - (1 - label_smoothing) * z[target] - label_smoothing * mean(z) + z_loss * lse(z)**2.

    precision: "fp8" if x and rows are rounded to e4m3 for the logits, each token and each entry with its own scale;
    otherwise None. Derivatives are of x @ rows.T. is_differentiable: whether JAX's own derivatives of the logits are
    these derivatives, which costs another matmul. transpose_w: whether the caller's w is [V, D] like LossInputs.rows,
    not [D, V]. chunk: the number of vocabulary entries for which each token's logits are in memory at once, on average
    in a loop over tiles of tokens; None for a number that follows from the tokens, logits_bytes and least_chunk.
    logits_bytes: the bytes of float32 logits in memory at once. least_chunk: the fewest vocabulary entries of a chunk.
    layout: the sharding of the logits.
    """

    transpose_w: bool = False
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    precision: str | None = None
    is_differentiable: bool = False
    chunk: int | None = None
    logits_bytes: int = LOGITS_BYTES
    least_chunk: int = LEAST_CHUNK
    layout: Layout = Layout()


def rounded(y: jax.Array, options: LossOptions) -> QuantizedArray | None:
    """y [..., D] in e4m3 with a scale for each row, if the options have 8 bits; otherwise None."""
    if options.precision is None:
        return None
    y = jax.lax.stop_gradient(y) if options.is_differentiable else without_derivative(y, NO_SECOND_DERIVATIVE)
    return quantize(y, scaling="row", axis=-1)
