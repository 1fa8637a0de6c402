"""PyTorch's own checks of every op of the bridge: opcheck of its operators, and gradcheck of its results.

gradcheck is PyTorch's fast version, in float32: its steps are large, and so are its tolerances.
"""

import itertools

import jax.numpy as jnp
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jax_kernels import bridge
from tests.support.cases import tiers

pytestmark = pytest.mark.timeout(120)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).requires_grad_()


QKV = [random(1, 8, 2, 4, seed=seed) for seed in range(3)]
KEEP = torch.ones(8, 8, dtype=torch.bool).tril()
IDS = torch.arange(8, dtype=torch.int32)[None] // 3
X = random(5, 8)
EIGHT_BITS = [bridge.quantize_fp8(random(1, 8, 2, 16, seed=seed).detach(), axis=(1, 3)) for seed in range(3)]


def decaying(score, b, h, q, k):
    return score - 0.1 * (q - k) ** 2


def both(x, y):
    return {"product": jnp.sin(x) * y, "sums": [x.sum(), y @ y]}


# By name: (a function of tensors, the tensors).
DIFFERENTIABLE = {
    "flash_attention": (lambda *x: bridge.flash_attention(*x, is_causal=True, segment_ids=IDS), QKV),
    "flash_attention, lse": (lambda *x: bridge.flash_attention(*x, window=(3, 1), return_lse=True), QKV),
    "bias and sinks": (
        lambda q, k, v, bias, sinks: bridge.flash_attention(q, k, v, bias=bias, sinks=sinks, mask=KEEP),
        [*QKV, random(1, 2, 8, 8), random(2)],
    ),
    "score_mod": (lambda *x: bridge.flash_attention(*x, score_mod=decaying), QKV),
    "scaled_dot_product_attention": (bridge.scaled_dot_product_attention, [x.detach().transpose(1, 2) for x in QKV]),
    "block_sparse_attention": (lambda *x: bridge.block_sparse_attention(*x, KEEP[:2, :2], block_size=4), QKV),
    "dynamic_mask_attention": (
        lambda q, k, v, bias: bridge.dynamic_mask_attention(q, k, v, KEEP, bias), [*QKV, random(8)],
    ),
    "dilated_attention": (
        lambda *x: bridge.dilated_attention(*x, segment_lengths=[4, 8], dilation_rates=[1, 2], is_causal=True), QKV,
    ),
    "flash_attn_func": (lambda *x: bridge.flash_attn_func(*x, causal=True), QKV),
    "matmul": (
        lambda x, w, b, r: bridge.matmul(x, w, bias=b, residual=r, activation="silu"),
        [X, random(8, 6), random(6), random(5, 6)],
    ),
    "linear": (bridge.linear, [X, random(6, 8), random(6)]),
    "gated_matmul": (bridge.gated_matmul, [X, random(8, 6), random(8, 6, seed=1)]),
    "mlp": (
        lambda x, up, down, gate: bridge.mlp(x, up, down, w_gate=gate),
        [X, random(8, 6), random(6, 8), random(8, 6, seed=2)],
    ),
    "grouped_matmul": (
        lambda x, w, b: bridge.grouped_matmul(x, w, IDS[0, :3] + 1, bias=b, activation="tanh"),
        [X, random(3, 8, 6), random(3, 6)],
    ),
    "grouped_gated_matmul": (
        lambda x, gate, up: bridge.grouped_gated_matmul(x, gate, up, IDS[0, :3] + 1),
        [X, random(3, 8, 6), random(3, 8, 6, seed=1)],
    ),
    "linear_cross_entropy": (
        lambda x, w, weights: bridge.linear_cross_entropy(x, w, IDS[0, :5], weights=weights, reduction="sum"),
        [X, random(8, 12), random(5)],
    ),
    "layer_norm": (
        lambda x, s, b, r: bridge.layer_norm(x, s, b, residual=r),
        [X, random(8), random(8, seed=1), random(5, 8, seed=1)],
    ),
    "rms_norm": (bridge.rms_norm, [X, random(8)]),
    "from_jax": (bridge.from_jax(both), [random(7), random(7, seed=1)]),
}  # fmt: skip
FORWARD_ALONE = {
    "decode_attention": (
        lambda q, k, v: bridge.decode_attention(q[:, :2], k, v, kv_lengths=IDS[:, 7] + 4, mask=KEEP[-2:]), QKV,
    ),
    "flash_attention_fp8": (
        lambda *x: bridge.flash_attention_fp8(*x, **dict(zip(("q_scale", "k_scale", "v_scale"), SCALES, strict=True))),
        [values for values, _ in EIGHT_BITS],
    ),
    "quantize": (bridge.quantize, [X]),
    "quantize_fp8": (bridge.quantize_fp8, [X]),
}  # fmt: skip
SCALES = [scale for _, scale in EIGHT_BITS]
OPS = DIFFERENTIABLE | FORWARD_ALONE


def flat(found):
    if isinstance(found, dict):
        found = (found["product"], *found["sums"])
    return tuple(found) if isinstance(found, tuple | list) else (found,)


class Recorded(TorchDispatchMode):
    """The first call of each of the library's operators, by operator."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "jax_kernels":
            self.calls.setdefault(function, args)
        return function(*args, **(kwargs or {}))


def fresh(x, requires_grad, is_strided=False):
    if isinstance(x, list | tuple):
        return type(x)(fresh(item, requires_grad, is_strided) for item in x)
    if not isinstance(x, torch.Tensor):
        return x
    may = x.dtype in (torch.float32, torch.bfloat16)
    x = x.detach().clone()
    if is_strided and x.ndim > 1:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return x.requires_grad_(requires_grad and may)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def tensors_of(arguments):
    flat = [y for x in arguments for y in (x if isinstance(x, list) else [x])]
    return [x for x in flat if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", tiers.cases(list(OPS), {"bias and sinks", "matmul", "decode_attention", "from_jax"}))
def test_opcheck(name):
    function, inputs = OPS[name]
    has_gradient = name in DIFFERENTIABLE
    with Recorded() as recorded, torch.no_grad():
        function(*fresh(inputs, has_gradient))
    if has_gradient:  # keeps the first call of operators without gradients; this call returns residuals, too
        with recorded:
            sum(x.sin().sum() for x in flat(function(*fresh(inputs, True)))).backward()
    assert any("backward" in str(operator) for operator in recorded.calls) == has_gradient
    for (operator, arguments), is_strided in itertools.product(recorded.calls.items(), (False, True)):
        may_differentiate = has_gradient and "backward" not in str(operator)
        given = fresh(arguments, may_differentiate, is_strided)
        has_eight_bits = any(x.dtype == torch.float8_e4m3fn for x in tensors_of(given))
        # PyTorch's schema check multiplies, which PyTorch cannot do in 8 bits.
        checks = torch.library.opcheck(operator, given, test_utils=CHECKS[1:] if has_eight_bits else CHECKS)
        assert set(checks.values()) == {"SUCCESS"}


QUICK = {"flash_attention, lse", "bias and sinks", "dilated_attention", "matmul", "mlp", "layer_norm", "from_jax"}


@pytest.mark.parametrize("name", tiers.cases(list(DIFFERENTIABLE), QUICK))
def test_gradcheck(name):
    function, inputs = DIFFERENTIABLE[name]
    assert torch.autograd.gradcheck(
        lambda *x: flat(function(*x)),
        fresh(inputs, True),
        eps=2e-3,
        atol=5e-3,
        rtol=5e-3,
        nondet_tol=1e-5,
        fast_mode=True,
    )
