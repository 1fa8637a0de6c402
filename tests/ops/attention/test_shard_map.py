"""Ops inside jax.shard_map with its default check_vma=True: a forgotten sum over the mesh raises an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_kernels import (
    decode_attention,
    dilated_attention,
    dynamic_mask_attention,
    flash_attention,
    flash_attention_fp8,
    masks,
    quantize_fp8,
)
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from tests.support.cases import tiers

LENGTH = 256


def _heads(dtype=jnp.bfloat16, heads=2):
    return jax.ShapeDtypeStruct((1, LENGTH, heads, 64), dtype)


def _attend(query, key, value, **arguments):
    return flash_attention(query, key, value, return_lse=True, **arguments)


def _decode(query, key, value):
    return decode_attention(query[:, :1], key, value, kv_lengths=jnp.full((1,), 200, jnp.int32))


def _fp8(query, key, value):
    (query, q_scale), (key, k_scale), (value, v_scale) = (quantize_fp8(x) for x in (query, key, value))
    return flash_attention_fp8(query, key, value, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)


def _dynamic(query, key, value):
    mask = jnp.ones((1, 1, 1, LENGTH), bool)
    return dynamic_mask_attention(query, key, value, mask, jnp.zeros((1, 1, 1, LENGTH), query.dtype))


OPS = {
    "full": _attend,
    "causal": functools.partial(_attend, is_causal=True),
    "window": functools.partial(_attend, window=(30, 20)),
    "lengths": lambda q, k, v: _attend(q, k, v, kv_lengths=jnp.full((1,), 100, jnp.int32)),
    "segments": lambda q, k, v: _attend(q, k, v, segment_ids=jnp.zeros((1, LENGTH), jnp.int32)),
    "sinks": lambda q, k, v: _attend(q, k, v, sinks=jnp.zeros(2)),
    "softcap": functools.partial(_attend, softcap=3.0),
    "mask": lambda q, k, v: _attend(q, k, v, mask=masks.causal() | masks.prefix(40)),
    "bias": lambda q, k, v: _attend(q, k, v, bias=jnp.zeros((1, 2, LENGTH, LENGTH))),
    "bias by key": lambda q, k, v: _attend(q, k, v, bias=jnp.zeros((1, 1, 1, LENGTH))),
    "score_mod": lambda q, k, v: flash_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - 0.1 * jnp.abs(i - j)),
    "dilated": functools.partial(dilated_attention, segment_lengths=(128, 256), dilation_rates=(1, 2)),
    "decode": _decode,
    "fp8": _fp8,
    "dynamic": _dynamic,
}
FORWARD_ONLY = ("decode", "fp8")


def _trace(op, out_specs, *, backward: bool):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    of_shard = jax.shard_map(
        _gradients(op) if backward else op, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=out_specs
    )
    jax.jit(of_shard).trace(*(_heads(),) * 3)


CASES = [(name, device) for name in OPS for device in ("h200", "a100", "cpu")]
CASES.remove(("score_mod", "cpu"))  # shard_map refuses its plain jnp code: no value can be wrong


def _gradients(op):
    total = lambda *arrays: sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(op(*arrays)))
    return jax.grad(total, argnums=(0, 1, 2))


@pytest.mark.parametrize(("name", "device"), CASES)
def test_results_vary_over_the_mesh(name, device, no_interpret):
    for backward in (False,) if name in FORWARD_ONLY else (False, True):
        with on_device(device):
            _trace(OPS[name], PartitionSpec("data"), backward=backward)
            with pytest.raises(ValueError, match="out_specs which require replication"):
                _trace(OPS[name], PartitionSpec(), backward=backward)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["causal", "lengths", "bias", "dilated"])
def test_one_device_mesh_changes_no_result(name, backend, no_interpret):
    device = jax.devices(backend)[0]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=[device])
    arrays = jax.random.normal(jax.random.key(0), (3, 1, LENGTH, 2, 64), jnp.bfloat16)
    arrays = jax.device_put(arrays, device)
    for op in (OPS[name], _gradients(OPS[name])):
        spec = PartitionSpec("data")
        with on_device(device_info(device)):
            got = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec))(*arrays)
            without = jax.jit(op)(*arrays)
        for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(without), strict=True):
            np.testing.assert_allclose(*(y.astype(np.float32) for y in (x, want)), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "check_vma"),
    tiers.some_pairs(["causal", "segments", "bias by key"], [True, False], [("causal", False), ("bias by key", True)]),
)
def test_untraced_shard_map(name, check_vma):
    """JAX has no custom_vjp with symbolic zeros in an untraced shard_map."""
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    query = jax.random.normal(jax.random.key(0), (1, LENGTH, 2, 64))
    attend = lambda x: OPS[name](x, x, x)[0]
    shared = jax.shard_map(
        attend, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=check_vma
    )
    np.testing.assert_allclose(shared(query), attend(query), atol=1e-6)
    loss = lambda attention: jax.grad(lambda x: jnp.sin(attention(x)).sum())(query)
    np.testing.assert_allclose(loss(shared), loss(attend), atol=1e-5)
