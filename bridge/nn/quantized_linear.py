"""A linear layer with low-bit weights, and a function that gives them to the linear layers of a model."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.jax_functions.argument_checks import check_activation, check_precision
from jax_kernels.bridge.nn.layers import has_hooks, keeping_dtype
from jax_kernels.bridge.nn.linear import Linear
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.matmul import linear
from jax_kernels.bridge.ops.quantization import QuantizedTensor, quantize
from jax_kernels.bridge.translate.activations import Activation
from jax_kernels.quantization import formats

__all__ = ["QuantizedLinear", "quantize_weights"]

_LOGGER = logging.getLogger("jax_kernels.bridge.quantized_linear")


class QuantizedLinear(torch.nn.Module):
    """A linear layer with low-bit weights, for inference and for training of the layers before it.

    Equivalent to torch.nn.functional.linear(x, bridge.dequantize(layer.weight, x.dtype), layer.bias), with an
    activation and a residual in the same pass. x: [..., in_features], bfloat16, float16 or float32.

    A new layer has weights of zero. from_linear rounds the weights of another layer; load_state_dict takes rounded
    weights. The state dict has the buffers weight_values and weight_scale, as in bridge.QuantizedTensor with axis=-1,
    the buffer weight_shape (out_features, in_features), and the parameter bias. `.to(dtype)` and similar methods cast
    only the bias.

    Args:
      in_features, out_features, bias, device: as in torch.nn.Linear.
      dtype: the dtype of the bias.
      format: "int8", "int4", "mxfp8" or "mxfp4".
      scaling: "group" (None): group_size values along in_features share a scale. "row", for integers: all of them.
      group_size: 32, 64, 128 (None) or 256; 32 (None) for the MX formats, which have no other.
      scale_dtype: the dtype of integers' scales, torch.float32 (None) or torch.bfloat16.
      activation, precision, implementation: as in bridge.nn.Linear, without precision="fp8".

    Raises:
      TypeError: activation is neither a name nor a function.
      ValueError: format, scaling, group_size, scale_dtype, activation or precision is wrong.
    """

    weight_values: torch.Tensor
    weight_scale: torch.Tensor
    weight_shape: torch.Tensor

    @plain_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        format: str = "int4",
        scaling: str | None = None,
        group_size: int | None = None,
        scale_dtype: torch.dtype | None = None,
        activation: str | Activation | None = None,
        precision: str | None = None,
        implementation: str | None = None,
    ) -> None:
        super().__init__()
        _check_format(format)
        check_activation(activation)
        check_precision(precision, ("fp32", "tf32", "bf16", "fp16"))
        zeros = torch.zeros(out_features, in_features, device=device, dtype=torch.float32)
        options: dict[str, Any] = {"scaling": scaling, "group_size": group_size, "scale_dtype": scale_dtype}
        self._hold(quantize(zeros, format, axis=-1, **options))
        self.bias = torch.nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.activation = activation
        self.precision = precision
        self.implementation = implementation

    @classmethod
    def from_linear(
        cls,
        layer: torch.nn.Linear,
        format: str = "int4",
        *,
        scaling: str | None = None,
        group_size: int | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> "QuantizedLinear":
        """Returns a layer with the weights of a torch.nn.Linear or bridge.nn.Linear, rounded, on their device.

        It has the same bias Parameter as `layer`, and a bridge.nn.Linear's activation, precision and implementation.
        format, scaling, group_size, scale_dtype: as in QuantizedLinear.

        Raises:
          TypeError: layer is of another class. This includes subclasses, whose forward might do more.
          ValueError: format, scaling, group_size or scale_dtype is wrong; layer has hooks, or precision="fp8".
        """
        if type(layer) not in (torch.nn.Linear, Linear):
            raise TypeError(f"layer: got {type(layer).__name__}, want torch.nn.Linear or bridge.nn.Linear")
        if has_hooks(layer):
            raise ValueError("layer: got hooks or a forward of its own, which would be lost; want a layer without")
        options = {name: getattr(layer, name, None) for name in ("activation", "precision", "implementation")}
        if options["precision"] == "fp8" or getattr(layer, "scaling", None) is not None:
            raise ValueError("layer: got precision='fp8' or a scaling, want None: low-bit weights have their own")
        _check_format(format)
        rounding: dict[str, Any] = {"scaling": scaling, "group_size": group_size, "scale_dtype": scale_dtype}
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._hold(quantize(layer.weight.detach(), format, axis=-1, **rounding))
        made.bias = layer.bias
        made.activation, made.precision, made.implementation = options.values()
        return made.train(layer.training)

    def _hold(self, weight: QuantizedTensor) -> None:
        """Stores the weights [out_features, in_features] as buffers, and their sizes and format as attributes."""
        self.out_features, self.in_features = weight.shape
        self.format = weight.format
        self.group_size = weight.group_size
        self.register_buffer("weight_values", weight.values)
        self.register_buffer("weight_scale", weight.scale)
        self.register_buffer("weight_shape", torch.tensor(list(weight.shape), device=weight.device))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Makes the weights and the bias zero, as in a new layer."""
        options: dict[str, Any] = {"scaling": "row"} if self.group_size is None else {"group_size": self.group_size}
        if self.weight_scale.dtype.is_floating_point:  # of integers; the MX formats have one dtype
            options["scale_dtype"] = self.weight_scale.dtype
        device = self.weight_values.device
        zeros = torch.zeros(self.out_features, self.in_features, device=device, dtype=torch.float32)
        weight = quantize(zeros, self.format, axis=-1, **options)
        self.weight_values.copy_(weight.values)
        self.weight_scale.copy_(weight.scale)
        self.weight_shape.copy_(torch.tensor(list(weight.shape), device=device))
        if self.bias is not None:
            self.bias.zero_()

    @property
    def weight(self) -> QuantizedTensor:
        """The weights [out_features, in_features], for bridge.linear and bridge.dequantize."""
        return QuantizedTensor(
            values=self.weight_values,
            scale=self.weight_scale,
            format=self.format,
            group_size=self.group_size,
            axis=-1,
            length=self.in_features,
        )

    @property
    def scaling(self) -> None:
        """Always None. It is here for GatedMLP, which reads `scaling` of a bridge.nn.Linear or of this layer.

        `scaling` is an option of 8-bit matmuls; this layer's matmuls have low-bit weights and 16-bit or 32-bit x.
        """
        return None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Returns activation(x @ weight.T + bias) + residual, [..., out_features].

        x: [..., in_features]. residual: [..., out_features], of the result's dtype, added last; under autocast any
        float dtype.
        """
        if isinstance(x, symbolic_trace.Proxy):
            return symbolic_trace.leaf(self, x, residual=residual)
        return linear(
            x,
            self.weight,
            self.bias,
            activation=self.activation,
            residual=residual,
            precision=self.precision,
            implementation=self.implementation,
        )

    __prepare_scriptable__ = symbolic_trace.no_script

    def extra_repr(self) -> str:
        group = "" if self.group_size is None else f", group_size={self.group_size}"
        features = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return f"{features}, format={self.format!r}{group}{activation}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves or casts the module as torch.nn.Module._apply does, except that buffers keep their dtypes.

        The buffers are the low-bit values, the scales and the shape.
        """
        return super()._apply(keeping_dtype(fn, self._buffers.values()), recurse)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        local_metadata: Mapping[str, int],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Loads as torch.nn.Module does, but adds to `errors`, and loads nothing, if the weights do not fit the layer.

        They do not fit if they have another format, whose dtype torch.nn.Module would cast, or another shape, which may
        have the same padded size.
        """
        wrong = []
        for name in ("weight_values", "weight_scale"):
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(given, torch.Tensor) and given.dtype != own.dtype:
                wrong.append(f"{prefix}{name}: got dtype {given.dtype}, want {own.dtype}, the dtype of {self.format!r}")
        shape, want = state_dict.get(prefix + "weight_shape"), [self.out_features, self.in_features]
        if isinstance(shape, torch.Tensor) and not shape.is_meta and shape.tolist() != want:
            wrong.append(f"{prefix}weight_shape: got {shape.tolist()}, want {want}, out_features and in_features")
        errors += wrong
        if not wrong:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)


def _check_format(format: str) -> None:
    """Raises ValueError unless format is "int8", "int4", "mxfp8" or "mxfp4"."""
    if format not in tuple(formats.FORMATS):
        raise ValueError(f"format: got {format!r}, want one of {', '.join(map(repr, formats.FORMATS))}")


def quantize_weights(
    model: torch.nn.Module,
    format: str = "int4",
    *,
    scaling: str | None = None,
    group_size: int | None = None,
    scale_dtype: torch.dtype | None = None,
    skip: str | Sequence[str] = (),
) -> torch.nn.Module:
    """Replaces the linear layers of a model by layers with low-bit weights. It changes the model and returns it.

    bridge.nn.QuantizedLinear.from_linear(module) replaces each module whose class is torch.nn.Linear or
    bridge.nn.Linear. Other modules stay unchanged, and so do modules of subclasses, such as
    torch.nn.MultiheadAttention's out_proj. The logger "jax_kernels.bridge.quantized_linear" reports the number of
    replaced modules at level INFO. It equals::

        sum(isinstance(x, bridge.nn.QuantizedLinear) for x in model.modules())

    Args:
      model: contains linear layers, on any device. A layer with several names is replaced under each name.
      format: "int8", "int4", "mxfp8" or "mxfp4".
      scaling, scale_dtype: as in bridge.quantize. group_size: None is 128 for integers, and 32 for the MX formats.
      skip: names of modules that stay unchanged with all their submodules, such as "lm_head", "layers.0.mlp" or
        "q_proj": whole names, or consecutive parts of names.

    Raises:
      TypeError: model is no module.
      ValueError: no layer is to be replaced; a name in skip fits no module; model is a linear layer itself; or
        QuantizedLinear.from_linear raises ValueError, which then has the layer's name. No layer has been replaced then.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, want a torch.nn.Module")
    if type(model) in (torch.nn.Linear, Linear):
        raise ValueError(
            "model: got a linear layer itself, want a model that holds some; see QuantizedLinear.from_linear"
        )
    _check_format(format)
    named = dict(model.named_modules(remove_duplicate=False))
    skipped = _fitting((skip,) if isinstance(skip, str) else skip, list(named))
    found = {name: x for name, x in named.items() if type(x) in (torch.nn.Linear, Linear) and name not in skipped}
    kept = {id(named[name]) for name in skipped}  # a kept layer may have other names
    found = {name: x for name, x in found.items() if id(x) not in kept}
    if not found:
        raise ValueError("model: got no torch.nn.Linear or bridge.nn.Linear outside skip, want one or more")
    made: dict[int, QuantizedLinear] = {}
    options: dict[str, Any] = {"scaling": scaling, "group_size": group_size, "scale_dtype": scale_dtype}
    for name, layer in found.items():
        if id(layer) not in made:
            try:
                made[id(layer)] = QuantizedLinear.from_linear(layer, format, **options)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    for name, layer in found.items():
        parent, _, own = name.rpartition(".")
        named[parent].register_module(own, made[id(layer)])
    _LOGGER.info("quantize_weights: %d linear layers have %s weights now", len(made), format)
    return model


def _fitting(skip: Sequence[str], names: Sequence[str]) -> set[str]:
    """Returns the names of modules that `skip` selects: names that contain an entry as consecutive whole parts.

    names: the names of all modules. Raises ValueError for an entry that selects none.
    """
    found: set[str] = set()
    for entry in skip:
        fits = {name for name in names if f".{entry}." in f".{name}."}
        if not fits:
            raise ValueError(f"skip: got {entry!r}, which is in no module's name; want names of modules")
        found |= fits
    return found
