"""The bridge's caches: how large they grow, and that what they drop is made again."""

import torch

from jax_kernels import bridge
from jax_kernels.bridge import once as module
from jax_kernels.bridge import plans


def test_old_plans_are_dropped_and_made_again(monkeypatch):
    monkeypatch.setattr(plans, "_MOST", 4)
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
        assert bridge.cache_info().plans == 4


def test_a_value_that_was_forgotten_is_made_again(monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    made = []
    double = module.once(lambda x: made.append(x) or 2 * x)
    module._ALL.remove(double)
    assert [double(x) for x in (1, 2, 3, 4, 4, 3)] == [2, 4, 6, 8, 8, 6]
    assert made == [1, 2, 3, 4]
    assert len(double) == 3
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
    assert before.plans > 0
    bridge.clear_cache()
    after = bridge.cache_info()
    assert (after.plans, after.chains, after.known_calls) == (0, 0, 0)
    assert after.functions == before.functions
    (gradient,) = torch.autograd.grad(out.sum(), x)  # of a call before
    torch.testing.assert_close(gradient, 3 * x.detach() ** 2)
    torch.autograd.grad(attended.sum(), query)
    torch.testing.assert_close(compiled(x), 2 * x.detach() ** 3, check_stride=False)
    torch.testing.assert_close(bridge.flash_attention(query, query, query), attended)
