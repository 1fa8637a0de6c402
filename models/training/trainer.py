"""Trainer: the state of a training run on a mesh, its compiled step, and its checkpoints."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_kernels.compilation import compile_kernels, compiler_options, paused_collections
from jax_kernels.models.config import TransformerConfig, positive
from jax_kernels.models.layers.dilated_attention import LongNet, LongNetConfig
from jax_kernels.models.parallel.sharding import (
    ShardingRules,
    check_mesh,
    has_explicit_axes,
    make_mesh,
    place,
    state_shardings,
)
from jax_kernels.models.training import checkpoints
from jax_kernels.models.training.folder_lock import FolderLock
from jax_kernels.models.training.packing import within_documents
from jax_kernels.models.training.preemption import STOPPED, stop_asked
from jax_kernels.models.training.trainer_checks import as_json, check_batch, check_fit, checked_arguments
from jax_kernels.models.transformer import Transformer
from jax_kernels.plain_numbers import plain_arguments

__all__ = ["Trainer", "next_token_loss"]

Loss = Callable[[Any, Any, jax.Array], tuple[jax.Array, jax.Array]]


def next_token_loss(model: Transformer, batch: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the sum of model.losses over a batch, the number of targets that count).

    batch: (tokens, targets), or of packed documents (tokens, targets, segment_ids), where targets in another document
    than their token do not count.
    """
    tokens, targets, *rest = batch
    if not rest:
        return model.losses(tokens, targets).sum(), (targets >= 0).sum()
    (segment_ids,) = rest
    targets = within_documents(targets, segment_ids)
    return model.losses(tokens, targets, segment_ids=segment_ids).sum(), (targets >= 0).sum()


class Trainer:
    """Trains a model of a TransformerConfig or a LongNetConfig on the devices of a mesh.

    Products are in config.dtype; parameters, gradients that are added up, and the optimizer's moments are in
    config.param_dtype, float32 by default. A step takes over the state of the step before (donation).

    Args:
      config: of the model; its `remat` says what the backward computes again.
      optimizer: of optax.
      mesh: as make_mesh gives it; None for one device. The step runs with Auto axes: in place of a mesh with Explicit
        ones, the attribute `mesh` has the same devices on Auto axes. rules: as in Transformer.
      seed: of the parameters, and of the keys that `loss` gets; from 0 to 2**32 - 1.
      accumulate: each batch is cut into so many parts, one after the other, whose gradients are added up in float32.
      loss: loss(model, batch, key) -> (the sum of the losses, how many they are, or the sum of their weights). The step
        takes the gradient of the sum over the whole batch by the number over the whole batch. key hangs on the seed,
        the step and the part.
      folder: for checkpoints; None for none. keep: how many of the newest to keep. One trainer at a time writes a
        folder: see lock_folder.

    step: how many steps the state has had.

    Raises:
      ValueError, TypeError: an argument is out of range, naming it; a dtype is float16, whose losses would need scales;
        no rule uses an axis of the mesh, its stages do not divide the layers, or it has no device of some process;
        folder is a file.
      OSError: folder is not there and cannot be made.
    """

    @plain_arguments
    def __init__(
        self,
        config: TransformerConfig,
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
        seed: int = 0,
        accumulate: int = 1,
        loss: Loss = next_token_loss,
        folder: str | Path | None = None,
        keep: int = 2,
    ) -> None:
        seed = checked_arguments(config, optimizer, mesh, rules, seed, loss, folder)
        positive("accumulate", accumulate)
        positive("keep", keep)
        if folder is not None:
            checkpoints.check_folder(Path(folder))
        if "float16" in (config.dtype, config.param_dtype):
            raise ValueError("config: got float16, want bfloat16 or float32: its losses would need scales")
        self.config = config
        self.optimizer = optimizer
        mesh = make_mesh({"data": 1}) if mesh is None else mesh
        self.mesh = Mesh(mesh.devices, mesh.axis_names) if has_explicit_axes(mesh) else mesh
        self.rules = ShardingRules() if rules is None else rules
        check_mesh(self.mesh, self.rules, config.sequence_axis, config.num_layers)
        self.accumulate = accumulate
        self.loss = loss
        self.step = 0
        self._is_compiled = False
        kind = LongNet if isinstance(config, LongNetConfig) else Transformer
        # Not under jit, which would compile the initialisation of each layer anew.
        self.graphdef, params = nnx.split(kind(config, rules=self.rules, rngs=nnx.Rngs(seed)))
        params = place(params, state_shardings(params, self.mesh, self.rules))
        with jax.set_mesh(self.mesh):  # in place of the caller's, whose axes may be Explicit
            moments = jax.eval_shape(optimizer.init, params)
            create = jax.jit(optimizer.init, out_shardings=state_shardings(moments, self.mesh, self.rules))
            moments = create(params)
        whole = NamedSharding(self.mesh, PartitionSpec())
        self.state: dict[str, Any] = {
            "params": params,
            "optimizer": moments,
            "step": place(jnp.int32(0), whole),
            "key": place(jax.random.key_data(jax.random.key(seed)), whole),
        }
        self._kept: tuple[int, dict[str, Any]] | None = None  # the step and the run of the state's own checkpoint
        self._manager = None if folder is None else checkpoints.manager(Path(folder), keep)
        self._lock = None if folder is None else FolderLock(Path(folder))

    @property
    def model(self) -> Any:
        """The model with the state's parameters, which the next step takes over."""
        return nnx.merge(self.graphdef, self.state["params"])

    @functools.cached_property
    def _train(self) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        options = compiler_options(self.mesh, triton_products=False)
        return jax.jit(self._new_state, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)

    def _new_state(self, state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])
        total, count, gradients = self._gradients(state["params"], batch, key)
        count = jnp.where(count > 0, count, 1)  # a batch without a target, such as padding alone, teaches nothing
        gradients = jax.tree.map(lambda g, x: (g / count).astype(x.dtype), gradients, state["params"])
        updates, moments = self.optimizer.update(gradients, state["optimizer"], state["params"])
        squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)]
        after = {
            "params": optax.apply_updates(state["params"], updates),
            "optimizer": moments,
            "step": state["step"] + 1,
            "key": state["key"],
        }
        return after, {"loss": total / count, "gradient_norm": jnp.sqrt(sum(squares))}

    def _gradients(self, params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """The sum of the losses, how many they are, and the sum's gradients."""

        def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.loss(nnx.merge(self.graphdef, params), batch, key)

        differentiate = jax.value_and_grad(loss, has_aux=True)
        if self.accumulate == 1:
            (total, count), gradients = differentiate(params, batch, jax.random.fold_in(key, 0))
            return total, count, gradients

        def parts(x: jax.Array) -> jax.Array:
            if x.shape[0] % self.accumulate:
                raise ValueError(f"batch: got {x.shape[0]} rows, want a multiple of accumulate={self.accumulate}")
            # Every n-th row makes a part, so that the devices that share out the rows have an equal part of it.
            x = x.reshape(-1, self.accumulate, *x.shape[1:]).swapaxes(0, 1)
            return self.rules.constrain(x, None, "batch", "tokens")

        def one(sums: Any, given: Any) -> Any:
            part, index = given
            (total, count), gradients = differentiate(params, part, jax.random.fold_in(key, index))
            return jax.tree.map(lambda x, y: x + y, sums, (total, count, gradients)), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)
        first = jax.eval_shape(loss, params, jax.tree.map(lambda x: parts(x)[0], batch), key)
        start = (*(jnp.zeros(x.shape, x.dtype) for x in first), zeros)
        (total, count, gradients), _ = jax.lax.scan(
            one, start, (jax.tree.map(parts, batch), jnp.arange(self.accumulate))
        )
        return total, count, gradients

    def train(self, batch: Any) -> dict[str, jax.Array]:
        """One step on a batch, whose rows and tokens are placed as shard_batch or TokenBatches do it.

        Returns {"loss": the mean, "gradient_norm": of the mean's gradient}, on the device and perhaps not yet computed.
        Both are 0 where no target counts, and NaN where an array of JAX's has a token outside the vocabulary.

        Raises TypeError or ValueError for a batch that next_token_loss, if it is the loss, does not take: other arrays
        than (tokens, targets) or (tokens, targets, segment_ids), or NumPy arrays of ids outside the vocabulary.
        """
        batch = self._on_auto_axes(self._checked_batch(batch))
        with jax.set_mesh(self.mesh):
            if not self._is_compiled:
                with paused_collections():
                    lowered = self._train.lower(self.state, batch)  # which jax.jit knows then
                compile_kernels(lowered, device=self.mesh.local_devices[0], wait=False)
                self._is_compiled = True
            self.state, found = self._train(self.state, batch)
        self.step += 1
        return found

    def _checked_batch(self, batch: Any, name: str = "batch") -> Any:
        if self.loss is next_token_loss:
            check_batch(batch, self.config.vocab_size, name)
        return batch

    def _on_auto_axes(self, batch: Any) -> Any:
        """A batch whose arrays may lie on a mesh with Explicit axes; they stay on their devices."""

        def moved(x: Any) -> Any:
            sharding = getattr(x, "sharding", None)
            if not isinstance(sharding, NamedSharding) or not has_explicit_axes(sharding.mesh):
                return x
            return jax.device_put(x, NamedSharding(self.mesh, sharding.spec))

        return jax.tree.map(moved, batch)

    @functools.cached_property
    def _evaluate(self) -> Any:
        loss = lambda params, batch: self.loss(nnx.merge(self.graphdef, params), batch, jax.random.key(0))
        return jax.jit(loss, compiler_options=compiler_options(self.mesh, triton_products=False))

    def evaluate(self, batch: Any) -> float:
        """The mean loss on a batch, 0 where no target counts. Raises as train."""
        batch = self._on_auto_axes(self._checked_batch(batch))
        with jax.set_mesh(self.mesh):
            total, count = self._evaluate(self.state["params"], batch)
        count = float(count)
        return float(total) / (count if count > 0 else 1.0)

    def fit(
        self,
        batches: Any,
        steps: int,
        *,
        save_every: int | None = None,
        run: Mapping[str, Any] | None = None,
        on_step: Callable[[int, dict[str, jax.Array]], None] | None = None,
    ) -> None:
        """Trains until the state has had `steps` steps, on batches[0], batches[1], ... from the state's own step on.

        batches: TokenBatches, a list, or any object with batches[step].
        save_every: saves after every so many steps, and after the last. run: as in save. on_step(step, found): is
        called after each step with what `train` gives.

        On SIGTERM the step goes on to its end. Then a checkpoint is saved, whatever save_every is, where there is a
        folder; and SystemExit is raised, with the status 143. Of several processes that jax.distributed knows, one that
        gets SIGTERM tells the others; all save and end after the next step that each of them can reach, if `steps` has
        that. In a single process `fit` has a handler of SIGTERM while it runs. It leaves SIGTERM alone where the caller
        has a handler or ignores it, and in a thread other than the main one, in which Python has no handlers.

        With save_every it takes the folder's lock before the first step, as save does. A `fit` that raises gives the
        lock back.

        Raises:
          ValueError: before the first step, where save would: `folder` has a later checkpoint than the state, or
            another run writes it; or save_every or steps is out of range, or batches are fewer than steps.
          TypeError: an argument is of a wrong type, naming it.
          FloatingPointError: after the last step, or before a checkpoint, a parameter is not finite.
          OSError: a checkpoint cannot be written.
          SystemExit: after SIGTERM, once the checkpoint is whole.
        """
        check_fit(batches, steps, save_every, on_step)
        if save_every is not None and self.step < steps:
            self._claim(and_this=False)
        try:
            self._fit(batches, steps, save_every, run, on_step)
        except BaseException:
            self._give_up()
            raise

    def _fit(self, batches: Any, steps: int, save_every: int | None, run: Any, on_step: Any) -> None:
        begun = self.step
        with stop_asked() as asked:
            while self.step < steps:
                found = self.train(self._checked_batch(batches[self.step], f"batches[{self.step}]"))
                if on_step is not None:
                    on_step(self.step, found)
                is_stopped = asked(self.step)
                is_due = save_every is not None and (self.step % save_every == 0 or self.step == steps)
                if is_due or (is_stopped and self._manager is not None):
                    self.save(run)
                if is_stopped:
                    if self._manager is not None:
                        with checkpoints.writing(self._manager):
                            self._manager.wait_until_finished()
                    raise SystemExit(STOPPED)
        if self.step > begun:
            self.check_finite()

    def check_finite(self) -> None:
        """Raises FloatingPointError, with the newest checkpoint, unless parameters and their squares are finite."""
        names = checkpoints.nonfinite(self.state["params"], self.mesh)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            newest = "" if self._manager is None else f"; {checkpoints.newest(self._manager)}"
            raise FloatingPointError(
                f"step {self.step}: got parameters that are not finite, or too large to be squared ({names[0]}{more}), "
                f"want finite ones, as of a smaller learning rate{newest}"
            )

    def lock_folder(self) -> None:
        """Takes the right to write `folder`, which save, and fit with save_every, take where they need it.

        The trainer keeps it until `close`, or the end of the process, also one that is killed. Reading needs none:
        restore works while another run writes.

        Raises ValueError, with the process, its host and the time, where another run has it; OSError where the folder
        cannot be written.
        """
        if self._lock is None:
            raise ValueError("folder: got None, want a folder for checkpoints")
        if not self._lock.is_held:
            self._lock.take()
            self._checkpoints.reload()  # for steps that another run wrote since the folder was read

    def _claim(self, *, and_this: bool) -> None:
        """Takes the folder's lock. Raises ValueError where the folder has later checkpoints: see _check_newest."""
        self._check_newest(and_this=and_this)
        if self._lock is not None and not self._lock.is_held:
            self.lock_folder()
            try:
                self._check_newest(and_this=and_this)
            except ValueError:
                self._lock.release()
                raise

    def _give_up(self) -> None:
        """Gives the folder's lock back, once no checkpoint is being written."""
        if self._lock is not None and self._lock.is_held:
            with contextlib.suppress(Exception):
                self._checkpoints.wait_until_finished()
            self._lock.release()

    def save(self, run: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint of the state, and of `run`, a JSON value. It counts once it is whole: see restore.

        On a GPU it is written while training goes on; the next save, and `close`, wait for it.

        Raises:
          ValueError: `folder` has a checkpoint of this step or a later one that is not the state's own, or another run
            writes it: see lock_folder.
          TypeError: `run` is no mapping of JSON values.
          FloatingPointError: a parameter is not finite. The earlier checkpoints stay.
          OSError: the checkpoint cannot be written, such as on a full disk. The text names the newest whole one.
        """
        import orbax.checkpoint as ocp

        of_run = as_json(run)
        if self._kept == (self.step, of_run):
            return  # it is there
        self._claim(and_this=True)
        self.check_finite()
        kept = {"config": dataclasses.asdict(self.config), "run": of_run}
        kept["digests"] = checkpoints.digests(self.state, self.mesh)
        items = ocp.args.Composite(state=ocp.args.StandardSave(self.state), run=ocp.args.JsonSave(kept))
        self._kept = None
        with checkpoints.writing(self._checkpoints, self.step):
            is_taken = self._checkpoints.save(self.step, args=items)
        if not is_taken:
            raise RuntimeError(f"folder: orbax took no checkpoint of step {self.step}")
        self._kept = self.step, of_run

    def _check_newest(self, *, and_this: bool = False) -> None:
        """Raises ValueError where the folder has later checkpoints than the state. and_this: also one of its step."""
        newest = self._checkpoints.latest_step()
        if newest is None or newest < self.step + (not and_this):
            return
        other = "a later step" if newest == self.step else "restore(step, remove_later=True)"
        raise ValueError(
            f"folder: got a checkpoint of step {newest} beside a state of step {self.step}, want another folder, or "
            f"{other}"
        )

    def restore(self, step: int | None = None, *, remove_later: bool = False) -> dict[str, Any]:
        """Puts the state where a checkpoint was, on this trainer's mesh, whatever mesh it was saved from.

        A checkpoint that was not written to its end, because the process was killed, does not count.

        Args:
          step: of the checkpoint; None for the newest.
          remove_later: whether to delete the checkpoints of later steps, once this one is restored. Without it, what
            goes on from here cannot be saved in the same folder.

        Returns:
          The `run` that was saved with it.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          TypeError: step is no int.
          ValueError: its model has other parameters, its optimizer another state or other dtypes, save did not write
            it, or its files are damaged: it cannot be read, or its arrays are not what was saved. The state then stays
            as it was. With remove_later also: another run writes the folder.
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
        self.state = checkpoints.read_state(self._checkpoints, step, self.state, self.mesh, kept.get("digests"))
        self.step = int(self.state["step"])
        self._kept = self.step, dict(kept["run"])
        for later in [x for x in steps if remove_later and x > self.step]:
            self._checkpoints.delete(later)
        return kept["run"]

    def _check_config(self, other: dict[str, Any]) -> None:
        """Raises ValueError where a checkpoint's model has other parameters or another forward."""
        free = {
            "dtype",
            "remat",
            "scan_layers",
            "implementation",
            "mlp_implementation",
            "projection_implementation",
            "microbatches",
            "sequence_axis",
            "sequence_strategy",
            "sequence_layout",
        }
        as_json = lambda x: list(x) if isinstance(x, tuple) else x
        own = {name: as_json(x) for name, x in dataclasses.asdict(self.config).items()}
        names = [name for name in sorted(own.keys() | other.keys()) if name not in free]
        told = [f"{name}={other.get(name)!r}" for name in names if own.get(name) != other.get(name)]
        if told:
            raise ValueError(f"config: got a model that differs from the checkpoint's, which has {', '.join(told)}")

    @property
    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, None where there is none."""
        return None if self._manager is None else self._manager.latest_step()

    @property
    def _checkpoints(self) -> Any:
        if self._manager is None:
            raise ValueError("folder: got None, want a folder for checkpoints")
        return self._manager

    def close(self) -> None:
        """Waits for a checkpoint that is still being written, and gives the folder's lock back.

        Raises OSError where that checkpoint cannot be written.
        """
        if self._manager is None or self._lock is None:
            return
        try:
            with checkpoints.writing(self._manager):
                self._manager.close()
        finally:
            self._lock.release()
