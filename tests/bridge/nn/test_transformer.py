"""The PyTorch Transformer equals the Flax Transformer."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_kernels import bridge, models
from jax_kernels.bridge.nn.layers import PlainLinear
from tests.support.cases import tiers

SHAPE = {"vocab_size": 61, "model_dim": 48, "num_layers": 2, "num_heads": 4}
CONFIGS = {
    "tied": {},
    "untied, grouped heads": {"num_kv_heads": 2, "tie_embeddings": False, "logit_softcap": 1.5},
    "head_dim and theta of its own": {"num_kv_heads": 1, "head_dim": 10, "rope_theta": 500.0, "mlp_dim": 80},
    "remat": {"remat": True, "norm_eps": 1e-3},
    "dilated": {"segment_lengths": (32,), "dilation_rates": (2,), "layer_norm": True, "gamma": 1.5},
}


def both(**fields):
    is_dilated = "segment_lengths" in fields
    config = (models.LongNetConfig if is_dilated else models.TransformerConfig)(**SHAPE | fields)
    flax = (models.LongNet if is_dilated else models.Transformer)(config, rngs=nnx.Rngs(3))
    module = bridge.nn.Transformer(config)
    module.load_flax_state(models.flat_parameters(flax))
    return flax, module


@pytest.mark.parametrize("case", tiers.cases(CONFIGS, {"untied, grouped heads", "dilated"}))
def test_logits_and_input_gradients(case):
    flax, module = both(**CONFIGS[case])
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 19))
    want = np.asarray(nnx.jit(lambda model, x: model(x))(flax, jnp.asarray(tokens)))
    got = module(torch.from_numpy(tokens))
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.detach().numpy(), want, atol=2e-5, rtol=0)

    embeddings = np.asarray(flax.embed_tokens(jnp.asarray(tokens)))
    weights = np.random.default_rng(1).standard_normal(want.shape).astype(np.float32)
    loss = lambda model, x: (model(embeddings=x) * weights).sum()
    want = nnx.jit(nnx.grad(loss, argnums=1))(flax, jnp.asarray(embeddings))
    x = torch.tensor(embeddings, requires_grad=True)
    (module(embeddings=x) * torch.from_numpy(weights)).sum().backward()
    scale = float(np.abs(want).max())
    np.testing.assert_allclose(x.grad.numpy(), np.asarray(want), atol=5e-6 * scale, rtol=0)
    assert all(parameter.grad is not None for name, parameter in module.named_parameters() if name != "embed.weight")


@pytest.mark.parametrize("scaling", [None, pytest.param("row", marks=pytest.mark.slow)])
def test_fp8_matmuls(scaling):
    flax, module = both(num_layers=1, precision="fp8", scaling=scaling)
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 19))
    want, plain = (
        np.asarray(nnx.jit(lambda model, x: model(x))(x, jnp.asarray(tokens))) for x in (flax, both(num_layers=1)[0])
    )
    got = module(torch.from_numpy(tokens))
    assert np.linalg.norm(got.detach().numpy() - want) < 0.02 * np.linalg.norm(want)  # 8-bit values may differ
    assert 0.03 * np.linalg.norm(want) < np.linalg.norm(plain - want)
    got.square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_bfloat16():
    flax, module = both(dtype="bfloat16")
    tokens = np.arange(19)[None]
    want = np.asarray(both()[0](jnp.asarray(tokens)))
    error = lambda logits: np.linalg.norm(np.asarray(logits) - want)
    got = module(torch.from_numpy(tokens))
    assert got.dtype == torch.float32
    assert error(got.detach()) <= 1.3 * error(flax(jnp.asarray(tokens)))


def test_bfloat16_parameters_load_exactly():
    flax, module = both(param_dtype="bfloat16")
    want = models.flat_parameters(flax)["layers.1.mlp.up_proj.kernel"].astype(np.float32)
    got = module.layers[1].mlp.up_proj.weight
    assert got.dtype == torch.bfloat16
    assert np.array_equal(got.detach().float().numpy().T, want)


def test_config_as_mapping():
    module = bridge.nn.Transformer(SHAPE)
    flax = models.Transformer(models.TransformerConfig(**SHAPE), rngs=nnx.Rngs(0))
    module.load_flax_state(models.flat_parameters(flax))
    std = float(PlainLinear(400, 500, torch.float32).weight.detach().std())
    assert abs(std - 400**-0.5) < 0.03 * 400**-0.5


def test_initialisation():
    """Flax's initialisation of embeddings; with gamma, MAGNETO's, which scales only value and out."""
    torch.manual_seed(0)
    shape = {"vocab_size": 100, "model_dim": 256, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 8}
    module = bridge.nn.Transformer(shape | CONFIGS["dilated"] | {"gamma": 3.0})
    assert module.embed.weight.std().item() == pytest.approx(1 / 16, rel=0.03)
    attention = module.layers[0].attention
    for name, fan_out, gain in (("q", 256, 1), ("k", 128, 1), ("v", 128, 3), ("out", 256, 3)):
        std = getattr(attention, f"{name}_proj").weight.std().item()
        assert std == pytest.approx(gain * (2 / (256 + fan_out)) ** 0.5, rel=0.03)


@pytest.mark.timeout(300)
def test_compiles_in_one_graph():
    torch._dynamo.reset()
    module = bridge.nn.Transformer(SHAPE)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    tokens = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(compiled(tokens), module(tokens), atol=1e-5, rtol=0)


def test_errors():
    module = bridge.nn.Transformer(SHAPE)
    with pytest.raises(ValueError, match=r"^tokens, embeddings: got (both|neither), want exactly one of them"):
        module()
    state = models.flat_parameters(models.Transformer(models.TransformerConfig(**SHAPE), rngs=nnx.Rngs(0)))
    before = module.embed.weight.clone()
    with pytest.raises(ValueError, match=r"missing: \['embed'\], unknown: \['emb'\]"):
        module.load_flax_state({"emb": 0, **{k: v for k, v in state.items() if k != "embed"}})
    with pytest.raises(ValueError, match=r"^state\['final_norm.scale'\]: got shape \(3,\), which does not fit"):
        module.load_flax_state({**state, "final_norm.scale": np.ones(3)})
    assert torch.equal(module.embed.weight, before)
    for config, message in (
        ({"vocab_size": 3}, "config: got no model_dim, num_layers, num_heads"),
        ({**SHAPE, "depth": 3}, r"config: got unknown fields \['depth'\]"),
        ({**SHAPE, "num_heads": 5}, "config: got num_heads=5, want a divisor of model_dim=48"),
        ({**SHAPE, "num_kv_heads": 3}, "config: got num_kv_heads=3, want a divisor of num_heads=4"),
        ({**SHAPE, "dtype": "int8"}, "config: got dtype='int8', want"),
        ({**SHAPE, "logit_softcap": 0}, "config: got logit_softcap=0, want a positive number or None"),
        ({**SHAPE, "precision": "tf32"}, "config: got precision='tf32', want 'fp8' or None"),
        ({**SHAPE, "scaling": "row"}, "config: got scaling='row' with precision=None, want None, or"),
        ({**SHAPE, "precision": "fp8", "scaling": "rows"}, "config: got scaling='rows' with precision='fp8', want"),
    ):
        with pytest.raises(ValueError, match=message):
            bridge.nn.Transformer(config)
    with pytest.raises(ValueError, match=r"^x: got head_dim 5, want an even one"):
        bridge.nn.rotary_embedding(torch.zeros(1, 2, 1, 5), torch.arange(2))


def test_token_ids_are_checked():
    model = bridge.nn.Transformer(models.TransformerConfig(vocab_size=9, model_dim=8, num_layers=1, num_heads=1))
    for tokens, message in [
        (torch.zeros(4, dtype=torch.int64), r"tokens: got torch.int64 \(4,\), want integers \[batch, length\]"),
        (torch.zeros(2, 4), r"tokens: got torch.float32 \(2, 4\), want integers"),
        (torch.tensor([[1, -1]]), "tokens: got ids from -1 to 1, want 0 to 8"),
        (torch.tensor([[1, 9]]), "tokens: got ids from 1 to 9, want 0 to 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(tokens)
    with pytest.raises(TypeError, match=r"tokens: got numpy\.ndarray, want a torch\.Tensor"):
        model(np.zeros((1, 4), np.int64))
    narrow = torch.tensor([[1, 8, 3]], dtype=torch.uint8)
    torch.testing.assert_close(model(narrow), model(narrow.long()))
    # vmap hides the values: NaN, as under torch.compile and on a GPU.
    many = torch.vmap(model._embedded)(torch.tensor([[[1, 2]], [[9, -1]]]))
    assert not many[0].isnan().any()
    assert many[1].isnan().all()


EXPERTS = {"model_dim": 16, "mlp_dim": 24, "num_experts": 4, "experts_per_token": 2}
RESET = {
    "transformer": lambda: bridge.nn.Transformer(SHAPE | {"qk_norm": True}),
    "longnet": lambda: bridge.nn.Transformer(SHAPE | CONFIGS["dilated"]),
    "experts": lambda: bridge.nn.MixtureOfExperts(*EXPERTS.values(), balance_bias=True),
    "int4": lambda: bridge.nn.QuantizedLinear(64, 8, group_size=32, scale_dtype=torch.bfloat16),
    "int8 rows": lambda: bridge.nn.QuantizedLinear(60, 8, bias=False, format="int8", scaling="row"),
    "mxfp4": lambda: bridge.nn.QuantizedLinear(60, 8, format="mxfp4"),
}


@pytest.mark.parametrize("name", RESET)
def test_reset_after_the_meta_device(name):
    """As large models are made: on the meta device, to_empty, then each module's reset_parameters."""
    with torch.device("meta"):
        module = RESET[name]()
    module = module.to_empty(device="cpu")
    for x in (*module.parameters(), *module.buffers()):
        x.data.fill_(7)
    torch.manual_seed(0)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    wanted = dict((*(made := RESET[name]()).named_parameters(), *made.named_buffers()))
    for key, x in (*module.named_parameters(), *module.named_buffers()):
        want = wanted[key]
        if want.unique().numel() <= 1 or not want.is_floating_point():  # ones of norms, zeros of biases, sizes
            torch.testing.assert_close(x, want)
        else:
            assert abs(x.std() / want.std() - 1) < 0.25, key
            assert x.mean().abs() < 0.5, key
