"""The demo's training: model and optimizer, the jitted step, held-out loss, checkpoints, sampling."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from jax_kernels.compilation import compile_kernels, compiler_options, paused_collections
from jax_kernels.models import LongNet, LongNetConfig, Transformer, TransformerConfig, make_mesh, state_shardings
from jax_kernels.models.parallel.sharding import ShardingRules, batch_sharding, check_mesh, place
from jax_kernels.models.training.checkpoints import writing
from jax_kernels.models.training.folder_lock import FolderLock

__all__ = ["Checkpoints", "Settings", "Trainer", "bits_per_byte", "make_model", "make_optimizer", "sample"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a training run, except its number of steps and the text itself. The checkpoint holds them.

    learning_rate: the peak. decay_steps: the rate warms up, then falls along a cosine until this step. So a run that
    stops before can be resumed to the same end. text: the path that the user gave, or None; sha256: of the bytes read.
    """

    model: TransformerConfig
    seq_len: int
    batch_size: int
    learning_rate: float
    decay_steps: int
    seed: int
    text: str | None
    sha256: str

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Settings":
        """The Settings of a dict that dataclasses.asdict made and JSON kept."""
        model = fields["model"]
        config = LongNetConfig(**model) if "segment_lengths" in model else TransformerConfig(**model)
        return cls(**{**fields, "model": config})


def make_model(config: TransformerConfig, rngs: nnx.Rngs) -> Transformer:
    return (LongNet if isinstance(config, LongNetConfig) else Transformer)(config, rngs=rngs)


def make_optimizer(steps: int, peak: float) -> optax.GradientTransformation:
    """AdamW with clipped gradients, and weight decay on matrices only.

    The learning rate warms up to `peak`, then falls along a cosine until `steps`.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=max(1, steps // 20),
        decay_steps=max(2, steps),
        end_value=peak / 10,
    )
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def bits_per_byte(nats: Any) -> Any:
    return nats / math.log(2)


class Trainer:
    """The state of a run on the devices of a mesh, and the compiled functions on it.

    state: {"params": nnx.State, "optimizer": the optax state}; every step consumes the state (donation) and makes a new
    state. step: the number of steps so far. mesh: the devices; None for one device.

    Raises ValueError if the number of devices that shard a batch does not divide it, or if an axis of the mesh has no
    use for the model.
    """

    def __init__(self, settings: Settings, mesh: Mesh | None = None) -> None:
        self.settings = settings
        self.optimizer = make_optimizer(settings.decay_steps, settings.learning_rate)

        # Not under jit, which would compile the initialisation of each layer separately.
        self.graphdef, params = nnx.split(make_model(settings.model, nnx.Rngs(settings.seed)), nnx.Param)
        self.mesh = make_mesh({"data": 1}) if mesh is None else mesh
        check_mesh(self.mesh, ShardingRules(), settings.model.sequence_axis, settings.model.num_layers)
        self._batch = batch_sharding((settings.batch_size, settings.seq_len), self.mesh)
        params = place(params, state_shardings(params, self.mesh))
        moments = state_shardings(jax.eval_shape(self.optimizer.init, params), self.mesh)
        self.state = {"params": params, "optimizer": jax.jit(self.optimizer.init, out_shardings=moments)(params)}
        self.step = 0
        self._loss = jax.jit(self._mean_loss)

    def _mean_loss(self, params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """The mean cross-entropy, in nats per byte, of inputs [B, T]; targets [B, T] are the bytes that follow them."""
        return nnx.merge(self.graphdef, params).losses(inputs, targets, reduction="mean")

    @functools.cached_property
    def _train(self) -> Any:
        """The compiled step: (state, inputs, targets) -> (new state, mean loss in nats per byte)."""
        places = jax.tree.map(lambda x: x.sharding, self.state)
        options = compiler_options(self.mesh, triton_products=False)

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, None), compiler_options=options)
        def train(state, inputs, targets):
            nats, gradients = jax.value_and_grad(self._mean_loss)(state["params"], inputs, targets)
            updates, optimizer = self.optimizer.update(gradients, state["optimizer"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, nats

        shape = (self.settings.batch_size, self.settings.seq_len)
        of_batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._batch)
        with jax.set_mesh(self.mesh):
            with paused_collections():
                lowered = train.lower(self.state, of_batch, of_batch)
            compile_kernels(lowered, device=self.mesh.local_devices[0], wait=False)
            return lowered.compile()

    def compile(self) -> None:
        """Compiles the step, if it is not compiled yet."""
        _ = self._train

    def train(self, windows: np.ndarray) -> jax.Array:
        """Runs one step on windows, uint8 [B, T + 1]. Returns its loss in nats per byte, on the device, perhaps not yet
        computed.
        """
        self.state, nats = self._train(self.state, *jax.device_put(_inputs_and_targets(windows), self._batch))
        self.step += 1
        return nats

    def evaluate(self, batches: np.ndarray) -> float:
        """The mean loss of batches of windows, uint8 [batches, B, T + 1], in bits per byte."""
        with jax.set_mesh(self.mesh):
            nats = [float(self._loss(self.state["params"], *_inputs_and_targets(batch))) for batch in batches]
        return float(np.mean(bits_per_byte(np.array(nats))))

    @property
    def params(self) -> nnx.State:
        return self.state["params"]


def _inputs_and_targets(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), int32 [B, T] each, of windows [B, T + 1]: each byte is predicted from the bytes before it."""
    windows = windows.astype(np.int32)
    return windows[:, :-1], windows[:, 1:]


class Checkpoints:
    """Writes and reads the checkpoints of a run in a folder, which keeps only the newest one. It has the folder's lock.

    A checkpoint holds the trainer's state and `run`, a JSON value. replace: whether the first save removes all
    checkpoints that are in the folder, which is for a new run.

    Raises FolderInUse if another run writes the folder, NotWritten if it cannot be written. save raises NotWritten too.
    """

    def __init__(self, folder: Path, *, replace: bool) -> None:
        self._lock = FolderLock(folder)
        self._lock.take()
        self._replace = replace
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(1),
                # An asynchronous save on the CPU would read buffers that the next step reuses.
                enable_async_checkpointing=False,
            ),
        )

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint, None without a checkpoint."""
        return self._manager.latest_step()

    def save(self, trainer: Trainer, run: Any) -> None:
        """Writes a checkpoint of the trainer's state and of `run`, and removes earlier checkpoints."""
        with writing(self._manager, trainer.step):
            if self._replace:
                for step in self._manager.all_steps():
                    self._manager.delete(step)
                self._replace = False
            items = ocp.args.Composite(state=ocp.args.StandardSave(trainer.state), run=ocp.args.JsonSave(run))
            self._manager.save(trainer.step, args=items)

    def load_run(self) -> Any:
        return self._manager.restore(self.latest, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run

    def load_state(self, trainer: Trainer) -> None:
        """Sets the trainer's state and step from the newest checkpoint. Raises FileNotFoundError without one."""
        step = self.latest
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self._manager.directory}")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, trainer.state)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        trainer.state = self._manager.restore(step, args=items).state
        trainer.step = step

    def close(self) -> None:
        try:
            self._manager.close()
        finally:
            self._lock.release()


def sample(trainer: Trainer, prompt: np.ndarray, length: int, seed: int, temperature: float = 0.8) -> bytes:
    """Draws `length` bytes after the prompt (uint8 [P]), one by one, each from the model's logits after the earlier
    bytes.

    Dilated attention has no cache: the model runs on the whole sequence again for each byte.
    """
    # Decoding has other needs than training: queries that start within the sequence, and one query a step. Matmuls
    # of one row gain nothing from 8 bits, and would round the weights again for each byte.
    config = dataclasses.replace(trainer.settings.model, implementation=None, precision=None, scaling=None)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, nnx.Rngs(0))))

    @jax.jit
    def generate_with_cache(params, prompt, key):
        model = nnx.merge(graphdef, params)

        def one(carry, key):
            logits, cache = carry
            token = jax.random.categorical(key, logits[:, -1:] / temperature).astype(jnp.int32)
            return model(token, cache=cache), token[0, 0]

        logits, cache = model(prompt[None], cache=model.init_cache(1, len(prompt) + length))
        _, tokens = jax.lax.scan(one, (logits[:, -1:], cache), jax.random.split(key, length))
        return tokens

    @jax.jit
    def generate_without_cache(params, prompt, key):
        model = nnx.merge(graphdef, params)

        def one(tokens, args):
            index, key = args
            logits = jax.lax.dynamic_index_in_dim(model(tokens), index, axis=1, keepdims=False)
            token = jax.random.categorical(key, logits / temperature).astype(jnp.int32)
            return jax.lax.dynamic_update_index_in_dim(tokens, token[:, None], index + 1, axis=1), token[0]

        # Attention is causal: padding past the last token has no effect.
        tokens = jnp.pad(prompt[None], ((0, 0), (0, length)))
        places = len(prompt) - 1 + jnp.arange(length)
        _, drawn = jax.lax.scan(one, tokens, (places, jax.random.split(key, length)))
        return drawn

    generate = generate_without_cache if isinstance(config, LongNetConfig) else generate_with_cache
    tokens = generate(trainer.params, jnp.asarray(prompt, jnp.int32), jax.random.key(seed))
    return np.asarray(tokens).astype(np.uint8).tobytes()
