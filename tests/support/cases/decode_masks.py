"""Decoding under masks: the cases, which blocks of keys are live in them, and NaN for the keys of all other blocks."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kernels import masks
from jax_kernels.testing.decode_attention import DecodeCase, arrays_of, errors, run

BLOCK = 128  # the largest block of keys at head_dim 64
SIZES = {
    "one query": DecodeCase("one query", kv_length=1000, kv_lengths=(1000, 400)),
    "grouped": DecodeCase("grouped", heads=8, q_length=3, kv_length=1000, kv_lengths=(1000, 400), sinks=True),
    "two tiles": DecodeCase("two tiles", q_length=16, heads=16, kv_length=520, kv_lengths=(520, 2)),
    "pages": DecodeCase("pages", q_length=2, kv_length=1024, kv_lengths=(1000, 30), page_size=32),
    "long pages": DecodeCase("long pages", kv_length=1024, kv_lengths=(1024, 640), page_size=256, softcap=3.0),
    "window": DecodeCase("window", batch=3, kv_length=1000, kv_lengths=(900, 0, 640), window=300),
    "bias": DecodeCase("bias", q_length=2, kv_length=600, kv_lengths=(600, 513), bias="HS"),
}
# The axes of an array. Its keys are in few blocks.
ARRAYS = {"keys": "BS", "heads": "BHS", "shared": "S", "pairs": "BHTS"}
LIVE = [1, 4, 5]
MASKS: dict[str, masks.Mask] = {
    "strided": masks.from_function(lambda b, h, q, k: k // BLOCK % 3 == 0),
    "longformer": masks.sliding_window(100, 0) | masks.prefix(5),
    "windowed": masks.causal() & masks.sliding_window(150, 7) & masks.dilated(3),
    "none": ~masks.sliding_window(None, None),
}
# "size: mask" for each pair, as the interpreter of Hopper kernels looks up its cases.
CASES = {f"{size}: {mask}": (size, mask) for size in SIZES for mask in [*ARRAYS, *MASKS]}


def masked(case: DecodeCase, name: str) -> tuple[dict[str, Any], np.ndarray]:
    """(the arrays of the call, its mask as an array [n, H or 1, T or 1, S]). The mask of the arrays may be a Mask."""
    arrays = arrays_of(case)
    if name in MASKS:
        offset = np.clip(np.asarray(case.lengths), 0, case.kv_length) - case.q_length
        dense = MASKS[name].to_dense(case.q_length, case.kv_length, q_offset=jnp.asarray(offset))
        return arrays | {"mask": MASKS[name]}, np.asarray(dense)
    mask = np.random.default_rng(1).random(case.shape_of(ARRAYS[name])) < 0.5
    mask &= np.isin(np.arange(case.kv_length) // BLOCK, LIVE)
    if "H" in ARRAYS[name]:  # key head 0 keeps fewer blocks than the others
        mask[:, : case.heads // case.kv_heads, :, : 3 * BLOCK] = False
    return arrays | {"mask": jnp.asarray(mask)}, mask


def alive_blocks(case: DecodeCase, mask: np.ndarray) -> np.ndarray:
    """Whether each block of keys has a key that a query of the key head keeps: bool [B, Hkv, blocks], by loops."""
    group, left = case.heads // case.kv_heads, case.window if isinstance(case.window, int) else -1
    alive = np.zeros((case.batch, case.kv_heads, -(-case.kv_length // BLOCK)), bool)
    for b, h, _, key in np.argwhere(np.broadcast_to(mask, case.shape_of("BHTS"))):
        if key < case.lengths[b] and (left < 0 or key >= case.lengths[b] - case.q_length - left):
            alive[b, h // group, key // BLOCK] = True
    return alive


def poisoned(case: DecodeCase, arrays: dict[str, Any], alive: np.ndarray) -> dict[str, Any]:
    """The arrays with NaN for each key and value of a dead block."""
    dead = ~alive.repeat(BLOCK, axis=2)[..., : case.kv_length].swapaxes(1, 2)  # [B, S, Hkv]
    if case.page_size is not None:
        pages, tables = dead.reshape(-1, case.page_size, case.kv_heads), np.asarray(arrays["block_tables"]).ravel()
        is_page = tables < len(arrays["k"])
        dead = np.zeros((len(arrays["k"]), case.page_size, case.kv_heads), bool)
        dead[tables[is_page]] = pages[is_page]
    return arrays | {name: jnp.where(dead[..., None], jnp.nan, arrays[name]) for name in "kv"}


def errors_by(case: tuple[str, str], implementation: str) -> dict[str, tuple[float, float]]:
    """(error, bound) of out and lse by name, with NaN in dead blocks. case: names of SIZES, and of ARRAYS or MASKS."""
    sizes = SIZES[case[0]]
    arrays, dense = masked(sizes, case[1])
    alive = alive_blocks(sizes, dense)
    assert not alive.all()
    out, lse = run(sizes, poisoned(sizes, arrays, alive), implementation)
    dead = np.isneginf(lse).swapaxes(1, 2)
    assert not np.asarray(out)[dead].any()
    assert dead.all() == (case[1] == "none" and not sizes.sinks)
    return errors(sizes, arrays | {"mask": dense}, (out, lse))
