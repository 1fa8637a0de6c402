"""Options that are numbers: Python's, NumPy's, JAX's and 0-d tensors give equal results; others raise."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge.ops.attention import flash_attention_operator

X = torch.randn(1, 9, 2, 16, generator=torch.Generator().manual_seed(0))
ROWS, WEIGHTS = X[0, :, 0], torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
EIGHT = ROWS.to(torch.float8_e4m3fn), WEIGHTS.to(torch.float8_e4m3fn)
FLOATS = (np.float32, np.float16, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float64), jnp.float32)
INTS = (np.int64, np.uint8, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.uint8), jnp.int32)
BOOLS = (np.bool_, np.array, torch.tensor, jnp.bool_)
PATTERN = {"segment_lengths": (4, 8), "dilation_rates": (1, 2)}
attend = lambda **options: bridge.flash_attention(X, X, X, **options)
modified = lambda **options: attend(score_mod=lambda s, b, h, q, k: s * 2, **options)
dynamic = lambda **options: bridge.dynamic_mask_attention(X, X, X, torch.ones(9, 9) > 0, **options)
blocks = lambda **options: bridge.block_sparse_attention(X, X, X, torch.ones(3, 3) > 0, **{"block_size": 4} | options)
decode = lambda **options: bridge.decode_attention(X[:, :1], X, X, **options)
dilated = lambda **options: bridge.dilated_attention(X, X, X, **PATTERN | options)
flash = lambda **options: bridge.flash_attn_func(X, X, X, **options)
alibi = lambda **options: flash(alibi_slopes=torch.tensor([0.5, 0.25]), **options)
heads_first = lambda **options: bridge.scaled_dot_product_attention(*(X.transpose(1, 2),) * 3, **options)
rms = lambda **options: bridge.rms_norm(ROWS, ROWS[0], **options)
eight = lambda **options: bridge.matmul(*EIGHT, transpose_w=True, **{"x_scale": 0.5, "w_scale": 2.0} | options)
chosen = lambda **options: bridge.masks.top_k(ROWS, **options).to_dense(9, 16)
CASES = {
    "attention scale": (attend, "scale", 0.5, FLOATS),
    "attention softcap": (attend, "softcap", 2, (*FLOATS, *INTS)),
    "attention window": (attend, "window", 4, INTS),
    "attention is_causal": (attend, "is_causal", True, BOOLS),
    "attention return_lse": (attend, "return_lse", True, BOOLS),
    "attention deterministic": (attend, "deterministic", True, BOOLS),
    "attention q_offset": (lambda **x: attend(is_causal=True, **x), "q_offset", 3, INTS),
    "score_mod scale": (modified, "scale", 0.5, FLOATS[1:4]),
    "dynamic scale": (dynamic, "scale", 0.5, FLOATS[1:4]),
    "dynamic softmax_scale": (dynamic, "softmax_scale", 0.5, FLOATS[1:4]),
    "block_size": (blocks, "block_size", 4, INTS),
    "decode scale": (decode, "scale", 0.5, FLOATS),
    "decode window": (decode, "window", 4, INTS),
    "decode return_lse": (decode, "return_lse", True, BOOLS),
    "dilated scale": (dilated, "scale", 0.5, FLOATS),
    "dilated is_causal": (dilated, "is_causal", True, BOOLS),
    "flash softmax_scale": (flash, "softmax_scale", 0.5, FLOATS),
    "flash softcap": (flash, "softcap", 2, (*FLOATS, *INTS)),
    "flash causal": (flash, "causal", True, BOOLS),
    "alibi softcap": (alibi, "softcap", 2.0, FLOATS[1:4]),
    "sdpa scale": (heads_first, "scale", 0.5, FLOATS),
    "sdpa is_causal": (heads_first, "is_causal", True, BOOLS),
    "rms eps": (rms, "eps", 0.5, FLOATS),
    "rms scale_offset": (rms, "scale_offset", 1, (*FLOATS, *INTS)),
    "matmul transpose_w": (lambda **x: bridge.matmul(ROWS, WEIGHTS, **x), "transpose_w", True, BOOLS),
    "matmul x_scale": (eight, "x_scale", 0.5, FLOATS),
    "matmul w_scale": (eight, "w_scale", 2, (*FLOATS, *INTS)),
    "quantize group_size": (
        lambda **x: bridge.quantize(WEIGHTS.T.repeat(4, 1), "int8", **x).scale,
        *("group_size", 32, INTS),
    ),
    "quantize_fp8 axis": (lambda **x: bridge.quantize_fp8(ROWS, **x), "axis", 1, INTS),
    "top_k": (chosen, "k", 3, INTS),
}


def same(got, want):
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for x, y in pairs:
        assert x.dtype == y.dtype
        assert torch.equal(
            *(z.detach().float() if isinstance(z, torch.Tensor) else torch.from_dlpack(z) for z in (x, y))
        )


@pytest.mark.parametrize("case", CASES)
def test_scalar_of_any_type(case):
    function, name, number, kinds = CASES[case]
    want = function(**{name: number})
    for kind in kinds:
        for _ in range(2):  # the second call may be cached
            same(function(**{name: kind(number)}), want)


PAIRS = [
    (np.int64(4), 0),
    [4, np.uint8(0)],
    (torch.tensor(4), jnp.int32(0)),
    torch.tensor([4, 0]),
    torch.tensor([4, 0], dtype=torch.int16),
    np.array([4, 0]),
    jnp.array([4, 0]),
]


@pytest.mark.parametrize("pair", PAIRS)
def test_window_of_any_type(pair, reference):
    want, _ = reference(X, X, X, window=(4, 0))
    for _ in range(2):
        for got in (attend(window=pair), flash(window_size=pair), dynamic(window=pair), attend(window_size=pair)):
            torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=0)
    same(decode(window=pair), decode(window=(4, 0)))


def test_pattern_of_tensors():
    want = dilated()
    for kind in (torch.tensor, np.array, lambda x: [np.int64(n) for n in x], lambda x: tuple(map(torch.tensor, x))):
        same(dilated(**{name: kind(x) for name, x in PATTERN.items()}), want)


def test_tensor_is_read_in_each_call(reference):
    """A number that was overwritten makes a different call than the cached call."""
    for function, name in ((attend, "scale"), (decode, "scale"), (dilated, "scale"), (flash, "softmax_scale")):
        number = torch.tensor(0.5)
        for value in (0.5, 0.5, 0.25, 0.25):
            number.fill_(value)
            same(function(**{name: number}), function(**{name: value}))
    want, _ = reference(X, X, X, scale=0.25)
    torch.testing.assert_close(attend(scale=number).double(), want, atol=2e-6, rtol=0)


WRONG = [
    (attend, "scale", True, "bool, want a number"),
    (attend, "scale", np.bool_(True), "bool, want a number"),
    (attend, "scale", torch.tensor(True), "bool, want a number"),
    (attend, "scale", torch.tensor([0.5]), "Tensor, want a number"),
    (attend, "softcap", torch.tensor(0.5, requires_grad=True), "a tensor that requires a gradient, want a number"),
    (attend, "scale", torch.tensor(0.5, device="meta"), "a tensor whose values are not known here, want a number"),
    (attend, "scale", 1j, "complex, want a number"),
    (attend, "softcap", np.float32("nan"), "nan, want a finite number"),
    (attend, "window", np.float64(4), "4.0, want an int"),
    (attend, "window", (True, 0), r"\(True, 0\), want an int"),
    (attend, "window", (4.0, 0), r"\(4.0, 0\), want an int"),
    (attend, "window", torch.tensor([4.0, 0.0]), r"\(4.0, 0.0\), want an int"),
    (attend, "is_causal", np.int64(1), "int, want a bool"),
    (attend, "q_offset", np.float32(1), "float, want an int"),
    (attend, "q_offset", True, "bool, want an int"),
    (decode, "scale", torch.tensor(0.5, requires_grad=True), "a tensor that requires a gradient"),
    (decode, "window", (4.0, 0), r"\(4.0, 0\), want an int"),
    (dilated, "dilation_rates", (True, 2), r"\(True, 2\), want a sequence of ints"),
    (dynamic, "scale", torch.tensor(True), "bool, want a number"),
    (flash, "softcap", torch.tensor(0.5, requires_grad=True), "a tensor that requires a gradient"),
    (flash, "window_size", torch.tensor([1.0, 2.0]), r"\(1.0, 2.0\), want an int"),
    (flash, "causal", 1, "int, want a bool"),
    (rms, "eps", torch.tensor(True), "bool, want a number"),
    (rms, "eps", torch.tensor(1e-6, requires_grad=True), "a tensor that requires a gradient"),
]


@pytest.mark.parametrize(("function", "name", "x", "message"), WRONG)
def test_wrong_scalars(function, name, x, message):
    attend(window=(1, 0)), attend(window=(4, 0)), decode(window=(4, 0)), dilated(dilation_rates=(1, 2))
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: got {message}"):
        function(**{name: x})


def test_scalars_in_a_graph():
    number = torch.tensor(0.5)
    compiled = torch.compile(lambda x: bridge.flash_attention(x, x, x, softcap=number), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="softcap: got a tensor in a graph, whose values are not known, want a number"):
        compiled(X)


def test_numpy_scalars_compile_nothing_new():
    attend(scale=0.375)
    before = flash_attention_operator._inference.cache_info().misses
    attend(scale=np.float32(0.375)), attend(scale=torch.tensor(0.375)), attend(scale=np.float64(0.375))
    assert flash_attention_operator._inference.cache_info().misses == before


MODULES = {
    "MultiheadAttention": ((np.int64(16), torch.tensor(2), np.float32(0)), {"batch_first": np.bool_(True)}),
    "AdaptiveAttention": ((np.int64(16), torch.tensor(2)), {"is_causal": torch.tensor(True)}),
    "DynamicMaskAttention": ((torch.tensor(16), np.uint8(2)), {"keys_to_keep": np.int64(4)}),
    "MultiheadDilatedAttention": (
        (np.int64(16), torch.tensor(2), torch.tensor([4, 8]), np.array([1, 2])),
        {"layer_norm_eps": np.float32(1e-5), "bias": np.bool_(True)},
    ),
    "LayerNorm": ((16,), {"eps": torch.tensor(0.5), "scale_offset": np.float32(1)}),
    "RMSNorm": ((np.int64(16),), {"eps": np.float32(0.5)}),
    "Linear": ((np.int64(16), torch.tensor(8)), {"bias": np.bool_(False)}),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    args, options = MODULES[name]
    plain = lambda x: tuple(x.tolist()) if np.ndim(x) else x.item() if hasattr(x, "item") else x
    make = getattr(bridge.nn, name)
    module = make(*args, **options)
    other = make(*map(plain, args), **{key: plain(x) for key, x in options.items()})
    other.load_state_dict(module.state_dict())
    x = X[:, :, 0]
    given = (x, x, x) if name == "MultiheadAttention" else (x,)
    results = [f(*given) for f in (module, other)]
    same(*(x[0] if isinstance(x, tuple) else x for x in results))


def test_flex_attention_pattern():
    want = bridge.nn.FlexAttention("sliding_window", 4)(X, X, X)
    for window in (np.int64(4), torch.tensor(4), torch.tensor([4, 4])):
        same(bridge.nn.FlexAttention("sliding_window", window)(X, X, X), want)
    compiled = bridge.compile_attention("strided", 9, 16, num_heads=2, dtype=torch.float32, stride=3)
    again = bridge.compile_attention(
        *("strided", np.int64(9), torch.tensor(16)),
        num_heads=np.int8(2),
        dtype=torch.float32,
        stride=torch.tensor(3),
    )
    assert again is compiled
