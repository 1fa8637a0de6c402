"""Two GPUs that share an op under jit give the results of one GPU, forward and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_kernels import dilated_attention, flash_attention, layer_norm, matmul, mlp, rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two NVIDIA GPUs"),
]
# The function, and the shapes of its arrays. The devices shard the first axis of arrays of three axes and more.
CALLS = {
    "flash_attention": (lambda q, k, v: flash_attention(q, k, v, is_causal=True), [(4, 500, 8, 64)] * 3),
    "matmul": (matmul, [(4, 256, 512), (512, 512)]),
    "mlp": (
        lambda x, up, down, gate: mlp(x, up, down, w_gate=gate),
        [(4, 256, 512), (512, 768), (768, 512), (512, 768)],
    ),
    "rms_norm": (rms_norm, [(4, 256, 1024), (1024,)]),
    "layer_norm": (layer_norm, [(4, 256, 1024), (1024,), (1024,)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_two_gpus_match_one(name):
    """The function is called twice, so that its calls have one program."""
    function, shapes = CALLS[name]
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.standard_normal(shape) / shape[0] ** 0.5, jnp.bfloat16) for shape in shapes]
    dout = jnp.asarray(random.standard_normal(shapes[0]), jnp.bfloat16)
    twice = lambda x, *others: function(function(x, *others), *others)

    def both(dout, *arrays):
        out, pullback = jax.vjp(twice, *arrays)
        return out, *pullback(dout)

    want = jax.jit(both)(*jax.device_put((dout, *arrays), jax.devices()[0]))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data") if x.ndim > 2 else PartitionSpec()))
    with jax.set_mesh(mesh):
        compiled = jax.jit(both).lower(*map(place, (dout, *arrays))).compile()
    assert "all-gather" not in compiled.as_text()
    for got, right in zip(compiled(*map(place, (dout, *arrays))), want, strict=True):
        got, right = (np.asarray(x, np.float32) for x in (got, right))
        assert np.linalg.norm(got - right) <= 1e-2 * np.linalg.norm(right)


@pytest.mark.parametrize("heads", ["all", "groups"])
@pytest.mark.parametrize("order", [None, "hilbert"])
def test_two_gpus_shard_dilated_heads(heads, order):
    """Each GPU runs its own tokens in its own program, forward and backward."""
    random = np.random.default_rng(0)
    query, dout = (jnp.asarray(random.standard_normal((2, 1024, 8, 64)), jnp.bfloat16) for _ in range(2))
    key, value = (jnp.asarray(random.standard_normal((2, 1024, 4, 64)), jnp.bfloat16) for _ in range(2))
    pattern = {"segment_lengths": (256, 1024), "dilation_rates": (2, 4), "heads": heads, "order": order}

    def both(dout, *arrays):
        out, pullback = jax.vjp(lambda *qkv: dilated_attention(*qkv, is_causal=True, **pattern), *arrays)
        return out, *pullback(dout)

    arrays = dout, query, key, value
    want = jax.jit(both)(*jax.device_put(arrays, jax.devices()[0]))
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    arrays = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(None, None, "tensor")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(both).lower(*arrays).compile()
    assert "all-gather" not in compiled.as_text()
    for got, right in zip(compiled(*arrays), want, strict=True):
        got, right = (np.asarray(x, np.float32) for x in (got, right))
        assert np.linalg.norm(got - right) <= 1e-2 * np.linalg.norm(right)
