"""jax_kernels.analyze: the runs of each op, their work, their times, and advice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_kernels
from jax_kernels import analyze, flash_attention, matmul, models, rms_norm
from jax_kernels.device import DeviceInfo, device_info

SPEC = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def runs(found):
    """{op: (forward, backward)} of an Analysis, equal ops added."""
    totals = {}
    for use in found.uses:
        forward, backward = totals.get(use.op, (0, 0))
        totals[use.op] = forward + use.forward, backward + use.backward
    return totals


def layer(x, w):
    query = (x @ w).reshape(2, 256, 4, 64)
    out = flash_attention(query, query, query, is_causal=True).reshape(2, 256, 256)
    return matmul(rms_norm(out), w), None


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_runs_in_a_scan_with_gradients(remat, jitted):
    """Each layer runs once; with remat its forward runs again in the backward. A traced function is traced again."""
    body = jax.checkpoint(layer) if remat else layer
    loss = lambda x, ws: jax.lax.scan(body, x, ws)[0].astype(jnp.float32).sum()
    step = jax.grad(loss, argnums=1)
    step = jax.jit(step) if jitted else step
    x, ws = SPEC(2, 256, 256), SPEC(3, 256, 256)
    if jitted:
        jax.eval_shape(step, x, ws)
    found = analyze(step, x, ws, device="h200")
    times = 6 if remat else 3
    assert runs(found)["flash_attention"] == runs(found)["rms_norm"] == (times, 3)
    assert runs(found)["matmul"] == (times + 2 * 3, 0)  # the backward has two matmuls
    assert found.matmuls == times + 2 * 3  # x @ w
    (use,) = [use for use in found.uses if use.op == "flash_attention"]
    pairs = 2 * 4 * 256 * 257 / 2
    assert use.cost.flops == pairs * 64 * (4 * times + 10 * 3)
    assert use.plan.implementation == "mosaic_gpu"
    assert use.bound_ms == pytest.approx(use.cost.bytes / 4.8e12 * 1e3, rel=1e-6)
    assert sum(use.share for use in found.uses) < 1
    assert "flash_attention  2x256x4x64 causal bfloat16" in str(found)


def test_a_cond_runs_its_largest_branch():
    def choose(x, w):
        branches = [lambda x: x, lambda x: jnp.tanh(x @ w) @ w, lambda x: x @ w]
        return jax.lax.switch(jnp.int32(x[0, 0] > 0), branches, x)

    assert analyze(choose, SPEC(64, 64), SPEC(64, 64), device="h200").matmuls == 2


def test_a_vmap_multiplies_the_work():
    one, many = SPEC(2, 64, 2, 32), SPEC(3, 2, 64, 2, 32)
    op = lambda q: flash_attention(q, q, q)
    single, mapped = (analyze(f, q).uses[0] for f, q in ((op, one), (jax.vmap(op), many)))
    assert (mapped.forward, mapped.cost.flops) == (1, 3 * single.cost.flops)
    assert mapped.shape.endswith("vmap of 3")


def test_equal_calls_are_one_use():
    x = SPEC(8, 64, 64)
    found = analyze(lambda x: rms_norm(rms_norm(x)) + matmul(x, x[0]), x)
    assert runs(found) == {"rms_norm": (2, 0), "matmul": (1, 0)}
    assert [use.op for use in found.uses if use.forward == 2] == ["rms_norm"]


CALLS = {
    "decode_attention": (SPEC(2, 1, 4, 64), SPEC(2, 128, 2, 64), SPEC(2, 128, 2, 64)),
    "gated_matmul": (SPEC(16, 32), SPEC(32, 64), SPEC(32, 64)),
    "mlp": (SPEC(16, 32), SPEC(32, 64), SPEC(64, 32)),
    "layer_norm": (SPEC(16, 32), SPEC(32), SPEC(32)),
    "grouped_matmul": (SPEC(16, 32), SPEC(2, 32, 64), SPEC(2, dtype=jnp.int32)),
    "grouped_gated_matmul": (SPEC(16, 32), SPEC(2, 32, 64), SPEC(2, 32, 64), SPEC(2, dtype=jnp.int32)),
    "linear_cross_entropy": (SPEC(16, 32), SPEC(32, 100), SPEC(16, dtype=jnp.int32)),
}
FLOPS = {
    "decode_attention": 4 * 2 * 4 * 128 * 64,
    "gated_matmul": 4 * 16 * 32 * 64,
    "mlp": 4 * 16 * 32 * 64,
    "layer_norm": 8 * 16 * 32,
    "grouped_matmul": 2 * 16 * 32 * 64,
    "grouped_gated_matmul": 4 * 16 * 32 * 64,
    "linear_cross_entropy": 2 * 16 * 32 * 100,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_work_of_each_op(name):
    found = analyze(getattr(jax_kernels, name), *CALLS[name], device="h200")
    assert sum(use.cost.flops for use in found.uses) == FLOPS[name]
    assert found.uses[0].bound_ms > 0
    assert found.matmuls == 0  # the ops' own matmuls are theirs


def test_the_experts_of_a_model():
    """Three matmuls for each pair of a token and an expert, and twice as many in the backward."""
    experts = models.MixtureOfExperts(32, 64, num_experts=4, experts_per_token=2, rngs=nnx.Rngs(0))
    found = analyze(jax.grad(lambda x: experts(x).sum()), SPEC(2, 8, 32, dtype=jnp.float32), device="h200")
    grouped = [use for use in found.uses if use.op.startswith("grouped")]
    assert sum(use.cost.flops for use in grouped) == 3 * 3 * 2 * (16 * 2) * 32 * 64
    assert sum(use.forward + use.backward for use in grouped) == 2
    # Rows, weights, group sizes, and a weight and two indices for each of 32 pairs; the sums of 16 tokens.
    given, out = 4 * (32 * 32 + 3 * 4 * 32 * 64 + 4 + 3 * 32), 4 * 16 * 32
    assert sum(use.cost.bytes for use in grouped) == 3 * given + 2 * out


def test_dilated_attention_has_the_work_of_its_branches():
    query = SPEC(1, 256, 4, 64)
    op = functools.partial(jax_kernels.dilated_attention, segment_lengths=(64, 128), dilation_rates=(1, 2))
    loss = lambda q: op(q, q, q).astype(jnp.float32).sum()
    (use,) = analyze(jax.grad(loss), query, device="h200").uses
    assert (use.op, use.forward, use.backward) == ("dilated_attention", 1, 1)
    pairs = 4 * (4 * 64**2 + 2 * 64**2)  # heads * (segments * rows ** 2 of each branch)
    assert use.cost.flops == pairs * 64 * (4 + 10)
    assert len(use.plan.branches) == 2


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(32, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return rms_norm(self.dropout(self.linear(x)))


def test_flax_modules_keep_their_state():
    """As the function, and as an argument of a function under nnx.jit. The dropout's counter stays."""
    model, x = Model(nnx.Rngs(0)), jnp.ones((4, 32))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.RngCount)))
    assert runs(analyze(model, x)) == {"rms_norm": (1, 0)}
    step = nnx.jit(lambda model, x: nnx.grad(lambda model: model(x).sum())(model))
    assert runs(analyze(step, model, x)) == {"rms_norm": (1, 1)}
    after = nnx.to_pure_dict(nnx.state(model, nnx.RngCount))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), before, after))


def test_measured_times():
    query = jnp.ones((1, 64, 2, 32))
    loss = lambda q: flash_attention(q, q, q).sum()
    found = analyze(jax.grad(loss), query, measure=True, seconds=0.002)
    (use,) = found.uses
    assert found.timer == "host"
    assert use.ms > 0
    assert found.total_ms > 0
    assert use.share == use.ms / found.total_ms
    assert use.roofline is None  # a CPU's rates are unknown
    assert "ms a call (host timer)" in str(found)


def test_the_head_tells_measured_times_from_bounds():
    """A CPU's rates are unknown, so its table has no bounds; profile times the calls without the whole script."""
    found = analyze(rms_norm, jnp.ones((4, 64)))
    assert found.head() == f"{found.device}; no bounds, as its rates are not known"
    timed = dataclasses.replace(found.uses[0], ms=0.1)
    by_itself = dataclasses.replace(found, uses=(timed,), timer="host")
    assert by_itself.head() == f"{found.device}; each call was timed by itself (host timer)"
    on_gpu = analyze(rms_norm, jnp.ones((4, 64)), device="h200")
    assert on_gpu.head() == "NVIDIA H200; times are bounds by the data sheet's rates"


def kinds(found):
    return [advice.kind for advice in found.advice]


def test_advice_on_float32():
    query = SPEC(2, 1024, 8, 64, dtype=jnp.float32)
    (advice,) = analyze(flash_attention, query, query, query, device="a100").advice
    assert advice.kind == "dtype"
    assert "bfloat16" in advice.text
    flops = 4 * 2 * 8 * 1024**2 * 64
    moved = 4 * 2 * 1024 * 8 * 64
    after = max(flops / 312e12, 2 * moved / 2039e9)
    assert advice.saves_ms == pytest.approx((flops / 19.5e12 - after) * 1e3)
    assert kinds(analyze(flash_attention, *[SPEC(2, 1024, 8, 64)] * 3, device="a100")) == []


def test_advice_on_a_dtype_without_arithmetic():
    query = SPEC(1, 64, 2, 64)
    assert kinds(analyze(flash_attention, query, query, query, device="t4")) == ["fallback", "dtype"]
    (advice,) = analyze(rms_norm, query, device="cpu").advice
    assert (advice.kind, advice.saves_ms) == ("dtype", None)


@pytest.mark.parametrize(("head_dim", "device", "padded"), [(80, "h200", 128), (144, "a100", 256), (120, "h200", None)])
def test_advice_on_a_padded_head_dim(head_dim, device, padded):
    query = SPEC(1, 256, 2, head_dim)
    found = [x for x in analyze(flash_attention, query, query, query, device=device).advice if x.kind == "head_dim"]
    assert len(found) == (padded is not None)
    if padded:
        assert f"pads head_dim {head_dim} to {padded}" in found[0].text


def test_advice_on_a_call_that_no_kernel_serves():
    query = SPEC(1, 256, 2, 64)
    found = analyze(flash_attention, query, query, query, device="v100")
    (advice,) = [x for x in found.advice if x.kind == "fallback"]
    assert "triton: it needs compute capability 8.0" in advice.text
    named = functools.partial(flash_attention, implementation="xla")
    assert "fallback" not in kinds(analyze(named, query, query, query, device="v100"))


def test_advice_on_masks():
    query = SPEC(1, 512, 2, 64)
    causal, few = np.tril(np.ones((512, 512), bool)), np.zeros((512, 512), bool)
    few[:, :64] = True
    of = lambda mask: analyze(flash_attention, query, query, query, mask=mask, device="h200")
    (advice,) = of(causal).advice
    assert "is_causal=True" in advice.text
    assert of(causal).uses[0].cost.flops == 4 * 2 * 64 * 512 * 513 / 2
    (advice,) = of(few).advice
    assert "75 % of its mask's blocks are dead" in advice.text
    assert kinds(of(np.ones((512, 512), bool))) == []
    assert of(jax.ShapeDtypeStruct((512, 512), bool)).uses[0].cost.is_bound


def test_advice_on_a_bias_that_masks():
    query, bias = SPEC(1, 512, 2, 64), jnp.full((512, 512), -jnp.inf).at[:, :64].set(0)
    op = lambda q: flash_attention(q, q, q, bias=bias)
    assert "bias" not in kinds(analyze(op, query))  # plain JAX skips nothing in a mask either
    (advice,) = analyze(op, query, device="h200").advice
    assert (advice.kind, advice.text[:4]) == ("bias", "75 %")
    assert advice.saves_ms > 0


def test_checked_advice():
    """check=True times the call with is_causal instead of the array."""
    query, mask = jnp.ones((1, 64, 2, 32)), np.tril(np.ones((64, 64), bool))
    (advice,) = analyze(flash_attention, query, query, query, mask=mask, check=True, seconds=0.002).advice
    assert advice.before_ms > 0
    assert advice.after_ms > 0
    assert "measured: " in str(advice)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "h200", "measure": True}, "device: got NVIDIA H200, want CPU or None"),
        ({"device": "nope"}, "device: got 'nope'"),
        ({"seconds": 0}, "seconds: got 0"),
        ({"seconds": "1"}, "seconds: got '1'"),
        ({"seconds": float("inf")}, "seconds: got inf"),
        ({"measure": True}, "args: got a jax.ShapeDtypeStruct with measure=True"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ValueError, match=words):
        analyze(rms_norm, SPEC(4, 32), **options)


def test_rates_of_devices():
    h100 = device_info("h100")
    assert [h100.flops(x) for x in ("bfloat16", "tf32", "fp8", "float32")] == [989e12, 494.5e12, 1978e12, 67e12]
    assert device_info("t4").flops("bfloat16") == 8.1e12  # it has no bfloat16 arithmetic
    assert device_info("a100").flops("fp8") == 312e12
    assert device_info("cpu").flops("float32") is None
    assert isinstance(h100, DeviceInfo)
