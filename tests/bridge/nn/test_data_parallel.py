"""Modules of bridge.nn in data-parallel runs of two processes of CPUs, and experts in bfloat16."""

import pytest

from tests.support.processes.ranks import printed_by_ranks

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from jax_kernels import bridge

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = bridge.nn.LayerNorm(16)
        self.attention = bridge.nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = bridge.nn.GatedMLP(16, 32)

    def forward(self, x):
        x = self.norm(x)
        return self.mlp(x + self.attention(x, x, x, need_weights=False)[0])


def model():
    torch.manual_seed(0)
    return Model()


def step(module, x):
    module(x).square().mean().backward()
    return {name: x.grad for name, x in module.named_parameters()}


batch = torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(1))
want = step(model(), batch)
own = batch[2 * rank : 2 * rank + 2]

got = step(DistributedDataParallel(model()), own)
for name, x in want.items():
    torch.testing.assert_close(got["module." + name], x, atol=1e-5, rtol=1e-4)
print("DDP")

sharded = model()
mesh = init_device_mesh("cpu", (2,))
for part in (sharded.attention, sharded.mlp, sharded):
    fully_shard(part, mesh=mesh)
for _ in range(2):
    sharded.zero_grad()
    got = step(sharded, own)
    for name, x in want.items():
        torch.testing.assert_close(got[name].full_tensor(), x, atol=1e-5, rtol=1e-4)
print("FSDP")

config = {"vocab_size": 31, "model_dim": 16, "num_layers": 1, "num_heads": 2, "experts": {"num_experts": 4}}
tokens = torch.arange(9)[None]
torch.manual_seed(0)
experts = bridge.nn.Transformer(config)
want = experts(tokens).detach()
for part in (experts.layers[0], experts):
    fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
got = experts(tokens)
torch.testing.assert_close(got.detach().float(), want, atol=0.1, rtol=0)
got.float().sum().backward()
assert experts.layers[0].mlp.router.grad.dtype == torch.float32
print("EXPERTS")
try:
    bridge.weights.to_flax(experts)
except TypeError as error:
    assert "got a DTensor, want a torch.Tensor; full_tensor()" in str(error), error
    print("TO_FLAX")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_gradients_match_one_process():
    for printed in printed_by_ranks(PROGRAM):
        assert "DDP" in printed
        assert "FSDP" in printed
        assert "EXPERTS" in printed
        assert "TO_FLAX" in printed
