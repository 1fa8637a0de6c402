"""benchmark_implementations: the time of each implementation, or the reason against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kernels
from jax_kernels import benchmark_implementations, masks
from jax_kernels.tuning import timers

QUERY = jax.random.normal(jax.random.key(0), (1, 32, 2, 16))
READINGS = {"xla": [2.0, 2.0, 2.2, 1.8, 9.0], "triton": [1.0, 1.0, 1.0, 1.0, 1.0]}


@pytest.fixture
def read(monkeypatch):
    """A fake timer, which takes the readings in turn. Returns a list of (implementation, direction) of the readings."""
    found = []

    def fake(program, calls):
        program.call()
        found.append((program.implementation, program.direction))
        return READINGS[program.implementation][found.count(found[-1]) - 1]

    monkeypatch.setattr(timers, "choose", lambda: timers.Timer(name="fake", read=fake))
    return found


@pytest.mark.triton
def test_the_table(read, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    rows = benchmark_implementations(jax_kernels.rms_norm, jnp.ones((4, 128), jnp.float32))
    assert [row.implementation for row in rows] == ["triton", "xla", "mosaic_gpu"]
    fast, slow, refused = rows
    assert (fast.ms, fast.spread, fast.timer, fast.reason) == (1.0, 0.0, "fake", None)
    assert (slow.ms, slow.spread) == (2.0, pytest.approx(0.1))
    assert (fast.plan.implementation, slow.plan.implementation) == ("triton", "xla")
    assert (refused.ms, refused.plan, refused.timer) == (None, None, None)
    assert refused.reason.startswith("its pipelines in shared memory are for rows of bfloat16")
    assert str(slow) == "xla: 2 ms (spread 10.0%, fake timer)"
    assert str(refused) == f"mosaic_gpu: {refused.reason}"
    assert read == [("xla", "forward"), ("triton", "forward")] * 5


CALLS = {
    "mask": lambda: (jax_kernels.flash_attention, (QUERY,) * 3, {"mask": masks.sliding_window(3, 0)}),
    "offset": lambda: (jax_kernels.flash_attention, (QUERY,) * 3, {"q_offset": np.int32(2), "is_causal": True}),
    "blocks": lambda: (
        jax_kernels.block_sparse_attention,
        (QUERY, QUERY, QUERY, np.ones((2, 2), bool)),
        {"block_size": 16},
    ),
    "dilated": lambda: (
        jax_kernels.dilated_attention,
        (QUERY,) * 3,
        {"segment_lengths": (16,), "dilation_rates": (1,)},
    ),
    "low_bits": lambda: (
        jax_kernels.matmul,
        (jnp.ones((4, 16)), jax_kernels.quantize(jnp.ones((16, 32)), "int8")),
        {},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_kinds_of_arguments(name, read, no_interpret):
    op, args, kwargs = CALLS[name]()
    rows = benchmark_implementations(op, *args, **kwargs)
    assert [row.implementation for row in rows if row.ms is not None] == ["xla"]
    assert all(row.reason for row in rows[1:])


def test_gradients_of_a_call_with_low_bit_weights(read, no_interpret):
    weights = jax_kernels.quantize(jnp.ones((32, 16)), "int8")
    timed, *_ = benchmark_implementations(jax_kernels.matmul, jnp.ones((4, 32)), weights, gradients=True)
    assert timed.reason is None
    assert set(read) == {("xla", "gradients")}


def test_gradients(read, no_interpret):
    call = functools.partial(jax_kernels.flash_attention, is_causal=True)
    rows = benchmark_implementations(call, QUERY, QUERY, QUERY, gradients=True)
    assert set(read) == {("xla", "gradients")}
    assert rows[0].plan.why == "asked for by name"


def test_an_implementation_that_fails(monkeypatch, no_interpret):
    """It has a plan, and the reason."""

    def fails(*args):
        raise RuntimeError("out of memory\nin detail")

    monkeypatch.setattr("jax_kernels.tuning.benchmark._built", fails)
    row = benchmark_implementations(jax_kernels.flash_attention, QUERY, QUERY, QUERY)[0]
    assert (row.ms, row.timer, row.reason) == (None, None, "RuntimeError: out of memory")
    assert row.plan.implementation == row.implementation == "xla"


def test_the_host_timer(no_interpret):
    rows = benchmark_implementations(jax_kernels.layer_norm, jnp.ones((4, 16)), seconds=0.01)
    assert rows[0].timer == "host"
    assert 0 < rows[0].ms < 1e4


def test_wrong_arguments():
    for seconds in (0, float("inf")):
        with pytest.raises(ValueError, match=f"seconds: got {seconds}"):
            benchmark_implementations(jax_kernels.flash_attention, QUERY, QUERY, QUERY, seconds=seconds)
    with pytest.raises(ValueError, match="implementation: got 'xla', want none"):
        benchmark_implementations(jax_kernels.flash_attention, QUERY, QUERY, QUERY, implementation="xla")
    with pytest.raises(TypeError, match="no argument `implementation`"):
        benchmark_implementations(jnp.sin, QUERY)
    with pytest.raises(ValueError, match="gradients: got True"):
        benchmark_implementations(jax_kernels.flash_attention, gradients=True)
    with pytest.raises(ValueError, match="key: got 3 heads"):
        benchmark_implementations(jax_kernels.flash_attention, QUERY, *[jnp.ones((1, 4, 3, 16))] * 2)
    with pytest.raises(TypeError, match="want an op of this library"):
        benchmark_implementations(lambda x, implementation=None: x, QUERY)
