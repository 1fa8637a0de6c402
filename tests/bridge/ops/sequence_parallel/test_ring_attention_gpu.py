"""bridge.ring_attention and its dilated form under torchrun, with a process for each of two GPUs, against float64."""

import pytest
import torch

from tests.support.processes.python import done_by

RANKS = 2
GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < RANKS, reason=f"needs two NVIDIA GPUs, found {GPUS}"),
    pytest.mark.timeout(600),
]
SCRIPT = """
import os
import torch
import torch.distributed as dist
from jax_kernels import bridge

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
bridge.initialize_distributed(timeout=120)
torch.manual_seed(0)
tokens, heads, head_dim = 1024, 4, 64
normal = lambda *shape: torch.randn(shape).to("cuda", torch.bfloat16)
query, dout = normal(2, tokens, heads, head_dim), normal(2, tokens, heads, head_dim)
key, value = normal(2, tokens, 2, head_dim), normal(2, tokens, 2, head_dim)
ids = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), tokens // 4).expand(2, -1).contiguous().cuda()


def reference(query, key, value, ids):
    repeated = [x.repeat_interleave(2, dim=2) for x in (key, value)]
    scores = torch.einsum("bthd,bshd->bhts", query, repeated[0]) / head_dim**0.5
    keep = torch.ones(tokens, tokens, dtype=bool, device="cuda").tril()
    keep = keep if ids is None else keep & (ids[:, None, :, None] == ids[:, None, None, :])
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~keep, -torch.inf).softmax(-1), repeated[1])


def close(name, got, want):
    got, want = got.double(), want.double()
    error = ((got - want).norm() / want.norm()).item()
    assert error < 8e-3, (name, error)


def check(attend, want_of, layout):
    whole = [x.double().requires_grad_() for x in (query, key, value)]
    want = want_of(*whole)
    want.backward(dout.double())
    shard = lambda x: bridge.shard_sequence(x, layout=layout)
    of_all = lambda x: bridge.unshard_sequence(x, layout=layout)
    mine = [shard(x).requires_grad_() for x in (query, key, value)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for stream in (torch.cuda.current_stream(), side):
        for x in mine:
            x.grad = None
        with torch.cuda.stream(stream):
            out = attend(*mine)
            out.backward(shard(dout))
            close("out", of_all(out.detach()), want.detach())
            for name, x, of in zip(("dq", "dk", "dv"), mine, whole):
                close(name, of_all(x.grad), of.grad)
        torch.cuda.synchronize()


for strategy in ("ring", "all_to_all", "auto"):
    check(
        lambda *qkv: bridge.ring_attention(*qkv, is_causal=True, strategy=strategy),
        lambda *qkv: reference(*qkv, None),
        "zigzag",
    )
my_ids = bridge.shard_sequence(ids)
check(
    lambda *qkv: bridge.ring_attention(*qkv, is_causal=True, segment_ids=my_ids),
    lambda *qkv: reference(*qkv, ids),
    "zigzag",
)
for pattern in (
    {"segment_lengths": (256, tokens), "dilation_rates": (1, 2)},
    {"segment_lengths": (300, tokens), "dilation_rates": (4, 3)},
    {"segment_lengths": (200, 600), "dilation_rates": (4, 2), "layout": "partition"},
):
    pattern["is_causal"] = True
    check(
        lambda *qkv: bridge.sequence_parallel_dilated_attention(*qkv, **pattern),
        lambda *qkv: bridge.dilated_attention(*(x.float() for x in qkv), implementation="xla", **pattern).double(),
        "contiguous",
    )
print("exact on rank", rank, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_two_processes_match_float64(tmp_path):
    script = tmp_path / "ring.py"
    script.write_text(SCRIPT)
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NVIDIA_TF32_OVERRIDE": "0", "NCCL_NVLS_ENABLE": "0"}
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = done_by(*command, script, limit=540, **environment)  # 135 s on quiet GPUs: kernels are compiled
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("exact")) == [
        f"exact on rank {rank}" for rank in range(RANKS)
    ]
