"""The cases of matmuls with low-bit weights that tests and `jax-kernels check` share, in float64 too.

A definition is a matmul with the dequantised weights.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.activations import ACTIVATIONS
from jax_kernels.ops.matmul.matmul import gated_matmul, matmul
from jax_kernels.quantization import dequantize, quantize
from jax_kernels.testing.refusals import refusal

__all__ = ["CASES", "HOPPER", "KINDS", "LARGE", "errors", "errors_by", "why_not"]

Options = dict[str, Any]
SizesAndOptions = tuple[tuple[int, int, int], Options]

KINDS: dict[str, Options] = {
    "int8": {"format": "int8"},
    "int8_row": {"format": "int8", "scaling": "row"},
    "int4": {"format": "int4", "scale_dtype": "bfloat16"},
    "int4_32": {"format": "int4", "group_size": 32},
    "int4_256": {"format": "int4", "group_size": 256},
    "mxfp8": {"format": "mxfp8"},
    "mxfp4": {"format": "mxfp4"},
}
# (M, K, N), and the options of the call.
CASES: dict[str, SizesAndOptions] = {
    "plain": ((3, 300, 50), {}),
    "wide_out": ((20, 512, 40), {"out_dtype": "float32", "bias": "float32", "activation": "gelu"}),
    "residual": ((2, 100, 33), {"dtype": "float16", "activation": "silu", "has_residual": True}),
    "transposed": ((5, 257, 16), {"transpose_w": True, "bias": "bfloat16"}),
    "tf32": ((4, 160, 24), {"dtype": "float32", "precision": "tf32"}),
    "gated": ((9, 192, 40), {"is_gated": True, "activation": "silu", "has_residual": True}),
}
LARGE: dict[str, SizesAndOptions] = {
    "few": ((16, 4096, 2048), {"bias": "float32", "activation": "gelu"}),
    "one": ((1, 1111, 1001), {}),
    "many": ((200, 1024, 512), {"dtype": "float16"}),
    "gated": ((33, 2048, 1024), {"is_gated": True, "activation": "silu"}),
}


def why_not(case: tuple[str, SizesAndOptions], implementation: str) -> str | None:
    """The reason why this implementation cannot run a case on this machine; None if it can.

    case: (kind, (sizes, options)). kind: of the weights, a key of KINDS. sizes: (M, K, N). options: of the call.
    """
    kind, ((m, k, n), given) = case
    axis = -1 if given.get("transpose_w", False) else -2
    w = jax.eval_shape(lambda w: quantize(w, axis=axis, **KINDS[kind]), jnp.zeros((n, k) if axis == -1 else (k, n)))
    x = jax.ShapeDtypeStruct((m, k), given.get("dtype", "bfloat16"))
    options = {name: given[name] for name in ("activation", "precision", "transpose_w") if name in given}
    if given.get("is_gated", False):
        return refusal(gated_matmul, x, w, w, **options, implementation=implementation)
    return refusal(matmul, x, w, **options, implementation=implementation)


def errors(kind: Options, case: SizesAndOptions, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of each result by name, for a call by this implementation.

    kind: the options of quantize, a value of KINDS. case: ((M, K, N), the options of the call), a value of CASES.
    """
    (m, k, n), given = case
    given = dict(given)
    dtype, bias, is_gated = given.pop("dtype", "bfloat16"), given.pop("bias", None), given.pop("is_gated", False)
    random = np.random.default_rng(0)
    normal = lambda *shape, dtype=dtype: jnp.asarray(random.standard_normal(shape), dtype)
    transposed = given.get("transpose_w", False)
    shape, axis = ((n, k), -1) if transposed else ((k, n), -2)
    weights = [quantize(normal(*shape, dtype="float32") / k**0.5, axis=axis, **kind) for _ in range(1 + is_gated)]
    arrays = {"x": normal(m, k)} | ({"bias": normal(n, dtype=bias)} if bias else {})
    out_dtype = given.get("out_dtype", dtype)
    if given.pop("has_residual", False):
        arrays["residual"] = normal(m, n, dtype=out_dtype)
    dout = normal(m, n, dtype=out_dtype)
    op: Any = gated_matmul if is_gated else matmul

    @jax.jit
    def run(arrays, weights):
        def call(found):
            rest = {key: y for key, y in found.items() if key != "x"}
            return op(found["x"], *weights, **rest, **given, implementation=implementation)

        out, vjp = jax.vjp(call, arrays)
        return {"out": out} | {f"d{name}": y for name, y in vjp(dout)[0].items()}

    got = run(arrays, weights)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = {name: jnp.asarray(np.asarray(y).astype(np.float64)) for name, y in arrays.items()}
        exact = [jnp.asarray(np.asarray(dequantize(w)).astype(np.float64)) for w in weights]
        activation = ACTIVATIONS[given["activation"]] if given.get("activation") else lambda z: z

        def definition(a):
            z, *up = (a["x"] @ (w.T if transposed else w) for w in exact)
            out = activation(z + a.get("bias", 0))
            return (out * up[0] if up else out) + a.get("residual", 0)

        out, vjp = jax.vjp(definition, wide)
        gradients = vjp(jnp.asarray(np.asarray(dout).astype(np.float64)))[0]
        want = {name: np.asarray(y) for name, y in ({"out": out} | {f"d{x}": y for x, y in gradients.items()}).items()}
    eps = 2**-10 if given.get("precision") == "tf32" else float(jnp.finfo(dtype).eps)

    def bound(name):
        """The bound of the result `name`: for the kernel's out one rounding, else roundings of weights and
        cotangents.
        """
        is_exact = name == "out" and implementation != "xla" and dtype != "float32"
        factor = 0.6 * float(jnp.finfo(got[name].dtype).eps) if is_exact else 6 * eps
        return (factor + 1e-5) * max(1.0, np.abs(want[name]).max())

    error = lambda name: float(np.abs(np.asarray(got[name]).astype(np.float64) - want[name]).max())
    return {name: (error(name), bound(name)) for name in want}


# Cases that the Hopper kernel serves: the kind, and the case.
HOPPER: dict[str, tuple[str, SizesAndOptions]] = {
    "int4": ("int4", ((3, 512, 128), {})),
    "int4_32": ("int4_32", ((8, 512, 64), {"bias": "float32", "activation": "gelu"})),
    "int4_256": ("int4_256", ((16, 768, 256), {"dtype": "float16", "has_residual": True})),
    "int4_gated": ("int4", ((9, 512, 128), {"is_gated": True, "activation": "silu"})),
    "int8": ("int8", ((17, 384, 192), {"out_dtype": "float32"})),
    "int8_row": ("int8_row", ((40, 256, 64), {"transpose_w": True})),
    "mxfp8": ("mxfp8", ((1, 384, 64), {"activation": "silu"})),
    "mxfp4": ("mxfp4", ((12, 512, 128), {"dtype": "float16"})),
    "mxfp4_one": ("mxfp4", ((1, 512, 64), {})),
}


def errors_by(case: tuple[str, SizesAndOptions], implementation: str | None) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of each result by name, for a call by this implementation.

    case: (kind, (sizes, options)). kind: of the weights, a key of KINDS. sizes: (M, K, N). options: of the call.
    """
    kind, options = case
    return errors(KINDS[kind], options, implementation)
