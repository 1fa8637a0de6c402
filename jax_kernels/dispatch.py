"""Turns a request into a plan: the implementation of an op that serves it, its blocks, and the reason.

An op owns a table of `Implementation`s; `choose` walks the table in the order that the block specs give for the
device. This module does not know an op's arguments: an implementation judges a request with its own `supports`.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax import export

from jax_kernels.device import DeviceInfo, device_info
from jax_kernels.plain_numbers import plain_options
from jax_kernels.spelling import did_you_mean

__all__ = ["Implementation", "Plan", "Request", "choose", "explain", "interpreting", "on_device", "target_device"]

_TARGET: contextvars.ContextVar[DeviceInfo | None] = contextvars.ContextVar("jax_kernels_target", default=None)


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of an op without its arrays. Ops derive their own request classes from it.

    SIZES: the fields that are lengths of axes. If one of these lengths is 0, a kernel has nothing to compute.
    """

    SIZES: ClassVar[tuple[str, ...]] = ()

    op: str
    device: DeviceInfo


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an op.

    supports(request) returns None, or the reason why the request cannot be served, forward and backward alike.
    config(request) returns the blocks and their source: "block spec", "tuned cache" or "heuristic".
    forward and backward are the op's own; a None backward means that JAX differentiates forward itself.
    """

    name: str
    supports: Callable[[Any], str | None]
    config: Callable[[Any], tuple[Any, str]]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The implementation that will run, and why.

    implementation: its name. config: its blocks, or None if it has no blocks. source: the source of the blocks.
    why: one line. passed_over: the implementations tried before it, each with the reason.
    """

    op: str
    implementation: str
    config: Any
    source: str
    why: str
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.implementation} ({self.why})"]
        lines += [] if self.config is None else [f"  blocks: {self.config} from {self.source}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.passed_over]
        return "\n".join(lines)


def choose(
    request: Request,
    table: Mapping[str, Implementation],
    order: Callable[[Any], Sequence[str]],
    implementation: str | None = None,
) -> Plan:
    """The plan for a request: the named implementation, or the first of order(request) in the table that can serve it.

    "xla" serves a request with a symbolic size, under jax.export. It also serves a request with an axis of length 0,
    even if the caller names another implementation that takes such calls: a kernel cannot be launched without a block.

    Raises ValueError for an unknown name, and NotImplementedError, with every reason, if no implementation can serve.
    """
    symbolic, empty = _symbolic(request), _empty(request)
    if implementation is not None:
        if implementation not in table:
            known = ", ".join(repr(name) for name in table)
            hint = did_you_mean(implementation, table)
            raise ValueError(
                f"implementation={implementation!r} is not known for {request.op}; want one of {known}{hint}"
            )
        reason = _reason(table[implementation], request, symbolic)
        if reason is not None:
            raise NotImplementedError(f"implementation={implementation!r} cannot serve this {request.op}: {reason}")
        why = "asked for by name"
        if empty is not None and implementation != "xla":
            implementation, why = "xla", f"{empty}, which leaves {implementation!r} nothing to compute"
        config, source = table[implementation].config(request)
        return Plan(request.op, implementation, config, source, why)

    passed_over: list[tuple[str, str]] = []
    names = order(request) if symbolic is None else table  # an order may depend on sizes
    for name in (name for name in names if name in table):
        reason = _reason(table[name], request, symbolic)
        if reason is None and empty is not None and name != "xla":
            reason = f"{empty}, which leaves a kernel nothing to compute"
        if reason is None:
            config, source = table[name].config(request)
            why = f"the fastest that serves this on {request.device.name}"
            return Plan(request.op, name, config, source, why, tuple(passed_over))
        passed_over.append((name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise NotImplementedError(f"no implementation serves this {request.op} on {request.device.name}: {reasons}")


def _reason(implementation: Implementation, request: Request, symbolic: str | None) -> str | None:
    """The reason why an implementation cannot serve a request; None if it can. symbolic: the result of _symbolic."""
    if symbolic is None or implementation.name == "xla":
        return implementation.supports(request)
    wanted = "want an int, for which kernels are compiled; export with fixed sizes, or with implementation='xla'"
    return f"{symbolic}, {wanted}"


def _symbolic(request: Request) -> str | None:
    """The text "field: got the symbolic size ..." for the first such field; None if all sizes are known."""
    for name, x in vars(request).items():
        size = _symbolic_size(x)
        if size is not None:
            return f"{name}: got the symbolic size {size}"
    return None


def _empty(request: Request) -> str | None:
    """The text "field is 0" for the first size of 0; None if all axes have entries."""
    for name in request.SIZES:
        size = getattr(request, name)
        if isinstance(size, int) and size == 0:  # a symbolic size is no int, and at least 1
            return f"{name} is 0"
    return None


def _symbolic_size(x: Any) -> Any:
    if isinstance(x, tuple):
        return next((size for size in map(_symbolic_size, x) if size is not None), None)
    return x if export.is_symbolic_dim(x) else None


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """The Plan of `op(*args, **kwargs)`, without running it. Arrays may be `jax.ShapeDtypeStruct`s.

    op may be a functools.partial of an op, or a result of compile_attention. Raises the error that the call itself
    would raise for these arguments; TypeError if `op` has no plan.
    """
    if isinstance(op, functools.partial):
        return explain(op.func, *op.args, *args, **op.keywords | kwargs)
    plan = getattr(op, "plan_of_call", None) or getattr(op, "plan", None)
    if not callable(plan):
        raise TypeError(f"op: got {op!r}, want an op of this library (flash_attention, ...)")
    return plan(*args, **plain_options(getattr(op, "plain_numbers", ()), kwargs))


def interpreting() -> bool:
    """Whether kernels run in Pallas interpret mode (JAX_KERNELS_INTERPRET=1): for debugging on any machine."""
    return os.environ.get("JAX_KERNELS_INTERPRET", "") not in ("", "0")


class _Target:
    """The context of on_device. It is no generator: the bridge enters it in each call, and a generator takes longer."""

    __slots__ = ("_info", "_token")

    def __init__(self, info: DeviceInfo) -> None:
        self._info = info

    def __enter__(self) -> DeviceInfo:
        self._token = _TARGET.set(self._info)
        return self._info

    def __exit__(self, *_: object) -> None:
        _TARGET.reset(self._token)


def on_device(device: DeviceInfo | str) -> contextlib.AbstractContextManager[DeviceInfo]:
    """Plan for this device inside the block, whatever the machine has: for ahead-of-time compiles and the bridge."""
    return _Target(device if isinstance(device, DeviceInfo) else device_info(device))


def target_device(*arrays: Any) -> DeviceInfo:
    """The device of a call: on_device's device, else the device of the first concrete array, else JAX's default.

    For traced arrays, JAX knows a device if they are on a mesh, or if jax.set_mesh or a shard_map has a mesh: a mesh
    of CPU devices is a CPU, even on a machine with a GPU.
    """
    target = _TARGET.get()
    if target is not None:
        return target
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            return _info(next(iter(array.devices())))
    meshes = [jax.typeof(array).sharding.mesh for array in arrays if isinstance(array, jax.core.Tracer)]
    if any(_is_of_cpus(mesh) for mesh in (*meshes, jax.sharding.get_abstract_mesh())):
        return device_info("cpu")
    default = jax.config.jax_default_device
    if isinstance(default, str):
        default = jax.devices(default)[0]
    return device_info() if default is None else _info(default)


def _is_of_cpus(mesh: Any) -> bool:
    return mesh.abstract_device is not None and mesh.abstract_device.device_kind == "cpu"


@functools.cache
def _info(device: Any) -> DeviceInfo:
    return device_info(device)
