"""The arrays, options and results of a matmul, from the public op down to a kernel."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

from jax_kernels.quantization.formats import LowBit

_TINY = float(jnp.finfo(jnp.float32).tiny)
_SHARE = 2.0**60  # the largest first factor of a row's scale


class MatmulInputs(NamedTuple):
    """The arrays of a call. Arrays that a call lacks are None.

    x: [M, K]; [K, M] with transpose_x. w: [K, N] in x's dtype; [N, K] with transpose_w. bias: [N], x's dtype or
    float32. residual: [M, N], out's dtype. w_up: like w, of a gated unit. x_up: like x; a call with x_up has no gated
    unit, and adds x_up @ w_up to x @ w.

    x_scale, w_scale, w_up_scale: float32, the factors of 8-bit operands, with a shape set by MatmulOptions.scaling.
    "tensor": []; "row": a scale for each row of x and column of w, [M] and [N]; "block": a scale for each 128 x 128
    values, [ceil(M / 128), ceil(K / 128)] and [ceil(K / 128), ceil(N / 128)], the last transposed with transpose_w.

    preactivation, up: [M, N], out's dtype, of an earlier call; up only of a gated unit. With them the epilogue is the
    derivative of the earlier call, and x @ w is its cotangent; see MatmulOptions.

    With MatmulOptions.low_bit: w and w_up are stored values, [N, bytes], and w_scale and w_up_scale are their scales;
    x is not quantised, and x_scale is None.

    A kernel takes the shapes above. In all other code M and K may each be several axes; N is one axis. M is x's outer
    axes, as the caller gave them. K is all axes of w except N, such as the outer axes in the gradient of the weights.
    The devices of a mesh shard each of these axes. With block scales, the last of several axes has whole blocks.
    """

    x: Float[Array, "*M K"] | Float[Array, "*K M"]
    w: Num[Array, "K N"] | Num[Array, "N K"]
    bias: Float[Array, " N"] | None = None
    residual: Float[Array, "*M N"] | None = None
    w_up: Num[Array, "K N"] | Num[Array, "N K"] | None = None
    x_scale: Float32[Array, "..."] | None = None
    w_scale: Float[Array, "..."] | None = None
    w_up_scale: Float[Array, "..."] | None = None
    x_up: Float[Array, "*M K"] | Float[Array, "*K M"] | None = None
    preactivation: Float[Array, "*M N"] | None = None
    up: Float[Array, "*M N"] | None = None

    @property
    def is_gated(self) -> bool:
        return self.w_up is not None and self.x_up is None


class MatmulResult(NamedTuple):
    """The results of a matmul's call, [M, N] each; M is several axes if x has several row axes.

    out: in the call's out_dtype. preactivation: x @ w + bias in the same dtype, None if it is not wanted. up:
    x @ w_up, likewise, of a gated unit. activated: None.

    A call whose inputs have a preactivation computes the derivative of the earlier call that saved it. Then out is the
    cotangent of the earlier preactivation, up the cotangent of the earlier up (None if there was none), and activated
    the earlier activation(preactivation) * up, without residual.
    """

    out: Float[Array, "*M N"]
    preactivation: Float[Array, "*M N"] | None = None
    up: Float[Array, "*M N"] | None = None
    activated: Float[Array, "*M N"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOptions:
    """The static half of a matmul's call: hashable, so that it can key a jit cache.

    out = activation(x @ w + bias) * (x @ w_up) + residual, in float32 from the matmuls on; without w_up there is no
    second factor. With x_up, x_up @ w_up is added to x @ w instead.

    With inputs.preactivation z and g = x @ w: out = g * derivative(z) * up, the result's up = g * activation(z), and
    activated = activation(z) * up; without inputs.up, up is 1.

    out_dtype: of the results. activation: an elementwise function in jnp, or None. derivative: the activation's, with
    inputs.preactivation. precision: of float32 matmuls, "fp32" or "tf32"; otherwise None. saves_preactivation: whether
    the result has preactivation and, for a gated unit, up. scaling: the layout of the scales of 8-bit operands, see
    MatmulInputs; otherwise None. low_bit: the layout of low-bit weights, which are [N, K], with transpose_w; otherwise
    None.
    """

    out_dtype: str
    transpose_x: bool = False
    transpose_w: bool = False
    activation: Callable[[Array], Array] | None = None
    derivative: Callable[[Array], Array] | None = None
    precision: str | None = None
    saves_preactivation: bool = False
    scaling: str | None = None
    low_bit: LowBit | None = None

    def axes(self, inputs: MatmulInputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(lengths of x's M axes, lengths of x's K axes)."""
        shape, count = inputs.x.shape, inputs.w.ndim - 1
        if self.transpose_x:
            return shape[count:], shape[:count]
        return shape[: len(shape) - count], shape[len(shape) - count :]

    def sizes(self, inputs: MatmulInputs) -> tuple[int, int, int]:
        """(M, N, K), with M and K as products of their axes' lengths."""
        rows, depth = self.axes(inputs)
        return math.prod(rows), inputs.w.shape[0 if self.transpose_w else -1], math.prod(depth)

    def gradients(
        self, g: Float32[Array, "..."], z: Float32[Array, "..."], load_up: Callable[[], Array] | None
    ) -> Iterator[tuple[str, Float32[Array, "..."]]]:
        """Yields (field of MatmulResult, value): the derivative of activation(z) * up, all in float32.

        g: the cotangent of activation(z) * up. z: the saved preactivation. load_up: a function that loads up when it is
        needed; None if there is no up. It yields "up" (with load_up only, the cotangent of up), "out" (the cotangent of
        z) and "activated" (activation(z) * up).
        """
        assert self.derivative is not None
        z = in_range(z, self.out_dtype)
        activated, dz = z if self.activation is None else self.activation(z), g * self.derivative(z)
        if load_up is not None:
            yield "up", g * activated
            up = in_range(load_up(), self.out_dtype)
            activated, dz = activated * up, dz * up
        yield "out", dz
        yield "activated", activated


def in_range(z: Float32[Array, "..."], dtype: DTypeLike) -> Float32[Array, "..."]:
    """z, a float32 sum that was saved in `dtype`, with float16's infinities replaced by its largest values.

    Other dtypes are unchanged. The sums were finite before they were saved. At an infinity, silu's derivative, for
    example, is NaN, and NaN times 0 is NaN.
    """
    if jnp.dtype(dtype) != jnp.float16:
        return z
    top = float(jnp.finfo(jnp.float16).max)
    return jnp.minimum(jnp.maximum(z, -top), top)


def scale_factors(x_scale: Array, w_scale: Array) -> tuple[Array, Array]:
    """(first, second), float32: a kernel computes sums * first * second for sums * x_scale * w_scale, without overflow.

    x_scale, w_scale: positive float32 scales of one shape or scalars. The product of two scales may leave float32's
    range even if the result does not. Then the scales multiply in turn: sums of 8-bit products have magnitudes from
    2**-18 to 2**40, so that no step leaves the range before the result does.
    """
    both = x_scale * w_scale
    is_normal = (both >= _TINY) & (both < float("inf"))
    return jnp.where(is_normal, both, x_scale), jnp.where(is_normal, 1.0, w_scale)


def wide_on_a_cpu(multiply: Callable[[Any, Any], Array], x: Array, w: Array) -> Array:
    """multiply(x, w), a matmul with a float32 result; on a CPU its bfloat16 operands become float32.

    The products are equal. XLA compiles a bfloat16 matmul with a transpose after it to a program that a CPU cannot run.
    A program that a CPU exports for a GPU multiplies in bfloat16.
    """
    if jax.default_backend() != "cpu" or jnp.bfloat16 not in (x.dtype, w.dtype):
        return multiply(x, w)
    wide = lambda y: y.astype(jnp.float32) if y.dtype == jnp.bfloat16 else y
    return lax.platform_dependent(x, w, cpu=lambda x, w: multiply(wide(x), wide(w)), default=multiply)


def scale_shares(scale: Array) -> tuple[Array, Array]:
    """(first, last), float32, shaped like `scale`, with first * last equal to scale.

    A kernel computes sums * first * other_scale * last instead of sums * scale * other_scale. first is between 2**-60
    and 2**60, so that no step leaves float32's range before the result does. scale: positive float32, one for each row.
    """
    first = jnp.minimum(jnp.maximum(scale, 1 / _SHARE), _SHARE)
    return first, jnp.where(scale > _SHARE, scale / _SHARE, jnp.where(scale < 1 / _SHARE, scale * _SHARE, 1.0))
