"""The bridge's caches: their largest sizes, and that dropped entries are made again."""

import gc

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from jax_kernels import bridge
from jax_kernels.bridge.interop import keyed_cache as module
from jax_kernels.bridge.jax_functions import store
from jax_kernels.bridge.jax_functions.programs import PROGRAMS
from jax_kernels.bridge.operators import call_cache


def test_old_programs_are_dropped_and_rebuilt(monkeypatch):
    monkeypatch.setattr(store, "MOST", 4)
    square = bridge.from_jax(lambda x: x * x)
    compiled = torch.compile(lambda x: square(x) + 1, backend="aot_eager", fullgraph=True)
    given = torch.arange(3.0, requires_grad=True)
    mapped = torch.func.vmap(square, in_dims=0)
    want = given.detach() ** 2
    for _ in range(2):
        torch.testing.assert_close(compiled(given), want + 1)
        torch.testing.assert_close(torch.autograd.grad(compiled(given).sum(), given)[0], 2 * given.detach())
        torch.testing.assert_close(mapped(given.detach().expand(2, 3)), want.expand(2, 3))
        for size in range(4, 12):
            square(torch.ones(size))
        assert bridge.cache_info().programs == 4


def test_old_rebuilders_are_dropped_except_for_graphs(monkeypatch):
    """A call keeps its backward when its record is dropped. Graphs keep their programs, also of mapped calls."""
    bridge.clear_cache()
    graphs = bridge.cache_info().program_records
    monkeypatch.setattr(store, "MOST", 4)
    square = bridge.from_jax(lambda x: x * x)
    given = torch.arange(3.0, requires_grad=True)
    values = given.detach()
    out, mapped = square(given), torch.func.vmap(torch.func.grad(lambda x: square(x).sum()))
    others = torch.arange(2.0)
    traced = make_fx(square)(others), make_fx(mapped)(values.expand(2, 3))
    compiled = torch.compile(lambda x: square(x) + 1, backend="aot_eager", fullgraph=True)
    mask = bridge.masks.causal()
    by_mask = bridge.from_jax(lambda x, mask: x * mask.to_dense(3, 3)[0, 0, 1])
    masked = torch.compile(lambda x: by_mask(x, mask), backend="aot_eager", fullgraph=True)
    compiled(values), masked(values)
    of_graphs = sum(map(PROGRAMS.is_pinned, PROGRAMS.names()))
    for _ in range(2):
        for size in range(4, 12):
            square(torch.ones(size, requires_grad=True)).sum().backward()
        assert bridge.cache_info().program_records == 4 + of_graphs > graphs + 4
        module.clear()
        call_cache.clear()
        gc.collect()
        alive = [program for program in PROGRAMS.alive().values() if program.request.function == square._op._name]
        assert len(alive) == 4 + 1  # and that of `out`
        del alive
        torch.testing.assert_close(compiled(values), values**2 + 1)
        torch.testing.assert_close(masked(values), torch.tensor([0.0, 1.0, 0.0]))
        torch.testing.assert_close(traced[0](others), others**2)
        torch.testing.assert_close(traced[1](values.expand(2, 3)), 2 * values.expand(2, 3))
        torch.testing.assert_close(mapped(values.expand(2, 3)), 2 * values.expand(2, 3))
    torch.testing.assert_close(torch.autograd.grad(out.sum(), given)[0], 2 * values)


def test_jvp_functions_are_dropped_with_their_program():
    scale = bridge.from_jax(lambda x, *, by: x * x * by)
    x, functions = torch.arange(3.0), bridge.cache_info().functions
    for by in range(3):
        _, tangent = torch.func.jvp(lambda x, by=by: scale(x, by=by), (x,), (torch.ones(3),))
        torch.testing.assert_close(tangent, 2 * by * x)
    assert bridge.cache_info().functions == functions
    assert bridge.cache_info().tangents >= 3
    bridge.clear_cache()
    gc.collect()
    assert bridge.cache_info().tangents == 0


def test_dropped_value_is_rebuilt(monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    made = []
    double = module.memoize(lambda x: made.append(x) or 2 * x)
    assert [double(x) for x in (1, 2, 3, 4, 4, 3)] == [2, 4, 6, 8, 8, 6]
    assert made == [1, 2, 3, 4]
    assert double.cache_info().currsize == 3
    assert double(1) == 2
    assert made == [1, 2, 3, 4, 1]


def test_clear_cache():
    x = torch.arange(4.0, requires_grad=True)
    cube = bridge.from_jax(lambda x: x**3)
    query = torch.randn(1, 8, 2, 16, requires_grad=True)
    out, attended = cube(x), bridge.flash_attention(query, query, query)
    compiled = torch.compile(lambda x: cube(x) * 2, backend="aot_eager", fullgraph=True)
    compiled(x)
    before = bridge.cache_info()
    assert before.programs > 0
    bridge.clear_cache()
    after = bridge.cache_info()
    assert (after.programs, after.chains, after.cached_calls) == (0, 0, 0)
    assert after.functions == before.functions
    (gradient,) = torch.autograd.grad(out.sum(), x)  # of an earlier call
    torch.testing.assert_close(gradient, 3 * x.detach() ** 2)
    torch.autograd.grad(attended.sum(), query)
    torch.testing.assert_close(compiled(x), 2 * x.detach() ** 3, check_stride=False)
    torch.testing.assert_close(bridge.flash_attention(query, query, query), attended)
