"""Losses and optimizers that a Trainer refuses: the error names the argument, its value and the wanted value."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_kernels import models
from jax_kernels.models.layers.routing import Routing

CONFIG = models.TransformerConfig(vocab_size=16, model_dim=32, num_layers=1, num_heads=2)
IDS = jnp.zeros((2, 6), jnp.int32)

LOSSES = {
    "scalar": (lambda x: x.sum(), TypeError, r"loss: got float32\[\] from it, want \(the sum of the losses, their"),
    "one": (lambda x: (x.sum(),), TypeError, "loss: got 1 values from it, want"),
    "three": (lambda x: (x.sum(), 2, x.sum()), TypeError, "loss: got 3 values from it, want"),
    "vector": (lambda x: (x[0], 2), ValueError, r"loss: got float32\[32\] as the sum from it, want a scalar"),
    "counts": (lambda x: (x.sum(), jnp.ones(2)), ValueError, r"loss: got float32\[2\] as the count from it, want a sc"),
    "none": (lambda x: (x.sum(), None), TypeError, "loss: got None as the count from it, want"),
    "integer": (lambda x: (x.sum().astype(int), 2), TypeError, r"loss: got int32\[\] as the sum from it, want a float"),
    "routing": (lambda x: (x.sum(), 2, x.sum(), {}), TypeError, r"loss: got .* as the fourth result from it, want the"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_results_of_a_loss_are_named(case):
    of, error, message = LOSSES[case]
    trainer = models.Trainer(CONFIG, optax.sgd(0.1), loss=lambda model, batch, key: of(model.embed[...]))
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(error, match=f"^{message}"):
            call(IDS)


def test_losses_with_a_count_or_a_routing():
    routing = Routing(load=jnp.ones((1, 4), jnp.int32), probability=jnp.ones((1, 4)))
    for more in ((), (jnp.float32(1), routing)):
        loss = lambda model, batch, key, more=more: [model.embed[...].sum(), 2, *more]
        assert np.isfinite(models.Trainer(CONFIG, optax.sgd(0.1), loss=loss).train(IDS)["loss"])


def test_an_optimizer_that_needs_the_loss_is_named():
    plateau = optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
    for optimizer in (optax.lbfgs(), optax.polyak_sgd(), plateau):
        with pytest.raises(TypeError, match=r"^optimizer: got one with .*'value'.*, want one whose update needs only"):
            models.Trainer(CONFIG, optimizer)
