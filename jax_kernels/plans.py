"""The records of dispatch: requests, implementations, the choice among them, and the plan that explains it."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jax_kernels.device import DeviceInfo
from jax_kernels.tuned.winners import Tuned

__all__ = ["Choice", "Implementation", "Order", "Plan", "Request", "rounded_up", "tuning_key", "without_blocks"]


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of an op without its arrays: the op's name and the device. Ops derive their own request classes from it.

    SIZES: the names of the fields that are lengths of axes. If one of these lengths is 0, a kernel has nothing to
    compute. ROUNDED: the names of the fields whose integers tuning rounds up, so that requests of similar sizes share
    their winner. Empty: SIZES.
    """

    SIZES: ClassVar[tuple[str, ...]] = ()
    ROUNDED: ClassVar[tuple[str, ...]] = ()

    op: str
    device: DeviceInfo

    def bucket(self) -> dict[str, Any]:
        """The fields by which tuning keeps the request's winner: all but the device, with sizes rounded up."""
        rounded = self.ROUNDED or self.SIZES
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "device"}
        return {name: rounded_up(x) if name in rounded else x for name, x in fields.items()}


def rounded_up(x: Any) -> Any:
    """An integer, or each integer of nested tuples, rounded up to the next of four sizes between powers of two.

    Up to 8, and for all that is no integer, nothing changes.
    """
    if isinstance(x, tuple):
        return tuple(map(rounded_up, x))
    if isinstance(x, bool) or not isinstance(x, int) or x <= 8:
        return x
    step = 1 << ((x - 1).bit_length() - 3)
    return -(-x // step) * step


@functools.lru_cache(maxsize=256)  # a request may hold its caller's activation
def tuning_key(request: Request) -> str:
    """The text by which tuning keeps the request's winner: equal for requests of one bucket."""
    named = lambda x: f"{x.__module__}.{x.__qualname__}" if hasattr(x, "__qualname__") else repr(x)
    return json.dumps(
        {name: x for name, x in request.bucket().items() if x is not None and x is not False}, default=named
    )


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    supports(request) returns None, or the reason why the request cannot be served, forward and backward alike.
    config(request) returns (blocks, their source in words); blocks is None if the implementation has none.
    forward and backward have signatures that all implementations of one op share; a None backward means that JAX
    differentiates forward itself. name: as the caller writes it in the argument `implementation`.
    candidates(request): other blocks for tuning to time, by the field of the config that they replace, such as
    "forward". None if there are no others.
    """

    name: str
    supports: Callable[[Any], str | None]
    config: Callable[[Any], tuple[Any, str]]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    candidates: Callable[[Any], Mapping[str, Sequence[Any]]] | None = None


def without_blocks(request: Request) -> tuple[None, str]:
    """(None, "no block spec"): the config of an implementation that has no blocks of this library, such as "xla"."""
    return None, "no block spec"


# order(request): the implementations in the order in which they are tried, and in words where the order comes from.
Order = Callable[[Any], tuple[Sequence[str], str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The implementation that will run, and why.

    op, device: their names. implementation: its name. config: its blocks, None if it has none.
    source: the source of the blocks, and the GPU on which they were measured. "sm_90's rows, measured on NVIDIA H200";
      "sm_86's rows, inherited by sm_89, not measured"; "heuristic: sm_86's rows, for sm_87, which has none, not
      measured", for a GPU without rows; "no block spec" if config is None.
    why: the reason for this implementation, and where the order of the implementations was measured.
    order: the op's implementations in the order in which they were tried. Empty if the caller named one, and after
      tuning.
    passed_over: (name, reason) of each implementation that was tried before it, of the later ones if none of them can
      serve the call, and of each that the order lacks.
    tuned: the times from tuning, if they chose the implementation or its blocks; else None.
    chunks: the chunks in which the call runs because it would take too much memory, in words; None for a whole call.
    """

    op: str
    device: str
    implementation: str
    config: Any
    source: str
    why: str
    order: tuple[str, ...] = ()
    passed_over: tuple[tuple[str, str], ...] = ()
    tuned: Tuned | None = None
    chunks: str | None = None

    @property
    def why_not(self) -> dict[str, str]:
        """The reason against each other implementation of the op, by name. Empty if the caller named one."""
        tried = self.order.index(self.implementation) + 1 if self.order else 0
        found = dict(self.passed_over)
        later = [name for name in self.order[tried:] if name not in found]
        return found | dict.fromkeys(later, f"it comes after {self.implementation} in the order")

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.implementation} ({self.why})", f"  device: {self.device}"]
        lines += [] if self.config is None else [f"  blocks: {self.config} from {self.source}"]
        lines += [] if self.chunks is None else [f"  in {self.chunks}"]
        lines += [] if self.tuned is None else [f"  {self.tuned.text(self.implementation)}"]
        return "\n".join(lines + self.lines_of_others())

    def lines_of_others(self) -> list[str]:
        """A line of text for each entry of why_not: an implementation that does not run, and the reason against it."""
        return [f"  not {name}: {reason}" for name, reason in self.why_not.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The implementation that a call runs, its blocks, and the facts from which plan_of makes a Plan.

    config: the blocks, or None. source: the source of the blocks, in words. order: the names of implementations in the
    order in which they are tried, also names that the op lacks. order_source: where this order was measured, in words.
    why: the reason in words, "" if the order decided. passed_over: (name, reason) of each implementation that was tried
    in vain. tuned: the times from tuning, if they chose the implementation or its blocks; else None.
    """

    implementation: str
    config: Any
    source: str
    order: Sequence[str] = ()
    order_source: str = ""
    why: str = ""
    passed_over: tuple[tuple[str, str], ...] = ()
    tuned: Tuned | None = None
