"""Chains of the bridge that compute on the CPU, and calls that they can serve."""

import jax.numpy as jnp
import torch

import jax_kernels
from jax_kernels import bridge
from jax_kernels.bridge.interop import dlpack, planning_device


class Chain:
    """A chain that computes by JAX on the CPU. calls: number of calls. results: number of results of the last call."""

    def __init__(self, function, tensors, operands):
        self.there = [x is not None for x in tensors]
        self.function = function
        self.operands = operands
        self.calls = self.results = 0

    def __call__(self, *tensors):
        self.calls += 1
        arrays, owners = dlpack.import_tensors(tensors, tensors[0].device)
        given = iter(arrays)
        with planning_device.planning_on(tensors[0].device):
            masks = () if self.operands is None else (self.operands.masks,)
            results = self.function(*masks, *(next(given) if there else None for there in self.there))
        exported = dlpack.export_arrays(results, tensors[0].device)
        del owners
        self.results = len(exported)
        return exported


class Route:
    """A route that makes a `Chain` for each function and shapes. chains: by function and shapes."""

    def __init__(self):
        self.chains = {}

    def find(self, function, tensors, operands=None):
        masks = None if operands is None else operands.name
        key = function, masks, *[None if x is None else (x.shape, x.dtype) for x in tensors]
        if key not in self.chains:
            self.chains[key] = Chain(function, tensors, operands)
        return self.chains[key]

    @property
    def calls(self):
        return sum(chain.calls for chain in self.chains.values())


def qkv(length=24, **options):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, length, 4, 16, generator=generator, **options).requires_grad_() for _ in range(3)]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


IDS = torch.arange(24, dtype=torch.int32).repeat(2, 1) // 10
OFFSET = torch.tensor(3, dtype=torch.int32)
LENGTHS = torch.tensor([5, 24], dtype=torch.int32)
PREFIX = bridge.masks.causal() | bridge.masks.prefix(3)
SEGMENTS = bridge.masks.causal() & bridge.masks.segments(jnp.asarray(IDS.numpy()))
BY_MASK = bridge.from_jax(lambda q, mask, k, v: jax_kernels.flash_attention(q, k, v, mask=mask))
BY_NAME = bridge.from_jax(lambda x, *, y, scale: (x["x"] - y[0] if isinstance(x, dict) else x - y) * scale)
BLOCKS = torch.ones(3, 3, dtype=torch.bool).tril()


def compiled():
    return bridge.compile_attention("sliding_window", 24, 16, num_heads=4, dtype=torch.float32, left=6, right=0)


def decay(score, b, h, q, k):
    return score - 0.1 * (q - k) ** 2


# By name: (a call of tensors, the tensors).
CALLS = {
    "plain": (bridge.flash_attention, qkv()),
    "causal": (lambda *x: bridge.flash_attention(*x, is_causal=True), qkv()),
    "window": (lambda *x: bridge.flash_attention(*x, window=(4, 2), scale=0.3), qkv()),
    "segments": (lambda *x: bridge.flash_attention(*x, segment_ids=IDS), qkv()),
    "pair": (lambda *x: bridge.flash_attention(*x, segment_ids=(IDS, IDS.flip(1).contiguous())), qkv()),
    "lengths": (lambda *x: bridge.flash_attention(*x, kv_lengths=torch.tensor([5, 24], dtype=torch.int32)), qkv()),
    "offset": (lambda *x: bridge.flash_attention(*x, is_causal=True, q_offset=OFFSET), qkv()),
    "mask": (lambda *x: bridge.flash_attention(*x, mask=IDS[:, None, None] < 2), qkv()),
    "bias": (lambda q, k, v, bias: bridge.flash_attention(q, k, v, bias=bias), [*qkv(), random(1, 4, 24, 24)]),
    "constant bias": (lambda *x: bridge.flash_attention(*x, bias=random(1, 4, 24, 24).detach()), qkv()),
    "sinks": (lambda q, k, v, sinks: bridge.flash_attention(q, k, v, sinks=sinks), [*qkv(), random(4)]),
    "dilated": (
        lambda *x: bridge.dilated_attention(*x, segment_lengths=[8, 24], dilation_rates=[1, 2], is_causal=True),
        qkv(),
    ),
    "Mask": (lambda *x: bridge.flash_attention(*x, mask=PREFIX), qkv()),
    "Mask of arrays": (lambda *x: bridge.flash_attention(*x, mask=SEGMENTS, scale=0.3), qkv()),
    "Mask and tensors": (
        lambda q, k, v, sinks: bridge.flash_attention(
            q, k, v, mask=SEGMENTS, sinks=sinks, segment_ids=(IDS, IDS), bias=torch.ones(4, 1, 24),
            kv_lengths=LENGTHS, q_offset=OFFSET
        ),
        [*qkv(), random(4)],
    ),
    "CompiledAttention": (lambda *x: compiled()(*x), qkv()),
    "score_mod": (lambda *x: bridge.flash_attention(*x, score_mod=decay), qkv()),
    "from_jax of a Mask": (lambda q, k, v: BY_MASK(q, SEGMENTS, k, v), qkv()),
    "matmul": (bridge.matmul, [random(5, 8), random(8, 6)]),
    "linear": (bridge.linear, [random(5, 8), random(6, 8), random(6)]),
    "residual": (
        lambda x, w, r: bridge.matmul(x, w, residual=r, activation="silu"),
        [random(5, 8), random(8, 6), random(5, 6)],
    ),
    "gated_matmul": (bridge.gated_matmul, [random(5, 8), random(8, 6), random(8, 6, seed=1)]),
    "mlp": (bridge.mlp, [random(5, 8), random(8, 6), random(6, 8)]),
    "grouped_matmul": (
        lambda x, w, bias: bridge.grouped_matmul(x, w, LENGTHS[:1].repeat(2), bias=bias, activation="silu"),
        [random(11, 8), random(2, 8, 6), random(2, 6)],
    ),
    "grouped_gated_matmul": (
        lambda x, w_gate, w_up: bridge.grouped_gated_matmul(x, w_gate, w_up, LENGTHS[:1].repeat(2)),
        [random(11, 8), random(2, 8, 6), random(2, 8, 6, seed=1)],
    ),
    "linear_cross_entropy": (
        lambda x, w: bridge.linear_cross_entropy(x, w, LENGTHS[:1].repeat(5), reduction="mean"),
        [random(5, 8), random(8, 60)],
    ),
    "layer_norm": (bridge.layer_norm, [random(5, 8), random(8), random(8)]),
    "rms_norm": (bridge.rms_norm, [random(5, 8), random(8)]),
    "residual norm": (lambda x, r: bridge.rms_norm(x, residual=r)[0], [random(5, 8), random(5, 8, seed=1)]),
    "from_jax": (bridge.from_jax(lambda x, y: x * y), [random(7), random(7)]),
    "from_jax by name": (lambda x, y: BY_NAME(x, scale=0.5, y=y), [random(7), random(7)]),
    "from_jax of a tree": (lambda x, y: BY_NAME({"x": x}, y=[y], scale=-0.5), [random(7), random(7)]),
    "blocks": (
        lambda q, k, v, sinks: bridge.block_sparse_attention(
            q, k, v, BLOCKS, sinks=sinks, block_size=(8, 8), segment_ids=(IDS, IDS)
        ),
        [*qkv(), random(4)],
    ),
    "blocks of a Mask and a bias": (
        lambda q, k, v, bias: bridge.block_sparse_attention(q, k, v, PREFIX, scale=0.3, bias=bias, is_causal=True),
        [*qkv(), random(1, 4, 24, 24)],
    ),
    "dynamic": (
        lambda q, k, v, bias: bridge.dynamic_mask_attention(q, k, v, IDS[:, None, None] < 2, bias, softcap=2.0),
        [*qkv(), random(1, 4, 1, 24)],
    ),
    "several results": (bridge.from_jax(lambda x: {"a": (x * 2, x + 1)}), [random(7)]),
}  # fmt: skip


def total(results):
    if isinstance(results, dict):
        results = results["a"]
    return sum(x.sin().sum() for x in results) if isinstance(results, tuple) else results.sin().sum()
