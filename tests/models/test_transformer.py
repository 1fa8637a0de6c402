"""The Transformer: its parameters by name, decoding, rematerialisation, gradients by the input, its config's checks."""

import dataclasses
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import device_info, dispatch
from jax_kernels.models import Transformer, TransformerConfig, flat_parameters

CONFIG = TransformerConfig(vocab_size=50, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48)
BATCH, LENGTH = 2, 11

forward = nnx.jit(lambda transformer, tokens: transformer(tokens))


def model(**changes):
    return Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


def tokens():
    return jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, CONFIG.vocab_size)


def plain(config, parameters, tokens):
    """The forward of the docstring, in float64 NumPy from flat_parameters alone."""
    p = {name: np.asarray(array, np.float64) for name, array in parameters.items()}
    norm = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale
    half = config.head_dim // 2

    def rotate(x):
        angles = np.arange(LENGTH)[:, None] * config.rope_theta ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
        return np.concatenate([turned.real, turned.imag], -1)

    x = p["embed"][np.asarray(tokens)]
    for i in range(config.num_layers):
        kernel = lambda name, i=i: p[f"layers.{i}.{name}.kernel"]
        h = norm(x, p[f"layers.{i}.attention_norm.scale"])
        heads = lambda name, h=h, kernel=kernel: (h @ kernel(f"attention.{name}")).reshape(
            BATCH, LENGTH, -1, config.head_dim
        )
        q, k, v = rotate(heads("q_proj")), rotate(heads("k_proj")), heads("v_proj")
        k, v = (np.repeat(y, config.num_heads // config.num_kv_heads, axis=2) for y in (k, v))
        scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(config.head_dim)
        weights = np.exp(np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -np.inf))
        out = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
        x = x + out.reshape(BATCH, LENGTH, -1) @ kernel("attention.out_proj")
        h = norm(x, p[f"layers.{i}.mlp_norm.scale"])
        gate = h @ kernel("mlp.gate_proj")
        x = x + (gate / (1 + np.exp(-gate)) * (h @ kernel("mlp.up_proj"))) @ kernel("mlp.down_proj")
    head = p["embed"].T if config.tie_embeddings else p["head.kernel"]
    return norm(x, p["final_norm.scale"]) @ head


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_matches_its_docstring(tie_embeddings):
    transformer = model(tie_embeddings=tie_embeddings)
    logits = forward(transformer, tokens())
    assert logits.dtype == jnp.float32
    want = plain(transformer.config, flat_parameters(transformer), tokens())
    np.testing.assert_allclose(logits, want, atol=5e-6)


def test_parameter_names_and_shapes():
    layer = {
        "attention_norm.scale": (32,),
        "attention.q_proj.kernel": (32, 32),
        "attention.k_proj.kernel": (32, 16),
        "attention.v_proj.kernel": (32, 16),
        "attention.out_proj.kernel": (32, 32),
        "mlp_norm.scale": (32,),
        "mlp.gate_proj.kernel": (32, 48),
        "mlp.up_proj.kernel": (32, 48),
        "mlp.down_proj.kernel": (48, 32),
    }
    want = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    want |= {"embed": (50, 32), "final_norm.scale": (32,)}
    got = flat_parameters(model())
    assert {name: array.shape for name, array in got.items()} == want
    assert {type(array) for array in got.values()} == {np.ndarray}
    assert flat_parameters(model(tie_embeddings=False))["head.kernel"].shape == (32, 50)


@pytest.mark.parametrize("chunks", [(1,) * LENGTH, (6, 1, 4)])
def test_decoding_equals_the_full_forward(chunks):
    transformer, traces = model(), []

    @nnx.jit
    def step(transformer, tokens, cache):
        traces.append(tokens.shape)
        return transformer(tokens, cache=cache)

    cache, outs, start = transformer.init_cache(BATCH, 16), [], 0
    for length in chunks:
        out, cache = step(transformer, tokens()[:, start : start + length], cache)
        outs.append(out)
        start += length
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), forward(transformer, tokens()), atol=5e-6)
    assert len(traces) == len(set(chunks))


def test_decoding_a_ragged_batch():
    transformer, lengths = model(), (3, 7)
    step = nnx.jit(lambda transformer, tokens, cache: transformer(tokens, cache=cache))
    _, cache = step(transformer, tokens()[:, :7], transformer.init_cache(BATCH, 16))
    cache = tuple(layer.with_length(jnp.array(lengths)) for layer in cache)
    new = jnp.stack([tokens()[b, n : n + 4] for b, n in enumerate(lengths)])
    out, _ = step(transformer, new, cache)
    want = forward(transformer, tokens())
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(out[b], want[b, n : n + 4], atol=5e-6)


def test_is_causal():
    transformer = model()
    changed = tokens().at[:, 6].add(1) % CONFIG.vocab_size
    before, after = forward(transformer, tokens()), forward(transformer, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (np.abs(before - after)[:, 6:].max((0, 2)) > 1e-4).all()


@pytest.mark.slow
def test_remat_changes_no_gradient():
    """Each policy rematerialises less than the policy before it. The test counts matmuls in the compiled gradient."""
    loss = lambda transformer: (transformer(tokens()) ** 2).mean()
    gradient, products = nnx.jit(nnx.grad(loss)), {}
    want = gradient(model())
    scanned = gradient(model(scan_layers=True, remat="products"))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), scanned, want)
    for remat in (True, "attention", "products", False):
        transformer = model(remat=remat)
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), gradient(transformer), want)
        graphdef, state = nnx.split(transformer)
        compiled = jax.jit(jax.grad(lambda state: loss(nnx.merge(graphdef, state)))).lower(state).compile()  # noqa: B023
        products[remat] = compiled.as_text().count(" dot(")
    assert products[True] > products["attention"] > products["products"] >= products[False]


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_loss_is_the_cross_entropy(tie_embeddings):
    transformer = model(tie_embeddings=tie_embeddings)
    targets = jnp.roll(tokens(), -1, axis=1).at[0, 3].set(-1)

    def plain(transformer):
        logits = transformer(tokens())
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.where(targets >= 0, losses, 0).mean()

    ours = lambda transformer: transformer.losses(tokens(), targets).mean()
    (got, gradient), (want, wanted) = (nnx.jit(nnx.value_and_grad(f))(transformer) for f in (ours, plain))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), gradient, wanted)


def test_exports_with_a_symbolic_batch():
    graphdef, state = nnx.split(model())
    forward = lambda leaves, tokens: nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))(tokens)
    (batch,) = jax.export.symbolic_shape("batch")
    leaves = jax.tree.leaves(state)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    exported = jax.export.export(jax.jit(forward))(shapes, jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32))
    for rows in (1, 2):
        want = forward(leaves, tokens()[:rows])
        np.testing.assert_allclose(exported.call(leaves, tokens()[:rows]), want, atol=5e-6)


def test_embeddings_as_input():
    transformer = model()
    embeddings = transformer.embed_tokens(tokens())
    loss = lambda transformer, embeddings: (transformer(embeddings=embeddings) ** 2).mean()
    value, gradient = nnx.jit(nnx.value_and_grad(loss, argnums=1))(transformer, embeddings)
    np.testing.assert_allclose(value, (forward(transformer, tokens()) ** 2).mean(), rtol=1e-6)
    # The gradient along a direction is the slope of the loss.
    direction = jax.random.normal(jax.random.key(2), embeddings.shape) * 1e-3
    slope = (
        nnx.jit(loss)(transformer, embeddings + direction) - nnx.jit(loss)(transformer, embeddings - direction)
    ) / 2
    np.testing.assert_allclose(jnp.vdot(gradient, direction), slope, rtol=2e-2)


def test_bfloat16_keeps_float32_logits_and_parameters():
    transformer = model(dtype="bfloat16")
    logits = forward(transformer, tokens())
    assert logits.dtype == jnp.float32
    assert {array.dtype for array in flat_parameters(transformer).values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(logits, forward(model(), tokens()), atol=0.1)


@pytest.mark.parametrize(
    ("scaling", "dtype"), [(None, "bfloat16"), pytest.param("block", "float16", marks=pytest.mark.slow)]
)
def test_fp8_matmuls(scaling, dtype):
    """Parameters, and their initial values, equal the model's without 8 bits."""
    plain, eight = (model(num_layers=1, dtype=dtype, **x) for x in ({}, {"precision": "fp8", "scaling": scaling}))
    params = nnx.state(eight, nnx.Param)
    assert jax.tree.structure(params) == jax.tree.structure(nnx.state(plain, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, flat_parameters(eight), flat_parameters(plain))
    nnx.update(plain, params)

    def loss(transformer, tokens):
        logits = transformer(tokens)
        return (logits**2).mean(), logits

    gradient = nnx.jit(nnx.grad(loss, has_aux=True))
    (got, logits), (want, wanted) = (gradient(transformer, tokens()) for transformer in (eight, plain))
    assert 0 < np.linalg.norm(logits - wanted) < 0.1 * np.linalg.norm(wanted)
    got, want = nnx.to_flat_state(got), nnx.to_flat_state(want)
    for (path, a), (_, b) in zip(got, want, strict=True):
        a, b = np.asarray(a[...]), np.asarray(b[...])
        assert a.dtype == b.dtype
        assert 0 < np.linalg.norm(a - b) < 0.3 * np.linalg.norm(b), path


def test_all_block_matmuls_are_fp8():
    def program(**changes):
        graphdef, state = nnx.split(model(**changes))
        return nnx.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens)).lower(state, tokens()).as_text()

    # x and the weights of q, k, v, out, down, and of gate and up, which have the same x. All blocks are one function.
    calls = re.findall(r"-> tensor<\S+xf8E4M3FN>$", program(precision="fp8"), re.MULTILINE)
    assert len(calls) == 2 * 5 + 3
    assert "f8E4M3FN" not in program()


def test_fp8_row_decoding_equals_the_full_forward():
    transformer = model(num_layers=1, precision="fp8", scaling="row")
    step = nnx.jit(lambda transformer, tokens, cache: transformer(tokens, cache=cache))
    cache, outs = transformer.init_cache(BATCH, 16), []
    for chunk in (slice(0, 6), slice(6, LENGTH)):
        out, cache = step(transformer, tokens()[:, chunk], cache)
        outs.append(out)
    got, want = jnp.concatenate(outs, axis=1), forward(transformer, tokens())
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)  # a last bit may change an 8-bit value


def test_config_fills_its_defaults():
    config = TransformerConfig(vocab_size=256, model_dim=96, num_layers=1, num_heads=6)
    assert (config.num_kv_heads, config.head_dim, config.mlp_dim) == (6, 16, 256)
    assert TransformerConfig(256, 32, 1, 2, dtype=jnp.bfloat16).dtype == "bfloat16"
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocab_size": 0}, ValueError, "TransformerConfig.vocab_size=0 must be positive"),
        (
            {"remat": "some"},
            ValueError,
            "TransformerConfig.remat='some' must be a bool or one of 'attention', 'products'",
        ),
        (
            {"sequence_layout": "zig"},
            ValueError,
            "sequence_layout='zig' must be one of 'zigzag', 'striped', 'contiguous'",
        ),
        ({"sequence_axis": 1}, TypeError, "sequence_axis=1 must be the name of a mesh axis, or None"),
        (
            {"sequence_strategy": "ulysses"},
            ValueError,
            "sequence_strategy='ulysses' must be one of 'ring', 'halo', 'all_to_all', 'all_gather', 'auto'",
        ),
        ({"num_layers": 1.5}, TypeError, "TransformerConfig.num_layers=1.5 must be an int"),
        ({"num_heads": 5, "head_dim": None}, ValueError, "num_kv_heads=2 must divide num_heads=5"),
        ({"num_heads": 6, "head_dim": None}, ValueError, "num_heads=6 must divide model_dim=32"),
        ({"head_dim": 7}, ValueError, "TransformerConfig.head_dim=7 must be even"),
        ({"head_dim": 512}, ValueError, "TransformerConfig.head_dim=512 must be at most 256"),
        ({"mlp_dim": -1}, ValueError, "TransformerConfig.mlp_dim=-1 must be positive"),
        ({"rope_theta": 0.0}, ValueError, "TransformerConfig.rope_theta=0.0 must be positive and finite"),
        ({"norm_eps": "small"}, TypeError, "TransformerConfig.norm_eps='small' must be a number"),
        ({"tie_embeddings": 1}, TypeError, "TransformerConfig.tie_embeddings=1 must be a bool"),
        ({"dtype": "float64"}, ValueError, "TransformerConfig.dtype='float64' must be one of float32, bfloat16"),
        ({"dtype": "half a float"}, ValueError, "TransformerConfig.dtype='half a float' must be one of"),
        ({"implementation": 3}, TypeError, "TransformerConfig.implementation=3 must be a name or None"),
        (
            {"projection_implementation": 3},
            TypeError,
            "TransformerConfig.projection_implementation=3 must be a name or None",
        ),
        ({"precision": "tf32"}, ValueError, "TransformerConfig.precision='tf32' must be 'fp8' or None"),
        (
            {"precision": "fp8", "scaling": 1},
            ValueError,
            "TransformerConfig.scaling=1 must be 'tensor', 'row', 'block'",
        ),
        ({"scaling": "row"}, ValueError, "TransformerConfig.scaling='row' must be None with precision=None"),
    ],
)
def test_config_errors(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_bad_inputs_are_named():
    transformer = model()
    with pytest.raises(ValueError, match="want exactly one of them"):
        transformer()
    with pytest.raises(ValueError, match=r"tokens: got float32 \(2, 11\), want integers"):
        transformer(tokens().astype(jnp.float32))
    with pytest.raises(ValueError, match="cache: got 1 entries, want one for each of the 2 layers"):
        transformer(tokens(), cache=transformer.init_cache(BATCH, 16)[:1])
    assert np.isnan(forward(transformer, tokens().at[0, 0].set(CONFIG.vocab_size))[0]).all()


@pytest.mark.parametrize("name", ["implementation", "mlp_implementation", "projection_implementation"])
@pytest.mark.parametrize("precision", [None, "fp8"])
def test_implementation_reaches_the_matmuls(name, precision):
    with pytest.raises(ValueError, match="implementation: got 'fast'"):
        model(**{name: "fast", "precision": precision})(tokens())


def test_fp8_is_emulated_on_request():
    """A GPU without 8-bit matmuls gets a program only if "xla" is named for all matmuls."""
    names = ("implementation", "mlp_implementation", "projection_implementation")
    xla, eight = dict.fromkeys(names, "xla"), {"dtype": "bfloat16", "precision": "fp8"}
    got, want = (forward(model(**options | xla), tokens()) for options in (eight, {"dtype": "bfloat16"}))
    assert 0 < np.linalg.norm(got - want) < 0.1 * np.linalg.norm(want)
    with dispatch.on_device(device_info("a100")):
        program = lambda **options: jax.eval_shape(model(**eight | options), tokens())
        assert program(**xla).shape == (BATCH, LENGTH, CONFIG.vocab_size)
        for name in names[1:]:
            with pytest.raises(NotImplementedError, match=r"A100.* has no 8-bit matmuls"):
                program(**xla | {name: None})


def test_layers_keep_their_static_attributes():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    tokens = jnp.arange(16).reshape(2, 8) % CONFIG.vocab_size
    before = model(tokens)
    model.layers[1].attention.rope_theta = 3.0
    after = model(tokens)
    assert float(jnp.abs(after - before).max()) > 1e-2
    np.testing.assert_allclose(after, model(tokens, cache=model.init_cache(2, 8))[0], atol=1e-4)
    scanned = Transformer(dataclasses.replace(CONFIG, scan_layers=True), rngs=nnx.Rngs(0))
    scanned.layers[1].attention.rope_theta = 3.0
    with pytest.raises(ValueError, match="layers: got blocks that differ"):
        scanned(tokens)
