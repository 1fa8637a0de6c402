"""Cases of the Hopper matmul with other blocks than its block spec row's, for interpreters/kernels.py and for GPUs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.sm90 import SM90
from jax_kernels.testing import matmul as testing_matmul
from jax_kernels.testing import mlp

PINGPONG = {"pingpong": True}
TALL = {"pingpong": True, "wg_rows": 128, "block_n": 128, "stages": 6}
WIDE = {"pingpong": True, "wg_rows": 128, "block_n": 192, "stages": 4, "early_bias": False, "cluster": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and the fields of MatmulSm90 that it replaces."""

    call: Any
    blocks: dict[str, Any]


def _of(name: str, **blocks: Any) -> Case:
    return Case(testing_matmul.HOPPER[name], blocks)


EPILOGUE = {"early_bias": True, "short_activation": True}
CASES = {
    "pingpong_edges": _of("edges", **PINGPONG, **EPILOGUE),
    "pingpong_epilogue": _of("epilogue", **PINGPONG, **EPILOGUE),
    "pingpong_gated": _of("gated", **PINGPONG, **EPILOGUE),
    "pingpong_mlp": Case(mlp.HOPPER["plain"], PINGPONG),
    # Parts of the operands of a derivative straddle stages.
    "narrow_mlp": Case(mlp.HOPPER["gated"], {"block_n": 192}),
    "small_mlp": Case(mlp.HOPPER["gated"], {"block_n": 64, "stages": 8}),
    "three_warpgroups_mlp": Case(
        mlp.HOPPER["plain"], {"block_n": 128, "compute_wgs": 3, "pingpong": False, "wg_rows": 64}
    ),
    "tall_mlp": Case(mlp.HOPPER["gated"], TALL),
    "tall_together_mlp": Case(mlp.HOPPER["plain"], TALL | {"pingpong": False}),
    "tall_float32_out": _of("float32_out", **TALL),
    "tall_gated": _of("gated", **TALL),
    "tall_together": _of("epilogue", **TALL | EPILOGUE | {"pingpong": False}),
    "tall_transposed": _of("transposed", **TALL),
    "wide_edges": _of("edges", **WIDE),
    "wide_gated": _of("gated", **WIDE, short_activation=True),
    "wide_gated_transposed": _of("gated_transposed", **WIDE),
    "wide_epilogue": _of("epilogue", **WIDE, short_activation=True),
    "wide_float32_out": _of("float32_out", **WIDE),
    "wide_transposed": _of("transposed", **WIDE),
}
# For a GPU: many tiles.
GPU = {
    f"{name}_{call}": Case(testing_matmul.GPU[call], blocks)
    for name, blocks in {
        "pingpong": PINGPONG | EPILOGUE,
        "tall": TALL | EPILOGUE,
        "early": EPILOGUE,
        "wide": WIDE,
    }.items()
    for call in ("many", "many_gated")
}


@contextlib.contextmanager
def replaced(blocks: dict[str, Any]) -> Iterator[None]:
    """Inside, matmuls are planned with other blocks in all rows of the Hopper matmul."""
    of_hopper = lambda row: row.implementation == "mosaic_gpu" and row.bits != 8
    rows = tuple(
        dataclasses.replace(row, config=dataclasses.replace(row.config, **blocks)) if of_hopper(row) else row
        for row in SM90.matmul
    )
    with block_specs.replaced_tables((9, 0), matmul=rows):
        yield


def errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """The largest error of each result, and its bound."""
    cases = mlp if isinstance(case.call, mlp.Case) else testing_matmul
    with replaced(case.blocks):
        return cases.errors_by(case.call, implementation)
