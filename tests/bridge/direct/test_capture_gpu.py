"""CUDA graphs of calls on the direct route. Each test has its own process, as a failed capture spoils the process."""

import textwrap

import pytest
import torch

from tests.support.processes.python import done_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]


def alone(code: str) -> None:
    """Runs a program in a process of its own, as a failed capture leaves a process unusable."""
    header = """
    import torch
    from jax_kernels import bridge
    from jax_kernels.bridge.direct import route

    torch.manual_seed(0)

    def close(got, want, tolerance=1e-2):
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < tolerance, (float(error), route.reasons())
    """
    done_by("-c", textwrap.dedent(header) + textwrap.dedent(code))


def test_captured_forward_replays_new_inputs():
    alone("""
    inputs = [torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    bridge.flash_attention(*inputs, is_causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bridge.flash_attention(*inputs, is_causal=True)
    for _ in range(3):
        for x in inputs:
            x.normal_()
        graph.replay()
        close(out, bridge.flash_attention(*inputs, is_causal=True), 1e-6)
    print(route.reasons())
    """)


def test_captured_training_step_replays_new_inputs():
    alone("""
    inputs = [torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    weight = torch.randn(512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    def step():
        out = bridge.flash_attention(*inputs, is_causal=True)
        return torch.autograd.grad(out.float().square().sum(), inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(3):
        with torch.no_grad():
            for x in inputs:
                x.normal_()
        graph.replay()
        for ours, right in zip(got, step(), strict=True):
            close(ours, right)
    """)


def test_call_with_mask_is_captured():
    alone("""
    from jax_kernels.bridge import masks
    inputs = [torch.randn(2, 512, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    mask = masks.prefix(torch.tensor([100, 400], dtype=torch.int32, device="cuda"))
    bridge.flash_attention(*inputs, mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bridge.flash_attention(*inputs, mask=mask)
    for x in inputs:
        x.normal_()
    graph.replay()
    close(out, bridge.flash_attention(*inputs, mask=mask), 1e-6)
    """)


def test_graph_outlives_the_captured_call():
    alone("""
    import gc
    inputs = [torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    bridge.flash_attention(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bridge.flash_attention(*inputs)
    want = bridge.flash_attention(*inputs)
    bridge.clear_cache()
    gc.collect()
    bridge.flash_attention(*(x[:1].contiguous() for x in inputs))
    graph.replay()
    close(out, want, 1e-6)
    """)


def test_first_call_during_capture_is_refused():
    alone("""
    import contextlib
    inputs = [torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    message = None
    with contextlib.suppress(Exception), torch.cuda.graph(graph):
        try:
            bridge.flash_attention(*inputs)
        except RuntimeError as error:
            message = str(error)
            raise
    assert message is not None and "cannot be captured in a CUDA graph" in message, message
    """)


def test_compiled_with_cuda_graphs():
    alone("""
    def function(x, key, value, weight):
        out = bridge.flash_attention(x * 2, key, value, is_causal=True)
        return out.sin().flatten(2) @ weight
    inputs = [torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    inputs.append(torch.randn(256, 256, device="cuda", dtype=torch.bfloat16))
    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            for x in inputs:
                x.normal_()
            close(compiled(*inputs).clone(), function(*inputs))
    """)


def test_compiled_training_with_cuda_graphs():
    alone("""
    def function(query, key, value):
        return bridge.flash_attention(query * 2, key, value, is_causal=True).float().square().mean()
    compiled = torch.compile(function, mode="reduce-overhead")
    for seed in range(5):
        inputs = [torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        torch.compiler.cudagraph_mark_step_begin()
        got = [x.clone() for x in torch.autograd.grad(compiled(*inputs), inputs)]
        for ours, right in zip(got, torch.autograd.grad(function(*inputs), inputs), strict=True):
            close(ours, right)
    """)
