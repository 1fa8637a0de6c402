"""The Triton grouped matmul: its launches, and its block specs compiled without a GPU.

As a script it compiles one call, forward and backward:
`python tests/pallas/grouped/triton/test_grouped_matmul.py h200 '{"activation": "silu", ...}'`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions
from jax_kernels.pallas.block_specs.matmul_specs import MatmulTriton
from jax_kernels.pallas.grouped.triton.matmul import Traits
from jax_kernels.testing import grouped_gated_matmul as gated_cases
from jax_kernels.testing import grouped_matmul as cases
from tests.support.cases import ids, tiers
from tests.tools import compile_case
from tests.tools.compile_budget import GPUS

BLOCKS = MatmulTriton(block_m=64, block_n=32, block_k=64, num_warps=4, num_stages=2, row_group=3)


@pytest.mark.parametrize(
    "name",
    tiers.cases(
        cases.TRITON, ["past", "primes", "one_short", "skewed", "tf32_epilogue", "gathered", "gathered_transposed"]
    ),
)
def test_against_float64(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for result, (error, bound) in cases.errors_by(cases.TRITON[name], "triton").items():
        assert error <= bound, result


@pytest.mark.parametrize("name", tiers.cases(gated_cases.TRITON, ["past", "primes", "skewed"]))
def test_gated_against_float64(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    for result, (error, bound) in cases.errors_by(gated_cases.TRITON[name], "triton").items():
        assert error <= bound, result


GPU_CASES = (
    cases.TRITON
    | cases.LONG
    | {f"gated_{name}": case for name, case in (gated_cases.TRITON | gated_cases.LONG).items()}
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(GPU_CASES))
def test_on_gpu(name):
    for result, (error, bound) in cases.errors_by(GPU_CASES[name], "triton").items():
        assert error <= bound, result


@pytest.mark.parametrize(("rows", "groups", "want"), [(1000, 7, 16 + 7), (64, 1, 1 + 1), (5, 100, 1 + 100)])
def test_tiles_of_a_launch(rows, groups, want):
    """The number of tiles follows from the shapes alone. Blocks shrink to fit the arrays."""
    types = [((rows, 48), "bfloat16"), ((groups, 48, 100), "bfloat16"), ((groups,), "int32")]
    inputs = GroupedInputs(*(jax.ShapeDtypeStruct(*of) for of in types))
    traits = Traits.of(inputs, GroupedOptions(out_dtype="bfloat16"), BLOCKS)
    assert (traits.row_tiles, traits.n_blocks) == (want, 4)
    assert traits.block_m == (16 if rows == 5 else 64)


COMPILED = {
    "plain": {},
    "epilogue": {"activation": "gelu", "has_bias": True, "transpose_w": True},
    "float16": {"dtype": "float16", "activation": "gelu_tanh", "has_bias": True},
    "odd": {"m": 1001, "n": 1027, "k": 333, "activation": "relu"},
    "tf32": {"dtype": "float32", "precision": "tf32", "activation": "tanh", "has_bias": True},
    "gathered": {"gathers": True},
    "gated": {"activation": "silu", "is_gated": True},
    "float32_out": {"out_dtype": "float32", "activation": "sigmoid"},
    "few_rows": {"m": 64, "activation": "silu", "has_bias": True},
}
SPILLED: dict[str, int] = {}
CASES = [f"{gpu}-{name}" for gpu in ("h200", "a100", "rtx4090", "b200") for name in COMPILED]
CASES += [case for gpu in GPUS.values() if (case := f"{gpu}-plain") not in CASES]
QUICK = ["h200-plain", "a100-epilogue"]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("case", tiers.cases(CASES, QUICK))
def test_compiled(case):
    """Forward and backward."""
    gpu, name = case.split("-")
    printed, _, others = compile_case.compile_script(__file__, gpu, json.dumps(COMPILED[name]))
    kernels = set(json.loads(printed))
    assert kernels == {"grouped_matmul_triton", "grouped_weight_gradient_triton"}
    for kernel in kernels:
        figures = others[kernel]
        assert figures["spill_stores"] + figures["spill_loads"] <= SPILLED.get(case, 0), (kernel, figures)


def _compile(gpu: str, options: dict) -> list[str]:
    """Compiles in this process. Returns the names of the Triton kernels."""
    from jax_kernels import grouped_gated_matmul, grouped_matmul

    dtype, (m, n, k) = options.pop("dtype", "bfloat16"), (options.pop(name, 2048) for name in "mnk")
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    arrays = {"x": array(m, k), "w": array(8, n, k) if options.get("transpose_w") else array(8, k, n)}
    op, gathers = grouped_matmul, options.pop("gathers", False)
    if options.pop("is_gated", False):
        op = grouped_gated_matmul
        arrays["w_gate"] = arrays["w_up"] = arrays.pop("w")
    if options.pop("has_bias", False):
        arrays["bias"] = array(8, n)

    def both(arrays, sizes, dout, index=None):
        if index is not None:
            options["gather_indices"] = index
        call = lambda given: op(**given, group_sizes=sizes, **options, implementation="triton")
        out, vjp = jax.vjp(call, arrays)
        return out, vjp(dout)

    dout = array(m, n, dtype=options.get("out_dtype", dtype))
    more = [array(m, dtype="int32")] * gathers
    return compile_case.lower_and_compile(gpu, both, arrays, array(8, dtype="int32"), dout, *more)[1]


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], json.loads(sys.argv[2]))))
