"""No Triton kernel reads or writes past the end of an array, which the interpreter would not show."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import decode_attention, masks
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.ops.dilated import branches as dilated_views
from jax_kernels.pallas.attention.passes import block_counts as block_counts_pass
from jax_kernels.pallas.attention.passes import fp8_values, merge_branches, prepare_backward, ranked_bits, row_norms
from jax_kernels.pallas.attention.passes import mask_bits as mask_bits_pass
from jax_kernels.pallas.attention.triton import decode as decode_triton
from jax_kernels.testing import ATTENTION_CASES, attention_inputs, run_attention, why_not
from jax_kernels.testing import decode_attention as decode_cases
from tests.support.cases import dilated as dilated_cases
from tests.support.interpreters.overhangs import unmasked
from tests.tools import compile_case

pytestmark = pytest.mark.triton

# A machine with few SMs: keys are cut into a few splits.
FEW_CORES = dataclasses.replace(device_info("a100"), core_count=9)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.fixture
def _few_cores(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    with on_device(FEW_CORES):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_few_cores")
def test_attention():
    served = [case for case in ATTENTION_CASES if why_not(case, "triton") is None]
    assert len(served) > 40
    for case in served:
        found = unmasked(lambda *arrays, case=case: run_attention(case, arrays, "triton"), *attention_inputs(case))
        assert not found, (case.name, found)


@pytest.mark.usefixtures("_few_cores")
@pytest.mark.parametrize("case", decode_cases.CASES.values())
def test_decode_attention(case):
    def call(q, k, v, **arrays):
        options = {"window": case.window, "softcap": case.softcap, "scale": case.scale}
        return decode_attention(q, k, v, **arrays, **options, implementation="triton")

    arrays = decode_cases.arrays_of(case)
    assert not unmasked(lambda arrays: call(**arrays), arrays)


@pytest.mark.parametrize("v_head_dim", [8, 24, 64, 192])
def test_decode_merge(v_head_dim):
    """A head of 192 columns in a view of 256: the last 64 columns belong to the next row, or to the next array."""
    merge = functools.partial(decode_triton.merge, interpret=True)
    query, lse = array(2, 3, 4, 64, dtype="bfloat16"), array(2, 2, 19, 16)
    assert not unmasked(merge, array(2, 2, 19, 16, v_head_dim), lse, query)


@pytest.mark.parametrize("name", dilated_cases.PATTERNS)
def test_dilated(name):
    calls, heads, kv_heads, length = dilated_cases.calls_of(name)
    outs, lses = dilated_cases.random_results(calls, heads, "heads", 6)
    parts, _ = dilated_cases.random_results(calls, heads, "kv_heads", 20)
    like, kv_like = array(2, length, heads, 6), array(2, length, kv_heads, 20, dtype="bfloat16")
    rows, kv_rows = (dilated_views.compact_rows(calls, 2, heads, n) for n in (heads, kv_heads))
    statics = {"interpret": True}
    merge = lambda outs, lses: merge_branches.merge(rows, outs, lses, like=like, share=0.5, **statics)
    total = lambda parts: merge_branches.total(kv_rows, parts, None, 0.3, like=kv_like, **statics)
    assert not unmasked(merge, outs, lses)
    assert not unmasked(total, parts)
    for call in calls:
        of_call = dilated_views.compact_rows([call], 2, heads, heads)
        gather = lambda x, call=call, rows=of_call: merge_branches.gather(rows, [x], call.rows, **statics)
        assert not unmasked(gather, array(2, length, heads, 20, dtype="bfloat16"))


def _ranked(**blocks):
    mask = masks.top_k(jnp.zeros((2, 3, 1, 301)), 20, among=masks.causal(), q_length=203)
    return functools.partial(ranked_bits.packed, **blocks), mask


@pytest.mark.parametrize("transposed", [False, True])
def test_passes(transposed):
    blocks = {"rows": 64, "columns": 128, "transposed": transposed, "interpret": True}
    ranked, mask = _ranked(**blocks)
    keep, of_row = array(2, 3, 203, 301, dtype="bool"), array(2, 3, 1, 301, dtype="bool")
    assert not unmasked(functools.partial(mask_bits_pass.packed, **blocks), keep)
    assert not unmasked(functools.partial(mask_bits_pass.packed, **blocks), of_row)
    assert not unmasked(ranked, mask)
    assert not unmasked(lambda keep: block_counts_pass.counts(keep, 64, 128, interpret=True), keep)
    for head_dim in (40, 128, 192):
        x, value = array(2, 301, 3, head_dim, dtype="bfloat16"), array(2, 301, 3, head_dim, dtype="float8_e4m3fn")
        assert not unmasked(lambda x: row_norms.longest(x, interpret=True), x)
        blocks = {"block_q": 64, "width": 256}
        rows = functools.partial(prepare_backward.rows_of, **blocks, zeros=True, interpret=True)
        assert not unmasked(rows, x, x, array(2, 3, 301), array(2, 3, 301))
        of_values = lambda value, lengths: fp8_values.transposed(value, lengths, interpret=True)
        assert not unmasked(of_values, value, array(2, dtype="int32"))


# Triton kernels that run with the Hopper kernels: gradients of a bias and a score_mod's arrays, large rows, mask bits.
BESIDE_HOPPER = {
    "bias": {"bias": "hts", "bias_gradient": True},
    "bias_by_key": {"bias": "bs", "bias_gradient": True, "kv_lengths": True},
    "bias_and_mask": {"bias": "ts", "mask": "bts", "bias_gradient": True},
    "mask": {"mask": "ts", "is_causal": True},
    "segments": {"bias": "ts", "segment_ids": True, "bias_gradient": True},
    "score_mod": {"score_mod": "alibi", "score_mod_gradients": True},
    "of_key": {"score_mod": "of_key", "score_mod_gradients": True},
    "narrow": {"bias": "hts", "bias_gradient": True, "head_dim": 40, "v_head_dim": 24},
}


@pytest.mark.parametrize("name", BESIDE_HOPPER)
def test_passes_of_the_hopper_kernels(name, monkeypatch, no_interpret):
    seen = []

    def look(gpu, function, *shapes):
        seen.append(unmasked(function, *shapes))
        return None, []

    monkeypatch.setattr(compile_case, "lower_and_compile", look)
    sizes = {"q_length": 301, "kv_length": 203, "heads": 4, "kv_heads": 2}
    with on_device("h200"):
        compile_case.compile_here(
            "h200", compile_case.Spec(implementation="mosaic_gpu", **sizes, **BESIDE_HOPPER[name])
        )
    assert seen == [[]]
