"""The programs of from_jax, and the tables that keep them.

A request is a call without its values (ProgramKey). A program is a request with the compiled functions that serve it.
PyTorch's operators take a program's name. The tables keep at most _MOST programs and _MOST recipes; a recipe is a
function without arguments that makes a dropped program again. A dropped program is still found while another object
holds it, such as a call whose backward has not run. If a program's name went into a graph of torch.compile,
torch.export or make_fx, its recipe is kept until the process ends.
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
    """A PyTorch tensor without its values. layout: torch.strided for a dense tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @property
    def is_inexact(self) -> bool:
        """Whether it can have a gradient: its dtype is floating-point or complex."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class VmapLevel(NamedTuple):
    """One level of torch.func.vmap around a call.

    size: the number of calls that are mapped. mapped: for each tensor, whether it has a leading axis of this size; the
    other tensors are the same for all calls.
    """

    size: int
    mapped: tuple[bool, ...]


class ProgramKey(NamedTuple):
    """A call without its values, for which a program is made. Also called a request.

    function: the name by which find_function finds the JAX function. structure: `flatten` of (args, kwargs), with the
    constants. signatures: one TensorSpec for each tensor, whose shape includes the leading axes that torch.func.vmap
    added. masks: the Masks' structure, shapes and dtypes; None if the call has no Masks. x64: jax_enable_x64. maps: the
    levels of torch.func.vmap, the innermost first.
    """

    function: str
    structure: Structure
    signatures: tuple[TensorSpec, ...]
    masks: MaskSignature | None
    x64: bool
    maps: tuple[VmapLevel, ...] = ()


class ResultSpec(NamedTuple):
    """The shape and PyTorch dtype of one result of a program's forward or backward."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ResidualSource(NamedTuple):
    """The source of one residual: a value that the forward computes or receives, and the backward needs.

    `place` names a list: "mask" (the arrays of the Masks), "input" (the call's tensors), "output" (the function's own
    outputs), or "extra" (all residuals). position: the residual's index in this list. The forward returns an "extra"
    residual as an additional result.
    """

    place: str
    position: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A request, and the compiled forward and backward that serve it.

    name: the name by which find_program finds it. needs: for each tensor, whether the backward computes its gradient.
    outputs: the structure of the function's outputs, for `unflatten`. count: the number of outputs. fixed: the indices
    of the integer and bool outputs, which have no gradient. results: the forward's results: `count` outputs, then the
    extra residuals for the backward. grads: the backward's results, one for each tensor with a gradient. inputs_read,
    outputs_read: the indices of the tensors and of the outputs that the backward reads in addition to the extra
    residuals.

    forward, backward: jitted functions whose first argument is the tuple of Masks. forward(masks, *tensors) returns
    `results`. backward(masks, *inputs read, *outputs read, *extra residuals, *cotangents of the outputs) returns
    `grads`; a cotangent may be None.
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
        """The text 'from_jax of FUNCTION', by which error messages name the program."""
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
    """Stores a JAX function in FUNCTIONS until the process ends. Returns its new name.

    The name is a string, because torch.compile may make ints symbolic.
    """
    name = unique_name(getattr(function, "__name__", "function").replace(" ", "_"))  # a recipe's text is cut at spaces
    FUNCTIONS[name] = function
    return name


def register_tangents(function: Callable[..., Any]) -> str:
    """Stores a function that computes tangents, for forward mode. Returns its new name.

    find_function finds it as long as another object, such as a program, holds the function.
    """
    name = unique_name(getattr(function, "__name__", "function"))
    _TANGENTS[name] = function
    return name


def find_function(name: str) -> Callable[..., Any]:
    """The function that `register` or register_tangents named. Raises KeyError if it is gone."""
    function = FUNCTIONS.get(name)
    return _TANGENTS[name] if function is None else function


def display_name(name: str) -> str:
    """The __name__ of the function that `register` gave this name, for texts: "relu_3_5f..." becomes "relu"."""
    return name.rsplit("_", 2)[0]


def new_name(request: ProgramKey) -> str:
    """A name for a program of this request, unique among all programs of all processes."""
    return unique_name(display_name(request.function))


def store(name: str, make: Callable[[], Program]) -> Program:
    """Calls make(), keeps the program under this name, and returns it.

    `make` is kept as the program's recipe: find_program calls it again if the program was dropped.
    """
    with _LOCK:
        _REBUILDERS[name] = make
        program = find_program(name)
        drop_oldest(_REBUILDERS, _MOST)
        return program


def pin_for_graph(name: str) -> None:
    """Keeps the recipe of the program with this name until the process ends. Call it if the name goes into a graph."""
    with _LOCK:
        make = _REBUILDERS.get(name)
        if make is None and name not in _PINNED and (program := _ALIVE.get(name)) is not None:
            make = lambda: program  # its recipe was dropped
        if make is not None:
            _PINNED[name] = make  # stored before the pop: other threads may look it up
            _REBUILDERS.pop(name, None)


def pin_if_traced(name: str) -> None:
    """Keeps the recipe of the program with this name until the process ends, if a torch dispatch mode is active.

    Such a mode, as of torch.compile or make_fx, may write the name into a graph.
    """
    if torch._C._len_torch_dispatch_stack() and name not in _PINNED:
        pin_for_graph(name)


def find_program(name: str) -> Program:
    """The program of this name, made again if it was dropped.

    Raises RuntimeError if its recipe is gone too, or if another process made the name.
    """
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
    """The kept program of this name; otherwise make(), which is then kept under this name."""
    with _LOCK:
        program = PROGRAMS.get(name) or _ALIVE.get(name)
        if program is None:
            program = PROGRAMS[name] = _ALIVE[name] = make()
        drop_oldest(PROGRAMS, _MOST)
        return program


def rebuilder(name: str) -> Callable[[], Program]:
    """A function without arguments that returns the program of this name, even after its recipe was dropped."""
    make = _REBUILDERS.get(name) or _PINNED.get(name)
    if make is None:
        program = find_program(name)
        return lambda: program
    return functools.partial(_found, name, make)


def count_recipes() -> int:
    """The number of recipes that are kept, including the recipes of programs in graphs."""
    return len(_REBUILDERS) + len(_PINNED)


def count_tangents() -> int:
    """The number of functions from register_tangents that are alive."""
    return len(_TANGENTS)


def clear() -> None:
    """Drops all programs, with their jitted functions, and the recipes of programs whose names are in no graph."""
    with _LOCK:
        PROGRAMS.clear()
        _REBUILDERS.clear()
