"""A launch chain: the kernels, fills and copies of a program on a GPU, in order, with their buffers.

A chain's buffers are numbered: first the inputs, then the outputs, then the workspace (scratch memory in the GPU's
device memory, also counted if its size is 0), then the constants.
"""

import dataclasses

__all__ = [
    "Array",
    "BufferSlice",
    "Bytes",
    "Constant",
    "Copy",
    "Dims",
    "Fill",
    "Kernel",
    "Launch",
    "LaunchChain",
    "MosaicKernel",
    "MosaicLaunch",
    "NotDirectError",
    "Parameter",
    "Step",
    "TensorMap",
    "TensorMaps",
]


class NotDirectError(Exception):
    """Raised for a program without a launch chain. The text is the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferSlice:
    """A slice of one of a chain's buffers.

    buffer: the buffer's number: inputs, outputs, the workspace and constants are counted in this order. offset: bytes
    from the buffer's start. size: bytes in the slice.
    """

    buffer: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes along three axes: CTAs in a grid, threads in a CTA, or CTAs in a cluster."""

    x: int = 1
    y: int = 1
    z: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The launch of a compiled kernel, without its parameters.

    cubin: the compiled module, which has the kernel under `name`. grid: CTAs. block: threads in a CTA. cluster: CTAs in
    a cluster. shared_memory: bytes of dynamic shared memory for each CTA.
    """

    name: str
    cubin: bytes = dataclasses.field(repr=False)
    grid: Dims
    block: Dims
    cluster: Dims
    shared_memory: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel(Launch):
    """A step that launches a compiled kernel, whose arguments are all addresses of device memory.

    arguments: the ranges whose addresses are the kernel's arguments, in order. zeroed: slices that are filled with
    zeros before the kernel runs.
    """

    arguments: tuple[BufferSlice, ...]
    zeroed: tuple[BufferSlice, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A descriptor of the tensor memory accelerator, for an array in device memory.

    source: the array's memory. dtype, swizzle: numbers of CUtensorMapDataType and CUtensorMapSwizzle in cuda.h. sizes,
    box: elements along each axis of the array and of a copied tile, the contiguous axis first. strides: bytes between
    entries of each axis but the first.
    """

    source: BufferSlice
    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMaps:
    """A parameter of tensor maps, one behind the other, of 128 bytes each."""

    maps: tuple[TensorMap, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """A parameter with the same bytes in every launch."""

    value: bytes


type Parameter = BufferSlice | TensorMaps | Bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicLaunch(Launch):
    """The launch of a compiled Mosaic kernel.

    parameters: in order. A BufferSlice is an address of 8 bytes.
    """

    parameters: tuple[Parameter, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicKernel:
    """A step that launches a Mosaic kernel.

    module: MLIR bytecode, which Mosaic compiles to a function that launches the kernel. arguments: the slices of device
    memory that the kernel reads, then the slices that it writes. launch: of the kernel as XLA compiled it; None if it
    is not known, and Mosaic has to compile the module.
    """

    name: str
    module: bytes = dataclasses.field(repr=False)
    arguments: tuple[BufferSlice, ...]
    launch: MosaicLaunch | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fill:
    """A step that fills device memory with copies of a 32-bit value. value: 0 if the size is no multiple of 4 bytes."""

    target: BufferSlice
    value: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """A step that copies device memory. source and target have the same size."""

    source: BufferSlice
    target: BufferSlice


type Step = Kernel | MosaicKernel | Fill | Copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """The shape of a chain's input or output, the name of its dtype, such as "bfloat16", and its size in bytes."""

    shape: tuple[int, ...]
    dtype: str
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """An array that is a constant of the program. value: its bytes, which a launch reads from device memory."""

    name: str
    value: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchChain:
    """A program as steps on device memory, which run one after the other on one stream.

    inputs, outputs: the arrays that a launch takes and returns. workspace: bytes of scratch memory that a launch needs.
    constants: the arrays that the steps read in addition to the inputs.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    workspace: int
    constants: tuple[Constant, ...]
    steps: tuple[Step, ...]

    @property
    def has_mosaic(self) -> bool:
        return any(isinstance(step, MosaicKernel) for step in self.steps)
