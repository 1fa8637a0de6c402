"""Arrays that cross between PyTorch and JAX, and their memory layout."""

import threading
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_kernels
from jax_kernels import bridge
from jax_kernels.bridge.interop import cuda_driver, dlpack
from jax_kernels.bridge.interop import keep_alive as held_memory
from jax_kernels.bridge.operators import execute

CPU = torch.device("cpu")
NARROW = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.bool, torch.int8, torch.int16, torch.int32),
    *(torch.uint8, torch.uint16, torch.uint32, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def values(array):
    """The array's values as a tensor that owns its memory."""
    return dlpack.export_arrays([array], CPU)[0]


@pytest.fixture(params=["private", "public"])
def route(request, monkeypatch):
    if request.param == "public":
        monkeypatch.setattr(dlpack, "_PRIVATE", None)
    return request.param


def test_default_stream_is_pytorchs(monkeypatch):
    """For handle 0, torch.cuda.ExternalStream makes a new stream, for which no PyTorch work waits."""
    made = []
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: made.append(handle) or "external")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default of {device}")
    found = [dlpack._external_stream.__wrapped__(handle, torch.device("cuda", 1)) for handle in (0, 64)]
    assert found == ["default of cuda:1", "external"]
    assert made == [64]


@pytest.mark.parametrize("dtype", NARROW)
def test_dtypes_cross_without_a_copy(dtype, route):
    tensor = torch.arange(256, dtype=torch.uint8).remainder(2 if dtype == torch.bool else 100).repeat(8).view(dtype)
    dlpack.check_dtype("x", dtype)
    (array,), owners = dlpack.import_tensors([tensor], CPU)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == owners[0].data_ptr()
    assert array.dtype == dlpack.jax_dtype(dtype)
    (back,) = dlpack.export_arrays([array], CPU)
    assert back.dtype == dtype
    assert back.data_ptr() != tensor.data_ptr()
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [("float64", "float32"), ("int64", "int32"), ("uint64", "uint32"), ("complex128", "complex64")],
)
def test_64_bit_dtypes_are_refused(dtype, narrow):
    cast = rf"cast it first, with \.to\(torch\.{narrow}\)"
    with pytest.raises(TypeError, match=rf"^x: got dtype torch\.{dtype}, want at most 32 bits; {cast}$"):
        dlpack.check_dtype("x", getattr(torch, dtype))
    text = rf"^x: got dtype torch\.{dtype}, which JAX narrows to 32 bits; {cast}, or set jax_enable_x64$"
    with pytest.raises(TypeError, match=text):
        dlpack.check_dtype("x", getattr(torch, dtype), takes_64_bits=True)
    with pytest.raises(TypeError, match=text):
        bridge.from_jax(lambda x: x * 2)(torch.ones(4, dtype=getattr(torch, dtype)))


WIDE, W = torch.ones(4, 8, dtype=torch.float64), torch.ones(8, 8, dtype=torch.float64)
SIZES = torch.tensor([4], dtype=torch.int32)
OPS = {
    "matmul": lambda: bridge.matmul(WIDE, W),
    "mlp": lambda: bridge.mlp(WIDE, W, W),
    "linear": lambda: bridge.nn.Linear(8, 8)(WIDE),
    "grouped_matmul": lambda: bridge.grouped_matmul(WIDE, W[None], SIZES),
    "layer_norm": lambda: bridge.layer_norm(WIDE, W[0]),
    "cross_entropy": lambda: bridge.linear_cross_entropy(WIDE, W, torch.zeros(4, dtype=torch.int64)),
    "an op by from_jax": lambda: bridge.from_jax(jax_kernels.matmul)(WIDE, W),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_do_not_advise_x64(name):
    """The library's own functions have no float64 with jax_enable_x64 either."""
    call = OPS[name]
    with pytest.raises(TypeError, match=r"^(x|input): got dtype torch\.float64, want at most 32 bits; cast it"):
        call()
    wide = r"^(x|input): got dtype float64|, want (x|input)'s dtype float64$"
    with jax.enable_x64(True), pytest.raises(TypeError, match=wide):
        call()


def test_64_bit_dtypes_under_x64():
    double = bridge.from_jax(lambda x: x * 2)
    with jax.enable_x64(True):
        assert double(torch.tensor([2**40])).tolist() == [2**41]
    with pytest.raises(TypeError, match=r"^x: got dtype torch\.int64"):
        double(torch.tensor([2**40]))


def test_unknown_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"x: got dtype torch\.complex32, which JAX does not take"):
        dlpack.check_dtype("x", torch.complex32)
    with pytest.raises(TypeError, match="out: got dtype int4, which PyTorch does not take"):
        dlpack.torch_dtype("out", jnp.dtype("int4"))


TENSORS = {
    "transposed": lambda: torch.randn(64, 32).T,
    "permuted": lambda: torch.randn(2, 8, 4, 16).transpose(1, 2),
    "sliced": lambda: torch.randn(64, 32)[:, :16],
    "strided": lambda: torch.randn(64)[::2],
    "stride 0": lambda: torch.randn(1, 64).expand(32, 64),
    "chunk of a joint projection": lambda: torch.randn(8, 96).chunk(3, -1)[1],
    "misaligned": lambda: torch.randn(65)[1:],
    "0-d": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 4),
    "requires_grad": lambda: torch.randn(64, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(64)),
    "conjugate bit": lambda: torch.randn(64, dtype=torch.complex64).conj(),
    "negative bit": lambda: torch._neg_view(torch.randn(64)),
    "both bits": lambda: torch.randn(64, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("case", TENSORS)
def test_every_layout_keeps_its_values(case, route):
    tensor = TENSORS[case]()
    (array,), _ = dlpack.import_tensors([tensor], CPU)
    assert array.shape == tuple(tensor.shape)
    want = tensor.detach().resolve_conj().resolve_neg()
    assert np.array_equal(np.asarray(array), want.numpy())
    assert torch.equal(values(array), want)
    # Also through a jitted function, where XLA would read a wrong layout.
    assert torch.equal(values(jax.jit(lambda x: -x)(array)), -want)


def test_outputs_are_owned_by_torch():
    array = jnp.arange(64.0)
    first, second = dlpack.export_arrays([array, array], CPU)
    first += 1
    assert np.asarray(array).tolist() == second.tolist() == list(range(64))


def test_lent_tensors_are_returned():
    tensors = [torch.randn(2, 16, 4, 32, requires_grad=True) for _ in range(3)]
    bridge.flash_attention(*tensors).sum().backward()
    deadline = time.monotonic() + 10
    while dlpack._LENT and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(dlpack._LENT) == 0


def test_exit_waits_for_lent_tensors(monkeypatch):
    lent = {0: torch.zeros(3)}
    monkeypatch.setattr(dlpack, "_LENT", lent)
    threading.Timer(0.1, lent.clear).start()
    start = time.monotonic()
    dlpack._finish()
    assert not lent
    assert 0.09 < time.monotonic() - start < 5


def test_devices():
    assert dlpack.jax_device(CPU).platform == "cpu"
    with pytest.raises(ValueError, match="got a tensor on meta, want one on a CPU or a CUDA device"):
        dlpack.jax_device(torch.device("meta"))


def test_device_unknown_to_jax(monkeypatch):
    def local_devices(backend):
        if backend == "cuda":
            raise RuntimeError("no such backend")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    with pytest.raises(
        RuntimeError, match=r"got a tensor on cuda:9, but JAX has no cuda backend \(install jax\[cuda13\]"
    ):
        dlpack.jax_device(torch.device("cuda", 9))
    monkeypatch.setattr(jax, "local_devices", lambda backend: [types.SimpleNamespace(local_hardware_id=0)])
    with pytest.raises(RuntimeError, match="got a tensor on cuda:9, but JAX sees only"):
        dlpack.jax_device(torch.device("cuda", 9))


class Event:
    """A CUDA event that has passed when the test sets `passed`."""

    made: list["Event"]

    def __init__(self):
        self.passed = False
        Event.made.append(self)

    def record(self, stream):
        pass

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


@pytest.fixture
def held(monkeypatch):
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(held_memory, "_memory_to_hold", lambda index: 1000)
    return held_memory.StreamKeepAlive()


def sizes(held):
    return {key[1]: [entry.size for entry in queue] for key, queue in held._queues.items()}


def test_memory_is_kept_until_copied(held):
    stream = types.SimpleNamespace(device_index=0, cuda_stream=7)
    other = types.SimpleNamespace(device_index=0, cuda_stream=8)
    held.hold(stream, [torch.zeros(25)])
    held.hold(other, [torch.zeros(50)])
    held.hold(stream, [torch.zeros(5)])
    assert sizes(held) == {7: [100, 20], 8: [200]}
    Event.made[0].passed = True
    held.hold(other, [torch.zeros(1)])
    assert sizes(held) == {7: [20], 8: [200, 4]}
    assert held._sizes[0] == 224
    held.clear()
    assert all(event.passed for event in Event.made)
    assert not held._queues


def test_host_waits_at_the_memory_limit(held):
    stream = types.SimpleNamespace(device_index=0, cuda_stream=7)
    for _ in range(4):
        held.hold(stream, [torch.zeros(100)])  # 400 bytes of the 1000 allowed
    assert [event.passed for event in Event.made] == [True, True, False, False]
    held.hold(stream, [torch.zeros(1000)])  # a call never waits for its own memory
    assert [event.passed for event in Event.made] == [True, True, True, True, False]
    assert sizes(held) == {7: [4000]}


def test_finished_memory_is_freed_without_a_call(held):
    stream = types.SimpleNamespace(device_index=0, cuda_stream=7)
    tensor = torch.zeros(3)
    reference = weakref.ref(tensor)
    held.hold(stream, [torch.zeros(25)], [tensor])
    del tensor
    time.sleep(0.2)
    assert reference() is not None
    assert held.sizes() == {0: 100}
    Event.made[0].passed = True
    deadline = time.monotonic() + 10
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reference() is None
    assert held.sizes() == {0: 0}


def test_read_tensors_are_returned_at_the_end(held):
    tensor = torch.zeros(3)
    held.hold(types.SimpleNamespace(device_index=0, cuda_stream=7), [torch.zeros(25)], [tensor])
    (reference,) = held.clear()
    assert reference() is tensor
    assert Event.made[0].passed


def test_capture_of_another_thread_continues(monkeypatch):
    """Only in a special mode may a thread query an event while another captures. The mode is set just for that."""
    modes = []

    def exchange(mode):
        modes.append(mode._obj.value)
        mode._obj.value = 0 if len(modes) == 1 else 2

    fake = types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
    with held_memory.relaxed_capture():
        assert modes == [2]
    assert modes == [2, 0]


def test_capture_is_refused_before_jax_runs(monkeypatch):
    monkeypatch.setattr(dlpack, "is_capturing", lambda device: True)
    called = []
    tensor = types.SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="a JAX function cannot be captured in a CUDA graph"):
        execute._through_jax(lambda *_: called.append(1), [True], [tensor], None)
    assert not called


def test_zeros_without_memory():
    """PyTorch's zero tensors have the address 0, which a program would read; a cached call must not take them."""
    zeros = torch._efficientzerotensor
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, 4)
    query = torch.randn(1, 5, 2, 8, requires_grad=True)
    for _ in range(3):
        assert not bridge.matmul(zeros((3, 8)), w).any()
        assert bridge.matmul(x.detach(), w).any()
        assert not torch.autograd.grad(bridge.matmul(x, w, activation="silu"), x, zeros((3, 4)))[0].any()
        assert not bridge.flash_attention(*[zeros((1, 5, 2, 8))] * 3).any()
        assert not torch.autograd.grad(bridge.flash_attention(*[query] * 3), query, zeros((1, 5, 2, 8)))[0].any()
