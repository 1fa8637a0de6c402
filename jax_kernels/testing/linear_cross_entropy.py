"""The cases of linear_cross_entropy for tests and `jax-kernels check`, their definition in float64, and bounds."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from jax_kernels.quantization import quantize
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
    """A call of linear_cross_entropy, without its arrays.

    tokens: the axes of x but the last. depth: D. vocabulary: V. dtype, w_dtype: of x and w; None is x's. ignored: of
    each 4 tokens, the number whose target is -1. weights: their dtype, None for none. scale: of the logits' standard
    deviation.
    """

    tokens: tuple[int, ...]
    depth: int
    vocabulary: int
    dtype: str = "bfloat16"
    w_dtype: str | None = None
    ignored: int = 1
    weights: str | None = None
    reduction: str = "none"
    transpose_w: bool = False
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0
    precision: str | None = None

    @property
    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the call's arrays by name, and of dout, the cotangent of the result."""
        weight = (self.depth, self.vocabulary)
        found = {
            "x": spec((*self.tokens, self.depth), self.dtype),
            "w": spec(weight[::-1] if self.transpose_w else weight, self.w_dtype or self.dtype),
            "targets": spec(self.tokens, "int32"),
        }
        if self.weights:
            found["weights"] = spec(self.tokens, self.weights)
        return found | {"dout": spec(self.tokens if self.reduction == "none" else (), "float32")}

    def arrays(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """(the arrays of the call by name, the cotangent of the result): normal random values, weights of the
        vocabulary times scale / sqrt(D).
        """
        random = np.random.default_rng(0)
        found = {}
        for name, of_type in self.types.items():
            values = np.asarray(random.standard_normal(of_type.shape))
            if name == "w":
                values = values * (self.scale * self.depth**-0.5)
            if name == "targets":
                values = random.integers(0, self.vocabulary, self.tokens)
                values = np.where(np.arange(values.size).reshape(self.tokens) % 4 < self.ignored, -1, values)
            found[name] = jnp.asarray(np.abs(values) if name == "weights" else values, of_type.dtype)
        return found, found.pop("dout")

    def call(self, given: dict[str, Any], implementation: str | None, op: Any = linear_cross_entropy) -> Any:
        """op(x, w, targets, ...) with the case's options. given: the arrays by name."""
        names = ("reduction", "transpose_w", "softcap", "label_smoothing", "z_loss", "precision")
        return op(**given, **{name: getattr(self, name) for name in names}, implementation=implementation)

    def run(self, implementation: str | None = None) -> dict[str, jax.Array]:
        """The results by name: "loss", "primal" (the loss of a call that is not differentiated) and the gradients, as
        in "dx".
        """
        arrays, dout = self.arrays()
        targets = arrays.pop("targets")

        @jax.jit
        def both(arrays, targets, dout):
            call = lambda given: self.call(given | {"targets": targets}, implementation)
            loss, vjp = jax.vjp(call, arrays)
            return loss, call(arrays), vjp(dout)[0]

        loss, primal, gradients = both(arrays, targets, dout)
        return {"loss": loss, "primal": primal} | {f"d{name}": x for name, x in gradients.items()}

    def definition(self) -> dict[str, np.ndarray]:
        """The right results in NumPy float64, with the names that `run` gives."""
        arrays, cotangent = self.arrays()
        x = np.asarray(arrays["x"]).astype(np.float64)
        w = np.asarray(arrays["w"].astype(self.dtype)).astype(np.float64)
        w, targets = w.T if self.transpose_w else w, np.asarray(arrays["targets"])
        counts, one_hot = targets >= 0, np.maximum(targets, 0)[..., None] == np.arange(self.vocabulary)
        raw, smoothing = _rounded(x) @ _rounded(w.T).T if self.precision else x @ w, self.label_smoothing
        logits = raw if self.softcap is None else self.softcap * np.tanh(raw / self.softcap)
        largest = logits.max(-1, keepdims=True)
        lse = largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True))
        wanted = (1 - smoothing) * one_hot + smoothing / self.vocabulary
        losses = lse[..., 0] - (logits * wanted).sum(-1) + self.z_loss * lse[..., 0] ** 2
        losses = np.where(counts, losses, 0)
        dlosses = np.exp(logits - lse) * (1 + 2 * self.z_loss * lse) - wanted
        weights: Any = np.ones(self.tokens)
        if self.weights:
            weights = np.asarray(arrays["weights"]).astype(np.float64)
        weights, dout = np.where(counts, weights, 0), np.asarray(cotangent, np.float64)
        total = (weights.sum() or 1.0) if self.reduction == "mean" else 1.0
        loss: Any = losses * weights
        loss = loss if self.reduction == "none" else loss.sum() / total
        dlogits = dlosses * (weights * dout / total)[..., None]
        dlogits = dlogits if self.softcap is None else dlogits * (1 - (logits / self.softcap) ** 2)
        outer = tuple(range(len(self.tokens)))
        dw = np.tensordot(x, dlogits, (outer, outer))
        found = {"loss": loss, "primal": loss, "dx": dlogits @ w.T, "dw": dw.T if self.transpose_w else dw}
        if self.weights:
            of_mean = loss if self.reduction == "mean" else 0.0
            found["dweights"] = np.where(counts, losses - of_mean, 0) * dout / total
        return found


def _rounded(rows: np.ndarray) -> np.ndarray:
    """rows [..., D] in e4m3 with a scale for each row, multiplied by the scales, in float64."""
    found = quantize(rows.astype(np.float32), scaling="row", axis=-1)
    return np.asarray(found.values).astype(np.float64) * np.asarray(found.scale, np.float64)[..., None]


def why_not(case: Case, implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can."""
    given = {name: x for name, x in case.types.items() if name != "dout"}
    return case.call(given, implementation, functools.partial(refusal, linear_cross_entropy))


def errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of each result by name, for a call by this implementation."""
    return errors_of(case, case.run(implementation))


def errors_of(case: Case, got: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of each result by name. got: from Case.run."""
    return named_errors(got, case.definition(), functools.partial(_bound, case))


def _bound(case: Case, name: str, dtype: Any, right: np.ndarray) -> float:
    """The largest absolute error that a result may have.

    Losses, and the gradients of the tokens' weights, have float32's error; with logits of 8-bit values, the error of
    tensor cores, which add them in about 14 bits. dx and dw are sums of cotangents that are rounded to x's dtype. These
    roundings are independent, so the relative error of a sum equals one rounding.

    name, dtype: of the result. right: the right answer.
    """
    scale = float(np.abs(right).max(initial=0))
    exact = (2**-19 if case.precision is None else 2**-11) * (scale + case.scale * (1 + (case.softcap or 0) / 50))
    if name == "dweights":
        return exact + 0.6 * float(jnp.finfo(dtype).eps) * scale
    if name not in ("dx", "dw"):
        return exact * (math.sqrt(math.prod(case.tokens)) if case.reduction == "sum" else 1)
    of_inputs = 0.0 if case.dtype == "float32" else float(jnp.finfo(case.dtype).eps)
    roundings = 0.6 if case.reduction == "none" else 1.2  # the gradients of a reduced loss are rounded twice
    return float((roundings * float(jnp.finfo(dtype).eps) + of_inputs) * scale + exact)


CASES = {
    "plain": Case((37,), 32, 40),
    "none_ignored": Case((5,), 16, 24, ignored=0),
    "all_ignored": Case((6,), 16, 24, ignored=4, reduction="mean"),
    "mean": Case((2, 19), 32, 136, reduction="mean", transpose_w=True),
    "sum": Case((3, 7), 33, 257, reduction="sum", weights="float32"),
    "weighted_mean": Case((29,), 40, 131, reduction="mean", weights="bfloat16", label_smoothing=0.1, z_loss=1e-3),
    "softcap": Case((2, 3, 5), 24, 70, softcap=2.0, scale=3.0, label_smoothing=0.2),
    "softcap_mean": Case((31,), 24, 70, softcap=2.0, scale=3.0, reduction="mean", z_loss=0.01, transpose_w=True),
    "float16": Case((17,), 40, 53, dtype="float16", weights="float32", z_loss=1e-4),
    "float16_mean": Case((17,), 40, 53, dtype="float16", reduction="mean"),
    "float32": Case((4, 9), 24, 48, dtype="float32", weights="float32", label_smoothing=0.1),
    "float32_mean": Case((4, 9), 24, 48, dtype="float32", reduction="mean", z_loss=0.1, softcap=5.0),
    "wide_weights": Case((23,), 32, 41, w_dtype="float32", reduction="sum"),
    "peaked": Case((23,), 32, 41, scale=30.0, dtype="float32"),
    "8_bits": Case((2, 19), 48, 70, precision="fp8", weights="float32", label_smoothing=0.1, z_loss=1e-3),
    "8_bits_mean": Case((37,), 40, 53, dtype="float32", precision="fp8", reduction="mean", softcap=5.0, scale=3.0),
    "one_entry": Case((5,), 8, 1, dtype="float32", reduction="mean"),
}
# For the Hopper kernel: sizes next to its work tiles of 128 tokens and 192 entries of the vocabulary.
HOPPER = {
    "mean": Case((2, 37), 64, 256, reduction="mean", transpose_w=True),
    "one_token": Case((1,), 64, 64, ignored=0, reduction="sum"),
    "options": Case(
        (131,), 128, 448, reduction="mean", weights="float32", label_smoothing=0.1, z_loss=0.1, softcap=8.0, scale=3.0
    ),
    "each": Case((70,), 64, 384, weights="bfloat16", softcap=8.0, scale=3.0, transpose_w=True),
    "float16": Case((9,), 64, 320, dtype="float16", reduction="mean", label_smoothing=0.2),
    "float16_each": Case((9,), 64, 192, dtype="float16", weights="float32", transpose_w=True),
    "wide_weights": Case((130,), 64, 192, w_dtype="float32", reduction="mean"),
    "peaked": Case((23,), 64, 448, scale=30.0, reduction="mean", transpose_w=True),
    "all_ignored": Case((6,), 64, 128, ignored=4, reduction="mean"),
    "8_bits": Case((131,), 256, 448, precision="fp8", reduction="mean", weights="float32", softcap=8.0, scale=3.0),
    "8_bits_each": Case((70,), 128, 320, precision="fp8", transpose_w=True, label_smoothing=0.1, z_loss=0.1),
    "8_bits_float16": Case((9,), 384, 64, precision="fp8", dtype="float16", w_dtype="float32", reduction="sum"),
}
CASES |= {"aligned": HOPPER["each"], "aligned_mean": HOPPER["options"]}
# Sizes next to the blocks of the Triton kernels.
TRITON = {name: case for name, case in CASES.items() if case.dtype != "float32" and case.precision is None} | {
    "one_short": Case((127,), 63, 255, weights="float32", label_smoothing=0.1),
    "one_more": Case((3, 43), 65, 257, reduction="mean", z_loss=1e-3, transpose_w=True),
    "capped": Case((130,), 64, 384, dtype="float16", softcap=1.5, reduction="sum", label_smoothing=0.3),
}
# For a GPU: several chunks and tiles.
LONG = {
    "many": Case((4, 1024), 1024, 50257, reduction="mean", transpose_w=True),
    "many_aligned": Case((2, 1024), 512, 50240, reduction="mean", transpose_w=True, weights="float32", z_loss=1e-4),
    "many_weighted": Case((1031,), 256, 151936, weights="float32", label_smoothing=0.1),
    "many_8_bits": Case((2, 1024), 512, 50240, precision="fp8", reduction="mean", transpose_w=True),
    "many_capped": Case((3001,), 256, 64000, reduction="sum", softcap=30.0, z_loss=1e-4),
}
ERROR = "largest error"  # the kind of error, for a table
# `jax-kernels check` runs these cases without --full.
QUICK = ("plain", "mean", "sum", "softcap", "float16_mean", "float32", "8_bits", "aligned", "aligned_mean")
TYPICAL = {
    "linear_cross_entropy": TypicalCall(
        linear_cross_entropy,
        implementations=("mosaic_gpu", "triton", "xla"),
        shapes=((LENGTH, 4096), (4096, 32768)),
        arguments={"targets": spec((LENGTH,), "int32")},
    ),
}
