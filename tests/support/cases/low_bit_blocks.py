"""Cases of the Hopper matmul by low-bit weights whose splits a cluster joins, for interpreters/kernels.py and GPUs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.sm90 import SM90
from jax_kernels.testing.low_precision import low_bit_matmul as plain

JOINED = {"cluster_join": True}
CASES = {
    "two": ("int4", ((3, 512, 128), {"bias": "bfloat16", "activation": "silu"})),
    "residual": ("int4_32", ((16, 512, 64), {"has_residual": True, "activation": "gelu", "out_dtype": "float32"})),
    "an_empty_split": ("int4_256", ((8, 1280, 256), {"dtype": "float16", "has_residual": True})),
    "gated": ("int4", ((9, 1024, 128), {"is_gated": True, "activation": "silu"})),
    "alone": ("int8", ((17, 384, 192), {"out_dtype": "float32"})),
    "row": ("int8_row", ((40, 512, 64), {"transpose_w": True})),
    "mxfp4_one": ("mxfp4", ((1, 1024, 64), {})),
}
GPU = {
    "few": ("int4", ((16, 8192, 8192), {"bias": "float32", "activation": "gelu"})),
    "one": ("int4_32", ((1, 4096, 4096), {"has_residual": True})),
    "many": ("int8", ((64, 4096, 2048), {"out_dtype": "float32"})),
    "joined_gated": ("mxfp8", ((32, 2048, 1024), {"is_gated": True, "activation": "silu"})),
}


@contextlib.contextmanager
def replaced(blocks: dict[str, Any]) -> Iterator[None]:
    """Inside, matmuls are planned with other blocks in all rows of the Hopper kernel."""
    rows = tuple(
        dataclasses.replace(row, config=dataclasses.replace(row.config, **blocks))
        if row.implementation == "mosaic_gpu"
        else row
        for row in SM90.matmul_low_bit
    )
    with block_specs.replaced_tables((9, 0), matmul_low_bit=rows):
        yield


def errors_by(case: Any, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(error, bound) of each result; the error is the largest."""
    with replaced(JOINED):
        return plain.errors_by(case, implementation)
