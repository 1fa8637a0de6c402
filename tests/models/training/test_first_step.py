"""The first step of a decoder: the kernels in its program for one H200, or for two, and their calls."""

import collections
import json
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.models import Transformer, TransformerConfig
from tests.tools import compile_case

CONFIG = TransformerConfig(
    vocab_size=128,
    model_dim=2048,
    num_layers=3,
    num_heads=16,
    mlp_dim=2048,
    dtype="bfloat16",
    remat="products",
    implementation="xla",
)


@pytest.mark.usefixtures("no_interpret")
def test_program_lowers_each_kernel_once():
    """JAX numbers the kernels of a program: a kernel that is lowered twice has two names, and compiles twice."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

    def loss(params, tokens):
        return nnx.merge(graphdef, params).losses(tokens, tokens).mean()

    device = compile_case.abstract_device(device_info("h200"))
    with on_device("h200"), jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(jax.grad(loss)).trace(params, tokens)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = collections.Counter(name for name, _ in set(re.findall(r"([a-z_]+_sm90)_(\d+)", program)))
    # Norms with a residual and without. The MLP has two matmuls in the forward, one of them gated, and three in the
    # backward, since one kernel computes the gradients of its first two matrices.
    assert kernels == {"norm_forward_sm90": 2, "norm_backward_sm90": 2, "matmul_sm90": 5}
    assert program.count("custom_call @mosaic_gpu") == sum(kernels.values())


# The vocabulary is two chunks of the head's loop.
SMALL = ["layers=3", "width=1024", "heads=8", "mlp=1024", "vocabulary=8192", "length=1024"]


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("mesh", ["data=2", "sequence=2"])
def test_two_device_program_lowers_each_kernel_once(mesh):
    """Each kernel is called in each block. Gradients are summed, and heads exchanged; nothing else is sent."""
    script = compile_case.__file__.replace("compile_case.py", "compile_step.py")
    found = json.loads(compile_case.compile_script(script, mesh, *SMALL).printed.splitlines()[-1])
    assert set(found["kernels"]) >= {"attention_forward_sm90 0", "norm_forward_sm90 1", "norm_backward_sm90 1"}
    # The last norm's backward is the only one that adds no cotangent of a residual.
    once = [name for name, calls in found["kernels"].items() if calls < 3]
    assert once == ["norm_backward_sm90 0"], found["kernels"]
    # The gradients of the embedding and of the head, which is summed once, not in each iteration of its loop.
    assert sum(size == 8192 * 1024 * 4 / 1e6 for _, size, _ in found["collectives"]) == 2
    assert not any(size == 4096 * 1024 * 4 / 1e6 for _, size, _ in found["collectives"])
    large = {name for name, size, _ in found["collectives"] if size > 0.1}
    assert large == ({"all-reduce"} if mesh == "data=2" else {"all-reduce", "collective-permute"})
