"""DTensors in two CPU processes: results and gradients equal whole tensors', or an error names the argument."""

import pytest

from tests.support.processes.ranks import printed_by_ranks

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from jax_kernels import bridge, masks

is_whole = sys.argv[1] == "all"
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
FEW = ("bias, heads", "rms_norm", "grouped in 8 bits")
BATCH, HEADS, ROWS, WHOLE = Shard(0), Shard(2), Shard(1), Replicate()
first = lambda x: x if isinstance(x, torch.Tensor) else x[0]


def compare(name, function, tensors, placements, **options):
    if not is_whole and name not in FEW:
        return
    whole = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    parts = [distribute_tensor(x, mesh, [p]) for x, p in zip(tensors, placements)]
    parts = [x.detach().requires_grad_(x.is_floating_point()) for x in parts]
    for _ in range(2):
        want, got = function(*whole, **options), function(*parts, **options)
        pairs = [(want, got)] if isinstance(want, torch.Tensor) else zip(want, got)
        for a, b in pairs:
            if a is not None:
                assert isinstance(b, DTensor), name
                torch.testing.assert_close(b.full_tensor(), a, atol=3e-6, rtol=1e-5, msg=name)
        want, got = first(want), first(got)
        if not want.requires_grad:
            continue
        dout = torch.linspace(-1, 1, want.numel()).reshape(want.shape)
        inputs = [x for x in whole if x.requires_grad]
        gradients = torch.autograd.grad(want, inputs, dout)
        dout = distribute_tensor(dout, mesh, got.placements)
        own = torch.autograd.grad(got, [x for x in parts if x.requires_grad], dout)
        for a, b in zip(gradients, own):
            torch.testing.assert_close(b.full_tensor(), a, atol=3e-5, rtol=1e-4, msg=name)
    print("same", name)


rand = torch.randn
qkv = [rand(4, 12, 4, 8), rand(4, 12, 2, 8), rand(4, 12, 2, 8)]
attend = lambda q, k, v, bias=None, sinks=None, **options: bridge.flash_attention(
    q, k, v, bias=bias, sinks=sinks, **options
)
for p in (BATCH, HEADS, WHOLE):
    compare(f"attention {p}", attend, qkv, [p] * 3, is_causal=True, return_lse=True)
extra = [rand(1, 4, 12, 12), rand(4)]
compare("bias, heads", attend, qkv + extra, [HEADS] * 3 + [Shard(1), Shard(0)], window=(3, 1))
compare("bias, batch", attend, qkv + extra, [BATCH] * 3 + [WHOLE] * 2, scale=torch.tensor(0.3))
one = [qkv[0], *(x[:, :, :1].clone() for x in qkv[1:])]
compare("one key head", attend, one, [HEADS, WHOLE, WHOLE])
limits = [torch.tensor([3, 12, 0, 7]).int(), torch.randint(0, 2, (4, 12)).int()]
limited = lambda q, k, v, n, ids: bridge.flash_attention(q, k, v, kv_lengths=n, segment_ids=ids)
compare("limits", limited, qkv + limits, [BATCH] * 5)
compare("limits, heads", limited, qkv + limits, [HEADS] * 3 + [WHOLE] * 2)
compare("a Mask", lambda *x: bridge.flash_attention(*x, mask=masks.causal() | masks.prefix(3)), qkv, [HEADS] * 3)
keep = torch.rand(4, 2, 12, 12) > 0.3
compare("dynamic", bridge.dynamic_mask_attention, [*qkv, keep], [HEADS] * 3 + [Shard(1)])
blocks = torch.rand(4, 3, 3) > 0.3
compare("blocks", bridge.block_sparse_attention, [*qkv, blocks], [HEADS] * 3 + [Shard(0)], block_size=4)
newest = [qkv[0][:, :1].clone(), *qkv[1:], limits[0]]
with torch.no_grad():
    decode = lambda q, k, v, n: bridge.decode_attention(q, k, v, kv_lengths=n)
    compare("decode", decode, newest, [BATCH] * 4)
    compare("decode, heads", decode, newest, [HEADS] * 3 + [WHOLE])
dilated = lambda *x: bridge.dilated_attention(*x, segment_lengths=(4, 8), dilation_rates=(1, 2))
compare("dilated", dilated, qkv, [BATCH] * 3)
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
alibi = lambda q, k, v, slopes: bridge.flash_attn_func(q, k, v, causal=True, softcap=2.0, alibi_slopes=slopes)
compare("alibi, heads", alibi, [*qkv, slopes], [HEADS] * 3 + [Shard(0)])
compare("alibi, batch", alibi, [*qkv, slopes], [BATCH] * 3 + [WHOLE])
compare("qkvpacked", bridge.flash_attn_qkvpacked_func, [rand(4, 12, 3, 4, 8)], [Shard(3)], causal=True)
starts = torch.tensor([0, 5, 12]).int()
varlen = lambda q, k, v: bridge.flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, causal=True)
compare("varlen", varlen, [x[0].clone() for x in qkv], [Shard(1)] * 3)
sdpa = lambda *x: bridge.scaled_dot_product_attention(*x, is_causal=True)
compare("sdpa", sdpa, [rand(4, 2, 6, 8) for _ in range(3)], [Shard(1)] * 3)
x, scale = rand(4, 6, 16), rand(16)
compare("rms_norm", bridge.rms_norm, [x, scale], [ROWS, WHOLE])
layer_norm = lambda x, s, b, r: bridge.layer_norm(x, s, b, residual=r)
compare("layer_norm", layer_norm, [x, scale, rand(16), rand(4, 6, 16)], [BATCH, WHOLE, WHOLE, BATCH])
w, bias = rand(16, 8), rand(8)
linear = lambda x, w, b: bridge.matmul(x, w, bias=b, activation="silu")
compare("matmul, rows", linear, [x, w, bias], [ROWS, WHOLE, WHOLE])
compare("matmul, columns", linear, [x, w, bias], [WHOLE, Shard(1), Shard(0)])
compare("gated", bridge.gated_matmul, [x, w, rand(16, 8)], [BATCH, WHOLE, WHOLE])
compare("mlp", lambda x, a, b: bridge.mlp(x, a, b), [x, w, rand(8, 16)], [BATCH, WHOLE, WHOLE])
rows, sizes = rand(10, 16), torch.tensor([3, 5]).int()
of_groups = lambda x, w, b, n: bridge.grouped_matmul(x, w, n, bias=b, activation="silu")
compare("grouped, columns", of_groups, [rows, rand(2, 16, 8), rand(2, 8), sizes], [WHOLE, Shard(2), Shard(1), WHOLE])
gated = lambda x, a, b, n: bridge.grouped_gated_matmul(x, a, b, n)
compare("grouped gated", gated, [rows, rand(2, 16, 8), rand(2, 16, 8), sizes], [WHOLE, Shard(2), Shard(2), WHOLE])
eight = lambda x: x.to(torch.float8_e4m3fn)
scaled = lambda x, w, s, n: bridge.grouped_matmul(x, eight(w), n, w_scale=s)
both = lambda x, w, s, n: bridge.grouped_gated_matmul(x, eight(w), eight(w), n, w_gate_scale=s, w_up_scale=s)
with torch.no_grad():
    for name, function in {"grouped in 8 bits": scaled, "grouped gated in 8 bits": both}.items():
        given = [rows, rand(2, 16, 8), rand(2, 8).abs(), sizes]
        compare(name, function, given, [WHOLE, Shard(2), Shard(1), WHOLE])


def refused(name, function, *tensors):
    try:
        function(*tensors)
    except (TypeError, ValueError, NotImplementedError) as error:
        text = str(error)
        assert text.startswith(f"{name}: got") and "DTensor" in text, text
    else:
        raise AssertionError(name)


of = lambda x, p: distribute_tensor(x, mesh, [p])
q, k, v = (of(x, HEADS) for x in qkv)
partial = DTensor.from_local(qkv[0], mesh, [Partial()])
refused("query", bridge.flash_attention, *(of(x, ROWS) for x in qkv))
refused("query", bridge.flash_attention, *(of(x, Shard(3)) for x in qkv))
refused("query", bridge.flash_attention, partial, of(qkv[1], WHOLE), of(qkv[2], WHOLE))
refused("key", bridge.flash_attention, q, of(qkv[1], WHOLE), v)
refused("key", bridge.flash_attention, q, qkv[1], v)
refused("query", bridge.flash_attention, qkv[0], k, v)
refused("key", bridge.flash_attention, q, of(qkv[1], BATCH), v)
refused("sinks", lambda *x: bridge.flash_attention(*x, sinks=slopes), q, k, v)
refused("score_mod", lambda *x: bridge.flash_attention(*x, score_mod=lambda s, b, h, i, j: s * h), q, k, v)
lengths = masks.prefix(torch.arange(4).int().numpy())
refused("mask", lambda *x: bridge.flash_attention(*x, mask=lengths), *(of(x, BATCH) for x in qkv))
refused("query", lambda *x: bridge.dilated_attention(*x, segment_lengths=(4,), dilation_rates=(1,)), q, k, v)
refused("x", bridge.rms_norm, of(x, Shard(2)))
refused("scale", bridge.rms_norm, of(x, BATCH), scale)
refused("x", bridge.matmul, of(x, Shard(2)), of(w, Shard(0)))
refused("x", lambda *y: bridge.matmul(*y, precision="fp8"), of(x, BATCH), of(w, WHOLE))
refused("q", bridge.flash_attn_with_kvcache, q, k, v)
refused("x", bridge.quantize_fp8, of(x, WHOLE))
refused("x", bridge.from_jax(lambda x: x), of(x, WHOLE))
refused("array", bridge.masks.dense, of(keep, WHOLE))
print("refused")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("cases", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_dtensors_become_full_tensors(cases):
    for printed in printed_by_ranks(PROGRAM, cases):
        assert printed.splitlines()[-1] == "refused"
