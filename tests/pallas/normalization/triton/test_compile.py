"""The kernels of layer_norm and rms_norm compile for every generation, and spill nothing."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import layer_norm
from jax_kernels.dispatch import on_device
from tests.support.cases.tiers import cases
from tests.tools import compile_case
from tests.tools.compile_budget import GPUS

# The GPU, columns and dtype: the most columns of each row of the block specs, and some that are no power of two.
SHAPES = [f"{gpu}-{columns}-bfloat16" for gpu in ("h200", "a100") for columns in (256, 1000, 4096, 8192, 16384, 40000)]
SHAPES += ["h200-4096-float32", "h200-16384-float32"]
SHAPES += [f"{gpu}-4096-bfloat16" for gpu in GPUS.values() if gpu not in ("h200", "a100")]
QUICK = ["h200-4096-bfloat16", "h200-40000-bfloat16", "a100-8192-bfloat16"]
# The same with the format of a quantized output.
QUANTIZED = [f"h200-{columns}-bfloat16-e4m3" for columns in (256, 1000, 4096, 8192, 16384, 40000)]
QUANTIZED += ["h200-4096-float32-e5m2", "h200-16384-float32-e4m3", "b200-4096-bfloat16-e4m3"]
QUANTIZED += [f"rtx4090-{columns}-bfloat16-{format}" for columns in (4096, 40000) for format in ("e4m3", "e5m2")]
QUICK_QUANTIZED = ["h200-4096-bfloat16-e4m3", "h200-40000-bfloat16-e4m3", "rtx4090-4096-bfloat16-e5m2"]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("shape", cases(SHAPES, QUICK))
def test_compile(shape):
    printed, _, others = compile_case.compile_script(__file__, shape)
    kernels = json.loads(printed)
    assert kernels[0] == "norm_forward_triton"
    assert len(kernels) == (3 if int(shape.split("-")[1]) > 8192 else 2)
    for name in kernels:
        figures = others[name]
        assert figures["spill_stores"] + figures["spill_loads"] == 0, (name, figures)


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("shape", cases(QUANTIZED, QUICK_QUANTIZED))
def test_compile_quantized(shape):
    """One kernel, and no pass by XLA."""
    printed, _, others = compile_case.compile_script(__file__, shape)
    assert json.loads(printed) == ["norm_forward_quantized_triton"]
    assert list(others) == ["norm_forward_quantized_triton"]
    figures = others["norm_forward_quantized_triton"]
    assert figures["spill_stores"] + figures["spill_loads"] == 0, figures


def main(gpu: str, columns: str, dtype: str, quantize: str | None = None) -> list[str]:
    x = jax.ShapeDtypeStruct((4096, int(columns)), jnp.dtype(dtype))
    weights = jax.ShapeDtypeStruct(x.shape[1:], jnp.dtype(dtype))

    def norm(x, scale, bias, residual):
        return layer_norm(x, scale, bias, residual=residual, quantize=quantize, implementation="triton")

    def both(x, residual, scale, bias, dout):
        results, vjp = jax.vjp(norm, x, scale, bias, residual)
        return results, vjp((dout, dout))

    with on_device(gpu):
        if quantize is not None:
            return compile_case.lower_and_compile(gpu, norm, x, weights, weights, x)[1]
        return compile_case.lower_and_compile(gpu, both, x, x, weights, weights, x)[1]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1].split("-"))))
