"""The blocks that tuning times: other blocks of the same kernel, which fit the GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import dispatch
from jax_kernels.device import device_info
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.ops.attention.checks import check
from jax_kernels.ops.attention.decode_attention import _check as decode_check
from jax_kernels.ops.attention.decode_implementations import IMPLEMENTATIONS as DECODE
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS
from jax_kernels.ops.matmul import checks as matmul_checks
from jax_kernels.ops.matmul.implementations import IMPLEMENTATIONS as MATMULS
from jax_kernels.ops.normalization.implementations import IMPLEMENTATIONS as NORMS
from jax_kernels.ops.normalization.implementations import NormRequest
from jax_kernels.pallas.block_specs.candidates import backward_sm90_bytes, forward_sm90_bytes

pytestmark = pytest.mark.usefixtures("no_interpret")
MOST = 24  # each candidate is compiled, which takes seconds


def attention(device, head_dim, **arguments):
    array = jax.ShapeDtypeStruct((2, 4096, 16, head_dim), jnp.bfloat16)
    with dispatch.on_device(device):
        request, _ = check(FlashArguments(query=array, key=array, value=array, **arguments))
    return request


def matmul(device, rows, dtype=jnp.bfloat16, **arguments):
    x, w = jax.ShapeDtypeStruct((rows, 1024), dtype), jax.ShapeDtypeStruct((1024, 2048), dtype)
    with dispatch.on_device(device):
        request, *_ = matmul_checks.check(x=x, w=w, **arguments)
    return request


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize(
    ("device", "name"), [("h200", "mosaic_gpu"), ("h200", "triton"), ("a100", "triton"), ("4090", "triton")]
)
def test_attention(device, name, head_dim, is_causal):
    request = attention(device, head_dim, is_causal=is_causal)
    implementation = IMPLEMENTATIONS[name]
    assert implementation.supports(request) is None
    config, _ = implementation.config(request)
    found = implementation.candidates(request)
    assert set(found) == {"forward", "backward"}
    assert 0 < len(found["forward"]) <= MOST
    for side, candidates in found.items():
        standing = getattr(config, side)
        assert {type(x) for x in candidates} <= {type(standing)}
        assert len({standing, *candidates}) == 1 + len(candidates) <= MOST
    if name == "mosaic_gpu":
        width = next(width for width in (64, 80, 128, 192, 256) if head_dim <= width)
        assert max(forward_sm90_bytes(x, width) for x in found["forward"]) <= 227 * 1024
        assert max(backward_sm90_bytes(x, width) for x in found["backward"]) <= 227 * 1024
        assert found["backward"]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("device", "name"), [("h200", "mosaic_gpu"), ("h200", "triton"), ("4090", "triton")])
def test_decoding(device, name, head_dim):
    query, cache = (jax.ShapeDtypeStruct((4, length, 8, head_dim), jnp.bfloat16) for length in (1, 4096))
    with dispatch.on_device(device):
        request, _ = decode_check(
            query=query, key=cache, value=cache, kv_lengths=None, block_tables=None, mask=None, bias=None, window=None,
            softcap=None, sinks=None, scale=None, return_lse=False, implementation=None,
        )  # fmt: skip
    (config, _), (found,) = DECODE[name].config(request), DECODE[name].candidates(request).values()
    assert 0 < len(set(found)) == len(found) <= MOST
    assert {type(x) for x in found} == {type(config.forward)}
    assert config.forward not in found


@pytest.mark.parametrize("columns", [64, 1024, 4096, 8192, 16384, 65536])
@pytest.mark.parametrize(("device", "name"), [("h200", "mosaic_gpu"), ("h200", "triton"), ("a100", "triton")])
def test_norms(device, name, columns):
    request = NormRequest("rms_norm", device_info(device), 4096, columns, "bfloat16")
    if NORMS[name].supports(request) is not None:
        columns = 512
        request = dataclasses.replace(request, columns=columns)
    (config, _), found = NORMS[name].config(request), NORMS[name].candidates(request)
    for side in ("forward", "backward"):
        standing, candidates = getattr(config, side), found[side]
        is_varied = getattr(standing, "cluster", 1) == 1
        assert bool(candidates) == is_varied
        assert {type(x) for x in candidates} <= {type(standing)}
        assert len({standing, *candidates}) == 1 + len(candidates) <= MOST


def test_the_smaller_shared_memory_has_fewer_candidates():
    of = lambda device: IMPLEMENTATIONS["triton"].candidates(attention(device, 128))["forward"]
    assert set(of("4090")) < set(of("a100"))
    wide = dataclasses.replace(of("a100")[0], block_q=128, block_kv=128, num_warps=8, num_stages=3)
    assert wide not in of("4090")


def test_a_deterministic_backward_keeps_its_dquery_blocks():
    found = IMPLEMENTATIONS["mosaic_gpu"].candidates(attention("h200", 128, deterministic=True))
    assert all(x.dquery is not None for x in found["backward"])


@pytest.mark.parametrize(("device", "name"), [("h200", "mosaic_gpu"), ("h200", "triton"), ("a100", "triton")])
def test_matmul(device, name):
    for rows in (16, 4096):
        request = matmul(device, rows)
        (standing, _), found = MATMULS[name].config(request), MATMULS[name].candidates(request)
        assert set(found) == {"forward"}
        assert {type(x) for x in found["forward"]} == {type(standing.forward)}
        assert standing.forward not in found["forward"]
        assert 4 < len(set(found["forward"])) == len(found["forward"]) <= MOST


def test_matmuls_without_candidates():
    eight_bits = matmul("h200", 4096, precision="fp8")
    assert MATMULS["mosaic_gpu"].candidates(eight_bits) == {"forward": ()}
    assert MATMULS["xla"].candidates is None
