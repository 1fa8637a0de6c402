"""GatedMLP: a gated unit and its down projection as one PyTorch module."""

from typing import Any

import torch

from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.jax_functions.argument_checks import check_activation
from jax_kernels.bridge.nn.layers import check_input, computes_its_weight, uncomputed_weight
from jax_kernels.bridge.nn.linear import Linear
from jax_kernels.bridge.nn.quantized_linear import QuantizedLinear
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.matmul import activate, gated_matmul, linear, mlp
from jax_kernels.bridge.translate.activations import Activation
from jax_kernels.ops.matmul import mlp as mlp_ops

__all__ = ["GatedMLP"]


class GatedMLP(torch.nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), with bridge.mlp, or bridge.gated_matmul and bridge.linear.

    bridge.mlp supports precision None, "fp32" and "tf32". With low-bit weights, as from bridge.quantize_weights, the
    module calls bridge.gated_matmul and bridge.linear. A projection with hooks or a bias, or another module in its
    attribute, such as a LoRA layer, is called by itself.

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
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        is_few = [isinstance(layer, QuantizedLinear) for layer in (gate, up, down)]
        is_plain = [computes_its_weight(layer, Linear, QuantizedLinear) for layer in (gate, up, down)]
        check_input("x", x, uncomputed_weight(gate) if is_plain[0] and not is_few[0] else None)
        is_one = all(is_plain[:2]) and is_few[0] == is_few[1] and _options(gate) == _options(up)
        is_whole = is_one and is_plain[2] and not any(is_few) and _options(down) == _options(gate)
        if is_whole and gate.precision in mlp_ops.PRECISIONS:
            return mlp(
                x,
                up.weight,
                down.weight,
                w_gate=gate.weight,
                activation=self.activation,
                residual=residual,
                transpose_w=True,
                precision=gate.precision,
                implementation=gate.implementation,
            )
        if is_one:
            hidden = gated_matmul(x, gate.weight, up.weight, self.activation, transpose_w=True, **_options(gate))
        elif is_plain[0]:
            hidden = linear(x, gate.weight, activation=self.activation, **_options(gate)) * up(x)
        else:
            hidden = activate(gate(x), self.activation) * up(x)
        if residual is None:
            return down(hidden)
        return down(hidden, residual=residual) if is_plain[2] else down(hidden) + residual

    __prepare_scriptable__ = symbolic_trace.no_script


def _options(layer: Linear) -> dict[str, Any]:
    """Returns the options precision, scaling and implementation of a layer, as keyword arguments of bridge.matmul."""
    return {"precision": layer.precision, "scaling": layer.scaling, "implementation": layer.implementation}
