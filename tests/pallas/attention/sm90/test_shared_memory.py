"""The shared memory of the Hopper kernels under combined features, forward and backward, for an H200.

The interpreter has no limit of shared memory: lowering raises where a kernel needs more than an SM has.
"""

import dataclasses
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import flash_attention, masks
from tests.tools import compile_case

WIDTHS = [(64, 64), (64, 128), (80, 80), (96, 96), (112, 112), (128, 128), (128, 64), (160, 160)]
WIDTHS += [(192, 64), (192, 128), (192, 192), (256, 256), (256, 64)]
BATCH, HEADS, KV_HEADS = 2, 6, 3


@dataclasses.dataclass(frozen=True)
class Features:
    """mask: "cells" of block lists, "window" (a Mask), "pairs" or "keys" (arrays). bias: "keys", or its dtype for
    pairs. length: of queries and keys.
    """

    head_dim: int
    v_head_dim: int
    mask: str
    bias: str
    segments: bool
    deterministic: bool
    length: int
    is_causal: bool

    def __str__(self) -> str:
        flags = {"segments": self.segments, "deterministic": self.deterministic, "causal": self.is_causal}
        words = [f"D{self.head_dim}", f"V{self.v_head_dim}", self.mask and f"mask_{self.mask}"]
        words += [self.bias and f"bias_{self.bias}", *(name for name in flags if flags[name]), f"T{self.length}"]
        return "-".join(filter(None, words))

    @property
    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        spec, length = jax.ShapeDtypeStruct, self.length
        blocks = -(-length // 64)
        columns = {
            "query": (HEADS, self.head_dim),
            "key": (KV_HEADS, self.head_dim),
            "value": (KV_HEADS, self.v_head_dim),
        }
        found = {name: spec((BATCH, length, *of_name), jnp.bfloat16) for name, of_name in columns.items()}
        shapes = {"cells": (BATCH, HEADS, blocks, blocks), "pairs": (BATCH, 1, length, length)}
        shapes |= {"keys": (BATCH, 1, 1, length)}
        if self.mask in shapes:
            found["mask"] = spec(shapes[self.mask], jnp.bool_)
        if self.bias:
            of_keys = self.bias == "keys"
            shape = shapes["keys"] if of_keys else (BATCH, HEADS, length, length)
            found["bias"] = spec(shape, jnp.dtype("float32" if of_keys else self.bias))
        if self.segments:
            found["segment_ids"] = spec((BATCH, length), jnp.int32)
        return found


def gradients_of(features: Features) -> Any:
    """The function of features.arrays that computes all gradients."""

    def gradients(arrays: dict[str, Any]) -> Any:
        others = {"deterministic": features.deterministic, "is_causal": features.is_causal}
        others |= {name: arrays[name] for name in ("mask", "segment_ids") if name in arrays}
        if features.mask == "cells":
            others["mask"] = masks.block_sparse(arrays["mask"], 64)
        if features.mask == "window":
            others["mask"] = masks.sliding_window(40, 40) | masks.global_tokens(8)
        floats = {name: x for name, x in arrays.items() if name not in ("mask", "segment_ids")}
        attend = lambda floats: flash_attention(**floats, **others, implementation="mosaic_gpu")
        out, vjp = jax.vjp(attend, floats)
        return vjp(out)

    return gradients


def drawn(count: int) -> list[Features]:
    """Combinations of at least two features."""
    masks, biases, flags = ("", "cells", "window", "pairs", "keys"), ("", "keys", "bfloat16", "float32"), (False, True)
    wide = itertools.product(masks, biases, flags, flags, (274, 512), flags)
    combined = [x for x in wide if sum(map(bool, x[:4])) >= 2]
    draw = random.Random(0)
    return [Features(*draw.choice(WIDTHS), *draw.choice(combined)) for _ in range(count)]


def lower(features: Features) -> None:
    try:
        compile_case.lower("h200", gradients_of(features), features.arrays)
    except NotImplementedError as error:  # another implementation serves this call
        if "mosaic_gpu" not in str(error):
            raise


# A value per key takes shared memory in the dquery kernel, which 256 columns nearly fill.
OF_KEYS = [
    Features(256, 256, "", "keys", False, True, 274, False),
    Features(192, 64, "cells", "keys", False, True, 274, False),
    Features(160, 160, "keys", "", False, True, 512, True),
]


@pytest.mark.parametrize("features", OF_KEYS, ids=str)
def test_values_per_key_in_deterministic_backwards(features):
    compile_case.lower("h200", gradients_of(features), features.arrays)


@pytest.mark.slow
@pytest.mark.parametrize("features", dict.fromkeys(drawn(60)), ids=str)
def test_combined_features(features):
    lower(features)
