"""A launch chain: the kernels, fills and copies of a program on a GPU, in order, with their buffers."""

import dataclasses

__all__ = [
    "Array",
    "Constant",
    "Copy",
    "Dims",
    "Fill",
    "Kernel",
    "LaunchChain",
    "MosaicKernel",
    "NotDirectError",
    "Place",
    "Step",
]


class NotDirectError(Exception):
    """Raised for a program without a launch chain. The text is the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """An address. buffer: the buffer's index in the chain. offset: bytes from its start. size: bytes that are used."""

    buffer: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dims:
    """Numbers of CTAs or threads along three axes."""

    x: int = 1
    y: int = 1
    z: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel whose arguments are all addresses. shared_memory: bytes of dynamic shared memory.

    zeroed: addresses that are filled with zeros before the kernel runs.
    """

    name: str
    cubin: bytes = dataclasses.field(repr=False)
    grid: Dims
    block: Dims
    cluster: Dims
    shared_memory: int
    arguments: tuple[Place, ...]
    zeroed: tuple[Place, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MosaicKernel:
    """A Mosaic kernel. Mosaic compiles `module` to a function that launches the kernel."""

    name: str
    module: bytes = dataclasses.field(repr=False)
    arguments: tuple[Place, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fill:
    """Fills memory with a 32-bit value. If the size is no multiple of 4 bytes, the value must be 0."""

    target: Place
    value: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """Copies memory. source and target have the same size."""

    source: Place
    target: Place


type Step = Kernel | MosaicKernel | Fill | Copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """The shape of an input or output of a chain, the name of its dtype, and its size in bytes."""

    shape: tuple[int, ...]
    dtype: str
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of the program."""

    name: str
    value: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchChain:
    """The steps of a program. Its buffers, in this order: inputs, outputs, the workspace, constants.

    workspace: its size in bytes.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    workspace: int
    constants: tuple[Constant, ...]
    steps: tuple[Step, ...]

    @property
    def has_mosaic(self) -> bool:
        return any(isinstance(step, MosaicKernel) for step in self.steps)
