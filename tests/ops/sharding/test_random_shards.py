"""Random calls under jit with arrays sharded over four devices, on meshes with Auto axes and with Explicit axes.

JAX_KERNELS_EXAMPLES=200 draws 200 calls of each kind. A call is drawn again by its kind and number::

    JAX_KERNELS_EXAMPLES=200 python -m pytest -m gpu tests/ops/sharding/test_random_shards.py
"""

import os

import jax
import pytest

from tests.support.processes import cpu_devices, forked
from tests.support.random import calls as random_calls
from tests.support.random import draws as random_draws
from tests.support.random import shards as random_shards
from tests.tools import compile_case

EXAMPLES = int(os.environ.get("JAX_KERNELS_EXAMPLES", "0"))
GPUS = jax.device_count() if jax.default_backend() == "gpu" else 0
# On CPUs some calls run plain JAX code, which must state the sharding of its results on Explicit axes.
QUICK = ["attention-1", "attention-7", "products-0", "eight_bits-3", "norms-7"]


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 4, reason=f"needs four NVIDIA GPUs, found {GPUS}")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(EXAMPLES or 3))
@pytest.mark.parametrize("kind", random_calls.KINDS)
def test_on_gpus(kind, number):
    call, draw = random_shards.drawn(f"{kind}-{number}")
    random_draws.check(call, random_shards.results(call, draw, jax.devices()))
    jax.clear_caches()


@pytest.mark.timeout(220)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        *(
            pytest.param([f"{kind}-{number}" for number in range(EXAMPLES or 4)], id=kind, marks=pytest.mark.slow)
            for kind in random_calls.KINDS
        ),
    ],
)
def test_on_cpus(names):
    limit = 200 + 10 * EXAMPLES
    assert cpu_devices.lines_of(random_shards.__file__, "cpu", *names, devices=4, limit=limit) == names


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.timeout(compile_case.TIMEOUT + 20 * EXAMPLES + 30)
@pytest.mark.parametrize("kind", random_calls.KINDS)
def test_random_shards_compile(kind):
    names = [f"{kind}-{number}" for number in range(EXAMPLES or 4)]
    done = forked.run(random_shards.__file__, "h200", *names, env={}, timeout=compile_case.TIMEOUT + 20 * EXAMPLES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == names
