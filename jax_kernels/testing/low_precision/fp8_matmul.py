"""The cases of 8-bit matmuls that tests and `jax-kernels check` share, and their definitions in float64.

A definition is a matmul of the operands that quantize has rounded.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.matmul.matmul import gated_matmul, matmul
from jax_kernels.quantization import dequantize, quantize
from jax_kernels.testing.refusals import refusal

__all__ = ["CASES", "GPU", "HOPPER", "Case", "errors_by", "gated_errors", "why_not"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of matmul with precision="fp8", without an activation and without its arrays.

    shape: the axes of x's rows, then K. columns: N. magnitudes: the standard deviations of x and w.
    """

    shape: tuple[int, ...]
    columns: int
    scaling: str = "tensor"
    dtype: str = "bfloat16"
    out_dtype: str = "float32"
    has_bias: bool = False
    has_residual: bool = False
    transpose_w: bool = False
    magnitudes: tuple[float, float] = (1, 1)

    @property
    def statics(self) -> dict[str, Any]:
        """The arguments of matmul that are no arrays, by name, except implementation."""
        names = ("scaling", "transpose_w", "out_dtype")
        return {name: getattr(self, name) for name in names} | {"precision": "fp8"}

    def arrays(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """(x, w, bias and residual by name, if the call has them; the cotangent of out): normal random values."""
        random = np.random.default_rng(0)
        normal = lambda *shape, dtype=self.dtype: jnp.asarray(random.standard_normal(shape), dtype)
        depth, shape = self.shape[-1], (*self.shape[:-1], self.columns)
        of_x, of_w = self.magnitudes
        found = {"x": normal(*self.shape) * of_x}
        found["w"] = normal(*((self.columns, depth) if self.transpose_w else (depth, self.columns))) * of_w
        if self.has_bias:
            found["bias"] = normal(self.columns, dtype="float32")
        if self.has_residual:
            found["residual"] = normal(*shape, dtype=self.out_dtype)
        return found, normal(*shape, dtype=self.out_dtype)

    def run(self, implementation: str | None = None) -> dict[str, jax.Array]:
        """The results by name: "out" and the gradients, as in "dx"."""
        arrays, dout = self.arrays()
        statics = self.statics | {"implementation": implementation}

        @jax.jit
        def both(arrays, dout):
            out, vjp = jax.vjp(lambda given: matmul(**given, **statics), arrays)
            return out, vjp(dout)[0]

        out, gradients = both(arrays, dout)
        return {"out": out} | {f"d{name}": x for name, x in gradients.items()}

    def definition(self) -> dict[str, np.ndarray]:
        """The right results in NumPy float64, with the names that `run` gives: matmuls of the operands rounded to 8
        bits.
        """
        arrays, dout = self.arrays()
        x, dout = (y.reshape(-1, y.shape[-1]) for y in (arrays["x"], dout))
        w = arrays["w"].T if self.transpose_w else arrays["w"]
        of_last = lambda y, format="e4m3": _rounded(y, format, self.scaling)
        out = of_last(x) @ of_last(w.T).T
        out = out.reshape(*self.shape[:-1], self.columns)
        dx = of_last(dout, "e5m2") @ of_last(w).T
        dw = of_last(x.T) @ of_last(dout.T, "e5m2").T
        found = {"dx": dx.reshape(self.shape), "dw": dw.T if self.transpose_w else dw}
        if self.has_bias:
            out = out + _wide(arrays["bias"])
            found["dbias"] = _wide(dout).sum(0)
        if self.has_residual:
            out = out + _wide(arrays["residual"])
            found["dresidual"] = _wide(dout).reshape(out.shape)
        return found | {"out": out}


def why_not(case: Case, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can."""
    arrays, _ = case.arrays()
    return refusal(matmul, **arrays, **case.statics, implementation=implementation)


def _wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _rounded(x, format: str, scaling: str) -> np.ndarray:
    """x rounded to 8 bits and back, in float64. format: "e4m3" or "e5m2". The matmul sums over x's last axis."""
    # Compiled, as the op is: a compiled division may round otherwise, and move a value to the other side of a tie.
    quantized = jax.jit(lambda x: quantize(x, format, scaling=scaling))(x)
    largest = quantized.scale.max(initial=0)  # a separate factor: float32 lacks the smallest products of small scales
    return _wide(dequantize(dataclasses.replace(quantized, scale=quantized.scale / largest))) * _wide(largest)


def errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of each result by name, for a call by this implementation.

    The bound is one rounding to the result's dtype plus the error of the sums: float32 sums, or for "mosaic_gpu" the
    tensor cores' sums of 14 bits. For other implementations on a GPU the bound is 50 times as large, since XLA may use
    tf32 there.
    """
    got, want = case.run(implementation), case.definition()
    if sorted(got) != sorted(want):
        raise ValueError(f"got: results {sorted(got)}, want {sorted(want)}")
    found = {}
    for name, right in want.items():
        error = np.abs(_wide(got[name]) - right).max(initial=0)
        # The tensor cores truncate sums to 14 bits, four times in a step of 128: 2**-11.6 of the largest sum was
        # measured, as in torch._scaled_mm without fast sums.
        largest = np.abs(right).max(initial=0)
        sums = 2**-11 * largest if implementation == "mosaic_gpu" else 2**-16 * min(1, largest)
        bound = float((0.51 * float(jnp.finfo(got[name].dtype).eps) + 1e-5) * largest + sums)
        # XLA's 8-bit matmuls on a GPU are cuBLAS matmuls or tf32 matmuls.
        is_loose = implementation != "mosaic_gpu" and jax.default_backend() == "gpu"
        found[name] = float(error), 50 * bound if is_loose else bound
    return found


CASES = {
    f"{name}_{scaling}": dataclasses.replace(case, scaling=scaling)
    for scaling in ("tensor", "row", "block")
    for name, case in {
        "plain": Case((5, 7, 64), 48),
        "odd": Case((13, 131), 257, dtype="float32"),
        "one": Case((1, 1), 1),
        "transposed": Case((2, 70, 136), 40, transpose_w=True, has_bias=True, has_residual=True),
        "bfloat16_out": Case((9, 32), 40, out_dtype="bfloat16", dtype="float16", has_bias=True),
        # The scales' product, or the sums times one scale, is outside of float32's range.
        "small": Case((4, 128), 64, dtype="float32", magnitudes=(1e-31, 1e-3)),
        "large": Case((4, 128), 64, dtype="float32", magnitudes=(1e35, 1e-20)),
    }.items()
}
# Cases whose three matmuls the Hopper kernel serves.
HOPPER = {
    "tensor": Case((128, 128), 256),
    "row": Case((2, 128, 256), 384, "row", has_bias=True, out_dtype="bfloat16"),
    "block": Case((384, 128), 128, "block", has_residual=True, transpose_w=True),
    "edges": Case((200, 256), 192, "row"),
    "block_edges": Case((136, 384), 320, "block"),
    "small": Case((128, 128), 128, magnitudes=(1e-31, 1e-3)),
    "large_rows": Case((128, 128), 128, "row", magnitudes=(1e35, 1e-20)),
}
# For a GPU.
GPU = {f"many_{scaling}": Case((1024, 1024), 1536, scaling) for scaling in ("tensor", "row", "block")}


def gated_errors(scaling: str, transpose_w: bool, implementation: str | None, size: int = 32) -> dict[str, float]:
    """The relative error (2-norm) of each result of an 8-bit gated_matmul against a float32 one, by name.

    size: scales the shapes: x is [6 * size, 3 * size], and the weights have 4 * size columns.
    """
    random = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    depth, columns = 3 * size, 4 * size
    # w_up needs its own scales: with the scales of w_gate, its values would saturate.
    weights = [normal(depth, columns) / depth**0.5 * magnitude for magnitude in (1, 30)]
    arrays = {"x": normal(6 * size, depth)}
    arrays |= {name: w.T if transpose_w else w for name, w in zip(("w_gate", "w_up"), weights, strict=True)}
    dout = normal(6 * size, columns)

    def run(**options):
        call = lambda given: gated_matmul(**given, transpose_w=transpose_w, **options)
        out, vjp = jax.vjp(call, arrays)
        return {"out": out} | vjp(dout)[0]

    got, want = run(precision="fp8", scaling=scaling, implementation=implementation), run(implementation="xla")
    return {name: float(jnp.linalg.norm(got[name] - y) / jnp.linalg.norm(y)) for name, y in want.items()}
