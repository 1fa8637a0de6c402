"""layer_norm and rms_norm on PyTorch tensors, and the modules LayerNorm and RMSNorm."""

import functools
from collections.abc import Callable
from typing import Any, overload

import jax
import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.interop.dlpack import check_dense
from jax_kernels.bridge.jax_functions.api import JaxOp
from jax_kernels.bridge.jax_functions.argument_checks import check_optional_tensors, check_tensors
from jax_kernels.bridge.jax_functions.argument_names import under_names
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.ops.normalization import normalization
from jax_kernels.quantization import FORMATS
from jax_kernels.spelling import with_name_hints

__all__ = ["LayerNorm", "RMSNorm", "layer_norm", "rms_norm"]


type Outputs = torch.Tensor | tuple[torch.Tensor, ...]


def _as_arrays(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a norm of JAX arrays, so that it returns an 8-bit result as plain arrays.

    With `quantize` the wrapper returns (values, scale), or with a residual (values, scale, x + residual). The norm
    itself returns its 8-bit result as one QuantizedArray.

    norm: jax_kernels.layer_norm or rms_norm.
    """

    @functools.wraps(norm)
    def call(*args: jax.Array | None, residual: jax.Array | None, quantize: str | None, **options: Any) -> Any:
        found = norm(*args, residual=residual, quantize=quantize, **options)
        if quantize is None:
            return found
        out, *total = (found,) if residual is None else found
        return out.values, out.scale, *total

    return call


_layer_norm = JaxOp(_as_arrays(normalization.layer_norm), is_opaque=True)
_rms_norm = JaxOp(_as_arrays(normalization.rms_norm), is_opaque=True)


@overload
def layer_norm(
    x: torch.Tensor,
    scale: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    *,
    residual: None = ...,
    eps: float = ...,
    scale_offset: float = ...,
    quantize: None = ...,
    implementation: str | None = ...,
) -> torch.Tensor: ...
@overload
def layer_norm(
    x: torch.Tensor,
    scale: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    *,
    residual: torch.Tensor,
    eps: float = ...,
    scale_offset: float = ...,
    quantize: None = ...,
    implementation: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def layer_norm(
    x: torch.Tensor,
    scale: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    *,
    residual: torch.Tensor | None = ...,
    eps: float = ...,
    scale_offset: float = ...,
    quantize: str | None = ...,
    implementation: str | None = ...,
) -> Outputs: ...
@with_name_hints
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
) -> Outputs:
    """jax_kernels.layer_norm on PyTorch tensors: normalises the last axis, with gradients of all tensors.

    Without a residual it is equivalent to torch.nn.functional.layer_norm(x, (N,), scale_offset + scale, bias, eps). See
    bridge.from_jax for torch.compile, derivatives and CUDA graphs. Autocast has no effect: the statistics are in
    float32 for every dtype of x.

    Args:
      x: [..., N], bfloat16, float16 or float32, on a CPU or a CUDA device.
      scale, bias: [N], on x's device; None omits it. A 16-bit tensor whose dtype is not x's is converted to float32.
      residual: of x's shape and dtype, added to x before the norm; the sum is rounded to x's dtype.
      eps: added to the variance; PyTorch's default.
      scale_offset: added to scale.
      quantize: "e4m3" or "e5m2" rounds out to 8 bits in the same pass, with a scale for each row: the row's largest
        magnitude divided by the format's largest value. Forward only. None leaves out in x's dtype.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.

    Returns:
      out, of x's shape and dtype; with a residual, (out, x + residual). With quantize (values, scale), or (values,
        scale, x + residual): 8-bit values and float32 scales [...], for x and x_scale of bridge.matmul.

    It raises the errors of jax_kernels.layer_norm, or of bridge.from_jax if they differ.
    """
    call = _layer_norm.lookup((x, scale, bias, residual), (eps, scale_offset, quantize, implementation))
    if call and call.cached:
        return call.cached(call.tensors)
    check_tensors(x=x)
    check_optional_tensors(scale=scale, bias=bias, residual=residual)
    if dtensors.are_in(x, scale, bias, residual):
        own = {"eps": eps, "scale_offset": scale_offset, "quantize": quantize, "implementation": implementation}
        return _on_shards(layer_norm, {"x": x, "scale": scale, "bias": bias, "residual": residual}, own)
    return _layer_norm.run(
        call,
        x,
        _weights(scale, x),
        _weights(bias, x),
        residual=residual,
        eps=eps,
        scale_offset=scale_offset,
        quantize=quantize,
        implementation=implementation,
    )


@overload
def rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor | None = ...,
    *,
    residual: None = ...,
    eps: float | None = ...,
    scale_offset: float = ...,
    quantize: None = ...,
    implementation: str | None = ...,
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor | None = ...,
    *,
    residual: torch.Tensor,
    eps: float | None = ...,
    scale_offset: float = ...,
    quantize: None = ...,
    implementation: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor | None = ...,
    *,
    residual: torch.Tensor | None = ...,
    eps: float | None = ...,
    scale_offset: float = ...,
    quantize: str | None = ...,
    implementation: str | None = ...,
) -> Outputs: ...
@with_name_hints
def rms_norm(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float | None = None,
    scale_offset: float = 0.0,
    quantize: str | None = None,
    implementation: str | None = None,
) -> Outputs:
    """jax_kernels.rms_norm on PyTorch tensors: divides by the last axis's root mean square, with gradients.

    Without a residual it is equivalent to torch.nn.functional.rms_norm(x, (N,), scale_offset + scale, eps). The
    gradients are of x, scale and residual. See bridge.from_jax for torch.compile, derivatives and CUDA graphs. Autocast
    has no effect: the statistics are in float32 for every dtype of x.

    Args:
      x: [..., N], bfloat16, float16 or float32, on a CPU or a CUDA device.
      scale: [N], on x's device; None omits it. A 16-bit tensor whose dtype is not x's is converted to float32.
      residual: of x's shape and dtype, added to x before the norm; the sum is rounded to x's dtype.
      eps: added to the mean square; None is the default of the installed PyTorch: torch.finfo(torch.float32).eps in
        recent versions, torch.finfo(x.dtype).eps in older versions.
      scale_offset: added to scale: 1.0 for weights that are stored as their difference from 1, such as Gemma's.
      quantize: "e4m3" or "e5m2" rounds out to 8 bits in the same pass, with a scale for each row. Forward only.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.

    Returns:
      out, of x's shape and dtype; with a residual, (out, x + residual). With quantize (values, scale), or (values,
        scale, x + residual): 8-bit values and float32 scales [...], for x and x_scale of bridge.matmul.

    It raises the errors of jax_kernels.rms_norm, or of bridge.from_jax if they differ.
    """
    call = _rms_norm.lookup((x, scale, residual), (eps, scale_offset, quantize, implementation))
    if call and call.cached:
        return call.cached(call.tensors)
    check_tensors(x=x)
    check_optional_tensors(scale=scale, residual=residual)
    if dtensors.are_in(x, scale, residual):
        own = {"eps": eps, "scale_offset": scale_offset, "quantize": quantize, "implementation": implementation}
        return _on_shards(rms_norm, {"x": x, "scale": scale, "residual": residual}, own)
    return _rms_norm.run(
        call,
        x,
        _weights(scale, x),
        residual=residual,
        eps=_default_eps(x.dtype) if eps is None else eps,
        scale_offset=scale_offset,
        quantize=quantize,
        implementation=implementation,
    )


def _on_shards(norm: Callable[..., Outputs], tensors: dict[str, Any], options: dict[str, Any]) -> Outputs:
    """Runs layer_norm or rms_norm on DTensors, whose rows may be sharded. Returns DTensors, as the norm does.

    tensors: the tensor arguments by name, or None. options: the other arguments.
    """
    rows, width = dtensors.rows_roles(tensors["x"]), (None,)
    roles = {"x": rows, "residual": rows, "scale": width, "bias": width}
    results: tuple[dtensors.Roles, ...] = (rows, rows) if options["quantize"] is None else (rows, rows[:-1], rows)
    if tensors["residual"] is None:
        results = results[:-1]
    return dtensors.on_shards(norm, tensors, roles, results, options)


@torch_internals.constant_in_graph
def _default_eps(dtype: torch.dtype) -> float:
    """Returns the default eps of the installed PyTorch's torch.nn.functional.rms_norm for x of this dtype."""
    return _found_eps(dtype)


@functools.cache
def _found_eps(dtype: torch.dtype) -> float:
    """Returns the default eps of the installed PyTorch's rms_norm, found by a call of it.

    For 16-bit x, older versions use the eps of x's dtype, newer versions float32's. The norm of a small value shows the
    difference.
    """
    wide = torch.finfo(torch.float32).eps
    if dtype not in (torch.bfloat16, torch.float16):
        return torch.finfo(dtype).eps if dtype.is_floating_point else wide
    is_off = torch.autocast("cpu", enabled=False)
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableFuncTorch(),
        torch_internals.without_modes(),
        torch.no_grad(),
        is_off,
    ):
        x = torch.full((1, 1), 1e-3, dtype=dtype, device="cpu")
        is_wide = float(torch.nn.functional.rms_norm(x, (1,))) > 0.5
    return wide if is_wide else torch.finfo(dtype).eps


def _weights(weights: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """Returns a scale or bias, converted to float32 if it has 16 bits and its dtype is not x's. None stays None."""
    if weights is None or weights.dtype == x.dtype or weights.dtype not in (torch.bfloat16, torch.float16):
        return weights
    return weights.float()


class _Options(torch.nn.Module):
    """The options of LayerNorm and RMSNorm that PyTorch's modules lack: scale_offset, quantize, implementation."""

    weight: torch.nn.Parameter | None
    eps: float | None
    scale_offset: float = 0.0
    quantize: str | None = None
    implementation: str | None = None

    def _take(self, scale_offset: float, quantize: str | None, implementation: str | None) -> None:
        """Checks and stores the options, and initialises weight to 1 - scale_offset.

        Raises ValueError for an unknown format in quantize, and for a scale_offset without a weight.
        """
        if quantize not in (None, *FORMATS):
            raise ValueError(f"quantize: got {quantize!r}, want {' or '.join(map(repr, FORMATS))}, or None")
        if scale_offset and self.weight is None:
            raise ValueError(
                f"scale_offset: got {scale_offset} with elementwise_affine=False, want 0.0: there is no weight"
            )
        self.scale_offset = scale_offset
        self.quantize = quantize
        self.implementation = implementation
        if scale_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weight to 1 - scale_offset, so that scale_offset + weight is 1, and bias to 0."""
        super().reset_parameters()
        if self.weight is not None and self.scale_offset:
            torch.nn.init.constant_(self.weight, 1.0 - self.scale_offset)

    __prepare_scriptable__ = symbolic_trace.no_script

    @property
    def _options(self) -> dict[str, Any]:
        """The keyword arguments of layer_norm or rms_norm that the module stores: eps and the three options."""
        names = ("scale_offset", "quantize", "implementation")
        return {"eps": self.eps} | {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        told = {name: x for name, x in self._options.items() if name != "eps" and x}
        return super().extra_repr() + "".join(f", {name}={x!r}" for name, x in told.items())


class LayerNorm(_Options, torch.nn.LayerNorm):
    """torch.nn.LayerNorm with this library's kernels. A call with a residual adds it before the norm.

    It has torch.nn.LayerNorm's arguments, parameters and state dict. normalized_shape may have several axes.

    Args:
      scale_offset: added to weight. weight is initialised to 1 - scale_offset.
      quantize: "e4m3" or "e5m2" rounds the result to 8 bits, with a scale for each row; forward only.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.
      Other arguments: torch.nn.LayerNorm's.

    Raises:
      ValueError: quantize is an unknown format, or there is a scale_offset and no weight.
    """

    @plain_arguments
    def __init__(
        self,
        normalized_shape: int | list[int] | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale_offset: float = 0.0,
        quantize: str | None = None,
        implementation: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._take(scale_offset, quantize, implementation)

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> Outputs:
        """Returns the normalised input, of its shape and dtype; with a residual, (the result, input + residual).

        input: [..., *normalized_shape]. residual: of input's shape and dtype, added before the norm. With quantize,
        returns (values, scale), or (values, scale, input + residual): scale [...], float32.
        """
        if isinstance(input, symbolic_trace.Proxy):
            return symbolic_trace.leaf(self, input, residual=residual)
        names = {"x": "input"}
        flat = under_names(names, _flat, input, residual, self.normalized_shape, self.weight, self.bias)
        results = under_names(names, layer_norm, *flat[:3], residual=flat[3], **self._options)
        return _like(input, results, self.quantize)


class RMSNorm(_Options, torch.nn.RMSNorm):
    """torch.nn.RMSNorm with this library's kernels. A call with a residual adds it before the norm.

    It has torch.nn.RMSNorm's arguments, parameters and state dict. normalized_shape may have several axes.

    Args:
      scale_offset: added to weight; 1.0 for Gemma's weights. weight is initialised to 1 - scale_offset.
      quantize: "e4m3" or "e5m2" rounds the result to 8 bits, with a scale for each row; forward only.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.
      Other arguments: torch.nn.RMSNorm's.

    Raises:
      ValueError: quantize is an unknown format, or there is a scale_offset and no weight.
    """

    @plain_arguments
    def __init__(
        self,
        normalized_shape: int | list[int] | tuple[int, ...],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale_offset: float = 0.0,
        quantize: str | None = None,
        implementation: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._take(scale_offset, quantize, implementation)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Outputs:
        """Returns the normalised x, of its shape and dtype; with a residual, (the result, x + residual).

        x: [..., *normalized_shape]. residual: of x's shape and dtype, added before the norm. With quantize, returns
        (values, scale), or (values, scale, x + residual): scale [...], float32.
        """
        if isinstance(x, symbolic_trace.Proxy):
            return symbolic_trace.leaf(self, x, residual=residual)
        x_, scale, _, residual = _flat(x, residual, self.normalized_shape, self.weight, None)
        return _like(x, rms_norm(x_, scale, residual=residual, **self._options), self.quantize)


def _flat(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns (x, scale, bias, residual), with the axes of normalized_shape flattened to one axis.

    shape: normalized_shape, the last axes of x and residual, and all axes of weight and bias. Raises TypeError for an
    argument that is no tensor, ValueError if x or residual has a wrong shape or layout.
    """
    axes = len(shape)
    check_tensors(x=x)
    check_optional_tensors(residual=residual)
    check_dense("x", x)
    if residual is not None:
        check_dense("residual", residual)
    if tuple(x.shape[-axes:]) != tuple(shape):
        raise ValueError(f"x: got shape {tuple(x.shape)}, want [..., {', '.join(map(str, shape))}]")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual: got shape {tuple(residual.shape)}, want x's {tuple(x.shape)}")
    if axes == 1:
        return x, weight, bias, residual
    rows, flat = (lambda y: None if y is None else y.flatten(-axes)), (lambda y: None if y is None else y.flatten())
    return rows(x), flat(weight), flat(bias), rows(residual)


def _like(x: torch.Tensor, results: Outputs, quantize: str | None) -> Outputs:
    """Returns a norm's results in x's shape. The scales of 8-bit results, the second of a tuple, stay unchanged."""
    if not isinstance(results, tuple | list):
        return results.view(x.shape)
    return tuple(y if quantize is not None and at == 1 else y.view(x.shape) for at, y in enumerate(results))
