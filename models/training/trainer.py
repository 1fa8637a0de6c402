"""Trainer: the state of a training run on a mesh, its compiled step, and its checkpoints."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_kernels.compilation import compile_kernels, compiler_options, paused_collections
from jax_kernels.models.config import TransformerConfig, check_kind, positive
from jax_kernels.models.layers.delayed_scaling import AmaxHistory, without_histories
from jax_kernels.models.layers.dilated_attention import LongNet, LongNetConfig
from jax_kernels.models.layers.routing import balanced
from jax_kernels.models.parallel.sharding import (
    ShardingRules,
    check_mesh,
    has_explicit_axes,
    make_mesh,
    place,
    state_shardings,
)
from jax_kernels.models.training import checkpoints
from jax_kernels.models.training.deal import check_dealing, dealt
from jax_kernels.models.training.folder_lock import FolderLock
from jax_kernels.models.training.loss_scale import (
    SMALLEST,
    all_finite,
    first_state,
    next_state,
    scaled_gradient,
    select,
)
from jax_kernels.models.training.next_token import is_next_token_loss, next_token_loss
from jax_kernels.models.training.preemption import stop_asked
from jax_kernels.models.training.trainer_checkpoints import TrainerCheckpoints
from jax_kernels.models.training.trainer_checks import (
    check_fit,
    check_update,
    checked_arguments,
    checked_batch,
    checked_losses,
    checked_scale,
    updated,
)
from jax_kernels.models.transformer import Transformer
from jax_kernels.plain_numbers import plain_arguments
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["Trainer"]

Loss = Callable[[Any, Any, jax.Array], tuple[Any, ...]]


class Trainer(TrainerCheckpoints):
    """Trains a model of a TransformerConfig or a LongNetConfig on the devices of a mesh.

    Matmuls are in config.dtype; parameters and the optimizer's moments are in config.param_dtype, float32 by default. A
    step donates the previous step's state.

    With config.dtype "float16", the backward runs on a scaled loss. A step whose gradient is not finite is skipped: the
    parameters and the moments stay, and the scale halves. 2000 steps without an overflow double it.

    Args:
      config: of the model; its `remat` says which values the backward rematerialises.
      optimizer: an optax optimizer whose update needs only (gradients, state, params), so not optax.lbfgs.
      mesh: from make_mesh; None for one device. The step runs with Auto axes: if the mesh has Explicit axes, the
        attribute `mesh` has the same devices on Auto axes. rules: as in Transformer.
      seed: of the parameters and of the keys that `loss` gets; from 0 to 2**32 - 1.
      accumulate: the number of parts into which each batch is cut. The parts run one after the other, and their
        gradients are added in float32. With experts it changes the step: next_token_loss computes the load-balancing
        loss of each part from the part's own loads.
      loss: loss(model, batch, key) -> (the sum of the losses, their count or the sum of their weights). The step uses
        the gradient of the whole batch's sum divided by the whole batch's count. key depends on the seed, the step and
        the part. For a model with experts the loss may also return the part of the sum that balances them, and the
        model's Routing, by which the step moves each expert_bias.
      folder: for checkpoints; None to write none. keep: the number of newest checkpoints to keep. One trainer at a time
        writes a folder: see lock_folder.
      deal_documents: deals the packed documents of each batch out to the devices of config.sequence_axis, by a
        DocumentLayout, so that all have equal work. Batches have segment_ids, which the host reads; the losses are the
        same up to rounding. For next_token_loss, on one process, without pipeline stages.
      loss_scale: with "float16", the first scale of the mean loss; None for 2**16. Checkpoints keep the current scale.

    step: the number of steps, trained and skipped, that led to the state.

    Raises:
      ValueError, TypeError: an argument is wrong; the error names it. Also: param_dtype is float16, which loses small
        updates; no rule uses an axis of the mesh; the pipeline stages do not divide the layers; the mesh has no device
        of some process; folder is a file.
      OSError: folder does not exist and cannot be made.
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
        loss_scale: float | None = None,
        deal_documents: bool = False,
    ) -> None:
        seed = checked_arguments(config, optimizer, mesh, rules, seed, loss, folder)
        positive("accumulate", accumulate)
        positive("keep", keep)
        if folder is not None:
            checkpoints.check_folder(Path(folder))
        self._first_scale = checked_scale(loss_scale, config)
        check_kind("deal_documents", deal_documents, bool, "a bool")
        if deal_documents:
            check_dealing(config, loss)
        self._deals = deal_documents
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
        # Not under jit, which would compile the initialisation of each layer separately.
        self.graphdef, params = nnx.split(kind(config, rules=self.rules, rngs=nnx.Rngs(seed)))
        params = place(params, state_shardings(params, self.mesh, self.rules))
        with jax.set_mesh(self.mesh):  # instead of the caller's mesh, whose axes may be Explicit
            trained = without_histories(params)
            moments = jax.eval_shape(optimizer.init, trained)
            check_update(optimizer, moments, trained)
            create = jax.jit(optimizer.init, out_shardings=state_shardings(moments, self.mesh, self.rules))
            moments = create(trained)
        self.state: dict[str, Any] = {
            "params": params,
            "optimizer": moments,
            "step": self._on_all_devices(jnp.int32(0)),
            "key": self._on_all_devices(jax.random.key_data(jax.random.key(seed))),
        }
        if self._first_scale is not None:
            self.state["loss_scale"] = self._on_all_devices(first_state(self._first_scale))
        self._kept: tuple[int, Any, Any] | None = None  # the step, run and digests of the state's own checkpoint
        self._manager = None if folder is None else checkpoints.manager(Path(folder), keep)
        self._lock = None if folder is None else FolderLock(Path(folder))

    def _on_all_devices(self, tree: Any) -> Any:
        """The tree, whole on each device of the mesh."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: place(x, whole), tree)

    @property
    def model(self) -> Any:
        """The model with the state's current parameters. The next step donates these, so read it again after a step."""
        return nnx.merge(self.graphdef, self.state["params"])

    @functools.cached_property
    def _train(self) -> Any:
        """The jitted step: _new_state, which donates the state."""
        shardings = jax.tree.map(lambda x: x.sharding, self.state)
        options = compiler_options(self.mesh, triton_products=False)
        return jax.jit(self._new_state, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)

    def _new_state(self, state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """(the state after a step on this batch, the result of `train`)."""
        key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])
        scaling = state.get("loss_scale")
        total, (count, (balance, histories)), gradients = self._gradients(
            state["params"], batch, key, scaling and scaling["scale"]
        )
        count = jnp.where(count > 0, count, 1)  # a batch without targets, such as all padding, has gradients of 0
        gradients, params = without_histories(gradients), without_histories(state["params"])
        gradients = jax.tree.map(lambda g, x: (g / count).astype(x.dtype), gradients, params)
        updates, moments = updated(self.optimizer, gradients, state["optimizer"], params)
        squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)]
        after = {
            "params": optax.apply_updates(params, updates),
            "optimizer": moments,
            "step": state["step"] + 1,
            "key": state["key"],
        }
        found = {"loss": total / count, "gradient_norm": jnp.sqrt(sum(squares))}
        if balance:
            of_loss, routing = balance
            found |= {"balance_loss": of_loss / count, "largest_load": routing.largest_load.max()}
        self._set_biases(state["params"], after["params"], balance)
        if histories:
            after["params"] = nnx.merge_state(after["params"], histories)
        if scaling is None:
            return after, found
        is_finite = all_finite(gradients)
        trained = {name: select(is_finite, after[name], state[name]) for name in ("params", "optimizer")}
        after |= trained | {"loss_scale": next_state(scaling, is_finite)}
        return after, found | {"loss_scale": scaling["scale"], "is_skipped": ~is_finite}

    def _gradients(
        self, params: Any, batch: Any, key: jax.Array, scale: jax.Array | None
    ) -> tuple[jax.Array, Any, Any]:
        """(total, (count, (others, histories)), the gradients of total with respect to params): total, count and others
        are the results of `loss`, and histories the model's AmaxHistories after it.

        For next_token_loss total is the sum of the losses, and count the number of targets that count. The batch is cut
        into `accumulate` parts, which run one after the other. All results are summed over the parts, except the
        histories, whose maximum is taken. scale: of
        each part's mean loss during its backward; None for the backward of the sum.
        """

        def loss(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any]:
            model = nnx.merge(self.graphdef, params)
            total, count, *others = checked_losses(self.loss(model, batch, key))
            return total, (count, (tuple(others), nnx.state(model, AmaxHistory)))

        differentiate = jax.value_and_grad(loss, has_aux=True) if scale is None else scaled_gradient(loss, scale)
        if self.accumulate == 1:
            (total, counted), gradients = differentiate(params, batch, jax.random.fold_in(key, 0))
            return total, counted, gradients

        def parts(x: jax.Array) -> jax.Array:
            if x.shape[0] % self.accumulate:
                raise ValueError(f"batch: got {x.shape[0]} rows, want a multiple of accumulate={self.accumulate}")
            # Each part takes every n-th row, so that each device that shards the rows has an equal share of the part.
            x = x.reshape(-1, self.accumulate, *x.shape[1:]).swapaxes(0, 1)
            return self.rules.constrain(x, None, "batch", "tokens")

        def one(sums: Any, given: Any) -> Any:
            part, index = given
            (total, (count, (others, histories))), gradients = differentiate(
                params, part, jax.random.fold_in(key, index)
            )
            *summed, largest = sums
            summed = jax.tree.map(lambda x, y: x + y, summed, [total, count, others, gradients])
            return (*summed, jax.tree.map(jnp.maximum, largest, histories)), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)
        first = jax.eval_shape(loss, params, jax.tree.map(lambda x: parts(x)[0], batch), key)
        total, (count, (others, histories)) = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
        start = (total, count, others, zeros, histories)
        (total, count, others, gradients, histories), _ = jax.lax.scan(
            one, start, (jax.tree.map(parts, batch), jnp.arange(self.accumulate))
        )
        return total, (count, (others, histories)), gradients

    def _set_biases(self, before: Any, after: Any, balance: Any) -> None:
        """Sets the expert_biases of the parameters `after` a step, in place: the optimizer has no part in them.

        before: the parameters before the step. balance: the third and fourth result of `loss`; without them the biases
        stay.
        """
        experts = self.config.experts
        if experts is None or experts.bias_rate is None:
            return
        for i, layer in enumerate(self.config.expert_layers):
            bias = before["layers"][layer]["mlp"]["expert_bias"]
            moved = balanced(bias[...], balance[1].load[i], experts.bias_rate) if balance else bias[...]
            after["layers"][layer]["mlp"]["expert_bias"] = bias.replace(moved)

    @under_defaults  # optax too promotes dtypes
    def train(self, batch: Any) -> dict[str, jax.Array]:
        """Runs one step on a batch, sharded as by shard_batch or TokenBatches.

        Returns {"loss": the mean, "gradient_norm": of the mean's gradient}, on the device and perhaps not yet computed.
        Both values are 0 if no target counts, and NaN if a JAX array has a token outside the vocabulary. With "float16"
        also {"loss_scale": of this step, "is_skipped": whether the gradient is not finite}. With experts also
        {"balance_loss": the part of the loss that balances their load, "largest_load": of all experts of all blocks,
        over the mean of its block}.

        Raises TypeError or ValueError if the loss is next_token_loss and the batch does not have its form, or has NumPy
        arrays with ids outside the vocabulary or weights below 0.
        """
        batch = self._placed_batch(self._checked_batch(batch))
        with jax.set_mesh(self.mesh):
            if not self._is_compiled:
                with paused_collections():
                    lowered = self._train.lower(self.state, batch)  # jax.jit then has the lowered program in its cache
                compile_kernels(lowered, device=self.mesh.local_devices[0], wait=False)
                self._is_compiled = True
            self.state, found = self._train(self.state, batch)
        self.step += 1
        return found

    def _checked_batch(self, batch: Any, name: str = "batch") -> Any:
        """The batch. If the loss is next_token_loss, raises TypeError or ValueError for a wrong batch.

        NumPy's 64-bit integers become int32. name: of the batch, for the error. With another loss nothing is checked or
        changed.
        """
        if is_next_token_loss(self.loss):
            batch = checked_batch(batch, self.config.vocab_size, name)
        if self._deals and len(batch) < 3:
            raise ValueError(f"{name}: got {len(batch)} items with deal_documents=True, want segment_ids as third")
        return batch

    def _placed_batch(self, batch: Any) -> Any:
        """The batch on this trainer's mesh, dealt out with deal_documents.

        Arrays on a mesh with Explicit axes are moved; their shards stay on their devices.
        """

        def moved(x: Any) -> Any:
            sharding = getattr(x, "sharding", None)
            if not isinstance(sharding, NamedSharding) or not has_explicit_axes(sharding.mesh):
                return x
            return jax.device_put(x, NamedSharding(self.mesh, sharding.spec))

        batch = jax.tree.map(moved, batch)
        return dealt(batch, self.mesh, self.rules, self.config) if self._deals else batch

    @functools.cached_property
    def _evaluate(self) -> Any:
        """The jitted loss: a function of (params, batch) that returns the results of `loss`."""
        model = lambda params: nnx.merge(self.graphdef, params)
        loss = lambda params, batch: checked_losses(self.loss(model(params), batch, jax.random.key(0)))
        return jax.jit(loss, compiler_options=compiler_options(self.mesh, triton_products=False))

    @under_defaults
    def evaluate(self, batch: Any) -> float:
        """The mean loss on a batch, in nats for next_token_loss; 0 if no target counts. Raises the errors of
        `train`. The part of the loss that balances experts is left out.
        """
        batch = self._placed_batch(self._checked_batch(batch))
        with jax.set_mesh(self.mesh):
            total, count, *balance = self._evaluate(self.state["params"], batch)
        count, total = float(count), float(total) - (float(balance[0]) if balance else 0.0)
        return total / (count if count > 0 else 1.0)

    def fit(
        self,
        batches: Any,
        steps: int,
        *,
        save_every: int | None = None,
        run: Mapping[str, Any] | None = None,
        on_step: Callable[[int, dict[str, jax.Array]], None] | None = None,
    ) -> None:
        """Trains until the state has had `steps` steps. Step i uses batches[i], beginning at the state's step.

        batches: TokenBatches, a list, or any object with batches[step].
        save_every: saves after every save_every steps and after the last step. run: as in save. on_step(step, found):
        called after each step with the result of `train`.

        On SIGTERM the current step finishes. Then, if there is a folder, a checkpoint is saved, even without
        save_every, and SystemExit is raised with the status 143. With several processes of jax.distributed, the process
        that gets SIGTERM notifies the others; all save and end after the next step that all of them can reach, if
        `steps` includes that step. In a single process `fit` installs a handler of SIGTERM while it runs. It does not
        if the caller handles or ignores SIGTERM, or in a thread other than the main thread, where Python has no
        handlers.

        With save_every, `fit` takes the folder's lock before the first step, as save does. If `fit` raises, it releases
        the lock.

        Raises:
          ValueError: before the first step, if save would raise: `folder` has a later checkpoint than the state, or
            another run writes it. Also if save_every or steps is out of range, or there are fewer batches than steps.
          TypeError: an argument has a wrong type; the error names it.
          FloatingPointError: after the last step, or before a checkpoint, a parameter is not finite, or no loss scale
            gives a finite gradient in float16.
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
        """The loop of `fit`: steps, checkpoints, and SIGTERM. Its arguments are `fit`'s, checked."""
        begun = self.step
        with stop_asked() as asked:
            while self.step < steps:
                found = self.train(self._checked_batch(batches[self.step], f"batches[{self.step}]"))
                if on_step is not None:
                    on_step(self.step, found)
                status = asked(self.step)
                is_due = save_every is not None and (self.step % save_every == 0 or self.step == steps)
                if is_due or (status and self._manager is not None):
                    self.save(run)
                if status:
                    if self._manager is not None:
                        with checkpoints.writing(self._manager):
                            self._manager.wait_until_finished()
                    raise SystemExit(status)
        if self.step > begun:
            self.check_finite()

    def check_finite(self) -> None:
        """Raises FloatingPointError unless all parameters and their squares are finite; it names the newest
        checkpoint. With "float16" also if the loss scale is so small that no further scale can help.
        """
        scaling = self.state.get("loss_scale")
        if scaling is not None and float(scaling["scale"]) <= SMALLEST:
            raise FloatingPointError(
                f"step {self.step}: got a gradient that is not finite at the smallest loss scale, {SMALLEST}, want a "
                'finite one: try a smaller learning rate, or config.dtype="bfloat16"'
            )
        names = checkpoints.nonfinite(self.state["params"], self.mesh)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            newest = "" if self._manager is None else f"; {checkpoints.newest(self._manager)}"
            raise FloatingPointError(
                f"step {self.step}: got parameters that are not finite, or too large to be squared ({names[0]}{more}), "
                f"want finite values: try a smaller learning rate{newest}"
            )
