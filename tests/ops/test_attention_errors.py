"""Bad input of flash_attention: the error names the argument, what it got and what it wants, before any compiling."""

import re

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, flash_attention
from jax_kernels.ops.attention_table import IMPLEMENTATIONS

pytestmark = pytest.mark.usefixtures("no_interpret")

B, T, S, H, HKV, D, DV = 2, 6, 5, 4, 2, 16, 8
GOOD = {
    "query": jnp.ones((B, T, H, D)),
    "key": jnp.ones((B, S, HKV, D)),
    "value": jnp.ones((B, S, HKV, DV)),
}
BFLOAT16 = {name: x.astype(jnp.bfloat16) for name, x in GOOD.items()}


def like(name, **axes):
    """The good array of this name with other axes."""
    index = {"batch": 0, "length": 1, "heads": 2, "head_dim": 3}
    shape = list(GOOD[name].shape)
    for axis, size in axes.items():
        shape[index[axis]] = size
    return {name: jnp.ones(shape)}


class Tensor:
    """Stands for a tensor of another framework."""

    dtype, shape, ndim = np.dtype(np.float32), (B, T, H, D), 4

    def __array__(self, dtype=None, copy=None):
        return np.ones(self.shape, np.float32)


Tensor.__module__ = "torch"

BAD = [
    # id, the arguments that differ, the error, its message
    ("query_rank", {"query": jnp.ones((T, H, D))}, ValueError, "query: got shape (6, 4, 16), want 4 axes"),
    (
        "key_rank",
        {"key": jnp.ones((1, B, S, HKV, D))},
        ValueError,
        "key: got shape (1, 2, 5, 2, 16), want 4 axes",
    ),
    ("value_rank", {"value": np.float32(1)}, TypeError, "value: got numpy.float32, want a jax.Array"),
    (
        "heads",
        like("key", heads=3) | like("value", heads=3),
        ValueError,
        "key: got 3 heads, want a divisor of query's 4",
    ),
    ("no_heads", like("key", heads=0) | like("value", heads=0), ValueError, "key: got 0 heads, want a divisor"),
    ("value_heads", like("value", heads=4), ValueError, "value: got (length, heads) (5, 4), want key's (5, 2)"),
    ("value_length", like("value", length=4), ValueError, "value: got (length, heads) (4, 2), want key's (5, 2)"),
    ("key_batch", like("key", batch=1), ValueError, "key: got batch 1, want query's batch 2"),
    ("value_batch", like("value", batch=3), ValueError, "value: got batch 3, want query's batch 2"),
    ("key_head_dim", like("key", head_dim=8), ValueError, "key: got head_dim 8, want query's head_dim 16"),
    ("head_dim_0", like("query", head_dim=0), ValueError, "query: got head_dim 0, want 1 to 256"),
    ("head_dim_257", like("query", head_dim=257), ValueError, "query: got head_dim 257, want 1 to 256"),
    ("v_head_dim_257", like("value", head_dim=257), ValueError, "value: got head_dim 257, want 1 to 256"),
    ("no_keys", like("key", length=0) | like("value", length=0), ValueError, "want no axis of length 0"),
    ("no_queries", like("query", length=0), ValueError, "want no axis of length 0"),
    ("float64", {"query": np.ones((B, T, H, D))}, TypeError, "query: got dtype float64, want bfloat16, float16 or"),
    ("int64", {"key": np.ones((B, S, HKV, D), np.int64)}, TypeError, "key: got dtype int64, want bfloat16, float16 or"),
    ("mixed", {"key": BFLOAT16["key"]}, TypeError, "key: got dtype bfloat16, want query's dtype float32"),
    ("mixed_value", {"value": GOOD["value"].astype(np.float16)}, TypeError, "value: got dtype float16, want query's"),
    ("list", {"query": [[1.0]]}, TypeError, "query: got builtins.list, want a jax.Array"),
    ("none", {"value": None}, TypeError, "value: got builtins.NoneType, want a jax.Array"),
    ("torch", {"query": Tensor()}, TypeError, "query: got torch.Tensor, want a jax.Array"),
    ("int_flag", {"is_causal": 1}, TypeError, "is_causal: got int, want a bool that is known when tracing"),
    ("array_flag", {"return_lse": np.ones(1, bool)}, TypeError, "return_lse: got ndarray, want a bool that is known"),
    ("deterministic", {"deterministic": "yes"}, TypeError, "deterministic: got str, want True, False or None"),
    ("scale_str", {"scale": "1"}, TypeError, "scale: got str, want a number that is known when tracing"),
    ("scale_bool", {"scale": True}, TypeError, "scale: got bool, want a number that is known when tracing"),
    ("scale_array", {"scale": np.ones(2)}, TypeError, "scale: got ndarray, want a number that is known when tracing"),
    ("scale_nan", {"scale": float("nan")}, ValueError, "scale: got nan, want a finite number"),
    ("scale_inf", {"scale": np.inf}, ValueError, "scale: got inf, want a finite number"),
    ("precision", {"precision": "bf16"}, ValueError, "precision: got 'bf16', want 'fp32', 'tf32' or None"),
    ("precision_type", {"precision": ["fp32"]}, ValueError, "precision: got ['fp32'], want 'fp32', 'tf32' or None"),
    ("precision_16_bit", BFLOAT16 | {"precision": "tf32"}, ValueError, "precision: got 'tf32' with bfloat16 inputs"),
    (
        "implementation",
        {"implementation": "cuda"},
        ValueError,
        "implementation='cuda' is not known for flash_attention",
    ),
    ("implementation_type", {"implementation": 3}, TypeError, "implementation: got int, want a name or None"),
    ("mask_dtype", {"mask": np.ones((T, S), np.int32)}, TypeError, "mask: got dtype int32, want bool (True = attend)"),
    ("mask_bf16", {"mask": np.ones((T, S), jnp.bfloat16)}, TypeError, "mask: got dtype bfloat16, want bool"),
    ("mask_list", {"mask": [[True] * S] * T}, TypeError, "mask: got list, want a bool array"),
    (
        "mask_shape",
        {"mask": np.ones((T, 4), bool)},
        ValueError,
        "mask: got shape (6, 4), want a shape broadcastable to",
    ),
    ("mask_heads", {"mask": np.ones((B, HKV, T, S), bool)}, ValueError, "mask: got shape (2, 2, 6, 5), want a shape"),
    (
        "mask_rank",
        {"mask": np.ones((1, B, H, T, S), bool)},
        ValueError,
        "mask: got shape (1, 2, 4, 6, 5), want a shape",
    ),
    ("mask_additive", {"mask": np.full((T, S), -1e9, np.float32)}, ValueError, "mask: got float32 values other than 0"),
    ("mask_nan", {"mask": np.full((T, S), np.nan, np.float32)}, ValueError, "mask: got float32 values other than 0"),
    (
        "lengths_shape",
        {"kv_lengths": np.ones(3, np.int32)},
        ValueError,
        "kv_lengths: got shape (3,), want [batch] = (2,)",
    ),
    ("lengths_scalar", {"kv_lengths": np.int32(3)}, ValueError, "kv_lengths: got shape (), want [batch] = (2,)"),
    ("lengths_int", {"kv_lengths": 3}, TypeError, "kv_lengths: got int, want an int32 array"),
    ("lengths_float", {"kv_lengths": np.ones(B)}, TypeError, "kv_lengths: got dtype float64, want int32"),
    ("lengths_bool", {"kv_lengths": np.ones(B, bool)}, TypeError, "kv_lengths: got dtype bool, want int32"),
    ("lengths_huge", {"kv_lengths": np.array([1, 2**40])}, ValueError, "kv_lengths: got values up to 1099511627776"),
    ("offset_float", {"q_offset": 1.5}, TypeError, "q_offset: got float, want an int or an int32 array"),
    ("offset_bool", {"q_offset": True}, TypeError, "q_offset: got bool, want an int or an int32 array"),
    ("offset_none", {"q_offset": None}, TypeError, "q_offset: got NoneType, want an int or an int32 array"),
    ("offset_dtype", {"q_offset": np.ones(B)}, TypeError, "q_offset: got dtype float64, want int32"),
    (
        "offset_shape",
        {"q_offset": np.ones(3, np.int32)},
        ValueError,
        "q_offset: got shape (3,), want an int, a scalar or",
    ),
    ("offset_huge", {"q_offset": 1 << 40}, ValueError, "q_offset: got 1099511627776, want a position within 2**30"),
    (
        "offset_array_huge",
        {"q_offset": np.array([0, -(2**40)])},
        ValueError,
        "q_offset: got values up to 1099511627776",
    ),
]


@pytest.fixture
def compiled():
    """The names of JAX's compile events while a test runs."""
    events = []
    listen = lambda event, duration, **_: events.append(event) if "compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(("arguments", "error", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_argument(arguments, error, message, compiled):
    arguments = GOOD | arguments
    with pytest.raises(error, match=re.escape(message)):
        flash_attention(**arguments)
    assert not compiled
    with pytest.raises(error, match=re.escape(message)):
        explain(flash_attention, **arguments)


def test_the_listener_hears_compiling(compiled):
    jax.jit(lambda x: x * 3 + 1)(np.float32(2)).block_until_ready()
    assert compiled


@pytest.mark.parametrize("name", ["bias", "window", "segment_ids", "score_mod", "sinks", "softcap"])
def test_argument_that_is_not_served_yet(name, compiled):
    for value in (np.zeros((1, 1, T, S), np.float32), 0, lambda *score: score[0]):
        with pytest.raises(NotImplementedError, match=f"{name}: not served yet by any implementation"):
            flash_attention(**GOOD, **{name: value})
    assert not compiled


@pytest.mark.parametrize("name", ["mosaic_gpu", "triton", "cudnn"])
def test_gpu_implementation_on_a_cpu(name, compiled):
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(NotImplementedError, match=f"'{name}' cannot serve this flash_attention: it needs an NVIDIA GPU"),
    ):
        flash_attention(**BFLOAT16, implementation=name)
    assert not compiled


def test_unknown_implementation_lists_the_known_ones():
    with pytest.raises(ValueError, match=", ".join(f"'{name}'" for name in IMPLEMENTATIONS)):
        flash_attention(**GOOD, implementation="flash")


@pytest.mark.parametrize("name", ["is_causal", "return_lse", "deterministic", "scale"])
def test_traced_where_a_static_value_is_wanted(name):
    with pytest.raises(TypeError, match=rf"{name}: got \w*Tracer, want"):
        jax.jit(lambda flag: flash_attention(**GOOD, **{name: flag}))(True if name != "scale" else 1.0)


def test_argument_without_a_meaning():
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        flash_attention(**GOOD, causal=True)
    with pytest.raises(TypeError, match="positional"):
        flash_attention(*GOOD.values(), None)


def test_good_arguments_of_every_kind():
    """The checks let through what is documented: these would fail if they were too strict."""
    want = flash_attention(**GOOD, is_causal=True, q_offset=1, kv_lengths=jnp.array([5, 2]))
    for offset in (np.int64(1), np.array(1), jnp.int32(1), [1, 1], np.array([1, 1], np.uint8), jnp.ones(B, jnp.int16)):
        for lengths in ([5, 2], (5, 2), np.array([5, 2], np.int64), jnp.array([5, 2], jnp.uint8)):
            got = flash_attention(**GOOD, is_causal=np.bool_(True), q_offset=offset, kv_lengths=lengths)
            np.testing.assert_array_equal(got, want)
    arrays = (np.asarray(x) for x in GOOD.values())
    np.testing.assert_array_equal(flash_attention(*arrays, is_causal=True), flash_attention(**GOOD, is_causal=True))
