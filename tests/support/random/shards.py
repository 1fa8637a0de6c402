"""The random calls of random_calls under jit, with arrays that are sharded at random over four devices.

As a script it checks calls on four CPU devices, or compiles them for GPUs that are not present. It prints each name
that passes::

    python tests/support/random/shards.py cpu attention-0 attention-1 norms-0
    python tests/support/random/shards.py h200 products-0
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jax_kernels.dispatch import on_device
from tests.support.random import calls as random_calls
from tests.support.random.draws import Call, Draw, check, check_all
from tests.tools import compile_case

NAMES, SIZES = ("rows", "columns"), (2, 2)


def specs_of(call: Call, draw: Draw, mesh: jax.sharding.Mesh) -> dict[str, jax.P]:
    """A random PartitionSpec for each array. A mesh axis shards at most one axis of an array.

    If the mesh has Explicit axes, attention refuses sharded tokens, and grouped_matmul sharded rows and groups: these
    axes stay whole.
    """
    found = {}
    is_explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    is_whole, is_grouped = is_explicit and "query" in call.arrays, is_explicit and "group_sizes" in call.arrays
    for name, x in call.arrays.items():
        axes: list[Any] = [None] * x.ndim
        may_be_shared = [0, 2] if name in ("query", "key", "value") else [0]
        for mesh_axis, size in zip(NAMES, SIZES, strict=True):
            fits = [i for i in range(x.ndim) if axes[i] is None and x.shape[i] and x.shape[i] % size == 0]
            free = [i for i in fits if i in may_be_shared] if is_whole else [i for i in fits if i or not is_grouped]
            if free and draw.chance(0.7):
                axes[draw.one(*free)] = mesh_axis
        found[name] = jax.P(*axes)
    return found


def mesh_of(draw: Draw, devices: Sequence[Any]) -> jax.sharding.Mesh:
    """A mesh of two axes, both Auto or both Explicit."""
    kind = draw.one(jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    return jax.sharding.Mesh(np.array(devices[:4]).reshape(SIZES), NAMES, axis_types=(kind, kind))


def results(call: Call, draw: Draw, devices: Sequence[Any]) -> Mapping[str, jax.Array]:
    """The call's results, with arrays placed on the devices as drawn."""
    mesh = mesh_of(draw, devices)
    specs = specs_of(call, draw, mesh)
    given = {
        name: jax.device_put(x, jax.sharding.NamedSharding(mesh, specs[name]))
        for name, x in call.given(call.dtype).items()
    }
    with jax.set_mesh(mesh):
        return jax.jit(call.run)(given)


def compile_for(gpu: str, call: Call, draw: Draw) -> None:
    """Compiles the call for four GPUs of one machine, without GPUs."""
    with on_device(gpu) as info:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=compile_case.target_config(info), topology="1x1x4"
        )
        mesh = mesh_of(draw, topology.devices)
        specs = specs_of(call, draw, mesh)
        place = lambda name: jax.sharding.NamedSharding(mesh, specs[name])
        shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(name))
            for name, x in call.given(call.dtype).items()
        }
        device = compile_case.abstract_device(info)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            lowered = jax.jit(call.run).lower(shapes)
        lowered.compile()


def drawn(name: str) -> tuple[Call, Draw]:
    """The call of a name such as norms-3, and the Draw that chooses its sharding."""
    kind, number = name.split("-")
    return random_calls.drawn(kind, int(number)), Draw(int(number), 2)


def main(gpu: str, *names: str) -> None:
    def check_one(pair: tuple[Call, Draw]) -> None:
        if gpu == "cpu":
            check(pair[0], results(*pair, jax.devices()))
        else:
            compile_for(gpu, *pair)

    check_all(names, drawn, check_one)


if __name__ == "__main__":
    main(*sys.argv[1:])
