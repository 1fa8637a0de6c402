"""Turns a request into a plan: the implementation of an op that serves it, its blocks, and the reason.

An op owns a table of `Implementation`s; `choose` walks the table in the order that the block specs give for the
device, and `plan_of` puts the choice into words. This module does not know an op's arguments: an implementation judges
a request with its own `supports`.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import export

from jax_kernels.device import DeviceInfo, device_info
from jax_kernels.frameworks import check_function
from jax_kernels.plain_numbers import plain_options
from jax_kernels.plans import Choice, Implementation, Order, Plan, Request, tuning_key, without_blocks
from jax_kernels.spelling import did_you_mean
from jax_kernels.target import has_target, on_device, target_device
from jax_kernels.tuned import cache
from jax_kernels.tuned.winners import Winner

__all__ = [
    "Choice",
    "Implementation",
    "Order",
    "Plan",
    "Request",
    "choose",
    "device_to_explain",
    "explain",
    "has_target",
    "interpreting",
    "on_device",
    "plan_of",
    "reason_against",
    "serving",
    "target_device",
    "tuning_key",
    "without_blocks",
]


def choose(
    request: Request, table: Mapping[str, Implementation], order: Order, implementation: str | None = None
) -> Choice:
    """The Choice for a request: the named implementation, or the first of order(request) that can serve the request.

    If the request was tuned on its device, the Choice has the blocks, and without a name the implementation, that were
    the fastest: by the user's own tuning, else by the winners that are part of the library.

    table: the op's implementations by name. "xla" serves a request with a symbolic size, under jax.export. It also
    serves a request with an axis of length 0, even if the caller names another implementation that takes such calls: a
    kernel cannot be launched without a block.

    Raises ValueError for an unknown name, and NotImplementedError, with every reason, if no implementation can serve.
    """
    symbolic, empty = _symbolic(request), _empty(request)
    winners = _winners(request) if symbolic is None and empty is None else ()
    if implementation is not None:
        return _named(request, table, implementation, symbolic, empty, winners)
    for winner in winners:
        if (fastest := _fastest(request, table, winner)) is not None:
            return fastest
    passed_over: list[tuple[str, str]] = []
    names, order_source = order(request) if symbolic is None else (tuple(table), "")  # an order goes by sizes, too
    for name in names:
        if name not in table:
            continue
        reason = _reason(table[name], request, symbolic, empty)
        if reason is None:
            config, source = table[name].config(request)
            return Choice(
                implementation=name,
                config=config,
                source=source,
                order=names,
                order_source=order_source,
                passed_over=tuple(passed_over),
            )
        passed_over.append((name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise NotImplementedError(f"no implementation serves this {request.op} on {request.device.name}: {reasons}")


def serving(
    request: Request, table: Mapping[str, Implementation], order: Order, implementation: str | None = None
) -> list[str]:
    """The implementations that can serve a request: in the order in which they are tried, then others. Only the named
    one, if given.

    Empty for a request with a symbolic size or an axis of length 0, which "xla" serves.
    """
    if _symbolic(request) is not None or _empty(request) is not None:
        return []
    names = dict.fromkeys([*order(request)[0], *table]) if implementation is None else (implementation,)
    return [name for name in names if name in table and table[name].supports(request) is None]


def _named(
    request: Request,
    table: Mapping[str, Implementation],
    implementation: str,
    symbolic: str | None,
    empty: str | None,
    winners: Sequence[Winner],
) -> Choice:
    """The Choice of the implementation that the caller named.

    symbolic, empty: the texts that _symbolic and _empty return for the request. winners: of _winners. Raises ValueError
    for an unknown name, NotImplementedError if the implementation cannot serve the request.
    """
    if implementation not in table:
        known = ", ".join(repr(name) for name in table)
        hint = did_you_mean(implementation, table)
        raise ValueError(f"implementation: got {implementation!r} for {request.op}, want one of {known}{hint}")
    reason = _reason(table[implementation], request, symbolic)
    if reason is not None:
        raise NotImplementedError(f"implementation={implementation!r} cannot serve this {request.op}: {reason}")
    why = "asked for by name"
    if empty is not None and implementation != "xla":
        implementation, why = "xla", f"{empty}, which leaves {implementation!r} nothing to compute"
    for winner in winners:
        if (tuned := _tuned(request, table, winner, implementation, why)) is not None:
            return tuned
    config, source = table[implementation].config(request)
    return Choice(implementation=implementation, config=config, source=source, why=why)


def _winners(request: Request) -> tuple[Winner, ...]:
    """The winners of the request's bucket on its device: the user's own, then the library's. Empty without any."""
    name = request.device.name
    files = [winners for winners in (cache.find(name), cache.find_shipped(name)) if winners]
    if not files:
        return ()
    key = tuning_key(request)
    return tuple(winners[key] for winners in files if key in winners)


def _fastest(request: Request, table: Mapping[str, Implementation], winner: Winner) -> Choice | None:
    """The Choice of the fastest implementation that was timed; None if it cannot serve this request of the bucket."""
    name = winner.fastest
    if name is None or name not in table or _reason(table[name], request, None) is not None:
        return None
    slower = [f"{timed.name} {timed.ms:.3g} ms" for timed in winner.timed if timed.name != name]
    why = "the fastest when it was tuned" + (f"; {', '.join(slower)}" if slower else "")
    return _tuned(request, table, winner, name, why, by_name=False)


def _tuned(
    request: Request,
    table: Mapping[str, Implementation],
    winner: Winner,
    name: str,
    why: str,
    *,
    by_name: bool = True,
) -> Choice | None:
    """The Choice of an implementation with the blocks from tuning; None if it was not timed, or has no such blocks.

    by_name: whether the caller named the implementation.
    """
    timed = winner.of(name)
    if timed is None:
        return None
    config, source = table[name].config(request)
    try:
        changed = timed.changed(config)
    except (AttributeError, TypeError, ValueError):  # of another type, or not for this request's row
        return None
    return Choice(
        implementation=name,
        config=changed,
        source="tuning" if timed.blocks else source,
        why=why,
        passed_over=() if by_name else _not_fastest(request, table, winner, name),
        tuned=winner.tuned(name, by_name=by_name),
    )


def _not_fastest(
    request: Request, table: Mapping[str, Implementation], winner: Winner, fastest: str
) -> tuple[tuple[str, str], ...]:
    """(name, reason) of each implementation except the fastest."""
    found = []
    for name in table:
        timed, reason = winner.of(name), _reason(table[name], request, None)
        if reason is None:
            reason = "it was not timed" if timed is None else f"it took {timed.ms:.3g} ms when it was tuned"
        found += [] if name == fastest else [(name, reason)]
    return tuple(found)


def plan_of(
    request: Request, table: Mapping[str, Implementation], order: Order, implementation: str | None = None
) -> Plan:
    """The Plan for a request: the choice of `choose`, with the reason for it and against each other implementation in
    words.

    table: the op's implementations by name. order(request): the names in the order in which they are tried. Raises the
    errors of `choose`.
    """
    choice = choose(request, table, order, implementation)
    passed_over, tried = choice.passed_over, tuple(name for name in choice.order if name in table)
    if implementation is None and choice.tuned is None:
        symbolic, empty = _symbolic(request), _empty(request)
        reasons = {name: _reason(table[name], request, symbolic, empty) for name in table}
        later = tried[tried.index(choice.implementation) + 1 :]
        if None not in [reasons[name] for name in later]:
            passed_over += tuple((name, reasons[name] or "") for name in later)
        passed_over += tuple((name, reasons[name] or _left_out(request)) for name in table if name not in tried)
    return Plan(
        op=request.op,
        device=request.device.name,
        implementation=choice.implementation,
        config=choice.config,
        source=choice.source,
        why=choice.why or _why(request, table, choice, tried, passed_over),
        order=tried,
        passed_over=passed_over,
        tuned=choice.tuned,
    )


def reason_against(error: Exception) -> str:
    """The reason in an error of `choose` for a named implementation, without the words that name the call."""
    return re.sub(r"^implementation='\w+' cannot serve this \w+: ", "", str(error))


def _left_out(request: Request) -> str:
    return f"the order of {request.device.name} leaves it out"


def _why(
    request: Request,
    table: Mapping[str, Implementation],
    choice: Choice,
    tried: Sequence[str],
    passed_over: Sequence[tuple[str, str]],
) -> str:
    """The reason for a choice in words.

    tried: the names in the order. passed_over: (name, reason) of the implementations that cannot serve the request, and
    of the ones that the order leaves out.
    """
    device = request.device
    if len(passed_over) == len(table) - 1 and all(reason != _left_out(request) for _, reason in passed_over):
        why = f"no other implementation serves this on {device.name}"
    else:
        why = f"first in this GPU's order that serves the call: {', '.join(tried)}; {choice.order_source}"
    is_emulated = device.compute_capability is not None and not device.supports_bf16
    if is_emulated and getattr(request, "dtype", None) == "bfloat16":
        why += f"; it has no bfloat16 arithmetic, its dtype to train in is {device.optimal_dtype}"
    return why


def _reason(
    implementation: Implementation, request: Request, symbolic: str | None, empty: str | None = None
) -> str | None:
    """Why an implementation cannot serve a request, in words; None if it can.

    symbolic: a text that names a symbolic size, or None. empty: a text that names an axis of length 0, or None; left
    out for an implementation that the caller named, which serves such a call by "xla".
    """
    if implementation.name == "xla":
        return implementation.supports(request)
    if symbolic is not None:
        wanted = "want an int, for which kernels are compiled; export with fixed sizes, or with implementation='xla'"
        return f"{symbolic}, {wanted}"
    reason = implementation.supports(request)
    if reason is None and empty is not None:
        return f"{empty}, which leaves a kernel nothing to compute"
    return reason


def _symbolic(request: Request) -> str | None:
    """The text "field: got the symbolic size ..." for the first field of a request with a symbolic size; None without
    one.
    """
    for name, x in vars(request).items():
        size = _symbolic_size(x)
        if size is not None:
            return f"{name}: got the symbolic size {size}"
    return None


def _empty(request: Request) -> str | None:
    """The text "field is 0" for the first length of an axis that is 0; None if all axes have entries."""
    for name in request.SIZES:
        size = getattr(request, name)
        if isinstance(size, int) and size == 0:  # a symbolic size is no int, and at least 1
            return f"{name} is 0"
    return None


def _symbolic_size(x: Any) -> Any:
    """The first symbolic size of jax.export in x or in the tuples within it; None without one."""
    if isinstance(x, tuple):
        return next((size for size in map(_symbolic_size, x) if size is not None), None)
    return x if export.is_symbolic_dim(x) else None


def explain(
    op: Callable[..., Any], *args: Any, device: "DeviceInfo | jax.Device | str | None" = None, **kwargs: Any
) -> Plan:
    """The Plan of `op(*args, **kwargs)`, without running it. Arrays may be `jax.ShapeDtypeStruct`s.

    op may be a functools.partial of an op, or a result of compile_attention.
    device: plans for this device, which need not be present: "a100", or another name of device_names(). None: the
      device on which the call would run.

    Raises the error that the call itself would raise for these arguments; TypeError if `op` has no plan, and for
    `device` with a function that has a parameter `device`; ValueError for an unknown device, and for a device other
    than the one for which compile_attention planned.
    """
    if device is not None:
        with on_device(device_to_explain(op, device)):
            return _explain(op, args, kwargs)
    return _explain(op, args, kwargs)


def _explain(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    if getattr(op, "plan", None) is None:  # modules and results of compile_attention have it
        check_function("op", op, "explain")
    if isinstance(op, functools.partial):
        return _explain(op.func, (*op.args, *args), op.keywords | kwargs)
    plan_of_call = getattr(op, "plan_of_call", None) or getattr(op, "plan", None)
    if not callable(plan_of_call):
        raise TypeError(f"op: got {op!r}, want an op of this library (flash_attention, ...)")
    return plan_of_call(*args, **plain_options(getattr(op, "plain_numbers", ()), kwargs))


def device_to_explain(op: Callable[..., Any], device: "DeviceInfo | jax.Device | str") -> DeviceInfo:
    """The DeviceInfo of explain's argument `device`.

    Raises TypeError if op itself has a parameter `device`, which explain's own would hide from it; ValueError for an
    unknown name, and if op is planned for another device.
    """
    info = device_info(device)
    planned = getattr(op, "plan", None)
    if isinstance(planned, Plan) and planned.device != info.name:
        raise ValueError(f"device: got {info.name}, want None: {op!r} is planned for {planned.device}")
    try:
        parameters = inspect.signature(op).parameters
    except (TypeError, ValueError):  # it has no signature, or is no function
        return info
    is_bound = isinstance(op, functools.partial) and "device" in op.keywords
    if "device" in parameters and not is_bound:
        name = getattr(op, "__name__", repr(op))
        raise TypeError(
            f"device: {name} has a parameter of this name, want functools.partial({name}, device=...) as op, because "
            "explain's device is the one to plan for"
        )
    return info


def interpreting() -> bool:
    """Whether kernels run in Pallas interpret mode (JAX_KERNELS_INTERPRET=1): for debugging on any machine.

    Raises ValueError for values other than 0 and 1.
    """
    setting = os.environ.get("JAX_KERNELS_INTERPRET", "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"JAX_KERNELS_INTERPRET: got {setting!r}, want 1 to interpret kernels, or 0")
    return setting == "1"
