"""Matmuls on a GPU against float64: their errors are as small as cuBLAS's, called by PyTorch."""

import pytest
import torch

from jax_kernels import bridge

pytestmark = pytest.mark.gpu
SHAPES = [(512, 1024, 4096), (16, 2048, 8192), (1000, 1536, 520)]


def operands(rows, columns, depth, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator, device="cuda")
    return normal(rows, depth).to(dtype), (normal(depth, columns) / depth**0.5).to(dtype)


def error(got, want):
    return ((got.double() - want).square().mean() / want.square().mean()).sqrt().item()


def by(implementation, *given, **options):
    """The matmul by an implementation; None if it does not serve the call."""
    try:
        return bridge.matmul(*given, implementation=implementation, **options)
    except NotImplementedError:
        return None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "tf32"])
def test_errors_match_cublas(kind, shape, monkeypatch):
    """At most 1.05 times cuBLAS's for bfloat16 and float16; 1.5 times for float32, whose sums have another order."""
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", kind == "tf32")
    x, w = operands(*shape, dtype)
    want = x.double() @ w.double()
    of_cublas = error(x @ w, want)
    options = {"precision": "tf32"} if kind == "tf32" else {}
    served = 0
    for implementation in ("mosaic_gpu", "triton", "xla", None):
        if (got := by(implementation, x, w, **options)) is not None:
            served += 1
            factor = {"float32": 1.5, "tf32": 1.5}.get(kind, 1.05)
            assert error(got, want) <= factor * of_cublas, (implementation, error(got, want), of_cublas)
    assert served >= 2


def test_fp8_errors_match_cublas():
    """Compared with torch._scaled_mm without fast sums."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit matmuls")
    x, w = (y.to(torch.float8_e4m3fn) for y in operands(512, 1024, 4096, torch.float32))
    one = torch.ones((), device="cuda")
    want = x.double() @ w.double()
    columns = w.t().contiguous().t()
    of_cublas = error(torch._scaled_mm(x, columns, one, one, out_dtype=torch.float32, use_fast_accum=False), want)
    got = bridge.matmul(x, w, x_scale=one, w_scale=one, out_dtype=torch.float32)
    assert error(got, want) <= 1.05 * of_cublas, (error(got, want), of_cublas)
