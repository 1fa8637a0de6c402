"""Calls from several threads, with equal shapes and different constants, do not disturb each other."""

import concurrent.futures
import dataclasses
import itertools
import os
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import bridge, masks
from jax_kernels.bridge.interop import keyed_cache
from jax_kernels.bridge.interop.keyed_cache import memoize, unique_name
from jax_kernels.bridge.jax_functions import programs as module

pytestmark = pytest.mark.timeout(300)


def together(*functions):
    """The results of the functions, each called in its own thread, all started at the same moment."""
    start = threading.Barrier(len(functions))
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda function: (start.wait(), function())[1], functions))


def test_first_calls_with_different_constants():
    x = torch.arange(1.0, 5.0)
    for _ in range(15):
        times = bridge.from_jax(lambda x, c: x * c)
        together(*(lambda c=c, times=times: times(x, c) for c in (1, 2, 3, 4)))
        for c in (1, 2, 3, 4):
            torch.testing.assert_close(times(x, c), x * c)


def test_first_calls_with_different_gradients():
    x, y = torch.arange(1.0, 5.0), torch.arange(2.0, 6.0)
    for _ in range(8):
        multiply = bridge.from_jax(lambda x, y: x * y)

        def one(needs_x, needs_y, multiply=multiply):
            given = x.clone().requires_grad_(needs_x), y.clone().requires_grad_(needs_y)
            multiply(*given).sum().backward()
            return [z.grad for z in given]

        for _ in range(2):
            results = together(*(lambda n=n: one(*n) for n in ((True, False), (False, True), (True, True))))
            assert [[g is not None for g in r] for r in results] == [[True, False], [False, True], [True, True]]
            for dx, dy in results:
                torch.testing.assert_close((dx, dy), (dx if dx is None else y, dy if dy is None else x))


@pytest.mark.usefixtures("no_programs")
def test_one_program_per_key():
    def slow(x):
        time.sleep(0.05)
        return jnp.sin(x)

    sine = bridge.from_jax(slow)
    before = len(module.PROGRAMS)
    together(*[lambda: sine(torch.ones(3))] * 4)
    assert len(module.PROGRAMS) == before + 1
    torch.func.vmap(sine)(torch.ones(2, 3))
    before = len(module.PROGRAMS)
    together(*[lambda: torch.func.vmap(sine)(torch.ones(5, 3))] * 4)
    assert len(module.PROGRAMS) == before + 1


def test_functions_made_in_threads_stay_apart():
    def make(factor):
        def scale(x):
            return x * factor

        return bridge.from_jax(scale)

    for _ in range(20):
        functions = together(*(lambda factor=factor: make(factor) for factor in range(8)))
        assert len(set(map(id, functions))) == 8
    assert [f(torch.ones(1)).item() for f in functions] == list(range(8))


def test_memoize_builds_once_and_names_are_unique():
    made = []

    @memoize
    def make(key):
        time.sleep(0.02)
        made.append(key)
        if key == "bad":
            raise ValueError(key)
        return object()

    assert len(set(together(*[lambda: make(1)] * 6))) == 1
    assert made == [1]
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            make("bad")
    assert made == [1, "bad", "bad"]
    names = together(*[lambda: [unique_name("x") for _ in range(500)]] * 4)
    assert len(set(itertools.chain(*names))) == 2000


def test_memoize_while_a_thread_clears():
    class Key:
        """A key whose hash drops all values, as another thread may at any time."""

        def __hash__(self):
            keyed_cache._FORGET[-1]()  # of `same`
            return 0

    same, key = memoize(lambda key: key), Key()
    assert same(key) is key


def test_compile_attention_makes_one_object():
    compiled = lambda: bridge.compile_attention("causal", 24, 16, num_heads=1, dtype=torch.float32, device="cpu")
    assert len(set(map(id, together(*[compiled] * 4)))) == 1


def test_mask_is_copied_once(monkeypatch):
    copies = []
    monkeypatch.setattr(bridge.jax_functions.mask_operands.dlpack, "jax_device", lambda device: "elsewhere")
    monkeypatch.setattr(
        bridge.jax_functions.mask_operands.jax, "device_put", lambda mask, target: copies.append(target) or mask
    )
    mask = masks.block_sparse(jnp.ones((2, 2), bool), 4)
    together(*[lambda: bridge.jax_functions.mask_operands.on_device(mask, torch.device("cpu"))] * 4)
    assert copies == ["elsewhere"]


@dataclasses.dataclass(frozen=True)
class Call:
    """A function of query, key, value, and a constant."""

    name: str
    function: object
    constants: tuple


BLOCKS = torch.ones(2, 2, dtype=torch.bool).tril()
KEEP = torch.ones(8, 8, dtype=torch.bool).tril()
MASKS = {n: masks.prefix(np.int32(n)) for n in (2, 5)}


def scored(factor):
    return lambda score, b, h, q, k: score * factor


MODS = {factor: scored(factor) for factor in (0.5, 2.0)}


def sdpa(*inputs, **options):
    return bridge.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), **options)


times = bridge.from_jax(lambda q, k, v, c: jnp.tanh(q * c) + k * v)
CALLS = [
    Call("flash", lambda *x, c: bridge.flash_attention(*x, is_causal=c), (True, False)),
    Call("scale", lambda *x, c: bridge.flash_attention(*x, scale=c), (0.1, 0.7)),
    Call("lse", lambda *x, c: bridge.flash_attention(*x, q_offset=c, is_causal=True, return_lse=True)[1], (0, 3)),
    Call("mask", lambda *x, c: bridge.flash_attention(*x, mask=MASKS[c]), (2, 5)),
    Call("score_mod", lambda *x, c: bridge.flash_attention(*x, score_mod=MODS[c]), (0.5, 2.0)),
    Call("block", lambda *x, c: bridge.block_sparse_attention(*x, BLOCKS, block_size=4, is_causal=c), (True, False)),
    Call("dynamic", lambda *x, c: bridge.dynamic_mask_attention(*x, KEEP, window=c), (2, 4)),
    Call(
        "dilated",
        lambda *x, c: bridge.dilated_attention(*x, segment_lengths=(4, 8), dilation_rates=(1, 2), is_causal=c),
        (True, False),
    ),
    Call("sdpa", lambda *x, c: sdpa(*x, is_causal=c), (True, False)),
    Call("from_jax", lambda *x, c: times(*x, c), (0.0, -0.0, 1, 1.0, 3.0)),
    Call("pooled", lambda *x, c: bridge.masks.pooled_scores(*x[:2], c) + 0 * x[2].sum(), (2, 4)),
]


def run(call, constant, inputs):
    """The result and the gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = call.function(*inputs, c=constant)
    return out.detach(), torch.autograd.grad(out.square().sum(), inputs)


def many_calls(threads, rounds):
    generator = torch.Generator().manual_seed(0)
    # No other test has this length, so that the first calls of all threads make the plans.
    inputs = torch.randn(3, 1, 8, 1, 6, generator=generator).unbind()
    chosen = [(call, constant) for call in CALLS for constant in call.constants]

    def work(number):
        results = []
        for index in range(rounds * len(chosen)):
            call, constant = chosen[(index + 3 * number) % len(chosen)]
            results.append((call, constant, run(call, constant, inputs)))
        return results

    found = list(itertools.chain(*together(*(lambda n=n: work(n) for n in range(threads)))))
    want = {(call.name, repr(constant)): run(call, constant, inputs) for call, constant in chosen}
    for call, constant, got in found:
        message = lambda m, call=call, constant=constant: f"{call.name}, {constant!r}: {m}"
        torch.testing.assert_close(got, want[call.name, repr(constant)], atol=1e-6, rtol=1e-5, msg=message)
    for call in CALLS:
        first, second, *_ = call.constants
        same = torch.equal(want[call.name, repr(first)][0], want[call.name, repr(second)][0])
        assert same == (call.name == "from_jax"), call.name
    return len(found)


def test_every_function_from_8_threads():
    assert many_calls(threads=8, rounds=3) == 600


@pytest.mark.skipif("JAX_KERNELS_LONG_TESTS" not in os.environ, reason="run by hand, with JAX_KERNELS_LONG_TESTS=1")
def test_every_function_from_8_threads_for_long():
    assert many_calls(threads=8, rounds=200) == 40_000
