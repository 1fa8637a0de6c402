"""shard_sequence and unshard_sequence: the sharding of their results, on eight CPU devices, and their errors.

As a script it runs the functions below by their names.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType

import jax_kernels
from jax_kernels import shard_sequence, unshard_sequence
from tests.support.processes import cpu_devices

LAYOUTS = "zigzag", "striped", "contiguous"
KINDS = {
    "auto": (AxisType.Auto,) * 2,
    "explicit": (AxisType.Explicit,) * 2,
    "mixed": (AxisType.Explicit, AxisType.Auto),
}
X = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)


def functions(kind):
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), KINDS[kind])
    for layout in LAYOUTS:
        options = {"mesh": mesh, "axis_name": "sequence", "layout": layout}
        yield mesh, *(functools.partial(function, **options) for function in (shard_sequence, unshard_sequence))


def spec_of(x):
    return (*x.sharding.spec, None, None)[:2]


def under_jit(kind):
    """Traced arrays, which jit gets on one device or with a sharded batch."""
    for mesh, shard, unshard in functions(kind):
        got = jax.jit(shard)(X)
        assert spec_of(got) == (None, "sequence"), got.sharding
        np.testing.assert_array_equal(got, shard(X))
        assert spec_of(jax.jit(unshard)(got)) == (None, "sequence")
        placed = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
        got = jax.jit(shard)(placed)
        assert spec_of(got) == ("data", "sequence"), got.sharding
        again = jax.jit(unshard)(got)
        assert spec_of(again) == ("data", "sequence"), again.sharding
        np.testing.assert_array_equal(again, X)


def eager(kind):
    """Known arrays keep their batch's mesh axis. The sequence's mesh axis moves from any other axis."""
    for mesh, shard, unshard in functions(kind):
        put = lambda *spec, mesh=mesh: jax.device_put(X, jax.NamedSharding(mesh, jax.P(*spec)))
        for given, want in (
            (put("data", "sequence"), ("data", "sequence")),
            (put("data"), ("data", "sequence")),
            (put("sequence"), (None, "sequence")),
            (put(("data", "sequence")), ("data", "sequence")),
            (put(None, "data"), (None, "sequence")),
            (X, (None, "sequence")),
        ):
            got = shard(given)
            assert spec_of(got) in (want, (want[0] and (want[0],), want[1])), (given.sharding, got.sharding)
            assert spec_of(unshard(got)) == spec_of(got)
            np.testing.assert_array_equal(unshard(got), X)
        squares = lambda x, f=shard: ((f(x) ** 2).sum(), f(x))
        with jax.set_mesh(mesh):
            gradient, got = jax.grad(squares, has_aux=True)(put("data", "sequence"))
        np.testing.assert_array_equal(gradient, 2 * X)
        assert spec_of(got) == ("data", "sequence"), got.sharding


@pytest.mark.timeout(220)
def test_shardings():
    names = [f"{how} {kind}" for kind in KINDS for how in ("under_jit", "eager")]
    cpu_devices.results_of(__file__, names)


MESH = jax.make_mesh((1,), ("sequence",), (AxisType.Auto,))


@pytest.mark.parametrize("function", [shard_sequence, unshard_sequence])
@pytest.mark.parametrize(
    ("x", "mesh", "error", "message"),
    [
        ([[1, 2]], MESH, TypeError, "x: got int, want an array or a tree of arrays"),
        (X, None, TypeError, "mesh: got NoneType, want a jax.sharding.Mesh"),
        (X, "sequence", TypeError, "mesh: got str, want a jax.sharding.Mesh"),
        (
            np.array([[0, 2**31]]), MESH, ValueError,
            "x: got int64 from 0 to 2147483648, want integers of -2147483648 to 2147483647",
        ),
        (np.array([[0, 2**32]], np.uint64), MESH, ValueError, "x: got uint64 from 0 to 4294967296"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_bad_input(function, x, mesh, error, message, layout):
    with pytest.raises(error, match=re.escape(message)):
        function(x, mesh, "sequence", layout=layout)


def test_fitting_integers_are_kept():
    ids = np.array([[-(2**31), 2**31 - 1]])
    np.testing.assert_array_equal(shard_sequence(ids, MESH, "sequence"), ids)
    with jax.enable_x64(True):
        assert shard_sequence(ids * 4, MESH, "sequence").dtype == jnp.int64


@pytest.mark.parametrize("name", ["shard_sequence", "unshard_sequence", "quantize", "quantize_fp8"])
def test_tensors_of_pytorch_are_named(name):
    mesh = jax.make_mesh((1,), ("s",), (AxisType.Auto,))
    with pytest.raises(TypeError, match=r"^x: got Tensor, want .* of JAX or NumPy"):
        getattr(jax_kernels, name)(torch.ones(2, 64), *([mesh, "s"] if "shard" in name else []))


if __name__ == "__main__":
    found = {}
    for name in sys.argv[1:]:
        how, kind = name.split()
        found[name] = {"under_jit": under_jit, "eager": eager}[how](kind)
    print(json.dumps(found))
