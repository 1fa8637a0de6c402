"""Checks of Trainer's arguments. An error names the argument, the value that it got and the value that it wants."""

import functools
import json
import numbers
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_kernels.masks.checks import array_text
from jax_kernels.models.config import TransformerConfig, check_kind, check_size, positive
from jax_kernels.models.layers.routing import Routing
from jax_kernels.models.parallel.sharding import ShardingRules
from jax_kernels.models.training.loss_scale import FIRST, LARGEST, SMALLEST
from jax_kernels.models.training.token_ids import check_targets, checked_tokens
from jax_kernels.ops.cross_entropy.targets import clipped
from jax_kernels.tracing.promotion import under_defaults

__all__ = [
    "as_json",
    "check_fit",
    "check_update",
    "checked_arguments",
    "checked_batch",
    "checked_losses",
    "checked_scale",
    "fields_of_model",
    "updated",
]


def checked_batch(batch: Any, vocabulary: int, name: str) -> tuple[Any, ...]:
    """The batch, with NumPy's 64-bit integers as int32: jax.jit drops half of their bits.

    Raises TypeError or ValueError unless the batch has the form that next_token_loss takes. That is (tokens, targets),
    (tokens, targets, segment_ids) or (tokens, targets, segment_ids or None, weights): integers [B, T], and floats [B,
    T]. If all are NumPy arrays, ids must be within the vocabulary, and weights 0 or more. vocabulary: the number of
    token ids. name: of the batch, for the error.
    """
    want = "want (tokens, targets), with segment_ids, or with segment_ids and weights, arrays [batch, length]"
    if not isinstance(batch, tuple | list) or not 2 <= len(batch) <= 4:
        got = f"{len(batch)} items" if isinstance(batch, tuple | list) else type(batch).__name__
        raise TypeError(f"{name}: got {got}, {want}")
    for i, (part, x) in enumerate(zip(("tokens", "targets", "segment_ids", "weights"), batch, strict=False)):
        if part == "segment_ids" and x is None and len(batch) == 4:
            continue
        kind, kinds = (jnp.floating, "floats") if part == "weights" else (jnp.integer, "integers")
        if not hasattr(x, "dtype") or x.ndim != 2 or not jnp.issubdtype(x.dtype, kind):
            got = f"{x.dtype} {x.shape}" if hasattr(x, "dtype") else type(x).__name__
            raise TypeError(f"{name}: got {got} for item {i}, {part}, want {kinds} [batch, length]")
        if x.shape != batch[0].shape:
            raise ValueError(f"{name}: got {part} of shape {x.shape}, want tokens' {batch[0].shape}")
    # Reading JAX arrays would wait for the previous steps.
    if all(x is None or isinstance(x, np.ndarray) for x in batch):
        tokens, targets, segment_ids, weights = (*batch, None, None)[:4]
        checked_tokens(tokens, vocabulary, targets=targets, segment_ids=segment_ids)
        check_targets(targets, vocabulary)
        if weights is not None and not ((weights >= 0) & np.isfinite(weights)).all():
            raise ValueError(f"{name}: got weights below 0 or not finite, want finite values of 0 or more")
    parts = zip(("tokens", "targets", "segment_ids", "weights"), batch, strict=False)
    return tuple(_narrowed(f"{name}: got {part}", x, vocabulary, part == "segment_ids") for part, x in parts)


def _narrowed(got: str, x: Any, vocabulary: int, is_segments: bool) -> Any:
    """An item of a batch, with NumPy's 64-bit integers as int32. Ids outside the vocabulary stay outside.

    got: the beginning of the error. is_segments: whether the item is segment_ids. Raises ValueError for segment_ids
    that int32 does not hold.
    """
    if not isinstance(x, np.ndarray) or x.dtype not in (np.int64, np.uint64):
        return x
    if not is_segments:
        return clipped(x, vocabulary)
    held = x.astype(np.int32)
    if (held != x).any():
        raise ValueError(f"{got} from {x.min()} to {x.max()}, want int32")
    return held


def checked_arguments(config: Any, optimizer: Any, mesh: Any, rules: Any, seed: Any, loss: Any, folder: Any) -> int:
    """The seed as an int. Raises TypeError or ValueError if one of these arguments of Trainer is wrong."""
    wanted: tuple[tuple[str, Any, Any, str], ...] = (
        ("config", config, TransformerConfig, "a TransformerConfig or a LongNetConfig"),
        ("mesh", mesh, Mesh | None, "a jax.sharding.Mesh, as make_mesh gives it, or None"),
        ("rules", rules, ShardingRules | None, "ShardingRules or None"),
        ("folder", folder, str | os.PathLike | None, "a path or None"),
    )
    for name, x, kinds, want in wanted:
        check_kind(name, x, kinds, want)
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(f"optimizer: got {optimizer!r}, want one of optax, such as optax.adamw(1e-3)")
    if not callable(loss):
        raise TypeError(f"loss: got {loss!r}, want a function of (model, batch, key)")
    check_size("seed", seed, most=2**32 - 1)
    return int(seed)


def checked_losses(found: Any) -> tuple[Any, ...]:
    """The results of Trainer's argument `loss`, as a tuple. Raises TypeError unless they are (sum, count), or these
    with the balance term and the Routing; ValueError unless the numbers are scalars.
    """
    want = "want (the sum of the losses, their count), or these with the balance term and the Routing"
    if not isinstance(found, tuple | list) or len(found) not in (2, 4):
        got = f"{len(found)} values" if isinstance(found, tuple | list) else array_text(found)
        raise TypeError(f"loss: got {got} from it, {want}")
    for which, x in zip(("sum", "count", "balance term"), found, strict=False):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | int | float):
            raise TypeError(f"loss: got {array_text(x)} as the {which} from it, {want}")
        if np.shape(x) != ():
            raise ValueError(f"loss: got {array_text(x)} as the {which} from it, want a scalar")
    if not jnp.issubdtype(jnp.result_type(found[0]), jnp.floating):
        raise TypeError(f"loss: got {array_text(found[0])} as the sum from it, want a float")
    if len(found) == 4 and not isinstance(found[3], Routing):
        raise TypeError(f"loss: got {array_text(found[3])} as the fourth result from it, want the model's Routing")
    return tuple(found)


def updated(optimizer: Any, gradients: Any, moments: Any, params: Any) -> tuple[Any, Any]:
    """The results of optimizer.update. Raises TypeError if it needs further arguments, such as the loss's value."""
    try:
        return optimizer.update(gradients, moments, params)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        want = "want one whose update needs only (gradients, state, params), such as optax.adamw(1e-3)"
        raise TypeError(f"optimizer: got one with {str(error).split(' ', 1)[1]}, {want}") from error


@under_defaults  # optax promotes dtypes
def check_update(optimizer: Any, moments: Any, params: Any) -> None:
    """Raises TypeError if the optimizer's update needs further arguments. moments, params: arrays or their shapes."""
    jax.eval_shape(functools.partial(updated, optimizer), params, moments, params)


def checked_scale(scale: Any, config: TransformerConfig) -> float | None:
    """The first loss scale of a Trainer: None unless config.dtype is float16. Raises TypeError or ValueError.

    scale: the argument `loss_scale`.
    """
    if config.param_dtype == "float16":
        raise ValueError("config: got param_dtype float16, want float32 or bfloat16: float16 loses small updates")
    if config.dtype != "float16":
        if scale is not None:
            raise ValueError(
                f"loss_scale: got {scale!r} with dtype {config.dtype}, want None: only float16 has a scale"
            )
        return None
    if scale is None:
        return FIRST
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"loss_scale: got {scale!r}, want a number or None")
    if not SMALLEST < (first := float(scale)) <= LARGEST:
        raise ValueError(f"loss_scale: got {scale}, want a number above {SMALLEST}, at most {LARGEST}")
    return first


def check_fit(batches: Any, steps: Any, save_every: Any, on_step: Any) -> None:
    """Raises TypeError or ValueError if one of these arguments of Trainer.fit is wrong; the error names it."""
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer):
        raise TypeError(f"steps: got {steps!r}, want an int: the total number of steps")
    if steps < 0:
        raise ValueError(f"steps: got {steps}, want 0 or more")
    if save_every is not None:
        positive("save_every", save_every)
    if not hasattr(type(batches), "__getitem__"):
        raise TypeError(f"batches: got {type(batches).__name__}, want TokenBatches, a list, or an object with [step]")
    if isinstance(batches, Sequence) and len(batches) < steps:
        raise ValueError(f"batches: got {len(batches)} of them, want one for each of the {steps} steps")
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step: got {on_step!r}, want a function of (step, found)")


def as_json(run: Any) -> dict[str, Any]:
    """The dict that `run`, the argument of Trainer.save, is after a round trip through JSON; {} for None.

    Raises TypeError if it is not a mapping of JSON values.
    """
    try:
        return json.loads(json.dumps(dict(run or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(f"run: got {type(run).__name__} ({error}), want a mapping of JSON values") from None


# Fields of a config that change neither the parameters nor the result of the forward, beyond rounding.
_FREE = {
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
_FREE_OF_EXPERTS = {"balance_loss", "exchange", "implementation"}


def fields_of_model(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config that change the parameters or the forward. fields: the config's, as JSON.

    A checkpoint that is older than a field has the field's default.
    """
    defaults: dict[str, Any] = {"qk_norm": False, "fp8_scaling": "dynamic"}
    found = defaults | {name: x for name, x in fields.items() if name not in _FREE}
    if experts := found.get("experts"):
        kept = {name: x for name, x in experts.items() if name not in _FREE_OF_EXPERTS}
        # The rate is the training's, but with one there is a parameter more.
        found["experts"] = kept | {"bias_rate": experts.get("bias_rate") is not None}
    return found
