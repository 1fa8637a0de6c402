"""matmul, linear and Linear on tensors against PyTorch's own: results, gradients, autocast, state dicts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import jax_kernels
from jax_kernels import bridge
from jax_kernels.bridge.jax_functions.argument_names import rename
from tests.support.cases import tiers

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def tensors(*shapes, dtype=torch.float32, seed=0):
    random = np.random.default_rng(seed)
    return [torch.tensor(random.standard_normal(shape), dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_linear_with_its_epilogue(activation):
    x, weight, bias, residual = tensors((2, 5, 24), (40, 24), (40,), (2, 5, 40))
    got = bridge.linear(x, weight, bias, activation=activation, residual=residual)
    function = ACTIVATIONS.get(activation, lambda x: x)
    want = function(functional.linear(x, weight, bias)) + residual
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    given, dout = (x, weight, bias, residual), torch.sin(want.detach())
    gradients = torch.autograd.grad(got, given, dout), torch.autograd.grad(want, given, dout)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_matmul():
    x, w = tensors((2, 5, 24), (24, 40), dtype=torch.bfloat16)
    got = bridge.matmul(x, w, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ w.float(), rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(got.sum(), x)
    torch.testing.assert_close(dx, w.sum(1).expand_as(x), rtol=1e-2, atol=1e-1)


def test_module_matches_torch():
    torch.manual_seed(0)
    mine = bridge.nn.Linear(24, 40)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(24, 40)
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    (x,) = tensors((3, 24))
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-5)
    with_epilogue = bridge.nn.Linear(24, 40, activation="silu")
    with_epilogue.load_state_dict(theirs.state_dict())
    residual = torch.ones(3, 40)
    torch.testing.assert_close(
        with_epilogue(x, residual=residual), functional.silu(theirs(x)) + 1, rtol=1e-5, atol=1e-5
    )
    assert bridge.nn.Linear(4, 8, bias=False).bias is None


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_mlp(activation):
    module, (x, residual) = bridge.nn.GatedMLP(24, 40, activation=activation), tensors((2, 5, 24), (2, 5, 24))
    got = module(x, residual=residual)
    gate, up, down = (y.weight for y in (module.gate_proj, module.up_proj, module.down_proj))
    want = (ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)) @ down.T + residual
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    given = (x, gate, up, down, residual)
    gradients = [torch.autograd.grad(torch.sin(y).sum(), given) for y in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert sorted(module.state_dict()) == ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]


def test_autocast():
    module, (x,) = bridge.nn.Linear(24, 40), tensors((3, 24))
    with torch.autocast("cpu", torch.bfloat16):
        got, want = module(x), torch.nn.functional.linear(x, module.weight, module.bias)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    got.sum().backward()
    assert module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "fp8", "gated", "mlp", "mlp of 8 bits", "compiled"])
def test_wide_residual_under_autocast(kind, dtype):
    """A float32 residual stream stays float32, as in plain PyTorch."""
    (x, gate, up, down, residual), linear = tensors((6, 24), (24, 24), (24, 24), (24, 24), (6, 24)), functional.linear
    precision = "fp8" if kind in ("fp8", "mlp of 8 bits") else None
    module = bridge.nn.GatedMLP(24, 24, precision=precision)
    state = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
    run = lambda: torch.func.functional_call(module, state, (x,), {"residual": residual})
    if kind in ("linear", "fp8"):
        run = lambda: bridge.linear(x, down, residual=residual, precision=precision)
    if kind == "gated":
        run = lambda: bridge.gated_matmul(x, gate, up, transpose_w=True, residual=residual)
    if kind == "compiled":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype):
        got = run()
        hidden = x if kind in ("linear", "fp8") else functional.silu(linear(x, gate)) * linear(x, up)
        want = residual + (hidden if kind == "gated" else linear(hidden, down))
    assert got.dtype == want.dtype == torch.float32
    most = 0.15 if precision else 0.02
    assert norm_of(got - want) < most * norm_of(want - residual)
    given = {"linear": (x, down), "fp8": (x, down), "gated": (x, gate, up)}.get(kind, (x, gate, up, down))
    dout = torch.sin(want.detach())
    gradients = [torch.autograd.grad(y, (*given, residual), dout) for y in (want, got)]
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert norm_of(a - b) < most * norm_of(a)


def test_residual_with_another_dtype():
    x, w, residual = tensors((6, 24), (24, 40), (6, 40))
    with torch.autocast("cpu", torch.bfloat16):
        got = bridge.matmul(x, w, residual=residual.half())
        assert got.dtype == (x @ w + residual.half()).dtype == torch.float32
        assert bridge.matmul(x, w, residual=residual.bfloat16()).dtype == torch.bfloat16
        with pytest.raises(TypeError, match="residual: got dtype float32, want out_dtype bfloat16"):
            bridge.matmul(x, w, residual=residual, out_dtype=torch.bfloat16)
        with pytest.raises(TypeError, match=r"residual: got dtype torch.float64"):
            bridge.matmul(x, w, residual=residual.double())
    with pytest.raises(TypeError, match="residual: got dtype float32, want out_dtype bfloat16"):
        bridge.matmul(x.bfloat16(), w.bfloat16(), residual=residual)


def test_under_torch_compile():
    module, (x,) = bridge.nn.Linear(16, 8, activation="relu"), tensors((6, 16))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)


def test_bad_input():
    x, w = tensors((6, 16), (16, 4))
    with pytest.raises(ValueError, match=re.escape("weight: got shape (16, 4), want [N, K] with x's K = 16")):
        bridge.linear(x, w)
    for arguments, name in (((x.double(), w), "x"), ((x, w.double()), "weight"), ((x, w.T, w[0].double()), "bias")):
        with pytest.raises(TypeError, match=rf"^{name}: got dtype torch\.float64"):
            bridge.linear(*arguments)
    with pytest.raises(TypeError, match=r"^weight: got dtype float16, want x's dtype float32"):
        bridge.linear(x, w.T.half())
    layer = bridge.nn.Linear(16, 4)
    with pytest.raises(ValueError, match=re.escape("weight: got shape (4, 16), want [N, K] with input's K = 4")):
        layer(x[:, :4])
    for wrong, got in (
        (x.double(), "dtype torch.float64"),
        (x.to_sparse(), "layout"),
        (x.detach().numpy(), "numpy.ndarray"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^input: got {got}"):
            layer(wrong)
    with pytest.raises(ValueError, match=re.escape("activation: got 'mish', want a function or one of 'relu'")):
        bridge.matmul(x, w, activation="mish")
    with pytest.raises(TypeError, match=re.escape("out_dtype: got torch.int8, want torch.bfloat16")):
        bridge.matmul(x, w, out_dtype=torch.int8)
    with pytest.raises(TypeError, match=re.escape("transpose_w: got the argument with linear, whose weight is [N, K]")):
        bridge.linear(x, w, transpose_w=False)
    with pytest.raises(TypeError, match=r"^x: got dtype torch\.float64"):
        bridge.matmul(x.double(), w.double())


def test_renamed_arguments_keep_sizes():
    """An error's sizes, such as 128 x 128, keep their x where the argument x has another name."""
    error = ValueError("x: got one of 128 x 128, want x's [3, 4]")
    rename(error, x="input")
    assert str(error) == "input: got one of 128 x 128, want input's [3, 4]"


def norm_of(x):
    return float(x.detach().double().norm())


def in_jax(x):
    """A tensor as a jax.Array, by way of float32, which represents all narrower values."""
    return jnp.asarray(x.detach().float().numpy(), str(x.dtype).removeprefix("torch."))


def as_eight_bits(x):
    """(values, scale) of a tensor, in e4m3."""
    scale = x.detach().abs().max() / 448
    return (x.detach() / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(
    ("dtype", "scaling"),
    tiers.some_pairs(
        [torch.float32, torch.bfloat16],
        [None, "row", "block"],
        {(torch.float32, "block"), (torch.bfloat16, None), (torch.bfloat16, "row")},
    ),
)
def test_fp8_matmul_matches_jax(dtype, scaling):
    x, weight, bias, residual = tensors((2, 5, 24), (40, 24), (40,), (2, 5, 40), dtype=dtype)
    options = {"activation": "silu", "precision": "fp8", "scaling": scaling}
    got = bridge.linear(x, weight, bias, residual=residual, **options)
    gradients = torch.autograd.grad(torch.sin(got.float()).sum(), (x, weight, bias, residual))

    def loss(x, weight, bias, residual):
        out = jax_kernels.matmul(x, weight, bias=bias, residual=residual, transpose_w=True, **options)
        return jnp.sin(out.astype(jnp.float32)).sum(), out

    given = [in_jax(y) for y in (x, weight, bias, residual)]
    wanted, want = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*given)
    assert got.dtype == dtype
    for a, b in zip((got, *gradients), (want, *wanted), strict=True):
        b = torch.tensor(np.asarray(b, np.float32))
        assert norm_of(a.float() - b) <= 0.01 * norm_of(b)  # a last bit may change an 8-bit value
    exact = functional.silu(functional.linear(x, weight, bias)) + residual
    assert 0 < norm_of(got - exact) < 0.05 * norm_of(exact)


def test_fp8_given_scales():
    x, w = tensors((6, 24), (24, 40))
    (_, x_scale), (_, w_scale) = as_eight_bits(x), as_eight_bits(w)
    want = bridge.matmul(x, w, precision="fp8")
    x_scale.requires_grad_()
    for scale in (x_scale, x_scale.item()):
        got = bridge.matmul(x, w, x_scale=scale, w_scale=w_scale, precision="fp8")
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        got.sum().backward()
    assert x_scale.grad is None
    layer = bridge.nn.Linear(24, 40, bias=False, precision="fp8")
    layer.weight = torch.nn.Parameter(w.detach().T.contiguous())
    torch.testing.assert_close(layer(x, x_scale=x_scale, w_scale=w_scale), want, rtol=1e-5, atol=1e-5)
    halved = bridge.matmul(x, w, x_scale=x_scale / 2, precision="fp8")  # values above half of the largest saturate
    assert norm_of(halved - want) > 0.05 * norm_of(want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_weights_of_8_bits(scaling, dtype):
    """Weights that were rounded once give the results of a call that rounds them; x has a gradient."""
    x, weight, up = tensors((6, 24), (40, 24), (40, 24), dtype=dtype)
    known = [jax_kernels.quantize(in_jax(y), scaling=scaling, axis=-1) for y in (weight, up)]
    (w, w_scale), (of_up, up_scale) = (
        (torch.from_dlpack(y.values.view(jnp.uint8)).view(torch.float8_e4m3fn), torch.tensor(np.asarray(y.scale)))
        for y in known
    )
    given = {"precision": "fp8", "scaling": scaling, "transpose_w": True}
    want = bridge.matmul(x, weight, **given)
    (want_dx,) = torch.autograd.grad(torch.sin(want.float()).sum(), x)
    got = bridge.matmul(x, w, w_scale=w_scale, scaling=scaling, transpose_w=True)
    (dx,) = torch.autograd.grad(torch.sin(got.float()).sum(), x)
    assert got.dtype == dtype
    assert norm_of(got - want) <= 0.01 * norm_of(want)
    assert norm_of(dx - want_dx) <= 0.05 * norm_of(want_dx)
    gated = bridge.gated_matmul(
        x, w, of_up, w_gate_scale=w_scale, w_up_scale=up_scale, scaling=scaling, transpose_w=True
    )
    want = bridge.gated_matmul(x, weight, up, **given)
    assert norm_of(gated - want) <= 0.01 * norm_of(want)
    with torch.autocast("cpu", torch.bfloat16):
        assert bridge.matmul(x, w, w_scale=w_scale, scaling=scaling, transpose_w=True).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="w: got dtype float8_e4m3fn, want x's dtype"):
        bridge.matmul(x, w, transpose_w=True)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_fp8_tensors(scaling):
    x, w, up = (y.detach().to(torch.float8_e4m3fn) for y in tensors((6, 24), (40, 24), (40, 24)))
    w = w.to(torch.float8_e5m2)
    shapes = {"tensor": ((), ()), "row": ((6,), (40,)), "block": ((1, 1), (1, 1))}[scaling]
    x_scale, w_scale = (torch.rand(shape) + 0.5 for shape in shapes)
    spread = lambda scale: scale[:, None] if scaling == "row" else scale
    gate = (x.float() * spread(x_scale)) @ (w.float() * spread(w_scale)).T
    scales = {"scaling": scaling, "x_scale": x_scale, "transpose_w": True}
    got = bridge.matmul(x, w, w_scale=w_scale, **scales)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), gate, rtol=1e-2, atol=1e-5)
    got = bridge.matmul(x, w, w_scale=w_scale, out_dtype=torch.float32, **scales)
    torch.testing.assert_close(got, gate, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):  # casts no 8-bit tensor
        again = bridge.matmul(x, w, w_scale=w_scale, out_dtype=torch.float32, **scales)
    torch.testing.assert_close(again, got, rtol=0, atol=0)
    w = w.to(up.dtype)
    up_scale = 3 * w_scale.flip(0) + 1
    got = bridge.gated_matmul(x, w, up, w_gate_scale=w_scale, w_up_scale=up_scale, **scales)
    of_weights = (w, w_scale), (up, up_scale)
    gate, up = ((x.float() * spread(x_scale)) @ (y.float() * spread(scale)).T for y, scale in of_weights)
    torch.testing.assert_close(got.float(), functional.silu(gate) * up, rtol=1e-2, atol=1e-4)


def test_fp8_tensors_have_no_gradients():
    (x, w), (bias,) = (y.detach().to(torch.float8_e4m3fn) for y in tensors((6, 24), (24, 40))), tensors((40,))
    for given in ((x.clone().requires_grad_(), w, None), (x, w, bias)):
        with pytest.raises(NotImplementedError, match="matmul: arrays of 8 bits have no gradients"):
            bridge.matmul(*given[:2], bias=given[2])
        with torch.no_grad():
            bridge.matmul(*given[:2], bias=given[2])


def test_fp8_gated_mlp():
    module, (x,) = bridge.nn.GatedMLP(24, 40, precision="fp8", scaling="row"), tensors((2, 5, 24))
    got = module(x)
    gate, up, down = (y.weight for y in (module.gate_proj, module.up_proj, module.down_proj))
    want = (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert 0 < norm_of(got - want) < 0.1 * norm_of(want)
    gradients = [torch.autograd.grad(torch.sin(y).sum(), (x, gate, up, down)) for y in (got, want)]
    for a, b in zip(*gradients, strict=True):
        assert 0 < norm_of(a - b) < 0.15 * norm_of(b)


def test_fp8_autocast():
    module, (x,) = bridge.nn.Linear(24, 40, precision="fp8"), tensors((3, 24))
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x)
    x, weight, bias = (y.to(torch.bfloat16) for y in (x, module.weight, module.bias))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, bridge.linear(x, weight, bias, precision="fp8"), rtol=0, atol=0)
    got.sum().backward()
    assert module.weight.grad.dtype == torch.float32


def test_fp8_under_torch_compile():
    module, (x,) = bridge.nn.Linear(16, 8, precision="fp8", scaling="row"), tensors((6, 16))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
    gradients = [torch.autograd.grad(run(x).sum(), (x, module.weight)) for run in (compiled, module)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    (x, x_scale), (w, w_scale) = map(as_eight_bits, tensors((6, 16), (16, 8)))
    product = lambda x, x_scale: bridge.matmul(x, w, x_scale=x_scale, w_scale=w_scale)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x_scale), product(x, x_scale), rtol=0, atol=0)


def test_fp8_bad_input():
    x, w = tensors((6, 16), (16, 4))
    with pytest.raises(ValueError, match="scaling: got one without precision='fp8' or arrays of 8 bits"):
        bridge.matmul(x, w, scaling="row")
    with pytest.raises(ValueError, match="scaling: got 'rows', want 'tensor', 'row' or 'block'"):
        bridge.nn.GatedMLP(16, 4, precision="fp8", scaling="rows")(x)
    with pytest.raises(ValueError, match=re.escape("x_scale: got shape (4,), want (6,)")):
        bridge.matmul(x, w, precision="fp8", scaling="row", x_scale=torch.ones(4))
    with pytest.raises(TypeError, match="w_scale: got float16, want float32"):
        bridge.matmul(x, w, precision="fp8", scaling="row", w_scale=torch.ones(4, dtype=torch.float16))
    with pytest.raises(TypeError, match="w: got dtype float8_e4m3fn, want x's dtype float32"):
        bridge.matmul(x, w.detach().to(torch.float8_e4m3fn))


@pytest.mark.parametrize("is_gated", [False, True])
def test_mlp(is_gated):
    """With the gradients of all tensors, against torch's own functions."""
    x, up, down, gate, bias_up, bias_down = tensors((2, 5, 12), (20, 12), (8, 20), (20, 12), (20,), (8,))
    rest = {"w_gate": gate} if is_gated else {"bias_up": bias_up}
    given = [x, up, down, bias_down, *rest.values()]
    for y in given:
        y.requires_grad_()
    got = bridge.mlp(x, up, down, bias_down=bias_down, transpose_w=True, precision="fp32", **rest)
    linear = torch.nn.functional.linear
    first = linear(x, gate if is_gated else up, None if is_gated else bias_up)
    hidden = torch.nn.functional.silu(first) * (linear(x, up) if is_gated else 1)
    want = linear(hidden, down, bias_down)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    pairs = zip(torch.autograd.grad(got, given, cotangent), torch.autograd.grad(want, given, cotangent), strict=True)
    for y, right in pairs:
        torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-5)
