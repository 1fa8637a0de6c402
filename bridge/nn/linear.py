"""Linear: torch.nn.Linear with this library's matmul."""

import torch

from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.jax_functions.argument_checks import (
    check_activation,
    check_precision,
)
from jax_kernels.bridge.jax_functions.argument_names import under_names
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.matmul import check_scaling_option, linear
from jax_kernels.bridge.translate.activations import Activation

__all__ = ["Linear"]


class Linear(torch.nn.Linear):
    """torch.nn.Linear with this library's matmul, and with an activation and a residual in the same pass.

    It has torch.nn.Linear's arguments, parameters, initialisation and state dict.

    Args:
      activation: None, a name such as "relu" or "silu", or an elementwise function; see bridge.matmul.
      precision: "fp32" or "tf32" for float32 inputs; "fp8", "bf16" or "fp16" round inputs and weights first. None
        follows the input's dtype and torch.set_float32_matmul_precision.
      scaling: of 8-bit matmuls, the values that share a scale: "tensor", "row" or "block".
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.
      Other arguments: torch.nn.Linear's.

    Raises:
      TypeError, ValueError: bridge.matmul does not take the activation, precision or scaling.
    """

    @plain_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | Activation | None = None,
        precision: str | None = None,
        scaling: str | None = None,
        implementation: str | None = None,
    ) -> None:
        check_activation(activation)
        check_precision(precision)
        check_scaling_option(scaling, precision)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.precision = precision
        self.scaling = scaling
        self.implementation = implementation

    def forward(
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        x_scale: torch.Tensor | float | None = None,
        w_scale: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """Returns activation(input @ weight.T + bias) + residual, [..., out_features].

        input: [..., in_features]. residual: [..., out_features], added last. x_scale, w_scale: of 8-bit matmuls, the
        factors of the 8-bit values of input and weight, float32 tensors or numbers.
        """
        if isinstance(input, symbolic_trace.Proxy):
            return symbolic_trace.leaf(self, input, residual=residual, x_scale=x_scale, w_scale=w_scale)
        return under_names(
            {"x": "input"},
            linear,
            input,
            self.weight,
            self.bias,
            activation=self.activation,
            residual=residual,
            x_scale=x_scale,
            w_scale=w_scale,
            precision=self.precision,
            scaling=self.scaling,
            implementation=self.implementation,
        )

    __prepare_scriptable__ = symbolic_trace.no_script
