"""Reads the model of a checkpoint that `jax-kernels train` wrote."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from jax_kernels.cli import UserError
from jax_kernels.cli.demo.training import make_optimizer
from jax_kernels.models import LongNetConfig, Trainer, TransformerConfig
from jax_kernels.models.training import checkpoints

__all__ = ["TrainedModel", "trained_model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model of `jax-kernels train` on this machine's first device.

    trainer: has the checkpoint's state. settings: of the training, with "seq_len" and "batch_size".
    """

    trainer: Trainer
    settings: dict[str, Any]

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.trainer.step


def trained_model(folder: Path, step: int | None = None, implementation: str | None = None) -> TrainedModel:
    """The model of a checkpoint.

    folder: the --out of `jax-kernels train`. step: of the checkpoint; None for the newest. implementation: of the
    attention; None for the fastest. Raises UserError if there is no such checkpoint, or if it cannot be read.
    """
    inside = folder / "checkpoint"
    if not inside.is_dir():
        raise UserError(f"--checkpoint: got {str(folder)!r}, want a folder that `jax-kernels train --out` wrote")
    try:
        manager = checkpoints.manager(inside, keep=1)
    except OSError as error:
        raise UserError(f"--checkpoint: {inside} cannot be read ({checkpoints.reason(error)})") from error
    try:
        steps = sorted(manager.all_steps())
        if not steps or (step is not None and step not in steps):
            option, got = ("--checkpoint", f"{str(folder)!r}") if step is None or not steps else ("--step", f"{step}")
            want = f"one of the checkpoints {', '.join(map(str, steps))}" if steps else "a folder with a checkpoint"
            raise UserError(f"{option}: got {got}, want {want}")
        kept = checkpoints.read_run(manager, max(steps) if step is None else step)
    except ValueError as error:
        if "without its `run`" in str(error):
            raise _of_another_program(folder) from error
        raise _unreadable(error) from error
    finally:
        manager.close()
    settings, fields = kept["run"], kept["config"] | {"implementation": implementation}
    if not {"steps", "learning_rate", "seq_len", "batch_size"} <= settings.keys() or fields["vocab_size"] != 256:
        raise _of_another_program(folder)
    config = LongNetConfig(**fields) if "segment_lengths" in fields else TransformerConfig(**fields)
    trainer = Trainer(config, make_optimizer(settings["steps"], settings["learning_rate"]), folder=inside)
    try:
        trainer.restore(step)
    except ValueError as error:
        raise _unreadable(error) from error
    return TrainedModel(trainer=trainer, settings=settings)


def _of_another_program(folder: Path) -> UserError:
    want = "want the --out of jax-kernels train"
    return UserError(f"--checkpoint: got {str(folder)!r}, which jax-kernels demo or another program wrote, {want}")


def _unreadable(error: ValueError) -> UserError:
    """The error of a checkpoint that cannot be read, with the option --step instead of the library's function."""
    text = re.sub(r"restore\(step=(\d+)\)", r"--step \1", str(error).removeprefix("folder: "))
    return UserError(f"--checkpoint: {text}")
