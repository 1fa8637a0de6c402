"""Hopper kernels of slices: XLA would read and write them in place, at addresses that Mosaic refuses."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import matmul
from jax_kernels.pallas.mosaic.launch import ALIGNMENT, slices_are_aligned
from tests.support.cases.slices import CALLS, SCANNED, with_gradients
from tests.tools import compile_case

# XLA would pass slices to these calls' kernels, and write the result of the second one into the updated array.
FUSED = ("matmul", "update", "norm", "grouped", "cross-entropy", "attention")


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((128, 64), "bfloat16", False),
        ((128, 128), "bfloat16", True),
        ((1, 128, 64), "bfloat16", False),
        ((2, 128, 64), "bfloat16", True),
        ((2, 193, 1, 64), "bfloat16", False),
        ((2, 193, 2, 64), "bfloat16", True),
        ((4096,), "float32", False),
        ((1, 4096), "bfloat16", False),
        ((4096,), "int32", False),
        ((8, 4096), "int32", True),
        ((2, 256), "float8_e4m3fn", True),
        ((), "float32", False),
        ((0, 64), "bfloat16", False),
    ],
)
def test_slices_are_aligned(shape, dtype, expected):
    assert slices_are_aligned(shape, jnp.dtype(dtype)) is expected


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(2 * compile_case.TIMEOUT)
def test_kernels_get_no_slice_at_another_address():
    """But slices that are aligned, such as a layer's weights in a scan over layers, are read in place."""
    found = json.loads(compile_case.compile_script(__file__).printed)
    assert all(all(aligned) for aligned in found.values()), found
    assert found["layers"] == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_on_gpu(name):
    """Equal to the call of copies. dquery has at most two addends, so that their order has no effect."""
    call = CALLS[name]
    arrays = [jnp.asarray(x) for x in call.arrays]
    found = jax.jit(call.of_slices)(*arrays)
    wanted = jax.jit(call.run)(*(jnp.array(x[1:]) for x in call.arrays))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32), equal_nan=True)
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCANNED)
def test_scans_on_gpu(name):
    """Kernels in a scan, with their gradients, equal the calls of a loop."""
    function, arrays = with_gradients(SCANNED[name].run), [jnp.asarray(x) for x in SCANNED[name].arrays]
    found = jax.jit(lambda *arrays: jax.lax.map(lambda entry: function(*entry), arrays))(*arrays)
    wanted = [jax.jit(function)(*(x[i] for x in arrays)) for i in range(len(arrays[0]))]
    for x, *parts in zip(jax.tree.leaves(found), *map(jax.tree.leaves, wanted), strict=True):
        y = np.stack(parts).astype(np.float32)
        assert np.linalg.norm(np.asarray(x, np.float32) - y) < 5e-3 * np.linalg.norm(y)


def _fused(program: str) -> list[bool]:
    """For each slice or update along a first axis that Hopper kernels read or write in place: whether it is aligned."""
    bodies = [body for body in re.split(r"\n(?=%|ENTRY)", program) if "mosaic_gpu" in body]
    shapes = re.findall(r" = (\w+)\[([\d,]*)\]\S* (?:dynamic-|dynamic-update-)?slice\(", "\n".join(bodies))
    bits = {"bf16": 16, "f32": 32, "s32": 32, "pred": 8}
    rows = ((bits[dtype], [int(size) for size in sizes.split(",")[1:]]) for dtype, sizes in shapes)
    return [math.prod(row) * size % (8 * ALIGNMENT) == 0 for size, row in rows]


def _layers(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (matmul(x, w, implementation="mosaic_gpu"), None), x, w)[0]


def main() -> None:
    shape = lambda *of: jax.ShapeDtypeStruct(of, jnp.bfloat16)
    functions = {name: (CALLS[name].of_slices, CALLS[name].arrays) for name in FUSED}
    functions["layers"] = _layers, (shape(128, 128), shape(4, 128, 128))
    compiled = {
        name: compile_case.lower("h200", *[function, *arrays]) for name, (function, arrays) in functions.items()
    }
    print(json.dumps({name: _fused(lowered.compile().as_text()) for name, lowered in compiled.items()}))


if __name__ == "__main__":
    main()
