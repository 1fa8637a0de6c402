"""The direct route on a GPU: which calls take it, and that their results are right."""

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge import masks
from jax_kernels.bridge.direct import route
from jax_kernels.bridge.interop import dlpack, donated_outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
SHAPE = (2, 512, 4, 64)
SLEEP = 20_000_000  # cycles: about 12 ms on an H200


@contextlib.contextmanager
def only_direct():
    """Fails, with the route's reasons, if a call inside the block takes the DLPack route."""
    before, taken = len(route.reasons()), []

    def counting(own):
        def counted(*given, **options):
            taken.append(given)
            return own(*given, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dlpack, "import_tensors", counting(dlpack.import_tensors))
        patch.setattr(donated_outputs, "run", counting(donated_outputs.run))
        yield
    reasons = route.reasons()
    assert not taken, f"{len(taken)} calls went through DLPack; new reasons: {reasons[before:]}; all: {set(reasons)}"


def poison():
    """Fills free memory of PyTorch's allocator, on the current stream, with NaN."""
    blocks = [
        torch.full((size,), float("nan"), device="cuda") for size in (*(2**8,) * 64, *(2**17,) * 32, *(2**23,) * 8)
    ]
    del blocks


def random(*shape, dtype=torch.bfloat16, device="cuda", seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype).requires_grad_()


def qkv(shape=SHAPE, kv_heads=None, device="cuda"):
    kv_shape = (*shape[:2], kv_heads or shape[2], shape[3])
    return [random(*shape, device=device), *(random(*kv_shape, device=device, seed=seed) for seed in (1, 2))]


def close(got, want, tolerance=1e-2):
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < tolerance, float(error)


class Case(NamedTuple):
    """A call of the tensors `inputs`, and the same in float64; None: compare with the DLPack route."""

    inputs: list[torch.Tensor]
    call: Callable[..., Any]
    exact: Callable[..., Any] | None


def attention(reference, *, inputs=None, **options):
    call = lambda *given: bridge.flash_attention(*given, **options)
    return Case(inputs or qkv(), call, lambda *given: reference(*given, **options)[0])


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def with_bias(reference):
    call = lambda q, k, v, bias: bridge.flash_attention(q, k, v, bias=bias)
    exact = lambda q, k, v, bias: reference(q, k, v, bias=bias)[0]
    return Case([*qkv(), random(1, 4, 512, 512)], call, exact)


def with_mask(kind):
    blocks = torch.rand(2, 4, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    made = {
        "blocks": lambda: masks.block_sparse(blocks.cuda(), 128),
        "lengths": lambda: masks.prefix(lengths(100, 400)),
        "structure": lambda: masks.causal() & masks.sliding_window(100, 0),
    }[kind]()
    return Case(qkv((2, 512, 4, 128)), lambda *given: bridge.flash_attention(*given, mask=made), None)


def halved(score, b, h, q_idx, kv_idx):
    return score * 0.5 - jnp.abs(q_idx - kv_idx) * 0.01


def by_layer_norm(x, scale, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, 1e-5)


def by_rms_norm(x, scale):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], scale, 1e-5)


CASES: dict[str, Callable[[Any], Case]] = {
    "plain": lambda reference: attention(reference),
    "causal": lambda reference: attention(reference, is_causal=True),
    "window": lambda reference: attention(reference, window=(100, 20)),
    "segments": lambda reference: attention(
        reference, segment_ids=(torch.arange(512, device="cuda", dtype=torch.int32) // 200).expand(2, 512).contiguous()
    ),
    "kv_lengths": lambda reference: attention(reference, kv_lengths=lengths(300, 512)),
    "bool mask": lambda reference: attention(
        reference, mask=torch.rand(2, 1, 512, 512, generator=torch.Generator().manual_seed(0)).cuda() < 0.7
    ),
    "softcap": lambda reference: attention(reference, softcap=20.0),
    "sinks": lambda reference: Case(
        [*qkv(), random(4)],
        lambda q, k, v, sinks: bridge.flash_attention(q, k, v, sinks=sinks),
        lambda q, k, v, sinks: reference(q, k, v, sinks=sinks)[0],
    ),
    "bias": with_bias,
    "grouped": lambda reference: attention(reference, inputs=qkv((2, 512, 8, 128), kv_heads=2), is_causal=True),
    "odd": lambda reference: attention(reference, inputs=qkv((1, 333, 3, 80)), is_causal=True),
    "long": lambda reference: attention(reference, inputs=qkv((1, 4096, 4, 128)), is_causal=True),
    "score_mod": lambda reference: Case(qkv(), lambda *given: bridge.flash_attention(*given, score_mod=halved), None),
    "mask of blocks": lambda reference: with_mask("blocks"),
    "mask of lengths": lambda reference: with_mask("lengths"),
    "mask of structure": lambda reference: with_mask("structure"),
    "dilated": lambda reference: Case(
        qkv((1, 1024, 4, 64)),
        lambda *given: bridge.dilated_attention(*given, segment_lengths=[256, 1024], dilation_rates=[1, 2]),
        None,
    ),
    "matmul": lambda reference: Case([random(4096, 2048), random(2048, 4096)], bridge.matmul, torch.matmul),
    "linear": lambda reference: Case(
        [random(2, 2048, 2048), random(4096, 2048), random(4096)], bridge.linear, torch.nn.functional.linear
    ),
    "gated_matmul": lambda reference: Case(
        [random(4096, 2048), random(2048, 4096), random(2048, 4096)],
        bridge.gated_matmul,
        lambda x, gate, up: torch.nn.functional.silu(x @ gate) * (x @ up),
    ),
    "layer_norm": lambda reference: Case(
        [random(4096, 2048), random(2048), random(2048)],
        lambda x, scale, bias: bridge.layer_norm(x, scale, bias, eps=1e-5),
        by_layer_norm,
    ),
    "rms_norm": lambda reference: Case(
        [random(4096, 2048), random(2048)], lambda x, scale: bridge.rms_norm(x, scale, eps=1e-5), by_rms_norm
    ),
    "small rms_norm": lambda reference: Case(
        [random(64, 512), random(512)], lambda x, scale: bridge.rms_norm(x, scale, eps=1e-5), by_rms_norm
    ),
    "from_jax": lambda reference: Case([random(1000)], bridge.from_jax(lambda x: x * 2), lambda x: x * 2),
}
names = pytest.mark.parametrize("name", list(CASES))


def expected(case, cotangent=None):
    """The output, and with a cotangent the gradients, in float64 or by the DLPack route."""
    if case.exact is None:
        with route.disabled():
            inputs = [x.detach().requires_grad_() for x in case.inputs]
            out = case.call(*inputs)
            return out, () if cotangent is None else torch.autograd.grad(out, inputs, cotangent)
    inputs = [x.detach().double().requires_grad_() for x in case.inputs]
    out = case.exact(*inputs)
    return out, () if cotangent is None else torch.autograd.grad(out, inputs, cotangent.double())


@names
def test_without_gradient(name, reference):
    case = CASES[name](reference)
    with torch.no_grad():
        case.call(*case.inputs)
        poison()
        with only_direct():
            out = case.call(*case.inputs)
    close(out, expected(case)[0])


@names
def test_forward_and_backward(name, reference):
    case = CASES[name](reference)
    cotangent = torch.randn_like(case.call(*case.inputs))
    torch.autograd.grad(case.call(*case.inputs), case.inputs, cotangent)
    poison()
    with only_direct():
        out = case.call(*case.inputs)
        poison()
        gradients = torch.autograd.grad(out, case.inputs, cotangent)
    want, want_gradients = expected(case, cotangent)
    close(out, want)
    for got, right in zip(gradients, want_gradients, strict=True):
        close(got, right, 2e-2)


def test_lse_and_its_gradient(reference):
    inputs = qkv()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for _ in range(2):
        out, lse = bridge.flash_attention(*inputs, return_lse=True)
        got = torch.autograd.grad(out.float().sum() + lse.sin().sum(), inputs)
    with only_direct():
        out, lse = bridge.flash_attention(*inputs, return_lse=True)
        got = torch.autograd.grad(out.float().sum() + lse.sin().sum(), inputs)
    want_out, want_lse = reference(*exact)
    close(lse, want_lse, 1e-3)
    for ours, right in zip(got, torch.autograd.grad(want_out.sum() + want_lse.sin().sum(), exact), strict=True):
        close(ours, right)


@names
def test_on_a_separate_stream(name, reference):
    """The inputs are written late on that stream: a launch on another stream would read their old values."""
    case = CASES[name](reference)
    with torch.no_grad():
        want = case.call(*case.inputs)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        for _ in range(3):
            with torch.cuda.stream(stream):
                late = [torch.zeros_like(x) for x in case.inputs]
                torch.cuda._sleep(SLEEP)
                for x, source in zip(late, case.inputs, strict=True):
                    x.copy_(source)
                poison()
                with only_direct():
                    out = case.call(*late)
                out = out.clone()
            stream.synchronize()
            close(out, want)


def test_successive_streams(reference):
    case = CASES["causal"](reference)
    cotangent = torch.randn_like(case.inputs[0])
    want = torch.autograd.grad(case.call(*case.inputs), case.inputs, cotangent)
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(4)]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), only_direct():
            got = torch.autograd.grad(case.call(*case.inputs), case.inputs, cotangent)
        stream.synchronize()
        for ours, right in zip(got, want, strict=True):
            close(ours, right)


def test_from_two_threads(reference):
    case = CASES["causal"](reference)
    other = attention(reference, inputs=qkv((1, 256, 8, 64)))
    found: dict[int, Any] = {}

    def work(index, case):
        with torch.cuda.stream(torch.cuda.Stream()):
            cotangent = torch.ones_like(case.inputs[0])
            for _ in range(50):
                out = case.call(*case.inputs)
                found[index] = (out, *torch.autograd.grad(out, case.inputs, cotangent))
            torch.cuda.current_stream().synchronize()

    for each in (case, other):
        each.call(*each.inputs).sum().backward()
    torch.cuda.synchronize()
    with only_direct():
        threads = [threading.Thread(target=work, args=(i, (case, other)[i % 2])) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index in range(4):
        each = (case, other)[index % 2]
        want, gradients = expected(each, torch.ones_like(each.inputs[0]))
        for ours, right in zip(found[index], (want, *gradients), strict=True):
            close(ours, right)


def test_two_gpus(reference):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        inputs = qkv(device=device)
        bridge.flash_attention(*inputs, is_causal=True).sum().backward()
        with only_direct():
            out = bridge.flash_attention(*inputs, is_causal=True)
            gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert {x.device for x in (out, *gradients)} == {torch.device(device)}
        exact = [x.detach().double().requires_grad_() for x in inputs]
        want = reference(*exact, is_causal=True)[0]
        close(out, want)
        for ours, right in zip(gradients, torch.autograd.grad(want.sum(), exact), strict=True):
            close(ours, right)


def used_memory():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.alone
def test_many_calls_leak_no_memory(reference):
    case = CASES["causal"](reference)
    cotangent = torch.randn_like(case.inputs[0])

    def step():
        torch.autograd.grad(case.call(*case.inputs), case.inputs, cotangent)

    for _ in range(200):
        step()
    before = used_memory()
    for _ in range(3000):
        step()
    assert used_memory() - before < 2 * 2**20


@pytest.mark.alone
def test_dropped_chains_are_unloaded():
    """Chains of new lengths take no more GPU memory than the chains that they replace."""

    def use(length):
        with torch.no_grad():
            bridge.flash_attention(*qkv((1, length, 2, 64)))

    use(128)
    bridge.clear_cache()
    used = []
    for round in range(4):
        for length in range(129, 133):
            use(length + 4 * round)
        bridge.clear_cache()
        used.append(used_memory())
    assert used[3] - used[1] < 6 * 2**20, used


def test_views_and_unaligned_tensors(reference):
    base = random(2, 513, 4, 192).detach()
    query, key, value = base[:, 1:].chunk(3, dim=-1)
    with torch.no_grad():
        bridge.flash_attention(query, key, value)
        with only_direct():
            out = bridge.flash_attention(query, key, value)
    close(out, reference(query, key, value)[0])
    flat = random(2 * 512 * 4 * 64 + 1).detach()
    unaligned = flat[1:].view(SHAPE)
    assert unaligned.data_ptr() % 16
    with torch.no_grad():
        close(bridge.flash_attention(unaligned, unaligned, unaligned), reference(unaligned, unaligned, unaligned)[0])


def test_second_derivative_raises(reference):
    inputs = qkv()
    out = bridge.flash_attention(*inputs)
    (first,) = torch.autograd.grad(out.float().square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        first.float().sum().backward()


def test_input_changed_after_the_forward_raises():
    inputs = [x.detach().clone().requires_grad_() for x in qkv()]
    doubled = inputs[0] * 2
    out = bridge.flash_attention(doubled, *inputs[1:])
    with torch.no_grad():
        doubled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_cached_calls_with_masks():
    """Each mask is used in its own calls, on a second stream too. A backward outlives the caller's mask."""
    inputs = qkv((2, 512, 4, 128))
    lengths = [torch.tensor([a, 500], dtype=torch.int32, device="cuda") for a in (100, 300)]
    made = [masks.prefix(x) for x in lengths]
    columns = torch.arange(512, device="cuda")
    dense = [(columns < x[:, None])[:, None, None].expand(2, 1, 512, 512) for x in lengths]
    want = [bridge.flash_attention(*inputs, mask=x) for x in dense]
    wanted = [torch.autograd.grad(x.float().sin().sum(), inputs) for x in want]
    outs = []
    side = torch.cuda.Stream()
    for _ in range(3):
        for mask in made:
            outs.append(bridge.flash_attention(*inputs, mask=mask))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), only_direct():
        outs += [bridge.flash_attention(*inputs, mask=mask) for mask in made]
    torch.cuda.current_stream().wait_stream(side)
    made.clear()
    del mask
    gc.collect()
    for at, out in enumerate(outs):
        close(out, want[at % 2], 1e-2)
        for ours, theirs in zip(torch.autograd.grad(out.float().sin().sum(), inputs), wanted[at % 2], strict=True):
            close(ours, theirs, 2e-2)
