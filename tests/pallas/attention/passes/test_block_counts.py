"""The number of pairs that each block of a bool array keeps: the kernel interpreted, and its use by masks."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.dispatch import on_device
from jax_kernels.masks.block_lists import block_status, block_sums
from jax_kernels.ops.attention import block_counts
from jax_kernels.pallas.attention.passes import block_counts as block_counts_pass
from tests.tools import compile_case

pytestmark = pytest.mark.triton

# The array's shape and the blocks: partial blocks at the ends, several blocks in a program, and blocks that several
# programs share.
TAKEN = [
    ((2, 3, 300, 203), (64, 64)),
    ((1, 1, 1000, 1000), (192, 64)),
    ((1, 2, 256, 512), (128, 128)),
    ((1, 1, 513, 700), (512, 256)),
    ((1, 2, 50, 900), (16, 16)),
    ((2, 1, 257, 40), (32, 8)),
]


def array_of(shape):
    keep = np.random.default_rng(0).random(shape) < 0.5
    keep[:, :, :70, :130] = True
    keep[:, :, 40:, 100:] &= np.tri(*keep[0, 0, 40:, 100:].shape, 0, bool)
    return jnp.asarray(keep)


@pytest.mark.parametrize(("shape", "blocks"), TAKEN)
def test_counts_match_numpy(shape, blocks):
    assert block_counts_pass.takes(shape, *blocks)
    keep = array_of(shape)
    want = block_sums(keep, *blocks)
    np.testing.assert_array_equal(block_counts_pass.counts(keep, *blocks, interpret=True), want)
    with on_device("h200"):  # planned for a GPU, lowered for a CPU
        np.testing.assert_array_equal(jax.jit(block_counts.counts, static_argnums=(1, 2))(keep, *blocks), want)


def test_supported_shapes():
    takes = block_counts_pass.takes
    assert not takes((1, 1, 256, 256), 128, 96)  # no power of two
    assert not takes((1, 1, 256, 256), 40, 64)  # rows are in parts of 8
    assert not takes((1, 1, 1, 256), 64, 64)  # a broadcast axis
    assert not takes((1, 1, 256, 1), 64, 64)
    assert not takes((1, 70000, 64, 64), 64, 64)
    assert takes((1, 8, 1 << 14, 1 << 14), 128, 128)
    assert not takes((1, 8, 1 << 14, (1 << 14) + 1), 128, 128)


def has_kernel(function, *arguments):
    return "attention_dense_blocks" in str(jax.make_jaxpr(function)(*arguments))


def test_use_in_block_lists(monkeypatch):
    """Each case has a different length, since jit keeps its traces."""
    keep = lambda n: jax.ShapeDtypeStruct((2, n, n), bool)
    density = lambda keep: masks.dense(keep).density(*keep.shape[-2:], 16)
    assert not has_kernel(density, keep(64))
    for gpu, length in (("h200", 65), ("a100", 66)):
        with on_device(gpu):
            assert has_kernel(density, keep(length))
    with on_device("h200"):
        lists = lambda keep: (~masks.dense(keep)).block_lists(67, 67, 16, 16)
        assert has_kernel(lists, keep(67))
        # A computed mask is counted without the kernel.
        assert not has_kernel(lambda keep: (masks.dense(keep) & masks.causal()).density(68, 68, 16), keep(68))
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
        assert not has_kernel(density, keep(69))


def test_transforms():
    keep = jnp.asarray(array_of((3, 2, 71, 71)))

    def status(keep):
        sizes = {"lengths": (71, 71), "blocks": (16, 32), "static_offset": 0}
        return block_status(masks.dense(keep), jnp.zeros(1, jnp.int32), **sizes)

    want = [np.asarray(x)[:, None] for x in status(keep)]
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    with on_device("h200"):
        specs = jax.sharding.PartitionSpec("x")
        sharded = jax.shard_map(jax.vmap(status), mesh=mesh, in_specs=specs, out_specs=specs)
        assert has_kernel(sharded, keep)
        for of_entries in (jax.vmap(status), sharded):
            got = jax.jit(of_entries)(keep)
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y)


def _compile(gpu: str, shape: list[int], blocks: list[int]) -> list[str]:
    status = lambda keep: masks.dense(keep).density(*shape[2:], tuple(blocks))
    return compile_case.lower_and_compile(gpu, status, jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(bool)))[1]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((1, 16, 8192, 8192), (128, 128)), ((2, 1, 4001, 3999), (64, 32)), ((1, 1, 512, 512), (16, 16))],
)
def test_compiles(gpu, shape, blocks):
    printed, _, others = compile_case.compile_script(__file__, gpu, json.dumps([shape, blocks]))
    assert json.loads(printed) == ["attention_dense_blocks"]
    figures = others["attention_dense_blocks"]
    assert figures["spill_stores"] + figures["spill_loads"] == 0
    assert figures["registers"] <= 128


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], *json.loads(sys.argv[2]))))
