"""Random calls of the bridge: in any memory layout, results and PyTorch's gradients equal XLA's in float32.

JAX_KERNELS_EXAMPLES=200 draws 200 calls of each kind. A call is drawn again by its number::

    JAX_KERNELS_EXAMPLES=200 python -m pytest -m gpu tests/bridge/test_random_calls.py -n 12
"""

import os

import jax
import pytest
import torch

from tests.support.random import calls as random_calls
from tests.support.random import draws as random_draws
from tests.support.random import tensors as random_tensors

EXAMPLES = int(os.environ.get("JAX_KERNELS_EXAMPLES", "0"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(EXAMPLES or 6))
@pytest.mark.parametrize("kind", random_calls.KINDS)
def test_on_a_gpu(kind, number):
    """On a stream of its own, with free memory that is not zero. The second call is a cached call."""
    call, layout = random_calls.drawn(kind, number), random_draws.Draw(number, 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        made = random_tensors.made(call, layout, "cuda")
        for _ in range(2):
            random_tensors.poison()
            random_draws.check(call, random_tensors.results(call, made))
    jax.clear_caches()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, EXAMPLES or 4))]
)
@pytest.mark.parametrize("kind", random_calls.KINDS)
def test_on_a_cpu(kind, number):
    call = random_calls.drawn(kind, number)
    made = random_tensors.made(call, random_draws.Draw(number, 1), "cpu")
    random_draws.check(call, random_tensors.results(call, made))


def test_wrong_result_is_found():
    call = random_calls.drawn("norms", 1)
    found = random_tensors.results(call, random_tensors.made(call, random_draws.Draw(1), "cpu"))
    with pytest.raises(AssertionError, match="d_x"):
        random_draws.check(call, {name: 1.1 * x if name == "d_x" else x for name, x in found.items()})
