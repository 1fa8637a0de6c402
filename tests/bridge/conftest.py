"""Fixtures of the bridge's tests: attention in float64 in plain PyTorch, and the direct route on a CPU."""

import math

import pytest
import torch

from jax_kernels.bridge.direct import route
from jax_kernels.bridge.jax_functions import programs
from jax_kernels.bridge.operators import call_cache
from tests.support.cases.cached_calls import Route


def attention(
    query, key, value, *, bias=None, mask=None, is_causal=False, window=None, segment_ids=None, kv_lengths=None,
    q_offset=0, sinks=None, scale=None, softcap=None,
):  # fmt: skip
    """(out [B, T, H, Dv], lse [B, H, T]) in float64, differentiable, for tensors in flash_attention's layout."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.einsum("bthd,bshd->bhts", query, key) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias.double()
    keep = scores > -math.inf
    columns = torch.arange(key.shape[1], device=query.device)
    offset = torch.as_tensor(q_offset, device=query.device).reshape(-1, 1)
    rows = (offset + torch.arange(query.shape[1], device=query.device))[:, None, :, None]
    left, right = window if isinstance(window, tuple) else (window, window)
    if is_causal:
        keep = keep & (rows >= columns)
    if left is not None:
        keep = keep & (rows - left <= columns)
    if right is not None:
        keep = keep & (columns <= rows + right)
    if segment_ids is not None:
        q_ids, kv_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        keep = keep & (q_ids[:, None, :, None] == kv_ids[:, None, None]) & (q_ids >= 0)[:, None, :, None]
    if kv_lengths is not None:
        keep = keep & (columns < kv_lengths[:, None, None, None])
    if mask is not None:
        keep = keep & mask
    dead = ~keep.any(-1)
    scores = scores.masked_fill(~keep, -math.inf)
    lse = torch.logsumexp(torch.where(dead[..., None], torch.zeros_like(scores), scores), dim=-1)
    lse = lse.masked_fill(dead, -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    weights = torch.exp(scores - lse.masked_fill(dead, 0.0)[..., None])
    return torch.einsum("bhts,bshd->bthd", weights, value), lse


@pytest.fixture
def no_programs():
    """Drops the programs of earlier tests. A full store drops one for each that it adds, and keeps its length."""
    programs.PROGRAMS.clear()


@pytest.fixture
def fresh_dynamo():
    """torch.compile without the graphs of other tests, before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def reference():
    return attention


@pytest.fixture
def make_qkv():
    """Random query, key and value that require a gradient."""

    def make(batch=2, length=24, heads=4, head_dim=16, *, kv_length=None, kv_heads=None, dtype=torch.float32, **place):
        generator = torch.Generator().manual_seed(length * 1000 + head_dim)
        kv_shape = (batch, kv_length or length, kv_heads or heads, head_dim)
        shapes = ((batch, length, heads, head_dim), kv_shape, kv_shape)
        return [torch.randn(shape, generator=generator).to(dtype=dtype, **place).requires_grad_() for shape in shapes]

    return make


@pytest.fixture
def direct(monkeypatch):
    """The direct route with chains that compute on the CPU. No call is cached."""
    made = Route()
    monkeypatch.setattr(route, "find", made.find)
    monkeypatch.setattr(route._STATE, "is_enabled", True)
    call_cache.clear()
    yield made
    call_cache.clear()
