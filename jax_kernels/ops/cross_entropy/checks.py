"""The checks of linear_cross_entropy's arguments."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import chunks, dispatch
from jax_kernels.inputs import linear_cross_entropy as loss_inputs
from jax_kernels.inputs.linear_cross_entropy import LossOptions
from jax_kernels.masks.checks import is_int
from jax_kernels.ops import checks
from jax_kernels.ops.cross_entropy.implementations import LossRequest
from jax_kernels.ops.cross_entropy.targets import check_targets, clipped, usable_targets
from jax_kernels.ops.sharding.partitioning import is_partitioned
from jax_kernels.plain_numbers import plain

__all__ = ["CheckedLoss", "check", "check_reduction", "checked_options", "request_of"]

REDUCTIONS = ("none", "mean", "sum")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedLoss:
    """The arrays of a checked call. targets: as in LossInputs. weights: [...], or None."""

    x: jax.Array
    w: jax.Array
    targets: jax.Array
    weights: jax.Array | None


def check(
    *, x, w, targets, weights=None, reduction="none", transpose_w=False, softcap=None, label_smoothing=0.0, z_loss=0.0,
    ignore_index=-1, precision=None, implementation=None,
) -> tuple[LossRequest, CheckedLoss, LossOptions]:  # fmt: skip
    """(request, arrays, options) of a linear_cross_entropy call. Raises the errors that linear_cross_entropy
    documents.
    """
    checks.check_flags(transpose_w=transpose_w)
    checks.check_names(implementation=implementation)
    check_reduction(reduction)
    options = checked_options(transpose_w, softcap, label_smoothing, z_loss, precision)
    x, w = _checked_operands(x, w, transpose_w)
    targets = _checked_targets(targets, x.shape[:-1], w.shape[0 if transpose_w else 1], ignore_index)
    weights = None if weights is None else _checked_weights(weights, x.shape[:-1])
    request = request_of(x, w, reduction, options)
    return request, CheckedLoss(x=x, w=w, targets=targets, weights=weights), options


def request_of(x: Any, w: Any, reduction: str, options: LossOptions) -> LossRequest:
    """The request of a call with these checked arguments."""
    depth, vocabulary = w.shape[::-1] if options.transpose_w else w.shape
    return LossRequest(
        op="linear_cross_entropy",
        device=dispatch.target_device(x),
        tokens=math.prod(x.shape[:-1]),
        depth=depth,
        vocabulary=vocabulary,
        dtype=str(x.dtype),
        w_dtype=str(w.dtype),
        reduction=reduction,
        softcap=options.softcap,
        precision=options.precision,
        is_partitioned=is_partitioned() and not (_is_on_one_device(x) and _is_on_one_device(w)),
    )


def _is_on_one_device(x: Any) -> bool:
    """Whether x is a concrete array on one device. A traced array may be on several."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and len(x.devices()) == 1


def check_reduction(reduction: Any) -> None:
    """Raises TypeError unless the reduction is a str, ValueError unless it is known."""
    checks.check_names(reduction=reduction)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: got {reduction!r}, want 'none', 'mean' or 'sum'")


def checked_options(
    transpose_w: bool, softcap: Any, label_smoothing: Any, z_loss: Any, precision: Any = None
) -> LossOptions:
    """The LossOptions of these arguments. Raises TypeError or ValueError."""
    checks.check_softcap(softcap)
    checks.check_names(precision=precision)
    if precision not in (None, "fp8"):
        raise ValueError(f"precision: got {precision!r}, want 'fp8' or None")
    for name, value in {"label_smoothing": label_smoothing, "z_loss": z_loss}.items():
        checks.check_number(name, value)
        if value is None:
            raise TypeError(f"{name}: got None, want a number")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: got {label_smoothing}, want a number from 0 to 1")
    if z_loss < 0:
        raise ValueError(f"z_loss: got {z_loss}, want a number of 0 or more")
    return LossOptions(
        transpose_w=bool(transpose_w),
        softcap=None if softcap is None else float(softcap),
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        precision=precision,
        logits_bytes=_logits_bytes(),
        least_chunk=loss_inputs.LEAST_CHUNK,
    )


def _logits_bytes() -> int:
    """The bytes of logits in memory at once: LOGITS_BYTES, or a smaller memory_limit."""
    limit = chunks.limit()
    return loss_inputs.LOGITS_BYTES if limit is None else max(int(min(limit, loss_inputs.LOGITS_BYTES)), 1)


def _checked_operands(x: Any, w: Any, transpose_w: bool) -> tuple[Any, Any]:
    """(x, w) as jax.Arrays with dtypes and shapes that fit. Raises TypeError or ValueError."""
    x, w = checks.checked_array("x", x), checks.checked_array("w", w)
    for name, y in {"x": x, "w": w}.items():
        if y.dtype not in checks.DTYPES:
            raise TypeError(f"{name}: got dtype {y.dtype}, want bfloat16, float16 or float32")
    want = "[V, D] with transpose_w" if transpose_w else "[D, V]"
    if x.ndim < 1:
        raise ValueError(f"x: got shape {x.shape}, want [..., D]")
    if w.ndim != 2 or x.shape[-1] != w.shape[1 if transpose_w else 0]:
        raise ValueError(f"w: got shape {w.shape}, want {want} with x's D = {x.shape[-1]}")
    if w.shape[0 if transpose_w else 1] == 0:
        raise ValueError(f"w: got shape {w.shape}, want {want} with one entry of the vocabulary or more")
    return x, w


def _checked_targets(targets: Any, shape: tuple[int, ...], vocabulary: int, ignore_index: Any) -> Any:
    """The targets as LossInputs has them. Raises TypeError or ValueError."""
    ignore_index = plain(ignore_index)
    if not is_int(ignore_index):
        raise TypeError(f"ignore_index: got {type(ignore_index).__name__}, want an int")
    if not isinstance(targets, jax.Array | np.ndarray | np.integer | jax.ShapeDtypeStruct):
        raise TypeError(f"targets: got {type(targets).__name__}, want an array of integers")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets: got dtype {targets.dtype}, want integers")
    if targets.shape != shape:
        raise ValueError(f"targets: got shape {targets.shape}, want x's {shape}")
    if isinstance(targets, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32))
    if ignore_index >= 0:  # may be an id outside the vocabulary, which the clipped targets would not show
        numeric: Any = jnp if isinstance(targets, jax.Array) else np
        limits = jnp.iinfo(targets.dtype)
        is_ignored = targets == ignore_index if ignore_index <= limits.max else numeric.zeros(shape, bool)
        targets = numeric.where(is_ignored, -1, clipped(targets, vocabulary))
    check_targets(targets, vocabulary)
    return usable_targets(targets, vocabulary)


def _checked_weights(weights: Any, shape: tuple[int, ...]) -> Any:
    """The weights [...] as a jax.Array. Raises TypeError or ValueError."""
    weights = checks.checked_array("weights", weights)
    if weights.dtype not in checks.DTYPES:
        raise TypeError(f"weights: got dtype {weights.dtype}, want bfloat16, float16 or float32")
    if weights.shape != shape:
        raise ValueError(f"weights: got shape {weights.shape}, want x's {shape}")
    return weights
