"""flash-attn's and flash-dmattn's functions, with their own names and semantics, against float64."""

import inspect
import itertools

import numpy as np
import pytest
import torch

from jax_kernels import bridge

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
CASES = {
    "plain": ((9, 11), {}),
    "causal, more keys": ((9, 11), {"causal": True}),
    "causal, more queries": ((11, 9), {"causal": True}),
    "window": ((9, 13), {"window_size": (2, 1)}),
    "window of one side": ((9, 13), {"window_size": (3, -1)}),
    "causal window, softcap, scale": (
        (9, 11),
        {"causal": True, "window_size": (3, 0), "softcap": 1.5, "softmax_scale": 0.3},
    ),
    "alibi": ((9, 11), {"alibi_slopes": SLOPES, "causal": True}),
    "alibi of entries": ((9, 9), {"alibi_slopes": torch.stack([SLOPES, SLOPES.flip(0)])}),
    "capped alibi": ((9, 11), {"alibi_slopes": SLOPES, "causal": True, "softcap": 1.5, "softmax_scale": 0.7}),
}


def wanted(reference, query, key, value, *, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0,
           alibi_slopes=None):  # fmt: skip
    """(out, lse) in float64."""
    length, kv_length = query.shape[1], key.shape[1]
    bias = None
    if alibi_slopes is not None:
        rows = torch.arange(length)[:, None] + kv_length - length
        bias = -alibi_slopes.reshape(-1, 4, 1, 1) * (rows - torch.arange(kv_length)).abs()
    sides = tuple(None if side < 0 else side for side in window_size)
    return reference(
        *(query, key, value),
        bias=bias,
        is_causal=causal,
        window=None if sides == (None, None) else sides,
        q_offset=kv_length - length,
        softcap=softcap or None,
        scale=softmax_scale,
    )


def learned(options):
    """(options with slopes that require a gradient, these slopes or nothing)."""
    if "alibi_slopes" not in options:
        return options, []
    slopes = options["alibi_slopes"].clone().requires_grad_()
    return options | {"alibi_slopes": slopes}, [slopes]


def same_gradients(got, want, inputs, atol=2e-5):
    cotangent = torch.randn(want.shape, dtype=torch.float64)
    pairs = zip(*(torch.autograd.grad((x.double() * cotangent).sum(), inputs) for x in (got, want)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_flash_attn_func(case, make_qkv, reference):
    (length, kv_length), options = CASES[case]
    options, slopes = learned(options)
    inputs = make_qkv(length=length, kv_length=kv_length, kv_heads=2)
    want, want_lse = wanted(reference, *inputs, **options)
    out, lse, nothing = bridge.flash_attn_func(*inputs, return_attn_probs=True, **options)
    assert nothing is None
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=3e-6, rtol=0)
    alone = bridge.flash_attn_func(*inputs, **options)
    torch.testing.assert_close(alone, out, atol=1e-6, rtol=0)
    same_gradients(alone, want, [*inputs, *slopes])


def test_packed_tensors(make_qkv, reference):
    qkv = torch.stack(make_qkv(), dim=2).detach().requires_grad_()
    want, _ = reference(*qkv.unbind(2), is_causal=True)
    got = bridge.flash_attn_qkvpacked_func(qkv, causal=True)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=0)
    same_gradients(got, want, [qkv])
    got = bridge.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], 0.0, None, True)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=0)


PACKED = {
    "self": ((4, 0, 7, 3), None, {"causal": True}),
    "self, alibi": ((4, 7, 3), None, {"causal": True, "alibi_slopes": SLOPES}),
    "cross": ((4, 2, 3), (5, 6, 1), {}),
    "causal cross": ((4, 0, 3, 2), (5, 6, 3, 1), {"causal": True}),
    "window of a cross": ((4, 3), (5, 6), {"window_size": (1, 1)}),
    "alibi of entries": ((4, 3), (5, 6), {"alibi_slopes": torch.stack([SLOPES, SLOPES.flip(0)])}),
    "self, capped alibi": ((4, 7, 3), None, {"causal": True, "alibi_slopes": SLOPES, "softcap": 1.5}),
    "cross, capped alibi": ((4, 3), (5, 6), {"alibi_slopes": SLOPES, "softcap": 1.5, "window_size": (2, 2)}),
}


@pytest.mark.parametrize("case", PACKED)
def test_flash_attn_varlen_func(case, reference):
    lengths, kv_lengths, options = PACKED[case]
    options, slopes = learned(options)
    starts_of = lambda x: torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32)
    starts = starts_of(lengths)
    kv_starts = starts if kv_lengths is None else starts_of(kv_lengths)
    kv_lengths = kv_lengths or lengths
    torch.manual_seed(0)
    rows, columns = sum(lengths) + 2, sum(kv_lengths) + (2 if kv_starts is starts else 1)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((rows, 4, 16), (columns, 2, 16), (columns, 2, 16))]
    out, lse, _ = bridge.flash_attn_varlen_func(
        *inputs, starts, kv_starts, max(lengths), max(kv_lengths), return_attn_probs=True, **options
    )
    wants, lses = [], []
    for number in range(len(lengths)):
        if not lengths[number]:
            continue
        q = inputs[0][None, starts[number] : starts[number + 1]]
        k, v = (x[None, kv_starts[number] : kv_starts[number + 1]] for x in inputs[1:])
        own = dict(options)
        if own.get("alibi_slopes", SLOPES).ndim == 2:
            own["alibi_slopes"] = own["alibi_slopes"][number]
        found = wanted(reference, q, k, v, **own)
        wants.append(found[0][0])
        lses.append(found[1][0])
    want = torch.cat([*wants, torch.zeros(2, 4, 16, dtype=torch.float64)])
    assert out.shape == inputs[0].shape
    assert lse.shape == (4, rows)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse[:, :-2].double(), torch.cat(lses, dim=1), atol=3e-6, rtol=0)
    same_gradients(out, want, inputs + slopes)


@pytest.mark.parametrize("lengths", [(3, 5), (2, 7)], ids=["one length", "two lengths"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (2, 0)}, {"alibi_slopes": torch.ones(4)}], ids=str
)
def test_tokens_after_the_last_sequence(options, lengths):
    """They have out 0, lse -inf and no gradient, whichever way the sequences are batched."""
    query, key, value = (torch.randn(12, 4, 16, requires_grad=True) for _ in range(3))
    starts, kv_starts = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, *np.cumsum(lengths)]).int()
    out, lse, _ = bridge.flash_attn_varlen_func(
        query, key, value, starts, kv_starts, 5, max(lengths), return_attn_probs=True, **options
    )
    assert (out[8:] == 0).all()
    assert (lse[:, 8:] == -torch.inf).all()
    assert lse[:, 1:8].isfinite().all()  # with two lengths and a causal mask, query 0 has no key
    (out.square().sum() + lse[:, 1:8].sum()).backward()
    assert (query.grad[8:] == 0).all()
    assert (query.grad[:8] != 0).any()


@pytest.mark.parametrize("is_one_tensor", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 0)}], ids=str)
def test_tokens_before_the_first_sequence(options, is_one_tensor):
    """They have out 0 and lse -inf, and no other token attends to them."""
    q, k, v = (torch.randn(12, 4, 16) for _ in range(3))
    call = lambda starts, q, k, v: bridge.flash_attn_varlen_func(
        q, k, v, starts, starts if is_one_tensor else starts.clone(), 4, 4, return_attn_probs=True, **options
    )
    starts = torch.tensor([6, 8, 12], dtype=torch.int32)  # more tokens before it than max_seqlen
    out, lse, _ = call(starts, q, k, v)
    want, want_lse, _ = call(starts - 6, q[6:], k[6:], v[6:])
    torch.testing.assert_close((out[6:], lse[:, 6:]), (want, want_lse))
    assert (out[:6] == 0).all()
    assert (lse[:, :6] == -torch.inf).all()


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"causal": True, "alibi_slopes": SLOPES, "softcap": 1.5, "window_size": (3, 0)}],
    ids=["causal", "all"],
)
def test_packed_tensors_with_several_lengths(options, reference):
    lengths, kv_lengths = (4, 3), (5, 6)
    starts, kv_starts = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (lengths, kv_lengths))
    qkv = torch.randn(7, 3, 4, 16, requires_grad=True)
    kv = torch.randn(11, 2, 2, 16, requires_grad=True)

    def pieces(x, starts):
        return [x[None, a:b] for a, b in itertools.pairwise(starts.tolist())]

    parts = zip(*(pieces(x, starts) for x in qkv.unbind(1)), strict=True)
    want = torch.cat([wanted(reference, *x, **options)[0][0] for x in parts])
    got, lse, _ = bridge.flash_attn_varlen_qkvpacked_func(qkv, starts, 4, return_attn_probs=True, **options)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=0)
    assert lse.shape == (4, 7)
    same_gradients(got, want, [qkv])

    parts = zip(pieces(qkv[:, 0], starts), *(pieces(x, kv_starts) for x in kv.unbind(1)), strict=True)
    want = torch.cat([wanted(reference, *x, **options)[0][0] for x in parts])
    longest = torch.tensor(4), np.int64(6)
    got = bridge.flash_attn_varlen_kvpacked_func(qkv[:, 0], kv, starts, kv_starts, *longest, **options)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=0)
    same_gradients(got, want, [qkv, kv])


def test_mask_arguments(make_qkv, reference):
    inputs = make_qkv(length=9, kv_length=11, kv_heads=2)
    bias, mask = torch.randn(2, 2, 9, 11, requires_grad=True), torch.rand(2, 4, 9, 11) > 0.3
    want, _ = reference(*inputs, bias=bias.repeat_interleave(2, dim=1), mask=mask, is_causal=True, q_offset=2)
    got = bridge.flash_dmattn_func(*inputs, mask=mask, bias=bias, is_causal=True)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=0)
    same_gradients(got, want, [*inputs, bias])
    of_mask = bridge.flash_dmattn_func(*inputs, mask=bridge.masks.dense(mask))
    want, _ = reference(*inputs, mask=mask)
    torch.testing.assert_close(of_mask.double(), want, atol=3e-6, rtol=0)
    for name, x in (("mask", mask), ("bias", bias)):
        with pytest.raises(TypeError, match=rf"^attn_{name}: got it together with {name}, which is the"):
            bridge.flash_dmattn_func(*inputs, **{name: x, f"attn_{name}": x})


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_flash_dmattn_func(heads, masked, make_qkv, reference):
    inputs = make_qkv(length=9, kv_length=11, kv_heads=2)
    bias = torch.randn(2, heads, 9, 11, requires_grad=True)
    mask = torch.rand(2, heads, 9, 11) > 0.3 if masked else None
    of_heads = lambda x: x if heads in (1, 4) else x.repeat_interleave(2, dim=1)
    want, _ = reference(
        *inputs, bias=of_heads(bias), mask=of_heads(mask) if masked else None, is_causal=True, q_offset=2
    )
    got = bridge.flash_dmattn_func(*inputs, mask, bias, is_causal=True)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=0)
    same_gradients(got, want, [*inputs, bias])


def test_signatures():
    names = lambda function: " ".join(inspect.signature(function).parameters)
    common = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    assert names(bridge.flash_attn_func) == f"q k v {common}"
    packed = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    assert names(bridge.flash_attn_varlen_func) == f"{packed} {common} block_table"
    assert names(bridge.flash_attn_varlen_qkvpacked_func) == f"qkv cu_seqlens max_seqlen {common}"
    assert names(bridge.flash_attn_varlen_kvpacked_func) == f"{packed.replace('k v', 'kv', 1)} {common}"


X = torch.zeros(2, 8, 4, 16)
STARTS = torch.tensor([0, 8, 16], dtype=torch.int32)
ERRORS = [
    (bridge.flash_attn_func, (X, X, X, 0.1), {}, NotImplementedError, r"^dropout_p: got 0\.1, want 0"),
    (bridge.flash_attn_func, (X, X, X), {"window_size": 3}, TypeError, r"^window_size: got 3, want \(left, right\)"),
    (bridge.flash_attn_func, (X, X, X), {"alibi_slopes": SLOPES[:3]}, ValueError, r"^alibi_slopes: got .* want torch"),
    (bridge.flash_attn_func, (X[0], X, X), {}, ValueError, r"^q: got shape \(8, 4, 16\), want 4 axes"),
    (bridge.flash_attn_qkvpacked_func, (X,), {}, ValueError, r"^qkv: got shape .*, want \[batch, length, 3, heads"),
    (bridge.flash_dmattn_func, (X, X, X), {"return_attn_probs": True}, NotImplementedError, "^return_attn_probs: got"),
    (
        *(bridge.flash_attn_varlen_func, (*(X.flatten(0, 1),) * 3, STARTS.long(), STARTS, 8, 8)),
        *({}, ValueError, r"^cu_seqlens_q: got torch\.int64 \(3,\), want torch\.int32 \[sequences \+ 1\]"),
    ),
    (bridge.flash_attn_func, (X, X, X), {"softmax_scale": "x"}, TypeError, r"^softmax_scale: got str, want a number"),
    (
        *(bridge.flash_attn_func, (X, X, X), {"softcap": -1.0, "alibi_slopes": SLOPES}, ValueError),
        r"^softcap: got -1.0, want a number above 0",
    ),
    (bridge.flash_attn_varlen_qkvpacked_func, (X, STARTS, 8), {}, ValueError, r"^qkv: got shape .* \[tokens, 3, heads"),
    (
        *(bridge.flash_attn_varlen_qkvpacked_func, (X.flatten(0, 1)[:, :3].unsqueeze(2), STARTS, 7)),
        *({}, ValueError, r"^max_seqlen: got 7, want at least 8, the longest of cu_seqlens"),
    ),
    (
        *(bridge.flash_attn_varlen_func, (*(X.flatten(0, 1),) * 3, STARTS, STARTS * 100, 8, 8)),
        *({}, ValueError, r"^cu_seqlens_k: got \[.*\], want ascending numbers from 0 to \d+, the tokens"),
    ),
    (
        *(bridge.flash_attn_varlen_func, (*(X.flatten(0, 1),) * 3, STARTS.flip(0), STARTS, 8, 8)),
        *({}, ValueError, r"^cu_seqlens_q: got \[.*\], want ascending numbers"),
    ),
    (
        *(bridge.flash_attn_varlen_func, (*(X.flatten(0, 1),) * 3, STARTS, STARTS, 8.0, 8)),
        *({}, TypeError, r"^max_seqlen_q: got float, want an int"),
    ),
    (
        *(bridge.flash_attn_varlen_func, (*(X.flatten(0, 1),) * 3, STARTS, STARTS, 8, 8)),
        *({"block_table": STARTS}, NotImplementedError, "^block_table: got one, want None"),
    ),
]


@pytest.mark.parametrize(("function", "args", "options", "error", "message"), ERRORS, ids=[x[4] for x in ERRORS])
def test_errors(function, args, options, error, message):
    with pytest.raises(error, match=message):
        function(*args, **options)


NAMES = {
    "attn_mask": ({"attn_mask": torch.ones(24, 24).tril().bool()}, {"mask": torch.ones(24, 24).tril().bool()}),
    "attn_mask=None": ({"attn_mask": None}, {}),
    "softmax_scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True}, {"is_causal": True}),
    "window_size": ({"window_size": (3, 0), "causal": True}, {"window": (3, 0), "is_causal": True}),
    "no window": ({"window_size": (-1, -1), "causal": False}, {}),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [False, True])
def test_argument_aliases_of_flash_attention(name, compiled, make_qkv):
    others, own = NAMES[name]
    inputs = make_qkv()
    attend = lambda *x: bridge.flash_attention(*x, **others)
    attend = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    for _ in range(3):  # cached calls too
        torch.testing.assert_close(attend(*inputs), bridge.flash_attention(*inputs, **own))


def test_argument_aliases_of_mask_ops(make_qkv):
    inputs, keep = make_qkv(), torch.ones(24, 24, dtype=torch.bool).tril(3)
    want = bridge.dynamic_mask_attention(*inputs, keep, scale=0.3, is_causal=True)
    for _ in range(3):
        got = bridge.dynamic_mask_attention(*inputs, attn_mask=keep, softmax_scale=0.3, causal=True)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    blocks = torch.ones(3, 3, dtype=torch.bool)
    want = bridge.block_sparse_attention(*inputs, blocks, block_size=8, scale=0.3, window=(4, 0))
    got = bridge.block_sparse_attention(*inputs, blocks, block_size=8, softmax_scale=0.3, window_size=(4, 0))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_compiled_mask_ops(make_qkv):
    inputs = [x.detach() for x in make_qkv()]
    keep, blocks = torch.ones(24, 24, dtype=torch.bool).tril(3), torch.ones(3, 3, dtype=torch.bool)
    for attend in (
        lambda *x: bridge.dynamic_mask_attention(*x, keep, is_causal=True),
        lambda *x: bridge.dynamic_mask_attention(*x, attn_mask=keep, softmax_scale=0.3),
        lambda *x: bridge.block_sparse_attention(*x, blocks, block_size=8),
        lambda *x: bridge.block_sparse_attention(*x, blocks, block_size=8, softmax_scale=0.3),
    ):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))


def test_argument_alias_errors(make_qkv):
    inputs, longer = make_qkv(), make_qkv(kv_length=30)
    keep = torch.ones(24, 24, dtype=torch.bool)
    for options, error, message in (
        ({"softmax_scale": 1.0, "scale": 1.0}, TypeError, "^softmax_scale: got it with scale"),
        ({"causal": False, "is_causal": True}, TypeError, "^causal: got it with is_causal"),
        ({"attn_mask": keep, "mask": keep}, TypeError, "^attn_mask: got it with mask"),
        ({"attn_mask": keep.float()}, TypeError, r"^attn_mask: got dtype torch\.float32, .* is a bias"),
        ({"window_size": 3}, TypeError, r"^window_size: got 3, want \(left, right\)"),
        ({"dropout": 0.0}, TypeError, r"^flash_attention\(\) got an unexpected keyword argument 'dropout'"),
    ):
        with pytest.raises(error, match=message):
            bridge.flash_attention(*inputs, **options)
    with pytest.raises(ValueError, match=r"^causal: got it with 24 queries and 30 keys, .* is_causal with q_offset=6"):
        bridge.flash_attention(*longer, causal=True)
    torch.testing.assert_close(
        bridge.flash_attention(*longer, causal=True, q_offset=6), bridge.flash_attn_func(*longer, causal=True)
    )
    with pytest.raises(TypeError, match=r"^mask: got None, want a bool tensor"):
        bridge.dynamic_mask_attention(*inputs)
    with pytest.raises(TypeError, match=r"^attn_mask: got it with mask"):
        bridge.dynamic_mask_attention(*inputs, keep, attn_mask=keep)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("causal", [False, True])
def test_sequence_longer_than_max_seqlen(name, causal):
    x, starts = torch.zeros(10, 2, 8), torch.tensor([0, 3, 10], dtype=torch.int32)
    lengths = {"max_seqlen_q": 7, "max_seqlen_k": 7} | {name: 6}
    with pytest.raises(ValueError, match=rf"^{name}: got 6, want at least 7, the longest of cu_seqlens_{name[-1]}"):
        bridge.flash_attn_varlen_func(x, x, x, starts, starts.clone(), causal=causal, **lengths)
