"""Runs of a Trainer on CPU devices, for tests/models/training/test_trainer.py: each prints its losses as JSON.

    python trainer_runs.py FOLDER MESH STEPS [kill] [elsewhere]

MESH: for example data=2,sequence=2. A run continues from the newest checkpoint in FOLDER. With "kill" the process kills
itself in the middle of its second checkpoint. With "elsewhere" it then restores the oldest checkpoint on 2 devices and
on 1, and trains to STEPS there, too.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import optax

from jax_kernels.models import TokenBatches, Trainer, TransformerConfig, make_mesh

CONFIG = TransformerConfig(vocab_size=64, model_dim=32, num_layers=1, num_heads=4, num_kv_heads=2, mlp_dim=48)
SAVE_EVERY = 2


def text():
    """Tokens that each follow from the token before, so that a model can learn."""
    random = np.random.default_rng(0)
    return np.cumsum(random.integers(1, 4, 4000)) % CONFIG.vocab_size


def trainer_on(folder, axes, **options):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)
    options = {"accumulate": 2, "seed": 1} | options
    return Trainer(CONFIG, optax.adamw(schedule), mesh=make_mesh(axes), folder=folder, **options)


def kill_in_the_middle_of_a_write(folder):
    """Ends the process by SIGKILL when the second checkpoint, with files in it, is about to get its final name."""
    rename = os.rename

    def dying(source, target, *args, **kwargs):
        if Path(target).name == str(2 * SAVE_EVERY):
            assert any(path.is_file() for path in Path(source).rglob("*"))
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(source, target, *args, **kwargs)

    os.rename = os.replace = dying


def main(folder, mesh, steps, *words):
    axes = {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}
    trainer = trainer_on(folder, axes)
    batches = TokenBatches(text(), 32, 8, seed=3, mesh=trainer.mesh)
    if trainer.latest is not None:
        trainer.restore()
    if "kill" in words:
        kill_in_the_middle_of_a_write(folder)
    begun, losses = trainer.step, []
    told = lambda step, found: losses.append(float(found["loss"]))
    trainer.fit(batches, int(steps), save_every=SAVE_EVERY, on_step=told)
    trainer.close()
    answer = {"begun": begun, "losses": losses, "elsewhere": {}}
    for devices in (2, 1) if "elsewhere" in words else ():
        other = trainer_on(folder, {"fsdp": devices})
        other.restore(int(steps) - SAVE_EVERY)
        batches = TokenBatches(text(), 32, 8, seed=3, mesh=other.mesh)
        found: list[float] = []
        other.fit(batches, int(steps), on_step=lambda step, of, found=found: found.append(float(of["loss"])))
        placed = {len(x.sharding.device_set) for x in jax.tree.leaves(other.state)}
        answer["elsewhere"][devices] = {"losses": found, "devices": sorted(placed)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
