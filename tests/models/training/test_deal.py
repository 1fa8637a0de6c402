"""Trainer(deal_documents=True) on meshes of CPU devices, in a process of its own, against one device.

As a script it prints, for each case, the errors of the loss, the gradient's norm and the parameters after a step.
"""

import dataclasses
import json
import sys

import jax
import numpy as np
import optax
import pytest

from jax_kernels import DocumentLayout
from jax_kernels.models import LongNetConfig, ShardingRules, Trainer, TransformerConfig, make_mesh, next_token_loss
from jax_kernels.models.training.deal import dealt
from tests.support.cases import tiers
from tests.support.processes import cpu_devices

CONFIG = TransformerConfig(vocab_size=64, model_dim=32, num_layers=1, num_heads=4, num_kv_heads=2, mlp_dim=48)
# A document over all devices, short ones, padding, and in row 1 an id that comes back.
LENGTHS = ((70, 5, 9, 1, 3, 30, 10), (20, 20, 20, 60, 8))
CASES = {
    "ring": ({"sequence": 4}, {}, {}),
    "accumulated": ({"data": 2, "sequence": 2}, {"accumulate": 2}, {"remat": "products", "sequence_strategy": "ring"}),
    "one device": ({"data": 2}, {}, {}),
}


def batch(name):
    ids = np.stack([np.repeat(np.arange(len(row)), row) for row in LENGTHS]).astype(np.int32)
    ids[0, -10:] = -1
    ids[1, ids[1] == 2] = 0
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 64, (2, ids.shape[1] + 1), dtype=np.int32)
    found = tokens[:, :-1], tokens[:, 1:], ids
    return found if name == "ring" else (*found, draw.random(ids.shape, np.float32))


def trained(name, mesh, options, deals):
    _, _, fields = CASES[name]
    config = dataclasses.replace(CONFIG, **fields)
    trainer = Trainer(config, optax.sgd(1.0), mesh=make_mesh(mesh), deal_documents=deals, **options)
    before = trainer.evaluate(batch(name))
    seen = []
    trainer.fit([batch(name)], steps=1, on_step=lambda step, found: seen.append(found))
    (found,) = seen
    params = jax.tree.map(np.asarray, jax.tree.leaves(trainer.state["params"]))
    return np.array([before, found["loss"], found["gradient_norm"]]), params


def errors(name):
    mesh, options, _ = CASES[name]
    want, of_params = trained(name, {"data": 1}, {}, False)
    got, params = trained(name, mesh, options, True)
    largest = max(float(np.abs(x - y).max()) for x, y in zip(params, of_params, strict=True))
    return {"values": float(np.abs(got / want - 1).max()), "params": largest}


@pytest.mark.parametrize("names", tiers.groups(CASES, ["accumulated"], 2))
def test_losses_and_gradients_are_those_of_one_device(names):
    for name, found in cpu_devices.results_of(__file__, names, devices=4).items():
        assert found["values"] < 1e-5, name
        assert found["params"] < 1e-5, name


def test_a_document_is_cut_and_the_work_is_equal():
    """The layout cuts the long document of the cases."""
    layout = DocumentLayout.of(batch("ring")[2], 4, heads=4, head_dim=8)
    assert layout.pairs.max() < 1.2 * layout.pairs.mean()


def test_wrong_use():
    longnet = LongNetConfig(
        vocab_size=64, model_dim=32, num_layers=1, num_heads=4, segment_lengths=(8,), dilation_rates=(1,)
    )
    to_all = dataclasses.replace(CONFIG, sequence_strategy="all_to_all")
    for config, options, message in (
        (longnet, {}, "got True with a LongNetConfig, want a TransformerConfig"),
        (to_all, {}, "got True with sequence_strategy='all_to_all', want 'auto' or 'ring'"),
        (CONFIG, {"loss": lambda *given: next_token_loss(*given)}, "got True with another loss, want next_token_loss"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(config, optax.sgd(1.0), deal_documents=True, **options)
    with pytest.raises(TypeError, match="deal_documents"):
        Trainer(CONFIG, optax.sgd(1.0), deal_documents="yes")
    trainer = Trainer(CONFIG, optax.sgd(1.0), deal_documents=True)
    with pytest.raises(ValueError, match="batch: got 2 items with deal_documents=True, want segment_ids as third"):
        trainer.train(batch("ring")[:2])
    tokens, targets, _ = batch("ring")
    rules, mesh = ShardingRules(), jax.sharding.AbstractMesh((2,), ("sequence",))
    with pytest.raises(ValueError, match="got None for item 2, segment_ids, with deal_documents=True"):
        dealt((tokens, targets, None), mesh, rules, dataclasses.replace(CONFIG, sequence_axis="sequence"))


if __name__ == "__main__":
    print(json.dumps({name: errors(name) for name in sys.argv[1:]}))
