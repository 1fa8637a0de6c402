"""Cached calls, with chains that compute on the CPU: which calls are cached, which are not, and that all are right."""

import gc
import threading

import jax.numpy as jnp
import pytest
import torch
import torch.utils.checkpoint

from jax_kernels import bridge
from jax_kernels.bridge.direct import route
from jax_kernels.bridge.interop import keyed_cache, torch_internals
from jax_kernels.bridge.operators import call_cache, execute
from jax_kernels.bridge.ops.attention import masked_attention
from tests.support.cases import tiers
from tests.support.cases.cached_calls import BLOCKS, CALLS, IDS, qkv, random, total

# One case for each way in which a call's arrays reach its chain.
QUICK = [
    "plain", "offset", "mask", "bias", "dilated", "Mask", "CompiledAttention", "score_mod", "linear", "residual", "mlp",
    "layer_norm", "residual norm", "from_jax by name", "from_jax of a tree", "dynamic", "several results",
]  # fmt: skip


@pytest.mark.parametrize("name", tiers.cases(CALLS, QUICK))
def test_cached_calls_match_first_calls(name, direct):
    """The tensors of the third call have other values than in the first two calls."""
    call, given = CALLS[name]
    fresh = [x.detach().mul(0.5).requires_grad_() for x in given]
    with route.disabled():
        want = call(*fresh)
        want_gradients = torch.autograd.grad(total(want), fresh)
    for _ in range(2):
        torch.autograd.grad(total(call(*given)), given)
    before = direct.calls
    got = call(*fresh)
    assert direct.calls == before + 1
    gradients = torch.autograd.grad(total(got), fresh)
    assert direct.calls == before + 2
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients, want_gradients)
    with torch.no_grad():
        call(*given)
        before = direct.calls
        torch.testing.assert_close(call(*fresh), want)
        assert direct.calls == before + 1


def test_constants_and_names_are_part_of_the_key(direct):
    """Also constants that compare equal in Python, and a setting of PyTorch's."""
    x, y = random(3).detach(), random(3, seed=1).detach()
    one = {"scale": 0.0, "kind": 1}

    def function(x, y, *, scale, kind, more=(1, 2), change=None):
        x = (x - y) * (scale + 1) * len(more) + jnp.copysign(1.0, scale) * (3 if kind is True else 1)
        return x if change is None else change(x)

    wrapped = bridge.from_jax(function)
    cases = [
        ((x, y), one),
        ((x, y), one | {"scale": -0.0}),
        ((x, y), one | {"kind": True}),
        ((x,), {"y": y, **one}),
        ((), {"y": y, "x": x, **one}),
        ((), {"x": x, "y": y, **one}),
        ((x, y), one | {"more": (1, 2, 3)}),
        ((x, y), one | {"more": (1.0, 2)}),
        ((x, y), one | {"change": jnp.negative}),
        ((x, y), one | {"change": lambda x: x + 1}),
    ]
    for args, options in cases * 2:
        arrays = [jnp.asarray(given.numpy()) for given in args]
        named = {name: jnp.asarray(z.numpy()) if isinstance(z, torch.Tensor) else z for name, z in options.items()}
        want = torch.tensor(function(*arrays, **named).__array__())
        torch.testing.assert_close(wrapped(*args, **options), want)
    assert len(wrapped._op._cache) == len(cases)
    attend = lambda **options: bridge.block_sparse_attention(*(z.detach() for z in qkv()), BLOCKS, **options)
    for _ in range(2):
        attend(block_size=8)
    count = len(masked_attention._block_sparse._cache)
    torch.use_deterministic_algorithms(True)
    try:
        attend(block_size=8)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(masked_attention._block_sparse._cache) == count + 1
    with pytest.raises(TypeError, match="block_mask: got dtype"):
        bridge.block_sparse_attention(*qkv(), BLOCKS.int(), block_size=8)


@pytest.mark.parametrize("with_bias", [False, True])
def test_lse_and_its_gradient(with_bias, direct):
    given = [*qkv(), random(1, 4, 24, 24)] if with_bias else qkv()

    def attend(query, key, value, bias=None):
        return bridge.flash_attention(query, key, value, bias=bias, return_lse=True)

    with route.disabled():
        want = attend(*given)
        out, lse = want
        cases = {"out": out.sin().sum(), "lse": lse.sin().sum(), "both": out.sum() + lse.sin().sum()}
        gradients = {
            name: torch.autograd.grad(x, given, retain_graph=True, allow_unused=True) for name, x in cases.items()
        }
    for _ in range(3):
        out, lse = got = attend(*given)
        torch.testing.assert_close(got, want)
        cases = {"out": out.sin().sum(), "lse": lse.sin().sum(), "both": out.sum() + lse.sin().sum()}
        for name, x in cases.items():
            found = torch.autograd.grad(x, given, retain_graph=True, allow_unused=True)
            torch.testing.assert_close(found, gradients[name])
    assert direct.calls


def test_masks_are_compared_by_identity(direct):
    """Masks of one structure share a program, no cached call. A call dies with its Mask; a backward keeps it."""
    given, numbers = qkv(), [jnp.arange(24, dtype=jnp.int32)[None].repeat(2, 0) // at for at in (3, 9, 15)]
    wants = []
    for ids in (torch.tensor(x.__array__()) for x in numbers):
        wants.append(bridge.flash_attention(*given, mask=ids[:, None, :, None] == ids[:, None, None]))
    calls, outs = masked_attention._flash._cache, []
    for ids in numbers:
        mask = bridge.masks.segments(ids)
        outs += [bridge.flash_attention(*given, mask=mask) for _ in range(3)][2:]
    del mask
    assert len(calls) == 3
    for got, want in zip(outs, wants, strict=True):
        torch.testing.assert_close(got, want)
        gradients = [torch.autograd.grad(total(x), given) for x in (got, want)]
        torch.testing.assert_close(*gradients)
    del outs, got
    gc.collect()
    assert len(calls) == 0


# The tensors belong to a cached call, but each call below is a different call.
def test_other_tensors_skip_the_cache(direct):
    query, key, value = (x.detach() for x in qkv())
    for _ in range(2):
        want = bridge.flash_attention(query, key, value)
    calls = direct.calls
    assert calls
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(bridge.flash_attention(strided, key, value), want)
    torch.testing.assert_close(bridge.flash_attention(torch._neg_view(-query), key, value), want)
    with torch.autocast("cpu"):
        assert bridge.flash_attention(query, key, value).dtype == torch.bfloat16
    batched = torch.func.vmap(bridge.flash_attention)(*(torch.stack([x, x]) for x in (query, key, value)))
    torch.testing.assert_close(batched, torch.stack([want, want]))
    assert direct.calls == calls
    with pytest.raises(TypeError, match="key: got"):
        bridge.flash_attention(query, key.numpy(), value)
    with pytest.raises(TypeError, match="scale"):
        bridge.flash_attention(query, key, value, scale=torch.ones(2))
    with pytest.raises(ValueError, match="segment_ids"):
        bridge.flash_attention(query, key, value, segment_ids=(IDS,))
    with pytest.raises(TypeError, match="dtype"):
        bridge.flash_attention(query, key.double(), value)


MASK = bridge.masks.causal()


@pytest.mark.parametrize("name", ["plain", "dilated", "matmul", "dynamic", "Mask"])
def test_autocast_dtype_is_part_of_the_key(name, direct):
    call, given = CALLS[name]
    given = [x.detach().bfloat16() for x in given]
    outs = {}
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16, torch.float16):
        for _ in range(3):
            with torch.autocast("cpu", dtype):
                out = call(*given)
            assert out.dtype == dtype
            torch.testing.assert_close(out, outs.setdefault(dtype, out))
    assert call(*given).dtype == torch.bfloat16


def dilate(*tensors, **options):
    return bridge.dilated_attention(*tensors, segment_lengths=(8,), dilation_rates=(1,), **options)


EIGHT_BITS = torch.ones(16, 16).to(torch.float8_e4m3fn)
# (a call of tensors, an argument that is accepted, an equal argument that is not).
EQUAL = [
    *[(bridge.flash_attention, {name: True}, {name: 1}) for name in ("is_causal", "return_lse", "deterministic")],
    *[(bridge.flash_attention, {name: 1}, {name: True}) for name in ("scale", "softcap", "window", "q_offset")],
    (bridge.flash_attention, {"window": 4}, {"window": 4.0}),
    (lambda *x, **options: bridge.flash_attention(*x, mask=MASK, **options), {"is_causal": True}, {"is_causal": 1}),
    *[(dilate, {name: True}, {name: 1}) for name in ("is_causal", "return_lse", "stop_gradient_weights")],
    (dilate, {"scale": 1}, {"scale": True}),
    (lambda *x, **options: bridge.dilated_attention(*x, dilation_rates=[1], **options), {"segment_lengths": [8]},
     {"segment_lengths": [8.0]}),
    (lambda *x, **options: bridge.matmul(EIGHT_BITS, EIGHT_BITS, **options), {"x_scale": 1}, {"x_scale": True}),
    (lambda q, *x, **options: bridge.layer_norm(q, **options), {"eps": 1.0}, {"eps": True}),
    (lambda q, *x, **options: bridge.decode_attention(q[:, :1].contiguous(), *x, **options), {"scale": 1},
     {"scale": True}),
    (lambda q, *x, **options: bridge.decode_attention(q[:, :1].contiguous(), *x, **options), {"window": (1, 0)},
     {"window": (True, 0)}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(EQUAL)))
def test_wrong_type_equal_to_a_cached_value_raises(case, direct):
    call, taken, refused = EQUAL[case]
    ((name, _),) = refused.items()
    given = [x.detach() for x in qkv()]
    for _ in range(3):
        with pytest.raises(TypeError, match=f"^{name}: got"):
            call(*given, **refused)
        call(*given, **taken)


def test_torch_modes_see_the_operator(direct):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    query, key, value = (x.detach() for x in qkv())
    for _ in range(2):
        bridge.flash_attention(query, key, value)
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for mode in (Functions, Dispatch):
        for length in (24, 25):
            for _ in range(3):
                with mode(), torch.no_grad():
                    bridge.flash_attention(*qkv(length))
                assert any("flash_attention" in name for name in seen)
                assert not any("direct" in name for name in seen)
                seen.clear()


def test_settings_are_part_of_the_key(direct, monkeypatch):
    query, key, value = (x.detach() for x in qkv())
    for _ in range(2):
        bridge.flash_attention(query, key, value)
    count = len(direct.chains)
    torch.use_deterministic_algorithms(True)
    try:
        bridge.flash_attention(query, key, value)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(direct.chains) == count + 1
    import jax

    function = bridge.from_jax(lambda x: x * 2)
    x = random(3).detach()
    for _ in range(2):
        function(x)
    calls = direct.calls
    with jax.enable_x64(True):
        function(x)
    assert direct.calls == calls


def test_compiled_code_skips_the_cache(direct):
    torch._dynamo.reset()
    query, key, value = (x.detach() for x in qkv())
    for _ in range(2):
        want = bridge.flash_attention(query, key, value)
    calls = direct.calls
    compiled = torch.compile(lambda *x: bridge.flash_attention(*x) * 2, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(query, key, value), want * 2)
    assert direct.calls == calls


def test_operator_caches_its_calls(direct, monkeypatch):
    """A compiled graph calls the operator, which launches by the direct route."""
    torch._dynamo.reset()
    query, key, value = qkv()
    want = bridge.flash_attention(query, key, value)
    want_gradients = torch.autograd.grad(want.sin().sum(), (query, key, value))
    found = []

    def launch(function, tensors, operands=None):
        found.append(function)
        return direct.find(function, tensors, operands)(*(x for x in tensors if x is not None))

    own = execute.execute

    def run(function, tensors, operands=None):
        results = execute._launched(function, tensors, [x for x in tensors if x is not None], operands)
        return own(function, tensors, operands) if results is None else results

    monkeypatch.setattr(route, "launch", launch)
    monkeypatch.setattr(execute, "execute", run)
    compiled = torch.compile(lambda *x: bridge.flash_attention(*x).sin(), backend="aot_eager", fullgraph=True)
    counts = []
    for _ in range(4):  # while compiling, PyTorch's state differs from later calls
        got = torch.autograd.grad(compiled(query, key, value).sum(), (query, key, value))
        torch.testing.assert_close(got, want_gradients)
        counts.append(len(found))
    assert counts[0] >= 2
    assert counts[1] == counts[3]
    keyed_cache.clear()


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("name", ["plain", "bias", "matmul", "from_jax"])
def test_compiled_graph_has_capturable_operators(name, is_direct, request):
    from torch._dynamo.backends.common import aot_autograd

    if is_direct:
        request.getfixturevalue("direct")
    torch._dynamo.reset()
    call, given = CALLS[name]
    nodes = []

    def keep(graph, inputs):
        nodes.extend(node.target for node in graph.graph.nodes if "jax_kernels" in str(node.target))
        return graph

    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    out = compiled(*given)
    torch.testing.assert_close(out, call(*given))
    gradients = torch.autograd.grad(total(out), given)
    torch.testing.assert_close(gradients, torch.autograd.grad(total(call(*given)), given))
    assert len(nodes) == 2
    assert [torch.Tag.cudagraph_unsafe in node.tags for node in nodes] == [not is_direct] * 2
    if is_direct:
        (first, *_) = torch.autograd.grad(total(compiled(*given)), given)
        torch.testing.assert_close(first, gradients[0])


def test_threads(direct):
    groups = [[x.detach() for x in qkv(length)] for length in (8, 16, 24, 32)]
    with route.disabled():
        want = [bridge.flash_attention(*group) for group in groups]
    wrong = []

    def work(index):
        for _ in range(30):
            for offset in range(4):
                at = (index + offset) % 4
                if not torch.allclose(bridge.flash_attention(*groups[at]), want[at], atol=1e-5):
                    wrong.append(at)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_cache_size_is_bounded(direct, monkeypatch):
    monkeypatch.setattr(call_cache, "_MOST", 3)
    function = bridge.from_jax(lambda x: x + 1)
    for size in range(1, 8):
        function(torch.zeros(size))
    (calls,) = [x for x in call_cache._ALL if len(x) == 3]
    assert [call.chain.launch.there for call in calls._calls.values()] == [[True]] * 3


def test_no_cache_without_pytorch_guards(direct, monkeypatch):
    monkeypatch.setattr(torch_internals, "_GUARDS", None)
    query, key, value = (x.detach() for x in qkv())
    for _ in range(3):
        bridge.flash_attention(query, key, value)
    assert not direct.calls


def test_private_symbols_are_found():
    """A PyTorch without them serves every call, and takes longer."""
    assert torch_internals._GUARDS is not None
    assert torch_internals.empty_on_gpu is torch._C._dynamo.guards._empty_strided_cuda


@pytest.mark.parametrize("name", ["matmul", "flash_attention", "dilated_attention"])
def test_autocast_dtype_change_misses_the_cache(name):
    """The tensors are the same, and so is PyTorch's check of them."""
    query = torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    call = {
        "matmul": lambda: bridge.matmul(query, query[0, 0].T.contiguous()),
        "flash_attention": lambda: bridge.flash_attention(query, query, query),
        "dilated_attention": lambda: bridge.dilated_attention(
            query, query, query, segment_lengths=(8,), dilation_rates=(1,)
        ),
    }[name]
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, None, torch.float16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            assert call().dtype == (dtype or torch.bfloat16)
