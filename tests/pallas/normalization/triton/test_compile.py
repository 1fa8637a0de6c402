"""The kernels of layer_norm and rms_norm compile for every generation, and spill nothing."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))

import aot
from tiers import cases

from jax_kernels import layer_norm
from jax_kernels.dispatch import on_device

# The GPU, columns and dtype. The most columns of each row of the block specs, and some that are no power of two.
SHAPES = [f"{gpu}-{columns}-bfloat16" for gpu in ("h200", "a100") for columns in (256, 1000, 4096, 8192, 16384, 40000)]
SHAPES += ["h200-4096-float32", "h200-16384-float32", "rtx4090-4096-bfloat16", "b200-4096-bfloat16"]
QUICK = ["h200-4096-bfloat16", "h200-40000-bfloat16", "a100-8192-bfloat16"]


@pytest.mark.compile
@pytest.mark.timeout(aot.TIMEOUT + 30)
@pytest.mark.parametrize("shape", cases(SHAPES, QUICK))
def test_compile(shape):
    printed, _, others = aot.compile_script(__file__, shape)
    kernels = json.loads(printed)
    assert kernels[0] == "norm_forward_triton"
    assert len(kernels) == (3 if int(shape.split("-")[1]) > 8192 else 2)
    for name in kernels:
        figures = others[name]
        assert figures["spill_stores"] + figures["spill_loads"] == 0, (name, figures)


def main(gpu: str, columns: str, dtype: str) -> list[str]:
    x = jax.ShapeDtypeStruct((4096, int(columns)), jnp.dtype(dtype))
    weights = jax.ShapeDtypeStruct(x.shape[1:], jnp.dtype(dtype))

    def both(x, residual, scale, bias, dout):
        norm = lambda *given: layer_norm(*given[:3], residual=given[3], implementation="triton")
        results, vjp = jax.vjp(norm, x, scale, bias, residual)
        return results, vjp((dout, dout))

    with on_device(gpu):
        return aot.lower_and_compile(gpu, both, x, x, weights, weights, x)[1]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1].split("-"))))
