"""The checkpoints of a Trainer: the folder and its lock, save and restore."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_kernels.models.config import TransformerConfig
from jax_kernels.models.layers.delayed_scaling import AmaxHistory, without_histories
from jax_kernels.models.parallel.sharding import ShardingRules, state_shardings
from jax_kernels.models.training import checkpoints
from jax_kernels.models.training.folder_lock import FolderLock
from jax_kernels.models.training.loss_scale import FIRST, first_state
from jax_kernels.models.training.trainer_checks import as_json, fields_of_model

__all__ = ["TrainerCheckpoints"]


class TrainerCheckpoints:
    """The part of a Trainer that writes and reads its folder. Trainer derives from it and sets the attributes."""

    config: TransformerConfig
    optimizer: Any
    mesh: Mesh
    rules: ShardingRules
    state: dict[str, Any]
    step: int
    _manager: Any
    _lock: FolderLock | None
    _kept: Any
    _first_scale: float | None

    def check_finite(self) -> None:
        """Raises FloatingPointError unless the state is finite: see Trainer."""
        raise NotImplementedError

    def _on_all_devices(self, tree: Any) -> Any:
        """The arrays of a tree on all devices of the mesh: see Trainer."""
        raise NotImplementedError

    def lock_folder(self) -> None:
        """Takes the folder's lock, the right to write it. save and fit with save_every take it themselves.

        The trainer keeps the lock until `close` or until the process ends, even if it is killed. Reading needs no lock:
        restore works while another run writes. On a file system without locks there is a warning and no lock.

        Raises ValueError, which names the process, its host and the time, if another run has the lock; OSError if the
        folder cannot be written.
        """
        if self._lock is None:
            raise ValueError("folder: got None, want a folder for checkpoints")
        if not self._lock.is_held:
            self._lock.take()
            if self._lock.excludes_others:  # a run that was killed while it saved left files
                checkpoints.remove_unfinished(self._lock.folder)
            self._checkpoints.reload()  # finds steps that another run wrote since the folder was read

    def _claim(self, *, and_this: bool) -> None:
        """Takes the folder's lock. Raises ValueError, without keeping the lock, if the folder has a later checkpoint.

        and_this: whether a checkpoint of the state's own step counts too.
        """
        self._check_newest(and_this=and_this)
        if self._lock is not None and not self._lock.is_held:
            self.lock_folder()
            try:
                self._check_newest(and_this=and_this)
            except ValueError:
                self._lock.release()
                raise

    def _give_up(self) -> None:
        """Waits until no checkpoint is being written, and releases the folder's lock."""
        if self._lock is not None and self._lock.is_held:
            with contextlib.suppress(Exception):
                self._checkpoints.wait_until_finished()
            self._lock.release()

    def save(self, run: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint of the state and of `run`, a JSON value. It counts once it is whole: see restore.

        On a GPU it is written while training goes on; the next save and `close` wait for it.

        Raises:
          ValueError: `folder` has a checkpoint of this or a later step that is not the state's own, such as after the
            state has been changed without a step, or another run writes it: see lock_folder.
          TypeError: `run` is not a mapping of JSON values.
          FloatingPointError: see check_finite. The earlier checkpoints stay.
          OSError: the checkpoint cannot be written, such as on a full disk. The text names the newest whole checkpoint.
        """
        import orbax.checkpoint as ocp

        of_run, of_state = as_json(run), checkpoints.digests(self.state, self.mesh)
        if self._kept == (self.step, of_run, of_state):
            return  # already saved
        self._claim(and_this=True)
        self.check_finite()
        kept = {"config": dataclasses.asdict(self.config), "run": of_run, "digests": of_state}
        items = ocp.args.Composite(state=ocp.args.StandardSave(self.state), run=ocp.args.JsonSave(kept))
        self._kept = None
        with checkpoints.writing(self._checkpoints, self.step):
            is_taken = self._checkpoints.save(self.step, args=items)
        if not is_taken:
            raise RuntimeError(f"folder: orbax took no checkpoint of step {self.step}")
        self._kept = self.step, of_run, of_state

    def _check_newest(self, *, and_this: bool = False) -> None:
        """Raises ValueError if the folder has a checkpoint of a later step than the state; with and_this, also of the
        same step.
        """
        newest = self._checkpoints.latest_step()
        if newest is None or newest < self.step + (not and_this):
            return
        other = "a later step" if newest == self.step else "restore(step, remove_later=True)"
        raise ValueError(
            f"folder: got a checkpoint of step {newest} with a state of step {self.step}, want another folder, or "
            f"{other}"
        )

    def restore(self, step: int | None = None, *, remove_later: bool = False) -> dict[str, Any]:
        """Restores the state from a checkpoint, onto this trainer's mesh, from any mesh.

        A partial checkpoint, whose process was killed while writing, does not count.

        Args:
          step: of the checkpoint; None for the newest.
          remove_later: whether to delete the checkpoints of later steps after restoring. Otherwise the run that
            continues from here cannot save in the same folder.

        Returns:
          The `run` that was saved with the checkpoint.

        Raises:
          FileNotFoundError: the checkpoint does not exist.
          TypeError: step is not an int.
          ValueError: the checkpoint's model has other parameters, its optimizer another state or other dtypes, save did
            not write it, it cannot be read, or its arrays differ from the saved arrays. The state is then unchanged.
            With remove_later also: another run writes the folder.
        """
        if step is not None and (isinstance(step, bool) or not isinstance(step, int | np.integer)):
            raise TypeError(f"step: got {step!r}, want an int, or None for the newest")
        if self._lock is not None and not self._lock.is_held:
            self._checkpoints.reload()  # another run may have written since the folder was read
        steps = self._checkpoints.all_steps()
        if not steps or (step is not None and step not in steps):
            got = "no checkpoint" if step is None or not steps else f"no checkpoint of step {step}"
            has = f"; it has steps {', '.join(map(str, sorted(steps)))}" if steps else ""
            raise FileNotFoundError(
                f"folder: got {self._checkpoints.directory} with {got}, want one that save wrote there{has}"
            )
        if remove_later and step is not None and max(steps) > step:
            self.lock_folder()
        step = max(steps) if step is None else step
        kept = checkpoints.read_run(self._checkpoints, step)
        self._check_config(kept["config"])
        self.state = self._read_state(step, kept)
        self.step = int(self.state["step"])
        self._kept = self.step, dict(kept["run"]), checkpoints.digests(self.state, self.mesh)
        for later in [x for x in steps if remove_later and x > self.step]:
            self._checkpoints.delete(later)
        return kept["run"]

    def _read_state(self, step: int, kept: dict[str, Any]) -> dict[str, Any]:
        """The state of a checkpoint. kept: its `run` item. Only a state of float16 has a loss scale."""
        first = self._on_all_devices(first_state(self._first_scale or FIRST))
        like = {name: x for name, x in self.state.items() if name != "loss_scale"}
        if kept["config"].get("dtype") == "float16":
            like["loss_scale"] = first
        read = lambda like: checkpoints.read_state(self._checkpoints, step, like, self.mesh, kept.get("digests"))
        try:
            state = read(like)
        except checkpoints.OtherOptimizer:
            older = self._moments_with_histories()
            if older is None:
                raise
            state = read(like | {"optimizer": older})
            state["optimizer"] = without_histories(state["optimizer"])
        scaling = state.pop("loss_scale", first)
        return state if self._first_scale is None else state | {"loss_scale": scaling}

    def _moments_with_histories(self) -> Any:
        """The shapes of the optimizer's state in older checkpoints, which had moments of AmaxHistories.

        None for a model without histories.
        """
        params = self.state["params"]
        if not jax.tree.leaves(nnx.filter_state(params, AmaxHistory)):
            return None
        moments = jax.eval_shape(self.optimizer.init, params)
        shaped = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(shaped, moments, state_shardings(moments, self.mesh, self.rules))

    def _check_config(self, other: dict[str, Any]) -> None:
        """Raises ValueError if a checkpoint's config differs in fields that change the parameters or the forward.

        other: the fields of the checkpoint's config, by name.
        """
        own, wanted = fields_of_model(as_json(dataclasses.asdict(self.config))), fields_of_model(other)
        names = sorted(own.keys() | wanted.keys())
        told = [f"{name}={other.get(name)!r}" for name in names if own.get(name) != wanted.get(name)]
        if told:
            raise ValueError(f"config: got a model that differs from the checkpoint's, which has {', '.join(told)}")

    @property
    def latest(self) -> int | None:
        """The step of the newest whole checkpoint in the folder; None without a checkpoint or a folder."""
        return None if self._manager is None else self._manager.latest_step()

    @property
    def _checkpoints(self) -> Any:
        """The orbax CheckpointManager. Raises ValueError if the trainer has no folder."""
        if self._manager is None:
            raise ValueError("folder: got None, want a folder for checkpoints")
        return self._manager

    def close(self) -> None:
        """Waits for a checkpoint that is still being written, and releases the folder's lock.

        Raises OSError if the checkpoint cannot be written.
        """
        if self._manager is None or self._lock is None:
            return
        try:
            with checkpoints.writing(self._manager):
                self._manager.close()
        finally:
            self._lock.release()
