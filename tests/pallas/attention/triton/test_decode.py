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

from jax_kernels import masks
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.pallas.attention import decode_contract
from jax_kernels.pallas.attention.triton import decode
from jax_kernels.testing.decode_attention import DecodeCase, arrays_of, errors, run
from tests.support.cases import tiers

pytestmark = pytest.mark.timeout(120)

BLOCK = 128  # keys of a block at head_dim 64
# More SMs than the cases have sequences and key heads: the keys are split.
DEVICE = dataclasses.replace(device_info("a100"), core_count=9)
CASES = {
    "one query": DecodeCase("one query", kv_length=1000, kv_lengths=(1000, 400)),
    "grouped": DecodeCase("grouped", heads=8, q_length=3, kv_length=1000, kv_lengths=(1000, 400), sinks=True),
    "two tiles": DecodeCase("two tiles", q_length=16, heads=16, kv_length=520, kv_lengths=(520, 2)),
    "pages": DecodeCase("pages", q_length=2, kv_length=1024, kv_lengths=(1000, 30), page_size=32),
    "long pages": DecodeCase("long pages", kv_length=1024, kv_lengths=(1024, 640), page_size=256, softcap=3.0),
    "window": DecodeCase("window", batch=3, kv_length=1000, kv_lengths=(900, 0, 640), window=300),
    "bias": DecodeCase("bias", q_length=2, kv_length=600, kv_lengths=(600, 513), bias="HS"),
}
# The axes of an array, and the blocks in which it keeps keys; None for a Mask, whose array is compared.
ARRAYS = {"keys": "BS", "heads": "BHS", "shared": "S", "pairs": "BHTS"}
LIVE = [1, 4, 5]  # of the blocks of an array
MASKS: dict[str, masks.Mask] = {
    "strided": masks.from_function(lambda b, h, q, k: k // BLOCK % 3 == 0),
    "longformer": masks.sliding_window(100, 0) | masks.prefix(5),
    "windowed": masks.causal() & masks.sliding_window(150, 7) & masks.dilated(3),
    "none": ~masks.sliding_window(None, None),
}


@pytest.fixture(autouse=True)
def _interpret(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")


def masked(case: DecodeCase, name: str) -> tuple[dict[str, Any], np.ndarray]:
    """(the arrays of the call, its mask as an array [n, H or 1, T or 1, S]). The mask of the arrays may be a Mask."""
    arrays = arrays_of(case)
    if name in MASKS:
        offset = np.clip(np.asarray(case.lengths), 0, case.kv_length) - case.q_length
        dense = MASKS[name].to_dense(case.q_length, case.kv_length, q_offset=jnp.asarray(offset))
        return arrays | {"mask": MASKS[name]}, np.asarray(dense)
    random = np.random.default_rng(1)
    mask = random.random(case.shape_of(ARRAYS[name])) < 0.5
    mask &= np.isin(np.arange(case.kv_length) // BLOCK, LIVE)
    if "H" in ARRAYS[name]:  # key head 0 keeps fewer blocks than the others
        mask[:, : case.heads // case.kv_heads, :, : 3 * BLOCK] = False
    return arrays | {"mask": jnp.asarray(mask)}, mask


def alive_blocks(case: DecodeCase, mask: np.ndarray) -> np.ndarray:
    """Whether each block of keys has a key that a query of the key head keeps: bool [B, Hkv, blocks], by loops."""
    group, left = case.heads // case.kv_heads, case.window if isinstance(case.window, int) else -1
    whole = np.broadcast_to(mask, case.shape_of("BHTS"))
    alive = np.zeros((case.batch, case.kv_heads, -(-case.kv_length // BLOCK)), bool)
    for b, h, _, key in np.argwhere(whole):
        if key < case.lengths[b] and (left < 0 or key >= case.lengths[b] - case.q_length - left):
            alive[b, h // group, key // BLOCK] = True
    return alive


def poisoned(case: DecodeCase, arrays: dict[str, Any], alive: np.ndarray) -> dict[str, Any]:
    """The arrays with NaN for each key and value of a dead block."""
    dead = ~alive.repeat(BLOCK, axis=2)[..., : case.kv_length].swapaxes(1, 2)  # [B, S, Hkv]
    if case.page_size is None:
        return arrays | {name: jnp.where(dead[..., None], jnp.nan, arrays[name]) for name in "kv"}
    pages = dead.reshape(-1, case.page_size, case.kv_heads)
    tables = np.asarray(arrays["block_tables"]).ravel()
    used = tables < len(arrays["k"])
    dead = np.zeros((len(arrays["k"]), case.page_size, case.kv_heads), bool)
    dead[tables[used]] = pages[used]
    return arrays | {name: jnp.where(dead[..., None], jnp.nan, arrays[name]) for name in "kv"}


QUICK = [("one query", "keys"), ("grouped", "heads"), ("two tiles", "pairs"), ("pages", "strided"), ("bias", "keys"),
         ("long pages", "shared"), ("window", "longformer"), ("grouped", "windowed"),
         ("one query", "none")]  # fmt: skip


@pytest.mark.parametrize(("name", "mask"), tiers.some_pairs(CASES, [*ARRAYS, *MASKS], QUICK))
def test_dead_blocks_are_not_read(name, mask):
    case = CASES[name]
    arrays, dense = masked(case, mask)
    alive = alive_blocks(case, dense)
    assert not alive.all()
    with on_device(DEVICE):
        got = run(case, poisoned(case, arrays, alive), "triton")
    for result, (error, bound) in errors(case, arrays | {"mask": dense}, got).items():
        assert error <= bound, (result, error, bound)
    dead = np.isneginf(got[1]).swapaxes(1, 2)
    assert not np.asarray(got[0])[dead].any()
    assert dead.all() == (mask == "none" and not case.sinks)


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
    case = dataclasses.replace(CASES["one query"], kv_length=1100)
    arrays, dense = masked(case, name)
    alive = alive_blocks(case, dense)
    with on_device(DEVICE):
        found = visits(monkeypatch, lambda: run(case, arrays, "triton"))
    want = np.argwhere(alive)[:, 2] * BLOCK
    assert sorted(found) == sorted([*want, *want])


def test_a_tenth_of_the_keys_takes_a_tenth_of_the_visits():
    mask = np.zeros((1, 1, 1, 40 * 64), bool)
    mask[..., 4 * 64 : 8 * 64 : 3] = True
    lengths = jnp.array([40 * 64, 6 * 64 + 2])  # key 6 * 64 + 1 is kept
    live = decode_contract.live_blocks(jnp.asarray(mask), lengths, kv_heads=2, q_length=1, left=-1, block_kv=64)
    np.testing.assert_array_equal(live.counts, [[4], [3]])
    np.testing.assert_array_equal(live.indices[0, 0, :4], range(4, 8))
