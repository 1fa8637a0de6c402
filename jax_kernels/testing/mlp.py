"""The cases of mlp that tests and `jax-kernels check` share, their definitions in float64, and error bounds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.activations import ACTIVATIONS
from jax_kernels.ops.matmul.mlp import mlp
from jax_kernels.testing.refusals import refusal
from jax_kernels.testing.typical_call import LENGTH, TypicalCall

__all__ = ["CASES", "GPU", "HOPPER", "TRITON", "TYPICAL", "Case", "errors_by", "errors_of", "why_not"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of mlp, without its arrays. shape: the axes of x's rows, then K; hidden: H; columns: N.

    w_up (and w_gate, if is_gated) is [K, H] and w_down [H, N]; with transpose_w, [H, K] and [N, H].
    """

    shape: tuple[int, ...]
    hidden: int
    columns: int
    dtype: str = "bfloat16"
    activation: str = "silu"
    is_gated: bool = False
    has_biases: bool = False
    has_residual: bool = False
    transpose_w: bool = False
    precision: str | None = None

    @property
    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the call's arrays by name, and of dout, the cotangent of out."""
        depth, out = self.shape[-1], (*self.shape[:-1], self.columns)
        weight = lambda *shape: (shape[::-1] if self.transpose_w else shape, self.dtype)
        found: dict[str, Any] = {"x": (self.shape, self.dtype), "w_up": weight(depth, self.hidden)}
        found["w_down"] = weight(self.hidden, self.columns)
        if self.is_gated:
            found["w_gate"] = weight(depth, self.hidden)
        if self.has_biases:
            found["bias_down"] = (self.columns,), self.dtype
            if not self.is_gated:
                found["bias_up"] = (self.hidden,), "float32"
        if self.has_residual:
            found["residual"] = out, self.dtype
        found["dout"] = out, self.dtype
        return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, (shape, dtype) in found.items()}

    def arrays(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """(the arrays of the call by name, the cotangent of out): normal random values, weights divided by sqrt(K) or
        sqrt(H).
        """
        random = np.random.default_rng(0)
        found = {}
        for name, of_type in self.types.items():
            inner = self.hidden if name == "w_down" else self.shape[-1]
            scale = inner**-0.5 if name.startswith("w") else 1.0
            found[name] = jnp.asarray(scale * random.standard_normal(of_type.shape), of_type.dtype)
        return found, found.pop("dout")

    def call(self, given: dict[str, Any], implementation: str | None, op: Any = mlp) -> Any:
        """op(x, w_up, w_down, ...) for the case's options. given: the arrays by name."""
        statics = {name: getattr(self, name) for name in ("activation", "transpose_w", "precision")}
        rest = {name: y for name, y in given.items() if name not in ("x", "w_up", "w_down")}
        return op(given["x"], given["w_up"], given["w_down"], **rest, **statics, implementation=implementation)

    def run(self, implementation: str | None = None) -> dict[str, jax.Array]:
        """The results by name: "out", "primal" (out of a call that is not differentiated) and the gradients, as in
        "dx".
        """
        arrays, dout = self.arrays()

        @jax.jit
        def both(arrays, dout):
            out, vjp = jax.vjp(lambda given: self.call(given, implementation), arrays)
            return out, self.call(arrays, implementation), vjp(dout)[0]

        out, primal, gradients = both(arrays, dout)
        return {"out": out, "primal": primal} | {f"d{name}": x for name, x in gradients.items()}

    def definition(self) -> dict[str, np.ndarray]:
        """The right results in NumPy float64, with the names that `run` gives."""
        arrays, dout = self.arrays()
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            wide = {name: jnp.asarray(np.asarray(x).astype(np.float64)) for name, x in arrays.items()}
            activation = ACTIVATIONS[self.activation]

            def call(given):
                product = lambda y, name: y @ (given[name].T if self.transpose_w else given[name])
                up = product(given["x"], "w_up") + given.get("bias_up", 0)
                hidden = activation(product(given["x"], "w_gate")) * up if self.is_gated else activation(up)
                return product(hidden, "w_down") + given.get("bias_down", 0) + given.get("residual", 0)

            out, vjp = jax.vjp(call, wide)
            gradients = vjp(jnp.asarray(np.asarray(dout).astype(np.float64)))[0]
            found = {"out": out, "primal": out} | {f"d{name}": x for name, x in gradients.items()}
            return {name: np.asarray(x) for name, x in found.items()}


def why_not(case: Case, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can."""
    given = {name: x for name, x in case.types.items() if name != "dout"}
    return case.call(given, implementation, functools.partial(refusal, mlp))


def errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(relative error in the 2-norm, bound) of each result by name, for a call by this implementation."""
    return errors_of(case, case.run(implementation))


def errors_of(case: Case, got: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(relative error in the 2-norm, bound) of each result by name. got: from Case.run.

    The bound is four roundings of the dtype, or the error of tf32.
    """
    want = case.definition()
    if sorted(got) != sorted(want):
        raise ValueError(f"got: results {sorted(got)}, want {sorted(want)}")
    bound = max(0.75 * float(jnp.finfo(case.dtype).eps), 2**-8 if case.precision == "tf32" else 2**-19)
    found = {}
    for name, right in want.items():
        wrong = np.linalg.norm(np.asarray(got[name]).astype(np.float64) - right)
        found[name] = float(wrong / np.linalg.norm(right)), bound
    return found


CASES = {
    "plain": Case((5, 7, 32), 24, 16),
    "biases": Case((9, 17), 31, 13, activation="gelu", has_biases=True, has_residual=True, dtype="float16"),
    "vector": Case((31,), 17, 5, dtype="float32"),
    "gated": Case((2, 9, 32), 40, 24, is_gated=True, has_residual=True),
    "transposed": Case((9, 32), 40, 24, is_gated=True, transpose_w=True, has_biases=True, activation="gelu_tanh"),
    "tf32": Case((6, 40), 24, 16, dtype="float32", precision="tf32", activation="relu"),
}
# Cases in which the Hopper kernel serves all matmuls.
HOPPER = {
    "plain": Case((136, 64), 192, 128, has_biases=True, has_residual=True, activation="gelu_tanh"),
    "gated": Case((2, 100, 128), 192, 64, is_gated=True, has_residual=True, dtype="float16"),
    "transposed": Case((264, 64), 320, 128, is_gated=True, transpose_w=True, has_biases=True),
}
# Cases that the Triton kernel serves.
TRITON = {name: CASES[name] for name in ("plain", "biases", "gated", "tf32")} | {
    "primes": Case((131, 67), 269, 137, is_gated=True, transpose_w=True, activation="gelu"),
}
# For a GPU: many work tiles, or few work tiles that several programs share.
GPU = {
    "many": Case((1000, 1024), 2048, 512, has_biases=True, activation="gelu"),
    "many_gated": Case((1024, 512), 3072, 512, is_gated=True, transpose_w=True),
    "few": Case((8, 2048), 1024, 2048, is_gated=True, has_residual=True),
}
TYPICAL = {
    "mlp": TypicalCall(
        mlp, implementations=("mosaic_gpu", "triton", "xla"), shapes=((LENGTH, 1024), (1024, 4096), (4096, 1024))
    ),
}
