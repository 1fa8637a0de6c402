"""jax_kernels.tune and benchmark_implementations on a GPU, in device time."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_kernels
from jax_kernels import benchmark_implementations, explain, tune
from jax_kernels.tuned import cache

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.usefixtures("no_interpret")]


def random(*shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.float32).astype(dtype)


CALLS = {
    "attention": lambda: (
        functools.partial(jax_kernels.flash_attention, is_causal=True),
        (random(2, 1024, 8, 64),) * 3,
    ),
    "decoding": lambda: (jax_kernels.decode_attention, (random(8, 1, 8, 64), *[random(8, 2048, 8, 64)] * 2)),
    "matmul": lambda: (
        functools.partial(jax_kernels.matmul, activation="gelu"),
        (random(1024, 512), random(512, 1024)),
    ),
    "norm": lambda: (jax_kernels.rms_norm, (random(4096, 1024), random(1024))),
}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_LOADED", {})


@pytest.mark.parametrize("name", CALLS)
def test_tuning(name):
    """The winner is at least as fast as the untuned call, its results agree, and a new process finds it."""
    op, args = CALLS[name]()
    want = op(*args)
    with tune(seconds=0.01) as results:
        got = op(*args)
    (result,) = results
    print(result, *result.failed.items(), sep="\n")
    assert result.winner is not None, result.reason
    assert result.winner.timer == "cupti"
    assert result.winner.of(result.winner.untuned) is not None
    assert not [text for text, reason in result.failed.items() if "differ from" in reason]
    error = jnp.linalg.norm((got - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
    assert error < 0.02
    cache._LOADED.clear()
    plan = explain(op, *args)
    assert plan.implementation == result.winner.fastest
    assert plan.tuned.ms <= plan.tuned.untuned_ms
    assert "tuned on " in str(plan)


def test_traced_calls():
    """A training step under jit and grad: the calls are timed after the block."""
    x, w = random(2048, 512), random(512, 512)
    loss = lambda x, w: jax_kernels.matmul(x, w, activation="silu").astype(jnp.float32).sum()
    with tune(seconds=0.01) as results:
        jax.jit(jax.grad(loss, (0, 1)))(x, w)
        assert results == []
    assert len(results) == 3
    assert all(result.winner is not None or "only candidate" in result.reason for result in results)


@pytest.mark.parametrize("gradients", [False, True])
def test_times_of_implementations(gradients):
    op, args = CALLS["attention"]()
    rows = benchmark_implementations(op, *args, gradients=gradients, seconds=0.05)
    timed = [row for row in rows if row.ms is not None]
    assert {row.timer for row in timed} == {"cupti"}
    assert {"xla", explain(op, *args).implementation} <= {row.implementation for row in timed}
    assert [row.ms for row in timed] == sorted(row.ms for row in timed)
