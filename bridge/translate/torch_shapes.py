"""jnp forms of the tensor methods that convert, create, reshape, look up and reduce, for torch_table."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from jax_kernels.bridge.interop import dlpack

__all__ = ["DTYPES", "SHAPES", "TORCHS", "UnsupportedTorchOpError", "dtype_of"]


class UnsupportedTorchOpError(TypeError):
    """Raised for a function in torch operations that uses an operation without a form in jnp."""


type Operand = jax.Array | float  # an array, or a Python number
type Result = jax.Array | tuple[jax.Array, ...]
type Form = Callable[..., Result]
type Size = int | tuple[int, ...] | list[int]
type _Option = torch.device | torch.layout | torch.memory_format | str | int | None

TORCHS = {
    jnp.dtype(dlpack.jax_dtype(x)): x
    for x in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int8, torch.int16, torch.int32, torch.uint8),
        *(torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


def dtype_of(dtype: torch.dtype) -> jnp.dtype:
    """The JAX dtype for a torch.dtype; int64 becomes int32.

    Raises UnsupportedTorchOpError for float64, complex dtypes, and other dtypes that the forms do not support.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.int64, *TORCHS.values()):
        raise UnsupportedTorchOpError(f"converts to {dtype!r}, want torch.float32, a 16-bit dtype, an int or a bool")
    return dlpack.jax_dtype(torch.int32 if dtype == torch.int64 else dtype)


def _to(
    x: jax.Array,
    *args: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    copy: bool | None = None,
    non_blocking: bool | None = None,
) -> jax.Array:
    """tensor.to: x, cast if a dtype is given. Device, copy and non_blocking have no effect.

    args: a dtype, a tensor (for its dtype), a device, or a device and a dtype.
    """
    for given in args:
        if isinstance(given, torch.dtype):
            dtype = given
        elif hasattr(given, "dtype") and hasattr(given, "shape"):
            return x.astype(given.dtype)
        elif not isinstance(given, str | torch.device | int | bool | None):
            raise UnsupportedTorchOpError(f"converts to {given!r}, want a torch.dtype, a device or a tensor")
    return x if dtype is None else x.astype(dtype_of(dtype))


def _cast(dtype: torch.dtype) -> Form:
    return lambda x: x.astype(dtype_of(dtype))


def _type(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    return x.astype(dtype_of(dtype))


_MADE = ("device", "layout", "pin_memory", "memory_format")  # options that change no value


def _checked(options: dict[str, _Option]) -> None:
    """Raises UnsupportedTorchOpError for an option of a factory, such as torch.zeros_like, that changes the result."""
    if options.get("requires_grad"):
        raise UnsupportedTorchOpError("makes a tensor with requires_grad=True, want a tensor that the function reads")
    for name in options:
        if name not in (*_MADE, "requires_grad"):
            raise UnsupportedTorchOpError(f"makes a tensor with {name}, which has no form in jnp here")


def _like(number: Operand) -> Callable[..., jax.Array]:
    """The form of torch functions such as zeros_like (number=0): an array with x's shape, filled with `number`.

    It has x's dtype if none is given. For empty_like the number is 0, for ones_like 1, for full_like any.
    """

    def like(x: jax.Array, dtype: torch.dtype | None = None, **options: _Option) -> jax.Array:
        _checked(options)
        return jnp.full_like(x, number, dtype=None if dtype is None else dtype_of(dtype))

    return like


def _full_like(x: jax.Array, fill_value: Operand, dtype: torch.dtype | None = None, **options: _Option) -> jax.Array:
    return _like(fill_value)(x, dtype, **options)


def _sizes(given: Sequence[Any]) -> tuple[int, ...]:
    """A size as a tuple of ints. given: the ints, or one tuple or list of them."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else tuple(given)


def _new(number: Operand) -> Form:
    """The form of tensor.new_zeros (number=0), new_ones (number=1) or new_empty (number=0)."""

    def new(x: jax.Array, *size: Size, dtype: torch.dtype | None = None, **options: Any) -> jax.Array:
        size = _sizes((options.pop("size"),) if "size" in options else size)
        return _new_full(x, size, number, dtype, **options)

    return new


def _new_full(
    x: jax.Array, size: Size, fill_value: Operand, dtype: torch.dtype | None = None, **options: _Option
) -> jax.Array:
    _checked(options)
    return jnp.full(_sizes((size,)), fill_value, x.dtype if dtype is None else dtype_of(dtype))


def _new_tensor(x: jax.Array, data: Any, dtype: torch.dtype | None = None, **options: _Option) -> jax.Array:
    _checked(options)
    return jnp.asarray(data, x.dtype if dtype is None else dtype_of(dtype))


DTYPES: dict[str, Form] = {
    "to": _to,
    "type": _type,
    "type_as": lambda x, y: x.astype(y.dtype),
    **{name: _cast(getattr(torch, name)) for name in ("float", "half", "bfloat16", "int", "long", "bool", "short")},
    "char": _cast(torch.int8),
    "byte": _cast(torch.uint8),
    "zeros_like": _like(0),
    "empty_like": _like(0),
    "ones_like": _like(1),
    "full_like": _full_like,
    "new_zeros": _new(0),
    "new_empty": _new(0),
    "new_ones": _new(1),
    "new_full": _new_full,
    "new_tensor": _new_tensor,
    "detach": lambda x: lax.stop_gradient(x),
    **dict.fromkeys(("clone", "contiguous", "cpu", "cuda"), lambda x, *_, **__: x),
}


def _axes(dim: Size | None) -> int | tuple[int, ...] | None:
    return tuple(dim) if isinstance(dim, list | tuple) else dim


def _reduction(function: Callable[..., jax.Array]) -> Form:
    """The form of a torch reduction (x, dim, keepdim, dtype). function: from jnp, with axis and keepdims."""

    def reduced(
        x: jax.Array, dim: Size | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
    ) -> jax.Array:
        x = x if dtype is None else x.astype(dtype_of(dtype))
        return function(x, axis=_axes(dim), keepdims=keepdim)

    return reduced


def _product(function: Callable[..., jax.Array]) -> Form:
    """The form of a torch function of two vectors or matrices, such as matmul, in full float32 precision.

    function: from jnp, with the argument precision. The operands are cast to their common dtype.
    """

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        dtype = jnp.result_type(x, y)
        return function(jnp.asarray(x, dtype), jnp.asarray(y, dtype), precision=lax.Precision.HIGHEST)

    return product


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """The form of torch.dot and torch.vdot: a sum of elementwise products of two vectors, which kernels can contain."""
    if x.ndim != 1 or y.ndim != 1:
        raise UnsupportedTorchOpError(f"calls torch.dot of shapes {x.shape} and {y.shape}, want two vectors")
    return jnp.sum(x * y)


def _view(x: jax.Array, *shape: Size | torch.dtype) -> jax.Array:
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise UnsupportedTorchOpError("views a tensor as another dtype, which has no form in jnp here")
    return x.reshape(_sizes(shape))


def _expand(x: jax.Array, *size: Size) -> jax.Array:
    size = _sizes(size)
    own = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(x, tuple(n if m == -1 else m for n, m in zip(own, size, strict=True)))


def _squeeze(x: jax.Array, dim: Size | None = None) -> jax.Array:
    dims = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(i for i in dims if x.shape[i] == 1))


def _flatten(x: jax.Array, start_dim: int = 0, end_dim: int = -1) -> jax.Array:
    if x.ndim == 0:
        return x.reshape(1)
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


def _select(x: jax.Array, dim: int, index: jax.Array | int) -> jax.Array:
    return jnp.moveaxis(x, dim, 0)[index]


def _index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    return jnp.take(x, jnp.atleast_1d(index), axis=dim, mode="clip")


def _narrow(x: jax.Array, dim: int, start: jax.Array | int, length: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, length, dim)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.reshape(-1)[index]


def _embedding(x: jax.Array, weight: jax.Array, **options: bool | float | None) -> jax.Array:
    if any(options.values()):
        raise UnsupportedTorchOpError("calls torch's embedding with options, want weight[index]")
    return weight[x]


def _searchsorted(
    sorted_sequence: jax.Array, x: Operand, out_int32: bool = False, right: bool = False, side: str | None = None
) -> jax.Array:
    side = side or ("right" if right else "left")
    return jnp.searchsorted(sorted_sequence, x, side=side).astype(jnp.int32)


def _bucketize(x: Operand, boundaries: jax.Array, out_int32: bool = False, right: bool = False) -> jax.Array:
    return _searchsorted(boundaries, x, right=right)


def _einsum(equation: str, *operands: jax.Array | tuple[jax.Array, ...] | list[jax.Array]) -> jax.Array:
    return jnp.einsum(equation, *_sizes(operands), precision=lax.Precision.HIGHEST)


SHAPES: dict[str, Form] = {
    "__getitem__": lambda x, index: x[index],
    **dict.fromkeys(("view", "reshape"), _view),
    **dict.fromkeys(("view_as", "reshape_as"), lambda x, y: x.reshape(y.shape)),
    "unsqueeze": lambda x, dim: jnp.expand_dims(x, dim),
    "squeeze": _squeeze,
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    "expand_as": lambda x, y: jnp.broadcast_to(x, y.shape),
    "permute": lambda x, *dims: jnp.transpose(x, _sizes(dims)),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), lambda x, dim0, dim1: jnp.swapaxes(x, dim0, dim1)),
    **dict.fromkeys(("movedim", "moveaxis"), lambda x, source, destination: jnp.moveaxis(x, source, destination)),
    "t": lambda x: x.T,
    "flatten": _flatten,
    "ravel": lambda x: x.reshape(-1),
    "flip": lambda x, *dims: jnp.flip(x, _sizes(dims)),
    "select": _select,
    "narrow": _narrow,
    "unbind": lambda x, dim=0: tuple(jnp.moveaxis(x, dim, 0)),
    "index_select": _index_select,
    "take": _take,
    "gather": lambda x, dim, index: jnp.take_along_axis(x, index, dim, mode="clip"),
    "take_along_dim": lambda x, indices, dim: jnp.take_along_axis(x, indices, dim, mode="clip"),
    "embedding": _embedding,
    "stack": lambda tensors, dim=0: jnp.stack(tensors, dim),
    **dict.fromkeys(("cat", "concat", "concatenate"), lambda tensors, dim=0: jnp.concatenate(tensors, dim)),
    "broadcast_tensors": lambda *tensors: tuple(jnp.broadcast_arrays(*tensors)),
    **{name: (lambda f: lambda x: f(x))(getattr(jnp, name)) for name in ("atleast_1d", "atleast_2d")},
    "searchsorted": _searchsorted,
    "bucketize": _bucketize,
    **{name: _reduction(getattr(jnp, name)) for name in ("sum", "mean", "prod", "any", "all", "count_nonzero")},
    **{name: _reduction(getattr(jnp, name)) for name in ("nansum", "nanmean")},
    "amax": _reduction(jnp.max),
    "amin": _reduction(jnp.min),
    "logsumexp": _reduction(jax.nn.logsumexp),
    **dict.fromkeys(("dot", "vdot"), _dot),
    "inner": _product(jnp.inner),
    **dict.fromkeys(("matmul", "mv", "mm", "__matmul__"), _product(jnp.matmul)),
    "outer": _product(jnp.outer),
    "einsum": _einsum,
}
