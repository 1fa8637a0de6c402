"""compile_attention: its results, its cache, and its measured speedup."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import compile_attention, device_info, explain, flash_attention, masks
from jax_kernels.dispatch import on_device
from jax_kernels.ops.attention.compile_attention import CompiledAttention
from jax_kernels.testing import rms_error

pytestmark = pytest.mark.usefixtures("no_interpret")

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "dtype": jnp.float32}


@pytest.fixture(autouse=True)
def empty_cache():
    compile_attention.cache_clear()


def arrays(seq_len=40, kv_len=40, head_dim=16, batch=2):
    random = np.random.default_rng(0)
    shapes = ((batch, seq_len, 4, head_dim), (batch, kv_len, 2, head_dim), (batch, kv_len, 2, head_dim))
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("pattern", "options", "mask"),
    [
        ("longformer", {"window": 8, "n": 2}, masks.sliding_window(4, 4) | masks.global_tokens(2)),
        (masks.prefix(7) | masks.causal(), {}, masks.prefix(7) | masks.causal()),
    ],
)
def test_equals_flash_attention(pattern, options, mask):
    attention = compile_attention(pattern, 40, 16, **SHAPE, **options)
    given = arrays()
    np.testing.assert_allclose(attention(*given), flash_attention(*given, mask=mask), atol=1e-6)
    gradients = lambda attend: jax.jit(jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), (0, 1, 2)))(*given)
    want = gradients(lambda *x: flash_attention(*x, mask=mask))
    for got, w in zip(gradients(attention), want, strict=True):
        np.testing.assert_allclose(got, w, atol=1e-5)


def test_density_counts_blocks():
    """Blocks of 128. A causal mask has 10 of 16 live blocks; a window counts a block that it only touches as live."""
    assert compile_attention("causal", 512, 64).density == 10 / 16
    assert compile_attention("sliding_window", 512, 64, left=1, right=0).density == 7 / 16
    assert compile_attention("causal", 256, 64, kv_len=512).density == 3 / 8
    assert compile_attention("causal", 258, 64).density == pytest.approx(6 / 9)


def test_lengths_reach_the_presets():
    attention = compile_attention(
        "bigbird", 60, 16, kv_len=40, block_size=20, random_blocks=0, window_blocks=1, **SHAPE
    )
    assert attention.mask.blocks.shape == (1, 1, 3, 2)
    assert attention(*arrays(60)).shape == (2, 60, 4, 16)


def test_cache():
    """Keeps one object for each set of arguments, device and mode, and counts."""
    of = lambda **kwargs: compile_attention("sliding_window", 40, 16, **{"left": 3, "right": 0} | kwargs)
    first = of()
    assert of() is first
    assert compile_attention("sliding_window", 40, 16, right=0, left=3) is first
    assert of(left=4) is not first
    assert of(implementation="xla") is not first
    with on_device("H200"):
        assert of() is not first
        assert of().plan.implementation == "mosaic_gpu"
    assert compile_attention.cache_info()[:2] == (3, 4)
    mask = masks.block_sparse(np.ones((2, 2), bool), 20)
    assert compile_attention(mask, 40, 16) is compile_attention(mask, 40, 16)
    assert compile_attention(masks.causal(), 40, 16) is compile_attention(masks.causal(), 40, 16)
    other = masks.block_sparse(np.ones((2, 2), bool), 20)
    assert compile_attention(mask, 40, 16) is not compile_attention(other, 40, 16)
    assert compile_attention(masks.PreparedMask(mask, ()), 40, 16).mask is mask
    compile_attention.cache_clear()
    assert of() is not first


def test_interpreted_calls_are_not_cached(monkeypatch):
    of = lambda: compile_attention(masks.sliding_window(3, 0), 40, 16, implementation="triton")
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    assert of().plan.implementation == "triton"
    monkeypatch.delenv("JAX_KERNELS_INTERPRET")
    with pytest.raises(NotImplementedError, match="implementation='triton' cannot serve this"):
        of()


def test_requested_implementation_runs():
    """It does not run the implementation that dispatch would choose for the device."""
    for implementation, kernels in (("xla", 0), (None, 1)):
        with on_device("H200"):
            attention = compile_attention("causal", 512, 64, implementation=implementation)
            program = jax.make_jaxpr(attention)(*attention.specs.values())
        assert attention.plan.implementation == (implementation or "mosaic_gpu")
        assert str(program).count("name=attention_forward") == kernels


def test_inside_jit():
    """The cached object keeps nothing of a trace."""

    @jax.jit
    def attend(*qkv):
        return compile_attention("bigbird", 40, 16, block_size=10, **SHAPE)(*qkv)

    want = attend(*arrays())
    attention = compile_attention("bigbird", 40, 16, block_size=10, **SHAPE)
    assert compile_attention.cache_info().hits == 1
    np.testing.assert_allclose(attention(*arrays()), want, atol=1e-6)


@pytest.mark.parametrize("backward", [False, True])
def test_measured_speedup_follows_the_clock(backward, monkeypatch):
    """It returns the median of the rounds. Sparse and dense attention take turns, and each runs the right calls."""
    attention = compile_attention("causal", 40, 16, batch=3, **SHAPE)
    outs, seconds = [], iter([0.01, 0.0001, 0.002, 0.006, 0.004, 0.007, 0.003, 0.1])

    def clock(run, calls, *, warm=1):
        outs.append((jax.tree.leaves(run()), calls))
        return next(seconds)

    monkeypatch.setattr(sys.modules[CompiledAttention.__module__], "_seconds", clock)
    got = attention.measured_speedup(backward=backward, rounds=3)
    assert got.milliseconds == pytest.approx(3.0)
    assert got.dense_milliseconds == pytest.approx(7.0)
    assert got.speedup == pytest.approx(7 / 3)
    assert got.device == device_info().name
    assert [calls for _, calls in outs] == [1, 1, 2, 100, 2, 100, 2, 100]
    (ours, *others), (dense, *_) = outs[2][0], outs[3][0]
    assert ours.shape == (3, 40, 4, 16)
    assert [x.shape for x in others] == ([(3, 40, 2, 16)] * 2 if backward else [])
    # The last query attends to all keys with either mask. Its own gradient is equal, too.
    np.testing.assert_allclose(ours[:, -1], dense[:, -1], atol=1e-5)
    assert rms_error(ours[:, 0], dense[:, 0]) > 0.1


def test_clock_times_one_call(monkeypatch):
    """The clock ignores the first call, which compiles."""
    module = sys.modules[CompiledAttention.__module__]
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += 0.5 if now[0] >= 100 else 100
        return jnp.zeros(1)

    assert module._seconds(run, 4) == 0.5


def test_explain_gives_the_plan():
    attention = compile_attention("causal", 40, 16, **SHAPE)
    assert explain(attention, *arrays()) is explain(attention, **attention.specs) is attention.plan


def test_measured_speedup_runs():
    got = compile_attention("causal", 40, 16, **SHAPE).measured_speedup(rounds=2)
    assert got.speedup == got.dense_milliseconds / got.milliseconds > 0


BAD = {
    "pattern": (lambda: compile_attention(3, 40, 16), TypeError, "pattern: got int, want the name of a preset or a"),
    "name": (lambda: compile_attention("ring", 40, 16), ValueError, "pattern: got 'ring', want one of"),
    "option": (
        lambda: compile_attention("causal", 40, 16, left=3),
        TypeError,
        "options: got left for 'causal', want ()",
    ),
    "with_mask": (
        lambda: compile_attention(masks.causal(), 40, 16, left=3),
        TypeError,
        "options: got left with a Mask, want none",
    ),
    "array": (
        lambda: compile_attention("block_sparse", 40, 16, blocks=np.ones((1, 1), bool), block_size=40),
        TypeError,
        "blocks: got ndarray, want a constant; for an array, pass a masks.Mask",
    ),
    "seq_len": (lambda: compile_attention("causal", -1, 16), ValueError, "seq_len: got -1, want an int of at least 0"),
    "heads": (
        lambda: compile_attention("causal", 40, 16, num_heads=4, num_kv_heads=3),
        ValueError,
        "num_kv_heads: got 3, want a divisor of num_heads 4",
    ),
    "dtype": (
        lambda: compile_attention("causal", 40, 16, dtype=jnp.int32),
        TypeError,
        "dtype: got int32, want bfloat16, float16 or float32",
    ),
    "dtype_name": (lambda: compile_attention("causal", 40, 16, dtype="foo"), TypeError, "dtype: got 'foo', want"),
    "dtype_none": (lambda: compile_attention("causal", 40, 16, dtype=None), TypeError, "dtype: got None, want"),
    "head_dim": (lambda: compile_attention("causal", 40, 300), ValueError, "query: got head_dim 300, want 1 to 256"),
    "traced": (
        lambda: jax.jit(lambda x: compile_attention(masks.segments(x), 40, 16)(*arrays()))(jnp.zeros(40, jnp.int32)),
        TypeError,
        "pattern: got a Mask of traced arrays, want known arrays",
    ),
    "unhashable": (
        lambda: compile_attention("longformer", 40, 16, window=([8],)),
        TypeError,
        "window: got ([8],), want a constant; for an array, pass a masks.Mask",
    ),
    "shape": (
        lambda: compile_attention("causal", 41, 16, **SHAPE)(*arrays()),
        ValueError,
        "query: got shape (2, 40, 4, 16), want [batch, 41, 4, 16]",
    ),
    "no_array": (
        lambda: compile_attention("causal", 40, 16, **SHAPE)(*arrays()[:2], None),
        TypeError,
        "value: got builtins.NoneType, want a jax.Array",
    ),
    "numpy_dtype": (
        lambda: compile_attention("causal", 40, 16, **SHAPE)(*(np.asarray(x, np.float64) for x in arrays())),
        TypeError,
        "query: got dtype float64, want float32",
    ),
    "explained": (
        lambda: explain(compile_attention("causal", 41, 16, **SHAPE), *arrays()),
        ValueError,
        "query: got shape (2, 40, 4, 16), want [batch, 41, 4, 16]",
    ),
    "dtype_of_call": (
        lambda: compile_attention("causal", 40, 16, num_heads=4, num_kv_heads=2)(*arrays()),
        TypeError,
        "query: got dtype float32, want bfloat16",
    ),
    "rounds": (
        lambda: compile_attention("causal", 40, 16).measured_speedup(rounds=0),
        ValueError,
        "rounds: got 0, want an int of at least 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call()
    assert compile_attention.cache_info().currsize <= 1
