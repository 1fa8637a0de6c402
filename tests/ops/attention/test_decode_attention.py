"""decode_attention against its definition in float64, its errors and its plans; on a GPU, every implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import decode_attention, explain, masks
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.ops.attention.decode_implementations import IMPLEMENTATIONS
from jax_kernels.pallas.attention import decode_contract
from jax_kernels.pallas.attention.triton.decode import merge
from jax_kernels.testing import rms_error
from jax_kernels.testing.decode_attention import CASES, LONG, DecodeCase, arrays_of, definition, errors, run
from tests.support.cases import decode_masks, tiers

pytestmark = pytest.mark.timeout(120)
ON_XLA = DecodeCase("float32", dtype="float32", q_length=3, window=30, softcap=4.0, sinks=True, kv_lengths=(190, 2))
# A machine with more SMs than a case has heads: the keys are split.
MANY_CORES = dataclasses.replace(device_info("a100"), core_count=9)
QUICK = [
    "plain", "dead", "everything", "head_dim_256", "pages_32_everything", "alibi", "masked_odd", "odd_pages",
    "long_pages_128"]  # fmt: skip


def check(case, implementation, arrays=None):
    arrays = arrays_of(case) if arrays is None else arrays
    out, lse = run(case, arrays, implementation)
    assert (str(out.dtype), str(lse.dtype)) == (case.dtype, "float32")
    for name, (error, bound) in errors(case, arrays, (out, lse)).items():
        assert error <= bound, (name, error, bound)
    if not case.sinks:
        dead = np.isneginf(lse).swapaxes(1, 2)
        assert not np.asarray(out)[dead].any()


@pytest.mark.parametrize("case", tiers.cases([*CASES.values(), ON_XLA], [*QUICK, "float32"]))
def test_xla(case, no_interpret):
    check(case, "xla")


@pytest.mark.parametrize("case", tiers.cases(CASES.values(), QUICK))
def test_triton_interpreted(case, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    with on_device(MANY_CORES):
        check(case, "triton")


@pytest.mark.parametrize("name", ["short", "pages_16"])
def test_triton_interpreted_in_one_split(name, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    with on_device(dataclasses.replace(MANY_CORES, core_count=1)):
        check(CASES[name], "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [*CASES.values(), *LONG.values(), ON_XLA])
def test_on_gpu(case, implementation, no_interpret):
    arrays = arrays_of(case)
    try:
        explain(decode_attention, arrays["q"], arrays["k"], arrays["v"], implementation=implementation,
                **{name: x for name, x in arrays.items() if name not in ("q", "k", "v", "sinks")})  # fmt: skip
    except NotImplementedError as error:
        pytest.skip(str(error))
    check(case, implementation, arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_on_gpu_the_same_bits(implementation, no_interpret):
    arrays = arrays_of(LONG["long"])
    results = [run(LONG["long"], arrays, implementation) for _ in range(2)]
    for once, twice in zip(*results, strict=True):
        np.testing.assert_array_equal(once, twice)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("name", decode_masks.CASES)
def test_dead_blocks_are_not_read_on_gpu(name, implementation, no_interpret):
    try:
        found = decode_masks.errors_by(decode_masks.CASES[name], implementation)
    except NotImplementedError as error:
        pytest.skip(str(error))
    for result, (error, bound) in found.items():
        assert error <= bound, (result, error, bound)


def test_matches_bottom_right_flash_attention(no_interpret):
    from jax_kernels import flash_attention

    random = np.random.default_rng(3)
    query, key, value = (jnp.asarray(random.standard_normal((2, n, 4, 16), np.float32)) for n in (5, 40, 40))
    lengths = jnp.array([33, 5])
    got = decode_attention(query, key, value, kv_lengths=lengths, window=8, return_lse=True)
    want = flash_attention(
        query, key, value, kv_lengths=lengths, is_causal=True, q_offset=lengths - 5, window=8, return_lse=True
    )
    for x, y in zip(got, want, strict=True):
        assert rms_error(x, y) < 1e-6


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_mask_object_and_shared_batch_entries(implementation, monkeypatch):
    """A Mask's queries are at the end of each sequence. An array entry can serve several neighbouring sequences."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    case = dataclasses.replace(CASES["pairs"], sinks=False, window=None, mask="BHTS", bias="")
    arrays = arrays_of(case)
    position = np.asarray(case.lengths)[:, None] - case.q_length + np.arange(case.q_length)
    keys = np.arange(case.kv_length)
    kept = ((keys + position[..., None]) % 3 != 0) | (keys < 3)  # differs with the position of the query
    arrays["mask"] = jnp.asarray(np.broadcast_to(kept[:, None], case.shape_of("BHTS")))
    given = masks.from_function(lambda b, h, q, k: (q + k) % 3 != 0) | masks.prefix(3)
    for name, (error, bound) in errors(case, arrays, run(case, arrays | {"mask": given}, implementation)).items():
        assert error <= bound, (name, error, bound)

    case = dataclasses.replace(case, batch=6, mask="BTS", kv_lengths=(200, 190, 3, 0, 7, 8))
    arrays = arrays_of(case)
    few = arrays["mask"][::3]
    arrays["mask"] = jnp.repeat(few, 3, axis=0)
    for name, (error, bound) in errors(case, arrays, run(case, arrays | {"mask": few}, implementation)).items():
        assert error <= bound, (name, error, bound)


def test_without_lse_and_with_zero_scale(no_interpret):
    arrays = arrays_of(dataclasses.replace(ON_XLA, window=None, softcap=None, sinks=False, kv_lengths=None))
    out = decode_attention(arrays["q"], arrays["k"], arrays["v"], scale=0)
    assert isinstance(out, jax.Array)
    want = np.asarray(arrays["v"])[:, :-2].mean(axis=1).repeat(2, axis=1)
    np.testing.assert_allclose(out[:, 0], want, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("mapped", ["all", "not_the_pages", "queries"])
def test_vmap(implementation, mapped, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    case = dataclasses.replace(CASES["pages_16"], mask="S", bias="BS")
    case = dataclasses.replace(case, heads=2, kv_heads=1, head_dim=64, kv_length=64, kv_lengths=(60, 10))
    calls = [arrays_of(case, seed) for seed in range(2)]
    of_sequences = {"q", "kv_lengths", "block_tables", "bias"}
    axes = {"all": set(calls[0]), "not_the_pages": of_sequences, "queries": {"q"}}[mapped]
    if mapped == "not_the_pages":  # the second call has the first call's sequences in reverse order
        calls[1] = {name: x[::-1] if name in axes else x for name, x in calls[0].items()}  # one mask for all calls
    joined = {name: jnp.stack([c[name] for c in calls]) if name in axes else calls[0][name] for name in calls[0]}
    call = lambda arrays: run(case, arrays, implementation)
    got = jax.vmap(call, in_axes=({name: 0 if name in axes else None for name in joined},))(joined)
    for i in range(2):
        alone = {name: x[i] if name in axes else x for name, x in joined.items()}
        its_case = dataclasses.replace(case, kv_lengths=tuple(alone["kv_lengths"].tolist()))
        for name, (error, bound) in errors(its_case, alone, [x[i] for x in got]).items():
            assert error <= bound, (name, error, bound)


def test_has_no_gradient(no_interpret):
    arrays = arrays_of(ON_XLA)
    for name in "qkv":
        loss = lambda x, name=name: run(ON_XLA, arrays | {name: x}, "xla")[0].sum()
        with pytest.raises(NotImplementedError, match=r"decode_attention: it has no gradient, want flash_attention"):
            jax.grad(loss)(arrays[name])


@pytest.mark.parametrize("parts", [3, 37])
def test_merge(parts):
    batch, kv_heads, group, q_length, columns, rows = 2, 2, 3, 2, 24, 8
    random = np.random.default_rng(0)
    out = random.standard_normal((batch, kv_heads, parts, rows, columns), np.float32)
    lse = 9 * random.standard_normal((batch, kv_heads, parts, rows + 8), np.float32)
    lse[0, :, : parts - 1, 2], lse[1, 1, :, 3] = -np.inf, -np.inf  # without a key: all parts but one; all parts
    query = jax.ShapeDtypeStruct((batch, q_length, kv_heads * group, 16), jnp.float32)
    merged, merged_lse = jax.jit(functools.partial(merge, query=query, interpret=True))(out, lse)
    weights = np.exp(lse[..., :rows].astype(np.float64))
    total = weights.sum(axis=2)
    with np.errstate(divide="ignore"):
        want_lse = np.log(total)
    want = (out * weights[..., None]).sum(axis=2) / np.where(total == 0, 1, total)[..., None]
    for b, t, h in np.ndindex(batch, q_length, kv_heads * group):
        row = t * group + h % group
        np.testing.assert_allclose(merged[b, t, h], want[b, h // group, row], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(merged_lse[b, h, t], want_lse[b, h // group, row], rtol=1e-6)


def test_splits():
    # A full grid is left alone, one that is too small is filled, and no split is made for little.
    assert decode_contract.split_count(64 * 8, 256, 132) == 1
    assert decode_contract.split_count(8, 256, 132) == 16
    assert decode_contract.split_count(1, 256, 132) == 128
    assert decode_contract.split_count(1, 1, 132) == 1
    assert decode_contract.split_count(8, 4, 132) == 1
    # A window of 100 keys and 2 queries touches 3 blocks of 64 at most.
    assert decode_contract.most_blocks(16384, 2, 100, 64) == 3
    assert decode_contract.most_blocks(128, 2, 1000, 64) == 2
    assert decode_contract.most_blocks(130, 2, -1, 64) == 3


def shapes(batch=2, q_length=1, kv_length=256, heads=8, kv_heads=2, head_dim=128, dtype="bfloat16"):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    cache = array(batch, kv_length, kv_heads, head_dim)
    return array(batch, q_length, heads, head_dim), cache, cache


@pytest.mark.triton
def test_plans(no_interpret):
    def plan(device, **changed):
        with on_device(device):
            return explain(decode_attention, *shapes(**changed))

    assert [plan(gpu).implementation for gpu in ("h200", "a100", "rtx4090", "b200", "t4", "cpu")] == [
        "mosaic_gpu", "triton", "triton", "triton", "xla", "xla",
    ]  # fmt: skip
    assert plan("h200").source == "sm_90's rows, measured on NVIDIA H200"
    assert plan("h200", head_dim=192).source == "sm_90's rows, not measured"
    assert plan("a100").source == "sm_80's rows, not measured"
    assert plan("rtx4090").source == "sm_80's rows, inherited by sm_89, not measured"
    assert plan("h200").config.core_count == 132
    assert "multiples of 64" in dict(plan("h200", head_dim=80).passed_over)["mosaic_gpu"]
    assert "multiple of 8" in dict(plan("h200", kv_length=255).passed_over)["mosaic_gpu"]
    assert plan("h200", dtype="float32").implementation == "xla"
    with on_device("h200"):
        masked = explain(decode_attention, *shapes(), bias=jax.ShapeDtypeStruct((1, 8, 1, 256), jnp.bfloat16))
    assert (masked.implementation, dict(masked.passed_over)) == (
        "triton",
        {"mosaic_gpu": "it takes no bias"},
    )
    assert "decode_attention: mosaic_gpu" in str(plan("h200"))
    with on_device("h200"):  # causal masks and windows are no arrays, which this kernel does not take
        banded = explain(decode_attention, *shapes(), mask=masks.causal() & masks.sliding_window(9, 2))
    assert banded.implementation == "mosaic_gpu"


@pytest.mark.triton
def test_named_implementation_cannot_serve(no_interpret):
    for device, implementation, changed, message in (
        ("a100", "mosaic_gpu", {}, "it needs Hopper"),
        ("h200", "mosaic_gpu", {"dtype": "float32"}, "not float32"),
        ("a100", "triton", {"dtype": "float32"}, "not float32"),
        ("t4", "triton", {}, "it needs compute capability 8.0"),
        ("cpu", "triton", {}, "it needs an NVIDIA GPU"),
    ):
        with on_device(device), pytest.raises(NotImplementedError, match=message):
            explain(decode_attention, *shapes(**changed), implementation=implementation)


GOOD = {
    "query": jnp.ones((2, 3, 4, 16)),
    "key": jnp.ones((2, 32, 2, 16)),
    "value": jnp.ones((2, 32, 2, 8)),
    "kv_lengths": jnp.array([3, 32]),
}
PAGED = {"block_tables": jnp.zeros((2, 2), jnp.int32)}
BAD = {
    "rank": ({"query": jnp.ones((3, 4, 16))}, ValueError, "query: got shape (3, 4, 16), want 4 axes"),
    "page_rank": (PAGED | {"key": jnp.ones((2, 2))}, ValueError, "want 4 axes [pages, page_size, heads, head_dim]"),
    "type": ({"key": [1.0]}, TypeError, "key: got builtins.list, want a jax.Array"),
    "dtype": ({"value": jnp.ones((2, 32, 2, 8), jnp.bfloat16)}, TypeError, "value: got dtype bfloat16, want query's"),
    "integers": ({"query": jnp.ones((2, 3, 4, 16), int)}, TypeError, "query: got dtype int32, want bfloat16"),
    "queries": ({"query": jnp.ones((2, 17, 4, 16))}, ValueError, "query: got 17 queries per sequence, want up to 16"),
    "head_dim": ({"key": jnp.ones((2, 32, 2, 8))}, ValueError, "key: got head_dim 8, want query's head_dim 16"),
    "wide": ({"value": jnp.ones((2, 32, 2, 257))}, ValueError, "value: got head_dim 257, want 1 to 256"),
    "heads": ({"query": jnp.ones((2, 3, 5, 16))}, ValueError, "key: got 2 heads, want a divisor of query's 5 heads"),
    "value": ({"value": jnp.ones((2, 31, 2, 8))}, ValueError, "value: got shape (2, 31, 2, 8), want key's (2, 32, 2)"),
    "batch": ({"query": jnp.ones((3, 3, 4, 16))}, ValueError, "key: got batch 2, want query's batch 3"),
    "lengths": ({"kv_lengths": jnp.array([1])}, ValueError, "kv_lengths: got shape (1,), want [batch] = (2,)"),
    "float_lengths": ({"kv_lengths": jnp.ones(2)}, TypeError, "kv_lengths: got dtype float32, want int32"),
    "no_lengths": (PAGED | {"kv_lengths": None}, ValueError, "kv_lengths: got None with block_tables, want [batch]"),
    "tables": ({"block_tables": jnp.zeros((3, 2), int)}, ValueError, "block_tables: got shape (3, 2), want [batch, pa"),
    "float_tables": ({"block_tables": jnp.zeros((2, 2))}, TypeError, "block_tables: got dtype float32, want int32"),
    "page_size": (
        PAGED | {"key": jnp.ones((2, 24, 2, 16)), "value": jnp.ones((2, 24, 2, 8))},
        ValueError,
        "key: got pages of 24 keys, want a power of two from 16 on",
    ),
    "mask": (
        {"mask": jnp.ones((2, 3, 1, 32), bool)},
        ValueError,
        "mask: got shape (2, 3, 1, 32), want a shape broadcas",
    ),
    "mask_dtype": ({"mask": jnp.ones((1, 1, 1, 32), int)}, TypeError, "mask: got dtype int32, want bool"),
    "mask_type": ({"mask": [True]}, TypeError, "mask: got list, want a bool array or a Mask"),
    "bias": (
        {"bias": jnp.ones((3, 1, 1, 32))},
        ValueError,
        "bias: got shape (3, 1, 1, 32), want a shape broadcastable",
    ),
    "bias_dtype": (
        {"bias": jnp.ones((1, 1, 1, 32), bool)},
        TypeError,
        "bias: got dtype bool, want query's dtype float",
    ),
    "window": ({"window": -3}, ValueError, "window: got -3, want an int from 0"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap: got 0.0, want a number above 0, or None"),
    "scale": ({"scale": float("nan")}, ValueError, "scale: got nan, want a finite number"),
    "sinks": ({"sinks": jnp.ones(2)}, ValueError, "sinks: got shape (2,), want [heads] = (4,)"),
    "return_lse": ({"return_lse": 1}, TypeError, "return_lse: got int, want a bool"),
    "name": ({"implementation": "cudnn"}, ValueError, "implementation: got 'cudnn' for decode_attention"),
    "name_type": ({"implementation": 1}, TypeError, "implementation: got int, want a name or None"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, no_interpret):
    changed, error, message = BAD[name]
    for call in (decode_attention, functools.partial(explain, decode_attention)):
        with pytest.raises(error) as caught:
            call(**GOOD | changed)
        assert message in str(caught.value)


def test_keys_past_the_length_have_no_influence(no_interpret):
    """Keys past a length have no influence, and the last key within it has: this checks the cases' own checks."""
    case = dataclasses.replace(ON_XLA, kv_lengths=(150, 150), window=None)
    arrays = arrays_of(case)
    before = run(case, arrays, "xla")
    for first, changes in ((150, False), (149, True)):
        after = run(case, arrays | {name: arrays[name].at[:, first:].set(3.0) for name in "kv"}, "xla")
        assert np.array_equal(before[1], after[1]) is not changes
    assert rms_error(before[1], definition(case, arrays)[1]) < 2e-6


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_kernel_programs_are_equal_under_x64(implementation):
    query, cache = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 1, 8, 64), (2, 512, 2, 64)))
    with jax.enable_x64(True), on_device("h200"):
        out = jax.eval_shape(functools.partial(decode_attention, implementation=implementation), query, cache, cache)
    assert (out.shape, out.dtype) == (query.shape, query.dtype)
