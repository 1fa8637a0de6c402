"""Linear and GatedMLP: PyTorch modules with this library's matmul."""

from typing import Any

import torch

from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.jax_functions.argument_checks import (
    check_activation,
    check_precision,
)
from jax_kernels.bridge.nn.layers import check_input
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.matmul import check_scaling_option, gated_matmul, linear, mlp
from jax_kernels.bridge.ops.quantization import QuantizedTensor
from jax_kernels.bridge.translate.activations import Activation
from jax_kernels.ops.matmul import mlp as mlp_ops

__all__ = ["GatedMLP", "Linear"]


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
        return linear(
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


class GatedMLP(torch.nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), with bridge.mlp, or bridge.gated_matmul and bridge.linear.

    bridge.mlp supports precision None, "fp32" and "tf32". bridge.quantize_weights may give the projections low-bit
    weights; bridge.gated_matmul and bridge.linear run then.

    Parameters: gate_proj.weight, up_proj.weight [hidden_features, in_features] and down_proj.weight [in_features,
    hidden_features], initialised like torch.nn.Linear's, without bias.

    Args:
      in_features, hidden_features: the width of x and of the result, and the width between the matmuls.
      activation, precision, scaling, implementation: as in bridge.nn.Linear; activation may not be None.
      device, dtype: of the parameters.

    Raises:
      TypeError, ValueError: bridge.matmul does not take the activation, precision or scaling.
    """

    @plain_arguments
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: str | Activation = "silu",
        precision: str | None = None,
        scaling: str | None = None,
        implementation: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation, is_optional=False)
        if scaling is not None and precision != "fp8":
            raise ValueError(f"scaling: got {scaling!r} with precision={precision!r}, want None, or precision='fp8'")
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        options |= {"precision": precision, "scaling": scaling, "implementation": implementation}
        self.gate_proj = Linear(in_features, hidden_features, **options)
        self.up_proj = Linear(in_features, hidden_features, **options)
        self.down_proj = Linear(hidden_features, in_features, **options)
        self.activation = activation

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Returns down_proj(activation(gate_proj(x)) * up_proj(x)) + residual, [..., in_features].

        x: [..., in_features]. residual: x's shape and dtype, added last; under autocast any float dtype.
        """
        if isinstance(x, symbolic_trace.Proxy):
            return symbolic_trace.leaf(self, x, residual=residual)
        gate, up = self.gate_proj, self.up_proj
        is_few = [isinstance(layer.weight, QuantizedTensor) for layer in (gate, up, self.down_proj)]
        check_input("x", x, None if is_few[0] else gate.weight)
        if not any(is_few) and gate.precision in mlp_ops.PRECISIONS:
            return mlp(
                x,
                up.weight,
                self.down_proj.weight,
                w_gate=gate.weight,
                activation=self.activation,
                residual=residual,
                transpose_w=True,
                precision=gate.precision,
                implementation=gate.implementation,
            )
        if is_few[0] != is_few[1]:  # bridge.quantize_weights skipped one of the two
            hidden = linear(x, gate.weight, activation=self.activation, **_options(gate)) * up(x)
            return self.down_proj(hidden, residual=residual)
        hidden = gated_matmul(x, gate.weight, up.weight, self.activation, transpose_w=True, **_options(gate))
        return self.down_proj(hidden, residual=residual)

    __prepare_scriptable__ = symbolic_trace.no_script


def _options(layer: Linear) -> dict[str, Any]:
    """Returns the options precision, scaling and implementation of a layer, as keyword arguments of bridge.matmul."""
    return {"precision": layer.precision, "scaling": layer.scaling, "implementation": layer.implementation}
