"""LayerNorm and RMSNorm as nnx modules, by this library's kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import initializers

from jax_kernels.models.config import check_kind, check_size
from jax_kernels.models.layers.inputs import check_features, check_floats, check_promotion
from jax_kernels.ops.normalization import normalization, vjp
from jax_kernels.plain_numbers import plain_arguments
from jax_kernels.tracing.explicit_mesh import explicit_mesh

__all__ = ["LayerNorm", "RMSNorm", "with_input"]


class LayerNorm(nnx.LayerNorm):
    """nnx.LayerNorm by jax_kernels.layer_norm, which can first add a residual to x.

    It has nnx.LayerNorm's arguments, parameters and results, with two differences: float32 scale and bias are used in
    float32, and the fast variance is never used. Calls that the kernels do not support run as in nnx: with a mask, with
    axes other than the last, or with statistics over devices.

    Args:
      scale_offset: added to scale, as in layer_norm; without a scale_init, scale starts at 1 - scale_offset.
      implementation: of the op. The other arguments are nnx.LayerNorm's.

    Raises, when called:
      ValueError: a residual or a scale_offset is combined with a mask or with other axes; or as layer_norm.
    """

    @plain_arguments
    def __init__(
        self, num_features: int, *, scale_offset: float = 0.0, implementation: str | None = None, **options: Any
    ) -> None:
        _check_options(num_features, scale_offset, implementation)
        super().__init__(num_features, **_with_scale_init(options, scale_offset))
        self.scale_offset = scale_offset
        self.implementation = implementation

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """The normalised x [..., num_features]; with a residual, (the normalised x + residual, x + residual).

        mask: as in nnx.LayerNorm, which then computes the result. residual: like x, or None.
        """
        if not _is_served(self, mask, residual):
            return super().__call__(x, mask=mask)
        x, residual, scale, bias = _promoted(self, x, residual, self.scale, self.bias)
        return normalization.layer_norm(
            x,
            scale,
            bias,
            residual=residual,
            eps=self.epsilon,
            scale_offset=self.scale_offset,
            implementation=self.implementation,
        )


class RMSNorm(nnx.RMSNorm):
    """nnx.RMSNorm by jax_kernels.rms_norm, which can first add a residual to x.

    It has nnx.RMSNorm's arguments, parameters and results, with two differences: a float32 scale is used in float32,
    and the fast variance is never used. Calls that the kernels do not support run as in nnx: with a mask, with axes
    other than the last, or with statistics over devices.

    Args:
      scale_offset: added to scale, as in rms_norm; without a scale_init, scale starts at 1 - scale_offset.
      implementation: of the op. The other arguments are nnx.RMSNorm's.

    Raises, when called:
      ValueError: a residual or a scale_offset is combined with a mask or with other axes; or as rms_norm.
    """

    @plain_arguments
    def __init__(
        self, num_features: int, *, scale_offset: float = 0.0, implementation: str | None = None, **options: Any
    ) -> None:
        _check_options(num_features, scale_offset, implementation)
        super().__init__(num_features, **_with_scale_init(options, scale_offset))
        self.scale_offset = scale_offset
        self.implementation = implementation

    def __call__(self, x: jax.Array, mask: jax.Array | None = None, *, residual: jax.Array | None = None) -> Any:
        """The normalised x [..., num_features]; with a residual, (the normalised x + residual, x + residual).

        mask: as in nnx.RMSNorm, which then computes the result. residual: like x, or None.
        """
        if not _is_served(self, mask, residual):
            return super().__call__(x, mask=mask)
        x, residual, scale, _ = _promoted(self, x, residual, self.scale, None)
        return normalization.rms_norm(
            x,
            scale,
            residual=residual,
            eps=self.epsilon,
            scale_offset=self.scale_offset,
            implementation=self.implementation,
        )


def with_input(module: nnx.Module, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(module(x), x), where the norm's backward adds the cotangent of the second result, without a further pass.

    module: an RMSNorm. x: in the dtype of the module's computation; otherwise the backward adds the cotangents itself.
    """
    is_rms = type(module) is RMSNorm and _is_served(module, None, None)
    if not is_rms or module.scale is None or explicit_mesh(x) is not None:
        return module(x), x
    promoted, _, scale, _ = _promoted(module, x, None, module.scale, None)
    if promoted.dtype != x.dtype:
        return module(x), x
    arrays = {"x": x, "scale": scale, "residual": None, "bias": None, "op": "rms_norm"}
    options = {"eps": module.epsilon, "scale_offset": module.scale_offset, "implementation": module.implementation}
    with jax.named_scope("rms_norm"):
        return vjp.with_input(*normalization.prepare(**arrays, **options))


def _check_options(num_features: Any, scale_offset: Any, implementation: Any) -> None:
    """Raises TypeError or ValueError for an argument of wrong type or a num_features below 0; the error names it."""
    check_size("num_features", num_features)
    if isinstance(scale_offset, bool) or not isinstance(scale_offset, int | float | np.number):
        raise TypeError(f"scale_offset: got {scale_offset!r}, want a number")
    check_kind("implementation", implementation, str | None, "a name or None")


def _with_scale_init(options: dict[str, Any], scale_offset: float) -> dict[str, Any]:
    """nnx's options; with a scale_offset, also an initialisation of scale to 1 - scale_offset, unless the caller gave
    one.
    """
    return {"scale_init": initializers.constant(1.0 - scale_offset)} | options if scale_offset else options


def _is_served(module: Any, mask: Any, residual: Any) -> bool:
    """Whether this library's op computes the call; if not, nnx does. Raises ValueError if nnx cannot.

    nnx cannot add a residual or a scale_offset.
    """
    axes = (module.reduction_axes, module.feature_axes)
    is_plain = all(axis in (-1, (-1,), [-1]) for axis in axes) and module.axis_name is None
    if is_plain and mask is None:
        return True
    if residual is not None:
        raise ValueError("residual: got one with a mask, with axes other than the last, or an axis_name, want None")
    if module.scale_offset:
        raise ValueError(f"scale_offset: got {module.scale_offset} with a mask or other axes, want 0.0")
    return False


def _promoted(module: Any, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, ...]:
    """(x, residual, scale, bias) in the dtype that nnx computes in; None stays None, float32 parameters stay
    float32.
    """
    weights = [None if y is None else y[...] for y in (scale, bias)]
    x = jnp.asarray(x)
    for weight in weights:
        if weight is not None:
            check_features("x", x, weight.shape[0])
    if residual is not None:
        residual = jnp.asarray(residual)
        check_floats("residual", residual)
    check_promotion(module.dtype, x=x, param_dtype=next((y.dtype for y in weights if y is not None), None))
    x, residual, *_ = module.promote_dtype((x, residual, *weights), dtype=module.dtype)
    weights = [y if y is None or y.dtype == jnp.float32 else y.astype(x.dtype) for y in weights]
    return x, residual, *weights
