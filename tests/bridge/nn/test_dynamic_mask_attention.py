"""bridge.nn.DynamicMaskAttention equals the Flax module."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.func import functional_call, grad, vmap

from jax_kernels import bridge, models
from jax_kernels.bridge import masks
from tests.support.cases import tiers

WIDTH, BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 32, 2, 17, 4, 2, 8
LINEARS = ("q_proj", "k_proj", "v_proj", "out_proj", "dt_proj")
SOME = (torch.rand(BATCH, KV_HEADS, LENGTH, LENGTH) < 0.6) | torch.eye(LENGTH, dtype=torch.bool)
WINDOW = masks.sliding_window(9, 3)


def both(**options):
    """(the Flax module, ours) with equal weights, like trained weights: biases differ by more than a rounding."""
    options = {"num_kv_heads": KV_HEADS, "keys_to_keep": 5} | options
    flax = models.DynamicMaskAttention(WIDTH, HEADS, rngs=nnx.Rngs(0), **options)
    flax.A[...] = jnp.linspace(0.5, -0.7, flax.num_kv_heads)
    ours = bridge.nn.DynamicMaskAttention(WIDTH, HEADS, **options)
    ours.load_state_dict(state(flax))
    return flax, ours


def state(flax):
    """The Flax module's parameters, or their gradients, by PyTorch's names."""
    as_tensor = lambda x: torch.from_numpy(np.array(x[...]))
    weights = {f"{name}.weight": as_tensor(getattr(flax, name).kernel).T for name in LINEARS}
    return weights | {"A": as_tensor(flax.A)}


def inputs():
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


CASES = {
    "causal": ({}, None),
    "without rotary": ({"use_rotary": False, "num_kv_heads": 4, "head_dim": 5}, None),
    "one key": ({"is_causal": False, "keys_to_keep": 1, "rope_theta": 500.0}, None),
    "all keys": ({"keys_to_keep": LENGTH, "num_kv_heads": 1}, None),
    "a mask": ({}, SOME),
    "a Mask of both": ({"mask": WINDOW}, masks.dense(SOME)),
    "a mask, and all keys": ({"keys_to_keep": 99, "mask": WINDOW, "is_causal": False, "implementation": "xla"}, SOME),
}


@pytest.mark.parametrize("keys_to_keep", [5, 99])
def test_nan_bias_keeps_no_key(keys_to_keep):
    flax, ours = both(keys_to_keep=keys_to_keep)
    flax.A[...] = flax.A[...].at[0].set(jnp.nan)
    ours.load_state_dict(state(flax))
    x = inputs()
    out = ours(x).detach()
    assert out.isfinite().all()
    want = nnx.jit(lambda flax, x: flax(x))(flax, x.numpy())  # eagerly, XLA would compile each operation
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("case", tiers.cases(CASES, set(list(CASES)[:1])))
def test_equals_flax_with_all_gradients(case):
    options, mask = CASES[case]
    flax, ours = both(**options)
    x, cotangent = inputs(), torch.randn(BATCH, LENGTH, WIDTH)
    in_jax = jnp.asarray(mask.numpy()) if isinstance(mask, torch.Tensor) else mask

    def loss(flax, x):
        out = flax(x, mask=in_jax)
        return (out * cotangent.numpy()).sum(), out

    (of_weights, of_x), want = nnx.jit(nnx.grad(loss, argnums=(0, 1), has_aux=True))(flax, x.numpy())
    x.requires_grad_()
    out = ours(x, mask=mask)
    np.testing.assert_allclose(out.detach().numpy(), want, atol=3e-6)
    (out * cotangent).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), of_x, atol=2e-5)
    for name, gradient in state(of_weights).items():
        mine = ours.get_parameter(name).grad
        # With one key the exact gradient is 0: only rounding errors are left.
        least = 1e-4 if ours.keys_to_keep == 1 else 0.0
        atol = max(2e-5 * float(gradient.abs().max()), least)
        torch.testing.assert_close(mine, gradient, atol=atol, rtol=1e-4)
        assert torch.count_nonzero(mine) or ours.keys_to_keep == 1  # the softmax of one key has no gradient


def test_parameters_and_initialisation():
    torch.manual_seed(0)
    module = bridge.nn.DynamicMaskAttention(256, 8, num_kv_heads=4, dtype=torch.float64)
    assert list(module.state_dict()) == ["A", *(f"{name}.weight" for name in LINEARS)]
    assert module.keys_to_keep == 2048
    assert module.dt_proj.weight.shape == (4, 128)
    assert {x.dtype for x in module.parameters()} == {torch.float64}
    before = copy.deepcopy(module.state_dict())
    module.reset_parameters()
    for name, parameter in module.named_parameters():
        assert not torch.equal(parameter, before[name])
        want = 0.02 if name == "A" else parameter.shape[1] ** -0.5
        assert 0.4 * want < float(parameter.detach().std()) < 2 * want
    assert "keys_to_keep=2048" in repr(module)


def test_dtypes_and_autocast():
    _, ours = both(keys_to_keep=99)
    want = ours(inputs()).detach()
    error = lambda out: (out.detach().float() - want).norm() / want.norm()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = ours(inputs())
    half = ours(inputs().bfloat16())
    assert mixed.dtype == half.dtype == torch.bfloat16
    assert error(mixed) < 2e-2
    assert error(half) < 2e-2
    half.float().sum().backward()
    assert {x.grad.dtype for x in ours.parameters()} == {torch.float32}


@pytest.mark.timeout(300)
def test_compiles_in_one_graph():
    torch._dynamo.reset()
    _, ours = both()
    attend = lambda x, mask: ours(x, mask=mask)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs(), SOME), attend(inputs(), SOME), atol=1e-5, rtol=0)
    with_mask = torch.compile(lambda x: ours(x, mask=masks.dense(SOME)), backend="aot_eager")
    torch.testing.assert_close(with_mask(inputs()), attend(inputs(), SOME), atol=1e-5, rtol=0)
    gradients = [
        torch.autograd.grad(f(inputs(), SOME).square().sum(), list(ours.parameters())) for f in (compiled, attend)
    ]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_vmap_of_an_ensemble():
    modules = [both()[1] for _ in range(2)]
    with torch.no_grad():
        for parameter in modules[1].parameters():
            parameter.mul_(1.3)
    stacked, _ = torch.func.stack_module_state(modules)
    loss = lambda parameters, x: functional_call(modules[0], parameters, (x,)).square().sum()
    got = vmap(grad(loss), (0, None))({name: x.detach() for name, x in stacked.items()}, inputs())
    for index, module in enumerate(modules):
        module(inputs()).square().sum().backward()
        for name, parameter in module.named_parameters():
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(got[name][index], parameter.grad, atol=2e-5 * scale, rtol=1e-4)


ERRORS = [
    ({"keys_to_keep": 0}, ValueError, "^keys_to_keep: got 0, want a positive one"),
    ({"keys_to_keep": 2.0}, TypeError, r"^keys_to_keep: got 2\.0, want an int"),
    ({"num_kv_heads": 3}, ValueError, "^num_kv_heads: got 3, want a divisor of num_heads=4"),
    ({"head_dim": 5}, ValueError, "^head_dim: got 5, want an even one"),
    ({"is_causal": 1}, TypeError, "^is_causal: got 1, want a bool"),
    ({"mask": SOME}, TypeError, "^mask: got Tensor, want a masks.Mask"),
    (
        {"mask": masks.dense(SOME[:1, :1].expand(1, 3, -1, -1))},
        ValueError,
        "^mask: got 3 heads, want 1 or num_kv_heads",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), ERRORS, ids=[case[2] for case in ERRORS])
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        bridge.nn.DynamicMaskAttention(WIDTH, HEADS, **{"num_kv_heads": KV_HEADS} | options)


def test_call_errors():
    _, module = both()
    with pytest.raises(ValueError, match=r"^x: got shape \(2, 17, 31\), want \[batch, length, 32\]"):
        module(inputs()[..., 1:])
    with pytest.raises(TypeError, match=r"^mask: got dtype torch\.int32, want torch\.bool"):
        module(inputs(), mask=SOME.int())
    with pytest.raises(ValueError, match=r"^mask: got shape \(2, 4, 17, 17\), want one broadcastable to"):
        module(inputs(), mask=torch.ones(BATCH, HEADS, LENGTH, LENGTH).bool())
    with pytest.raises(ValueError, match=r"^mask: got 4 heads, want 1 or num_kv_heads=2"):
        module(inputs(), mask=masks.dense(torch.ones(1, HEADS, LENGTH, LENGTH).bool()))
    with pytest.raises(ValueError, match=r"^model_dim: got 30 with num_heads=4, want a multiple"):
        bridge.nn.DynamicMaskAttention(30, 4)
