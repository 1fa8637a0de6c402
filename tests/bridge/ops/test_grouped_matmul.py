"""bridge.grouped_matmul against plain PyTorch: results, gradients, torch.compile, autocast, vmap and errors."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import bridge

SIZES = torch.tensor([4, 0, 7], dtype=torch.int32)


def tensors(*shapes, dtype=torch.float32, seed=0):
    random = np.random.default_rng(seed)
    return [torch.tensor(random.standard_normal(shape), dtype=dtype, requires_grad=True) for shape in shapes]


def plain(x, w, sizes, bias, activation=torch.nn.functional.silu):
    """A loop over the groups, with rows of zeros past the last group."""
    parts, start = [], 0
    for group, size in enumerate(sizes.tolist()):
        parts.append(activation(x[start : start + size] @ w[group] + bias[group]))
        start += size
    return torch.cat([*parts, torch.zeros(len(x) - start, w.shape[2])])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_results_and_gradients(dtype):
    x, w, bias = tensors((13, 8), (3, 8, 6), (3, 6))
    got = bridge.grouped_matmul(x, w, SIZES.to(dtype), bias=bias, activation="silu")
    want = plain(x, w, SIZES, bias)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    dout = torch.sin(want.detach())
    gradients = [torch.autograd.grad(y, (x, w, bias), dout) for y in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_other_sizes_share_a_program():
    x, w, bias = (y.detach() for y in tensors((13, 8), (3, 8, 6), (3, 6)))
    bridge.clear_cache()
    for sizes in ([4, 0, 7], [13, 0, 0], [1, 1, 1]):
        sizes = torch.tensor(sizes, dtype=torch.int32)
        got = bridge.grouped_matmul(x, w, sizes, bias=bias, activation="silu")
        torch.testing.assert_close(got, plain(x, w, sizes, bias), rtol=1e-5, atol=1e-5)
    assert bridge.cache_info().programs == 1


def test_transposed_weights_and_dtypes():
    x, w = tensors((13, 8), (3, 6, 8), dtype=torch.bfloat16)
    got = bridge.grouped_matmul(x, w, SIZES, transpose_w=True, out_dtype=torch.float32)
    assert got.dtype == torch.float32
    want = plain(x.float(), w.float().mT, SIZES, torch.zeros(3, 6), lambda z: z)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    dx, dw = torch.autograd.grad(got.sum(), (x, w))
    assert dx.dtype == dw.dtype == torch.bfloat16
    assert not dx[11:].any()
    assert not dw[1].any()


def test_autocast():
    x, w, bias = tensors((13, 8), (3, 8, 6), (3, 6))
    with torch.autocast("cpu", torch.bfloat16):
        got = bridge.grouped_matmul(x, w, SIZES, bias=bias, activation="silu")
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), plain(x, w, SIZES, bias), rtol=3e-2, atol=3e-2)
    got.sum().backward()
    assert w.grad.dtype == torch.float32


def test_compiled():
    x, w, bias = tensors((13, 8), (3, 8, 6), (3, 6))
    function = torch.compile(
        lambda x, w, sizes, bias: 2 * bridge.grouped_matmul(x, w, sizes + 0, bias=bias, activation="silu"),
        backend="aot_eager",
        fullgraph=True,
    )
    for sizes in (SIZES, SIZES.flip(0)):
        got, want = function(x, w, sizes, bias), 2 * plain(x, w, sizes, bias)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(y.sin().sum(), (x, w, bias)) for y in (got, want)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_vmap():
    xs, (w, bias) = tensors((2, 13, 8))[0].detach(), (y.detach() for y in tensors((3, 8, 6), (3, 6)))
    sizes = torch.stack([SIZES, SIZES.flip(0)])
    call = lambda x, sizes: bridge.grouped_matmul(x, w, sizes, bias=bias, activation="silu")
    want = torch.stack([plain(x, w, own, bias) for x, own in zip(xs, sizes, strict=True)])
    torch.testing.assert_close(torch.vmap(call)(xs, sizes), want, rtol=1e-5, atol=1e-5)


X, W = (y.detach() for y in tensors((13, 8), (3, 8, 6)))
BOTH = {
    "matmul": lambda x, **given: bridge.grouped_matmul(x, W, **given),
    "gated": lambda x, **given: bridge.grouped_gated_matmul(x, W, W, **given),
}


@pytest.mark.parametrize("name", BOTH)
def test_int64_sizes_and_indices(name):
    """As torch.bincount and torch.argsort return them; values beyond int32 count as in int64."""
    groups = torch.tensor([2, 0, 2, 0, 2, 0, 0])
    sizes, order = torch.bincount(groups, minlength=3), torch.argsort(groups, stable=True)
    assert (sizes.dtype, order.dtype) == (torch.int64, torch.int64)
    want = BOTH[name](X, group_sizes=sizes.int(), gather_indices=order.int())
    given = {"group_sizes": sizes, "gather_indices": order}
    call = lambda x, sizes, order: BOTH[name](x, group_sizes=sizes, gather_indices=order)
    for _ in range(2):
        torch.testing.assert_close(BOTH[name](X, **given), want, rtol=0, atol=0)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, *given.values()), want, rtol=0, atol=0)
    mapped = torch.vmap(call)(X[None], sizes[None], order[None])
    torch.testing.assert_close(mapped[0], want, rtol=0, atol=0)
    far = {"group_sizes": torch.tensor([4, -(2**40), 2**40]), "gather_indices": order + 2**32}
    assert not BOTH[name](X, **far).any()
    rows = BOTH[name](X, group_sizes=torch.tensor([4, -(2**40), 2**40]))
    torch.testing.assert_close(rows, BOTH[name](X, group_sizes=torch.tensor([4, 0, 9], dtype=torch.int32)))


WRONG = {
    "numpy": ({"x": X.numpy()}, TypeError, "x: got numpy.ndarray, want a torch.Tensor"),
    "sizes_list": ({"group_sizes": [4, 0, 7]}, TypeError, "group_sizes: got builtins.list, want a torch.Tensor"),
    "sizes_array": ({"group_sizes": jnp.ones(3, int)}, TypeError, "group_sizes: got jaxlib"),
    "sizes_wide": (
        {"group_sizes": SIZES.to(torch.uint64)},
        TypeError,
        "group_sizes: got dtype torch.uint64, want at most 32 bits; cast it first, with .to(torch.uint32)",
    ),
    "x_wide": (
        {"x": X.double()},
        TypeError,
        "x: got dtype torch.float64, want at most 32 bits; cast it first, with .to(torch.float32)",
    ),
    "x_int": (
        {"x": X.int()},
        TypeError,
        "x: got dtype int32, want bfloat16, float16, float32, or float8_e4m3fn or float8_e5m2 with x_scale",
    ),
    "w_bool": (
        {"w": W.bool()},
        TypeError,
        "w: got dtype bool, want bfloat16, float16, float32, or float8_e4m3fn or float8_e5m2 with w_scale",
    ),
    "sizes_float": ({"group_sizes": SIZES.float()}, TypeError, "group_sizes: got dtype float32, want int32"),
    "sizes_shape": ({"group_sizes": SIZES[:2]}, ValueError, "group_sizes: got shape (2,), want [G] = (3,)"),
    "w": ({"w": W[0]}, ValueError, "w: got shape (8, 6), want [G, K, N]"),
    "out_dtype": ({"out_dtype": torch.int8}, TypeError, "out_dtype: got torch.int8, want torch.bfloat16"),
    "precision": (
        {"precision": "int8"},
        ValueError,
        "precision: got 'int8', want 'fp32', 'tf32', 'bf16', 'fp16', 'fp8' or None",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changed, error, text = WRONG[name]
    with pytest.raises(error, match=re.escape(text)):
        bridge.grouped_matmul(**({"x": X, "w": W, "group_sizes": SIZES} | changed))


def test_8_bits():
    """The results and the gradients of x, w and bias are near the float32 call's, and show the rounding."""
    x, w, bias = tensors((13, 64), (3, 64, 16), (3, 16))
    results = []
    for precision in ("fp8", None):
        out = bridge.grouped_matmul(x, w, SIZES, bias=bias, precision=precision)
        results.append([out, *torch.autograd.grad(out, (x, w, bias), torch.sin(x @ w[0]).detach())])
    errors = [((got - want).norm() / want.norm()).item() for got, want in zip(*results, strict=True)]
    assert 0.01 < errors[0] < 0.06
    assert 0.01 < errors[1] < 0.1
    assert max(errors[2:]) < 0.01


def quantized(w, transpose_w):
    """(values, scale) of weights [G, K, N] in e4m3, for a call with this transpose_w."""
    return bridge.quantize(w.mT.contiguous() if transpose_w else w, scaling="row", axis=-1 if transpose_w else -2)


def of_8_bits(values, scale, transpose_w):
    """The weights [G, K, N] in float32 of 8-bit values and their scales."""
    wide = values.float() * scale.unsqueeze(-1 if transpose_w else -2)
    return wide.mT if transpose_w else wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_quantized_weights(dtype, transpose_w):
    """The results and the gradients of x and bias, of both ops; again from the cached call."""
    x, bias = tensors((13, 64), (3, 16), dtype=dtype)
    weights = [quantized(w.detach(), transpose_w) for w in tensors((3, 64, 16), (3, 64, 16), seed=1)]
    (w, scale), (up, up_scale) = weights
    wide = [of_8_bits(*pair, transpose_w).to(dtype) for pair in weights]
    how = {"transpose_w": transpose_w}
    scales = {"w_gate_scale": scale, "w_up_scale": up_scale}
    calls = {
        "matmul": (
            (x, bias),
            lambda: bridge.grouped_matmul(x, w, SIZES, bias=bias, activation="silu", w_scale=scale, **how),
            lambda: bridge.grouped_matmul(x, wide[0], SIZES, bias=bias, activation="silu"),
        ),
        "gated": (
            (x,),
            lambda: bridge.grouped_gated_matmul(x, w, up, SIZES, **scales, **how),
            lambda: bridge.grouped_gated_matmul(x, *wide, SIZES),
        ),
    }
    for moved, call, right in calls.values():
        want = right()
        dout = torch.sin(want.detach())
        gradients = torch.autograd.grad(want, moved, dout)
        for _ in range(2):
            got = call()
            assert got.dtype == dtype
            for y, exact in zip((got, *torch.autograd.grad(got, moved, dout)), (want, *gradients), strict=True):
                error = ((y - exact).float().norm() / exact.float().norm()).item()
                assert error < 0.1
    with torch.no_grad():
        assert ((calls["gated"][1]() - want).float().norm() / want.float().norm()).item() > 0.005


def test_quantized_weights_compiled_and_under_settings():
    """torch.compile, autocast, and a float32 setting that allows tf32."""
    (x,), (w, scale) = tensors((13, 64)), quantized(tensors((3, 64, 16))[0].detach(), False)
    call = lambda x: bridge.grouped_matmul(x, w, SIZES, w_scale=scale)
    want = call(x)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (compiled(x), want)]
    torch.testing.assert_close(*gradients)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x).dtype == torch.bfloat16
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        torch.testing.assert_close(call(x), want)
    finally:
        torch.set_float32_matmul_precision(before)


def test_quantized_rows():
    """x of 8 bits gives bfloat16, and the gradient of the bias."""
    x, (bias,) = tensors((13, 64))[0].detach(), tensors((3, 16))
    w, scale = quantized(tensors((3, 64, 16))[0].detach(), False)
    rows, x_scale = bridge.quantize(x, scaling="row")
    got = bridge.grouped_matmul(rows, w, SIZES, bias=bias, x_scale=x_scale, w_scale=scale, out_dtype=torch.float32)
    want = bridge.grouped_matmul(x, w, SIZES, bias=bias, w_scale=scale)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), bias)[0] for y in (got, want)))
    scales = {"x_scale": x_scale, "w_gate_scale": scale, "w_up_scale": scale}
    gated = bridge.grouped_gated_matmul(rows, w, w, SIZES, **scales)
    assert gated.dtype == torch.bfloat16
    plain = bridge.grouped_gated_matmul(x, w, w, SIZES, w_gate_scale=scale, w_up_scale=scale)
    torch.testing.assert_close(gated.float(), plain, rtol=1e-2, atol=1e-2)


VALUES, SCALE = quantized(W, False)
WRONG_8_BITS = {
    "none": ({"w": VALUES}, ValueError, "w_scale: got None with w of dtype float8_e4m3fn, want float32 [G, N]"),
    "unneeded": ({"w_scale": SCALE}, ValueError, "w_scale: got a scale with w of dtype float32, want None"),
    "x": (
        {"x": VALUES[0], "w": VALUES, "w_scale": SCALE},
        ValueError,
        "x_scale: got None with x of dtype float8_e4m3fn",
    ),
    "ints": (
        {"w": VALUES.view(torch.int8), "w_scale": SCALE},
        TypeError,
        "w: got dtype int8, want bfloat16, float16, float32, or float8_e4m3fn or float8_e5m2 with w_scale",
    ),
    "x_alone": (
        {"x": X.to(torch.float8_e4m3fn), "x_scale": torch.ones(13)},
        TypeError,
        "w: got dtype float32 with x of 8 bits, want 8 bits with w_scale",
    ),
    "number": ({"w": VALUES, "w_scale": 1.0}, TypeError, "w_scale: got builtins.float, want a torch.Tensor"),
    "shape": ({"w": VALUES, "w_scale": SCALE[:2]}, ValueError, "w_scale: got shape (2, 6), want (3, 6)"),
    "dtype": ({"w": VALUES, "w_scale": SCALE.half()}, TypeError, "w_scale: got float16, want float32"),
    "precision": ({"w": VALUES, "w_scale": SCALE, "precision": "bf16"}, ValueError, "precision: got 'bf16' with w of"),
}


@pytest.mark.parametrize("name", WRONG_8_BITS)
def test_wrong_8_bit_arguments(name):
    changed, error, text = WRONG_8_BITS[name]
    with pytest.raises(error, match=re.escape(text)):
        bridge.grouped_matmul(**({"x": X, "w": W, "group_sizes": SIZES} | changed))


def test_wrong_8_bit_arguments_of_a_gated_unit():
    with pytest.raises(ValueError, match=r"w_up_scale: got None with w_up of dtype float8_e4m3fn"):
        bridge.grouped_gated_matmul(X, VALUES, VALUES, SIZES, w_gate_scale=SCALE)
    with pytest.raises(TypeError, match=r"w_up: got unquantized weights, want quantized weights, as w_gate"):
        bridge.grouped_gated_matmul(X, VALUES, W, SIZES, w_gate_scale=SCALE)


def test_8_bit_weights_have_no_gradients():
    values = VALUES.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="weights of 8 bits have no gradients"):
        bridge.grouped_matmul(X, values, SIZES, w_scale=SCALE).sum().backward()
