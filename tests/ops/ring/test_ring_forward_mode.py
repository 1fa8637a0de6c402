"""Forward mode and second derivatives of ring_attention on two devices: against flash_attention of all tokens.

As a script: `python tests/ops/ring/test_ring_forward_mode.py STRATEGY...` prints the errors by strategy.
"""

import functools
import json
import sys

import pytest

from tests.support.processes import cpu_devices

STRATEGIES = ["ring", "halo", "all_to_all", "all_gather", "auto"]


@pytest.mark.parametrize("names", [["ring"], pytest.param(STRATEGIES[1:], marks=pytest.mark.slow)], ids=len)
def test_against_flash_attention(names):
    for name, error in cpu_devices.results_of(__file__, names, devices=2).items():
        assert error < 2e-5, name


def _errors(strategy: str) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_kernels import flash_attention, ring_attention

    mesh = jax.make_mesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    ids = np.array([[0, 0, 0, 1, 1, 1, -1, -1]], np.int32)  # the last tokens are padding
    limits = {"is_causal": True, "window": (2, 0)}
    of_shard = {"axis_name": "sequence", "strategy": strategy, "layout": "contiguous"}
    call = functools.partial(ring_attention, **of_shard, **limits)
    spec = jax.P(None, "sequence")
    run = jax.shard_map(
        lambda q, k, v, ids: call(q, k, v, segment_ids=ids), mesh=mesh, in_specs=(spec,) * 4, out_specs=spec
    )
    random = np.random.default_rng(0)
    normal = lambda: tuple(jnp.asarray(random.standard_normal((1, 8, 2, 4)), jnp.float32) for _ in range(3))
    arrays, directions = normal(), normal()
    functions = (
        lambda *arrays: run(*arrays, ids),
        lambda *arrays: flash_attention(*arrays, **limits, segment_ids=ids),
    )

    def derivatives(function):
        loss = lambda arrays: jnp.sin(function(*arrays)).sum()
        tangents = jax.jvp(function, arrays, directions)
        second = jax.jvp(jax.grad(loss), (arrays,), (directions,))
        return tangents, second, jax.grad(lambda arrays: jax.jvp(loss, (arrays,), (directions,))[1])(arrays)

    got, want = (jax.jit(lambda f=function: derivatives(f))() for function in functions)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(x - y).max()) for x, y in pairs)


if __name__ == "__main__":
    print(json.dumps({name: _errors(name) for name in sys.argv[1:]}))
