"""Random calls of attention with a sequence sharded over devices.

The calls of ring_attention have every layout and strategy, masks, biases and functions of scores.
JAX_KERNELS_EXAMPLES=200 draws 200 calls of each kind. A call is drawn again by its number and the number of devices::

    JAX_KERNELS_EXAMPLES=200 python -m pytest -m gpu tests/ops/ring/test_random_rings.py
"""

import os

import jax
import pytest

from tests.support.processes import cpu_devices, forked
from tests.support.random import draws as random_draws
from tests.support.random import rings as random_rings
from tests.tools import compile_case

EXAMPLES = int(os.environ.get("JAX_KERNELS_EXAMPLES", "0"))
GPUS = jax.device_count() if jax.default_backend() == "gpu" else 0


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"needs two NVIDIA GPUs for a ring, found {GPUS}")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(EXAMPLES or 10))
@pytest.mark.parametrize("kind", random_rings.KINDS)
def test_on_gpus(kind, number):
    random_draws.check(random_rings.KINDS[kind](number, min(GPUS, 4)))
    jax.clear_caches()


@pytest.mark.timeout(120 + 20 * EXAMPLES)
def test_on_cpus():
    names = [f"{kind}-{number}" for kind in random_rings.KINDS for number in range(EXAMPLES or 2)]
    limit = 100 + 20 * EXAMPLES
    assert cpu_devices.lines_of(random_rings.__file__, "cpu", *names, devices=4, limit=limit) == names


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
def test_padded_sizes_compile():
    """One call has a head_dim that is no multiple of 64, the other a device's tokens in no multiple of 8."""
    padded, odd = random_rings.drawn(5), random_rings.drawn(33)
    assert padded.arrays["query"].shape[3] % 64 != 0
    assert odd.arrays["query"].shape[1] // odd.devices % 8 != 0
    assert all(call.options["strategy"] in ("ring", "auto") for call in (padded, odd))
    done = forked.run(random_rings.__file__, "h200", "ring-5", "ring-33", env={}, timeout=compile_case.TIMEOUT)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.timeout(compile_case.TIMEOUT + 20 * EXAMPLES + 30)
@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("kind", random_rings.KINDS)
def test_random_rings_compile(kind, gpu):
    names = [f"{kind}-{number}" for number in range(EXAMPLES or 6)]
    done = forked.run(random_rings.__file__, gpu, *names, env={}, timeout=compile_case.TIMEOUT + 20 * EXAMPLES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == names
