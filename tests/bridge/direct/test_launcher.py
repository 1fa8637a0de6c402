"""Launches of a chain, with a driver that records them."""

import ctypes
import dataclasses
import gc
import threading
from types import SimpleNamespace

import pytest
import torch

from jax_kernels.bridge.direct import executable, launcher, loaded_kernels
from jax_kernels.bridge.direct.chain import (
    Array,
    BufferSlice,
    Bytes,
    Constant,
    Copy,
    Dims,
    Fill,
    Kernel,
    LaunchChain,
    MosaicKernel,
    MosaicLaunch,
    TensorMap,
    TensorMaps,
)
from jax_kernels.bridge.interop.cuda_driver import DriverError
from tests.support.fakes.cuda import CONTEXT, STREAM, FakeCuda, FakeMosaic, Launch, Memory

GPU, GPU1 = torch.device("cuda", 0), torch.device("cuda", 1)
X = Array(shape=(4, 6), dtype="float32", size=96)
# Indices of the buffers: two inputs, two outputs, the workspace, a constant.
IN, IN1, OUT, OUT1, WORK, CONSTANT = range(6)


def part(buffer, offset=0, size=96):
    return BufferSlice(buffer=buffer, offset=offset, size=size)


FIRST = Kernel(
    name="first",
    cubin=b"first's",
    grid=Dims(x=7, y=5, z=3),
    block=Dims(x=128, y=2),
    cluster=Dims(x=2),
    shared_memory=100_000,
    arguments=(part(IN), part(WORK, 256), part(CONSTANT, size=4)),
    zeroed=(part(WORK, 512, 7),),
)
SECOND = Kernel(
    name="second",
    cubin=b"second's",
    grid=Dims(),
    block=Dims(x=32),
    cluster=Dims(),
    shared_memory=0,
    arguments=(part(WORK, 256), part(OUT1)),
)
MOSAIC = MosaicKernel(name="mosaic", module=b"ML", arguments=(part(IN1), part(WORK, 256), part(OUT)))
MAP = TensorMap(source=part(IN1), dtype=7, sizes=(6, 4), strides=(24,), box=(6, 2), swizzle=0)
SECOND_MAP = dataclasses.replace(MAP, source=part(WORK, 256), swizzle=3)
LAUNCHED = dataclasses.replace(
    MOSAIC,
    launch=MosaicLaunch(
        name="launched",
        cubin=b"launched's",
        grid=Dims(x=9),
        block=Dims(x=384),
        cluster=Dims(x=2),
        shared_memory=200_000,
        parameters=(Bytes(value=b"\7\0\0\0"), part(OUT), TensorMaps(maps=(MAP, SECOND_MAP)), TensorMaps(maps=(MAP,))),
    ),
)
STEPS = (
    FIRST,
    Fill(target=part(WORK, 1024, 12), value=5),
    MOSAIC,
    Copy(source=part(CONSTANT, size=4), target=part(OUT1, 8, 4)),
    SECOND,
)


def chain_of(*steps):
    return LaunchChain(
        inputs=(X, X),
        outputs=(X, X),
        workspace=2048,
        constants=(Constant(name="c", value=b"\1\2\3\4"),),
        steps=steps,
    )


class Bench:
    """A loaded chain, and the objects that loaded it."""

    def __init__(self, *steps, device=GPU):
        self.cuda = FakeCuda({"first": 3, "second": 2, "launched": [4, 8, 256, 128]})
        self.mosaic = FakeMosaic(3)
        self.memory = Memory()
        self.inputs = [torch.rand(4, 6) for _ in range(2)]
        self.chain = chain_of(*(steps or STEPS))
        self.device = device

    def load(self):
        return launcher.LoadedChain(
            self.chain,
            self.device,
            cuda=self.cuda.driver,
            mosaic=lambda: self.mosaic,
            allocator=self.memory.allocator,
        )

    def addresses(self):
        """The buffers' addresses in the last call, without the constant's, which only the launch has."""
        outputs = self.memory.tensors[-3:-1]
        return [x.data_ptr() for x in (*self.inputs, *outputs, self.memory.tensors[-1])]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Constants stay on the CPU, as there is no GPU."""
    own = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, *a: x if device in (GPU, GPU1) else own(x, device, *a))
    yield
    loaded_kernels._DROPPED.clear()


def test_steps_get_addresses_on_the_current_stream():
    bench = Bench()
    loaded = bench.load()
    constant = loaded._constants[0]
    assert bench.cuda.calls == [
        ("load", (0x100, b"first's", CONTEXT)),
        ("attribute", ("first", 8, 100_000)),
        ("load", (0x102, b"second's", CONTEXT)),
    ]
    assert bench.mosaic.modules == [b"ML"]
    for stream in (STREAM, STREAM, 0, 9):
        bench.memory.stream = stream
        bench.cuda.calls.clear()
        bench.mosaic.calls.clear()
        outputs = loaded(*bench.inputs)
        x, y, out, out1, work = bench.addresses()
        assert [o.data_ptr() for o in outputs] == [out, out1]
        assert [(o.shape, o.dtype) for o in outputs] == [((4, 6), torch.float32)] * 2
        first = Launch("first", (7, 5, 3), (128, 2, 1), (2, 1, 1), 100_000, stream, [x, work + 256, constant])
        second = Launch("second", (1, 1, 1), (32, 1, 1), None, 0, stream, [work + 256, out1])
        assert bench.cuda.calls == [
            ("fill bytes", (work + 512, 0, 7, stream)),
            ("launch", first),
            ("fill", (work + 1024, 5, 3, stream)),
            ("copy", (out1 + 8, constant, 4, stream)),
            ("launch", second),
        ]
        assert bench.mosaic.calls == [("launch", (0xF00, stream, [y, work + 256, out]))]


def test_a_known_launch_needs_no_mosaic():
    """The tensor maps of each launch have the addresses of its buffers, and otherwise the bytes of the driver."""
    bench = Bench(FIRST, LAUNCHED, SECOND)
    loaded = bench.load()
    values = 7, [6, 4], [24], [6, 2], [1, 1], 0, 0, 0, 0
    assert bench.cuda.maps[:2] == [values] * 2
    assert bench.cuda.maps[2][:7] == (*values[:6], 3)
    assert ("attribute", ("launched", 8, 200_000)) in bench.cuda.calls
    tails = [ready.tails for ready in loaded.ready][1]
    for _ in range(3):
        bench.inputs = [torch.rand(4, 6) for _ in range(2)]
        bench.cuda.calls.clear()
        loaded(*bench.inputs)
        x, y, out, out1, work = bench.addresses()
        sources = zip((y, work + 256, y), tails, strict=True)
        first, second, third = (address.to_bytes(8, "little") + tail for address, tail in sources)
        launch = Launch(
            *("launched", (9, 1, 1), (384, 1, 1), (2, 1, 1), 200_000, STREAM),
            [b"\7\0\0\0", out, first + second, third],
        )
        assert bench.cuda.calls[2] == ("launch", launch)
        assert bench.cuda.calls[1][1].arguments == [x, work + 256, loaded._constants[0]]
        assert bench.cuda.calls[3][1].arguments == [work + 256, out1]
    assert not bench.mosaic.modules


@pytest.mark.parametrize("trouble", ["a driver with other maps", "a kernel with other parameters", "no encoder"])
def test_mosaic_compiles_if_a_launch_cannot_be_used(trouble):
    bench = Bench(LAUNCHED)
    if trouble == "a driver with other maps":
        own = bench.cuda._cuTensorMapEncodeTiled
        bench.cuda.cuTensorMapEncodeTiled._call = lambda target, dtype, rank, address, *others: own(
            target, dtype, rank, address >> 1, *others
        )
    elif trouble == "no encoder":
        bench.cuda.fails = {"cuTensorMapEncodeTiled"}
    else:
        bench.cuda.counts["launched"] = [4, 8, 128, 128]
    loaded = bench.load()
    assert bench.mosaic.modules == [b"ML"]
    loaded(*bench.inputs)
    _, y, out, _, work = bench.addresses()
    assert bench.mosaic.calls == [("launch", (0xF00, STREAM, [y, work + 256, out]))]


def test_newer_mosaic_gets_the_kernel_and_the_device(monkeypatch):
    bench, seen = Bench(MOSAIC, device=GPU1), []
    launch = loaded_kernels._MOSAIC_LAUNCH_OF_KERNEL(lambda *given: seen.append(given))
    compiled = (ctypes.c_void_p * 3)(0xF00, ctypes.cast(launch, ctypes.c_void_p).value, 0xF0F)
    monkeypatch.setattr(bench.mosaic, "MosaicGpuCompile", lambda module, size: compiled)
    monkeypatch.setattr(loaded_kernels, "_TAKES_KERNEL", True)
    loaded = bench.load()
    loaded(*bench.inputs)
    ((kernel, function, stream, _, index),) = seen
    assert (kernel, function, stream, index) == (0xF0F, 0xF00, STREAM, 1)


@pytest.mark.parametrize("current", [None, 0x77])
def test_device_context_is_set_and_restored(current):
    bench = Bench()
    loaded = bench.load()
    bench.cuda.stack = [] if current is None else [current]
    seen = []
    own = bench.cuda._cuLaunchKernelEx
    bench.cuda.cuLaunchKernelEx._call = lambda *given: seen.append(bench.cuda.stack[-1]) or own(*given)
    loaded(*bench.inputs)
    assert seen == [CONTEXT, CONTEXT]
    assert bench.cuda.stack == ([] if current is None else [current])


def test_second_device_has_its_own_context():
    bench = Bench(SECOND, device=GPU1)
    bench.load()
    assert {context for name, (_, _, context) in bench.cuda.calls if name == "load"} == {CONTEXT + 1}
    assert bench.cuda.stack == [CONTEXT]


def test_launch_sets_the_current_device():
    bench = Bench(SECOND, device=GPU1)
    devices = []
    own = bench.memory.empty
    bench.memory.empty = lambda *facts: devices.append(bench.memory.device) or own(*facts)
    loaded = bench.load()
    bench.cuda.calls.clear()
    loaded(*bench.inputs)
    assert set(devices) == {1}
    assert bench.memory.device == 0
    assert bench.cuda.stack == [CONTEXT]  # of device 0, the earlier current device
    assert [name for name, _ in bench.cuda.calls] == ["launch"]


def test_unaligned_input_is_copied():
    bench = Bench(MOSAIC)
    bench.inputs[1] = torch.rand(25)[1:].view(4, 6)
    assert bench.inputs[1].data_ptr() % 16
    loaded = bench.load()
    loaded(*bench.inputs)
    ((_, (_, _, (address, _, _))),) = bench.mosaic.calls
    assert address % 16 == 0
    assert address != bench.inputs[1].data_ptr()


def test_modules_unload_with_their_chain():
    bench = Bench()
    loaded = bench.load()
    loaded(*bench.inputs)
    bench.cuda.calls.clear()
    loaded_kernels.unload_dropped()
    assert not bench.cuda.calls
    del loaded
    gc.collect()
    loaded_kernels.unload_dropped()
    assert bench.cuda.calls == [("synchronize", CONTEXT), ("unload", 0x102), ("unload", 0x100)]
    assert bench.mosaic.calls[-1] == ("unload", 0xF00)
    assert bench.cuda.stack == [CONTEXT]
    loaded_kernels.unload_dropped()
    assert len(bench.cuda.calls) == 3


def test_captured_chain_stays_loaded():
    bench = Bench()
    loaded = bench.load()
    bench.memory.is_capturing = True
    loaded(*bench.inputs)
    bench.memory.is_capturing = False
    loaded(*bench.inputs)
    bench.cuda.calls.clear()
    del loaded
    gc.collect()
    loaded_kernels.unload_dropped()
    assert not bench.cuda.calls


def test_kernel_with_wrong_arguments_is_unloaded():
    for count in (1, 3):
        bench = Bench(SECOND)
        bench.cuda.counts["second"] = count
        with pytest.raises(DriverError):
            bench.load()
        loaded_kernels.unload_dropped()
        assert [name for name, _ in bench.cuda.calls] == ["load", "synchronize", "unload"]
        assert bench.cuda.stack == [CONTEXT]


def test_driver_error_is_named_and_recoverable():
    """A driver error is raised by its name, and later launches work."""
    bench = Bench()
    loaded = bench.load()
    bench.cuda.fails = {"cuLaunchKernelEx"}
    with pytest.raises(DriverError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        loaded(*bench.inputs)
    bench.cuda.fails = set()
    loaded(*bench.inputs)
    assert len(loaded._blocks) == 1


def test_threads_do_not_share_a_launch_block():
    """Each launch waits in the driver until all threads have entered it."""
    bench = Bench(SECOND)
    loaded = bench.load()
    barrier = threading.Barrier(4, timeout=20)
    own = bench.cuda._cuLaunchKernelEx

    def together(*given):
        barrier.wait()
        own(*given)
        barrier.wait()

    bench.cuda.cuLaunchKernelEx._call = together
    found = []
    threads = [threading.Thread(target=lambda: found.append(loaded(*bench.inputs))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launched = {call.arguments[1] for name, call in bench.cuda.calls if name == "launch"}
    assert launched == {outputs[1].data_ptr() for outputs in found}
    assert len(launched) == len(loaded._blocks) == 4


@pytest.mark.parametrize(("kind", "size", "value"), [("memzero", 12, 0), ("memzero", 3, 0), ("memset", 12, 7)])
def test_fill_has_the_program_value(kind, size, value):
    target = BufferSlice(buffer=0, offset=4, size=size)
    (number,) = [number for number, name in executable._THUNKS.items() if name == kind]
    own = SimpleNamespace(message=lambda _: None, integer=lambda field: {2: 7}[field])
    thunk = SimpleNamespace(numbers=lambda: [1, number], message=lambda _: own)
    buffers = SimpleNamespace(shaped=lambda _: target, slice_of=lambda _: target)
    assert list(executable._steps(thunk, buffers)) == [Fill(target=target, value=value)]


def test_word_fill_needs_whole_words():
    target = BufferSlice(buffer=0, offset=0, size=6)
    (number,) = [number for number, name in executable._THUNKS.items() if name == "memset"]
    own = SimpleNamespace(message=lambda _: None, integer=lambda _: 7)
    thunk = SimpleNamespace(numbers=lambda: [number], message=lambda _: own)
    with pytest.raises(ValueError, match="got a memset of 6 bytes, want a multiple of 4"):
        list(executable._steps(thunk, SimpleNamespace(slice_of=lambda _: target)))
