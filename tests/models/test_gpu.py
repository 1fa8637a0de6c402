"""Models on a GPU: training steps and decoding by the kernels, against plain JAX in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels.models import Trainer, Transformer, TransformerConfig, make_mesh, shard_batch

pytestmark = pytest.mark.gpu
DEVICES = jax.device_count() if jax.default_backend() == "gpu" else 0

CONFIG = TransformerConfig(
    vocab_size=1000, model_dim=256, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=512, dtype="bfloat16"
)
PLAIN = dataclasses.replace(CONFIG, dtype="float32", implementation="xla", mlp_implementation="xla")


def tokens():
    return jax.random.randint(jax.random.key(0), (2, 256), 0, CONFIG.vocab_size)


def loss_and_gradient(config):
    model = Transformer(config, rngs=nnx.Rngs(0))
    loss = lambda model: model.losses(tokens(), jnp.roll(tokens(), -1, 1)).mean()
    value, gradient = nnx.jit(nnx.value_and_grad(loss))(model)
    return float(value), [np.asarray(x, np.float64) for x in jax.tree.leaves(gradient)]


def distance(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("options", [{}, {"remat": "products"}, {"remat": "attention", "scan_layers": True}])
def test_loss_and_gradients(options):
    with jax.default_matmul_precision("highest"):
        want, wanted = loss_and_gradient(PLAIN)
    # The rounding error of bfloat16 in plain JAX is the measure.
    near, nearly = loss_and_gradient(dataclasses.replace(PLAIN, dtype="bfloat16"))
    got, gradients = loss_and_gradient(dataclasses.replace(CONFIG, **options))
    assert abs(got - want) < 1.5 * abs(near - want) + 1e-3
    for g, n, w in zip(gradients, nearly, wanted, strict=True):
        assert distance(g, w) < 1.5 * distance(n, w) + 1e-3


def test_decoding_equals_the_full_forward():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    step = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache))
    want = nnx.jit(lambda model, tokens: model(tokens))(model, tokens())
    _, cache = step(model, tokens()[:, :200], model.init_cache(2, 256))
    found, _ = step(model, tokens()[:, 200:204], cache)
    assert distance(np.asarray(found), np.asarray(want[:, 200:204])) < 2e-2
    drawn = model.generate(tokens()[:, :64], 16, 0.7, 50, key=jax.random.key(1), lengths=jnp.array([64, 40]))
    assert drawn.shape == (2, 16)
    assert ((np.asarray(drawn) >= 0) & (np.asarray(drawn) < CONFIG.vocab_size)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_trainer_memorizes_a_batch(dtype):
    config = dataclasses.replace(CONFIG, remat="products", dtype=dtype)
    trainer = Trainer(config, optax.adamw(3e-3), accumulate=2)
    batch = tokens(), jnp.roll(tokens(), -1, 1)
    losses = [float(trainer.train(batch)["loss"]) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


MESHES = [
    *({axis: 2} for axis in ("data", "fsdp", "tensor", "sequence", "pipeline")),
    {"data": 2, "sequence": 2},
    {"fsdp": 2, "tensor": 2},
]


@pytest.mark.timeout(300)
@pytest.mark.skipif(DEVICES < 2, reason=f"needs two NVIDIA GPUs, found {DEVICES}")
@pytest.mark.parametrize("axes", MESHES)
def test_mesh_trains_as_one_gpu(axes):
    """Three steps of SGD. The second and third losses depend on all earlier gradients."""
    if (count := int(np.prod(list(axes.values())))) > DEVICES:
        pytest.skip(f"needs {count} NVIDIA GPUs, found {DEVICES}")
    batch = jax.random.randint(jax.random.key(0), (4, 1024), 0, CONFIG.vocab_size)

    def losses(axes):
        size = int(np.prod(list(axes.values())))
        mesh = make_mesh(axes, devices=jax.devices()[:size])
        trainer = Trainer(dataclasses.replace(CONFIG, remat="products"), optax.sgd(1.0), mesh=mesh)
        placed = [shard_batch(x, mesh) for x in (batch, jnp.roll(batch, -1, 1))]
        return [float(trainer.train(tuple(placed))["loss"]) for _ in range(3)]

    want, got = losses({"data": 1}), losses(axes)
    assert want[2] < want[0] - 0.02
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-3)
