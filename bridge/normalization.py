"""layer_norm and rms_norm on PyTorch tensors, and the modules made of them."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from jax_kernels.bridge.dlpack import check_dense
from jax_kernels.bridge.function import JaxOp, from_jax, seen
from jax_kernels.ops import normalization

__all__ = ["LayerNorm", "RMSNorm", "layer_norm", "rms_norm"]


def _as_arrays(norm: Callable[..., Any]) -> Callable[..., Any]:
    """The norm with an output of 8 bits as two arrays: (values, scale), and x + residual where there is a residual."""

    @functools.wraps(norm)
    def call(*args: Any, residual: Any, **options: Any) -> Any:
        found = norm(*args, residual=residual, **options)
        out, *total = (found,) if residual is None else found
        return out.values, out.scale, *total

    return call


_layer_norm = JaxOp(normalization.layer_norm, is_whole=True)
_rms_norm = JaxOp(normalization.rms_norm, is_whole=True)
_quantized_layer_norm = from_jax(_as_arrays(normalization.layer_norm))
_quantized_rms_norm = from_jax(_as_arrays(normalization.rms_norm))


def layer_norm(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    scale_offset: float = 0.0,
    quantize: str | None = None,
    implementation: str | None = None,
) -> Any:
    """jax_kernels.layer_norm on PyTorch tensors, with gradients of x, scale, bias and residual.

    Calls run, and may be compiled, differentiated and captured, as bridge.from_jax says. Autocast changes nothing: the
    statistics are in float32, whatever x's dtype.

    Args:
      x: [..., N], bfloat16, float16 or float32, on a CPU or a CUDA device.
      scale, bias: [N], on x's device; None leaves it out. 16-bit ones of another dtype than x's count in float32.
      residual: like x, added to it, rounded to x's dtype.
      eps: added to the variance; PyTorch's default.
      scale_offset: added to scale.
      quantize: "e4m3" or "e5m2" rounds out to 8 bits in the same pass, as in jax_kernels.layer_norm; forward only.
      implementation: "triton" or "xla"; None picks the fastest that can serve.

    Returns:
      out, like x; with a residual, (out, x + residual). With quantize (values, scale), or
      (values, scale, x + residual): values in 8 bits and float32 scales [...], x and x_scale of bridge.matmul.

    It raises what jax_kernels.layer_norm does, or from_jax where the two differ.
    """
    call = None
    if quantize is None and not torch.compiler.is_compiling():
        call = seen((x, scale, bias, residual), (eps, scale_offset, implementation))
        if (known := _layer_norm.find(call)) is not None:
            return known(call.tensors)
    scale, bias = (_weights(weights, x) for weights in (scale, bias))
    options: dict[str, Any] = {"eps": eps, "scale_offset": scale_offset, "implementation": implementation}
    if quantize is not None:
        return _quantized_layer_norm(x, scale, bias, residual=residual, quantize=quantize, **options)
    return _layer_norm.serve(call, x, scale, bias, residual=residual, **options)


def rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float | None = None,
    scale_offset: float = 0.0,
    quantize: str | None = None,
    implementation: str | None = None,
) -> Any:
    """jax_kernels.rms_norm on PyTorch tensors, with gradients of x, scale and residual.

    Calls run, and may be compiled, differentiated and captured, as bridge.from_jax says. Autocast changes nothing: the
    statistics are in float32, whatever x's dtype.

    Args:
      x: [..., N], bfloat16, float16 or float32, on a CPU or a CUDA device.
      scale: [N], on x's device; None leaves it out. A 16-bit one of another dtype than x's counts in float32.
      residual: like x, added to it, rounded to x's dtype.
      eps: added to the mean square; None is PyTorch's default, torch.finfo(x.dtype).eps.
      scale_offset: added to scale: 1.0 for weights that are stored as their difference from 1, as Gemma's are.
      quantize: as in layer_norm.
      implementation: "triton" or "xla"; None picks the fastest that can serve.

    Returns:
      out, like x; with a residual, (out, x + residual). With quantize (values, scale), or
      (values, scale, x + residual): values in 8 bits and float32 scales [...], x and x_scale of bridge.matmul.

    It raises what jax_kernels.rms_norm does, or from_jax where the two differ.
    """
    call = None
    if quantize is None and not torch.compiler.is_compiling():
        call = seen((x, scale, residual), (eps, scale_offset, implementation))
        if (known := _rms_norm.find(call)) is not None:
            return known(call.tensors)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    options: dict[str, Any] = {"eps": eps, "scale_offset": scale_offset, "implementation": implementation}
    if quantize is not None:
        return _quantized_rms_norm(x, _weights(scale, x), residual=residual, quantize=quantize, **options)
    return _rms_norm.serve(call, x, _weights(scale, x), residual=residual, **options)


def _weights(weights: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """scale or bias in x's dtype or float32."""
    if weights is None or weights.dtype == x.dtype or weights.dtype not in (torch.bfloat16, torch.float16):
        return weights
    return weights.float()


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm by this library's kernels, with an addition before it where a call has a residual.

    It has torch.nn.LayerNorm's arguments, parameters and state dict. normalized_shape may have several axes.
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """x: [..., *normalized_shape]. Returns the result like x; with a residual, (the result, x + residual)."""
        given = _flat(x, residual, self.normalized_shape, self.weight, self.bias)
        return _like(x, layer_norm(*given[:3], residual=given[3], eps=self.eps))


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm by this library's kernels, with an addition before it where a call has a residual.

    It has torch.nn.RMSNorm's arguments, parameters and state dict. normalized_shape may have several axes.
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """x: [..., *normalized_shape]. Returns the result like x; with a residual, (the result, x + residual)."""
        x_, scale, _, residual = _flat(x, residual, self.normalized_shape, self.weight, None)
        return _like(x, rms_norm(x_, scale, residual=residual, eps=self.eps))


def _flat(x: Any, residual: Any, shape: tuple[int, ...], weight: Any, bias: Any) -> tuple[Any, Any, Any, Any]:
    """(x, scale, bias, residual) with the axes of `shape` as one."""
    axes = len(shape)
    check_dense("x", x)
    if tuple(x.shape[-axes:]) != tuple(shape):
        raise ValueError(f"x: got shape {tuple(x.shape)}, want [..., {', '.join(map(str, shape))}]")
    if axes == 1:
        return x, weight, bias, residual
    rows, flat = (lambda y: None if y is None else y.flatten(-axes)), (lambda y: None if y is None else y.flatten())
    return rows(x), flat(weight), flat(bias), rows(residual)


def _like(x: torch.Tensor, results: Any) -> Any:
    """The results in x's shape."""
    return tuple(y.view(x.shape) for y in results) if isinstance(results, tuple | list) else results.view(x.shape)
