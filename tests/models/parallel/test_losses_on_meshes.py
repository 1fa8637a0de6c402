"""Trainer's weighted loss and delayed scales on meshes of CPU devices: equal to one device's.

As a script it prints, for each case, the loss, the gradient norm and the histories after two steps.
"""

import functools
import json
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_kernels.models import AmaxHistory, Trainer, TransformerConfig, make_mesh, next_token_loss, shard_batch
from tests.support.processes import cpu_devices

CONFIG = {"vocab_size": 96, "model_dim": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 64}
FP8 = {
    "precision": "fp8", "fp8_scaling": "delayed", "mlp_implementation": "xla", "projection_implementation": "xla",
}  # fmt: skip
# The mesh, fields of the config, and whether the batch is packed.
CASES = {
    "weights": ({"data": 2, "sequence": 2}, {"logit_softcap": 4.0}, False),
    "packed": ({"fsdp": 2, "tensor": 2}, {}, True),
    "delayed": ({"data": 2, "tensor": 2}, FP8, False),
    "float16": ({"data": 2}, {"dtype": "float16", "tie_embeddings": False}, True),
}


def batch_of(is_packed):
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, 96, (2, 8, 16)).astype(np.int32)
    targets[0, :5] = -1
    ids = np.repeat([[0, 1]], 8, axis=1).repeat(8, axis=0).astype(np.int32) if is_packed else None
    return tokens, targets, ids, random.random((8, 16)).astype(np.float32)


def two_steps(name, axes):
    _, fields, is_packed = CASES[name]
    loss = functools.partial(next_token_loss, z_loss=1e-2, label_smoothing=0.1)
    trainer = Trainer(TransformerConfig(**CONFIG | fields), optax.sgd(0.1), mesh=make_mesh(axes), loss=loss)
    batch = shard_batch(batch_of(is_packed), trainer.mesh)
    found = [trainer.train(batch) for _ in range(2)]
    histories = jax.tree.leaves(nnx.state(trainer.model, AmaxHistory))
    return [
        *([float(of["loss"]), float(of["gradient_norm"])] for of in found),
        [float(x) for history in histories for x in history[:2]],
    ]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["weights", *(pytest.param(x, marks=pytest.mark.slow) for x in list(CASES)[1:])])
def test_two_steps_equal_one_device(name):
    want, got = cpu_devices.results_of(__file__, [name])[name]
    rtol = {"delayed": 2e-2, "float16": 5e-3}.get(name, 2e-5)
    for one, other in zip(want, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=rtol)
    assert bool(want[-1]) == (name == "delayed")


if __name__ == "__main__":
    print(json.dumps({name: [two_steps(name, {"data": 1}), two_steps(name, CASES[name][0])] for name in sys.argv[1:]}))
