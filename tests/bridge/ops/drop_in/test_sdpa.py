"""scaled_dot_product_attention against PyTorch's own: shapes, masks, gradients, fallbacks, errors."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from jax_kernels import bridge
from jax_kernels.bridge.interop import warn_once
from jax_kernels.bridge.ops.attention import flash_attention_operator
from jax_kernels.bridge.ops.drop_in import heads_first
from jax_kernels.dispatch import on_device

# Shapes of query, key and value, and the options.
SAME = ((2, 4, 9, 8), (2, 4, 11, 8), (2, 4, 11, 8))
CASES = {
    "causal, odd lengths": ((2, 4, 17, 16), (2, 4, 29, 16), (2, 4, 29, 16), {"is_causal": True}),
    "more queries than keys": ((2, 4, 29, 16), (2, 4, 17, 16), (2, 4, 17, 16), {"is_causal": True}),
    "grouped heads": ((2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16), {"enable_gqa": True, "is_causal": True}),
    "groups of their own": ((2, 4, 9, 8), (2, 2, 11, 8), (2, 1, 11, 8), {"enable_gqa": True}),
    "2 axes": ((9, 8), (11, 8), (11, 6), {}),
    "3 axes": ((3, 9, 8), (3, 11, 8), (3, 11, 6), {"attn_mask": torch.rand(3, 9, 11) > 0.4}),
    "3 axes, grouped heads": ((4, 9, 8), (2, 11, 8), (2, 11, 8), {"enable_gqa": True}),
    "5 axes": ((2, 3, 4, 9, 8), (2, 3, 4, 11, 8), (2, 3, 4, 11, 6), {"is_causal": True}),
    "5 axes, broadcast": ((2, 3, 4, 9, 8), (1, 3, 4, 11, 8), (1, 1, 1, 11, 6), {}),
    "5 axes, broadcast mask": (
        *((2, 3, 4, 9, 8), (2, 3, 4, 11, 8), (2, 3, 4, 11, 8)),
        {"attn_mask": torch.randn(2, 1, 4, 9, 11).requires_grad_()},
    ),
    "one batch entry of keys": ((2, 4, 9, 8), (1, 4, 11, 8), (1, 4, 11, 8), {}),
    "one head of keys": ((2, 4, 9, 8), (2, 1, 11, 8), (2, 1, 11, 8), {}),
    "one head and entry of queries": ((1, 1, 9, 8), (2, 4, 11, 8), (2, 4, 11, 8), {}),
    "axes of several numbers": ((9, 8), (2, 4, 11, 8), (4, 11, 8), {}),
    "mask of two axes": (*SAME, {"attn_mask": torch.rand(9, 11) > 0.4}),
    "expanded mask": (*SAME, {"attn_mask": (torch.rand(2, 1, 1, 11) > 0.4).expand(2, 4, 9, 11), "scale": 0.2}),
    "mask of keys": (*SAME, {"attn_mask": torch.rand(2, 1, 1, 11) > 0.4}),
    "added to keys": (*SAME, {"attn_mask": torch.randn(4, 1, 11).requires_grad_()}),
    "rows without keys": (*SAME, {"attn_mask": torch.arange(9)[:, None].expand(9, 11) > 3}),
    "added to the scores": (*SAME, {"attn_mask": torch.randn(4, 9, 11).requires_grad_()}),
    "added, one column": (*SAME, {"attn_mask": torch.randn(9, 1).requires_grad_()}),
    "added, expanded leaf": (*SAME, {"attn_mask": torch.randn(9, 1).expand(9, 11).detach().requires_grad_()}),
    "added, -inf": (*SAME, {"attn_mask": torch.triu(torch.full((9, 11), -torch.inf), 1)}),
    "added, rows of -inf": (*SAME, {"attn_mask": torch.full((9, 11), -torch.inf).triu(-3)}),
    "added, the least float": (*SAME, {"attn_mask": torch.full((9, 11), torch.finfo(torch.float32).min).triu(-3)}),
    "scale 0": (*SAME, {"scale": 0.0}),
    "a negative int as scale": (*SAME, {"scale": -1}),
    "a scale of 30": (*SAME, {"scale": 30.0}),
    "one query, mask of entries": (
        *((2, 4, 1, 8), (2, 2, 11, 8), (2, 2, 11, 8)),
        {"attn_mask": torch.rand(2, 1, 1, 11) > 0.4, "enable_gqa": True},
    ),
    "one query, added for heads": (
        *((2, 4, 1, 8), (2, 2, 11, 8), (2, 2, 11, 8)),
        {"attn_mask": torch.randn(4, 1, 11).requires_grad_(), "enable_gqa": True},
    ),
    "added, of heads and entries": (*SAME, {"attn_mask": torch.randn(2, 4, 9, 11).requires_grad_()}),
    "no entries": ((0, 4, 9, 8), (0, 4, 11, 8), (0, 4, 11, 8), {}),
    "no heads": ((2, 0, 9, 8), (2, 0, 11, 8), (2, 0, 11, 8), {}),
    "no queries": ((2, 4, 0, 8), (2, 4, 11, 8), (2, 4, 11, 8), {"is_causal": True}),
    "no keys": ((2, 4, 9, 8), (2, 4, 0, 8), (2, 4, 0, 8), {}),
    "head_dim 0": ((2, 4, 9, 0), (2, 4, 11, 0), (2, 4, 11, 8), {"scale": 1.0}),
}
QUICK = {
    *("causal, odd lengths", "grouped heads", "groups of their own", "2 axes", "3 axes", "5 axes, broadcast mask"),
    *("one head and entry of queries", "expanded mask", "rows without keys", "added, expanded leaf", "no keys"),
    *("added, rows of -inf", "a negative int as scale", "one query, added for heads", "head_dim 0"),
}


def test_signature_is_pytorchs():
    want = "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)"
    own = inspect.signature(bridge.scaled_dot_product_attention)
    assert str(own.replace(return_annotation=own.empty, parameters=[
        x.replace(annotation=x.empty) for x in own.parameters.values()
    ])) == want  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in CASES])
def test_values_and_gradients(case):
    """PyTorch's plain mathematics in float64 is the reference."""
    *shapes, options = CASES[case]
    torch.manual_seed(len(case))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    mask = options.get("attn_mask")
    is_added = mask is not None and mask.is_floating_point()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_mask = mask.detach().double().requires_grad_(mask.requires_grad) if is_added else mask
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = bridge.scaled_dot_product_attention(*inputs, **options)
    with sdpa_kernel(SDPBackend.MATH):
        want = functional.scaled_dot_product_attention(*exact, **{**options, "attn_mask": exact_mask})
    assert out.shape == want.shape
    # With scores of -1e38, float32 keeps only their order: rows of only such scores have equal weights.
    far = mask is not None and is_added and bool((mask == torch.finfo(torch.float32).min).all(-1).any())
    torch.testing.assert_close(out.double(), want, atol=3e-5 if options.get("scale") == 30.0 else 3e-6, rtol=0)
    if far:
        return
    cotangent = torch.randn(want.shape, dtype=torch.float64)
    if is_added and mask.requires_grad:
        inputs.append(mask)
        exact.append(exact_mask)
    got = torch.autograd.grad((out.double() * cotangent).sum(), inputs)
    for ours, theirs in zip(got, torch.autograd.grad((want * cotangent).sum(), exact), strict=True):
        scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5 * scale, rtol=0)


def _skewed(*shape):
    """A tensor whose last axis has stride 2, with an offset of one element."""
    *outer, last = shape
    return torch.randn(*outer, 2 * last + 1)[..., 1 : 2 * last + 1 : 2]


# Cases of PyTorch's own tests with tensors in unusual memory layouts: (query, key, value), the mask.
MEMORY = {
    "unaligned": ([torch.randn(2 * 3 * 9 * 8 + 3)[3:].view(2, 3, 9, 8) for _ in range(3)], None),
    "strides of the last axis": ([_skewed(2, 3, 9, 8) for _ in range(3)], _skewed(9, 9)),
    "a head of one with a stride": ([torch.randn(2, 9, 3, 8)[:, :, :1].transpose(1, 2) for _ in range(3)], None),
    "one query and key": ([torch.randn(2, 3, 1, 8) for _ in range(3)], torch.randn(1, 1)),
    "a mask that is transposed": ([torch.randn(2, 3, 9, 8) for _ in range(3)], (torch.rand(9, 9) > 0.4).T),
    "a mask with an expanded last axis": (
        [torch.randn(2, 3, 9, 8) for _ in range(3)], (torch.rand(2, 3, 9, 1) > 0.4).expand(2, 3, 9, 9),
    ),
    "packed projections": (list(torch.randn(2, 9, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind()), None),
}  # fmt: skip


@pytest.mark.parametrize("case", MEMORY)
def test_memory_layouts_of_pytorchs_tests(case):
    inputs, mask = MEMORY[case]
    inputs = [x.detach().requires_grad_() for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        want = functional.scaled_dot_product_attention(*(x.double() for x in inputs), mask)
    got = bridge.scaled_dot_product_attention(*inputs, mask)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=0)
    gradients = (torch.autograd.grad(x.sin().sum(), inputs) for x in (got, want))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("queries", "keys"), [(9, 11), (11, 9)])
def test_pytorchs_causal_bias(queries, keys, monkeypatch):
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    query, key, value = torch.randn(2, 4, queries, 8), *torch.randn(2, 2, 4, keys, 8)
    got = bridge.scaled_dot_product_attention(query, key, value, causal_upper_left(queries, keys))
    torch.testing.assert_close(got, functional.scaled_dot_product_attention(query, key, value, is_causal=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lower = causal_lower_right(queries, keys)
    got = bridge.scaled_dot_product_attention(query, key, value, lower)
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    torch.testing.assert_close(got, functional.scaled_dot_product_attention(query, key, value, mask))
    double = [x.double() for x in (query, key, value)]
    with pytest.warns(UserWarning, match="query is float64"):
        got = bridge.scaled_dot_product_attention(*double, lower)
    torch.testing.assert_close(got, functional.scaled_dot_product_attention(*double, mask))
    with pytest.raises(ValueError, match=r"^attn_mask: got a CausalBias of 3 queries"):
        bridge.scaled_dot_product_attention(query, key, value, causal_upper_left(3, 3))


LAYOUTS = {
    "transposed": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), 4, 9),
    "contiguous": (lambda x: x, 4, 9),
    "one query, grouped heads": (lambda x: x, 2, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_layouts_are_read_in_place(layout, monkeypatch):
    arrange, kv_heads, length = LAYOUTS[layout]
    query, key, value = torch.randn(2, 4, length, 8), *torch.randn(2, 2, kv_heads, 11, 8)
    seen = []
    attend = heads_first.flash_attention
    monkeypatch.setattr(heads_first, "flash_attention", lambda *x, **given: seen.extend(x) or attend(*x, **given))
    given = [arrange(x) for x in (query, key, value)]
    got = bridge.scaled_dot_product_attention(*given, enable_gqa=True)
    want = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(got, want, atol=3e-6, rtol=0)
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in given]
    assert all(x.is_contiguous() for x in seen)


@pytest.mark.parametrize("scale", [True, False, torch.tensor(0.3)])
def test_scale_types_that_pytorch_accepts(scale):
    inputs = torch.randn(3, 2, 4, 9, 8)
    got = bridge.scaled_dot_product_attention(*inputs, scale=scale)
    want = functional.scaled_dot_product_attention(*inputs, scale=float(scale))
    torch.testing.assert_close(got, want, atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_on_another_device_raises(dtype):
    with pytest.raises(ValueError, match=r"^attn_mask: got a tensor on meta, want query's device cpu$"):
        bridge.scaled_dot_product_attention(*torch.randn(3, 2, 4, 9, 8), torch.ones(9, 9, dtype=dtype, device="meta"))


def test_differentiated_scale_raises():
    inputs = torch.randn(3, 2, 4, 9, 8)
    scale = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(TypeError, match=r"^scale: got a tensor that requires a gradient, want a number"):
        bridge.scaled_dot_product_attention(*inputs, scale=scale)
    with pytest.raises(TypeError, match="scale"):  # as PyTorch's own does
        functional.scaled_dot_product_attention(*inputs, scale=scale)


FALLBACKS = {
    "dropout": ({"dropout_p": 0.5}, torch.float32, 8, "dropout_p=0.5 drops attention weights"),
    "wide heads": ({"is_causal": True}, torch.float32, 264, "head_dim is 264, and flash_attention's limit is 256"),
    "float64": ({}, torch.float64, 8, "query is float64, and flash_attention computes in float32"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_fallback_matches_pytorch_and_warns_once(case, monkeypatch):
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    options, dtype, head_dim, message = FALLBACKS[case]
    inputs = torch.randn(3, 1, 2, 5, head_dim, dtype=dtype).requires_grad_()
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=message):
        got = bridge.scaled_dot_product_attention(*inputs, **options)
    torch.manual_seed(1)
    want = functional.scaled_dot_product_attention(*inputs, **options)
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    assert torch.autograd.grad(got.sum(), inputs)[0].isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridge.scaled_dot_product_attention(*inputs, **options)


@pytest.mark.filterwarnings("ignore:scaled_dot_product_attention")
@pytest.mark.parametrize("is_added", [False, True], ids=["bool", "added"])
@pytest.mark.parametrize("case", FALLBACKS)
def test_fully_masked_rows_in_the_fallback(case, is_added):
    options, dtype, head_dim, _ = FALLBACKS[case]
    inputs = torch.randn(3, 1, 2, 5, head_dim, dtype=dtype).requires_grad_()
    mask = torch.rand(2, 5, 5) > 0.5
    mask[0, 2] = mask[1] = False
    given = torch.zeros(2, 5, 5, dtype=dtype).masked_fill(~mask, -torch.inf) if is_added else mask
    out = bridge.scaled_dot_product_attention(*inputs, given, **{**options, "is_causal": False})
    assert (out[0, 0, 2] == 0).all()
    assert (out[0, 1] == 0).all()
    (gradients,) = torch.autograd.grad(out.square().sum(), inputs)
    assert gradients.isfinite().all()
    assert (gradients[:, 0, 1] == 0).all()


def test_assigned_to_torch_functional(monkeypatch):
    """torch.nn's modules call it, and its own fall back does not call itself."""
    monkeypatch.setattr(warn_once, "_GIVEN", set())
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 7, 32)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    want = layer(x, src_key_padding_mask=padding)
    calls = []
    monkeypatch.setattr(functional, "scaled_dot_product_attention", bridge.scaled_dot_product_attention)
    attend = heads_first.attend
    monkeypatch.setattr(heads_first, "attend", lambda *x, **given: calls.append(given) or attend(*x, **given))
    got = layer(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    assert len(calls) == 1
    with pytest.warns(UserWarning, match="drops attention weights"):
        functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 8), dropout_p=0.1)


@pytest.mark.parametrize("shape", [(2, 1, 1, 500), (500, 500)])
def test_saved_mask_has_one_shape_per_device(shape):
    """Kernels of a GPU take a mask of keys as a bias. The results of the operator do not show it to its backward."""
    options = flash_attention_operator.Options(
        is_causal=False, window_left=-1, window_right=-1, q_offset=0, scale=None, softcap=None, return_lse=False,
        deterministic=None, precision=None, implementation=None,
    )  # fmt: skip
    query = jax.ShapeDtypeStruct((2, 500, 4, 64), jnp.bfloat16)
    others = dict.fromkeys(("bias", "sinks", "q_segment_ids", "kv_segment_ids", "kv_lengths", "q_offset"))
    mask = jax.ShapeDtypeStruct(shape, jnp.bool_)
    tensors = flash_attention_operator.Tensors(query=query, key=query, value=query, mask=mask, **others)
    device = torch.device("cuda", 0)
    with on_device("H200"):
        out, rows = jax.eval_shape(flash_attention_operator._forward.__wrapped__(device, options), *tensors)
    assert out.shape == query.shape
    assert rows.shape == (2, 4, 500)


def test_meta_tensors():
    query = torch.empty(2, 4, 9, 8, device="meta")
    assert bridge.scaled_dot_product_attention(query, query, query).shape == query.shape


@pytest.mark.timeout(300)
def test_compiles_in_one_graph():
    torch._dynamo.reset()
    call = lambda *args: bridge.scaled_dot_product_attention(*args, is_causal=True)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    inputs = [torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3)]
    torch.testing.assert_close(compiled(*inputs), call(*inputs), atol=1e-6, rtol=0)
    masked = lambda q, k, v, mask: bridge.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((3, 2, 4, 9, 8), (3, 2, 2, 9, 8), (3, 2, 2, 9, 8))]
    mask = torch.randn(3, 1, 1, 9, 9, requires_grad=True)
    got, want = (
        torch.autograd.grad(f(*inputs, mask).square().sum(), (*inputs, mask))
        for f in (torch.compile(masked, backend="aot_eager", fullgraph=True), masked)
    )
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    dropped = torch.compile(
        lambda x: bridge.scaled_dot_product_attention(x, x, x, dropout_p=1e-9), backend="aot_eager", fullgraph=True
    )
    assert dropped(torch.randn(1, 2, 5, 8)).isfinite().all()


def test_vmap_and_autocast():
    query, key, value = torch.randn(3, 2, 3, 4, 9, 8)
    mask = torch.rand(3, 9, 9) > 0.4
    mask[..., 0] = True
    call = lambda f: torch.func.vmap(f, in_dims=(1, 1, 1, 0), out_dims=1)(query, key, value, mask)
    got, want = call(bridge.scaled_dot_product_attention), call(functional.scaled_dot_product_attention)
    torch.testing.assert_close(got, want, atol=3e-6, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        got = bridge.scaled_dot_product_attention(
            query, key.bfloat16(), value, torch.zeros(9, dtype=torch.bfloat16)[None]
        )
    assert got.dtype == torch.bfloat16


ONE = torch.zeros(1, 4, 8, 16)
ERRORS = [
    ({"attn_mask": torch.zeros(8, 8).half()}, TypeError, r"^attn_mask: got dtype torch\.float16, want torch\.bool"),
    (
        {"attn_mask": torch.zeros(8, 8).int()},
        TypeError,
        r"^attn_mask: got dtype torch\.int32, want torch\.bool .*, or query's dtype torch\.float32 \(added",
    ),
    ({"attn_mask": torch.zeros(8, 8), "is_causal": True}, ValueError, "^attn_mask, is_causal: got both"),
    ({"attn_mask": torch.ones(8).bool()}, ValueError, r"^attn_mask: got shape \(8,\), want 2 axes or more"),
    ({"attn_mask": torch.ones(1, 1, 4, 8, 8).bool()}, ValueError, r"^attn_mask: got shape .* want at most 4 axes"),
    *(
        ({"attn_mask": torch.ones(shape).bool()}, ValueError, rf"^attn_mask: got shape \({text}\), .* \(1, 4, 8, 8\)")
        for shape, text in (((3, 4, 8, 8), "3, 4, 8, 8"), ((8, 7), "8, 7"), ((3, 1, 8), "3, 1, 8"))
    ),
    ({"attn_mask": [[True]]}, TypeError, r"^attn_mask: got builtins\.list, want a torch\.Tensor"),
    ({"key": ONE[:, :2], "value": ONE[:, :2]}, ValueError, "^query, key, value: got 4, 2, 2 heads, want one number"),
    (
        {"key": ONE[:, :3], "value": ONE[:, :3], "enable_gqa": True},
        *(ValueError, r"^key, value: got \[3, 3\] heads, want divisors of query's 4"),
    ),
    ({"query": ONE[0, 0], "key": ONE[0, 0], "value": ONE[0, 0], "enable_gqa": True}, ValueError, "^query: .*3 axes"),
    ({"query": ONE.expand(2, 4, 8, 16), "key": ONE.expand(3, 4, 8, 16)}, ValueError, r".*want axes that broadcast"),
    ({"key": ONE[:, :, :4]}, ValueError, "^value: got "),
    ({"query": ONE[0, 0, 0]}, ValueError, r"^query: got shape \(16,\), want 2 axes or more"),
    ({"query": 3}, TypeError, r"^query: got builtins\.int, want a torch\.Tensor"),
    ({"key": ONE.half()}, TypeError, r"^key: got dtype torch\.float16, want query's dtype torch\.float32"),
    ({"scale": float("nan")}, ValueError, "^scale: got nan, want a finite number"),
    (
        {"query": torch.nested.as_nested_tensor([ONE[0]], layout=torch.jagged)},
        ValueError,
        "^query: got a nested tensor",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), ERRORS, ids=[case[2] for case in ERRORS])
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        bridge.scaled_dot_product_attention(**{"query": ONE, "key": ONE, "value": ONE, **options})


def test_pytorchs_fast_path_skips_attention():
    """docs/start/pytorch.md says so, and says how to turn the fast path off."""
    layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True).eval()
    layer.self_attn = bridge.nn.MultiheadAttention(16, 2, batch_first=True)
    calls, forward = [], layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **options: calls.append(1) or forward(*args, **options)
    layer.eval()
    was = torch.backends.mha.get_fastpath_enabled()
    try:
        for is_enabled, wanted in ((True, 0), (False, 1)):
            torch.backends.mha.set_fastpath_enabled(is_enabled)
            with torch.no_grad():
                layer(torch.zeros(1, 4, 16))
            assert len(calls) == wanted
    finally:
        torch.backends.mha.set_fastpath_enabled(was)
