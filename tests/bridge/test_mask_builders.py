"""bridge.masks, bridge.prepare_mask and bridge.compile_attention: JAX's functions, on tensors."""

import inspect
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_kernels
from jax_kernels import bridge
from jax_kernels import masks as of_jax
from jax_kernels.bridge import masks
from jax_kernels.dispatch import on_device

LENGTH = 24


def as_array(x):
    if not isinstance(x, torch.Tensor):
        return x
    return jnp.asarray(x.float().numpy(), "bfloat16") if x.dtype == torch.bfloat16 else jnp.asarray(x.numpy())


def same_segment(b, h, q, k, ids):
    return ids[b, q] == ids[b, k]


def parameters(function):
    return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]


def test_names_and_signatures_match_jax_masks():
    public = lambda module: {name for name in vars(module) if not name.startswith("_")}
    folder = {name for name, x in vars(of_jax).items() if inspect.ismodule(x)}
    modules = {name for name, x in vars(masks).items() if inspect.ismodule(x)} | {"Any", "Callable"}
    ours = public(masks) - modules
    assert ours == public(of_jax) - folder
    for name in ours:
        if inspect.isfunction(getattr(of_jax, name)):
            assert parameters(getattr(masks, name)) == parameters(getattr(of_jax, name))
            assert getattr(masks, name).__doc__
    assert bridge.masks is masks


BIAS = torch.randn(2, 4, LENGTH, LENGTH)
BIAS[0, 1, 3] = -torch.inf
IDS = torch.randint(0, 3, (2, LENGTH), dtype=torch.int32)
LENGTHS = torch.tensor([5, 24], dtype=torch.int32)
CAUSAL = of_jax.causal()
CASES = {
    "dense": ("dense", (BIAS > 0,), {}),
    "dense of zeros and ones": ("dense", ((BIAS > 0).float(),), {}),
    "segments": ("segments", (IDS,), {}),
    "segments of two": ("segments", (IDS, IDS.flip(1)), {}),
    "segments, named": ("segments", (), {"q_ids": IDS, "kv_ids": IDS[:1]}),
    "prefix": ("prefix", (LENGTHS,), {}),
    "prefix of a scalar": ("prefix", (LENGTHS[0],), {}),
    "prefix of a number": ("prefix", (7,), {}),
    "global_tokens": ("global_tokens", (LENGTHS,), {}),
    "block_sparse": ("block_sparse", (BIAS[0, :, :3, :3] > 0, 8), {}),
    "from_function": ("from_function", (same_segment, IDS), {"batch": 2}),
    "preset": ("preset", ("prefix_lm",), {"n": LENGTHS}),
    "preset of blocks": ("preset", (), {"name": "block_sparse", "blocks": BIAS[0, 0, :3, :3] > 0, "block_size": 8}),
    "preset of numbers": ("preset", ("longformer",), {"window": 6, "n": 2}),
    "top_k": ("top_k", (BIAS, 3), {}),
    "top_k of a row": ("top_k", (BIAS[:, :, :1],), {"k": 5, "among": CAUSAL, "q_length": LENGTH, "q_offset": 2}),
    "top_k in 16 bits": ("top_k", (BIAS.bfloat16(), 3), {"among": CAUSAL}),
    "threshold": ("threshold", (BIAS, 0.25), {}),
    "threshold of heads": ("threshold", (BIAS, torch.linspace(-1, 1, 4)[:, None, None]), {}),
    "top_k_blocks": ("top_k_blocks", (BIAS[..., :3, :3], 2, 8), {}),
    "top_k_blocks among": (
        "top_k_blocks",
        (BIAS[..., :3, :3], 2),
        {"block_size": (8, 8), "among": CAUSAL, "always": of_jax.sliding_window(0, 0)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_builders(case):
    name, args, kwargs = CASES[case]
    got = getattr(masks, name)(*args, **kwargs)
    want = getattr(of_jax, name)(*map(as_array, args), **{key: as_array(x) for key, x in kwargs.items()})
    assert repr(got) == repr(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(ours, jax.Array)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def test_mask_keeps_its_values():
    """Later writes to a tensor do not reach the mask, whether JAX can read the tensor in place or not."""
    for tensor in (torch.zeros(64, 64, dtype=torch.bool), torch.zeros(64 * 64 + 1, dtype=torch.bool)[1:].view(64, 64)):
        mask, scores = masks.dense(tensor), masks.threshold(tensor.float(), 0.5)
        tensor.fill_(True)
        assert not np.asarray(mask.array).any()
        assert not np.asarray(scores.array).any()


def test_one_program_for_all_thresholds():
    masks.threshold(BIAS, 0.5)
    before = masks._jitted._cache_size()
    for tau in (0.1, 0.2):
        masks.threshold(BIAS, tau)
    assert masks._jitted._cache_size() == before


def test_from_scores_to_gradients(make_qkv):
    """Native sparse attention's choice of blocks, computed on tensors. The scores get no gradient through the mask."""
    inputs = make_qkv(kv_heads=2)
    query, key, _ = inputs

    def attend(query, key, value):
        scores = masks.pooled_scores(query, key, 8)
        assert isinstance(scores, torch.Tensor)
        mask = masks.top_k_blocks(scores, 2, 8, among=masks.causal(), always=masks.sliding_window(0, 0))
        return bridge.flash_attention(query, key, value, mask=mask & masks.causal())

    arrays = [as_array(x.detach()) for x in inputs]
    scores = of_jax.pooled_scores(arrays[0], arrays[1], 8)
    torch.testing.assert_close(masks.pooled_scores(query, key, 8).detach(), torch.from_numpy(np.array(scores)))
    blocks = of_jax.top_k_blocks(scores, 2, 8, among=CAUSAL, always=of_jax.sliding_window(0, 0))
    loss = lambda *x: jnp.square(jax_kernels.flash_attention(*x, mask=blocks & CAUSAL)).sum()
    want = jax.grad(loss, (0, 1, 2))(*arrays)
    watched = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    of_func = torch.func.grad(lambda *x: attend(*x).square().sum(), (0, 1, 2))(*(x.detach() for x in inputs))
    for got in (watched, of_func):
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-5)
    gradient = torch.autograd.grad(masks.pooled_scores(query, key, 8).sum(), query)[0]
    assert gradient.abs().min() > 0


@pytest.mark.timeout(300)
def test_builders_break_the_compiled_graph(make_qkv):
    torch._dynamo.reset()
    query, key, value = make_qkv()

    def attend(query, key, value):
        mask = masks.top_k(query[:, :, :, 0].transpose(1, 2)[:, :, None] * 1.0, 4)
        return bridge.flash_attention(query, key, value, mask=mask) * 2

    torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(query, key, value), attend(query, key, value))


@pytest.mark.triton
def test_prepare_mask(make_qkv):
    inputs = make_qkv(length=256, head_dim=64, heads=2)
    mask = masks.prefix(LENGTHS) | masks.sliding_window(100, 0)
    assert bridge.prepare_mask(mask, *inputs).lists == ()  # no implementation here reads lists
    with pytest.MonkeyPatch.context() as patch, on_device("H200") as hopper:
        patch.setattr(bridge.interop.planning_device, "_device_info", lambda device: hopper)
        prepared = bridge.prepare_mask(mask, *(x.bfloat16() for x in inputs), is_causal=True)
        specs = [jax.ShapeDtypeStruct(x.shape, "bfloat16") for x in inputs]
        want = jax_kernels.prepare_mask(mask, *specs, is_causal=True)
        assert prepared.lists
        assert jax.tree.structure(prepared) == jax.tree.structure(want)
        for ours, theirs in zip(jax.tree.leaves(prepared), jax.tree.leaves(want), strict=True):
            assert np.array_equal(ours, theirs)
        of_meta = bridge.prepare_mask(mask, *(x.bfloat16().to("meta") for x in inputs), is_causal=True)
        assert jax.tree.structure(of_meta) == jax.tree.structure(want)
        assert len(bridge.prepare_mask(mask, *inputs[:2]).lists) == 3  # Triton's: the inputs are float32
        with torch.autocast("cpu", torch.bfloat16):
            of_autocast = bridge.prepare_mask(mask, *inputs, is_causal=True)
        assert jax.tree.structure(of_autocast) == jax.tree.structure(want)
        torch.use_deterministic_algorithms(True)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                fixed = bridge.prepare_mask(mask, *inputs[:2], is_causal=True)
        finally:
            torch.use_deterministic_algorithms(False)
        assert fixed.lists
        assert jax.tree.structure(fixed) != jax.tree.structure(want)
    # Lists for another device are kept, but not read.
    got = bridge.flash_attention(*inputs, mask=prepared, is_causal=True)
    torch.testing.assert_close(got, bridge.flash_attention(*inputs, mask=mask, is_causal=True), atol=1e-6, rtol=0)


def test_compile_attention(make_qkv, reference):
    shape = {"num_heads": 4, "num_kv_heads": 2, "dtype": torch.float32}
    attention = bridge.compile_attention("longformer", LENGTH, 16, window=8, n=2, **shape)
    assert attention is bridge.compile_attention("longformer", LENGTH, 16, window=8, n=2, **shape)
    assert attention.plan.implementation == "xla"
    assert (attention.device, attention.dtype) == (torch.device("cpu"), torch.float32)
    assert attention.density == 1.0
    inputs = make_qkv(kv_heads=2)
    keep = torch.from_numpy(np.array(attention.mask.to_dense(LENGTH, LENGTH)))
    out, (want, _) = attention(*inputs), reference(*inputs, mask=keep)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=0)
    cotangent = torch.randn_like(out)
    got, want = (torch.autograd.grad(x, inputs, cotangent.to(x.dtype)) for x in (out, want))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    speedup = attention.measured_speedup(backward=True, rounds=1)
    assert speedup.milliseconds > 0
    assert "longformer" not in repr(attention)
    assert "on cpu" in repr(attention)
    own = bridge.compile_attention(masks.dense(BIAS > 0), LENGTH, 16, num_heads=4, batch=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert own(*make_qkv()).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"^query: got dtype torch\.float32, want torch\.bfloat16"):
        own(*make_qkv())
    with pytest.raises(ValueError, match=r"^key: got shape \(2, 24, 4, 16\), want \[batch, 24, 2, 16\]"):
        attention(*make_qkv())


def test_compile_attention_passes_all_arguments(monkeypatch):
    compiled = mock.Mock()
    make = mock.Mock(return_value=compiled)
    function = bridge.compile_attention
    monkeypatch.setattr(inspect.unwrap(function).__globals__["ops"], "compile_attention", make)
    given = {"kv_len": 9, "batch": 3, "num_heads": 6, "num_kv_heads": 2, "implementation": "xla"}
    names = ["pattern", "seq_len", "head_dim", *given, "dtype", "device", "options"]
    assert sorted(inspect.signature(function).parameters) == sorted(names)
    attention = function("dilated", 5, 8, **given, dtype=torch.float16, device="cpu", rate=3)
    make.assert_called_once_with("dilated", 5, 8, **given, dtype=jnp.float16, rate=3)
    attention.measured_speedup(backward=True, rounds=4)
    compiled.measured_speedup.assert_called_once_with(backward=True, rounds=4)


ZEROS = torch.zeros(2, 8, 4, 16)
ERRORS = [
    (lambda: masks.prefix(LENGTHS.long()), TypeError, r"^n: got dtype torch\.int64, .* with \.to\(torch\.int32\)"),
    (lambda: masks.segments(IDS, kv_ids=IDS.float()), TypeError, "^kv_ids: got dtype float32, want an int32 array"),
    (lambda: masks.top_k(BIAS.double(), 3), TypeError, r"^bias: got dtype torch\.float64"),
    (lambda: masks.top_k(BIAS, 0), ValueError, "^k: got 0, want an int of at least 1"),
    (lambda: masks.top_k(BIAS.to("meta"), 3), ValueError, "^bias: got a tensor on meta, want one on a CPU or a CUDA"),
    (lambda: masks.dense(BIAS.to_sparse()), ValueError, r"^array: got layout torch\.sparse_coo, want a dense tensor"),
    (lambda: masks.dense(BIAS), ValueError, "^array: got float32 values other than 0 and 1"),
    (
        lambda: masks.from_function(same_segment, IDS, BIAS.to("meta"), batch=2),
        ValueError,
        "^arrays: got a tensor on meta",
    ),
    (
        lambda: torch.func.vmap(lambda bias: masks.top_k(bias, 3))(BIAS),
        NotImplementedError,
        r"^bias: got a tensor that torch\.func\.vmap maps",
    ),
    (lambda: bridge.prepare_mask(BIAS > 0, ZEROS, ZEROS), TypeError, "^mask: got Tensor, want a masks.Mask"),
    (
        lambda: bridge.prepare_mask(masks.causal(), ZEROS, ZEROS.to("meta")),
        ValueError,
        "^key: got a tensor on meta, want the device of the others, cpu",
    ),
    (
        lambda: bridge.prepare_mask(masks.causal(), ZEROS, ZEROS, segment_ids=IDS),
        ValueError,
        "^segment_ids: got Tensor, want None: compose masks.segments",
    ),
    (
        lambda: bridge.compile_attention("causal", 24, 16, dtype="float32"),
        TypeError,
        r"^dtype: got 'float32', want torch\.bfloat16",
    ),
    (
        lambda: bridge.compile_attention("causal", 24, 16, device="meta"),
        ValueError,
        "^device: got meta, want a CPU or a CUDA device",
    ),
    (
        lambda: bridge.compile_attention("prefix_lm", 24, 16, n=LENGTHS),
        TypeError,
        r"^n: got a torch\.Tensor, want a constant",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[case[2] for case in ERRORS])
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
