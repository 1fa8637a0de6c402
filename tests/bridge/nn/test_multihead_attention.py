"""bridge.nn.MultiheadAttention equals torch.nn.MultiheadAttention, in values, gradients and weights."""

import copy
import inspect
import itertools
import pickle
import warnings

import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge.interop import warn_once

EMBED, HEADS, BATCH, LENGTH, KEYS = 32, 4, 3, 9, 11
CASES = {
    "self, batch first": ({"batch_first": True}, {}),
    "self, sequence first": ({}, {}),
    "cross": ({"batch_first": True}, {"keys": KEYS}),
    "cross, sequence first, without bias": ({"bias": False}, {"keys": KEYS}),
    "widths of their own": ({"kdim": 20, "vdim": 24, "batch_first": True}, {"keys": KEYS}),
    "no batch": ({"batch_first": True}, {"batch": None, "keys": KEYS, "padding": True}),
    "padding": ({"batch_first": True}, {"padding": True}),
    "padding, sequence first": ({}, {"padding": True, "keys": KEYS}),
    "mask": ({"batch_first": True}, {"keys": KEYS, "mask": (LENGTH, KEYS)}),
    "mask of heads": ({"batch_first": True}, {"keys": KEYS, "mask": (BATCH * HEADS, LENGTH, KEYS), "padding": True}),
    "mask of heads, sequence first": ({}, {"mask": (BATCH * HEADS, LENGTH, LENGTH), "padding": True}),
    "added": ({"batch_first": True}, {"mask": (LENGTH, LENGTH), "added": True, "padding": True}),
    "added, sequence first": ({}, {"mask": (BATCH * HEADS, LENGTH, LENGTH), "added": True}),
    "causal": ({"batch_first": True}, {"causal": True}),
    "appended rows": ({"add_bias_kv": True, "batch_first": True}, {"padding": True, "mask": (LENGTH, LENGTH)}),
    "appended zeros": ({"add_zero_attn": True}, {"padding": True, "keys": KEYS}),
    "appended both, sequence first": ({"add_zero_attn": True, "add_bias_kv": True}, {"mask": (LENGTH, LENGTH)}),
    "appended, no batch": ({"add_bias_kv": True, "add_zero_attn": True}, {"batch": None}),
}
QUICK = {
    *("self, batch first", "cross, sequence first, without bias", "widths of their own", "no batch", "causal"),
    *("padding, sequence first", "mask of heads, sequence first", "added", "appended both, sequence first"),
}


def both(**options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(EMBED, HEADS, **options)
    ours = bridge.nn.MultiheadAttention(EMBED, HEADS, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs_of(module, *, batch=BATCH, keys=None, padding=False, mask=None, added=False, causal=False):
    """The positional tensors and the arguments of a call."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    shape = lambda length, width: (
        (length, width) if batch is None else (batch, length, width) if module.batch_first else (length, batch, width)
    )
    if keys is None:
        x = draw(*shape(LENGTH, EMBED)).requires_grad_()
        tensors = [x, x, x]
    else:
        sizes = ((LENGTH, EMBED), (keys, module.kdim), (keys, module.vdim))
        tensors = [draw(*shape(*size)).requires_grad_() for size in sizes]
    options = {}
    if mask is not None:
        options["attn_mask"] = draw(*mask) if added else draw(*mask) > 0.6
    if padding:
        left_out = torch.zeros(batch or 1, keys or LENGTH, dtype=torch.bool)
        left_out[0, -4:] = True
        left_out = left_out if not added else torch.zeros_like(left_out, dtype=torch.float).masked_fill(left_out, -9.0)
        options["key_padding_mask"] = left_out[0] if batch is None else left_out
    if causal:
        options |= {"is_causal": True, "attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)}
    return tensors, options


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in CASES])
def test_values_and_gradients(case):
    arguments, given = CASES[case]
    theirs, ours = both(**arguments)
    tensors, options = inputs_of(theirs, **given)
    want, _ = theirs(*tensors, need_weights=False, **options)
    got, weights = ours(*tensors, **options)
    assert weights is None
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=3e-6, rtol=0)
    cotangent = torch.randn_like(want)
    leaves = [*dict.fromkeys(tensors)]
    gradients = [
        torch.autograd.grad(out, [*leaves, *module.parameters()], cotangent)
        for out, module in ((got, ours), (want, theirs))
    ]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, atol=3e-5, rtol=1e-5)
    if given.get("causal"):
        torch.testing.assert_close(ours(*tensors, is_causal=True)[0], want, atol=3e-6, rtol=0)


def test_causal_with_appended_keys():
    """All tokens see the appended rows. No token sees a later token."""
    _, module = both(add_bias_kv=True, batch_first=True)
    x = torch.randn(1, LENGTH, EMBED)
    got, _ = module(x, x, x, is_causal=True)
    want, _ = module(x, x, x, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_arguments_parameters_initialisation():
    names = list(inspect.signature(torch.nn.MultiheadAttention).parameters)
    assert list(inspect.signature(bridge.nn.MultiheadAttention).parameters) == [*names, "implementation"]
    forward = list(inspect.signature(torch.nn.MultiheadAttention.forward).parameters)
    assert list(inspect.signature(bridge.nn.MultiheadAttention.forward).parameters) == forward
    for bias, own, append in itertools.product([False, True], repeat=3):
        options = {"bias": bias, "add_bias_kv": append, **({"kdim": 8, "vdim": 12} if own else {})}
        drawn = []
        for cls in (torch.nn.MultiheadAttention, bridge.nn.MultiheadAttention):
            torch.manual_seed(3)
            drawn.append(cls(EMBED, HEADS, **options).state_dict())
        assert list(drawn[0]) == list(drawn[1])
        assert all(torch.equal(x, y) for x, y in zip(drawn[0].values(), drawn[1].values(), strict=True))


@pytest.mark.parametrize("average", [True, False])
def test_attention_weights_match_pytorch(average):
    theirs, ours = both(batch_first=True)
    (x, _, _), options = inputs_of(theirs, padding=True)
    options |= {"need_weights": True, "average_attn_weights": average}
    for want, got in zip(theirs(x, x, x, **options), ours(x, x, x, **options), strict=True):
        torch.testing.assert_close(got, want)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for want, got in zip(
        theirs(x, x, x, attn_mask=causal, **options), ours(x, x, x, is_causal=True, **options), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_fallback_matches_pytorch(monkeypatch):
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    x = torch.randn(2, LENGTH, EMBED)
    theirs, ours = both(batch_first=True, dropout=0.5)
    results = []
    for module, options in ((theirs, {"need_weights": False}), (ours, {})):
        torch.manual_seed(2)
        results.append(module(x, x, x, **options)[0])
    torch.testing.assert_close(*results)
    assert any("dropout=0.5 drops attention weights" in x for x in warn_once._GIVEN)
    with_weights = []
    for module in (theirs, ours):  # the same weights are dropped, too
        torch.manual_seed(2)
        with_weights.append(module(x, x, x, need_weights=True, average_attn_weights=False))
    torch.testing.assert_close(*with_weights)
    with warnings.catch_warnings():  # the same reason with another value warns no second time
        warnings.simplefilter("error")
        ours.dropout = 0.25
        ours(x, x, x)
    torch.testing.assert_close(ours.eval()(x, x, x)[0], theirs.eval()(x, x, x)[0], atol=3e-6, rtol=0)
    with pytest.warns(UserWarning, match="query is float64"):
        assert ours.double()(x.double(), x.double(), x.double())[0].dtype == torch.float64
    assert ours.float()(x[:, :0], x[:, :0], x[:, :0])[0].shape == (2, 0, EMBED)


def test_fully_masked_rows_give_the_output_bias():
    _, ours = both(batch_first=True)
    x = torch.randn(2, LENGTH, EMBED, requires_grad=True)
    out, _ = ours(x, x, x, key_padding_mask=torch.tensor([[True] * LENGTH, [False] * LENGTH]))
    torch.testing.assert_close(out[0], ours.out_proj.bias.expand(LENGTH, -1))
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


DEAD = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
DEAD[0], DEAD[1, -2:] = True, True
ROWS = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) > 0.6
ROWS[2] = True
OF_HEADS = torch.rand(BATCH * HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(6)) > 0.6
OF_HEADS[HEADS + 1, 3], OF_HEADS[HEADS + 2, 4], OF_HEADS[0] = True, True, True


def added(mask):
    """The mask as floats: -inf where it is True, else 0.5."""
    return torch.full(mask.shape, 0.5).masked_fill(mask, -torch.inf)


# The module's options, the call's, and whether to compare the call without weights too (JAX compiles a program).
DEAD_ROWS = {
    "padding": ({"batch_first": True}, {"key_padding_mask": DEAD}, True),
    "padding, added": ({"batch_first": True}, {"key_padding_mask": added(DEAD)}, False),
    "padding, sequence first": ({}, {"key_padding_mask": DEAD}, False),
    "mask": ({"batch_first": True}, {"attn_mask": ROWS}, False),
    "mask, added": ({}, {"attn_mask": added(ROWS)}, False),
    "mask of heads": ({"batch_first": True}, {"attn_mask": OF_HEADS}, True),
    "mask of heads, added, and padding": (
        *({}, {"attn_mask": added(OF_HEADS), "key_padding_mask": added(DEAD)}, True),
    ),
    "causal behind padding": (
        *({"batch_first": True}, {"is_causal": True, "key_padding_mask": torch.arange(LENGTH).expand(3, -1) < 2}, True),
    ),
    "bool and added": ({"batch_first": True}, {"attn_mask": added(ROWS), "key_padding_mask": DEAD}, False),
    "no batch": ({}, {"attn_mask": OF_HEADS[HEADS : 2 * HEADS]}, False),
    "appended": ({"add_zero_attn": True, "add_bias_kv": True}, {"attn_mask": OF_HEADS, "key_padding_mask": DEAD}, True),
}  # fmt: skip


def exact_attention(module, x, *, attn_mask=None, key_padding_mask=None, is_causal=False):
    """(output, weights of the heads [N, H, L, S]) of self-attention in float64, from the definition.

    x: [N, L, E]. Rows of weights without an allowed key are 0.
    """
    batch, length, _ = x.shape
    query, key, value = torch.nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)
    scores_mask = torch.zeros(batch, HEADS, length, length, dtype=torch.float64)
    floats = lambda m: m.double() if m.is_floating_point() else torch.zeros(m.shape).double().masked_fill(m, -torch.inf)
    if attn_mask is not None:
        scores_mask = scores_mask + floats(attn_mask).reshape(-1, HEADS if attn_mask.ndim == 3 else 1, length, length)
    if key_padding_mask is not None:
        scores_mask = scores_mask + floats(key_padding_mask)[:, None, None]
    if is_causal:
        scores_mask = scores_mask + floats(torch.ones(length, length, dtype=torch.bool).triu(1))
    if module.bias_k is not None:
        key, value = (
            torch.cat([y, row.expand(batch, 1, -1)], 1) for y, row in ((key, module.bias_k), (value, module.bias_v))
        )
    if module.add_zero_attn:
        key, value = (torch.cat([y, torch.zeros_like(y[:, :1])], 1) for y in (key, value))
    scores_mask = torch.nn.functional.pad(scores_mask, (0, key.shape[1] - length))
    query, key, value = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (query, key, value))
    scores = query @ key.transpose(-2, -1) / (EMBED // HEADS) ** 0.5 + scores_mask
    powers = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e30).detach())
    totals = powers.sum(-1, keepdim=True)
    weights = powers / torch.where(totals == 0, 1.0, totals)
    out = (weights @ value).transpose(1, 2).flatten(2)
    return torch.nn.functional.linear(out, module.out_proj.weight, module.out_proj.bias), weights


@pytest.mark.parametrize("average", [True, False], ids=["averaged", "heads"])
@pytest.mark.parametrize("case", DEAD_ROWS)
def test_fully_masked_rows_have_zero_weights(case, average):
    """Output, weights and all gradients agree with the definition, in calls with weights and without them."""
    arguments, options, without_too = DEAD_ROWS[case]
    _, ours = both(**arguments)
    is_batched = case != "no batch"
    exact = copy.deepcopy(ours).double()
    x = torch.randn(BATCH if is_batched else 1, LENGTH, EMBED, generator=torch.Generator().manual_seed(2))
    exact_x = x.double().requires_grad_()
    want, want_weights = exact_attention(exact, exact_x, **options)
    assert not want_weights.any(-1).all() or case == "appended"
    want_weights = want_weights.mean(1) if average else want_weights
    draw = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(y.shape, generator=draw, dtype=torch.float64) for y in (want, want_weights)]
    for need_weights in (True, False) if without_too and average else (True,):
        x = x.detach().requires_grad_()
        given = (x if is_batched else x[0]) if ours.batch_first or not is_batched else x.transpose(0, 1)
        out, weights = ours(given, given, given, need_weights=need_weights, average_attn_weights=average, **options)
        out = out if ours.batch_first or not is_batched else out.transpose(0, 1)
        results, wanted = [out if is_batched else out[None]], [want]
        if need_weights:
            results, wanted = [*results, weights if is_batched else weights[None]], [want, want_weights]
        for got, right in zip(results, wanted, strict=True):
            assert got.shape == right.shape
            torch.testing.assert_close(got.double(), right, atol=3e-6, rtol=0)
        total = lambda results: sum((y.double() * c).sum() for y, c in zip(results, cotangents, strict=False))
        gradients = torch.autograd.grad(total(results), [x, *ours.parameters()])
        right = torch.autograd.grad(total(wanted), [exact_x, *exact.parameters()], retain_graph=True)
        for got, value in zip(gradients, right, strict=True):
            torch.testing.assert_close(got.double(), value, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_fully_masked_rows_in_the_fallback(need_weights):
    """Dropout; and heads too wide for the kernels, in eval without gradients, where PyTorch has a fast path."""
    x = torch.randn(BATCH, LENGTH, EMBED)
    _, ours = both(batch_first=True, dropout=0.5)
    out, weights = ours(x, x, x, key_padding_mask=DEAD, need_weights=need_weights)
    assert all(y.isfinite().all() for y in torch.autograd.grad(out.square().sum(), list(ours.parameters())))
    wide = bridge.nn.MultiheadAttention(2 * 264, 2, batch_first=True).eval()
    torch.nn.init.normal_(wide.out_proj.bias)
    x = torch.randn(BATCH, LENGTH, 2 * 264)
    with torch.no_grad():
        out, weights = wide(x, x, x, key_padding_mask=DEAD, need_weights=need_weights)
    torch.testing.assert_close(out[0], wide.out_proj.bias.expand(LENGTH, -1))
    assert out.isfinite().all()
    assert weights is None or (weights[0] == 0).all()


@pytest.mark.timeout(300)
def test_in_pytorch_layers_compile_copy_pickle():
    torch._dynamo.reset()
    layer = torch.nn.TransformerDecoderLayer(EMBED, HEADS, 48, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(layer)
    for name in ("self_attn", "multihead_attn"):
        module = bridge.nn.MultiheadAttention(EMBED, HEADS, batch_first=True)
        module.load_state_dict(getattr(layer, name).state_dict())
        setattr(ours, name, module)
    x, memory = torch.randn(2, 5, EMBED), torch.randn(2, 7, EMBED)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
    want = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(ours(x, memory, tgt_mask=mask, tgt_is_causal=True), want, atol=3e-6, rtol=0)
    module = ours.self_attn
    want, _ = module(x, x, x, key_padding_mask=torch.arange(5) > torch.tensor([[3], [5]]))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    got, _ = compiled(x, x, x, key_padding_mask=torch.arange(5) > torch.tensor([[3], [5]]))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"attn_mask": torch.ones(2, 5).bool()},
            ValueError,
            r"^attn_mask: got shape \(2, 5\), want \(9, 9\) or \(8, 9",
        ),
        ({"attn_mask": torch.ones(9, 9).int()}, TypeError, r"^attn_mask: got dtype torch\.int32, want torch\.bool"),
        (
            {"attn_mask": torch.zeros(9, 9).half()},
            TypeError,
            r"^attn_mask: got dtype torch\.float16, want torch\.bool, or query's dtype torch\.float32$",
        ),
        (
            {"key_padding_mask": torch.zeros(2, 9).half()},
            TypeError,
            r"^key_padding_mask: got dtype torch\.float16, want",
        ),
        (
            {"key_padding_mask": torch.zeros(2, 9, device="meta")},
            ValueError,
            r"^key_padding_mask: got a tensor on meta, want query's device cpu",
        ),
        ({"key_padding_mask": torch.ones(9).bool()}, ValueError, r"^key_padding_mask: got shape \(9,\), want \(2, 9\)"),
        ({"key_padding_mask": [True]}, TypeError, r"^key_padding_mask: got list, want a torch\.Tensor"),
        ({"key": torch.ones(9, EMBED)}, ValueError, r"^query, key, value: got shapes .*, want 3 axes each"),
        ({"key": torch.ones(1, 18, EMBED)}, ValueError, r"^query, key, value: got shapes .*, want one batch"),
        ({"value": torch.ones(2, 8, EMBED)}, ValueError, r"^query, key, value: got shapes .* as many keys as values"),
    ],
)
def test_errors(options, error, message):
    _, ours = both(batch_first=True)
    x = torch.randn(2, LENGTH, EMBED)
    with pytest.raises(error, match=message):
        ours(**{"query": x, "key": x, "value": x, **options})


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("entries", [1, 3, 4])
def test_context_with_another_batch_is_refused(entries, batch_first):
    """A reshape could otherwise assign its tokens to the entries of the query's batch."""
    _, ours = both(batch_first=batch_first)
    x, context = torch.randn(2, LENGTH, EMBED), torch.randn(entries, LENGTH, EMBED)
    if not batch_first:
        x, context = x.transpose(0, 1), context.transpose(0, 1)
    with pytest.raises(ValueError, match=r"^query, key, value: got shapes .*, want one batch"):
        ours(x, context, context)
