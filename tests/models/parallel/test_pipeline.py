"""pipelined on CPU devices in a process of its own, against the blocks in sequence, with gradients.

As a script it prints the errors of the result and of the gradients, and its messages for bad arguments.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_kernels.models import Trainer, TransformerConfig, make_mesh, pipelined
from jax_kernels.testing import rms_error
from tests.support.processes import cpu_devices


def block(params, x, shift=None):
    x = jnp.tanh(x @ params["w"] + params["b"])
    return x if shift is None else x + shift[..., None]


def one_after_the_other(params, x, shift):
    for i in range(len(params["b"])):
        x = block(jax.tree.map(lambda p, i=i: p[i], params), x, shift)
    return x


def errors(axes, microbatches, *, beside, **options):
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    params, x, shift = {"w": normal(8, 5, 5), "b": normal(8, 5)}, normal(12, 4, 5), normal(12, 4)
    dout = normal(*x.shape)
    shift = shift if beside else None
    with jax.set_mesh(make_mesh(axes)):
        run = functools.partial(pipelined, block, axis="pipeline", microbatches=microbatches, beside=shift, **options)
        got = jax.jit(lambda *given: (run(*given), *jax.vjp(run, *given)[1](dout)))(params, x)
    alone = lambda params, x: one_after_the_other(params, x, shift)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda *given: (alone(*given), *jax.vjp(alone, *given)[1](dout)))(params, x)
    return max(rms_error(np.asarray(g), np.asarray(w)) for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True))


def told(microbatches, layers, axes, axis="pipeline"):
    try:
        with jax.set_mesh(make_mesh(axes)):
            pipelined(lambda w, x: x * w, jnp.ones(layers), jnp.ones((6, 2, 3)), axis=axis, microbatches=microbatches)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def told_of_a_model():
    config = TransformerConfig(vocab_size=8, model_dim=8, num_layers=2, num_heads=2)
    try:
        Trainer(config, optax.sgd(0.1), mesh=make_mesh({"pipeline": 4}))
    except ValueError as error:
        return str(error)
    return ""


def main():
    found = {
        "four stages": errors({"pipeline": 4}, 3, beside=False),
        "beside": errors({"pipeline": 2, "data": 2}, 2, beside=True, batch=("data",)),
        "tokens": errors({"pipeline": 4, "sequence": 2}, 6, beside=True, tokens="sequence"),
    }
    two = {"pipeline": 2}
    messages = [told(2, 3, two), told(4, 4, two), told(2, 4, two, "z"), *(told(x, 4, two) for x in (0, -2, 2.0))]
    return {"errors": found, "told": [*messages, told_of_a_model()]}


@pytest.mark.timeout(120)
def test_stages_match_the_blocks():
    found = json.loads(cpu_devices.lines_of(__file__, limit=100)[-1])
    for name, error in found["errors"].items():
        assert error < 2e-6, name
    assert found["told"] == [
        "num_layers: got 3 for 2 stages along 'pipeline', want a multiple",
        "batch: got 6 rows on a device, want a multiple of 4 microbatches",
        "axis: got 'z', want an axis of jax.set_mesh's mesh: 'pipeline'",
        "microbatches=0 must be positive",
        "microbatches=-2 must be positive",
        "microbatches=2.0 must be an int",
        "num_layers: got 2 for 4 stages along 'pipeline', want a multiple",
    ]


if __name__ == "__main__":
    print(json.dumps(main()))
