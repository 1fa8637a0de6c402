"""A launch chain: the kernels, fills and copies that a program comes to on a GPU, in order, with their buffers."""

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
    """A program that has no launch chain, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """An address: so many bytes into a buffer of the chain, by its index there. size: the bytes that are used."""

    buffer: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dims:
    """Three counts of CTAs or threads."""

    x: int = 1
    y: int = 1
    z: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel whose arguments are addresses alone. shared_memory: the bytes of its dynamic part.

    zeroed: places that are filled with zeros before it runs.
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
    """A kernel of Mosaic's, which compiles `module` to a function that launches it."""

    name: str
    module: bytes = dataclasses.field(repr=False)
    arguments: tuple[Place, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fill:
    """Fills a place with a 32-bit value; a place whose size is no multiple of 4 bytes, with zeros alone."""

    target: Place
    value: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy:
    """Copies a place to another one of the same size."""

    source: Place
    target: Place


type Step = Kernel | MosaicKernel | Fill | Copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """The shape of an array of the chain's, and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of the program's."""

    name: str
    value: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchChain:
    """The steps of a program. Its buffers, in this order: inputs, outputs, the workspace, constants.

    workspace: its bytes.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    workspace: int
    constants: tuple[Constant, ...]
    steps: tuple[Step, ...]

    @property
    def has_mosaic(self) -> bool:
        return any(isinstance(step, MosaicKernel) for step in self.steps)
