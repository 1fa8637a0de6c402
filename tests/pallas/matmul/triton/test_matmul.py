"""The Triton matmul: its tiles and splits, and its block specs compiled without a GPU.

As a script it compiles one call: `python tests/pallas/matmul/triton/test_matmul.py h200 '{"activation": "silu", ...}'`.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.pallas.block_specs.matmul_specs import MatmulTriton
from jax_kernels.pallas.matmul.triton.state import Traits
from jax_kernels.testing import matmul as matmul_cases
from tests.support.cases import ids, tiers
from tests.tools import compile_case
from tests.tools.compile_budget import GPUS

BLOCKS = MatmulTriton(block_m=64, block_n=32, block_k=64, num_warps=4, num_stages=2, row_group=3)


@pytest.mark.parametrize(("m", "n"), [(900, 160), (64, 31), (1, 1), (500, 100)])
def test_every_work_tile_runs_once(m, n):
    inputs = MatmulInputs(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, 64), (64, n))))
    traits = Traits.of(inputs, MatmulOptions(out_dtype="bfloat16"), BLOCKS, 132)
    tile = jax.vmap(lambda i: (traits.tile(i).rows.start, traits.tile(i).columns.start))
    found = list(zip(*(x.tolist() for x in tile(jnp.arange(traits.tiles, dtype=jnp.int32))), strict=True))
    want = {(row, column) for row in range(0, m, traits.block_m) for column in range(0, n, traits.block_n)}
    assert len(found) == len(want)
    assert set(found) == want


@pytest.mark.parametrize(
    ("m", "n", "k", "split_steps", "want"),
    [
        (64, 64, 4096, 8, (8, 8)),  # split_steps is the limit
        (64, 2048, 4096, 4, (2, 32)),  # the SMs for each tile are the limit
        (64, 2112, 4096, 4, (2, 32)),
        (64, 2144, 4096, 4, (1, 64)),  # the tiles exceed half of the SMs
        (64, 64, 600, 4, (3, 4)),  # the last split has fewer steps
        (64, 64, 4096, None, (1, 64)),
    ],
)
def test_split_k_counts(m, n, k, split_steps, want):
    inputs = MatmulInputs(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n))))
    config = dataclasses.replace(BLOCKS, split_steps=split_steps)
    traits = Traits.of(inputs, MatmulOptions(out_dtype="bfloat16"), config, 132)
    assert (traits.splits, traits.steps_of_split) == want


SPLIT = {
    "rows": matmul_cases.Case((5, 1500), 70, activation="silu", has_residual=True, bias="float32"),
    "gated": matmul_cases.Case((33, 1100), 17, activation="gelu", is_gated=True, out_dtype="float32", transpose_w=True),
}


@pytest.mark.parametrize("name", ids.named(SPLIT))
def test_split_k_matches_float64(name, monkeypatch):
    """Several programs work on one tile. The gradients of w have equally few rows, and short sums."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    with on_device(dataclasses.replace(device_info("a100"), core_count=8)):
        errors = matmul_cases.errors_by(SPLIT[name], "triton")
    for result, (error, bound) in errors.items():
        assert error <= bound, result


COMPILED = {
    "plain": {},
    "epilogue": {"activation": "gelu", "has_bias": True, "has_residual": True, "transpose_w": True},
    "float16": {"dtype": "float16", "activation": "gelu_tanh", "has_bias": True, "m": 1000, "n": 1096},
    "odd": {"m": 1001, "n": 1027, "k": 333, "activation": "relu"},
    "tf32": {"dtype": "float32", "precision": "tf32", "activation": "tanh", "has_residual": True},
    "float32_out": {"out_dtype": "float32", "activation": "sigmoid", "has_residual": True},
    "gated": {"activation": "silu", "is_gated": True},
    "gated_tf32": {"activation": "silu", "is_gated": True, "dtype": "float32", "precision": "tf32"},
    "few_rows": {"m": 16, "activation": "silu", "has_bias": True},
    "few_rows_gated": {"m": 64, "activation": "silu", "is_gated": True, "transpose_w": True},
}
SPILLED = {"h200-float32_out": 16}  # bytes, in the epilogue
CASES = [f"{gpu}-{name}" for gpu in ("h200", "a100", "rtx4090", "b200") for name in COMPILED]
CASES += [case for gpu in GPUS.values() if (case := f"{gpu}-plain") not in CASES]
QUICK = ["h200-gated", "a100-epilogue", "a100-few_rows"]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("case", tiers.cases(CASES, QUICK))
def test_compiled(case):
    """Forward and backward."""
    gpu, name = case.split("-")
    printed, _, others = compile_case.compile_script(__file__, gpu, json.dumps(COMPILED[name]))
    kernels = set(json.loads(printed))
    assert kernels >= ({"matmul_split_triton", "matmul_join_triton"} if name == "few_rows" else {"matmul_triton"})
    for kernel in kernels:
        figures = others[kernel]
        assert figures["spill_stores"] + figures["spill_loads"] <= SPILLED.get(case, 0), (kernel, figures)


def _compile(gpu: str, options: dict) -> list[str]:
    """Compiles in this process. Returns the names of the Triton kernels."""
    from jax_kernels import gated_matmul, matmul

    dtype, (m, n, k) = options.pop("dtype", "bfloat16"), (options.pop(name, 2048) for name in "mnk")
    out_dtype = options.get("out_dtype", dtype)
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    arrays = {"x": array(m, k), "w": array(n, k) if options.get("transpose_w") else array(k, n)}
    is_gated = options.pop("is_gated", False)
    if is_gated:
        arrays = {"x": arrays["x"], "w_gate": arrays["w"], "w_up": arrays["w"]}
    if options.pop("has_bias", False):
        arrays["bias"] = array(n)
    if options.pop("has_residual", False):
        arrays["residual"] = array(m, n, dtype=out_dtype)

    def both(arrays, dout):
        op = gated_matmul if is_gated else matmul
        out, vjp = jax.vjp(lambda given: op(**given, **options, implementation="triton"), arrays)
        return out, vjp(dout)

    return compile_case.lower_and_compile(gpu, both, arrays, array(m, n, dtype=out_dtype))[1]


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], json.loads(sys.argv[2]))))
