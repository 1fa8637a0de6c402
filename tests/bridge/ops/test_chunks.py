"""A call of the bridge that runs out of memory is run again in chunks, by the DLPack route and by the direct route."""

import types
import warnings
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_kernels import bridge, chunks, memory_limit
from jax_kernels.bridge.direct import dlpack_route, route
from jax_kernels.bridge.direct.chain import Array, BufferSlice, Dims, Kernel, LaunchChain
from jax_kernels.bridge.direct.launcher import LoadedChain
from jax_kernels.bridge.operators import call_cache
from tests.support.fakes.cuda import FakeCuda, Memory

ERROR = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes."
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_known_calls():
    bridge.clear_cache()
    yield
    bridge.clear_cache()


def need_chunks(monkeypatch, count, largest=64):
    """JAX's programs run out of memory in less than `count` chunks. Returns the list of the chunks of all tries."""
    real, tried = dlpack_route.memory.retry_on_oom, []

    def limited(device, call):
        results = real(device, call)
        tried.append(chunks._FORCED.value)
        if chunks._FORCED.value < count:
            raise jax.errors.JaxRuntimeError(ERROR)
        return results

    monkeypatch.setattr(dlpack_route.memory, "retry_on_oom", limited)
    return tried


def training_step(name):
    """(the op's step, which returns the gradient of its first tensor; the same call without gradients)."""
    query = torch.randn(2, 8, 2, 4, requires_grad=True)
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, 6)
    moving, call = {
        "flash_attention": (query, lambda: bridge.flash_attention(query, query, query)),
        "matmul": (x, lambda: bridge.matmul(x, w)),
    }[name]

    def step():
        moving.grad = None
        call().square().sum().backward()
        return moving.grad

    return step, torch.no_grad()(call)


@pytest.mark.parametrize("name", ["flash_attention", "matmul"])
def test_a_call_is_tried_again(monkeypatch, name):
    """Forward and backward warn once each. Later calls begin with the number of chunks that sufficed."""
    step, _ = training_step(name)
    want = step().clone()
    tried = need_chunks(monkeypatch, 4)
    with pytest.warns(RuntimeWarning) as warned:
        torch.testing.assert_close(step(), want)
    assert [str(x.message) for x in warned] == [
        f"{name}{suffix}: out of memory on cpu; the call ran in 4 chunks" for suffix in ("", "_backward")
    ]
    assert tried == [1, 2, 4] * 2
    tried.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(step(), want)
    assert tried == [4] * 2


def test_more_chunks_than_sufficed_before(monkeypatch):
    """A call that no number of chunks mends raises each time, and tries no more chunks than its ops have."""
    x, w = torch.randn(8, 4), torch.randn(4, 6)
    want = bridge.matmul(x, w)
    tried = need_chunks(monkeypatch, 2)
    with pytest.warns(RuntimeWarning, match="2 chunks"):
        bridge.matmul(x, w)
    monkeypatch.undo()
    tried = need_chunks(monkeypatch, 8)
    with pytest.warns(RuntimeWarning, match="8 chunks"):
        torch.testing.assert_close(bridge.matmul(x, w), want)
    assert tried == [2, 4, 8]
    monkeypatch.undo()
    tried = need_chunks(monkeypatch, 100)
    for expected in ([8, 16], [1, 2, 4, 8, 16]):
        tried.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            bridge.matmul(x, w)
        assert tried == expected


X = Array(shape=(4, 6), dtype="float32", size=96)
COPY = Kernel(
    name="copy",
    cubin=b"",
    grid=Dims(),
    block=Dims(x=32),
    cluster=Dims(),
    shared_memory=0,
    arguments=(BufferSlice(buffer=0, offset=0, size=96), BufferSlice(buffer=1, offset=0, size=96)),
)
CHAIN = LaunchChain(inputs=(X,), outputs=(X, X), workspace=64, constants=(), steps=(COPY,))


def chain_without_memory(by_jax, fails="workspace", device=GPU):
    """(a loaded chain that runs out of memory, its allocator, its CUDA driver). fails: the allocation, or "kernel"."""
    cuda, memory = FakeCuda({"copy": 2}), Memory()
    if fails == "kernel":
        cuda.cuLaunchKernelEx._call = lambda *given: 2
    else:
        most, own, fresh = {"outputs": 1, "workspace": 2}[fails], memory.empty, []

        def empty(*facts):
            fresh.append(facts)
            if len(fresh) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 bytes.")
            return own(*facts)

        memory.empty = empty
    return LoadedChain(CHAIN, device, cuda=cuda.driver, allocator=memory.allocator, by_jax=by_jax), memory, cuda


@pytest.mark.parametrize("fails", ["outputs", "workspace", "kernel"])
def test_a_launch_without_memory_runs_by_jax(fails):
    """The chain has freed its own outputs and workspace by then. A CUDA graph gets the error."""
    x, freed = torch.rand(4, 6), []

    def by_jax(tensors):
        assert [y.data_ptr() for y in tensors] == [x.data_ptr()]
        references = [weakref.ref(memory.tensors.pop()) for _ in range(len(memory.tensors))]
        freed.extend(reference() is None for reference in references)
        return ["the outputs"]

    loaded, memory, _ = chain_without_memory(by_jax, fails)
    assert loaded(x) == ["the outputs"]
    assert freed == [True] * {"outputs": 1, "workspace": 2, "kernel": 3}[fails]
    loaded, memory, _ = chain_without_memory(by_jax, fails)
    memory.is_capturing = True
    with pytest.raises((torch.OutOfMemoryError, RuntimeError), match=r"out of memory|a launch"):
        loaded(x)
    loaded, memory, _ = chain_without_memory(None, fails)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError), match=r"out of memory|a launch"):
        loaded(x)


def test_other_driver_errors_are_raised():
    loaded, _, cuda = chain_without_memory(lambda tensors: pytest.fail("no error of memory"), "kernel")
    cuda.cuLaunchKernelEx._call = lambda *given: 700
    with pytest.raises(RuntimeError, match=r"ILLEGAL_ADDRESS \(700\)"):
        loaded(torch.rand(4, 6))


@pytest.fixture
def direct_without_memory(monkeypatch):
    """Cached calls launch a chain without memory, on the CPU. Yields the list of the functions that chains replace."""
    names = []

    def find(function, tensors, operands=None):
        names.append(function.__name__)
        flat = route._of_arrays(function, tensors, None if operands is None else operands.signature)
        device = torch.device("cpu")
        return chain_without_memory(dlpack_route.by_jax(flat, device), device=types.SimpleNamespace(index=0))[0]

    monkeypatch.setattr(route, "find", find)
    return names


@pytest.mark.parametrize("name", ["flash_attention", "matmul"])
def test_a_direct_call_is_tried_again(monkeypatch, direct_without_memory, name):
    """With and without gradients, a cached call runs in chunks, with one warning for forward and backward each."""
    step, call = training_step(name)
    want, want_out = step().clone(), call()
    assert direct_without_memory
    step()  # a second call, as the backward is cached after the first
    tried = need_chunks(monkeypatch, 4)
    messages = lambda warned: [str(x.message).split(";")[0] for x in warned]
    with pytest.warns(RuntimeWarning) as warned:
        torch.testing.assert_close([step().clone() for _ in range(2)], [want] * 2)
    assert messages(warned) == [f"{name}{suffix}: out of memory on cpu" for suffix in ("", "_backward")]
    assert tried == [1, 2, 4] * 2 + [4] * 2
    with pytest.warns(RuntimeWarning) as warned:
        torch.testing.assert_close([call() for _ in range(2)], [want_out] * 2)
    assert messages(warned) == [f"{name}: out of memory on cpu"]


def test_masks_of_a_chain_are_its_first_inputs():
    """The function of a chain's inputs gets the Masks from their arrays, and None for absent tensors."""
    masks = types.SimpleNamespace(structure=jax.tree.structure(((1, 2),)), arrays=[None, None])

    @jax.jit
    def attend(given, x, absent, y):
        ((first, second),) = given
        assert absent is None
        return (first * x - second * y,)

    flat = route._of_arrays(attend, [torch.ones(2), None, torch.ones(2)], masks)
    (got,) = flat(jnp.array(2.0), jnp.array(3.0), jnp.arange(2.0), jnp.ones(2))
    assert flat.__name__ == "attend"
    assert got.tolist() == [-3.0, -1.0]


def test_the_limit_holds_on_a_host_of_several_devices(monkeypatch):
    """A call of the bridge is for one device, so that its limit splits the call before it runs out of memory."""
    monkeypatch.setattr(jax, "device_count", lambda *_: 2)
    x, w = torch.randn(8, 4), torch.randn(4, 6)
    with memory_limit(50), chunks.forced(1) as split:
        got = bridge.matmul(x, w)
    assert max(split) > 1
    torch.testing.assert_close(got, x @ w)


def test_a_cached_call_depends_on_the_limit(monkeypatch):
    cache, x = call_cache.CallCache(), torch.rand(2)
    make = lambda: call_cache.CachedCall(lambda x: [x], lambda results: results)
    cache.record((), [x], make)
    whole = cache.lookup((), [x])
    assert whole is not None
    with memory_limit(100):
        assert cache.lookup((), [x]) is None
        cache.record((), [x], make)
        limited = cache.lookup((), [x])
        assert limited not in (None, whole)
    assert cache.lookup((), [x]) is whole
    seen = []
    monkeypatch.setattr(route, "_make", lambda key, *given: seen.append(key))
    with route.enabled():
        tensor = types.SimpleNamespace(shape=(1,), dtype=torch.float32, device=GPU)
        route.find(len, [tensor])
        with memory_limit(100):
            route.find(len, [tensor])
    assert len(set(seen)) == 2


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_full_gpu():
    """4 GiB of hidden values find no memory, neither in PyTorch nor in JAX. A second call does not warn."""
    shapes = (65536, 4096), (4096, 32768), (32768, 4096)
    x, w_up, w_down = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 64 for shape in shapes)
    want = bridge.mlp(x, w_up, w_down).cpu()  # results are compared on the host: the full GPU has no room for it
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - (4352 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.warns(RuntimeWarning, match=r"mlp: out of memory on cuda:0; the call ran in \d+ chunks"):
            got = bridge.mlp(x, w_up, w_down).cpu()
        torch.testing.assert_close(got, want)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = bridge.mlp(x, w_up, w_down).cpu()
        torch.testing.assert_close(again, want)
    finally:
        del filler
        torch.cuda.empty_cache()
