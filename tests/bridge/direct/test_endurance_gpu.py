"""Thousands of calls over changing shapes, streams and threads: no wrong result, no growth, and a clean end."""

import json
import os

import pytest
import torch

from tests.support.processes import endurance
from tests.support.processes.python import done_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(900),
]
LONG = os.environ.get("JAX_KERNELS_LONG_TESTS") == "1"


@pytest.mark.parametrize("calls", [3_000, pytest.param(100_000, marks=pytest.mark.skipif(not LONG, reason="long"))])
def test_many_calls(calls):
    done = done_by(endurance.__file__, str(calls), "800", limit=880)
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["errors"]
    assert (found["calls"], found["wrong"]) == (calls, 0)
    before, after = found["before"], found["after"]
    assert after["torch"] <= before["torch"] + 2**20
    assert after["jax"] <= before["jax"] + 2**20
    assert after["threads"] <= before["threads"]
    assert after["process"] <= before["process"] + 2**26
