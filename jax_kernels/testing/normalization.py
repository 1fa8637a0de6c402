"""The cases of the norms that tests and `jax-kernels check` share, their definitions in float64, and error bounds."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.normalization.normalization import layer_norm, rms_norm
from jax_kernels.testing import largest_error
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.typical_call import LENGTH, TypicalCall

__all__ = [
    "CASES",
    "HOPPER",
    "LONG",
    "TYPICAL",
    "Case",
    "errors_by",
    "errors_of",
    "quantized_errors_by",
    "quantized_why_not",
    "why_not",
]

OPS: dict[str, Callable[..., Any]] = {"layer_norm": layer_norm, "rms_norm": rms_norm}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of layer_norm or rms_norm (op), without its arrays. shape: x's.

    weights: the dtype of scale and bias; None for neither.
    centre: the mean of x, whose standard deviation is 1. drift: the rise of x from a row's start to its end.
    """

    shape: tuple[int, ...]
    op: str = "layer_norm"
    dtype: str = "bfloat16"
    weights: str | None = "float32"
    has_bias: bool = True
    has_residual: bool = False
    eps: float = 1e-6
    scale_offset: float = 0.0
    centre: float = 0.5
    drift: float = 0.0

    def of_rows(self, count: int) -> "Case":
        """The case with `count` rows of the same width."""
        return dataclasses.replace(self, shape=(count, *self.shape[-1:]))

    @property
    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of x, residual, scale and bias by name, if the call has them."""
        found: dict[str, Any] = {"x": (self.shape, self.dtype)}
        if self.has_residual:
            found["residual"] = found["x"]
        if self.weights:
            found["scale"] = self.shape[-1:], self.weights
        if self.weights and self.has_bias and self.op == "layer_norm":
            found["bias"] = found["scale"]
        return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in found.items()}

    @property
    def statics(self) -> dict[str, Any]:
        """The arguments of the op that are no arrays, by name, except implementation."""
        return {"eps": self.eps, "scale_offset": self.scale_offset}

    def arrays(self) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
        """(the arrays of the call by name, the cotangent of out, the cotangent of total): normal random values.

        total is x + residual, which the op returns with a residual.
        """
        random = np.random.default_rng(0)
        normal = lambda shape, dtype, centre=0.0: jnp.asarray(random.standard_normal(shape) + centre, dtype)
        centres: dict[str, Any] = {"scale": 1.0, "bias": 0.0}
        rows = self.centre + np.linspace(0, self.drift, self.shape[-1])
        arrays = {name: normal(x.shape, x.dtype, centres.get(name, rows)) for name, x in self.types.items()}
        return arrays, normal(self.shape, self.dtype), normal(self.shape, self.dtype)

    def run(self, implementation: str | None = None) -> dict[str, jax.Array]:
        """The results by name: "out", with a residual "total" (x + residual), and the gradients, as in "dx"."""
        given, dout, dtotal = self.arrays()
        op = functools.partial(OPS[self.op], **self.statics, implementation=implementation)

        @jax.jit
        def both(given, cotangents):
            results, vjp = jax.vjp(lambda given: op(**given), given)
            return results, vjp(cotangents)[0]

        results, gradients = both(given, (dout, dtotal) if self.has_residual else dout)
        out, total = results if self.has_residual else (results, None)
        found = {"out": out} | ({} if total is None else {"total": total})
        return found | {f"d{name}": x for name, x in gradients.items()}

    def definition(self) -> dict[str, np.ndarray]:
        """The right results in NumPy float64, with the names that `run` gives. x + residual is rounded to x's dtype
        first.
        """
        arrays, dout, dtotal = self.arrays()
        wide: Any = lambda x: None if x is None else np.asarray(x).astype(np.float64)
        total = arrays["x"] + arrays["residual"] if self.has_residual else arrays["x"]
        x, scale, bias, dout = (wide(y) for y in (total, arrays.get("scale"), arrays.get("bias"), dout))
        centred = x - x.mean(-1, keepdims=True) if self.op == "layer_norm" else x
        inverse = 1 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + self.eps)
        normed, weight = centred * inverse, 1.0 if scale is None else scale + self.scale_offset
        g = dout * weight
        dx = g - normed * (g * normed).mean(-1, keepdims=True)
        dx = (dx - g.mean(-1, keepdims=True) if self.op == "layer_norm" else dx) * inverse
        rows = tuple(range(x.ndim - 1))
        found = {"out": normed * weight + (0 if bias is None else bias)}
        if self.has_residual:
            dx = dx + wide(dtotal)
            found |= {"total": x, "dresidual": dx}
        found["dx"] = dx
        if scale is not None:
            found["dscale"] = (dout * normed).sum(rows)
        if bias is not None:
            found["dbias"] = dout.sum(rows)
        return found


def why_not(case: Case, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can."""
    return refusal(OPS[case.op], **case.types, **case.statics, implementation=implementation)


def errors_of(case: Case, got: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(largest relative error, bound) of each result by name, with a floor for values near 0. got: from Case.run."""
    want = case.definition()
    if sorted(got) != sorted(want):
        raise ValueError(f"got: results {sorted(got)}, want {sorted(want)}")
    found = {}
    for name, right in want.items():
        eps = float(jnp.finfo(got[name].dtype).eps)
        # Roundings of the result, and of float32 sums whose terms have magnitude 1.
        count = np.prod(case.shape[:-1]) if name in ("dscale", "dbias") else 1
        sums = np.sqrt(count) * max(1.0, np.sqrt(case.shape[-1]) / 16)
        exact = 2**-19 * max(1.0, abs(case.centre)) * sums + eps * 0.01
        bound = 0.51 * eps + exact
        found[name] = largest_error(got[name], right, floor=2 * exact / bound), float(bound)
    return found


def errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(largest relative error, bound) of each result by name, for a call by this implementation."""
    return errors_of(case, case.run(implementation))


def quantized_why_not(case: Case, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case with an 8-bit output on this machine; None if it can."""
    return refusal(OPS[case.op], **case.types, **case.statics, quantize="e4m3", implementation=implementation)


def quantized_errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """{"out": (largest error in steps of e4m3, bound)} of an 8-bit output by this implementation.

    The bound is half a step, and the error of the sums.
    """
    arrays, *_ = case.arrays()
    options = case.statics | {"quantize": "e4m3", "implementation": implementation}
    got = jax.jit(lambda arrays: OPS[case.op](**arrays, **options))(arrays)
    values = got[0] if case.has_residual else got
    scale, info = np.asarray(values.scale, np.float64)[..., None], jnp.finfo(jnp.float8_e4m3fn)
    exact = case.definition()["out"] / scale
    step = np.maximum(np.abs(exact), float(info.tiny)) * float(info.eps)
    error = np.abs(np.asarray(values.values).astype(np.float64) - exact) / step
    sums = 2**-19 * max(1, abs(case.centre)) * max(1, np.sqrt(case.shape[-1]) / 16)
    return {"out": (float(error.max(initial=0)), 0.501 + float((sums / scale / step).max(initial=0)))}


CASES = {
    "plain": Case((5, 7, 64)),
    "odd": Case((13, 63)),
    "prime": Case((3, 257), weights="bfloat16"),
    "one_row": Case((129,)),
    "one_column": Case((4, 1), eps=1e-3),
    "residual": Case((9, 200), has_residual=True),
    "no_bias": Case((9, 200), has_bias=False, dtype="float16", weights="float16"),
    "no_weights": Case((9, 200), weights=None, has_residual=True),
    "float32": Case((6, 300), dtype="float32"),
    "far_mean": Case((6, 1000), dtype="float32", centre=1e4),
    "far_mean_bf16": Case((6, 1000), centre=100.0),
    "rms": Case((5, 7, 65), "rms_norm"),
    "rms_residual": Case((21, 128), "rms_norm", has_residual=True, weights="bfloat16"),
    "rms_offset": Case((21, 100), "rms_norm", scale_offset=1.0, eps=1e-5),
    "rms_no_scale": Case((21, 100), "rms_norm", weights=None, dtype="float32"),
    "wide": Case((3, 5000), has_residual=True, eps=0.5),
    "rms_wide": Case((3, 5000), "rms_norm", eps=0.5),
}
# Rows that do not fit the registers of a program. An eps near the rows' mean square changes every result.
LONG = {
    "long": Case((3, 40_001), eps=0.5),
    "long_far_mean": Case((2, 70_000), dtype="float32", centre=1e4, has_residual=True, eps=0.5),
    "long_drift": Case((3, 40_001), drift=8.0),
    "rms_long": Case((3, 70_000), "rms_norm", has_residual=True, eps=0.5),
}
# Cases that the Hopper kernels serve: a row for each warp, and rows of 1, 2 and 4 warpgroups.
HOPPER = {
    "row_for_each_warp": Case((2, 3, 256), eps=0.5),
    "many_short_rows": Case((37, 384), "rms_norm", weights="bfloat16", has_residual=True, scale_offset=1.0),
    "no_weights": Case((5, 128), weights=None, dtype="float16"),
    "one_warpgroup": Case((19, 2560), centre=100.0, has_residual=True),
    "rms_one_warpgroup": Case((6, 2560), "rms_norm", dtype="float16", weights="float16"),
    "no_bias": Case((6, 2560), has_bias=False, drift=8.0),
    "two_warpgroups": Case((7, 5120), eps=0.5),
    "wide_two_warpgroups": Case((3, 13312), "rms_norm"),
    "four_warpgroups": Case((7, 16384), has_residual=True, drift=8.0),
    "rms_four_warpgroups": Case((5, 16384), "rms_norm", has_residual=True, weights="bfloat16", eps=0.5),
}
TYPICAL = {
    name: TypicalCall(op, implementations=("triton", "mosaic_gpu", "xla"), shapes=((LENGTH, 4096),))
    for name, op in OPS.items()
}
