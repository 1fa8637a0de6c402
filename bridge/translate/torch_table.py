"""The jnp forms of torch's functions and methods, by name, for torch_to_jnp.

A form takes arrays instead of tensors. Its first two parameters are x and y, which torch calls `input` and `other`; the
other parameters have torch's names. At a kink a form has torch's derivative.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import special

from jax_kernels.bridge.translate.torch_shapes import DTYPES, SHAPES, Form, Operand, Result, UnsupportedTorchOpError

__all__ = ["CASTS", "FORMS", "IN_PLACE", "RANDOM", "VIEWS", "binary"]

RANDOM = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "poisson", "multinomial", "binomial"),
    *("rand_like", "randn_like", "randint_like", "dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu"),
}
# Functions whose last positional argument may be `inplace`.
IN_PLACE = {
    *("relu", "relu6", "silu", "mish", "selu", "celu", "elu", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu"),
    *("threshold", "_threshold"),
}
# If dtype and device stay the same, these return x itself.
CASTS = {
    *("to", "type", "type_as", "float", "half", "bfloat16", "int", "long", "bool", "short", "char", "byte", "cpu"),
    *("cuda", "contiguous", "positive", "real", "conj", "resolve_conj", "resolve_neg"),
}
# The results of these share memory with x.
VIEWS = {
    *("view", "view_as", "reshape", "reshape_as", "unsqueeze", "squeeze", "expand", "expand_as", "permute", "t"),
    *("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "flatten", "ravel", "select", "narrow", "unbind"),
    *("detach", "__getitem__", "broadcast_to", "broadcast_tensors", "atleast_1d", "atleast_2d"),
}


def _floating(x: Operand) -> jax.Array:
    """x as an array; integers and bools become float32."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _is_whole(x: Operand) -> bool:
    return not jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def unary(function: Form) -> Form:
    """The form (x) of a torch function of one tensor. Integers and bools are converted to float32 first."""
    return lambda x: function(_floating(x))


def binary(function: Form) -> Form:
    """The form (x, y) of a torch function of two tensors. function: the same function of two arrays.

    The form's parameters are named x and y, so that torch's arguments `input` and `other` can be passed by keyword.
    """
    return lambda x, y: function(x, y)


def _binary_floats(function: Form) -> Form:
    return lambda x, y: function(*jnp.broadcast_arrays(_floating(x), _floating(y)))


def _rounded(function: Form) -> Form:
    """The form (x) of a rounding function, which returns integers and bools unchanged."""
    return lambda x: x if _is_whole(x) else function(x)


def _where(condition: jax.Array, x: Operand, y: Operand) -> jax.Array:
    return jnp.where(condition, x, y)


def _is_number(x: Operand) -> bool:
    return isinstance(x, int | float)


def _clamp(x: jax.Array, min: Operand | None = None, max: Operand | None = None) -> jax.Array:
    """The form of torch.clamp.

    At a bound that is a number, x has gradient 0, and at a tensor's bound 1/2, as in torch from 2.14 on; at both 1, as
    in torch before 2.14.
    """
    if min is None and max is None:
        raise UnsupportedTorchOpError("calls torch.clamp without a bound, want min or max")
    if min is not None:
        x = _at_least(x, min)
    return x if max is None else _at_most(x, max)


# Before torch 2.14, clamp, fmin and fmax give the whole gradient of a tie to their first argument.
_TIES_SPLIT = torch.__version__ >= (2, 14)


def _at_least(x: jax.Array, bound: Operand) -> jax.Array:
    if _TIES_SPLIT:
        return jnp.where(x <= bound, bound, x) if _is_number(bound) else jnp.maximum(x, bound)
    return jnp.where((x < bound) | jnp.isnan(bound), bound, x)


def _at_most(x: jax.Array, bound: Operand) -> jax.Array:
    if _TIES_SPLIT:
        return jnp.where(x >= bound, bound, x) if _is_number(bound) else jnp.minimum(x, bound)
    return jnp.where((x > bound) | jnp.isnan(bound), bound, x)


def _limited(x: jax.Array, low: float, high: float) -> jax.Array:
    """x limited to low ... high. At both ends x has gradient 0, as in torch's functions that limit an input."""
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def _abs(x: jax.Array) -> jax.Array:
    """The form of torch.abs. Its gradient at 0 is 0, as in torch."""
    return x * jnp.sign(x)


def _softplus(x: jax.Array, beta: float = 1.0, threshold: float = 20.0) -> jax.Array:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(scaled, threshold))) / beta)


def _divide(x: jax.Array, y: Operand, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    if rounding_mode == "trunc":
        whole = _is_whole(x) and _is_whole(y)
        return lax.div(*jnp.broadcast_arrays(*_promoted(x, y))) if whole else jnp.trunc(jnp.true_divide(x, y))
    raise UnsupportedTorchOpError(f"rounding_mode: got {rounding_mode!r}, want None, 'floor' or 'trunc'")


def _promoted(x: Operand, y: Operand) -> tuple[jax.Array, jax.Array]:
    dtype = jnp.result_type(x, y)
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def _add(x: jax.Array, y: Operand, alpha: float = 1) -> jax.Array:
    return x + (y if alpha == 1 else alpha * y)


def _subtract(x: jax.Array, y: Operand, alpha: float = 1) -> jax.Array:
    return _add(x, y, -alpha)


def _power(x: jax.Array, exponent: Operand) -> jax.Array:
    if isinstance(exponent, int) and not isinstance(exponent, bool) and hasattr(x, "dtype") and exponent >= 0:
        return x**exponent
    return jnp.power(x, exponent)


def _round(x: jax.Array, decimals: int = 0) -> jax.Array:
    return x if _is_whole(x) else jnp.round(x, decimals)


def _gelu(x: jax.Array, approximate: str = "none") -> jax.Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _hardtanh(x: jax.Array, min_val: float = -1.0, max_val: float = 1.0) -> jax.Array:
    return _limited(x, min_val, max_val)


def _hardsigmoid(x: jax.Array) -> jax.Array:
    return _limited(x + 3.0, 0.0, 6.0) / 6.0


def _leaky_relu(x: jax.Array, negative_slope: float = 0.01) -> jax.Array:
    return jnp.where(x > 0, x, x * negative_slope)


def _threshold(x: jax.Array, threshold: float, value: float) -> jax.Array:
    return jnp.where(x > threshold, x, value)


def _below(x: jax.Array) -> jax.Array:
    """min(x, 0), for activations that use exp(x) or expm1(x) only where x <= 0. Its gradient at 0 is 1.

    With x itself, exp would overflow for large x, and the activation's gradient there would be NaN.
    """
    return jnp.where(x > 0, 0.0, x)


def _elu(x: jax.Array, alpha: float = 1.0) -> jax.Array:
    return jnp.where(x > 0, x, alpha * jnp.expm1(_below(x)))


def _celu(x: jax.Array, alpha: float = 1.0) -> jax.Array:
    return jnp.where(x > 0, x, alpha * jnp.expm1(_below(x) / alpha))


def _selu(x: jax.Array) -> jax.Array:
    return 1.0507009873554805 * _elu(x, 1.6732632423543772)


def _softshrink(x: jax.Array, lambd: float = 0.5) -> jax.Array:
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, 0.0))


def _masked_fill(x: jax.Array, mask: jax.Array, value: Operand) -> jax.Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


def _lerp(x: jax.Array, end: jax.Array, weight: Operand) -> jax.Array:
    return x + weight * (end - x)


def _addcmul(x: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: float = 1) -> jax.Array:
    return x + value * (tensor1 * tensor2)


def _addcdiv(x: jax.Array, tensor1: jax.Array, tensor2: jax.Array, value: float = 1) -> jax.Array:
    return x + value * jnp.true_divide(tensor1, tensor2)


def _logit(x: jax.Array, eps: float | None = None) -> jax.Array:
    x = _floating(x)
    return special.logit(x if eps is None else _limited(x, eps, 1 - eps))


def _copysign(x: jax.Array, y: Operand) -> jax.Array:
    """The form of torch.copysign. Its gradient at x = 0 is 0, as in torch."""
    return _abs(_floating(x)) * jnp.where(jnp.signbit(_floating(y)), -1.0, 1.0)


def _isclose(x: jax.Array, y: Operand, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> jax.Array:
    return jnp.isclose(x, y, rtol, atol, equal_nan)


def _isin(elements: Operand, test_elements: Operand, assume_unique: bool = False, invert: bool = False) -> jax.Array:
    return jnp.isin(elements, test_elements, invert=invert)


def _nan_to_num(
    x: jax.Array, nan: float | None = 0.0, posinf: float | None = None, neginf: float | None = None
) -> jax.Array:
    return x if _is_whole(x) else jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


def _without_nan(function: Callable[..., jax.Array]) -> Form:
    """The form (x, y) of fmin or fmax. function: jnp.minimum or jnp.maximum. If one value is NaN, returns the other.

    Equal values share the gradient, as in torch from 2.14 on; before, x has all of it.
    """

    def form(x, y):
        found = jnp.where(jnp.isnan(x), y, jnp.where(jnp.isnan(y), x, function(x, y)))
        return found if _TIES_SPLIT else jnp.where(x == y, x, found)

    return form


def _extreme(of_two: Form, of_all: Form) -> Form:
    """The form of torch.max or torch.min, for two tensors or for all values of one tensor.

    of_two: the function of two arrays. of_all: the reduction of one array to a scalar. An axis is not supported.
    """

    def extreme(x: jax.Array, y: Operand | None = None) -> Result:
        if isinstance(y, int):
            raise UnsupportedTorchOpError("calls max or min along an axis, want amax or amin")
        return of_all(x) if y is None else of_two(x, y)

    return extreme


def _named(function: Form, *names: str) -> dict[str, Form]:
    return dict.fromkeys(names, function)


_ARITHMETIC: dict[str, Form] = {
    **_named(_add, "add", "__add__", "__radd__"),
    **_named(_subtract, "sub", "subtract"),
    **_named(binary(jnp.multiply), "mul", "multiply"),
    **_named(_divide, "div", "divide", "true_divide"),
    **{name: binary(getattr(jnp, name)) for name in ("floor_divide", "remainder", "fmod", "gcd", "lcm", "nextafter")},
    **_named(_power, "pow"),
    "float_power": lambda x, exponent: jnp.power(_floating(x), exponent),
    "rsub": lambda x, y, alpha=1: _subtract(y, x, alpha),
    **_named(lambda x: jnp.negative(x), "neg", "negative"),
    **_named(lambda x: x, "positive", "real", "conj", "conj_physical", "resolve_conj", "resolve_neg"),
    **_named(binary(jnp.equal), "eq"),
    **_named(binary(jnp.not_equal), "ne", "not_equal"),
    **_named(binary(jnp.less), "lt", "less"),
    **_named(binary(jnp.less_equal), "le", "less_equal"),
    **_named(binary(jnp.greater), "gt", "greater"),
    **_named(binary(jnp.greater_equal), "ge", "greater_equal"),
    **{name: binary(getattr(jnp, name)) for name in ("logical_and", "logical_or", "logical_xor")},
    **{name: binary(getattr(jnp, name)) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    "logical_not": lambda x: jnp.logical_not(x),
    "bitwise_not": lambda x: jnp.bitwise_not(x),
    "bitwise_left_shift": binary(jnp.left_shift),
    "bitwise_right_shift": binary(jnp.right_shift),
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "ldexp": lambda x, y: x * jnp.exp2(_floating(y)),
    "where": _where,
    "masked_fill": _masked_fill,
    **_named(_clamp, "clamp", "clip"),
    "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "minimum": binary(jnp.minimum),
    "maximum": binary(jnp.maximum),
    "min": _extreme(jnp.minimum, jnp.min),
    "max": _extreme(jnp.maximum, jnp.max),
    "fmin": _without_nan(jnp.minimum),
    "fmax": _without_nan(jnp.maximum),
    **_named(_abs, "abs", "absolute"),
    "isclose": _isclose,
    "isin": _isin,
}

_MATHEMATICS: dict[str, Form] = {
    **{name: unary(getattr(jnp, name)) for name in ("exp", "exp2", "expm1", "log", "log1p", "log2", "log10")},
    **{name: unary(getattr(jnp, name)) for name in ("tanh", "sinh", "cosh", "sin", "cos", "tan", "sqrt", "reciprocal")},
    **{f"a{name}": unary(getattr(jnp, f"arc{name}")) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{f"arc{name}": unary(getattr(jnp, f"arc{name}")) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **_named(_binary_floats(jnp.arctan2), "atan2", "arctan2"),
    **{name: unary(getattr(jnp, name)) for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit")},
    **{name: unary(getattr(jnp, name)) for name in ("rad2deg", "deg2rad", "sinc", "angle")},
    **{name: _binary_floats(getattr(jnp, name)) for name in ("hypot", "logaddexp", "logaddexp2", "heaviside")},
    **{name: _rounded(getattr(jnp, name)) for name in ("floor", "ceil", "trunc")},
    "fix": _rounded(jnp.trunc),
    "round": _round,
    "frac": lambda x: x - jnp.trunc(x),
    "frexp": lambda x: jnp.frexp(x),
    "square": lambda x: jnp.square(x),
    **_named(lambda x: jnp.sign(x), "sign", "sgn"),
    "isreal": lambda x: jnp.ones(x.shape, bool),
    "rsqrt": unary(lax.rsqrt),
    "copysign": _copysign,
    "nan_to_num": _nan_to_num,
    **_named(unary(jax.nn.sigmoid), "sigmoid", "expit"),
    **{name: unary(getattr(special, name)) for name in ("erf", "erfc", "i0", "i0e", "i1", "i1e", "entr")},
    **{name: unary(getattr(special, name)) for name in ("ndtr", "log_ndtr", "ndtri", "digamma")},
    "erfinv": unary(lax.erf_inv),
    "psi": unary(special.digamma),
    **_named(unary(special.gammaln), "lgamma", "gammaln"),
    **_named(_binary_floats(special.gammainc), "igamma", "gammainc"),
    **_named(_binary_floats(special.gammaincc), "igammac", "gammaincc"),
    **{name: _binary_floats(getattr(special, name)) for name in ("xlogy", "xlog1py", "zeta")},
    "logit": _logit,
}

_ACTIVATIONS: dict[str, Form] = {
    **_named(unary(jax.nn.log_sigmoid), "logsigmoid", "log_sigmoid"),
    "softplus": _softplus,
    "relu": lambda x: jax.nn.relu(x),
    "relu6": lambda x: _limited(x, 0.0, 6.0),
    "silu": lambda x: jax.nn.silu(x),
    "gelu": _gelu,
    "hardtanh": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x: x * _hardsigmoid(x),
    "hardshrink": lambda x, lambd=0.5: jnp.where(jnp.abs(x) <= lambd, 0.0, x),
    "softshrink": _softshrink,
    "leaky_relu": _leaky_relu,
    "prelu": lambda x, weight: jnp.where(x > 0, x, x * weight),
    **_named(_threshold, "threshold", "_threshold"),
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "softsign": lambda x: x / (1 + _abs(x)),
    "tanhshrink": lambda x: x - jnp.tanh(x),
}

FORMS: dict[str, Form] = {**_ARITHMETIC, **_MATHEMATICS, **_ACTIVATIONS, **DTYPES, **SHAPES}
