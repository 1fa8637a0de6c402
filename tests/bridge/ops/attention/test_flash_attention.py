"""flash_attention on CPU tensors: values, gradients, errors."""

import inspect
import itertools

import jax
import pytest
import torch
from torch.nn import functional

import jax_kernels
from jax_kernels import bridge
from jax_kernels.bridge.operators import call_cache

IDS = torch.tensor([[0] * 7 + [2] * 14 + [-1] * 3, [1, 0] * 12], dtype=torch.int32)
CASES = {
    "plain": ({}, {}),
    "causal, odd lengths": ({"length": 17, "kv_length": 29}, {"is_causal": True, "q_offset": 12}),
    "grouped heads": ({"kv_heads": 2}, {"is_causal": True}),
    "one kv head, head_dim 5": ({"kv_heads": 1, "head_dim": 5}, {}),
    "scale": ({}, {"scale": -0.3}),
    "mask": ({"length": 9}, {"mask": torch.arange(9)[:, None] % 3 != torch.arange(9) % 3}),
    "rows without keys": ({"length": 8}, {"mask": torch.arange(8)[:, None].expand(8, 8) > 2}),
    "kv_lengths": ({}, {"kv_lengths": torch.tensor([5, 24], dtype=torch.int32)}),
    "q_offset per entry": ({}, {"is_causal": True, "q_offset": torch.tensor([-3, 7], dtype=torch.int32)}),
    "window": ({"length": 17, "kv_length": 29}, {"window": (5, 3), "q_offset": 4}),
    "window on one side": ({}, {"window": (5, None)}),
    "causal window": ({}, {"window": 6, "is_causal": True}),
    "segments": ({}, {"segment_ids": IDS}),
    "segments of queries and keys": ({"length": 9}, {"segment_ids": (IDS[:, :9], IDS[:, 12:21])}),
    "softcap": ({}, {"softcap": 1.5, "scale": -0.5}),
}


def gradients(results, inputs, cotangents):
    """Gradients in the order of inputs, of results weighted by cotangents."""
    total = sum((r.double() * c).sum() for r, c in zip(results, cotangents, strict=True))
    return torch.autograd.grad(total, inputs)


def test_arguments_match_the_jax_function():
    ours, theirs = (inspect.signature(f).parameters for f in (bridge.flash_attention, jax_kernels.flash_attention))
    ours = {name: x for name, x in ours.items() if name != "other_names"}
    assert list(ours) == list(theirs)
    assert [x.default for x in ours.values()] == [x.default for x in theirs.values()]


@pytest.mark.parametrize("case", CASES)
def test_values(case, make_qkv, reference):
    shape, options = CASES[case]
    inputs = make_qkv(**shape)
    out, lse = bridge.flash_attention(*inputs, return_lse=True, implementation="xla", **options)
    want_out, want_lse = reference(*inputs, **options)
    assert out.dtype == lse.dtype == torch.float32
    assert out.shape == want_out.shape
    torch.testing.assert_close(out.double(), want_out, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=3e-6, rtol=0)
    without_lse = bridge.flash_attention(*(x.detach() for x in inputs), **options)
    torch.testing.assert_close(without_lse, out.detach(), atol=1e-6, rtol=0)

    alive = lse.detach() > -torch.inf
    cotangents = torch.randn(out.shape, dtype=torch.float64), torch.randn(lse.shape, dtype=torch.float64) * alive
    finite = lambda x: torch.where(alive, x, torch.zeros_like(x))
    got = gradients((out, finite(lse)), inputs, cotangents)
    want = gradients((want_out, finite(want_lse)), inputs, cotangents)
    for name, ours, theirs in zip("qkv", got, want, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(
            ours.double(), theirs.double(), atol=2e-5, rtol=0, msg=lambda m, n=name: f"d{n}: {m}"
        )


BIASES = {
    "full": (2, 4, 9, 11),
    "one entry": (1, 4, 9, 11),
    "heads": (4, 1, 1),
    "keys": (2, 1, 1, 11),
    "two axes": (9, 11),
    "masked": (1, 4, 9, 11),
}


@pytest.mark.parametrize("case", BIASES)
def test_bias_and_sinks(case, make_qkv, reference):
    """Values, and all five gradients; any gradient may be left out. One case leaves out each of three."""
    inputs = make_qkv(length=9, kv_length=11, kv_heads=2)
    bias, sinks = torch.randn(BIASES[case]), torch.randn(4)
    if case == "masked":
        bias[torch.rand(bias.shape) < 0.3] = -torch.inf
        bias[..., 2, :] = -torch.inf
    inputs += [bias.requires_grad_(), sinks.requires_grad_()]

    def results(function, inputs):
        out, lse = function(*inputs[:3], bias=inputs[3], sinks=inputs[4], is_causal=True, q_offset=3)
        return out.double(), lse.double()

    ours = lambda *args, **options: bridge.flash_attention(*args, return_lse=True, **options)
    got, want = results(ours, inputs), results(reference, inputs)
    torch.testing.assert_close(got, want, atol=3e-6, rtol=0)
    cotangents = tuple(torch.randn_like(x) for x in want)
    wanted = torch.autograd.grad(want, inputs, cotangents)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, cotangents), wanted, atol=2e-5, rtol=0)
    for index in (0, 3, 4) if case == "full" else (3,):
        alone = [x.detach().requires_grad_(i == index) for i, x in enumerate(inputs)]
        (gradient,) = torch.autograd.grad(results(ours, alone), [alone[index]], cotangents)
        torch.testing.assert_close(gradient, wanted[index], atol=2e-5, rtol=0)


def test_bias_and_sinks_dtypes(make_qkv):
    query, key, value = make_qkv(dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        bias, sinks = (torch.zeros(n, dtype=dtype, requires_grad=True) for n in (24, 4))
        out = bridge.flash_attention(query, key, value, bias=bias, sinks=sinks)
        assert {x.dtype for x in torch.autograd.grad(out.sum(), (bias, sinks))} == {dtype}
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.zeros(24, dtype=torch.float16, requires_grad=True)
        (gradient,) = torch.autograd.grad(bridge.flash_attention(*make_qkv(), bias=half).sum(), half)
    assert gradient.dtype == torch.float16


def test_cached_calls_compute_only_requested_gradients(make_qkv, monkeypatch):
    """The second round runs cached calls."""
    programs, made = {}, bridge.ops.attention.flash_attention_operator._backward

    def backward(device, options, wanted):
        programs[wanted] = made(device, options, wanted)
        return programs[wanted]

    monkeypatch.setattr(bridge.ops.attention.flash_attention_operator, "_backward", backward)
    inputs, bias, sinks = make_qkv(), torch.randn(24).requires_grad_(), torch.randn(4).requires_grad_()
    for asked in [(0,), (1,), (0, 2), (3,), (2, 4), (0, 1, 2, 3, 4)] * 2:
        everything = [*inputs, bias, sinks]
        given = [x if index in asked else x.detach() for index, x in enumerate(everything)]
        out = bridge.flash_attention(*given[:3], bias=given[3], sinks=given[4])
        got = torch.autograd.grad(out.square().sum(), [given[index] for index in asked])
        out = bridge.flash_attention(*inputs, bias=bias, sinks=sinks)
        want = torch.autograd.grad(out.square().sum(), everything)
        for index, gradient in zip(asked, got, strict=True):
            torch.testing.assert_close(gradient, want[index])
    assert set(programs) == {0b1, 0b10, 0b101, 0b1000, 0b10100, 0b11111}
    arrays = [jax.ShapeDtypeStruct(x.shape, "float32") for x in (*inputs, bias, sinks)]
    rows = jax.ShapeDtypeStruct((2, 2, 4, 24), "float32")
    arrays += [*[None] * 5, arrays[0], rows, arrays[0], None]
    work = {wanted: programs[wanted].lower(*arrays).compile().cost_analysis()["flops"] for wanted in (0b1, 0b11111)}
    assert work[0b1] < 0.8 * work[0b11111]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_errors_are_at_most_pytorchs(dtype, make_qkv, reference):
    inputs = make_qkv(length=64, dtype=dtype)
    cotangent = torch.randn(inputs[0].shape, dtype=torch.float64)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_out, _ = reference(*exact, is_causal=True)
    want = (exact_out, *gradients((exact_out,), exact, (cotangent,)))

    ours = bridge.flash_attention(*inputs, is_causal=True)
    theirs = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), is_causal=True)
    theirs = theirs.transpose(1, 2)
    assert ours.dtype == dtype
    for name, a, b, c in zip(
        ("out", "dq", "dk", "dv"),
        (ours, *gradients((ours,), inputs, (cotangent,))),
        (theirs, *gradients((theirs,), inputs, (cotangent,))),
        want,
        strict=True,
    ):
        error, bound = ((x.double() - c).norm() for x in (a, b))
        assert error <= 1.1 * bound, name


@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=3))[:-1])
def test_only_requested_gradients(needed, make_qkv, reference):
    inputs = [x.detach().requires_grad_(n) for x, n in zip(make_qkv(), needed, strict=True)]
    bridge.flash_attention(*inputs).square().sum().backward()
    got = [x.grad for x in inputs]
    assert [x is not None for x in got] == list(needed)
    asked = [x for x in inputs if x.requires_grad]
    want = torch.autograd.grad(reference(*inputs)[0].square().sum(), asked)
    for ours, theirs in zip((x for x in got if x is not None), want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_gradient_through_lse_alone(make_qkv, reference):
    inputs = make_qkv()
    _, lse = bridge.flash_attention(*inputs, return_lse=True)
    got = torch.autograd.grad(lse.square().sum(), inputs)
    want = torch.autograd.grad(reference(*inputs)[1].square().sum(), inputs[:2])
    for ours, theirs in zip(got[:2], want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert torch.count_nonzero(got[2]) == 0


def test_no_gradient_without_requires_grad(make_qkv):
    inputs = make_qkv()
    with torch.no_grad():
        assert not bridge.flash_attention(*inputs).requires_grad
    assert not bridge.flash_attention(*(x.detach() for x in inputs)).requires_grad
    assert bridge.flash_attention(*inputs).requires_grad


def test_strided_inputs_and_cotangents(make_qkv, reference):
    joint = torch.randn(2, 24, 3, 4, 16, requires_grad=True)
    out = bridge.flash_attention(*joint.unbind(2), is_causal=True)
    want, _ = reference(*joint.unbind(2), is_causal=True)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=0)
    # The cotangent of a sum has stride 0.
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), joint)[0], torch.autograd.grad(want.sum(), joint)[0], atol=1e-5, rtol=0
    )


def test_inputs_may_change_after_the_call(make_qkv):
    inputs = [x.detach() for x in make_qkv()]
    want = bridge.flash_attention(*(x.clone() for x in inputs))
    out = bridge.flash_attention(*inputs)
    for x in inputs:
        x.zero_()
    torch.testing.assert_close(out, want, atol=0, rtol=0)


def test_autocast(make_qkv):
    inputs = make_qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out = bridge.flash_attention(*inputs)
    assert out.dtype == torch.bfloat16
    want = bridge.flash_attention(*(x.detach().bfloat16() for x in inputs))
    torch.testing.assert_close(out.detach(), want, atol=0, rtol=0)
    assert {x.dtype for x in torch.autograd.grad(out.sum(), inputs)} == {torch.float32}


def test_deterministic_follows_torch(monkeypatch, make_qkv):
    call_cache.clear()  # a known call takes no operator
    seen = []
    inference = bridge.ops.attention.flash_attention.inference_op
    deterministic = lambda args: bridge.ops.attention.flash_attention_operator.split(args).options.deterministic
    monkeypatch.setattr(
        bridge.ops.attention.flash_attention,
        "inference_op",
        lambda *args: seen.append(deterministic(args)) or inference(*args),
    )
    inputs = [x.detach() for x in make_qkv()]
    bridge.flash_attention(*inputs)
    torch.use_deterministic_algorithms(True)
    try:
        bridge.flash_attention(*inputs)
        bridge.flash_attention(*inputs, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [None, True, False]


ZEROS = torch.zeros(2, 8, 4, 16)
INT32, INT64 = torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int64)
ERRORS = [
    ((ZEROS.numpy(), ZEROS, ZEROS), {}, TypeError, r"^query: got numpy\.ndarray, want a torch\.Tensor"),
    ((ZEROS, ZEROS, None), {}, TypeError, r"^value: got builtins\.NoneType, want a torch\.Tensor"),
    ((ZEROS.double(),) * 3, {}, TypeError, r"^query: got dtype torch\.float64, want .*query\.to\(torch\.float32\)"),
    ((ZEROS, ZEROS.long(), ZEROS), {}, TypeError, r"^key: got dtype torch\.int64, want .*key\.to\(torch\.float32\)"),
    ((ZEROS, ZEROS.half(), ZEROS), {}, TypeError, "^key: got dtype float16, want query's dtype float32"),
    ((ZEROS, ZEROS.to("meta"), ZEROS), {}, ValueError, "^key: got a tensor on meta, want query's device cpu"),
    ((ZEROS.to_sparse(), ZEROS, ZEROS), {}, ValueError, r"^query: got layout torch\.sparse_coo, want a dense"),
    ((ZEROS[0], ZEROS, ZEROS), {}, ValueError, r"^query: got shape \(8, 4, 16\), want 4 axes"),
    ((ZEROS, ZEROS[:, :, :3], ZEROS[:, :, :3]), {}, ValueError, "^key: got 3 heads, want a divisor of query's 4"),
    ((ZEROS, ZEROS[..., :8], ZEROS), {}, ValueError, "^key: got head_dim 8, want query's head_dim 16"),
    ((ZEROS,) * 3, {"mask": torch.zeros(8, 8).int()}, TypeError, r"^mask: got dtype torch\.int32, want torch\.bool"),
    ((ZEROS,) * 3, {"mask": torch.full((8, 8), 0.5)}, ValueError, r"^mask: got torch\.float32 values other than 0"),
    ((ZEROS,) * 3, {"mask": torch.ones(8, 7).bool()}, ValueError, r"^mask: got shape \(8, 7\), want a shape broadcast"),
    ((ZEROS,) * 3, {"kv_lengths": INT64}, TypeError, r"^kv_lengths: got dtype torch\.int64, want torch\.int32; cast"),
    ((ZEROS,) * 3, {"kv_lengths": [3, 4]}, TypeError, r"^kv_lengths: got builtins\.list, want a torch\.Tensor"),
    ((ZEROS,) * 3, {"kv_lengths": INT32[:1]}, ValueError, r"^kv_lengths: got shape \(1,\), want \[batch\]"),
    ((ZEROS,) * 3, {"q_offset": INT64}, TypeError, r"^q_offset: got dtype torch\.int64, want torch\.int32; cast"),
    ((ZEROS,) * 3, {"q_offset": 1.5}, TypeError, "^q_offset: got float, want an int or an int32 tensor"),
    ((ZEROS,) * 3, {"q_offset": 2**30}, ValueError, r"^q_offset: got 1073741824, want a position within 2\*\*30 of 0"),
    ((ZEROS,) * 3, {"q_offset": -(2**64)}, ValueError, r"^q_offset: got -18446744073709551616, want a position within"),
    ((ZEROS,) * 3, {"window": 2**63}, ValueError, r"^window: got 9223372036854775808, want an int from 0 to 2\*\*29"),
    (
        (ZEROS,) * 3,
        {"scale": 10**400},
        ValueError,
        "^scale: got an int of 1329 bits, want a number in the range of a float",
    ),
    ((ZEROS,) * 3, {"bias": 3.0}, TypeError, r"^bias: got builtins\.float, want a torch\.Tensor"),
    ((ZEROS,) * 3, {"bias": torch.zeros(8).bool()}, TypeError, r"^bias: got dtype torch\.bool, .* is a mask"),
    ((ZEROS,) * 3, {"bias": torch.zeros(8).double()}, TypeError, r"^bias: got dtype torch\.float64, want torch\.bflo"),
    ((ZEROS,) * 3, {"bias": torch.zeros(8).half()}, TypeError, "^bias: got dtype float16, want query's dtype float32"),
    ((ZEROS,) * 3, {"bias": torch.zeros(7)}, ValueError, r"^bias: got shape \(7,\), want a shape broadcastable"),
    ((ZEROS,) * 3, {"sinks": torch.zeros(4).int()}, TypeError, r"^sinks: got dtype torch\.int32, want torch\.bfloat16"),
    ((ZEROS,) * 3, {"sinks": torch.zeros(3)}, ValueError, r"^sinks: got shape \(3,\), want \[heads\] = \(4,\)"),
    ((ZEROS,) * 3, {"window": 2.5}, TypeError, r"^window: got 2\.5, want an int, or \(left, right\) of them"),
    ((ZEROS,) * 3, {"window": (1, 2, 3)}, TypeError, r"^window: got \(1, 2, 3\), want an int, or \(left, right\)"),
    ((ZEROS,) * 3, {"window": -4}, ValueError, r"^window: got \(-4, -4\), want an int from 0 to 2\*\*29"),
    ((ZEROS,) * 3, {"softcap": -1}, ValueError, r"^softcap: got -1\.0, want a number above 0"),
    ((ZEROS,) * 3, {"softcap": "3"}, TypeError, "^softcap: got str, want a number"),
    ((ZEROS,) * 3, {"segment_ids": INT64}, TypeError, r"^segment_ids: got dtype torch\.int64, want torch\.int32; cast"),
    ((ZEROS,) * 3, {"segment_ids": INT32}, ValueError, r"^segment_ids: got shape \(2,\) for query, want \[2, 8\]"),
    ((ZEROS,) * 3, {"segment_ids": (INT32, None)}, ValueError, "^segment_ids: got None for key, want an int32 tensor"),
    ((ZEROS,) * 3, {"segment_ids": 3}, TypeError, r"^segment_ids: got builtins\.int, want a torch\.Tensor"),
    ((ZEROS,) * 3, {"is_causal": 1}, TypeError, "^is_causal: got int, want a bool"),
    ((ZEROS,) * 3, {"deterministic": 1}, TypeError, "^deterministic: got int, want True, False or None"),
    ((ZEROS,) * 3, {"scale": torch.ones(2)}, TypeError, "^scale: got Tensor, want a number"),
    ((ZEROS,) * 3, {"scale": float("nan")}, ValueError, "^scale: got nan, want a finite number"),
    ((ZEROS,) * 3, {"precision": "fp8"}, ValueError, "^precision: got 'fp8', want"),
    ((ZEROS,) * 3, {"implementation": 3}, TypeError, "^implementation: got int, want a name or None"),
    ((ZEROS,) * 3, {"implementation": "fast"}, ValueError, "^implementation: got 'fast'"),
    ((ZEROS,) * 3, {"implementation": "mosaic_gpu"}, NotImplementedError, "'mosaic_gpu' cannot serve this"),
]


INTEGERS = ("uint8", "int8", "int16", "uint16", "uint32", "int64", "uint64", "bool", "float32")


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", ["segment_ids", "kv_lengths", "q_offset"])
def test_integers_are_int32(name, dtype):
    """Other integers are wider than JAX's, or wrap when they meet int32."""
    dtype = getattr(torch, dtype)
    x = torch.ones((2, 8) if name == "segment_ids" else 2).to(dtype)
    functions = [
        bridge.flash_attention,
        lambda *args, **options: bridge.flash_attention(*args, score_mod=lambda s, b, h, q, k: s, **options),
        lambda *args, **options: bridge.block_sparse_attention(*args, torch.ones(1, 1) > 0, **options),
        lambda *args, **options: bridge.dynamic_mask_attention(*args, torch.ones(8, 8) > 0, **options),
    ]
    if name == "segment_ids":
        pattern = {"segment_lengths": (8,), "dilation_rates": (1,)}
        functions.append(lambda *args, **options: bridge.dilated_attention(*args, **pattern, **options))
    for function in functions:
        with pytest.raises(TypeError, match=rf"^{name}: got dtype {dtype}, want torch\.int32; cast it"):
            function(ZEROS, ZEROS, ZEROS, **{name: x})
    builder = {"segment_ids": bridge.masks.segments, "kv_lengths": bridge.masks.prefix}.get(name)
    if builder is not None and dtype not in (torch.uint8, torch.int8, torch.int16, torch.uint16):
        with pytest.raises(TypeError, match=r"^(q_ids|n): got dtype"):
            builder(x)


@pytest.mark.parametrize(("args", "options", "error", "message"), ERRORS, ids=[case[3] for case in ERRORS])
def test_errors(args, options, error, message):
    with pytest.raises(error, match=message):
        bridge.flash_attention(*args, **options)
