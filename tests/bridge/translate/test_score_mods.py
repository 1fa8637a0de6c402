"""Score functions and mask functions in torch operations, against FlexAttention's semantics in plain PyTorch."""

import math

import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

from jax_kernels import bridge
from jax_kernels.bridge import masks
from jax_kernels.bridge.translate import torch_to_jnp

BATCH, LENGTH, HEADS = 2, 20, 4
GENERATOR = torch.Generator().manual_seed(0)
SLOPES = torch.rand(HEADS, generator=GENERATOR, requires_grad=True)
BIAS = torch.randn(HEADS, LENGTH, LENGTH, generator=GENERATOR, requires_grad=True)
DOCUMENTS = (torch.arange(LENGTH) // 7).to(torch.int32).expand(BATCH, LENGTH).contiguous()
HALF = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.bfloat16)
WIDE = torch.arange(LENGTH).double()


class Module:
    """An object with a tensor, which can be read by other ways than an attribute."""

    bias = torch.zeros(HEADS)

    def __getitem__(self, index):
        return self.bias[index]


MODULE = Module()


def flex(query, key, value, score_mod, mask_mod=None):
    """flex_attention without a kernel: applies the function to all scores and to four grids of indices."""
    scores = torch.einsum("bthd,bshd->bhts", query, key) / math.sqrt(query.shape[-1])
    grids = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    scores = scores if score_mod is None else score_mod(scores, *grids)
    scores = scores if mask_mod is None else scores.masked_fill(~mask_mod(*grids), -math.inf)
    return torch.einsum("bhts,bshd->bthd", torch.softmax(scores, -1), value)


def helper(score, h):
    return score + SLOPES[h]


def closing_over(tensor):
    return lambda score, b, h, q_idx, kv_idx: score + tensor[h] * (kv_idx - q_idx)


# Each has the tensors that it passes a gradient to, without query, key and value.
MODS = {
    "tanh": (lambda s, b, h, q, k: 2 * torch.tanh(s / 2), ()),
    "a method": (lambda s, b, h, q, k: s.tanh(), ()),
    "causal": (lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf), ()),
    "a method of two": (lambda s, b, h, q, k: s.where((q - k).abs() <= 3, s * 0.5), ()),
    "a constant": (lambda s, b, h, q, k: torch.where((q >= k) & ~(h == 1), s, torch.tensor(-1e9)), ()),
    "arithmetic": (lambda s, b, h, q, k: s * 2.0 ** -(h + 1) - (q - k) % 3 + (q // 4 == k // 4) / 2 + 1 / (1 + b), ()),
    # Also uses torch's functions: a function of operators alone runs on JAX's arrays unchanged.
    "numbers on the left": (
        lambda s, b, h, q, k: (
            1 - torch.tanh(s) + 2 / (2 + torch.tanh(s)) + 1.5 ** torch.tanh(s) + 0.1 * (7 % (2 + k))
            + (9 // (1 + k)) / 9 + torch.where(k < 5, 0.5 * s, 3.0 * torch.cos(s))
        ),
        (),
    ),
    "bools on the left": (
        lambda s, b, h, q, k: torch.where((True & (q >= k)) ^ (False | (k % 3 == 0)), torch.tanh(s), 2 * s),
        (),
    ),
    "many": (
        lambda s, b, h, q, k: (
            torch.sigmoid(s).sqrt() + functional.softplus(s) * functional.relu(s - 0.1) + torch.clamp(s, -0.5, max=0.5)
            + torch.maximum(s, -s).square() + torch.sign(s).float() * s.abs().log1p() + torch.exp(-s.abs()).sin()
        ),
        (),
    ),
    "a global": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), (SLOPES,)),
    "a tensor that is closed over": (closing_over(SLOPES), (SLOPES,)),
    "a default": (lambda s, b, h, q, k, bias=BIAS: s + bias[h, q, k], (BIAS,)),
    "a function with a tensor": (lambda s, b, h, q, k: helper(s, h) * 2, (SLOPES,)),
    "documents": (lambda s, b, h, q, k: torch.where(DOCUMENTS[b, q] == DOCUMENTS[b, k], s, -float("inf")), ()),
    "16 bits": (lambda s, b, h, q, k: s * HALF[h], ()),
}  # fmt: skip


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, LENGTH, HEADS, 16, generator=generator, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("name", MODS)
def test_score_mod(name, qkv):
    score_mod, read = MODS[name]
    want, got = flex(*qkv, score_mod), bridge.flash_attention(*qkv, score_mod=score_mod)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    gradients = zip(*(torch.autograd.grad(out, (*qkv, *read), dout) for out in (got, want)), strict=True)
    for of_ours, of_theirs in gradients:
        torch.testing.assert_close(of_ours, of_theirs, atol=1e-4, rtol=1e-4)


def test_tensor_values_are_data(qkv):
    slopes = torch.ones(HEADS)
    score_mod = closing_over(slopes)
    bridge.flash_attention(*qkv, score_mod=score_mod)
    slopes.mul_(0.25)
    want = flex(*qkv, score_mod)
    torch.testing.assert_close(bridge.flash_attention(*qkv, score_mod=score_mod), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        bridge.flash_attention(*qkv, score_mod=closing_over(2 * slopes)), flex(*qkv, closing_over(2 * slopes)),
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["causal", "a global", "a tensor that is closed over"])
def test_compiled(name, qkv):
    score_mod, read = MODS[name]
    attend = torch.compile(
        lambda *x: bridge.flash_attention(*x, score_mod=score_mod), fullgraph=True, backend="aot_eager"
    )
    got, want = attend(*qkv), flex(*qkv, score_mod)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for pair in zip(*(torch.autograd.grad(out.sum(), (*qkv, *read)) for out in (got, want)), strict=True):
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)


def test_other_ops(qkv):
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    score_mod = MODS["a global"][0]
    want = flex(*qkv, score_mod, lambda b, h, q, k: q >= k)
    for got in (
        bridge.dynamic_mask_attention(*qkv, keep, score_mod=score_mod),
        bridge.block_sparse_attention(
            *qkv, torch.ones(1, 1, dtype=torch.bool), block_size=32, score_mod=score_mod, is_causal=True
        ),
    ):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_explain(qkv):
    assert bridge.explain(bridge.flash_attention, *qkv, score_mod=MODS["a global"][0]).implementation == "xla"


MASK_MODS = {
    "causal": lambda b, h, q, k: q >= k,
    "torch's": lambda b, h, q, k: torch.logical_and(q >= k, torch.abs(q - k) < 5),
    "documents": lambda b, h, q, k: (DOCUMENTS[b, q] == DOCUMENTS[b, k]) & (q >= k),
}


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mod(name, qkv):
    mask = masks.from_function(MASK_MODS[name], batch=BATCH)
    got, want = bridge.flash_attention(*qkv, mask=mask), flex(*qkv, None, MASK_MODS[name])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_gradients_at_bounds():
    """A form with several possible derivatives has torch's."""
    for function in (lambda x: torch.clamp(x, -1.0, 1.0), torch.abs, functional.relu, functional.softplus):
        x = torch.tensor([-30.0, -1.0, 0.0, 1.0, 30.0], requires_grad=True)
        (want,) = torch.autograd.grad(function(x).sum(), x)
        traced = bridge.from_jax(torch_to_jnp.to_jnp(function))
        (got,) = torch.autograd.grad(traced(x).sum(), x)
        torch.testing.assert_close(got, want)


def conditional(score, b, h, q_idx, kv_idx):
    return score if q_idx >= kv_idx else score * torch.pi


def scanned(score, b, h, q_idx, kv_idx):
    return torch.cumsum(score, 0)


ERRORS = {
    "if": (conditional, "^score_mod: conditional asks for the value .* want torch.where"),
    "no form": (scanned, "^score_mod: scanned uses torch's cumsum, .*jnp.where"),
    "no method": (lambda s, b, h, q, k: s.cumsum(0), "^score_mod: <lambda> uses Tensor.cumsum"),
    "a tensor of an object": (
        lambda s, b, h, q, k: s + MODULE.bias[h],
        r"reads a torch.Tensor of shape \(4,\) through",
    ),
    "jnp beside a tensor": (
        lambda s, b, h, q, k: jnp.tanh(s) + SLOPES[h],
        "^score_mod: <lambda> raised TypeError when traced .*; it reads torch.Tensors, so it cannot be in jnp code",
    ),
    "64 bits": (lambda s, b, h, q, k: s + WIDE[q], "<lambda> that reads a tensor of torch.float64 .*, WIDE, want .*32"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, qkv):
    score_mod, message = ERRORS[name]
    with pytest.raises(TypeError, match=message):
        bridge.flash_attention(*qkv, score_mod=score_mod)
