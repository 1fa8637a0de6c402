"""Training on real text, on a mesh of 2 x 2 CPU devices in a process of its own: the losses equal one device's.

As a script it prints the losses of each step on each mesh.
"""

import json
import math

import numpy as np
import optax
import pytest

from jax_kernels.cli.demo.data import standard_library, unigram_entropy
from jax_kernels.models import TokenBatches, Trainer, TransformerConfig, make_mesh, read_text
from tests.support.processes import cpu_devices

CONFIG = TransformerConfig(
    vocab_size=256, model_dim=64, num_layers=1, num_heads=4, num_kv_heads=2, mlp_dim=128
)  # fmt: skip
MESHES = ({"data": 1}, {"data": 2, "sequence": 2})
STEPS = 30


def text() -> np.ndarray:
    """Part of the text of `jax-kernels train`: Python's standard library is on every machine."""
    return read_text([standard_library() / name for name in ("argparse.py", "shutil.py", "textwrap.py")])


def losses_on(axes: dict[str, int]) -> list[float]:
    mesh = make_mesh(axes)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, STEPS)
    trainer = Trainer(CONFIG, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), mesh=mesh)
    batches = TokenBatches(text(), 64, 8, mesh=mesh)
    losses: list[float] = []
    trainer.fit(batches, STEPS, on_step=lambda _, found: losses.append(float(found["loss"])))
    return losses


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_mesh_trains_on_real_text_as_one_device():
    one, four = json.loads(cpu_devices.lines_of(__file__, devices=4, limit=120)[-1])
    assert len(one) == len(four) == STEPS
    np.testing.assert_allclose(four, one, rtol=1e-5)
    # The model has learnt more than the frequency of each byte.
    assert np.mean(one[-5:]) < math.log(2) * unigram_entropy(text()) < one[0]


if __name__ == "__main__":
    print(json.dumps([losses_on(axes) for axes in MESHES]))
