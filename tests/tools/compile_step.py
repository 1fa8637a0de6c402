"""Compiles a decoder's training step for the H200s of one machine, without a GPU, and prints its figures as JSON.

    python tests/tools/compile_step.py data=2 [FIELD=NUMBER...]

FIELD: a field of SIZES. The step is the step of benchmarks/train.py, with 2 sequences for each device. "seconds":
processor time to trace, lower and compile, with ptxas' time. "kernels": the number of calls of each Mosaic kernel, by
name and index. "collectives": [name, MB of a device's shard, number of kernels and matmuls that begin between its start
and its end, -1 if it is synchronous] of each, in the schedule's order. "temporary": GB.
"""

import collections
import functools
import json
import math
import os
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractMesh

from jax_kernels import compiler_options
from jax_kernels.dispatch import on_device
from jax_kernels.models import Transformer, TransformerConfig, make_mesh, state_shardings
from jax_kernels.models.parallel.sharding import batch_sharding
from tests.tools import compile_case

SIZES = {"layers": 18, "width": 2048, "heads": 16, "mlp": 5632, "vocabulary": 32000, "length": 8192}
BYTES = {"f32": 4, "bf16": 2, "s32": 4}


def processor_seconds() -> float:
    """The processor time of this process and of its finished child processes."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def compiled(axes: dict[str, int], sizes: dict[str, int]) -> tuple[Any, dict[str, float]]:
    """(the program, the seconds of each stage)."""
    devices = math.prod(axes.values())
    config = TransformerConfig(
        vocab_size=sizes["vocabulary"],
        model_dim=sizes["width"],
        num_layers=sizes["layers"],
        num_heads=sizes["heads"],
        mlp_dim=sizes["mlp"],
        dtype="bfloat16",
        remat="products",
    )
    with on_device("h200") as info:
        mesh = mesh_of_gpus(info, axes)
        train, *arguments = step(config, mesh, (2 * devices, sizes["length"]))
        seconds, stage = {}, train
        with jax.set_mesh(mesh):
            for part, given in (("trace", arguments), ("lower", ()), ("compile", ())):
                start = processor_seconds()
                stage = getattr(stage, part)(*given)
                seconds[part] = round(processor_seconds() - start, 2)
    return stage, seconds


def mesh_of_gpus(info: Any, axes: dict[str, int]) -> jax.sharding.Mesh:
    """A mesh of the GPUs of one machine that this machine lacks. info: their DeviceInfo."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=compile_case.target_config(info), topology=f"1x1x{math.prod(axes.values())}"
    )
    mesh = make_mesh(axes, topology.devices)
    # Mosaic reads the compute capability off the device of jax.set_mesh's mesh.
    mesh.__dict__["abstract_mesh"] = AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=compile_case.abstract_device(info)
    )
    return mesh


def step(config: TransformerConfig, mesh: Any, shape: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """(the training step, shapes of parameters, of moments and of tokens)."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    optimizer = optax.adamw(1e-4)
    moments = jax.eval_shape(optimizer.init, params)
    places, of_moments = (state_shardings(tree, mesh) for tree in (params, moments))
    shaped = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(shape, mesh))

    def loss_of(params: Any, tokens: Any) -> Any:
        return nnx.merge(graphdef, params).losses(tokens, jnp.roll(tokens, -1, 1)).mean()

    options = compiler_options(mesh)
    assert len(options) == (0 if mesh.size == 1 else 2), options

    @functools.partial(
        jax.jit, donate_argnums=(0, 1), out_shardings=(places, of_moments, None), compiler_options=options
    )
    def train(params: Any, moments: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    return train, jax.tree.map(shaped, params, places), jax.tree.map(shaped, moments, of_moments), tokens


def kernels_of(program: str) -> dict[str, int]:
    """The number of calls of each Mosaic kernel, by its name and an index among the kernels of this name."""
    found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for line in program.splitlines():
        if kernel := re.search(r'kernel_hash = ("(?:[^"\\]|\\.)*")', line):
            name = re.search(r"([a-z_]+_sm90)_mosaic_gpu", line)
            found[name[1] if name else ""][kernel[1]] += 1
    return {f"{name} {i}": n for name, calls in found.items() for i, n in enumerate(sorted(calls.values()))}


def collectives_of(program: str) -> list[tuple[str, float, int]]:
    """Each collective's name, its MB, and the number of kernels that run at the same time."""
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found: list[tuple[str, float, int]] = []
    in_flight: dict[str, tuple[str, float, int]] = {}
    kernels = 0
    for line in program.splitlines():
        if started := re.search(rf"%([\w.-]+) = (.*?) ({names})(-start)?\(", line):
            arrays = re.findall(r"(f32|bf16|s32)\[([\d,]*)\]", started[2])
            arrays = arrays[: max(1, len(arrays) // 2)] if started[4] else arrays
            size = sum(BYTES[dtype] * math.prod(int(n) for n in of.split(",") if n) for dtype, of in arrays) / 1e6
            if started[4]:
                in_flight[started[1]] = started[3], size, kernels
            else:
                found.append((started[3], size, -1))
        elif ended := re.search(rf"({names})-done\(.*?%([\w.-]+)\)", line):
            name, size, before = in_flight.pop(ended[2])
            found.append((name, size, kernels - before))
        elif re.search(r"mosaic_gpu|cublas|%gemm_fusion[\w.-]* =", line):
            kernels += 1
    assert not in_flight
    return found


def main(mesh: str, *words: str) -> None:
    sizes = SIZES | {name: int(number) for name, number in (word.split("=") for word in words)}
    axes = {name: int(number) for name, number in (part.split("=") for part in mesh.split(","))}
    jax.config.update("jax_num_cpu_devices", 2)  # ops shard only where there are devices
    program, seconds = compiled(axes, sizes)
    text = program.as_text()
    temporary = program.memory_analysis().temp_size_in_bytes / 1e9
    found = {"seconds": seconds, "kernels": kernels_of(text), "collectives": collectives_of(text)}
    print(json.dumps(found | {"temporary": temporary}))


if __name__ == "__main__":
    main(*sys.argv[1:])
