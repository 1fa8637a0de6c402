"""Meta tensors, builds of PyTorch for other GPUs, and calls inside of functions that JAX traces."""

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge import masks
from jax_kernels.bridge.interop import dlpack


def qkv(length, **options):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, length, 2, 8, generator=generator).to(**options).requires_grad_() for _ in range(3)]


# By name: (a call of tensors, the shapes of the tensors, the shape of the result).
SHAPES = {
    "flash_attention": (lambda *x: bridge.flash_attention(*x, is_causal=True), [(1, 24, 2, 8)] * 3, (1, 24, 2, 8)),
    "few queries": (bridge.flash_attention, [(1, 2, 2, 8), (1, 24, 2, 8), (1, 24, 2, 8)], (1, 2, 2, 8)),
    "a Mask": (lambda *x: bridge.flash_attention(*x, mask=masks.causal()), [(1, 24, 2, 8)] * 3, (1, 24, 2, 8)),
    "dilated_attention": (
        lambda *x: bridge.dilated_attention(*x, segment_lengths=[8], dilation_rates=[2]),
        [(1, 24, 2, 8)] * 3,
        (1, 24, 2, 8),
    ),
    "matmul": (bridge.matmul, [(5, 8), (8, 4)], (5, 4)),
    "rms_norm": (bridge.rms_norm, [(5, 8), (8,)], (5, 8)),
    "from_jax": (bridge.from_jax(lambda x: jnp.sum(x, axis=0)), [(5, 8)], (8,)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_meta_tensors_have_shapes_and_gradients(name):
    """The call of the second round would be cached."""
    call, shapes, shape = SHAPES[name]
    for _ in range(2):
        inputs = [torch.empty(each, device="meta", requires_grad=True) for each in shapes]
        out = call(*inputs)
        assert (out.device.type, out.shape, out.dtype) == ("meta", shape, torch.float32)
        gradients = torch.autograd.grad(out.sum(), inputs)
        assert [(x.device.type, x.shape) for x in gradients] == [("meta", x.shape) for x in inputs]
        with torch.no_grad():
            assert call(*inputs).shape == shape


def test_wrong_meta_shape_raises():
    query, key, value = (torch.empty(1, 24, 2, size, device="meta") for size in (8, 16, 8))
    with pytest.raises(ValueError, match="head_dim"):
        bridge.flash_attention(query, key, value)


def test_amd_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(RuntimeError, match=r"cuda:7, which is an AMD GPU in this build of PyTorch \(6.4\)"):
        dlpack.jax_device(torch.device("cuda", 7))


def step(length):
    """The gradients of a call that no other test makes, so that JAX traces it inside."""
    inputs = qkv(length)
    return torch.autograd.grad(bridge.flash_attention(*inputs, mask=masks.causal()).square().sum(), inputs)


@pytest.mark.parametrize(("transform", "length"), [(jax.jit, 18), (jax.grad, 20), (jax.vmap, 22)])
def test_tensors_inside_a_traced_function(transform, length):
    """The tensors are no part of the traced function."""
    found = []

    def traced(x):
        found.append(step(length))
        return jnp.sin(x)

    transform(traced)(jnp.ones(3) if transform is jax.vmap else 1.0)
    for got, want in zip(found[0], step(length), strict=True):
        torch.testing.assert_close(got, want)


def test_traced_array_is_refused():
    with pytest.raises(TypeError, match=r"query: got jax.*Tracer, want a torch.Tensor"):
        jax.jit(lambda x: bridge.flash_attention(x, x, x))(jnp.ones((1, 4, 2, 8)))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_set_mesh(kind):
    want = step(25)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    bridge.clear_cache()
    with jax.set_mesh(mesh):
        for got, each in zip(step(25), want, strict=True):
            torch.testing.assert_close(got, each)


def test_with_jit_disabled():
    want = step(14)
    with jax.disable_jit():
        for got, each in zip(step(14), want, strict=True):
            torch.testing.assert_close(got, each)
