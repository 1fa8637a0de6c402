"""Random calls: a GPU's kernels equal XLA in float32, and the kernels of every GPU compile.

JAX_KERNELS_EXAMPLES=200 draws 200 calls of each kind. A call is drawn again by its number::

    JAX_KERNELS_EXAMPLES=200 python -m pytest -m gpu tests/ops/test_random_calls.py -n 12
"""

import dataclasses
import os

import jax
import pytest

from tests.support.processes import forked
from tests.support.random import calls as random_calls
from tests.support.random import draws as random_draws
from tests.tools import compile_case

EXAMPLES = int(os.environ.get("JAX_KERNELS_EXAMPLES", "0"))


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(EXAMPLES or 6))
@pytest.mark.parametrize("kind", random_calls.KINDS)
def test_gpu_matches_xla_in_float32(kind, number):
    random_draws.check(random_calls.drawn(kind, number))
    jax.clear_caches()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", random_calls.KINDS)
def test_random_calls_are_right(kind):
    """XLA gives equal results in the call's dtype."""
    random_draws.check(random_calls.drawn(kind, 1))


def test_wrong_result_is_found():
    call = random_calls.drawn("norms", 1)
    wrong = dataclasses.replace(
        call, forward=lambda *given, **how: {k: x if how else 1.1 * x for k, x in call.forward(*given, **how).items()}
    )
    with pytest.raises(AssertionError, match="d_scale"):
        random_draws.check(wrong)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize(
    ("kind", "gpu"),
    [
        (kind, gpu)
        for kind in random_calls.KINDS
        for gpu in ("h200", "a100", "rtx4090")
        if (kind, gpu) != ("eight_bits", "a100")  # no 8-bit matmuls
    ],
)
def test_random_calls_compile(kind, gpu):
    """Each kind has its own process, as an instruction that the architecture lacks can end the process."""
    numbers = range(EXAMPLES or 6)
    done = forked.run(__file__, kind, gpu, *map(str, numbers), env={}, timeout=compile_case.TIMEOUT + 20 * EXAMPLES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(number) for number in numbers]


def main(kind: str, gpu: str, *numbers: str) -> None:
    def compile_for_gpu(call: random_draws.Call) -> None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call.given(call.dtype))
        compile_case.lower_and_compile(gpu, call.run, shapes)

    random_draws.check_all(numbers, lambda number: random_calls.drawn(kind, int(number)), compile_for_gpu)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
