"""Cases of gated_matmul in 8 bits, with separate scales for each operand, and their definition in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import dequantize, gated_matmul, quantize

__all__ = ["CASES", "GatedCase", "errors_by"]


@dataclasses.dataclass(frozen=True)
class GatedCase:
    """A call. shape: the shape of x. columns: of both weights. up: the ratio of w_up's values to w_gate's values."""

    shape: tuple[int, int]
    columns: int
    scaling: str
    transpose_w: bool = False
    up: float = 30.0

    def arrays(self) -> tuple[Any, Any, Any]:
        """x, w_gate and w_up in 8 bits, with their scales."""
        random = np.random.default_rng(0)
        rows, depth = self.shape
        shape = (self.columns, depth) if self.transpose_w else (depth, self.columns)
        x, gate, up = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((rows, depth), shape, shape))
        axis = -1 if self.transpose_w else -2
        of_weights = lambda w: quantize(w, scaling=self.scaling, axis=axis)
        gate, up = (of_weights(w / depth**0.5) for w in (gate, self.up * up))
        return quantize(x, scaling=self.scaling), gate, up


CASES = {
    "tensor": GatedCase((128, 128), 128, "tensor"),
    "row": GatedCase((72, 128), 192, "row", transpose_w=True),
    "block": GatedCase((128, 256), 128, "block"),
}


def errors_by(case: GatedCase, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(error, bound) of the result: the largest error, and a bound for float32 sums and one rounding."""
    given, options = case.arrays(), {"transpose_w": case.transpose_w, "implementation": implementation}
    got = jax.jit(lambda *given: gated_matmul(*given, **options))(*given)
    x, gate, up = (np.asarray(dequantize(y)).astype(np.float64) for y in given)
    gate, up = (x @ (w.T if case.transpose_w else w) for w in (gate, up))
    want = gate / (1 + np.exp(-gate)) * up
    error = np.abs(np.asarray(got).astype(np.float64) - want).max()
    bound = 0.51 * float(jnp.finfo(got.dtype).eps) * np.abs(want).max() + 1e-5 * np.abs(gate).max() * np.abs(up).max()
    return {"out": (float(error), float(bound))}
