"""Norms, matmuls and quantize of arrays whose outer axes are sharded, on a mesh of 2 x 4: no device gathers a token.

As a script, in a process with eight CPU devices, it prints for each case the error against one device, and each
collective with the shapes of its results. Its first word names the axes' type, and the implementation.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_kernels import dequantize, gated_matmul, layer_norm, matmul, mlp, quantize, rms_norm
from tests.support.processes import cpu_devices

K, N = 32, 64
X, Y, SCALE, BIAS, UP, DOWN = "x", "y", (K,), (N,), (K, N), (N, K)  # "x" and "y": the outer axes with K and with N
SHARDINGS = {
    (16,): [P("d"), P(("d", "t"))],
    (8, 16): [P("d", "t"), P("t", "d"), P(None, "t"), P(("d", "t"))],
    (4, 2, 8): [P("d", None, "t"), P("t", "d"), P(None, "d", "t"), P(None, None, ("d", "t"))],
    (4, 64): [P("d", "t")],  # two batch entries have 128 rows
    (2, 256): [P("d", "t")],  # each entry has two times 128 rows, and each device half of 128 rows
}


def in_8_bits(x, **how):
    found = quantize(x, **how)
    return found.values.astype(jnp.float32), found.scale, dequantize(found)


def of_low_bits(x, w, format="int4", **how):
    return matmul(x, quantize(jax.lax.stop_gradient(w), format, axis=-2), activation="silu", **how)


def of_normed(x, scale, w, **how):
    values = rms_norm(x, scale, quantize="e4m3", **how)
    return matmul(values, quantize(w, scaling="row", axis=-2), **how)


def with_epilogue(x, w, b, r, **how):
    return matmul(x, w, bias=b, residual=r, activation="gelu", **how)


def with_scales(x, w, **how):
    return matmul(x, w, precision="fp8", x_scale=jnp.full(x.shape[:-1], 0.01), w_scale=jnp.full(N, 0.02), **how)


def of_float16(x, w, b, **how):
    how.pop("precision")
    return matmul(x.astype(jnp.float16), w.astype(jnp.float16), bias=b, out_dtype=jnp.float32, **how)


def normed(norm, *names):
    return lambda x, *arrays, **how: norm(x, **dict(zip(names, arrays, strict=True)), **how)


def gated_mlp(x, gate, up, down, r, **how):
    return mlp(x, up, down, w_gate=gate, residual=r, **how)


def mlp_with_biases(x, up, down, b, c, **how):
    return mlp(x, up, down, bias_up=b, bias_down=c, **how)


def mapped(x, w, **how):
    """Over a sharded axis."""
    return jax.vmap(lambda x: matmul(x, w, **how))(x)


TF32 = {"precision": "tf32"}
FP8 = {scaling: {"precision": "fp8", "scaling": scaling} for scaling in ("tensor", "row", "block")}
# Name: the function, its arrays, how many have gradients, and options.
OPS = {
    "rms_norm": (normed(rms_norm, "scale", "residual"), [X, SCALE, X], 3, {}),
    "layer_norm": (normed(layer_norm, "scale", "bias"), [X, SCALE, SCALE], 3, {}),
    "matmul": (matmul, [X, UP], 2, TF32),
    "transposed": (functools.partial(matmul, transpose_w=True), [X, DOWN], 2, TF32),
    "epilogue": (with_epilogue, [X, UP, BIAS, Y], 4, TF32),
    "mapped": (mapped, [X, UP], 1, TF32),
    "gated": (gated_matmul, [X, UP, UP], 3, TF32),
    "mlp": (gated_mlp, [X, UP, UP, DOWN, X], 5, TF32),
    "mlp biases": (mlp_with_biases, [X, UP, DOWN, BIAS, SCALE], 5, TF32),
    "int4": (of_low_bits, [X, UP], 1, TF32),
    "mxfp8": (functools.partial(of_low_bits, format="mxfp8"), [X, UP], 1, TF32),
}
XLA_ONLY = {  # Triton has no 8-bit matmul, and quantize is plain JAX code
    "float16": (of_float16, [X, UP, BIAS], 3, TF32),
    "fp8 tensor": (with_epilogue, [X, UP, BIAS, Y], 4, FP8["tensor"]),
    "fp8 row": (with_epilogue, [X, UP, BIAS, Y], 4, FP8["row"]),
    "fp8 block": (with_epilogue, [X, UP, BIAS, Y], 4, FP8["block"]),
    "fp8 gated": (gated_matmul, [X, UP, UP], 3, FP8["row"]),
    "fp8 scales": (with_scales, [X, UP], 2, {}),
    "normed": (of_normed, [X, SCALE, UP], 0, {}),
    "quantize": (in_8_bits, [X], 0, {"scaling": "tensor"}),
    "quantize rows": (in_8_bits, [X], 0, {"scaling": "row"}),
    "quantize blocks": (in_8_bits, [X], 0, {"scaling": "block"}),
}
BLOCKS = "fp8 block", "quantize blocks"
EXPLICIT = "rms_norm", "epilogue", "gated", "mlp", "fp8 row", "normed"  # the cases of the short run on Explicit axes


def both(function, moving):
    """The results, and the gradients of the first arrays."""

    def run(*arrays):
        if not moving:
            return function(*arrays)
        out, vjp = jax.vjp(lambda *first: function(*first, *arrays[moving:]), *arrays[:moving])
        return out, vjp(jax.tree.map(lambda y: y / 64, out))

    return run


def error_of(got, want):
    """The largest error of an array, over its root mean square."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    pairs = ([np.asarray(x, np.float64) for x in pair] for pair in pairs)
    return max(float(np.abs(g - w).max() / (np.sqrt(np.square(w).mean()) + 1e-30)) for g, w in pairs)


def cases(kind, implementation, length):
    """(name, outer axes, shardings) of a run; length: "short" or "all"."""
    ops = OPS | (XLA_ONLY if implementation == "xla" else {})
    for name in ops:
        if length == "short" and kind == "explicit" and name not in EXPLICIT:
            continue
        for outer, specs in SHARDINGS.items():
            if (len(outer) == 1 and name == "mapped") or (max(outer) >= 64 and name not in BLOCKS):
                continue
            if name == "quantize blocks" and len(outer) == 1:
                continue  # a row block would lie along the first axis
            if length == "all":
                yield name, outer, specs
            elif outer == (8, 16) or (max(outer) >= 64 and name == "fp8 block"):
                yield name, outer, specs[:1]


def main(kind, implementation, length):
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    mesh = jax.make_mesh((2, 4), ("d", "t"), (types[kind],) * 2)
    random, found = np.random.default_rng(0), {}
    for name, outer, specs in cases(kind, implementation, length):
        function, given, moving, options = (OPS | XLA_ONLY)[name]
        how = options if name.startswith("quantize") else options | {"implementation": implementation}
        run = both(functools.partial(function, **how), moving)
        shapes = [(*outer, {X: K, Y: N}[x]) if isinstance(x, str) else x for x in given]
        arrays = [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]
        want = jax.jit(run)(*arrays)
        for spec in specs:
            place = lambda x, of, spec=spec: jax.device_put(x, jax.NamedSharding(mesh, spec if of in (X, Y) else P()))
            sharded = list(map(place, arrays, given))
            with jax.set_mesh(mesh):
                compiled = jax.jit(run).lower(*sharded).compile()
            found[f"{name} {outer} {spec}"] = {
                "error": error_of(compiled(*sharded), want),
                "collectives": cpu_devices.collectives_of(compiled.as_text()),
            }
    return found


def is_legal(case, name, *shape):
    """Whether devices may send this: sums of weight gradients, and the scales of blocks that shards split."""
    if "block" in case and np.prod(shape) <= 8:
        return name in ("all-reduce", "all-gather")
    weights = [[], [1], [K], [N], [K, N], [N, K]]
    return name == "all-reduce" and shape in map(tuple, weights)


def check(found):
    for case, of in found.items():
        illegal = [x for x in of["collectives"] if not is_legal(case, *x)]
        assert not illegal, (case, illegal)
        # Each shard rounds its partial sums to float16, whose unit roundoff is 4.9e-4.
        assert of["error"] < (1e-3 if case.startswith("float16") else 1e-4), (case, of["error"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("implementation", "length"),
    [("xla", "short"), *(pytest.param(name, "all", marks=pytest.mark.slow) for name in ("xla", "triton"))],
)
def test_tokens_are_not_gathered(kind, implementation, length):
    words = kind, implementation, length
    lines = cpu_devices.lines_of(__file__, *words, limit=580, JAX_KERNELS_INTERPRET="1")
    check(json.loads(lines[-1]))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
