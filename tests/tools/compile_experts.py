"""Compiles a mixture of experts over two H200s, forward and backward, without a GPU, and prints its schedule as JSON.

    python tests/tools/compile_experts.py [tokens,model_dim,mlp_dim,experts,experts of a token]

The call is benchmarks/experts.py's, with exchange="gather". "collectives": as in compile_step.py, of the whole program.
"first": the name of the first collective in the schedule, and the number of XLA's kernels before it.
"""

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kernels import compiler_options
from jax_kernels.dispatch import on_device
from jax_kernels.models import MixtureOfExperts
from tests.tools import compile_step

SHAPE = "4096,512,256,16,2"


def compiled(tokens: int, model_dim: int, mlp_dim: int, experts: int, each: int) -> str:
    """The program's text. tokens: of a device."""
    sizes = model_dim, mlp_dim, experts, each
    make = lambda key: MixtureOfExperts(*sizes, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(key))
    with on_device("h200") as info:
        mesh = compile_step.mesh_of_gpus(info, {"expert": 2})
        graphdef, parameters = nnx.split(nnx.eval_shape(make, jax.random.key(0)))

        def step(parameters: Any, x: jax.Array, dout: jax.Array) -> Any:
            out, vjp = jax.vjp(lambda parameters, x: nnx.merge(graphdef, parameters)(x), parameters, x)
            return out, vjp(dout)

        shaped = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        of_parameter = lambda path, x: shaped(x, P("expert" if "proj" in str(path) else None))
        parameters = jax.tree_util.tree_map_with_path(of_parameter, parameters)
        x = shaped(jax.ShapeDtypeStruct((2, tokens, model_dim), jnp.bfloat16), P("expert"))
        with jax.set_mesh(mesh):
            return jax.jit(step, compiler_options=compiler_options(mesh)).lower(parameters, x, x).compile().as_text()


def first_collective(program: str) -> tuple[str, int]:
    """The first collective in the schedule of the entry computation, and the number of kernels of XLA before it."""
    kernels = 0
    for line in program[program.index("\nENTRY ") :].splitlines():
        if found := re.search(r"= .*? ((?:all-gather|all-to-all|all-reduce)(?:-start)?)\(", line):
            return found[1], kernels
        kernels += " fusion(" in line
    raise AssertionError("the program has no collective")


def main(shape: str = SHAPE) -> None:
    jax.config.update("jax_num_cpu_devices", 2)  # ops shard only where there are devices
    program = compiled(*(int(number) for number in shape.split(",")))
    found = {"collectives": compile_step.collectives_of(program), "first": first_collective(program)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
