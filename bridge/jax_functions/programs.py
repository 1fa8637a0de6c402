"""The programs of from_jax, and the tables that keep them.

A request is a call without its values. A program is a request with the compiled functions that serve it. PyTorch's
operators take a program's name. The tables keep at most _MOST programs and _MOST recipes; a recipe makes a dropped
program again. A dropped program is still found while another object holds it, such as a call whose backward has not
run. If a program's name went into a graph, its recipe is kept until the process ends.
"""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.interop.donated_outputs import JaxFunction
from jax_kernels.bridge.interop.keyed_cache import unique_name
from jax_kernels.bridge.jax_functions.mask_operands import MaskSignature
from jax_kernels.bridge.jax_functions.pytree import Structure

__all__ = [
    "FUNCTIONS",
    "PROGRAMS",
    "Program",
    "ProgramKey",
    "ResidualSource",
    "ResultSpec",
    "TensorSpec",
    "VmapLevel",
    "clear",
    "count_recipes",
    "count_tangents",
    "display_name",
    "find_function",
    "find_program",
    "new_name",
    "pin_for_graph",
    "pin_if_traced",
    "rebuilder",
    "register",
    "register_tangents",
    "store",
]


class TensorSpec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @property
    def is_inexact(self) -> bool:
        """Whether its values can be differentiated."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class VmapLevel(NamedTuple):
    """A leading axis that torch.func.vmap added. size: its calls. mapped: whether each tensor has the axis."""

    size: int
    mapped: tuple[bool, ...]


class ProgramKey(NamedTuple):
    """A call without its values, for which a program is made.

    function: its name in FUNCTIONS. structure: the arguments, with their constants. signatures: the tensors, with the
    axes of all maps. masks: the Masks, or None. x64: jax_enable_x64. maps: the maps of torch.func.vmap, in the order in
    which they apply.
    """

    function: str
    structure: Structure
    signatures: tuple[TensorSpec, ...]
    masks: MaskSignature | None
    x64: bool
    maps: tuple[VmapLevel, ...] = ()


class ResultSpec(NamedTuple):
    """The shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ResidualSource(NamedTuple):
    """The source of a value that the backward needs.

    `place`: "mask" (an array of a Mask), "input", "output", or "extra" (an additional result of the forward).
    position: the value's index in that list.
    """

    place: str
    position: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A request, and the functions that serve it.

    needs: whether each tensor has a gradient. outputs: the structure of the outputs. count: the number of outputs.
    fixed: the outputs without a gradient. results: shape and dtype of the forward's results: outputs, then residuals.
    grads: shape and dtype of the backward's results. inputs_read, outputs_read: the tensors and outputs that the
    backward reads in addition to the residuals.
    """

    name: str
    request: ProgramKey
    needs: tuple[bool, ...]
    outputs: Structure
    count: int
    fixed: tuple[int, ...]
    results: tuple[ResultSpec, ...]
    grads: tuple[ResultSpec, ...]
    inputs_read: tuple[int, ...]
    outputs_read: tuple[int, ...]
    forward: JaxFunction
    backward: JaxFunction

    @functools.cached_property
    def has_gradient(self) -> bool:
        return any(self.needs)

    @property
    def device(self) -> torch.device:
        first, *_ = self.request.signatures
        return first.device

    @property
    def label(self) -> str:
        """The program's name in error messages."""
        return f"from_jax of {display_name(self.request.function)}"


FUNCTIONS: dict[str, Callable[..., Any]] = {}
PROGRAMS: dict[str, Program] = {}  # the newest last
_TANGENTS: weakref.WeakValueDictionary[str, Callable[..., Any]] = weakref.WeakValueDictionary()
_ALIVE: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
_REBUILDERS: dict[str, Callable[[], Program]] = {}  # the newest last
_PINNED: dict[str, Callable[[], Program]] = {}
_LOCK = threading.RLock()
_MOST = 1024  # programs, and as many recipes


def register(function: Callable[..., Any]) -> str:
    """Stores a function in FUNCTIONS. Returns its new name: a string, because torch.compile may make ints symbolic."""
    name = unique_name(getattr(function, "__name__", "function").replace(" ", "_"))  # a recipe's text is cut at spaces
    FUNCTIONS[name] = function
    return name


def register_tangents(function: Callable[..., Any]) -> str:
    """Names a function of tangents. find_function finds it as long as another object, such as a program, holds it."""
    name = unique_name(getattr(function, "__name__", "function"))
    _TANGENTS[name] = function
    return name


def find_function(name: str) -> Callable[..., Any]:
    function = FUNCTIONS.get(name)
    return _TANGENTS[name] if function is None else function


def display_name(name: str) -> str:
    """The __name__ of a function in FUNCTIONS, without the suffix of unique_name."""
    return name.rsplit("_", 2)[0]


def new_name(request: ProgramKey) -> str:
    """A name for a program of this request, unique among all programs of all processes."""
    return unique_name(display_name(request.function))


def store(name: str, make: Callable[[], Program]) -> Program:
    """Makes a program, keeps it under its name, and returns it. find_program makes it again if it was dropped."""
    with _LOCK:
        _REBUILDERS[name] = make
        program = find_program(name)
        drop_oldest(_REBUILDERS, _MOST)
        return program


def pin_for_graph(name: str) -> None:
    """Keeps the recipe of a program whose name goes into a graph."""
    with _LOCK:
        make = _REBUILDERS.get(name)
        if make is None and name not in _PINNED and (program := _ALIVE.get(name)) is not None:
            make = lambda: program  # its recipe was dropped
        if make is not None:
            _PINNED[name] = make  # stored before the pop: other threads may look it up
            _REBUILDERS.pop(name, None)


def pin_if_traced(name: str) -> None:
    """pin_for_graph, if a torch dispatch mode is active: it may write the program's name into a graph."""
    if torch._C._len_torch_dispatch_stack() and name not in _PINNED:
        pin_for_graph(name)


def find_program(name: str) -> Program:
    """The program of this name. Raises RuntimeError if another process made it."""
    program = PROGRAMS.get(name)
    if program is None:
        program = _ALIVE.get(name)
    if program is not None:
        return program
    make = _REBUILDERS.get(name) or _PINNED.get(name)
    if make is None:
        raise RuntimeError(f"{name}: a graph that calls a from_jax function runs only in the process that traced it")
    return _found(name, make)


def _found(name: str, make: Callable[[], Program]) -> Program:
    with _LOCK:
        program = PROGRAMS.get(name) or _ALIVE.get(name)
        if program is None:
            program = PROGRAMS[name] = _ALIVE[name] = make()
        drop_oldest(PROGRAMS, _MOST)
        return program


def rebuilder(name: str) -> Callable[[], Program]:
    """A function that returns the program of this name, even after its recipe was dropped."""
    make = _REBUILDERS.get(name) or _PINNED.get(name)
    if make is None:
        program = find_program(name)
        return lambda: program
    return functools.partial(_found, name, make)


def count_recipes() -> int:
    """The number of kept recipes."""
    return len(_REBUILDERS) + len(_PINNED)


def count_tangents() -> int:
    """The number of functions of tangents that are alive."""
    return len(_TANGENTS)


def clear() -> None:
    """Drops all programs, their JAX programs, and the recipes of programs that are in no graph."""
    with _LOCK:
        PROGRAMS.clear()
        _REBUILDERS.clear()
