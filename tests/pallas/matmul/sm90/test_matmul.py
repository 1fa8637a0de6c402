"""The Hopper matmul in the Mosaic interpreter, with gradients and races; and its block specs, compiled without a GPU.

As a script it compiles one call: `python tests/pallas/matmul/sm90/test_matmul.py '{"activation": "silu", ...}'`.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))

import aot
import cases_interpreter
import tiers

# Cores, whether races are looked for, and cases of matmul_cases.HOPPER.
INTERPRETED = {
    "one_core": (1, True, ["plain", "edges", "transposed", "gated"]),
    "three_cores": (3, False, ["edges", "epilogue", "float32_out", "gated_transposed"]),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", INTERPRETED)
def test_interpreted(group):
    cases_interpreter.check("matmul_cases", *INTERPRETED[group])


COMPILED = {
    "plain": {},
    "transposed": {"transpose_w": True, "activation": "gelu", "has_bias": True, "has_residual": True},
    "float16": {"dtype": "float16", "activation": "gelu_tanh", "has_bias": True},
    "narrow": {"n": 128, "activation": "sigmoid", "has_residual": True},
    "float32_out": {"out_dtype": "float32", "activation": "tanh", "has_residual": True},
    "relu": {"activation": "relu"},
    "silu": {"activation": "silu", "has_bias": True},
    "gated": {"activation": "silu", "is_gated": True},
    "gated_float32_out": {"activation": "gelu", "is_gated": True, "out_dtype": "float32", "has_residual": True},
}


@pytest.mark.compile
@pytest.mark.timeout(aot.TIMEOUT + 30)
@pytest.mark.parametrize("name", tiers.cases(COMPILED, ["plain", "transposed", "gated"]))
def test_compiled(name):
    """Forward and backward: three launches, none of which spills."""
    printed, mosaic, _ = aot.compile_script(__file__, json.dumps(COMPILED[name]))
    assert json.loads(printed) == []
    assert list(mosaic) == ["matmul_sm90_mosaic_gpu_kernel"]
    for figures in mosaic.values():
        assert figures["spill_stores"] == 0
        assert figures["registers"] <= 168
        assert figures["shared_memory"] <= 232448


def _compile(options: dict) -> list[str]:
    """Compiles in this process; the names of the Triton kernels."""
    import jax
    import jax.numpy as jnp

    from jax_kernels import gated_matmul, matmul

    dtype, n = options.pop("dtype", "bfloat16"), options.pop("n", 4096)
    out_dtype = options.get("out_dtype", dtype)
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    arrays = {"x": array(4096, 2048), "w": array(n, 2048) if options.get("transpose_w") else array(2048, n)}
    is_gated = options.pop("is_gated", False)
    if is_gated:
        arrays = {"x": arrays["x"], "w_gate": arrays["w"], "w_up": arrays["w"]}
    if options.pop("has_bias", False):
        arrays["bias"] = array(n)
    if options.pop("has_residual", False):
        arrays["residual"] = array(4096, n, dtype=out_dtype)

    def both(arrays, dout):
        out, vjp = jax.vjp(
            lambda given: (gated_matmul if is_gated else matmul)(**given, **options, implementation="mosaic_gpu"),
            arrays,
        )
        return out, vjp(dout)

    return aot.lower_and_compile("h200", both, arrays, array(4096, n, dtype=out_dtype))[1]


if __name__ == "__main__":
    print(json.dumps(_compile(json.loads(sys.argv[1]))))
