"""mask_mods and score_mods in the forms of PyTorch's examples and attention-gym's, against PyTorch's own evaluation."""

import functools
import operator

import numpy as np
import pytest
import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn import functional
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from jax_kernels import bridge
from jax_kernels.bridge import masks

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 36, 8


def causal(b, h, q, k):
    return q >= k


def sliding(window):
    return and_masks(lambda b, h, q, k: q - k <= window, causal)


def prefix_lm(length):
    return or_masks(lambda b, h, q, k: k < length, causal)


def offsets_of(*lengths):
    return torch.cumsum(torch.tensor([0, *lengths]), dim=0)


def documents_of(offsets):
    return torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets[1:] - offsets[:-1])


def of_documents(inner, offsets):
    ids = documents_of(offsets)

    def of_one(b, h, q, k):
        logical = inner(b, h, q - offsets[ids[q]], k - offsets[ids[k]])
        return (ids[q] == ids[k]) & logical

    return of_one


def shared_prefix(offsets, prefixes):
    ids = documents_of(offsets)

    def of_pair(b, h, q, k):
        prefix = prefixes[ids[q]]
        is_own = (k >= offsets[ids[q]]) & causal(b, h, q, k)
        is_prefix = (ids[q] != prefix) & (k >= offsets[prefix]) & (k < offsets[prefix + 1])
        return is_own | is_prefix

    return of_pair


def dilated(window, rate):
    def of_pair(b, h, q, k):
        distance = torch.abs(q - k)
        return (distance <= window) & ((distance % rate) == 0)

    return of_pair


def longformer(window, is_global):
    return or_masks(lambda b, h, q, k: (q - k).abs() <= window, lambda b, h, q, k: is_global[q] | is_global[k])


def flamingo(intervals, tokens):
    images = torch.repeat_interleave(torch.arange(intervals.shape[0]), repeats=tokens)

    def of_pair(b, h, q, k):
        interval = intervals[images[k]]
        return (q >= interval[0]) & (q < interval[1])

    return of_pair


def natten(place, width, height, kernel):
    def of_pair(b, h, q, k):
        (qx, qy), (kx, ky) = place(q), place(k)
        half = kernel // 2
        near_x = (qx.clamp(half, width - 1 - half) - kx).abs() <= half
        return near_x & ((qy.clamp(half, height - 1 - half) - ky).abs() <= half)

    return of_pair


def tiled(index, width=6, tile=3):
    number, within = index // tile**2, index % tile**2
    across = width // tile
    return number % across * tile + within % tile, number // across * tile + within // tile


def spread(code):
    code = code & 0x55555555
    for shift, keep in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
        code = (code | (code >> shift)) & keep
    return code


def morton(code):
    return spread(code), spread(code >> 1)


def interleaved(x):
    for shift, keep in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        x = (x | (x << shift)) & keep
    return x


def block_diffusion(length, block):
    def of_pair(b, h, q, k):
        noised_q, noised_k = q < length, k < length
        of_q, of_k = (q % length) // block, (k % length) // block
        diagonal = (of_q == of_k) & (noised_q == noised_k)
        before = (of_q > of_k) & noised_q & ~noised_k
        return diagonal | before | ((of_q >= of_k) & ~noised_q & ~noised_k)

    return of_pair


def tree(prefix, ancestors):
    def of_pair(b, h, q, k):
        node = (k - prefix).clamp(min=0, max=ancestors.shape[0] - 1)
        row = q.clamp(max=ancestors.shape[0] - 1)
        return (k < prefix) | ((k >= prefix) & (k < prefix + ancestors.shape[0]) & ancestors[row, node])

    return of_pair


def in_batches(inner, size):
    return lambda b, h, q, k: (q // size == k // size) & inner(b, h, q % size, k % size)


class Cache:
    """Page tables, as paged attention's mask_mod reads them."""

    def __init__(self):
        self.logical = torch.arange(LENGTH // 4).flip(0).repeat(BATCH, 1)
        self.page = 4

    def mask_mod(self, b, h, q, k):
        page, within = k // self.page, k % self.page
        logical = self.logical[b, page]
        place = torch.where(logical >= 0, logical * self.page + within, 0)
        return torch.where(logical >= 0, causal(b, h, q, place), False)


CACHE = Cache()
OFFSETS = offsets_of(7, 12, 1, 16)
FLAGS = torch.arange(LENGTH) % 11 == 0
SPANS = torch.tensor([[3, 9], [12, 20]])
LIMITS = torch.tensor([[5, 36], [20, 1]], dtype=torch.int64)
BLOCKS = torch.rand(HEADS, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.5
LAST = torch.tensor(9)
MASKS = {
    "noop": noop_mask,
    "causal": causal,
    "and of none": and_masks(),
    "or of none": or_masks(),
    "sliding window": sliding(5),
    "prefix lm": prefix_lm(9),
    "documents": of_documents(causal, OFFSETS),
    "documents, window": of_documents(sliding(3), OFFSETS),
    "documents, noop": of_documents(noop_mask, OFFSETS.int()),
    "shared prefix": shared_prefix(OFFSETS, torch.tensor([0, 0, 2, 2])),
    "dilated": dilated(9, 3),
    "longformer": longformer(2, FLAGS),
    "longformer, causal": and_masks(longformer(2, FLAGS), causal),
    "flamingo": flamingo(SPANS, LENGTH // 2),
    "natten": natten(lambda i: (i // 6, i % 6), 6, 6, 3),
    "natten, tiled": natten(tiled, 6, 6, 3),
    "natten, morton": natten(morton, 6, 6, 3),
    "natten, 1-D": lambda b, h, q, k: (q.clamp(2, LENGTH - 3) - k).abs() <= 2,
    "morton both ways": lambda b, h, q, k: (interleaved(morton(q)[1]) << 1) | interleaved(morton(q)[0]) == q,
    "block diffusion": block_diffusion(LENGTH // 2, 3),
    "tree": tree(8, torch.ones(6, 6, dtype=torch.bool).tril()),
    "in batches": in_batches(causal, 9),
    "in batches, noop": in_batches(noop_mask, 9),
    "paged": lambda b, h, q, k: CACHE.mask_mod(b, h, q, k),
    "ragged": lambda b, h, q, k: k < LIMITS[0, b],
    "rectangle": lambda b, h, q, k: (q < LIMITS[0][b]) & (k < LIMITS[1][b]),
    "transfusion": or_masks(
        causal, *(functools.partial(lambda lo, hi, b, h, q, k: (q >= lo) & (q < hi) & (k >= lo) & (k < hi), *span)
                  for span in SPANS.tolist())
    ),
    "transfusion of a tensor": lambda b, h, q, k: (
        (q >= k) | ((q >= SPANS[:, 0]) & (q < SPANS[:, 1]) & (k >= SPANS[:, 0]) & (k < SPANS[:, 1])).any()
    ),
    "blocks of heads": lambda b, h, q, k: BLOCKS[h, q // 6, k // 6],
    "a partial": functools.partial(lambda ids, b, h, q, k: ids[q] == ids[k], documents_of(OFFSETS)),
    "a default": lambda b, h, q, k, last=LAST: (k <= last) | causal(b, h, q, k),
    "bits": lambda b, h, q, k: torch.bitwise_and(torch.bitwise_right_shift(q, 1), k) == torch.bitwise_xor(q, k),
    "shifts": lambda b, h, q, k: (1 << (q % 5)) >= (k.bitwise_left_shift(1) >> 2),
    "new_full": lambda b, h, q, k: q.new_full((), 7, dtype=torch.int64) + k.new_zeros(()) < q + k.new_tensor(2),
    "like": lambda b, h, q, k: torch.zeros_like(q, dtype=torch.bool) | torch.ones_like(k, dtype=torch.bool),
    "no index": lambda b, h, q, k: torch.tensor(True),
    "isin": lambda b, h, q, k: torch.isin(k, torch.tensor([0, 3, 17])) | (q == k),
    "searchsorted": lambda b, h, q, k: (
        torch.searchsorted(OFFSETS, q, right=True) == torch.bucketize(k, OFFSETS, right=True)
    ),
    "logical": lambda b, h, q, k: torch.logical_xor(q > k, torch.logical_not(h.remainder(2).bool())) & b.eq(b),
    "in place": lambda b, h, q, k: operator.iand((q >= k).logical_or(k == 0), q - k < 20),
    "spans of a row": lambda b, h, q, k: ((LIMITS[:, b] - k) > q - LENGTH).all(),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask_mod = MASKS[name]
    want = torchs.create_mask(mask_mod, BATCH, HEADS, LENGTH, LENGTH, device="cpu")
    mask = masks.from_function(mask_mod, batch=BATCH, heads=HEADS)
    got = np.broadcast_to(mask.to_dense(LENGTH, LENGTH), want.shape)
    np.testing.assert_array_equal(got, want.numpy())


class Relative(torch.nn.Module):
    """A bias by distance, whose score_mod reads a parameter of the module."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(HEADS, 2 * LENGTH, generator=torch.Generator().manual_seed(1)))
        self.length = LENGTH

    def bias(self, h, q, k):
        return self.table[h, q - k + self.length]

    def score_mod(self, score, b, h, q, k):
        return score + self.bias(h, q, k)


class Tanh(torch.autograd.Function):
    """A Function whose backward is the derivative of its forward."""

    @staticmethod
    def forward(x):
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * (1 - result * result)

    @staticmethod
    def vmap(info, in_dims, x):
        return torch.tanh(x), 0


class Through(torch.autograd.Function):
    """A straight-through estimator: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


GENERATOR = torch.Generator().manual_seed(2)
RELATIVE = Relative()
SLOPES = torch.rand(HEADS, generator=GENERATOR, requires_grad=True)
TABLES = [torch.randn(HEADS, 3, generator=GENERATOR, requires_grad=True) for _ in range(2)]
TYPES = torch.randint(0, 3, (BATCH, LENGTH, LENGTH, 2), generator=GENERATOR)
COUNTS = torch.randint(0, 3, (BATCH, LENGTH, LENGTH), generator=GENERATOR)
ROPE = torch.randn(2, BATCH, HEADS, LENGTH, 4, generator=GENERATOR)
Q_ROPE, K_ROPE = ROPE
OPTIONS = {"slopes": SLOPES, "scale": 0.5}


def edges(score, b, h, q, k):
    count, total = COUNTS[b, q, k], 0.0
    for i, table in enumerate(TABLES):
        total = total + torch.where(count > i, table[h, TYPES[b, q, k, i]], 0.0)
    return score + total / torch.clamp(count, min=1)


def in_place(score, b, h, q, k):
    score = score * 1.0
    score += SLOPES[h]
    return score.mul_(0.5)


MODS = {
    "alibi": (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)), ()),
    "alibi of a tensor": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), (SLOPES,)),
    "softcap": (lambda s, b, h, q, k: 2 * torch.tanh(s / 2), ()),
    "softcap of a Function": (lambda s, b, h, q, k: 2 * Tanh.apply(s / 2), ()),
    "activation": (lambda s, b, h, q, k: torch.log(functional.gelu(s) + 1.0), ()),
    "relative": (lambda s, b, h, q, k: s + (q - k), ()),
    "relative of a module": (lambda s, b, h, q, k: s + RELATIVE.table[h, q - k + LENGTH], (RELATIVE.table,)),
    "a method": (RELATIVE.score_mod, (RELATIVE.table,)),
    "a method in a function": (lambda s, b, h, q, k: RELATIVE.score_mod(s, b, h, q, k) * 2, (RELATIVE.table,)),
    "head bias": (lambda s, b, h, q, k: s + 2 * h, ()),
    "checkerboard": (lambda s, b, h, q, k: torch.where(torch.abs(k - q) % 2 == 1, s * 0.5, s * 2.0), ()),
    "inverse causal": (lambda s, b, h, q, k: torch.where(q <= k, s, -float("inf")), ()),
    "identity": (lambda s, b, h, q, k: s, ()),
    "edges of lists": (edges, tuple(TABLES)),
    "a dict": (lambda s, b, h, q, k: s + OPTIONS["slopes"][h] * OPTIONS["scale"], (SLOPES,)),
    "a partial": (functools.partial(lambda x, s, b, h, q, k, y: s + x[h] * y, SLOPES, y=2.0), (SLOPES,)),
    "rope": (lambda s, b, h, q, k: s + 0.5 * torch.dot(Q_ROPE[b, h, q], K_ROPE[b, h // 2, k]), ()),
    "addcmul": (lambda s, b, h, q, k: torch.addcmul(s, SLOPES[h], q - k, value=0.5).addcdiv(s, q + 1.0), (SLOPES,)),
    "in place": (in_place, (SLOPES,)),
}


def oracle(query, key, value, score_mod):
    """Attention in float64 with the scores that PyTorch's vmap of the function returns."""
    scores = query.double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5
    of_all = score_mod
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        of_all = torch.vmap(of_all, in_dims=(0, *axes))
    with TransformGetItemToIndex():
        scores = of_all(scores, *(torch.arange(n) for n in scores.shape))
    return torch.softmax(scores, -1) @ value.double()


@pytest.mark.parametrize("name", MODS)
def test_score_mods(name):
    score_mod, read = MODS[name]
    generator = torch.Generator().manual_seed(3)
    qkv = [torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, generator=generator, requires_grad=True) for _ in range(3)]
    want, got = oracle(*qkv, score_mod), bridge.flex_attention(*qkv, score_mod)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    dout = torch.randn(want.shape, generator=generator)
    pairs = zip(*(torch.autograd.grad(x, (*qkv, *read), dout.to(x.dtype)) for x in (got, want)), strict=True)
    for of_ours, of_theirs in pairs:
        torch.testing.assert_close(of_ours, of_theirs, atol=2e-4, rtol=2e-4)


HUGE = torch.tensor([1, 2**40])


def in_a_random_way(s, b, h, q, k):
    return s + torch.rand(())


def of_slices(b, h, q, k):
    return FLAGS[q : q + 2].any()


REFUSED = {
    "no form": (lambda s, b, h, q, k: s.cumprod(0), "uses Tensor.cumprod"),
    "attribute": (lambda s, b, h, q, k: s.grad_fn, "uses Tensor.grad_fn"),
    "random": (in_a_random_way, "uses torch's rand, .* its values are random"),
    "dropout": (lambda s, b, h, q, k: functional.dropout(s), "uses torch's dropout, .* random"),
    "straight through": (lambda s, b, h, q, k: Through.apply(s), "Function Through, whose backward"),
    "a view in place": (lambda s, b, h, q, k: s.view(1).add_(1)[0], "shares memory with another in place, by add"),
    "read in place": (lambda s, b, h, q, k: s + SLOPES.mul_(2)[h], "that the function reads in place, by mul"),
    "another dtype in place": (lambda s, b, h, q, k: s + q.add_(0.5), "of torch.int32 .* in place to torch.float32"),
    "assigned": (lambda s, b, h, q, k: torch.zeros(3).__setitem__(0, s), "assigns to a part"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_untranslatable_score_mods(name):
    score_mod, message = REFUSED[name]
    query = torch.zeros(1, 2, HEADS, 8)
    with pytest.raises(TypeError, match=f"^score_mod: .*{message}"):
        bridge.flash_attention(query, query, query, score_mod=score_mod)


@pytest.mark.parametrize(
    ("mask_mod", "kind", "message"),
    [
        (lambda b, h, q, k: (q - k).cummax(0) > 0, TypeError, "^function: .*<lambda> uses Tensor.cummax"),
        (lambda b, h, q, k: torch.fft.fft(q) > k, TypeError, "^function: .*<lambda> uses torch's fft_fft"),
        (of_slices, TypeError, "^function: of_slices slices a tensor at a score"),
        (lambda b, h, q, k: HUGE[q % 2] > k, ValueError, "torch.int64 .*, HUGE, with the value 1099511627776, want"),
        (lambda b, h, q, k: q > torch.tensor(2**40), TypeError, "by torch.tensor with integers beyond int32"),
        (lambda b, h, q, k: SLOPES.double()[h] > k, TypeError, "uses torch's double|float64|Tensor.double"),
    ],
)
def test_untranslatable_masks(mask_mod, kind, message):
    with pytest.raises(kind, match=message):
        masks.from_function(mask_mod, batch=BATCH, heads=HEADS)


def test_score_mod_int64_tensors():
    """They are narrowed exactly. A value that does not fit raises an error that names the tensor."""
    places = torch.arange(4, dtype=torch.int64)
    score_mod = lambda s, b, h, q, k: s * (places[q] - places[k])
    query = torch.randn(1, 4, HEADS, 8, generator=torch.Generator().manual_seed(4))
    want = bridge.flash_attention(query, query, query, score_mod=lambda s, b, h, q, k: s * (q - k))
    torch.testing.assert_close(bridge.flash_attention(query, query, query, score_mod=score_mod), want)
    places[1] = 2**31
    with pytest.raises(ValueError, match=r"^score_mod: .*torch.int64 .4,., places, with the value 2147483648"):
        bridge.flash_attention(query, query, query, score_mod=score_mod)


def test_equal_functions_share_a_program():
    made = lambda module, scale: lambda s, b, h, q, k: s + module.table[h, q - k + module.length] * scale
    query = torch.randn(1, HEADS, 6, 8, generator=torch.Generator().manual_seed(5))
    bridge.flex_attention(query, query, query, made(RELATIVE, 2.0))
    before = bridge.cache_info().programs
    for module in (RELATIVE, Relative()):
        bridge.flex_attention(query, query, query, made(module, 2.0))
    assert bridge.cache_info().programs == before
    bridge.flex_attention(query, query, query, made(RELATIVE, 3.0))
    assert bridge.cache_info().programs > before


def test_activation_may_not_mix_values():
    """An activation runs on whole tiles, a score_mod on scalars."""
    x = torch.randn(4, 8)
    with pytest.raises(TypeError, match=r"activation: .*torch's sum, which mixes"):
        bridge.linear(x, torch.randn(8, 8), activation=lambda y: torch.sum(y))
