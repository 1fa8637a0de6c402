"""The cases of grouped_matmul that tests and `jax-kernels check` share, their definition in float64, and bounds."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.activations import ACTIVATIONS
from jax_kernels.ops.grouped.grouped_matmul import grouped_gated_matmul, grouped_matmul
from jax_kernels.testing import named_errors
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.typical_call import LENGTH, TypicalCall, spec

__all__ = [
    "CASES",
    "ERROR",
    "HOPPER",
    "LONG",
    "QUICK",
    "TRITON",
    "TYPICAL",
    "Case",
    "errors_by",
    "errors_of",
    "why_not",
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of grouped_matmul, or of grouped_gated_matmul if is_gated, without its arrays.

    sizes: of the groups. past: the rows of x past the last group, which hold NaN, as does their cotangent. depth: K.
    columns: N. bias: its dtype, None for none. out_dtype: None for dtype. tokens: the rows of x, from which the call
    gathers its rows, a few of them with indices outside of x; None for a call that does not gather.
    """

    sizes: tuple[int, ...]
    depth: int
    columns: int
    past: int = 0
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    bias: str | None = None
    activation: str | None = None
    transpose_w: bool = False
    precision: str | None = None
    is_gated: bool = False
    tokens: int | None = None

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.past

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights."""
        return ("w_gate", "w_up") if self.is_gated else ("w",)

    @property
    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the call's arrays by name, and of dout, the cotangent of out."""
        groups, weight = len(self.sizes), (self.depth, self.columns)
        of_w = spec((groups, *(weight[::-1] if self.transpose_w else weight)), self.dtype)
        found = {"x": spec((self.tokens or self.rows, self.depth), self.dtype)} | dict.fromkeys(self.weights, of_w)
        found["group_sizes"] = spec((groups,), "int32")
        if self.tokens:
            found["gather_indices"] = spec((self.rows,), "int32")
        if self.bias:
            found["bias"] = spec((groups, self.columns), self.bias)
        return found | {"dout": spec((self.rows, self.columns), self.out_dtype or self.dtype)}

    def arrays(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """(the arrays of the call by name, the cotangent of out): normal random values, weights divided by sqrt(K)."""
        random = np.random.default_rng(0)
        found = {}
        for name, of_type in self.types.items():
            values = random.standard_normal(of_type.shape) * (self.depth**-0.5 if name in self.weights else 1.0)
            if name == "dout" or (name == "x" and not self.tokens):
                values[sum(self.sizes) :] = np.nan
            if name == "gather_indices":
                values = random.integers(-2, (self.tokens or 0) + 2, self.rows)
            found[name] = jnp.asarray(self.sizes if name == "group_sizes" else values, of_type.dtype)
        return found, found.pop("dout")

    @property
    def op(self) -> Any:
        return grouped_gated_matmul if self.is_gated else grouped_matmul

    def call(self, given: dict[str, Any], implementation: str | None, op: Any = None) -> Any:
        """op(x, w, group_sizes, ...) with the case's options. given: the arrays by name. op: None is the case's."""
        op = op or self.op
        options = {name: getattr(self, name) for name in ("activation", "out_dtype", "precision", "transpose_w")}
        return op(**given, **options, implementation=implementation)

    def run(self, implementation: str | None = None) -> dict[str, jax.Array]:
        """The results by name: "out", "primal" (out of a call that is not differentiated) and the gradients, as in
        "dx".
        """
        arrays, dout = self.arrays()
        integers = {name: arrays.pop(name) for name in ("group_sizes", "gather_indices") if name in arrays}

        @jax.jit
        def both(arrays, integers, dout):
            call = lambda given: self.call(given | integers, implementation)
            out, vjp = jax.vjp(call, arrays)
            return out, call(arrays), vjp(dout)[0]

        out, primal, gradients = both(arrays, integers, dout)
        return {"out": out, "primal": primal} | {f"d{name}": x for name, x in gradients.items()}

    def definition(self) -> dict[str, np.ndarray]:
        """The right results in NumPy float64, with the names that `run` gives: a loop over the groups."""
        arrays, cotangent = self.arrays()
        x, dout, *weights = (
            np.asarray(y).astype(np.float64) for y in (arrays["x"], cotangent, *(arrays[name] for name in self.weights))
        )
        weights = [y.swapaxes(1, 2) if self.transpose_w else y for y in weights]
        index = np.asarray(arrays["gather_indices"]) if self.tokens else np.arange(self.rows)
        exists = (index >= 0) & (index < len(x))
        rows = np.where(exists[:, None], x[np.where(exists, index, 0)], 0)
        found = self._gated_definition(rows, weights, dout) if self.is_gated else self._plain(rows, weights[0], dout)
        of_rows, found["dx"] = found["dx"], np.zeros(x.shape)
        np.add.at(found["dx"], index[exists], of_rows[exists])
        return found

    def _plain(self, x: np.ndarray, w: np.ndarray, dout: np.ndarray) -> dict[str, np.ndarray]:
        """The right results of a call that is not gated, for these rows. w: [G, K, N]."""
        arrays, _ = self.arrays()
        bias = np.zeros((len(w), self.columns))
        if self.bias:
            bias = np.asarray(arrays["bias"]).astype(np.float64)
        out, dx, dw, dbias = (np.zeros(y.shape) for y in (dout, x, w, bias))
        ends = np.cumsum(self.sizes)
        for group, (end, size) in enumerate(zip(ends, self.sizes, strict=True)):
            rows = slice(end - size, end)
            out[rows], dz = self._activated(x[rows] @ w[group] + bias[group], dout[rows])
            dx[rows], dw[group], dbias[group] = dz @ w[group].T, x[rows].T @ dz, dz.sum(axis=0)
        found = {"out": out, "primal": out, "dx": dx, "dw": dw.swapaxes(1, 2) if self.transpose_w else dw}
        return found | ({"dbias": dbias} if self.bias else {})

    def _gated_definition(self, x: np.ndarray, weights: list[np.ndarray], dout: np.ndarray) -> dict[str, np.ndarray]:
        """The right results of a gated call. weights: [G, K, N] of the gate and of up."""
        out, dx, *gradients = (np.zeros(y.shape) for y in (dout, x, *weights))
        ends = np.cumsum(self.sizes)
        for group, (end, size) in enumerate(zip(ends, self.sizes, strict=True)):
            rows = slice(end - size, end)
            gate, up = (x[rows] @ w[group] for w in weights)
            activated, dgate = self._activated(gate, dout[rows] * up)
            out[rows] = activated * up
            for w, gradient, dz in zip(weights, gradients, (dgate, dout[rows] * activated), strict=True):
                dx[rows] += dz @ w[group].T
                gradient[group] = x[rows].T @ dz
        gradients = [y.swapaxes(1, 2) if self.transpose_w else y for y in gradients]
        return {"out": out, "primal": out, "dx": dx, "dw_gate": gradients[0], "dw_up": gradients[1]}

    def _activated(self, z: np.ndarray, dout: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(activation(z), the cotangent of z for the cotangent dout of activation(z)), in float64."""
        if self.activation is None:
            return z, dout
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            out, vjp = jax.vjp(ACTIVATIONS[self.activation], jnp.asarray(z))
            return np.asarray(out), np.asarray(vjp(jnp.asarray(dout))[0])


def why_not(case: Case, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can."""
    given = {name: x for name, x in case.types.items() if name != "dout"}
    return case.call(given, implementation, functools.partial(refusal, case.op))


def errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of each result by name, for a call by this implementation."""
    return errors_of(case, case.run(implementation))


def errors_of(case: Case, got: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of each result by name. got: from Case.run."""
    return named_errors(got, case.definition(), functools.partial(_bound, case))


def _bound(case: Case, name: str, dtype: Any, right: np.ndarray) -> float:
    """The largest absolute error that a result may have.

    It is one rounding of the largest result, plus the roundings of the summands, whose magnitude is about 1.

    name, dtype: of the result. right: the right answer.
    """
    of_inputs, scale = float(jnp.finfo(case.dtype).eps), np.abs(right).max(initial=0)
    precision = 2**-9 if case.precision == "tf32" else 2**-22  # operands are truncated to tf32, not rounded
    largest = max(case.sizes, default=0)
    counts = {"dw": largest, "dw_gate": largest, "dw_up": largest, "dbias": largest, "dx": case.columns}
    terms = math.sqrt(counts.get(name, case.depth))
    if case.is_gated:  # a factor of each summand, x @ w_up or activation(x @ w_gate), is up to about 4
        terms *= 4
    # The gradients are sums of dz, which is rounded and comes from a rounded preactivation.
    rounded = 0.0 if name in ("out", "primal") else of_inputs * (3 if case.activation else 1)
    return float(0.6 * float(jnp.finfo(dtype).eps) * scale + terms * (rounded + precision) + 2**-20 * scale)


CASES = {
    "plain": Case((5, 0, 17, 1, 13), 32, 24),
    "one_group": Case((37,), 32, 24),
    "all_in_one": Case((0, 0, 37, 0), 24, 40, bias="bfloat16", activation="silu"),
    "no_rows_in_groups": Case((0, 0, 0), 16, 24, past=7, bias="float32", activation="sigmoid"),
    "past": Case((3, 0, 11), 40, 16, past=19, bias="bfloat16", activation="gelu"),
    "primes": Case((2, 3, 5, 7, 11, 13), 31, 37, transpose_w=True),
    "ones": Case((1,) * 9, 17, 16, bias="float32", activation="tanh"),
    "float16": Case((7, 29, 0, 2), 40, 24, dtype="float16", bias="float32", activation="gelu_tanh", transpose_w=True),
    "float32": Case((7, 1, 23), 24, 16, dtype="float32", bias="float32", activation="silu", past=2),
    "tf32": Case((7, 0, 23), 24, 16, dtype="float32", precision="tf32", transpose_w=True),
    "wide_out": Case((9, 5, 0, 21), 32, 24, out_dtype="float32", bias="float32", activation="relu"),
    "float16_wide_out": Case((9, 5, 0, 21), 32, 24, dtype="float16", out_dtype="float32"),
    "gathered": Case((9, 0, 5, 21), 32, 24, bias="float32", activation="silu", past=4, tokens=11),
    "gathered_transposed": Case((2, 37, 1), 31, 40, transpose_w=True, tokens=50),
}
# Sizes next to the blocks of the Triton kernels, and groups that end inside of a block.
TRITON = {name: case for name, case in CASES.items() if name != "float32"} | {
    "one_short": Case((127, 63, 0, 129), 65, 255, activation="silu", bias="bfloat16"),
    "skewed": Case((1, 0, 301, 2, 0, 0, 64), 128, 136, past=33, transpose_w=True),
    "many_groups": Case(tuple(range(17)) * 2, 64, 72, bias="float32"),
    "tf32_epilogue": Case((33, 1, 96), 40, 33, dtype="float32", precision="tf32", activation="gelu", bias="float32"),
}
# Cases that the Hopper kernel serves: blocks of 64 rows that overlap, and groups of fewer rows. The first three have a
# multiple of 8 rows, for the Hopper kernel of the gradient of w.
HOPPER = {
    "small": Case((5, 0, 17, 1, 8, 63), 64, 64, past=2),
    "overlapping": Case((65, 0, 130, 127, 70), 64, 128, bias="float32", activation="silu"),
    "blocks": Case((64, 0, 192, 20, 128), 128, 64, past=60, bias="bfloat16", activation="tanh"),
    "past": Case((3, 77), 128, 64, past=140, bias="bfloat16", activation="gelu_tanh"),
    "edges": Case((200, 1), 192, 320, transpose_w=True, dtype="float16", activation="relu"),
    "all_in_one": Case((0, 301, 0), 128, 192, bias="bfloat16"),
}
# For a GPU: many tiles, and long groups.
LONG = {
    "many": Case((1000, 0, 3, 2045, 900, 1, 147), 1024, 1536, activation="gelu", bias="float32", past=5),
    "many_odd": Case((1001, 17, 0, 513), 1027, 1531, activation="silu", bias="bfloat16", transpose_w=True),
    "many_tf32": Case((300, 700, 1), 512, 1536, dtype="float32", precision="tf32"),
    "many_gathered": Case((1000, 0, 3, 2045), 1024, 1536, activation="gelu", tokens=1024),
    "decoding": Case((3, 0, 1, 0, 0, 9, 2, 1) * 8, 1024, 768, activation="silu"),
}
ERROR = "largest error"  # the kind of error, for a table
# `jax-kernels check` runs these cases without --full.
QUICK = ("plain", "past", "primes", "float32", "tf32", "wide_out", "tiles_overlapping")
TYPICAL = {
    "grouped_matmul": TypicalCall(
        grouped_matmul,
        implementations=("mosaic_gpu", "triton", "xla"),
        shapes=((LENGTH, 4096), (8, 4096, 1024)),
        arguments={"group_sizes": spec((8,), "int32")},
    ),
}
