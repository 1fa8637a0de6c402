"""Functions whose values change between calls: each call reads the values of its time, whatever is cached."""

import functools

import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge.translate import snapshots

X, W = (torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
FACTOR = [2.0]


class Scaled:
    """A function with an attribute that it reads."""

    factor = 2.0

    def __call__(self, x, *indices):
        return x * self.factor


class Method:
    """An object with a method that reads an attribute."""

    factor = 2.0

    def scaled(self, x, *indices):
        return x * self.factor


def _closure():
    factor = 2.0

    def scaled(x, *indices):
        return x * factor

    def change():
        nonlocal factor
        factor = 5.0

    return scaled, change


def _dict():
    table = {"factor": 2.0}
    return lambda x, *indices: x * table["factor"], lambda: table.update(factor=5.0)


def _list():
    own = [*FACTOR]
    return lambda x, *indices: x * own[0], lambda: own.__setitem__(0, 5.0)


def _default():
    def scaled(x, *indices, factor=2.0):
        return x * factor

    return scaled, lambda: setattr(scaled, "__kwdefaults__", {"factor": 5.0})


def _object():
    made = Scaled()
    return made, lambda: setattr(made, "factor", 5.0)


def _method():
    made = Method()
    return made.scaled, lambda: setattr(made, "factor", 5.0)


FUNCTIONS = [_closure, _dict, _list, _default, _object, _method]


def _module():
    made = torch.nn.LeakyReLU(0.1)
    return made, lambda: setattr(made, "negative_slope", 0.9)


def _sequence():
    made = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.LeakyReLU(0.1))
    return made, lambda: made.__setitem__(0, torch.nn.SiLU())


def _hook():
    made = torch.nn.GELU()
    return made, lambda: made.register_forward_hook(lambda module, args, out: 2.0 * out)


def _partial():
    made = functools.partial(torch.nn.functional.leaky_relu, negative_slope=0.1)
    return made, lambda: made.keywords.update(negative_slope=0.9)


ACTIVATIONS = [*FUNCTIONS, _module, _sequence, _hook, _partial]
NAME = lambda make: make.__name__.strip("_")


@pytest.mark.parametrize("make", ACTIVATIONS, ids=NAME)
def test_changed_activation(make):
    activation, change = make()
    for _ in range(2):
        for x in (X, X[:2]):  # a cached call, and a call that is traced again
            for _ in range(2):
                got = bridge.linear(x, W, activation=activation)
                torch.testing.assert_close(got, activation(x @ W.T), rtol=1e-5, atol=1e-5)
        change()


@pytest.mark.parametrize("make", [_closure, _module, _object], ids=NAME)
def test_twin_of_a_changed_activation(make):
    """An equal function, made after the first one has changed, is traced with its own values."""
    first, change = make()
    bridge.linear(X, W, activation=first)
    change()
    second, _ = make()
    x = X.repeat(3, 1)  # another shape
    torch.testing.assert_close(bridge.linear(x, W, activation=second), second(x @ W.T), rtol=1e-5, atol=1e-5)


def _block_sparse(query, key, value, **options):
    return bridge.block_sparse_attention(query, key, value, torch.ones(1, 1, dtype=torch.bool), **options)


@pytest.mark.parametrize("op", [bridge.flash_attention, _block_sparse])
@pytest.mark.parametrize("make", FUNCTIONS, ids=NAME)
def test_changed_score_mod(make, op):
    query, key, value = torch.randn(3, 1, 8, 2, 8, generator=torch.Generator().manual_seed(0))
    score_mod, change = make()
    for factor in (2.0, 5.0):
        want = op(factor * query, key, value)
        for _ in range(2):
            torch.testing.assert_close(op(query, key, value, score_mod=score_mod), want, rtol=1e-5, atol=1e-5)
        change()


def test_mask_of_a_changed_function():
    """A mask that is made again from a function has the function's current values."""
    limit = {"window": 1}
    near = lambda b, h, q, k: q - k < limit["window"]
    query, key, value = torch.randn(3, 1, 8, 2, 8, generator=torch.Generator().manual_seed(0))
    for window in (1, 4):
        limit["window"] = window
        mask = bridge.masks.from_function(near)
        want = bridge.flash_attention(query, key, value, mask=bridge.masks.sliding_window(window - 1, None))
        torch.testing.assert_close(bridge.flash_attention(query, key, value, mask=mask), want)


def test_equal_snapshots():
    """Calls with equal functions find one cached call; functions that read tensors are their own snapshots."""
    for make in ACTIVATIONS:
        function, change = make()
        before = snapshots.snapshot(function)
        assert snapshots.snapshot(function) is before
        change()
        assert snapshots.snapshot(function) is not before
    reads = lambda x: x * X[0, 0]
    assert snapshots.snapshot(reads) is reads


def test_twin_whose_helper_is_another(monkeypatch):
    """A function and its helper have the values of their time, also if the first helper changes later."""
    helper, change = _closure()
    monkeypatch.setitem(globals(), "HELPER", helper)
    calls_helper = lambda x: HELPER(x)  # noqa: F821
    torch.testing.assert_close(bridge.matmul(X, W.T, activation=calls_helper), 2 * (X @ W.T), rtol=1e-5, atol=1e-5)
    change()
    monkeypatch.setitem(globals(), "HELPER", _closure()[0])
    got = bridge.matmul(X[:2], W.T, activation=calls_helper)
    torch.testing.assert_close(got, 2 * (X[:2] @ W.T), rtol=1e-5, atol=1e-5)


def test_functions_of_libraries_are_their_own_snapshots():
    for function in (torch.nn.functional.silu, torch.relu, torch.nn.functional.hardswish):
        assert snapshots.snapshot(function) is function

    @functools.wraps(torch.nn.functional.silu)  # it has the library's name, but reads a value of the caller's
    def wrapped(x):
        return torch.nn.functional.silu(x) * FACTOR[0]

    before = snapshots.snapshot(wrapped)
    FACTOR[0] = 3.0
    try:
        assert snapshots.snapshot(wrapped) is not before
    finally:
        FACTOR[0] = 2.0


def test_a_function_with_the_name_of_a_librarys_function():
    """functools.wraps gives a score_mod PyTorch's module name; its tensors still get gradients."""
    table = torch.tensor([2.0, 3.0], requires_grad=True)

    @functools.wraps(torch.nn.functional.silu)
    def wrapped(score, b, h, q, k):
        return score * table[h]

    query, key, value = torch.randn(3, 1, 8, 2, 8, generator=torch.Generator().manual_seed(0))
    out = bridge.flash_attention(query, key, value, score_mod=wrapped)
    want = bridge.flash_attention(query * table.detach()[:, None], key, value)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert torch.autograd.grad(out.square().sum(), table)[0].abs().min() > 0
