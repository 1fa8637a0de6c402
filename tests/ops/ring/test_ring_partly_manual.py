"""ring_attention in a shard_map that leaves the batch's axis of the mesh to XLA, on four CPU devices.

As a script it prints the collectives of the compiled program, and the largest error of its results and gradients.
"""

import collections
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention, masks, ring_attention, shard_sequence, unshard_sequence
from jax_kernels.testing import rms_error
from tests.support.processes import cpu_devices

CASES = {
    "full": ("contiguous", {}),
    "striped": ("striped", {"is_causal": True}),
    "halo": ("zigzag", {"is_causal": True, "window": (5, 0), "strategy": "halo"}),
    "masked": ("zigzag", {"mask": masks.causal() & masks.sliding_window(9, 0) | masks.global_tokens(2)}),
}
COLLECTIVES = r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("


def run_case(layout, options):
    options = {"strategy": "ring"} | options
    strategy = options.pop("strategy")
    normal = lambda seed, heads: jax.random.normal(jax.random.key(seed), (4, 32, heads, 8))
    given = [normal(seed, heads) for seed, heads in enumerate((4, 2, 2, 4))]

    def both(attention, query, key, value, dout):
        out, vjp = jax.vjp(functools.partial(attention, implementation="xla", **options), query, key, value)
        return out, *vjp(dout)

    mesh = jax.make_mesh((2, 2), ("data", "sequence"), (jax.sharding.AxisType.Auto,) * 2)
    attention = functools.partial(ring_attention, axis_name="sequence", layout=layout, strategy=strategy)
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


def for_h100s():
    """The collectives of the program that XLA compiles for four H100s that are not there."""
    from jax.experimental import topologies
    from jax.sharding import AbstractMesh, Mesh

    from jax_kernels.dispatch import on_device
    from tests.tools import compile_case

    attend = functools.partial(ring_attention, axis_name="sequence", is_causal=True, strategy="ring")

    def both(query, key, value, dout):
        out, vjp = jax.vjp(attend, query, key, value)
        return out, *vjp(dout)

    with on_device("h100") as info:
        config = compile_case.target_config(info)
        devices = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x4x1").devices
        mesh, device = Mesh(np.array(devices).reshape(2, 2), ("data", "sequence")), compile_case.abstract_device(info)
        # With a device whose compute capability Mosaic can read.
        mesh.__dict__["abstract_mesh"] = AbstractMesh(
            mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=device
        )
        tokens, axes = jax.P(None, "sequence"), {"sequence"}
        ring = jax.shard_map(both, mesh=mesh, in_specs=tokens, out_specs=tokens, axis_names=axes, check_vma=False)
        sharding = jax.NamedSharding(mesh, jax.P("data", "sequence"))
        x = jax.ShapeDtypeStruct((4, 4096, 8, 128), jnp.bfloat16, sharding=sharding)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            text = jax.jit(ring).lower(x, x, x, x).compile().as_text()
    return {"found": collections.Counter(re.findall(COLLECTIVES, text))}


@pytest.mark.compile
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_hopper_kernels_shard_the_batch():
    """Hopper's kernels shard the batch. XLA makes one send of keys and values."""
    found = cpu_devices.results_of(__file__, ["h100"])["h100"]
    assert found["found"] == {"collective-permute": 3}


@pytest.mark.timeout(240)
def test_batch_is_not_exchanged():
    """Keys and values travel as one array with a leading axis of two: three sends of two devices."""
    for name, found in cpu_devices.results_of(__file__, list(CASES)).items():
        assert found["error"] < 2e-6, name
        # A halo of zigzag chunks comes from both neighbours, and its gradient goes back to them.
        assert found["found"] == {"collective-permute": 4 if name == "halo" else 3}, name


if __name__ == "__main__":
    print(json.dumps({name: for_h100s() if name == "h100" else run_case(*CASES[name]) for name in sys.argv[1:]}))
