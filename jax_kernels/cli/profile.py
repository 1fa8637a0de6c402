"""jax-kernels profile: runs a script, and shows the ops that it ran, their work, their times, and advice."""

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jax_kernels import dispatch
from jax_kernels.analysis import record
from jax_kernels.analysis.analyze import analysis_of
from jax_kernels.analysis.record import Trace
from jax_kernels.analysis.report import Analysis
from jax_kernels.cli import UserError
from jax_kernels.cli.info import find_device
from jax_kernels.cli.outputs import json_text, print_table
from jax_kernels.cli.paths import path_of
from jax_kernels.tuning import timers

__all__ = ["profile"]


def profile(
    script: Annotated[Path, typer.Argument(parser=path_of("SCRIPT"), help="a Python script, in JAX or PyTorch")],
    arguments: Annotated[list[str] | None, typer.Argument(help="the script's arguments, after -- if options")] = None,
    device: Annotated[str | None, typer.Option(help="show plans and bounds for this device, such as h200")] = None,
    measure: Annotated[bool, typer.Option(help="time each call after the script, with random arrays")] = False,
    check: Annotated[bool, typer.Option(help="time the calls before and after the changes that are advised")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON; the script then prints to stderr")] = False,
) -> None:
    """Run a script, and show the ops that it ran: how often, their FLOPs, bytes, bounds, and advice."""
    if not os.path.isfile(script):  # Path.is_file would raise for a name that is too long
        raise UserError(f"script: got {str(script)!r}, want a Python script")
    if device is not None and (measure or check):
        raise UserError(
            f"--device: got {device!r} with --measure or --check, want one of them: times are measured on this machine"
        )
    info = find_device(device)
    with _printing_to_stderr() if as_json else contextlib.nullcontext():
        traced = _traced_run(script, arguments or [])
    if not traced.calls:
        raise UserError(f"script: got {str(script)!r}, which runs no op of jax_kernels")
    if device is not None:
        traced = record.replanned(traced, info)
    timer = timers.choose() if measure or check else None
    with dispatch.on_device(info):
        found = analysis_of(traced, info, timer=timer, measure=measure, check=check, seconds=0.05)
    print(json_text(_as_json(found))) if as_json else _show(found)


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """A context manager in which this process and processes that it starts print to stderr instead of stdout."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _traced_run(script: Path, arguments: list[str]) -> Trace:
    """Runs the script as the main program. Returns the calls of ops that it made, from JAX and from PyTorch."""
    before = list(sys.argv), list(sys.path)
    sys.argv[:], sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with record.recorded_run() as traces, _tensor_calls(script) as calls:
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise
    finally:
        sys.argv[:], sys.path[:] = before
    found = list(traces)
    if calls:
        from jax_kernels.bridge.interop.planning_device import planning_on
        from jax_kernels.bridge.ops.analyze import trace_of

        with planning_on(calls[0].device):
            found.append(trace_of(calls))
    return Trace(calls=tuple(call for trace in found for call in trace.calls), others=(), matmuls=0)


@contextlib.contextmanager
def _tensor_calls(script: Path) -> Iterator[list[Any]]:
    """Records the calls of the bridge's ops, if the script's text has the word torch. Yields the list of calls."""
    if "torch" not in script.read_text(errors="replace"):
        yield []
        return
    from jax_kernels.bridge.operators.plan_query import recording

    with recording() as calls:
        yield calls


def _show(found: Analysis) -> None:
    rows = found.rows()
    shown = [i for i in range(len(found.COLUMNS)) if any(row[i] for row in rows)]  # without times, some are empty
    table = Table(*(found.COLUMNS[i] for i in shown), title=found.head())
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    print_table(table)
    console = Console()
    for advice in found.advice:
        console.print(f"advice: {advice}", markup=False, highlight=False, soft_wrap=True)


def _as_json(found: Analysis) -> dict[str, Any]:
    fields = "op", "shape", "forward", "backward", "bound_ms", "ms", "share", "roofline"
    uses = [
        {name: getattr(use, name) for name in fields}
        | {
            "implementation": use.plan.implementation,
            "blocks": None if use.plan.config is None else str(use.plan.config),
            "flops": None if use.cost is None else use.cost.flops,
            "bytes": None if use.cost is None else use.cost.bytes,
        }
        for use in found.uses
    ]
    advice = [
        {name: getattr(x, name) for name in ("kind", "op", "shape", "text", "saves_ms", "before_ms", "after_ms")}
        for x in found.advice
    ]
    return {"device": found.device, "timer": found.timer, "uses": uses, "advice": advice}
