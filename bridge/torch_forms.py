"""Scalars of JAX's that PyTorch's functions take, for a score_mod or a mask's function in torch operations.

A Value stands for an array that JAX traces. Operators, methods of tensors and functions of torch give Values, by their
forms in jnp, which the table below lists.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.scipy import special
from torch.overrides import TorchFunctionMode

from jax_kernels.bridge import dlpack

__all__ = ["NoFormError", "Value", "in_jnp"]


class NoFormError(TypeError):
    """A function in torch operations does something that has no form in jnp here."""


def _where(condition: Any, x: Any, y: Any) -> Any:
    return jnp.where(condition, x, y)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """At a bound that is a number x has no gradient, as in torch; beside a tensor it has half of it."""
    if min is not None:
        x = jnp.where(x <= min, min, x) if isinstance(min, int | float) else jnp.maximum(x, min)
    if max is None:
        return x
    return jnp.where(x >= max, max, x) if isinstance(max, int | float) else jnp.minimum(x, max)


def _abs(x: Any) -> Any:
    """At 0 its gradient is 0, as in torch."""
    return x * jnp.sign(x)


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(scaled, threshold))) / beta)


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    raise NoFormError(f"rounding_mode: got {rounding_mode!r}, want None or 'floor'")


def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x + (y if alpha == 1 else alpha * y)


def _subtract(x: Any, y: Any, alpha: Any = 1) -> Any:
    return _add(x, y, -alpha)


def _relu(x: Any, inplace: bool = False) -> Any:
    return jax.nn.relu(x)


def _silu(x: Any, inplace: bool = False) -> Any:
    return jax.nn.silu(x)


def _gelu(x: Any, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return _clamp(x, min_val, max_val)


def _relu6(x: Any, inplace: bool = False) -> Any:
    return _clamp(x, 0.0, 6.0)


def _hardsigmoid(x: Any, inplace: bool = False) -> Any:
    return _relu6(x + 3.0) / 6.0


def _hardswish(x: Any, inplace: bool = False) -> Any:
    return x * _hardsigmoid(x)


def _leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return jnp.where(x > 0, x, x * negative_slope)


def _threshold(x: Any, threshold: float, value: float, inplace: bool = False) -> Any:
    return jnp.where(x > threshold, x, value)


def _below(x: Any) -> Any:
    """x up to 0, and 0 above, where the gradient is 0 for what overflows. At 0 its gradient is 1."""
    return jnp.where(x > 0, 0.0, x)


def _elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return jnp.where(x > 0, x, alpha * jnp.expm1(_below(x)))


def _celu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return jnp.where(x > 0, x, alpha * jnp.expm1(_below(x) / alpha))


def _selu(x: Any, inplace: bool = False) -> Any:
    return 1.0507009873554805 * _elu(x, 1.6732632423543772)


def _mish(x: Any, inplace: bool = False) -> Any:
    return x * jnp.tanh(jax.nn.softplus(x))


def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


def _to(x: Any, dtype: Any) -> Any:
    return x.astype(_dtype(dtype))


def _dtype(dtype: Any) -> Any:
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.int64, *_TORCHS.values()):
        raise NoFormError(f"converts to {dtype!r}, want torch.float32, a 16-bit dtype, an int or a bool")
    return dlpack.jax_dtype(torch.int32 if dtype == torch.int64 else dtype)  # indices have 32 bits here


def _full_like(x: Any, value: Any) -> Any:
    return jnp.full_like(x, value)


def _pair(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The function of two values: torch's max, for one, has other forms."""
    return lambda x, y: function(x, y)


_FORMS: dict[str, Callable[..., Any]] = {
    "add": _add,
    **dict.fromkeys(("sub", "subtract"), _subtract),
    **dict.fromkeys(("mul", "multiply"), jnp.multiply),
    **dict.fromkeys(("div", "divide", "true_divide"), _divide),
    **{name: getattr(jnp, name) for name in ("floor_divide", "remainder", "fmod")},
    **dict.fromkeys(("pow", "float_power"), jnp.power),
    "rsub": lambda x, y: y - x,
    **dict.fromkeys(("neg", "negative"), jnp.negative),
    "eq": jnp.equal,
    **dict.fromkeys(("ne", "not_equal"), jnp.not_equal),
    **dict.fromkeys(("lt", "less"), jnp.less),
    **dict.fromkeys(("le", "less_equal"), jnp.less_equal),
    **dict.fromkeys(("gt", "greater"), jnp.greater),
    **dict.fromkeys(("ge", "greater_equal"), jnp.greater_equal),
    **{name: getattr(jnp, name) for name in ("logical_and", "logical_or", "logical_xor", "logical_not")},
    **{name: getattr(jnp, name) for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")},
    "where": _where,
    "masked_fill": _masked_fill,
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    **dict.fromkeys(("minimum", "min"), _pair(jnp.minimum)),
    **dict.fromkeys(("maximum", "max"), _pair(jnp.maximum)),
    **dict.fromkeys(("abs", "absolute"), _abs),
    **{name: getattr(jnp, name) for name in ("exp", "exp2", "expm1", "log", "log1p", "log2", "log10")},
    **{name: getattr(jnp, name) for name in ("tanh", "sinh", "cosh", "sin", "cos", "tan", "atan2")},
    **{name: getattr(jnp, name) for name in ("sqrt", "square", "sign", "floor", "ceil", "trunc", "reciprocal")},
    **{name: getattr(jnp, name) for name in ("isnan", "isinf", "isfinite")},
    "round": lambda x: jnp.round(x),
    "atan": jnp.arctan,
    "rsqrt": jax.lax.rsqrt,
    **dict.fromkeys(("sigmoid", "special_expit"), jax.nn.sigmoid),
    **dict.fromkeys(("erf", "special_erf"), special.erf),
    **dict.fromkeys(("logsigmoid", "log_sigmoid"), jax.nn.log_sigmoid),
    "softplus": _softplus,
    "relu": _relu,
    "silu": _silu,
    "gelu": _gelu,
    "hardtanh": _hardtanh,
    "relu6": _relu6,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "leaky_relu": _leaky_relu,
    **dict.fromkeys(("threshold", "_threshold"), _threshold),
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "mish": _mish,
    "softsign": lambda x: x / (1 + _abs(x)),
    "tanhshrink": lambda x: x - jnp.tanh(x),
    "zeros_like": lambda x: _full_like(x, 0),
    "ones_like": lambda x: _full_like(x, 1),
    "full_like": lambda x, fill_value: _full_like(x, fill_value),
    **dict.fromkeys(("to", "type"), _to),
    **{
        name: functools.partial(_to, dtype=dtype)
        for name, dtype in (
            *(("float", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)),
            *(("int", torch.int32), ("long", torch.int64), ("bool", torch.bool)),
        )
    },
    "type_as": lambda x, other: x.astype(other.dtype),
    "detach": jax.lax.stop_gradient,
    **dict.fromkeys(("clone", "contiguous"), lambda x: x),
    "__getitem__": lambda x, index: x[index],
}
_OPERATORS = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{name: getattr(operator, f"{name}_") for name in ("and", "or")},
    "xor": operator.xor,
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_FACTORIES = ("tensor", "as_tensor", "scalar_tensor", "full", "zeros", "ones")
_TORCHS = {jnp.dtype(dlpack.jax_dtype(x)): x for x in (torch.float32, torch.float16, torch.bfloat16, torch.int32)} | {
    jnp.dtype(bool): torch.bool
}


class Value:
    """An array of JAX's in code that is written for torch.Tensors."""

    __array_ufunc__ = None  # NumPy's scalars leave operators to it
    __hash__ = object.__hash__

    def __init__(self, array: Any) -> None:
        self.array = array

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _called(getattr(function, "__name__", str(function)), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _FORMS:
            raise NoFormError(f"uses Tensor.{name}, which has no form in jnp here")
        return _Method(name, self)

    @property
    def dtype(self) -> torch.dtype:
        return _TORCHS[jnp.dtype(self.array.dtype)]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.array.shape)

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # where constants are made that JAX moves

    def __getitem__(self, index: Any) -> "Value":
        return _called("__getitem__", (self, index), {})

    def __neg__(self) -> "Value":
        return Value(-self.array)

    def __abs__(self) -> "Value":
        return Value(_abs(self.array))

    def __invert__(self) -> "Value":
        return Value(~self.array)

    def _has_no_value(self, *_: Any) -> Any:
        raise NoFormError("asks for the value of a score or an index, as in `if`; want torch.where(condition, x, y)")

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = _has_no_value


class _Method:
    """A method of a Value."""

    def __init__(self, name: str, value: Value) -> None:
        self._name = name
        self._value = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name == "where":  # x.where(condition, y)
            condition, other = args
            return _called("where", (condition, self._value, other), kwargs)
        return _called(self._name, (self._value, *args), kwargs)


def _operate(function: Callable[[Any, Any], Any], *, swaps: bool = False) -> Callable[[Value, Any], Value]:
    def operate(self: Value, other: Any) -> Value:
        pair = _array(self), _array(other)
        return Value(function(*(pair[::-1] if swaps else pair)))

    return operate


for _name, _function in _OPERATORS.items():
    setattr(Value, f"__{_name}__", _operate(_function))
    setattr(Value, f"__r{_name}__", _operate(_function, swaps=True))
for _name in _COMPARISONS:
    setattr(Value, f"__{_name}__", _operate(getattr(operator, _name)))


def _called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """The result of torch's function or method of that name, by its form in jnp."""
    form = _FORMS.get(name)
    if form is None:
        raise NoFormError(f"uses torch's {name}, which has no form in jnp here")
    if kwargs.get("out") is not None:
        raise NoFormError(f"gives torch.{name} an `out`, want its result")
    given = {key: _array(x) for key, x in kwargs.items() if key != "out"}
    given = {"y" if key == "other" else "x" if key in ("input", "self") else key: x for key, x in given.items()}
    try:
        return Value(form(*map(_array, args), **given))
    except TypeError as error:
        if isinstance(error, NoFormError):
            raise
        raise NoFormError(f"calls torch.{name} in a way that has no form in jnp here ({error})") from error


def _array(x: Any) -> Any:
    """The array that stands for x in jnp."""
    if isinstance(x, Value):
        return x.array
    if isinstance(x, tuple | list):
        return tuple(map(_array, x))
    if isinstance(x, torch.Tensor):
        raise NoFormError(
            f"reads a torch.Tensor of shape {tuple(x.shape)} through an object; want it as a variable of its own, "
            "as in `bias = module.bias` before the function"
        )
    return x


class _Constants(TorchFunctionMode):
    """Inside it, tensors that a function makes are Values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        if name in _FACTORIES and not any(isinstance(x, Value | torch.Tensor) for x in args):
            made = function(*args, **(kwargs or {}))
            return Value(jnp.asarray(made.tolist(), _dtype(made.dtype)))
        if any(issubclass(kind, Value) for kind in types) or any(isinstance(x, Value) for x in args):
            return _called(name, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def in_jnp(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, in torch operations, as a function of arrays. It raises NoFormError where it has none."""

    @functools.wraps(function)
    def of_arrays(*args: Any) -> Any:
        with _Constants():
            result = function(*map(Value, args))
        if isinstance(result, bool | int | float):
            return jnp.asarray(result)
        return _array(result)

    return of_arrays
