"""Bad input of flash_attention. The error names the argument, the value and the wanted value, before any compiling."""

import re

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, flash_attention
from jax_kernels.dispatch import on_device
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS

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
    """A tensor of another framework."""

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
        "implementation: got 'cuda' for flash_attention",
    ),
    ("implementation_type", {"implementation": 3}, TypeError, "implementation: got int, want a name or None"),
    ("mask_dtype", {"mask": np.ones((T, S), np.int32)}, TypeError, "mask: got dtype int32, want bool (True = attend)"),
    ("mask_float64", {"mask": np.ones((T, S))}, TypeError, "mask: got dtype float64, want bool"),
    (
        "mask_additive_bf16",
        {"mask": np.full((T, S), -1e9, jnp.bfloat16)},
        ValueError,
        "mask: got bfloat16 values other than 0 and 1, want a bool mask; an additive one is a bias",
    ),
    ("score_mod", {"score_mod": "alibi"}, TypeError, "score_mod: got str, want an elementwise function"),
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


IDS = np.zeros((B, T), np.int32)
BAD += [
    ("window_type", {"window": 1.5}, TypeError, "window: got 1.5, want an int from 0 to 2**29, or (left, right)"),
    ("window_bool", {"window": True}, TypeError, "window: got True, want an int"),
    ("window_array", {"window": np.array([1, 2, 3])}, ValueError, "window: got (1, 2, 3), want an int"),
    ("window_one", {"window": (3,)}, ValueError, "window: got (3,), want an int"),
    ("window_three", {"window": (3, 2, 1)}, ValueError, "window: got (3, 2, 1), want an int"),
    ("window_negative", {"window": (3, -2)}, ValueError, "window: got (3, -2), want an int"),
    ("window_wide", {"window": 1 << 30}, ValueError, "window: got 1073741824, want an int"),
    (
        "segments_type",
        {"segment_ids": 3},
        TypeError,
        "segment_ids: got int for query, want an int32 array [B, T], or a (query, key) pair of",
    ),
    (
        "segments_one",
        {"segment_ids": IDS},
        ValueError,
        "segment_ids: got one array where query and key have lengths 6 and 5, want a (query, key) pair",
    ),
    ("segments_three", {"segment_ids": (IDS,) * 3}, ValueError, "segment_ids: got 3 items, want an int32 array"),
    ("segments_none", {"segment_ids": (IDS, None)}, ValueError, "segment_ids: got None for key, want an int32"),
    ("segments_shape", {"segment_ids": (IDS, IDS + 0)}, ValueError, "segment_ids: got shape (2, 6) for key, want"),
    ("segments_query", {"segment_ids": (IDS[:1], IDS)}, ValueError, "segment_ids: got shape (1, 6) for query, want"),
    ("segments_list", {"segment_ids": [[0] * T] * B}, TypeError, "segment_ids: got list for query, want an int32"),
    ("segments_float", {"segment_ids": (IDS + 0.5, IDS[:, :S])}, TypeError, "segment_ids: got dtype float64, want"),
    ("softcap_zero", {"softcap": 0}, ValueError, "softcap: got 0, want a number above 0, or None"),
    ("softcap_negative", {"softcap": -2.0}, ValueError, "softcap: got -2.0, want a number above 0, or None"),
    ("softcap_inf", {"softcap": np.inf}, ValueError, "softcap: got inf, want a finite number"),
    ("softcap_type", {"softcap": "30"}, TypeError, "softcap: got str, want a number that is known when tracing"),
    ("sinks_shape", {"sinks": np.zeros(HKV, np.float32)}, ValueError, "sinks: got shape (2,), want [heads] = (4,)"),
    ("sinks_dtype", {"sinks": np.zeros(H)}, TypeError, "sinks: got dtype float64, want bfloat16, float16 or float32"),
    ("sinks_int", {"sinks": jnp.zeros(H, jnp.int32)}, TypeError, "sinks: got dtype int32, want bfloat16, float16"),
    ("sinks_type", {"sinks": 0.0}, TypeError, "sinks: got float, want an array"),
    ("bias_type", {"bias": 0.5}, TypeError, "bias: got float, want an array"),
    ("bias_dtype", {"bias": jnp.zeros((T, S), jnp.bfloat16)}, TypeError, "bias: got dtype bfloat16, want query's"),
    ("bias_float64", {"bias": np.zeros((T, S))}, TypeError, "bias: got dtype float64, want query's dtype float32"),
    ("bias_bool", {"bias": np.ones((T, S), bool)}, TypeError, "want query's dtype float32; a bool one is a mask"),
    (
        "bias_fp16",
        BFLOAT16 | {"bias": np.zeros((T, S), np.float16)},
        TypeError,
        "bias: got dtype float16, want query's dtype bfloat16 or float32",
    ),
    ("bias_shape", {"bias": np.zeros((T, 4), np.float32)}, ValueError, "bias: got shape (6, 4), want a shape broadc"),
    ("bias_heads", {"bias": np.zeros((HKV, 1, 1), np.float32)}, ValueError, "bias: got shape (2, 1, 1), want a shape"),
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


def test_listener_hears_compiling(compiled):
    jax.jit(lambda x: x * 3 + 1)(np.float32(2)).block_until_ready()
    assert compiled


EVEN = {name: jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16) for name in ("query", "key", "value")}
BIAS = jax.ShapeDtypeStruct((1, 4, 64, 64), jnp.bfloat16)
LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)
NOT_SERVED = [
    (
        "mosaic_gpu",
        {"bias": jax.ShapeDtypeStruct((64, 1), jnp.bfloat16)},
        "it takes a bias with a value for each key, not of shape (1, 1, 64, 1)",
    ),
    (
        "mosaic_gpu",
        {"bias": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
        | {name: jax.ShapeDtypeStruct((2, 64, 4, 192), jnp.bfloat16) for name in EVEN},
        "above head_dim 128 it takes a bias for each query in 16 bits, not in float32",
    ),
    ("cudnn", {"segment_ids": jax.ShapeDtypeStruct((2, 64), jnp.int32)}, "it does not take segment_ids"),
    ("cudnn", {"softcap": 3}, "it does not take a softcap"),
    ("cudnn", {"sinks": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}, "it does not take sinks"),
    ("cudnn", {"window": 4}, "its window has only a left side, under a causal mask"),
    ("cudnn", {"window": 4, "is_causal": True, "kv_lengths": LENGTHS}, "it does not take a window with kv_lengths"),
    ("cudnn", {"window": (4, 0), "bias": BIAS}, "it does not take a window with kv_lengths, a dense mask or a bias"),
    (
        "cudnn",
        {"window": (4, 0), "query": jax.ShapeDtypeStruct((2, 66, 4, 64), jnp.bfloat16)},
        "with a window it needs a key for every query",
    ),
    (
        "cudnn",
        {"bias": jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)},
        "it takes a bias in query's dtype bfloat16, not float32",
    ),
    (
        "cudnn",
        {"bias": jax.ShapeDtypeStruct((2, 4, 64, 64), jnp.bfloat16)},
        "it has a gradient only for a bias of shape [1, H, T, S] = (1, 4, 64, 64), not (2, 4, 64, 64)",
    ),
    (
        "cudnn",
        {"window": (4, 0)} | {name: jax.ShapeDtypeStruct((2, 64, 4, 192), jnp.bfloat16) for name in EVEN},
        "with a window its head_dim is at most 128",
    ),
    (
        "cudnn",
        {"bias": BIAS, "mask": jax.ShapeDtypeStruct((64, 64), bool)},
        "it does not take a bias with a dense mask",
    ),
]


@pytest.mark.parametrize(("implementation", "arguments", "reason"), NOT_SERVED)
def test_named_implementation_cannot_serve(implementation, arguments, reason):
    with (
        on_device("h200"),
        pytest.raises(NotImplementedError, match=rf"'{implementation}' cannot .*: {re.escape(reason)}"),
    ):
        explain(flash_attention, **EVEN | arguments, implementation=implementation)


@pytest.mark.parametrize(
    ("arguments", "implementation"),
    [
        ({"window": (4, 0)}, "mosaic_gpu"),
        ({"window": 4, "is_causal": True}, "mosaic_gpu"),
        ({"window": (4, 0), "implementation": "cudnn"}, "cudnn"),
        ({"window": (-1, 0)}, "mosaic_gpu"),
        ({"window": -1}, "mosaic_gpu"),
        ({"window": (None, None)}, "mosaic_gpu"),
        ({"bias": BIAS}, "mosaic_gpu"),
        ({"bias": BIAS, "deterministic": True}, "mosaic_gpu"),
        ({"bias": jax.ShapeDtypeStruct((64, 1), jnp.bfloat16)}, "triton"),
        ({"mask": jax.ShapeDtypeStruct((64, 64), bool)}, "mosaic_gpu"),
        ({"mask": jax.ShapeDtypeStruct((64, 64), bool), "deterministic": True}, "mosaic_gpu"),
        ({"mask": jax.ShapeDtypeStruct((64, 1), bool)}, "mosaic_gpu"),
        ({"window": 4}, "mosaic_gpu"),
        ({"softcap": np.float32(30)}, "mosaic_gpu"),
        ({"segment_ids": jax.ShapeDtypeStruct((2, 64), jnp.int16)}, "mosaic_gpu"),
        ({"sinks": jax.ShapeDtypeStruct((4,), jnp.float16)}, "mosaic_gpu"),
        ({"sinks": jax.ShapeDtypeStruct((4,), jnp.float16), "bias": BIAS}, "mosaic_gpu"),
        ({"bias": BIAS, "mask": jax.ShapeDtypeStruct((64, 64), bool)}, "mosaic_gpu"),
        ({"bias": BIAS, "mask": jax.ShapeDtypeStruct((2, 1, 64, 64), bool)}, "mosaic_gpu"),
    ],
)
@pytest.mark.triton
def test_hopper_implementation(arguments, implementation):
    with on_device("h200"):
        assert explain(flash_attention, **EVEN | arguments).implementation == implementation


@pytest.mark.parametrize("name", ["mosaic_gpu", "triton", "cudnn"])
@pytest.mark.triton
def test_gpu_implementation_on_a_cpu(name, compiled):
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(NotImplementedError, match=f"'{name}' cannot serve this flash_attention: it needs an NVIDIA GPU"),
    ):
        flash_attention(**BFLOAT16, implementation=name)
    assert not compiled


@pytest.mark.parametrize("name", ["mosaic_gpu", "triton", "cudnn"])
@pytest.mark.triton
def test_float32_error_on_a_cpu_names_the_gpu(name):
    with pytest.raises(
        NotImplementedError, match=f"'{name}' cannot serve this flash_attention: it needs an NVIDIA GPU"
    ):
        flash_attention(**GOOD, implementation=name)


def test_unknown_implementation_lists_the_known_ones():
    with pytest.raises(ValueError, match=", ".join(f"'{name}'" for name in IMPLEMENTATIONS)):
        flash_attention(**GOOD, implementation="flash")


@pytest.mark.parametrize("name", ["is_causal", "return_lse", "deterministic"])
def test_traced_value_for_a_static_argument(name):
    with pytest.raises(TypeError, match=rf"{name}: got \w*Tracer, want"):
        jax.jit(lambda flag: flash_attention(**GOOD, **{name: flag}))(True)


def test_meaningless_argument():
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        flash_attention(**GOOD, causal=True)
    with pytest.raises(TypeError, match="positional"):
        flash_attention(*GOOD.values(), None)


def test_valid_arguments_of_every_type():
    """The checks accept the documented arguments. These calls would fail if a check were too strict."""
    want = flash_attention(**GOOD, is_causal=True, q_offset=1, kv_lengths=jnp.array([5, 2]))
    for offset in (np.int64(1), np.array(1), jnp.int32(1), [1, 1], np.array([1, 1], np.uint8), jnp.ones(B, jnp.int16)):
        for lengths in ([5, 2], (5, 2), np.array([5, 2], np.int64), jnp.array([5, 2], jnp.uint8)):
            got = flash_attention(**GOOD, is_causal=np.bool_(True), q_offset=offset, kv_lengths=lengths)
            np.testing.assert_array_equal(got, want)
    for window in (-1, (None, -1), [-1, None], (-1, 4), (100, np.int64(100))):
        np.testing.assert_array_equal(
            flash_attention(**GOOD, window=window, is_causal=True), flash_attention(**GOOD, is_causal=True)
        )
    ids = (np.zeros((B, T), np.int64), jnp.zeros((B, S), jnp.uint8))
    zeros = {"bias": np.zeros((1, S), np.float32), "sinks": np.full(H, -np.inf, jnp.bfloat16)}
    np.testing.assert_allclose(flash_attention(**GOOD, segment_ids=ids, **zeros), flash_attention(**GOOD), rtol=1e-6)
    arrays = (np.asarray(x) for x in GOOD.values())
    np.testing.assert_array_equal(flash_attention(*arrays, is_causal=True), flash_attention(**GOOD, is_causal=True))
