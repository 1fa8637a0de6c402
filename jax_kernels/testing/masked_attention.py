"""The cases of block_sparse_attention and dynamic_mask_attention for tests and `jax-kernels check`.

They are cases of flash_attention, with its oracle and error bounds: both ops are flash_attention under a mask.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kernels.masks.arrays import BlockSparse
from jax_kernels.ops.attention.block_sparse_attention import block_sparse_attention
from jax_kernels.ops.attention.dynamic_mask_attention import dynamic_mask_attention
from jax_kernels.testing.attention_cases import ATTENTION_CASES, GPU_ATTENTION_CASES, AttentionCase
from jax_kernels.testing.typical_call import LENGTH, TypicalCall, spec

__all__ = [
    "BLOCK_SPARSE",
    "DYNAMIC_MASK",
    "GPU_BLOCK_SPARSE",
    "GPU_DYNAMIC_MASK",
    "TYPICAL",
    "KvHeadsCase",
    "block_sparse",
    "dynamic_mask",
]


@dataclasses.dataclass(frozen=True)
class KvHeadsCase(AttentionCase):
    """An AttentionCase whose mask has one entry for each key head: the query heads of a key head have equal masks."""

    def _mask(self) -> Any:
        of_keys = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mask = AttentionCase(**of_keys | {"heads": self.kv_heads})._mask()
        return np.repeat(mask, self.heads // self.kv_heads, axis=1)


def block_sparse(case: AttentionCase) -> Any:
    """Returns block_sparse_attention as a function with the arguments of flash_attention, so that it can run its
    cases.
    """

    def attend(query: Any, key: Any, value: Any, *, mask: Any, **arguments: Any) -> Any:
        if isinstance(mask, BlockSparse):  # the array form
            return block_sparse_attention(
                query, key, value, mask.blocks, block_size=(mask.block_q, mask.block_kv), **arguments
            )
        return block_sparse_attention(query, key, value, mask, **arguments)

    return attend


def dynamic_mask(case: AttentionCase) -> Any:
    """Returns dynamic_mask_attention as a function with the arguments of flash_attention, so that it can run its cases.

    A mask with one entry for each key head (KvHeadsCase) is passed with num_kv_heads heads.
    """
    step = case.heads // case.kv_heads if isinstance(case, KvHeadsCase) else 1

    def attend(query: Any, key: Any, value: Any, *, mask: Any, **arguments: Any) -> Any:
        return dynamic_mask_attention(query, key, value, jnp.asarray(mask)[:, ::step], **arguments)

    return attend


def _long(name: str, **fields: Any) -> KvHeadsCase:
    sizes = {"q_length": 1025, "kv_length": 1999, "heads": 8, "kv_heads": 2, "head_dim": 128, "v_head_dim": 128}
    return KvHeadsCase(name, **sizes | fields)


def _with_pattern(cases: tuple[AttentionCase, ...]) -> dict[str, AttentionCase]:
    return {case.name.removeprefix("pattern_"): case for case in cases if case.pattern is not None}


def _with_mask(cases: tuple[AttentionCase, ...]) -> dict[str, AttentionCase]:
    return {case.name: case for case in cases if case.mask is not None}


BLOCK_SPARSE = _with_pattern(ATTENTION_CASES) | {
    "cells_fp32": AttentionCase(
        "cells_fp32", pattern="cells", dtype="float32", q_length=150, kv_length=140, sinks=True
    ),
}
DYNAMIC_MASK = _with_mask(ATTENTION_CASES) | {
    "kv_heads": KvHeadsCase("kv_heads", mask="bhts", bias="hs", q_length=77, kv_length=131, heads=4, sinks=True),
    "kv_heads_fp32": KvHeadsCase(
        "kv_heads_fp32", mask="bhts", dtype="float32", q_length=45, kv_length=38, heads=4, head_dim=16, v_head_dim=24
    ),
    "kv_heads_of_keys": KvHeadsCase("kv_heads_of_keys", mask="bhs", q_length=70, kv_length=131, heads=4),
}
# For a GPU: many blocks in both directions.
GPU_BLOCK_SPARSE = _with_pattern(GPU_ATTENTION_CASES)
GPU_DYNAMIC_MASK = _with_mask(GPU_ATTENTION_CASES) | {
    "long_kv_heads": _long("long_kv_heads", mask="bhts", bias="hs", is_causal=True),
}
TYPICAL = {
    "dynamic_mask_attention": TypicalCall(
        dynamic_mask_attention, arguments={"mask": spec((1, 1, LENGTH, LENGTH), "bool")}
    ),
    "block_sparse_attention": TypicalCall(
        block_sparse_attention, arguments={"block_mask": np.ones((LENGTH // 128, LENGTH // 128), bool)}
    ),
}
