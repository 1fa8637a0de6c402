"""The Hopper backward with other columns of value than of key: its tiles fit shared memory, and its copies lower.

The interpreter has no limit of shared memory, and copies any part of a tile.
"""

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import chunks, explain, flash_attention
from jax_kernels.dispatch import on_device
from tests.support.cases import tiers
from tests.tools import compile_case

# (head_dims of key and value), by name.
WIDTHS = {"192/128": (192, 128), "160/128": (160, 128), "80/96": (80, 96), "192/64": (192, 64)}
# (B, T, heads, key heads) and options. "float32": 4 chunks of queries, whose gradients of key and value are float32.
CALLS = {
    "few_tiles": ((2, 256, 4, 4), {}),
    "few_tiles_of_groups": ((2, 200, 4, 1), {}),
    "segments": ((2, 256, 4, 4), {"segment_ids": jnp.zeros((2, 256), jnp.int32)}),
    "segments_causal": ((2, 256, 4, 4), {"segment_ids": jnp.zeros((2, 256), jnp.int32), "is_causal": True}),
    "float32": ((1, 1024, 1, 1), {}),
    "float32_causal": ((1, 1024, 1, 1), {"is_causal": True}),
}
QUICK = [("192/128", "few_tiles"), ("80/96", "float32")]


@pytest.mark.parametrize(("columns", "name"), tiers.some_pairs(WIDTHS, CALLS, QUICK))
def test_gradients_lower(columns, name):
    (head_dim, v_head_dim), ((batch, length, heads, kv_heads), options) = WIDTHS[columns], CALLS[name]
    count = 4 if name.startswith("float32") else 1
    spec = lambda heads, columns: jax.ShapeDtypeStruct((batch, length, heads, columns), jnp.bfloat16)

    def gradients(query, key, value):
        attend = lambda *arrays: flash_attention(*arrays, **options, implementation="mosaic_gpu")
        out, vjp = jax.vjp(attend, query, key, value)
        return vjp(out)

    with chunks.forced(count) as split:
        lowered = compile_case.lower(
            "h200", gradients, spec(heads, head_dim), spec(kv_heads, head_dim), spec(kv_heads, v_head_dim)
        )
    assert "attention_backward_sm90" in lowered.as_text()
    assert max(split, default=1) == count


def test_segments_and_a_bias_of_queries_go_to_triton():
    spec = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    query, value, ids = spec(2, 256, 4, 192), spec(2, 256, 4, 128), jax.ShapeDtypeStruct((2, 256), jnp.int32)
    with on_device("h200"):
        plan = explain(flash_attention, query, query, value, bias=spec(2, 4, 256, 256), segment_ids=ids)
        of_keys = explain(flash_attention, query, query, value, bias=spec(2, 1, 1, 256), segment_ids=ids)
    assert plan.implementation == "triton"
    assert "no room for segment_ids" in str(plan)
    assert of_keys.implementation == "mosaic_gpu"
