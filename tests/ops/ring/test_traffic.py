"""The bytes that a device sends: each collective by its definition, on 4 devices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jax_kernels.ops.ring.traffic import sent_bytes

DEVICES, ROWS = 4, 8  # rows of a device, 16 bytes each
OWN = 16 * ROWS
CALLS = {
    "ppermute": (lambda x: lax.ppermute(x, "x", [(i, (i + 1) % DEVICES) for i in range(DEVICES)]), OWN),
    "all_to_all": (lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True), OWN * 3 / 4),
    "all_gather": (lambda x: lax.all_gather(x, "x", tiled=True), OWN * 3),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "x", tiled=True), OWN * 3 / 4),
    "psum": (lambda x: lax.psum(x, "x"), OWN * 3 / 2),
    "other axis": (lambda x: lax.psum(x, "y"), 0),
    "scan": (lambda x: lax.scan(lambda y, _: (lax.ppermute(y, "x", [(0, 1)]), None), x, length=5)[0], 5 * OWN),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_collective(name):
    call, want = CALLS[name]
    found = []
    mesh = AbstractMesh((DEVICES, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    def run(x):
        found.append(sent_bytes(lambda: call(x), "x", DEVICES))
        return x

    jax.eval_shape(run, jax.ShapeDtypeStruct((ROWS, 4), jnp.float32))
    assert found == [want]
