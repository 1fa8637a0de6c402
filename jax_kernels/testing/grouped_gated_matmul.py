"""The cases of grouped_gated_matmul that tests and `jax-kernels check` share."""

import dataclasses

from jax_kernels.ops.grouped.grouped_matmul import grouped_gated_matmul
from jax_kernels.testing.grouped_matmul import ERROR, Case, errors_by, errors_of, why_not
from jax_kernels.testing.typical_call import LENGTH, TypicalCall, spec

__all__ = [
    "CASES",
    "ERROR",
    "HOPPER",
    "LONG",
    "QUICK",
    "TRITON",
    "TYPICAL",
    "errors_by",
    "errors_of",
    "why_not",
]


def _gated(**cases: Case) -> dict[str, Case]:
    """The cases as calls of grouped_gated_matmul, with "silu" for None."""
    return {
        name: dataclasses.replace(case, is_gated=True, activation=case.activation or "silu")
        for name, case in cases.items()
    }


CASES = _gated(
    plain=Case((5, 0, 17, 1, 13), 32, 24),
    all_in_one=Case((0, 0, 37, 0), 24, 40, activation="gelu"),
    no_rows_in_groups=Case((0, 0, 0), 16, 24, past=7),
    past=Case((3, 0, 11), 40, 16, past=19, activation="gelu"),
    primes=Case((2, 3, 5, 7, 11, 13), 31, 37, transpose_w=True),
    float16=Case((7, 29, 0, 2), 40, 24, dtype="float16", activation="gelu_tanh", transpose_w=True),
    float32=Case((7, 1, 23), 24, 16, dtype="float32", past=2),
    tf32=Case((7, 0, 23), 24, 16, dtype="float32", precision="tf32", transpose_w=True),
    gathered=Case((9, 0, 5, 21), 32, 24, past=4, tokens=11),
    wide_out=Case((9, 5, 0, 21), 32, 24, out_dtype="float32", activation="sigmoid"),
    float16_wide_out=Case((9, 5, 0, 21), 32, 24, dtype="float16", out_dtype="float32", past=3),
)
# Sizes next to the blocks of the Triton kernels, and groups that end inside of a block.
TRITON = {name: case for name, case in CASES.items() if name != "float32"} | _gated(
    one_short=Case((127, 63, 0, 129), 65, 255),
    skewed=Case((1, 0, 301, 2, 0, 0, 64), 128, 136, past=33, transpose_w=True),
)
# Cases that the Hopper kernel serves: blocks of 64 rows that overlap, and groups of fewer rows.
HOPPER = _gated(
    small=Case((5, 0, 17, 1, 8, 63), 64, 64, past=2),
    overlapping=Case((65, 0, 130, 127, 70), 64, 128, activation="gelu_tanh"),
    past=Case((3, 77), 128, 64, past=140),
    edges=Case((200, 1), 192, 320, transpose_w=True, dtype="float16"),
    all_in_one=Case((0, 301, 0), 128, 192),
)
# For a GPU: many tiles, and long groups.
LONG = _gated(
    many=Case((1000, 0, 3, 2045, 900, 1, 147), 1024, 1536, activation="gelu", past=5),
    many_odd=Case((1001, 17, 0, 513), 1027, 1531, transpose_w=True),
    many_gathered=Case((1000, 0, 3, 2045), 1024, 1536, tokens=1024),
    decoding=Case((3, 0, 1, 0, 0, 9, 2, 1) * 8, 1024, 768),
)
# `jax-kernels check` runs these cases without --full.
QUICK = ("plain", "past", "primes", "float32", "tf32", "wide_out", "tiles_overlapping")
TYPICAL = {
    "grouped_gated_matmul": TypicalCall(
        grouped_gated_matmul,
        implementations=("mosaic_gpu", "triton", "xla"),
        shapes=((LENGTH, 4096), (8, 4096, 1024), (8, 4096, 1024)),
        arguments={"group_sizes": spec((8,), "int32")},
    ),
}
