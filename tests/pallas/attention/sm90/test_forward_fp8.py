"""8-bit attention on Hopper: its operands' layout, its kernel in the interpreter, its rows compiled without a GPU.

As a script it compiles one call: `python tests/pallas/attention/sm90/test_forward_fp8.py '{"head_dim": 128, ...}'`.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.pallas.attention.passes import fp8_values
from jax_kernels.pallas.attention.passes.fp8_values import KEY_ORDER
from jax_kernels.pallas.attention.sm90.forward.fp8 import reorder_keys
from tests.support.cases import tiers
from tests.support.interpreters import kernels as cases_interpreter
from tests.tools import compile_case

# Cores, whether to detect races, and cases.
INTERPRETED = {
    "one_core": (1, True, ["causal"]),
    "lengths": (3, False, ["lengths", "odd"]),
    "three_cores": (3, False, ["offsets", "rising_some", "head_dim_256"]),
}


def places(layout, shape):
    """[registers ..., thread, element]: the index in an array, row by row, of the element that a layout puts there."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        outer = x.shape[: x.ndim - len(tile)]
        pairs = [(n // t, t) for n, t in zip(x.shape[-len(tile) :], tile, strict=True)]
        x = x.reshape(*outer, *(n for pair in pairs for n in pair))
        first = len(outer)
        order = [first + 2 * i + part for part in range(2) for i in range(len(tile))]
        x = x.transpose(*range(first), *order)
    of_thread = [x.ndim + axis for axis in (*layout.warp_dims, *layout.lane_dims, layout.vector_dim)]
    registers = [axis for axis in range(x.ndim) if axis not in of_thread]
    x = x.transpose(*registers, *of_thread)
    return x.reshape(-1, 128, x.shape[-1])


def test_p_registers_are_the_operand_layout():
    """as_operand relies on this: a thread's values belong to its own part of the operand, in KEY_ORDER."""
    from jax.experimental.mosaic.gpu import fragmented_array

    shape = (64, 64)
    pairs = places(fragmented_array.WGMMA_LAYOUT, shape).reshape(4, 2, 2, 128, 2)  # 16 keys, 8 keys, 8 rows
    quadruples = places(fragmented_array.WGMMA_LAYOUT_8BIT, shape).reshape(4, 2, 128, 4)
    assert sorted(pairs.reshape(-1)) == sorted(quadruples.reshape(-1)) == list(range(64 * 64))
    row, place = np.divmod(quadruples, 64)
    key = place // 16 * 16 + np.array(KEY_ORDER)[place % 16]
    np.testing.assert_array_equal(np.concatenate([pairs[:, 0], pairs[:, 1]], axis=-1), row * 64 + key)


@pytest.mark.parametrize("shape", [(2, 200, 3, 64), (1, 130, 2, 192), (2, 77, 2, 40)])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_values(shape, with_lengths):
    batch, kv_length, kv_heads, head_dim = shape
    value = np.random.default_rng(0).integers(-100, 100, shape).astype(np.int8)
    lengths = np.array([kv_length - 33, -5][:batch]) if with_lengths else np.full(batch, kv_length)
    transposed = jax.jit(functools.partial(fp8_values.transposed, interpret=True))
    got = transposed(jax.lax.bitcast_convert_type(value, jnp.float8_e4m3fn), lengths if with_lengths else None)
    assert got.shape == (batch, kv_heads, -(-head_dim // 64) * 64, -(-kv_length // 128) * 128)
    want = np.where((np.arange(kv_length) < lengths[:, None])[..., None, None], value, 0)
    want = np.pad(want, [(0, 0), (0, -kv_length % 128), (0, 0), (0, -head_dim % 64)])
    order = np.arange(want.shape[1]).reshape(-1, 16)[:, KEY_ORDER].reshape(-1)
    want = want[:, order].transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(np.asarray(got).view(np.int8), want)
    np.testing.assert_array_equal(reorder_keys(np.arange(want.shape[3])[None], axis=1)[0], order)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", tiers.cases(INTERPRETED, {"one_core", "lengths"}))
def test_interpreted(group):
    cases_interpreter.check("jax_kernels.testing.flash_attention_fp8", *INTERPRETED[group])


def _compile(options: dict) -> None:
    from jax_kernels import flash_attention_fp8

    head_dim, length, heads, kv_heads = options.pop("head_dim"), options.pop("length", 8192), 16, 4
    array = lambda *shape, dtype="float8_e4m3fn": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    arrays = {"query": array(2, length, heads, head_dim), "q_scale": array(2, heads, dtype="float32")}
    if options.pop("kv_lengths", False):
        arrays["kv_lengths"] = array(2, dtype="int32")
    arrays |= {name: array(2, length, kv_heads, head_dim) for name in ("key", "value")}
    call = lambda arrays: flash_attention_fp8(**arrays, **options, return_lse=True, implementation="mosaic_gpu")
    compile_case.lower_and_compile("h200", call, arrays)


# Representatives of similar rows: an odd call for 128 causal, causal calls for 64 and 256.
COMPILED = {
    "head_dim_64": {"head_dim": 64, "is_causal": True},
    "head_dim_128": {"head_dim": 128},
    "head_dim_256": {"head_dim": 256, "is_causal": True},
    "odd": {"head_dim": 72, "is_causal": True, "kv_lengths": True, "length": 777},
}
# Bytes that a kernel may spill outside the loop over the keys: once for each tile of queries.
SPILLS = {"head_dim_256": 8}


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("name", tiers.cases(COMPILED, {"odd"}))
def test_compiles(name):
    _, mosaic, others = compile_case.compile_script(__file__, json.dumps(COMPILED[name]))
    (kernel,) = mosaic.values()
    assert kernel["spill_stores"] + kernel["spill_loads"] <= SPILLS.get(name, 0), kernel
    assert kernel["notes"] == []
    values = others["attention_fp8_values_triton"]
    assert (values["spill_stores"], values["spill_loads"]) == (0, 0), values


if __name__ == "__main__":
    _compile(json.loads(sys.argv[1]))
