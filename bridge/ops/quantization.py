"""quantize and dequantize on PyTorch tensors, and weights of few bits as a dataclass of tensors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jax_kernels import quantization
from jax_kernels.bridge.interop.plain_numbers import plain_of
from jax_kernels.bridge.jax_functions.api import from_jax
from jax_kernels.bridge.jax_functions.argument_checks import check_optional_tensors, check_tensors
from jax_kernels.quantization import QuantizedArray, formats
from jax_kernels.quantization.formats import LowBit

__all__ = ["QuantizedTensor", "dequantize", "on_stored", "quantize", "stored"]

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedTensor:
    """Weights of 4 or 8 bits with their scales, as bridge.quantize gives them.

    values: [..., N, K padded] int8 (int8) or float8_e4m3fn (mxfp8), or [..., N, K padded / 2] uint8 (int4, mxfp4): K is
    last, whichever axis of the weights it is. scale: [..., K padded / group_size, N], or [..., N] where group_size is
    None; float32 or bfloat16, or, of the MX formats, uint8: the exponents of powers of two, with 127 added. format:
    "int8", "int4", "mxfp8" or "mxfp4". axis: that of K in the weights, -1 or -2. length: K.

    `shape` is that of the weights. The values lie as jax_kernels.QuantizedArray has them.
    """

    values: torch.Tensor
    scale: torch.Tensor
    format: str
    group_size: int | None
    axis: int
    length: int

    @property
    def shape(self) -> torch.Size:
        *outer, columns, _ = self.values.shape
        return torch.Size((*outer, columns, self.length) if self.axis == -1 else (*outer, self.length, columns))

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def facts(self) -> tuple[Any, ...]:
        """All that is no tensor."""
        return self.format, self.group_size, self.axis, self.length

    def to(self, device: torch.device | str | int) -> "QuantizedTensor":
        """The same weights on another device. Their dtypes are those of the format.

        Raises:
          TypeError: device is a dtype.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"device: got {device}, want a device; bridge.dequantize(x, dtype) gives another dtype")
        return dataclasses.replace(self, values=self.values.to(device), scale=self.scale.to(device))


def stored(name: str, x: QuantizedTensor) -> dict[str, Any]:
    """Weights as an argument of a JAX function. Raises NotImplementedError where a gradient of them is wanted."""
    if torch.is_grad_enabled() and (x.values.requires_grad or x.scale.requires_grad):
        raise NotImplementedError(f"{name}: got weights of few bits that require a gradient, want them detached")
    return _stored(x)


def _stored(x: QuantizedTensor) -> dict[str, Any]:
    facts = {"format": x.format, "group_size": x.group_size, "axis": x.axis, "length": x.length}
    return {"values": x.values, "scale": x.scale, **facts}


def on_stored(function: Callable[..., Any]) -> Callable[..., Any]:
    """An op of JAX arrays as one that also takes weights as `stored` gives them. It has the op's plan."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_as_array, args), **kwargs)

    call.plan = lambda *args, **kwargs: function.plan(*map(_as_array, args), **kwargs)  # type: ignore[attr-defined]
    return call


def _as_array(x: Any) -> Any:
    """The QuantizedArray of stored weights. Others stay as they are."""
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
def _dequantize(x: dict[str, Any], dtype: str) -> jax.Array:
    return quantization.dequantize(_as_array(x), dtype)


def quantize(
    x: torch.Tensor,
    format: str = "e4m3",
    *,
    scaling: str | None = None,
    axis: int | None = None,
    scale: torch.Tensor | None = None,
    group_size: int | None = None,
    scale_dtype: torch.dtype | None = None,
) -> Any:
    """jax_kernels.quantize on a PyTorch tensor.

    Args:
      x: a float tensor with at least two axes, for "block" and weights of few bits, or one, for "row".
      format: "e4m3" (torch.float8_e4m3fn) or "e5m2" (torch.float8_e5m2), of operands of products in 8 bits. "int8",
        "int4", "mxfp8" or "mxfp4", of weights that bridge.matmul multiplies by numbers of 16 or 32 bits.
      scaling: which numbers share a scale: all ("tensor", the default), those along `axis` ("row"), or 128 x 128 of
        the last two axes ("block"). Of weights of few bits: so many along `axis` ("group", the default), or, of
        integers, all along it ("row").
      axis: for "row" and weights of few bits, -1 or -2: the axis that a product sums over. None is -1, and -2 for
        weights of few bits, which is K of bridge.matmul's w [K, N]. Weights [N, K] of bridge.linear have -1.
      scale: a scale that was found before, positive float32 of the shape that scaling gives; not for weights of few
        bits.
      group_size: for "group", 32, 64, 128 or 256; None is 128. The MX formats have 32.
      scale_dtype: of integers' scales, torch.float32 (None) or torch.bfloat16.

    Returns:
      Of "e4m3" and "e5m2", (values, scale): values of x's shape; scale, float32. They are x and x_scale, or w and
      w_scale, of bridge.matmul, and x ≈ values * scale. Of weights of few bits, a bridge.QuantizedTensor.

    Raises:
      TypeError: x is no float tensor, or scale no float32 tensor.
      ValueError: format, scaling, axis, group_size, scale_dtype or scale's shape is wrong.
      NotImplementedError: x requires a gradient, which rounding does not have.
    """
    check_tensors(x=x)
    check_optional_tensors(scale=scale)
    axis, group_size = plain_of("axis", axis), plain_of("group_size", group_size)
    if scale_dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"scale_dtype: got {scale_dtype}, want torch.float32, torch.bfloat16 or None")
    name = None if scale_dtype is None else _NAMES[scale_dtype]
    if format not in formats.FORMATS:
        options = {"scaling": scaling, "axis": axis, "scale": scale, "group_size": group_size, "scale_dtype": name}
        return tuple(_quantize(x, format=format, **options))
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "x: got a tensor that requires a gradient, which rounding to few bits does not have; want x.detach()"
        )
    options = {"scaling": scaling, "axis": axis, "group_size": group_size, "scale_dtype": name}
    values, found = _quantize(x, format=format, scale=scale, **options)
    group = None if scaling == "row" else group_size or (32 if format.startswith("mx") else 128)
    axis = -2 if axis is None else axis
    return QuantizedTensor(values=values, scale=found, format=format, group_size=group, axis=axis, length=x.shape[axis])


def dequantize(x: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """jax_kernels.dequantize on weights of few bits: values * scale, rounded to dtype once, [..., K, N] or [..., N, K].

    It has gradients with respect to scales in float32 and bfloat16. Of 8-bit tensors it is values.float() * scale.

    Raises:
      TypeError: x is no bridge.QuantizedTensor, or dtype is not torch.bfloat16, torch.float16 or torch.float32.
    """
    if not isinstance(x, QuantizedTensor):
        raise TypeError(f"x: got {type(x).__name__}, want a bridge.QuantizedTensor")
    if dtype not in _NAMES:
        raise TypeError(f"dtype: got {dtype}, want torch.bfloat16, torch.float16 or torch.float32")
    return _dequantize(_stored(x), _NAMES[dtype])
