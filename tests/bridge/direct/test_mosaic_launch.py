"""The launch of a Mosaic kernel, noted from the host function in XLA's executable."""

import ctypes
import dataclasses
import platform

import pytest

from jax_kernels.bridge.direct import executable, mosaic_launch
from jax_kernels.bridge.direct.chain import BufferSlice, Bytes, Dims, MosaicKernel, TensorMaps
from jax_kernels.bridge.direct.records import Message
from tests.tools import compile_chains

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the launch is noted on x86-64 alone"),
]


@pytest.fixture(scope="module")
def kernel():
    """(state, arguments, step) of the matmul [4096, 1024] @ [1024, 2048] for an H200, in bf16."""
    found = []
    own = executable.launch_of
    executable.launch_of = lambda *given: found.append(given) or own(*given)
    try:
        chain = compile_chains.chain_for("h200", "matmul")
    finally:
        executable.launch_of = own
    ((state, arguments),) = found
    (step,) = chain.steps
    return state, arguments, step


def test_a_launch_has_the_kernel_and_its_tensor_maps(kernel, monkeypatch):
    """x, w and out are read and written in tiles, by maps of their sizes and strides."""
    state, _, step = kernel
    launch = step.launch
    assert isinstance(step, MosaicKernel)
    assert launch.name == step.name
    assert launch.cubin.startswith(b"\x7fELF")
    assert launch.cluster == Dims(x=2)
    assert launch.block.x % 128 == 0
    assert launch.shared_memory == Message(state).integer(10) > 100_000
    (parameter,) = launch.parameters
    assert isinstance(parameter, TensorMaps)
    assert {x.source.buffer for x in parameter.maps} == {0, 1, 2}
    for found in parameter.maps:
        rows, columns = ((4096, 1024), (1024, 2048), (4096, 2048))[found.source.buffer]
        assert found.source == BufferSlice(buffer=found.source.buffer, offset=0, size=2 * rows * columns)
        assert (found.dtype, found.swizzle) == (9, 3)  # bfloat16, 128 bytes
        assert 2 * columns in found.strides
        assert found.box[0] * 2 == 128


def test_slices_of_buffers_keep_their_offsets(kernel):
    """Arguments at other offsets of other buffers give the same launch there."""
    state, arguments, step = kernel
    moved = [dataclasses.replace(x, buffer=x.buffer + 5, offset=x.offset + 512) for x in arguments]
    found = mosaic_launch.launch_of(state, moved)
    move = lambda x: dataclasses.replace(
        x, source=dataclasses.replace(x.source, buffer=x.source.buffer + 5, offset=512)
    )
    (parameter,) = step.launch.parameters
    assert found.parameters == (TensorMaps(maps=tuple(map(move, parameter.maps))),)


def proto(fields):
    """A protocol buffer with these fields by number."""

    def varint(x):
        out = b""
        while x > 127:
            out, x = out + bytes([x & 127 | 128]), x >> 7
        return out + bytes([x])

    return b"".join(
        varint(number << 3 | 2) + varint(len(x)) + x if isinstance(x, bytes) else varint(number << 3) + varint(x)
        for number, x in fields.items()
    )


CHANGES = {
    "another version": lambda f: f | {1: 4},
    "NVSHMEM": lambda f: f | {3: 1},
    "multicast": lambda f: f | {7: 1},
    "a large cluster": lambda f: f | {11: 16},
    "another cluster": lambda f: f | {11: 4},
    "other shared memory": lambda f: f | {10: f[10] + 16},
    "another function": lambda f: f | {5: b"_mlir_ciface_other"},
    "another kernel": lambda f: f | {9: b"other"},
    "a cut file": lambda f: f | {2: f[2][:200]},
    "no file": lambda f: f | {2: b"text"},
    "another machine": lambda f: f | {2: f[2][:18] + b"\xb7" + f[2][19:]},
    "an unknown function": lambda f: f | {2: f[2].replace(b"mosaic_gpu_launch_kernel", b"mosaic_gpu_launch_others")},
    "another runtime": lambda f: f | {2: swapped(f[2])},
}


def swapped(data):
    """The ELF file with the names of the runtime's two functions exchanged, whose lengths are equal."""
    first, second = b"mosaic_gpu_init_tma_desc", b"mosaic_gpu_launch_kernel"
    return data.replace(first, b"?" * 24).replace(second, first).replace(b"?" * 24, second)


def test_an_unknown_form_has_no_launch(kernel):
    """Then Mosaic compiles the kernel, as before."""
    state, arguments, step = kernel
    message = Message(state)
    fields = {n: message.data(n) if n in (2, 4, 5, 8, 9) else message.integer(n) for n in message.numbers()}
    assert mosaic_launch.launch_of(proto(fields), arguments) == step.launch
    found = {name: mosaic_launch.launch_of(proto(change(fields)), arguments) for name, change in CHANGES.items()}
    assert found == dict.fromkeys(CHANGES)
    assert mosaic_launch.launch_of(state, arguments[:-1]) is None  # a map of an unknown buffer


def test_relocations_of_other_types_are_refused(kernel):
    """The host code is not called with an address that is not understood."""
    state, _, _ = kernel
    elf = mosaic_launch._Elf(Message(state).data(2))
    (section,) = (x for x in elf.sections if x.type == 4 and elf.text(elf._names, x.name) == ".rela.ltext")
    data = bytearray(elf.data)
    data[section.offset + 8] = 2
    with pytest.raises(mosaic_launch._UnknownLaunchError, match="relocation of type 2"):
        mosaic_launch._HostCode.load(bytes(data), Message(state).text(5))


def test_a_system_without_executable_memory_has_no_launch(kernel, monkeypatch):
    state, arguments, _ = kernel

    def refuse(*given):
        raise OSError(13, "mprotect")

    monkeypatch.setattr(mosaic_launch._HostCode, "_protect", refuse)
    assert mosaic_launch.launch_of(state, arguments) is None


def test_a_described_launch_is_noted():
    """jaxlib 0.12's host function describes the launch; a size of 0 is a device address."""
    slices = [BufferSlice(buffer=3, offset=256, size=64), BufferSlice(buffer=0, offset=0, size=1 << 20)]
    first, step = 0x1000_0000_0000, mosaic_launch._STRIDE
    values = [ctypes.c_uint64(first + step + 16), ctypes.c_uint32(7)]
    pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))

    def noted(sizes, description=mosaic_launch._FUNCTION, shared_memory=512):
        notes = mosaic_launch._Notes(slices, first, 512, [8, 4])
        call = mosaic_launch._DESCRIBE(notes.guarded(notes.describe))
        numbers = 9, 8, 7, 2, 1, 1, 128, 1, 1, shared_memory, 0, 2
        call(description, *numbers, pointers, (ctypes.c_int32 * 2)(*sizes))
        return notes

    launched = noted((0, 4)).launched
    assert (launched.grid, launched.cluster, launched.block) == (Dims(x=9, y=8, z=7), Dims(x=2), Dims(x=128))
    assert launched.parameters == (
        BufferSlice(buffer=0, offset=16, size=(1 << 20) - 16),
        Bytes(value=b"\7\0\0\0"),
    )
    for wrong in (noted((0, 8)), noted((0, 4), description=5), noted((0, 4), shared_memory=500)):
        assert wrong.launched is None
        assert wrong.problem.startswith("ValueError: got ")
