"""Trainer.fit on SIGTERM saves and ends: in one process, and in two processes after the same step.

As a script it is such a process: FOLDER [PORT ID], for two processes that connect at a port.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from jax_kernels.models import TokenBatches, Trainer, TransformerConfig, make_mesh
from jax_kernels.models.parallel.distributed import initialize_distributed
from jax_kernels.models.training.preemption import STOPPED, stop_asked
from tests.support.processes import forked
from tests.support.processes.ranks import free_port, printed_by

CONFIG = TransformerConfig(vocab_size=16, model_dim=16, num_layers=1, num_heads=1, mlp_dim=16)
AT = 2  # the signal comes after this step


def trainer_and_batches(folder):
    trainer = Trainer(CONFIG, optax.sgd(1e-2), mesh=make_mesh({"data": -1}), folder=folder)
    return trainer, TokenBatches(np.arange(400) % 16, 8, 4, mesh=trainer.mesh)


def terminates(step, found):
    if step == AT and jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGTERM)


def test_process_saves_and_ends_after_its_step(tmp_path):
    trainer, batches = trainer_and_batches(tmp_path)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(batches, 100, run={"name": "mine"}, on_step=terminates)
    assert ended.value.code == STOPPED == 143
    assert trainer.step == AT
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    trainer.close()
    again, batches = trainer_and_batches(tmp_path)
    assert again.restore() == {"name": "mine"}
    again.fit(batches, 2 * AT)
    again.close()
    assert again.step == 2 * AT


def test_process_without_a_folder_ends_after_its_step():
    trainer, batches = trainer_and_batches(None)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(batches, AT, on_step=terminates)
    assert ended.value.code == STOPPED


def test_existing_handler_is_kept():
    got = []
    handler = lambda *_: got.append("SIGTERM")
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with stop_asked() as asked:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not asked(1)
        assert got == ["SIGTERM"]
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_install_no_handler():
    asks = []

    def run():
        with stop_asked() as asked:
            asks.append(asked(1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert asks == [False]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_processes_end_after_the_same_step(tmp_path):
    flags = f"--xla_force_host_platform_device_count=1 {forked.QUICK_COMPILES}"
    command = [__file__, str(tmp_path / "run"), str(free_port())]
    told = printed_by([([*command, str(i)], {"XLA_FLAGS": flags}) for i in range(2)], code=STOPPED, limit=90)
    step, other = (int(out.splitlines()[-1]) for out in told)  # Gloo prints, too
    assert step == other >= AT
    names = [path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")]
    assert names == [str(step)]


def main(folder, port, process):
    initialize_distributed(f"localhost:{port}", 2, int(process), timeout=60)
    trainer, batches = trainer_and_batches(Path(folder))
    try:
        trainer.fit(batches, 100_000, on_step=terminates)
    finally:
        trainer.close()
        print(trainer.step)


if __name__ == "__main__":
    main(*sys.argv[1:])
