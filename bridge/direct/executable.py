"""Reads the launch chain of a JAX executable. The formats are private to XLA, as in compile.py and records.py.

A serialized executable is a header and an ExecutableAndOptionsProto, whose first field is a GpuExecutableProto. Both
protos are split into records (xla/util/split_proto). The GpuExecutableProto has the program's thunks, in the order in
which they run, and the memory allocations that the thunks use. The field numbers below are from jaxlib 0.11:
xla/service/gpu/gpu_executable.proto, xla/service/hlo.proto, xla/xla_data.proto, xla/backends/gpu/runtime/
thunk.proto and copy_thunk.proto, xla/backends/gpu/codegen/kernels/custom_kernel.proto,
xla/stream_executor/kernel_spec.proto, kernel_args_packing_spec.proto and launch_dim.proto.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jax_kernels.bridge.direct.chain import (
    Array,
    BufferSlice,
    Constant,
    Copy,
    Dims,
    Fill,
    Kernel,
    LaunchChain,
    MosaicKernel,
    NotDirectError,
    Step,
)
from jax_kernels.bridge.direct.mosaic_launch import launch_of
from jax_kernels.bridge.direct.records import Message, read_records, varint

__all__ = ["chain_of", "read_chain"]

_ALIGNMENT = 256  # bytes, of XLA's allocations
_THUNKS = {
    2: "sequential",
    3: "copy",
    8: "kernel",
    9: "cuBLAS matmul",
    13: "device-to-device copy",
    15: "cuDNN kernel",
    19: "memzero",
    22: "cuBLASLt matmul",
    28: "memset",
    30: "custom call",
    36: "custom kernel",
    57: "async start",
    58: "async done",
}


def chain_of(
    compiled: jax.stages.Compiled, inputs: Sequence[jax.ShapeDtypeStruct], outputs: Sequence[jax.ShapeDtypeStruct]
) -> LaunchChain:
    """The launch chain of a program that JAX compiled for a GPU. inputs, outputs: shape and dtype of each, in order.

    Raises NotDirectError, with the reason, if the program has other steps than kernels, fills and copies, or if the
    serialized executable is not in jaxlib 0.11's format.
    """
    try:
        data = compiled.runtime_executable().serialize()  # type: ignore[union-attr]
        return read_chain(data, inputs, outputs)
    except (ValueError, IndexError, AttributeError, TypeError, UnicodeDecodeError) as error:
        raise NotDirectError(f"JAX's executable is not in jaxlib 0.11's format: {error}") from error


def read_chain(
    data: bytes, inputs: Sequence[jax.ShapeDtypeStruct], outputs: Sequence[jax.ShapeDtypeStruct]
) -> LaunchChain:
    """The launch chain of an executable that JAX serialized.

    inputs, outputs: shape and dtype of each array, in order. Raises NotDirectError if the program has other steps than
    kernels, fills and copies, or memory that a chain cannot describe; ValueError and other errors if `data` is not in
    jaxlib 0.11's format.
    """
    header = varint(data, 0)
    outer = _joined(data[header.end + header.value :], "xla.ExecutableAndOptionsProto")
    executable = _joined(outer.data(1), "xla.gpu.GpuExecutableProto")
    buffers = _Buffers.of(executable, [_array(x) for x in inputs], [_array(x) for x in outputs])
    steps = tuple(itertools.chain.from_iterable(_steps(thunk, buffers) for thunk in executable.messages(13)))
    if not any(isinstance(step, Kernel | MosaicKernel) for step in steps):
        raise NotDirectError("the program has no kernel")
    # XLA allocates the address tables of tuples too, which no step reads.
    number = len(inputs) + len(outputs)
    uses_workspace = any(part.buffer == number for step in steps for part in _slices(step))
    return LaunchChain(
        inputs=buffers.inputs,
        outputs=buffers.outputs,
        workspace=buffers.workspace if uses_workspace else 0,
        constants=buffers.constants,
        steps=steps,
    )


def _slices(step: Step) -> tuple[BufferSlice, ...]:
    """The slices of the chain's buffers that a step reads or writes."""
    match step:
        case Kernel():
            return *step.arguments, *step.zeroed
        case MosaicKernel():
            return step.arguments
        case Fill():
            return (step.target,)
        case Copy():
            return step.source, step.target


def _joined(data: bytes, name: str) -> Message:
    """The protocol buffer that XLA split into the records in `data`. name: the name of its type.

    The first record is a manifest; each of its entries describes one of the other records. Raises ValueError if the
    message has another type.
    """
    first, *records = read_records(data)
    manifest = Message(first)
    if manifest.text(1) != name:
        raise ValueError(f"got a {manifest.text(1)}, want a {name}")
    merged, fields = b"", {}
    for record, entry in zip(records, manifest.messages(2), strict=True):
        if not entry.has(3):
            merged += record
            continue
        (part,) = entry.message(3).messages(1)  # a field of the message itself
        fields[part.integer(1)] = record
    return Message(merged).with_fields(fields)


def _array(x: jax.ShapeDtypeStruct) -> Array:
    """The Array of this shape and dtype. Raises NotDirectError if it has no elements."""
    dtype = np.dtype(x.dtype)
    size = int(np.prod(x.shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        raise NotDirectError("an array is empty")
    return Array(shape=tuple(x.shape), dtype=dtype.name, size=size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Buffers:
    """The buffers of a chain, which replace XLA's allocations: the blocks of memory that the program's steps use.

    inputs, outputs, workspace, constants: the fields of the LaunchChain. slices: the slice of a buffer that replaces
    each allocation, by the allocation's index.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    workspace: int
    constants: tuple[Constant, ...]
    slices: dict[int, BufferSlice]

    @classmethod
    def of(cls, executable: Message, inputs: list[Array], outputs: list[Array]) -> "_Buffers":
        """Reads the buffers of a GpuExecutableProto.

        Raises NotDirectError for memory that a chain cannot describe, such as an output that is also an input, and
        ValueError if the allocations do not fit the inputs, outputs and constants.
        """
        allocations = {x.integer(1): x for x in executable.message(10).messages(1)}
        slices: dict[int, BufferSlice] = {}
        for number, allocation in allocations.items():
            if allocation.integer(8):
                raise NotDirectError("memory that is not the GPU's own")
            if allocation.integer(5):
                position = allocation.integer(6)
                if allocation.has(10) or position >= len(inputs):
                    raise ValueError(f"got input {position}, want {len(inputs)} inputs")
                slices[number] = _whole(position, allocation, inputs[position])
        results = _outputs(executable, len(outputs))
        for position, number in enumerate(results):
            if number in slices:
                raise NotDirectError("an output is an input, or another output")
            slices[number] = _whole(len(inputs) + position, allocations[number], outputs[position])
        first = len(inputs) + len(outputs)
        constants = []
        literals = _Literals(executable)
        for constant in executable.messages(12):
            number, value, name = constant.integer(3), constant.message(2).data(1), constant.text(1)
            size = allocations[number].integer(2)
            value = value or literals.value(name.removeprefix("buffer_for_"))
            if len(value) != size:
                raise ValueError(f"constant {name}: got {len(value)} bytes, want {size}")
            constants.append(Constant(name=name, value=value))
            slices[number] = BufferSlice(buffer=first + len(constants), offset=0, size=size)
        workspace = 0
        for number, allocation in allocations.items():
            # Skipped: thread-local allocations (registers), and XLA's live-out table of the outputs' addresses.
            if number in slices or allocation.integer(3) or allocation.integer(7) or allocation.integer(12):
                continue
            size = allocation.integer(2)
            slices[number] = BufferSlice(buffer=first, offset=workspace, size=size)
            workspace += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            workspace=workspace,
            constants=tuple(constants),
            slices=slices,
        )

    def slice_of(self, piece: Message) -> BufferSlice:
        """The slice of a BufferAllocationSliceProto. Raises ValueError if its allocation does not contain it."""
        number, offset, size = piece.integer(3), piece.integer(1), piece.integer(2)
        whole = self.slices.get(number)
        if whole is None or offset + size > whole.size:
            raise ValueError(f"got {size} bytes at offset {offset} of allocation {number}, which does not contain them")
        return BufferSlice(buffer=whole.buffer, offset=whole.offset + offset, size=size)

    def shaped(self, piece: Message) -> BufferSlice:
        """The slice of a ShapedSliceProto. Raises ValueError if its allocation does not contain it."""
        return self.slice_of(piece.message(1))


# number of a PrimitiveType -> (field of a LiteralProto that holds its values, bits of a value)
_LITERALS = {
    1: (2, 8),  # bool
    2: (15, 8),  # signed
    3: (17, 16),
    4: (4, 32),
    5: (5, 64),
    6: (3, 8),  # unsigned
    7: (16, 16),
    8: (6, 32),
    9: (7, 64),
    10: (11, 16),  # floating-point
    11: (8, 32),
    12: (9, 64),
    16: (13, 16),
}
_NUMBERS = (4, 5, 8, 9)  # types whose values are varints; other types' values are bytes


class _Literals:
    """The values of the constants in a program's HLO module, in the executable.

    The executable also has a list of constants with their values, which is read first. It may have a name without the
    value: then `value` finds the value by the name.
    """

    def __init__(self, executable: Message) -> None:
        self._executable = executable

    def value(self, name: str) -> bytes:
        """The bytes of the constant of this name. Raises NotDirectError if there is none, or if it cannot be read."""
        found = self._instructions.get(name)
        if found is None:
            raise NotDirectError(f"the program has no constant {name}")
        shape, literal = found.data(3), found.message(8)
        kind = Message(shape).integer(2)
        if literal.data(1) != shape or kind not in _LITERALS:
            raise NotDirectError(f"constant {name} has a layout or a type that cannot be read")
        field, bits = _LITERALS[kind]
        if kind not in _NUMBERS:
            return literal.data(field)
        return b"".join((x % 2**bits).to_bytes(bits // 8, "little") for x in literal.integers(field))

    @functools.cached_property
    def _instructions(self) -> dict[str, Message]:
        """The HLO instructions of the constants whose names are unique, by name, with "_" for special characters."""
        computations = self._executable.message(1).message(1).messages(3)
        constants = [x for each in computations for x in each.messages(2) if x.data(2) == b"constant"]
        names = [re.sub(r"\W", "_", x.text(1)) for x in constants]
        return {name: x for name, x in zip(names, constants, strict=True) if names.count(name) == 1}


def _whole(buffer: int, allocation: Message, array: Array) -> BufferSlice:
    """All of a buffer, which replaces an allocation. Raises ValueError if the array's size is not the allocation's."""
    size = allocation.integer(2)
    if size != array.size:
        raise ValueError(f"got an allocation of {size} bytes for an array of {array.size}")
    return BufferSlice(buffer=buffer, offset=0, size=size)


def _outputs(executable: Message, count: int) -> list[int]:
    """The index of each output's allocation, in order. count: the number of outputs.

    Raises NotDirectError if an output is also an input, and ValueError for another number of outputs.
    """
    found: dict[int, int] = {}
    entries = executable.messages(11)
    for entry in entries:
        index, info = entry.message(1).integers(1), entry.message(2)
        if info.integer(2) or info.has(3):
            raise NotDirectError("an output is an input")
        if len(entries) == 1 and not index:  # a single output that is no tuple
            index = [0]
        if len(index) == 1:
            (position,) = index
            found[position] = info.integer(1)
    if sorted(found) != list(range(count)):
        raise ValueError(f"got outputs {sorted(found)}, want {count}")
    return [found[position] for position in range(count)]


def _steps(thunk: Message, buffers: _Buffers) -> Iterator[Step]:
    """Yields the steps of one of XLA's thunks, also of the thunks inside it.

    Raises NotDirectError for a thunk that is no kernel, fill or copy, and ValueError for an unknown format.
    """
    kinds = [number for number in thunk.numbers() if number != 1]
    if len(kinds) != 1:
        raise ValueError(f"got a thunk of kinds {kinds}")
    (kind,) = kinds
    own = thunk.message(kind)
    match _THUNKS.get(kind):
        case "sequential":
            for inner in own.messages(1):
                yield from _steps(inner, buffers)
        case "async start":  # one stream keeps the order
            for inner in own.message(3).messages(1):
                yield from _steps(inner, buffers)
        case "async done":
            pass
        case "custom kernel":
            yield _kernel(own, buffers)
        case "custom call":
            yield _mosaic(own, buffers)
        case "memzero":
            yield Fill(target=buffers.shaped(own.message(1)), value=0)
        case "memset":
            target = buffers.slice_of(own.message(1))
            if target.size % 4:
                raise ValueError(f"got a memset of {target.size} bytes, want a multiple of 4")
            yield Fill(target=target, value=own.integer(2))
        case "device-to-device copy":
            yield _copy(own.message(1), buffers)
        case "copy":
            yield _copy(own, buffers)
        case name:
            label = thunk.message(1).text(1)
            raise NotDirectError(f"the program has a {name or f'thunk of kind {kind}'}, {label}")


def _copy(own: Message, buffers: _Buffers) -> Copy:
    """The step of a CopyThunkProto. Raises ValueError if it copies more bytes than its source or target has."""
    source, target, size = buffers.shaped(own.message(1)), buffers.shaped(own.message(2)), own.integer(3)
    if not 0 < size <= min(source.size, target.size):
        raise ValueError(f"got a copy of {size} bytes, from {source.size} to {target.size}")
    return Copy(source=dataclasses.replace(source, size=size), target=dataclasses.replace(target, size=size))


def _dims(message: Message, number: int) -> Dims:
    """The sizes along x, y and z in a field of the message. number: the field's number. An absent size is 1."""
    coordinates = message.message(number)
    x, y, z = (coordinates.integer(axis, 1) for axis in (1, 2, 3))
    return Dims(x=x, y=y, z=z)


def _kernel(own: Message, buffers: _Buffers) -> Kernel:
    """The step of a CustomKernelThunkProto.

    Raises NotDirectError if the kernel is no cubin, or has arguments other than addresses of buffers.
    """
    kernel = own.message(3)
    spec, name = kernel.message(2), kernel.message(2).text(4)
    if own.data(6):
        raise NotDirectError(f"kernel {name} has descriptors of the tensor memory accelerator")
    cubin = spec.message(2).data(1)
    if not cubin.startswith(b"\x7fELF"):
        raise NotDirectError(f"kernel {name} is no cubin")
    given = [buffers.shaped(x) for x in own.messages(1)]
    arguments = tuple(given[index] for index in _packing(spec, len(given)))
    if len(arguments) != spec.integer(3):
        raise ValueError(f"kernel {name}: got {len(arguments)} arguments, want {spec.integer(3)}")
    block = _dims(kernel.message(4), 1)
    if not 0 < block.x * block.y * block.z <= 1024:
        raise ValueError(f"kernel {name}: got {block} threads")
    return Kernel(
        name=name,
        cubin=cubin,
        grid=_dims(kernel.message(3), 2),
        block=block,
        cluster=_dims(kernel.message(5), 3),
        shared_memory=kernel.integer(6),
        arguments=arguments,
        zeroed=tuple(given[index] for index in own.integers(5)),
    )


def _packing(spec: Message, count: int) -> list[int]:
    """For each kernel argument, the index of the thunk's buffer whose address it is.

    spec: a KernelLoaderSpecProto. count: the thunk's number of buffers. Raises NotDirectError for an argument that is
    no address.
    """
    if not spec.has(5):
        return list(range(count))
    found = []
    for argument in spec.message(5).messages(1):
        (relocation,) = argument.messages(1)
        if relocation.integer(1) != 1 or any(argument.data(2)):
            raise NotDirectError("a kernel has an argument that is no address")
        found.append(relocation.integer(2))
    return found


_MOSAIC = "mosaic_gpu_v2"


def _mosaic(own: Message, buffers: _Buffers) -> MosaicKernel:
    """The step of a CustomCallThunkProto. Raises NotDirectError unless it is a Mosaic kernel on one device."""
    target = own.text(1)
    if target != _MOSAIC:
        raise NotDirectError(f"the program calls {target}")
    attributes = {entry.text(1): entry.message(2) for entry in own.message(6).messages(1)}
    flags = ("use_custom_barrier", "uses_xla_collective_metadata")
    if "xla_replica_ids" in attributes or any(attributes[flag].message(1).integer(1) for flag in flags):
        raise NotDirectError("a Mosaic kernel runs on several devices")
    module = attributes["module"].data(3)
    if not module.startswith(b"ML\xefR"):
        raise ValueError("a Mosaic kernel has no MLIR bytecode")
    pieces = [*own.messages(2), *own.messages(3)]
    arguments = tuple(buffers.shaped(piece.message(1)) for piece in pieces)
    state = own.message(8).data(2)
    return MosaicKernel(
        name=Message(state).text(9), module=module, arguments=arguments, launch=launch_of(state, arguments)
    )
