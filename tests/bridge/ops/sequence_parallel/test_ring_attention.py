"""bridge.ring_attention and its dilated form over two CPU processes: equal to one process, forward and gradients."""

import pytest

from tests.support.processes.ranks import printed_by_ranks

RING = """
import os, sys
import torch
import torch.distributed as dist
from jax_kernels import bridge

is_whole = sys.argv[1] == "whole"  # every strategy

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(1, 4, 2, 8)
try:
    bridge.ring_attention(x, x, x)
except RuntimeError as error:
    assert "call bridge.initialize_distributed()" in str(error), error
    print("not initialized", flush=True)
bridge.initialize_distributed(timeout=60)
bridge.initialize_distributed()  # a second call does nothing

torch.manual_seed(0)
tokens, heads = 16, 4
query, dout = torch.randn(2, tokens, heads, 8), torch.randn(2, tokens, heads, 8)
key, value, dlse = torch.randn(2, tokens, 2, 8), torch.randn(2, tokens, 2, 8), torch.randn(2, heads, tokens)
ids = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), 4).expand(2, -1).contiguous()
sinks = torch.randn(heads)


def reference(query, key, value, ids, sinks, is_causal, left=tokens):
    repeated = [x.repeat_interleave(2, dim=2) for x in (key, value)]
    scores = torch.einsum("bthd,bshd->bhts", query, repeated[0]) / 8**0.5
    keep = torch.ones(tokens, tokens, dtype=bool)
    keep = (keep.tril() if is_causal else keep).triu(-left)
    if ids is not None:
        keep = keep & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = scores.masked_fill(~keep, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks[:, None])
    return torch.einsum("bhts,bshd->bthd", (scores - lse[..., None]).exp(), repeated[1]), lse


def check(layout, is_causal, ids, sinks, **options):
    whole = [x.double().requires_grad_() for x in (query, key, value)]
    of_sinks = None if sinks is None else sinks.double().requires_grad_()
    out, lse = reference(*whole, ids, of_sinks, is_causal, options.get("window", (tokens, 0))[0])
    torch.autograd.backward([out, lse], [dout.double(), dlse.double()])
    shard = lambda x, axis=1: None if x is None else bridge.shard_sequence(x, layout=layout, axis=axis)
    mine = [shard(x).requires_grad_() for x in (query, key, value)]
    my_sinks = None if sinks is None else sinks.clone().requires_grad_()
    my_ids = shard(ids if isinstance(layout, str) else torch.from_numpy(layout.segment_ids))
    got, got_lse = bridge.ring_attention(
        *mine, layout=layout, is_causal=is_causal, segment_ids=my_ids, sinks=my_sinks, return_lse=True, **options
    )
    torch.autograd.backward([got, got_lse], [shard(dout), shard(dlse, 2)])
    close = lambda a, b: torch.testing.assert_close(a, b.float(), rtol=0, atol=2e-6)
    close(bridge.unshard_sequence(got, layout=layout), out)
    close(bridge.unshard_sequence(got_lse, layout=layout, axis=2), lse)
    for x, of in zip(mine, whole):
        close(bridge.unshard_sequence(x.grad, layout=layout), of.grad)
    if sinks is not None:
        dist.all_reduce(my_sinks.grad)
        close(my_sinks.grad, of_sinks.grad)


check("zigzag", True, ids, sinks)
check("contiguous", False, None, None, sends_ahead=2)
if is_whole:
    check("zigzag", True, ids, sinks, strategy="ring")
    check("zigzag", True, ids, sinks, strategy="halo", window=(3, 0))
    check("zigzag", True, None, None, strategy="all_gather")
    check("zigzag", True, ids, sinks, strategy="all_to_all")
    from jax_kernels import DocumentLayout
    lengths = torch.tensor([9, 4, 3])
    of_rows = torch.stack([torch.repeat_interleave(torch.arange(3), x) for x in (lengths, lengths.flip(0))]).int()
    documents = DocumentLayout.of(of_rows.numpy(), 2, heads=10**6)
    assert documents.steps.steps == (1,), documents
    check(documents, True, of_rows, sinks)
# Successive calls that differ in one option's value.
with torch.no_grad():
    mine = [bridge.shard_sequence(x) for x in (query, key, value)]
    others = [{"softcap": 0.5}, {"softcap": 50.0}, {"scale": 0.1}, {"window": (3, 2)}, {"is_causal": True}]
    for options in 2 * [{}, *others]:
        want = bridge.flash_attention(query, key, value, **options)
        got = bridge.ring_attention(*mine, layout="zigzag", **options)
        torch.testing.assert_close(bridge.unshard_sequence(got), want, rtol=0, atol=2e-6)
from jax_kernels.bridge import masks
for layout, strategy in (("zigzag", "auto"), ("striped", "all_to_all"))[: 1 + is_whole]:
    bias = torch.randn(heads, tokens, tokens)
    mask = masks.causal() & masks.segments(ids) | masks.global_tokens(2)
    mod = lambda score, b, h, q, k: score - 0.25 * torch.abs(q - k)
    place = torch.arange(tokens)
    of_mod = -0.25 * (place[:, None] - place).abs().expand(heads, -1, -1)
    for given, as_bias in (({"bias": bias}, bias), ({"score_mod": mod}, of_mod), ({}, torch.zeros_like(bias))):
        whole = [x.clone().requires_grad_() for x in (query, key, value, as_bias.float())]
        options = {"mask": mask, "return_lse": True, "implementation": "xla"}
        want = bridge.flash_attention(*whole[:3], bias=whole[3], **options)
        torch.autograd.backward(want, [dout, dlse])
        shard = lambda x, axis=1: bridge.shard_sequence(x, layout=layout, axis=axis)
        of_all = lambda x, axis=1: bridge.unshard_sequence(x, layout=layout, axis=axis)
        mine = [shard(x).requires_grad_() for x in (query, key, value)]
        if "bias" in given:
            given = {"bias": shard(bias).requires_grad_()}
        got = bridge.ring_attention(*mine, layout=layout, strategy=strategy, **given, **options)
        torch.autograd.backward(got, [shard(dout), shard(dlse, 2)])
        close = lambda a, b: torch.testing.assert_close(a, b.detach(), rtol=0, atol=3e-6)
        close(of_all(got[0]), want[0])
        close(of_all(got[1], 2), want[1])
        for x, of in zip(mine, whole):
            close(of_all(x.grad), of.grad)
        if "bias" in given:
            close(of_all(given["bias"].grad), whole[3].grad)
mine = bridge.shard_sequence(query).requires_grad_()
out = bridge.ring_attention(mine, mine, mine, is_causal=True)  # lse has no cotangent
try:
    bridge.ring_attention(mine, mine, mine, mask=torch.ones(tokens, tokens, dtype=bool))
except TypeError as error:
    assert "mask: got Tensor, want a masks.Mask of the whole sequence" in str(error), error
(first,) = torch.autograd.grad(out.square().sum(), mine, create_graph=True)
try:
    first.sum().backward()
except RuntimeError as error:
    assert "double backward" in str(error), error
    print("once", flush=True)
try:
    bridge.shard_sequence(query[:, :7])
except ValueError as error:
    assert "got 7 tokens for 2 devices with layout='zigzag', want a multiple of 4" in str(error), error
    print("refused", flush=True)

"""
DILATED = """
pattern = {"segment_lengths": (4, 16), "dilation_rates": (1, 2)}
local = lambda x, axis=1: bridge.shard_sequence(x, layout="contiguous", axis=axis)
of_all = lambda x, axis=1: bridge.unshard_sequence(x, layout="contiguous", axis=axis)
options = {"is_causal": True, "return_lse": True, "implementation": "xla"} | pattern
whole = [x.clone().requires_grad_() for x in (query, key, value)]
want = bridge.dilated_attention(*whole, segment_ids=ids, **options)
torch.autograd.backward(want, [dout, dlse])
mine = [local(x).requires_grad_() for x in (query, key, value)]
got = bridge.sequence_parallel_dilated_attention(*mine, segment_ids=local(ids), **options)
torch.autograd.backward(got, [local(dout), local(dlse, 2)])
for axis, g, w in zip((1, 2), got, want):
    torch.testing.assert_close(of_all(g, axis), w.detach(), rtol=0, atol=2e-6)
for g, w in zip(mine, whole):
    torch.testing.assert_close(of_all(g.grad), w.grad, rtol=0, atol=2e-6)
with torch.no_grad():
    mine = [local(x) for x in (query, key, value)]
    for other in 2 * [{}, {"scale": 0.1}, {"combine": "mean"}, {"is_causal": False}]:
        want = bridge.dilated_attention(query, key, value, **options | other)[0]
        got = bridge.sequence_parallel_dilated_attention(*mine, **options | other)[0]
        torch.testing.assert_close(of_all(got), want, rtol=0, atol=2e-6)
torch.manual_seed(1)
arguments = 32, 4, (5, 12), (2, 3)  # segments that end within a process
single = bridge.nn.MultiheadDilatedAttention(*arguments, attention_backend="xla", order="hilbert")
shared = bridge.nn.RingDilatedAttention(*arguments, attention_backend="xla", order="hilbert")
shared.load_state_dict(single.state_dict())
x = query.flatten(-2)
single(x, is_causal=True).square().sum().backward()
out = shared(local(x), is_causal=True)
torch.testing.assert_close(of_all(out), single(x, is_causal=True).detach(), rtol=0, atol=2e-6)
out.square().sum().backward()
largest = max(x.grad.norm() for x in single.parameters())  # k_proj.bias's gradient is a sum that cancels
for one, other in zip(shared.parameters(), single.parameters()):
    dist.all_reduce(one.grad)
    assert (one.grad - other.grad).norm() < 2e-6 * largest
single, shared = (
    of(*arguments, attention_backend="xla", layout="partition").eval()
    for of in (bridge.nn.MultiheadDilatedAttention, bridge.nn.RingDilatedAttention)
)
shared.load_state_dict(single.state_dict())
out = shared(local(x), is_causal=True)
torch.testing.assert_close(of_all(out), single(x, is_causal=True).detach(), rtol=0, atol=2e-6)
print("dilated", flush=True)
"""
END = """
alone = dist.new_group([0])
if rank == 0:
    out = bridge.ring_attention(query, key, value, group=alone, is_causal=True)
    torch.testing.assert_close(out, reference(query, key, value, None, None, True)[0], rtol=0, atol=2e-6)
print("done", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "extent", "printed"),
    [
        pytest.param(RING + END, "few", ["not initialized", "once", "refused", "done"], id="ring, one strategy"),
        pytest.param(
            RING + DILATED + END,
            "whole",
            ["not initialized", "once", "refused", "dilated", "done"],
            id="ring and dilated, every strategy",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_processes_match_one(program, extent, printed):
    for output in printed_by_ranks(program, extent):
        assert [line for line in output.splitlines() if not line.startswith("[Gloo]")] == printed
