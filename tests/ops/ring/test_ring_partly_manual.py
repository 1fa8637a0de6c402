"""ring_attention in a shard_map that leaves the batch's axis of the mesh to XLA, on four CPU devices.

As a script it prints the collectives of the compiled program, and the largest error of its results and gradients.
"""

import collections
import functools
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import cpu_devices

from jax_kernels import flash_attention, masks, ring_attention, shard_sequence, unshard_sequence
from jax_kernels.testing import rms_error

CASES = {
    "full": ("contiguous", {}),
    "striped": ("striped", {"is_causal": True}),
    "masked": ("zigzag", {"mask": masks.causal() & masks.sliding_window(9, 0) | masks.global_tokens(2)}),
}
COLLECTIVES = r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("


def run_case(layout, options):
    normal = lambda seed, heads: jax.random.normal(jax.random.key(seed), (4, 32, heads, 8))
    given = [normal(seed, heads) for seed, heads in enumerate((4, 2, 2, 4))]

    def both(attention, query, key, value, dout):
        out, vjp = jax.vjp(functools.partial(attention, implementation="xla", **options), query, key, value)
        return out, *vjp(dout)

    mesh = jax.make_mesh((2, 2), ("data", "sequence"), (jax.sharding.AxisType.Auto,) * 2)
    attention = functools.partial(ring_attention, axis_name="sequence", layout=layout, strategy="ring")
    tokens = jax.P(None, "sequence")
    ring = jax.shard_map(
        functools.partial(both, attention), mesh=mesh, in_specs=tokens, out_specs=tokens, axis_names={"sequence"}
    )
    shared = [shard_sequence(x, mesh, "sequence", layout=layout) for x in given]
    shared = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("data", "sequence"))) for x in shared]
    compiled = jax.jit(ring).lower(*shared).compile()
    got = [unshard_sequence(x, mesh, "sequence", layout=layout) for x in compiled(*shared)]
    errors = [float(rms_error(np.asarray(g), w)) for g, w in zip(got, both(flash_attention, *given), strict=True)]
    return {"error": max(errors), "found": collections.Counter(re.findall(COLLECTIVES, compiled.as_text()))}


@pytest.mark.timeout(240)
def test_the_batch_is_not_exchanged():
    """Keys and values travel as one array, whose halves have an axis of their own: three sends of two devices."""
    results = json.loads(cpu_devices.lines_of(__file__, *CASES)[-1])
    assert sorted(results) == sorted(CASES)
    for name, found in results.items():
        assert found["error"] < 2e-6, name
        assert found["found"] == {"collective-permute": 3}, name


if __name__ == "__main__":
    print(json.dumps({name: run_case(*CASES[name]) for name in sys.argv[1:]}))
