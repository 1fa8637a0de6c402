"""QuantizedMixtureOfExperts: a MixtureOfExperts whose experts have low-bit weights."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_kernels.models.layers.mixture_of_experts import MixtureOfExperts
from jax_kernels.models.layers.routing import Routing
from jax_kernels.ops.matmul.checks import checked_activation
from jax_kernels.quantization import QuantizedArray, dequantize, quantize

__all__ = ["QuantizedMatrices", "QuantizedMixtureOfExperts", "QuantizedWeight"]


class QuantizedWeight(nnx.Variable):
    """The values or scales of low-bit weights. Not an nnx.Param, so that optimizers and nnx.grad ignore it."""


class QuantizedMatrices(nnx.Module):
    """The low-bit matrices of all experts, [num_experts, in, out]. `[...]` dequantises all of them, to `dtype`.

    Variables: values and scale, QuantizedWeights with the fields of the QuantizedArray, which is quantized along axis
    -2.
    """

    def __init__(self, kernel: QuantizedArray, dtype: Any) -> None:
        self.values = QuantizedWeight(kernel.values)
        self.scale = QuantizedWeight(kernel.scale)
        self.scaling, self.layout, self.length = kernel.scaling, kernel.layout, kernel.length
        self.dtype = jnp.dtype(dtype)

    def of(self, experts: Any = ...) -> QuantizedArray:
        """The matrices of the experts with these indices, [len(experts), in, out]; of all experts by default."""
        return QuantizedArray(
            values=self.values[...][experts],
            scale=self.scale[...][experts],
            scaling=self.scaling,
            axis=-2,
            layout=self.layout,
            length=self.length,
        )

    def __getitem__(self, index: Any) -> jax.Array:
        return dequantize(self.of(), self.dtype)[index]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of().shape


class QuantizedMixtureOfExperts(MixtureOfExperts):
    """A MixtureOfExperts whose experts have weights of 4 or 8 bits. The router keeps its float32 matrix.

    Equivalent to the MixtureOfExperts with dequantised weights, rounded once to the dtype of the computation.
    grouped_matmul has no kernel for low-bit weights, so they are dequantised first:

    | pairs of a token and an expert | dequantised |
    |---|---|
    | fewer than num_experts, outside of a mesh, as in decoding | the matrices of each pair's expert |
    | others | the matrices of all experts of the layer, for the time of their matmuls |

    The gradients of x and of the router equal the gradients with dequantised weights. Gradients of the experts' weights
    raise an error.

    Variables: of gate_proj, up_proj and down_proj values and scale, QuantizedWeights with a first axis for the experts;
    router, expert_bias and shared as in MixtureOfExperts.
    """

    def __init__(self, experts: MixtureOfExperts, format: str = "int4", **options: Any) -> None:
        """
        Args:
          experts: the module whose weights are quantized. Its router, expert_bias and shared experts are shared.
          format: "int8", "int4", "mxfp8" or "mxfp4".
          options: scaling, group_size and scale_dtype, as in quantize.

        Raises:
          TypeError: experts is not a MixtureOfExperts, or has low-bit weights already.
          ValueError: an option of quantize is wrong, or experts has a precision.
        """
        if not isinstance(experts, MixtureOfExperts) or isinstance(experts, QuantizedMixtureOfExperts):
            raise TypeError(f"experts: got {type(experts).__name__}, want a MixtureOfExperts with float weights")
        if experts.precision is not None:
            raise ValueError(
                f"experts.precision: got {experts.precision!r} with low-bit weights, want None; a model with "
                "precision='fp8' has the same parameters as a model without it"
            )
        for name, value in vars(experts).items():
            if not name.startswith("_") and name not in ("gate_proj", "up_proj", "down_proj"):
                setattr(self, name, value)
        of = lambda matrices: QuantizedMatrices(
            quantize(matrices[...], format, axis=-2, **options), self.dtype or matrices.dtype
        )
        self.gate_proj: Any = None if experts.gate_proj is None else of(experts.gate_proj)
        self.up_proj: Any = of(experts.up_proj)
        self.down_proj: Any = of(experts.down_proj)

    def _routed(
        self, x: Any, router: Any, bias: Any, up: Any, down: Any, gate: Any = None, *, devices: Any
    ) -> tuple[jax.Array, Routing]:
        pairs = x.size // self.model_dim * self.experts_per_token
        if not 0 < pairs < self.num_experts or not jax.sharding.get_abstract_mesh().empty:
            return super()._routed(x, router, bias, up, down, gate, devices=devices)
        # XLA drops the dequantised up, down and gate, which nothing reads here.
        tokens = x.reshape(-1, self.model_dim)
        weights, experts, routing = self._route(tokens, router, bias)
        results = self._of_pairs(jnp.repeat(tokens, self.experts_per_token, axis=0), experts.reshape(-1))
        out = (weights[..., None] * results.reshape(*weights.shape, self.model_dim).astype(jnp.float32)).sum(1)
        return out.reshape(x.shape), routing

    def _of_pairs(self, rows: jax.Array, experts: jax.Array) -> jax.Array:
        """The results of each row's expert, [pairs, model_dim] in rows' dtype. experts: int32 [pairs]."""
        precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None

        def multiply(rows: jax.Array, matrices: QuantizedMatrices) -> jax.Array:
            kernels = dequantize(matrices.of(experts), rows.dtype)
            out = jnp.einsum("pk,pkn->pn", rows, kernels, preferred_element_type=jnp.float32, precision=precision)
            return out.astype(rows.dtype)

        activation = checked_activation(self.activation)
        assert activation is not None
        hidden = multiply(rows, self.up_proj).astype(jnp.float32)
        if self.gate_proj is None:
            hidden = activation(hidden)
        else:
            hidden = hidden * activation(multiply(rows, self.gate_proj).astype(jnp.float32))
        return multiply(hidden.astype(rows.dtype), self.down_proj)
