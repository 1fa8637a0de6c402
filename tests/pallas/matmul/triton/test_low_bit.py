"""The Triton matmul of low-bit weights: its PTX, its splits, and its block specs compiled without a GPU.

As a script it compiles one call: `python tests/pallas/matmul/triton/test_low_bit.py h200 '{"format": "int4", ...}'`.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.pallas.block_specs.matmul_specs import MatmulLowBitTriton
from jax_kernels.pallas.matmul.triton.dequantize import assembly
from jax_kernels.pallas.matmul.triton.low_bit import LowBitTraits
from jax_kernels.quantization.formats import LowBit, numbers
from tests.support.cases import tiers
from tests.tools import compile_case

OPERATIONS = {
    "mov.b32": lambda x: x,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "shl.b32": lambda x, y: x << y,
    "shr.u32": lambda x, y: x >> y,
    "xor.b32": lambda x, y: x ^ y,
    "add.u32": lambda x, y: x + y,
    "sub.u32": lambda x, y: x - y,
    "prmt.b32": lambda x, y, order: sum(((x | y << 32) >> 8 * (order >> 4 * i & 7) & 255) << 8 * i for i in range(4)),
}


def _run(program: str, given: int) -> list[int]:
    """Runs a piece of PTX with the register $2. Returns the registers $0 and $1."""
    registers = {"$2": given}
    for line in program.strip("{ }").split(";"):
        operation, _, operands = line.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        target, *names = operands.split(", ")
        values = [registers[name] if name in registers else int(name, 0) for name in names]
        if operation.startswith("fma"):
            dtype = jnp.bfloat16 if operation.endswith("bf16x2") else jnp.float16
            x, y, z = (np.array([v], np.uint32).view(dtype).astype(np.float64) for v in values)
            registers[target] = int((x * y + z).astype(dtype).view(np.uint32)[0])
        else:
            registers[target] = OPERATIONS[operation](*values) & 0xFFFFFFFF
    return [registers["$0"], registers["$1"]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("format", "group"), [("int4", 128), ("int8", 128), ("mxfp4", 32), ("mxfp8", 32)])
def test_assembly(format, group, dtype):
    """Every byte, at every position, gives the values of low_bit.numbers, including NaN and the sign of zero."""
    stored = np.arange(256, dtype=np.uint8)[:, None] + np.array([0, 85, 170, 3], np.uint8)
    layout = LowBit(format=format, group=group)
    wanted = numbers(jnp.asarray(stored).view(layout.dtype), layout)
    for half, want in enumerate(wanted):
        program = assembly(format, dtype, half)
        got = np.array([_run(program, int(x)) for x in stored.view(np.uint32)[:, 0]], np.uint32).view(jnp.dtype(dtype))
        np.testing.assert_array_equal(got.astype(np.float32), np.asarray(want))
        if layout.is_mx:
            np.testing.assert_array_equal(
                np.signbit(got.astype(np.float32)), stored >> (3 if half == 0 and layout.is_packed else 7) & 1 == 1
            )


@pytest.mark.parametrize(
    ("m", "n", "k", "programs", "want"),
    [
        (16, 8192, 8192, 2, (2, 16)),
        (16, 8192, 8192, None, (1, 32)),
        (1, 1024, 4096, 2, (16, 1)),
        (16, 100, 384, 2, (3, 1)),  # 256 does not divide 384
        (16, 65536, 8192, 2, (1, 32)),
    ],
)
def test_split_k_counts(m, n, k, programs, want):
    layout = LowBit(format="int4", group=128)
    x, w = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((n, layout.bytes_of(k)), jnp.uint8)
    config = MatmulLowBitTriton(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=4, programs=programs)
    options = MatmulOptions(out_dtype="bfloat16", transpose_w=True, low_bit=layout)
    traits = LowBitTraits.of(MatmulInputs(x, w), options, config, 132)
    assert (traits.splits, traits.steps_of_split) == want


COMPILED = {
    "int4": {},
    "int4_epilogue": {"activation": "gelu", "has_bias": True, "has_residual": True},
    "int4_group32": {"group_size": 32, "transpose_w": True, "scale_dtype": "bfloat16"},
    "int4_row": {"scaling": "row", "m": 1},
    "int4_float16": {"dtype": "float16", "m": 64},
    "int4_tf32": {"dtype": "float32", "precision": "tf32"},
    "int4_gated": {"is_gated": True, "m": 32},
    "int4_odd": {"m": 7, "n": 1027, "k": 1111, "has_bias": True},
    "int4_many": {"m": 512},
    "int8": {"scaling": "row", "activation": "silu"},
    "int8_groups": {"format": "int8", "m": 32},
    "int8_many": {"format": "int8", "m": 512, "dtype": "float16"},
    "mxfp8": {},
    "mxfp8_float16": {"dtype": "float16", "is_gated": True},
    "mxfp4": {},
    "mxfp4_float16": {"dtype": "float16", "m": 64, "has_residual": True},
}
QUICK = ["h200-int4", "a100-mxfp8", "a100-mxfp4"]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("case", tiers.cases([f"{gpu}-{name}" for gpu in ("h200", "a100") for name in COMPILED], QUICK))
def test_compiled(case):
    gpu, name = case.split("-")
    options = {"format": name.split("_")[0]} | COMPILED[name]
    printed, _, others = compile_case.compile_script(__file__, gpu, json.dumps(options))
    kernels = set(json.loads(printed))
    assert any(kernel.startswith("matmul_low_bit") for kernel in kernels)
    for kernel in kernels:
        figures = others[kernel]
        assert figures["spill_stores"] + figures["spill_loads"] == 0, (kernel, figures)


def _compile(gpu: str, options: dict) -> list[str]:
    """Compiles in this process. Returns the names of the Triton kernels."""
    from jax_kernels import gated_matmul, matmul
    from jax_kernels.ops.matmul import implementations
    from jax_kernels.quantization import quantize

    if blocks := options.pop("blocks", None):
        found = implementations._low_bit_config
        swap = lambda plan: dataclasses.replace(plan, forward=dataclasses.replace(plan.forward, **blocks))
        implementations._low_bit_config = lambda *given: (swap(found(*given)[0]), "swept")
    dtype = options.pop("dtype", "bfloat16")
    m, n, k = (options.pop(name, size) for name, size in (("m", 16), ("n", 8192), ("k", 8192)))
    names = "format", "group_size", "scaling", "scale_dtype"
    given = {name: options.pop(name) for name in names if name in options}
    axis = -1 if options.get("transpose_w") else -2
    shape = (n, k) if axis == -1 else (k, n)
    w = jax.eval_shape(lambda w: quantize(w, axis=axis, **given), jax.ShapeDtypeStruct(shape, jnp.float32))
    arrays = {"x": jax.ShapeDtypeStruct((m, k), jnp.dtype(dtype))}
    if options.pop("has_bias", False):
        arrays["bias"] = jax.ShapeDtypeStruct((n,), jnp.float32)
    if options.pop("has_residual", False):
        arrays["residual"] = jax.ShapeDtypeStruct((m, n), jnp.dtype(dtype))
    leaves, tree = jax.tree.flatten(w)
    is_gated = options.pop("is_gated", False)

    def run(arrays, leaves):
        w, x = jax.tree.unflatten(tree, leaves), arrays["x"]
        rest = {name: y for name, y in arrays.items() if name != "x"} | options | {"implementation": "triton"}
        return gated_matmul(x, w, w, **rest) if is_gated else matmul(x, w, **rest)

    return compile_case.lower_and_compile(gpu, run, arrays, leaves)[1]


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], json.loads(sys.argv[2]))))
