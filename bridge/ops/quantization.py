"""quantize and dequantize on PyTorch tensors, and low-bit weights as a dataclass of tensors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NoReturn, overload

import jax
import jax.numpy as jnp
import torch

from jax_kernels import quantization
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_of
from jax_kernels.bridge.jax_functions.api import from_jax
from jax_kernels.bridge.jax_functions.argument_checks import check_float_dtype, check_optional_tensors, check_tensors
from jax_kernels.quantization import QuantizedArray, formats
from jax_kernels.quantization.formats import LowBit

__all__ = ["Facts", "QuantizedTensor", "Stored", "dequantize", "on_stored", "quantize", "stored"]

type Facts = tuple[str | int | None, ...]
type Stored = dict[str, torch.Tensor | str | int | None]

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedTensor:
    """Low-bit weights (4 or 8 bits) with their scales, as bridge.quantize returns them.

    values: [..., N, K padded] int8 (int8) or float8_e4m3fn (mxfp8), or [..., N, K padded / 2] uint8 (int4, mxfp4). K is
    the axis that a matmul sums over. It is always last here, for both values of `axis`. scale:
    [..., K padded / group_size, N], or [..., N] if group_size is None; float32 or bfloat16. The MX formats have uint8
    scales: the exponent of a power of two, plus 127. format: "int8", "int4", "mxfp8" or "mxfp4". group_size: the number
    of consecutive values along K that share a scale; None: all. axis: the axis of K in the weights, -1 (weights
    [..., N, K]) or -2 ([..., K, N]). length: K, without padding.

    `shape` is the shape of the weights. The values have the memory layout of jax_kernels.QuantizedArray.
    """

    values: torch.Tensor
    scale: torch.Tensor
    format: str
    group_size: int | None
    axis: int
    length: int

    @property
    def shape(self) -> torch.Size:
        """The shape of the weights: [..., N, K] if axis is -1, else [..., K, N]."""
        *outer, columns, _ = self.values.shape
        return torch.Size((*outer, columns, self.length) if self.axis == -1 else (*outer, self.length, columns))

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the field `values`: torch.int8, torch.uint8 or torch.float8_e4m3fn."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raises TypeError: functions of PyTorch take no QuantizedTensor.

        PyTorch's TransformerEncoderLayer looks for this method. It then calls its layers, instead of giving their
        weights to one function.
        """
        raise TypeError(
            f"{getattr(function, '__name__', function)}: got a QuantizedTensor, want a torch.Tensor: bridge.matmul and "
            "bridge.linear take it, and bridge.dequantize makes a tensor of it"
        )

    @property
    def facts(self) -> Facts:
        """(format, group_size, axis, length): the fields that are not tensors."""
        return self.format, self.group_size, self.axis, self.length

    def to(self, device: torch.device | str | int) -> "QuantizedTensor":
        """Returns the same weights on another device.

        There is no dtype argument: the format determines the dtypes.

        Raises:
          TypeError: device is a dtype.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"device: got {device}, want a device; bridge.dequantize(x, dtype) gives another dtype")
        return dataclasses.replace(self, values=self.values.to(device), scale=self.scale.to(device))


def stored(name: str, x: QuantizedTensor) -> Stored:
    """Returns low-bit weights as a dict of tensors and constants, which an argument of a JAX function may be.

    The keys are the fields of QuantizedTensor. name: the argument's name, for the error. Raises NotImplementedError if
    the weights require a gradient.
    """
    if torch.is_grad_enabled() and (x.values.requires_grad or x.scale.requires_grad):
        raise NotImplementedError(f"{name}: got low-bit weights that require a gradient, want detached weights")
    return _stored(x)


def _stored(x: QuantizedTensor) -> Stored:
    facts = {"format": x.format, "group_size": x.group_size, "axis": x.axis, "length": x.length}
    return {"values": x.values, "scale": x.scale, **facts}


def on_stored[Result](function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns an op that also takes low-bit weights as the dict that `stored` returns; it makes them QuantizedArrays.

    function: an op of JAX arrays with a method `plan`. The result has a method `plan` too.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        return function(*map(_as_array, args), **kwargs)

    call.plan = lambda *args, **kwargs: function.plan(*map(_as_array, args), **kwargs)  # type: ignore[attr-defined]
    return call


def _as_array(x: Any) -> Any:
    """Returns the QuantizedArray of a dict that `stored` returned. Returns other arguments unchanged."""
    if not isinstance(x, dict):
        return x
    layout = LowBit(format=x["format"], group=x["group_size"])
    return QuantizedArray(
        values=x["values"],
        scale=x["scale"],
        scaling="row" if layout.group is None else "group",
        axis=x["axis"],
        layout=layout,
        length=x["length"],
    )


@from_jax
def _quantize(x: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    found = quantization.quantize(x, **options)
    scale = found.scale
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    return found.values, scale


@from_jax
def _dequantize(x: dict[str, jax.Array | str | int | None], dtype: str) -> jax.Array:
    return quantization.dequantize(_as_array(x), dtype)


@overload
def quantize(
    x: torch.Tensor,
    format: Literal["e4m3", "e5m2"] = ...,
    *,
    scaling: str | None = ...,
    axis: int | None = ...,
    scale: torch.Tensor | None = ...,
    group_size: int | None = ...,
    scale_dtype: torch.dtype | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def quantize(
    x: torch.Tensor,
    format: Literal["int8", "int4", "mxfp8", "mxfp4"],
    *,
    scaling: str | None = ...,
    axis: int | None = ...,
    scale: torch.Tensor | None = ...,
    group_size: int | None = ...,
    scale_dtype: torch.dtype | None = ...,
) -> QuantizedTensor: ...
@overload
def quantize(
    x: torch.Tensor,
    format: str,
    *,
    scaling: str | None = ...,
    axis: int | None = ...,
    scale: torch.Tensor | None = ...,
    group_size: int | None = ...,
    scale_dtype: torch.dtype | None = ...,
) -> Any: ...
def quantize(
    x: torch.Tensor,
    format: str = "e4m3",
    *,
    scaling: str | None = None,
    axis: int | None = None,
    scale: torch.Tensor | None = None,
    group_size: int | None = None,
    scale_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | QuantizedTensor:
    """Rounds a tensor to 8 or 4 bits with scales, by jax_kernels.quantize.

    Args:
      x: a float tensor with at least two axes for "block" and low-bit weights, or at least one for "row".
      format: for operands of 8-bit matmuls, "e4m3" (torch.float8_e4m3fn) or "e5m2" (torch.float8_e5m2). For low-bit
        weights, which bridge.matmul multiplies with 16-bit or 32-bit x, "int8", "int4", "mxfp8" or "mxfp4".
      scaling: the values that share a scale. For 8-bit operands: all values ("tensor", the default), values along
        `axis` ("row"), or blocks of 128 x 128 of the last two axes ("block"). For low-bit weights: group_size values
        along `axis` ("group", the default) or, for integers, all values along `axis` ("row").
      axis: for "row" and low-bit weights, -1 or -2: the axis that the matmul sums over. None is -1 for "row", and -2
        for low-bit weights: K of bridge.matmul's w [K, N]. Weights [N, K] of bridge.linear have -1.
      scale: a precomputed scale, positive float32 of the shape that scaling gives; not for low-bit weights.
      group_size: for "group", 32, 64, 128 or 256; None is 128. The MX formats have 32.
      scale_dtype: the dtype of integers' scales, torch.float32 (None) or torch.bfloat16.

    Returns:
      For "e4m3" and "e5m2", (values, scale): values of x's shape; scale, float32. Pass them to bridge.matmul as x and
        x_scale, or as w and w_scale; x ≈ values * scale. For low-bit weights, a bridge.QuantizedTensor.

    Raises:
      TypeError: x is no float tensor, or scale no float32 tensor.
      ValueError: format, scaling, axis, group_size, scale_dtype or scale's shape is wrong.
      NotImplementedError: x requires a gradient. Rounding has none.
    """
    check_tensors(x=x)
    check_optional_tensors(scale=scale)
    axis, group_size = plain_of("axis", axis), plain_of("group_size", group_size)
    if not isinstance(format, str):
        raise ValueError(f"format: got {type(format).__name__}, want a name")
    if scale_dtype is not None and (
        not isinstance(scale_dtype, torch.dtype) or scale_dtype not in (torch.float32, torch.bfloat16)
    ):
        got = scale_dtype if isinstance(scale_dtype, torch.dtype | str) else type(scale_dtype).__name__
        raise ValueError(f"scale_dtype: got {got}, want torch.float32, torch.bfloat16 or None")
    name = None if scale_dtype is None else _NAMES[scale_dtype]
    if format not in formats.FORMATS:
        options = {"scaling": scaling, "axis": axis, "scale": scale, "group_size": group_size, "scale_dtype": name}
        return tuple(_quantize(x, format=format, **options))
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("x: got a tensor that requires a gradient, want x.detach(): rounding has no gradient")
    options = {"scaling": scaling, "axis": axis, "group_size": group_size, "scale_dtype": name}
    values, found = _quantize(x, format=format, scale=scale, **options)
    group = None if scaling == "row" else group_size or (32 if format.startswith("mx") else 128)
    axis = -2 if axis is None else axis
    return QuantizedTensor(values=values, scale=found, format=format, group_size=group, axis=axis, length=x.shape[axis])


def dequantize(x: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns low-bit weights as floats: values * scale, rounded to dtype once, of the shape x.shape.

    x: a bridge.QuantizedTensor. The result has gradients with respect to x.scale in float32 and bfloat16. It is
    jax_kernels.dequantize on tensors. Dequantize 8-bit tensors as values.float() * scale.

    Raises:
      TypeError: x is no bridge.QuantizedTensor, or dtype is not torch.bfloat16, torch.float16 or torch.float32.
    """
    if not isinstance(x, QuantizedTensor):
        raise TypeError(f"x: got {type(x).__name__}, want a bridge.QuantizedTensor")
    check_float_dtype(dtype)
    return _dequantize(_stored(x), _NAMES[dtype])
