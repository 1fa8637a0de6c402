"""PyTorch's context_parallel over the GPUs of one machine: the worker of one process, started by torchrun.

The attention is scaled_dot_product_attention by cuDNN, with PyTorch's own load balancing of causal masks. Each process
queues the same number of calls; a time is the slowest process's, from a barrier on.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness.ring_cases import RingCase, row_of
from harness.side_by_side import gpu_alone
from harness.timing import Contender
from harness.workers import answer

__all__ = ["ROTATIONS", "work"]

ROTATIONS = ("alltoall", "allgather")


def work(cases: Iterator[RingCase]) -> None:
    """Answers cases: process 0 reads them, and sends them to the others."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),))
    while True:
        told = [next(cases, None) if rank == 0 else None]
        dist.broadcast_object_list(told, src=0)
        case = told[0]
        if case is None:
            break
        with gpu_alone() if rank == 0 else contextlib.nullcontext():
            rows = [row for mode in case.modes for row in _measure(case, mode, mesh)]
        if rank == 0:
            answer(rows)
    dist.destroy_process_group()
    sys.stdout.flush()


def _measure(case: RingCase, mode: str, mesh: Any) -> list[dict[str, Any]]:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    contenders = [Contender(f"torch {name}", "torch", plan="context_parallel, cuDNN") for name in ROTATIONS]
    tensors = _tensors(case)
    with context_parallel(
        mesh, buffers=tensors, buffer_seq_dims=[2] * len(tensors), no_restore_buffers=set(tensors)
    ), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # fmt: skip
        call = _call(case, mode, tensors)
        for number in range(case.rounds):
            for rotation, contender in zip(ROTATIONS, contenders, strict=True):
                if contender.status != "ok":
                    continue
                set_rotate_method(rotation)
                with contender.attempt():
                    if number == 0:
                        contender.calls = max(3, round(case.seconds / _seconds(call, 2)))
                    contender.times.append(_seconds(call, contender.calls) * 1e3)
    return [row_of(case, mode, contender) for contender in contenders]


def _tensors(case: RingCase) -> list[Any]:
    """query, key, value, dout: [1, heads, tokens, head_dim], the same on each process."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    shape = 1, case.heads, case.tokens, case.head_dim
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def _call(case: RingCase, mode: str, tensors: list[Any]) -> Callable[[], Any]:
    import torch
    import torch.nn.functional as F

    *qkv, dout = (x.detach().clone() for x in tensors)
    if mode == "fwd":

        @torch.no_grad()
        def forward() -> Any:
            return F.scaled_dot_product_attention(*qkv, is_causal=case.causal)

        return forward
    for x in qkv:
        x.requires_grad_()

    def both() -> Any:
        return torch.autograd.grad(F.scaled_dot_product_attention(*qkv, is_causal=case.causal), qkv, dout)

    return both


def _seconds(call: Callable[[], Any], calls: int) -> float:
    """The seconds of one call of the slowest process, after a call that is not timed."""
    import torch
    import torch.distributed as dist

    call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    worst = torch.tensor((time.perf_counter() - start) / calls, device="cuda")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)
