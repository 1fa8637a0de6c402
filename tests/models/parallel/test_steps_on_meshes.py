"""The Trainer's compiled step on meshes of CPU devices: no activation is gathered, and the loss equals one device's.

As a script it prints, for each mesh, the collectives with the shapes of their results, and the loss and gradient norm.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_kernels.models import ShardingRules, Trainer, TransformerConfig, linear_cross_entropy, make_mesh, shard_batch
from jax_kernels.testing import rms_error
from tests.support.processes import cpu_devices

BATCH, TOKENS, DIM = 8, 64, 32
CONFIG = TransformerConfig(
    vocab_size=96, model_dim=DIM, num_layers=1, num_heads=4, num_kv_heads=2, mlp_dim=80, norm_eps=1e-6
)
MESHES = {
    "tokens": {"data": 2, "sequence": 2},
    "parameters": {"fsdp": 2, "tensor": 2},
    "all": {"fsdp": 2, "sequence": 2, "tensor": 2},
}


def batch_of():
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, TOKENS)).astype(np.int32)
    return tokens, np.roll(tokens, -1, axis=1)


def one_step(axes):
    """The compiled step's collectives, the step's loss and gradient norm, and the loss after it."""
    mesh = None if axes is None else make_mesh(axes)
    trainer = Trainer(CONFIG, optax.sgd(1.0), mesh=mesh)
    batch = batch_of() if mesh is None else shard_batch(batch_of(), mesh)
    with jax.set_mesh(trainer.mesh):
        text = trainer._train.lower(trainer.state, batch).compile().as_text()
    found = trainer.train(batch)
    numbers = [float(found["loss"]), float(found["gradient_norm"]), float(trainer.evaluate(batch))]
    return {"collectives": cpu_devices.collectives_of(text), "numbers": numbers}


def losses_of(outer, spec):
    """The collectives of linear_cross_entropy and its gradients, on axes that no rule names, and the largest error."""
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((*outer, DIM), (DIM, 96)))
    targets = jnp.asarray(random.integers(-1, 96, outer), jnp.int32)

    def plain(x, w):
        logits = x @ w
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.where(targets >= 0, jax.nn.logsumexp(logits, axis=-1) - chosen, 0).sum()

    want = jax.value_and_grad(plain, (0, 1))(x, w)
    mesh = jax.make_mesh((2, 4), ("d", "t"), (jax.sharding.AxisType.Auto,) * 2)
    sharded = lambda y, spec: jax.device_put(y, jax.NamedSharding(mesh, spec))
    given = sharded(x, spec), sharded(w, jax.P()), sharded(targets, spec)
    total = lambda x, w, targets: linear_cross_entropy(x, w, targets, chunk=48).sum()
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*given).compile()
    pairs = zip(jax.tree.leaves(compiled(*given)), jax.tree.leaves(want), strict=True)
    errors = [rms_error(np.asarray(g), np.asarray(w)) for g, w in pairs]
    return {"collectives": cpu_devices.collectives_of(compiled.as_text()), "error": max(errors)}


def reduced_on(axes):
    """The collectives of a sum with its gradients over 4 tiles of tokens and of its loop, and the largest error."""
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((BATCH, TOKENS, DIM), (96, DIM)))
    targets = jnp.asarray(random.integers(-1, 96, (BATCH, TOKENS)), jnp.int32)
    weights = jnp.asarray(random.random((BATCH, TOKENS)), jnp.float32)
    options = {"transpose_w": True, "softcap": 20.0, "z_loss": 1e-2, "label_smoothing": 0.1}
    wanted = jax.value_and_grad(
        lambda x, w, t, c: (c * linear_cross_entropy(x, w, t, **options)).sum(), (0, 1)
    )(x, w, targets, weights)  # fmt: skip
    mesh, rules = make_mesh(axes), ShardingRules()
    sharded = lambda y, *names: jax.device_put(y, jax.NamedSharding(mesh, rules.spec(names, y.shape, mesh)))
    tokens = "batch", "tokens"
    given = sharded(x, *tokens), sharded(w, "vocab", "embed"), sharded(targets, *tokens), sharded(weights, *tokens)
    total = lambda x, w, t, c: linear_cross_entropy(x, w, t, weights=c, reduction="sum", chunk=24, **options)
    with jax.set_mesh(mesh):
        shardings = None, (given[0].sharding, given[1].sharding)
        compiled = jax.jit(jax.value_and_grad(total, (0, 1)), out_shardings=shardings).lower(*given).compile()
    errors = [
        rms_error(np.asarray(g), np.asarray(w))
        for g, w in zip(jax.tree.leaves(compiled(*given)), jax.tree.leaves(wanted), strict=True)
    ]
    text = compiled.as_text()
    loops = [part for part in text.split("\n\n") if "while/body" in part.split("\n")[0] or "region" in part[:40]]
    return {
        "collectives": cpu_devices.collectives_of(text),
        "in loops": cpu_devices.collectives_of("\n".join(loops)),
        "error": max(errors),
    }


REDUCED = {
    "sum on tokens": {"data": 2, "sequence": 2},
    "sum on vocabulary": {"data": 2, "tensor": 2},
    "sum on all": {"fsdp": 2, "sequence": 2, "tensor": 2},
}
LOSSES = {
    "2 axes": ((16,), jax.P(("d", "t"))),
    "3 axes": ((4, 16), jax.P("d", "t")),
    "4 axes": ((2, 2, 8), jax.P("d", None, "t")),
}


@pytest.mark.timeout(240)
def test_loss_gathers_no_activation():
    for name, found in cpu_devices.results_of(__file__, list(LOSSES)).items():
        assert {collective for collective, *_ in found["collectives"]} == {"all-reduce"}, (name, found)
        shapes = [shape for _, *shape in found["collectives"]]
        assert all(len(shape) < 2 or sorted(shape)[-2:] in ([DIM, 48], [DIM, 96]) for shape in shapes), (name, found)
        assert found["error"] < 1e-5, (name, found)


@pytest.mark.timeout(240)
def test_reduced_loss_adds_the_gradients_once():
    for name, found in cpu_devices.results_of(__file__, list(REDUCED)).items():
        assert found["error"] < 1e-5, (name, found)
        shapes = [shape for _, *shape in found["collectives"]]
        assert not [shape for shape in shapes if shape[-1:] and shape[-1] > DIM], (name, "exchanges logits")
        of_w = [shape for collective, *shape in found["collectives"] if len(shape) == 2 and shape[1] == DIM]
        assert of_w, (name, "adds no gradients of w")
        assert not [shape for _, *shape in found["in loops"] if shape in of_w], (name, "adds them in the loop")
        assert found["in loops"] or "tokens" in name


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", [["tokens", "parameters"], pytest.param(["all"], marks=pytest.mark.slow)])
def test_step_gathers_no_activation(names):
    done = cpu_devices.done_by(__file__, *names, limit=220, TF_CPP_MIN_LOG_LEVEL="0")
    assert "full rematerialization" not in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in names:
        gathered = [shape for collective, *shape in found[name]["collectives"] if collective == "all-gather"]
        assert not [shape for shape in gathered if len(shape) > 2], (name, gathered)  # weights have two axes
        np.testing.assert_allclose(found[name]["numbers"], found["one device"]["numbers"], rtol=2e-5)


if __name__ == "__main__":
    names = sys.argv[1:]
    if set(names) <= set(REDUCED):
        print(json.dumps({name: reduced_on(REDUCED[name]) for name in names}))
    elif set(names) <= set(LOSSES):
        print(json.dumps({name: losses_of(*LOSSES[name]) for name in names}))
    else:
        print(json.dumps({name: one_step(MESHES.get(name)) for name in (*names, "one device")}))
