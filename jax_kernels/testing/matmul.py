"""The matmul cases that tests and `jax-kernels check` share, their definitions in float64, and error bounds."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.activations import ACTIVATIONS
from jax_kernels.ops.matmul.matmul import gated_matmul, matmul
from jax_kernels.testing import named_errors
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.typical_call import LENGTH, TypicalCall

__all__ = ["CASES", "GPU", "HOPPER", "TRITON", "TYPICAL", "Case", "errors_by", "errors_of", "why_not"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of matmul, or of gated_matmul if is_gated, without its arrays.

    shape: the axes of x's rows, then K. columns: N. bias: its dtype, None for none. out_dtype: None for dtype.
    """

    shape: tuple[int, ...]
    columns: int
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    bias: str | None = None
    activation: str | None = None
    has_residual: bool = False
    transpose_w: bool = False
    precision: str | None = None
    is_gated: bool = False

    @property
    def op(self) -> Any:
        return gated_matmul if self.is_gated else matmul

    @property
    def statics(self) -> dict[str, Any]:
        """The arguments of the op that are no arrays, by name, except implementation."""
        return {name: getattr(self, name) for name in ("activation", "out_dtype", "precision", "transpose_w")}

    @property
    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the call's arrays by name, and of dout, the cotangent of out.

        w is w_gate for gated_matmul.
        """
        depth, out = self.shape[-1], ((*self.shape[:-1], self.columns), self.out_dtype or self.dtype)
        w = ((self.columns, depth) if self.transpose_w else (depth, self.columns)), self.dtype
        found: dict[str, Any] = {"x": (self.shape, self.dtype), "w": w}
        if self.bias:
            found["bias"] = (self.columns,), self.bias
        if self.has_residual:
            found["residual"] = out
        if self.is_gated:
            found["w_up"] = w
        found["dout"] = out
        return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in found.items()}

    def arrays(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """(the arrays of the call by name, the cotangent of out): normal random values, weights divided by sqrt(K)."""
        random = np.random.default_rng(0)
        found = {}
        for name, of_type in self.types.items():
            scale = self.shape[-1] ** -0.5 if name.startswith("w") else 1.0
            found[name] = jnp.asarray(scale * random.standard_normal(of_type.shape), of_type.dtype)
        return found, found.pop("dout")

    def call(self, given: dict[str, Any], implementation: str | None, op: Any) -> Any:
        """op(x, w, ...), or for gated_matmul op(x, w_gate, w_up, ...), with the case's options. given: the arrays by
        name.
        """
        rest = {name: y for name, y in given.items() if name not in ("x", "w")}
        weights = [given["w"], rest.pop("w_up")] if self.is_gated else [given["w"]]
        return op(given["x"], *weights, **rest, **self.statics, implementation=implementation)

    def run(self, implementation: str | None = None) -> dict[str, jax.Array]:
        """The results by name: "out", "primal" (out of a call that is not differentiated) and the gradients, as in
        "dx".
        """
        arrays, dout = self.arrays()

        @jax.jit
        def both(arrays, dout):
            call = lambda given: self.call(given, implementation, self.op)
            out, vjp = jax.vjp(call, arrays)
            return out, call(arrays), vjp(dout)[0]

        out, primal, gradients = both(arrays, dout)
        return {"out": out, "primal": primal} | {f"d{name}": x for name, x in gradients.items()}

    def definition(self) -> dict[str, np.ndarray]:
        """The right results in NumPy float64, with the names that `run` gives."""
        arrays, dout = self.arrays()
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            wide = {name: jnp.asarray(np.asarray(x).astype(np.float64)) for name, x in arrays.items()}
            activation = ACTIVATIONS[self.activation] if self.activation else lambda x: x

            def call(given):
                product = lambda w: given["x"] @ (w.T if self.transpose_w else w)
                out = activation(product(given["w"]) + given.get("bias", 0))
                out = out * product(given["w_up"]) if self.is_gated else out
                return out + given.get("residual", 0)

            out, vjp = jax.vjp(call, wide)
            gradients = vjp(jnp.asarray(np.asarray(dout).astype(np.float64)))[0]
            found = {"out": out, "primal": out} | {f"d{name}": x for name, x in gradients.items()}
            return {name: np.asarray(x) for name, x in found.items()}


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


def _bound(case: Case, name: str, dtype, right: np.ndarray) -> float:
    """The largest absolute error that a result may have.

    It is one rounding of the largest result, plus the roundings of the summands, whose magnitude is about 1.

    name, dtype: of the result. right: the right answer.
    """
    of_inputs, scale = float(jnp.finfo(case.dtype).eps), np.abs(right).max(initial=0)
    precision = 2**-9 if case.precision == "tf32" else 2**-22  # operands are truncated to tf32, not rounded
    rows = math.prod(case.shape[:-1])
    counts = {"dw": rows, "dw_up": rows, "dbias": rows, "dx": case.columns}
    terms = math.sqrt(counts.get(name, case.shape[-1]))
    # The gradients are sums of dout, or of dz, which is rounded and comes from a rounded preactivation.
    rounded = 0.0 if name in ("out", "primal") else of_inputs * (6 if case.is_gated else 3 if case.activation else 1)
    return float(0.6 * float(jnp.finfo(dtype).eps) * scale + terms * (rounded + precision) + 2**-20 * scale)


CASES = {
    "plain": Case((5, 7, 64), 48),
    "odd": Case((13, 63), 65),
    "one": Case((1, 1), 1),
    "vector": Case((31,), 17),
    "float32": Case((6, 40), 24, dtype="float32", bias="float32"),
    "tf32": Case((6, 40), 24, dtype="float32", precision="tf32"),
    "wide_out": Case((9, 32), 40, out_dtype="float32", bias="float32", activation="gelu", has_residual=True),
    "transposed": Case((9, 32), 40, transpose_w=True, bias="bfloat16", activation="silu"),
    "residual": Case((2, 9, 32), 40, dtype="float16", has_residual=True, activation="tanh", bias="float32"),
    "gated": Case((2, 9, 32), 40, activation="silu", is_gated=True, has_residual=True),
    "gated_float32": Case((9, 32), 40, activation="gelu", is_gated=True, transpose_w=True, dtype="float32"),
} | {name: Case((17, 32), 24, bias="float32", activation=name) for name in ACTIVATIONS}


# Cases that the Hopper kernel serves.
HOPPER = {
    "plain": Case((128, 64), 64),
    "edges": Case((2, 100, 192), 320, bias="float32"),
    "epilogue": Case((72, 128), 192, bias="bfloat16", activation="gelu_tanh", has_residual=True),
    "transposed": Case((136, 64), 128, transpose_w=True, activation="silu", dtype="float16"),
    "float32_out": Case((264, 64), 448, out_dtype="float32", activation="relu", bias="float32", has_residual=True),
    "gated": Case((200, 128), 192, activation="silu", is_gated=True, has_residual=True),
    "gated_transposed": Case((136, 64), 320, activation="gelu", is_gated=True, transpose_w=True, out_dtype="float32"),
}


# Cases that the Triton kernel serves: one block, several blocks, and sizes next to its block sizes.
TRITON = {name: CASES[name] for name in ("plain", "odd", "one", "vector", "tf32", "wide_out", "residual", "gated")} | {
    "one_short": Case((127, 63), 255, activation="silu", bias="bfloat16"),
    "one_more": Case((129, 65), 257, activation="silu", has_residual=True),
    "primes": Case((131, 67), 269, out_dtype="float32", transpose_w=True),
    "one_row": Case((1, 257), 100, bias="float32", activation="gelu"),
    "gated_odd": Case((131, 33), 129, activation="gelu_tanh", is_gated=True, transpose_w=True, dtype="float16"),
    "gated_tf32": Case((9, 33), 17, activation="silu", is_gated=True, dtype="float32", precision="tf32"),
}
# For a GPU: many work tiles, or few work tiles that several programs share.
GPU = {
    "many": Case((1000, 1024), 1536, activation="gelu", bias="float32", has_residual=True),
    "many_odd": Case((1001, 1027), 1531, activation="silu", bias="float32"),
    "many_gated": Case((1024, 512), 1536, activation="silu", is_gated=True, transpose_w=True),
    "many_tf32": Case((1000, 512), 1536, dtype="float32", precision="tf32", transpose_w=True, activation="tanh"),
    "split": Case((5, 4096), 2048, activation="silu", has_residual=True, bias="float32"),
    "split_odd": Case((33, 4001), 1001, out_dtype="float32", transpose_w=True),
    "split_gated": Case((64, 4096), 1024, activation="silu", is_gated=True),
}
TYPICAL = {
    "matmul": TypicalCall(
        matmul, implementations=("mosaic_gpu", "triton", "xla"), shapes=((LENGTH, 4096), (4096, 4096))
    ),
    "gated_matmul": TypicalCall(
        gated_matmul,
        implementations=("mosaic_gpu", "triton", "xla"),
        shapes=((LENGTH, 4096), (4096, 4096), (4096, 4096)),
    ),
}
