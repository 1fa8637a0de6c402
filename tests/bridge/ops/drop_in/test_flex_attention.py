"""bridge.flex_attention against PyTorch's, under BlockMasks of every kind."""

import copy
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

from jax_kernels import bridge
from jax_kernels.bridge import masks
from jax_kernels.bridge.interop import warn_once

BATCH, HEADS, LENGTH, KV_LENGTH, HEAD_DIM = 2, 4, 40, 48, 8
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.arange(KV_LENGTH) // 9
LIMITS = torch.tensor([48, 23])
BIAS = torch.randn(HEADS, LENGTH, KV_LENGTH, generator=GENERATOR, requires_grad=True)


def documents(b, h, q, k):
    return (IDS[q] == IDS[k]) & (q >= k)


def ragged(b, h, q, k):
    return (k < LIMITS[b]) & (h != q // 30)  # one head has queries without keys


def biased(score, b, h, q, k):
    return score * 0.5 + BIAS[h, q, k]


def make(heads=HEADS, kv_heads=HEADS, batch=BATCH, kv_batch=BATCH, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch, heads, LENGTH), (kv_batch, kv_heads, KV_LENGTH), (kv_batch, kv_heads, KV_LENGTH))
    return [torch.randn(*x, HEAD_DIM, generator=generator, **options).to(dtype) for x in shapes]


def block_mask(mask_mod, batch=None, heads=None, block=16, lengths=(LENGTH, KV_LENGTH)):
    return torchs.create_block_mask(mask_mod, batch, heads, *lengths, device="cpu", BLOCK_SIZE=block)


def oracle(query, key, value, *, score_mod=None, keep=None, scale=None):
    """(out, lse) in float64. keep: bool, broadcastable to the scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    grids = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    scores = scores if score_mod is None else score_mod(scores, *grids)
    if keep is None:
        return torch.softmax(scores, -1) @ value, scores.logsumexp(-1)
    keep = keep(*grids) if callable(keep) else keep
    scores = scores.masked_fill(~keep, -torch.inf)
    lse = scores.logsumexp(-1)
    shifted = torch.where(lse.isinf(), torch.zeros_like(lse), lse)[..., None]
    return torch.exp(scores - shifted) @ value, lse


CASES = {
    "plain": {},
    "score_mod": {"score_mod": biased},
    "causal": {"keep": lambda b, h, q, k: q >= k},
    "documents": {"keep": documents, "score_mod": biased},
    "documents, uneven blocks": {"keep": documents, "block": (8, 16)},
    "batch and heads": {"keep": ragged, "batch": BATCH, "heads": HEADS, "score_mod": biased, "scale": 0.3},
    "grouped heads": {"keep": documents, "kv_heads": 2, "score_mod": biased},
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    case = CASES[name]
    keep, score_mod, scale = case.get("keep"), case.get("score_mod"), case.get("scale")
    made = None if keep is None else block_mask(keep, case.get("batch"), case.get("heads"), case.get("block", 16))
    qkv = make(kv_heads=case.get("kv_heads", HEADS), requires_grad=True)
    options = {"scale": scale, "enable_gqa": "kv_heads" in case}
    out, aux = bridge.flex_attention(*qkv, score_mod, made, **options, return_aux=torchs.AuxRequest(lse=True))
    want, lse = oracle(*qkv, score_mod=score_mod, keep=keep, scale=scale)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(aux.lse.double(), lse, atol=1e-5, rtol=1e-5)
    assert aux.max_scores is None
    read = (*qkv, BIAS) if score_mod is biased else qkv
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    dlse = torch.where(lse.isinf(), 0.0, 1.0)
    ours = torch.autograd.grad((out * dout).sum() + torch.where(dlse > 0, aux.lse, 0.0).sum(), read)
    theirs = torch.autograd.grad((want * dout).sum() + torch.where(dlse > 0, lse, 0.0).sum(), read)
    for of_ours, of_theirs in zip(ours, theirs, strict=True):
        torch.testing.assert_close(of_ours, of_theirs, atol=1e-4, rtol=1e-4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = [x.detach() for x in qkv]
        of_torch = torchs.flex_attention(*plain, score_mod, made, **options)
        torch.testing.assert_close(bridge.flex_attention(*plain, score_mod, made, **options), of_torch)


def of_blocks(keep, size=16, noop=True, **full):
    """A BlockMask whose kept pairs follow only from its lists of blocks."""
    counts, indices = torchs._dense_to_ordered(keep.to(torch.int8))
    mask_mod = None if noop else documents
    return torchs.BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(LENGTH, KV_LENGTH), **full
    )


def test_block_lists_are_used():
    """PyTorch's kernels skip unlisted blocks. Its eager function reads only the mask_mod."""
    keep = torch.rand(BATCH, HEADS, 3, 3, generator=GENERATOR) > 0.4
    full = ~keep & (torch.rand(BATCH, HEADS, 3, 3, generator=GENERATOR) > 0.5)
    cells = lambda x: x.repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :LENGTH, :KV_LENGTH]
    qkv = make()
    counts, indices = torchs._dense_to_ordered(full.to(torch.int8))
    for made, want in (
        (of_blocks(keep), cells(keep)),
        (of_blocks(keep[:1, :1]), cells(keep[:1, :1])),
        (of_blocks(keep, full_kv_num_blocks=counts, full_kv_indices=indices), cells(keep | full)),
        (
            of_blocks(keep, noop=False, full_kv_num_blocks=counts, full_kv_indices=indices),
            (cells(keep) & documents(None, None, torch.arange(LENGTH)[:, None], torch.arange(KV_LENGTH))) | cells(full),
        ),
    ):
        out, lse = bridge.flex_attention(*qkv, block_mask=made, return_lse=True)
        of_oracle = oracle(*qkv, keep=want)
        torch.testing.assert_close(out.double(), of_oracle[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), of_oracle[1], atol=1e-5, rtol=1e-5)


def test_keys_with_one_batch_entry():
    qkv = make(kv_batch=1)
    made = block_mask(ragged, BATCH, HEADS)
    want, _ = oracle(qkv[0], *(x.expand(BATCH, -1, -1, -1) for x in qkv[1:]), keep=ragged)
    torch.testing.assert_close(bridge.flex_attention(*qkv, block_mask=made).double(), want, atol=1e-5, rtol=1e-5)


def test_mask_mod_reads_current_values():
    ids = torch.zeros(KV_LENGTH, dtype=torch.int64)
    mask_mod = lambda b, h, q, k: ids[q] == ids[k]
    made = block_mask(mask_mod)
    qkv = make()
    plain, _ = oracle(*qkv)
    torch.testing.assert_close(bridge.flex_attention(*qkv, block_mask=made).double(), plain, atol=1e-5, rtol=1e-5)
    attend = torch.compile(lambda *x: bridge.flex_attention(*x, block_mask=made), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(attend(*qkv).double(), plain, atol=1e-5, rtol=1e-5)
    kept = [made._jax_kernels_masks[key].mask for key in made._jax_kernels_masks]
    bridge.flex_attention(*qkv, block_mask=made)
    assert [made._jax_kernels_masks[key].mask for key in made._jax_kernels_masks] == kept
    ids[20:] = 1  # the block lists still keep all blocks, the mask_mod now keeps fewer pairs
    # The first 32 queries' blocks were full when the lists were made. PyTorch's kernels ask the mask_mod only in
    # partial blocks.
    want, _ = oracle(*qkv, keep=lambda b, h, q, k: (ids[q] == ids[k]) | (q < 32))
    torch.testing.assert_close(bridge.flex_attention(*qkv, block_mask=made).double(), want, atol=1e-5, rtol=1e-5)
    want, _ = oracle(*qkv, keep=mask_mod)
    partial = torchs.BlockMask.from_kv_blocks(
        *torchs._dense_to_ordered(torch.ones(1, 1, 3, 3, dtype=torch.int8)), BLOCK_SIZE=16, mask_mod=mask_mod,
        seq_lengths=(LENGTH, KV_LENGTH),
    )  # fmt: skip
    torch.testing.assert_close(bridge.flex_attention(*qkv, block_mask=partial).double(), want, atol=1e-5, rtol=1e-5)
    ids.zero_()
    torch.testing.assert_close(bridge.flex_attention(*qkv, block_mask=partial).double(), plain, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"^mask: .* ids has changed since"):
        attend(*qkv)


def test_changed_lists_rebuild_the_mask():
    made = of_blocks(torch.ones(1, 1, 3, 3, dtype=torch.bool))
    qkv = make()
    bridge.flex_attention(*qkv, block_mask=made)
    made.kv_num_blocks.fill_(1)  # keeps the first block of each row
    want, _ = oracle(*qkv, keep=lambda b, h, q, k: k < 16)
    torch.testing.assert_close(bridge.flex_attention(*qkv, block_mask=made).double(), want, atol=1e-5, rtol=1e-5)
    assert not copy.deepcopy(made)._jax_kernels_masks


def relative(bias, places):
    return lambda score, b, h, q, k: score + bias[h, places[q] - places[k] + KV_LENGTH]


class Layer(torch.nn.Module):
    """A layer whose score_mod reads a parameter and an int64 buffer."""

    def __init__(self, made):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(HEADS, 2 * KV_LENGTH, generator=torch.Generator().manual_seed(3)))
        self.score_mod = relative(self.bias, torch.arange(KV_LENGTH))
        self.made = made

    def forward(self, *qkv):
        return bridge.flex_attention(*qkv, self.score_mod, self.made, enable_gqa=True)


def test_compiled():
    layer = Layer(block_mask(documents))
    qkv = make(kv_heads=2, requires_grad=True)
    inputs = (*qkv, layer.bias)
    want = layer(*qkv)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*qkv)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for pair in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (got, want)), strict=True):
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)
    attend = torch.compile(
        lambda made, *x: bridge.flex_attention(*x, block_mask=made, return_lse=True), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    plain = make()
    for mask_mod in (documents, lambda b, h, q, k: q >= k):
        out, lse = attend(block_mask(mask_mod), *plain)
        of_oracle = oracle(*plain, keep=mask_mod)
        torch.testing.assert_close(out.double(), of_oracle[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), of_oracle[1], atol=1e-5, rtol=1e-5)


def test_library_mask():
    qkv = make()
    want, _ = oracle(*qkv, keep=lambda b, h, q, k: q >= k)
    got = bridge.flex_attention(*qkv, block_mask=masks.causal())
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_other_calls_run_pytorchs_function(monkeypatch):
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    qkv = [x.double() for x in make()]
    with pytest.warns(UserWarning, match=r"flex_attention: query is torch.float64.* PyTorch's own function runs"):
        got = bridge.flex_attention(*qkv, block_mask=block_mask(documents))
    torch.testing.assert_close(got, oracle(*qkv, keep=documents)[0])
    scanned = lambda s, b, h, q, k: s + torch.cumsum(BIAS.detach()[h, q], 0)[k]
    plain = make()
    with pytest.warns(UserWarning, match=r"uses torch's cumsum.* PyTorch's own function runs"):
        got = bridge.flex_attention(*plain, scanned)
    torch.testing.assert_close(got, torchs.flex_attention(*plain, scanned))
    with pytest.raises(TypeError, match=r"score_mod: .* uses torch's cumsum"):  # PyTorch has no gradients here
        bridge.flex_attention(*make(requires_grad=True), scanned)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"query": 1}, TypeError, "^query: got builtins.int, want a torch.Tensor"),
        ({"query": torch.zeros(2, 3, 4)}, ValueError, "^query: .* want 4 axes .batch, heads, length, head_dim"),
        ({"key": torch.zeros(2, 2, 48, 8)}, ValueError, "^key: got 2 heads, want query's 4, or enable_gqa=True"),
        ({"key": torch.zeros(2, 3, 48, 8), "enable_gqa": True}, ValueError, "^key: got 3 heads, want a divisor"),
        ({"key": torch.zeros(1, 4, 48, 8)}, ValueError, "^key: got batch 1, want query's 2, or 1 with a block_mask"),
        ({"block_mask": 3}, TypeError, "^block_mask: got int, want a .*BlockMask"),
        ({"block_mask": block_mask(documents, lengths=(40, 40))}, ValueError, "^block_mask: got one for 40 .* 40 keys"),
        ({"block_mask": block_mask(documents, 3, 4)}, ValueError, "^block_mask: got kv_num_blocks of shape .3, 4, 3."),
        ({"block_mask": block_mask(documents)[:, :, 1:]}, ValueError, "^block_mask: got a part of a BlockMask"),
        ({"kernel_options": {"BLOCK": 3}}, ValueError, "^kernel_options: got 'BLOCK'"),
        ({"return_lse": True, "return_aux": torchs.AuxRequest(lse=True)}, ValueError, "^return_lse, return_aux: got"),
    ],
)
def test_errors(change, kind, message):
    given = dict(zip(("query", "key", "value"), make(), strict=True)) | change
    with pytest.raises(kind, match=message):
        bridge.flex_attention(**given)


def test_kernel_options_change_nothing():
    qkv = make()
    options = {"BLOCK_M": 32, "fwd_BLOCK_N": 64, "num_warps": 4, "PRESCALE_QK": True}
    torch.testing.assert_close(bridge.flex_attention(*qkv, kernel_options=options), bridge.flex_attention(*qkv))
