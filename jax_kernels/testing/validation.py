"""jax_kernels.validate: compares a function and its gradients with a baseline that is computed in float64."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.frameworks import check_function, check_no_tensors
from jax_kernels.spelling import did_you_mean

__all__ = ["SIZES", "Comparison", "ValidationReport", "compared", "sized_shape", "validate"]

# [batch, length, heads, head_dim] of query, key and value.
SIZES = {
    "small": (1, 128, 4, 32),
    "realistic": (2, 512, 8, 64),
    "large": (4, 1024, 16, 64),
    "xlarge": (8, 2048, 32, 128),
}
# The error of a result that is allowed in any case: two roundings for 16 bits, more for longer mantissas, whose errors
# come from sums rather than from the last rounding.
_BOUNDS = {
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "float32": 2.0**-18,
    "float64": 2.0**-40,
    "complex64": 2.0**-18,
    "complex128": 2.0**-40,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One result: an output, or a gradient.

    error: the norm of the difference from the true values, over their norm; infinite if a NaN or an infinity is not at
    the same index as in the true values. baseline_error: of the baseline in the inputs' own dtypes. bound: the largest
    error allowed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    baseline_error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """The comparisons of all outputs and gradients. truth: how the true values were computed, in words."""

    truth: str
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return all(x.passed for x in self.comparisons)

    def __str__(self) -> str:
        lines = [f"{'passed' if self.passed else 'FAILED'}; true values: {self.truth}"]
        width = max((len(x.name) for x in self.comparisons), default=0)
        for x in self.comparisons:
            kind = f"{x.dtype}{list(x.shape)}"
            figures = f"error {x.error:.1e}, baseline's {x.baseline_error:.1e}, bound {x.bound:.1e}"
            lines.append(f"  {x.name:{width}}  {kind}: {figures}{'' if x.passed else '  FAILED'}")
        return "\n".join(lines)


def validate(
    candidate: Callable[..., Any],
    baseline: Callable[..., Any],
    inputs: Sequence[Any] | str,
    *,
    dtype: str = "bfloat16",
    gradients: bool = True,
    factor: float = 2.0,
) -> ValidationReport:
    """Compares candidate(*inputs), and its gradients, with a baseline.

    The true values are the baseline's for the inputs in float64 (complex128 for complex inputs); if the baseline
    refuses float64, as this library's ops do, for the inputs as they are. A result passes if its error is at most
    `factor` times the error of the baseline in the inputs' own dtypes, or within a bound of the result's dtype.
    The bounds are 2**-7 in bfloat16, 2**-10 in float16, 2**-18 in float32 and complex64, and 2**-40 in float64 and
    complex128. For example::

        report = validate(functools.partial(flash_attention, is_causal=True), plain_attention, "realistic")
        assert report.passed, report

    Args:
      candidate, baseline: functions of the inputs, which return arrays in one structure.
      inputs: arrays, or trees of arrays; or a size of random query, key and value [batch, length, heads, head_dim]:
        "small" (1, 128, 4, 32), "realistic" (2, 512, 8, 64), "large" (4, 1024, 16, 64), "xlarge" (8, 2048, 32, 128).
      dtype: of the arrays of a size.
      gradients: also compares the gradients of all floating-point and complex inputs, for one random cotangent.
      factor: the allowed multiple of the baseline's error.

    Returns a ValidationReport: `passed`, and for each output and gradient a Comparison. Its text is a table.

    Raises the functions' errors; ValueError for an unknown size, for a factor below 1, and if the results differ in
    structure or shape.
    """
    check_function("candidate", candidate, "validate")
    check_function("baseline", baseline, "validate")
    check_no_tensors(inputs, "validate")
    if not factor >= 1:
        raise ValueError(f"factor: got {factor}, want 1 or more")
    if not isinstance(inputs, str | list | tuple):
        raise TypeError(f"inputs: got {type(inputs).__name__}, want a list or tuple of arrays, or the name of a size")
    given = _random(sized_shape(inputs), dtype) if isinstance(inputs, str) else tuple(inputs)
    truth = "the baseline in float64"
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: x.astype(_exact_dtype(x)) if _is_inexact(x) else x, given)
        try:
            want = jax.tree.map(np.asarray, _results(baseline, exact, gradients))
        except (TypeError, ValueError, NotImplementedError):
            want = None
    of_baseline = jax.tree.map(np.asarray, _results(baseline, given, gradients))
    if want is None:
        truth, want = "the baseline in the inputs' dtypes, since it refuses float64", of_baseline
    got = jax.tree.map(np.asarray, _results(candidate, given, gradients))
    return ValidationReport(truth=truth, comparisons=compared(got, of_baseline, want, factor))


def sized_shape(size: str) -> tuple[int, ...]:
    """The shape [batch, length, heads, head_dim] of a size. Raises ValueError for an unknown one."""
    if size not in SIZES:
        raise ValueError(f"inputs: got {size!r}, want arrays, or one of {', '.join(SIZES)}{did_you_mean(size, SIZES)}")
    return SIZES[size]


def _random(shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in keys)


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _exact_dtype(x: Any) -> Any:
    """complex128 for complex arrays, else float64."""
    return jnp.complex128 if _is_complex(x) else jnp.float64


def _results(function: Callable[..., Any], inputs: tuple[Any, ...], gradients: bool) -> dict[str, Any]:
    """{"output": the function's results, "gradient": of each floating-point or complex input, by its path}."""
    if not gradients:
        return {"output": jax.jit(function)(*inputs)}
    leaves, structure = jax.tree.flatten(inputs)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(inputs)]
    moving = {path: x for path, x in zip(paths, leaves, strict=True) if _is_inexact(x)}

    @jax.jit
    def both(moving: dict[str, Any]) -> Any:
        def call(moving: dict[str, Any]) -> Any:
            filled = [moving.get(path, x) for path, x in zip(paths, leaves, strict=True)]
            return function(*jax.tree.unflatten(structure, filled))

        out, vjp = jax.vjp(call, moving)
        return out, vjp(jax.tree.map(_cotangent, out))[0]

    out, found = both(moving)
    return {"output": out, "gradient": found}


def _cotangent(x: jax.Array) -> Any:
    """Random values like x; the same for each dtype, up to rounding."""
    if not _is_inexact(x):
        return np.zeros(x.shape, jax.dtypes.float0)
    dtype = jnp.complex64 if _is_complex(x) else jnp.float32
    return jax.random.normal(jax.random.key(1), x.shape, dtype).astype(x.dtype)


def compared(got: Any, of_baseline: Any, want: Any, factor: float) -> tuple[Comparison, ...]:
    """A Comparison of each array of three equal trees of NumPy arrays: candidate's, baseline's and true values.

    Raises ValueError if the structures or shapes differ.
    """
    structures: list[Any] = [jax.tree.structure(tree) for tree in (got, want)]
    if structures[0] != structures[1]:
        raise ValueError(f"candidate: got results {structures[0]}, want {structures[1]}")
    found = []
    entries = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(of_baseline), jax.tree.leaves(want), strict=True)
    for (path, x), other, true in entries:
        name = jax.tree_util.keystr(path, simple=True, separator=" ")
        if x.shape != true.shape:
            raise ValueError(f"candidate: got {name} of shape {x.shape}, want {true.shape}")
        error = _error(other, true)
        found.append(
            Comparison(
                name=name,
                dtype=str(x.dtype),
                shape=x.shape,
                error=_error(x, true),
                baseline_error=error,
                bound=max(factor * error if np.isfinite(error) else 0.0, _BOUNDS.get(str(x.dtype), 0.0)),
            )
        )
    return tuple(sorted(found, key=lambda x: not x.name.startswith("output")))


def _error(got: np.ndarray, want: np.ndarray) -> float:
    if got.dtype.kind in "iu" and want.dtype.kind in "iu" and not np.array_equal(got, want):
        return max(_inexact_error(got, want), sys.float_info.min)  # float64 rounds integers from 2**53 on
    return _inexact_error(got, want)


def _inexact_error(got: np.ndarray, want: np.ndarray) -> float:
    dtype = np.complex128 if np.iscomplexobj(got) or np.iscomplexobj(want) else np.float64
    got, want = np.asarray(got, dtype), np.asarray(want, dtype)
    is_finite = np.isfinite(want)
    if not np.array_equal(np.where(is_finite, 0, got), np.where(is_finite, 0, want), equal_nan=True):
        return float("inf")
    got, want = np.where(is_finite, got, 0), np.where(is_finite, want, 0)
    if not np.isfinite(got).all():
        return float("inf")
    difference, norm = float(np.linalg.norm(got - want)), float(np.linalg.norm(want))
    return difference / norm if norm else difference
