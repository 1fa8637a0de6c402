"""Calls of layer_norm and rms_norm with their definitions in float64, and bounds of their errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import layer_norm, rms_norm


@dataclasses.dataclass(frozen=True)
class Case:
    """A call. weights: the dtype of scale and bias.

    centre: the mean of x, over a standard deviation of 1. drift: by so much x rises from a row's start to its end.
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

    def arrays(self):
        """x, residual, scale, bias, and the cotangents of both results."""
        random = np.random.default_rng(0)
        normal = lambda shape, dtype, centre=0.0: jnp.asarray(random.standard_normal(shape) + centre, dtype)
        centre = self.centre + np.linspace(0, self.drift, self.shape[-1])
        x, residual = (normal(self.shape, self.dtype, centre) for _ in range(2))
        columns = self.shape[-1:]
        scale = normal(columns, self.weights, 1.0) if self.weights else None
        bias = normal(columns, self.weights) if self.weights and self.has_bias and self.op == "layer_norm" else None
        dout, dtotal = (normal(self.shape, self.dtype) for _ in range(2))
        return {"x": x, "residual": residual if self.has_residual else None, "scale": scale, "bias": bias}, dout, dtotal

    def run(self, implementation=None):
        """The results by name."""
        arrays, dout, dtotal = self.arrays()
        given = {name: x for name, x in arrays.items() if x is not None}
        statics = {"eps": self.eps, "scale_offset": self.scale_offset, "implementation": implementation}
        op = {"layer_norm": layer_norm, "rms_norm": rms_norm}[self.op]

        @jax.jit
        def both(given, cotangents):
            results, vjp = jax.vjp(lambda given: op(**given, **statics), given)
            return results, vjp(cotangents)[0]

        results, gradients = both(given, (dout, dtotal) if self.has_residual else dout)
        out, total = results if self.has_residual else (results, None)
        found = {"out": out} | ({} if total is None else {"total": total})
        return found | {f"d{name}": x for name, x in gradients.items()}

    def definition(self):
        """The same in float64. x + residual is rounded to x's dtype first."""
        arrays, dout, dtotal = self.arrays()
        wide = lambda x: None if x is None else np.asarray(x).astype(np.float64)
        total = arrays["x"] if arrays["residual"] is None else arrays["x"] + arrays["residual"]
        x, scale, bias, dout = (wide(y) for y in (total, arrays["scale"], arrays["bias"], dout))
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
    "wide": Case((3, 5000), has_residual=True),
    "rms_wide": Case((3, 5000), "rms_norm"),
}
# Rows that do not fit the registers of a program.
LONG = {
    "long": Case((3, 40_001)),
    "long_far_mean": Case((2, 70_000), dtype="float32", centre=1e4, has_residual=True),
    "long_drift": Case((3, 40_001), drift=8.0),
    "rms_long": Case((3, 70_000), "rms_norm", has_residual=True),
}
# What the Hopper kernels serve: a row for each warp, and rows of 1, 2 and 4 warpgroups.
HOPPER = {
    "row_for_each_warp": Case((2, 3, 256)),
    "many_short_rows": Case((37, 384), "rms_norm", weights="bfloat16", has_residual=True, scale_offset=1.0),
    "no_weights": Case((5, 128), weights=None, dtype="float16"),
    "one_warpgroup": Case((19, 2560), centre=100.0, has_residual=True),
    "rms_one_warpgroup": Case((6, 2560), "rms_norm", dtype="float16", weights="float16"),
    "no_bias": Case((6, 2560), has_bias=False, drift=8.0),
    "two_warpgroups": Case((7, 5120)),
    "wide_two_warpgroups": Case((3, 13312), "rms_norm"),
    "four_warpgroups": Case((7, 16384), has_residual=True, drift=8.0),
    "rms_four_warpgroups": Case((5, 16384), "rms_norm", has_residual=True, weights="bfloat16"),
}


def bounds(case: Case, name: str, x, right: np.ndarray) -> np.ndarray:
    """The largest error of each number of a result: its rounding, and those of sums in float32 of terms near 1."""
    count = np.prod(case.shape[:-1]) if name in ("dscale", "dbias") else 1
    sums = np.sqrt(count) * max(1.0, np.sqrt(case.shape[-1]) / 16)
    exact = 2**-19 * max(1.0, abs(case.centre)) * sums + float(jnp.finfo(x.dtype).eps) * 0.01
    return 2 * exact + (0.51 * float(jnp.finfo(x.dtype).eps) + exact) * np.abs(right)


def errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """The largest error of each result, in bounds, and 1."""
    got, want = case.run(implementation), case.definition()
    assert sorted(got) == sorted(want)
    errors = {name: np.abs(np.asarray(got[name]).astype(np.float64) - right) for name, right in want.items()}
    return {
        name: (float(np.max(np.nan_to_num(error / bounds(case, name, got[name], want[name]), nan=np.inf))), 1.0)
        for name, error in errors.items()
    }
