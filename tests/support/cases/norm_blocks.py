"""Cases of the Hopper norms with rows split over CTAs, in blocks of no block spec row, for interpreters/kernels.py."""

import contextlib
import dataclasses
from collections.abc import Iterator

from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.normalization_specs import NormRow, NormSm90
from jax_kernels.pallas.block_specs.sm80 import SM80
from jax_kernels.pallas.block_specs.sm90 import SM90
from jax_kernels.testing import normalization as testing_normalization
from jax_kernels.testing.normalization import Case as Call


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and the blocks of its forward."""

    call: Call
    forward: NormSm90


def _shared(ctas: int, row_warps: int = 4, turns: int = 2, stages: int = 2) -> NormSm90:
    return NormSm90(row_warps=row_warps, warpgroups=4, stages=stages, turns=turns, cluster=ctas)


CASES = {
    "two": Case(Call((7, 1024), drift=8.0, has_residual=True), _shared(2)),
    "rms_two": Case(Call((5, 2048), "rms_norm", weights="bfloat16"), _shared(2, row_warps=8, stages=3)),
    "four": Case(Call((9, 4096), centre=100.0, weights="bfloat16"), _shared(4, row_warps=8, turns=3)),
    "long": Case(Call((5, 32768), drift=8.0), _shared(2, row_warps=16)),
    "rms_long": Case(Call((3, 65536), "rms_norm", has_residual=True, dtype="float16"), _shared(4, row_warps=16)),
    "not_shared": Case(Call((4, 1152)), _shared(2)),
}


@contextlib.contextmanager
def replaced(forward: NormSm90) -> Iterator[None]:
    """Inside, Hopper's norms are planned with these blocks, and with Triton's backward."""
    backward = next(row.backward for row in SM80.norm if row.columns is None)
    row = NormRow(implementation="mosaic_gpu", columns=None, forward=forward, backward=backward)
    with block_specs.replaced_tables((9, 0), norm=(row, *SM90.norm)):
        yield


def errors_by(case: Case, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(error, bound) of each result; the error is the largest relative error."""
    with replaced(case.forward):
        return testing_normalization.errors_by(case.call, implementation)
