"""No derivative is lost silently: each way to ask for it returns it, or raises an error that names the function."""

import itertools
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from jax_kernels import bridge, masks
from jax_kernels.bridge.interop import torch_internals
from tests.support.cases import tiers

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_dynamo")]


def tensor(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


QUERY, KEY, VALUE = tensor(1, 8, 2, 4), tensor(1, 8, 2, 4).flip(1), tensor(1, 8, 2, 4).flip(2)
BIAS, SINKS, FACTOR = tensor(8), tensor(2), tensor(8).flip(0)
BLOCKS = torch.ones(2, 2, dtype=torch.bool).tril()
MASK = masks.causal() | masks.prefix(3)
# Under a Mask of arrays, and under a tensor as a mask.
BLOCK_MASK, KEEP = masks.block_sparse(np.tri(2, dtype=bool), 4), torch.ones(8, 8, dtype=torch.bool).tril()

sine = bridge.from_jax(jnp.sin)
pair = bridge.from_jax(lambda x, y: {"first": jnp.exp(x) * y, "index": jnp.argmax(x), "second": [jnp.cos(x)]})


def half_precise(score, b, h, q, k):
    return score * (1 + h)


# (a function of one tensor, the tensor)
CASES = {
    "query": (lambda x: bridge.flash_attention(x, KEY, VALUE), QUERY),
    "same tensor": (lambda x: bridge.flash_attention(x, x, x, is_causal=True), QUERY),
    "lse": (lambda x: bridge.flash_attention(QUERY, x, VALUE, return_lse=True)[1], KEY),
    "out beside lse": (lambda x: bridge.flash_attention(QUERY, KEY, x, return_lse=True)[0], VALUE),
    "bias": (lambda x: bridge.flash_attention(QUERY, KEY, VALUE, bias=x), BIAS),
    "sinks": (lambda x: bridge.flash_attention(QUERY, KEY, VALUE, sinks=x), SINKS),
    "a bool mask": (lambda x: bridge.flash_attention(x, KEY, VALUE, mask=KEEP), QUERY),
    "sdpa": (lambda x: bridge.scaled_dot_product_attention(QUERY, KEY, VALUE, x), tensor(8, 8)[:2, :2]),
    "a score_mod": (lambda x: bridge.flash_attention(x, KEY, VALUE, score_mod=half_precise), QUERY),
    "block sparse": (lambda x: bridge.block_sparse_attention(x, KEY, VALUE, BLOCKS, block_size=4), QUERY),
    "dynamic mask": (lambda x: bridge.dynamic_mask_attention(QUERY, KEY, VALUE, KEEP, x), BIAS),
    "dilated": (
        lambda x: bridge.dilated_attention(x, KEY, VALUE, segment_lengths=(4, 8), dilation_rates=(1, 2)),
        QUERY,
    ),
    "from_jax": (sine, BIAS),
    "from_jax, several outputs": (lambda x: pair(x, FACTOR)["first"] * pair(x, FACTOR)["second"][0], BIAS),
}
WITH_MASKS = {
    "a Mask": (lambda x: bridge.flash_attention(x, KEY, VALUE, mask=MASK), QUERY),
    "a Mask of an array": (lambda x: bridge.flash_attention(x, KEY, VALUE, mask=BLOCK_MASK), QUERY),
}
ALL = CASES | WITH_MASKS


def total(function):
    return lambda x: function(x).sin().sum()


def of_eager_mode(function, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(function)(x), x)
    assert gradient.count_nonzero() > 0
    return gradient


def dual(function, x, requires_grad=False):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x.clone().requires_grad_(requires_grad), torch.ones_like(x)))


def dual_cotangent(function, x):
    x = x.clone().requires_grad_()
    out = function(x)
    with forward_ad.dual_level():
        torch.autograd.grad(out, x, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


FORWARD_MODE = {
    "dual": dual,
    "dual that requires a gradient": lambda f, x: dual(f, x, True),
    "dual, no_grad": lambda f, x: torch.no_grad()(dual)(f, x),
    "dual cotangent": dual_cotangent,
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "linearize": lambda f, x: linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(total(f))(x),
    "jvp of grad": lambda f, x: jvp(grad(total(f)), (x,), (x,)),
    "jvp of vmap": lambda f, x: jvp(vmap(f), (x.expand(2, *x.shape),), (x.expand(2, *x.shape),)),
}


REVERSE_ALONE = [name for name in ALL if not name.startswith("from_jax")]


@pytest.mark.parametrize(("case", "how"), tiers.pairs(REVERSE_ALONE, FORWARD_MODE, ("query", "dual")))
def test_forward_mode_raises(case, how):
    function, x = ALL[case]
    name = "(the gradient of )?(flash|block_sparse|dynamic_mask|dilated)_attention"
    with pytest.raises(NotImplementedError, match=f"^({name}): forward-mode differentiation is not supported"):
        FORWARD_MODE[how](function, x)


def in_torch(x, y):
    return torch.sin(x) * y.conj(), torch.argmax(x.real), [x @ y]


in_jax = bridge.from_jax(lambda x, y: (jnp.sin(x) * jnp.conj(y), jnp.argmax(x.real), [x @ y]))
X, Y = tensor(5), tensor(5).flip(0)
MASKED = masks.segments(np.arange(5)[None] // 2), torch.arange(5)[:, None] // 2 == torch.arange(5) // 2
under_mask = bridge.from_jax(lambda x, mask: jnp.where(mask.to_dense(5, 5)[0, 0], x[:, None] * x, 0.0))


def floats(function):
    """The results that have tangents, as a function of the same tensors."""

    def of(*x):
        first, _, (last,) = function(*x)
        return first, last

    return of


def tangents(function, x, y, *, requires_grad=False):
    x = x.clone().requires_grad_(requires_grad)
    with forward_ad.dual_level():
        outs = floats(function)(forward_ad.make_dual(x, y), y)
        found = [forward_ad.unpack_dual(out).tangent.detach() for out in outs]
    return [*found, *torch.autograd.grad(outs[0].sum(), x)] if requires_grad else found


# Derivatives of a function of two tensors.
PUSHED = {
    "dual": lambda f: tangents(f, X, Y),
    "dual that requires a gradient": lambda f: tangents(f, X, Y, requires_grad=True),
    "jvp": lambda f: jvp(floats(f), (X, Y), (Y, X)),
    "jvp of one": lambda f: jvp(lambda y: floats(f)(X, y), (Y,), (X,)),
    "jacfwd": lambda f: jacfwd(floats(f), (0, 1))(X, Y),
    "linearize": lambda f: linearize(floats(f), X, Y)[1](Y, X),
    "jvp of vmap": lambda f: jvp(
        vmap(floats(f), (0, None)), (torch.stack([X, Y]), Y), (torch.stack([Y, X]), X)
    ),
    "jacrev of jvp": lambda f: jacrev(lambda x: jvp(floats(f), (x, Y), (Y, X))[1])(X),
    "jacfwd twice": lambda f: jacfwd(jacfwd(lambda x: floats(f)(x, Y)[0]))(X),
    "complex": lambda f: jvp(floats(f), (torch.complex(X, Y), Y + 0j), (torch.complex(Y, X), X * 1j)),
}  # fmt: skip


@pytest.mark.parametrize("how", PUSHED)
def test_forward_mode_of_a_jnp_function(how):
    torch.testing.assert_close(PUSHED[how](in_jax), PUSHED[how](in_torch))


def test_forward_mode_with_a_mask_and_without_jvp():
    mask, keep = MASKED
    got, want = (
        jvp(function, (X,), (Y,))
        for function in (lambda x: under_mask(x, mask), lambda x: torch.where(keep, x[:, None] * x, 0.0))
    )
    torch.testing.assert_close(got, want)
    with pytest.raises(NotImplementedError, match=r"^the gradient of from_jax of <lambda>: forward-mode"):
        hessian(lambda x: floats(in_jax)(x, Y)[1])(X)
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        out, _ = floats(in_jax)(forward_ad.make_dual(x, Y), Y)
        with pytest.raises(NotImplementedError, match=r"^the gradient of from_jax of <lambda>: forward-mode"):
            torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("how", ["jvp", "jacfwd"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_forward_mode_of_a_jnp_function(how, backend):
    """A graph enters torch.func.jvp without Python. sine(x) is cached already, and its tangents add to x's tangents."""
    for _ in range(2):
        sine(X)
    push = {"jvp": lambda f: jvp(f, (X,), (Y,))[1], "jacfwd": lambda f: jacfwd(f)(X)}[how]
    compiled = torch.compile(lambda: push(lambda x: sine(x) + x), backend=backend)
    torch.testing.assert_close(compiled(), push(lambda x: torch.sin(x) + x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graph_that_enters_a_dual_level(backend):
    """Python does not see the level. A call with a Mask is another operator. An input without tangent gives none."""
    mask, keep = MASKED

    def push(x, y, functions):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, y)
            found = [forward_ad.unpack_dual(f(dual)).tangent for f in functions]
            return *found, forward_ad.unpack_dual(functions[0](x)).tangent

    functions = [sine, lambda x: under_mask(x, mask)]
    want = push(X, Y, [torch.sin, lambda x: torch.where(keep, x[:, None] * x, 0.0)])
    assert want[2] is None
    compiled = torch.compile(lambda x, y: push(x, y, functions), backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(X, Y), want)
    plain = torch.compile(lambda x: under_mask(sine(x), mask), backend=backend, fullgraph=True)
    torch.testing.assert_close(plain(X), under_mask(sine(X), mask))


def test_dual_level_belongs_to_its_thread():
    """PyTorch has one counter for all threads: the dual level that another thread enters meanwhile stays valid."""
    seen = []

    def elsewhere():
        seen.append(torch_internals.is_forward_mode())
        seen.extend(tangents(in_torch, X, Y))

    before = forward_ad._current_level
    with torch_internals.as_in_dual_level():
        assert torch_internals.is_forward_mode()
        assert forward_ad._current_level == before
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not torch_internals.is_forward_mode()
    assert seen[0] is False
    torch.testing.assert_close(seen[1:], tangents(in_torch, X, Y))


@pytest.mark.parametrize("case", ["query"])
def test_compiled_forward_mode_raises(case):
    function, x = CASES[case]
    compiled = torch.compile(lambda x: jvp(function, (x,), (x,)), backend="aot_eager")
    with pytest.raises(Exception, match="forward-mode differentiation is not supported"):
        compiled(x)


@pytest.mark.parametrize("case", ALL)
def test_unrelated_tangents_change_nothing(case):
    function, x = ALL[case]
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(3), torch.ones(3))
        torch.testing.assert_close(function(x), function(x))
        of_eager_mode(function, x)


REVERSE_MODE = {
    "grad": lambda f, x: grad(f)(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones(()))[0],
    "jacrev": lambda f, x: jacrev(f)(x),
    "grad of what vjp gives beside": lambda f, x: grad(lambda x: vjp(f, x)[0])(x),
    "vmap of grad": lambda f, x: vmap(grad(f))(torch.stack([x, x]))[1],
    "grad of vmap": lambda f, x: grad(lambda x: vmap(f)(torch.stack([x, x])).sum())(x) / 2,
    "grad of vmap of one": lambda f, x: grad(lambda x: vmap(lambda _: f(x))(torch.zeros(2)).sum())(x) / 2,
    "make_fx": lambda f, x: make_fx(grad(f))(x)(x),
}


@pytest.mark.parametrize(("case", "how"), tiers.pairs(ALL, REVERSE_MODE, ("query", "grad")))
def test_reverse_mode(case, how):
    function, x = ALL[case]
    if how == "make_fx" and case in WITH_MASKS:
        pytest.skip("a Mask is held for its call alone")
    torch.testing.assert_close(REVERSE_MODE[how](total(function), x), of_eager_mode(function, x), atol=1e-5, rtol=1e-5)


class Module(torch.nn.Module):
    """Applies the function to the product of a parameter and the input."""

    def __init__(self, function, x):
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(x.cos())

    def forward(self, x):
        return self.function(x * self.weight)


def gradients(function, module, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(total(function)(x), (x, *module.parameters()))


EXPORTED = ["query", "lse", "dynamic mask", "dilated", "from_jax, several outputs"]
HOW_EXPORTED = list(itertools.product(("non-strict", "strict"), ("grad", "no_grad"), ("exported", "decomposed")))


@pytest.mark.parametrize(
    ("case", "how"), tiers.pairs(EXPORTED, HOW_EXPORTED, ("lse", ("non-strict", "grad", "exported")))
)
def test_export(case, how):
    strictness, mode, form = how
    function, x = CASES[case]
    module = Module(function, x)
    with torch.set_grad_enabled(mode == "grad"):
        program = torch.export.export(module, (x,), strict=strictness == "strict")
        program = program.run_decompositions() if form == "decomposed" else program
    exported = program.module()
    torch.testing.assert_close(gradients(exported, exported, x), gradients(module, module, x))
    if case.startswith("from_jax"):
        dual(exported, x)
    else:
        with pytest.raises(NotImplementedError, match="forward-mode differentiation is not supported"):
            dual(exported, x)


@pytest.mark.parametrize("case", tiers.cases(CASES, {"lse", "sdpa", "a score_mod", "dynamic mask", "dilated"}))
def test_compile(case):
    function, x = CASES[case]
    module = Module(function, x)
    want = gradients(module, module, x)
    torch.testing.assert_close(gradients(torch.compile(module, backend="aot_eager", fullgraph=True), module, x), want)
    again = torch.compile(lambda x: checkpoint(module, x, use_reentrant=False), backend="aot_eager")
    torch.testing.assert_close(gradients(again, module, x), want)
    by_name = lambda weight, x: total(lambda x: functional_call(module, {"weight": weight}, (x,)))(x)
    compiled = torch.compile(lambda w, x: grad(by_name, (1, 0))(w, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(module.weight.detach(), x), want)


@pytest.mark.slow
def test_compiled_by_inductor():
    module = Module(lambda x: sine(CASES["query"][0](x) + CASES["dilated"][0](x)), QUERY)
    want = gradients(module, module, QUERY)
    torch.testing.assert_close(gradients(torch.compile(module, fullgraph=True), module, QUERY), want)


@pytest.mark.parametrize("case", tiers.cases(ALL, {"query", "lse", "a score_mod", "dilated", "a Mask"}))
def test_autocast(case):
    function, x = ALL[case]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(grad(total(function))(x), of_eager_mode(function, x), atol=0, rtol=0)


def twice(function, x):
    """Adds a term with a second derivative, as most losses have."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(total(function)(x) + (x**3).sum(), x, create_graph=True)
    torch.autograd.grad(first.sum(), x)


SECOND = {
    "autograd": twice,
    "grad of grad": lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(x),
    "jacrev of grad": lambda f, x: jacrev(grad(lambda x: f(x).sum() + (x**3).sum()))(x),
    "grad of vmap of grad": lambda f, x: grad(lambda x: vmap(grad(lambda x: f(x).sum()))(x[None]).sum())(x),
}


@pytest.mark.parametrize(("case", "how"), tiers.pairs(ALL, SECOND, ("query", "autograd")))
def test_second_derivative_raises(case, how):
    function, x = ALL[case]
    name = "from_jax of .*" if case.startswith("from_jax") else r"\w+_attention"
    with pytest.raises(RuntimeError, match=f"^{name}: double backward is not supported"):
        SECOND[how](function, x)


W = torch.randn(8, 8)
HEADS = torch.randn(2, 16, 4, 16)
NAMES = {
    "matmul": (lambda x: bridge.matmul(x, W), torch.randn(4, 8)),
    "gated_matmul": (lambda x: bridge.gated_matmul(x, W, W), torch.randn(4, 8)),
    "mlp": (lambda x: bridge.mlp(x, W, W), torch.randn(4, 8)),
    "grouped_matmul": (lambda x: bridge.grouped_matmul(x, W[None], torch.tensor([4])), torch.randn(4, 8)),
    "rms_norm": (lambda x: bridge.rms_norm(x, W[0]), torch.randn(4, 8)),
    "linear_cross_entropy": (lambda x: bridge.linear_cross_entropy(x, W, torch.arange(4)), torch.randn(4, 8)),
    "dynamic_mask_attention": (bridge.nn.DynamicMaskAttention(8, 2, keys_to_keep=2), torch.randn(1, 4, 8)),
    "flash_attn": (lambda q: bridge.flash_attn_func(q, HEADS, HEADS, alibi_slopes=torch.ones(4)), HEADS),
}


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_the_function_of_bridge(name):
    function, x = NAMES[name]
    with pytest.raises(RuntimeError, match=f"^{name}: double backward is not supported"):
        twice(function, x)
    with pytest.raises(NotImplementedError, match=f"^{name}: forward-mode differentiation is not supported"):
        jvp(function, (x,), (x,))


def test_second_derivative_of_a_linear_function_is_zero():
    times = bridge.from_jax(lambda x, c: x * c)
    x, c = BIAS.clone().requires_grad_(), BIAS
    (first,) = torch.autograd.grad((times(x, c) + x**3).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())


def test_no_gradient_without_requires_grad():
    frozen = lambda x: (sine(x).detach() * x).sum()
    torch.testing.assert_close(grad(frozen)(BIAS), torch.sin(BIAS))
    with torch.no_grad():
        assert not CASES["query"][0](QUERY.clone().requires_grad_()).requires_grad
    assert not pair(BIAS.clone().requires_grad_(), BIAS)["index"].requires_grad
