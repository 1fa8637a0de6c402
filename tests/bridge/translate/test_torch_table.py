"""The forms of torch's functions: values and slopes equal torch's, and every pointwise function is listed or named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from jax_kernels.bridge.translate import torch_to_jnp
from jax_kernels.bridge.translate.torch_table import FORMS

# Pointwise functions of torch without a form, as jax.scipy has none, or as their result is no tensor of scalars.
WITHOUT = {
    *("complex", "polar", "view_as_complex", "frexp", "equal", "polygamma", "mvlgamma", "nextafter", "special_zeta"),
    *("special_airy_ai", "special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1"),
    *(f"special_{x}_polynomial_{y}" for x, of in (("chebyshev", "tuvw"), ("laguerre", "l"), ("legendre", "p"))
      for y in of),
    *(f"special_shifted_chebyshev_polynomial_{x}" for x in "tuvw"),
    *("special_hermite_polynomial_h", "special_hermite_polynomial_he", "special_spherical_bessel_j0"),
    *(f"special_{x}modified_bessel_{y}" for x in ("", "scaled_") for y in ("i0", "i1", "k0", "k1")),
    *("special_erfcx", "rand_like", "randn_like", "randint_like", "bernoulli", "dropout", "rrelu", "glu"),
}  # fmt: skip
POINTS = torch.tensor([-2.6, -1.3, -0.45, 0.2, 0.7, 1.6, 2.9])
POSITIVE, WITHIN = POINTS.abs() + 0.1, POINTS / 3.1
UNARY = {
    POINTS: """exp exp2 expm1 tanh sinh cosh sin cos tan atan asinh arctan arcsinh erf erfc sigmoid relu silu gelu elu
        celu selu mish relu6 hardtanh hardsigmoid hardswish leaky_relu softplus logsigmoid softsign tanhshrink
        hardshrink softshrink square abs absolute neg negative sign sgn floor ceil trunc fix frac round reciprocal
        sinc deg2rad rad2deg nan_to_num isnan isinf isfinite isposinf isneginf signbit positive i0 logical_not
        special.i0e special.i1 special.i1e special.ndtr special.log_ndtr special.expit zeros_like ones_like isreal
        angle detach clone""",
    POSITIVE: "log log2 log10 log1p sqrt rsqrt lgamma digamma special.entr special.gammaln special.psi acosh arccosh",
    WITHIN: "asin acos atanh arcsin arccos arctanh erfinv special.erfinv",
    WITHIN.abs(): "logit special.ndtri special.logit",
}
BINARY = """add sub subtract mul multiply div divide true_divide floor_divide remainder fmod maximum minimum fmax fmin
    max min eq ne lt le gt ge not_equal less less_equal greater greater_equal atan2 arctan2 hypot logaddexp logaddexp2
    copysign logical_and logical_or logical_xor isclose rsub heaviside ldexp"""
WHOLE = """bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm add sub mul remainder fmod
    floor_divide eq lt maximum"""
CALLS = {
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.5),
    "addcdiv": lambda x, y: x.addcdiv(y, y * y + 1, value=2),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3) + x.lerp(y, y),
    "clamp": lambda x, y: torch.clamp(x, -1, 1) + x.clamp(min=y) + x.clip(max=0.5) + x.clamp_min(0) + x.clamp_max(1),
    "where": lambda x, y: (
        torch.where(x > y, x, 2.0) + x.where(y > 0, y)
        + torch.where(input=x, condition=x > 0, other=y)
    ),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -3.0),
    "pow": lambda x, y: x**2 + x.pow(3) + 2.0**y + torch.pow(x.abs() + 1, y) + torch.pow(x, exponent=2),
    "alpha": lambda x, y: torch.add(x, y, alpha=2) - torch.sub(x, y, alpha=3) + torch.add(input=x, other=y),
    "rounding": lambda x, y: torch.div(x, y, rounding_mode="floor") + torch.div(x, y, rounding_mode="trunc"),
    "round": lambda x, y: torch.round(x, decimals=1) + torch.special.round(y),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 1) + torch.special.xlog1py(x, y.abs()),
    "gamma": lambda x, y: torch.special.gammainc(x.abs() + 1, y.abs()) + torch.igammac(x.abs() + 1, y.abs()),
    "options": lambda x, y: (
        functional.gelu(x, approximate="tanh") + functional.softplus(x, beta=2) + functional.threshold(y, 0.1, 5.0)
        + functional.leaky_relu(y, 0.3) + functional.elu(x, alpha=0.5) + functional.prelu(x, torch.tensor([0.2]))
        + functional.hardtanh(x, -0.5, 0.5) + functional.relu(y, inplace=False) + torch.logit(y * 0.1 + 0.5, eps=1e-3)
    ),
    "methods in place": lambda x, y: (x * 1).add_(y).mul_(2).clamp_(-1, 1).sub_(y).tanh_(),
    "operators in place": lambda x, y: torch_in_place(x * 1, y),
    "functions in place": lambda x, y: (
        functional.relu(x * 1, inplace=True) + torch.relu_(y * 1) + functional.elu_(x
        + y)
    ),
    "conversions": lambda x, y: (
        x.half().float() + y.to(torch.bfloat16).to(x) + x.type_as(y) + (x > 0).to(y.dtype)
        + x.bool()
    ),
    "new": lambda x, y: (
        x * x.new_ones(()) + y.new_full((), 2.5) + x.new_zeros(1) + y.new_tensor([3.0])
        + x.new_ones(1, 1)[0]
    ),
    "like": lambda x, y: (
        torch.full_like(x, 3) + torch.zeros_like(y, dtype=torch.float32)
        + torch.ones_like(x, device=x.device)
    ),
    "constants": lambda x, y: (
        x * torch.tensor([2.0]) + torch.arange(3)[1] + torch.full((), 2.0)
        + torch.linspace(0, 1, 3)[1]
    ),
    "shapes": lambda x, y: (
        x.view(-1).reshape(x.shape).unsqueeze(0).squeeze(0).expand_as(y) + x.flatten() + x[None][0]
        + x[..., :]
    ),
    "sizes": lambda x, y: x * x.dim() + y.size(0) + x.numel() + len(y) + x.shape[-1] + x.ndim + x.is_floating_point(),
    "lookups": lambda x, y: (
        y[2] + x[1:3].sum() + x.take(torch.tensor([1])) + x.select(0, 2)
        + x.index_select(0, torch.tensor([0]))
    ),
    "reductions": lambda x, y: (
        x.sum() + y.mean() + x.amax() + y.min() + (x > 0).any() + torch.dot(x, y) + (x @ y)
        + x.prod()
    ),
    "stacks": lambda x, y: torch.stack([x, y]).amax(0) + torch.cat((x, y))[:7] + torch.einsum("i,i->", x, y),
    "ops": lambda x, y: torch.ops.aten.add.Tensor(x, y) + torch.ops.aten.tanh(x) + torch.ops.aten.mul(x, 2),
    "reflected": lambda x, y: 1 - x + 2 / (y + 9) + 3 % (x + 5) + 7 // (y + 9) + abs(x) + (+y) - (-x),
    "numbers of NumPy": lambda x, y: np.float32(2) * x + y * np.float64(0.5) + np.int64(1),
}  # fmt: skip


def torch_in_place(x, y):
    x += y
    x *= 2
    x -= 1
    x /= 3
    return x


def found(name):
    for home in (torch, functional, torch.Tensor):
        function = home
        for part in name.split("."):
            function = getattr(function, part, None)
        if function is not None:
            return (lambda *x: getattr(x[0], name)(*x[1:])) if home is torch.Tensor else function
    raise AssertionError(name)


def slopes_of(out, given):
    """torch's slopes; None where PyTorch has no derivative, as for floor_divide."""
    try:
        slopes = torch.autograd.grad(out.sum(), given, allow_unused=True)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        return []
    is_zero = lambda s: s is None or s._is_zerotensor()
    return [torch.zeros_like(x) if is_zero(s) else s for s, x in zip(slopes, given, strict=True)]


def both(functions, *tensors):
    """The values and the slopes of functions: {name: (ours, torch's)}. One program computes all of ours."""
    arrays = [jnp.asarray(x.numpy()) for x in tensors]
    is_float = all(x.dtype == torch.float32 for x in tensors)

    def ours(*arrays):
        results = {}
        for name, function in functions.items():
            out, pull = jax.vjp(torch_to_jnp.to_jnp(function), *arrays) if is_float else (
                torch_to_jnp.to_jnp(function)(*arrays), None
            )  # fmt: skip
            moves = is_float and jnp.issubdtype(out.dtype, jnp.floating)
            results[name] = out, pull(jnp.ones_like(out)) if moves else ()
        return results

    got, want = jax.jit(ours)(*arrays), {}
    for name, function in functions.items():
        given = [x.clone().requires_grad_(is_float) for x in tensors]
        out = function(*given)
        moves = is_float and out.requires_grad
        want[name] = out.detach(), slopes_of(out, given) if moves else []
    return got, want


def compare(got, want):
    for name, (out, slopes) in want.items():
        ours, of_ours = got[name]
        assert ours.dtype == (np.int32 if out.dtype == torch.int64 else out.numpy().dtype), name
        np.testing.assert_allclose(ours, out.numpy(), atol=2e-5, rtol=2e-5, err_msg=name)
        for x, y in zip(of_ours, slopes, strict=False):
            np.testing.assert_allclose(x, y.numpy(), atol=1e-4, rtol=1e-4, err_msg=f"the slope of {name}")


def test_unary_functions():
    for points, names in UNARY.items():
        compare(*both({name: found(name) for name in names.split()}, points))


def test_binary_functions():
    compare(*both({name: found(name) for name in BINARY.split()}, POINTS, POINTS.flip(0) * 0.9))


def test_integer_functions():
    x, y = torch.tensor([7, -9, 12, 0, 5], dtype=torch.int32), torch.tensor([2, 4, 3, 1, 6], dtype=torch.int32)
    compare(*both({name: found(name) for name in WHOLE.split()}, x, y))
    more = {
        name: found(name)
        for name in [
            "floor",
            "ceil",
            "trunc",
            "round",
            "abs",
            "neg",
            "sign",
            "square",
            "exp",
            "sqrt",
            "sigmoid",
            "bitwise_not",
        ]
    }
    compare(*both(more, y))
    operators = {
        "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        "shift": lambda x, y: (x >> y) + (x << 1),
        "divide": lambda x, y: x / y,
        "power": lambda x, y: x**2 + 2**y,
    }
    compare(*both(operators, x, y))


def test_calls():
    compare(*both(CALLS, POINTS, POINTS.flip(0) * 0.9))


def test_ties_split_the_gradient_as_in_torch():
    x = torch.tensor([-1.0, 0.0, 0.0, 1.0, 2.0])
    names = [
        "relu",
        "abs",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "copysign",
        "hardshrink",
        "softshrink",
        "hardtanh",
        "relu6",
    ]
    calls = {name: found(name) for name in names}
    one = {name: f for name, f in calls.items() if name not in ("maximum", "minimum", "fmax", "fmin", "copysign")}
    compare(*both(one | {"clamp": lambda x: torch.clamp(x, 0.0, 1.0)}, x))
    two = {name: f for name, f in calls.items() if name not in one}
    compare(*both(two, x, x.clone()))


def pointwise():
    """The names of torch's pointwise functions, according to torch's own tags."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket) or name.startswith("_") or "backward" in name:
            continue
        if any(torch.Tag.pointwise in getattr(packet, x).tags for x in packet.overloads()):
            yield name.strip("_")


def test_every_pointwise_function_is_listed():
    names = set(pointwise())
    assert len(names) > 100
    missing = {x for x in names if x not in FORMS and x.removeprefix("special_") not in FORMS}
    assert missing <= WITHOUT, sorted(missing - WITHOUT)
    for name in ("erfcx", "bessel_j0", "airy_ai", "modified_bessel_k0"):
        with pytest.raises(torch_to_jnp.UnsupportedTorchOpError, match=f"uses torch's {name}, which has no form"):
            torch_to_jnp.to_jnp(getattr(torch.special, name))(jnp.float32(1.0))
