"""The cases of 8-bit grouped matmuls that tests and `jax-kernels check` share, their definition in float64, and bounds.

A definition multiplies the operands that quantize has rounded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.grouped.grouped_matmul import grouped_gated_matmul, grouped_matmul
from jax_kernels.quantization import quantize
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.typical_call import spec

__all__ = ["CASES", "GPU", "HOPPER", "QUICK", "Case", "errors_by", "why_not"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of grouped_matmul with precision="fp8", without an activation and without its arrays.

    With is_gated, of grouped_gated_matmul with silu.

    sizes: of the groups. past: the rows of x past the last group, which hold NaN, as does their cotangent. depth: K.
    columns: N. magnitudes: the standard deviations of x and w. tokens: the rows of x, from which the call gathers its
    rows; None for a call that does not gather.
    """

    sizes: tuple[int, ...]
    depth: int
    columns: int
    past: int = 0
    dtype: str = "bfloat16"
    out_dtype: str = "float32"
    has_bias: bool = False
    transpose_w: bool = False
    magnitudes: tuple[float, float] = (1, 1)
    tokens: int | None = None
    is_gated: bool = False

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.past

    @property
    def op(self) -> Callable[..., jax.Array]:
        return grouped_gated_matmul if self.is_gated else grouped_matmul

    @property
    def weights(self) -> tuple[str, ...]:
        return ("w_gate", "w_up") if self.is_gated else ("w",)

    @property
    def statics(self) -> dict[str, Any]:
        """The arguments of the op that are no arrays, by name, except implementation."""
        return {"transpose_w": self.transpose_w, "out_dtype": self.out_dtype, "precision": "fp8"}

    def arrays(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]:
        """(x, the weights and bias by name, group_sizes and gather_indices by name, the cotangent of out).

        The values are normal and random.
        Each row of x, and each column of each group's w, has a magnitude of its own, so that a wrong scale shows.
        """
        random = np.random.default_rng(0)
        groups, of_w = len(self.sizes), (self.depth, self.columns)
        spread = lambda shape: 2.0 ** random.integers(-3, 4, shape)
        x = random.standard_normal((self.tokens or self.rows, self.depth)) * self.magnitudes[0]
        x = x * spread((len(x), 1))
        draw = lambda: random.standard_normal((groups, *of_w)) * self.magnitudes[1] * spread((groups, 1, self.columns))
        weights = {name: draw() for name in self.weights}
        dout = random.standard_normal((self.rows, self.columns)) * spread((self.rows, 1))
        dout[sum(self.sizes) :] = np.nan
        integers = {"group_sizes": jnp.asarray(self.sizes, jnp.int32)}
        if self.tokens:
            integers["gather_indices"] = jnp.asarray(random.integers(0, self.tokens, self.rows), jnp.int32)
        else:
            x[sum(self.sizes) :] = np.nan
        given = {"x": x} | {name: w.swapaxes(1, 2) if self.transpose_w else w for name, w in weights.items()}
        if self.has_bias:
            given["bias"] = random.standard_normal((groups, self.columns)) * 10
        return (
            {name: jnp.asarray(y, self.dtype) for name, y in given.items()},
            integers,
            jnp.asarray(dout, self.out_dtype),
        )

    def run(self, implementation: str | None = None) -> dict[str, jax.Array]:
        """The results by name: "out", "primal" (out of a call that is not differentiated) and the gradients, as in
        "dx".
        """
        arrays, integers, dout = self.arrays()

        @jax.jit
        def both(arrays, integers, dout):
            call = lambda given: self.op(**given, **integers, **self.statics, implementation=implementation)
            out, vjp = jax.vjp(call, arrays)
            return out, call(arrays), vjp(dout)[0]

        out, primal, gradients = both(arrays, integers, dout)
        return {"out": out, "primal": primal} | {f"d{name}": x for name, x in gradients.items()}

    def definition(self) -> dict[str, np.ndarray]:
        """The right results in NumPy float64, with the names that `run` gives: a loop over the groups.

        The backward of a gated unit reads the results of its matmuls, and rounds their cotangents, in out_dtype.
        """
        arrays, integers, cotangent = self.arrays()
        weights = [arrays[name] for name in self.weights]
        of_out = [self._of_columns(_rounded(w, "e4m3", -1 if self.transpose_w else -2)) for w in weights]
        together = np.concatenate([np.asarray(self._of_columns(w)) for w in weights], axis=-1)
        of_dx = _rounded(jnp.asarray(together), "e4m3", -1)
        x8, dout, x = _rounded(arrays["x"], "e4m3", -1), _wide(cotangent), _wide(arrays["x"])
        index = np.asarray(integers.get("gather_indices", np.arange(self.rows)))
        bias = _wide(arrays["bias"]) if self.has_bias else np.zeros((len(self.sizes), self.columns))
        groups = np.split(np.arange(self.rows), np.cumsum(self.sizes))[:-1]
        found = [np.zeros((self.rows, self.columns)) for _ in weights]
        for of_matmul, w8 in zip(found, of_out, strict=True):
            for group, rows in enumerate(groups):
                of_matmul[rows] = x8[index[rows]] @ w8[group] + bias[group]
        out, cotangents = _gated_results(found, dout, self.out_dtype) if self.is_gated else (found[0], [dout])
        kept = jnp.asarray(np.concatenate(cotangents, axis=-1), self.out_dtype)
        cotangents8 = _rounded(kept, "e5m2", -1)
        dx, dbias = np.zeros(x.shape), np.zeros(bias.shape)
        gradients = [np.zeros((len(self.sizes), self.depth, self.columns)) for _ in weights]
        for group, rows in enumerate(groups):
            np.add.at(dx, index[rows], cotangents8[rows] @ of_dx[group].T)
            dbias[group] = dout[rows].sum(axis=0)
            for dw, of_matmul in zip(gradients, cotangents, strict=True):
                dw[group] = x[index[rows]].T @ of_matmul[rows]
        results = {"out": out, "primal": out, "dx": dx} | ({"dbias": dbias} if self.has_bias else {})
        return results | {f"d{name}": self._of_columns(dw) for name, dw in zip(self.weights, gradients, strict=True)}

    def _of_columns(self, w: Any) -> Any:
        """[G, K, N] weights from weights as the call has them, or the other way round."""
        return w.swapaxes(1, 2) if self.transpose_w else w


def _gated_results(found: list[np.ndarray], dout: np.ndarray, kept: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """(silu(z) * up, [the cotangent of z, the cotangent of up]) of [z, up].

    kept: the dtype in which the backward reads z and up.
    """
    z, up = found
    sigmoid = lambda z: 0.5 * (1 + np.tanh(z / 2))
    out = z * sigmoid(z) * up
    z, up = (_wide(jnp.asarray(y, kept)) for y in (z, up))
    slope = sigmoid(z) * (1 + z * (1 - sigmoid(z)))
    return out, [dout * up * slope, dout * z * sigmoid(z)]


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _rounded(x: jax.Array, format: str, axis: int) -> np.ndarray:
    """x rounded to 8 bits and back, in float64, with a scale for all values along `axis`."""
    # Compiled, as the op is: a compiled division may round otherwise, and move a value to the other side of a tie.
    found = jax.jit(lambda x: quantize(x, format, scaling="row", axis=axis))(x)
    return _wide(found.values) * np.expand_dims(_wide(found.scale), axis)


def why_not(case: Case, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can."""
    groups, of_w = len(case.sizes), (case.depth, case.columns)
    given = {"x": spec((case.tokens or case.rows, case.depth), case.dtype), "group_sizes": spec((groups,), "int32")}
    given |= dict.fromkeys(case.weights, spec((groups, *(of_w[::-1] if case.transpose_w else of_w)), case.dtype))
    given |= {"gather_indices": spec((case.rows,), "int32")} if case.tokens else {}
    given |= {"bias": spec((groups, case.columns), case.dtype)} if case.has_bias else {}
    return refusal(case.op, **given, **case.statics, implementation=implementation)


def errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of each result by name, for a call by this implementation.

    Errors and bounds are relative to the largest value of the same row, or for dw of the same group. The bound is one
    rounding to the result's dtype plus the error of the sums: float32 sums, or for "mosaic_gpu" the tensor cores' sums
    of 14 bits. dw is a sum of values in 16 bits, and so is dx of gathered rows, whose roundings count as well. For
    other implementations on a GPU the bound is larger, since XLA may use tf32 there.

    A gated unit has the errors of two matmuls. A cotangent near the middle of two 8-bit values may become either. So
    its dx has the root mean square of the rows' relative errors, about 0.05 if nothing were rounded to 8 bits.
    """
    got, want = case.run(implementation), case.definition()
    if sorted(got) != sorted(want):
        raise ValueError(f"got: results {sorted(got)}, want {sorted(want)}")
    is_loose = implementation != "mosaic_gpu" and jax.default_backend() == "gpu"
    found = {}
    for name, right in want.items():
        is_weight = name.startswith("dw")
        axes = (1, 2) if is_weight else 1
        largest = np.abs(right).max(axis=axes, keepdims=True, initial=0)
        is_sum = is_weight or (name == "dx" and case.tokens is not None)
        error = np.abs(_wide(got[name]) - right) / np.where(largest > 0, largest, 1)
        of_operands = float(jnp.finfo(jnp.float16 if case.dtype == "float16" else jnp.bfloat16).eps)
        bound = 0.51 * float(jnp.finfo(got[name].dtype).eps) + 2e-5 + (of_operands if is_sum else 0.0)
        if implementation == "mosaic_gpu" and name != "dbias":
            bound += 2**-9  # 2**-11 of the sum of magnitudes, which is about 4 times a row's largest value
        if case.is_gated:
            bound *= 2
        if case.is_gated and name == "dx":
            error, bound = (
                _row_errors(_wide(got[name]), right),
                bound + (0.03 if implementation == "mosaic_gpu" else 0.01),
            )
        found[name] = float(error.max(initial=0)), 50 * bound if is_loose else bound
    return found


def _row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """The root mean square of the rows' relative errors. Rows of 0 must be 0."""
    norms = np.linalg.norm(want, axis=1)
    return np.sqrt(np.mean(np.linalg.norm(got - want, axis=1) ** 2 / np.where(norms > 0, norms, 1e-30) ** 2))


def _gated(sizes: tuple[int, ...], depth: int, columns: int, **fields: Any) -> Case:
    """A Case of a gated unit, with weights that keep silu(x @ w_gate) * (x @ w_up) in float16's range."""
    return dataclasses.replace(Case(sizes, depth, columns, **fields), is_gated=True, magnitudes=(1, 0.02))


CASES = {
    "plain": Case((5, 0, 17, 1, 13), 32, 24),
    "all_in_one": Case((0, 0, 37, 0), 24, 40, has_bias=True, dtype="float16"),
    "no_rows_in_groups": Case((0, 0, 0), 16, 24, past=7, has_bias=True),
    "past": Case((3, 0, 11), 40, 16, past=19, has_bias=True, out_dtype="bfloat16"),
    "primes": Case((2, 3, 5, 7, 11, 13), 31, 37, transpose_w=True),
    "ones": Case((1,) * 9, 17, 16, dtype="float32"),
    "gathered": Case((9, 0, 5, 21), 32, 24, past=4, tokens=11),
    # The scales' product, or the sums times one scale, is outside of float32's range.
    "small": Case((4, 1, 7), 64, 40, dtype="float32", magnitudes=(1e-31, 1e-3)),
    "large": Case((4, 0, 5), 64, 40, dtype="float32", magnitudes=(1e35, 1e-20)),
    "gated": _gated((5, 0, 17, 1, 13), 32, 24, past=3),
    "gated_transposed": _gated((7, 2, 11), 31, 37, transpose_w=True, dtype="float16"),
    "gated_gathered": _gated((9, 0, 5, 21), 32, 24, past=4, tokens=11),
}
# Cases that the Hopper kernel serves: blocks of 64 rows that overlap, and groups of fewer rows.
HOPPER = {
    "small": Case((5, 0, 17, 1, 8, 63), 128, 128, past=2, out_dtype="bfloat16"),
    "overlapping": Case((65, 0, 130, 127, 70), 128, 128, out_dtype="bfloat16", has_bias=True),
    "blocks": Case((64, 0, 192, 20, 128), 384, 256, past=60, out_dtype="bfloat16"),
    "edges": Case((200, 1), 256, 384, transpose_w=True, dtype="float16", out_dtype="float16"),
    "all_in_one": Case((0, 301, 0), 640, 128, out_dtype="bfloat16"),
    "past": Case((3, 77), 128, 640, past=140, out_dtype="bfloat16", has_bias=True),
    "tiny_scales": Case((3, 77, 64), 128, 128, out_dtype="bfloat16", magnitudes=(1e-31, 1e-3)),
    "gated_small": _gated((5, 0, 17, 1, 8, 63), 128, 128, past=2, out_dtype="bfloat16"),
    "gated_edges": _gated((200, 1), 384, 256, transpose_w=True, dtype="float16", out_dtype="float16"),
    "gated_overlapping": _gated((65, 0, 130), 256, 384, out_dtype="bfloat16"),
}
# For a GPU: many tiles, and long groups.
GPU = {
    "many": Case((1000, 0, 3, 2045, 900, 1, 147), 1024, 1536, past=5, out_dtype="bfloat16", has_bias=True),
    "many_transposed": Case((1000, 17, 0, 519), 1024, 1536, out_dtype="bfloat16", transpose_w=True),
    "many_gated": _gated((1000, 0, 3, 2045), 1024, 1536, past=5, out_dtype="bfloat16"),
}
# `jax-kernels check` runs these cases without --full.
QUICK = ("plain", "past", "primes", "small", "gated", "tiles_small")
