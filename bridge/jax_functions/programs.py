"""The programs of from_jax, and the stores of programs and of JAX functions.

A request is a call without its values (ProgramKey). A program is a request with the compiled functions that serve it.
PyTorch's operators take a program's name. store.py says how long a program is found by its name.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.interop.donated_outputs import JaxFunction
from jax_kernels.bridge.jax_functions.mask_operands import MaskSignature
from jax_kernels.bridge.jax_functions.pytree import Structure
from jax_kernels.bridge.jax_functions.store import Store

__all__ = [
    "FUNCTIONS",
    "PROGRAMS",
    "DynamicCall",
    "Program",
    "ProgramKey",
    "ResidualSource",
    "ResultSpec",
    "TensorSpec",
    "VmapLevel",
    "display_name",
    "find_function",
    "find_program",
    "is_of_library",
    "label_in_errors",
    "pin_if_traced",
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


@dataclasses.dataclass(frozen=True)
class DynamicCall:
    """A call without values and shapes, which a graph for many shapes contains.

    function: the name by which find_function finds the JAX function. structure: `flatten` of (args, kwargs), with the
    constants. x64: jax_enable_x64. outputs: the structure of the results of the last traced call, as a list with at
    most one item.
    """

    function: str
    structure: Structure
    x64: bool
    outputs: list[Structure] = dataclasses.field(default_factory=list, compare=False)

    def request(self, signatures: Iterable[TensorSpec]) -> ProgramKey:
        """The call with tensors of these shapes and dtypes."""
        return ProgramKey(self.function, self.structure, tuple(signatures), None, self.x64)

    @property
    def label(self) -> str:
        """The text by which error messages name the call."""
        return label_in_errors(self.function)


class ResultSpec(NamedTuple):
    """The shape and PyTorch dtype of one result of a program's forward or backward."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ResidualSource(NamedTuple):
    """The source of one residual: a value that the forward computes or receives, and the backward needs.

    origin: a list: "mask" (the arrays of the Masks), "input" (the call's tensors), "output" (the function's own
    outputs), or "extra" (all residuals). position: the residual's index in this list. The forward returns an "extra"
    residual as an additional result.
    """

    origin: str
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
        """The text by which error messages name the program."""
        return label_in_errors(self.request.function)


FUNCTIONS: Store[Callable[..., Any]] = Store()
PROGRAMS: Store[Program] = Store()


def find_function(name: str) -> Callable[..., Any]:
    """The function of this name in FUNCTIONS. Raises KeyError if it is gone."""
    function = FUNCTIONS.find(name)
    if function is None:
        raise KeyError(name)
    return function


def display_name(name: str) -> str:
    """The __name__ of the function that has this name in FUNCTIONS, for texts: "relu_3_5f..." becomes "relu"."""
    return name.rsplit("_", 2)[0]


def is_of_library(function: Callable[..., Any] | None) -> bool:
    """Whether this library defines a function of jax.Arrays, such as the op of a function of bridge."""
    home = getattr(getattr(function, "func", function), "__module__", None) or ""  # func: of a functools.partial
    return f"{home}.".startswith("jax_kernels.")


def label_in_errors(name: str) -> str:
    """The text by which error messages name the function that has this name in FUNCTIONS.

    It is the name of a function of this library, which bridge has too, and "from_jax of NAME" for a user's function.
    """
    own = display_name(name)
    return own.lstrip("_") if is_of_library(FUNCTIONS.find(name)) else f"from_jax of {own}"


def pin_if_traced(*names: str) -> None:
    """Makes programs' names valid until the process ends, if a torch dispatch mode is active.

    Such a mode, as of torch.compile or make_fx, may write a name into a graph.
    """
    if torch._C._len_torch_dispatch_stack():
        for name in names:
            PROGRAMS.pin(name)


def find_program(name: str) -> Program:
    """The program of this name. Raises RuntimeError if it is gone, or if another process made the name."""
    program = PROGRAMS.find(name)
    if program is None:
        raise RuntimeError(f"{name}: a graph that calls a from_jax function runs only in the process that traced it")
    return program
