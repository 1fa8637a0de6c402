"""One case of each op: `make test-unit`, which runs in less than a minute while you edit.

In JAX a case of `jax-kernels check`, against float64; through the bridge a random call, against its definition.
"""

import pytest

import jax_kernels
from jax_kernels import bridge
from jax_kernels.cli.check import QUICK, SUITES, run_case
from jax_kernels.cli.ops import OPS
from tests.support.random import calls, tensors
from tests.support.random.draws import SmallDraw, check
from tests.support.random.examples import definition

pytestmark = pytest.mark.unit
# The kinds of random calls that the bridge runs here, each with the first seed that draws a call of every op.
KINDS = tuple(calls.KINDS)


@pytest.mark.parametrize("op", SUITES)
def test_jax(op, no_interpret):
    """The first quick case by XLA. An op without quick cases has its first case."""
    (name, *_) = QUICK.get(op) or SUITES[op].cases
    result = run_case(op, name, SUITES[op].cases[name], "xla")
    assert result.passed, result
    assert result.errors or result.skipped


@pytest.mark.parametrize("kind", KINDS)
def test_bridge(kind):
    call = calls.KINDS[kind](SmallDraw(2, KINDS.index(kind)))
    made = tensors.made(call, SmallDraw(1), "cpu")
    check(call, tensors.results(call, made), definition(call, "cpu"))


def test_every_op_has_a_case():
    assert set(OPS) <= set(SUITES)
    assert all(hasattr(bridge, name) for name in OPS if hasattr(jax_kernels, name))
