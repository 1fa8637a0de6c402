"""The plans of from_jax, and the tables that keep them.

A request is a call without its values. A plan is a request with the programs that serve it. PyTorch's operators take a
plan's name. The tables keep at most _MOST plans and _MOST recipes; a recipe makes a dropped plan again. A dropped plan
is still found while another object holds it, such as a call whose backward has not run. If a plan's name went into a
graph, its recipe is kept until the process ends.
"""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.interop.keyed_cache import fresh_name
from jax_kernels.bridge.jax_functions.mask_operands import MaskSignature

__all__ = [
    "FUNCTIONS",
    "PLANS",
    "Info",
    "Map",
    "Plan",
    "Request",
    "Residual",
    "Signature",
    "clear",
    "count_recipes",
    "count_tangents",
    "find_function",
    "find_plan",
    "finder",
    "keep",
    "keep_for_graphs",
    "keep_if_traced",
    "new_name",
    "register",
    "register_tangents",
    "stem_of",
]


class Signature(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @property
    def is_inexact(self) -> bool:
        """Whether its values can be differentiated."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class Map(NamedTuple):
    """A leading axis that torch.func.vmap added. size: its calls. mapped: whether each tensor has the axis."""

    size: int
    mapped: tuple[bool, ...]


class Request(NamedTuple):
    """A call without its values, for which a plan is made.

    function: its name in FUNCTIONS. structure: the arguments, with their constants. signatures: the tensors, with the
    axes of all maps. masks: the Masks, or None. x64: jax_enable_x64. maps: the maps of torch.func.vmap, in the order in
    which they apply.
    """

    function: str
    structure: Any
    signatures: tuple[Signature, ...]
    masks: MaskSignature | None
    x64: bool
    maps: tuple[Map, ...] = ()


class Info(NamedTuple):
    """The shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Residual(NamedTuple):
    """The source of a value that the backward needs.

    `place`: "mask" (an array of a Mask), "input", "output", or "extra" (an additional result of the forward).
    position: the value's index in that list.
    """

    place: str
    position: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A request, and the programs that serve it.

    needs: whether each tensor has a gradient. outputs: the structure of the outputs. count: the number of outputs.
    fixed: the outputs without a gradient. results: shape and dtype of the forward's results: outputs, then residuals.
    grads: shape and dtype of the backward's results. inputs_read, outputs_read: the tensors and outputs that the
    backward reads in addition to the residuals.
    """

    name: str
    request: Request
    needs: tuple[bool, ...]
    outputs: Any
    count: int
    fixed: tuple[int, ...]
    results: tuple[Info, ...]
    grads: tuple[Info, ...]
    inputs_read: tuple[int, ...]
    outputs_read: tuple[int, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @functools.cached_property
    def has_gradient(self) -> bool:
        return any(self.needs)

    @property
    def device(self) -> torch.device:
        first, *_ = self.request.signatures
        return first.device

    @property
    def label(self) -> str:
        """The plan's name in error messages."""
        return f"from_jax of {stem_of(self.request.function)}"


FUNCTIONS: dict[str, Callable[..., Any]] = {}
PLANS: dict[str, Plan] = {}  # the newest last
_TANGENTS: weakref.WeakValueDictionary[str, Callable[..., Any]] = weakref.WeakValueDictionary()
_ALIVE: weakref.WeakValueDictionary[str, Plan] = weakref.WeakValueDictionary()
_RECIPES: dict[str, Callable[[], Plan]] = {}  # the newest last
_OF_GRAPHS: dict[str, Callable[[], Plan]] = {}
_LOCK = threading.RLock()
_MOST = 1024  # plans, and as many recipes


def register(function: Callable[..., Any]) -> str:
    """Stores a function in FUNCTIONS. Returns its new name: a string, because torch.compile may make ints symbolic."""
    name = fresh_name(getattr(function, "__name__", "function").replace(" ", "_"))  # a recipe's text is cut at spaces
    FUNCTIONS[name] = function
    return name


def register_tangents(function: Callable[..., Any]) -> str:
    """Names a function of tangents. find_function finds it as long as another object, such as a plan, holds it."""
    name = fresh_name(getattr(function, "__name__", "function"))
    _TANGENTS[name] = function
    return name


def find_function(name: str) -> Callable[..., Any]:
    function = FUNCTIONS.get(name)
    return _TANGENTS[name] if function is None else function


def stem_of(name: str) -> str:
    """The __name__ of a function in FUNCTIONS, without the suffix of fresh_name."""
    return name.rsplit("_", 2)[0]


def new_name(request: Request) -> str:
    """A name for a plan of this request, unique among all plans of all processes."""
    return fresh_name(stem_of(request.function))


def keep(name: str, make: Callable[[], Plan]) -> Plan:
    """Makes a plan, keeps it under its name, and returns it. find_plan makes it again if it was dropped."""
    with _LOCK:
        _RECIPES[name] = make
        plan = find_plan(name)
        drop_oldest(_RECIPES, _MOST)
        return plan


def keep_for_graphs(name: str) -> None:
    """Keeps the recipe of a plan whose name goes into a graph."""
    with _LOCK:
        make = _RECIPES.get(name)
        if make is None and name not in _OF_GRAPHS and (plan := _ALIVE.get(name)) is not None:
            make = lambda: plan  # its recipe was dropped
        if make is not None:
            _OF_GRAPHS[name] = make  # stored before the pop: other threads may look it up
            _RECIPES.pop(name, None)


def keep_if_traced(name: str) -> None:
    """keep_for_graphs, if a torch dispatch mode is active: it may write the plan's name into a graph."""
    if torch._C._len_torch_dispatch_stack() and name not in _OF_GRAPHS:
        keep_for_graphs(name)


def find_plan(name: str) -> Plan:
    """The plan of this name. Raises RuntimeError if another process made it."""
    plan = PLANS.get(name)
    if plan is None:
        plan = _ALIVE.get(name)
    if plan is not None:
        return plan
    make = _RECIPES.get(name) or _OF_GRAPHS.get(name)
    if make is None:
        raise RuntimeError(f"{name}: a graph that calls a from_jax function runs only in the process that traced it")
    return _found(name, make)


def _found(name: str, make: Callable[[], Plan]) -> Plan:
    with _LOCK:
        plan = PLANS.get(name) or _ALIVE.get(name)
        if plan is None:
            plan = PLANS[name] = _ALIVE[name] = make()
        drop_oldest(PLANS, _MOST)
        return plan


def finder(name: str) -> Callable[[], Plan]:
    """A function that returns the plan of this name, even after its recipe was dropped."""
    make = _RECIPES.get(name) or _OF_GRAPHS.get(name)
    if make is None:
        plan = find_plan(name)
        return lambda: plan
    return functools.partial(_found, name, make)


def count_recipes() -> int:
    """The number of kept recipes."""
    return len(_RECIPES) + len(_OF_GRAPHS)


def count_tangents() -> int:
    """The number of functions of tangents that are alive."""
    return len(_TANGENTS)


def clear() -> None:
    """Drops all plans, their JAX programs, and the recipes of plans that are in no graph."""
    with _LOCK:
        PLANS.clear()
        _RECIPES.clear()
