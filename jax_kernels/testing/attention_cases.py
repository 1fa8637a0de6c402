"""The cases of attention that tests, benchmarks and `jax-kernels check` share; jax_kernels.testing runs them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_kernels import masks

# The lowest finite values, by which other libraries mask.
LOWEST, LOWEST_BF16 = float(np.finfo(np.float32).min), float(jnp.finfo(jnp.bfloat16).min)


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One attention call, without its arrays.

    q_offset: an int, or an int per batch entry. kv_lengths: None, or an int per batch entry. precision: "fp32" or
    "tf32" for float32, else None. magnitude: the standard deviation of the query; the key's is 1, and the value's is
    value_magnitude. window, softcap: as in flash_attention. sinks: whether the call has sinks. segments: None;
    "packed", segments in sequence with padding at the end; "mixed", ids in any order; or "both", where every second
    batch entry is "mixed". bias: None, or the axes of a
    bias, from "bhts" (batch, heads, queries, keys); its other axes have length 1. bias_dtype: "" for dtype. bias_masks:
    some entries of the bias, and some whole rows, are -inf. bias_low: added to the bias where a key comes after its
    query, as in causal masks by -1e30. mask: None, or the axes of a bool mask, as for bias. With "t", some queries have
    no key. With "t" and "s", the first third of the queries drops the second half of the keys, and the last third keeps
    all keys of the first half. pattern: None, or the name of a Mask in PATTERNS, instead of mask. bias_whole: unless it
    is 0, it replaces the bias of the first quarter of the queries; a value such as the lowest float masks these queries
    whole. garbage: keys and values past kv_lengths are NaNs and infinities. no_sink: the sink of the first head is
    -inf.
    """

    name: str
    batch: int = 2
    q_length: int = 128
    kv_length: int = 128
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    dtype: str = "bfloat16"
    is_causal: bool = False
    q_offset: int | tuple[int, ...] = 0
    kv_lengths: tuple[int, ...] | None = None
    precision: str | None = None
    magnitude: float = 1.0
    value_magnitude: float = 1.0
    window: int | tuple[int, int] | None = None
    softcap: float | None = None
    sinks: bool = False
    segments: str | None = None
    bias: str | None = None
    bias_dtype: str = ""
    bias_masks: bool = False
    bias_low: float = 0.0
    bias_whole: float = 0.0
    mask: str | None = None
    pattern: str | None = None
    garbage: bool = False
    no_sink: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The names of flash_attention's arguments that have a gradient in this case, in the order of
        AttentionResults.
        """
        extra = {"bias": self.bias is not None, "sinks": self.sinks}
        return ("query", "key", "value", *(name for name, given in extra.items() if given))

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of flash_attention for this case, except query, key and value. Arrays are random but
        fixed.
        """
        return {
            "is_causal": self.is_causal,
            "q_offset": self.q_offset if isinstance(self.q_offset, int) else np.asarray(self.q_offset, np.int32),
            "kv_lengths": None if self.kv_lengths is None else np.asarray(self.kv_lengths, np.int32),
            "precision": self.precision,
            "window": self.window,
            "softcap": self.softcap,
            "bias": self._bias(),
            "mask": self._mask(),
            "sinks": self._sinks() if self.sinks else None,
            "segment_ids": None if self.segments is None else self._segment_ids(),
        }

    def counts(self) -> np.ndarray:
        """Whether each key is within kv_lengths: bool [B, S, 1, 1]."""
        lengths = np.full(self.batch, self.kv_length) if self.kv_lengths is None else np.asarray(self.kv_lengths)
        return (np.arange(self.kv_length) < lengths[:, None])[:, :, None, None]

    def _sinks(self) -> np.ndarray:
        sinks = self._random(1).standard_normal(self.heads, np.float32)
        sinks[0] = -np.inf if self.no_sink else sinks[0]
        return sinks

    def _random(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([purpose, self.batch, self.q_length, self.kv_length])

    def _bias(self) -> Any:
        """The bias, [B or 1, H or 1, T or 1, S or 1], or None. Its values are random but fixed."""
        if self.bias is None:
            return None
        random = self._random(2)
        bias = random.standard_normal(self._shape(self.bias), np.float32)
        if self.bias_low:
            bias += np.float32(self.bias_low) * ~np.tri(self.q_length, self.kv_length, dtype=bool)
        if self.bias_masks:
            bias = np.where(random.random(bias.shape) < 0.2, -np.inf, bias)
            bias[:, :, : self.q_length // 4] = -np.inf
        if self.bias_whole:
            bias[:, :, : self.q_length // 4] = self.bias_whole
        return jnp.asarray(bias, self.bias_dtype or self.dtype)

    def _mask(self) -> Any:
        """The mask: a Mask for a pattern, else bool [B or 1, H or 1, T or 1, S or 1], or None. Its values are random
        but fixed.
        """
        if self.pattern is not None:
            return PATTERNS[self.pattern](self)
        if self.mask is None:
            return None
        mask = self._random(4).random(self._shape(self.mask)) < 0.4
        if "t" in self.mask:
            mask[:, :, self.q_length // 2 : self.q_length // 2 + 3] = False
        if "t" in self.mask and "s" in self.mask:
            mask[:, :, : self.q_length // 3, self.kv_length // 2 :] = False
            mask[:, :, -self.q_length // 3 :, : self.kv_length // 2] = True
        return mask

    def _shape(self, axes: str) -> list[int]:
        """The shape of an array on these axes, from "bhts": [B or 1, H or 1, T or 1, S or 1]."""
        sizes = {"b": self.batch, "h": self.heads, "t": self.q_length, "s": self.kv_length}
        return [size if axis in axes else 1 for axis, size in sizes.items()]

    def _segment_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the queries and of the keys, int32 [B, T] and [B, S]."""
        lengths, random = (self.q_length, self.kv_length), self._random(3)
        if self.segments in ("mixed", "both"):
            mixed = [random.integers(-1, 3, (self.batch, length), np.int32) for length in lengths]
            if self.segments == "both":
                for ids, sorted_ids in zip(
                    mixed, dataclasses.replace(self, segments="packed")._segment_ids(), strict=True
                ):
                    ids[::2] = sorted_ids[::2]
            q_ids, kv_ids = mixed
            return q_ids, kv_ids
        # Two segments of about a third each, a shorter segment, a tenth of padding. The borders differ between entries.
        borders = np.array([0.33, 0.66, 0.9]) - random.random((self.batch, 1)) / 10
        q_ids, kv_ids = ((np.arange(n)[:, None] >= borders[:, None] * n).sum(-1, dtype=np.int32) for n in lengths)
        return np.where(q_ids == 3, -1, q_ids), np.where(kv_ids == 3, -1, kv_ids)


def _cells(case: AttentionCase, size: int) -> masks.Mask:
    """A block_sparse mask of random cells of size x size for each batch entry and head.

    For the query heads of batch entry 0's first key head, the first row and the last column of cells are dropped.
    """
    shape = (case.batch, case.heads, -(-case.q_length // size), -(-case.kv_length // size))
    cells = case._random(5).random(shape) < 0.4
    cells[0, : case.heads // case.kv_heads, 0] = False
    cells[0, : case.heads // case.kv_heads, :, -1] = False
    return masks.block_sparse(jnp.asarray(cells), size)


def _stripes(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 3 + k * (h + 1)) % 5 < 2


def _documents(case: "AttentionCase") -> masks.Mask:
    """Causal attention within documents of 70 tokens, every third key before, and a prefix of each batch entry."""
    of_side = lambda length: jnp.tile(jnp.arange(length, dtype=jnp.int32) // 70, (case.batch, 1))
    documents = masks.segments(of_side(case.q_length), of_side(case.kv_length))
    prefix = masks.prefix(jnp.arange(case.batch, dtype=jnp.int32) * 5 + 3)
    return masks.causal() & (documents | masks.dilated(3)) | prefix


PATTERNS: dict[str, Callable[[AttentionCase], masks.Mask]] = {
    "cells": lambda case: _cells(case, 128),
    "cells_causal": lambda case: _cells(case, 48) & masks.causal(),
    "global": lambda case: masks.sliding_window(40, 10) | masks.global_tokens(5),
    "long_global": lambda case: masks.sliding_window(300, 100) | masks.global_tokens(70),
    "dense": lambda case: masks.dense(jnp.asarray(dataclasses.replace(case, pattern=None, mask="hts")._mask())),
    "documents": _documents,
    "stripes": lambda case: masks.from_function(_stripes, heads=case.heads),
}


def _heads(name: str, head_dim: int, v_head_dim: int | None = None, **fields: Any) -> AttentionCase:
    fields = {"batch": 1, "q_length": 100, "kv_length": 100, "is_causal": True} | fields
    return AttentionCase(name, head_dim=head_dim, v_head_dim=v_head_dim or head_dim, **fields)


# Small: each case takes milliseconds jitted on a CPU, and in interpret mode.
ATTENTION_CASES = (
    AttentionCase("full"),
    AttentionCase("causal", is_causal=True),
    AttentionCase("odd", q_length=131, kv_length=77),
    AttentionCase("odd_causal", q_length=201, kv_length=201, is_causal=True),
    AttentionCase("one_query", q_length=1, kv_length=130),
    AttentionCase("one_query_last", q_length=1, kv_length=130, is_causal=True, q_offset=129),
    AttentionCase("one_key", q_length=66, kv_length=1),
    AttentionCase("more_keys_causal", q_length=72, kv_length=200, is_causal=True),
    AttentionCase("gqa", heads=4, is_causal=True, q_length=100, kv_length=100),
    AttentionCase("mqa", heads=4, kv_heads=1, q_length=100, kv_length=67),
    _heads("head_dim_16", 16),
    _heads("head_dim_40", 40),
    _heads("head_dim_96", 96),
    _heads("head_dim_128", 128),
    _heads("head_dim_192", 192),
    _heads("head_dim_256", 256, is_causal=False),
    _heads("value_wider", 64, 128),
    _heads("value_narrower", 128, 40, is_causal=False),
    _heads("head_dim_192_128", 192, 128, is_causal=False, heads=4, kv_heads=1),
    _heads("head_dim_192_128_segments", 192, 128, segments="packed"),
    AttentionCase("offset_positive", q_length=72, kv_length=200, is_causal=True, q_offset=128),
    # Queries 0 to 49 have no key.
    AttentionCase("offset_negative", q_length=150, kv_length=100, is_causal=True, q_offset=-50),
    AttentionCase("offset_per_batch", q_length=90, kv_length=140, is_causal=True, q_offset=(50, -30)),
    # Lengths below 0 and beyond the keys, here and below: they count as 0 and as all keys.
    AttentionCase("kv_lengths", batch=4, q_length=70, kv_length=140, kv_lengths=(-3, 300, 65, 0)),
    AttentionCase("kv_lengths_causal", q_length=140, kv_length=140, is_causal=True, kv_lengths=(141, 77)),
    AttentionCase("all_dead", batch=1, q_length=40, kv_length=60, is_causal=True, q_offset=-40),
    AttentionCase("fp16", dtype="float16"),
    AttentionCase("fp16_causal_gqa", dtype="float16", heads=4, is_causal=True, q_length=99, kv_length=131),
    AttentionCase("fp32", dtype="float32", precision="fp32", q_length=99, kv_length=131),
    AttentionCase("fp32_causal", dtype="float32", is_causal=True, heads=4, q_length=99, kv_length=99),
    _heads("fp32_head_dim_128", 128, dtype="float32", q_offset=-10),
    _heads("fp32_head_dim_256", 256, dtype="float32", q_length=50, kv_length=70),
    AttentionCase("tf32", dtype="float32", precision="tf32", is_causal=True, kv_lengths=(100, 128)),
    AttentionCase("window", window=(30, 20), q_length=150, kv_length=140),
    AttentionCase("window_causal", window=40, is_causal=True, q_length=131, kv_length=131),
    AttentionCase("window_left_only", window=(25, -1), q_length=90, kv_length=140, heads=4),
    AttentionCase("window_right_only", window=(-1, 25), q_length=140, kv_length=90),
    AttentionCase("window_of_one", window=0, q_length=70, kv_length=70),
    # The last queries have no key; in the second entry, the first queries have no key either.
    AttentionCase(
        "window_offsets_lengths", window=(20, 9), q_length=150, kv_length=120, q_offset=(17, -40), kv_lengths=(190, 77)
    ),
    AttentionCase("segments", segments="packed", q_length=150, kv_length=150),
    AttentionCase("segments_causal", segments="packed", q_length=140, kv_length=140, heads=4, is_causal=True),
    AttentionCase("segments_mixed", segments="mixed", q_length=77, kv_length=131),
    AttentionCase("segments_both", segments="both", q_length=150, kv_length=131, heads=4, is_causal=True, q_offset=20),
    AttentionCase("segments_window", segments="packed", q_length=140, kv_length=140, window=(30, 5)),
    AttentionCase("softcap", softcap=2.0),
    AttentionCase("softcap_causal", softcap=30.0, is_causal=True, q_length=99, kv_length=131, magnitude=10.0),
    AttentionCase("softcap_fp32", softcap=1.5, dtype="float32", is_causal=True, heads=4),
    AttentionCase("garbage", batch=3, q_length=70, kv_length=140, kv_lengths=(-1, 200, 65), garbage=True),
    AttentionCase(
        "garbage_causal",
        batch=2,
        q_length=140,
        kv_length=200,
        is_causal=True,
        kv_lengths=(1, 77),
        garbage=True,
        heads=4,
    ),
    AttentionCase("garbage_fp32", batch=2, dtype="float32", q_length=40, kv_lengths=(100, 3), garbage=True, bias="s"),
    AttentionCase("no_sink", sinks=True, no_sink=True, q_length=99, kv_length=99, is_causal=True, q_offset=-40),
    AttentionCase("no_sink_no_keys", sinks=True, no_sink=True, q_length=40, kv_lengths=(0, 90)),
    AttentionCase("sinks", sinks=True, q_length=99, kv_length=99, heads=4),
    AttentionCase("sinks_dead", sinks=True, q_length=80, kv_length=60, is_causal=True, q_offset=-40),
    AttentionCase("sinks_fp32", sinks=True, dtype="float32", is_causal=True, q_length=70, kv_length=70),
    AttentionCase("bias_full", bias="bhts", q_length=150, kv_length=131, heads=4),
    AttentionCase("bias_heads", bias="hts", bias_dtype="float32", is_causal=True, q_length=70, kv_length=70),
    AttentionCase("bias_keys", bias="bs", q_length=150, kv_length=131, heads=4),
    # The gradients of a row's scores add up to the gradient of its lse: all else cancels, and only float32 shows this.
    AttentionCase("bias_queries", bias="ht", dtype="float32", q_length=77, kv_length=131),
    AttentionCase("bias_number", bias="", dtype="float32", q_length=77, kv_length=70, heads=4, is_causal=True),
    AttentionCase("bias_masks", bias="hts", bias_masks=True, q_length=80, kv_length=80, kv_lengths=(99, 40)),
    AttentionCase("bias_low", bias="ts", bias_low=-1e30, q_length=150, kv_length=150),
    AttentionCase("bias_lower", bias="hts", bias_dtype="float32", bias_low=-1e10, q_length=70, kv_length=150),
    AttentionCase("bias_whole", bias="ts", bias_whole=LOWEST_BF16, q_length=150, kv_length=131, heads=4),
    AttentionCase("bias_whole_causal", bias="hts", bias_dtype="float32", bias_whole=LOWEST, is_causal=True, q_offset=4),
    AttentionCase("bias_whole_keys", bias="bs", bias_whole=LOWEST_BF16, q_length=70, kv_length=131, heads=4),
    AttentionCase("bias_whole_fp32", bias="bhts", dtype="float32", bias_whole=LOWEST, sinks=True, softcap=3.0),
    AttentionCase("bias_fp32", bias="bhts", dtype="float32", is_causal=True, q_length=70, kv_length=70),
    AttentionCase("mask", mask="bts", q_length=150, kv_length=131, heads=4),
    AttentionCase("mask_keys", mask="bs", q_length=70, kv_length=131, is_causal=True, q_offset=61),
    AttentionCase("mask_bias", mask="ts", bias="bhs", q_length=131, kv_length=70, heads=4),
    AttentionCase("pattern_cells", pattern="cells", batch=1, q_length=300, kv_length=256, heads=4),
    AttentionCase("pattern_cells_causal", pattern="cells_causal", q_length=150, kv_length=200, heads=4, q_offset=20),
    AttentionCase("pattern_global", pattern="global", q_length=140, kv_length=131, kv_lengths=(400, 60), sinks=True),
    AttentionCase("pattern_stripes", pattern="stripes", q_length=77, kv_length=140, window=(60, 30), softcap=3.0),
    AttentionCase("pattern_bias", pattern="cells", bias="hts", bias_masks=True, q_length=77, kv_length=140, heads=4),
    AttentionCase(
        "everything",
        q_length=45,
        kv_length=38,
        heads=4,
        head_dim=16,
        v_head_dim=24,
        dtype="float32",
        is_causal=True,
        q_offset=(-3, 5),
        kv_lengths=(30, 300),
    ),
    AttentionCase(
        "everything_else",
        q_length=45,
        kv_length=38,
        heads=4,
        head_dim=16,
        v_head_dim=24,
        dtype="float32",
        q_offset=(-3, 5),
        kv_lengths=(30, 300),
        window=(15, 11),
        softcap=3.0,
        sinks=True,
        segments="packed",
        bias="hts",
        bias_masks=True,
    ),
    # |query . key| reaches 10,000: the softmax must subtract its maximum before it exponentiates.
    AttentionCase("large", magnitude=300.0),
    AttentionCase("large_fp16", dtype="float16", magnitude=300.0, is_causal=True),
    AttentionCase("large_fp32", dtype="float32", magnitude=300.0),
)


def _long(name: str, head_dim: int, **fields: Any) -> AttentionCase:
    fields = {"batch": 1, "q_length": 2048, "kv_length": 2048, "heads": 4, "kv_heads": 4} | fields
    return AttentionCase(name, head_dim=head_dim, v_head_dim=head_dim, **fields)


# For a GPU: many tiles in both directions, still within reach of the float64 oracle on the host.
GPU_ATTENTION_CASES = (
    *(
        _long(f"long_{head_dim}{suffix}", head_dim, is_causal=is_causal)
        for head_dim in (64, 96, 128, 192, 256)
        for suffix, is_causal in (("", False), ("_causal", True))
    ),
    _long("long_odd_64", 64, q_length=2047, kv_length=2049),
    _long("long_odd_128_causal", 128, q_length=2049, kv_length=2047, is_causal=True),
    _long("long_odd_128_causal_last", 128, q_length=2047, kv_length=2049, is_causal=True, q_offset=2),
    _long("long_odd_256_causal", 256, q_length=1025, kv_length=1025, is_causal=True),
    # Rows are multiples of 16 bytes, and the last blocks are not whole.
    _long("long_fours_64", 64, q_length=2044, kv_length=2049),
    _long("long_fours_128_causal", 128, q_length=1028, kv_length=1028, is_causal=True),
    _long("long_fours_bias", 128, q_length=1996, bias="hts"),
    _long("long_gqa_64", 64, heads=8, kv_heads=2, is_causal=True),
    _long("long_gqa_128", 128, heads=8, kv_heads=2),
    _long("long_gqa_128_fp16", 128, heads=8, kv_heads=2, is_causal=True, dtype="float16"),
    _long("long_kv_lengths", 128, batch=4, q_length=513, kv_lengths=(0, 2048, 1, 1023)),
    _long("long_offset_per_batch", 64, batch=2, q_length=513, is_causal=True, q_offset=(1535, -100)),
    _long("long_fp32", 128, dtype="float32", precision="fp32", is_causal=True),
    _long("long_tf32", 64, dtype="float32", precision="tf32"),
    _long("long_window", 128, window=(512, 128)),
    _long("long_window_causal", 64, window=512, is_causal=True, heads=8, kv_heads=2),
    _long("long_window_odd", 128, window=(300, -1), q_length=2047, kv_length=1999, q_offset=50),
    _long("long_segments", 128, batch=2, segments="packed", is_causal=True),
    _long("long_segments_both", 128, batch=2, segments="both", is_causal=True, heads=8, kv_heads=2),
    _long("long_segments_mixed", 64, segments="mixed"),
    _long("long_softcap", 128, softcap=2.0, is_causal=True),
    _long("long_sinks", 64, sinks=True, window=512, is_causal=True, heads=8, kv_heads=2),
    _long("long_bias", 128, batch=2, bias="hts", is_causal=True),
    _long("long_bias_full", 64, batch=2, bias="bhts", bias_dtype="float32", heads=8, kv_heads=2),
    _long("long_bias_keys", 64, batch=2, bias="bs", bias_masks=True),
    _long("long_bias_128_float32", 128, batch=2, bias="bhts", bias_dtype="float32"),
    _long("long_bias_256", 256, bias="hts", is_causal=True),
    _long("long_bias_window", 64, bias="hts", window=(300, 100), q_length=2047, kv_length=1999),
    _long("long_mask", 128, batch=2, mask="bts"),
    _long("long_mask_causal", 64, batch=2, mask="hts", is_causal=True, heads=8, kv_heads=2),
    _long("long_mask_256", 256, mask="bhts", q_length=1025, kv_length=1999),
    _long("long_mask_keys", 128, batch=2, mask="bs", is_causal=True),
    _long("long_mask_bias", 64, batch=2, mask="bts", bias="bs"),
    _long("long_cells", 128, pattern="cells", batch=2),
    _long("long_cells_64", 64, pattern="cells", q_length=1999, kv_length=2047),
    _long("long_cells_256", 256, pattern="cells", heads=8, kv_heads=2),
    _long("long_cells_causal", 128, pattern="cells_causal", heads=8, kv_heads=2, q_length=2047),
    _long("long_global", 128, pattern="long_global", batch=2, kv_lengths=(2048, 1000)),
    _long("long_global_64", 64, pattern="long_global", is_causal=True, heads=8, kv_heads=2),
    _long("long_global_256", 256, pattern="long_global", q_length=1025, kv_length=1999),
    _long("long_stripes", 128, pattern="stripes", q_length=1025, kv_length=999, segments="packed"),
    _long("long_cells_bias", 128, pattern="cells", bias="bhts", batch=2, heads=8, kv_heads=2),
    _long("long_global_bias_64", 64, pattern="long_global", bias="hts", bias_dtype="float32", bias_masks=True),
    _long("long_mask_bias_tiles", 256, mask="ts", bias="hts", is_causal=True, q_length=1025, kv_length=1999),
    _long("long_mask_bias_heads", 128, batch=2, mask="bhts", bias="ts", softcap=5.0),
    _long("long_bias_keys_128", 128, batch=2, bias="bhs", is_causal=True),
    _long("long_bias_keys_256", 256, bias="s", heads=8, kv_heads=2),
    _long("long_cells_bias_keys", 128, batch=2, pattern="cells", bias="hs"),
    _long("long_bias_odd", 128, bias="hts", q_length=2047, kv_length=1999, is_causal=True),
    _long("long_bias_fp32", 64, bias="ts", dtype="float32", precision="fp32", softcap=5.0),
)
