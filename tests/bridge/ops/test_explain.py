"""Plans and times of the bridge's ops on tensors."""

import re

import pytest
import torch

import jax_kernels
from jax_kernels import bridge
from jax_kernels.bridge import masks

QKV = [torch.randn(1, 16, 4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
X, W = torch.randn(8, 32), torch.randn(32, 16)
CALLS = {
    "flash_attention": lambda ask: ask(bridge.flash_attention, *QKV, is_causal=True),
    "segments": lambda ask: ask(bridge.flash_attention, *QKV, segment_ids=torch.zeros(1, 16, dtype=torch.int32)),
    "mask": lambda ask: ask(bridge.flash_attention, *QKV, mask=masks.sliding_window(4, 4)),
    "blocks": lambda ask: ask(bridge.block_sparse_attention, *QKV, torch.ones(2, 2, dtype=torch.bool), block_size=8),
    "blocks of floats": lambda ask: ask(bridge.block_sparse_attention, *QKV, torch.ones(4, 2, 2), block_size=8),
    "score_mod": lambda ask: ask(bridge.flash_attention, *QKV, score_mod=lambda score, b, h, q, k: score * 2),
    "sdpa": lambda ask: ask(bridge.scaled_dot_product_attention, *QKV),
    "dilated": lambda ask: ask(bridge.dilated_attention, *QKV, segment_lengths=[8], dilation_rates=[2]),
    "decode": lambda ask: ask(bridge.decode_attention, QKV[0][:, :1], *QKV[1:]),
    "matmul": lambda ask: ask(bridge.matmul, X, W),
    "linear": lambda ask: ask(bridge.nn.Linear(32, 16), X),
    "layer_norm": lambda ask: ask(bridge.layer_norm, X),
    "rms_norm": lambda ask: ask(bridge.rms_norm, X),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_function_has_a_plan(name):
    plan = CALLS[name](bridge.explain)
    assert isinstance(plan, jax_kernels.Plan)
    assert plan.implementation == "xla"
    assert dict(plan.passed_over).keys() <= {"mosaic_gpu", "triton", "cudnn"}


def test_plan_matches_the_jax_op():
    arrays = [jax_kernels.bridge.interop.dlpack.jax.numpy.asarray(x.numpy()) for x in QKV]
    want = jax_kernels.explain(jax_kernels.flash_attention, *arrays, window=3)
    assert bridge.explain(bridge.flash_attention, *QKV, window=3) == want


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_for_a_device_that_is_not_there(name):
    plan = CALLS[name](lambda op, *args, **kwargs: bridge.explain(op, *args, device="v100", **kwargs))
    assert (plan.implementation, plan.device) == ("xla", "Tesla V100-SXM2-16GB")


@pytest.mark.triton
def test_a_plan_for_a_device_is_the_one_of_the_jax_op():
    arrays = [jax_kernels.bridge.interop.dlpack.jax.numpy.asarray(x.numpy()) for x in QKV]
    want = jax_kernels.explain(jax_kernels.flash_attention, *arrays, window=3, device="a100")
    assert want.implementation == "triton"
    assert bridge.explain(bridge.flash_attention, *QKV, window=3, device="a100") == want
    assert bridge.explain(bridge.flash_attention, *QKV, device=torch.device("cpu")).device == "CPU"
    assert (
        bridge.explain(bridge.flash_attention, *QKV).device == bridge.device_info("cpu").name
    )  # it is no longer asked


def test_a_wrong_device_is_an_error():
    with pytest.raises(ValueError, match=r"device: got 'a10o', .*; did you mean 'a10'"):
        bridge.explain(bridge.flash_attention, *QKV, device="a10o")
    compiled = bridge.compile_attention("causal", 16, 16, num_heads=4, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"device: got NVIDIA H200, want None: CompiledAttention.* is planned for CPU"):
        bridge.explain(compiled, *QKV, device="h200")

    class Attend(torch.nn.Module):
        def forward(self, query, device=None):
            return bridge.flash_attention(query, query, query)

    with pytest.raises(TypeError, match="device: forward has a parameter of this name"):
        bridge.explain(Attend(), QKV[0], device="h200")


def test_wrong_arguments_raise():
    with pytest.raises(TypeError, match=r"^op: got int"):
        bridge.explain(3)
    with pytest.raises(TypeError, match="calls no op"):
        bridge.explain(torch.nn.functional.relu, X)
    with pytest.raises(TypeError, match="want an op of this library"):
        bridge.explain(bridge.from_jax(lambda x: x * 2), X)
    with pytest.raises(ValueError, match=re.escape("block_mask: got shape (2, 3)")):
        bridge.explain(bridge.block_sparse_attention, *QKV, torch.ones(2, 3, dtype=torch.bool), block_size=8)
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        bridge.explain(bridge.flash_attention, *QKV, implementation="mosaic_gpu")
    torch.testing.assert_close(bridge.matmul(X, W), X @ W)  # explain has ended: the op runs


def test_device_info():
    assert bridge.device_info(torch.device("cpu")) == bridge.device_info("cpu")
    with pytest.raises(ValueError, match="meta"):
        bridge.device_info("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"^place: got none, want a CUDA device$"):
            bridge.device_info("cuda")


@pytest.mark.parametrize("gradients", [False, True])
def test_times_of_implementations(gradients):
    inputs = [x.clone().requires_grad_() for x in QKV]
    times = bridge.benchmark_implementations(bridge.flash_attention, *inputs, gradients=gradients, seconds=0.01)
    assert list(times) == ["xla"]
    assert 0 < times["xla"] < 10_000
    rows = bridge.benchmark_implementations(
        bridge.flash_attention, *inputs, gradients=gradients, seconds=0.01, table=True
    )
    assert [row.implementation for row in rows] == ["xla", "mosaic_gpu", "triton", "cudnn"]
    assert (rows[0].timer, rows[0].plan.implementation, rows[0].reason) == ("host", "xla", None)
    assert 0 < rows[0].ms < 10_000
    assert rows[1].reason.startswith("it needs an NVIDIA GPU")
    with pytest.raises(ValueError, match="implementation"):
        bridge.benchmark_implementations(bridge.flash_attention, *inputs, implementation="xla")
    with pytest.raises(
        TypeError, match=r"^op: got scaled_dot_product_attention, which has no argument `implementation`"
    ):
        bridge.benchmark_implementations(bridge.scaled_dot_product_attention, *inputs)
    with pytest.raises(ValueError, match="no tensor"):
        bridge.benchmark_implementations(bridge.flash_attention)
    with pytest.raises(ValueError, match="gradients"):
        bridge.benchmark_implementations(bridge.matmul, X, W, gradients=True)
    with pytest.raises(TypeError, match="dtype"):
        bridge.benchmark_implementations(bridge.flash_attention, *(x.double() for x in QKV))


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), "1"])
def test_wrong_seconds(seconds):
    message = re.escape(f"seconds: got {seconds!r}, want a finite number above 0")
    with pytest.raises(ValueError, match=message):
        bridge.benchmark_implementations(bridge.matmul, X, W, seconds=seconds)
    with pytest.raises(ValueError, match=message):
        bridge.analyze(bridge.matmul, X, W, seconds=seconds)
