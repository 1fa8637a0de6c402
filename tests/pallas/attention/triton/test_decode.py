"""Decoding under a mask by the Triton kernel, interpreted on the CPU: dead blocks of keys are neither read nor visited.

The results are compared with the definition in float64.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.pallas.attention import decode_contract
from jax_kernels.pallas.attention.triton import decode
from jax_kernels.testing.decode_attention import run
from tests.support.cases import decode_masks, tiers

pytestmark = pytest.mark.timeout(120)

# More SMs than the cases have sequences and key heads: the keys are split.
DEVICE = dataclasses.replace(device_info("a100"), core_count=9)
QUICK = [
    "one query: keys", "grouped: heads", "two tiles: pairs", "pages: strided", "bias: keys", "long pages: shared",
    "window: longformer", "grouped: windowed", "one query: none"]  # fmt: skip


@pytest.fixture(autouse=True)
def _interpret(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")


@pytest.mark.parametrize("name", tiers.cases(decode_masks.CASES, QUICK))
def test_dead_blocks_are_not_read(name):
    with on_device(DEVICE):
        found = decode_masks.errors_by(decode_masks.CASES[name], "triton")
    for result, (error, bound) in found.items():
        assert error <= bound, (result, error, bound)


def visits(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> list[int]:
    """The first key of each block of keys that a call's programs visit."""
    found: list[int] = []
    load_block = decode._load_block

    def recorded(traced, ref, page, start, length, head_dim):
        jax.debug.callback(lambda start: found.append(int(start)), start)
        return load_block(traced, ref, page, start, length, head_dim)

    monkeypatch.setattr(decode, "_load_block", recorded)
    jax.block_until_ready(call())
    jax.effects_barrier()
    return found


@pytest.mark.parametrize("name", ["keys", "heads"])
def test_only_live_blocks_are_visited(name, monkeypatch):
    """Each live block is visited by one split, for its keys and for its values."""
    # Sizes that no other test has: a program that JAX has traced before would record nothing.
    case = dataclasses.replace(decode_masks.SIZES["one query"], kv_length=1100)
    arrays, dense = decode_masks.masked(case, name)
    alive = decode_masks.alive_blocks(case, dense)
    with on_device(DEVICE):
        found = visits(monkeypatch, lambda: run(case, arrays, "triton"))
    want = np.argwhere(alive)[:, 2] * decode_masks.BLOCK
    assert sorted(found) == sorted([*want, *want])


def test_a_tenth_of_the_keys_takes_a_tenth_of_the_visits():
    mask = np.zeros((1, 1, 1, 40 * 64), bool)
    mask[..., 4 * 64 : 8 * 64 : 3] = True
    lengths = jnp.array([40 * 64, 6 * 64 + 2])  # key 6 * 64 + 1 is kept
    live = decode_contract.live_blocks(jnp.asarray(mask), lengths, kv_heads=2, q_length=1, left=-1, block_kv=64)
    np.testing.assert_array_equal(live.counts, [[4], [3]])
    np.testing.assert_array_equal(live.indices[0, 0, :4], range(4, 8))
