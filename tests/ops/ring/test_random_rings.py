"""Random calls of ring_attention are right: in every layout and strategy, under masks, biases and functions of scores.

JAX_KERNELS_EXAMPLES=200 draws that many. A call is drawn again by its number and the number of devices::

    JAX_KERNELS_EXAMPLES=200 python -m pytest -m gpu tests/ops/ring/test_random_rings.py
"""

import os

import cpu_devices
import jax
import pytest
import random_draws
import random_rings

EXAMPLES = int(os.environ.get("JAX_KERNELS_EXAMPLES", "0"))
GPUS = jax.device_count() if jax.default_backend() == "gpu" else 0


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"needs two NVIDIA GPUs for a ring, found {GPUS}")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(EXAMPLES or 10))
def test_on_gpus(number):
    random_draws.check(random_rings.drawn(number, min(GPUS, 4)))
    jax.clear_caches()


@pytest.mark.timeout(120 + 10 * EXAMPLES)
def test_on_cpus():
    numbers = [str(number) for number in range(EXAMPLES or 8)]
    limit = 100 + 10 * EXAMPLES
    assert cpu_devices.lines_of(random_rings.__file__, *numbers, devices=4, limit=limit) == numbers
