"""Linear as an nnx module, by this library's matmul."""

from typing import Any

import jax
from flax import nnx
from jax import lax

from jax_kernels.ops import matmul as ops

__all__ = ["Linear"]


class Linear(nnx.Linear):
    """nnx.Linear by jax_kernels.matmul, with an activation and a residual in the same pass.

    It has nnx.Linear's arguments, parameters and results, but that bias counts in float32. A dot_general, a
    preferred_element_type or an out_sharding of the caller's runs as in nnx, without activation and residual.

    Args:
      activation: as in matmul. precision: of float32, "fp32" or "tf32"; or any of nnx.Linear's, which runs as in nnx.
      implementation: of the op. The others are nnx.Linear's.

    Raises, when called:
      ValueError: an activation or a residual meets an option that runs as in nnx; or as matmul.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Any = None,
        implementation: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.activation = activation
        self.implementation = implementation

    def __call__(self, x: jax.Array, out_sharding: Any = None, *, residual: jax.Array | None = None) -> jax.Array:
        """x: [..., in_features]. residual: [..., out_features], added last."""
        is_plain = self.dot_general is lax.dot_general and self.preferred_element_type is None and out_sharding is None
        if not is_plain or self.precision not in (None, "fp32", "tf32"):
            if self.activation is not None or residual is not None:
                raise ValueError(
                    "activation, residual: got one with an option of nnx's (precision, dot_general, "
                    "preferred_element_type, out_sharding), want None"
                )
            return super().__call__(x, out_sharding)
        bias = None if self.bias is None else self.bias[...]
        x, kernel, _ = self.promote_dtype((x, self.kernel[...], bias), dtype=self.dtype)
        if bias is not None and bias.dtype != jax.numpy.float32:
            bias = bias.astype(x.dtype)
        return ops.matmul(
            x,
            kernel,
            bias=bias,
            activation=self.activation,
            residual=None if residual is None else residual.astype(x.dtype),
            precision=self.precision,
            implementation=self.implementation,
        )
