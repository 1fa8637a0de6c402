"""The plans of from_jax, and where they are kept.

A request is a call without its values. A plan is a request with the programs that serve it. PyTorch's operators take a
plan's name, under which it is found as long as the process lives. The programs of so many plans are kept; an older
plan, whose name a compiled graph may hold, is made again.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from jax_kernels.bridge.once import fresh_name
from jax_kernels.bridge.operands import MaskSignature

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
    "find_plan",
    "keep",
    "new_name",
    "register",
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
        """Whether it holds numbers that can be differentiated."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class Map(NamedTuple):
    """An axis of calls that torch.func.vmap has added in front: how many calls, and which tensors have it."""

    size: int
    mapped: tuple[bool, ...]


class Request(NamedTuple):
    """A call without its values, for which a plan is made.

    function: its name in FUNCTIONS. structure: the arguments, with their constants. signatures: the tensors, with the
    axes of all maps. masks: the Masks, or None. x64: jax_enable_x64. maps: those of torch.func.vmap, the first applied
    first.
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
    """The place where the backward finds a value that it needs.

    place: "mask" (an array of a Mask), "input", "output", or "extra" (a result of its own). position: its index there.
    """

    place: str
    position: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A request, and the programs that serve it.

    needs: which tensors have a gradient. outputs: their structure; count: how many. fixed: those without a gradient.
    results: shape and dtype of the forward's results, outputs and then residuals. grads: those of the backward's.
    inputs_read, outputs_read: what the backward reads besides residuals.
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
        """Its name in error messages."""
        return f"from_jax of {stem_of(self.request.function)}"


FUNCTIONS: dict[str, Callable[..., Any]] = {}
PLANS: dict[str, Plan] = {}  # the newest last
_RECIPES: dict[str, Callable[[], Plan]] = {}
_LOCK = threading.RLock()
_MOST = 1024


def register(function: Callable[..., Any]) -> str:
    """A new name in FUNCTIONS. It is a string, as torch.compile may make a symbol of a number."""
    name = fresh_name(getattr(function, "__name__", "function").replace(" ", "_"))  # a recipe's text is cut at spaces
    FUNCTIONS[name] = function
    return name


def stem_of(name: str) -> str:
    """The own name of a function in FUNCTIONS, without what fresh_name added."""
    return name.rsplit("_", 2)[0]


def new_name(request: Request) -> str:
    """A name for a plan of this request, which no other plan has, in this process or another."""
    return fresh_name(stem_of(request.function))


def keep(name: str, make: Callable[[], Plan]) -> Plan:
    """Makes a plan, keeps it under its name, and returns it. It is made again where it is wanted and no longer kept."""
    _RECIPES[name] = make
    return find_plan(name)


def find_plan(name: str) -> Plan:
    """The plan of this name. Raises RuntimeError where another process made it."""
    plan = PLANS.get(name)
    if plan is not None:
        return plan
    if name not in _RECIPES:
        raise RuntimeError(f"{name}: a graph that calls a from_jax function runs only in the process that traced it")
    with _LOCK:
        if name not in PLANS:
            PLANS[name] = _RECIPES[name]()
        plan = PLANS[name]
        while len(PLANS) > _MOST:
            del PLANS[next(iter(PLANS))]
        return plan


def clear() -> None:
    """Drops all plans, and with them JAX's programs."""
    with _LOCK:
        PLANS.clear()
