"""Each Triton pass of "mosaic_gpu", interpreted, against the plain JAX that replaces it without Pallas-Triton."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.inputs.attention import AttentionGradients, AttentionInputs, AttentionOptions
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.inputs.normalization import NormInputs, NormOptions
from jax_kernels.masks.ranked_mask import Ranked
from jax_kernels.ops.activations import ACTIVATIONS
from jax_kernels.ops.attention import implementations
from jax_kernels.ops.dilated import vjp as dilated_vjp
from jax_kernels.ops.matmul import fp8
from jax_kernels.ops.matmul.implementations import IMPLEMENTATIONS
from jax_kernels.ops.matmul.quantized_rows import quantized_rows
from jax_kernels.ops.normalization import implementations as norms
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.pallas.attention.passes import (
    block_counts,
    fp8_values,
    mask_bits,
    prepare_backward,
    ranked_bits,
    row_norms,
)
from jax_kernels.pallas.attention.softmax import is_large
from jax_kernels.pallas.attention.triton import bias_gradient, decode, large_lse_rows
from jax_kernels.pallas.block_specs.normalization_specs import NormBackwardTriton
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton
from jax_kernels.pallas.matmul.triton import matmul
from jax_kernels.pallas.matmul.triton.state import Sums
from jax_kernels.pallas.triton import backend
from jax_kernels.quantization import FORMATS
from jax_kernels.reference import attention as reference
from jax_kernels.reference import chunked_attention
from jax_kernels.reference import normalization as norm_reference

pytestmark = pytest.mark.triton


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.fixture
def both(monkeypatch):
    """A function that runs `run` with the pass and without Pallas-Triton, and returns both results as float32."""

    def found(run):
        results = []
        for available in (True, False):
            monkeypatch.setattr(backend, "AVAILABLE", available)
            program = jax.make_jaxpr(lambda: run())()
            assert ("pallas_call" in str(program)) is available
            results.append([np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(lambda: run())())])
        return results

    return found


def assert_equal(got, want, **bounds):
    assert len(got) == len(want) > 0
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, **bounds)


@pytest.mark.parametrize("entries", [None, 1])
def test_row_norms(both, entries):
    x = normal(2, 300, 3, 72, dtype="bfloat16")
    assert_equal(*both(lambda: row_norms.longest(x, interpret=True, entries=entries)), rtol=1e-6)


def test_decode_merge(both):
    out, lse = normal(2, 2, 19, 8, 24), 9 * normal(2, 2, 19, 16, seed=1)
    lse = lse.at[0, :, :18, 2].set(-jnp.inf).at[1, 1, :, 3].set(-jnp.inf)  # one part with keys; none
    query = jax.ShapeDtypeStruct((2, 2, 6, 16), jnp.float32)
    got, want = both(lambda: decode.merge(out, lse, query, interpret=True))
    assert_equal(got, want, rtol=2e-6, atol=1e-6)
    assert np.isneginf(want[1]).any()


@pytest.mark.parametrize("lengths", [None, (120, -5)])
def test_fp8_values(both, lengths):
    value = normal(2, 200, 3, 40, dtype="float8_e4m3fn")
    lengths = None if lengths is None else jnp.array(lengths)
    assert_equal(*both(lambda: fp8_values.transposed(value, lengths, interpret=True)))


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_both_ways_in_8_bits(both, scaling):
    """A kernel that multiplies by a reciprocal may round a value to its neighbour of 8 bits."""
    x = normal(2, 150, 200, dtype="bfloat16")
    options = dataclasses.make_dataclass("Options", ["scaling"], frozen=True)(scaling)
    call = PlannedCall("mosaic_gpu", None, options, True)

    def run():
        return [(x.values, x.scale) for x in fp8.both_ways(call, x[:, :128] if scaling == "block" else x)]

    got, want = both(run)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0.13)
        assert (x == y).mean() > 0.98


def test_a_gated_unit_in_8_bits(both):
    """The derivative, the joined cotangents and the joined weights. Other scales give other roundings of dx."""
    options = MatmulOptions(out_dtype="bfloat16", activation=ACTIVATIONS["silu"], scaling="tensor")
    call = PlannedCall("mosaic_gpu", None, options, True)
    x, w, w_up, dout = (normal(*shape, seed=i, dtype="bfloat16") for i, shape in enumerate([(128, 128)] * 4))

    def run():
        with pytest.MonkeyPatch.context() as patch:
            plain = dataclasses.replace(IMPLEMENTATIONS["xla"], name="mosaic_gpu")
            patch.setitem(IMPLEMENTATIONS, "mosaic_gpu", plain)
            found = fp8.forward(call, MatmulInputs(x=x, w=w, w_up=w_up), measures=False)
            (gradients,) = fp8.backward(call, found.residuals, dout)
            return found.out, gradients.x, gradients.w, gradients.w_up

    for y, right in zip(*both(run), strict=True):
        assert np.linalg.norm(y - right) < 0.1 * np.linalg.norm(right)


@pytest.mark.parametrize("format", FORMATS)
def test_quantized_rows(both, format):
    x = normal(2, 30, 200)
    call = PlannedCall("mosaic_gpu", None, None, True)
    got, want = both(lambda: dataclasses.astuple(quantized_rows(call, x, format))[:2])
    for y, right in zip(got, want, strict=True):
        np.testing.assert_allclose(y, right, rtol=0.25)
        assert (y == right).mean() > 0.98


@dataclasses.dataclass(frozen=True)
class Launch:
    """EpilogueTraits of a launch whose work tiles are split."""

    options: MatmulOptions
    transposes_sums: bool
    m: int = 5
    n: int = 192
    splits: int = 3


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("transposes_sums", [False, True])
def test_sums_of_splits(both, transposes_sums, is_gated):
    options = MatmulOptions(out_dtype="float32", activation=jnp.tanh, saves_preactivation=True)
    launch = Launch(options=options, transposes_sums=transposes_sums)
    sums = [normal(*((3, 192, 8) if transposes_sums else (3, 5, 192)), seed=seed) for seed in range(1 + is_gated)]
    arrays = {"x": None, "w": None, "w_up": normal(1) if is_gated else None}
    inputs = MatmulInputs(bias=normal(192, seed=2), residual=normal(5, 192, seed=3), **arrays)
    assert_equal(*both(lambda: matmul.joined(launch, inputs, Sums(*sums), interpret=True)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_gated", [False, True])
def test_derivative_of_sums_of_splits(both, is_gated):
    options = MatmulOptions(out_dtype="float32", activation=jnp.tanh, derivative=lambda x: 1 - jnp.tanh(x) ** 2)
    launch = Launch(options=options, transposes_sums=False)
    up = normal(5, 192, seed=2) if is_gated else None
    inputs = MatmulInputs(x=None, w=None, preactivation=normal(5, 192, seed=1), up=up)
    sums = Sums(product=normal(3, 5, 192))
    assert_equal(*both(lambda: matmul.joined(launch, inputs, sums, interpret=True)), rtol=1e-5, atol=1e-5)


def test_other_passes_are_replaced(monkeypatch):
    """XLA does the work of these passes where their `takes` is False; their own tests compare the two."""
    ranked = Ranked(*(jnp.zeros(shape, jnp.int32) for shape in ((1, 2, 128), (1, 2, 128), (1, 128), (1, 128))))
    out = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    takes = (
        lambda: block_counts.takes((1, 1, 128, 128), 64, 64),
        lambda: mask_bits.takes(128 * 128, 64),
        lambda: ranked_bits.takes(ranked, 64),
        lambda: prepare_backward.takes(out, 64, 64),
    )
    call = dilated_vjp.DilatedCall(
        ((None, PlannedCall("mosaic_gpu", None, None, True)),), (), 1, False, False,
        stop_gradient_weights=False, return_lse=True,
    )  # fmt: skip
    assert all(take() for take in takes)
    assert call.by_passes
    monkeypatch.setattr(backend, "AVAILABLE", False)
    assert not any(take() for take in takes)
    assert not call.by_passes
    assert call.by_kernels


BLOCKS = AttentionBackwardTriton(
    block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32, num_warps=4, num_stages=1
)
STATICS = {"config": BLOCKS, "core_count": 4, "interpret": True}


def call_with_large_rows(shape: tuple[int, ...]):
    """(inputs, options, lse, delta, dout, lse_lo) of a causal call whose bias is -1e9 for some queries."""
    query, key, value, dout = (
        normal(2, length, heads, 32, seed=seed, dtype="bfloat16")
        for seed, (length, heads) in enumerate(((70, 4), (90, 2), (90, 2), (70, 4)))
    )
    bias = normal(*shape, seed=4)
    bias = bias.at[:, :, 10:50].set(-1e9) if shape[2] > 1 else bias.at[:1, :1].set(-1e9)
    mask = jnp.asarray(np.random.default_rng(5).random((2, 1, 70, 90)) < 0.8)
    inputs = AttentionInputs(query, key, value, bias=bias, mask=mask, kv_lengths=jnp.array([90, 60]))
    options = AttentionOptions(scale=0.2, is_causal=True, q_offset=3)
    out, lse, lse_lo = chunked_attention.forward(inputs, options, out_dtype=jnp.float32)
    lse, delta = reference.row_terms(out, lse, dout, None)
    large = np.asarray(is_large(lse))
    assert large.any()
    assert not large.all()
    return inputs, options, lse, delta, dout, lse_lo


BIASES = [(2, 4, 70, 90), (1, 4, 70, 90), (2, 4, 1, 90)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", BIASES)
def test_large_rows(shape, with_bias):
    inputs, options, *rows, lse_lo = call_with_large_rows(shape)
    start = [normal(*x.shape, seed=6).astype(x.dtype) for x in inputs[:3]]
    start = AttentionGradients(*start, bias=jnp.ones_like(inputs.bias) if with_bias else None)
    got = large_lse_rows.large_rows(inputs, options, start, *rows, lse_lo, **STATICS)
    # The rows are arguments: XLA would add constants to each other, which rounds lse_lo away.
    plain = jax.jit(lambda *rows: implementations.with_large_rows(inputs, options, start, *rows))
    want = plain(*rows, lse_lo)
    assert (got.bias is None) is (want.bias is None) is not with_bias
    for x, y, before in zip(jax.tree.leaves(got), jax.tree.leaves(want), jax.tree.leaves(start), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert (np.asarray(y) != np.asarray(before)).any()
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", BIASES)
def test_bias_gradient(shape):
    inputs, options, *rows, lse_lo = call_with_large_rows(shape)
    got = bias_gradient.bias_gradient(inputs, options, *rows, lse_lo, **STATICS)
    want = chunked_attention.backward(inputs, options, *rows, lse_lo).bias
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.01)
    assert np.asarray(want).any()


def test_backward_of_wide_norms(both):
    inputs = NormInputs(x=normal(9, 96, dtype="bfloat16"), scale=normal(96, seed=1), bias=normal(96, seed=2))
    options = NormOptions(eps=1e-6, is_centred=True)
    result = norm_reference.norm_forward(inputs, options)
    config = NormBackwardTriton(block_rows=4, chunk=32, num_warps=1, programs=1)
    statics = {"config": config, "core_count": 2, "interpret": True}
    dout = normal(9, 96, seed=3, dtype="bfloat16")
    run = lambda: norms._mosaic_backward(inputs, options, result, dout, None, **statics)
    assert_equal(*both(run), rtol=0.01, atol=1e-3)
