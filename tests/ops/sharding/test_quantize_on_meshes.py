"""quantize and dequantize of arrays on Explicit axes, alone and with Manual axes: values, and gradients of scales."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import dequantize, quantize
from tests.support.processes import cpu_devices


def both(x, scaling):
    """x quantized, and the gradient of its scales."""
    rounded = quantize(x, scaling=scaling)
    loss = lambda scale: (dequantize(dataclasses.replace(rounded, scale=scale)) ** 2).sum()
    return dequantize(rounded), jax.grad(loss)(rounded.scale)


def main(*scalings: str) -> dict[str, float]:
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), kinds, devices=jax.devices()[:4])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((256, 256)), jnp.float32)
    shared = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows", "columns")))
    found = {}
    for scaling in scalings:
        of_rows = lambda x, scaling=scaling: both(x, scaling)
        rows = jax.P("rows")
        with jax.set_mesh(mesh):
            manual = jax.shard_map(of_rows, axis_names={"rows"}, in_specs=rows, out_specs=(rows, rows))
            got = jax.device_get([*jax.jit(of_rows)(shared), *jax.jit(manual)(shared)])
        halves = [both(half, scaling) for half in jnp.split(x, 2)]
        want = [*both(x, scaling), *(np.concatenate(parts) for parts in zip(*halves, strict=True))]
        found[scaling] = max(float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, want, strict=True))
    return found


@pytest.mark.timeout(220)
def test_values_and_gradients():
    found = cpu_devices.results_of(__file__, ["row", "block"], devices=4)
    assert max(found.values()) < 1e-5, found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
