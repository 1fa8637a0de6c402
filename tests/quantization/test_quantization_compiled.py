"""Rounding to 8 bits, compiled for a GPU: XLA keeps the rounding, also if the values become wide again.

As a script it compiles for an H200 and prints the number of 8-bit types in each program.
"""

import json

import pytest

from tests.tools import compile_case


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
def test_rounding_is_kept():
    counts = json.loads(compile_case.compile_script(__file__).printed.splitlines()[-1])
    assert all(counts.values()), counts


def _counts() -> dict[str, int]:
    import jax
    import jax.numpy as jnp

    from jax_kernels.quantization import dequantize, quantize, quantize_fp8

    def by_heads(x):
        values, scales = quantize_fp8(x, axis=1)
        return values.astype(jnp.float32) * scales[:, None]

    functions = {format: lambda x, f=format: dequantize(quantize(x, f)) for format in ("e4m3", "e5m2", "mxfp8")}
    functions["quantize_fp8"] = by_heads
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    programs = {
        name: compile_case.lower_and_compile("h200", function, x)[0].as_text() for name, function in functions.items()
    }
    return {name: program.count("f8e") for name, program in programs.items()}


if __name__ == "__main__":
    print(json.dumps(_counts()))
