"""The arrays, options and results of a normalisation, from the public op down to a kernel."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float, Float32


class NormInputs(NamedTuple):
    """The arrays of a call. Arrays that a call lacks are None.

    x: [..., columns], bfloat16, float16 or float32; [rows, columns] for a kernel. residual: like x, added to it first.
    scale, bias: [columns], in x's dtype or float32.
    """

    x: Float[Array, "*rows columns"]
    residual: Float[Array, "*rows columns"] | None = None
    scale: Float[Array, " columns"] | None = None
    bias: Float[Array, " columns"] | None = None


class NormResult(NamedTuple):
    """The result of a forward.

    out: like x. total: x + residual in x's dtype, None without a residual. mean: the mean of each row, None for
    rms_norm. inverse: the inverse of each row's standard deviation, or, for rms_norm, of its root mean square. Both are
    float32 in x's shape without the last axis.

    With options.quantize, out has 8 bits, out_scale has the factors of its rows, float32 of mean's shape, and mean and
    inverse may be None.
    """

    out: Float[Array, "*rows columns"]
    total: Float[Array, "*rows columns"] | None
    mean: Float32[Array, "*rows"] | None
    inverse: Float32[Array, "*rows"] | None
    out_scale: Float32[Array, "*rows"] | None = None


class NormGradients(NamedTuple):
    """The gradients of x, scale and bias. None for an array without gradient.

    x: the gradient of x + residual; x and residual have equal gradients.
    """

    x: Float[Array, "*rows columns"]
    scale: Float[Array, " columns"] | None = None
    bias: Float[Array, " columns"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormOptions:
    """The static half of a call: hashable, so that it can key a jit cache.

    out = (x - mean) * inverse * (scale + scale_offset) + bias, with inverse = 1 / sqrt(mean((x - mean)²) + eps). The
    mean is subtracted if is_centred (layer_norm), and otherwise counts as 0 (rms_norm). quantize: None, or the format
    that out is rounded to, "e4m3" or "e5m2", with a scale for each row. quantizes_by_half: whether the GPU rounds to 8
    bits by way of float16, as Ada does.
    """

    is_centred: bool
    eps: float
    scale_offset: float = 0.0
    quantize: str | None = None
    quantizes_by_half: bool = False
