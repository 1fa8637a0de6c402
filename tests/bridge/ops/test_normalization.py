"""layer_norm and rms_norm on tensors against PyTorch's own: results, gradients, modules and their state dicts."""

import re

import numpy as np
import pytest
import torch
from torch.nn import functional

from jax_kernels import bridge
from jax_kernels.bridge.ops import normalization

OPS = {
    "layer_norm": (bridge.layer_norm, functional.layer_norm),
    "rms_norm": (bridge.rms_norm, functional.rms_norm),
}
MODULES = {
    "layer_norm": (bridge.nn.LayerNorm, torch.nn.LayerNorm),
    "rms_norm": (bridge.nn.RMSNorm, torch.nn.RMSNorm),
}


def tensors(*shapes, dtype=torch.float32, seed=0):
    random = np.random.default_rng(seed)
    return [torch.tensor(random.standard_normal(shape), dtype=dtype, requires_grad=True) for shape in shapes]


def close(got, want, dtype):
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        got.float(), want.float(), rtol=tolerance, atol=tolerance * float(want.detach().abs().max())
    )


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
     (torch.float32, torch.bfloat16)],
)  # fmt: skip
def test_matches_torch(name, dtype, weights):
    mine, theirs = OPS[name]
    (x,), given = tensors((3, 5, 40), dtype=dtype), tensors((40,), (40,), dtype=weights, seed=1)
    given = given if name == "layer_norm" else given[:1]
    got = mine(x, *given, eps=1e-5)
    # In float32: PyTorch wants one dtype, and on a CPU rounds the statistics of bfloat16.
    wide = [y.detach().float().requires_grad_() for y in (x, *given)]
    want = theirs(wide[0], (40,), *wide[1:], eps=1e-5)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    close(got, want, dtype)
    dout = torch.tensor(np.random.default_rng(2).standard_normal(x.shape), dtype=dtype)
    gradients = torch.autograd.grad(got, (x, *given), dout)
    for a, b, of in zip(gradients, torch.autograd.grad(want, wide, dout.float()), (x, *given), strict=True):
        assert a.dtype == of.dtype
        close(a, b, of.dtype if of.dtype == torch.bfloat16 else dtype)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_default_eps_matches_torch(name, dtype):
    """The values are so small that eps decides the result. Holds for every version of PyTorch."""
    (x,) = tensors((3, 40), dtype=dtype)
    x = (x.detach() * 1e-3).requires_grad_()
    mine, theirs = (module(40, dtype=dtype) for module in MODULES[name])
    normalization._found_eps.cache_clear()
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)
    want = theirs(x)
    close(compiled(x), want, dtype)
    close(mine(x), want, dtype)
    dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    gradients = [torch.autograd.grad(module(x), x, dout)[0] for module in (mine, theirs)]
    close(*gradients, dtype)


@pytest.mark.parametrize("name", OPS)
def test_residual(name):
    mine, theirs = OPS[name]
    x, residual = tensors((4, 24), (4, 24))
    out, total = mine(x, residual=residual, eps=1e-3)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    want = theirs(x + residual, (24,), eps=1e-3)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad((out * out + total).sum(), (x, residual))
    right = torch.autograd.grad((want * want + x + residual).sum(), (x, residual))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("shape", [40, (5, 8)])
def test_modules_match_torch(name, shape):
    mine, theirs = (module(shape) for module in MODULES[name])
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter))
    mine.load_state_dict(theirs.state_dict())
    (x,) = tensors((3, 5, 8) if shape != 40 else (3, 40))
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-5)
    out, total = mine(x, residual=x)
    torch.testing.assert_close((out, total), (theirs(x + x), x + x), rtol=1e-5, atol=1e-5)
    mine(x).square().sum().backward()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        (want,) = torch.autograd.grad(theirs(x).square().sum(), b)
        torch.testing.assert_close(a.grad, want, rtol=1e-4, atol=1e-4)


def test_gemma_and_no_parameters():
    x, scale = tensors((6, 16), (16,))
    got = bridge.rms_norm(x, scale, scale_offset=1.0, eps=1e-6)
    torch.testing.assert_close(got, functional.rms_norm(x, (16,), scale + 1, eps=1e-6), rtol=1e-5, atol=1e-5)
    module = bridge.nn.LayerNorm(16, elementwise_affine=False)
    torch.testing.assert_close(module(x), functional.layer_norm(x, (16,)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("shape", [16, (2, 8)])
def test_module_options(name, shape):
    norm, _ = OPS[name]
    given = (3, 5, 16) if shape == 16 else (3, 5, 2, 8)
    (x,) = tensors(given)
    module = MODULES[name][0](shape, 1e-3, scale_offset=1.0, implementation="xla")
    plain = MODULES[name][1](shape, 1e-3)
    torch.testing.assert_close(module(x), plain(x), rtol=1e-5, atol=1e-5)  # weight starts as 0
    with torch.no_grad():
        module.weight.copy_(tensors(given[2:], seed=1)[0])
        plain.weight.copy_(module.weight + 1)
    torch.testing.assert_close(module(x), plain(x), rtol=1e-5, atol=1e-5)
    assert "scale_offset=1.0, implementation='xla'" in repr(module)
    assert "scale_offset" not in repr(MODULES[name][0](shape))
    module.reset_parameters()
    assert not module.weight.any()

    eight_bits = MODULES[name][0](shape, quantize="e4m3")
    with torch.no_grad():
        got = eight_bits(x, residual=x)
        want = norm(x.flatten(2), torch.ones(16), residual=x.flatten(2), quantize="e4m3")
    assert [y.shape for y in got] == [x.shape, x.shape[:2], x.shape]
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.float().flatten(), theirs.float().flatten(), rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="quantize: got 'e4m3' in a call that is differentiated"):
        eight_bits(x)
    with pytest.raises(ValueError, match="implementation: got 'nothing'"):
        MODULES[name][0](shape, implementation="nothing")(x)
    with pytest.raises(ValueError, match="quantize: got 'int8', want 'e4m3' or 'e5m2', or None"):
        MODULES[name][0](shape, quantize="int8")
    with pytest.raises(ValueError, match=r"scale_offset: got 1\.0 with elementwise_affine=False"):
        MODULES[name][0](shape, elementwise_affine=False, scale_offset=1.0)


def test_under_torch_compile():
    module = bridge.nn.RMSNorm(16)
    (x,) = tensors((6, 16))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", OPS)
def test_quantized(name):
    """It is the norm in 8 bits with a scale for each row, and an operand of matmul."""
    norm, _ = OPS[name]
    (x,), (scale,), (w,) = tensors((3, 5, 64), dtype=torch.bfloat16), tensors((64,), seed=1), tensors((64, 32), seed=2)
    with torch.no_grad():
        values, scales = norm(x, scale, quantize="e4m3", eps=1e-5)
        assert (values.dtype, values.shape, scales.shape) == (torch.float8_e4m3fn, x.shape, (3, 5))
        right = norm(x.float(), scale, eps=1e-5)
        largest = right.abs().amax(-1)
        torch.testing.assert_close(scales, largest / 448, rtol=1e-5, atol=0)
        want = (right / scales[..., None]).to(torch.float8_e4m3fn)
        assert (values.float() == want.float()).float().mean() > 0.99
        w_scale = w.abs().amax(0) / 448
        w_8 = (w / w_scale).to(torch.float8_e4m3fn)
        out = bridge.matmul(values, w_8, x_scale=scales, w_scale=w_scale, out_dtype=torch.float32)
        unfused = (want.float() * scales[..., None]) @ (w_8.float() * w_scale)
        torch.testing.assert_close(out, unfused, rtol=1e-2, atol=0.05)
        *of_sum, total = norm(x, scale, residual=x, quantize="e5m2")
        assert [y.dtype for y in of_sum] == [torch.float8_e5m2, torch.float32]
        torch.testing.assert_close(total, x + x, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="quantize: got 'e4m3' in a call that is differentiated"):
        norm(x, scale, quantize="e4m3")
    with pytest.raises(ValueError, match="quantize: got 'int8', want 'e4m3', 'e5m2' or None"):
        norm(x.detach(), quantize="int8")


def test_bad_input():
    (x,) = tensors((6, 16))
    with pytest.raises(ValueError, match=re.escape("input: got shape (6, 16), want [..., 8]")):
        bridge.nn.LayerNorm(8)(x)
    with pytest.raises(ValueError, match=re.escape("scale: got shape (8,), want [N] = (16,)")):
        bridge.layer_norm(x, torch.ones(8))
    with pytest.raises(TypeError, match="float64"):
        bridge.rms_norm(x.double())
    with pytest.raises(ValueError, match=re.escape("eps: got -1.0, want a number of 0 or more")):
        bridge.rms_norm(x, eps=-1.0)
    with pytest.raises(TypeError, match=re.escape("input: got dtype torch.float64")):
        bridge.nn.LayerNorm(16)(x.double())
    for module, name in ((bridge.nn.RMSNorm((4, 8)), "x"), (bridge.nn.LayerNorm((4, 8)), "input")):
        with pytest.raises(ValueError, match=re.escape(f"residual: got shape (2, 8, 4), want {name}'s (2, 4, 8)")):
            module(torch.ones(2, 4, 8), residual=torch.ones(2, 8, 4))


@pytest.mark.parametrize("name", OPS)
def test_quantized_in_a_graph(name):
    norm, _ = OPS[name]
    x, scale = (y.detach() for y in tensors((5, 64), (64,)))
    call = lambda x: (*norm(x, scale, quantize="e4m3"), *norm(x, residual=x, quantize="e5m2"))
    for got, want in zip(torch.compile(call, backend="aot_eager", fullgraph=True)(x), call(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
