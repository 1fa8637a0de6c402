"""linear_cross_entropy on meshes of 8 CPU devices: its results, and its collectives, without logits."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import linear_cross_entropy
from jax_kernels.inputs import linear_cross_entropy as loss_inputs
from jax_kernels.inputs.linear_cross_entropy import LossGradients
from jax_kernels.ops.cross_entropy import gradients
from jax_kernels.reference import linear_cross_entropy as reference
from tests.support.processes import cpu_devices

TOKENS, DEPTH, VOCABULARY = (4, 32), 16, 192
DATA, TENSOR, NONE = jax.P("data"), jax.P("tensor"), jax.P()
# The reduction, the implementation, and the PartitionSpecs of x and of w [V, D].
CASES = {
    "none tokens": ("none", "xla", DATA, NONE),
    "none vocabulary": ("none", "xla", NONE, TENSOR),
    "none both": ("none", "xla", DATA, TENSOR),
    "mean tokens": ("mean", "xla", DATA, NONE),
    "mean vocabulary": ("mean", "xla", NONE, TENSOR),
    "mean both": ("mean", "xla", DATA, TENSOR),
    "mean sequence": ("mean", "xla", jax.P("data", "tensor"), NONE),
    "mean both 8 bits": ("mean", "xla", DATA, TENSOR),
    "none vocabulary 8 bits": ("none", "xla", NONE, TENSOR),
    "shard_map": ("sum", "xla", DATA, NONE),
    "triton none": ("none", "triton", DATA, NONE),
    "triton mean": ("mean", "triton", DATA, NONE),
    "triton mean, one launch": ("mean", "triton", DATA, NONE),
}


def with_gradients(inputs, options, cotangent, **launch):
    """LossGradients in plain jnp, instead of a kernel that makes the losses and the gradients from one matmul."""
    found = reference.statistics(inputs, options)
    dx, drows = reference.gradients(inputs, found.lse, cotangent, options)
    return LossGradients(statistics=found, dx=dx, drows=drows)


def run(name):
    """The collectives of a case's loss and gradients, and the largest relative error."""
    reduction, implementation, of_x, of_w = CASES[name]
    gradients.WITH_GRADIENTS = {"triton": with_gradients} if "one launch" in name else {}
    loss_inputs.LOGITS_BYTES, loss_inputs.LEAST_CHUNK = 4 * 16 * VOCABULARY, 48  # 8 tiles of tokens, 4 chunks
    random = np.random.default_rng(0)
    dtype = jnp.bfloat16 if implementation == "triton" else jnp.float32
    x, w = (jnp.asarray(random.standard_normal(shape), dtype) for shape in ((*TOKENS, DEPTH), (VOCABULARY, DEPTH)))
    targets = jnp.asarray(random.integers(-1, VOCABULARY, TOKENS), jnp.int32)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    place = lambda y, spec: jax.device_put(y, jax.NamedSharding(mesh, spec))

    def loss(x, w, targets, implementation=implementation):
        options = {"transpose_w": True, "reduction": reduction, "implementation": implementation}
        options["precision"] = "fp8" if name.endswith("8 bits") else None
        return linear_cross_entropy(x, w, targets, **options).sum()

    def mapped(x, w, targets):
        local = lambda *given: jax.lax.psum(loss(*given), "data")
        return jax.shard_map(local, mesh=mesh, in_specs=(of_x, of_w, of_x), out_specs=jax.P())(x, w, targets)

    function = jax.value_and_grad(mapped if name == "shard_map" else loss, (0, 1))
    want = jax.value_and_grad(lambda *given: loss(*given, "xla"), (0, 1))(x, w, targets)
    with jax.set_mesh(mesh):
        given = place(x, of_x), place(w, of_w), place(targets, of_x)
        shardings = None, (given[0].sharding, given[1].sharding)
        compiled = jax.jit(function, out_shardings=shardings).lower(*given).compile()
        got = compiled(*given)
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)
    ]
    error = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
    return {"collectives": cpu_devices.collectives_of(compiled.as_text()), "error": error}


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("triton", marks=[pytest.mark.triton, pytest.mark.slow])]
)
def test_no_logits_are_exchanged(implementation):
    """The devices add values of each token, and gradients, and gather nothing."""
    names = [name for name, case in CASES.items() if case[1] == implementation]
    for name, found in cpu_devices.results_of(__file__, names, JAX_KERNELS_INTERPRET="1").items():
        assert found["error"] < (2e-2 if "triton" in name else 1e-5), (name, found)
        assert found["collectives"], name
        for collective, *shape in found["collectives"]:
            is_gradient = shape[-1:] == [DEPTH]
            assert collective == "all-reduce", (name, shape)
            assert is_gradient or np.prod(shape) <= np.prod(TOKENS), (name, collective, shape)
        if name == "shard_map":
            assert [shape for _, *shape in found["collectives"] if DEPTH in shape] == [[VOCABULARY, DEPTH]]


if __name__ == "__main__":
    print(json.dumps({name: run(name) for name in sys.argv[1:]}))
