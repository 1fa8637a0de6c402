"""Parameters between PyTorch, Hugging Face Llamas and Flax: equal outputs, and round trips without loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_kernels import bridge, models
from jax_kernels.bridge import weights

TOKENS = np.random.default_rng(0).integers(3, 61, (2, 19))


def pure(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def llama_config(**more):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    arguments = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    }
    return transformers.LlamaConfig(**arguments | more)


def llama(config):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_llama_to_flax_and_back(tied):
    config = llama_config(tie_word_embeddings=tied)
    theirs = llama(config)
    own = models.Transformer(models.TransformerConfig(**weights.transformer_fields(config)), rngs=nnx.Rngs(1))
    before = jax.tree.structure(pure(own))
    found = weights.to_flax(theirs)
    assert jax.tree.structure(found) == before
    nnx.update(own, found)
    got = nnx.jit(lambda model, x: model(x))(own, jnp.asarray(TOKENS))
    with torch.no_grad():
        want = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-4, rtol=1e-4)

    back = weights.from_flax(pure(own), names="llama")
    assert set(back) == set(theirs.state_dict())
    assert all(torch.equal(back[name], x) for name, x in theirs.state_dict().items())
    other = llama(config)
    torch.nn.init.zeros_(other.model.embed_tokens.weight)
    other.load_state_dict(back)
    with torch.no_grad():
        assert torch.equal(other(torch.from_numpy(TOKENS)).logits, theirs(torch.from_numpy(TOKENS)).logits)
    assert jax.tree.structure(weights.to_flax(theirs.state_dict())) == before
    assert jax.tree.structure(weights.to_flax(theirs.model.state_dict() if tied else theirs)) == before


LONGNET = {"segment_lengths": (32,), "dilation_rates": (2,), "layer_norm": True}


@pytest.mark.parametrize("options", [{"tie_embeddings": False}, {"num_kv_heads": 2}, LONGNET])
def test_library_models(options):
    fields = {"vocab_size": 61, "model_dim": 48, "num_layers": 2, "num_heads": 4} | options
    is_dilated = "segment_lengths" in options
    config = (models.LongNetConfig if is_dilated else models.TransformerConfig)(**fields)
    module = bridge.nn.Transformer(fields)
    own = (models.LongNet if is_dilated else models.Transformer)(config, rngs=nnx.Rngs(1))
    found = weights.to_flax(module)
    assert jax.tree.structure(found) == jax.tree.structure(pure(own))
    nnx.update(own, found)
    got = nnx.jit(lambda model, x: model(x))(own, jnp.asarray(TOKENS))
    want = module(torch.from_numpy(TOKENS)).detach().numpy()
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5, rtol=0)
    for parameters in (pure(own), models.flat_parameters(own)):
        back = weights.from_flax(parameters)
        assert all(torch.equal(back[name], x) for name, x in module.state_dict().items())
        assert len(back) == len(module.state_dict())


def both(name, *args, **options):
    torch.manual_seed(0)
    module = getattr(bridge.nn, name)(*args, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module, getattr(models, name)(*args, rngs=nnx.Rngs(0), **options)


MODULES = {
    "Linear": (48, 32),
    "GatedMLP": (48, 64),
    "MixtureOfExperts": (48, 40, 6, 2),
    "LayerNorm": (48,),
    "RMSNorm": (48,),
    "DynamicMaskAttention": (48, 4),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    module, own = both(name, *MODULES[name])
    nnx.update(own, weights.to_flax(module))
    x = np.random.default_rng(1).standard_normal((2, 9, 48)).astype(np.float32)
    want = module(torch.from_numpy(x)).detach().numpy()
    # PyTorch's and Flax's RMSNorm have different epsilons, which are no parameters.
    np.testing.assert_allclose(np.asarray(own(jnp.asarray(x))), want, atol=2e-4 * max(1.0, np.abs(want).max()), rtol=0)
    back = weights.from_flax(pure(own))
    assert all(torch.equal(back[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_kept(dtype):
    module = torch.nn.Linear(5, 3, dtype=dtype)
    found = weights.to_flax(module)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(str(dtype).removeprefix("torch."))}
    back = weights.from_flax(found)
    assert back["weight"].dtype == dtype
    assert torch.equal(back["weight"], module.weight)
    with torch.no_grad():
        before = back["weight"].clone()
        module.weight.zero_()
    assert torch.equal(weights.from_flax(found)["weight"], before)


def test_errors():
    with pytest.raises(ValueError, match=r"^source: got parameters that models.Transformer lacks: layers\.0"):
        weights.to_flax(llama(llama_config(attention_bias=True)))
    for name, value in (
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}),
    ):
        with pytest.raises(ValueError, match=rf"^config\.{name}: got "):
            weights.transformer_fields(llama_config(**{name: value}))
    with pytest.raises(
        ValueError, match=r"^names: got 'gpt', want 'bridge', 'llama', 'mixtral', 'qwen3' or 'qwen3_moe'"
    ):
        weights.from_flax({}, names="gpt")
    with pytest.raises(ValueError, match=r"^parameters: got 'A', which a Llama lacks"):
        weights.from_flax({"A": np.zeros(3)}, names="llama")
    with pytest.raises(TypeError, match=r"^weight: got dtype torch\.float64, want torch\.float32"):
        weights.to_flax(torch.nn.Linear(2, 2, bias=False, dtype=torch.float64))
    for given, got in (
        (None, "builtins.NoneType, want a torch.nn.Module"),
        ({"a.weight": 3}, "builtins.int for a.weight"),
    ):
        with pytest.raises(TypeError, match=rf"^source: got {got}"):
            weights.to_flax(given)
    for given, got in (
        (None, "builtins.NoneType, want nested"),
        ({"a": {"kernel": "x"}}, r"builtins.str for a\.kernel"),
    ):
        with pytest.raises(TypeError, match=rf"^parameters: got {got}"):
            weights.from_flax(given)


@pytest.mark.parametrize("tied", [False, True])
def test_head_with_the_values_of_the_embedding(tied):
    """The config decides whether it is omitted. A state dict has no config: its head is omitted."""
    theirs = llama(llama_config(tie_word_embeddings=tied))
    with torch.no_grad():
        theirs.lm_head.weight.copy_(theirs.model.embed_tokens.weight)
    found = weights.to_flax(theirs)
    assert ("head" in found) == (not tied)
    if not tied:
        np.testing.assert_array_equal(found["head"]["kernel"].T, found["embed"])
    assert "head" not in weights.to_flax(theirs.state_dict())


def test_part_of_a_state_dict():
    """The last file of a sharded checkpoint may have a head and no embedding."""
    state = llama(llama_config()).state_dict()
    del state["model.embed_tokens.weight"]
    found = weights.to_flax(state)
    assert "embed" not in found
    np.testing.assert_array_equal(found["head"]["kernel"].T, state["lm_head.weight"].numpy())


@pytest.mark.parametrize("half", ["gate_proj", "up_proj"])
def test_experts_with_one_half_of_the_gate(half):
    with pytest.raises(ValueError, match=rf"^parameters: got 'layers\.0\.mlp\.{half}' without 'layers\.0\.mlp\."):
        weights.from_flax({"embed": np.zeros((5, 2)), f"layers.0.mlp.{half}": np.zeros((3, 2, 4))}, names="mixtral")


def test_language_model_without_an_embedding():
    with pytest.raises(ValueError, match=r"^parameters: got no 'embed\.weight', which becomes embed_tokens"):
        weights.from_flax({"final_norm.scale": np.zeros(3)}, names="llama")


UNREADABLE = {
    "meta": (lambda: torch.zeros(2, 2, device="meta"), "a meta tensor, want a dense tensor with values"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"a torch\.sparse_coo tensor, want a dense tensor with values"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_tensors_without_readable_values(kind):
    make, got = UNREADABLE[kind]
    with pytest.raises(TypeError, match=rf"^part\.weight: got {got}"):
        weights.to_flax({"part.weight": make()})


def other_config(kind, **more):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    fields = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1}
    return getattr(transformers, kind)(**fields | {"num_attention_heads": 4, "num_key_value_heads": 2} | more)


@pytest.mark.parametrize("kind", ["GraniteConfig", "HeliumConfig", "OlmoConfig", "Qwen2Config"])
def test_unsupported_models(kind):
    config = other_config(kind)
    with pytest.raises(ValueError, match=rf"^config\.model_type: got '{config.model_type}', want 'llama', 'mistral', "):
        weights.transformer_fields(config)


def test_unsupported_model_with_llama_names():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = other_config("GraniteConfig", attention_multiplier=0.5)
    with pytest.raises(ValueError, match=r"^config\.model_type: got 'granite'"):
        weights.to_flax(transformers.GraniteForCausalLM(config))


def test_mistral():
    config = other_config("MistralConfig", sliding_window=None)
    assert weights.transformer_fields(config)["num_kv_heads"] == 2
    with pytest.raises(ValueError, match=r"^config\.sliding_window: got 8"):
        weights.transformer_fields(other_config("MistralConfig", sliding_window=8))


FAMILIES = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "qwen3_moe, one dense layer": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0], "norm_topk_prob": True}
        | {"num_experts_per_tok": 2},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_to_flax_and_back(family):
    """Logits and gradients of the embeddings equal transformers'; bridge.nn.Transformer's logits, too."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    kind, more = FAMILIES[family]
    config = other_config(kind, num_hidden_layers=2, initializer_range=0.2, **more)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for parameter in theirs.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    fields = weights.transformer_fields(config)
    own = models.Transformer(models.TransformerConfig(**fields), rngs=nnx.Rngs(1))
    found = weights.to_flax(theirs)
    assert jax.tree.structure(found) == jax.tree.structure(pure(own))
    nnx.update(own, found)
    tokens = torch.from_numpy(TOKENS)
    embedded = theirs.get_input_embeddings()(tokens).detach().requires_grad_()
    want = theirs(inputs_embeds=embedded).logits
    cotangent = np.random.default_rng(1).standard_normal(want.shape).astype(np.float32)
    want.backward(torch.from_numpy(cotangent))
    embeddings = jnp.asarray(embedded.detach().numpy())
    loss = nnx.jit(nnx.value_and_grad(lambda x, m: (((y := m(embeddings=x)) * cotangent).sum(), y), has_aux=True))
    (_, logits), gradient = loss(embeddings, own)
    np.testing.assert_allclose(logits, want.detach().numpy(), atol=1e-4 * np.abs(want.detach().numpy()).max())
    of_theirs = embedded.grad.numpy()
    np.testing.assert_allclose(gradient, of_theirs, atol=2e-4 * np.abs(of_theirs).max())

    back = weights.from_flax(models.flat_parameters(own), names=family.partition(",")[0])
    assert set(back) == set(theirs.state_dict())
    assert all(torch.equal(back[name], x) for name, x in theirs.state_dict().items())
    module = bridge.nn.Transformer(own.config)
    module.load_flax_state(models.flat_parameters(own))
    np.testing.assert_allclose(module(tokens).detach(), logits, atol=1e-4 * np.abs(logits).max())
    assert jax.tree.structure(weights.to_flax(module)) == jax.tree.structure(pure(own))


def test_names_of_another_family():
    """A Llama has no experts and no norms of queries; GPT-OSS has sinks, biases and another gate."""
    with pytest.raises(ValueError, match=r"^parameters: got 'layers\.0\.mlp\.router', which a Llama lacks"):
        weights.from_flax({"layers.0.mlp.router": np.zeros((3, 2))}, names="llama")
    with pytest.raises(ValueError, match=r"^parameters: got 'layers\.0\.attention\.q_norm\.weight', which a mixtral"):
        weights.from_flax({"layers.0.attention.q_norm.scale": np.zeros(3)}, names="mixtral")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    with pytest.raises(ValueError, match=r"^config\.model_type: got 'gpt_oss', want 'llama', 'mistral'"):
        weights.transformer_fields(transformers.GptOssConfig())
    config = other_config("MixtralConfig", router_jitter_noise=0.1)
    with pytest.raises(ValueError, match=r"^config\.router_jitter_noise: got 0\.1"):
        weights.transformer_fields(config)


@pytest.mark.parametrize(("name", "value"), [("logits_scaling", 2.0), ("attention_multiplier", 0.1)])
def test_config_fields_that_change_the_model(name, value):
    config = llama_config()
    setattr(config, name, value)
    with pytest.raises(ValueError, match=rf"^config\.{name}: got "):
        weights.transformer_fields(config)


ALONE = {
    "MultiheadDilatedAttention": (
        lambda: bridge.nn.MultiheadDilatedAttention(32, 4, (8,), (1,)), "^source: got a MultiheadDilatedAttention"
    ),
    "MultiheadAttention": (
        lambda: bridge.nn.MultiheadAttention(16, 2),
        "^source: got a MultiheadAttention, which jax_kernels.models lacks",
    ),
    "torch's, inside": (
        lambda: torch.nn.Sequential(torch.nn.MultiheadAttention(16, 2)), r"^source\.0: got a MultiheadAttention"
    ),
    "its state dict": (lambda: torch.nn.MultiheadAttention(16, 2).state_dict(), "^source: got in_proj_weight of shape"),
    "a norm over two axes": (lambda: torch.nn.LayerNorm((4, 6)), r"^source: got a norm over \(4, 6\), want"),
    "its state": (lambda: torch.nn.LayerNorm((4, 6)).state_dict(), "^source: got bias of shape"),
    "an embedding": (lambda: torch.nn.Embedding(4, 6), "^source: got an Embedding, want it as `embed`"),
    "a convolution": (lambda: torch.nn.Conv1d(3, 4, 2), "^source: got weight of shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_modules_without_a_flax_equivalent(name):
    make, message = ALONE[name]
    with pytest.raises(ValueError, match=message):
        weights.to_flax(make())


def test_flax_model_with_more_axes():
    own = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^parameters: got key\.bias of shape|^parameters: got key\.kernel of shape"):
        weights.from_flax(pure(own))
