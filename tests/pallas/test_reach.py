"""Arrays of 2 to 4 GiB: Triton's kernels reach elements of 2 and 4 bytes, and never get elements of 1 byte."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import decode_attention, explain, flash_attention, flash_attention_fp8, layer_norm, matmul, rms_norm
from jax_kernels.dispatch import on_device
from jax_kernels.ops import unsupported
from jax_kernels.pallas.attention.passes import block_counts, fp8_values, mask_bits
from jax_kernels.pallas.attention.triton import bias_gradient
from jax_kernels.pallas.triton import tensors
from jax_kernels.quantization import QuantizedArray
from jax_kernels.quantization.formats import LowBit

pytestmark = pytest.mark.triton
GIB = 1 << 30


def test_reach_of_arrays():
    """Offsets are signed 32-bit element counts up to 4 GiB, and 64-bit counts beyond."""
    for itemsize in (2, 4):
        assert all(tensors.reaches(size * GIB // itemsize, itemsize) for size in (1, 2, 3, 4, 5, 16))
    assert [tensors.reaches(int(size * GIB), 1) for size in (2, 2.5, 3.9, 4, 4.5)] == [True, False, False, False, True]
    assert not tensors.reaches(2 * GIB + 1, 1)
    assert not tensors.reaches(4 * GIB, 1)
    assert tensors.reaches(4 * GIB + 1, 1)


def test_plans_exclude_triton_beyond_its_reach():
    """A bool mask of decode_attention, an 8-bit output and a low-bit weight of 2.5 GiB: each goes to "xla"."""
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    cache = array(5 << 10, 16384, 1, 64)
    of_mask = functools.partial(explain, decode_attention, array(5 << 10, 2, 16, 64), cache, cache)
    weight = QuantizedArray(
        values=array(5 << 17, 4096, dtype="int8"),
        scale=array(32, 5 << 17, dtype="float32"),
        scaling="group",
        layout=LowBit(format="int8", group=128),
        length=4096,
    )
    with on_device("A100"):
        plans = [
            of_mask(mask=array(5 << 10, 16, 2, 16384, dtype="bool")),
            explain(matmul, array(4, 4096), weight, transpose_w=True),
        ]
        assert [plan.implementation for plan in plans] == ["xla", "xla"]
        assert all(("triton", unsupported.OUT_OF_REACH) in plan.passed_over for plan in plans)
        assert of_mask(mask=array(5 << 10, 1, 2, 16384, dtype="bool")).implementation == "triton"
        assert of_mask().implementation == "triton"


def test_bool_passes_beyond_their_reach():
    pairs = 5 << 29
    assert not mask_bits.takes(pairs, 128)
    assert mask_bits.takes(pairs // 2, 128)
    assert not block_counts.takes((1, 5, 1 << 14, 1 << 15), 128, 128)
    assert block_counts.takes((1, 2, 1 << 14, 1 << 15), 128, 128)


@pytest.mark.parametrize("with_lengths", [False, True])
def test_8_bit_values_go_to_xla(with_lengths, monkeypatch):
    """fp8 attention's values that Triton cannot reach are equal when XLA transposes them."""
    value = jax.random.normal(jax.random.key(0), (2, 200, 3, 72), jnp.float32).astype(jnp.float8_e4m3fn)
    lengths = jnp.array([130, -5]) if with_lengths else None
    transposed = functools.partial(fp8_values.transposed, interpret=True)
    want = jax.jit(transposed)(value, lengths)
    monkeypatch.setattr(fp8_values, "reaches", lambda elements, itemsize: False)
    got = jax.jit(lambda *given: transposed(*given))(value, lengths)
    np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (got, want)))


def test_bias_gradient_with_a_mask_beyond_reach(monkeypatch):
    """The kernels read the packed words of a bool mask instead of its bools."""
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.bfloat16)
    query, bias, mask = normal(1, 70, 2, 64), normal(1, 2, 70, 70), jnp.asarray(random.random((1, 2, 70, 70)) < 0.5)
    keys: list = []

    def gradient():
        from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
        from jax_kernels.pallas.attention.triton.common import TracedCall

        inputs = AttentionInputs(query, query, query, bias=bias, mask=mask)
        options = AttentionOptions(scale=0.125)
        call = TracedCall.of(inputs, options, 32, 32, True)
        pairs = bias_gradient.Pairs.of(inputs, options, call)
        keys.append((pairs.mask is None, pairs.words is None))
        rows = jnp.zeros((1, 2, 70), jnp.float32)
        config = _Config()
        return bias_gradient.bias_gradient(
            inputs, options, rows + 4.0, rows, query, config=config, core_count=4, interpret=True
        )

    want = gradient()
    monkeypatch.setattr(bias_gradient, "reaches", lambda elements, itemsize: False)
    got = gradient()
    assert keys == [(False, True), (True, False)]
    assert np.abs(np.asarray(want, np.float32)).max() > 0
    np.testing.assert_array_equal(got, want)


class _Config:
    block_q_dq = block_kv_dq = 32
    num_warps, num_stages = 4, 1


def _normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jax.jit(lambda key: jax.random.normal(key, shape, dtype))(jax.random.key(seed))


def _last(call, x, rows, *others):
    """(the last rows of call over all of x, the result of call over these rows only)."""
    both = jax.jit(call)(x, *others)[-rows:], jax.jit(call)(x[-rows:], *others)
    return [np.asarray(y, np.float32) for y in both]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("size", [2.5, 3.9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_large_arrays(size, dtype):
    """Norms, matmuls and attention by Triton over arrays of 2.5 and 3.9 GiB are right at their ends."""
    elements = int(size * GIB) // jnp.dtype(dtype).itemsize
    options = {} if dtype == "bfloat16" else {"precision": "tf32"}
    x, ones = _normal(elements // 4096, 4096, dtype=dtype), jnp.ones(4096, dtype)
    norm = lambda x: layer_norm(x, ones, implementation="triton")
    gradient = lambda x: jax.vjp(norm, x)[1](x)[0]
    w = _normal(4096, 64, dtype=dtype, seed=1)
    product = lambda x, w: matmul(x, w, implementation="triton", **options)
    for call, others in ((norm, ()), (gradient, ()), (product, (w,))):
        np.testing.assert_allclose(*_last(call, x, 300, *others), rtol=2e-2, atol=2e-2)
    batch = elements // (256 * 8 * 64)
    query = x[: batch * 32].reshape(batch, 256, 8, 64)
    attend = lambda q: flash_attention(q, q, q, is_causal=True, deterministic=True, implementation="triton", **options)
    np.testing.assert_allclose(*_last(attend, query, 4), rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(*_last(lambda q: jax.vjp(attend, q)[1](q)[0], query, 4), rtol=2e-2, atol=5e-2)
    del x, query
    gc.collect()


@pytest.mark.gpu
@pytest.mark.alone
def test_large_byte_arrays():
    """An 8-bit output, a mask and values of 2.5 GiB are right at their ends, in any implementation dispatched."""
    x = _normal(int(2.5 * GIB) // 4096, 4096)
    quantized = lambda x: rms_norm(x, quantize="e4m3").values.astype(jnp.bfloat16)
    np.testing.assert_array_equal(*_last(quantized, x, 300))
    del x
    value = _normal(1250, 16384, 1, 128).astype(jnp.float8_e4m3fn)
    query = _normal(1250, 16, 1, 128, seed=1).astype(jnp.float8_e4m3fn)
    attend = jax.jit(flash_attention_fp8)
    whole, last = attend(query, value, value)[-3:], attend(query[-3:], value[-3:], value[-3:])
    np.testing.assert_allclose(np.asarray(whole, np.float32), np.asarray(last, np.float32), atol=2e-2)


@pytest.mark.gpu
@pytest.mark.alone
def test_decode_many_sequences_with_a_mask():
    """An axis of CUDA's grid has 65,535 programs at most. Beyond, each sequence still reads its mask's row."""
    batch, length = 70_000, 64
    query, cache = _normal(batch, 1, 4, 64), _normal(batch, length, 1, 64, seed=1)
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, (batch, 1, 1, length))
    decode = lambda implementation: jax.jit(
        lambda *given: decode_attention(*given, cache, mask=mask, implementation=implementation)
    )(query, cache)
    got, want = (np.asarray(decode(name), np.float32) for name in ("triton", "xla"))
    np.testing.assert_allclose(got, want, atol=2e-2)
