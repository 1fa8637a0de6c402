"""bridge.nn.MixtureOfExperts against Flax's with the same weights: results, gradients, balance, errors."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_kernels import bridge, models
from jax_kernels.bridge import weights
from jax_kernels.models import flat_parameters
from jax_kernels.testing import rms_error

DIM, WIDTH, EXPERTS = 16, 24, 5
X = np.random.default_rng(0).standard_normal((2, 7, DIM)).astype(np.float32)
CASES = {
    "softmax": {},
    "sigmoid": {"scores": "sigmoid", "weight_scale": 2.5, "balance_bias": True, "shared_experts": 1},
    "no_gate": {"gated": False, "renormalize": False, "activation": "relu"},
    "all_to_two": {"balance_bias": True},
    "fp8": {"precision": "fp8", "shared_experts": 1},
    "fp8_no_gate": {"precision": "fp8", "gated": False, "activation": "relu"},
}


def made(name):
    torch.manual_seed(0)
    module = bridge.nn.MixtureOfExperts(DIM, WIDTH, EXPERTS, 2, **CASES[name])
    if module.expert_bias is not None:
        module.expert_bias += torch.arange(EXPERTS) * (9.0 if name == "all_to_two" else 0.05)
    flax = models.MixtureOfExperts(DIM, WIDTH, EXPERTS, 2, **CASES[name], rngs=nnx.Rngs(0))
    nnx.update(flax, weights.to_flax(module))
    return module, flax


@pytest.mark.parametrize("name", CASES)
def test_equals_flax(name):
    """The result, the loads, the balance loss, and the gradients of x and of all parameters."""
    module, flax = made(name)
    x = torch.tensor(X, requires_grad=True)
    out, routing = module.with_routing(x)
    (out.sin().sum() + routing.balance_loss).backward()

    def loss(flax, x):
        out, routing = flax.with_routing(x)
        return jnp.sin(out).sum() + routing.balance_loss, (out, routing)

    (of_parameters, of_x), (want, of_flax) = nnx.jit(nnx.grad(loss, argnums=(0, 1), has_aux=True))(flax, jnp.asarray(X))
    wide = 1000 if "fp8" in name else 1  # a last bit of a value may move it to the next of 8 bits
    assert rms_error(out.detach().numpy(), np.asarray(want)) < wide * 1e-6
    assert routing.load.tolist() == of_flax.load.tolist()
    np.testing.assert_allclose(routing.balance_loss.item(), of_flax.balance_loss, rtol=1e-5)
    assert rms_error(x.grad.numpy(), np.asarray(of_x)) < wide * 1e-5
    gradients = weights.from_flax(nnx.to_pure_dict(of_parameters))
    for key, parameter in module.named_parameters():
        assert rms_error(parameter.grad.numpy(), gradients[key].numpy()) < wide * 1e-5, key
    residual = torch.ones(2, 7, DIM)
    torch.testing.assert_close(module(x, residual), out + 1)


@pytest.mark.parametrize("name", ["sigmoid", "no_gate"])
def test_weights_round_trip(name):
    """The bias too, which is a buffer and an ExpertBias."""
    module, flax = made(name)
    state = weights.from_flax(flat_parameters(flax))
    assert state.keys() == module.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())


def test_the_bias_moves_as_in_flax():
    module, flax = made("sigmoid")
    load = np.array([0, 1, 2, 3, 4], np.int32)
    module.update_bias(torch.from_numpy(load), 0.5)
    flax.update_bias(jnp.asarray(load), 0.5)
    np.testing.assert_allclose(module.expert_bias.numpy(), flax.expert_bias[...], atol=1e-7)


def test_autocast_and_bfloat16():
    module, _ = made("softmax")
    want = module(torch.from_numpy(X))
    with torch.autocast("cpu", torch.bfloat16):
        got = module(torch.from_numpy(X))
    assert got.dtype == torch.float32
    assert rms_error(got.detach().numpy(), want.detach().numpy()) < 0.02
    half = bridge.nn.MixtureOfExperts(DIM, WIDTH, EXPERTS, 2, dtype=torch.bfloat16)
    assert {name: x.dtype for name, x in half.named_parameters()}["router"] == torch.float32
    assert half(torch.from_numpy(X).bfloat16()).dtype == torch.bfloat16


CASTS = {"bfloat16": torch.bfloat16, "half": torch.float16}


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("name", CASTS)
def test_casts_keep_the_router_in_float32(name, swaps):
    """As dtype= does; with gradients, in copies, through a state dict, and back to float32."""
    module, _ = made("sigmoid")
    x, dtype = torch.from_numpy(X), CASTS[name]
    module(x).sum().backward()
    given = module.router.detach().clone(), module.expert_bias.clone()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        for cast in (getattr(module, name)(), copy.deepcopy(module).float().to(dtype), copy.deepcopy(module).cpu()):
            assert {key for key, y in cast.state_dict().items() if y.dtype != dtype} == {"router", "expert_bias"}
            assert torch.equal(cast.router, given[0])
            assert torch.equal(cast.expert_bias, given[1])
            assert cast.router.grad is None or cast.router.grad.dtype == torch.float32
            assert cast(x.to(dtype)).dtype == dtype
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    fresh = bridge.nn.MixtureOfExperts(DIM, WIDTH, EXPERTS, 2, **CASES["sigmoid"], dtype=dtype)
    fresh.load_state_dict(module.state_dict())
    out = fresh(x.to(dtype))
    torch.testing.assert_close(out, module(x.to(dtype)), rtol=0, atol=0)
    module.zero_grad()
    module(x.to(dtype)).float().sum().backward()
    assert module.router.grad.dtype == torch.float32
    module.update_bias(torch.arange(EXPERTS, dtype=torch.int32), 1e-4)
    assert not torch.equal(module.expert_bias, given[1])


def test_a_router_of_another_dtype():
    """FSDP may cast the parameters of a call, and load_state_dict(assign=True) takes the state's dtypes."""
    module, _ = made("sigmoid")
    x = torch.from_numpy(X).bfloat16()
    state = {name: y.bfloat16() for name, y in module.state_dict().items()}
    assert torch.func.functional_call(module, state, x).dtype == torch.bfloat16
    module.load_state_dict(state, assign=True)
    assert module(x).dtype == torch.bfloat16
    module.update_bias(torch.arange(EXPERTS))
    assert module.to("cpu").router.dtype == torch.float32
    with pytest.raises(TypeError, match=r"x: got dtype torch\.float64"):
        module.double()(x.double())


@pytest.mark.parametrize("name", CASES)
def test_meta_device(name):
    x = torch.from_numpy(X)
    module = made(name)[0].to("meta")
    out, routing = module.with_routing(x.to("meta"))
    assert (out.shape, out.device.type) == (x.shape, "meta")
    assert routing.load.shape == (EXPERTS,)
    cast = module.bfloat16().to_empty(device="cpu")
    assert (cast.router.dtype, cast.up_proj.dtype) == (torch.float32, torch.bfloat16)
    assert module.to("meta", torch.float16).router.is_meta


@pytest.mark.parametrize("name", CASTS)
def test_transformer_with_experts_after_a_cast(name):
    """The experts compute in their own dtype, the other layers in the config's."""
    config = {"vocab_size": 31, "model_dim": 16, "num_layers": 2, "num_heads": 2}
    config["experts"] = {"num_experts": 4, "layers": (1,), "shared_experts": 1, "bias_rate": 1e-3}
    torch.manual_seed(0)
    module = bridge.nn.Transformer(config)
    tokens = torch.arange(9)[None]
    want = module(tokens).detach()
    got = getattr(module, name)()(tokens)
    assert got.dtype == torch.float32
    assert rms_error(got.detach().numpy(), want.numpy()) < 0.05
    got.sum().backward()
    assert module.layers[1].mlp.up_proj.grad.dtype == CASTS[name]
    assert module.layers[1].mlp.router.dtype == torch.float32
    assert module.to("meta")(tokens.to("meta")).shape == want.shape


ERRORS = {
    "dim": ({"model_dim": 0}, ValueError, "model_dim: got 0, want a positive one"),
    "each": ({"experts_per_token": 6}, ValueError, "experts_per_token: got 6, want at most num_experts=5"),
    "scores": ({"scores": "tanh"}, ValueError, "scores: got 'tanh', want"),
    "scale": ({"weight_scale": 0.0}, ValueError, "weight_scale: got 0.0, want a positive"),
    "gated": ({"gated": 1}, TypeError, "gated: got 1, want a bool"),
    "shared": ({"shared_experts": 1, "gated": False}, ValueError, "shared_experts: got 1 with gated=False"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_arguments_are_named(name):
    options, error, message = ERRORS[name]
    given = {"model_dim": DIM, "mlp_dim": WIDTH, "num_experts": EXPERTS, "experts_per_token": 2} | options
    with pytest.raises(error, match=message):
        bridge.nn.MixtureOfExperts(**given)


def test_bad_inputs_are_named():
    module, _ = made("softmax")
    with pytest.raises(ValueError, match=r"x: got shape \(3, 5\), want"):
        module(torch.ones(3, 5))
    with pytest.raises(ValueError, match="balance_bias: got False"):
        module.update_bias(torch.ones(EXPERTS))
    config = {"vocab_size": 8, "model_dim": 4, "num_layers": 1, "num_heads": 1}
    for changes, message in (
        (
            {"experts": {"num_experts": 2}, "dtype": "bfloat16"},
            "config: got experts with dtype='bfloat16' and param_dtype='float32'",
        ),
        ({"experts": {"number": 2}}, r"config: got unknown fields \['number'\] of experts, want"),
        ({"experts": {"experts_per_token": 2}}, "config: got experts without num_experts"),
    ):
        with pytest.raises(ValueError, match=message):
            bridge.nn.Transformer(config | changes)


def test_transformer_with_experts_equals_flax():
    """With shared experts, an expert bias, and experts in one of the blocks."""
    experts = {"num_experts": 4, "layers": (1,), "shared_experts": 1, "bias_rate": 1e-3, "scores": "sigmoid"}
    config = models.TransformerConfig(31, 16, 2, 2, experts=experts | {"mlp_dim": 12, "weight_scale": 2.0})
    flax = models.Transformer(config, rngs=nnx.Rngs(0))
    flax.layers[1].mlp.expert_bias[...] = jnp.array([0.5, -0.5, 0.0, 0.2])
    module = bridge.nn.Transformer(config)
    module.load_flax_state(models.flat_parameters(flax))
    tokens = np.random.default_rng(0).integers(0, 31, (2, 9))
    want = np.asarray(flax(jnp.asarray(tokens)))
    np.testing.assert_allclose(module(torch.from_numpy(tokens)).detach().numpy(), want, atol=2e-5)


def test_compiles_as_one_graph_and_copies():
    module, _ = made("sigmoid")
    x = torch.from_numpy(X)
    want = module(x)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), want)
    part = torch.nn.Sequential(module)
    torch.testing.assert_close(torch.fx.symbolic_trace(part)(x), want)
    torch.testing.assert_close(copy.deepcopy(module)(x), want)
    assert module(torch.zeros(0, DIM)).shape == (0, DIM)
    assert module(torch.zeros(DIM)).shape == (DIM,)


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize("low", [-300.0, -100.0, -88.0, -3.0])
def test_low_logits_as_in_flax(scores, low):
    """Weights of scores that underflow keep their ratios, and the router's gradient is finite."""
    torch.manual_seed(0)
    module = bridge.nn.MixtureOfExperts(DIM, WIDTH, EXPERTS, 2, scores=scores)
    flax = models.MixtureOfExperts(DIM, WIDTH, EXPERTS, 2, scores=scores, rngs=nnx.Rngs(0))
    with torch.no_grad():
        module.router.copy_((low + torch.arange(EXPERTS) / 2) / DIM)
    nnx.update(flax, weights.to_flax(module))
    x = torch.ones(3, DIM)
    out = module(x)
    assert rms_error(out.detach().numpy(), np.asarray(flax(jnp.ones((3, DIM))))) < 1e-5
    out.sum().backward()
    assert module.router.grad.isfinite().all()


@pytest.mark.parametrize(
    "residual",
    [torch.ones(3, 7, DIM), torch.ones(DIM), torch.ones(7, DIM, dtype=torch.bool), torch.ones(7, DIM).double()],
    ids=["batch", "row", "bool", "float64"],
)
def test_residuals_are_like_x(residual):
    module = bridge.nn.MixtureOfExperts(DIM, WIDTH, EXPERTS, 2)
    with pytest.raises(ValueError, match=r"^residual: got torch\..*, want x's torch.float32 \(7, 16\)"):
        module(torch.ones(7, DIM), residual)


def test_batched_cotangents():
    """A Jacobian by torch.autograd.grad(is_grads_batched=True), as by one call for each row."""
    torch.manual_seed(0)
    module = bridge.nn.MixtureOfExperts(8, 6, 4, 2)
    x = torch.randn(3, 8, requires_grad=True)
    out, leaves = module(x)[0], [x, *module.parameters()]
    got = torch.autograd.grad(out, leaves, torch.eye(8), is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(out, leaves, row, retain_graph=True) for row in torch.eye(8)]
    for jacobian, each in zip(got, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(jacobian, torch.stack(each))
