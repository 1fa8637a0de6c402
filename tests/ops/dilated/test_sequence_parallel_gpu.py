"""sequence_parallel_dilated_attention on GPUs equals dilated_attention by "xla" on one GPU, in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_kernels import dilated_attention, sequence_parallel_dilated_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two NVIDIA GPUs"),
]
LENGTH = 2048
PATTERNS = {
    "fits": {"segment_lengths": (256, 2048), "dilation_rates": (1, 4)},
    "longnet": {"segment_lengths": (2048, 4096, 8192, 16384, 32768), "dilation_rates": (1, 2, 4, 6, 12)},
    "odd": {"segment_lengths": (300, 1500), "dilation_rates": (3, 5)},
    "odd_hilbert_groups": {
        "segment_lengths": (300, 1500), "dilation_rates": (3, 5), "order": "hilbert", "heads": "groups",
    },
    "partition": {"segment_lengths": (200, 1200, 300), "dilation_rates": (2, 4, 3), "layout": "partition"},
}  # fmt: skip


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "whole"])
@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize("name", PATTERNS)
def test_devices_match_one_device(name, implementation, is_packed, is_causal):
    random = np.random.default_rng(0)
    query, dout = (jnp.asarray(random.standard_normal((2, LENGTH, 8, 64)), jnp.bfloat16) for _ in range(2))
    key, value = (jnp.asarray(random.standard_normal((2, LENGTH, 4, 64)), jnp.bfloat16) for _ in range(2))
    ids = jnp.asarray(np.sort(random.integers(-1, 4, (2, LENGTH)), axis=-1), jnp.int32) if is_packed else None
    pattern = PATTERNS[name] | {"is_causal": is_causal}

    def both(op, query, key, value, dout, ids):
        out, pullback = jax.vjp(lambda *qkv: op(*qkv, segment_ids=ids, **pattern), query, key, value)
        return out, *pullback(dout.astype(out.dtype))

    wide = [x.astype(jnp.float32) for x in (query, key, value, dout)]
    want = jax.jit(functools.partial(both, functools.partial(dilated_attention, implementation="xla")))(*wide, ids)
    op = functools.partial(sequence_parallel_dilated_attention, axis_name="sequence", implementation=implementation)
    mesh = jax.make_mesh((len(jax.devices()),), ("sequence",), axis_types=(AxisType.Auto,))
    tokens = PartitionSpec(None, "sequence")
    shared = jax.shard_map(functools.partial(both, op), mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False)
    arrays = jax.device_put((query, key, value, dout), NamedSharding(mesh, tokens))
    got = jax.jit(shared)(*arrays, ids)
    for label, g, w in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        g, w = (np.asarray(x, np.float32) for x in (g, w))
        assert np.linalg.norm(g - w) <= 1e-2 * np.linalg.norm(w), label
